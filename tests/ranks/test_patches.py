"""Each patch of torch is needed: a program that is right with it, and goes wrong without it.

Where the second fails, torch no longer needs the patch (`shardcompile/compat/patches.py`): take it out.
"""

from __future__ import annotations

import contextlib
import copy
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as nnf
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor import sizevars
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Replicate, Shard

import shardcompile as sc
from shardcompile import compat
from shardcompile.compat.caches import set_in_cache_keys
from shardcompile.compat.patch import LEFT_OUT, leave_out
from shardcompile.compat.patches import all_patches
from shardcompile.testing import LocalRanks, rank
from tests.ranks.test_compiled_functions import mixed_modes
from tests.support.tiers import often
from tools.fuzz import REFUSED, RIGHT, Input, Program, judge

TORCH = tuple(int(n) for n in torch.__version__.split(".")[:2])


def random(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def sharded(full: Tensor, dim: int, sizes: list[int], mesh: DeviceMesh) -> Any:
    shard = full.split(sizes, dim)[rank()].clone()
    return sc.ShardTensor.from_local(shard, mesh, [Shard(dim)], {0: sizes}).detach().requires_grad_()


@dataclass(frozen=True)
class Compiled:
    """A function under Inductor, forward and backward: one graph for all partitions."""

    function: Callable[[Tensor], Tensor]
    make: Callable[[int], Tensor]
    dim: int
    partitions: Sequence[list[int]]

    def __call__(self) -> str:
        counter = CompileCounterWithBackend("inductor")
        run = torch.compile(self.function, fullgraph=True, backend=counter)
        with LocalRanks(2, processes=False) as ranks:
            ranks(self._compare, run)
        return RIGHT if counter.frame_count == 1 else f"{counter.frame_count} graphs"

    def _compare(self, mesh: DeviceMesh, run: Callable[..., Any]) -> None:
        for sizes in self.partitions:
            full = self.make(sum(sizes)).requires_grad_()
            x = sharded(full.detach(), self.dim, sizes, mesh)
            out, expected = run(x), self.function(full)
            torch.testing.assert_close(out.full_tensor(), expected)
            out.square().sum().backward(), expected.square().sum().backward()
            torch.testing.assert_close(x.grad.full_tensor(), full.grad)


@dataclass(frozen=True)
class Fuzzed:
    """A program of the fuzzer's, and how it ends with the patch: right, but for one that the patch refuses in words."""

    lines: Sequence[str]
    inputs: Sequence[Input]
    mesh: int | tuple[int, ...]
    backend: str = "aot_eager"
    ends: str = RIGHT

    def __call__(self) -> str:
        mesh = self.mesh if isinstance(self.mesh, tuple) else (self.mesh,)
        program = Program(mesh, list(self.inputs), list(self.lines))
        with LocalRanks(program.ranks, processes=False) as ranks:
            told = judge(ranks, program, self.backend).kind
        return RIGHT if told == self.ends else f"{told}, not {self.ends}"


def _inputs_with_gradients(mesh: DeviceMesh) -> None:
    full = [random(7, 3) + n for n in range(6)]

    def gathered(*xs: Any) -> Any:
        return sum(x.redistribute(placements=[Replicate()]).sin().sum() for x in xs)

    inputs = [sharded(x, 0, [6, 1], mesh) for x in full]
    for x in inputs:
        x.grad = torch.zeros_like(x)
    torch.compile(gathered, fullgraph=True, backend="inductor")(*inputs).backward()
    for x, whole in zip(inputs, full, strict=True):
        torch.testing.assert_close(x.grad.full_tensor(), whole.cos())


def inputs_with_gradients() -> str:
    with LocalRanks(2, processes=False) as ranks:
        ranks(_inputs_with_gradients)
    return RIGHT


def _rows_of_windows(mesh: DeviceMesh) -> None:
    def function(x: Any, plain: Tensor) -> Any:
        return x.sin(), nnf.linear(plain.unfold(1, 3, 3).clone(), WEIGHT, BIAS)

    plain = random(1, 5)
    torch._dynamo.maybe_mark_dynamic(plain, 1)
    _, got = torch.compile(function, fullgraph=True, backend="inductor")(sharded(random(5), 0, [4, 1], mesh), plain)
    torch.testing.assert_close(got, nnf.linear(plain.unfold(1, 3, 3), WEIGHT, BIAS))


def rows_of_windows() -> str:
    with LocalRanks(2, processes=False) as ranks:
        ranks(_rows_of_windows)
    return RIGHT


def _rows_of_groups(mesh: DeviceMesh) -> None:
    def function(x: Any, plain: Tensor) -> Any:
        return x.sin(), nnf.grouped_mm(plain.t().contiguous() * 2, mats, offs=ends)

    plain, mats = torch.ones(16, 7, dtype=torch.bfloat16), torch.ones(3, 16, 8, dtype=torch.bfloat16)
    ends = torch.tensor([2, 2, 7], dtype=torch.int32)
    _, got = torch.compile(function, fullgraph=True, backend="inductor")(sharded(random(5), 0, [4, 1], mesh), plain)
    torch.testing.assert_close(got, torch.full((7, 8), 32, dtype=torch.bfloat16))


def rows_of_groups() -> str:
    with LocalRanks(2, processes=False) as ranks:
        ranks(_rows_of_groups)
    return RIGHT


class WithBuffer(torch.nn.Module):
    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.table.cos()  # type: ignore[operator]


def _buffer_of_a_module(mesh: DeviceMesh, counter: CompileCounterWithBackend) -> None:
    full, model = random(7), WithBuffer(torch.zeros(()))
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for sizes in ([6, 1], [0, 7]):
        model.table = sharded(full, 0, sizes, mesh).detach()
        torch.testing.assert_close(compiled(sharded(full, 0, sizes, mesh)).full_tensor(), full * full.cos())


def buffer_of_a_module() -> str:
    counter = CompileCounterWithBackend("aot_eager")
    with LocalRanks(2, processes=False) as ranks:
        ranks(_buffer_of_a_module, counter)
    return RIGHT if counter.frame_count == 1 else f"{counter.frame_count} graphs"


def asked_for_strides() -> str:
    """A transpose of shards: how often Inductor's C++ code generation simplifies an index to find a stride in it."""
    sizevars.stride_at_vec_range.cache_clear()
    scene = Compiled(lambda x: (x.mT.contiguous().sin() * x.shape[0]).mT, lambda n: random(n, 5, 4), 0, [[3, 4]])
    with mock.patch.object(sizevars, "stride_at", wraps=sizevars.stride_at) as simplified:
        told = scene()
    return told if told != RIGHT or simplified.call_count == 0 else f"simplified {simplified.call_count} indices"


@dataclass(frozen=True)
class Refused:
    """Something that we refuse to do with a sharded tensor: on each rank, before any communication."""

    act: Callable[[DeviceMesh, Any], object]
    ranks: int = 1
    words: str = ""  # what the error has to say

    def __call__(self) -> str:
        with LocalRanks(self.ranks, processes=False) as ranks:
            (told,) = set(ranks(self._try))
        return str(told)

    def _try(self, mesh: DeviceMesh) -> str:
        x = sharded(random(5, 3), 0, [4, 1] if self.ranks == 2 else [5], mesh)
        try:
            self.act(mesh, x)
        except sc.ShardError as error:
            return RIGHT if self.words in str(error) else f"refused in other words: {error}"
        return "not refused"


def with_parameter(x: Tensor) -> torch.nn.Module:
    module = torch.nn.Module()
    module.register_parameter("weight", torch.nn.Parameter(x.detach()))
    return module


def _values_of_state_dicts(mesh: DeviceMesh) -> str:
    full = random(5, 3)
    options = StateDictOptions(full_state_dict=True)
    got = get_model_state_dict(with_parameter(sharded(full, 0, [4, 1], mesh)), options=options)["weight"]
    return RIGHT if type(got) is Tensor and torch.equal(got, full) else "no full values"


def values_of_state_dicts() -> str:
    with LocalRanks(2, processes=False) as ranks:
        return str(ranks(_values_of_state_dicts)[0])


def _full_values_for_state_dicts(mesh: DeviceMesh) -> str:
    module = with_parameter(sharded(random(5, 3), 0, [4, 1], mesh))
    optimizer = torch.optim.Adam(module.parameters())
    module.weight.square().sum().backward()  # type: ignore[operator, union-attr]
    optimizer.step()
    options = StateDictOptions(full_state_dict=True)
    full = get_optimizer_state_dict(module, optimizer, options=options)
    set_optimizer_state_dict(module, optimizer, full, options=options)
    (state,) = optimizer.state.values()
    return RIGHT if isinstance(state["exp_avg"], sc.ShardTensor) else "the whole value in place of a shard"


def full_values_for_state_dicts() -> str:
    with LocalRanks(2, processes=False) as ranks:
        return str(ranks(_full_values_for_state_dicts)[0])


def _with_columns_over_the_rows(mesh: DeviceMesh, out: bool) -> None:
    torch.manual_seed(0)
    full, goal, plain = torch.randn(7, 4), torch.randn(7, 8), torch.nn.Linear(4, 8)
    layer = parallelize_module(copy.deepcopy(plain), mesh, ColwiseParallel(output_layouts=Replicate()))
    x, y = distribute_tensor(full, mesh, [Shard(0)]), sharded(goal, 0, [1, 2, 4], mesh)
    with leave_out("pads_on_all_ranks") if out else contextlib.nullcontext():
        run = torch.compile(lambda x, y: (layer(x) - y).square().mean(), fullgraph=True, backend="aot_eager")
        run(x, y).backward()
    (plain(full) - goal).square().mean().backward()
    torch.testing.assert_close(layer.weight.grad.full_tensor(), plain.weight.grad)  # type: ignore[union-attr, operator]


def columns_over_the_rows() -> str:
    """On processes: DTensor does not compile on ranks that are threads."""
    with LocalRanks(3) as ranks:
        ranks(_with_columns_over_the_rows, "pads_on_all_ranks" in LEFT_OUT, timeout=60)
    return RIGHT


ALONE = """
import contextlib, torch, torch.distributed as dist, shardcompile as sc
from shardcompile.compat.patch import LEFT_OUT, leave_out
from shardcompile.testing import LocalRanks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
"""


@dataclass(frozen=True)
class Alone:
    """A program in a process of its own, which fails where something is wrong."""

    patch: str
    code: str

    def __call__(self) -> str:
        out = f"leave_out({self.patch!r})" if self.patch in LEFT_OUT else "contextlib.nullcontext()"
        code = f"{ALONE}with {out}:{textwrap.indent(self.code, '    ')}"
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
        return f"ended by {ended.returncode}" if ended.returncode else RIGHT


DATA_OF_A_PLAIN_TENSOR = """
def assign(mesh):
    plain = torch.nn.Parameter(torch.ones(5, 3))
    sharded = sc.ShardTensor.from_local(torch.ones(5, 3), mesh, [Shard(0)])
    try:
        plain.data = sharded
    except sc.UnsupportedOpError:
        assert (plain.data * 2).sum() == 30
    else:
        print(plain * 2)

with LocalRanks(1, processes=False) as ranks:
    ranks(assign)
"""

COUNTED_COLLECTIVES = """
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
x = sc.ShardTensor.from_local(torch.ones(3, 2), init_device_mesh("cpu", (2,)), [Shard(0)], {0: [3, 1]})
with CommDebugMode() as mode:
    x @ x.mT  # which gathers one of the factors
assert mode.get_total_counts() == 1
"""


KERNEL, FACTOR, NOTHING = random(3, 2, 3, 3), random(2, 4, 5), random(5, 0)
WEIGHT, BIAS = random(4, 3), random(4)
MODES = random(2, 2, 2, 3), random(2, 2, 3), random(2, 2, 3, 2), random(2, 2, 2)
ROWS = [[3, 2], [1, 4]]
SELECTED = Compiled(lambda x: x[:, 0].exp() + x.select(1, 2), lambda n: random(n, 3, 4), 0, ROWS)

WRITTEN_PARTIAL = Fuzzed(
    [
        "v0 = a0.transpose(1, 1)",
        "a0[torch.tensor([0, 0], dtype=torch.int64)] = 0.5",
        "v1 = v0.expand([2, 7])",
        "v0.copy_(a3)",
        "v5 = a1 @ a3",
    ],
    [
        Input("a0", (1, 7), "P(sum)"),
        Input("a1", (1, 7), "S(0)", {0: [1, 0, 0]}, grad=True),
        Input("a3", (7,), "S(0)", {0: [0, 2, 5]}, grad=True),
    ],
    3,
    "inductor",
)
"""It writes to a pending sum, of which ranks hold zeros but for one, and saves tensors behind it."""

WRITTEN_AFTER_A_JOIN = Fuzzed(
    [
        *("v1 = F.linear(a0, weight(1, 4).to(a0.dtype))", "v2 = v1.reshape([1, 5])"),
        *("v3 = v2.diagonal(-1, 1, 0)", "v5 = v2[-3:, -5:-5]"),
    ],
    [Input("a0", (5, 4), "S(0)", {0: [0, 5]}, grad=True)],
    2,
    "inductor",
)
"""The gradient of a slice joins zeros with what comes, and that of a diagonal writes to the same zeros: a backward graph
that needs no sizes of the forward pass."""


def _sent_together(mesh: DeviceMesh, run: Callable[[Tensor, Tensor], Tensor]) -> None:
    own, other = (random(3, 16) + rank for rank in (mesh.get_rank(), 1 - mesh.get_rank()))
    got = run(own, torch.eye(16, dtype=own.dtype))
    torch.testing.assert_close(got, torch.cat([other.sin().flatten(), other.cos().flatten()]))


def sent_together() -> str:
    """Two tensors are sent by one call, while products of the same shape are computed."""

    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        partition = (6, 3, 1, True, [3, 3], 0, [], None)
        started = torch.ops.shardcompile.fetch_shard.default([x.sin(), x.cos()], [0, 0], *partition, name[0])
        product = x @ w @ w
        return torch.ops._c10d_functional.wait_tensor.default(started), product

    name = [""]
    compiled = torch.compile(function, fullgraph=True, backend="shardcompile")

    def run(mesh: DeviceMesh) -> None:
        name[0] = compat.group_name_of(mesh, 0)
        _sent_together(mesh, lambda x, w: compiled(x, w)[0])

    with LocalRanks(2, processes=False) as ranks:
        ranks(run)
    return RIGHT


SCENES: dict[str, Callable[[], str]] = {
    "payloads_until_the_wait": sent_together,
    "reads_after_writes": Fuzzed(
        [
            *('v0 = torch.einsum("a,cd->cda", a1, a0)', "v1 = F.scaled_dot_product_attention(v0, v0.sin(), v0)"),
            *("v2 = F.scaled_dot_product_attention(v0, v0.sin(), v0)", "v3 = F.pad(v2, [-1, 2], value=0.5)"),
        ],
        [Input("a0", (4, 3), "P(sum)", grad=True), Input("a1", (1,), "S(0)", {0: [0, 1]}, seed=388595)],
        2,
        "inductor",
    ),
    "rows_of_groups": rows_of_groups,
    "broadcast_by_guards": rows_of_windows,
    "parts_own_no_memory": Fuzzed(
        [
            *("v0 = a0.sin()", "v1 = torch.cat([a0, v0], 0)", "v2 = v1.cumsum(0)", "v3 = v0 * v2[2:]"),
            "v4 = weight(4, 4) @ v2",
        ],
        [Input("a0", (2, 5), "S(1)", {0: [2, 3]})],
        2,
        "inductor",
    ),
    "views_by_stride": SELECTED,
    "overlap_by_hint": SELECTED,
    "memory_format_by_hint": Compiled(
        lambda x: nnf.conv2d(x, KERNEL, padding=1), lambda n: random(n, 2, 5, 4), 0, [[3, 1], [1, 3]]
    ),
    "batched_products_by_hint": Compiled(lambda x: torch.bmm(x, FACTOR).sin(), lambda n: random(2, n, 4), 1, ROWS),
    "fill_order_by_hint": Compiled(lambda x: NOTHING @ x.mT, lambda n: random(n, 0), 0, [[9, 1], [0, 4]]),
    "channels_last_by_hint": Compiled(
        lambda x: x.permute(0, 3, 1, 2).sin(), lambda n: random(2, 1, 1, n), 3, [[3, 1], [1, 3]]
    ),
    "asserts_of_known_sizes": Fuzzed(
        [
            *("v0 = a0.transpose(1, -2)", "v1 = a0.var([-2, -1], keepdim=True, correction=0)"),
            *("v2 = torch.minimum(v0, v1)  # if away(v0 - v1, 0)", "v3 = v2 @ a0", "v4 = torch.cat([a0, a0, a0], 1)"),
            "v5 = v3.unflatten(1, [2, 1])",
        ],
        [Input("a0", (4, 2), "S(1)", {0: [0, 1, 1, 0]}, grad=True, seed=1003671)],
        4,
        "inductor",
    ),
    "numbers_of_written_rows": Fuzzed(
        [
            "v0 = a0.gather(-1, torch.ones_like(a0, dtype=torch.int64).cumsum(-1).mul(2).remainder(6))",
            *("v1 = (v0 > 0).any([0], True)  # if away(v0, 0)", 'v2 = to(v0, "S(2)")', "v3 = v2 > 0  # if away(v2, 0)"),
            *('v4 = to(a0, "S(0)")', "v4.transpose_(0, 1)", "v4[:, -6:8:3].zero_()", "v5 = v2.unbind(1)[-1]"),
        ],
        [Input("a0", (6, 3, 6), "S(0)", {0: [6, 0, 0]}, grad=True, seed=240043, inferred=True)],
        3,
        "inductor",
    ),
    "parts_to_the_end": Fuzzed(
        ["v0 = a0.square()", "v1 = v0[:, ::2]"],
        [Input("a0", (1, 4, 4), "P(sum) S(2)", {1: [0, 4]}, grad=True, seed=28238)],
        (2, 2),
        "inductor",
    ),
    "order_by_divisors": Fuzzed(
        [
            *('v0 = to(a1, "S(0) S(0)")', "v1 = (v0.split(2, -1)[:2])[0]"),
            "v2 = torch.hypot(v1, a0 + 3)  # if away(a0, -3)",
        ],
        [
            Input("a0", (1, 2, 2), grad=True, seed=727825),
            Input("a1", (2,), "S(0) S(0)", {1: [0, 2, 0, 0]}, grad=True, seed=102394),
        ],
        (2, 2),
        "inductor",
    ),
    "orders_of_unknown_strides": Compiled(
        lambda x: (nnf.conv2d(x.movedim(3, 1), KERNEL, stride=2) + 1).unsqueeze(1).movedim(2, 4),
        *(lambda n: random(2, n, 7, 2), 1, [[5, 4], [2, 7]]),
    ),
    "strides_after_sizes": Fuzzed(["v0 = torch.zeros_like(a0)"], [Input("a0", (7, 4), "R")], 2),
    "saved_after_written": WRITTEN_PARTIAL,
    "ones_in_kernels_by_hint": Fuzzed(
        [
            "v0 = torch.linalg.vector_norm(a0, 1, [-3], True)  # if away(a0, 0)",
            "v1 = v0.expand([4, 6, -1])",
            "v2 = v1.log_softmax(2)",
        ],
        [Input("a0", (6, 6, 2), "S(1)", {0: [2, 4]})],
        2,
        "aot_eager_decomp_partition",
    ),
    "storage_of_no_rows": Fuzzed(
        ["v0 = a2.expand([2, 1, 2])", "v2 = torch.cat([v0, v0], 2)", "v2.add_(0.25)"],
        [Input("a2", (1, 2), "S(0) S(1)", {0: [1, 0], 1: [0, 2]})],
        (2, 2),
        "inductor",
    ),
    "saved_as_traced": Fuzzed(
        ["v0 = F.conv2d(a0, weight(3, 2, 2, 2), stride=2)", "v1 = torch.cat([v0.movedim(1, 3)], 1)"],
        [Input("a0", (2, 2, 12, 6), "S(2)", {0: [8, 4]}, grad=True)],
        2,
        "inductor",
    ),
    "plain_sizes_are_guarded": Fuzzed(
        ["v1 = a1 - a0", "v4 = a1.chunk(2, 0)[-1]", "v11 = v4.unbind(-1)[-1]"],
        [Input("a0", (6,), "S(0)", {0: [0, 6, 0]}), Input("a1", (6,))],
        3,
    ),
    "failed_checks": Fuzzed(
        ["v6 = a1 / (a0.abs() + 0.5)  # if away(a0, 0)", "v7 = v6.view(-1, 2) * 2"],
        [Input("a0", (2, 1), "S(0) S(0)", {1: [0, 1, 0, 1]}, grad=True), Input("a1", (2, 4))],
        (2, 2),
        "inductor",
    ),
    "sizes_stay_symbols": Fuzzed(
        ["v3 = a2.chunk(4, 1)[-1]", "v5 = v3.unfold(1, 1, 1)", "v5.copy_(weight(1)[0])"],
        [Input("a2", (1, 7, 4), "S(0) S(2)", {0: [1, 0], 1: [1, 3]})],
        (2, 2),
        ends=REFUSED,
    ),
    "pads_on_all_ranks": columns_over_the_rows,
    "strides_by_terms": asked_for_strides,
    "copies_by_hint": Fuzzed(
        ["v0 = torch.fill(a0[::3], weight(1)[0])"],
        [Input("a0", (5, 1), "S(1)", {0: [0, 1]})],
        2,
        "aot_eager_decomp_partition",
    ),
    "joins_of_copies": WRITTEN_AFTER_A_JOIN,
    "places_of_parts": Fuzzed(  # none of its parts needs it
        [
            *("a1.cumsum_(2)", "a1.movedim(0, -1).copy_(weight(1)[0])", "v0 = a0[-1, None, 2:]"),
            *("v1 = a1.var([0, 2], keepdim=False, correction=0)", "v2 = torch.maximum(a1, a0)  # if away(a1 - a0, 0)"),
            *("v3 = a1 * v2", "v4 = v1.unflatten(0, [7, 1])", "v5 = v2.prod(2)"),
            "v6 = v5.scatter_add(0, torch.ones_like(v5, dtype=torch.int64).cumsum(0).mul(2).remainder(1), v5.cos())",
            *("v7 = v4.argmax(-1)  # if apart(v4, -1)", "v8 = v4.view([1, 1, -1])", "v9 = whole(v8)"),
            *("v10 = F.pad(v5, [0, 0, 1, 2], value=0.5)", "v11 = v1.logsumexp([0], True)"),
        ],
        [
            Input("a0", (1, 7, 6), "R", grad=True, seed=519202, inferred=True),
            Input("a1", (1, 7, 6), "S(0)", {0: [0, 1, 0]}, seed=737711, ways=("turned", "rows", "turned", "gaps")),
        ],
        3,
        "inductor",
    ),
    "overlaps_of_sizes": Fuzzed(["a1[::3] = 0"], [Input("a1", (5, 1), "S(1)", {0: [0, 1, 0, 0]})], 4, "inductor"),
    "traces_agree": Fuzzed(
        [
            *("v0 = a0.movedim(0, -1)", "v1 = F.pad(v0, [2, 0], value=0.5)", "v2 = F.glu(v0, 2)"),
            "v3 = torch.addcmul(v1, v1, v2, value=0.5)",
        ],
        [Input("a0", (2, 1, 0), "S(0)", {0: [1, 1]}, grad=True)],
        2,
    ),
    "symbols_by_both_names": inputs_with_gradients,
    "shards_of_modules_vary": buffer_of_a_module,
    "shards_of_dtensors": Refused(lambda mesh, x: DTensor.from_local(x, mesh, [Replicate()], run_check=False), 2),
    "parameters_of_fully_shard": Refused(lambda mesh, x: fully_shard(with_parameter(x), mesh=mesh)),
    "clamped_ends": Compiled(lambda x: mixed_modes(x, *MODES), lambda n: random(2, n, 6, 4), 1, [[3, 2], [1, 4]]),
    "decisions_where_guards_are_suppressed": Compiled(
        lambda x: nnf.scaled_dot_product_attention(x, x, x, is_causal=True),
        lambda n: random(2, 2, n, 4),
        2,
        [[5, 2], [3, 4]],
    ),
    "values_of_state_dicts": values_of_state_dicts,
    "data_of_plain_tensors": Alone("data_of_plain_tensors", DATA_OF_A_PLAIN_TENSOR),
    "slices_by_formula": Compiled(lambda x: x[4:-1] * 2, lambda n: random(n, 3), 0, [[5, 2], [0, 7], [6, 1]]),
    "full_values_for_state_dicts": full_values_for_state_dicts,
    "collectives_in_comm_debug_mode": Alone("collectives_in_comm_debug_mode", COUNTED_COLLECTIVES),
}
"""By patch, a program that needs it."""

RIGHT_NOW = {
    "a lookup in no rows": Fuzzed(
        [
            *('v1 = torch.einsum("ab,cd->cdab", a2, a2)', 'v5 = to(v1, "S(2)")', "v8 = v5.sum([1, 3], keepdim=True)"),
            "v10 = v8.gather(2, torch.ones_like(v8, dtype=torch.int64).cumsum(2).mul(2).remainder(1))",
        ],
        [
            Input("a0", (2, 1, 7), "S(2)", {0: [6, 1, 0]}, grad=True),
            Input("a2", (1, 7), "S(1)", {0: [4, 3, 0]}, seed=173537),
        ],
        3,
        "inductor",
    ),
    "images with the channel last": Fuzzed(
        [
            *("v0 = a1.unflatten(0, [3, 1])", "v1 = F.conv1d(a1, weight(2, 6, 3), padding=1)"),
            *("v2 = torch.where(torch.gt(v0, a0), v0, 2 * a0)", "v3 = whole(v2)"),
            "v4 = v1.index_fill(0, torch.tensor([2, 1], dtype=torch.int64), 0.5)",
        ],
        [Input("a0", (3, 6, 3), "R S(0)", {1: [0, 3]}), Input("a1", (3, 6, 3), seed=15442)],
        (2, 2),
        "inductor",
    ),
    "joins, products and sums of few rows": Fuzzed(
        [
            *("v0 = a3.logcumsumexp(0)", "v1 = a2.cummin(1)[0]  # if apart(a2, 1)", 'v4 = to(v1, "S(1)")'),
            *("v4.unsqueeze_(0)", "v6 = v4.sum([0, 1], False)", "v7 = v6.clone()"),
            *("v8 = F.pad(v7, [-1, 2], value=0.5)", 'v9 = to(v8, "S(0)")', "v12 = F.pad(v9, [1, 2], value=0.5)"),
            "v13 = v12[7:]",
        ],
        [
            Input("a2", (6, 1), "S(1)", {0: [0, 1, 0, 0]}, "float32", grad=True),
            Input("a3", (1,), dtype="float32", grad=True),
        ],
        4,
        "aot_eager_decomp_partition",
    ),
    "guards on a minimum": Fuzzed(
        [
            *("v0 = a2 / (a0.abs() + 0.5)  # if away(a0, 0)", "v1 = torch.lerp(v0, a2.to(v0.dtype), 0.3)"),
            *('v2 = to(a2, "S(1)")', "v3 = torch.view_as_real(torch.fft.rfftn(a2, s=[2, 1], dim=[1, 0], norm=None))"),
            *("v4 = whole(v1)", "v5 = torch.cdist(v1, v1 + 1)", "v6 = (a2 > 0).any([0, -1], False)  # if away(a2, 0)"),
            *("v7 = torch.cat([a1, v1, a1], -2)", "v8 = v2 @ a1", "v9 = v0.prod(1)"),
            "v10 = v9 / (a2.abs() + 0.5)  # if away(a2, 0)",
            "v11 = v9.to(torch.float8_e4m3fn).to(torch.float64)  # if rounds_alike(v9, torch.float8_e4m3fn)",
            "v12 = v10[:4:2]",
        ],
        [
            Input("a0", (1, 0), "S(1)", {0: [0, 0, 0, 0]}, grad=True, seed=167462),
            Input("a1", (1, 0), "R", grad=True, seed=149145),
            Input("a2", (2, 1), "S(0)", {0: [0, 0, 1, 1]}, grad=True, seed=219798),
        ],
        4,
        "shardcompile",
    ),
}
"""Programs that needed a patch before the sizes of shards were symbols on all ranks."""

WITHOUT_A_PROGRAM = {
    "compiled_once": "values are right without it, and code is compiled by all: see test_compiled_once.py",
    "portable_keys": "values are right without it, and code is compiled: see test_artifacts.py",
    "kept_libraries": "values are right without it, and code is compiled: see test_artifacts.py",
    "no_other_entries": "a later job would need it, on some of its ranks: see pure/test_artifacts.py",
    "grids_of_no_rows": "it is of kernels of GPUs: see test_gpu_kernels.py",
    "sizes_over_two_dims": "it is of kernels of GPUs: see test_gpu_kernels.py",
    "copies_of_late_sizes": "it is of kernels of GPUs: see test_gpu_kernels.py",
    "backward_before_forward": "it is of kernels of GPUs: see test_gpu_kernels.py",
    "captures_with_collectives": "it is of kernels of GPUs: see test_gpu_kernels.py",
    "mixed_reductions_by_hint": "it is of kernels of GPUs: see test_gpu_kernels.py",
    "later_traces": "it puts in symbols_of_shards",
    "symbols_of_shards": "not found: shards that are as large as other dims, with partitions that a run gives",
}
"""Patches of which no program is known that goes wrong with the torch that is installed, and why."""

RIGHT_SINCE = {
    "order_by_divisors": (2, 13),  # prefix masks through Inductor (test_flex_attention.py) still need it
    "reads_after_writes": (2, 14),
    "numbers_of_written_rows": (2, 15),  # the program of its report still fails
    "storage_of_no_rows": (2, 15),
    "decisions_where_guards_are_suppressed": (2, 15),
}
"""Patches without which their programs go right from this version of torch on, because its partitioner saves other tensors
of them, we trace other ones, or a part of what they do has come to torch. Other programs may still go wrong, so the
patches stay."""


@contextlib.contextmanager
def compiled_anew() -> Iterator[None]:
    """Without what was compiled before, in this process or another."""
    never_before = uuid.uuid4().hex  # a setting that switches caches off would hold in this thread only
    torch._dynamo.reset()
    set_in_cache_keys(never_before, True)
    try:
        yield
    finally:
        set_in_cache_keys(never_before, False)
        torch._dynamo.reset()


LONG = "reads_after_writes"
EACH = often([*(name for name in SCENES if name != LONG), LONG], 1)


def _needed(name: str) -> bool:
    """Whether a patch is about the installed version of torch."""
    versions = next(p.versions for p in all_patches() if p.name == name)
    first, _, last = versions.partition(" - ")
    low, high = (tuple(map(int, v.split("."))) for v in (first, last or first))
    return low <= TORCH <= high


def test_every_patch_has_a_program() -> None:
    assert {p.name for p in all_patches()} == SCENES.keys() | WITHOUT_A_PROGRAM.keys()
    assert not SCENES.keys() & WITHOUT_A_PROGRAM.keys()


def test_every_patch_says_what_it_is_for() -> None:
    for patch in all_patches():
        assert patch.reason.endswith((".", '"')) and len(patch.upstream) > 20 and patch.what and patch.versions


@pytest.mark.parametrize("name", EACH)
def test_right_with_it(name: str) -> None:
    with compiled_anew():
        assert SCENES[name]() == RIGHT


@pytest.mark.parametrize("name", often(list(RIGHT_NOW), 0))
def test_right_without_a_patch(name: str) -> None:
    with compiled_anew():
        assert RIGHT_NOW[name]() == RIGHT


@pytest.mark.parametrize("name", EACH)
def test_wrong_without_it(name: str) -> None:
    if not _needed(name):
        pytest.skip(f"torch {torch.__version__} is said not to need it")
    if RIGHT_SINCE.get(name, (99,)) <= TORCH:
        pytest.skip(f"the program that is known goes right with torch {torch.__version__}")
    with compiled_anew(), leave_out(name):
        try:
            told = SCENES[name]()
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
    assert told != RIGHT, f"torch {torch.__version__} no longer needs the patch {name}: take it out"
