"""NCCL's ways to gather and to reduce, on processes: over gloo, whose calls end one after the other as on a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work

from shardcompile.collectives import all_gather_v, reduce_scatter_v, transport, wait
from shardcompile.collectives.transport.nccl import Nccl
from shardcompile.collectives.transport.nccl_algorithms import Algorithm
from shardcompile.diagnosis.recorded_calls import Call
from shardcompile.sharding import GroupPartition, write_group_partitions
from shardcompile.testing import rank, world_size

_ops = torch.ops.shardcompile
PARTITIONS = {3: [[3, 3, 3], [5, 0, 2], [1, 4, 4], [0, 0, 6], [0, 1, 0], [7, 1, 1]], 2: [[3, 3], [0, 4], [5, 2]]}


class _OverGloo(Nccl):
    name = "nccl over gloo"
    device = "cpu"
    tells = False


def _in_place_of_gloos(monkeypatch: pytest.MonkeyPatch) -> Nccl:
    run = Call.run

    def run_to_the_end(self: Call, steps: Iterable[Callable[[], Any]]) -> list[Any]:
        results = run(self, steps)
        for found in results:
            for work in found if isinstance(found, list) else [found]:
                if isinstance(work, Work):
                    run(self, [work.wait])
        return [None if isinstance(found, Work) else [] if isinstance(found, list) else found for found in results]

    monkeypatch.setattr(Call, "run", run_to_the_end)
    over_gloo = _OverGloo()
    monkeypatch.setitem(transport.TRANSPORTS, "gloo", over_gloo)
    return over_gloo


def _draw(rows: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Whole numbers, whose sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 9, (rows, 3), generator=generator).to(dtype)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("way", [Algorithm.BALANCED, Algorithm.SENDS])
def test_ways_move_and_reduce_all_rows(way: Algorithm, monkeypatch: pytest.MonkeyPatch) -> None:
    _in_place_of_gloos(monkeypatch).fixed = way
    group = dist.group.WORLD
    assert group is not None
    for dtype in (torch.float32, torch.float64, torch.bool, torch.complex64, torch.bfloat16, torch.int32):
        for sizes in PARTITIONS[world_size()]:
            terms = [_draw(sum(sizes), dtype, r) for r in range(world_size())]
            shard = terms[0].split(sizes)[rank()]
            assert torch.equal(all_gather_v(shard, 0, sizes, group), terms[0])
            if dtype is torch.bool:
                continue
            for dim in (0, 1):
                whole = [t.movedim(0, dim) for t in terms]
                found = reduce_scatter_v(whole[rank()], dim, sizes, group)
                wanted = torch.stack(whole).sum(0).split(sizes, dim)[rank()]
                assert torch.equal(found, wanted), (dtype, sizes, dim)


@pytest.mark.ranks(3)
def test_equal_shards_are_reduced_by_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    _in_place_of_gloos(monkeypatch)
    asked, even = [], dist.reduce_scatter_tensor
    monkeypatch.setattr(dist, "reduce_scatter_tensor", lambda *a, **k: asked.append(a[0].shape) or even(*a, **k))
    group = dist.group.WORLD
    assert group is not None
    terms = [_draw(6, torch.float32, r) for r in range(3)]
    found = reduce_scatter_v(terms[rank()], 0, [2, 2, 2], group)
    assert torch.equal(found, torch.stack(terms).sum(0).split(2)[rank()])
    assert asked == [(6,)]
    least = reduce_scatter_v(terms[rank()], 0, [2, 2, 2], group, reduce_op="min")  # whose NaN NCCL would not keep
    assert torch.equal(least, torch.stack(terms).amin(0).split(2)[rank()])
    assert asked == [(6,)]


@pytest.mark.ranks(3)
def test_buckets_take_the_same_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wide member and a narrow one, of which no part of an even division has its shards alone."""
    group = dist.group.WORLD
    assert group is not None
    partitions = [GroupPartition(sizes, 0, []) for sizes in ([5, 0, 2], [1, 4, 4])]
    terms = [[_draw(sum(c.sizes), torch.float64, 2 * r + n) for n, c in enumerate(partitions)] for r in range(3)]
    mine = [c.sizes[rank()] for c in partitions]
    shards = [t.split(list(c.sizes))[rank()] for t, c in zip(terms[0], partitions, strict=True)]
    for way in (Algorithm.BALANCED, Algorithm.SENDS):
        _in_place_of_gloos(monkeypatch).fixed = way
        totals, ends = [sum(c.sizes) for c in partitions], write_group_partitions(partitions)
        gathered = wait(_ops.all_gather_bucket(shards, [0, 0], totals, *ends, group.group_name))
        assert torch.equal(gathered, torch.cat([t.view(-1) for t in terms[0]]))
        reduced = wait(_ops.reduce_scatter_bucket(terms[rank()], [0, 0], mine, "sum", *ends, group.group_name))
        sums = [torch.stack(t).sum(0) for t in zip(*terms, strict=True)]
        wanted = [t.split(list(c.sizes))[rank()] for t, c in zip(sums, partitions, strict=True)]
        assert torch.equal(reduced, torch.cat([w.reshape(-1) for w in wanted]))
