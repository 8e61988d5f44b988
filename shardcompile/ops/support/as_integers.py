"""Ops that only move elements, for dtypes that kernels hardly support: elements move as integers of the same size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardcompile.compat import OpOverload
from shardcompile.ops.record import OpRecord
from shardcompile.ops.registry import state
from shardcompile.sharding import is_ordinary, transfer_dtype_of

aten = torch.ops.aten


def moved_dtype(record: OpRecord, args: Sequence[object], kwargs: Mapping[str, object]) -> torch.dtype | None:
    """The dtype of the elements that a call moves and does not compute with; None if it is an ordinary dtype."""
    if record.moves is None:
        return None
    dtype = kwargs.get("dtype")
    dtypes = {dtype if isinstance(dtype, torch.dtype) else x.dtype for x in record.moves(args)}
    moved = dtypes.pop() if len(dtypes) == 1 else None  # torch promotes several, or refuses to
    return None if moved is None or is_ordinary(moved) else moved


def moves_as_integers(record: OpRecord, moved: torch.dtype) -> Callable[..., object]:
    """Wraps an op that only moves elements so that it runs on views of its tensors as integers.

    Args:
        record: the record of the op.
        moved: dtype of the elements, as `moved_dtype` returns it.
    """
    op: OpOverload = record.op

    def run(*args: Any, **kwargs: Any) -> object:
        assert record.moves is not None, "moved_dtype has checked it"
        moved_ids = [id(x) for x in record.moves(args)]

        def as_integers(a: Any) -> Any:
            if isinstance(a, (list, tuple)):
                return [as_integers(b) for b in a]
            return aten.view.dtype(a, transfer_dtype_of(a.dtype)) if id(a) in moved_ids else a

        dtype_option = {"dtype": transfer_dtype_of(moved)} if kwargs.get("dtype") is not None else {}
        out = op(*map(as_integers, args), **{**kwargs, **dtype_option})
        return args[0] if op._schema.is_mutable else aten.view.dtype(out, moved)

    return run


def _first(args: Sequence[Tensor]) -> Sequence[Tensor]:
    return args[:1]


state(
    [
        *(aten.clone.default, aten.flip.default, aten.roll.default, aten.repeat.default, aten.index_select.default),
        *(aten.index.Tensor, aten.embedding.default, aten.gather.default, aten.take.default),
        *(aten.masked_select.default, aten.tril.default, aten.triu.default, aten.zero_.default),
        *(aten.zeros_like.default, aten.new_zeros.default),
    ],
    moves=_first,
)
state([aten.cat.default, aten.stack.default], moves=lambda args: args[0])
state([aten.slice_scatter.default, aten.select_scatter.default], moves=lambda args: args[:2])
state(aten.where.self, moves=lambda args: args[1:])
