"""Changes to Inductor's decisions about GPU kernels. The patches at the end give the reasons."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from unittest import mock

import sympy
import torch

from shardcompile.compat.patch import Patch, replace

if TYPE_CHECKING:
    from torch._inductor.runtime.triton_heuristics import GridExpr  # 2.11 - 2.15
    from torch._inductor.scheduler import BaseSchedulerNode  # 2.11 - 2.15

_NARROW = (torch.float32, torch.float16, torch.bfloat16)
"""The dtypes that Triton sums in float32."""


def grids_of_no_rows(stack: contextlib.ExitStack) -> None:
    # Heavy, and only a compilation needs it.
    from torch._inductor.runtime.triton_heuristics import Grid2DWithYZOverflow  # 2.11 - 2.15

    replace(stack, Grid2DWithYZOverflow, "generate", _of_no_rows)


def _of_no_rows(generate: Callable[..., None]) -> Callable[..., None]:
    """Give a grid without rows a size of 0. Torch would divide by the number of rows."""

    @functools.wraps(generate)
    def generated(grid: GridExpr, *args: object, **kwargs: object) -> None:
        generate(grid, *args, **kwargs)
        if grid.mode == "python":
            grid.y_grid = f"(0 if {grid.z_grid} == 0 else {grid.y_grid})"

    return generated


def mixed_reductions_by_hint(stack: contextlib.ExitStack) -> None:
    # Heavy, and only a compilation needs it.
    from torch._inductor.scheduler import MixOrderReduction  # 2.11 - 2.15

    replace(stack, MixOrderReduction, "can_fuse", _by_hint)


def _by_hint(can_fuse: Callable[..., bool]) -> classmethod[Any, Any, bool]:
    """Decide by hints, which are the same on every rank, whether reductions along different dims are fused."""
    # Heavy, and only a compilation needs it.
    from torch._inductor.virtualized import V  # 2.11 - 2.15

    def holds(condition: sympy.Basic, *args: object, **kwargs: object) -> bool:
        # 64 is as good a guess as any for the size of a shard: fusing pays from thousands of rows on.
        hints = {s: V.graph.sizevars.optimization_hint(s, fallback=64) for s in condition.free_symbols}
        return bool(condition.xreplace({s: sympy.Integer(h) for s, h in hints.items()}))

    def asked(_: type, one: BaseSchedulerNode, other: BaseSchedulerNode) -> bool:
        nodes: list[Any] = [n.node for group in (one, other) for n in group.get_nodes() if n.is_reduction()]
        if any(n.get_dtype() not in _NARROW for n in nodes):
            return False
        with mock.patch.multiple(V.graph.sizevars, guard_or_true=holds, evaluate_expr=holds):
            return can_fuse(one, other)

    return classmethod(asked)


def sizes_over_two_dims(stack: contextlib.ExitStack) -> None:
    # Heavy, and only a compilation needs it.
    from torch._inductor.codegen.simd import SIMDKernel  # 2.11 - 2.15

    replace(stack, SIMDKernel, "_split_iteration_ranges", _by_divisors)


def _by_divisors(split: Callable[..., object]) -> staticmethod[..., object]:
    """Have a size go over a dim of the kernel and the next one where it is a multiple of the first, of any size."""
    # Heavy, and only a compilation needs it.
    from torch._inductor.virtualized import V  # 2.11 - 2.15

    @functools.wraps(split)
    def over_dims(*args: object, **kwargs: object) -> object:
        sizes = V.graph.sizevars
        greater, is_multiple = sizes.statically_known_gt, sizes.statically_known_multiple_of

        def reaches_beyond(size: sympy.Expr, room: sympy.Expr) -> bool:
            if greater(size, room):
                return True
            return bool(room != 1 and is_multiple(size, room) and not is_multiple(room, size))

        with mock.patch.object(sizes, "statically_known_gt", reaches_beyond):
            return split(*args, **kwargs)

    return staticmethod(over_dims)


GRIDS_OF_NO_ROWS = Patch(
    "grids_of_no_rows",
    "torch._inductor.runtime.triton_heuristics.Grid2DWithYZOverflow.generate",
    "The launch of a kernel with a grid of two dims divides by the number of rows: ZeroDivisionError on a rank without "
    "rows.",
    "Mended in 2.13. ceildiv(y_grid_raw_, y_grid_div_) with ynumel = 0, which an unbacked or a size-oblivious size "
    "may be.",
    "2.11 - 2.12",
    grids_of_no_rows,
)
"""Put in for good when a trace meets a collective of ours: cached code, too, computes its grids when it is loaded."""

SIZES_OVER_TWO_DIMS = Patch(
    "sizes_over_two_dims",
    "torch._inductor.codegen.simd.SIMDKernel._split_iteration_ranges",
    "For GPUs, Inductor fuses a reduction of 5 rows of s2 numbers with what is done to all 5*s2 of them, and does not "
    "see that 5*s2 goes over both dims of the kernel where s2 may be 0 or 1: 'CantSplit: 5 not divisible by 5*s2'.",
    "_split_iteration_ranges asks statically_known_gt(5*s2, 5), which is False if s2 may be 1. It takes care of 64*u0 "
    "and u0 alone. That 5 divides 5*s2, and 5*s2 does not divide 5, would do.",
    "2.11 - 2.15",
    sizes_over_two_dims,
)

MIXED_REDUCTIONS_BY_HINT = Patch(
    "mixed_reductions_by_hint",
    "torch._inductor.scheduler.MixOrderReduction.can_fuse",
    "For GPUs, Inductor fuses a reduction of rows with one of columns if there are thousands of rows. It compares with "
    "a guard (2.13 - 2.15), which holds on some ranks only, or assumes it for a symbol (2.11 - 2.12). The fused kernel "
    "sums in float32, so kernels of float64 do not compile.",
    "TritonKernel.codegen_body makes its accumulators of tl.float32 for any dtype: layer_norm of float64 rows with its "
    "gradients does not compile for 4,096 rows of 32, nor for a dynamic number of rows with backed_size_oblivious.",
    "2.11 - 2.15",
    mixed_reductions_by_hint,
    kind="sizes",
)
