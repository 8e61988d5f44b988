"""Worlds of process groups: what is kept for one is forgotten after it, the code that torch has compiled included."""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch._C._dynamo.eval_frame import reset_code  # 2.11 - 2.15
from torch._dynamo.convert_frame import compile_lock  # 2.11 - 2.15
from torch._dynamo.source import GlobalStateSource  # 2.11 - 2.15
from torch._dynamo.utils import orig_code_map  # 2.11 - 2.15
from torch._guards import CompileContext, Guard, TracingContext  # 2.11 - 2.15
from torch.distributed.tensor import _redistribute
from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # 2.11 - 2.15

from shardcompile.compat.patch import Patch, put_in_for_good, replace

__all__ = ["add_condition", "add_guard", "forget_with_world", "note_trace", "start_epoch", "world_epoch"]

_world: Any = None
_world_epoch = 0
_BY_MESH: list[Callable[[], None]] = []


def forget_with_world(clear: Callable[[], None]) -> None:
    """Have `clear` called when the process groups change.

    What is kept by mesh keeps the mesh, and with it process groups: their threads and sockets live on when they have
    been destroyed.
    """
    _BY_MESH.append(clear)


def world_epoch() -> int:
    """A number that changes when the default process group does, and with `start_epoch`.

    Meshes are equal by their ranks alone. What is kept by mesh is kept by this number as well. So a mesh whose process
    groups are gone does not stand in for a new one.
    """
    global _world
    world = _present_world()
    if world is not None and (_world is None or _world() is not world):
        _world = weakref.ref(world)
        start_epoch()
    return _world_epoch


def start_epoch() -> None:
    """Say that process groups of meshes were destroyed, though not the default one."""
    global _world_epoch
    _world_epoch += 1
    for clear in _BY_MESH:
        clear()


def _forget_at_the_end(stack: contextlib.ExitStack) -> None:
    """Have a world that is taken down forgotten at once."""

    def forgetting(destroy: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(destroy)
        def destroy_and_forget(*args: object, **kwargs: object) -> None:
            before = _present_world()
            destroy(*args, **kwargs)
            if before is not None and _present_world() is not before:
                start_epoch()

        return destroy_and_forget

    forgets = forgetting(torch.distributed.destroy_process_group)
    for module in (torch.distributed, torch.distributed.distributed_c10d):
        replace(stack, module, "destroy_process_group", lambda _: forgets)


def _present_world() -> object:
    world = torch.distributed.group.WORLD if torch.distributed.is_available() else None
    return getattr(world, "rooms", world)  # ranks that are threads are of one world


# What DTensor keeps by mesh


def _forget_plans_of_dtensor() -> None:
    """A DTensor that an op gives has the mesh of the first call whose arguments were equal, and its process groups."""
    _clear_sharding_prop_cache()
    _redistribute._planner_cache.clear()  # 2.11 - 2.15
    plans = _redistribute._gen_transform_infos  # 2.11 - 2.15
    if hasattr(plans, "cache_clear"):  # ranks that are threads keep none
        plans.cache_clear()


forget_with_world(_forget_plans_of_dtensor)


# What torch has compiled

_COMPILED: dict[int, weakref.ref[CodeType]] = {}
"""By its id, code of which a compiled version holds for one world."""

_GUARDED: weakref.WeakSet[TracingContext] = weakref.WeakSet()


def note_trace(guarded: bool = False) -> None:
    """What is being compiled holds for this world: it does not run in another one, and is forgotten with this one.

    Torch would keep what it has compiled for worlds that are gone, count it, and at its limit compile nothing more.

    Args:
        guarded: whether the guards of an input see to it that it does not run in another world.
    """
    context = TracingContext.try_get()
    if context is None or not context.traced_code:
        return
    code = context.traced_code[0]  # the frame's; what is inlined comes after it; 2.11 - 2.15
    _COMPILED[id(code)] = weakref.ref(code)
    if context not in _GUARDED:
        _GUARDED.add(context)
        if not guarded:
            add_guard(_holds_in(world_epoch()), "the process groups are those of the trace")


def _holds_in(epoch: int) -> Callable[[object], bool]:
    def holds(_: object) -> bool:
        # No new epoch starts here: it would forget the code whose guards torch goes through.
        return _world_epoch == epoch and (_world is None or _world() is _present_world())

    return holds


def add_guard(holds: Callable[[object], bool], text: str) -> None:
    """Have what Dynamo is compiling, if it is, run only while a condition holds.

    Args:
        holds: gets the function's variables.
        text: what `holds` asks, for logs.
    """

    def create(builder: object, _: object) -> None:
        add_condition(builder, holds, text)

    context = TracingContext.try_get()
    if context is not None:
        guards = context.guards_context.dynamo_guards  # 2.11 - 2.15
        guards.add(Guard(GlobalStateSource(), create), collect_debug_stack=False)


def add_condition(builder: Any, holds: Callable[[object], bool], text: str) -> None:
    """Add a condition to the guards that torch is building.

    Args:
        builder: torch's.
        holds: gets the function's variables.
        text: what `holds` asks, for logs.
    """
    root = builder.guard_manager.root
    try:
        root.add_lambda_guard(holds, [text], None)  # 2.13 - 2.15
    except TypeError:
        root.add_lambda_guard(holds, [text])  # 2.11 - 2.12


def _forget_compiled() -> None:
    """Have torch forget the code of a world that is gone. What runs or is compiled right now goes with the next one."""
    if CompileContext.try_get() is not None or not compile_lock.acquire(blocking=False):
        return
    try:
        running = _codes_that_run()
        for at in [at for at in _COMPILED if at not in running]:
            code = _COMPILED.pop(at)()
            if code is not None:
                reset_code(code)
    finally:
        compile_lock.release()


def _codes_that_run() -> set[int]:
    """Ids of code that a thread is in; where that is a compiled version, of what was compiled."""
    running = set()
    for frame in sys._current_frames().values():
        while frame is not None:
            running.add(id(orig_code_map.get(frame.f_code, frame.f_code)))
            frame = frame.f_back  # type: ignore[assignment]
    return running


forget_with_world(_forget_compiled)
if torch.distributed.is_available():
    put_in_for_good(
        Patch(
            "ends_of_worlds",
            "torch.distributed.destroy_process_group",
            "A program whose sharded tensors are inside of graphs alone asks for the world while it is compiled. That "
            "is too late to forget what was compiled for the one before.",
            "torch.distributed has no hook for the end of the default process group.",
            "2.11 - 2.15",
            _forget_at_the_end,
        )
    )
