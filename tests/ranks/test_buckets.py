"""Buckets of uneven collectives on real ranks: what the single collectives give, bit for bit."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.placement_types import Replicate, Shard

import shardcompile as sc
from examples.poisson.traffic import traffic_of
from shardcompile.collectives import scratch, wait
from shardcompile.collectives.halo_exchange import FETCH_HALO, RETURN_HALO, HaloExchange
from shardcompile.collectives.range_bucket import RANGE_BUCKET, together
from shardcompile.collectives.ranges import FETCH_RANGES, RETURN_RANGES, Ranges
from shardcompile.passes import inductor_options
from shardcompile.sharding import GroupPartition, write_group_partitions
from shardcompile.testing import rank, world_size
from tests.support.after_passes import graph_after_passes
from tests.support.sent import Sent
from tests.support.tiers import often

_ops = torch.ops.shardcompile
SIZES = {2: [[3, 5], [0, 4], [1, 0], [2, 2]], 3: [[3, 0, 5], [0, 0, 4], [1, 1, 1], [7, 1, 0]]}
SHAPES: list[tuple[int, list[int]]] = [(0, [-1, 3]), (1, [2, -1, 3]), (0, [-1]), (1, [4, -1])]
"""Dim that is sharded, shape but for its size."""

PASSES = ["bucket_all_gathers", "bucket_reduce_scatters", "bucket_all_to_alls", "bucket_ranges", "bucket_all_reduces"]


def group_name() -> str:
    return init_device_mesh("cpu", (world_size(),)).get_group(0).group_name


def values(shape: list[int], dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * 8
    return x > 0 if dtype == torch.bool else x.to(dtype)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    "dtypes",
    [[torch.float64] * 4, [torch.float64, torch.float32, torch.bfloat16, torch.bool], [torch.complex64] * 4],
    ids=["one dtype", "mixed", "complex"],
)
@pytest.mark.parametrize("width", [[], [64]], ids=["narrow", "wide"])
def test_gathers(dtypes: list[torch.dtype], width: list[int]) -> None:
    shards, singles, totals = [], [], []
    for n, (sizes, (dim, shape), dtype) in enumerate(zip(SIZES[world_size()], SHAPES, dtypes, strict=True)):
        shards.append(values([s if s >= 0 else sizes[rank()] for s in shape] + width, dtype, 10 * n + rank()))
        totals.append(sum(sizes))
        singles.append(wait(_ops.all_gather_v(shards[-1], dim, totals[-1], sizes, 0, [], group_name())))
    partitions = write_group_partitions([GroupPartition(sizes, 0, []) for sizes in SIZES[world_size()]])
    flat = wait(_ops.all_gather_bucket(shards, [d for d, _ in SHAPES], totals, *partitions, group_name()))
    start = 0
    for single in singles:
        length = single.numel() * single.dtype.itemsize // flat.dtype.itemsize
        part = flat[start : start + length].view(single.dtype)
        assert torch.equal(part, single)
        start += length
    assert start == flat.numel()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("members", [1, 2])
def test_what_is_conjugated_lazily_is_sent_as_it_reads(members: int) -> None:
    sizes = SIZES[world_size()][0]
    shards = [values([sizes[rank()], 8], torch.complex64, n) * (1 + rank() * 1j) for n in range(members)]
    partitions = write_group_partitions([GroupPartition(sizes, 0, [])] * members)
    ends = [0] * members, [sum(sizes)] * members
    lazy = wait(_ops.all_gather_bucket([b.conj() for b in shards], *ends, *partitions, group_name()))
    plain = wait(_ops.all_gather_bucket([b.conj().resolve_conj() for b in shards], *ends, *partitions, group_name()))
    assert torch.equal(lazy, plain) and plain.imag.any()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("reduce_op", ["sum", "max"])
def test_reduce_scatters(reduce_op: str) -> None:
    terms, singles, shards = [], [], []
    for n, (sizes, (dim, shape)) in enumerate(zip(SIZES[world_size()], SHAPES, strict=True)):
        terms.append(values([s if s >= 0 else sum(sizes) for s in shape], torch.float32, 10 * n + rank()))
        shards.append(sizes[rank()])
        singles.append(wait(_ops.reduce_scatter_v(terms[-1], dim, shards[-1], reduce_op, sizes, 0, [], group_name())))
    partitions = write_group_partitions([GroupPartition(sizes, 0, []) for sizes in SIZES[world_size()]])
    dims = [d for d, _ in SHAPES]
    flat = wait(_ops.reduce_scatter_bucket(terms, dims, shards, reduce_op, *partitions, group_name()))
    assert torch.equal(flat, torch.cat(singles))


@pytest.mark.ranks(2, 3)
def test_all_to_alls() -> None:
    shards, singles, dims, sizes, partitions = [], [], [], [], []
    for n, (src, dst) in enumerate(zip(SIZES[world_size()], SIZES[world_size()][::-1], strict=True)):
        shards.append(values([2, src[rank()], sum(dst)], torch.float64, 10 * n + rank()))
        arguments = (1, 2, sum(src), dst[rank()])
        singles.append(wait(_ops.all_to_all_v(shards[-1], *arguments, src, 0, [], dst, 0, [], group_name())))
        dims += arguments[:2]
        sizes += arguments[2:]
        partitions += [GroupPartition(src, 0, []), GroupPartition(dst, 0, [])]
    flat = wait(_ops.all_to_all_bucket(shards, dims, sizes, *write_group_partitions(partitions), group_name()))
    assert torch.equal(flat, torch.cat(singles))


def range_members(
    ranks: int, me: int, dtype: torch.dtype, filled: bool
) -> tuple[list[str], list[Ranges | HaloExchange]]:
    """Halos, shards of another partition, rolls and rows around shards, and the ways back, of several shapes and dims."""
    kinds: list[str] = []
    records: list[Ranges | HaloExchange] = []
    for n, (src, (dim, shape)) in enumerate(zip(SIZES[ranks], SHAPES, strict=True)):
        total, dst = sum(src), SIZES[ranks][n][::-1]
        held, wanted = GroupPartition(src, 0, []), GroupPartition(dst, 0, [])

        def shard(rows: int, seed: int, dim: int = dim, shape: list[int] = shape) -> Tensor:
            return values([rows if s < 0 else s for s in shape], dtype, 100 * seed + me)

        fill = 2.5 if filled else None
        end = sum(src[: me + 1])
        start = end - src[me]
        first, last = (start - 1, end + 1) if filled else (max(start - 1, 0), min(end + 1, total))
        halo = last - first if src[me] else 0
        reach = [total, 1, 1, 1, 1]
        kinds += ["fetch_ranges", "return_ranges"]
        records.append(Ranges(shard(src[me], n), dim, total, halo, held, held, reach, fill, group_name()))
        back = Ranges(shard(halo, 10 + n), dim, total, src[me], held, held, reach, fill, group_name())
        records.append(back)
        if filled:
            continue
        kinds += ["fetch_ranges", "return_ranges", "fetch_around", "fetch_around", "return_around"]
        records.append(Ranges(shard(src[me], 20 + n), dim, total, dst[me], held, wanted, [], None, group_name()))
        records.append(Ranges(shard(dst[me], 30 + n), dim, total, src[me], held, wanted, [], None, group_name()))
        records.append(HaloExchange(shard(src[me], 40 + n), dim, 2, -2, total, src[me], held, group_name()))
        records.append(HaloExchange(shard(src[me], 50 + n), dim, 1, 2, total, src[me] + 3, held, group_name()))
        records.append(HaloExchange(shard(src[me] + 3, 60 + n), dim, 1, 2, total, src[me], held, group_name()))
    return kinds, records


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64], ids=str)
def test_ranges(dtype: torch.dtype, filled: bool) -> None:
    kinds, records = range_members(world_size(), rank(), dtype, filled)
    by_kind = {d.kind: d for d in (FETCH_RANGES, RETURN_RANGES, FETCH_HALO, RETURN_HALO)}
    singles = [wait(by_kind[kind].call(record)) for kind, record in zip(kinds, records, strict=True)]
    for seed in range(3):
        order = list(range(len(kinds)))
        random.Random(seed).shuffle(order)
        with Sent() as watch:
            flat = wait(RANGE_BUCKET.call(together([kinds[i] for i in order], [records[i] for i in order])))
        assert watch.names == ["range_bucket"]
        assert torch.equal(flat, torch.cat([singles[i] for i in order]))


@pytest.mark.ranks(2, 3)
def test_several_at_once_do_not_share_memory() -> None:
    """Buckets and scatters of sizes that are kept, started before others end, again and again in memory that was used."""
    ranks, me = world_size(), rank()
    rows = [[900, 300, 600][:ranks], [10, 2000, 700][:ranks]]
    for repeat in range(4):
        started, expected = [], []
        for n in range(5):
            wholes = [values([sum(s), 100], torch.float64, 100 * repeat + 10 * n + i) for i, s in enumerate(rows)]
            shards = [w.split(s)[me] for w, s in zip(wholes, rows, strict=True)]
            partitions = write_group_partitions([GroupPartition(s, 0, []) for s in rows])
            totals = [sum(s) for s in rows]
            started.append(_ops.all_gather_bucket(shards, [0, 0], totals, *partitions, group_name()))
            expected.append(torch.cat([w.flatten() for w in wholes]))
            own = [s[me] for s in rows]
            started.append(_ops.reduce_scatter_bucket(wholes, [0, 0], own, "sum", *partitions, group_name()))
            expected.append(torch.cat([ranks * b.flatten() for b in shards]))
            started.append(_ops.reduce_scatter_v(wholes[0], 0, own[0], "sum", rows[0], 0, [], group_name()))
            expected.append(ranks * shards[0].flatten())
        order = range(len(started)) if repeat % 2 else reversed(range(len(started)))
        for n in order:
            torch.testing.assert_close(wait(started[n]), expected[n], rtol=1e-15, atol=0)


@pytest.mark.ranks(2)
def test_the_memory_of_members_stays_theirs() -> None:
    """A bucket of one member, of a size that is kept: the next collectives must not write into it."""
    rows = scratch._SMALLEST // 4
    x = torch.full([rows], float(rank()))
    for _ in range(3):
        wait(
            _ops.all_gather_bucket(
                [x], [0], [2 * rows], *write_group_partitions([GroupPartition([rows, rows], 0, [])]), group_name()
            )
        )
        wait(_ops.reduce_scatter_v(torch.ones(2 * rows), 0, rows, "sum", [rows, rows], 0, [], group_name()))
    assert torch.equal(x, torch.full([rows], float(rank())))


class Sharded(nn.Module):
    """Layers whose weights are kept in uneven shards and gathered where they are used."""

    def __init__(self, layers: int, mesh: Any, sizes: list[int]) -> None:
        super().__init__()
        dtypes = (torch.float64, torch.float32)
        self.weights = nn.ParameterList(
            nn.Parameter(sc.distribute_tensor(torch.randn(sum(sizes), 6, dtype=dtype), mesh, [Shard(0)], **partition))
            for dtype in dtypes
            for partition in [{"sharding_shapes": {0: sizes}}] * layers
        )

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            whole = weight.redistribute(placements=[Replicate()])
            x = torch.tanh(x @ whole.mT.to(x.dtype)) @ whole.to(x.dtype)
        return x.square().mean()


@pytest.mark.ranks(3, timeout=300)
@pytest.mark.parametrize("dynamic", often([True, False], 0), ids=["dynamic", "fixed"])
def test_a_model_with_sharded_weights_is_the_same_with_and_without_buckets(dynamic: bool) -> None:
    same_with_and_without_buckets("graph", dynamic)


@pytest.mark.nightly
@pytest.mark.ranks(2, 3, timeout=300)
@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "dynamic"])
def test_a_model_with_sharded_weights_through_inductor(dynamic: bool) -> None:
    same_with_and_without_buckets("inductor", dynamic)


def same_with_and_without_buckets(backend: str, dynamic: bool) -> None:
    mesh = init_device_mesh("cpu", (world_size(),))
    sizes, rows = ([4, 1], [5, 2]) if world_size() == 2 else ([4, 0, 1], [5, 2, 0])
    torch.manual_seed(0)
    net = Sharded(3, mesh, sizes)
    full = torch.randn(7, 6, dtype=torch.float64)
    results = []
    for off in (PASSES, []):
        torch._dynamo.reset()
        x = sc.distribute_tensor(full, mesh, [Shard(0)], sharding_shapes={0: rows})
        model = copy.deepcopy(net)
        weights = [w.detach().requires_grad_() if dynamic else w for w in model.weights]

        def loss(x: Tensor, weights: list[Tensor], model: nn.Module = model) -> Tensor:
            return model.forward(x) if not dynamic else Sharded.forward(_Weights(weights), x)

        how = {"options": inductor_options(off=off)} if backend == "inductor" else {"backend": graph_after_passes(off)}
        compiled = torch.compile(loss, fullgraph=True, **how)  # type: ignore[arg-type]
        compiled(x, weights).backward()  # compiles
        for w in weights:
            w.grad = None
        out: list[Tensor] = []
        traffic = traffic_of(lambda c=compiled, x=x, w=weights, out=out: _step(c, x, w, out), world_size())
        results.append((out[0], [w.grad.full_tensor() for w in weights], traffic.collectives))
    (value, gradients, many), (again, same, few) = results
    # Inductor fuses, and so vectorises, other loops with the buckets' views in them (seen on 2.15).
    tolerance = {"rtol": 1e-5, "atol": 1e-7} if backend == "inductor" else {"rtol": 0.0, "atol": 0.0}
    torch.testing.assert_close([again, *same], [value, *gradients], **tolerance)  # type: ignore[arg-type]
    assert many >= 12 + 1
    assert few <= many - 8
    counts = [None] * world_size()
    dist.all_gather_object(counts, few)
    assert len(set(counts)) == 1


class _Weights:
    def __init__(self, weights: list[Tensor]) -> None:
        self.weights = weights


def _step(compiled: Any, x: Tensor, weights: list[Tensor], out: list[Tensor]) -> None:
    loss = compiled(x, weights)
    loss.backward()
    out.append(loss.full_tensor() if isinstance(loss, sc.ShardTensor) else loss)


def advection(u: Tensor, v: Tensor) -> Tensor:
    """Two steps on a periodic grid."""
    for _ in range(2):
        slopes = [[0.5 * (f.roll(-1, d) - f.roll(1, d)) for d in (0, 1)] for f in (u, v)]
        u, v = (f - 0.1 * (u * s[0] + v * s[1]) for f, s in zip((u, v), slopes, strict=True))
    return u * v


def diffusion(u: Tensor, v: Tensor) -> Tensor:
    """Two steps on a grid with an edge."""
    for _ in range(2):
        u = u + 0.1 * nn.functional.pad(u[2:] + u[:-2] - 2 * u[1:-1], (0, 0, 1, 1))
    return u + v


@pytest.mark.ranks(3, timeout=300)
@pytest.mark.parametrize("backend", ["graph", pytest.param("inductor", marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    ("step", "without", "with_buckets"), often([(advection, 8 + 8, 2 + 2), (diffusion, 6 + 4, 4 + 2)], 1)
)
def test_stencils(step: Any, without: int, with_buckets: int, backend: str) -> None:
    mesh = init_device_mesh("cpu", (3,))
    results = []
    for off in (["bucket_ranges"], []):
        torch._dynamo.reset()
        how = {"options": inductor_options(off=off)} if backend == "inductor" else {"backend": graph_after_passes(off)}
        compiled = torch.compile(step, fullgraph=True, **how)  # type: ignore[arg-type]
        for sizes in ([3, 4, 1], [0, 6, 5], [1, 1, 9]):
            full = [values([sum(sizes), 4], torch.float64, seed) / 8 for seed in range(2)]
            partition = [sc.distribute_tensor(f, mesh, [Shard(0)], sharding_shapes={0: sizes}) for f in full]
            x = [c.detach().requires_grad_() for c in partition]
            compiled(*x).square().sum().backward()  # compiles
            for t in x:
                t.grad = None
            with Sent() as watch:
                out = compiled(*x)
                out.backward(out.detach())
            sent = len([name for name in watch.names if name != "wait_tensor"])
            plain = [f.clone().requires_grad_() for f in full]
            expected = step(*plain)
            expected.backward(expected.detach())
            found = [out.full_tensor(), *(t.grad.full_tensor() for t in x)]
            torch.testing.assert_close(found, [expected, *(p.grad for p in plain)], rtol=1e-12, atol=1e-12)
            assert sent == (without if off else with_buckets), (sent, ":".join(n[:12] for n in watch.names))
            results.append(found)
    if backend == "graph":
        assert all(
            torch.equal(a, b)
            for with_, without_ in zip(results[:3], results[3:], strict=True)
            for a, b in zip(with_, without_, strict=True)
        )
