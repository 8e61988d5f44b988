"""Graph passes on graphs that are written down or drawn at random: same values, valid order, fewer collectives."""

from __future__ import annotations

import itertools
import operator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Interpreter, Node

import shardcompile.passes as passes
from shardcompile.collectives.buckets import bucket_dtype
from shardcompile.errors import PassError
from shardcompile.passes.bucket import buckets as bucket
from shardcompile.passes.bucket import choice
from shardcompile.passes.graph.collective import WAIT, collectives
from shardcompile.passes.graph.dependencies import Closure
from shardcompile.passes.schedule.control_dependencies import control_dependencies
from tests.support import lockstep
from tests.support.lockstep import ALL_REDUCE

aten = torch.ops.aten


class Builder(lockstep.Builder):
    """Writes a graph of reductions."""

    def reduced(self, x: Node, op: str = "sum", group: str = "g") -> Node:
        return self.done(ALL_REDUCE, x, op, group)


class OneRankOfMany(Interpreter):
    """Runs a graph where the other ranks' terms are a known function of this rank's."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is ALL_REDUCE:
            return args[0] * {"sum": 3, "max": 5}[args[1]] + len(args[2])
        return args[0] if target is WAIT else super().call_function(target, args, kwargs)


def run(graph: Graph, *inputs: Tensor) -> Any:
    return OneRankOfMany(GraphModule(torch.nn.Module(), graph)).run(*[x.clone() for x in inputs])


def reductions(graph: Graph) -> int:
    return len(collectives(graph))


def bucketed(graph: Graph, kind: type[bucket.Bucketing] = passes.BucketAllReduces, **options: Any) -> Graph:
    """Put into all buckets that are legal, whether or not the graph gets faster by them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "score", lambda outline, plan, limit: (False, 0.0))
        kind(**options)(graph)
    graph.lint()
    return graph


def test_independent_reductions_become_one_and_keep_their_values() -> None:
    b = Builder()
    x, y, z = b.input(4), b.input(), b.input(0)
    graph = b.output(b.reduced(x), b.reduced(b.call(aten.neg.default, y)), b.reduced(z))
    inputs = [torch.randn(4).double(), torch.tensor(2.0).double(), torch.empty(0).double()]
    before = run(graph, *inputs)
    assert reductions(graph) == 3
    bucketed(graph)
    assert reductions(graph) == 1
    after = run(graph, *inputs)
    assert [a.shape for a in after] == [a.shape for a in before]
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_a_result_that_is_awaited_twice_shares_a_bucket_as_well() -> None:
    b = Builder()
    x, y = b.input(3), b.input(3)
    start = b.call(ALL_REDUCE, x, "sum", "g")
    graph = b.output(b.call(WAIT, start), b.reduced(y), b.call(WAIT, start))
    values = [torch.randn(3).double(), torch.randn(3).double()]
    before = run(graph, *values)
    assert reductions(bucketed(graph)) == 1
    torch.testing.assert_close(run(graph, *values), before, rtol=0, atol=0)


def test_a_reduction_of_a_reduction_stays_behind_it() -> None:
    b = Builder()
    first = b.reduced(b.input(3))
    graph = b.output(b.reduced(b.call(aten.exp.default, first)))
    assert reductions(bucketed(graph)) == 2


@pytest.mark.parametrize(
    ("dtype", "op", "group"), [(torch.float32, "sum", "g"), (torch.float64, "max", "g"), (torch.float64, "sum", "h")]
)
def test_only_equals_share_a_bucket(dtype: torch.dtype, op: str, group: str) -> None:
    b = Builder()
    x, y = b.input(3), b.input(3, dtype=dtype)
    assert reductions(bucketed(b.output(b.reduced(x), b.reduced(y, op, group)))) == 2


def test_a_bucket_is_full_at_its_cap() -> None:
    b = Builder()
    inputs = [b.input(4) for _ in range(5)]  # 32 B each
    graph = b.output(*[b.reduced(x) for x in inputs])
    assert reductions(bucketed(graph, bucket_bytes=64)) == 3


def test_a_bucket_may_not_close_a_circle_with_another() -> None:
    b = Builder()
    x, y = b.input(3), b.input(3)
    a1, b1 = b.reduced(x, group="a"), b.reduced(y, group="b")
    a2, b2 = b.reduced(b1, group="a"), b.reduced(a1, group="b")
    values = [torch.randn(3).double(), torch.randn(3).double()]
    graph = b.output(a1, a2, b1, b2)
    before = run(graph, *values)
    assert reductions(bucketed(graph)) == 3  # either group may have a bucket, not both
    torch.testing.assert_close(run(graph, *values), before, rtol=0, atol=0)


def test_an_early_reader_moves_behind_the_bucket_and_writes_keep_their_place() -> None:
    b = Builder()
    x, y = b.input(3), b.input(3)
    early = b.call(aten.mul.Tensor, b.reduced(x), 2.0)
    read = b.call(aten.add.Tensor, y, 1.0)
    written = b.call(aten.copy_.default, y, read)
    late = b.reduced(b.call(aten.add.Tensor, y, 5.0))
    values = [torch.randn(3).double(), torch.randn(3).double()]
    graph = b.output(early, written, late)
    before = run(graph, *values)
    # A write between two reductions is a barrier: the second may not start before, the first's reader not after.
    assert reductions(bucketed(graph)) == 2
    torch.testing.assert_close(run(graph, *values), before, rtol=0, atol=0)


def test_random_ops_keep_their_order() -> None:
    b = Builder()
    x, y = b.input(3), b.input(3)
    first = b.call(aten.bernoulli.p, b.reduced(x), 0.5)
    second = b.call(aten.bernoulli.p, y, 0.5)
    graph = bucketed(b.output(first, second, b.reduced(y)))
    assert reductions(graph) == 1
    order = list(graph.nodes)
    assert order.index(first) < order.index(second)


def test_inductor_is_told_the_order_of_random_ops() -> None:
    b = Builder()
    x, seed = b.input(4), b.input(1, dtype=torch.int64)
    first, second, third = (b.call(aten.rand_like.default, x) for _ in range(3))
    fused = b.call(torch.ops.prims.inductor_random.default, [4], seed, "rand")
    graph = b.output(b.call(aten.add.Tensor, third, first), second, fused)
    assert control_dependencies(graph) == {second: [first], third: [second]}


def _gathered_as_bytes(calls: list[Any]) -> list[Tensor]:
    """What each rank gets of a bucket of gathers: the members one after the other, of whatever dtypes, as one dtype."""
    inputs = [call.inputs for call in calls]
    dtype = bucket_dtype([x.dtype for x in inputs[0]])
    return [torch.cat([torch.cat(shards).view(-1).view(dtype) for shards in zip(*inputs, strict=True)])] * len(calls)


@pytest.mark.parametrize("dtypes", list(itertools.permutations([torch.float32, torch.float64, torch.bool])), ids=str)
def test_gathers_of_several_dtypes_each_get_their_own_part(
    dtypes: tuple[torch.dtype, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whatever order they come: within the bucket they lie in order of the size of their elements."""
    monkeypatch.setattr(lockstep, "_PLAYED", lockstep._PLAYED | {"all_gather_bucket": _gathered_as_bytes})
    monkeypatch.setattr(lockstep, "signature", lambda node: f"{node.target} {node.args[-1]}")

    def written() -> Graph:
        b = Builder()
        return b.output(*[b.done(lockstep.ALL_GATHER, b.input(3, dtype=dtype), 2, "g") for dtype in dtypes])

    plain, changed = [written(), written()], [written(), written()]
    inputs = [[torch.tensor([i, 1 - i, rank]).to(d) for i, d in enumerate(dtypes)] for rank in range(2)]
    with lockstep.world_of(2) as world:
        before = lockstep.play(world, plain, inputs)
        for _ in world.each():
            bucketed(changed[world.here], passes.BucketAllGathers)
        assert [reductions(graph) for graph in changed] == [1, 1]
        after = lockstep.play(world, changed, inputs)
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_dependencies_reach_through_other_nodes() -> None:
    b = Builder()
    x, y = b.input(3), b.input(3)
    doubled = b.call(aten.mul.Tensor, x, 2.0)
    last = b.call(aten.neg.default, doubled)
    dependencies = Closure(b.output(last), [x, y, last])
    assert dependencies.needs(last, x)
    assert not dependencies.needs(last, y)
    assert not dependencies.needs(x, last)


@st.composite
def graphs(draw: st.DrawFn) -> tuple[Graph, int]:
    b = Builder()
    nodes = [b.input(2) for _ in range(3)]
    for _ in range(draw(st.integers(1, 14))):
        x = draw(st.sampled_from(nodes))
        kind = draw(st.sampled_from(["add", "reduce", "reduce", "write", "neg"]))
        if kind == "add":
            nodes.append(b.call(aten.add.Tensor, x, draw(st.sampled_from(nodes))))
        elif kind == "reduce":
            op, group = draw(st.sampled_from(["sum", "max"])), draw(st.sampled_from(["g", "hh"]))
            nodes.append(b.reduced(x, op, group))
        elif kind == "write":
            nodes.append(b.call(aten.copy_.default, nodes[0], x))
        else:
            nodes.append(b.call(aten.neg.default, x))
    return b.output(*nodes), draw(st.sampled_from([16, 48, 1 << 20]))


@settings(max_examples=150, deadline=None)
@given(graphs())
def test_any_graph_keeps_its_values(drawn: tuple[Graph, int]) -> None:
    graph, cap = drawn
    inputs = [torch.arange(2.0).double() + i for i in range(3)]
    count, before = reductions(graph), [x.clone() for x in run(graph, *inputs)]
    bucketed(graph, bucket_bytes=cap)
    assert reductions(graph) <= count
    assert all(c.nbytes <= max(cap, 16) for c in collectives(graph))
    torch.testing.assert_close([x.clone() for x in run(graph, *inputs)], before, rtol=0, atol=0)


def test_symbolic_sizes_are_handed_to_the_split() -> None:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    b = Builder()
    b.mode = FakeTensorMode(shape_env=ShapeEnv())
    x = b.graph.placeholder("x")
    x.meta["val"] = b.mode.from_tensor(torch.empty(7), static_shapes=False)
    graph = bucketed(b.output(b.reduced(x), b.reduced(b.call(aten.neg.default, x))))
    assert reductions(graph) == 1
    values = torch.arange(5.0)  # another size than the one at hand when the graph was made
    assert [v.shape for v in run(graph, values)] == [(5,), (5,)]
    assert any(n.target is operator.getitem for n in graph.nodes)


def test_a_pass_is_switched_off_by_its_name() -> None:
    names = [p.name for p in passes.Pipeline().passes]
    assert "bucket_all_reduces" in names and len(set(names)) == len(names)
    assert [p.name for p in passes.Pipeline(off=names[1:]).passes] == names[:1]
    with pytest.raises(PassError, match=rf"no pass is called bucket; there are {', '.join(names)}"):
        passes.Pipeline(off=["bucket"])


def test_compiled_code_is_not_shared_between_settings() -> None:
    keys = {
        passes.Pipeline().uuid(),
        passes.Pipeline(off=["bucket_all_reduces"]).uuid(),
        passes.Pipeline([passes.BucketAllReduces(64)]).uuid(),
    }
    assert len(keys) == 3
    assert passes.Pipeline().uuid() in keys


def test_code_by_a_pass_that_is_known_by_its_address_is_not_cached() -> None:
    """Another pass, of another rank or made later, may have the same address."""

    class Nothing:
        name = "nothing"

        def __call__(self, graph: torch.fx.Graph) -> None: ...

    assert passes.Pipeline([Nothing()]).uuid() is None  # type: ignore[list-item,unused-ignore]
