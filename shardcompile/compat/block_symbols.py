"""The symbols that a trace has for extents, strides and offsets of a block.

Torch makes them from the numbers of this rank's block, and takes numbers that are equal for the same size. Ranks have
other numbers, so that each would trace, and guard, something else.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import sympy
from torch._dynamo.source import TensorProperty, TensorPropertySource  # 2.11 - 2.15
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,  # 2.11 - 2.15
    ShapeEnv,  # 2.11 - 2.15
)

GAPS = -1
"""Where Dynamo's hints for the dims of a block have `Gaps`: a number that is no dim, which torch leaves alone."""

Gaps = list[tuple[int, int | None]]
"""Dims from the fastest on; where the whole tensor has a gap in front of the next row, how many elements."""


_BLOCK, _KEYS = "_local_tensor", "_cut_keys"
"""The inner tensors of a sharded one: its block, and what carries the keys of its cuts."""


def is_block(source: Any) -> bool:
    """Whether an input of a graph is the block of a sharded tensor, by where Dynamo has it from."""
    return getattr(source, "member", None) == _BLOCK


def tells_of_block(source: Any) -> bool:
    """Whether a number is an extent, a stride or an offset of a block, or says how a tensor is cut."""
    return getattr(getattr(source, "base", None), "member", None) in (_BLOCK, _KEYS)


def name_symbols_of_blocks(shape_env: Any) -> None:
    """Have a trace make the symbols of blocks from what all ranks share."""
    symbols = _Symbols(shape_env)
    shape_env._compute_symbolic_stride = symbols.strides(  # 2.11 - 2.15
        _strides_of_few_rows(shape_env._compute_symbolic_stride)
    )
    shape_env.create_symbol = symbols.create  # 2.11 - 2.15
    shape_env._produce_dyn_sizes_from_int_tuple = symbols.sizes  # 2.11 - 2.15


class _Symbols:
    """Makes the symbols of a trace."""

    def __init__(self, shape_env: ShapeEnv) -> None:
        self._env = shape_env
        self._make: Callable[..., Any] = shape_env.create_symbol
        self._make_sizes: Callable[..., Any] = shape_env._produce_dyn_sizes_from_int_tuple
        self._extents: dict[Any, Any] = {}
        self._hints: dict[int, int] = {}
        self._gaps: dict[Any, Gaps] = {}

    def sizes(
        self, size: object, source: object, symbolic_context: object, hint_overrides: dict[int, int] | None = None
    ) -> Any:
        """What torch calls to make the symbols of a shape; the dims of a block that have hints of ours are cut."""
        outer, self._hints = self._hints, hint_overrides or {}
        if GAPS in self._hints:
            self._gaps[source] = self._hints[GAPS]  # type: ignore[assignment]
        try:
            return self._make_sizes(size, source, symbolic_context, hint_overrides)
        finally:
            self._hints = outer

    def create(self, value: Any, source: Any, *args: object, **kwargs: object) -> object:
        """The symbol, or the number, for an input's size, stride or offset; in place of torch's `create_symbol`."""
        what = getattr(source, "prop", None)
        of_block = what is not None and is_block(source.base)
        if what is TensorProperty.SIZE:
            if value in (0, 1) and source.idx not in self._hints:
                # Not cut, so that all ranks see it alike: it may be there to be broadcast. Dynamo would have a symbol
                # for it if it was of another extent in an earlier call.
                kwargs["do_not_specialize_zero_one"] = False
            found = (
                self._of_block(value, source, args, kwargs) if of_block else self._make(value, source, *args, **kwargs)
            )
            return self._extents.setdefault(source, found)
        if what is TensorProperty.STORAGE_OFFSET and of_block:
            return self._offset(value, source, args, kwargs)
        return self._make(value, source, *args, **kwargs)

    def strides(self, strides_of: Callable[..., object]) -> Callable[..., Any]:
        """What torch calls to make the symbols of strides; those above a gap along a cut dim are symbols of their own.

        A slice along a cut dim that is not the slowest leaves rows of the block unused, on some ranks. There torch has
        a symbol for the stride, elsewhere a product of extents, and another graph.
        """

        def strides(
            source: object,
            size: object,
            known_size: object,
            known_stride: object,
            dynamic: object,
            constraints: object,
            *rest: object,
        ) -> Any:
            gaps = self._gaps.pop(source, None)
            made = self._above_gaps(source, size, known_size, known_stride, constraints, gaps, rest) if gaps else None
            return made or strides_of(source, size, known_size, known_stride, dynamic, constraints, *rest)

        return strides

    def _above_gaps(
        self, source: Any, size: Any, known_size: Any, known_stride: Any, constraints: Any, gaps: Gaps, rest: Any
    ) -> list[Any] | None:
        """The strides, from the fastest dim on; None if those of this block are not what the whole tensor's say."""
        made: dict[int, Any] = {}
        step, product = 0, sympy.Integer(0)
        for number, (dim, gap) in enumerate(gaps):
            if gap is not None:
                made[dim] = self._make(
                    max(self._hint(product) + gap, 2),
                    TensorPropertySource(source, TensorProperty.STRIDE, dim),
                    dynamic_dim=DimDynamic.DYNAMIC,
                    constraint_dim=constraints[dim],
                    do_not_specialize_zero_one=True,
                    symbolic_context=rest[-1],
                )
            elif number == 0:
                made[dim] = sympy.Integer(known_stride[dim])
            elif known_stride[dim] == step:
                made[dim] = product
            else:
                return None
            step, product = known_stride[dim] * known_size[dim], made[dim] * size[dim]
        return [made[dim] for dim in range(len(size))]

    def _hint(self, size: Any) -> int:
        return int(size.xreplace(self._env.backed_var_to_val))

    def _of_block(self, value: Any, source: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Along a cut dim a symbol of its own: blocks that are alike on this rank need not be so on others.

        Along another dim what the whole tensor has. Dynamo would give it a symbol of its own where an earlier call, in
        another layout, had another size. It would not know that both are equal.
        """
        whole = self._extents.get(TensorPropertySource(source.base.base, TensorProperty.SIZE, source.idx))
        if whole is not None and source.idx not in self._hints and value == self._value(whole):
            if isinstance(whole, sympy.Symbol):
                self._env.var_to_sources[whole].append(source)  # 2.11 - 2.15
            return whole
        if args and args[0] is DimDynamic.DUCK:
            args = (DimDynamic.DYNAMIC, *args[1:])
        return self._make(value, source, *args, **kwargs)

    def _value(self, size: Any) -> int:
        return int(self._env.backed_var_to_val.get(size, size))  # 2.12 - 2.15; `var_to_val` before

    def _offset(self, value: object, source: object, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Where a block starts in its storage is a number like any other.

        Blocks that are views of a tensor that every rank holds (``whole.split(sizes)[rank]``) start anywhere. Torch
        takes an offset of 0 or 1 for a constant, and one that equals an extent for that extent: each time on some ranks
        only.
        """
        if kwargs.get("dynamic_dim") is not DimDynamic.STATIC:  # that of a DTensor is static
            kwargs |= {"do_not_specialize_zero_one": True, "dynamic_dim": DimDynamic.DYNAMIC}
            args = args[1:]
        return self._make(value, source, *args, **kwargs)


def _strides_of_few_rows(strides_of: Callable[..., object]) -> Callable[..., object]:
    """Strides of a block that are products of extents stay products where an extent is 0 or 1.

    Torch goes through strides in ascending order, and takes a stride of 0 or 1 that it meets before the extent it is a
    multiple of for a constant: a rank that compiles for a block with no columns would have to compile again for one
    that has some, alone.
    """

    def strides(source: Any, size: Any, known_size: Any, known_stride: Any, *rest: object) -> object:
        few = 0 in known_size or (1 in known_size and is_block(source))
        # What has no elements on any rank counts as one.
        one = [dim for dim, extent in enumerate(size) if known_size[dim] == 0 and not isinstance(extent, sympy.Symbol)]
        factors = [1 if dim in one else extent for dim, extent in enumerate(known_size)]
        order = _order_of_products(factors, known_stride) if few else None
        if order is None:
            return strides_of(source, size, known_size, known_stride, *rest)
        symbolic: dict[int, Any] = {}
        expression: Any = sympy.Integer(1)
        for dim in order:
            symbolic[dim] = expression
            expression = expression if dim in one else expression * size[dim]
        return [symbolic[dim] for dim in range(len(size))]

    return strides


def _order_of_products(sizes: Sequence[Any], strides: Sequence[Any]) -> Sequence[int] | None:
    """Dims from the fastest on, so that the stride of each is the product of the extents before it; None if it is not.

    The order of rows is tried first, and of tensors of many dims no other.
    """
    rows = range(len(sizes) - 1, -1, -1)
    for order in itertools.permutations(rows) if len(sizes) <= 6 else [tuple(rows)]:
        step = 1
        for dim in order:
            if strides[dim] != step:
                break
            step *= sizes[dim]
        else:
            return order
    return None
