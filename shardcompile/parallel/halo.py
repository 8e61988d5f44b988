"""A function of one's own on local shards with the rows around them: a stencil, neighbourhood attention, a custom
kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from shardcompile import compat
from shardcompile.collectives import Pending, derive, shard_size
from shardcompile.collectives.halo_exchange import FETCH_AROUND, Around
from shardcompile.errors import LayoutError
from shardcompile.ops.view.rows import take_rows
from shardcompile.sharding import IntLike, Layout, Partition, write_partition
from shardcompile.tensor import ShardTensor
from shardcompile.tensor.aligned_rows import on_mesh, wrapped
from shardcompile.tensor.autograd import ToLocal, redistributed

Halo = Mapping[int, tuple[int, int]]

Fill = float | Literal["circular"] | None


def halo_map(fn: Callable[..., object], *xs: Tensor, halo: Halo, fill: Fill = None, crop: bool = True) -> Any:
    """Run a function of plain tensors on the shards with the rows around them. Differentiable if the function is.

    Along a dim that is sharded, a rank gets the rows next to its shard from whoever holds them, be it several ranks.
    Corners come along. In the backward pass the gradients of these rows go home and are added.

    Args:
        fn: gets a shard of each of `xs`; returns a tensor or a tuple of tensors. Along the dims of the halo they have
            as many rows as what it was given, or without `crop` as many as the shard itself. A rank whose shard is
            empty calls it, too: with rows that nobody has and whose results are dropped. A tensor that it takes from
            elsewhere gets the gradient of this rank's rows alone.
        xs: tensors that have the same sizes along the dims of the halo; brought to the partitions of the first one.
        halo: by dim how many rows it needs in front of a shard and behind it.
        fill: what rows outside of the tensor hold, along all dims of the halo: a shard of n rows then comes with
            ``before + n + after``. ``"circular"``: the rows at the other end, as in a periodic domain. None: there are
            none, and shards end where the tensor ends, as a kernel expects that has a way of its own with edges.
        crop: whether the rows of the halo are to be taken off the results.

    Returns:
        What `fn` returns of all shards, sharded as the first tensor. Plain if all of `xs` are.

    Raises:
        LayoutError: a dim of the halo is sharded over several mesh dims, tensors do not fit, or a result has a wrong
            number of rows. Also if `fill` is another text.
    """
    if isinstance(fill, str) and fill != "circular":
        raise LayoutError(f'halo_map: fill is a number, "circular" or None, got {fill!r}')
    if not xs:
        raise LayoutError("halo_map needs a tensor to run the function on")
    first = next((x for x in xs if isinstance(x, ShardTensor)), None)
    reach = tuple((d, *_check(d, halo[d], xs)) for d in sorted(halo))
    if first is None:
        given = [_fill(x, reach, fill) for x in xs]
        result = fn(*given)
        outs = result if isinstance(result, tuple) else (result,)
        kept = tuple(_inner(o, xs[0], reach, fill, crop) for o in outs)
        return kept if isinstance(result, tuple) else kept[0]
    extended = _extend(reach, fill, *xs)
    result = fn(*extended)
    outs = result if isinstance(result, tuple) else (result,)
    kept = tuple(_crop(reach, fill, crop, o, *xs) for o in outs)
    return kept if isinstance(result, tuple) else kept[0]


def _check(dim: int, rows: tuple[int, int], xs: Sequence[Tensor]) -> tuple[int, int]:
    if not all(0 <= dim < x.ndim for x in xs):
        raise LayoutError(f"halo_map: there is no dim {dim} in all of {[tuple(x.shape) for x in xs]}; count from 0")
    if not isinstance(rows, (tuple, list)) or len(rows) != 2:
        raise LayoutError(
            f"halo_map: for dim {dim} give how many rows are needed in front and behind, as halo={{{dim}: (1, 1)}}; "
            f"got {rows!r}"
        )
    before, after = rows
    if before < 0 or after < 0:
        raise LayoutError(f"halo_map: rows in front and behind are at least 0, got {before} and {after} for dim {dim}")
    return before, after


@dataclass(frozen=True)
class _Reach:
    """What a shard is given along one dim.

    Attributes:
        dim: the dim.
        sharded: its partition; None if it is whole.
        before: rows in front that are wanted.
        after: rows behind.
        fill: what rows outside hold, see `halo_map`.
        mesh: the mesh.
    """

    dim: int
    partition: Partition | None
    before: int
    after: int
    fill: Fill
    mesh: Any

    @property
    def shown(self) -> IntLike | None:
        """Rows that the function is given; None if they are those of the shard."""
        if self.partition is None:
            return None
        if self.fill is not None:
            shard: Any = shard_size(self.partition, self.mesh)
            return self.before + shard + self.after  # type: ignore[no-any-return]
        return derive("around", [self.partition], [self.before, self.after], self.partition.size, self.mesh)[1]

    @property
    def ahead(self) -> IntLike:
        """How many of them are in front of the shard's own."""
        if self.fill is not None:
            return self.before
        if self.partition is None:
            return 0
        return derive("ahead", [self.partition], [self.before], self.partition.size, self.mesh)[1]

    def extend(self, x: Tensor) -> Tensor:
        """A shard with the rows around it."""
        if self.partition is None:
            return _pad(x, self.dim, self.before, self.after, self.fill)
        if not (self.before or self.after) and self.fill is not None:
            return x
        (mesh_dim,) = self.partition.mesh_dims
        held = self.partition.group_ref(compat.coordinate(self.mesh) or ())
        size, shown = self.partition.size, self.shown
        assert shown is not None, "the dim is sharded"
        group_name = compat.group_name_of(self.mesh, mesh_dim)
        if self.fill == "circular":
            around = Around(x, self.dim, self.before, self.after, size, shown, held, group_name)
            return FETCH_AROUND.start(around).wait()
        numbers = [size, 1, 1, self.before, self.after]
        how, told = ("within", numbers[3:]) if self.fill is None else ("reading", [*numbers, 0])
        fetched = derive(how, [self.partition], told, size, self.mesh)[1]
        partition = write_partition(held)
        flat = torch.ops.shardcompile.fetch_ranges(
            x, self.dim, size, fetched, *partition, *partition, numbers, self.fill, group_name
        )
        rows = Pending.of(flat, x.shape, self.dim, fetched).wait()
        if isinstance(fetched, int) and fetched == shown:
            return rows
        spare_shape = [self.before + self.after + 1 if d == self.dim else n for d, n in enumerate(x.shape)]
        spare = x.new_full(spare_shape, self.fill or 0)
        # `torch.narrow_copy` would do both, but has no derivative in torch 2.11.
        held_rows = torch.cat([rows, spare], self.dim).narrow(self.dim, 0, shown)
        return held_rows.clone(memory_format=torch.contiguous_format)


def _pad(x: Tensor, dim: int, before: int, after: int, fill: Fill) -> Tensor:
    if fill is None:
        return x
    if fill == "circular":
        if x.shape[dim] == 0:  # as ranks without rows are given: rows that nobody has
            return x.new_zeros([before + after if d == dim else n for d, n in enumerate(x.shape)])
        rows = torch.arange(-before, x.shape[dim] + after, device=x.device) % x.shape[dim]
        return x.index_select(dim, rows)
    return torch.nn.functional.pad(x, [*[0, 0] * (x.ndim - 1 - dim), before, after], value=fill)


def _fill(x: Tensor, reach: Sequence[tuple[int, int, int]], fill: Fill) -> Tensor:
    for dim, before, after in reach:
        x = _pad(x, dim, before, after, fill)
    return x


def _inner(out: Tensor, x: Tensor, reach: Sequence[tuple[int, int, int]], fill: Fill, crop: bool) -> Tensor:
    """On one device: a result without the rows of the halo."""
    for dim, before, after in reach:
        n = x.shape[dim]
        outside = before + after if crop and fill is not None else 0
        _check_rows(out, dim, n + outside)
        if outside:
            out = out.narrow(dim, before, n)
    return out


def _check_rows(out: Tensor, dim: int, rows: IntLike) -> None:
    if dim >= out.ndim or not compat.same_symbol(out.shape[dim], rows):
        raise LayoutError(
            f"halo_map: the function has returned {tuple(out.shape)}, where along dim {dim} {rows} rows are expected: "
            "those that it was given, or with crop=False those of the shard"
        )


def _lay_out(reach: Sequence[tuple[int, int, int]], fill: Fill, xs: Sequence[Tensor]) -> tuple[Layout, list[_Reach]]:
    """The layout of the first tensor that is sharded, without pending sums, and what is given along each dim."""
    layout = next(x for x in xs if isinstance(x, ShardTensor))._spec.layout.reduced()
    found = []
    for dim, before, after in reach:
        partition = layout.partitions[dim]
        if partition is not None and len(partition.mesh_dims) > 1:
            raise LayoutError(
                f"halo_map: dim {dim} of {layout.describe()} is sharded over several mesh dims; redistribute it to "
                f"one first"
            )
        found.append(_Reach(dim, partition, before, after, fill, layout.mesh))
    return layout, found


@torch.compiler.allow_in_graph  # one node for Dynamo; what follows, the user's function, it traces as if it stood alone
def _extend(reach: Sequence[tuple[int, int, int]], fill: Fill, *xs: Tensor) -> tuple[Tensor, ...]:
    layout, found = _lay_out(reach, fill, xs)
    shards = []
    for x in xs:
        shard = ToLocal.apply(_in_layout(x, layout), None)
        for r in found:
            shard = r.extend(shard)
        shards.append(shard)
    return tuple(shards)


def _in_layout(x: Tensor, layout: Layout) -> ShardTensor:
    """A tensor in the partitions of a layout, which has as many rows along all dims that are sharded."""
    x = on_mesh(x, layout.mesh)
    dims = [d for d, c in enumerate(layout.partitions) if c is not None]
    if any(d >= x.ndim or not compat.same_symbol(x.shape[d], layout.shape[d]) for d in dims):
        raise LayoutError(f"halo_map: {x._spec.layout.describe()} has not the rows of {layout.describe()}")
    partitions = [layout.partitions[d] if d < layout.ndim else None for d in range(x.ndim)]
    return redistributed(x, Layout.of(layout.mesh, layout.placements, tuple(x.shape), x.dtype, partitions))


@torch.compiler.allow_in_graph
def _crop(reach: Sequence[tuple[int, int, int]], fill: Fill, crop: bool, out: Tensor, *xs: Tensor) -> Tensor:
    layout, found = _lay_out(reach, fill, xs)
    for r in found:
        shard = layout.shape[r.dim] if r.partition is None else shard_size(r.partition, layout.mesh)
        outside = r.before + r.after if r.fill is not None else 0
        shown = r.shown
        whole = layout.shape[r.dim] + outside if shown is None else shown
        _check_rows(out, r.dim, whole if crop else shard)
        if crop:
            out = take_rows(out, r.dim, r.ahead, 1, shard)
    shape: list[Any] = list(out.shape)
    for d, partition in enumerate(layout.partitions):
        if partition is not None:
            _check_rows(out, d, shard_size(partition, layout.mesh))
            shape[d] = partition.size
    partitions = [layout.partitions[d] if d < layout.ndim else None for d in range(out.ndim)]
    result = Layout.of(layout.mesh, layout.placements, shape, out.dtype, partitions)
    return wrapped(out.contiguous(), result)
