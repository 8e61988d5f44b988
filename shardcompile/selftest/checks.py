"""The checks: each compares with plain PyTorch on full tensors, or with what torch's own collectives give.

A check is a function of `Here` that raises if something is wrong, on the ranks that see it, and returns what it has
measured. Whether one communicates is the same on every rank. Values are drawn alike on every rank.
"""

from __future__ import annotations

import functools
import itertools
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as nnf
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Replicate, Shard
from torch.nn.attention import SDPBackend, sdpa_kernel

import shardcompile as sc
from shardcompile.collectives import all_gather_v, all_reduce, all_to_all_v, fetch_ranges, reduce_scatter_v
from shardcompile.collectives.transport import transport_of
from shardcompile.collectives.transport.nccl import Nccl
from shardcompile.collectives.transport.nccl_algorithms import Way, costs_to_gather, costs_to_reduce
from shardcompile.inspect.offline import trace_offline
from shardcompile.selftest.environment import Here, same
from shardcompile.testing import assert_matches_single_device
from shardcompile.testing.arrange import uneven_sizes

ROWS = 23
BACKEND = "shardcompile"
ALL_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.int64, torch.int32, torch.uint8, torch.bool),
)
SUMMED = (torch.float32, torch.float64, torch.int64)


# Collectives


def gathers(here: Here) -> str:
    """`all_gather_v` of every dtype, over partitions with empty shards."""
    for dtype in ALL_DTYPES:
        x = here.drawn(ROWS, 3, dtype=dtype)
        for sizes in here.partitions(ROWS):
            found = all_gather_v(x.split(sizes)[here.rank], 0, sizes, here.group)
            assert isinstance(found, Tensor)
            same(found, x, rtol=0, atol=0)
    return f"{len(ALL_DTYPES)} dtypes"


def reductions(here: Here) -> str:
    """`reduce_scatter_v` and `all_reduce`."""
    for dtype in SUMMED:
        terms = [here.drawn(ROWS, 3, dtype=dtype, seed=r) for r in range(here.ranks)]
        total = torch.stack(terms).sum(0)
        for sizes in here.partitions(ROWS):
            found = reduce_scatter_v(terms[here.rank], 0, sizes, here.group)
            assert isinstance(found, Tensor)
            same(found, total.split(sizes)[here.rank])
        same(all_reduce(terms[here.rank], here.group), total)  # type: ignore[arg-type]
    return f"{len(SUMMED)} dtypes"


def exchanges(here: Here) -> str:
    """`all_to_all_v` and `fetch_ranges`."""
    x = here.drawn(ROWS, 11)
    partitions, others = here.partitions(ROWS), here.partitions(11)
    for sizes, target, columns in zip(partitions, partitions[1:] + partitions[:1], others, strict=True):
        shard = x.split(sizes)[here.rank]
        turned = all_to_all_v(shard, 0, 1, sizes, columns, here.group)
        same(turned, x.split(columns, 1)[here.rank], rtol=0, atol=0)  # type: ignore[arg-type]
        moved = fetch_ranges(shard, 0, sizes, target, here.group)
        same(moved, x.split(target)[here.rank], rtol=0, atol=0)  # type: ignore[arg-type]
    return ""


def speed_of_gathers(here: Here) -> str:
    """Uneven shards against torch's even gather of as many bytes."""
    if here.one_process:
        return "not measured: ranks in one process take turns"
    rows = 4096 * here.ranks
    sizes = [rows * 2 * (r + 1) // (here.ranks * (here.ranks + 1)) for r in range(here.ranks)]
    sizes[-1] += rows - sum(sizes)
    shard = torch.ones(sizes[here.rank], 64, device=here.device)
    even, out = torch.ones(rows // here.ranks, 64, device=here.device), torch.empty(rows, 64, device=here.device)
    ours = here.seconds(lambda: all_gather_v(shard, 0, sizes, here.group))
    torchs = here.seconds(lambda: dist.all_gather_into_tensor(out, even))
    return f"{rows * 256 / 2**20:.0f} MiB: {ours / torchs:.2f} of an even gather, {ours * 1e3:.2f} ms"


def ways_of_nccl(here: Here) -> str:
    """Each way that NCCL's transport has to gather and to reduce, and its time against what is expected of it.

    One rank holds most rows.
    """
    transport = transport_of(here.group)
    if not isinstance(transport, Nccl) or here.ranks == 1:
        return "not measured: only NCCL has several, between several ranks"
    sizes = [1024] * (here.ranks - 1) + [9 * 1024]
    x = here.drawn(sum(sizes), 64, dtype=torch.float32)
    shard, nbytes = x.split(sizes)[here.rank], [256 * n for n in sizes]
    gathers = functools.partial(all_gather_v, shard, 0, sizes, here.group)
    reduces = functools.partial(reduce_scatter_v, x, 0, sizes, here.group)
    told = []
    try:
        for what, call, wanted, costs in (
            ("gather", gathers, x, costs_to_gather(nbytes, torch.cuda.nccl.version())),
            ("reduce", reduces, shard * here.ranks, costs_to_reduce(nbytes)),
        ):
            seconds = {}
            for transport.fixed in costs:
                same(call(), wanted)  # type: ignore[arg-type]
                seconds[transport.fixed] = here.seconds(call)
            sends, expected = seconds[Way.SENDS], costs[Way.SENDS]
            rows = [f"{w.name.lower()} {s / sends:.2f} ({costs[w] / expected:.2f})" for w, s in seconds.items()]
            told.append(f"{what}: {', '.join(rows)}; sends {sends * 1e3:.2f} ms")
    finally:
        transport.fixed = None
    return "; ".join(told)


# Ops


def _layers(x: Tensor, weight: Tensor) -> Tensor:
    y = nnf.layer_norm(nnf.gelu(x @ weight), (5,))
    return (y - y.mean(0)) / (y.var(0) + 1) + y.softmax(0)


def _rows(x: Tensor, weight: Tensor) -> Tensor:
    joined = torch.cat([x[1:], x[:1].flip(0), x[::2]])
    return joined.cumsum(0) @ weight + joined.roll(2, 0) @ weight.cos()


def _lookups(x: Tensor, weight: Tensor) -> Tensor:
    index = torch.arange(0, 2 * x.shape[0], 3, device=x.device) % x.shape[0]
    return x[index].sort(0).values @ weight + x.amax(0) @ weight


def _windows(x: Tensor, weight: Tensor) -> Tensor:
    y = nnf.conv2d(x[None, None], weight[None, None, :2, :3], padding=1)
    return nnf.max_pool2d(y, 2) + nnf.avg_pool2d(y, 2)


def ops(here: Here) -> str:
    """Families of ops, forward and backward, eager and by one graph over three partitions."""
    functions = (_layers, _rows, _lookups, _windows)
    for function in functions:
        values = [here.drawn(ROWS, 4), here.drawn(4, 5, seed=1)]
        assert_matches_single_device(
            function, values, [Shard(0), None], mesh=here.mesh, steps=3, backend=["aot_eager", BACKEND]
        )
    return f"{len(functions)} functions, one graph each over 3 partitions"


def half_precision(here: Here) -> str:
    """The same layers in bfloat16."""
    values = [here.drawn(ROWS, 4, dtype=torch.bfloat16), here.drawn(4, 5, dtype=torch.bfloat16, seed=1)]
    assert_matches_single_device(
        lambda x, w: nnf.gelu(x @ w).softmax(1), values, [Shard(0), None], mesh=here.mesh, rtol=0.05, atol=0.05
    )
    return ""


# Attention


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return nnf.scaled_dot_product_attention(q, k, v, is_causal=causal)


def _attention(here: Here, ring: bool) -> str:
    dtype = torch.bfloat16 if here.on_gpu else torch.float64
    near = {"rtol": 0.05, "atol": 0.05} if here.on_gpu else {"rtol": 1e-9, "atol": 1e-9}
    backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    sizes = here.partitions(ROWS)[0]
    before, sc.config.attention = sc.config.attention, "ring" if ring else "auto"
    try:
        for causal in (True, False):
            function = functools.partial(_attend, causal=causal)
            values = [here.drawn(2, 4, ROWS, 16, dtype=dtype, seed=s) / 3 for s in range(3)]
            whole = [x.double().requires_grad_() for x in values]
            with sdpa_kernel(SDPBackend.MATH):
                function(*whole).sin().sum().backward()
                wanted = function(*whole).detach()
            for backend in ("eager", BACKEND):
                partition = [here.partition(x, sizes, 2).requires_grad_() for x in values]
                call = torch.compile(function, fullgraph=True, backend=backend)
                with sdpa_kernel(backends):
                    found = call(*partition)
                    found.sin().sum().backward()
                same(found.full_tensor().double(), wanted, **near)  # type: ignore[attr-defined]
                for x, y in zip(partition, whole, strict=True):
                    same(x.grad.full_tensor().double(), y.grad, **near)  # type: ignore[union-attr, arg-type]
    finally:
        sc.config.attention = before
    return str(dtype).removeprefix("torch.")


def attention(here: Here) -> str:
    """torch's fused kernels on local shards."""
    return _attention(here, ring=False)


def attention_by_ring(here: Here) -> str:
    """The same with keys a shard at a time."""
    return _attention(here, ring=True)


def documents(here: Here) -> str:
    """Packed documents."""
    dtype = torch.bfloat16 if here.on_gpu else torch.float64
    near = {"rtol": 0.05, "atol": 0.05} if here.on_gpu else {"rtol": 1e-9, "atol": 1e-9}
    ends = torch.tensor([0, 9, 9, 10, ROWS])
    q, k, v = (here.drawn(ROWS, 2, 16, dtype=dtype, seed=s) / 3 for s in range(3))
    wanted = []
    for a, b in itertools.pairwise(ends.tolist()):
        some = [x[a:b].double().transpose(0, 1) for x in (q, k, v)]
        wanted.append(nnf.scaled_dot_product_attention(some[0], some[1], some[2], is_causal=True).transpose(0, 1))
    for sizes in here.partitions(ROWS):
        of_query, of_key, of_value = (here.partition(x, sizes) for x in (q, k, v))
        found = sc.varlen_attention(of_query, of_key, of_value, ends, causal=True)
        same(found.full_tensor().double(), torch.cat(wanted), **near)  # type: ignore[attr-defined]
    return str(dtype).removeprefix("torch.")


# Models


class _Net(nn.Module):
    """Points that attend to one another, and a row of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 32)
        self.heads = nn.Linear(32, 96)
        self.last = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(0, 1) for t in self.heads(x).chunk(3, -1))
        weights = k.softmax(1)  # over all points
        y = q.softmax(-1) @ (weights.transpose(1, 2) @ v)
        result: Tensor = self.last(x + y.transpose(0, 1).flatten(1))
        return result


def build(mesh: DeviceMesh) -> tuple[Any, tuple[Any, ...]]:
    """The model, and 64 rows for each rank in uneven shards."""
    torch.manual_seed(0)
    sizes = uneven_sizes(64 * mesh.size(), mesh.size(), 0)
    local = torch.randn(sizes[mesh.get_local_rank()], 4, device=mesh.device_type)
    return _Net().to(mesh.device_type), (sc.ShardTensor.from_local(local, mesh, [Shard(0)], {0: sizes}),)


def training(here: Here) -> str:
    """Three steps of AdamW, compiled, another partition each, against one process; float64."""
    torch.manual_seed(0)
    assert_matches_single_device(
        _Net().double(),
        [here.drawn(ROWS, 4)],
        [Shard(0)],
        mesh=here.mesh,
        steps=3,
        backend=BACKEND,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    )
    return "3 steps"


def collectives_of_a_step(here: Here) -> str:
    """All ranks start the same collectives, and those that a trace without ranks finds; and how long a step takes.

    A prediction that is far from what was measured is for looking at: it makes nothing wrong. Ranks in one process see
    only what they compiled themselves: one of them all of it, the others nothing.
    """
    net, inputs = build(here.mesh)
    compiled = torch.compile(net, fullgraph=True, backend=BACKEND)

    def step() -> None:
        compiled(*inputs).sum().backward()

    with sc.capture() as seen:
        step()
    real = [(c.kind, c.global_bytes) for g in seen.graphs for c in g.issued]
    told: list[Any] = [None] * here.ranks
    dist.all_gather_object(told, real)
    if here.one_process:
        told = [max(told, key=len)]
        real = told[0]
    assert all(t == real for t in told), f"the ranks have other collectives: {told}"
    assert real == here.traced, f"a trace without ranks has {here.traced}, here there are {real}"
    if here.one_process:
        return f"{len(real)} collectives"
    expected, measured = sum(g.total for g in seen.graphs), here.seconds(step)
    return f"{len(real)} collectives; predicted {expected * 1e3:.2f} ms, measured {measured * 1e3:.2f} ms"


def traced_collectives(ranks: int, device: str) -> list[tuple[str, int]]:
    """Kind and bytes of the collectives of a step, as a trace without ranks finds them. Not inside of a rank."""
    trace = trace_offline(build, world_size=ranks, device=device)
    return [(c.kind, c.global_bytes) for c in trace.collectives]


# The rest


def halos(here: Here) -> str:
    """`halo_map`, forward and backward."""
    x = here.drawn(ROWS, 3).requires_grad_()

    def stencil(rows: Tensor) -> Tensor:
        return rows[2:] * 2 - rows[1:-1].sin() * rows[:-2]

    wanted = stencil(nnf.pad(x, [0, 0, 1, 1]))
    wanted.cos().sum().backward()
    for sizes in here.partitions(ROWS):
        partition = here.partition(x.detach(), sizes).requires_grad_()
        found = sc.halo_map(stencil, partition, halo={0: (1, 1)}, fill=0.0, crop=False)
        same(found.full_tensor(), wanted.detach())
        found.cos().sum().backward()
        same(partition.grad.full_tensor(), x.grad)  # type: ignore[union-attr, arg-type]
    return ""


def routing(here: Here) -> str:
    """`route_rows` there and back, to random ranks and all to one."""
    x = here.drawn(ROWS, 3)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        destination = torch.randint(here.ranks if seed else 1, [ROWS], generator=generator).to(here.device)
        sizes = here.partitions(ROWS)[seed]
        rows, route = sc.route_rows(here.partition(x, sizes), here.partition(destination, sizes))
        same(route.back(rows * 2).full_tensor(), x * 2)  # type: ignore[attr-defined]
    return ""


def neighbours(here: Here) -> str:
    """`neighbors.knn` against all distances."""
    x = here.drawn(ROWS, 3)
    wanted = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist").topk(3, largest=False)
    for sizes in here.partitions(ROWS):
        found = sc.neighbors.knn(here.partition(x, sizes), here.partition(x, sizes), 3)
        same(found.numbers.full_tensor(), wanted.indices)  # type: ignore[attr-defined]
    return ""


def checkpoints(here: Here) -> str:
    """Saved in one partition, loaded in another."""
    # Heavy, and only this check needs it.
    import torch.distributed.checkpoint as dcp

    x = here.drawn(ROWS, 3)
    partitions = here.partitions(ROWS)
    folder: list[Any] = [None]
    if here.rank == 0:
        folder[0] = tempfile.mkdtemp()
    dist.broadcast_object_list(folder)
    dcp.save({"x": here.partition(x, partitions[0])}, checkpoint_id=folder[0])
    for sizes in partitions:
        state = {"x": here.partition(torch.zeros_like(x), sizes)}
        dcp.load(state, checkpoint_id=folder[0])
        same(state["x"].full_tensor(), x, rtol=0, atol=0)
    dist.barrier()
    if here.rank == 0:
        shutil.rmtree(folder[0])
    return ""


def redistribution(here: Here) -> str:
    """Between partitions, from rows to columns, and to all."""
    x = here.drawn(ROWS, 11)
    for sizes, other, columns in zip(
        here.partitions(ROWS), here.partitions(ROWS)[::-1], here.partitions(11), strict=True
    ):
        partition = here.partition(x, sizes)
        for target, placed in ((other, Shard(0)), (columns, Shard(1))):
            moved = partition.redistribute(placements=[placed], sharding_shapes={0: target})
            same(moved.to_local(), x.split(target, placed.dim)[here.rank], rtol=0, atol=0)
        same(partition.redistribute(placements=[Replicate()]).to_local(), x, rtol=0, atol=0)
    return ""


CHECKS: dict[str, Callable[[Here], str]] = {
    "collectives: gathers": gathers,
    "collectives: reductions": reductions,
    "collectives: exchanges": exchanges,
    "collectives: speed": speed_of_gathers,
    "collectives: ways": ways_of_nccl,
    "redistribution": redistribution,
    "ops": ops,
    "ops: half precision": half_precision,
    "attention": attention,
    "attention: ring": attention_by_ring,
    "attention: documents": documents,
    "model: training": training,
    "model: collectives of a step": collectives_of_a_step,
    "halos": halos,
    "routing": routing,
    "neighbours": neighbours,
    "checkpoints": checkpoints,
}
"""By name, in the order in which they run."""
