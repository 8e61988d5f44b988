"""Rules of views that flatten and unflatten dims."""

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
from shardcompile.sharding import IntLike, Layout, Partition, in_segments

aten = torch.ops.aten


def match_dims(src: Sequence[IntLike], dst: Sequence[IntLike]) -> list[tuple[list[int], list[int]]]:
    """Groups the dims of a view: input dims with the output dims that hold the same elements, as few as possible.

    Dims of size 1 form groups of their own. A symbolic size matches an equal one only.
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
    return compat.guard_equal(a, b)


def _smaller(a: IntLike, b: IntLike) -> bool:
    """Whether to extend the input side of a group; for unbacked sizes a guess, as groups end with equal sides."""
    if compat.is_unbacked(a) or compat.is_unbacked(b):
        return compat.size_hint(a) < compat.size_hint(b)
    return bool(a < b)


def resolved_shape(shape: Sequence[IntLike], numel: IntLike) -> list[IntLike]:
    """Returns a shape with its -1 replaced by the inferred size."""
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
    inferred = next((d for d, e in enumerate(dst) if isinstance(e, int) and e == -1), None)
    if inferred is not None:
        dst = resolved_shape(dst, _numel(src))
    dst = [1 if not isinstance(e, int) and compat.statically_known_true(e == 1) else e for e in dst]
    if any(isinstance(e, int) and e == 0 for e in dst):
        return  # the view does not fit, and torch raises the error
    for ins, outs in _merge_unit_dims(match_dims(src, dst)):
        if is_one(src[ins[0]]):
            # Any output dim would do. The nearest one keeps the layout of a view to the same shape, and the order of
            # sharded dims: if a view exchanged two shard sizes, its fake kernel would take them for one size. One input
            # dim becomes the inferred one (-1), as it does in a trace, where its size is a symbol.
            last = max(len(ins) - 1, 1)
            for n, i in enumerate(ins):
                at = outs.index(inferred) / max(len(outs) - 1, 1) if len(ins) == 1 and inferred in outs else n / last
                yield from (along([i], [j]) for j in sorted(outs, key=lambda j: _distance(at, outs, j)))
        else:
            yield from _view_group(call, dst, ins, outs)
    yield from (partial([op], [op]) for op in REDUCE_OPS)


def _distance(position: float, outs: Sequence[int], out: int) -> float:
    """Distance of an output dim from a relative position among `outs`, where 0 is the first and 1 the last one."""
    return abs(position - outs.index(out) / max(len(outs) - 1, 1))


def _merge_unit_dims(groups: Iterable[tuple[list[int], list[int]]]) -> Iterable[tuple[list[int], list[int]]]:
    """Yields the groups that have dims on both sides.

    Adjacent dims of size 1 are merged into one group, as any of them can stand for another.
    """
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
    """Yields the strategies by which a sharded dim stays sharded.

    Trailing dims scale its shard sizes; leading dims make its shards hold rows of several segments.

    Args:
        call: the view.
        dst: output shape.
        ins: input dims of the group.
        outs: output dims of the group.
    """
    if len(ins) == len(outs) == 1:
        yield along([ins[0]], [outs[0]])
        return
    layout = call.tensors[0].layout
    src = layout.shape
    allows_segments = call.op is not aten.reshape.default  # which copies where rows are not contiguous
    pairs = itertools.product(range(len(ins)), range(len(outs)))
    for i, o in sorted(pairs, key=lambda pair: _leaves_segments(layout, dst, ins, outs, *pair)):
        src_sides = _numel([src[d] for d in ins[:i]]), _numel([src[d] for d in ins[i + 1 :]])
        dst_sides = _numel([dst[d] for d in outs[:o]]), _numel([dst[d] for d in outs[o + 1 :]])
        if (allows_segments or i == o == 0) and not any(map(compat.is_unbacked, (*src_sides, *dst_sides))):
            on_partition = functools.partial(_through_view, src_sides, dst_sides, allows_segments)
            other_partition: OnPartition | None = None
            if i == 0 and not is_one(dst_sides[0]):
                other_partition = functools.partial(in_segments, dst_sides[0])
            elif i == o == 0:
                whole_rows = WholeRows.of(src[ins[0]], dst[outs[0]], src_sides[1], dst_sides[1])
                if whole_rows is not None:
                    other_partition = functools.partial(whole_rows.shard_like, on_partition, layout.mesh)
            yield along([ins[i]], [outs[o]], on_partition, other_partition)


def _leaves_segments(
    layout: Layout, dst: Sequence[IntLike], ins: Sequence[int], outs: Sequence[int], i: int, o: int
) -> bool:
    """Whether a view that keeps a dim sharded leaves shards with rows of several segments, or is impossible.

    Args:
        layout: layout of the input.
        dst: output shape.
        ins: input dims of the group.
        outs: output dims of the group.
        i: position in `ins` of the sharded input dim.
        o: position in `outs` of the sharded output dim.
    """
    partition = layout.partitions[ins[i]]
    segments = _numel([layout.shape[d] for d in ins[:i]]) * (1 if partition is None else partition.num_segments)
    before = _numel([dst[d] for d in outs[:o]])
    return not compat.statically_known_true(segments == before)


@dataclass(frozen=True)
class WholeRows:
    """Groups of rows of the first input dim of a view that must not be split, for its first output dim to stay sharded.

    Attributes:
        rows: number of input rows in a group.
        count: number of groups.
    """

    rows: IntLike
    count: IntLike

    @staticmethod
    def of(size: IntLike, out: IntLike, row_numel: IntLike, out_row_numel: IntLike) -> WholeRows | None:
        """The groups for an input dim of size `size` and an output dim of size `out`.

        A row of the input dim has `row_numel` elements, a row of the output dim `out_row_numel`. None if these are
        symbolic and neither is a multiple of the other.
        """
        if isinstance(row_numel, int) and isinstance(out_row_numel, int):
            rows: IntLike = out_row_numel // max(math.gcd(row_numel, out_row_numel), 1)
        elif compat.divides(row_numel, out_row_numel):
            rows = compat.quotient(out_row_numel, row_numel)
        elif compat.divides(out_row_numel, row_numel):
            rows = 1
        else:
            return None
        exact = compat.statically_known_true(row_numel * rows == out_row_numel)
        return WholeRows(rows, out if exact else size // max(rows, 1))

    def shard_like(self, through: OnPartition, mesh: DeviceMesh, partition: Partition) -> Partition | None:
        """Returns the partition that gives each rank the groups whose first row is in its local shard.

        None if the view needs no other partition; if shards hold rows of several segments; if there are more ranks than
        groups; or if a trace would specialise on the new shard sizes, which would make the graphs of the ranks differ.
        """
        if compat.size_hint(self.rows) < 2 or not is_one(partition.num_segments):
            return None
        if compat.size_hint(self.count) < math.prod(partition.parts):
            return None
        if through(partition) is not None:
            return None
        if compat.is_compiling() and partition.known_sizes is not None and partition.kind != "fixed":
            return None
        window = [self.count, self.rows, 1, 0, self.rows - 1, 0]
        groups = derive("window", [partition], window, self.count, mesh)[0]
        return groups.flatten_trailing(self.rows).with_provenance(provisional=True)


def _through_view(
    src_sides: tuple[IntLike, IntLike], dst_sides: tuple[IntLike, IntLike], allows_segments: bool, partition: Partition
) -> Partition | None:
    """Returns the partition of an output dim that is sharded in place of an input dim; None if there is none.

    Args:
        src_sides: number of elements in the group's dims before the input dim, and after it.
        dst_sides: the same for the output dim.
        allows_segments: whether shards may hold rows of several segments.
        partition: partition of the input dim.
    """
    if partition.known_sizes is not None and not all(isinstance(n, int) for n in (*src_sides, *dst_sides)):
        if partition.kind != "chunk" or not partition.is_even:
            return None  # static shard sizes that differ would become symbolic
        partition = replace(partition, known_sizes=None).with_trace(local_size=partition.known_sizes[0])
    flat = partition.flatten_trailing(src_sides[1]).flatten_leading(src_sides[0])
    if not compat.divides(dst_sides[0], flat.num_segments):
        return None
    flat = flat.unflatten_leading(dst_sides[0])
    out = flat.unflatten_trailing(dst_sides[1])
    if out is None or (not is_one(out.num_segments) and not allows_segments):
        return None
    return None if _only_by_chance(partition, dst_sides[1] * flat.num_segments, flat.trace.scale, out) else out


def merged_partition(count: int, partition: Partition) -> Partition | None:
    """Returns the partition after each `count` rows became one; None if some of these are on several ranks."""
    out = partition.unflatten_trailing(count)
    return None if out is None or _only_by_chance(partition, count, partition.trace.scale, out) else out


def _only_by_chance(partition: Partition, count: IntLike, scale: IntLike, out: Partition) -> bool:
    """Whether eager code must not use that all shard sizes are multiples of `count`.

    A trace does not know that unless `count` divides the scale, and would use `WholeRows`, which needs as many groups
    as ranks.
    """
    known = partition.kind == "fixed" or compat.divides(count, scale)
    return not known and compat.size_hint(out.size) < math.prod(out.parts)


register([aten.view.default, aten._unsafe_view.default, aten.reshape.default], _view, local_shape_at(1))
register(aten._reshape_alias.default, lambda call: ())
