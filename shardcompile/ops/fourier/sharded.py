"""Fourier transforms of tensors that are cut: each rank transforms dims that are whole in its block.

A transform of several dims is one dim after the other. Those that are whole come first; then the cut one is made whole
by an exchange in which another dim is cut in its place, and is transformed. The result stays cut along that dim, whose
cut remembers the one that was there before: the way back, as of an inverse transform, leads to the same blocks.
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
from shardcompile.layout import Cut, IntLike, Layout, order_of
from shardcompile.ops import state
from shardcompile.ops.support.global_meta import global_meta
from shardcompile.ops.view.rows import wrap
from shardcompile.plan import find_plan
from shardcompile.redistribute import run_plan
from shardcompile.sharded import Sharded

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
    """The transform of a block. The block may be empty, which the kernels of some libraries refuse."""
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


class _Block:
    """This rank's block on its way from one layout to another.

    Args:
        local: the block.
        layout: where it is.
        order: of the dims of the result in memory.
    """

    def __init__(self, local: Tensor, layout: Layout, order: list[int]) -> None:
        self.local, self.layout, self.order = local, layout, order

    def transform(self, kind: str, dims: Sequence[int], normalization: int, forward: bool, size: IntLike) -> None:
        """Along dims that are whole; `size` is the extent that the last one gets."""
        self.local = torch.ops.shardcompile.fourier(
            self.local, kind, list(dims), normalization, forward, size, self.order
        )
        layout = self.layout
        shape = [size if d == dims[-1] else n for d, n in enumerate(layout.shape)]
        self.layout = Layout.of(layout.mesh, layout.placements, shape, self.local.dtype, layout.cuts)

    def make_whole(self, dim: int, others: Sequence[int]) -> None:
        """Exchange a cut of `dim` for one of another dim, or gather it where no other one can be cut.

        Args:
            dim: the dim.
            others: dims that are best cut in its place, the best one first.
        """
        layout = self.layout
        cut = layout.cut_of(dim)
        at = self._place_for(cut, dim, others)
        after = layout.gathered(dim)
        if at is not None:
            placements = [Shard(at) if m in cut.mesh_dims else p for m, p in enumerate(layout.placements)]
            cuts = [self._cut_like(cut, at) if d == at else c for d, c in enumerate(after.cuts)]
            after = Layout.of(layout.mesh, placements, layout.shape, layout.dtype, cuts)
        self.local = run_plan(find_plan(layout, after), self.local)
        self.layout = after

    def _place_for(self, cut: Cut, dim: int, others: Sequence[int]) -> int | None:
        layout = self.layout
        free = [
            d for d, c in enumerate(layout.cuts) if d != dim and c is None and compat.size_hint(layout.shape[d]) > 1
        ]
        best = [d for d in others if d in free]
        if best:
            return next((d for d in best if self._fits(cut, d)), best[0])
        return max(free, key=lambda d: (compat.size_hint(layout.shape[d]), -d), default=None)

    def _fits(self, cut: Cut, at: int) -> bool:
        """Whether the cut that was there before would be one of this dim."""
        home = cut.home
        if home is None or home.mesh_dims != cut.mesh_dims:
            return False
        return compat.statically_known_true(home.extent == self.layout.shape[at])

    def _cut_like(self, cut: Cut, at: int) -> Cut:
        extent, home = self.layout.shape[at], cut.home
        if home is not None and self._fits(cut, at):
            return replace(home, home=replace(cut, home=None))
        if cut.has_symbols:  # with known blocks that differ every rank would have a graph of its own
            divided = derive("divided", [cut], [extent, *cut.parts], extent, self.layout.mesh)[0]
        else:
            divided = Cut.chunk(cut.mesh_dims, cut.parts, extent)
        return replace(divided, home=replace(cut, home=None))


def _start(x: Sharded, op: OpOverload, args: tuple[object, ...]) -> tuple[_Block, Sequence[IntLike]]:
    meta = global_meta(op, args, {})
    stride = compat.retrace(meta.stride())
    layout = x._spec.layout
    if any(getattr(p, "reduce_op", "sum") not in ("sum", "avg") for p in layout.placements):
        layout = layout.reduced()  # not a sum, with which a transform commutes
    local = run_plan(find_plan(x._spec.layout, layout), x._local_tensor)
    return _Block(local, layout, order_of(stride)), stride


def _dims(x: Tensor, dims: Sequence[int]) -> list[int]:
    return [d % x.ndim for d in dims]


def c2c(x: Sharded, dim: Sequence[int], normalization: int, forward: bool) -> Sharded:
    """``aten._fft_c2c``."""
    dims = _dims(x, dim)
    block, stride = _start(x, aten._fft_c2c.default, (x, dim, normalization, forward))
    _rest(block, dims, dims, normalization, forward)
    return wrap(x, block.local, block.layout, stride)


def _rest(block: _Block, dims: Sequence[int], done_before: Sequence[int], normalization: int, forward: bool) -> None:
    """Complex transforms along dims, some of which may be cut: whole dims first, then each cut dim once it is whole.

    Args:
        block: what is transformed.
        dims: along which.
        done_before: dims of the whole transform, which are the best ones to be cut; those to come are not.
        normalization: of torch.
        forward: whether it is no inverse one.
    """
    left = list(dims)
    while left:
        whole = [d for d in left if block.layout.cuts[d] is None]
        if not whole:
            block.make_whole(left[0], [d for d in reversed(done_before) if d not in left])
            continue
        block.transform("c2c", whole, normalization, forward, block.layout.shape[whole[-1]])
        left = [d for d in left if d not in whole]


def r2c(x: Sharded, dim: Sequence[int], normalization: int, onesided: bool) -> Sharded:
    """``aten._fft_r2c``: the last dim first, while numbers are real."""
    dims = _dims(x, dim)
    block, stride = _start(x, aten._fft_r2c.default, (x, dim, normalization, onesided))
    last = dims[-1]
    if block.layout.cuts[last] is not None:
        block.make_whole(last, [d for d in reversed(dims) if d != last])
    whole = [d for d in dims if block.layout.cuts[d] is None]
    extent = block.layout.shape[last]
    kind, size = ("r2c", extent // 2 + 1) if onesided else ("r2c_full", extent)
    block.transform(kind, whole, normalization, True, size)
    _rest(block, [d for d in dims if d not in whole], dims, normalization, True)
    return wrap(x, block.local, block.layout, stride)


def c2r(x: Sharded, dim: Sequence[int], normalization: int, last_dim_size: IntLike) -> Sharded:
    """``aten._fft_c2r``: the last dim at the end, when the others are done."""
    dims = _dims(x, dim)
    block, stride = _start(x, aten._fft_c2r.default, (x, dim, normalization, last_dim_size))
    *others, last = dims
    if all(block.layout.cuts[d] is None for d in dims):
        block.transform("c2r", dims, normalization, False, last_dim_size)
        return wrap(x, block.local, block.layout, stride)
    _rest(block, others, dims, normalization, False)
    if block.layout.cuts[last] is not None:
        block.make_whole(last, list(reversed(others)))
    block.transform("c2r", [last], normalization, False, last_dim_size)
    return wrap(x, block.local, block.layout, stride)


state(aten._fft_c2c.default, sharded=c2c)
state(aten._fft_r2c.default, sharded=r2c)
state(aten._fft_c2r.default, sharded=c2r)
