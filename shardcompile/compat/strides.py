"""How torch returns strides that are symbols, and how it finds their order."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch._functorch._aot_autograd.schemas import SubclassCreationMeta  # 2.11 - 2.15
from torch._inductor.virtualized import V  # 2.11 - 2.15
from torch.utils._sympy.value_ranges import ValueRangeError  # 2.11 - 2.15

from shardcompile.compat.patch import Patch, put_in_once, replace
from shardcompile.compat.sizes import IntLike
from shardcompile.compat.tracing import UNKNOWN_SIZE

if TYPE_CHECKING:
    from torch._inductor.ir import Layout  # 2.11 - 2.15


def strides_after_sizes(stack: contextlib.ExitStack) -> None:
    replace(stack, SubclassCreationMeta, "compute_outer_size_and_stride", lambda _: _sizes_and_then_strides)  # 2.11


def return_strides_after_sizes() -> None:
    """Puts in what runs in each call of a compiled function."""
    put_in_once(STRIDES_AFTER_SIZES)


def order_by_divisors(stack: contextlib.ExitStack) -> None:
    # Heavy, and only a compilation needs it.
    from torch._inductor.ir import Layout  # 2.11 - 2.15

    replace(stack, Layout, "is_stride_ordered", _or_by_divisors)  # 2.11 - 2.15


def orders_of_unknown_strides(stack: contextlib.ExitStack) -> None:
    # Heavy, and only a compilation needs it.
    from torch._inductor.ir import FlexibleLayout  # 2.11 - 2.15

    replace(stack, FlexibleLayout, "same_ordered", _or_by_known_order)  # 2.11 - 2.15


def _sizes_and_then_strides(
    self: SubclassCreationMeta, all_args: Sequence[IntLike], *, curr_start_idx: int
) -> tuple[tuple[IntLike, ...], ...]:
    """The size and the strides of a tensor subclass. A graph returns their symbols after the inner tensors."""
    symbols = iter(all_args[curr_start_idx:])
    stated = (self.outer_size, self.outer_stride)
    return tuple(tuple(next(symbols) if n is None else n for n in numbers) for numbers in stated)


def _or_by_divisors(is_ordered: Callable[..., bool]) -> Callable[..., bool]:
    """If Inductor cannot compare strides, have it treat them as ordered if each divides the next for all sizes."""

    @functools.wraps(is_ordered)
    def ordered(layout: Layout, order: Sequence[int]) -> bool:
        try:
            return is_ordered(layout, order)
        except (UNKNOWN_SIZE, ValueRangeError):
            sizes = V.graph.sizevars
            dims = sorted(range(len(order)), key=order.__getitem__)
            strides = [layout.stride[d] for d in dims if not sizes.statically_known_equals(layout.size[d], 1)]
            pairs = itertools.pairwise(strides)
            return all(sizes.statically_known_leq(a, b) or sizes.statically_known_multiple_of(b, a) for a, b in pairs)

    return ordered


def _or_by_known_order(in_order_of: Callable[..., object]) -> staticmethod[..., object]:
    """Have Inductor sort strides of which a run gives the numbers by what is known of them."""
    # Heavy, and only a compilation needs it.
    from torch._inductor import ir  # 2.11 - 2.15

    @functools.wraps(in_order_of)
    def strides(sizes: Sequence[int], stride: Sequence[IntLike]) -> object:
        try:
            return in_order_of(sizes, stride)
        except UNKNOWN_SIZE:
            order = ir.get_fill_order(stride, V.graph.sizevars.shape_env)
            return ir.FlexibleLayout.fill_ordered(sizes, order)

    return staticmethod(strides)


STRIDES_AFTER_SIZES = Patch(
    "strides_after_sizes",
    "torch._functorch._aot_autograd.schemas.SubclassCreationMeta.compute_outer_size_and_stride",
    "A graph returns the symbols in the size of a sharded result, then those in its strides. Torch reads the "
    "strides from the place of the size, so the result reports other strides than its shards have.",
    "https://github.com/pytorch/pytorch/pull/176740",
    "2.11",
    strides_after_sizes,
)


ORDER_BY_DIVISORS = Patch(
    "order_by_divisors",
    "torch._inductor.ir.Layout.is_stride_ordered",
    "Inductor compares strides to find out whether a tensor is stored in the order of dims that an op needs. It cannot "
    "compare unbacked strides, and does not compile the graph.",
    "https://github.com/pytorch/pytorch/issues/183834 is the same of get_stride_order. Torch 2.13 asks in "
    "is_stride_ordered whether one stride divides the other (_stride_expr_ge_or_false), by sympy's Mod. If the "
    "strides have a common factor, sympy makes that a remainder of fractions, and torch raises ValueRangeError. Torch "
    "2.15 uses its own Mod.",
    "2.11 - 2.14",
    order_by_divisors,
)

ORDERS_OF_UNKNOWN_STRIDES = Patch(
    "orders_of_unknown_strides",
    "torch._inductor.ir.FlexibleLayout.same_ordered",
    "What is seen through a view lies in memory as an image with the channel last. To keep that, Inductor sorts "
    "strides by their numbers. Where a run gives them there are none, and the graph is not compiled.",
    "https://github.com/pytorch/pytorch/issues/183834 is the same of get_stride_order. "
    "convert_to_reinterpret_view keeps channels_last by freeze_layout_with_same_order, and FlexibleLayout.same_ordered "
    "asks guarding_hints_or_throw of unbacked strides (GuardOnDataDependentSymNode); get_fill_order(stride, shape_env) "
    "sorts them.",
    "2.11 - 2.15",
    orders_of_unknown_strides,
)
