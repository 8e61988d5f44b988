"""Compiled programs that the fuzzer found to go wrong once, each in a few lines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Replicate, Shard

import shardcompile as sc
from shardcompile.testing import LocalRanks, once, rank
from tests.support.tiers import often, spread
from tools.fuzz import RIGHT, Found, Input, Program, judge


@dataclass(frozen=True)
class Finding:
    """A program, and the backend that it went wrong with."""

    backend: str
    mesh: tuple[int, ...]
    inputs: list[Input]
    lines: list[str]


FINDINGS = {
    "a join of images with the channel last, of rows that an op gives": Finding(
        "inductor",
        (2,),
        [Input("a0", (2, 2, 12, 6), "S(2)", {0: [8, 4]}, grad=True)],
        ["v0 = F.conv2d(a0, weight(3, 2, 2, 2), stride=2)", "v1 = torch.cat([v0.movedim(1, 3)], 1)"],
    ),
    "the last chunk has one row, by a size that varies": Finding(
        "aot_eager",
        (2, 2),
        [Input("a0", (2, 7), "R S(1)", {1: [6, 1]}), Input("a1", (5, 2), dtype="float32", seed=211880)],
        [
            *("v0 = a1.logsumexp([-2], False)", 'v1 = to(a0, "S(1) S(0)")', "v3 = -v0"),
            *("v4 = v3.chunk(4, 0)[-1]", "v6 = v4 - v1"),
        ],
    ),
    "a slice that ends behind the last row, of rows that vary": Finding(
        "inductor",
        (2,),
        [
            Input("a0", (4, 2), "S(1)", {0: [0, 2]}, grad=True),
            Input("a2", (4, 2), "S(1)", {0: [2, 0]}, grad=True),
        ],
        ["v3 = (a2 + a0).movedim(0, -1)", "v9 = a2[3:6:3, None, 0:4:2]", "v10 = a0.prod(1)"],
    ),
    "a largest row that comes back from its integers is written to": Finding(
        "inductor",
        (2,),
        [Input("a0", (1, 2, 1), "S(2)", {0: [1, 0]}, grad=True)],
        ["v0 = a0.amax([-2, -1], False)", "v1 = v0.index_add(0, torch.arange(1), v0)"],
    ),
    "ranks with and without rows of known shards start collectives in one order": Finding(
        "shardcompile",
        (2, 2),
        [
            Input("a0", (4, 3, 6), "S(1) S(0)", {1: [3, 1], 0: [0, 3]}, grad=True, seed=357682),
            Input("a1", (4, 3, 6), seed=303316),
            Input("a2", (4, 3, 6), "R S(2)", {1: [6, 0]}, grad=True, seed=761636, inferred=True),
        ],
        [
            "v0 = a1.index_add(0, torch.arange(4).mul(4).remainder(4), a0)",
            *("v1 = torch.cat([v0, a0, v0], 0)", "v2 = a0[:, torch.tensor([2, 2], dtype=torch.int64)]"),
            *("v3 = F.conv1d(v0, weight(2, 3, 3), padding=0)", "v4 = v3.view([-1])", 'v5 = to(v2, "S(0) S(2)")'),
            *('v6 = to(v3, "S(1) S(2)")', "v7 = v5.median(-3)[0]", "v8 = torch.cdist(v6, v6 + 1)"),
            "v9 = torch.cat([v5, v2], 0)",
        ],
    ),
    "what is written to a pending sum depends on the same values on every rank": Finding(
        "shardcompile",
        (3,),
        [Input("a2", (), "R", grad=True, seed=679908), Input("a3", (7,), "S(0)", {0: [2, 1, 4]}, grad=True)],
        [
            *("v0 = a3.sum([0], False)", "v1 = v0.reshape([-1])", "v2 = a3.unflatten(0, [1, 7])"),
            *("v1[..., 1:] += a2.sum()", "v4 = F.mse_loss(v0, a2.expand_as(v0))"),
        ],
    ),
    "the local shard of the only row": Finding(
        "shardcompile", (3,), [Input("a0", (1, 4), "P(sum)")], ["v0 = a0.sigmoid()", 'v1 = to(v0, "S(0)")']
    ),
    "a softmax along a sharded dim, of shards of one row": Finding(
        "shardcompile",
        (2, 2),
        [Input("a0", (2, 3), "S(1) S(0)", {0: [1, 2], 1: [1, 1]}, grad=True)],
        ["v0 = a0.softmax(-1)"],
    ),
    "a diagonal beside the main one is one row of rows that vary": Finding(
        "aot_eager_decomp_partition",
        (4,),
        [
            Input("a0", (4, 3), "S(1)", {0: [0, 1, 0, 2]}),
            Input("a1", (4, 3), "R", ways=("gaps", "gaps", "odd", "rows"), inferred=True),
            Input("a2", (3, 4), grad=True),
        ],
        [
            *("v0 = a2.numel() + a2", "v1 = a1 - a0", "v3 = v0.unsqueeze(1)", "v4 = v3.diagonal(1, 1, 0)"),
            *('v5 = to(v4, "R")', "v6 = v5.cummin(0)[0]  # if apart(v5, 0)", "v8 = torch.cat([v6, v4, v6], -2)"),
            "v10 = v8 * v3",
        ],
    ),
    "the backward pass needs what a result with a gradient was written over": Finding(
        "aot_eager_decomp_partition",
        (3,),
        [Input("a1", (5, 2, 5), dtype="float32"), Input("a2", (5, 1, 5), "P(sum)", dtype="float32", grad=True)],
        ["v0 = torch.atan2(a2, a1.square() + 1)", "a1[:] = v0"],
    ),
    "a rank without rows sends constants, which are equal": Finding(
        "inductor", (3,), [Input("a1", (2,), "R", grad=True)], ['v0 = to(a1, "S(0)")', "v1 = v0.cumprod(0)"]
    ),
    "what is written to a sharded input is used afterwards": Finding(
        "aot_eager_decomp_partition",
        (2, 2),
        [Input("a0", (7, 3, 7), "S(0) S(1)", {0: [2, 5], 1: [3, 0]}), Input("a1", (), grad=True)],
        ["a0.copy_(a1)", "v0 = a0.mT"],
    ),
    "what is written to a sharded input is used afterwards, and is of its partition": Finding(
        "aot_eager",
        (3,),
        [Input("a0", (7, 3), "S(0)", {0: [2, 0, 5]}), Input("a1", (7, 3), "S(0)", {0: [1, 5, 1]}, grad=True)],
        ["a0.mul_(a1.sin())", "v0 = a0[1:]", "v1 = a1.cos()"],
    ),
    "a size is one by a formula, and is joined with others": Finding(
        "aot_eager",
        (3,),
        [Input("a0", (4,), "S(0)", {0: [0, 2, 2]}), Input("a1", (4,)), Input("a2", (4,), seed=1037659)],
        [
            *("v0 = a1[:]", "v1 = a2[-2:6:3]", "v2 = torch.minimum(v1, v0)  # if away(v1 - v0, 0)"),
            "v3 = torch.stack([v2, a0], 1)",
        ],
    ),
    "a view is given a size of its own where the shard has rows": Finding(
        "aot_eager_decomp_partition",
        (2,),
        [Input("a1", (7, 4), "S(1)", {0: [0, 4]}), Input("a2", (1, 1), grad=True)],
        [
            *("v0 = a1.flatten(0, 1)", "a1[3:-7:2, -4:-4][0:2:3, :].copy_(weight(1)[0])"),
            *("v1 = F.pad(v0, [0, 0], value=0.5)", "v2 = torch.cat([v0, v1, v0], -1)"),
            *("v3 = a2.expand([3, 2])", "v4 = v3[:, torch.tensor([1, 0, 0], dtype=torch.int64)]"),
        ],
    ),
    "a collective of the backward pass depends on no gradient": Finding(
        "aot_eager",
        (3,),
        [Input("a1", (1,), "S(0)", {0: [0, 1, 0]}, grad=True)],
        [
            *("v0 = torch.cat([a1, a1], 0)", 'v1 = torch.einsum("a,c->ac", v0, whole(a1))'),
            *("v2 = F.pad(v1, [-1, 2, -1, -1], value=0.5)", "v3 = F.softplus(a1)"),
        ],
    ),
    "dims are flattened that have one of size 1 between them": Finding(
        "aot_eager_decomp_partition",
        (2, 2),
        [Input("a0", (2, 1, 4), "S(1) S(2)", {0: [0, 1], 1: [4, 0]}, grad=True)],
        ["v1 = a0[:, :, :6]", "v4 = v1.flatten(0, 2)"],
    ),
    "dims of size 1 are flattened of which two are sharded": Finding(
        "aot_eager",
        (2, 2),
        [Input("a1", (1, 1, 1), "S(2) S(0)", {1: [0, 1], 0: [0, 1]}, grad=True)],
        ["v4 = a1.flatten(0, 1)"],
    ),
    "a tensor is joined with itself": Finding(
        "aot_eager_decomp_partition",
        (2,),
        [Input("a0", (4, 7, 1), "S(1)", {0: [6, 1]}, grad=True)],
        ["v0 = torch.stack([a0, a0], 1)", "v1 = v0 * 2"],
    ),
    "an assert names a size that another one has replaced": Finding(
        "shardcompile",
        (4,),
        [
            Input("a0", (5, 6, 0), "P(sum)", grad=True, seed=975182, inferred=True),
            Input("a1", (5, 6, 0), seed=709852),
            Input("a2", (5, 1, 1), "S(1)", {0: [1, 0, 0, 0]}, grad=True, seed=42842),
        ],
        [
            *("v0 = a1 / (a0.abs() + 0.5)  # if away(a0, 0)", 'v1 = to(a0, "S(1)")', 'v2 = to(a0, "S(0)")'),
            *("v3 = v2.unfold(0, 2, 1).mean(-1)", "v4 = F.pad(a1, [0, 2, 1, 0, 1, 1], value=0.5)"),
            "v5 = v2.gather(-2, torch.ones_like(v2, dtype=torch.int64).cumsum(-2).mul(4).remainder(6))",
            *('v6 = to(v3, "R")', 'v10 = to(a1, "S(0)")', "v13 = torch.logaddexp(v10, v2)"),
            "v14 = torch.gt(v13, a2)  # if away(v13 - a2, 0)",
        ],
    ),
    "a view of one element, which a mask kept, is sharded where -1 stands": Finding(
        "aot_eager",
        (2,),
        [Input("a0", (1, 1), "S(1)", {0: [1, 0]}, seed=26405)],
        [
            "v0 = a0.abs() + 1",
            "v1 = v0.masked_select((v0.detach().amax([0]) > 0.1))  # if away(v0.detach().amax([0]), 0.1)",
            "v2 = v1.view([1, -1])",
            "v3 = v2.abs().clamp(max=100)",
        ],
    ),
    "rows that happen to come in pairs are merged where there are few": Finding(
        "aot_eager",
        (2, 2),
        [Input("a0", (3,), "P(sum) S(0)", {1: [3, 0]}, grad=True, seed=146717)],
        [
            *("v0 = a0.unfold(0, 2, 1).mean(-1)", "v4 = v0.view(torch.complex128).view(torch.float64)"),
            *("v9 = torch.cat([v4 * 2, v4], -1)", "v12 = torch.cat([v9, v4, v9], 0)"),
        ],
    ),
    "a size that is 1 by a formula is broadcast": Finding(
        "aot_eager",
        (2, 2),
        [Input("a0", (6, 3, 2), "P(sum) S(2)", {1: [0, 2]}, seed=599842)],
        [
            *("v1 = F.unfold(a0, (2, 2), padding=0, stride=2)", "v4 = F.linear(v1, weight(4, 1).to(v1.dtype))"),
            "v7 = v4 + v1",
        ],
    ),
    "a mask keeps rows of a count that a formula gives": Finding(
        "aot_eager",
        (3,),
        [
            Input("a0", (1, 2, 5), "P(sum)", seed=468033),
            Input("a1", (1, 2, 5), "S(0)", {0: [0, 1, 0]}, grad=True, seed=241979),
        ],
        [
            *("v0 = a1[:, :, :a1.shape[2] // 3]", 'v1 = to(v0, "S(1)")', "v8 = a0.unfold(-1, 2, 1).mean(-1)"),
            'v9 = to(v8, "S(1)")',
            "v10 = v9[:, (v9.detach().amax([0]) > 0.1)]  # if away(v9.detach().amax([0]), 0.1)",
        ],
    ),
    "a transform in Python asks a rank without rows whether its shard is empty": Finding(
        "aot_eager",
        (2, 2),
        [
            Input("a0", (6, 2, 6), "S(1) P(sum)", {0: [2, 0]}, grad=True, seed=740799),
            Input("a1", (6, 2, 1), "S(0) P(sum)", {0: [6, 0]}, grad=True, seed=253221, inferred=True),
            Input("a2", (6, 2, 6), "S(1) R", {0: [1, 1]}, seed=91938),
        ],
        [
            "v0 = a0.view(torch.complex128).view(torch.float64)",
            "v1 = (weight(6, 2) > 0.2).nonzero()",
            "v2 = torch.fft.fftn(a2, s=[1, 2, 6], dim=[0, 1, 2], norm=None).real * 2",
            *("v3 = v0 + a0", "v4 = v3.softmax(0)"),
            "v5 = torch.fft.fftshift(torch.fft.fft(v4, dim=2, norm=None)).imag * 2",
            "v6, v7 = torch.std_mean(v5, [2, 0, -2], keepdim=True)  # if away(v5.std([2, 0, -2]), 0)",
            *("v8 = v5[-5:, 4:4]", "v9 = v7.sum()", "v10 = torch.stack([v7, v6], 3)"),
            "v10[torch.tensor([0], dtype=torch.int64)] = 0.5",
        ],
    ),
}


def _judge(program: Program, backend: str) -> Found:
    with LocalRanks(program.ranks, processes=False) as ranks:
        return judge(ranks, program, backend)


LONG = (
    "an assert names a size that another one has replaced",
    "a slice that ends behind the last row, of rows that vary",
    "ranks with and without rows of known shards start collectives in one order",
    "a rank without rows sends constants, which are equal",
    "a largest row that comes back from its integers is written to",
    "a transform in Python asks a rank without rows whether its shard is empty",
)
"""Findings that take longest, up to half a minute each."""

SHORT = [name for name in FINDINGS if name not in LONG]
EACH = often([*spread(SHORT, 5), *LONG], len(SHORT[::5]))


@pytest.mark.parametrize("name", EACH)
def test_it_is_right_now(name: str) -> None:
    finding = FINDINGS[name]
    told = _judge(Program(finding.mesh, finding.inputs, finding.lines), finding.backend)
    assert told.kind == RIGHT, told


def test_an_size_of_one_is_broadcast_where_dynamo_has_seen_another_and_traces_again() -> None:
    """In the second trace it was a symbol, which a trace does not take for 1."""
    of_others = Program(
        (2, 2),
        [
            Input("a0", (0, 4, 0), "S(0) S(1)", {0: [0, 0], 1: [4, 0]}, grad=True),
            Input("a1", (0, 5), grad=True),
            Input("a2", (1, 1, 0)),
        ],
        [
            *("v0 = a1.index_select(-1, torch.tensor([4, 2], dtype=torch.int64))", "v1 = a2.prod(2)"),
            *("v3 = v0.view([-1])", "a2.transpose_(0, 1)", "v4 = a1.sum([0], True)", "v5 = v3[2:]"),
            *("v7 = torch.cat([a1, v4], -2)", 'v12 = to(a2, "S(2) S(2)", {1: [0, 0, 0, 0]})'),
        ],
    )
    _judge(of_others, "aot_eager")
    of_one = Program(
        (2,),
        [
            Input("a0", (1, 7), "S(0)", {0: [0, 1]}, grad=True, seed=310377),
            Input("a1", (7, 1), "P(sum)", seed=853882),
            Input("a2", (), "P(sum)"),
            Input("a3", (1, 7), "S(0)", {0: [1, 0]}),
        ],
        ["v1 = torch.gt(a1, a0)  # if away(a1 - a0, 0)", "v8 = whole(a0)", "v11 = F.pad(v8, [1, 2], value=0.5)"],
    )
    told = _judge(of_one, "aot_eager")
    assert told.kind == RIGHT, told


def _gathered_twice(x: Any) -> tuple[Any, Any]:
    return x.redistribute(placements=[Replicate()]), x.redistribute(placements=[Replicate()])


def _second_after_a_write_to_the_first(mesh: DeviceMesh, backend: str, grad: bool) -> Tensor:
    full = torch.arange(8.0).view(4, 2)
    x = sc.distribute_tensor(full, mesh, [Shard(0)], sharding_shapes={0: [3, 1]}).detach().requires_grad_(grad)
    first, second = torch.compile(_gathered_twice, fullgraph=True, backend=backend)(x)
    with torch.no_grad():
        first.fill_(9.0)
    whole: Tensor = second.full_tensor()
    return whole.detach()


@pytest.mark.parametrize("backend", ["aot_eager_decomp_partition", "shardcompile"])
@pytest.mark.parametrize("grad", [False, True])
def test_two_results_of_one_gather_do_not_share_memory(backend: str, grad: bool) -> None:
    with LocalRanks(2, processes=False) as ranks:
        for second in ranks(_second_after_a_write_to_the_first, backend, grad):
            torch.testing.assert_close(second, torch.arange(8.0).view(4, 2))


def _gathered(x: Any) -> Any:
    return x.redistribute(placements=[Replicate()]) if isinstance(x, sc.ShardTensor) else x.clone()


def _few(x: Any) -> float:
    return 2.0 if x.shape[0] < 6 else 3.0


NUMBERS: dict[str, Callable[[Any], list[Any]]] = {
    # Known while the graph is recorded: the program asks whether there are at most 5 rows, and the tracer whether what
    # is taken from x[3:] has two.
    "split": lambda x: [_gathered(x.split(3)[1])],
    "lookup": lambda x: [x[3:][torch.tensor([0, 1, 0])] * _few(x)],
    "cat": lambda x: [torch.cat([_gathered(x[3:]), x]) * _few(x)],
    # Known from the start
    "unbind": lambda x: [sum(x.unbind(0))],
    "view": lambda x: [x.view(2, 3) if x.shape[0] == 6 else x.view(5, 1)],
    "chunk": lambda x: [*x.chunk(2), _gathered(x.chunk(2)[1])],
    "range": lambda x: [sum(x[i] * i for i in range(x.shape[0]))],
    "unflatten": lambda x: [x.unflatten(0, (-1, 3 if x.shape[0] == 6 else 5))],
    "condition": lambda x: [x * 2 if 4 < x.shape[0] < 6 else x * 3],
    "plain tensor": lambda x: [x + torch.arange(5.0 + (x.shape[0] == 6), dtype=torch.float64)],
}
"""Ways for a size to become a number in a trace, by rows of which there are 5 or 6."""


def _by_a_number(way: Callable[[Any], list[Any]]) -> Callable[..., list[Any]]:
    """Results that have the size, made before and after it is a number, and an input that is written to."""

    def function(x: Any, y: Any) -> list[Any]:
        before = x.sin()
        y.mul_(before)
        table = torch.outer(before, x)
        return [before, x.flip(0), table.mT, *way(before), before.cos(), x[1:], x + y.sum(0), y.cos(), table * before]

    return function


def _states_sizes(mesh: DeviceMesh, function: Callable[..., list[Any]], backend: str, grad: bool) -> None:
    run = once(lambda: torch.compile(function, fullgraph=True, backend=backend))
    for rows, columns in [(3, 6), (2, 5), (3, 5)]:
        dist.barrier()  # ranks share the function
        generator = torch.Generator().manual_seed(columns)
        full = [torch.randn(s, generator=generator, dtype=torch.float64) for s in ((columns,), (rows, columns))]
        partitions = [[2, columns - 2], [rows - 1, 1]]
        x, y = (
            sc.ShardTensor.from_local(f.split(c)[rank()].clone(), mesh, [Shard(0)], {0: c})
            for f, c in zip(full, partitions, strict=True)
        )
        plain, written = full[0].requires_grad_(grad), full[1]
        results, wanted = run(x.requires_grad_(grad), y), function(plain, written)
        for got, want in zip([*results, y], [*wanted, written], strict=True):
            assert got.shape == want.shape
            torch.testing.assert_close(got.full_tensor(), want)
        if grad:
            sum(r.square().sum() for r in results).backward()
            sum(w.square().sum() for w in wanted).backward()  # type: ignore[union-attr]
            torch.testing.assert_close(x.grad.full_tensor(), plain.grad)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(("way", "backend"), often([(w, b) for b in ("aot_eager", "inductor") for w in NUMBERS], 1))
def test_results_state_an_size_that_becomes_a_number(way: str, backend: str, grad: bool) -> None:
    """What AOTAutograd has counted as a symbol the recorded graph does not return."""
    with LocalRanks(2, processes=False) as ranks:
        ranks(_states_sizes, _by_a_number(NUMBERS[way]), backend, grad)
