"""Collectives give back the memory that they borrow, wherever they borrow any."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.placement_types import Partial, Shard

import shardcompile as sc
from shardcompile.collectives import scratch, wait
from shardcompile.sharding import GroupPartition, write_group_partitions
from shardcompile.testing import mesh, once, rank, world_size
from tests.support.sources import SOURCES

SIZES = [3, 0, 4]
_ops = torch.ops.shardcompile


def _partition(dim: int = 0) -> sc.ShardTensor:
    full = torch.arange(42, dtype=torch.float64).view([7, 6] if dim == 0 else [2, 7, 3])
    x = sc.distribute_tensor(full, mesh(), [Shard(dim)], sharding_shapes={0: SIZES})
    return x.requires_grad_()


def _backward(y: Any) -> None:
    (y * y.detach().cos()).sum().backward()


def _moved() -> None:
    """Rows over the edges, and their gradients back."""
    _backward(_partition()[2:] * 2 + _partition()[:-2])


def _windows() -> None:
    """Halos, and what is added up of them."""
    _backward(_partition().unfold(0, 3, 1))


def _rolled() -> None:
    _backward(_partition().roll(1, 0))


def _periodic() -> None:
    """Halos whose ends meet."""
    _backward(sc.halo_map(lambda x: x[2:] * x[:-2], _partition(), halo={0: (1, 1)}, fill="circular", crop=False))


def _reduced() -> None:
    terms = sc.ShardTensor.from_local(torch.ones(7, 6), mesh(), [Partial()])
    terms.redistribute(placements=[Shard(0)], sharding_shapes={0: SIZES}).to_local() + 1  # which waits


def _flattened() -> None:
    """Rows of several stretches."""
    _backward(_partition(1).reshape(-1, 3).cumsum(0).sin())


def _routed() -> None:
    ranks = torch.arange(7) % world_size()
    to = sc.distribute_tensor(ranks, mesh(), [Shard(0)], sharding_shapes={0: SIZES})
    rows, numbers, route = sc.route_rows(_partition(), to, _partition())
    _backward(route.combine(rows * numbers))


def _in_buckets() -> None:
    group, partitions = mesh().get_group(0).group_name, [GroupPartition(s, 0, []) for s in (SIZES, [1, 4, 2])]
    ends, mine = write_group_partitions(partitions), [c.sizes[rank()] for c in partitions]
    shards = [torch.ones(n, 50) for n in mine]
    wait(_ops.all_gather_bucket(shards, [0, 0], [7, 7], *ends, group))
    wait(_ops.all_gather_bucket([shards[0].T, shards[1]], [1, 0], [7, 7], *ends, group))
    wait(_ops.reduce_scatter_bucket([torch.ones(7, 50)] * 2, [0, 0], mine, "sum", *ends, group))
    turns = write_group_partitions([partitions[0], GroupPartition([10, 10, 30], 0, [])])
    wait(_ops.all_to_all_bucket([shards[0]], [0, 1], [7, [10, 10, 30][rank()]], *turns, group))


PROGRAMS: list[Callable[[], None]] = [_moved, _windows, _rolled, _periodic, _reduced, _flattened, _routed, _in_buckets]


def _places() -> set[tuple[str, int]]:
    """Where the sources borrow: file and line."""
    lines = ((f, n, text) for f in SOURCES for n, text in enumerate(f.read_text().splitlines(), 1))
    return {(str(f), n) for f, n, text in lines if re.search(r"scratch\.borrow\(", text)}


Lent = list[tuple[tuple[str, int], Tensor]]


def _noting(monkeypatch: pytest.MonkeyPatch) -> Lent:
    """All that is borrowed from now on, however little, and where."""
    lent: Lent = []
    borrow = scratch.borrow

    def note(numel: int, like: Tensor) -> Tensor:
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_name == "<listcomp>":
            frame = frame.f_back
        lent.append(((frame.f_code.co_filename, frame.f_lineno), borrow(numel, like)))
        return lent[-1][1]

    monkeypatch.setattr(scratch, "_SMALLEST", 1)
    monkeypatch.setattr(scratch, "borrow", note)
    return lent


@pytest.mark.ranks(3, processes=False)
def test_what_is_borrowed_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """And every place that borrows is tried by one of the programs, so that a new one needs a program."""
    lent = once(lambda: _noting(monkeypatch))
    for program in PROGRAMS:
        program()
        dist.barrier()
        kept = [place for place, x in lent if hasattr(x, scratch._LENT)]
        assert not kept, (program.__name__, kept)
        dist.barrier()
    assert _places() - {place for place, _ in lent} == set()
