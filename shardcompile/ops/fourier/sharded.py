"""Fourier transforms of sharded tensors: each rank transforms dims that are not sharded.

A transform of several dims is computed one dim after the other. Unsharded dims come first. Then an all-to-all moves the
sharding from the sharded dim to another one, and the former is transformed. The result stays sharded along the other
dim. Its partition records the partition of the original dim as `moved_from`, so that the inverse transform restores the
original shards.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Shard

from shardcompile import compat
from shardcompile.collectives import derive
from shardcompile.compat import OpOverload
from shardcompile.compat.own_ops import define_op
from shardcompile.ops import state
from shardcompile.ops.support.global_meta import global_meta
from shardcompile.ops.support.sharded_rows import wrap
from shardcompile.planning import find_plan
from shardcompile.redistribute import run_plan
from shardcompile.sharded import Sharded
from shardcompile.sharding import IntLike, Layout, Partition, order_of

aten = torch.ops.aten


def _shape_and_dtype(x: Tensor, kind: str, dims: list[int], size: IntLike) -> tuple[list[IntLike], torch.dtype]:
    shape = [size if d == dims[-1] else n for d, n in enumerate(x.shape)]
    return shape, x.dtype.to_real() if kind == "c2r" else x.dtype.to_complex()


def _store(x: Tensor, order: list[int]) -> Tensor:
    """Returns a copy whose dims are stored in the given order, from the slowest to the fastest."""
    return x.permute(order).contiguous().permute(sorted(range(x.ndim), key=order.__getitem__))


def _fourier(
    x: Tensor, kind: str, dims: list[int], normalization: int, forward: bool, size: int, order: list[int]
) -> Tensor:
    """Transforms a local shard. It may be empty, which the kernels of some libraries do not support."""
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


define_op(
    "fourier(Tensor x, str kind, int[] dims, int normalization, bool forward, SymInt size, int[] order) -> Tensor",
    _fourier,
    _fake_fourier,
    capturable=True,
    any_strides=False,
)


class _ShardInTransform:
    """A local shard and its layout, both updated by each step of a transform.

    Args:
        local: the local shard.
        layout: the current layout of the tensor.
        order: the order of the dims of the result in memory.
    """

    def __init__(self, local: Tensor, layout: Layout, order: list[int]) -> None:
        self.local, self.layout, self.order = local, layout, order

    def transform(self, kind: str, dims: Sequence[int], normalization: int, forward: bool, size: IntLike) -> None:
        """Transforms unsharded dims; `size` is the size of the last one afterwards."""
        self.local = torch.ops.shardcompile.fourier(
            self.local, kind, list(dims), normalization, forward, size, self.order
        )
        layout = self.layout
        shape = [size if d == dims[-1] else n for d, n in enumerate(layout.shape)]
        self.layout = Layout.of(layout.mesh, layout.placements, shape, self.local.dtype, layout.partitions)

    def unshard(self, dim: int, others: Sequence[int]) -> None:
        """Moves the sharding of `dim` to another dim, or gathers `dim` if no other dim can be sharded.

        Args:
            dim: the dim.
            others: preferred dims to shard instead, the most preferred one first.
        """
        layout = self.layout
        partition = layout.partition_of(dim)
        at = self._other_dim(partition, dim, others)
        after = layout.gathered(dim)
        if at is not None:
            placements = [Shard(at) if m in partition.mesh_dims else p for m, p in enumerate(layout.placements)]
            partitions = [self._replacement(partition, at) if d == at else c for d, c in enumerate(after.partitions)]
            after = Layout.of(layout.mesh, placements, layout.shape, layout.dtype, partitions)
        self.local = run_plan(find_plan(layout, after), self.local)
        self.layout = after

    def _other_dim(self, partition: Partition, dim: int, others: Sequence[int]) -> int | None:
        """Returns the dim to shard in place of `dim`, or None if there is none."""
        layout = self.layout
        free = [
            d
            for d, c in enumerate(layout.partitions)
            if d != dim and c is None and compat.size_hint(layout.shape[d]) > 1
        ]
        preferred = [d for d in others if d in free]
        if preferred:
            return next((d for d in preferred if self._is_home(partition, d)), preferred[0])
        return max(free, key=lambda d: (compat.size_hint(layout.shape[d]), -d), default=None)

    def _is_home(self, partition: Partition, at: int) -> bool:
        """Whether the partition that `partition` has replaced is a partition of dim `at`."""
        home = partition.provenance.moved_from
        if home is None or home.mesh_dims != partition.mesh_dims:
            return False
        return compat.statically_known_true(home.size == self.layout.shape[at])

    def _replacement(self, partition: Partition, at: int) -> Partition:
        """Returns the partition of dim `at` that replaces `partition`, which it records as its home."""
        size, home = self.layout.shape[at], partition.provenance.moved_from
        if home is not None and self._is_home(partition, at):
            return home.with_provenance(moved_from=partition.with_provenance(moved_from=None))
        if partition.has_symbols:  # static shard sizes that differ would give every rank its own graph
            divided = derive("rechunk", [partition], [size, *partition.parts], size, self.layout.mesh)[0]
        else:
            divided = Partition.chunk(partition.mesh_dims, partition.parts, size)
        return divided.with_provenance(moved_from=partition.with_provenance(moved_from=None))


def _start(x: Sharded, op: OpOverload, args: tuple[object, ...]) -> tuple[_ShardInTransform, Sequence[IntLike]]:
    meta = global_meta(op, args, {})
    stride = compat.retrace(meta.stride())
    layout = x._spec.layout
    if any(getattr(p, "reduce_op", "sum") not in ("sum", "avg") for p in layout.placements):
        layout = layout.reduced()  # a transform commutes with sums and averages only
    local = run_plan(find_plan(x._spec.layout, layout), x._local_tensor)
    return _ShardInTransform(local, layout, order_of(stride)), stride


def _dims(x: Tensor, dims: Sequence[int]) -> list[int]:
    return [d % x.ndim for d in dims]


def c2c(x: Sharded, dim: Sequence[int], normalization: int, forward: bool) -> Sharded:
    """``aten._fft_c2c``."""
    dims = _dims(x, dim)
    shard, stride = _start(x, aten._fft_c2c.default, (x, dim, normalization, forward))
    _transform_complex(shard, dims, dims, normalization, forward)
    return wrap(x, shard.local, shard.layout, stride)


def _transform_complex(
    shard: _ShardInTransform, dims: Sequence[int], all_dims: Sequence[int], normalization: int, forward: bool
) -> None:
    """Computes complex transforms along dims: first the unsharded dims, then each sharded dim once it is unsharded.

    Args:
        shard: the shard to transform.
        dims: the dims along which to transform.
        all_dims: all dims of the transform. Those that have been transformed already are the preferred ones to shard.
        normalization: torch's normalization mode.
        forward: whether the transform is a forward one.
    """
    remaining = list(dims)
    while remaining:
        unsharded = [d for d in remaining if shard.layout.partitions[d] is None]
        if not unsharded:
            shard.unshard(remaining[0], [d for d in reversed(all_dims) if d not in remaining])
            continue
        shard.transform("c2c", unsharded, normalization, forward, shard.layout.shape[unsharded[-1]])
        remaining = [d for d in remaining if d not in unsharded]


def r2c(x: Sharded, dim: Sequence[int], normalization: int, onesided: bool) -> Sharded:
    """``aten._fft_r2c``: the last dim is transformed first, from real to complex."""
    dims = _dims(x, dim)
    shard, stride = _start(x, aten._fft_r2c.default, (x, dim, normalization, onesided))
    last = dims[-1]
    if shard.layout.partitions[last] is not None:
        shard.unshard(last, [d for d in reversed(dims) if d != last])
    unsharded = [d for d in dims if shard.layout.partitions[d] is None]
    dim_size = shard.layout.shape[last]
    kind, size = ("r2c", dim_size // 2 + 1) if onesided else ("r2c_full", dim_size)
    shard.transform(kind, unsharded, normalization, True, size)
    _transform_complex(shard, [d for d in dims if d not in unsharded], dims, normalization, True)
    return wrap(x, shard.local, shard.layout, stride)


def c2r(x: Sharded, dim: Sequence[int], normalization: int, last_dim_size: IntLike) -> Sharded:
    """``aten._fft_c2r``: the last dim is transformed last, from complex to real."""
    dims = _dims(x, dim)
    shard, stride = _start(x, aten._fft_c2r.default, (x, dim, normalization, last_dim_size))
    *others, last = dims
    if all(shard.layout.partitions[d] is None for d in dims):
        shard.transform("c2r", dims, normalization, False, last_dim_size)
        return wrap(x, shard.local, shard.layout, stride)
    _transform_complex(shard, others, dims, normalization, False)
    if shard.layout.partitions[last] is not None:
        shard.unshard(last, list(reversed(others)))
    shard.transform("c2r", [last], normalization, False, last_dim_size)
    return wrap(x, shard.local, shard.layout, stride)


state(aten._fft_c2c.default, sharded=c2c)
state(aten._fft_r2c.default, sharded=r2c)
state(aten._fft_c2r.default, sharded=c2r)
