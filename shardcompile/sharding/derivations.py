"""Arithmetic on shard sizes: derives the partition of a result whose rows were removed, added or reordered.

Ranks hold rows in order: the rows of a rank follow those of the ranks before it. So a slice along a sharded dim
leaves every row on its rank, and only the sizes change. Each function takes the shard sizes of one or several
partitions and returns two tuples with an entry for each shard: the shard sizes of the result, and a second integer
that the function's docstring defines, for example the local index of the first row. All functions are pure, so the
results are rank-invariant.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

from shardcompile.sharding.sizes import REMEMBERED, nested_chunk_sizes

Sizes = tuple[int, ...]


def _starts(sizes: Sequence[int]) -> list[int]:
    return list(itertools.accumulate(sizes[:-1], initial=0))


def slice_sizes(partitions: Sequence[Sizes], start: int, step: int, count: int) -> tuple[Sizes, Sizes]:
    """Shard sizes of the slice of `count` rows ``start, start + step, ...``.

    The second tuple is the local index of each shard's first row in the slice; 0 for a shard that keeps none.

    >>> slice_sizes([(3, 0, 5)], 2, 2, 3)
    ((1, 0, 2), (2, 0, 1))
    """
    (sizes,) = partitions
    kept, firsts = [], []
    for begin, size in zip(_starts(sizes), sizes, strict=True):
        low = min(max(-(-(begin - start) // step), 0), count)
        high = min(max(-(-(begin + size - start) // step), 0), count)
        kept.append(high - low)
        firsts.append(start + low * step - begin if high > low else 0)
    return tuple(kept), tuple(firsts)


def inverse_slice_sizes(partitions: Sequence[Sizes], start: int, step: int, size: int) -> tuple[Sizes, Sizes]:
    """Inverse of `slice_sizes`: row i becomes row ``start + i * step`` of `size`.

    New rows join the shard of the row before them, and rows before the first one join the first shard. The second tuple
    is the local index that each shard's first row has in the result.

    >>> inverse_slice_sizes([(1, 0, 2)], 2, 2, 8)
    ((4, 0, 4), (2, 0, 0))
    """
    (sizes,) = partitions
    ends = [min(start + begin * step, size) for begin in _starts(sizes)[1:]] + [size]
    grown = tuple(b - a for a, b in itertools.pairwise([0, *ends]))
    return grown, (start, *[0] * (len(sizes) - 1))


def flip_sizes(partitions: Sequence[Sizes], inner: int, count: int) -> tuple[Sizes, Sizes]:
    """Reverses the order within each group of `count` units, where a unit is `inner` consecutive shards.

    The second tuple is zeros.

    >>> flip_sizes([(1, 2, 3, 4)], 2, 2)
    ((3, 4, 1, 2), (0, 0, 0, 0))
    """
    (sizes,) = partitions
    units = [sizes[i : i + inner] for i in range(0, len(sizes), inner)]
    reordered = [unit for i in range(0, len(units), count) for unit in reversed(units[i : i + count])]
    return tuple(itertools.chain.from_iterable(reordered)), (0,) * len(sizes)


def cat_sizes(partitions: Sequence[Sizes]) -> tuple[Sizes, Sizes]:
    """Shard sizes of a concatenation: every shard gets as many rows as it has in all partitions together.

    A partition of a single shard stands for a replicated value, whose rows any rank can take without communication.
    The first rank takes those before the last sharded partition, the last rank takes those after it, so that the
    sharded rows stay close to where they are. The second tuple is zeros.

    >>> cat_sizes([(1,), (3, 0, 5), (2, 2, 2)])
    ((6, 2, 7), (0, 0, 0))
    """
    count = max(map(len, partitions))
    total = [0] * count
    sharded = [i for i, sizes in enumerate(partitions) if len(sizes) > 1]
    for i, sizes in enumerate(partitions):
        if len(sizes) > 1:
            total = [a + b for a, b in zip(total, sizes, strict=True)]
        else:
            total[0 if not sharded or i < sharded[-1] else -1] += sizes[0]
    return tuple(total), (0,) * count


def window_sizes(
    partitions: Sequence[Sizes], count: int, num: int, den: int, before: int, after: int, shift: int
) -> tuple[Sizes, Sizes]:
    """Shard sizes of a windowed op with `count` output rows, such as a convolution.

    Output row j goes to the shard that holds input row ``(j * num + shift) / den``, or to the first or the last shard
    if there is no such row. It reads the input rows from ``(j * num - before) / den``, rounded up, to
    ``(j * num + after) / den``, rounded down. The second tuple is the number of input rows that each shard reads,
    including those outside of the dim.

    >>> window_sizes([(4, 0, 3)], 4, 2, 1, 1, 1, 0)  # a convolution of 3 rows, stride 2 and padding 1
    ((2, 0, 2), (5, 0, 5))
    """
    (sizes,) = partitions
    starts = [min(max(-((shift - begin * den) // num), 0), count) for begin in _starts(sizes)[1:]]
    ranges = list(itertools.pairwise([0, *starts, count]))
    reads = [((b - 1) * num + after) // den + 1 + (before - a * num) // den if b > a else 0 for a, b in ranges]
    return tuple(b - a for a, b in ranges), tuple(max(r, 0) for r in reads)


def offsets(partitions: Sequence[Sizes]) -> tuple[Sizes, Sizes]:
    """The unchanged shard sizes, and the global offset of each shard."""
    (sizes,) = partitions
    return sizes, tuple(_starts(sizes))


def halo_rows(partitions: Sequence[Sizes], before: int, after: int) -> tuple[Sizes, Sizes]:
    """The unchanged shard sizes, and the number of rows of each shard with its halo, clipped to the dim.

    An empty shard counts ``before + after + 1`` rows that belong to no shard, so that a kernel has rows to run on.

    >>> halo_rows([(3, 0, 2)], 1, 2)
    ((3, 0, 2), (5, 4, 3))
    """
    (sizes,) = partitions
    dim_size, rows = sum(sizes), []
    for begin, size in zip(_starts(sizes), sizes, strict=True):
        padded = min(begin + size + after, dim_size) - max(begin - before, 0)
        rows.append(padded if size else before + after + 1)
    return sizes, tuple(rows)


def nonempty_halo_rows(partitions: Sequence[Sizes], before: int, after: int) -> tuple[Sizes, Sizes]:
    """Same as `halo_rows`, but an empty shard counts no rows.

    >>> nonempty_halo_rows([(3, 0, 2)], 1, 2)
    ((3, 0, 2), (5, 0, 3))
    """
    sizes, rows = halo_rows(partitions, before, after)
    return sizes, tuple(n if size else 0 for n, size in zip(rows, sizes, strict=True))


def rows_before(partitions: Sequence[Sizes], before: int) -> tuple[Sizes, Sizes]:
    """The unchanged shard sizes, and how many rows precede each shard, at most `before`; 0 for an empty shard.

    >>> rows_before([(3, 0, 2)], 4)
    ((3, 0, 2), (0, 0, 3))
    """
    (sizes,) = partitions
    return sizes, tuple(min(begin, before) if size else 0 for begin, size in zip(_starts(sizes), sizes, strict=True))


def ring_shift_sizes(partitions: Sequence[Sizes], by: int, around: int) -> tuple[Sizes, Sizes]:
    """Shard sizes after every shard has moved on by `by` ranks, and the global offset of the shard a rank then holds.

    With `around`, the shards of the last ranks wrap around to the first ones; otherwise the first ranks hold nothing.

    >>> ring_shift_sizes([(3, 0, 5)], 1, 1)
    ((5, 3, 0), (3, 0, 3))
    >>> ring_shift_sizes([(3, 0, 5)], 1, 0)
    ((0, 3, 0), (0, 0, 3))
    """
    (sizes,) = partitions
    owners = [(i - by) % len(sizes) if around or i >= by else None for i in range(len(sizes))]
    starts = _starts(sizes)
    return tuple(0 if i is None else sizes[i] for i in owners), tuple(0 if i is None else starts[i] for i in owners)


def rechunk_sizes(_: Sequence[Sizes], size: int, *parts: int) -> tuple[Sizes, Sizes]:
    """Shard sizes of another dim of `size` rows, chunked by `torch.chunk` along each mesh dim, and the shard offsets.

    >>> rechunk_sizes([(3, 0, 5)], 4, 3)
    ((2, 2, 0), (0, 2, 4))
    >>> rechunk_sizes([(3, 0, 5, 0)], 2, 2, 2)
    ((1, 0, 1, 0), (0, 1, 1, 2))
    """
    sizes = nested_chunk_sizes(size, parts)
    return sizes, tuple(_starts(sizes))


DERIVATIONS: dict[str, Callable[..., tuple[Sizes, Sizes]]] = {
    "slice": slice_sizes,
    "inverse_slice": inverse_slice_sizes,
    "flip": flip_sizes,
    "cat": cat_sizes,
    "window": window_sizes,
    "offset": offsets,
    "halo": halo_rows,
    "nonempty_halo": nonempty_halo_rows,
    "rows_before": rows_before,
    "ring_shift": ring_shift_sizes,
    "rechunk": rechunk_sizes,
}
"""The functions by the name with which ops in a graph refer to them."""


@functools.lru_cache(REMEMBERED)
def derive_sizes(how: str, partitions: tuple[Sizes, ...], numbers: tuple[int, ...]) -> tuple[Sizes, Sizes]:
    """Returns what a function of `DERIVATIONS` does, and remembers the last results.

    >>> derive_sizes("offset", ((3, 0, 5),), ())
    ((3, 0, 5), (0, 3, 3))
    """
    return DERIVATIONS[how](partitions, *numbers)
