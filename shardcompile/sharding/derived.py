"""Arithmetic on the shard sizes of a partition: how they change where rows are removed, added or reordered.

Rows keep their order over the ranks: the rows of a rank follow those of the ranks before it. So a slice along a
partition dim leaves every row on its rank, and only the sizes change. Each function takes the all shard sizes and
gives those of the result, and for every shard a row number within it; they are pure, so that every rank gets the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from shardcompile.sharding.sizes import nested_chunk_sizes

Sizes = tuple[int, ...]


def _starts(sizes: Sequence[int]) -> list[int]:
    return list(itertools.accumulate(sizes[:-1], initial=0))


def sliced(partitions: Sequence[Sizes], start: int, step: int, count: int) -> tuple[Sizes, Sizes]:
    """Rows ``start, start + step, ...``, `count` of them: how many every shard holds, and which of its rows is first.

    >>> sliced([(3, 0, 5)], 2, 2, 3)
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


def spread(partitions: Sequence[Sizes], start: int, step: int, size: int) -> tuple[Sizes, Sizes]:
    """The way back: row i becomes row ``start + i * step`` of `size`; new rows stay with the row before them.

    Rows in front of all go to the first shard. Gives the sizes, and which row of its shard a shard's first row becomes.

    >>> spread([(1, 0, 2)], 2, 2, 8)
    ((4, 0, 4), (2, 0, 0))
    """
    (sizes,) = partitions
    ends = [min(start + begin * step, size) for begin in _starts(sizes)[1:]] + [size]
    grown = tuple(b - a for a, b in itertools.pairwise([0, *ends]))
    return grown, (start, *[0] * (len(sizes) - 1))


def mirrored(partitions: Sequence[Sizes], inner: int, count: int) -> tuple[Sizes, Sizes]:
    """Reverse the order of every `count` neighbours. A neighbour is a run of `inner` shards.

    >>> mirrored([(1, 2, 3, 4)], 2, 2)
    ((3, 4, 1, 2), (0, 0, 0, 0))
    """
    (sizes,) = partitions
    runs = [sizes[i : i + inner] for i in range(0, len(sizes), inner)]
    turned = [run for i in range(0, len(runs), count) for run in reversed(runs[i : i + count])]
    return tuple(itertools.chain.from_iterable(turned)), (0,) * len(sizes)


def joined(partitions: Sequence[Sizes]) -> tuple[Sizes, Sizes]:
    """Partitions one after the other as one: every shard gets as many rows as it has in all of them together.

    A partition of a single shard is a value that is whole on every rank. It costs nothing to take it, wherever that
    is: in front of all others by the first rank, behind them by the last, so that they stay where they are.

    >>> joined([(1,), (3, 0, 5), (2, 2, 2)])
    ((6, 2, 7), (0, 0, 0))
    """
    count = max(map(len, partitions))
    total = [0] * count
    divided = [i for i, sizes in enumerate(partitions) if len(sizes) > 1]
    for i, sizes in enumerate(partitions):
        if len(sizes) > 1:
            total = [a + b for a, b in zip(total, sizes, strict=True)]
        else:
            total[0 if not divided or i < divided[-1] else -1] += sizes[0]
    return tuple(total), (0,) * count


def reading(
    partitions: Sequence[Sizes], count: int, num: int, den: int, before: int, after: int, shift: int
) -> tuple[Sizes, Sizes]:
    """Rows that read others: `count` rows, of which j goes to the shard that has row ``(j * num + shift) / den``.

    If there is no such row, row j goes to the first or the last shard. Row j reads those from
    ``(j * num - before) / den``, rounded up, to ``(j * num + after) / den``, rounded down. Gives the sizes, and how
    many rows each shard reads, those outside of the dim included.

    >>> reading([(4, 0, 3)], 4, 2, 1, 1, 1, 0)  # a convolution of 3 rows, stride 2 and padding 1
    ((2, 0, 2), (5, 0, 5))
    """
    (sizes,) = partitions
    starts = [min(max(-((shift - begin * den) // num), 0), count) for begin in _starts(sizes)[1:]]
    ranges = list(itertools.pairwise([0, *starts, count]))
    reads = [((b - 1) * num + after) // den + 1 + (before - a * num) // den if b > a else 0 for a, b in ranges]
    return tuple(b - a for a, b in ranges), tuple(max(r, 0) for r in reads)


def located(partitions: Sequence[Sizes]) -> tuple[Sizes, Sizes]:
    """The same shards, and at which row of the whole dim each one starts."""
    (sizes,) = partitions
    return sizes, tuple(_starts(sizes))


def around(partitions: Sequence[Sizes], before: int, after: int) -> tuple[Sizes, Sizes]:
    """The same shards, and how many rows each one has with those around it, as far as the dim goes.

    An empty shard is given ``before + after + 1`` rows of nobody's, so that a kernel has rows to run on.

    >>> around([(3, 0, 2)], 1, 2)
    ((3, 0, 2), (5, 4, 3))
    """
    (sizes,) = partitions
    dim_size, rows = sum(sizes), []
    for begin, size in zip(_starts(sizes), sizes, strict=True):
        whole = min(begin + size + after, dim_size) - max(begin - before, 0)
        rows.append(whole if size else before + after + 1)
    return sizes, tuple(rows)


def within(partitions: Sequence[Sizes], before: int, after: int) -> tuple[Sizes, Sizes]:
    """As `around`, with no rows for empty shards: how many rows each shard reads.

    >>> within([(3, 0, 2)], 1, 2)
    ((3, 0, 2), (5, 0, 3))
    """
    sizes, rows = around(partitions, before, after)
    return sizes, tuple(n if size else 0 for n, size in zip(rows, sizes, strict=True))


def ahead(partitions: Sequence[Sizes], before: int) -> tuple[Sizes, Sizes]:
    """The same shards, and how many of up to `before` rows in front of each one there are.

    >>> ahead([(3, 0, 2)], 4)
    ((3, 0, 2), (0, 0, 3))
    """
    (sizes,) = partitions
    return sizes, tuple(min(begin, before) if size else 0 for begin, size in zip(_starts(sizes), sizes, strict=True))


def shifted(partitions: Sequence[Sizes], by: int, around: int) -> tuple[Sizes, Sizes]:
    """What each rank has after shards have moved on by `by` ranks, and at which row of the whole dim that starts.

    Unless they go `around`, the first ranks then have nothing.

    >>> shifted([(3, 0, 5)], 1, 1)
    ((5, 3, 0), (3, 0, 3))
    >>> shifted([(3, 0, 5)], 1, 0)
    ((0, 3, 0), (0, 0, 3))
    """
    (sizes,) = partitions
    whose = [(i - by) % len(sizes) if around or i >= by else None for i in range(len(sizes))]
    starts = _starts(sizes)
    return tuple(0 if i is None else sizes[i] for i in whose), tuple(0 if i is None else starts[i] for i in whose)


def divided(_: Sequence[Sizes], size: int, *parts: int) -> tuple[Sizes, Sizes]:
    """Another dim of `size` rows as `torch.chunk` divides it along each mesh dim, and where each shard starts.

    >>> divided([(3, 0, 5)], 4, 3)
    ((2, 2, 0), (0, 2, 4))
    >>> divided([(3, 0, 5, 0)], 2, 2, 2)
    ((1, 0, 1, 0), (0, 1, 1, 2))
    """
    found = nested_chunk_sizes(size, parts)
    return found, tuple(_starts(found))


DERIVATIONS: dict[str, Callable[..., tuple[Sizes, Sizes]]] = {
    "sliced": sliced,
    "spread": spread,
    "mirrored": mirrored,
    "joined": joined,
    "reading": reading,
    "located": located,
    "around": around,
    "within": within,
    "ahead": ahead,
    "shifted": shifted,
    "divided": divided,
}
"""By name, as ops inside a graph call them."""
