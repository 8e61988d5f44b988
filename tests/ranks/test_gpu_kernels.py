"""What is done for kernels of GPUs; what can be seen without one, and the rest where there is one."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import sympy
import torch
import torch.nn.functional as nnf
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor.placement_types import Shard
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import shardcompile as sc
from shardcompile.compat import cuda_graphs, gpu_kernels, patch
from shardcompile.dispatch import run as running
from shardcompile.testing import LocalRanks, assert_matches_single_device
from shardcompile.testing.agreement import RanksFailedError
from shardcompile.testing.rendezvous import RendezvousError
from tools.fuzz import FINE, draw, judge

ON_A_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


# Grids


@pytest.mark.parametrize("rows", [0, 1, 16, 17, 10**7])
def test_a_grid_of_no_rows_is_empty(rows: int) -> None:
    heuristics = pytest.importorskip("torch._inductor.runtime.triton_heuristics")
    with contextlib.ExitStack() as stack:
        gpu_kernels.grids_of_no_rows(stack)
        grid = heuristics.Grid2DWithYZOverflow(inductor_meta={})
        grid.generate({"XBLOCK": 32, "YBLOCK": 16})
    scope: dict[str, Any] = {"xnumel": 64, "ynumel": rows}
    for line in grid.prefix:
        exec(line, scope)
    _, y, z = (eval(str(n), scope) for n in (grid.x_grid, grid.y_grid, grid.z_grid))
    shards = -(-rows // 16)
    assert y * z >= shards and (y * z == 0) is (rows == 0) and y <= 65535


# Decisions


class Sizes:
    """Inductor's view of sizes: a hint for each symbol, and guards that nobody may leave."""

    def optimization_hint(self, symbol: sympy.Symbol, fallback: int) -> int:
        return {"many": 10**6, "few": 3}.get(str(symbol), fallback)

    def guard_or_true(self, condition: Any) -> bool:
        raise AssertionError(f"a guard: {condition}")

    evaluate_expr = guard_or_true


def node(*dtypes: torch.dtype) -> Any:
    nodes = [SimpleNamespace(node=SimpleNamespace(get_dtype=lambda d=d: d), is_reduction=lambda: True) for d in dtypes]
    return SimpleNamespace(get_nodes=lambda: nodes)


@pytest.mark.parametrize(
    ("rows", "dtype", "fused"),
    [
        ("many", torch.float32, True),
        ("many", torch.bfloat16, True),
        ("few", torch.float32, False),
        ("of a run", torch.float32, False),
        ("many", torch.float64, False),
        ("many", torch.int64, False),
    ],
)
def test_reductions_along_two_dims_are_fused_by_hints(rows: str, dtype: torch.dtype, fused: bool) -> None:
    virtualized = pytest.importorskip("torch._inductor.virtualized")
    scheduler = pytest.importorskip("torch._inductor.scheduler")

    def asks(one: Any, other: Any) -> bool:
        sizes = virtualized.V.graph.sizevars
        many = sympy.Ge(sympy.Symbol(rows, integer=True), 4096)
        return bool(sizes.guard_or_true(many) and sizes.evaluate_expr(many, fallback_value=True))

    found = vars(scheduler.MixOrderReduction)["can_fuse"]
    scheduler.MixOrderReduction.can_fuse = staticmethod(asks)
    try:
        graph = SimpleNamespace(sizevars=Sizes())
        with contextlib.ExitStack() as stack, virtualized.V.set_graph_handler(graph):
            gpu_kernels.mixed_reductions_by_hint(stack)
            assert scheduler.MixOrderReduction.can_fuse(node(dtype), node(dtype)) is fused
    finally:
        scheduler.MixOrderReduction.can_fuse = found


@pytest.mark.parametrize(
    ("groups", "lengths", "ranges"),
    [
        (lambda s: (5, s), lambda s: ((5 * s,), ()), lambda s: [[5], [s]]),
        (lambda s: (s, 5), lambda s: ((5 * s,), ()), lambda s: [[s], [5]]),
        (lambda s: (5 * s, 1), lambda s: ((s, 5), ()), lambda s: [[s, 5], []]),
        (lambda s: (5, s), lambda s: ((5,), (s,)), lambda s: [[5], [s]]),
    ],
)
def test_an_size_goes_over_two_dims_of_a_kernel(groups: Any, lengths: Any, ranges: Any) -> None:
    """Of rows whose number may be 0 or 1, which Inductor does not say of a size that is traced as others are."""
    from torch._inductor.codegen.simd import SIMDKernel
    from torch._inductor.sizevars import SizeVarAllocator
    from torch._inductor.virtualized import V

    s = sympy.Symbol("s2", integer=True, nonnegative=True)
    with contextlib.ExitStack() as stack, V.set_graph_handler(SimpleNamespace(sizevars=SizeVarAllocator(ShapeEnv()))):
        gpu_kernels.sizes_over_two_dims(stack)
        found, _ = SIMDKernel._split_iteration_ranges([sympy.sympify(g) for g in groups(s)], lengths(s))
    assert found == ranges(s)


@pytest.mark.ranks(2, processes=False)
def test_products_are_not_padded_by_what_a_rank_measures() -> None:
    seen = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Any:
        seen.append(torch._inductor.config.shape_padding)
        return graph.forward

    x = sc.ones(7, 3, device_mesh=sc.testing.mesh(), placements=[Shard(0)])
    torch.compile(lambda x: x @ x.mT, backend=backend)(x)
    assert seen == [False] and torch._inductor.config.shape_padding


# CUDA graphs


@contextlib.contextmanager
def codes_for_gpus() -> Iterator[list[str]]:
    """With nodes taken for those of a GPU, where Inductor asks what a CUDA graph may hold. Gives the code."""
    from torch._inductor import graph, ir, scheduler

    codes: list[str] = []
    with (
        mock.patch.object(scheduler.BaseSchedulerNode, "is_gpu", lambda n: not isinstance(n.node, ir.DynamicScalar)),
        mock.patch.object(graph.GraphLowering, "save_output_code", staticmethod(codes.append)),
    ):
        yield codes


DIVIDED = {"triton.cudagraphs": True, "graph_partition": True, "force_disable_caches": True}


class Layer(torch.nn.Module):
    """With collectives one after the other in both directions, in the order that a pass has chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.heads, self.last = torch.nn.LayerNorm(8), torch.nn.Linear(8, 24), torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(0, 1) for t in self.heads(self.norm(x)).chunk(3, -1))
        y = nnf.scaled_dot_product_attention(q[None], k[None], v[None])[0].transpose(0, 1).flatten(1)
        return self.last(x + y) + x.softmax(0)


def functions_to_capture(code: str) -> list[str]:
    """The functions of Inductor's code that are captured on a GPU."""
    return re.findall(r"^def partition_\d+\(.*?^    return ", code, re.MULTILINE | re.DOTALL)


@pytest.mark.nightly
@pytest.mark.parametrize("patched", [True, False])
def test_collectives_waits_and_joins_stay_outside_of_captures(patched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part would have a result of a join of its own, and the others' rows of it would be whatever is in memory."""
    from torch._inductor import config

    def compared(mesh: Any) -> None:
        torch.manual_seed(0)
        with config.patch(DIVIDED):  # of this thread
            assert_matches_single_device(Layer(), [torch.randn(11, 8)], [Shard(0)], mesh=mesh, backend="shardcompile")

    monkeypatch.setattr(cuda_graphs, "FEWEST_KERNELS", 1)
    without = contextlib.nullcontext() if patched else patch.leave_out("captures_with_collectives")
    with LocalRanks(3, processes=False) as ranks, codes_for_gpus() as codes, without:
        if patched:
            ranks(compared)
        else:
            with pytest.raises(RanksFailedError, match="grad of "):
                ranks(compared)
    captured = [function for code in codes for function in functions_to_capture(code)]
    assert len(codes) >= 2 and len(captured) >= 4
    assert any("wait_tensor" in function for function in captured) is not patched
    ops = {op for function in captured for op in re.findall(r"torch\.ops\.shardcompile\.(\w+)", function)}
    tags = [tag for op in ops for tag in getattr(torch.ops.shardcompile, op).default.tags]
    assert torch.Tag.cudagraph_unsafe not in tags


def test_few_kernels_are_not_captured() -> None:
    from torch._inductor import config

    def compiled(mesh: Any) -> None:
        x = sc.ones(7, 3, device_mesh=mesh, placements=[Shard(0)])
        with config.patch(DIVIDED):
            torch.compile(lambda x: x.softmax(0), fullgraph=True)(x)

    with LocalRanks(2, processes=False) as ranks, codes_for_gpus() as codes:
        ranks(compiled)
    assert codes and not any(map(functions_to_capture, codes))


@pytest.mark.parametrize("overlap", [True, False])
def test_nothing_is_asked_about_late_sizes(overlap: bool) -> None:
    output_code = pytest.importorskip("torch._inductor.output_code")
    if not hasattr(output_code, "complex_memory_overlap"):
        pytest.skip(f"torch {torch.__version__} does not ask")
    env = ShapeEnv()
    with FakeTensorMode(shape_env=env):
        rows = env.create_unbacked_symint()
        torch._check(rows >= 0)
        x = torch.empty(8).as_strided((rows, 3), (1, 1)) if overlap else torch.empty_strided((rows, 3), (0, 1))
        with contextlib.ExitStack() as stack:
            cuda_graphs.copies_of_late_sizes(stack)
            assert output_code.complex_memory_overlap(x) is overlap


def test_a_backward_pass_is_compiled_before_its_forward_pass_runs() -> None:
    output_code = pytest.importorskip("torch._inductor.output_code")
    trees = pytest.importorskip("torch._inductor.cudagraph_trees")
    ran: list[object] = []
    graph = SimpleNamespace(fx_kwargs={"is_backward": True}, current_callable=ran.append)
    manager = mock.Mock()
    with contextlib.ExitStack() as stack:
        cuda_graphs.backward_before_forward(stack)
        stack.enter_context(mock.patch.object(trees, "get_manager", return_value=None))
        output_code.maybe_handle_backward_generation(graph, SimpleNamespace(value=0))
        graph.current_callable("before")
        trees.get_manager.return_value = manager
        graph.current_callable("after")
    assert ran == ["before", "after"]
    manager.set_to_running_backward.assert_called_once_with()


# Shards without elements


@contextlib.contextmanager
def as_on_gpus() -> Iterator[None]:
    """With what is done for GPUs done on CPUs, too."""
    kept = set(running._RUN_ON_EMPTY_SHARDS)
    running._RUN_ON_EMPTY_SHARDS.clear()
    sc.dispatch.clear_cache()
    try:
        yield
    finally:
        running._RUN_ON_EMPTY_SHARDS.update(kept)
        sc.dispatch.clear_cache()


@pytest.mark.nightly
def test_nothing_is_made_without_a_kernel() -> None:
    """Programs with empty shards are right where kernels are not called for results without elements."""
    with as_on_gpus(), LocalRanks(2, processes=False) as two, LocalRanks(3, processes=False) as three:
        for seed in range(32_000_000, 32_000_120):
            program = draw(seed)
            if program.mesh in ((2,), (3,)):
                found = judge(two if program.ranks == 2 else three, program)
                assert found.kind in FINE, f"{found}\n{program}"


def test_the_kernel_of_an_op_sees_no_shard_without_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of an embedding's gradient, which reads memory that is not its own where there are no columns."""
    columns: list[int] = []
    real = running.compat.kernel_of

    def watched(op: Any) -> Any:
        kernel = real(op)
        if op is not torch.ops.aten.embedding_dense_backward.default:
            return kernel

        def run(grad: torch.Tensor, *rest: Any) -> Any:
            columns.append(grad.shape[-1])
            return kernel(grad, *rest)

        return run

    def gradient(mesh: Any) -> torch.Tensor:
        table = torch.arange(21.0).reshape(7, 3)
        w = sc.distribute_tensor(table, mesh, [Shard(1)], sharding_shapes={0: [0, 2, 1]}).requires_grad_()
        nnf.embedding(torch.tensor([5, 0, 5]), w).square().sum().backward()
        return w.grad.full_tensor()  # type: ignore[union-attr,attr-defined,no-any-return]

    monkeypatch.setattr(running.compat, "kernel_of", watched)
    with as_on_gpus(), LocalRanks(3, processes=False) as ranks:
        for found in ranks(gradient):
            assert found.sum(1).tolist() == [6, 0, 0, 0, 0, 4 * (15 + 16 + 17), 0]
    assert sorted(columns) == [1, 2]


# On a GPU


def test_ranks_of_another_device_are_told_so() -> None:
    def reduce_on_meta(mesh: Any) -> None:
        torch.distributed.all_reduce(torch.ones(2, device="meta"))

    with (
        LocalRanks(2, processes=False) as ranks,
        pytest.raises(RendezvousError, match="exchange tensors on devices of type 'cpu', not on meta"),
    ):
        ranks(reduce_on_meta)


@ON_A_GPU
def test_ranks_in_one_process_share_a_gpu() -> None:
    def step(mesh: Any) -> None:
        x, w = torch.randn(7, 4, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64)
        assert_matches_single_device(
            lambda x, w: nnf.gelu(x @ w).softmax(0),
            [x, w],
            [Shard(0), None],
            mesh=mesh,
            backend=["aot_eager", "shardcompile"],
        )

    with LocalRanks(3, processes=False, device="cuda") as ranks:
        ranks(step, timeout=300)


@ON_A_GPU
def test_an_index_on_the_cpu() -> None:
    full = torch.randn(7, 4, device="cuda")
    index = torch.tensor([6, 0, 3])
    with LocalRanks(3, processes=False, device="cuda") as ranks:
        ranks(
            lambda mesh: torch.testing.assert_close(
                sc.distribute_tensor(full, mesh, [Shard(0)])[index].full_tensor(), full[index]
            )
        )
