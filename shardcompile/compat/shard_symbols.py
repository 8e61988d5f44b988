"""The symbols that a trace has for the sizes, strides and offsets of a shard.

Torch makes them from the numbers of this rank's local shard, and gives equal numbers one symbol. Other ranks have other
numbers, so each rank would get another graph and other guards.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import sympy
from torch._dynamo.source import TensorProperty, TensorPropertySource  # 2.11 - 2.15
from torch._guards import ChainedSource, Source  # 2.11 - 2.15
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,  # 2.11 - 2.15
    ShapeEnv,  # 2.11 - 2.15
)

from shardcompile.compat.patch import require
from shardcompile.compat.sizes import Formula, IntLike, nominal_hints

GAPS = -1
"""The key of `Gaps` among Dynamo's hints for the dims of a shard. Torch ignores it, since -1 is no dim of a tensor."""

SHARDS = -2
"""The key, likewise, of what identifies the partitions of dims that are known in the trace, by dim."""

Gaps = list[tuple[int, int | None]]
"""Each dim, the fastest first, with the elements of the whole tensor that lie unused before its next row, or None."""

_SHARDED: weakref.WeakKeyDictionary[ShapeEnv, set[Source]] = weakref.WeakKeyDictionary()
"""The sharded inputs of traces."""

MakeSymbol = Callable[..., Formula]
MakeSymbols = Callable[..., list[Formula]]

_SHARD, _KEYS = "_local_tensor", "_partition_keys"
"""The inner tensors of a sharded one: its shard, and what carries the keys of its partitions."""


def is_shard(source: Source | None) -> bool:
    """Whether Dynamo's source of a graph input says that it is the shard of a sharded tensor."""
    return getattr(source, "member", None) == _SHARD


def describes_shard(source: Source | None) -> bool:
    """Whether a number is a size, a stride or an offset of a shard, or the key of a partition."""
    return getattr(getattr(source, "base", None), "member", None) in (_SHARD, _KEYS)


def describes_plain_value(shape_env: ShapeEnv, symbol: sympy.Symbol) -> bool:
    """Whether a symbol stands for something of an input that is not sharded, such as a size of a plain tensor.

    Also if the trace has found that it is equal to such a symbol.
    """
    sharded = _SHARDED.get(shape_env, set())

    def is_plain(source: Source) -> bool:
        return not describes_shard(source) and getattr(source, "base", None) not in sharded

    equal = [known for known, found in shape_env.replacements.items() if symbol in found.free_symbols]  # 2.11 - 2.15
    sources = [shape_env.var_to_sources.get(known, ()) for known in [symbol, *equal]]  # 2.11 - 2.15
    return any(map(is_plain, itertools.chain(*sources)))


def common_hints() -> contextlib.AbstractContextManager[None]:
    """Inside of this, `size_hint` gives the same number on all ranks: it does not read sizes of plain inputs.

    A plain tensor may have more rows on one rank than on another, such as a list of edges, or a batch.
    """
    return nominal_hints(describes_plain_value)


def name_symbols_of_shards(shape_env: ShapeEnv) -> None:
    """Have a trace make the symbols of shards from what all ranks share."""
    for name in ("_compute_symbolic_stride", "create_symbol", "_produce_dyn_sizes_from_int_tuple"):
        require(ShapeEnv, name)
    symbols = _Symbols(shape_env)
    strides = symbols.strides(_strides_of_few_rows(shape_env._compute_symbolic_stride))
    replacements: dict[str, object] = {
        "_compute_symbolic_stride": strides,  # 2.11 - 2.15
        "create_symbol": symbols.create,  # 2.11 - 2.15
        "_produce_dyn_sizes_from_int_tuple": symbols.sizes,  # 2.11 - 2.15
    }
    vars(shape_env).update(replacements)


class _Symbols:
    """Makes the symbols of a trace."""

    def __init__(self, shape_env: ShapeEnv) -> None:
        self._env = shape_env
        self._make: MakeSymbol = shape_env.create_symbol
        self._make_sizes: MakeSymbols = shape_env._produce_dyn_sizes_from_int_tuple
        self._sizes: dict[Source, Formula] = {}
        self._hints: dict[int, int] = {}
        self._gaps: dict[Source, Gaps] = {}
        self._of_shards: dict[object, Formula] = {}

    def sizes(
        self, size: object, source: Source, symbolic_context: object, hint_overrides: dict[int, int] | None = None
    ) -> list[Formula]:
        """Make the symbols of a shape, in place of torch's method. The dims of a shard that have our hints are
        sharded.
        """
        outer, self._hints = self._hints, hint_overrides or {}
        if GAPS in self._hints:
            self._gaps[source] = cast(Gaps, self._hints[GAPS])
        try:
            return self._make_sizes(size, source, symbolic_context, hint_overrides)
        finally:
            self._hints = outer

    def create(self, val: IntLike, source: Source, *args: object, **kwargs: object) -> Formula:
        """The symbol, or the number, for an input's size, stride or offset; in place of torch's `create_symbol`."""
        if not isinstance(source, TensorPropertySource):
            return self._make(val, source, *args, **kwargs)
        of_shard = is_shard(source.base)
        if of_shard:
            _SHARDED.setdefault(self._env, set()).add(cast(ChainedSource, source.base).base)
        if source.prop is TensorProperty.SIZE:
            if val in (0, 1) and source.idx not in self._hints:
                # This dim is not sharded, so all ranks see the same size, and the tensor may be broadcast along it. If
                # the size differed in an earlier call, Dynamo would give it a symbol.
                kwargs["do_not_specialize_zero_one"] = False
            if describes_shard(source) and args and args[0] is DimDynamic.DUCK:
                # Equal sizes on this rank may differ on others, and equal keys in the next call: torch would give both
                # one symbol, and a guard.
                args = (DimDynamic.DYNAMIC, *args[1:])
            found = self._of_shard(val, source, args, kwargs) if of_shard else self._make(val, source, *args, **kwargs)
            return self._sizes.setdefault(source, found)
        if source.prop is TensorProperty.STORAGE_OFFSET and of_shard:
            return self._offset(val, source, args, kwargs)
        return self._make(val, source, *args, **kwargs)

    def strides(self, strides_of: MakeSymbols) -> MakeSymbols:
        """Torch's function that makes the symbols of strides, with a new symbol for each stride above a gap.

        A slice along a sharded dim that is not the slowest leaves rows of the shard unused on some ranks. On these
        ranks torch has a symbol for the stride. On the others it has a product of sizes, and so another graph.
        """

        def strides(
            source: Source,
            size: Sequence[Formula],
            known_size: Sequence[int],
            known_stride: Sequence[int],
            dynamic: object,
            constraints: Sequence[object],
            *rest: object,
        ) -> list[Formula]:
            gaps = self._gaps.pop(source, None)
            made = self._above_gaps(source, size, known_size, known_stride, constraints, gaps, rest) if gaps else None
            return made or strides_of(source, size, known_size, known_stride, dynamic, constraints, *rest)

        return strides

    def _above_gaps(
        self,
        source: Source,
        size: Sequence[Formula],
        known_size: Sequence[int],
        known_stride: Sequence[int],
        constraints: Sequence[object],
        gaps: Gaps,
        rest: Sequence[object],
    ) -> list[Formula] | None:
        """The strides of a shard with gaps; None if this shard is not laid out like the whole tensor."""
        made: dict[int, Formula] = {}
        step: int = 0
        product: Formula = sympy.Integer(0)
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

    def _hint(self, size: Formula) -> int:
        return int(size.xreplace(self._env.backed_var_to_val))

    def _of_shard(
        self, value: IntLike, source: TensorPropertySource, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> Formula:
        """The symbol for a size of a shard.

        Along a sharded dim it is a new symbol: shards of equal size on this rank may differ in size on others. It is
        one symbol for all inputs of one known partition, such as a parameter and the state of its optimizer. Along
        another dim it is the whole tensor's symbol. If an earlier call had another layout and another size, Dynamo
        would make a new symbol there, and would not know that both are equal.
        """
        shard = cast(ChainedSource, source.base)
        whole = self._sizes.get(TensorPropertySource(shard.base, TensorProperty.SIZE, source.idx))
        if whole is not None and source.idx not in self._hints and value == self._value(whole):
            return self._also_of(whole, source)
        shards = cast(Mapping[int, object], self._hints.get(SHARDS, {})).get(cast(int, source.idx))
        if shards is None:
            return self._make(value, source, *args, **kwargs)
        if shards in self._of_shards:
            return self._also_of(self._of_shards[shards], source)
        made = self._of_shards[shards] = self._make(value, source, *args, **kwargs)
        return made

    def _also_of(self, size: Formula, source: Source) -> Formula:
        if isinstance(size, sympy.Symbol):
            self._env.var_to_sources[size].append(source)  # 2.11 - 2.15
        return size

    def _value(self, size: Formula) -> int:
        return int(self._env.backed_var_to_val.get(size, size))  # 2.12 - 2.15; `var_to_val` before

    def _offset(self, value: IntLike, source: Source, args: tuple[object, ...], kwargs: dict[str, object]) -> Formula:
        """A new symbol for where a shard starts in its storage.

        A shard that is a view of a tensor on every rank (``whole.split(sizes)[rank]``) may start anywhere. Torch takes
        an offset of 0 or 1 for a constant, and an offset that equals a size for that size. Either happens on some
        ranks only.
        """
        if kwargs.get("dynamic_dim") is not DimDynamic.STATIC:  # that of a DTensor is static
            kwargs |= {"do_not_specialize_zero_one": True, "dynamic_dim": DimDynamic.DYNAMIC}
            args = args[1:]
        return self._make(value, source, *args, **kwargs)


def _strides_of_few_rows(strides_of: MakeSymbols) -> MakeSymbols:
    """Torch's function that makes the symbols of strides, which keeps products of sizes where a size is 0 or 1.

    Torch visits strides in ascending order. It takes a stride of 0 or 1 for a constant if it has not yet met the
    size that is a factor of it. A rank that compiles for a shard with no columns would then have to compile again,
    alone, for a shard with some.
    """

    def strides(
        source: Source, size: Sequence[Formula], known_size: Sequence[int], known_stride: Sequence[int], *rest: object
    ) -> list[Formula]:
        few = 0 in known_size or (1 in known_size and is_shard(source))
        # A size that is 0 on every rank counts as 1.
        one = [
            dim for dim, dim_size in enumerate(size) if known_size[dim] == 0 and not isinstance(dim_size, sympy.Symbol)
        ]
        factors = [1 if dim in one else dim_size for dim, dim_size in enumerate(known_size)]
        order = _order_of_products(factors, known_stride) if few else None
        if order is None:
            return strides_of(source, size, known_size, known_stride, *rest)
        symbolic: dict[int, Formula] = {}
        expression: Formula = sympy.Integer(1)
        for dim in order:
            symbolic[dim] = expression
            expression = expression if dim in one else expression * size[dim]
        return [symbolic[dim] for dim in range(len(size))]

    return strides


def _order_of_products(sizes: Sequence[int], strides: Sequence[int]) -> Sequence[int] | None:
    """An order of dims, the fastest first, in which each stride is the product of the sizes before it, or None.

    The row-major order is tried first. For a tensor of more than six dims no other order is tried.
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
