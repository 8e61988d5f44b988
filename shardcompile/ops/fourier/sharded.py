"""Fourier transforms of tensors that are sharded: each rank transforms dims that are whole in its shard.

A transform of several dims is one dim after the other. Those that are whole come first; then the partition one is made
whole by an exchange in which another dim is sharded in its place, and is transformed. The result stays sharded along
that dim, whose sharded remembers the one that was there before: the way back, as of an inverse transform, leads to the
same shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Shard

from shardcompile import compat
from shardcompile.collectives import derive
from shardcompile.compat import OpOverload
from shardcompile.ops import state
from shardcompile.ops.support.global_meta import global_meta
from shardcompile.ops.view.rows import wrap
from shardcompile.planning import find_plan
from shardcompile.redistribute import run_plan
from shardcompile.sharded import Sharded
from shardcompile.sharding import IntLike, Layout, Partition, order_of

aten = torch.ops.aten

_LIBRARY = torch.library.Library("shardcompile", "FRAGMENT")
_LIBRARY.define(
    "fourier(Tensor x, str kind, int[] dims, int normalization, bool forward, SymInt size, int[] order) -> Tensor",
    tags=[torch.Tag.pt2_compliant_tag],
)


def _shape_and_dtype(x: Tensor, kind: str, dims: list[int], size: IntLike) -> tuple[list[IntLike], torch.dtype]:
    shape = [size if d == dims[-1] else n for d, n in enumerate(x.shape)]
    return shape, x.dtype.to_real() if kind == "c2r" else x.dtype.to_complex()


def _store(x: Tensor, order: list[int]) -> Tensor:
    """The same values, stored with the dims from the slowest to the fastest as `order` says."""
    return x.permute(order).contiguous().permute(sorted(range(x.ndim), key=order.__getitem__))


def _fourier(
    x: Tensor, kind: str, dims: list[int], normalization: int, forward: bool, size: int, order: list[int]
) -> Tensor:
    """The transform of a shard. The shard may be empty, which the kernels of some libraries refuse."""
    shape, dtype = _shape_and_dtype(x, kind, dims, size)
    if not x.numel():
        return _store(x.new_empty(shape, dtype=dtype), order)
    if kind == "c2c":
        return _store(aten._fft_c2c.default(x, dims, normalization, forward), order)
    if kind == "c2r":
        return _store(aten._fft_c2r.default(x, dims, normalization, size), order)
    return _store(aten._fft_r2c.default(x, dims, normalization, kind == "r2c"), order)


def _fake_fourier(
    x: Tensor, kind: str, dims: list[int], normalization: int, forward: bool, size: IntLike, order: list[int]
) -> Tensor:
    shape, dtype = _shape_and_dtype(x, kind, dims, size)
    back = sorted(range(x.ndim), key=order.__getitem__)
    return x.new_empty([shape[d] for d in order], dtype=dtype).permute(back)


_LIBRARY.impl("fourier", _fourier, "CompositeExplicitAutograd")
torch.library.register_fake("shardcompile::fourier", _fake_fourier, lib=_LIBRARY)


class _Shard:
    """This rank's shard on its way from one layout to another.

    Args:
        local: the shard.
        layout: where it is.
        order: of the dims of the result in memory.
    """

    def __init__(self, local: Tensor, layout: Layout, order: list[int]) -> None:
        self.local, self.layout, self.order = local, layout, order

    def transform(self, kind: str, dims: Sequence[int], normalization: int, forward: bool, size: IntLike) -> None:
        """Along dims that are whole; `size` is the size that the last one gets."""
        self.local = torch.ops.shardcompile.fourier(
            self.local, kind, list(dims), normalization, forward, size, self.order
        )
        layout = self.layout
        shape = [size if d == dims[-1] else n for d, n in enumerate(layout.shape)]
        self.layout = Layout.of(layout.mesh, layout.placements, shape, self.local.dtype, layout.partitions)

    def make_whole(self, dim: int, others: Sequence[int]) -> None:
        """Exchange a partition of `dim` for one of another dim, or gather it where no other one can be sharded.

        Args:
            dim: the dim.
            others: dims that are best sharded in its place, the best one first.
        """
        layout = self.layout
        partition = layout.partition_of(dim)
        at = self._place_for(partition, dim, others)
        after = layout.gathered(dim)
        if at is not None:
            placements = [Shard(at) if m in partition.mesh_dims else p for m, p in enumerate(layout.placements)]
            partitions = [self._shard_like(partition, at) if d == at else c for d, c in enumerate(after.partitions)]
            after = Layout.of(layout.mesh, placements, layout.shape, layout.dtype, partitions)
        self.local = run_plan(find_plan(layout, after), self.local)
        self.layout = after

    def _place_for(self, partition: Partition, dim: int, others: Sequence[int]) -> int | None:
        layout = self.layout
        free = [
            d
            for d, c in enumerate(layout.partitions)
            if d != dim and c is None and compat.size_hint(layout.shape[d]) > 1
        ]
        best = [d for d in others if d in free]
        if best:
            return next((d for d in best if self._fits(partition, d)), best[0])
        return max(free, key=lambda d: (compat.size_hint(layout.shape[d]), -d), default=None)

    def _fits(self, partition: Partition, at: int) -> bool:
        """Whether the partition that was there before would be one of this dim."""
        home = partition.home
        if home is None or home.mesh_dims != partition.mesh_dims:
            return False
        return compat.statically_known_true(home.size == self.layout.shape[at])

    def _shard_like(self, partition: Partition, at: int) -> Partition:
        size, home = self.layout.shape[at], partition.home
        if home is not None and self._fits(partition, at):
            return replace(home, home=replace(partition, home=None))
        if partition.has_symbols:  # with known shards that differ every rank would have a graph of its own
            divided = derive("divided", [partition], [size, *partition.parts], size, self.layout.mesh)[0]
        else:
            divided = Partition.chunk(partition.mesh_dims, partition.parts, size)
        return replace(divided, home=replace(partition, home=None))


def _start(x: Sharded, op: OpOverload, args: tuple[object, ...]) -> tuple[_Shard, Sequence[IntLike]]:
    meta = global_meta(op, args, {})
    stride = compat.retrace(meta.stride())
    layout = x._spec.layout
    if any(getattr(p, "reduce_op", "sum") not in ("sum", "avg") for p in layout.placements):
        layout = layout.reduced()  # not a sum, with which a transform commutes
    local = run_plan(find_plan(x._spec.layout, layout), x._local_tensor)
    return _Shard(local, layout, order_of(stride)), stride


def _dims(x: Tensor, dims: Sequence[int]) -> list[int]:
    return [d % x.ndim for d in dims]


def c2c(x: Sharded, dim: Sequence[int], normalization: int, forward: bool) -> Sharded:
    """``aten._fft_c2c``."""
    dims = _dims(x, dim)
    shard, stride = _start(x, aten._fft_c2c.default, (x, dim, normalization, forward))
    _rest(shard, dims, dims, normalization, forward)
    return wrap(x, shard.local, shard.layout, stride)


def _rest(shard: _Shard, dims: Sequence[int], done_before: Sequence[int], normalization: int, forward: bool) -> None:
    """Complex transforms along dims, some of which may be sharded: whole dims first, then each sharded dim once it is
    whole.

    Args:
        shard: what is transformed.
        dims: along which.
        done_before: dims of the whole transform, which are the best ones to be sharded; those to come are not.
        normalization: of torch.
        forward: whether it is no inverse one.
    """
    left = list(dims)
    while left:
        whole = [d for d in left if shard.layout.partitions[d] is None]
        if not whole:
            shard.make_whole(left[0], [d for d in reversed(done_before) if d not in left])
            continue
        shard.transform("c2c", whole, normalization, forward, shard.layout.shape[whole[-1]])
        left = [d for d in left if d not in whole]


def r2c(x: Sharded, dim: Sequence[int], normalization: int, onesided: bool) -> Sharded:
    """``aten._fft_r2c``: the last dim first, while numbers are real."""
    dims = _dims(x, dim)
    shard, stride = _start(x, aten._fft_r2c.default, (x, dim, normalization, onesided))
    last = dims[-1]
    if shard.layout.partitions[last] is not None:
        shard.make_whole(last, [d for d in reversed(dims) if d != last])
    whole = [d for d in dims if shard.layout.partitions[d] is None]
    dim_size = shard.layout.shape[last]
    kind, size = ("r2c", dim_size // 2 + 1) if onesided else ("r2c_full", dim_size)
    shard.transform(kind, whole, normalization, True, size)
    _rest(shard, [d for d in dims if d not in whole], dims, normalization, True)
    return wrap(x, shard.local, shard.layout, stride)


def c2r(x: Sharded, dim: Sequence[int], normalization: int, last_dim_size: IntLike) -> Sharded:
    """``aten._fft_c2r``: the last dim at the end, when the others are done."""
    dims = _dims(x, dim)
    shard, stride = _start(x, aten._fft_c2r.default, (x, dim, normalization, last_dim_size))
    *others, last = dims
    if all(shard.layout.partitions[d] is None for d in dims):
        shard.transform("c2r", dims, normalization, False, last_dim_size)
        return wrap(x, shard.local, shard.layout, stride)
    _rest(shard, others, dims, normalization, False)
    if shard.layout.partitions[last] is not None:
        shard.make_whole(last, list(reversed(others)))
    shard.transform("c2r", [last], normalization, False, last_dim_size)
    return wrap(x, shard.local, shard.layout, stride)


state(aten._fft_c2c.default, sharded=c2c)
state(aten._fft_r2c.default, sharded=r2c)
state(aten._fft_c2r.default, sharded=c2r)
