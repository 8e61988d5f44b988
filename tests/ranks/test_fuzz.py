"""The fuzzer: a sample of its programs, all of them at night, and what it has found, in a few lines each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor.placement_types import Replicate, Shard

from shardcompile import ShardTensor, distribute_tensor
from shardcompile.compat.testing import graphs_compiled
from shardcompile.testing import LocalRanks, mesh, once, rank
from tests.support.after_passes import graph_after_passes
from tests.support.tiers import often
from tools.fuzz import FINE, REFUSED, RIGHT, Input, Program, draw, judge, search, shrink

PARTITION = {0: [5, 0, 2]}


@pytest.mark.parametrize("first", often(list(range(0, 10_000, 500)), 0))
def test_programs(first: int) -> None:
    assert set(search(range(first, first + 500))) <= set(FINE)


@pytest.mark.parametrize("first", often(list(range(0, 500, 25)), 0))
def test_compiled_programs(first: int) -> None:
    assert set(search(range(first, first + 25), "aot_eager")) <= set(FINE)


@pytest.mark.nightly
def test_programs_in_half_precision() -> None:
    assert set(search(range(700_000, 700_300), lengths=(2, 7), half=True)) <= set(FINE)


@pytest.mark.nightly
def test_programs_in_half_precision_after_the_passes() -> None:
    """Each node of their graphs has the dtype that its op gives."""
    found = search(range(730_000, 730_015), graph_after_passes(()), lengths=(2, 7), half=True)
    assert set(found) <= set(FINE)


@pytest.mark.parametrize("backend", ["inductor", "shardcompile"])
@pytest.mark.parametrize("first", often(list(range(0, 50, 10)), 0))
def test_programs_through_inductor(first: int, backend: str) -> None:
    """Alone, and with the passes, which move collectives among what may write to what they send."""
    assert set(search(range(first, first + 10), backend)) <= set(FINE)


def test_a_sample_of_the_programs() -> None:
    tally = search(range(12))
    assert set(tally) <= set(FINE)
    assert tally[RIGHT] >= 9


def found(
    lines: list[str], inputs: list[Input] | None = None, mesh: tuple[int, ...] = (3,), backend: str | None = None
) -> Any:
    given = inputs or [Input("a0", (7, 3), "S(0)", PARTITION, grad=True), Input("a1", (7, 3), grad=True)]
    program = Program(mesh, given, lines)
    with LocalRanks(program.ranks, processes=False) as ranks:
        return judge(ranks, program, backend)


@pytest.mark.nightly
def test_what_a_mask_keeps_in_a_trace_decides_nothing_for_eager_code() -> None:
    """The decision of a trace, with unbacked sizes, is kept for eager calls with equal arguments."""
    lines = [
        "v0 = a0.logcumsumexp(2)",
        "v1 = a2.narrow(1, 0, 1)",
        "v2, v3 = tuple(v0.cummax(-1))",
        "v4 = torch.cat([v2, v0], 0)",
        "v5 = v2.diagonal(0, 1, 0)",
        "v6 = F.rms_norm(v4, v4.shape[-1:])",
        "v7 = v5.abs().clamp(max=100).to(torch.uint64).to(torch.float64)",
        "v8 = v6 @ v7",
        'v9 = torch.einsum("ab,cd->abcd", v5, v7)',
        "v10 = v9[:, :, (v9.detach().amax([0, 1, 3]) > 0.1)].mul(2)",
        "v11 = torch.fft.irfft(torch.fft.rfft(v7, n=2, dim=1).narrow(1, 0, 1), n=2, dim=1)",
        "v12 = torch.fft.hfft(v2, n=2, dim=0)",
        "v13 = v0.cummin(-1)[0]",
        "v14 = torch.stack([v0, v13], 3)",
    ]
    ways = ("rows", "turned", "turned", "turned")
    inputs = [
        Input("a0", (2, 3, 1), "S(0) S(2)", {0: [1, 1], 1: [0, 1]}, seed=617607, ways=ways, inferred=True),
        Input("a1", (1,), "R S(0)", {1: [0, 1]}, grad=True, seed=733577),
        Input("a2", (1, 1), "S(0) R", {0: [1, 0]}, seed=82449),
    ]
    assert found(lines, inputs, (2, 2), "aot_eager").kind == RIGHT


def test_a_wrong_value_is_found_and_shrunk() -> None:
    """A line that gives something else on sharded tensors, among lines that do not matter."""
    lines = ["v0 = a0.sin()", "v1 = v0 * (2 if hasattr(a0, 'sharding') else 1)", "v2 = a0 + a1", "v3 = v1[1:]"]
    program = Program((3,), [Input("a0", (7, 3), "S(0)", PARTITION, grad=True), Input("a1", (7, 3), grad=True)], lines)
    with LocalRanks(3, processes=False) as ranks:
        wrong = judge(ranks, program)
        assert wrong.kind == "wrong"
        small = shrink(ranks, program, wrong, None)
    assert [i.name for i in small.inputs] == ["a0"]
    assert list(small.lines) == lines[:2]
    scope: dict[str, Any] = {}
    exec(str(small).replace(".check()", "").replace("Program(", "small = Program(", 1), {}, scope)
    assert scope["small"].lines == list(small.lines)


def test_ranks_that_differ_are_found() -> None:
    line = "v0 = a0.sum() if not hasattr(a0, 'sharding') or a0.device_mesh.get_rank() else a0.sum().full_tensor()"
    assert found([line, "v1 = v0 + 1"]).kind in ("disagree", "waits", "wrong")


def test_a_program_is_the_same_each_time() -> None:
    assert [str(draw(seed)) for seed in range(5)] == [str(draw(seed)) for seed in range(5)]


# What it has found


@pytest.mark.parametrize("turn", ["v0.transpose_(0, 1)", "v0.unsqueeze_(0)"])
@pytest.mark.parametrize("view", ["v1 = v0[1:]", "v1 = v0.unsqueeze(0)", "v1 = v0.mT"])
def test_a_tensor_whose_views_have_gradients_is_not_turned_in_place(view: str, turn: str) -> None:
    told = found(["v0 = a0 * 2", view, turn])
    assert told.kind == REFUSED
    assert "views of it exist" in told.text
    assert found(["v0 = a0 * 2", turn]).kind == RIGHT
    assert found(["v0 = a0 * 2", "v1 = v0[1:].sum()", turn]).kind == RIGHT


@pytest.mark.parametrize("turn", ["v1.transpose_(0, 1)", "v1.unsqueeze_(0)"])
@pytest.mark.parametrize("view", ["v1 = v0[:]", "v1 = v0.mT"])
@pytest.mark.parametrize("write", ["v1.mul_(a1)", "v1[..., 1:].mul_(3)", "v0.mul_(a1)"])
def test_a_view_that_was_turned_in_place_is_not_written_to_where_gradients_are_wanted(
    view: str, turn: str, write: str
) -> None:
    """The gradient would be that of the view as it was before, on a square tensor without a word."""
    inputs = [Input("a0", (4, 4), "S(0)", {0: [3, 0, 1]}, grad=True), Input("a1", (4, 4), grad=True)]
    told = found(["v0 = a0 * 2", view, turn, write], inputs)
    assert told.kind == RIGHT or "is a view" in told.text, told.text
    assert told.kind in (RIGHT, REFUSED), told.text
    assert found(["v0 = a0 * 2", view, turn, "v2 = v1 * a1"], inputs).kind == RIGHT
    assert found(["v0 = a0 * 2", turn.replace("v1", "v0"), "v0.mul_(a1)"], inputs).kind == RIGHT


@pytest.mark.parametrize(
    "lines",
    [
        ["v0 = a0 - a1", "v1 = v0.select(1, 2)", "v2 = torch.linalg.vector_norm(v1, 1, [0])"],
        ['v0 = to(a0, "S(1)")', "v1 = v0.abs()"],
        ["v0 = a1.index_select(0, torch.tensor([], dtype=torch.int64))", "v1 = torch.cat([a0, v0, a0])"],
    ],
)
def test_gradients_that_are_zero_whatever_the_input_go_on_backward(lines: list[str]) -> None:
    assert found(lines).kind == RIGHT


def test_a_product_of_partition_rows_may_be_viewed_as_a_plain_one() -> None:
    told = found(
        ["v0 = F.linear(a0, weight(2, 7))", "v1 = v0.view([2, 8])"], [Input("a0", (2, 4, 7), "S(1)", {0: [1, 3, 0]})]
    )
    assert told.kind == RIGHT


@pytest.mark.parametrize("line", ["v0[v0 > 0.5] = 0.25  # if away(v0, 0.5)", "v0[torch.tensor([1, 2])] = 0.5"])
def test_a_write_to_an_expanded_tensor_is_refused_on_ranks_without_rows_as_well(line: str) -> None:
    told = found(["v0 = a0.expand([4, 7])", line], [Input("a0", (1, 7), "S(1)", PARTITION)])
    assert told.kind == RIGHT or "Clone it" in told.text
    assert told.kind in (RIGHT, REFUSED)


def test_an_op_that_was_decided_on_a_view_does_not_come_back_to_it() -> None:
    """What is kept of a decision was made on one rank's arguments; another rank, or call, has its own."""
    lines = ["v0 = a0.flatten(0, 1)", "a0.mul_(2)", "v1 = v0[torch.tensor([1, 2])]", "v2 = v0[torch.tensor([1, 2])]"]
    assert found(lines, [Input("a0", (3, 1), "S(1)", {0: [1, 0]})], (2,)).kind == RIGHT


def test_what_is_expanded_may_be_filled_and_no_more() -> None:
    inputs = [Input("a0", (1, 7), "S(1)", PARTITION)]
    assert found(["v0 = a0.expand([4, 7])", "v0.fill_(2)", "v0.zero_()"], inputs).kind == RIGHT
    told = found(["v0 = a0.expand([4, 7])", "v0[:] = a0"], inputs)  # to itself, which plain PyTorch leaves as it is
    assert told.kind == REFUSED
    assert "Clone it" in told.text


@pytest.mark.parametrize("line", ["F.layer_norm(v0, ())", "v0.softmax(2)", "torch.cat([v0, v0[:, 1:]], 0)"])
def test_what_plain_pytorch_refuses_is_refused_where_rows_would_move(line: str) -> None:
    program = Program((3,), [Input("a0", (7, 3), "S(0)", PARTITION)], ["v0 = a0 * 2", line], refused=True)
    with LocalRanks(3, processes=False) as ranks:
        assert judge(ranks, program).kind == REFUSED


def test_shards_that_are_views_need_no_graphs_of_their_own() -> None:
    """The bases of this rank's shards, of whatever sizes, are none of a trace's business."""
    inputs = [Input("a0", (3, 4), "S(1)", {0: [1, 3, 0]}, grad=True, ways=("turned", "gaps", "odd"))]
    told = found(["v0 = a0.sin()", "v1 = v0.sum(0)"], inputs, backend="aot_eager")
    assert (told.kind, told.text) == (RIGHT, "2")


def test_a_view_that_had_to_be_copied_is_right_when_a_compiled_function_returns_it() -> None:
    lines = ["v0 = a0 * 2", "v1 = v0[1:4]", "v2 = v0.diagonal()", "v0.mul_(0.5)"]
    assert found(lines, backend="aot_eager").kind == RIGHT


@pytest.mark.parametrize("view", often(["a0[9:]", "a0[-1:1:2]", "a0[9:-8]"], 1))
def test_gradients_of_a_slice_that_begins_behind_the_last_row(view: str) -> None:
    told = found([f"v0 = {view}"], backend="aot_eager")
    assert told.kind == RIGHT, told


NO_ROWS = ["a[9:, 1:]", "torch.cat([a[9:, 1:], a[:, 1:]])", "a[3:-9, 1:].flip(0).cumsum(0)", "a[9:, 1:].reshape(-1)"]


@pytest.mark.parametrize(("line", "dim"), often([(line, dim) for line in NO_ROWS for dim in (0, 1)], 2))
@pytest.mark.ranks(3, processes=False)
def test_no_rows_of_columns_that_vary(line: str, dim: int) -> None:
    """A size that is a formula, and 0 on this call, is no formula: torch would divide by it."""
    function = once(lambda: eval(f"lambda a: {line}", {"torch": torch}))
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    before = once(graphs_compiled)
    for sizes, others in (([5, 0, 2], 3), ([1, 3, 3], 3), ([4, 4, 0], 5)):
        shape = (sum(sizes), others) if dim == 0 else (others, sum(sizes))
        full = torch.randn(shape, dtype=torch.float64).requires_grad_()
        shard = full.detach().split(sizes, dim)[rank()].clone()
        x = ShardTensor.from_local(shard, mesh(), [Shard(dim)], {0: sizes}).requires_grad_()
        out, expected = compiled(x), function(full)
        torch.testing.assert_close(out.full_tensor(), expected, rtol=1e-12, atol=1e-12)
        (out.full_tensor() ** 2).sum().backward(), (expected**2).sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), full.grad, rtol=1e-12, atol=1e-12)
    assert graphs_compiled() - before == 1


def test_a_convolution_of_shards_that_were_gathered_has_one_graph() -> None:
    """Rows that arrive from other ranks are first in memory; a trace asked how a shard is stored."""
    inputs = [Input("a0", (3, 6, 6), "S(0) S(1)", {0: [3, 0], 1: [0, 6]}, grad=True)]
    assert found(["v0 = F.conv1d(a0, weight(2, 6, 3))"], inputs, (2, 2), "aot_eager").kind == RIGHT


def test_a_product_of_partition_rows_is_stored_as_a_plain_one() -> None:
    """Flattened it is a view, which may be written to."""
    inputs = [Input("a0", (3, 7, 7), "S(1)", PARTITION)]
    assert found(["v0 = F.linear(a0, weight(3, 7))", "v1 = v0.flatten()", "v1.fill_(0.75)"], inputs).kind == RIGHT


@pytest.mark.parametrize("backend", often([None, "aot_eager"], 1))
def test_what_is_added_to_rows_of_a_turned_tensor_is_stored_as_a_plain_result(backend: str | None) -> None:
    lines = ["v0 = a0.mT.contiguous().mT", "v1 = v0.index_add(0, torch.tensor([1, 4]), a1[:2])", "v2 = v1.flatten()"]
    assert found([*lines, "v2.fill_(0.75)"], backend=backend).kind == RIGHT


@pytest.mark.ranks(3, processes=False)
def test_an_size_of_1_is_broadcast_after_calls_with_other_sizes() -> None:
    """Dynamo has made a symbol of it by then."""
    compiled = once(lambda: torch.compile(lambda x, y: (x - y).sum(0), fullgraph=True, backend="aot_eager"))
    for rows, columns in ((7, 6), (7, 3), (1, 6), (7, 1), (1, 1)):
        full, other = torch.randn(7, 6), torch.randn(rows, columns)
        if columns == 3:
            full = full[:, :3]
        x = ShardTensor.from_local(full.split([5, 0, 2])[rank()], mesh(), [Shard(0)], PARTITION)
        y = distribute_tensor(other, mesh(), [Replicate()])
        torch.testing.assert_close(compiled(x, y).full_tensor(), (full - other).sum(0))


def test_a_tensor_is_not_turned_in_place_under_a_view_that_is_made_again_from_it() -> None:
    inputs = [Input("a0", (2, 3), "S(1) P(sum)", {0: [1, 2]})]
    told = found(["v0 = a0.view(3, 2)", "a0.mul_(2)", "a0.unsqueeze_(0)"], inputs, (2, 2))
    assert told.kind == REFUSED
    assert "copied again after every write to it" in told.text
    assert found(["v0 = a0.view(3, 2).sin()", "a0.mul_(2)", "a0.unsqueeze_(0)"], inputs, (2, 2)).kind == RIGHT


def test_strides_follow_those_of_a_dim_that_an_input_has_not_got() -> None:
    """torch's fake kernels expand such an input otherwise than its kernels do; only with sizes of 1 it matters."""
    lines = ["v0 = a1.mT", 'v1 = torch.einsum("ab,cd->cdab", v0, v0)', "v2 = torch.hypot(v1, a0)"]
    assert found(lines, [Input("a0", (5, 2, 5)), Input("a1", (5, 1), "R")]).kind == RIGHT


def test_a_whole_value_keeps_the_strides_of_sizes_of_1() -> None:
    """They decide how what is computed from it is stored."""
    lines = ["v0 = a0.unfold(0, 3, 1)", "v1 = whole(v0)", "v2 = v1 * v1.expand([1, 3, 3])"]
    assert found(lines, [Input("a0", (3, 1), "R")]).kind == RIGHT


@pytest.mark.parametrize(
    ("line", "ways"),
    often(
        [
            ("F.linear(a0, weight(2, 1).to(a0.dtype))", ("gaps", "rows")),  # a batched product of a column and a row
            ("torch.cat([a0, a0], -3)", ("rows",)),
            ("torch.stack([a0, a0], 1)", ("rows",)),
        ],
        1,
    ),
)
def test_what_inductor_decomposes_has_one_graph(line: str, ways: tuple[str, ...]) -> None:
    """Its decompositions compared shard sizes: ranks compiled apart, and waited for one another."""
    inputs = [Input("a0", (4, 7, 1), "S(1)", {0: [6, 1]}, grad=True, ways=ways)]
    told = found([f"v0 = {line}", "v1 = v0 * 2"], inputs, (2,), "aot_eager_decomp_partition")
    assert (told.kind, told.text) == (RIGHT, "2")


def test_a_diagonal_of_an_expanded_tensor() -> None:
    inputs = [Input("a0", (1, 7, 5), "S(2)", {0: [0, 5, 0]}, grad=True)]
    assert found(["v0 = a0.expand([2, 7, -1])", "v1 = v0.diagonal(-1, 0, 1)"], inputs).kind == RIGHT


@pytest.mark.parametrize("view", often(["diagonal(-1, 2, 1)", "as_strided([2, 3], [49, 2], 5)"], 1))
def test_a_compiled_view_of_a_whole_input_keeps_its_place(view: str) -> None:
    """A wrapper has no place in a storage, so that the compiler must not make the view anew from the input."""
    told = found([f"v0 = a0.{view}"], [Input("a0", (2, 7, 7), "R")], backend="aot_eager")
    assert told.kind == RIGHT


def test_what_was_computed_from_an_input_that_is_written_to_has_no_gradient_of_it() -> None:
    """Compiled, as in plain PyTorch."""
    inputs = [Input("a1", (2,), "S(0)", {0: [0, 2]}, grad=True), Input("a2", (2, 3, 2), "S(2)", {0: [0, 2]})]
    assert found(["a2.sub_(a1)", "v0 = a2 * a1"], inputs, (2,), "aot_eager").kind == RIGHT


def test_the_backward_graph_of_every_rank_holds_the_collectives_of_the_backward_pass() -> None:
    """Each rank knows its local shard of what is padded. One that has none would have run one of them twice."""
    inputs = [Input("a1", (1,), "S(0)", {0: [0, 1, 0]}, grad=True)]
    lines = [
        "v0 = torch.cat([a1, a1], 0)",
        'v1 = torch.einsum("a,c->ac", v0, whole(a1))',
        "v2 = F.pad(v1, [-1, 2, -1, -1], value=0.5)",
        "v3 = F.softplus(a1)",
    ]
    assert found(lines, inputs, backend="aot_eager").kind == RIGHT


@pytest.mark.parametrize(
    ("lines", "inputs", "mesh"),
    [
        (
            ['v0 = torch.einsum("ab,cd->abcd", a0, a0)', "v1 = v0**2", "v2 = F.pad(v1, [0, 2, 0, 1, 2, 1], value=0.5)"],
            [Input("a0", (2, 1), "S(1)", {0: [1, 0]})],
            (2,),
        ),
        (
            ["v0 = torch.logaddexp(a0, a0)", "v1 = v0.unfold(1, 3, 1)", 'v2 = to(v1, "S(1)", {0: [0, 1, 1]})'],
            [Input("a0", (5, 4, 5), "R")],
            (3,),
        ),
        (["v0 = a0.expand([4, 3])", "v1 = v0.unfold(0, 2, 1)"], [Input("a0", (1, 3), "S(1)", {0: [2, 0, 1]})], (3,)),
        (
            ["v0 = a0.movedim(0, -1)", "v1 = v0.expand([2, 3, -1])", 'v2 = to(v1, "S(1)", {0: [0, 0, 3, 0]})'],
            [Input("a0", (2, 2, 1), "R")],
            (4,),
        ),
        (
            [
                'v0 = torch.einsum("ab,cd->abcd", a1, a0)',
                "v1 = F.scaled_dot_product_attention(v0, v0.sin(), v0)",
                "v2 = torch.cat([v1, v1], 1)",
            ],
            [Input("a0", (3, 2), "S(0)", {0: [2, 1]}), Input("a1", (2, 1), grad=True)],
            (2,),
        ),
    ],
    ids=["columns of one", "windows that overlap", "windows of what is expanded", "expanded in the middle", "one head"],
)
def test_results_are_stored_as_plain_ones(lines: list[str], inputs: list[Input], mesh: tuple[int, ...]) -> None:
    assert found(lines, inputs, mesh).kind == RIGHT


@pytest.mark.parametrize("backend", often([None, "aot_eager"], 2))
@pytest.mark.parametrize("amounts", ["[0, 0, -1, 0]", "[0, 0, 0, -2]", "[0, 0, -1, -1]"])
def test_rows_that_are_padded_by_less_than_none_are_a_copy(amounts: str, backend: str | None) -> None:
    lines = [f"v0 = F.pad(a0, {amounts}, value=0.5)", "v0.add_(0.25)", "v1 = a0.sin()"]
    assert found(lines, [Input("a0", (7, 3), "S(0)", PARTITION)], backend=backend).kind == RIGHT


def test_a_shard_of_one_row_has_any_stride() -> None:
    assert found(["v0 = a0[::3]", "v1 = v0.argsort(0)"], [Input("a0", (2,), "S(0)", {0: [0, 2]})], (2,)).kind == RIGHT


@pytest.mark.parametrize("write", ["a0.add_(a1.sum())", "v0.add_(a1.sum())", "a0[0] = a1.sum()"])
def test_what_was_turned_while_there_were_views_takes_no_gradients(write: str) -> None:
    """Autograd would take the views again, of what has other dims now."""
    inputs = [Input("a0", (6, 2), "S(0)", {0: [5, 0, 1]}), Input("a1", (2, 4), grad=True)]
    told = found(["v0 = a0.mT", "a0.unsqueeze_(0)", write], inputs)
    assert told.kind == REFUSED, told
    assert "was turned in place" in told.text
    assert found(["a0.unsqueeze_(0)", write.replace("v0", "a0")], inputs).kind == RIGHT
    assert found(["v0 = a0.mT", "a0.unsqueeze_(0)", write.replace("a1", "a1.detach()")], inputs).kind == RIGHT


def test_rows_are_compared_with_their_target_in_the_forward_pass() -> None:
    """Both have one size, which gradients would be the first to say."""
    inputs = [Input("a0", (2, 4), "R", grad=True), Input("a1", (5, 2, 4), "S(2)", {0: [0, 1, 3]}, grad=True)]
    lines = [
        "v0 = a1 * 2",
        "v1 = a0.unflatten(0, [1, 2])",
        "v2 = v1.index_add(0, torch.arange(5).remainder(1), a1)",
    ]
    assert found(lines, inputs, backend="aot_eager").kind == RIGHT
    other = [*lines[:2], lines[2].replace("a1)", "a1[..., :1])")]
    with LocalRanks(3, processes=False) as ranks:
        assert judge(ranks, Program((3,), inputs, other, refused=True)).kind == REFUSED


def test_rows_of_a_dim_whose_size_is_a_symbol_are_taken_apart() -> None:
    inputs = [Input("a0", (4, 6, 3), "S(2)", {0: [3, 0]}), Input("a1", (4, 6, 3), "S(1)", {0: [0, 6]})]
    lines = ["v0 = torch.cat([a0, a1], 0)", "v1 = v0.unbind(0)[-1]", "v2 = v1.log_softmax(0)"]
    assert found(lines, inputs, (2,), backend="aot_eager").kind == RIGHT


@pytest.mark.parametrize(
    ("line", "mesh", "inputs"),
    [
        (
            'v4 = torch.einsum("ab,cd->cdab", a1, v3)',
            (2, 2),
            [Input("a0", (6, 1, 4), "R S(1)", {1: [1, 0]}), Input("a1", (3, 2), "R R")],
        ),
        ("v4 = 2**v3.mT", (2, 2), [Input("a0", (6, 2, 4), "R S(1)", {1: [1, 1]})]),
    ],
    ids=["einsum", "power"],
)
def test_what_follows_a_product_of_partition_rows_is_stored_as_a_plain_result(
    line: str, mesh: tuple[int, ...], inputs: list[Input]
) -> None:
    """Kernels tell the order of dims by the strides along sizes of 1 as well."""
    assert (
        found(["v0 = a0 * 2", "v1 = v0[5:, :1]", "v2 = v1.flatten(0, 2)", "v3 = v0 @ v2", line], inputs, mesh).kind
        == RIGHT
    )


def test_a_copy_keeps_strides_along_sizes_of_1() -> None:
    inputs = [Input("a0", (6, 1), "R"), Input("a1", (3, 2), "R")]
    lines = ["v0 = (a0 * 2).mT.clone()", 'v1 = torch.einsum("ab,cd->cdab", a1, v0.mT)']
    assert found(lines, inputs).kind == RIGHT


@pytest.mark.parametrize(
    "line", ["v0.abs() + 0.5", "2 / v0.abs()", "v0.abs() > 0", "F.hardtanh(v0.abs())", "v0.abs().clamp_max(1)"]
)
def test_strides_along_sizes_of_1_are_those_of_an_operand_that_meets_a_number(line: str) -> None:
    """Two contiguous tensors of one shape give one in rows; a number is a tensor without dims, and no option is."""
    inputs = [Input("a0", (6, 1), "S(0)", {0: [5, 1]}), Input("a1", (1, 2, 1), "R")]
    lines = ["v0 = a0.expand([1, 6, 3]).transpose(2, -3).unsqueeze(2)", f"v1 = {line}", "v2 = a1 + v1"]
    assert found(lines, inputs, (2,)).kind == RIGHT


@pytest.mark.parametrize(
    "line",
    ["v0.max()", "v0.min()", "v0.long().std()", "v0.long().var(0)", "(v0 > 0).argmax(0)", "(v0 > 0).argmin()"],
)
@pytest.mark.parametrize("layout", ["R", "S(0)"])
def test_reductions_that_plain_pytorch_refuses(line: str, layout: str) -> None:
    """Of nothing, or of what has no such reduction: shards are reduced by ops that know more."""
    given = Input("a0", (0, 3) if "()" in line and "long" not in line else (4, 3), layout, {0: [0, 0, 0]})
    if layout == "R" or given.shape[0]:
        given = Input("a0", given.shape, layout, {0: [3, 0, 1]} if layout != "R" else {})
    with LocalRanks(3, processes=False) as ranks:
        assert judge(ranks, Program((3,), [given], ["v0 = a0 * 2", line], refused=True)).kind == REFUSED


def test_the_gradient_of_a_product_leaves_sizes_open() -> None:
    """It has a cumulative product, which would make a number of a size that the forward graph has given away."""
    lines = ["v0 = a0.prod(-1)", "v1 = a0.cummin(1)[0]"]
    assert found(lines, [Input("a0", (4, 6), "R", grad=True)], (2,), "aot_eager").kind == RIGHT


@pytest.mark.parametrize(
    ("line", "write"),
    often(
        [("v0 = a0 * 2", "v0.diagonal(1, 1, 0).view([-1]).fill_(0.25)"), ("v0 = a1 * 2", "v0[1:].diagonal().mul_(3)")],
        1,
    ),
)
def test_a_diagonal_of_a_view_is_written_to_in_a_graph(line: str, write: str) -> None:
    inputs = [Input("a0", (6, 5), "S(0)", {0: [4, 0, 2]}), Input("a1", (5, 5), "R")]
    assert found([line, write], inputs, backend="aot_eager").kind == RIGHT


@pytest.mark.parametrize("sizes", often([[0, 1, 0], [0, 0, 1]], 1))
def test_a_partition_that_a_program_knows_has_no_graph_of_its_own(sizes: list[int]) -> None:
    """Half of a chunked tensor has a static partition, which may equal an input's partition, or not."""
    inputs = [Input("a0", (1, 2), "S(0)", {0: sizes}, grad=True)]
    lines = ['v0 = to(a0.expand([2, -1]), "S(0)")', "v1 = v0.chunk(2, 0)[-1]", "v2 = torch.stack([v1, a0], 2)"]
    assert found(lines, inputs, backend="aot_eager").kind == RIGHT


def test_a_slice_of_a_known_partition_has_the_same_graph_on_all_ranks() -> None:
    """A rank whose shard of the slice is empty would have had fewer nodes, and another order of collectives."""
    inputs = [
        Input("a0", (5, 6, 3), "R"),
        Input("a1", (6, 2), "S(1)", {0: [2, 0, 0]}, grad=True),
    ]
    lines = [
        'v0 = to(a1, "S(0)")',
        "v1 = torch.fft.hfft(v0, n=2, dim=-1)",
        "v2 = (lambda r: whole(to(r, 'S(0)')) - whole(r))(torch.rand_like(a0))",
        "v3 = a1.abs().flatten(0, 1)[:-3]",
        "v4, v5 = v0.split(3, 0)[:2]",
        "v6 = torch.randint_like(v4, 3, 4)",
    ]
    assert found(lines, inputs, backend="shardcompile").kind == RIGHT


@pytest.mark.ranks(3, processes=False)
def test_sizes_that_a_program_states_are_compared_with_none() -> None:
    """Not even where an input has them: a guard would have a graph for that partition, and another for all others."""
    compiled = once(
        lambda: torch.compile(
            lambda x, y: x.redistribute(placements=[Shard(0)], sharding_shapes={0: [5, 0, 2]}) * y.sum(1, True),
            fullgraph=True,
            backend="aot_eager",
            dynamic=True,
        )
    )
    before = once(graphs_compiled)
    for sizes in ([5, 0, 2], [1, 3, 3], [5, 0, 2], [4, 0, 3]):
        full = torch.arange(21.0).reshape(7, 3)
        x = ShardTensor.from_local(full.split(sizes)[rank()].clone(), mesh(), [Shard(0)], {0: sizes})
        torch.testing.assert_close(compiled(x, x).full_tensor(), full * full.sum(1, True))
    assert graphs_compiled() - before == 1


@pytest.mark.nightly
def test_rows_are_written_into_a_shard_that_is_not_stored_in_rows() -> None:
    """Whether the result is contiguous is asked of nobody's shard."""
    inputs = [
        Input("a0", (6, 4), "P(sum) S(1)", {1: [0, 4]}),
        Input("a1", (4, 4), "P(sum) S(1)", {1: [1, 3]}),
    ]
    lines = ["v0 = torch.cat([a0, a1, a0], 0)", "v0.movedim(0, -1)[:2].fill_(0.25)"]
    assert found(lines, inputs, (2, 2), "aot_eager").kind == RIGHT


@pytest.mark.nightly
def test_a_slice_of_a_dim_that_no_shard_tells_through_inductor() -> None:
    given = [
        Input("a0", (7, 3), layout="S(0)", sizes={0: [0, 0, 0, 7]}),
        Input("a1", (3, 3)),
        Input("a2", (7, 6), layout="R", dtype="int64", seed=367874),
        Input("a3", (3, 3), layout="P(sum)", seed=647163),
    ]
    lines = [
        *("v0 = a0[:, -4:5]", "v1 = a0[:4]", "v1.fill_(0.75)", "v2 = whole(v1)"),
        "a3[:1:2].unflatten(0, [1, 1]).mul_(1.5)",
        *("v3 = torch.stack([a0, v0], 1)", "v4 = torch.cat([v2, v1], -1)", "v5 = v1.flatten(0, 1)"),
        *("v6 = torch.cat([v5, v5, v5], 0)", "v7 = torch.stack([a0, v0], 0)", "v8 = a0.unflatten(0, [7, 1])"),
        *("v9 = whole(v8)", "v10 = v8.softmax(1)", "v11 = v10.min(1, keepdim=True)[0]  # if apart(v10, 1)"),
    ]
    assert found(lines, given, (4,), backend="inductor").kind == RIGHT


def test_a_gradient_that_autograd_makes_of_nothing() -> None:
    """It is plain and full of zeros: no gradient reached the products."""
    inputs = [Input("a0", (1, 0), "S(1)", {0: [0, 0]}, grad=True)]
    lines = ["v0 = a0.cumprod(-2)", "v1 = torch.linalg.vector_norm(v0, 1, [-2], True)"]
    assert found(lines, inputs, (2,)).kind == RIGHT


def test_a_size_that_the_backward_pass_finds_to_be_a_number() -> None:
    """The halves of `glu` add up to its input: half of what is at least 1 and at most 3 is 1, so all of it is 2."""
    inputs = [Input("a0", (2, 1, 0), "S(0)", {0: [1, 1]}, grad=True)]
    lines = [
        *("v0 = a0.movedim(0, -1)", "v1 = F.pad(v0, [2, 0], value=0.5)", "v2 = F.glu(v0, 2)"),
        "v3 = torch.addcmul(v1, v1, v2, value=0.5)",
    ]
    assert found(lines, inputs, (2,), "aot_eager").kind == RIGHT


def test_a_row_of_a_shard_whose_size_a_run_gives_is_written_to() -> None:
    inputs = [Input("a0", (4, 6), "S(0)", {0: [1, 1, 2]})]
    lines = ["v0 = torch.cat([a0, a0], 0)", 'v1 = to(v0, "S(1)")', "v1.unbind(0)[-1].zero_()"]
    assert found(lines, inputs, backend="aot_eager").kind == RIGHT


@pytest.mark.parametrize("dims", [(4, 0, 7), (0, 7, 3)])
def test_dims_without_elements_do_not_tell_shards_apart(dims: tuple[int, ...]) -> None:
    """One such dim counts as one element in strides, a shard without rows as none."""
    place = dims.index(7)
    inputs = [Input("a0", dims, f"S({place})", {0: [2, 3, 2, 0]}, inferred=True)]
    assert found(["v0 = a0 * 2"], inputs, (4,), "aot_eager").kind == RIGHT


@pytest.mark.nightly
def test_a_size_that_the_backward_pass_finds_to_be_a_number_beside_gradients_that_nobody_wants() -> None:
    """The gradient of `cumprod` of a plain tensor is a loop over the size, which the forward pass does not ask for."""
    inputs = [
        Input("a0", (6, 4), "S(1) S(0)", {1: [6, 0], 0: [4, 0]}, grad=True),
        Input("a1", (4,), "P(sum) S(0)", {1: [2, 2]}, grad=True),
    ]
    lines = ["v0 = torch.cat([a1, a1, a1], 0)", "v1 = whole(a0)", "v2 = a0 + a1", "v3 = v1.cumprod(-2)"]
    assert found(lines, inputs, (2, 2), "aot_eager").kind == RIGHT


def test_a_dim_without_rows_that_is_partition_twice_tells_its_shards() -> None:
    inputs = [Input("a0", (1, 0, 1), "S(1) S(1)", {1: [0, 0, 0, 0]}), Input("a1", (1, 1))]
    assert found(["v0 = a0 @ a1"], inputs, (2, 2), "aot_eager").kind == RIGHT


@pytest.mark.parametrize(
    "part", ["tensor_split(3, 0)[0]", "split(56)[1]", "chunk(3)[2]", "unflatten(0, [3, -1])[1]", "narrow(0, 9, 30)"]
)
def test_parts_of_a_flattened_tensor_are_written_to(part: str) -> None:
    """Its rows stay on their ranks, and are no neighbours there."""
    inputs = [Input("a0", (7, 6, 4), "R S(2)", {1: [4, 0]}), Input("a1", (7, 6, 4), "R S(1)", {1: [2, 4]})]
    lines = ["v0 = a0.reshape([-1])", f"v0.{part}.mul_(2)", "v1 = a1.flatten()", f"v1.{part}.zero_()"]
    assert found(lines, inputs, (2, 2)).kind == RIGHT


def test_rows_of_a_shard_whose_size_a_run_gives_are_filled() -> None:
    inputs = [Input("a0", (7, 1), "S(1)", {0: [0, 1, 0]}, grad=True), Input("a1", (7, 4), "S(1)", {0: [0, 3, 1]})]
    lines = [f"v{n} = a{n}.index_fill({n}, torch.tensor([0, 2, 0]) % {7 if not n else 4}, 0.5)" for n in (0, 1)]
    lines.append("v2 = a0.index_fill(1, torch.tensor([0, 0]), 0.5)")
    assert found(lines, inputs, backend="aot_eager").kind == RIGHT


def test_what_a_sum_of_products_does_not_save_is_written_to() -> None:
    inputs = [Input("a0", (4, 5), "S(1)", {0: [2, 2, 1]}, grad=True), Input("a1", (5, 6), "S(0)", {0: [0, 4, 1]})]
    lines = ["v0 = a0 / 3", 'v1 = torch.einsum("ab,cd->abcd", a1.sin(), v0)', "v0.mul_(1.5)"]
    assert found(lines, inputs).kind == RIGHT


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_a_sum_of_products_that_no_gradient_reaches(backend: str | None) -> None:
    """Autograd makes that of zeros, which are plain."""
    inputs = [Input("a0", (1, 0), "S(1)", {0: [0, 0, 0]}, grad=True), Input("a1", (1, 3), grad=True)]
    lines = ['v0 = torch.einsum("ab,ac->bc", a0, a1)', "v1 = torch.linalg.vector_norm(v0, 1, [-2], True)"]
    assert found(lines, inputs, backend=backend).kind == RIGHT


def test_a_gradient_of_one_row_that_was_expanded_is_partition_again() -> None:
    """Its only row has the stride of expanded rows, and a trace knows no shard to be as small."""
    inputs = [
        Input("a0", (1, 2), "R S(1)", {1: [2, 0]}, grad=True),
        Input("a1", (1, 2), "S(0) S(1)", {0: [1, 0], 1: [0, 2]}, grad=True),
    ]
    lines = ["v0 = a0.unflatten(1, [1, 2])", "v1 = torch.stack([a0, a1], 0)", "v2 = v0.sum([2, -2], False)"]
    assert found(lines, inputs, (2, 2), "aot_eager").kind == RIGHT


def test_a_column_that_a_compiled_function_returns_is_stored_as_a_plain_one() -> None:
    """Its shard is a copy, and AOTAutograd takes a view of it where a gradient is wanted."""
    inputs = [Input("a0", (5, 5), "S(1)", {0: [0, 3, 2]}, grad=True)]
    told = found(["v0 = a0[..., -2]"], inputs, backend="aot_eager")
    assert told.kind == RIGHT, told


def test_the_gradient_of_an_embedding_whose_table_may_be_empty() -> None:
    inputs = [Input("a0", (7, 1)), Input("a1", (5, 1), "P(sum) S(1)", {1: [1, 0]}, grad=True)]
    lines = [
        *("v0 = F.embedding(torch.tensor([3], dtype=torch.int64), a1)", "v1 = torch.cat([v0, a1], 0)"),
        *("v2 = v1.split(2, -1)[0]", "v3 = a0 * a0"),
    ]
    told = found(lines, inputs, (2, 2), "aot_eager_decomp_partition")
    assert told.kind == RIGHT, told


@pytest.mark.parametrize("layout", ["P(sum)", "S(0)", "S(1)", "R"])
@pytest.mark.parametrize(
    "view", ["v0.flatten(0, 1).unfold(0, 33, 2)", "v0.unfold(1, 3, 1)", "v0.as_strided([3, 2], [1, 1])"]
)
def test_windows_are_written_to_once_for_each_that_has_a_row_or_not_at_all(view: str, layout: str) -> None:
    """Plain PyTorch adds to a row once for each window that it is in."""
    sizes = {"S(0)": {0: [2, 0, 3]}, "S(1)": {0: [0, 6, 1]}}.get(layout, {})
    inputs = [Input("a0", (5, 7), layout, sizes)]
    told = found(["v0 = a0 * 2", f"{view}.add_(0.5)"], inputs)
    assert (
        told.kind == RIGHT
        or "lie in one place" in told.text
        or "share a memory location" in told.text
        or "no way back" in told.text
    ), told
    assert told.kind in (RIGHT, REFUSED), told
    assert layout != "P(sum)" or told.kind == REFUSED
    assert found(["v0 = a0 * 2", f"{view}.zero_()"], inputs).kind in (RIGHT, REFUSED)


@pytest.mark.parametrize(
    ("lines", "inputs", "mesh"),
    [
        (
            ["v0 = a0.mT.expand([2, -1, 3])", "v1 = v0.index_fill(0, a1.reshape(-1).remainder(2), 0.5)"],
            [Input("a0", (1, 3, 4)), Input("a1", (1, 3, 4), "R S(0)", {1: [1, 0]}, "int64")],
            (2, 2),
        ),
        (
            ['v0 = torch.einsum("ab,cd->abcd", a0.index_add(0, torch.arange(6), a0), a0)', "v1 = torch.cat([v0, v0], 1)"],
            [Input("a0", (6, 1), "P(sum)")],
            (3,),
        ),
        (
            ['v0 = a0.mT.div(a1, rounding_mode="floor")'],
            [Input("a0", (5, 4), "S(0)", {0: [2, 0, 3]}), Input("a1", (), "R")],
            (3,),
        ),
        (
            ["v0 = torch.fft.ihfft(a0, n=4, dim=0).real * 2", 'v1 = torch.einsum("ab,cd->cdab", a1[:, 3:], v0)'],
            [Input("a0", (6, 1), "S(1)", {0: [1, 0]}), Input("a1", (1, 5))],
            (2,),
        ),
    ],
)  # fmt: skip
def test_results_are_stored_as_those_of_plain_pytorch(
    lines: list[str], inputs: list[Input], mesh: tuple[int, ...]
) -> None:
    assert found(lines, inputs, mesh).kind == RIGHT


def test_what_has_no_order_of_dims_is_brought_to_the_order_of_rows() -> None:
    """An expanded tensor has strides of 0. Its gathered shards lie in memory with the sharded dim first."""
    inputs = [
        Input(f"a{n}", shape, "S(1)", {0: [1, 1, int(e)]}, grad=True)
        for n, (shape, e) in enumerate([((5, 3), 1), ((2, 5, 4), 3), ((2, 4, 3), 2)])
    ]
    assert found(["v0 = torch.addbmm(a0, a1, a2)"], inputs).kind == RIGHT


def test_a_part_is_filled_of_a_shard_of_one_column() -> None:
    inputs = [Input("a0", (5, 1), "S(1)", {0: [0, 1, 0]})]
    for line in ("a0[::3] = 1.25", "v0 = torch.fill(a0[::3], weight(1)[0])", "a0.fill_diagonal_(1.0)"):
        assert found([line], inputs, backend="aot_eager_decomp_partition").kind == RIGHT


def test_rows_are_partition_off_a_part_whose_size_is_a_formula() -> None:
    lines = ["v0 = a0.tensor_split(2, 1)[0]", "v1 = F.pad(v0, [1, -1], value=0.5)"]
    assert found(lines, [Input("a0", (1, 7), "S(1)", {0: [5, 2, 0]})], backend="aot_eager").kind == RIGHT


@pytest.mark.nightly
def test_a_size_that_a_gradient_alone_tells() -> None:
    """The gradient of `v6` has a size of its own, which no tensor of the forward pass has."""
    lines = [
        *("v0 = a2.expand([1, -1, 4])", "v1 = torch.cat([a2, a2], 0)", 'v2 = torch.einsum("ab,c->abc", a0, a3)'),
        *("v3 = v2[:, 6:-3]", "v4 = v2.roll(2, 0)", "v5 = v2.std()  # if away(v2.std(), 0)"),
        *("v6 = v4.unflatten(-3, [1, 5])", "v7 = v3[4:4, 0::3]", "v8 = (v5.square() + 1).sqrt()"),
        *("v9 = v3[-5, :]", "v10 = torch.stack([v1, v1], 1)"),
    ]
    inputs = [
        Input("a0", (5, 7), "S(1) S(0)", {1: [1, 4], 0: [7, 0]}, grad=True, seed=956447),
        Input("a2", (7, 1), "S(0) S(0)", {1: [4, 2, 1, 0]}, grad=True, seed=490766),
        Input("a3", (7,), "S(0) S(0)", {1: [5, 0, 1, 1]}, seed=611518, inferred=True),
    ]
    assert found(lines, inputs, (2, 2), "aot_eager_decomp_partition").kind == RIGHT


def test_windows_of_a_shard_of_one_column_have_gradients() -> None:
    lines = ["v0 = a2.expand([1, -1, -1])", "v3 = v0.unfold(1, 2, 1)"]
    inputs = [Input("a2", (1, 4, 4), "R S(2)", {1: [3, 1]}, grad=True)]
    assert found(lines, inputs, (2, 2), "aot_eager_decomp_partition").kind == RIGHT


@pytest.mark.nightly
def test_strides_of_sizes_that_a_run_gives_are_sorted_by_inductor() -> None:
    lines = ["v0 = torch.zeros_like(a1)", "v1 = v0.rot90()", "v3 = a0 @ v1"]
    inputs = [
        Input("a0", (4,), "S(0)", {0: [0, 4, 0]}, "float32", grad=True),
        Input("a1", (4, 4), "S(1)", {0: [2, 1, 1]}, "float32", grad=True),
    ]
    assert found(lines, inputs, (3,), "inductor").kind == RIGHT


@pytest.mark.parametrize("backend", often([None, "aot_eager"], 1))
@pytest.mark.parametrize(
    "line",
    [
        "v2 = torch.view_as_real(torch.view_as_complex(v1))",
        "torch.view_as_complex(v1).zero_()",
        "torch.view_as_real(torch.view_as_complex(v1))[1:].fill_(1)",
        "v1.view(torch.complex128)[1:].fill_(1)",
    ],
)
def test_a_shard_that_begins_within_a_pair_is_viewed_as_complex_numbers(line: str, backend: str | None) -> None:
    """One rank has one of the rows that go, and so does no rank know that another one begins at an odd row."""
    lines = ["v0 = a0[2:]", "v1 = v0.view(3, 2)", line, "v3 = v0 + 1"]
    told = found(lines, [Input("a0", (8,), "S(0)", {0: [1, 7]})], (2,), backend)
    assert told.kind == RIGHT, told


def test_strides_of_a_shard_without_rows_are_no_matter_to_complex_numbers() -> None:
    lines = [
        *("v0 = torch.diag_embed(a0.unfold(-1, 1, 3).sin())", "v1 = torch.fft.rfftn(v0, s=[1, 1, 2], dim=[2, 1, 0])"),
        "v2 = a0 @ torch.view_as_real(v1)",
    ]
    told = found(lines, [Input("a0", (1,), "S(0)", {0: [1, 0]}, grad=True)], (2,))
    assert told.kind == RIGHT, told


@pytest.mark.nightly
def test_a_program_is_compiled_after_one_that_could_not_be() -> None:
    """Dynamo has seen another size by then, and makes a symbol of one that the program takes for a number."""
    backend = "aot_eager_decomp_partition"
    before = Program((2,), [Input("a0", (2, 7))], ["a0.squeeze_()"])
    lines = [
        *("v0 = a0.flatten(0, 1)", 'v1 = to(v0, "S(0)")', "v2 = torch.zeros_like(v1)", "v3 = a0.mean([1], True)"),
        *("v4 = v2.index_add(0, torch.arange(24), v0)", "v5 = v3.flatten(0, 1)", "v6 = F.normalize(v5, dim=-1)"),
        "v7 = torch.cat([v1, v5, v1], 0)",
    ]
    program = Program((2,), [Input("a0", (6, 4), "P(sum)", grad=True)], lines)
    torch._dynamo.reset()
    with LocalRanks(2, processes=False) as ranks:
        assert judge(ranks, before, backend).kind == REFUSED
        told = judge(ranks, program, backend)
    assert told.kind == RIGHT, told


@pytest.mark.parametrize(
    ("lines", "inputs", "mesh"),
    often(
        [
            (["v0 = a0.masked_select(weight(0) > 0)"], [Input("a0", (0,), "S(0)", {0: [0, 0, 0]}, grad=True)], (3,)),
            (["v0 = a0.sum([0, 1], True)", "v1 = v0[:0]"], [Input("a0", (7, 3), "S(0)", PARTITION, grad=True)], (3,)),
            (
                ["v0 = a1 @ a1[:, :1]", "v1 = torch.fft.ihfft(v0, n=1, dim=0).real * 2"],
                [Input("a0", (2, 2, 1), grad=True), Input("a1", (1, 2, 1), "S(0) S(0)", {1: [1, 0, 0, 0]})],
                (2, 2),
            ),
        ],
        3,
    ),
    ids=["a mask of no rows", "no rows of a pending sum", "a transform along a dim that two mesh dims shard"],
)
def test_compiled_layouts_are_those_of_eager_mode(lines: list[str], inputs: list[Input], mesh: tuple[int, ...]) -> None:
    told = found(lines, inputs, mesh, "aot_eager")
    assert told.kind == RIGHT, told


def test_rows_of_a_dtype_that_kernels_hardly_know_are_taken_in_a_graph() -> None:
    lines = ["v0 = a0.abs().to(torch.uint64)[1:].to(torch.float64)  # if rounds_alike(a0.abs(), torch.uint64)"]
    assert found(lines, [Input("a0", (2,), "S(0)", {0: [0, 1, 1]})], backend="aot_eager").kind == RIGHT
