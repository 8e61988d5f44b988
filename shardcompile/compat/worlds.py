"""Worlds of process groups. Caches of a world, the compiled code included, are cleared after its end."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable
from types import CodeType
from typing import TYPE_CHECKING, cast

import torch
from torch._C._dynamo.eval_frame import reset_code  # 2.11 - 2.15
from torch._dynamo.convert_frame import compile_lock  # 2.11 - 2.15
from torch._dynamo.source import GlobalStateSource  # 2.11 - 2.15
from torch._dynamo.utils import orig_code_map  # 2.11 - 2.15
from torch._guards import CompileContext, Guard, GuardBuilderBase, TracingContext  # 2.11 - 2.15
from torch.distributed.distributed_c10d import _get_default_store  # 2.11 - 2.15
from torch.distributed.tensor import _redistribute
from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # 2.11 - 2.15

if TYPE_CHECKING:
    from torch._dynamo.guards import GuardBuilder  # 2.11 - 2.15

__all__ = ["add_condition", "add_guard", "forget_with_world", "note_trace", "start_epoch", "world_epoch"]

_world: weakref.ref[object] | None = None
_world_epoch = 0
_BY_MESH: list[Callable[[], None]] = []


def forget_with_world(clear: Callable[[], None]) -> None:
    """Have `clear` called when the process groups change.

    A cache with meshes as keys keeps the meshes alive, and with them destroyed process groups, whose threads and
    sockets would live on.
    """
    _BY_MESH.append(clear)


def world_epoch() -> int:
    """A number that changes with the default process group, and at each `start_epoch`.

    Two meshes with the same ranks are equal. So keys of caches contain this number beside the mesh. A mesh whose
    process groups are gone then does not match a new one.
    """
    global _world
    world = _present_world()
    if world is not None and (_world is None or _world() is not world):
        _world = weakref.ref(world)
        with contextlib.suppress(TypeError):  # ranks that are threads have a store that others may hold
            # Torch drops the store with the world. Compiled code is removed then: the compilation that finds another
            # world comes too late for that.
            weakref.finalize(_get_default_store(), _end, _world).atexit = False
        start_epoch()
    return _world_epoch


def _end(world: weakref.ref[object]) -> None:
    """Start an epoch at the end of a world, unless another one has been met."""
    if world is _world and _present_world() is not world():
        start_epoch()


def start_epoch() -> None:
    """Start a new epoch, after process groups of meshes were destroyed without the default group."""
    global _world_epoch
    _world_epoch += 1
    for clear in _BY_MESH:
        clear()


def _present_world() -> object:
    world = torch.distributed.group.WORLD if torch.distributed.is_available() else None
    return getattr(world, "rooms", world)  # ranks that are threads share one world


# DTensor's caches by mesh


def _forget_plans_of_dtensor() -> None:
    """Clear DTensor's caches. They would give a result the mesh, and process groups, of the first equal call."""
    _clear_sharding_prop_cache()
    _redistribute._planner_cache.clear()  # 2.11 - 2.15
    plans = _redistribute._gen_transform_infos  # 2.11 - 2.15
    if hasattr(plans, "cache_clear"):  # for ranks that are threads it is no cache
        plans.cache_clear()


forget_with_world(_forget_plans_of_dtensor)


# Compiled code

_COMPILED: dict[int, weakref.ref[CodeType]] = {}
"""By id, the code objects with compiled versions that hold for one world."""

_GUARDED: weakref.WeakSet[TracingContext] = weakref.WeakSet()


def note_trace(guarded: bool = False) -> None:
    """Note that the code in compilation holds for this world alone. It gets a guard, and is removed with the world.

    Torch would keep compiled code of worlds that are gone. At its recompile limit it would compile no more.

    Args:
        guarded: whether the guards of an input already forbid the code in another world.
    """
    context = TracingContext.try_get()
    if context is None or not context.traced_code:
        return
    code = context.traced_code[0]  # the frame's own code is the first, inlined code follows; 2.11 - 2.15
    _COMPILED[id(code)] = weakref.ref(code)
    if context not in _GUARDED:
        _GUARDED.add(context)
        if not guarded:
            add_guard(_holds_in(world_epoch()), "the process groups are those of the trace")


def _holds_in(epoch: int) -> Callable[[object], bool]:
    def holds(_: object) -> bool:
        # A new epoch must not start here: it would remove the code whose guards torch evaluates.
        return _world_epoch == epoch and (_world is None or _world() is _present_world())

    return holds


def add_guard(holds: Callable[[object], bool], text: str) -> None:
    """Add a guard to the code that Dynamo compiles. Outside a compilation this does nothing.

    Args:
        holds: the condition, which gets the variables of the function.
        text: the condition in words, for logs.
    """

    def create(builder: GuardBuilderBase, _: object) -> None:
        add_condition(builder, holds, text)

    context = TracingContext.try_get()
    if context is not None:
        guards = context.guards_context.dynamo_guards  # 2.11 - 2.15
        guards.add(Guard(GlobalStateSource(), create), collect_debug_stack=False)


def add_condition(builder: GuardBuilderBase, holds: Callable[[object], bool], text: str) -> None:
    """Add a condition to the guards that torch builds.

    Args:
        builder: torch's builder of guards.
        holds: the condition, which gets the variables of the function.
        text: the condition in words, for logs.
    """
    root = cast("GuardBuilder", builder).guard_manager.root
    add: Callable[..., None] = root.add_lambda_guard
    try:
        add(holds, [text], None)  # 2.13 - 2.15
    except TypeError:
        add(holds, [text])  # 2.11 - 2.12


def _forget_compiled() -> None:
    """Remove the compiled code of a world that is gone. Code that runs or compiles now goes with the next world."""
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
    """The ids of the code objects that threads run. For compiled code, the id of the original code object."""
    running = set()
    for frame in sys._current_frames().values():
        while frame is not None:
            running.add(id(orig_code_map.get(frame.f_code, frame.f_code)))
            frame = frame.f_back  # type: ignore[assignment]
    return running


forget_with_world(_forget_compiled)
