"""Costs: formulas against numbers worked out by hand, and the same on every rank whatever its shard is."""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from shardcompile import machines
from shardcompile.collectives.traffic import GroupShards, shares
from shardcompile.machines import CPU_CORE, H100, Device, Link
from shardcompile.passes.cost import operations
from shardcompile.passes.cost.model import NOMINAL_BYTES, CostModel, GraphCosts
from shardcompile.passes.graph.collective import WAIT, Collective, add_node
from shardcompile.passes.plan import key_of
from shardcompile.passes.schedule.bounds import lower_bound
from shardcompile.passes.schedule.simulator import simulate
from shardcompile.sharding import GroupPartition
from shardcompile.sharding.sizes import key_of as key_of_sizes
from tests.support.lockstep import world_of

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
ours = torch.ops.shardcompile

PORTS = Link("a second for a byte", launch=0.0, hop=0.0, bandwidth=1.0)
SHARED = Link("the same, shared", launch=0.0, hop=0.0, bandwidth=1.0, medium="shared")
LATENT = Link("latency only", launch=10.0, hop=1.0, bandwidth=math.inf)
GROUPS = {"g": 3, "h": 2, "one": 1}


def model(link: Link = PORTS, device: Device = H100, groups: Mapping[str, int] = GROUPS) -> CostModel:
    return CostModel(device, group_sizes=groups, group_links=dict.fromkeys([*groups, "unknown"], link))


class Builder:
    """Writes a graph of bytes: the sizes of a tensor are what it holds and moves."""

    def __init__(self, dtype: torch.dtype = torch.uint8) -> None:
        self.graph = Graph()
        self.mode = FakeTensorMode(shape_env=ShapeEnv())
        self.dtype = dtype

    def input(self, *shape: int, dynamic: Sequence[int] = ()) -> Node:
        node = self.graph.placeholder(f"x{len(self.graph.nodes)}")
        if dynamic:
            real = torch.empty(shape, dtype=self.dtype)
            torch._dynamo.maybe_mark_dynamic(real, list(dynamic))
            node.meta["val"] = self.mode.from_tensor(real, static_shapes=False)
        else:
            with self.mode:
                node.meta["val"] = torch.empty(shape, dtype=self.dtype)
        return node

    def call(self, target: Any, *args: Any) -> Node:
        return add_node(self.graph, target, *args)

    def wait(self, target: Any, *args: Any) -> Node:
        return self.call(WAIT, self.call(target, *args))

    def output(self, *nodes: Node) -> Graph:
        self.graph.output(nodes)
        self.graph.lint()
        return self.graph


def partition(sizes: Sequence[int]) -> tuple[list[int], int, list[int]]:
    return list(sizes), 0, []


def seconds(make: Any, link: Link) -> float:
    b = Builder()
    c = Collective.of(make(b))
    assert c is not None
    return model(link).collective_seconds(c)


SIZES = [6, 0, 2]
RING = 160 / 3 + (60 - 80 / 3)
"""Of 80 bytes in three parts, of which the first rank holds 60."""

COLLECTIVES = {
    # What: (how, seconds where every rank has its own link, where all share one), a second for a byte.
    "gather of 3 x 8": (lambda b: b.call(c10d.all_gather_into_tensor.default, b.input(8), 3, "g"), 16, 16),
    "reduce-scatter of 24": (lambda b: b.call(c10d.reduce_scatter_tensor.default, b.input(24), "sum", 3, "g"), 16, 16),
    "reduction of 24": (lambda b: b.call(c10d.all_reduce.default, b.input(24), "sum", "g"), 32, 32),
    "two reductions": (lambda b: b.call(c10d.all_reduce_coalesced.default, [b.input(20), b.input(4)], "sum", "g"), 32, 32),
    "exchange of 24": (lambda b: b.call(c10d.all_to_all_single.default, b.input(24), [], [], "g"), 16, 16),
    "broadcast of 24": (lambda b: b.call(c10d.broadcast.default, b.input(24), 0, "g"), 24, 16),
    # The owner of 6 x 10 sends them twice; all in all each of 80 bytes is sent twice, over 3 ranks.
    "uneven gather": (lambda b: b.call(ours.all_gather_v.default, b.input(6, 10), 0, 8, *partition(SIZES), "g"), RING, 160 / 3),
    "uneven scatter": (
        lambda b: b.call(ours.reduce_scatter_v.default, b.input(8, 10), 0, 6, "sum", *partition(SIZES), "g"), RING, 160 / 3
    ),
    # Rank 0 holds 6 of 8 rows and keeps 1 of 8 columns; rank 1 gets 3 columns and holds no row of them.
    "turn": (
        lambda b: b.call(ours.all_to_all_v.default, b.input(6, 8), 0, 1, 8, 1, *partition(SIZES), *partition([1, 3, 4]), "g"),
        6 * 7,
        (6 * 7 + 2 * 4) / 3,
    ),
    # Rows 0-5 | - | 6-7 become 0-1 | 2-5 | 6-7: rank 1 takes four of rank 0's.
    "new partition": (
        lambda b: b.call(ours.fetch_ranges.default, b.input(6, 10), 0, 8, 2, *partition(SIZES), *partition([2, 4, 2]), [], None, "g"),
        40,
        40 / 3,
    ),
    # A row from either neighbour: rank 1 takes two and gives two.
    "halo": (
        lambda b: b.call(ours.fetch_ranges.default, b.input(3, 10), 0, 9, 4, *partition([3, 3, 3]), *partition([3, 3, 3]), [9, 1, 1, 1, 1], None, "g"),
        20,
        40 / 3,
    ),
    "halo back": (
        lambda b: b.call(ours.return_ranges.default, b.input(4, 10), 0, 9, 3, *partition([3, 3, 3]), *partition([3, 3, 3]), [9, 1, 1, 1, 1], None, "g"),
        20,
        40 / 3,
    ),
    # Rows 7,0-4 | - | 5,6: one row of each of the two shards is the other's.
    "roll": (lambda b: b.call(ours.fetch_around.default, b.input(6, 10), 0, 1, -1, 8, 6, *partition(SIZES), "g"), 10, 20 / 3),
    # A row from either neighbour, also over the ends.
    "halo around": (
        lambda b: b.call(ours.fetch_around.default, b.input(3, 10), 0, 1, 1, 9, 5, *partition([3, 3, 3]), "g"), 20, 60 / 3
    ),
    "halo around back": (
        lambda b: b.call(ours.return_around.default, b.input(5, 10), 0, 1, 1, 9, 3, *partition([3, 3, 3]), "g"), 20, 60 / 3
    ),
    "chunk partition": (lambda b: b.call(ours.all_gather_v.default, b.input(3, 10), 0, 8, [], 0, [], "g"), 60, 160 / 3),
    "alone": (lambda b: b.call(c10d.all_reduce.default, b.input(24), "sum", "one"), 0, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", COLLECTIVES)
def test_what_collectives_move(name: str) -> None:
    make, ports, shared = COLLECTIVES[name]
    copies = 1e-6  # of single bytes: nothing
    assert seconds(make, PORTS) == pytest.approx(ports, abs=copies)
    assert seconds(make, SHARED) == pytest.approx(shared, abs=copies)


def test_a_bucket_moves_what_its_members_hold_and_costs_one_latency_and_copies() -> None:
    b = Builder()
    x, y = b.input(6, 10), b.input(1, 5)
    bucket = b.call(
        ours.all_gather_bucket.default, [x, y], [0, 0], [8, 4], [6, 0, 2, 1, 3, 0], [0, 0], [], [3, 0, 3, 0], "g"
    )
    c = Collective.of(bucket)
    assert c is not None
    assert model(SHARED).collective_seconds(c) == pytest.approx(2 * (80 + 20) / 3, abs=1e-6)
    assert model(PORTS).collective_seconds(c) == pytest.approx(2 / 3 * 100 + (60 + 5) - 100 / 3, abs=1e-6)
    copied = 2 * (100 + 65) / (H100.memory * H100.share)
    assert model(LATENT).collective_seconds(c) == pytest.approx(10 + math.log2(3) + copied)


def test_latency_grows_with_the_group() -> None:
    assert LATENT.seconds(100, 2) == 11
    assert LATENT.seconds(100, 8) == 13
    assert LATENT.seconds(100, 1) == 0


def test_what_one_thread_does_besides_holds_up_its_compute() -> None:
    """Starting collectives, moving bytes on the same cores, functions that take long, and the call of the graph."""
    link = Link("by the cores that compute", launch=10.0, hop=0.0, bandwidth=2.0, medium="shared", host=3.0, busy=0.25)
    device = replace(CPU_CORE, kernel=0.0, memory=math.inf, element=0.5, call=7.0)
    b = Builder(torch.float32)
    x = b.input(6)
    waited = b.wait(c10d.all_reduce.default, x, "sum", "h")
    (started,) = waited.all_input_nodes
    graph = b.output(b.call(aten.exp.default, waited), b.call(aten.neg.default, waited))
    prices = GraphCosts.of(graph, model(link, device))
    transfer = 24 / 2.0
    assert prices.packing[started] == pytest.approx(3 + transfer / 4)
    assert prices.latency[started] == pytest.approx(10 - 3)
    assert prices.seconds[started] == pytest.approx(7 + 3 * transfer / 4)
    exp, neg = (n for n in graph.nodes if n.target in (aten.exp.default, aten.neg.default))
    assert prices.seconds[exp] == pytest.approx(6 * 0.5)
    assert prices.seconds[neg] == 0
    timeline = simulate(list(graph.nodes), prices)
    assert timeline.total == lower_bound(graph, prices) == pytest.approx(7 + 10 + transfer + 3)
    assert timeline.exposed == pytest.approx(7 + 3 * transfer / 4)


def test_a_core_computes_and_moves_in_turns_and_a_gpu_side_by_side() -> None:
    core = replace(CPU_CORE, kernel=1.0, memory=2.0, share=1.0, flops={torch.float32: 4.0})
    assert core.compute_seconds(12, 10, torch.float32) == 1 + 12 / 4 + 10 / 2
    assert replace(core, kind="cuda").compute_seconds(12, 10, torch.float32) == 1 + max(12 / 4, 10 / 2)


def test_masks_that_loops_store_and_read_cost_extra() -> None:
    device = replace(CPU_CORE, kernel=0.0, memory=math.inf, mask=0.5)
    b = Builder(torch.float32)
    x, g = b.input(6), b.input(6)
    stored = b.call(aten.le.Scalar, x, 0)
    product = b.call(aten.mm.default, b.call(aten.view.default, stored, [2, 3]), b.input(3, 2))
    read = b.call(aten.where.self, b.call(aten.flip.default, stored, [0]), x, g)
    within = b.call(aten.where.self, b.call(aten.gt.Scalar, g, 0), x, g)
    graph = b.output(product, read, within)
    seconds = GraphCosts.of(graph, model(LATENT, device)).seconds
    named = {n.target: n for n in graph.nodes}
    assert seconds[stored] == seconds[read] == pytest.approx(6 * 0.5)
    assert seconds[within] == seconds[named[aten.gt.Scalar]] == 0


def test_links_follow_from_what_all_ranks_share() -> None:
    assert machines.link_of(H100, 8) is machines.NVLINK4
    assert machines.link_of(H100, 9) is machines.INFINIBAND_NDR
    assert machines.link_of(H100, 8, ranks_per_node=4) is machines.INFINIBAND_NDR
    assert machines.link_of(machines.device_of("cpu"), 4) is machines.GLOO_LOOPBACK
    assert machines.device_of("cuda") is H100
    assert all(d.flops[torch.float32] > 0 for d in machines.DEVICES.values())


def test_the_settings_of_a_model_are_in_its_repr() -> None:
    reprs = {repr(model(link, device)) for link in (PORTS, SHARED) for device in (H100, CPU_CORE)}
    assert len(reprs) == 4
    assert repr(model()) in reprs


def test_products_cost_their_operations_and_copies_their_bytes() -> None:
    b = Builder(torch.bfloat16)
    x, w = b.input(4096, 8192), b.input(8192, 2048)
    product = b.call(aten.mm.default, x, w)
    copied = b.call(aten.clone.default, product)
    table = b.call(aten.cat.default, [copied, copied])
    graph = b.output(table)
    prices = GraphCosts.of(graph, model())
    flops = 2 * 4096 * 8192 * 2048 / 989e12 / 0.7
    assert prices.seconds[product] == pytest.approx(flops + H100.kernel)
    nbytes = 4096 * 2048 * 2
    assert prices.seconds[table] == pytest.approx((nbytes + 2 * nbytes) / 3.35e12 / 0.7 + H100.kernel)
    assert [prices.seconds[n] for n in (x, w)] == [0, 0]
    assert [prices.nbytes[n] for n in (x, product, table)] == [4096 * 8192 * 2, nbytes, 2 * nbytes]


@pytest.mark.parametrize("name", ["convolution", "experts", "attention", "attention on the CPU"])
def test_operations_of_other_products(name: str) -> None:
    b = Builder(torch.float32)
    if name == "convolution":
        x, w = b.input(2, 3, 8, 8), b.input(5, 3, 3, 3)
        node = b.call(aten.convolution.default, x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        flops = 2 * (2 * 5 * 8 * 8) * (3 * 3 * 3)
    elif name == "experts":
        b.dtype = torch.bfloat16
        rows, weights, ends = b.input(32, 16), b.input(4, 16, 8), b.input(4)
        ends.meta["val"] = ends.meta["val"].int()
        node = b.call(aten._grouped_mm.default, rows, weights, ends)
        flops = 2 * 32 * 16 * 8
    else:
        q = b.input(2, 4, 16, 8)
        cpu = aten._scaled_dot_product_flash_attention_for_cpu.default
        op = cpu if "CPU" in name else aten._scaled_dot_product_efficient_attention.default
        node = b.graph.call_function(op, (q, q, q, *([None, False] if "CPU" not in name else [])))
        node.meta["val"] = (q.meta["val"],)
        flops = 2 * 2 * (2 * 4) * 16 * 16 * 8
    assert operations.flops_of(node) == flops


def test_an_op_whose_operations_cannot_be_counted_costs_its_bytes(caplog: pytest.LogCaptureFixture) -> None:
    b = Builder()
    x = b.input(8)
    odd = b.graph.call_function(aten.mm.default, (x,))  # no such call, as another version of an op could have it
    odd.meta["val"] = x.meta["val"]
    with caplog.at_level(logging.WARNING, logger="shardcompile"):
        assert operations.flops_of(odd) == 0
    assert "cannot be counted" in caplog.text


def test_what_passes_between_fused_ops_is_free() -> None:
    b = Builder(torch.float32)
    x = b.input(1 << 20)
    first = b.call(aten.exp.default, x)
    second = b.call(aten.neg.default, b.call(aten.view.default, first, [1 << 10, 1 << 10]))
    graph = b.output(second)
    prices = GraphCosts.of(graph, model())
    one_pass = (1 << 22) / 3.35e12 / 0.7
    assert prices.seconds[first] == pytest.approx(one_pass)  # reads x
    assert prices.seconds[second] == pytest.approx(one_pass + H100.kernel)  # writes its result


def test_views_and_waits_hold_what_another_node_allocated() -> None:
    b = Builder()
    x = b.input(6, 4)
    start = b.call(c10d.all_reduce.default, x, "sum", "g")
    wait = b.call(WAIT, start)
    parts = b.call(aten.split_with_sizes.default, wait, [2, 4], 0)
    part = b.call(operator.getitem, parts, 1)
    slept = b.call(aten.transpose.int, part, 0, 1)
    written = b.call(aten.add_.Tensor, slept, 1)
    coalesced = b.call(c10d.all_reduce_coalesced.default, [x, x], "sum", "g")
    member = b.call(WAIT, b.call(operator.getitem, coalesced, 0))
    own = b.call(aten.clone.default, part)
    prices = GraphCosts.of(b.output(own, written, member), model())
    for node in (wait, parts, part, slept, written):
        assert prices.storage[node] is start
        assert prices.nbytes[node] == 0
    assert prices.storage[member] is coalesced
    assert (prices.nbytes[coalesced], prices.nbytes[own], prices.storage[own]) == (48, 16, own)
    assert prices.seconds[written] > 0
    assert [prices.seconds[n] for n in (wait, parts, part, slept)] == [0] * 4
    assert prices.awaits == {wait: start, member: coalesced}
    assert prices.group == {start: "g", coalesced: "g"}


def test_symbols_are_priced_by_their_hints_and_get_no_guards() -> None:
    b = Builder()
    x = b.input(50, 10, dynamic=[0])
    start = b.call(c10d.all_reduce.default, x, "sum", "g")
    graph = b.output(b.call(WAIT, start))
    guards = len(b.mode.shape_env.guards)
    prices = GraphCosts.of(graph, model())
    assert prices.seconds[start] == 2 * 2 / 3 * 500
    assert prices.nbytes[x] == 500
    assert len(b.mode.shape_env.guards) == guards


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.message for r in caplog.records if r.name == "shardcompile"]


def test_sizes_without_a_hint_get_a_default_and_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    b = Builder()
    x = b.input(8)
    size = b.mode.shape_env.create_unbacked_symint()
    torch._check(size >= 0)
    with b.mode:
        x.meta["val"] = torch.empty((size,), dtype=torch.uint8)
    start = b.call(c10d.all_reduce.default, x, "sum", "g")
    graph = b.output(b.call(WAIT, start))
    operations.say_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="shardcompile"):
        assert [GraphCosts.of(graph, model()).seconds[start] for _ in range(2)] == [2 * 2 / 3 * 64] * 2
    assert ["unbacked sizes" in text for text in said(caplog)] == [True]


def test_the_default_model_goes_by_the_kind_of_device() -> None:
    b = Builder()
    assert CostModel.of(b.output(b.wait(c10d.all_reduce.default, b.input(8), "sum", "g"))).device is CPU_CORE
    b = Builder()
    x = b.graph.placeholder("x")
    with b.mode:
        x.meta["val"] = torch.empty(8, device="cuda")
    start = b.graph.call_function(c10d.all_reduce.default, (x, "sum", "g"))
    assert CostModel.of(b.output(start)).device is H100


def test_what_has_no_price_gets_a_default_and_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    b = Builder()
    x = b.input(8)
    graph = b.output(
        b.wait(c10d.all_reduce.default, x, "sum", "unknown"), b.wait(c10d.all_reduce.default, x, "max", "unknown")
    )
    operations.say_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="shardcompile"):
        prices = [GraphCosts.of(graph, model()) for _ in range(2)]
    starts = list(prices[0].group)
    assert [prices[0].seconds[s] for s in starts] == [NOMINAL_BYTES] * 2
    assert ["all_reduce over group unknown" in text for text in said(caplog)] == [True]


# The same on every rank.


def step(sizes: Sequence[int], columns: Sequence[int], rank: int) -> Graph:
    """What a rank traces of a program with fixed partitions: the numbers are those of its local shards."""
    b = Builder(torch.float32)
    n, mine, total = len(sizes), sizes[rank], sum(sizes)
    width = sum(columns)
    x, w, weight = b.input(mine, width), b.input(width, width), b.input(mine, width)
    # A weight that is gathered, used and gets a gradient.
    whole = b.call(
        aten.view.default, b.wait(ours.all_gather_v.default, weight, 0, total, *partition(sizes), "g"), [total, width]
    )
    hidden = b.call(aten.relu.default, b.call(aten.mm.default, x, w))
    y = b.call(aten.mm.default, hidden, b.call(aten.t.default, whole))
    grad = b.call(aten.mm.default, b.call(aten.t.default, y), hidden)
    flat = b.wait(ours.reduce_scatter_v.default, grad, 0, mine, "sum", *partition(sizes), "g")
    new = b.call(aten.sub.Tensor, weight, b.call(aten.view.default, flat, [mine, width]))
    # Shards that are sharded anew, turned, exchanged, and gathered in a bucket.
    moved = b.wait(
        ours.fetch_ranges.default,
        hidden,
        0,
        total,
        sizes[-1 - rank],
        *partition(sizes),
        *partition(sizes[::-1]),
        [],
        None,
        "g",
    )
    turned = b.wait(
        ours.all_to_all_v.default, hidden, 0, 1, total, columns[rank], *partition(sizes), *partition(columns), "g"
    )
    outer = [7 * (rank + 1)] * n
    exchanged = b.wait(c10d.all_to_all_single.default, b.input(sum(outer)), outer, outer, "g")
    both = b.wait(
        ours.all_gather_bucket.default,
        [new, hidden],
        [0, 0],
        [total, total],
        [*sizes] * 2,
        [0, 0],
        [],
        [n, 0, n, 0],
        "g",
    )
    own = b.call(ours.take_shard.default, whole, 0, mine, *partition(sizes), "g")
    placed = b.call(ours.place_shard.default, own, 0, total, *partition(sizes), "g")
    mirrored = b.wait(ours.reflect_shards.default, own, 0, sizes[-1 - rank], "g")
    loss = b.wait(c10d.all_reduce.default, b.call(aten.sum.default, y), "sum", "g")
    return b.output(new, moved, turned, exchanged, both, placed, mirrored, loss)  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 40), min_size=3, max_size=3).filter(lambda s: len(set(s)) > 1),
    st.lists(st.integers(1, 40), min_size=3, max_size=3),
)
def test_the_graphs_of_all_ranks_have_one_key(sizes: list[int], columns: list[int]) -> None:
    with world_of(3):
        graphs = [step(sizes, columns, rank) for rank in range(3)]
        assert len({key_of(g) for g in graphs}) == 1
        other = step([*sizes[:2], sizes[2] + 1], columns, 0)
        assert key_of(graphs[0]) != key_of(other)  # another partition


def test_shards_of_a_known_partition_count_as_the_largest_of_them() -> None:
    b = Builder()
    x = b.input(1, 10)
    start = b.call(ours.all_gather_v.default, x, 0, 12, *partition([1, 8, 3]), "g")
    scattered = b.call(ours.reduce_scatter_v.default, b.input(12, 10), 0, 1, "sum", *partition([1, 8, 3]), "g")
    other = b.call(aten.neg.default, x)
    prices = GraphCosts.of(b.output(start, b.call(WAIT, scattered), other), model())
    assert [prices.nbytes[n] for n in (x, start, scattered)] == [80, 120, 80]
    assert prices.nbytes[other] == 10


@pytest.mark.parametrize(
    ("ranks", "world", "spread"),
    [
        (range(8), 64, False),
        (range(0, 64, 8), 64, True),  # eight ranks on eight nodes
        (range(2, 8, 4), 64, False),
        (range(16), 64, True),
        (range(3), 6, False),  # all in one node
        (range(3), 9, True),  # another group along the same mesh dim crosses the border
        ([0, 1, 3], 64, True),
        ([5], 64, False),
    ],
)
def test_whether_a_group_is_in_one_node_is_told_by_its_ranks(ranks: list[int], world: int, spread: bool) -> None:
    assert machines.spans_nodes(list(ranks), world) is spread


def test_shards_are_numbers_where_their_scale_is_a_symbol() -> None:
    """Segments of a size that is a symbol, in a static partition: each rank's fraction is known."""
    rows = Builder().input(6, 4, dynamic=[0]).meta["val"].shape[0]
    key = key_of_sizes((2, 0, 1), [3])
    partition = GroupPartition([], key, [1, 0, rows])
    found = GroupShards.of(partition, 3 * rows, 3)
    assert found.sizes is not None and all(type(n) is int for n in found.sizes)
    assert shares(found, 3) == [2 / 3, 0.0, 1 / 3]
