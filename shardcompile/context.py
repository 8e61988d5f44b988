"""Context parallelism: models of plain tensors, whose sequence is cut over ranks while a context lasts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Shard
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from shardcompile import compat
from shardcompile.errors import LayoutError, UnsupportedOpError
from shardcompile.layout import Cut, Layout, Spec, chunk_sizes, contiguous_stride
from shardcompile.tensor import ShardTensor
from shardcompile.tensor.autograd import FromLocal, ToLocal, redistributed


@contextlib.contextmanager
def context_parallel(
    mesh: DeviceMesh,
    *,
    buffers: Sequence[Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: Collection[Tensor] | None = None,
    sizes: Sequence[int] | None = None,
) -> Iterator[None]:
    """As `torch.distributed.tensor.experimental.context_parallel`, over blocks of any sizes, eager and compiled.

    While it lasts each buffer holds this rank's rows of the sequence. `scaled_dot_product_attention` of plain tensors
    attends from this rank's rows to those of all ranks, as `sc.config.attention` says. A model runs in it as it is.
    What depends on the place of a row, as the ids of positions or rotary factors, is a buffer as well. Rows stay in
    order: cuts that balance the work of causal attention come from `sc.balanced_cut`.

    The loss of a rank is that of its rows, and so are the gradients of parameters: sum them over the mesh.

    Args:
        mesh: of one dim, the ranks that share the sequence; a part of a larger mesh is ``mesh["context"]``.
        buffers: plain tensors that have the sequence as a dim, each with the same number of rows, the same on every
            rank. They get other contents in place, and get their own back in the end.
        buffer_seq_dims: of each buffer the dim of the sequence.
        no_restore_buffers: of the buffers, those that keep this rank's rows in the end.
        sizes: rows of each rank; those of torch.chunk by default. They may change with every use: compiled functions
            serve all cuts.

    Raises:
        LayoutError: buffers, dims and sizes do not fit together.
        UnsupportedOpError: a buffer is sharded, or requires gradients.
    """
    buffers = list(buffers or ())
    dims = list(buffer_seq_dims or ())
    _check(mesh, buffers, dims, no_restore_buffers or ())
    rows = buffers[0].shape[dims[0]] if buffers else sum(sizes or ())
    cut = list(chunk_sizes(rows, mesh.size()) if sizes is None else sizes)
    _check_rows(buffers, dims, cut, mesh)
    kept = [None if any(b is other for other in no_restore_buffers or ()) else b.detach() for b in buffers]
    here = mesh.get_local_rank()
    with torch.no_grad():
        for buffer, dim in zip(buffers, dims, strict=True):
            buffer.set_(buffer.split(cut, dim)[here].clone(memory_format=torch.contiguous_format))  # type: ignore[call-overload]
    try:
        with _AttentionOverBlocks(_of_no_columns(mesh, cut, here)):
            yield
    finally:
        with torch.no_grad():
            for buffer, own in zip(buffers, kept, strict=True):
                if own is not None:
                    buffer.set_(own)  # type: ignore[call-overload]


def _check(mesh: DeviceMesh, buffers: Sequence[Tensor], dims: Sequence[int], kept: Collection[Tensor]) -> None:
    if mesh.ndim != 1:
        raise LayoutError(f'context_parallel takes a mesh of one dim, got {mesh}; a part of it is mesh["name"]')
    if len(buffers) != len(dims):
        raise LayoutError(f"context_parallel: {len(buffers)} buffers, and buffer_seq_dims for {len(dims)}")
    if any(not any(k is b for b in buffers) for k in kept):
        raise LayoutError("context_parallel: a tensor of no_restore_buffers is none of the buffers")
    for n, buffer in enumerate(buffers):
        if isinstance(buffer, ShardTensor):
            raise UnsupportedOpError(
                f"context_parallel: buffer {n} is sharded, {buffer.sharding.describe()}; attention along a cut "
                "sequence needs no context: call the model with sharded tensors"
            )
        if buffer.requires_grad:
            raise UnsupportedOpError(
                f"context_parallel: buffer {n} of shape {tuple(buffer.shape)} requires gradients, which its rows would "
                "not get while it has other contents; pass buffer.detach()"
            )
        if any(buffer is other for other in buffers[:n]):
            raise LayoutError(f"context_parallel: buffer {n} is given twice")


def _check_rows(buffers: Sequence[Tensor], dims: Sequence[int], cut: Sequence[int], mesh: DeviceMesh) -> None:
    if len(cut) != mesh.size() or any(size < 0 for size in cut):
        raise LayoutError(f"context_parallel: sizes={list(cut)} for the {mesh.size()} ranks of {mesh}")
    for n, (buffer, dim) in enumerate(zip(buffers, dims, strict=True)):
        if not -buffer.ndim <= dim < buffer.ndim or buffer.shape[dim] != sum(cut):
            raise LayoutError(
                f"context_parallel: buffer {n} of shape {tuple(buffer.shape)} has not the {sum(cut)} rows of "
                f"sizes={list(cut)} along dim {dim}"
            )


def _of_no_columns(mesh: DeviceMesh, cut: Sequence[int], here: int) -> ShardTensor:
    """A tensor that holds nothing but the cut: a graph gets it as an input, and so serves all cuts."""
    block = torch.empty(cut[here], 0, device=mesh.device_type)
    return ShardTensor.from_local(block, mesh, [Shard(0)], {0: list(cut)})


class _AttentionOverBlocks(TorchFunctionMode):
    """Attention of plain tensors is that of this rank's rows to all rows.

    Attributes:
        rows: of no columns, cut as the sequence is.
    """

    def __init__(self, rows: ShardTensor) -> None:
        super().__init__()
        self.rows = rows

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is scaled_dot_product_attention and ShardTensor not in types:
            return _attention(self.rows, *args, **(kwargs or {}))
        if func is Tensor.unflatten:  # which calls `super()`: under a mode Dynamo cannot trace that
            return torch.unflatten(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _attention(
    rows: ShardTensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **kwargs: Any,
) -> Tensor:
    """Of this rank's rows, [..., rows, features]. A mask has this rank's rows or one, and all columns."""
    is_causal = True if is_causal else False  # noqa: SIM210 (a symbol, where a model asks for more than one row)
    q, k, v = (_in_blocks(x, x.ndim - 2, rows) for x in (query, key, value))
    if query.shape[-2] <= 1 and attn_mask is None and not is_causal:
        raise LayoutError(
            f"context_parallel: attention of {query.shape[-2]} of the sequence's {k.shape[-2]} rows without is_causal. "
            "Models take so few rows for a step of generation, and ask for is_causal with more of them only, so that "
            "ranks would not agree. Give each rank at least two rows, or pass a mask"
        )
    if attn_mask is not None:
        if not compat.same_symbol(attn_mask.shape[-1], k.shape[-2]):
            raise LayoutError(
                f"context_parallel: a mask has a column for each of the sequence's {k.shape[-2]} rows, and this one "
                f"has shape {tuple(attn_mask.shape)}. Its rows are this rank's, as those of a buffer along dim -2 are"
            )
        # Of one row for all, or of this rank's only row: what is one here may be several elsewhere.
        attn_mask = attn_mask.expand((*attn_mask.shape[:-2], query.shape[-2], attn_mask.shape[-1]))
        attn_mask = _in_blocks(attn_mask, attn_mask.ndim - 2, rows)
    return _block(scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, **kwargs), rows)


# One node for Dynamo each; AOTAutograd traces what they do.


@torch.compiler.allow_in_graph
def _in_blocks(block: Tensor, dim: int, rows: Any) -> ShardTensor:
    """This rank's block as a sharded tensor, cut along a dim as `rows` is."""
    like: Layout = rows._spec.layout
    cut = like.cut_of(0)
    here = compat.coordinate(like.mesh)
    if cut.is_traced:
        cut = Cut.traced(cut.mesh_dims, cut.parts, cut.extent, cut.key, block.shape[dim])
    elif cut.local_size(here) != block.shape[dim]:
        raise LayoutError(
            f"context_parallel: attention to {block.shape[dim]} rows, where this rank has {cut.local_size(here)} of "
            f"the sequence's {cut.extent}, {list(cut.sizes)} on the ranks. All inputs that have rows of the sequence "
            "are buffers; call what attends to other rows outside of the context"
        )
    shape = [cut.extent if d == dim else n for d, n in enumerate(block.shape)]
    cuts = [cut if d == dim else None for d in range(block.ndim)]
    layout = Layout.of(like.mesh, [Shard(dim)], shape, block.dtype, cuts)
    spec = Spec.of(layout, contiguous_stride(layout.shape))
    return FromLocal.apply(block, ShardTensor, spec)  # type: ignore[no-any-return]


@torch.compiler.allow_in_graph
def _block(out: Any, rows: Any) -> Tensor:
    """This rank's rows of a result."""
    like: Layout = out._spec.layout
    dim = out.ndim - 2
    cuts = [rows._spec.layout.cut_of(0) if d == dim else None for d in range(out.ndim)]
    layout = Layout.of(like.mesh, [Shard(dim)], like.shape, like.dtype, cuts)
    return ToLocal.apply(redistributed(out, layout), None)  # type: ignore[no-any-return]
