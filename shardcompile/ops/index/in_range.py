"""Checks that indices are in range, before anything is sent.

A kernel raises only on the rank whose shard the index falls into, and the other ranks would wait for it. In eager mode
on CPUs indices are therefore checked first. The check of a replicated index is rank-invariant. Of a sharded index each
rank checks its local shard: an exchange would cost many times what a gather does, and `shardcompile.diagnosis` tells
the other ranks why they wait in vain. On other devices, and inside graphs, kernels assert as they do for plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardcompile import compat
from shardcompile.errors import IndexRangeError
from shardcompile.ops import OpRecord, state
from shardcompile.ops.index.planned_gathers import has_gather_plan
from shardcompile.sharded import Sharded

aten = torch.ops.aten


@dataclass(frozen=True)
class Indexed:
    """An index tensor of a call.

    Attributes:
        index: the tensor, sharded or plain.
        x: the tensor that it indexes.
        dim: the dim of `x` that it indexes.
        wraps: whether negative indices count from the end.
        ignored: an index that names no row.
    """

    index: Any
    x: Any
    dim: int
    wraps: bool = False
    ignored: int | None = None


def _indices_along_dim(wraps: bool = False) -> Callable[..., Iterator[Indexed]]:
    def find(x: Tensor, dim: int, index: Tensor, *_: object, **__: object) -> Iterator[Indexed]:
        if x.ndim:
            yield Indexed(index, x, dim % x.ndim, wraps)

    return find


def _indices_per_dim(x: Tensor, indices: Sequence[Tensor | None], *_: object, **__: object) -> Iterator[Indexed]:
    if not any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices):  # a mask may take several dims
        yield from (Indexed(i, x, d, wraps=True) for d, i in enumerate(indices) if i is not None)


def _embedding_indices(weight: Tensor, index: Tensor, *_: object, **__: object) -> Iterator[Indexed]:
    yield Indexed(index, weight, 0)


def _class_indices(
    x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1, ignore_index: int = -100
) -> Iterator[Indexed]:
    yield Indexed(target, x, 0 if x.ndim == 1 else 1, ignored=ignore_index)


_ALONG_A_DIM = (
    *(aten.index_select.default, aten.index_add.default, aten.index_copy.default, aten.index_reduce.default),
    *(aten.gather.default, aten.scatter.src, aten.scatter.value, aten.scatter_add.default, aten.scatter_reduce.two),
    *(aten.index_add_.default, aten.index_copy_.default, aten.index_reduce_.default, aten.scatter_.src),
    *(aten.scatter_.value, aten.scatter_add_.default, aten.scatter_reduce_.two),
)

state(_ALONG_A_DIM, indices=_indices_along_dim())
state(aten.index_fill.int_Scalar, indices=_indices_along_dim(wraps=True))
state(aten.index_fill.int_Tensor, indices=_indices_along_dim(wraps=True))
state(aten.index_fill_.int_Scalar, indices=_indices_along_dim(wraps=True))
state(aten.index_fill_.int_Tensor, indices=_indices_along_dim(wraps=True))
state(aten.index.Tensor, indices=_indices_per_dim)
state(aten.index_put.default, indices=_indices_per_dim)
state(aten.index_put_.default, indices=_indices_per_dim)
state(aten.embedding.default, indices=_embedding_indices)
state(aten.nll_loss_forward.default, indices=_class_indices)
state(aten.nll_loss2d_forward.default, indices=_class_indices)


def check_indices(cls: type[Sharded], record: OpRecord, args: Sequence[object], kwargs: dict[str, object]) -> None:
    """Raises if an index of a call is out of range: on all ranks, or, for a sharded index, on the ranks that hold it.

    Indices of a backward pass have been checked in the forward pass.

    Raises:
        IndexRangeError: an index is out of range.
    """
    if record.indices is None or compat.in_backward_pass():
        return
    for indexed in record.indices(*args, **kwargs):
        smallest, largest = _bounds(cls, indexed)
        size = indexed.x.shape[indexed.dim]
        if largest >= size or smallest < (-size if indexed.wraps else 0):
            index = largest if largest >= size else smallest
            raise IndexRangeError(
                f"{record.op}: index {index} is out of range for dim {indexed.dim} of size {size}"
                + (f" ({indexed.x._spec.layout.describe()})" if type(indexed.x) is cls else "")
            )


def _bounds(cls: type[Sharded], indexed: Indexed) -> tuple[int, int]:
    """The smallest and the largest index that this rank has; 0 and -1 if it has none, or if kernels check them."""
    index = indexed.index
    layout = index._spec.layout if type(index) is cls else None
    shard = index if layout is None else index._local_tensor
    if type(shard) not in (Tensor, torch.nn.Parameter) or shard.device.type != "cpu":
        return 0, -1
    if layout is not None and layout.is_partial:
        return 0, -1
    if type(indexed.x) is cls and has_gather_plan(index, indexed.x._spec.layout.partitions[indexed.dim]):
        return 0, -1  # checked while the gather plan is made, which raises on all ranks
    if indexed.ignored is not None:
        shard = shard[shard != indexed.ignored]
    smallest, largest = (int(n) for n in torch.aminmax(shard)) if shard.numel() else (0, -1)
    return smallest, largest
