"""Attention whose keys come a shard at a time (`shardcompile.config.attention = "ring"`)."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as nnf
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel

import shardcompile as sc
from shardcompile.collectives import Ring, transport
from shardcompile.collectives import ring as of_ring
from shardcompile.compat.testing import graphs_compiled
from shardcompile.inspect.offline import trace_offline
from shardcompile.testing import assert_matches_single_device, mesh
from tests.support.tiers import often

BATCH, HEADS, ROWS = Shard(0), Shard(1), Shard(2)


@pytest.fixture(autouse=True)
def by_ring() -> Iterator[None]:
    sc.config.attention = "ring"
    yield
    sc.config.attention = "auto"


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return nnf.scaled_dot_product_attention(q.sin(), k.sin(), v.sin(), mask, **options)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v, is_causal=True)


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v, enable_gqa=True, is_causal=True)


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return attention(q, k, v, mask.detach())


@contextlib.contextmanager
def seen_in_a_ring() -> Iterator[None]:
    """Fails where no shard has travelled."""
    found = []
    fetch = Ring.fetch

    def noted(self: Ring, shards: Any, dims: Any, by: int, after: Tensor | None = None) -> Any:
        found.append(by)
        return fetch(self, shards, dims, by, after)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ring, "fetch", noted)
        yield
    assert found


@pytest.mark.ranks(3, timeout=300, processes=False)
@pytest.mark.parametrize(
    ("function", "heads", "rows"),
    often([(causal, 2, 5), (grouped, 1, 7), (causal, 2, 7), (attention, 2, 7), (causal, 2, 2), (attention, 1, 4)], 2),
)
def test_one_graph_over_partitions(function: Any, heads: int, rows: int) -> None:
    torch.manual_seed(0)
    q, k, v = drawn(2, 2, 7, 4), drawn(2, heads, rows, 4), drawn(2, heads, rows, 4)
    if heads == 1 and function is attention:
        q = drawn(2, 1, 7, 4)
    with seen_in_a_ring():
        assert_matches_single_device(function, [q, k, v], [ROWS] * 3, steps=3, backend="aot_eager")


@pytest.mark.ranks(3, timeout=300, processes=False)
@pytest.mark.parametrize(
    ("shape", "of_mask"), often([((7, 7), Shard(0)), ((2, 1, 7, 1), ROWS), ((7, 7), None), ((2, 1, 7, 7), ROWS)], 1)
)
def test_masks(shape: tuple[int, ...], of_mask: Any) -> None:
    torch.manual_seed(0)
    q, k, v = (drawn(2, 2, 7, 4) for _ in range(3))
    mask = drawn(*shape)
    if shape[-1] == 7:
        mask[..., 2] = -float("inf")
    mask[..., 4, :] = -float("inf")
    with seen_in_a_ring():
        assert_matches_single_device(masked, [q, k, v, mask], [ROWS] * 3 + [of_mask], steps=2, backend="aot_eager")


@pytest.mark.ranks(4, mesh=(2, 2), timeout=300, processes=False)
@pytest.mark.parametrize("partition", [[ROWS, HEADS], *often([[BATCH, ROWS], [ROWS, Replicate()]], 0)], ids=str)
def test_two_mesh_dims(partition: list[Placement]) -> None:
    torch.manual_seed(0)
    q, k, v = (drawn(3, 4, 7, 4) for _ in range(3))
    with seen_in_a_ring():
        assert_matches_single_device(causal, [q, k, v], [partition] * 3, mesh=mesh(), steps=2, backend="aot_eager")


@pytest.mark.ranks(3, timeout=300, processes=False)
def test_half_precision() -> None:
    torch.manual_seed(0)
    q, k, v = (drawn(2, 2, 7, 8).bfloat16() for _ in range(3))
    assert_matches_single_device(causal, [q, k, v], [ROWS] * 3, compiled=False, rtol=0.03, atol=0.03)


@pytest.mark.ranks(3, timeout=300)
def test_on_real_ranks_through_the_backend() -> None:
    sc.config.attention = "ring"  # of the worker
    try:
        torch.manual_seed(0)
        q, k, v = (drawn(2, 2, 9, 4) for _ in range(3))
        assert_matches_single_device(causal, [q, k, v], [ROWS] * 3, steps=2, backend="shardcompile")
    finally:
        sc.config.attention = "auto"


def random_function(seed: int) -> tuple[Any, list[tuple[int, ...]], str]:
    """A function, the shapes of its inputs, and what kind of mask it has."""
    draw = random.Random(seed)
    batch, heads, group = draw.randint(1, 3), draw.randint(1, 2), draw.choice([1, 1, 2])
    rows, columns = draw.randint(1, 12), draw.randint(1, 12)
    kind = draw.choice(["plain", "causal", "mask", "bools", "same causal"])
    columns = rows if kind == "same causal" else columns
    features, of_values = draw.choice([(4, 4), (3, 3), (8, 8)])
    shapes: list[tuple[int, ...]] = [
        (batch, heads * group, rows, features),
        (batch, heads, columns, features),
        (batch, heads, columns, of_values),
    ]
    options: dict[str, Any] = {"enable_gqa": group > 1, "scale": draw.choice([None, 0.3])}
    if kind in ("mask", "bools"):
        shapes.append(draw.choice([(rows, columns), (batch, 1, rows, columns), (1, columns)]))
        return (lambda q, k, v, m: attention(q, k, v, m.detach(), **options)), shapes, kind
    return (lambda q, k, v: attention(q, k, v, is_causal="causal" in kind, **options)), shapes, kind


def random_inputs(draw: random.Random, shapes: list[tuple[int, ...]], kind: str) -> tuple[list[Tensor], list[Any]]:
    """Full values, and those on local shards of drawn sizes; a mask is sharded with the rows of the query, or whole."""

    def sizes(rows: int) -> dict[int, list[int]]:
        ends = sorted(draw.choices(range(rows + 1), k=2))
        return {0: [ends[0], ends[1] - ends[0], rows - ends[1]]}

    rows = shapes[0][2]
    of_query = sizes(rows)
    of_keys = of_query if kind == "same causal" else sizes(shapes[1][2])
    values = [drawn(*shape) for shape in shapes]
    if kind == "bools":
        values[3] = values[3] > -0.3
    dims = [2, 2, 2, *(len(shape) - 2 for shape in shapes[3:])]
    partitions = [of_query, of_keys, of_keys, *(of_query if shape[-2] == rows else None for shape in shapes[3:])]
    partition = [
        x if sizes is None else sc.distribute_tensor(x, mesh(), [Shard(dim)], sharding_shapes=sizes)
        for x, dim, sizes in zip(values, dims, partitions, strict=True)
    ]
    for x in (*values[:3], *partition[:3]):
        x.requires_grad_()
    return values, partition


def step(function: Any, values: list[Any]) -> list[Tensor]:
    """The result, and the gradients of a weighted sum of it."""
    out = function(*values)
    weights = torch.arange(out.numel(), dtype=out.dtype).view(out.shape).sin()
    if isinstance(out, sc.ShardTensor):
        weights = sc.distribute_tensor(weights, out.device_mesh, [Replicate()] * out.device_mesh.ndim)
    grads = torch.autograd.grad((out * weights).sum(), values[:3])
    return [x.full_tensor() if isinstance(x, sc.ShardTensor) else x for x in (out.detach(), *grads)]


@pytest.mark.ranks(3, timeout=900, processes=False)
@pytest.mark.parametrize(("first", "count"), often([(0, 1), *((n, 20) for n in range(0, 100, 20))], 1))
def test_random_cases(first: int, count: int) -> None:
    """Functions with five shards each, eagerly and by one graph."""
    for seed in range(first, first + count):
        torch._dynamo.reset()
        function, shapes, kind = random_function(seed)
        call = torch.compile(function, fullgraph=True, backend="aot_eager")
        before = graphs_compiled()
        for case in range(5):
            torch.manual_seed(5 * seed + case)
            values, partition = random_inputs(random.Random(f"{seed} {case}"), shapes, kind)
            wanted = step(function, values)
            for each in (function, call):
                for ours, theirs in zip(step(each, partition), wanted, strict=True):
                    torch.testing.assert_close(ours, theirs, msg=lambda text: f"seed {seed}, case {case}: {text}")  # noqa: B023
        assert graphs_compiled() - before == 1


# What moves, and when


@pytest.mark.ranks(3, processes=False)
def test_a_rank_gets_the_shards_before_its_own_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, received = [3, 1, 4], []
    exchange = transport.exchange

    def noted(call: Any, sends: Any, receives: Any) -> Any:
        received.extend((call.group.rank(), peer, t.numel()) for peer, t in receives if t.numel())
        return exchange(call, sends, receives)

    monkeypatch.setattr(transport, "exchange", noted)
    rank = mesh().get_local_rank()
    q, k, v = (sc.ShardTensor.from_local(drawn(1, 2, sizes[rank], 4), mesh(), [ROWS], {0: sizes}) for _ in range(3))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        nnf.scaled_dot_product_attention(q, k, v, is_causal=True)
    width = 2 * 4  # of two heads
    mine = [(peer, n) for r, peer, n in received if r == rank]
    assert sorted(mine) == [(peer, sizes[peer] * width) for peer in range(rank) for _ in ("keys", "values")]


class Held:
    """Counts bytes of fetched shards that exist at once, each as long as any view of it does."""

    def __init__(self) -> None:
        self.most = 0
        self._alive: list[tuple[StorageWeakRef, int]] = []
        self._step = of_ring._step

    def step(self, a: Any, of: Any, *, back: bool) -> Tensor:
        out = self._step(a, of, back=back)
        if not back:
            storage = out.untyped_storage()
            self._alive = [(ref, n) for ref, n in self._alive if not ref.expired()]
            self._alive.append((StorageWeakRef(storage), storage.nbytes()))
            self.most = max(self.most, sum(n for _, n in self._alive))
        return out


@pytest.mark.ranks(4, timeout=300)  # messages between threads are kept for longer than those of gloo
@pytest.mark.parametrize(("rows", "backend"), often([(512, None), (512, "aot_eager"), (16384, None)], 1))
def test_two_shards_of_others_exist_at_once(rows: int, backend: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held()
    monkeypatch.setattr(of_ring, "_step", held.step)
    monkeypatch.setattr(sc.config, "attention", "ring")  # of the worker
    sizes = [rows // 4 - 7, rows // 4 + 7, rows // 2, 0]
    q, k, v = (
        sc.distribute_tensor(torch.randn(1, rows, 2, 16), mesh(), [Shard(1)], sharding_shapes={0: sizes})
        .transpose(1, 2)
        .requires_grad_()
        for _ in range(3)
    )

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nnf.scaled_dot_product_attention(q, k, v)

    call = torch.compile(function, fullgraph=True, backend=backend) if backend else function
    out = call(q, k, v)
    torch.autograd.grad(out.sum(), [q, k, v])
    of_a_row = 2 * 2 * 16 * 4
    largest = sorted(sizes)[-2:]
    assert held.most <= sum(largest) * of_a_row
    assert held.most >= largest[-1] * of_a_row or mesh().get_local_rank() == 2  # which has the largest one itself


def rows_in_shards(mesh: DeviceMesh) -> tuple[Any, tuple[Tensor, ...]]:
    sizes = [600 + 64 * (rank % 3) for rank in range(mesh.size())]
    shapes = [(1, heads, sizes[mesh.get_local_rank()], 64) for heads in (8, 2, 2)]
    shards = [torch.randn(*shape, dtype=torch.bfloat16) for shape in shapes]
    return grouped, tuple(sc.ShardTensor.from_local(b, mesh, [ROWS], {0: sizes}).requires_grad_() for b in shards)


def most_shards_at_once(graph: torch.fx.Graph) -> int:
    """How many fetched shards are held at once, at most: each from its start to the last that reads it or its views."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    fetch = torch.ops.shardcompile.fetch_shard.default

    def last(node: torch.fx.Node) -> int:
        views = [u for u in node.users if _shares(u)]
        return max([order[u] for u in node.users] + [last(u) for u in views], default=order[node])

    spans = [(order[n], last(n)) for n in graph.nodes if n.target is fetch]
    return max(sum(a <= i <= b for a, b in spans) for i in range(len(order)))


def _shares(node: torch.fx.Node) -> bool:
    # A wait whose place in the order is held is a call of a graph of its own.
    held = node.args[1] if "control_deps" in str(node.target) else node
    names = (
        "wait_tensor",
        "split_with_sizes",
        "getitem",
        "reshape",
        "view",
        "permute",
        "slice",
        "transpose",
        "alias",
        "as_strided",
    )
    return any(n in str(held.target) for n in names)  # type: ignore[union-attr]


def test_no_more_than_two_shards_of_others_are_held() -> None:
    trace = trace_offline(rows_in_shards, world_size=6, device="cpu")
    assert trace.backward is not None
    kinds = [c.kind for c in trace.forward_collectives], sorted(c.kind for c in trace.backward_collectives)
    assert kinds == (["fetch_shard"] * 5, ["fetch_shard"] * 5 + ["return_shard"] * 5)
    assert most_shards_at_once(trace.forward.graph) == 2
    assert most_shards_at_once(trace.backward.graph) == 2


def test_nonsense_is_refused_and_caches_are_told() -> None:
    tag = torch.compiler.config.cache_key_tag
    with pytest.raises(ValueError, match="'auto', 'ring', 'gather', 'heads'"):
        sc.config.attention = "circle"  # type: ignore[assignment]
    sc.config.attention = "auto"
    assert torch.compiler.config.cache_key_tag != tag
    sc.config.attention = "ring"
    assert torch.compiler.config.cache_key_tag == tag
    with ThreadPoolExecutor(1) as thread:  # settings of torch hold in the thread that sets them
        assert thread.submit(lambda: torch.compiler.config.cache_key_tag).result() == tag
