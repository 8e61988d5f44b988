"""Indices that are out of range: an error before anything is sent.

A kernel raises on the rank whose shard of rows the index would be in, and the others would wait for it. In eager mode
on CPUs indices are looked at first. An index that every rank has is judged alike on all of them. Of a partition index
each rank looks at its part: an exchange would cost many times what a lookup does, and `shardcompile.diagnosis` tells
the others why they wait in vain. On other devices, and inside graphs, kernels assert as they do for plain tensors.
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
from shardcompile.ops.index.planned_gathers import is_linked
from shardcompile.sharded import Sharded

aten = torch.ops.aten


@dataclass(frozen=True)
class Indexed:
    """An index tensor of a call.

    Attributes:
        index: the tensor, sharded or plain.
        x: what it counts rows of.
        dim: along which.
        wraps: whether negative numbers count from the end.
        ignored: a number that stands for no row.
    """

    index: Any
    x: Any
    dim: int
    wraps: bool = False
    ignored: int | None = None


def _rows(wraps: bool = False) -> Callable[..., Iterator[Indexed]]:
    def find(x: Tensor, dim: int, index: Tensor, *_: object, **__: object) -> Iterator[Indexed]:
        if x.ndim:
            yield Indexed(index, x, dim % x.ndim, wraps)

    return find


def _by_dim(x: Tensor, indices: Sequence[Tensor | None], *_: object, **__: object) -> Iterator[Indexed]:
    if not any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices):  # a mask may take several dims
        yield from (Indexed(i, x, d, wraps=True) for d, i in enumerate(indices) if i is not None)


def _table(weight: Tensor, index: Tensor, *_: object, **__: object) -> Iterator[Indexed]:
    yield Indexed(index, weight, 0)


def _classes(
    x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1, ignore_index: int = -100
) -> Iterator[Indexed]:
    yield Indexed(target, x, 0 if x.ndim == 1 else 1, ignored=ignore_index)


_ALONG_A_DIM = (
    *(aten.index_select.default, aten.index_add.default, aten.index_copy.default, aten.index_reduce.default),
    *(aten.gather.default, aten.scatter.src, aten.scatter.value, aten.scatter_add.default, aten.scatter_reduce.two),
    *(aten.index_add_.default, aten.index_copy_.default, aten.index_reduce_.default, aten.scatter_.src),
    *(aten.scatter_.value, aten.scatter_add_.default, aten.scatter_reduce_.two),
)

state(_ALONG_A_DIM, indices=_rows())
state(aten.index_fill.int_Scalar, indices=_rows(wraps=True))
state(aten.index_fill.int_Tensor, indices=_rows(wraps=True))
state(aten.index_fill_.int_Scalar, indices=_rows(wraps=True))
state(aten.index_fill_.int_Tensor, indices=_rows(wraps=True))
state(aten.index.Tensor, indices=_by_dim)
state(aten.index_put.default, indices=_by_dim)
state(aten.index_put_.default, indices=_by_dim)
state(aten.embedding.default, indices=_table)
state(aten.nll_loss_forward.default, indices=_classes)
state(aten.nll_loss2d_forward.default, indices=_classes)


def check_indices(cls: type[Sharded], record: OpRecord, args: Sequence[object], kwargs: dict[str, object]) -> None:
    """Raise if an index of a call is out of range: on all ranks, or, where the index is sharded, on those that hold it.

    Those of a backward pass have been looked at in the forward pass.

    Raises:
        IndexRangeError: one is.
    """
    if record.indices is None or compat.in_backward_pass():
        return
    for found in record.indices(*args, **kwargs):
        least, most = _bounds(cls, found)
        size = found.x.shape[found.dim]
        if most >= size or least < (-size if found.wraps else 0):
            number = most if most >= size else least
            raise IndexRangeError(
                f"{record.op}: index {number} is out of range for dim {found.dim} of size {size}"
                + (f" ({found.x._spec.layout.describe()})" if type(found.x) is cls else "")
            )


def _bounds(cls: type[Sharded], found: Indexed) -> tuple[int, int]:
    """The smallest and the largest number that this rank has. 0 and -1 if it has none, or if kernels check them."""
    index = found.index
    layout = index._spec.layout if type(index) is cls else None
    shard = index if layout is None else index._local_tensor
    if type(shard) not in (Tensor, torch.nn.Parameter) or shard.device.type != "cpu":
        return 0, -1
    if layout is not None and layout.is_partial:
        return 0, -1
    if type(found.x) is cls and is_linked(index, found.x._spec.layout.partitions[found.dim]):
        return 0, -1  # looked at where ranks tell one another which rows they name: then it is an error on all of them
    if found.ignored is not None:
        shard = shard[shard != found.ignored]
    least, most = (int(n) for n in torch.aminmax(shard)) if shard.numel() else (0, -1)
    return least, most
