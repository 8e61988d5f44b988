"""The checks. Each compares with plain PyTorch on full tensors, or with torch's own collectives.

A check takes an `Environment`. It raises on the ranks that find an error, and returns a text with its measurements.
Whether a check communicates is rank-invariant, and so are the random values that it draws.
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
from shardcompile.collectives.transport.nccl_algorithms import Algorithm, costs_to_gather, costs_to_reduce
from shardcompile.inspect.offline import trace_offline
from shardcompile.selftest.environment import Environment, same
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


def gathers(env: Environment) -> str:
    """Checks `all_gather_v` for every dtype, over partitions with empty shards."""
    for dtype in ALL_DTYPES:
        x = env.drawn(ROWS, 3, dtype=dtype)
        for sizes in env.partitions(ROWS):
            found = all_gather_v(x.split(sizes)[env.rank], 0, sizes, env.group)
            assert isinstance(found, Tensor)
            same(found, x, rtol=0, atol=0)
    return f"{len(ALL_DTYPES)} dtypes"


def reductions(env: Environment) -> str:
    """Checks `reduce_scatter_v` and `all_reduce`."""
    for dtype in SUMMED:
        terms = [env.drawn(ROWS, 3, dtype=dtype, seed=r) for r in range(env.ranks)]
        total = torch.stack(terms).sum(0)
        for sizes in env.partitions(ROWS):
            found = reduce_scatter_v(terms[env.rank], 0, sizes, env.group)
            assert isinstance(found, Tensor)
            same(found, total.split(sizes)[env.rank])
        same(all_reduce(terms[env.rank], env.group), total)  # type: ignore[arg-type]
    return f"{len(SUMMED)} dtypes"


def exchanges(env: Environment) -> str:
    """Checks `all_to_all_v` and `fetch_ranges`."""
    x = env.drawn(ROWS, 11)
    partitions, others = env.partitions(ROWS), env.partitions(11)
    for sizes, target, columns in zip(partitions, partitions[1:] + partitions[:1], others, strict=True):
        shard = x.split(sizes)[env.rank]
        transposed = all_to_all_v(shard, 0, 1, sizes, columns, env.group)
        same(transposed, x.split(columns, 1)[env.rank], rtol=0, atol=0)  # type: ignore[arg-type]
        fetched = fetch_ranges(shard, 0, sizes, target, env.group)
        same(fetched, x.split(target)[env.rank], rtol=0, atol=0)  # type: ignore[arg-type]
    return ""


def speed_of_gathers(env: Environment) -> str:
    """Measures a gather of uneven shards against torch's even gather of as many bytes."""
    if env.one_process:
        return "not measured: ranks in one process take turns"
    rows = 4096 * env.ranks
    sizes = [rows * 2 * (r + 1) // (env.ranks * (env.ranks + 1)) for r in range(env.ranks)]
    sizes[-1] += rows - sum(sizes)
    shard = torch.ones(sizes[env.rank], 64, device=env.device)
    even, out = torch.ones(rows // env.ranks, 64, device=env.device), torch.empty(rows, 64, device=env.device)
    ours = env.seconds(lambda: all_gather_v(shard, 0, sizes, env.group))
    torchs = env.seconds(lambda: dist.all_gather_into_tensor(out, even))
    return f"{rows * 256 / 2**20:.0f} MiB: {ours / torchs:.2f} of an even gather, {ours * 1e3:.2f} ms"


def nccl_algorithms(env: Environment) -> str:
    """Checks every algorithm of the NCCL transport for gathers and reductions, and compares its time with its cost.

    One rank holds most rows.
    """
    transport = transport_of(env.group)
    if not isinstance(transport, Nccl) or env.ranks == 1:
        return "not measured: only NCCL has several algorithms, between several ranks"
    sizes = [1024] * (env.ranks - 1) + [9 * 1024]
    x = env.drawn(sum(sizes), 64, dtype=torch.float32)
    shard, nbytes = x.split(sizes)[env.rank], [256 * n for n in sizes]
    gathers = functools.partial(all_gather_v, shard, 0, sizes, env.group)
    reduces = functools.partial(reduce_scatter_v, x, 0, sizes, env.group)
    measured = []
    try:
        for what, call, wanted, costs in (
            ("gather", gathers, x, costs_to_gather(nbytes, torch.cuda.nccl.version())),
            ("reduce", reduces, shard * env.ranks, costs_to_reduce(nbytes)),
        ):
            seconds = {}
            for transport.fixed in costs:
                same(call(), wanted)  # type: ignore[arg-type]
                seconds[transport.fixed] = env.seconds(call)
            sends, expected = seconds[Algorithm.SENDS], costs[Algorithm.SENDS]
            rows = [f"{w.name.lower()} {s / sends:.2f} ({costs[w] / expected:.2f})" for w, s in seconds.items()]
            measured.append(f"{what}: {', '.join(rows)}; sends {sends * 1e3:.2f} ms")
    finally:
        transport.fixed = None
    return "; ".join(measured)


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


def ops(env: Environment) -> str:
    """Checks families of ops, forward and backward, in eager mode and compiled to one graph for three partitions."""
    functions = (_layers, _rows, _lookups, _windows)
    for function in functions:
        values = [env.drawn(ROWS, 4), env.drawn(4, 5, seed=1)]
        assert_matches_single_device(
            function, values, [Shard(0), None], mesh=env.mesh, steps=3, backend=["aot_eager", BACKEND]
        )
    return f"{len(functions)} functions, one graph each over 3 partitions"


def half_precision(env: Environment) -> str:
    """Checks layers in bfloat16."""
    values = [env.drawn(ROWS, 4, dtype=torch.bfloat16), env.drawn(4, 5, dtype=torch.bfloat16, seed=1)]
    assert_matches_single_device(
        lambda x, w: nnf.gelu(x @ w).softmax(1), values, [Shard(0), None], mesh=env.mesh, rtol=0.05, atol=0.05
    )
    return ""


# Attention


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return nnf.scaled_dot_product_attention(q, k, v, is_causal=causal)


def _attention(env: Environment, ring: bool) -> str:
    dtype = torch.bfloat16 if env.on_gpu else torch.float64
    tolerances = {"rtol": 0.05, "atol": 0.05} if env.on_gpu else {"rtol": 1e-9, "atol": 1e-9}
    backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    sizes = env.partitions(ROWS)[0]
    before, sc.config.attention = sc.config.attention, "ring" if ring else "auto"
    try:
        for causal in (True, False):
            function = functools.partial(_attend, causal=causal)
            values = [env.drawn(2, 4, ROWS, 16, dtype=dtype, seed=s) / 3 for s in range(3)]
            full = [x.double().requires_grad_() for x in values]
            with sdpa_kernel(SDPBackend.MATH):
                function(*full).sin().sum().backward()
                wanted = function(*full).detach()
            for backend in ("eager", BACKEND):
                sharded = [env.partition(x, sizes, 2).requires_grad_() for x in values]
                call = torch.compile(function, fullgraph=True, backend=backend)
                with sdpa_kernel(backends):
                    found = call(*sharded)
                    found.sin().sum().backward()
                same(found.full_tensor().double(), wanted, **tolerances)  # type: ignore[attr-defined]
                for x, y in zip(sharded, full, strict=True):
                    same(x.grad.full_tensor().double(), y.grad, **tolerances)  # type: ignore[union-attr, arg-type]
    finally:
        sc.config.attention = before
    return str(dtype).removeprefix("torch.")


def attention(env: Environment) -> str:
    """Checks attention by torch's fused kernels on local shards."""
    return _attention(env, ring=False)


def attention_by_ring(env: Environment) -> str:
    """Checks ring attention, which takes the keys one shard at a time."""
    return _attention(env, ring=True)


def documents(env: Environment) -> str:
    """Checks `varlen_attention` of packed documents."""
    dtype = torch.bfloat16 if env.on_gpu else torch.float64
    tolerances = {"rtol": 0.05, "atol": 0.05} if env.on_gpu else {"rtol": 1e-9, "atol": 1e-9}
    ends = torch.tensor([0, 9, 9, 10, ROWS])
    q, k, v = (env.drawn(ROWS, 2, 16, dtype=dtype, seed=s) / 3 for s in range(3))
    wanted = []
    for a, b in itertools.pairwise(ends.tolist()):
        document = [x[a:b].double().transpose(0, 1) for x in (q, k, v)]
        attended = nnf.scaled_dot_product_attention(document[0], document[1], document[2], is_causal=True)
        wanted.append(attended.transpose(0, 1))
    for sizes in env.partitions(ROWS):
        query, key, value = (env.partition(x, sizes) for x in (q, k, v))
        found = sc.varlen_attention(query, key, value, ends, causal=True)
        same(found.full_tensor().double(), torch.cat(wanted), **tolerances)  # type: ignore[attr-defined]
    return str(dtype).removeprefix("torch.")


# Models


class _Net(nn.Module):
    """Linear attention among points, followed by a pointwise network."""

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
    """Makes the model, and an input with 64 rows for each rank on average, in uneven shards."""
    torch.manual_seed(0)
    sizes = uneven_sizes(64 * mesh.size(), mesh.size(), 0)
    local = torch.randn(sizes[mesh.get_local_rank()], 4, device=mesh.device_type)
    return _Net().to(mesh.device_type), (sc.ShardTensor.from_local(local, mesh, [Shard(0)], {0: sizes}),)


def training(env: Environment) -> str:
    """Checks three compiled steps of AdamW, each with another partition, against one process, in float64."""
    torch.manual_seed(0)
    assert_matches_single_device(
        _Net().double(),
        [env.drawn(ROWS, 4)],
        [Shard(0)],
        mesh=env.mesh,
        steps=3,
        backend=BACKEND,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    )
    return "3 steps"


def collectives_of_a_step(env: Environment) -> str:
    """Checks that all ranks start the collectives that offline tracing finds, and measures the time of a step.

    A large difference between predicted and measured time is no error. In-process ranks record only the collectives
    that they compile: one rank compiles, and the others record none.
    """
    net, inputs = build(env.mesh)
    compiled = torch.compile(net, fullgraph=True, backend=BACKEND)

    def step() -> None:
        compiled(*inputs).sum().backward()

    with sc.capture() as seen:
        step()
    real = [(c.kind, c.global_bytes) for g in seen.graphs for c in g.issued]
    of_ranks: list[Any] = [None] * env.ranks
    dist.all_gather_object(of_ranks, real)
    if env.one_process:
        of_ranks = [max(of_ranks, key=len)]
        real = of_ranks[0]
    assert all(each == real for each in of_ranks), f"the collectives differ between ranks: {of_ranks}"
    assert real == env.traced, f"offline tracing finds {env.traced}, but the ranks start {real}"
    if env.one_process:
        return f"{len(real)} collectives"
    expected, measured = sum(g.total for g in seen.graphs), env.seconds(step)
    return f"{len(real)} collectives; predicted {expected * 1e3:.2f} ms, measured {measured * 1e3:.2f} ms"


def traced_collectives(ranks: int, device: str) -> list[tuple[str, int]]:
    """Traces a step offline, and returns kind and bytes of its collectives. Do not call this on a rank."""
    trace = trace_offline(build, world_size=ranks, device=device)
    return [(c.kind, c.global_bytes) for c in trace.collectives]


# The rest


def halos(env: Environment) -> str:
    """Checks `halo_map`, forward and backward."""
    x = env.drawn(ROWS, 3).requires_grad_()

    def stencil(rows: Tensor) -> Tensor:
        return rows[2:] * 2 - rows[1:-1].sin() * rows[:-2]

    wanted = stencil(nnf.pad(x, [0, 0, 1, 1]))
    wanted.cos().sum().backward()
    for sizes in env.partitions(ROWS):
        sharded = env.partition(x.detach(), sizes).requires_grad_()
        found = sc.halo_map(stencil, sharded, halo={0: (1, 1)}, fill=0.0, crop=False)
        same(found.full_tensor(), wanted.detach())
        found.cos().sum().backward()
        same(sharded.grad.full_tensor(), x.grad)  # type: ignore[union-attr, arg-type]
    return ""


def routing(env: Environment) -> str:
    """Checks dispatch and combine by `route_rows`, to random ranks and to one rank only."""
    x = env.drawn(ROWS, 3)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        destination = torch.randint(env.ranks if seed else 1, [ROWS], generator=generator).to(env.device)
        sizes = env.partitions(ROWS)[seed]
        rows, route = sc.route_rows(env.partition(x, sizes), env.partition(destination, sizes))
        same(route.combine(rows * 2).full_tensor(), x * 2)  # type: ignore[attr-defined]
    return ""


def neighbours(env: Environment) -> str:
    """Checks `neighbors.knn` against a search over all distances."""
    x = env.drawn(ROWS, 3)
    wanted = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist").topk(3, largest=False)
    for sizes in env.partitions(ROWS):
        found = sc.neighbors.knn(env.partition(x, sizes), env.partition(x, sizes), 3)
        same(found.indices.full_tensor(), wanted.indices)  # type: ignore[attr-defined]
    return ""


def checkpoints(env: Environment) -> str:
    """Checks a checkpoint that is saved in one partition and loaded in others."""
    # Heavy, and only this check needs it.
    import torch.distributed.checkpoint as dcp

    x = env.drawn(ROWS, 3)
    partitions = env.partitions(ROWS)
    folder: list[Any] = [None]
    if env.rank == 0:
        folder[0] = tempfile.mkdtemp()
    dist.broadcast_object_list(folder)
    dcp.save({"x": env.partition(x, partitions[0])}, checkpoint_id=folder[0])
    for sizes in partitions:
        state = {"x": env.partition(torch.zeros_like(x), sizes)}
        dcp.load(state, checkpoint_id=folder[0])
        same(state["x"].full_tensor(), x, rtol=0, atol=0)
    dist.barrier()
    if env.rank == 0:
        shutil.rmtree(folder[0])
    return ""


def redistribution(env: Environment) -> str:
    """Checks redistribution between partitions, from rows to columns, and to `Replicate`."""
    x = env.drawn(ROWS, 11)
    for sizes, other, columns in zip(env.partitions(ROWS), env.partitions(ROWS)[::-1], env.partitions(11), strict=True):
        sharded = env.partition(x, sizes)
        for target, placement in ((other, Shard(0)), (columns, Shard(1))):
            moved = sharded.redistribute(placements=[placement], sharding_shapes={0: target})
            same(moved.to_local(), x.split(target, placement.dim)[env.rank], rtol=0, atol=0)
        same(sharded.redistribute(placements=[Replicate()]).to_local(), x, rtol=0, atol=0)
    return ""


CHECKS: dict[str, Callable[[Environment], str]] = {
    "collectives: gathers": gathers,
    "collectives: reductions": reductions,
    "collectives: exchanges": exchanges,
    "collectives: speed": speed_of_gathers,
    "collectives: algorithms": nccl_algorithms,
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
"""The checks by name, in the order in which they run."""
