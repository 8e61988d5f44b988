"""Private names of torch with which threads of one process can be ranks. Seen in torch 2.11 to 2.15.

Torch keeps the state of a rank in globals of the process: process groups, the coordinate in a mesh, random numbers.
Here each thread that is a rank has its own. Layouts and compiled code are the same for all ranks, so threads share
them. A mesh that one rank made gives each rank the coordinate and process groups of that rank. If a trace asks for the
rank, the compiled code serves that rank alone.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._dynamo.config as _dynamo_config
import torch._dynamo.symbolic_convert as _symbolic_convert
import torch._functorch.config as _functorch_config
from torch._C._distributed_c10d import _set_thread_isolation_mode  # type: ignore[attr-defined]  # 2.11 - 2.15
from torch._dynamo.source import GlobalStateSource  # 2.11 - 2.15
from torch._guards import Guard, GuardBuilderBase, TracingContext  # 2.11 - 2.15
from torch.distributed import distributed_c10d as _c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import _redistribute
from torch.distributed.tensor.debug._comm_mode import _CommModeModuleTracker as _ModuleTracker  # 2.11 - 2.15
from torch.utils import _python_dispatch

from shardcompile import compat, config
from shardcompile.compat.threads import be_rank, rank_of_thread
from shardcompile.compat.worlds import add_condition


class _World(threading.local):
    """A thread's process groups: the attributes of torch's own `_World` (2.11 - 2.15)."""

    def __init__(self) -> None:
        self.default_pg: Any = None
        self.pg_map: dict[Any, Any] = {}
        self.pg_names: dict[Any, str] = {}
        self.pg_group_ranks: dict[Any, dict[int, int]] = {}
        self.pg_backend_config: dict[Any, str] = {}
        self.group_count = 0
        self.tags_to_pg: dict[str, list[Any]] = {}
        self.pg_to_tag: dict[Any, str] = {}
        self.pg_coalesce_state: dict[Any, list[Any]] = {}
        self.comms: list[Any] = []

    @property
    def pg_config_info(self) -> list[dict[str, object]]:
        """What torch's flight recorder would show."""
        return []


@dataclass
class RankState:
    """The state of a thread that is a rank.

    Attributes:
        rank: the number in the default process group.
        rooms: the object that makes groups; all ranks share it.
        meshes: the meshes that this rank has made since the last `forget`.
        standing: a mesh over all ranks that `forget` keeps, since its only process group is the default one.
        twins: by the id of another rank's mesh, that mesh and the equal mesh of this rank.
        siblings: while the groups of one mesh dim are made, their name and the ranks in them so far.
    """

    rank: int
    rooms: Any
    meshes: list[DeviceMesh] = field(default_factory=list)
    standing: DeviceMesh | None = None
    twins: dict[int, tuple[DeviceMesh, DeviceMesh]] = field(default_factory=dict)
    siblings: tuple[str, frozenset[int]] = ("", frozenset())

    def forget(self) -> None:
        """Forget the process groups and meshes of a test, except the default group and the standing mesh."""
        world = _WORLD
        default = world.default_pg
        for group, name in list(world.pg_names.items()):
            if group is not default:
                self.standing = None  # it may refer to a mesh with this group
                _c10d._unregister_process_group(name)  # type: ignore[arg-type,attr-defined]  # 2.11 - 2.15
                tables: Sequence[dict[Any, Any]] = (
                    world.pg_map,
                    world.pg_names,
                    world.pg_group_ranks,
                    world.pg_backend_config,
                    world.pg_to_tag,
                    world.pg_coalesce_state,
                )
                for table in tables:
                    table.pop(group, None)
        world.tags_to_pg.clear()
        world.group_count = 1
        self.meshes = [] if self.standing is None else [self.standing]
        self.twins.clear()
        self.siblings = ("", frozenset())


class _Here(threading.local):
    state: RankState | None = None


_WORLD = _World()
_HERE = _Here()


def here() -> RankState:
    """The state of the rank that this thread is."""
    assert _HERE.state is not None, "this thread is no rank"
    return _HERE.state


def enter_rank(state: RankState) -> None:
    """Make this thread a rank for the rest of its life."""
    _HERE.state = state
    be_rank(state.rank)
    torch.set_num_threads(1)


def use_store(store: object) -> None:
    """Have `compat.store` return this store in this thread."""
    world = _WORLD
    world.pg_map[world.default_pg] = (world.pg_map[world.default_pg][0], store)


# Globals of the process that a rank may change while other ranks wait for their turn.

_WARNINGS = ("filters", "showwarning", "_showwarnmsg_impl")  # the names that `warnings.catch_warnings` saves
_SDP = ("flash", "mem_efficient", "math", "cudnn", "overrideable")
_IN_MODES = (  # flags that a dispatch mode is active; 2.11 - 2.15
    "_is_in_torch_dispatch_mode",
    "_is_in_non_infra_torch_dispatch_mode",
    "_is_in_any_mode_without_ignore_compile_internals",
)


def save_rank_globals() -> list[object]:
    """The globals that a rank in its own process would have to itself: random numbers, settings, modes, warnings."""
    kernels = [getattr(torch._C, f"_get_{name}_sdp_enabled")() for name in _SDP]
    settings = {name: getattr(config, name) for name in config.SETTINGS}
    caught = {name: getattr(warnings, name) for name in _WARNINGS}
    modes = [getattr(_python_dispatch, name) for name in _IN_MODES]
    numbers = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [])]
    return [numbers, random.getstate(), torch.get_default_dtype(), kernels, settings, modes, caught, _dynamo_settings()]


def restore_rank_globals(saved: list[Any]) -> None:
    """Put back the globals that `save_rank_globals` returned."""
    numbers, python_numbers, dtype, kernels, settings, modes, caught, dynamo_settings = saved
    torch.set_rng_state(numbers[0])
    if len(numbers) > 1:
        torch.cuda.set_rng_state(numbers[1])
    random.setstate(python_numbers)
    if torch.get_default_dtype() is not dtype:
        torch.set_default_dtype(dtype)
    for name, enabled in zip(_SDP, kernels, strict=True):
        if getattr(torch._C, f"_get_{name}_sdp_enabled")() != enabled:
            getattr(torch._C, _SDP_SETTERS[name])(enabled)
    vars(config).update(settings)
    vars(_python_dispatch).update(zip(_IN_MODES, modes, strict=True))
    _python_dispatch.set_is_in_mode_without_ignore_compile_internals(modes[-1])  # guards compare it
    vars(warnings).update(caught)
    _set_dynamo_settings(dynamo_settings)


def _dynamo_settings() -> dict[str, object]:
    """What was set in ``torch._dynamo.config``. Since torch 2.12 each thread has settings of its own."""
    module: Any = sys.modules.get("torch._dynamo.config")
    if module is None or not torch.__version__.startswith("2.11."):
        return {}
    return {name: entry.user_override for name, entry in module._config.items()}  # 2.11


def _set_dynamo_settings(settings: dict[str, object]) -> None:
    if settings:
        module: Any = sys.modules["torch._dynamo.config"]
        for name, value in settings.items():
            if module._config[name].user_override is not value:  # 2.11
                module._config[name].user_override = value
                module._is_dirty = True


_SDP_SETTERS = {
    "flash": "_set_sdp_use_flash",
    "mem_efficient": "_set_sdp_use_mem_efficient",
    "math": "_set_sdp_use_math",
    "cudnn": "_set_sdp_use_cudnn",
    "overrideable": "_set_sdp_use_overrideable",
}


# Traces


_ONLY_TELL = (
    "torch._logging",
    "torch._dynamo.utils",
    "torch._dynamo.repro",
    "torch._inductor",
    "torch._functorch",
    "shardcompile.inspect",
)
"""Modules that read the rank only to write it into a log or into a file name."""


def _module_that_asks() -> str:
    """The innermost module outside `torch.distributed` that asks for the rank."""
    frame = sys._getframe(2)
    while frame.f_back is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if not module.startswith(("torch.distributed", "shardcompile.testing.thread_group", __name__)):
            return module
        frame = frame.f_back
    return ""


def note_rank_read() -> None:
    """Note that the rank was read. If a trace read it, the compiled code serves this rank alone."""
    state = _HERE.state
    if state is None or not compat.is_compiling() or _module_that_asks().startswith(_ONLY_TELL):
        return
    if getattr(_symbolic_convert.tls, "current_tx", None) is None:  # 2.11 - 2.15
        raise RuntimeError(
            "the graph of a backward pass depends on the rank, so ranks in one process cannot share it. Run this on "
            "processes: @pytest.mark.ranks(...) without processes=False, or LocalRanks(n)"
        )
    _guard_on_rank(state.rank)


def _guard_on_rank(rank: int) -> None:
    def holds(_: object) -> bool:
        return _HERE.state is not None and _HERE.state.rank == rank

    def create(builder: GuardBuilderBase, guard: Guard) -> None:
        _OF_ONE_RANK.setdefault(rank, {})[id(guard)] = guard
        add_condition(builder, holds, f"rank of this thread == {rank}")

    context = TracingContext.get()
    guards = context.guards_context.dynamo_guards  # 2.11 - 2.15
    if not any(getattr(g.create_fn, "__qualname__", "") == create.__qualname__ for g in guards):
        guards.add(Guard(GlobalStateSource(), create), collect_debug_stack=False)


_OF_ONE_RANK: dict[int, dict[int, Guard]] = {}
"""By rank, the guards of graphs that serve this rank alone."""


def count_repeated_graphs() -> int:
    """The number of graphs that a rank would not compile in its own process: they repeat another rank's graph."""
    counts = [len(guards) for guards in _OF_ONE_RANK.values()]
    return sum(counts) - max(counts, default=0)


def forget_graphs() -> None:
    """Forget which graphs serve one rank alone."""
    _OF_ONE_RANK.clear()


@contextlib.contextmanager
def settings_of_ranks(recompiles: int) -> Iterator[None]:
    """Inside the context, this thread has the compiler's settings for ranks that share a process.

    AOTAutograd's cache is off, since its keys do not contain the rank that a trace read. On GPUs, too, backward passes
    run in the rank's thread, since torch's own threads belong to no rank.

    Settings are context variables in torch 2.13 to 2.15, and belong to the process in older versions.

    Args:
        recompiles: how many graphs of a function the ranks may have together.
    """
    with (
        _functorch_config.patch(enable_autograd_cache=False),
        _dynamo_config.patch(recompile_limit=recompiles),
        torch.autograd.set_multithreading_enabled(False),
    ):
        yield


def recompile_limit() -> int:
    """How many graphs of a function a process may have, as it is set here."""
    return int(_dynamo_config.recompile_limit)


class Coordinate(tuple[int, ...]):
    """A rank's coordinate in a mesh, in a trace. Code that reads it reads the rank; code that passes it on does not."""

    __slots__ = ()

    def __getitem__(self, index: Any) -> Any:  # an index or a slice, as of any tuple
        note_rank_read()
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[int]:
        note_rank_read()
        return super().__iter__()

    def __eq__(self, other: object) -> bool:
        note_rank_read()
        return super().__eq__(other)

    def __hash__(self) -> int:
        note_rank_read()
        return super().__hash__()


def _lazy_coordinate(mesh: DeviceMesh) -> Any:
    """The coordinate for our own code, which passes it on far more often than it reads it."""
    if _HERE.state is None or not compat.is_compiling():
        return mesh.get_coordinate()
    coordinate = _attribute_here(mesh, "_coordinate_on_dim")
    return None if coordinate is None else Coordinate(coordinate)


# Meshes


class _OfEachRank:
    """An attribute of a mesh that differs by rank. Each rank gets it from the equal mesh that it has made itself."""

    def __init__(self, name: str, tells_rank: bool) -> None:
        self._name, self._tells_rank = name, tells_rank

    def __get__(self, mesh: DeviceMesh, owner: type | None = None) -> object:
        if mesh is None:
            return self
        if self._tells_rank:
            note_rank_read()
        return _attribute_here(mesh, self._name)

    def __set__(self, mesh: DeviceMesh, value: object) -> None:
        mesh.__dict__[self._name] = value
        if _HERE.state is not None and "_made_by_rank" not in mesh.__dict__:
            mesh.__dict__["_made_by_rank"] = _HERE.state.rank
            _HERE.state.meshes.append(mesh)


def _attribute_here(mesh: DeviceMesh, name: str) -> Any:
    made_by = mesh.__dict__.get("_made_by_rank")
    state = _HERE.state
    if state is not None and made_by is not None and made_by != state.rank:
        mesh = _twin(mesh, state)
    try:
        return mesh.__dict__[name]
    except KeyError:
        raise AttributeError(name) from None


def _twin(mesh: DeviceMesh, state: RankState) -> DeviceMesh:
    _, twin = state.twins.get(id(mesh), (None, None))
    if twin is None:
        twin = next((m for m in reversed(state.meshes) if m == mesh), None)
        if twin is None:
            raise RuntimeError(
                f"rank {state.rank} uses {mesh}, which only other ranks have made. Make the mesh on every rank"
            )
        state.twins[id(mesh)] = mesh, twin
    return twin


def _sibling_name(original: Callable[..., str]) -> Callable[..., str]:
    """Give all groups of a mesh dim one name, since graphs contain the name. Each rank is in one of these groups."""

    def name(ranks: Sequence[int], use_hashed_name: bool) -> str:
        state = _HERE.state
        if state is None or use_hashed_name or not ranks:
            return original(ranks, use_hashed_name)
        made = original(ranks, use_hashed_name)
        first, others = state.siblings
        if not (first and len(others) % len(ranks) == 0 and others.isdisjoint(ranks)):
            first, others = made, frozenset()
        state.siblings = (first, others | set(ranks))
        return first if state.rank in ranks else made

    return name


_HOOKS = ("_fw_pre_hook", "_fw_post_hook", "_fw_set_module_hook", "_bw_hook")


def _on_rank_of(tracker: type, name: str) -> Callable[..., object]:
    """A tracker's hook that runs only in the thread of the rank that entered the tracker's mode."""
    hook = vars(tracker)[name]

    @functools.wraps(hook)
    def hook_here(self: object, *args: object) -> object:
        return hook(self, *args) if vars(self)["entered_by"] == rank_of_thread() else None

    return hook_here


def _entering(tracker: type) -> Callable[..., object]:
    """A tracker's `__enter__` that notes the rank which enters the mode."""
    enter = vars(tracker)["__enter__"]

    @functools.wraps(enter)
    def enter_here(self: object) -> object:
        vars(self)["entered_by"] = rank_of_thread()
        return enter(self)

    return enter_here


@contextlib.contextmanager
def in_rank_threads() -> Iterator[None]:
    """Inside the context, threads of this process can be ranks."""
    if isinstance(_c10d._world, _World):
        yield
        return
    patches: list[tuple[Any, str, Any]] = [
        (_c10d, "_world", _WORLD),
        (_c10d, "_process_group_name", _sibling_name(_c10d._process_group_name)),
        (DeviceMesh, "_rank", _OfEachRank("_rank", True)),
        (DeviceMesh, "_coordinate_on_dim", _OfEachRank("_coordinate_on_dim", True)),
        (DeviceMesh, "_pg_registry", _OfEachRank("_pg_registry", False)),
        (compat, "coordinate", _lazy_coordinate),
        # DTensor caches by mesh what holds on one rank only.
        (_redistribute, "_gen_transform_infos", _redistribute._gen_transform_infos.__wrapped__),  # 2.11 - 2.15
        # CommDebugMode installs hooks for all modules of the process, which ranks may share.
        (_ModuleTracker, "__enter__", _entering(_ModuleTracker)),
        *((_ModuleTracker, name, _on_rank_of(_ModuleTracker, name)) for name in _HOOKS),
    ]
    found = [(owner, name, vars(owner).get(name, _NOTHING)) for owner, name, _ in patches]
    saved, threads = save_rank_globals(), torch.get_num_threads()
    for owner, name, value in patches:
        setattr(owner, name, value)
    _set_thread_isolation_mode(True)
    torch._C._ensureCUDADeviceGuardSet()  # 2.11 - 2.15; without a GPU, a first call in a later thread ends the process
    torch.set_num_threads(1)  # as in ranks that are processes
    try:
        with settings_of_ranks(recompile_limit()):
            yield
    finally:
        _set_thread_isolation_mode(False)
        for owner, name, value in found:
            if value is _NOTHING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
        restore_rank_globals(saved)
        torch.set_num_threads(threads)


_NOTHING = object()
