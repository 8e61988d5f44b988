"""`same_collectives_on_every_rank`: a test against hangs that traces each rank offline, and needs no ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.distributed import HashStore
from torch.distributed.device_mesh import DeviceMesh

from shardcompile.compat.testing import tree_leaves
from shardcompile.inspect.offline import CollectiveRecord, trace_offline
from shardcompile.passes.plan import exchanging
from shardcompile.sharding import Layout
from shardcompile.tensor import ShardTensor

Build = Callable[[DeviceMesh], tuple[Callable[..., Any], Sequence[Any]]]
Records = tuple[CollectiveRecord, ...]

_ALL_UP_TO = 8
"""In a world of at most this many ranks every rank is traced."""

_NONE = "none, there are no more"


def same_collectives_on_every_rank(
    build: Build,
    world_size: int,
    *,
    ranks: Sequence[int] | None = None,
    device: str = "cpu",
    mesh_shape: Sequence[int] | None = None,
    **options: Any,
) -> Records:
    """Checks that ranks start the same collectives in the same order. Otherwise they would wait without end.

        def build(mesh):
            sizes = [10 * r for r in range(mesh.size())]
            local = torch.randn(sizes[mesh.get_local_rank()], 5)
            return Net(), (sc.ShardTensor.from_local(local, mesh, [Shard(0)], {0: sizes}),)

        def test_ranks_agree():
            records = same_collectives_on_every_rank(build, 64)
            assert len(records) <= 6

    This traces a step for one rank after the other, forward and backward and through all passes. It runs in this
    process, with a fake process group, so do not call it in a test with the mark ``ranks``. On a mesh of several dims,
    two ranks are compared by the collectives of groups that contain both.

    Args:
        build: takes the mesh, and returns the function or module and its arguments, see
            `shardcompile.inspect.offline.trace_offline`.
        world_size: the number of ranks.
        ranks: the ranks to trace. By default all, if there are at most 8. Otherwise the first two, the middle and the
            last rank along each mesh dim. For each sharded input or parameter, also the ranks with the smallest and
            the largest shard.
        device: "cpu" or "cuda". Tracing for CUDA needs a C++ compiler once.
        mesh_shape: the shape of the mesh; one dim by default.
        **options: options of `trace_offline`: ``mesh_dim_names``, ``passes``, ``off``, ``backward``, ``inductor``.

    Returns:
        The collectives of the first traced rank, forward first. On a mesh of one dim all ranks have the same ones.

    Raises:
        AssertionError: two ranks differ: the message has the ranks, the first difference, and the lines of the program.
            Or the trace of a rank fails, though that of another rank succeeded.
        OfflineError: this process has a process group, or the function cannot be traced.
        ValueError: `ranks` is empty.
    """
    shape = (world_size,) if mesh_shape is None else tuple(mesh_shape)
    seen: list[Layout] = []
    store = HashStore()

    def trace(rank: int) -> Records:
        watched = _record(build, seen)
        with exchanging(store, rank):  # one rank plans for all, as in a job
            traced = trace_offline(
                watched, world_size=world_size, mesh_shape=mesh_shape, rank=rank, device=device, **options
            )
        return traced.collectives

    if ranks is not None and not ranks:
        raise ValueError("ranks is empty: name at least one rank, or leave it out")
    first = 0 if ranks is None else ranks[0]
    found = {first: trace(first)}
    for rank in _selected(shape, seen) if ranks is None else ranks:
        if rank not in found:
            found[rank] = _trace_like(first, rank, trace)
            for other in list(found)[:-1]:
                _compare(other, found[other], rank, found[rank])
    return found[first]


def _record(build: Build, seen: list[Layout]) -> Build:
    """Wraps `build` so that it also stores the layouts of inputs and parameters in `seen`."""

    def recording(mesh: DeviceMesh) -> tuple[Callable[..., object], Sequence[object]]:
        fn, inputs = build(mesh)
        parameters = list(fn.parameters()) if isinstance(fn, nn.Module) else []
        seen[:] = [x.sharding for x in tree_leaves((list(inputs), parameters)) if isinstance(x, ShardTensor)]
        return fn, inputs

    return recording


def _selected(shape: Sequence[int], layouts: Sequence[Layout]) -> list[int]:
    """Returns the ranks to trace by default, see `same_collectives_on_every_rank`."""
    coordinates = list(itertools.product(*map(range, shape)))  # in the order of ranks
    if len(coordinates) <= _ALL_UP_TO:
        return list(range(len(coordinates)))
    selected = {0, len(coordinates) - 1}
    for dim, size in enumerate(shape):
        for index in (1, size // 2, size - 1):
            along = tuple(min(index, size - 1) if d == dim else 0 for d in range(len(shape)))
            selected.add(coordinates.index(along))
    for layout in layouts:
        numels = [math.prod(int(n) for n in layout.local_shape(c)) for c in coordinates]
        selected |= {numels.index(min(numels)), numels.index(max(numels))}
    return sorted(selected)


def _trace_like(first: int, rank: int, trace: Callable[[int], Records]) -> Records:
    try:
        return trace(rank)
    except Exception as error:
        raise AssertionError(
            f"rank {rank} cannot be traced, though rank {first} can: {type(error).__name__}: {error}"
        ) from error


def _compare(a: int, records_of_a: Records, b: int, records_of_b: Records) -> None:
    ours, theirs = ([r for r in rs if {a, b} <= set(r.ranks)] for rs in (records_of_a, records_of_b))
    for number, (x, y) in enumerate(itertools.zip_longest(ours, theirs), 1):
        if x != y:
            raise AssertionError(
                f"ranks {a} and {b} start different collectives, and would wait for each other without end. They "
                f"differ in number {number} (of {len(ours)} and {len(theirs)} that both take part in):\n"
                f"  rank {a}: {x or _NONE}\n"
                f"  rank {b}: {y or _NONE}\n"
                "The program, or a pass, takes a decision by what only one rank knows: the rank, or its shard"
            )
