"""Rules: what their notation means, who may register them, and which of their strategies is chosen."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._ops import OpOverload
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from shardcompile.errors import RuleError
from shardcompile.ops import (
    OpCall,
    OpRecord,
    Order,
    Rule,
    Strategy,
    TensorArg,
    along,
    find_rule,
    record_of,
    register,
    registered_ops,
    registry,
    replace_rule,
    state,
)
from shardcompile.ops.choice import Choice, choose
from shardcompile.ops.notation import multilinear, parse_notation, split_notation
from shardcompile.ops.registry import overloads
from shardcompile.ops.strategy import partial
from shardcompile.ops.view.reshape import match_dims
from shardcompile.sharding import Layout, MeshShape, Partition, Unflattened
from tests.support.simulator import (
    DIVISIBLE,
    Array,
    LocalShards,
    all_layouts,
    bytes_that_change_rank,
    collect,
    compositions,
    coordinates,
    run,
    same_partitions,
    spread,
)

aten = torch.ops.aten
R, P = Replicate(), Partial("sum")
S0, S1 = Shard(0), Shard(1)


def layout(placements: Sequence[Placement], shape: Sequence[int], *sizes: int, world: int = 2) -> Layout:
    """On a 1-D mesh, with these shard sizes or torch.chunk's."""
    chunked = Layout.chunked(MeshShape((world,)), placements, shape, torch.float32)
    partitions = [c and (Partition.of_sizes(c.mesh_dims, c.parts, sizes) if sizes else c) for c in chunked.partitions]
    return Layout.of(chunked.mesh, placements, shape, torch.float32, partitions)


def call_of(op: OpOverload, *args: object) -> OpCall:
    """A call with layouts in place of tensors."""
    described = tuple(TensorArg(a) if isinstance(a, Layout) else a for a in args)
    return OpCall(op, described, {}, tuple(a for a in described if isinstance(a, TensorArg)))


# Notation


def test_notation_gives_one_strategy_for_each_axis() -> None:
    rule = parse_notation("m k, k n -> m n", aten.mm.default)
    table = list(rule(call_of(aten.mm.default, layout([R], (3, 4)), layout([R], (4, 2)))))
    assert [(s.inputs, s.outputs) for s in table] == [
        ((S0, R), (S0,)),
        ((S1, S0), (P,)),
        ((R, S1), (S1,)),
    ]
    assert all(s.on_partition is None for s in table)


def test_axes_in_brackets_and_stars_stay_whole() -> None:
    x = layout([R], (3, 4))
    rule = parse_notation("b [k], * -> b [k]", aten.gelu_backward.default)
    assert [(s.inputs, s.outputs) for s in rule(call_of(aten.gelu_backward.default, x, x))] == [((S0, R), (S0,))]
    rule = parse_notation("[a] [b] -> [a] [b]", aten.neg.default)
    assert list(rule(call_of(aten.neg.default, x))) == []
    rule = parse_notation("b [c] -> b [d]", aten.neg.default)
    assert [(s.inputs, s.outputs) for s in rule(call_of(aten.neg.default, x))] == [((S0,), (S0,))]


def test_an_axis_that_one_of_two_outputs_lacks_is_a_partial_sum_there() -> None:
    x = layout([R], (3, 4))
    rule = parse_notation("m n -> m n, n", aten.native_dropout.default)
    assert [(s.inputs, s.outputs) for s in rule(call_of(aten.native_dropout.default, x, 0.5, True))] == [
        ((S0,), (S0, P)),
        ((S1,), (S1, S0)),
    ]


def test_multilinear_passes_one_partial_input_on() -> None:
    rule = multilinear("m k, k n -> m n")
    table = list(rule(call_of(aten.mm.default, layout([R], (3, 4)), layout([R], (4, 2)))))
    passing = [(s.inputs, s.outputs) for s in table if any(isinstance(p, Partial) for p in s.inputs)]
    avg = Partial("avg")
    assert passing == [((P, R), (P,)), ((avg, R), (avg,)), ((R, P), (P,)), ((R, avg), (avg,))]
    assert len(table) == len(passing) + 3


@pytest.mark.parametrize(
    "text, problem",
    [
        ("m k", "must have one arrow"),
        ("m -> m -> m", "must have one arrow"),
        ("M k -> k", "cannot read 'M k'"),
        ("m  k -> m", "cannot read 'm  k'"),
        ("1m -> m", "cannot read '1m'"),
        ("m; k -> m", "cannot read 'm; k'"),
        ("* k -> k", r"cannot read '\* k'"),
        ("[m -> [m", r"cannot read '\[m'"),
        ("m] -> m]", r"cannot read 'm\]'"),
        ("[m k] -> m", r"cannot read '\[m k\]'"),
        ("m -> n", r"the axes \['n'\] of the outputs are in no input; put them in brackets"),
        ("[m] -> m", r"the axes \['m'\] of the outputs are in no input"),
        ("m m -> m", "one tensor has an axis twice"),
        ("m -> m m", "one tensor has an axis twice"),
        ("m -> *", "only inputs may be *"),
    ],
)
def test_notation_that_cannot_be_read(text: str, problem: str) -> None:
    with pytest.raises(RuleError, match=problem):
        split_notation(text)


@pytest.mark.parametrize("text", ["m k, k n -> m n", "k, k -> ", "*, b1 -> b1", "b [k] [k2] -> b", "[k] [k] -> "])
def test_notation_that_can_be_read(text: str) -> None:
    inputs, outputs = split_notation(text)
    assert ", ".join(map(" ".join, inputs)) + " -> " + ", ".join(map(" ".join, outputs)) == text


@pytest.mark.parametrize("text", ["m k, k n, n -> m n", "m k, k n -> m n, m", "m -> "])
def test_notation_must_fit_the_signature(text: str) -> None:
    op = aten.native_dropout.default if text == "m -> " else aten.mm.default
    with pytest.raises(RuleError, match=r"does not fit the signature aten::"):
        parse_notation(text, op)


def test_notation_must_fit_the_call() -> None:
    rule = parse_notation("m k, k n -> m n", aten.mm.default)
    matrix, vector = layout([R], (3, 4)), layout([S0], (4,))
    with pytest.raises(RuleError, match=r"aten.mm.default: 'm k, k n -> m n' expects 2 dims, got f32\[4\] 0: S\(0\)"):
        rule(call_of(aten.mm.default, matrix, vector))
    rule = parse_notation("b k, n k -> b n", aten.linear.default)
    with pytest.raises(RuleError, match="has 2 inputs, but the call has 3 tensors"):
        rule(call_of(aten.linear.default, matrix, matrix, vector))
    assert len(list(rule(call_of(aten.linear.default, matrix, matrix)))) == 3


# The registry


@pytest.fixture
def rules(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[OpOverload, OpRecord]]:
    """An empty table of ops."""
    table: dict[OpOverload, OpRecord] = {}
    record_of.cache_clear()
    monkeypatch.setattr(registry, "_RECORDS", table)
    yield table
    record_of.cache_clear()


def test_registering_twice_raises_and_names_both_places(rules: dict[OpOverload, OpRecord]) -> None:
    register(aten.mm.default, "m k, k n -> m n")
    first = _line_of('register(aten.mm.default, "m k, k n -> m n")\n')
    with pytest.raises(RuleError) as error:
        register(aten.mm.default, "m k, [k] n -> m n")
    second = _line_of('register(aten.mm.default, "m k, [k] n -> m n")\n')
    assert str(error.value) == (
        f"aten.mm.default already has a rule, from test_rules.py:{first} (again: test_rules.py:{second})"
    )
    assert first < second and find_rule(aten.mm.default).origin == f"test_rules.py:{first}"


def _line_of(text: str) -> int:
    lines = Path(__file__).read_text().splitlines(keepends=True)
    return next(i for i, line in enumerate(lines, 1) if line.endswith(text))


def test_a_packet_registers_all_its_overloads(rules: dict[OpOverload, OpRecord]) -> None:
    register([aten.neg, aten.mm.default], lambda call: ())
    assert aten.neg.default in rules and aten.neg.out in rules
    assert set(registered_ops()) == {*overloads(aten.neg), aten.mm.default}
    assert overloads(aten.mm.default) == [aten.mm.default]


def test_a_malformed_rule_is_not_registered(rules: dict[OpOverload, OpRecord]) -> None:
    with pytest.raises(RuleError, match="does not fit the signature"):
        register(aten.mm.default, "m k, k n, n -> m n")
    with pytest.raises(RuleError, match="cannot read"):
        register(aten.mm.default, "M -> M")
    assert find_rule(aten.mm.default) is None and rules == {}


def test_replace_rule(rules: dict[OpOverload, OpRecord]) -> None:
    register(aten.mm.default, "m k, k n -> m n")
    new = Rule(lambda call: (), None, "a user")
    replace_rule(aten.mm.default, new)
    assert find_rule(aten.mm.default) is new


def test_facts_of_an_op_meet_in_its_record_and_are_stated_once(rules: dict[OpOverload, OpRecord]) -> None:
    register(aten.mm.default, "m k, k n -> m n")
    state([aten.mm.default, aten.bmm.default], kernel=torch.mm, order=Order.OF_ROWS)
    record = record_of(aten.mm.default)
    assert record.rule is not None and record.kernel is torch.mm and record.order.needs_rows
    assert set(record.origins) == {"rule", "kernel", "order"} and record_of(aten.bmm.default).rule is None
    with pytest.raises(RuleError, match=r"aten.mm.default already has a kernel, from test_rules.py:\d+ \(again: test"):
        state(aten.mm.default, kernel=torch.matmul)
    state(aten.mm.default, sharded=torch.mm)
    form = record_of(aten.mm.default).sharded
    assert form is not None and form.run is torch.mm and not form.always


def test_a_family_speaks_where_a_record_says_nothing(rules: dict[OpOverload, OpRecord]) -> None:
    tagged = record_of(aten.sin.default)
    assert tagged.elementwise and tagged.rule is not None and find_rule(aten.sin.default) is None
    register(aten.sin.default, lambda call: ())
    stated = record_of(aten.sin.default)
    assert stated.elementwise and stated.rule is find_rule(aten.sin.default) is not tagged.rule


# Views


def factorizations(number: int, dims: int) -> Iterator[tuple[int, ...]]:
    """All shapes of up to so many dims that hold so many elements."""
    if dims:
        for first in range(1, number + 1):
            if number % first == 0:
                yield from ((first, *rest) for rest in factorizations(number // first, dims - 1))
    if number == 1:
        yield ()


VIEWS = [
    (src, dst)
    for number, dims in [(1, 3), (4, 4), (6, 3), (8, 4), (12, 3), (24, 3)]
    for src, dst in itertools.product(sorted(set(factorizations(number, dims))), repeat=2)
]


def flattened(shape: Sequence[int], dims: Sequence[int]) -> list[int]:
    """For every element in order, its position in these dims flattened."""
    index = torch.arange(math.prod(shape)).view(list(shape) or [])
    position = torch.zeros_like(index)
    for d in dims:
        along_d = torch.arange(shape[d]).view([-1 if i == d else 1 for i in range(len(shape))])
        position = position * shape[d] + along_d
    return position.flatten().tolist()


def test_match_dims_groups_dims_that_hold_the_same_elements() -> None:
    assert len(VIEWS) > 2000
    for src, dst in VIEWS:
        groups = match_dims(src, dst)
        assert [d for ins, _ in groups for d in ins] == list(range(len(src))), (src, dst, groups)
        assert [d for _, outs in groups for d in outs] == list(range(len(dst))), (src, dst, groups)
        for ins, outs in groups:
            assert flattened(src, ins) == flattened(dst, outs), (src, dst, groups)


def test_match_dims_makes_groups_as_small_as_possible() -> None:
    for src, dst in VIEWS:
        for ins, outs in match_dims(src, dst):
            for k, n in itertools.product(range(1, len(ins)), range(1, len(outs))):
                assert math.prod(src[d] for d in ins[:k]) != math.prod(dst[d] for d in outs[:n]), (src, dst)
            if ins and outs:  # the leading dim is the one that stays sharded: one of size 1 would hide another
                assert src[ins[0]] > 1 and dst[outs[0]] > 1, (src, dst)


@pytest.mark.parametrize(
    "src, dst, groups",
    [
        ((6,), (2, 3), [([0], [0, 1])]),
        ((2, 3, 4), (6, 4), [([0, 1], [0]), ([2], [1])]),
        ((2, 6), (4, 3), [([0, 1], [0, 1])]),
        ((4, 1, 3), (4, 3), [([0], [0]), ([1], []), ([2], [1])]),
        ((), (1, 1), [([], [0]), ([], [1])]),
    ],
)
def test_match_dims_examples(src: Sequence[int], dst: Sequence[int], groups: object) -> None:
    assert match_dims(src, dst) == groups


def _check_joined_shards(value: np.ndarray, source: Layout, out: Layout) -> int:
    """With the dims apart that were flattened, the shards are those of with_one_segment rows."""
    apart = Unflattened.of(out)
    seen = apart.layout(out)
    for c in coordinates(seen):
        shard = value[source.shard_slices(c)].reshape(apart.shape(out.local_shape(c)))
        assert (shard == value.reshape(seen.shape)[seen.shard_slices(c)]).all(), (source, out)
    return 1


def test_the_view_rule_views_shards() -> None:
    """For every partition of the dim that a strategy partitions, viewed shards are the shards of the view."""
    rule = find_rule(aten.view.default)
    assert rule is not None
    checked, refused, joined = 0, 0, 0
    for src, dst in [v for v in VIEWS if 4 < math.prod(v[0]) < 24 and len(v[0]) < 4 and len(v[1]) < 4]:
        value = np.arange(math.prod(src)).reshape(src)
        for strategy in rule.strategies(call_of(aten.view.default, layout([R], src), list(dst))):
            (before,), (after,) = strategy.inputs, strategy.outputs
            if not isinstance(before, Shard) or not isinstance(after, Shard):
                assert before == after  # a pending reduction passes
                continue
            for sizes in compositions(src[before.dim], 2):
                partition = Partition.of_sizes([0], [2], sizes)
                new = strategy.on_partition(partition) if strategy.on_partition else partition
                if new is None:
                    refused += 1
                    continue
                assert new.size == dst[after.dim]
                partitions = [new if d == after.dim else None for d in range(len(dst))]
                out = Layout.of(MeshShape((2,)), [after], dst, torch.float32, partitions)
                if new.num_segments > 1:
                    joined += _check_joined_shards(value, layout([before], src, *sizes), out)
                    continue
                for c in coordinates(out):
                    shard = value[layout([before], src, *sizes).shard_slices(c)]
                    viewed = shard.reshape(out.local_shape(c))
                    assert (viewed == value.reshape(dst)[out.shard_slices(c)]).all(), (src, dst, sizes)
                checked += 1
    assert checked > 1000 and refused > 100 and joined > 100


# Choosing


ALONG_0 = along([0, 0], [0])
ALONG_1 = along([1, 1], [1])
ADD = [ALONG_0, ALONG_1, partial(["sum", "sum"], ["sum"])]


def chosen(layouts: Sequence[Layout], table: Sequence[Strategy], outputs: int = 1, in_place: bool = False) -> Choice:
    choice = choose(layouts, table, outputs, in_place)
    assert choice is not None
    return choice


def test_inputs_that_fit_are_taken_as_they_are() -> None:
    for placement, sizes in [(S0, (3, 5)), (S1, (0, 4)), (R, ()), (P, ())]:
        x = layout([placement], (8, 4), *sizes)
        choice = chosen([x, x], ADD)
        assert choice.nbytes == choice.cost == 0 and not any(p.steps for p in choice.plans) and not choice.communicates
        assert choice.outputs[0].layout(x, x.shape, x.dtype) is x


def test_a_strategy_that_fits_is_taken_before_others_that_cost_nothing() -> None:
    """Whole tensors could be sharded for nothing; they stay whole, and sharded ones stay sharded."""
    x = layout([R], (8, 4))
    assert chosen([x, x], ADD).outputs[0].placements == (R,)
    partition = layout([S1], (8, 4), 1, 3)
    assert (
        chosen([partition, partition], [ALONG_0, ALONG_1])
        .outputs[0]
        .layout(partition, partition.shape, partition.dtype)
        is partition
    )
    # Nothing else is looked at.
    others = along([1], [1], lambda partition: pytest.fail("priced"))
    assert chosen([layout([S0], (8, 4), 3, 5)], [others, along([0], [0])]).nbytes == 0
    with pytest.raises(pytest.fail.Exception, match="priced"):
        chosen([layout([S0], (8, 4), 3, 5)], [others])
    # A sharded tensor and a whole one: sharding_of the whole one is free, too.
    choice = chosen([partition, x], ADD)
    assert choice.nbytes == 0 and choice.outputs[0].layout(partition, partition.shape, partition.dtype) is partition
    assert [s.kind for s in choice.plans[1].steps] == ["take_shard"]


def test_of_two_partitions_the_cheaper_one_is_taken_over() -> None:
    """Cheaper by what has to move: the narrow input goes to the partition of the wide one, in either order."""
    table = [along([0, 0], [0])]
    for sizes, others in itertools.product(compositions(5, 3), repeat=2):
        wide, narrow = layout([S0], (5, 3), *sizes, world=3), layout([S0], (5, 1), *others, world=3)
        for pair in ((wide, narrow), (narrow, wide)):
            choice = chosen(pair, table)
            assert choice.outputs[0].partitions[0].sizes == sizes
            assert choice.nbytes == bytes_that_change_rank(narrow, layout([S0], (5, 1), *sizes, world=3))


def test_of_three_partitions_the_one_with_least_to_move_is_taken_over() -> None:
    """Least by the tensors that have to move, not by their sizes on the ranks, which compiled code does not know."""
    rng = random.Random(0)
    all_sizes = compositions(6, 3)
    seen = set()
    for _ in range(200):
        partitions = [rng.choice(all_sizes) for _ in range(3)]
        widths = [rng.randint(1, 4) for _ in range(3)]
        inputs = [layout([S0], (6, w), *s, world=3) for w, s in zip(widths, partitions, strict=True)]
        costs = [sum(w for w, other in zip(widths, partitions, strict=True) if other != s) for s in partitions]
        taken = costs.index(min(costs))
        choice = chosen(inputs, [along([0, 0, 0], [0])])
        target = [layout([S0], (6, w), *partitions[taken], world=3) for w in widths]
        assert choice.outputs[0].partitions[0].sizes == partitions[taken]
        assert choice.nbytes == sum(map(bytes_that_change_rank, inputs, target))
        seen.add(taken)
    assert seen == {0, 1, 2}


def test_rows_stay_sharded_where_a_newly_sharded_output_would_have_to_come_back() -> None:
    """Scores of an attention: keys are gathered, unless the scores are so small that all goes to the batch and back."""
    for rows, taken in ((12, S1), (3, S0)):
        query, key = layout([S1], (9, rows, 8), world=3), layout([Shard(2)], (9, 8, rows), world=3)
        table = multilinear("b m k, b k n -> b m n")(call_of(aten.bmm.default, query, key))
        choice = choose([query, key], table, 1, produced=lambda rows=rows: [9 * rows * rows * 4])
        assert choice is not None and choice.outputs[0].placements == (taken,)


def test_partial_inputs_pass_where_that_is_legal() -> None:
    x, whole, partition = layout([P], (8, 4)), layout([R], (8, 4)), layout([S0], (8, 4), 3, 5)
    both = chosen([x, x], ADD)
    assert both.nbytes == 0 and both.outputs[0].placements == (P,)

    # A sum of a term and a whole is no term: it must be reduced.
    mixed = chosen([x, whole], ADD)
    assert [s.kind for s in mixed.plans[0].steps] == ["all_reduce"] and mixed.outputs[0].placements == (R,)
    # Beside a sharded input the reduction need not go to all.
    scattered = chosen([x, partition], ADD)
    assert [s.kind for s in scattered.plans[0].steps] == ["reduce_scatter_v"]
    assert scattered.outputs[0].layout(partition, partition.shape, partition.dtype) is partition

    # No rule, or another reduction: reduced.
    for placement, table in [(P, [ALONG_0]), (Partial("max"), ADD), (Partial("avg"), ADD)]:
        pending = layout([placement], (8, 4))
        choice = chosen([pending, pending], table)
        assert [[s.kind for s in p.steps] for p in choice.plans] == [["all_reduce"], ["all_reduce"]]
        assert choice.outputs[0].placements == (R,)


def test_a_mesh_dim_that_partitions_nothing_stays_unused() -> None:
    mesh = MeshShape((2, 2))
    x = Layout.chunked(mesh, [S0, R], (8, 4), torch.float32)
    choice = chosen([x, x.replicated()], ADD)
    assert choice.outputs[0].placements == (S0, R)


def test_without_a_strategy_everything_is_gathered() -> None:
    x = layout([S0], (8, 4), 3, 5)
    choice = chosen([x, x], [], outputs=2)
    assert choice.nbytes == 2 * x.nbytes and [o.placements for o in choice.outputs] == [(R,), (R,)]
    assert [o.partitions for o in choice.outputs] == [{}, {}] and choice.communicates


def test_a_partition_that_the_output_cannot_have_is_not_taken() -> None:
    x = layout([S0], (6, 4), 1, 5)
    halved = along([0], [0], lambda partition: partition.unflatten_trailing(2))
    assert chosen([x], [halved]).outputs[0].placements == (R,)
    x = layout([S0], (6, 4), 2, 4)
    choice = chosen([x], [halved])
    assert choice.outputs[0].partitions[0].sizes == (1, 2) and choice.plans[0].steps == ()


def test_two_strategies_may_not_partition_one_dim() -> None:
    """Both mesh dims would sharded dim 0 of the output, each by a partition of its own."""
    mesh = MeshShape((2, 2))
    x = Layout.chunked(mesh, [S0, R], (8,), torch.float32)
    y = Layout.chunked(mesh, [R, S0], (8,), torch.float32)
    table = [along([0, None], [0]), along([None, 0], [0])]
    choice = chosen([x, y], table)
    assert choice.outputs[0].placements.count(S0) == 1 and choice.nbytes > 0


def test_nested_partitions_are_taken_over_in_their_order() -> None:
    mesh = MeshShape((2, 2))
    partition = Partition.of_sizes((1, 0), (2, 2), (1, 2, 3, 2))
    x = Layout.of(mesh, [S0, S0], (8, 4), torch.float32, [partition, None])
    choice = chosen([x.replicated(), x], ADD)
    assert choice.nbytes == 0 and choice.outputs[0].partitions == {0: partition}


def test_in_place_never_moves_the_first_input() -> None:
    table = [along([0, 0], [0]), along([1, 1], [1]), partial(["sum", "sum"], ["sum"])]
    inputs = [
        *(layout([S0], (4, 2), *s, world=3) for s in compositions(4, 3)),
        *(layout([S1], (4, 2), *s, world=3) for s in compositions(2, 3)),
        layout([R], (4, 2), world=3),
        layout([P], (4, 2), world=3),
    ]
    for x, y in itertools.product(inputs, repeat=2):
        choice = choose([x, y], table, 1, in_place=True)
        if x.is_partial and not y.is_partial:
            assert choice is None  # it would have to be reduced, which moves it
            continue
        assert choice is not None and choice.plans[0].steps == ()
        result = choice.outputs[0].layout(x, x.shape, x.dtype)
        assert result.placements == x.placements and same_partitions(result, x)
        if not x.is_partial:
            assert choice.nbytes == bytes_that_change_rank(y, x)


def test_in_place_refuses_a_result_that_is_laid_out_otherwise() -> None:
    x = layout([S0], (8, 4), 3, 5)
    assert choose([x], [along([0], ["sum"])], 1, in_place=True) is None
    assert choose([x], [along([0], [1])], 1, in_place=True) is None
    swapped = along([0], [0], lambda partition: Partition.of_sizes([0], [2], partition.sizes[::-1]))
    assert choose([x], [swapped], 1, in_place=True) is None
    assert choose([x], [], 1, in_place=True) is None


def test_in_place_without_results() -> None:
    x, y = layout([S0], (8, 4), 3, 5), layout([S0], (8, 4), 4, 4)
    choice = choose([x, y], [along([0, 0], [])], 0, in_place=True)
    assert choice is not None and choice.outputs == () and choice.plans[0].steps == ()
    assert choose([x, y], [], 0, in_place=True) is None


def test_a_fitting_strategy_is_found_among_very_many() -> None:
    """More combinations than are priced: those that fit the inputs come first."""
    mesh = MeshShape((2, 2, 2))
    shape = (4,) * 8
    x = Layout.chunked(mesh, [Shard(5), Shard(6), Shard(7)], shape, torch.float32)
    partition = Partition.of_sizes([2], [2], (1, 3))
    y = Layout.of(mesh, x.placements, shape, torch.float32, [*x.partitions[:7], partition])
    table = [along([d, d], [d]) for d in range(8)]
    for in_place in (False, True):
        choice = chosen([x, y], table, in_place=in_place)
        assert choice.outputs[0].placements == x.placements
        assert [s.kind for p in choice.plans for s in p.steps] == ["fetch_ranges"]
    # Whole tensors are legal whatever the table holds.
    never = [along([d, d], [d], lambda partition: None) for d in range(8)]
    assert chosen([x, y], never).outputs[0].placements == (R, R, R)


# What is chosen gives the right result


def check_result(
    layouts: Sequence[Layout], table: Sequence[Strategy], shape: Sequence[int], op: Callable[..., Array]
) -> Choice:
    """Shards are brought to where the choice wants them, the op runs on each rank, the outputs make up the result."""
    rng = np.random.default_rng(1)
    values = [rng.integers(1, 9, x.shape) * DIVISIBLE for x in layouts]
    choice = chosen(layouts, table)
    inputs: list[LocalShards] = []
    for plan, value in zip(choice.plans, values, strict=True):
        shards, moved = run(plan, spread(value, plan.src))
        assert sum(moved) == plan.nbytes
        inputs.append(shards)
    out = choice.outputs[0].layout(layouts[0], shape, layouts[0].dtype)
    result = {c: op(*(shards[c] for shards in inputs)) for c in coordinates(out)}
    assert (collect(result, out) == op(*values)).all(), f"{layouts} to {out}"
    return choice


MM = list(multilinear("m k, k n -> m n")(call_of(aten.mm.default, layout([R], (3, 4)), layout([R], (4, 2)))))


@pytest.mark.parametrize("mesh, count", [((2,), 3), ((3,), 2), ((2, 2), 1)])
def test_matrix_products_of_all_layouts_are_right(mesh: tuple[int, ...], count: int) -> None:
    placements = [S0, S1, R, P, *([Partial("avg"), Partial("max")] if len(mesh) == 1 else [])]
    left, right = (all_layouts(mesh, shape, placements, count) for shape in [(3, 4), (4, 2)])
    pairs = list(itertools.product(left, right))
    kinds = set()
    for a, b in pairs if len(mesh) == 1 else random.Random(0).sample(pairs, 200):
        choice = check_result([a, b], MM, (3, 2), np.matmul)
        kinds.add(choice.outputs[0].placements)
    assert kinds >= ({(S0,), (S1,), (P,), (R,)} if len(mesh) == 1 else {(S0, S0), (S0, S1), (P, S1), (P, P)})


def test_sums_of_all_layouts_are_right() -> None:
    layouts = all_layouts((2, 2), (3, 4), [S0, S1, R, P], 1)
    for a, b in random.Random(1).sample(list(itertools.product(layouts, repeat=2)), 200):
        check_result([a, b], ADD, (3, 4), np.add)


def test_a_wrong_rule_gives_a_wrong_result() -> None:
    """The check above can fail: the square of a sum is not the sum of squares."""
    x = layout([P], (3, 4))
    with pytest.raises(AssertionError):
        check_result([x], [partial(["sum"], ["sum"])], (3, 4), np.square)
    y = layout([S0], (3, 4))
    with pytest.raises(AssertionError):
        check_result([y], [along([0], [0])], (3, 4), lambda shard: np.cumsum(shard, axis=0))
