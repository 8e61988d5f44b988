"""`halo_map` runs a user's function on local shards with halos: a stencil, neighborhood attention, a custom kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from shardcompile import compat
from shardcompile.collectives import Pending, derive, shard_size
from shardcompile.collectives.halo_exchange import FETCH_HALO, HaloExchange
from shardcompile.errors import LayoutError
from shardcompile.ops.support.sharded_rows import take_rows
from shardcompile.sharding import IntLike, Layout, Partition, write_group_partition
from shardcompile.tensor import ShardTensor
from shardcompile.tensor.aligned_rows import on_mesh, wrapped
from shardcompile.tensor.autograd import ToLocal, redistributed

Halo = Mapping[int, tuple[int, int]]

Fill = float | Literal["circular"] | None


def halo_map(fn: Callable[..., object], *xs: Tensor, halo: Halo, fill: Fill = None, crop: bool = True) -> Any:
    """Runs a function of plain tensors on the local shards, each extended by a halo. Differentiable if the function is.

    Along a sharded dim a rank receives the rows next to its shard from the ranks that hold them, which may be several.
    Corners are included. In the backward pass the gradients of halo rows are sent back to their owners and added.

    Args:
        fn: takes the extended shard of each of `xs`; returns a tensor or a tuple of tensors. Along the dims of the halo
            a result has as many rows as the extended shard, or, without `crop`, as many as the shard. A rank whose
            shard is empty calls it as well, on padding rows, whose results are dropped. A tensor that it closes over
            gets the gradient of this rank's rows alone.
        xs: tensors of the same sizes along the dims of the halo; redistributed to the partitions of the first sharded
            one.
        halo: for each dim the width of the halo before and after a shard, in rows.
        fill: the value of halo rows outside of the global tensor, along all dims of the halo: a shard of n rows is then
            extended to ``before + n + after`` rows. ``"circular"``: the rows at the other end, as in a periodic domain.
            None: the halo ends where the global tensor ends, for a kernel that handles borders itself.
        crop: whether the halo is removed from the results.

    Returns:
        The results of `fn`, sharded as the first tensor. Plain if all of `xs` are.

    Raises:
        LayoutError: a dim of the halo is sharded over several mesh dims, tensors do not fit, or a result has a wrong
            number of rows. Also if `fill` is another text.
    """
    if isinstance(fill, str) and fill != "circular":
        raise LayoutError(f'halo_map: fill is a number, "circular" or None, got {fill!r}')
    if not xs:
        raise LayoutError("halo_map needs a tensor to run the function on")
    first = next((x for x in xs if isinstance(x, ShardTensor)), None)
    widths = tuple((d, *_check(d, halo[d], xs)) for d in sorted(halo))
    if first is None:
        result = fn(*[_extend_plain(x, widths, fill) for x in xs])
        outs = result if isinstance(result, tuple) else (result,)
        cropped = tuple(_crop_plain(o, xs[0], widths, fill, crop) for o in outs)
        return cropped if isinstance(result, tuple) else cropped[0]
    extended = _extend(widths, fill, *xs)
    result = fn(*extended)
    outs = result if isinstance(result, tuple) else (result,)
    cropped = tuple(_crop(widths, fill, crop, o, *xs) for o in outs)
    return cropped if isinstance(result, tuple) else cropped[0]


def _check(dim: int, rows: tuple[int, int], xs: Sequence[Tensor]) -> tuple[int, int]:
    if not all(0 <= dim < x.ndim for x in xs):
        raise LayoutError(f"halo_map: there is no dim {dim} in all of {[tuple(x.shape) for x in xs]}; count from 0")
    if not isinstance(rows, (tuple, list)) or len(rows) != 2:
        raise LayoutError(
            f"halo_map: for dim {dim} pass the width of the halo before and after a shard, as halo={{{dim}: (1, 1)}}; "
            f"got {rows!r}"
        )
    before, after = rows
    if before < 0 or after < 0:
        raise LayoutError(f"halo_map: the width of a halo is at least 0, got {before} and {after} for dim {dim}")
    return before, after


@dataclass(frozen=True)
class _DimHalo:
    """The halo along one dim.

    Attributes:
        dim: the dim.
        partition: its partition; None if it is not sharded.
        before: width before the shard, in rows.
        after: width after the shard.
        fill: the value of rows outside of the global tensor, see `halo_map`.
        mesh: the mesh.
    """

    dim: int
    partition: Partition | None
    before: int
    after: int
    fill: Fill
    mesh: Any

    @property
    def extended_size(self) -> IntLike | None:
        """Number of rows of the extended shard; None if the dim is not sharded."""
        if self.partition is None:
            return None
        if self.fill is not None:
            shard: Any = shard_size(self.partition, self.mesh)
            return self.before + shard + self.after  # type: ignore[no-any-return]
        return derive("halo", [self.partition], [self.before, self.after], self.partition.size, self.mesh)[1]

    @property
    def rows_before(self) -> IntLike:
        """Number of halo rows before the shard."""
        if self.fill is not None:
            return self.before
        if self.partition is None:
            return 0
        return derive("rows_before", [self.partition], [self.before], self.partition.size, self.mesh)[1]

    def extend(self, x: Tensor) -> Tensor:
        """Returns a shard with its halo along this dim."""
        if self.partition is None:
            return _pad(x, self.dim, self.before, self.after, self.fill)
        if not (self.before or self.after) and self.fill is not None:
            return x
        (mesh_dim,) = self.partition.mesh_dims
        held = self.partition.group_partition(compat.coordinate(self.mesh) or ())
        size, extended_size = self.partition.size, self.extended_size
        assert extended_size is not None, "the dim is sharded"
        group_name = compat.group_name_of(self.mesh, mesh_dim)
        if self.fill == "circular":
            exchange = HaloExchange(x, self.dim, self.before, self.after, size, extended_size, held, group_name)
            return FETCH_HALO.start(exchange).wait()
        window = [size, 1, 1, self.before, self.after]
        derivation, arguments = ("nonempty_halo", window[3:]) if self.fill is None else ("window", [*window, 0])
        fetched = derive(derivation, [self.partition], arguments, size, self.mesh)[1]
        partition = write_group_partition(held)
        flat = torch.ops.shardcompile.fetch_ranges(
            x, self.dim, size, fetched, *partition, *partition, window, self.fill, group_name
        )
        rows = Pending.of(flat, x.shape, self.dim, fetched).wait()
        if isinstance(fetched, int) and fetched == extended_size:
            return rows
        padding_shape = [self.before + self.after + 1 if d == self.dim else n for d, n in enumerate(x.shape)]
        padding = x.new_full(padding_shape, self.fill or 0)
        # `torch.narrow_copy` would do both, but has no derivative in torch 2.11.
        extended = torch.cat([rows, padding], self.dim).narrow(self.dim, 0, extended_size)
        return extended.clone(memory_format=torch.contiguous_format)


def _pad(x: Tensor, dim: int, before: int, after: int, fill: Fill) -> Tensor:
    if fill is None:
        return x
    if fill == "circular":
        if x.shape[dim] == 0:  # padding rows, as for a rank with an empty shard
            return x.new_zeros([before + after if d == dim else n for d, n in enumerate(x.shape)])
        rows = torch.arange(-before, x.shape[dim] + after, device=x.device) % x.shape[dim]
        return x.index_select(dim, rows)
    return torch.nn.functional.pad(x, [*[0, 0] * (x.ndim - 1 - dim), before, after], value=fill)


def _extend_plain(x: Tensor, widths: Sequence[tuple[int, int, int]], fill: Fill) -> Tensor:
    """Returns a plain tensor with its halo."""
    for dim, before, after in widths:
        x = _pad(x, dim, before, after, fill)
    return x


def _crop_plain(out: Tensor, x: Tensor, widths: Sequence[tuple[int, int, int]], fill: Fill, crop: bool) -> Tensor:
    """Removes the halo from a result on plain tensors."""
    for dim, before, after in widths:
        n = x.shape[dim]
        halo_rows = before + after if crop and fill is not None else 0
        _check_rows(out, dim, n + halo_rows)
        if halo_rows:
            out = out.narrow(dim, before, n)
    return out


def _check_rows(out: Tensor, dim: int, rows: IntLike) -> None:
    if dim >= out.ndim or not compat.guard_equal(out.shape[dim], rows):
        raise LayoutError(
            f"halo_map: the function has returned {tuple(out.shape)}, where along dim {dim} {rows} rows are expected: "
            "as many as those of its arguments, or with crop=False as many as those of the shard"
        )


def _layout_and_halos(
    widths: Sequence[tuple[int, int, int]], fill: Fill, xs: Sequence[Tensor]
) -> tuple[Layout, list[_DimHalo]]:
    """Returns the layout of the first sharded tensor, without pending reductions, and the halo along each dim."""
    layout = next(x for x in xs if isinstance(x, ShardTensor))._spec.layout.reduced()
    halos = []
    for dim, before, after in widths:
        partition = layout.partitions[dim]
        if partition is not None and len(partition.mesh_dims) > 1:
            raise LayoutError(
                f"halo_map: dim {dim} of {layout.describe()} is sharded over several mesh dims; redistribute it to "
                f"one first"
            )
        halos.append(_DimHalo(dim, partition, before, after, fill, layout.mesh))
    return layout, halos


@torch.compiler.allow_in_graph  # one node for Dynamo, which traces the user's function, called next, on plain tensors
def _extend(widths: Sequence[tuple[int, int, int]], fill: Fill, *xs: Tensor) -> tuple[Tensor, ...]:
    layout, halos = _layout_and_halos(widths, fill, xs)
    shards = []
    for x in xs:
        shard = ToLocal.apply(_with_partitions_of(layout, x), None)
        for halo in halos:
            shard = halo.extend(shard)
        shards.append(shard)
    return tuple(shards)


def _with_partitions_of(layout: Layout, x: Tensor) -> ShardTensor:
    """Redistributes a tensor to the partitions of a layout, which has the same sizes along all sharded dims."""
    x = on_mesh(x, layout.mesh)
    dims = [d for d, c in enumerate(layout.partitions) if c is not None]
    if any(d >= x.ndim or not compat.guard_equal(x.shape[d], layout.shape[d]) for d in dims):
        raise LayoutError(
            f"halo_map: {x._spec.layout.describe()} does not have the same size along the sharded dims as "
            f"{layout.describe()}"
        )
    partitions = [layout.partitions[d] if d < layout.ndim else None for d in range(x.ndim)]
    return redistributed(x, Layout.of(layout.mesh, layout.placements, tuple(x.shape), x.dtype, partitions))


@torch.compiler.allow_in_graph
def _crop(widths: Sequence[tuple[int, int, int]], fill: Fill, crop: bool, out: Tensor, *xs: Tensor) -> Tensor:
    layout, halos = _layout_and_halos(widths, fill, xs)
    for halo in halos:
        size = layout.shape[halo.dim] if halo.partition is None else shard_size(halo.partition, layout.mesh)
        outside = halo.before + halo.after if halo.fill is not None else 0
        extended_size = halo.extended_size
        if extended_size is None:
            extended_size = layout.shape[halo.dim] + outside
        _check_rows(out, halo.dim, extended_size if crop else size)
        if crop:
            out = take_rows(out, halo.dim, halo.rows_before, 1, size)
    shape: list[Any] = list(out.shape)
    for d, partition in enumerate(layout.partitions):
        if partition is not None:
            _check_rows(out, d, shard_size(partition, layout.mesh))
            shape[d] = partition.size
    partitions = [layout.partitions[d] if d < layout.ndim else None for d in range(out.ndim)]
    result = Layout.of(layout.mesh, layout.placements, shape, out.dtype, partitions)
    return wrapped(out.contiguous(), result)
