"""Views that join dims and split them."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardcompile import compat
from shardcompile.collectives import derive
from shardcompile.compat import is_one
from shardcompile.ops.pointwise.rule import _REDUCE_OPS as REDUCE_OPS
from shardcompile.ops.registry import register
from shardcompile.ops.strategy import OnPartition, OpCall, Strategy, along, partial
from shardcompile.ops.view.rule import local_shape_at
from shardcompile.sharding import IntLike, Layout, Partition, in_stretches

aten = torch.ops.aten


def match_dims(src: Sequence[IntLike], dst: Sequence[IntLike]) -> list[tuple[list[int], list[int]]]:
    """Groups of input and output dims of a view that hold the same elements, as small as possible.

    Dims of size 1 form groups of their own. A symbolic size pairs with an equal one only.
    """
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(src) or j < len(dst):
        if i < len(src) and is_one(src[i]):
            groups.append(([i], []))
            i += 1
            continue
        if j < len(dst) and is_one(dst[j]):
            groups.append(([], [j]))
            j += 1
            continue
        if i >= len(src) or j >= len(dst):
            break
        ins, outs = [i], [j]
        a, b = src[i], dst[j]
        i, j = i + 1, j + 1
        while not _same(a, b):
            if j >= len(dst) or (i < len(src) and _smaller(a, b)):
                if i >= len(src):
                    break
                a = a * src[i]
                ins.append(i)
                i += 1
            else:
                b = b * dst[j]
                outs.append(j)
                j += 1
        groups.append((ins, outs))
    return groups


def _same(a: IntLike, b: IntLike) -> bool:
    return compat.same_symbol(a, b)


def _smaller(a: IntLike, b: IntLike) -> bool:
    """Which side of a group to extend. Where a number is one that a run gives, a guess: groups end with equal sides."""
    if compat.is_unbacked(a) or compat.is_unbacked(b):
        return compat.size_hint(a) < compat.size_hint(b)
    return bool(a < b)


def resolved_shape(shape: Sequence[IntLike], numel: IntLike) -> list[IntLike]:
    """A shape with its -1 replaced."""
    known: IntLike = 1
    for size in shape:
        if not (isinstance(size, int) and size == -1):
            known = known * size
    return [numel // known if isinstance(e, int) and e == -1 else e for e in shape]


def _numel(shape: Sequence[IntLike]) -> IntLike:
    total: IntLike = 1
    for size in shape:
        total = total * size
    return total


def _view(call: OpCall) -> Iterable[Strategy]:
    src = call.tensors[0].shape
    dst = call.args[1]
    if any(isinstance(e, int) and e == 0 for e in src):
        yield from (along([d], [d]) for d, (a, b) in enumerate(zip(src, dst, strict=False)) if a is b or a == b)
        yield from (partial([op], [op]) for op in REDUCE_OPS)
        return
    if any(isinstance(e, int) and e == -1 for e in dst):
        dst = resolved_shape(dst, _numel(src))
    dst = [1 if not isinstance(e, int) and compat.statically_known_true(e == 1) else e for e in dst]
    if any(isinstance(e, int) and e == 0 for e in dst):
        return  # the view does not fit, and torch says so
    for ins, outs in _joined_ones(match_dims(src, dst)):
        if is_one(src[ins[0]]):
            # Any would do. A view to the same shape keeps its layout. Sharded dims keep their order: the fake kernel
            # of a view that exchanged the sizes of two shards would take them for one.
            last = max(len(ins) - 1, 1)
            for n, i in enumerate(ins):
                yield from (along([i], [j]) for j in sorted(outs, key=lambda j: _apart(n / last, outs, j)))
        else:
            yield from _view_group(call, dst, ins, outs)
    yield from (partial([op], [op]) for op in REDUCE_OPS)


def _apart(place: float, outs: Sequence[int], out: int) -> float:
    """How far an output dim is from a place among them, 0 being the first and 1 the last."""
    return abs(place - outs.index(out) / max(len(outs) - 1, 1))


def _joined_ones(groups: Iterable[tuple[list[int], list[int]]]) -> Iterable[tuple[list[int], list[int]]]:
    """Groups with dims on both sides, neighbouring dims of size 1 in one group: any of them can stand for another."""
    ones: tuple[list[int], list[int]] = ([], [])
    for ins, outs in [*groups, ([], [])]:
        if bool(ins) != bool(outs):
            ones = (ones[0] + ins, ones[1] + outs)
            continue
        if all(ones):
            yield ones
        ones = ([], [])
        if ins:
            yield ins, outs


def _view_group(call: OpCall, dst: Sequence[IntLike], ins: list[int], outs: list[int]) -> Iterable[Strategy]:
    """A sharded dim stays sharded; trailing dims scale its shards, leading ones give them rows of several stretches.

    Args:
        call: the view.
        dst: shape after.
        ins: the dims that become `outs`.
        outs: those.
    """
    if len(ins) == len(outs) == 1:
        yield along([ins[0]], [outs[0]])
        return
    layout = call.tensors[0].layout
    src = layout.shape
    joins = call.op is not aten.reshape.default  # of which a copy is made where rows are no neighbours
    pairs = itertools.product(range(len(ins)), range(len(outs)))
    for i, o in sorted(pairs, key=lambda pair: _leaves_segments(layout, dst, ins, outs, *pair)):
        around = _numel([src[d] for d in ins[:i]]), _numel([src[d] for d in ins[i + 1 :]])
        within = _numel([dst[d] for d in outs[:o]]), _numel([dst[d] for d in outs[o + 1 :]])
        if (joins or i == o == 0) and not any(map(compat.is_unbacked, (*around, *within))):
            through = functools.partial(_through_view, around, within, joins)
            into: OnPartition | None = None
            if i == 0 and not is_one(within[0]):
                into = functools.partial(in_stretches, within[0])
            elif i == o == 0:
                whole = WholeRows.of(src[ins[0]], dst[outs[0]], around[1], within[1])
                into = None if whole is None else functools.partial(whole.shard_like, through, layout.mesh)
            yield along([ins[i]], [outs[o]], through, into)


def _leaves_segments(
    layout: Layout, dst: Sequence[IntLike], ins: Sequence[int], outs: Sequence[int], i: int, o: int
) -> bool:
    """Whether an output dim, sharded for an input dim, has shards of rows of several segments, or none at all."""
    partition = layout.partitions[ins[i]]
    segments = _numel([layout.shape[d] for d in ins[:i]]) * (1 if partition is None else partition.runs)
    before = _numel([dst[d] for d in outs[:o]])
    return not compat.statically_known_true(segments == before)


@dataclass(frozen=True)
class WholeRows:
    """How the first dim of a view's input is sharded so that no row of the first dim of its output is divided.

    Attributes:
        rows: rows of the input's dim that go together.
        count: how many times they fit into it.
    """

    rows: IntLike
    count: IntLike

    @staticmethod
    def of(size: IntLike, out: IntLike, behind: IntLike, behind_out: IntLike) -> WholeRows | None:
        """For a dim of `size` and one of `out` rows, with as many elements in a row of each as is behind them.

        None for symbols of which none is a multiple of the other.
        """
        if isinstance(behind, int) and isinstance(behind_out, int):
            rows: IntLike = behind_out // max(math.gcd(behind, behind_out), 1)
        elif compat.divides(behind, behind_out):
            rows = compat.quotient(behind_out, behind)
        elif compat.divides(behind_out, behind):
            rows = 1
        else:
            return None
        exact = compat.statically_known_true(behind * rows == behind_out)
        return WholeRows(rows, out if exact else size // max(rows, 1))

    def shard_like(self, through: OnPartition, mesh: DeviceMesh, partition: Partition) -> Partition | None:
        """The partition that gives each rank those rows together of which the first one is in its shard.

        None if the view leaves the sharded as it is; if shards are no neighbouring rows; if there are more ranks than
        rows of the output; or if a trace would take the sizes of the new shards for numbers, by which the graphs of the
        ranks would differ.
        """
        if compat.size_hint(self.rows) < 2 or not is_one(partition.runs):
            return None
        if compat.size_hint(self.count) < math.prod(partition.parts):
            return None
        if through(partition) is not None:
            return None
        if compat.is_compiling() and partition.shards is not None and partition.kind != "fixed":
            return None
        numbers = [self.count, self.rows, 1, 0, self.rows - 1, 0]
        return replace(derive("reading", [partition], numbers, self.count, mesh)[0].scaled(self.rows), makeshift=True)


def _through_view(
    around: tuple[IntLike, IntLike], within: tuple[IntLike, IntLike], joins: bool, partition: Partition
) -> Partition | None:
    """The partition of an output dim, from that of an input dim and the sizes in front of and behind each."""
    if partition.shards is not None and not all(isinstance(n, int) for n in (*around, *within)):
        if partition.kind != "chunk" or not partition.is_even:
            return None  # shards of known, different sizes would become ones of symbolic sizes
        partition = replace(partition, shard=partition.shards[0], shards=None)
    flat = partition.scaled(around[1]).joined(around[0])
    if not compat.divides(within[0], flat.runs):
        return None
    flat = flat.parted(within[0])
    out = flat.unscaled(within[1])
    if out is None or (not is_one(out.runs) and not joins):
        return None
    if partition.kind != "fixed" and not compat.divides(within[1] * flat.runs, flat.scale):
        # The sizes happen to be multiples. A trace knows no sizes, and `WholeRows` has none with fewer rows than ranks.
        return None if compat.size_hint(out.size) < math.prod(out.parts) else out
    return out


register([aten.view.default, aten._unsafe_view.default, aten.reshape.default], _view, local_shape_at(1))
register(aten._reshape_alias.default, lambda call: ())
