"""Derived partitions: what torch does to the whole tensor is what every shard keeps of its rows, in order."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shardcompile.sharding import DERIVATIONS

SIZES = st.lists(st.integers(0, 5), min_size=1, max_size=6).map(tuple)


def shards(sizes: tuple[int, ...], first: int = 0) -> list[Tensor]:
    return list(torch.arange(first, first + sum(sizes)).split(list(sizes)))


@given(SIZES, st.data())
def test_sliced_rows_stay_in_their_shards(sizes: tuple[int, ...], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, sum(sizes)))
    step = data.draw(st.integers(1, 4))
    wanted = torch.arange(sum(sizes))[start::step]
    count = data.draw(st.integers(0, len(wanted)))
    kept, firsts = DERIVATIONS["slice"]([sizes], start, step, count)
    pieces = [b[f : f + n * step : step] for b, n, f in zip(shards(sizes), kept, firsts, strict=True)]
    assert tuple(map(len, pieces)) == kept
    assert torch.equal(torch.cat(pieces), wanted[:count])


@given(SIZES, st.data())
def test_spread_rows_stay_in_their_shards(sizes: tuple[int, ...], data: st.DataObject) -> None:
    start, step, behind = (data.draw(st.integers(low, 4)) for low in (0, 1, 0))
    rows = sum(sizes)
    dim_size = start + max((rows - 1) * step + 1, 0) + behind
    grown, firsts = DERIVATIONS["inverse_slice"]([sizes], start, step, dim_size)
    wanted = torch.full([dim_size], -1)
    wanted[start : start + rows * step : step] = torch.arange(rows)
    pieces = []
    for shard, size, first in zip(shards(sizes), grown, firsts, strict=True):
        pieces.append(torch.full([size], -1))
        pieces[-1][first : first + len(shard) * step : step] = shard
    assert sum(grown) == dim_size
    assert torch.equal(torch.cat(pieces), wanted)


@given(SIZES, st.integers(0, 4), st.integers(1, 4), st.integers(0, 4))
def test_what_was_spread_is_sliced_back(sizes: tuple[int, ...], start: int, step: int, behind: int) -> None:
    size = start + max((sum(sizes) - 1) * step + 1, 0) + behind
    grown, firsts = DERIVATIONS["inverse_slice"]([sizes], start, step, size)
    kept, rows = DERIVATIONS["slice"]([grown], start, step, sum(sizes))
    assert kept == sizes
    assert all(r == f for r, f, n in zip(rows, firsts, sizes, strict=True) if n)


@given(st.integers(1, 3), st.integers(1, 4), st.data())
def test_mirrored_along_each_mesh_dim_is_reversed(outer: int, inner: int, data: st.DataObject) -> None:
    sizes = tuple(data.draw(st.lists(st.integers(0, 5), min_size=outer * inner, max_size=outer * inner)))
    within, _ = DERIVATIONS["flip"]([sizes], 1, inner)
    whole, _ = DERIVATIONS["flip"]([within], inner, outer)
    assert whole == sizes[::-1]


@given(st.integers(2, 5), st.data())
def test_joined_has_all_rows_and_one_divided_tensor_stays(count: int, data: st.DataObject) -> None:
    divided = st.lists(st.integers(0, 5), min_size=count, max_size=count).map(tuple)
    partitions = data.draw(st.lists(st.one_of(divided, st.tuples(st.integers(0, 5))), min_size=1, max_size=4))
    partitions.append(data.draw(divided))
    total, _ = DERIVATIONS["cat"](partitions)
    assert len(total) == count
    assert sum(total) == sum(map(sum, partitions))
    start = 0
    pieces = []
    for sizes in partitions:
        pieces.append(DERIVATIONS["slice"]([total], start, 1, sum(sizes))[0])
        start += sum(sizes)
    assert tuple(map(sum, zip(*pieces, strict=True))) == total, "every shard is made of its parts"
    many = [(p, c) for p, c in zip(pieces, partitions, strict=True) if len(c) > 1]
    if len(many) == 1:
        assert many[0][0] == many[0][1], "what is whole everywhere is put around it"


@given(SIZES)
def test_located_gives_the_first_row_of_every_shard(sizes: tuple[int, ...]) -> None:
    same, starts = DERIVATIONS["offset"]([sizes])
    assert same == sizes
    assert all(int(b[0]) == s for b, s in zip(shards(sizes), starts, strict=True) if len(b))


@given(SIZES, st.integers(1, 4), st.integers(1, 3), st.integers(0, 3), st.integers(0, 5), st.integers(-3, 5))
def test_rows_that_read_others_go_to_the_middle_of_what_they_read(
    sizes: tuple[int, ...], num: int, den: int, before: int, after: int, shift: int
) -> None:
    count = sum(sizes) * den // num + 2
    kept, reads = DERIVATIONS["window"]([sizes], count, num, den, before, after, shift)
    owner = [rank for rank, size in enumerate(sizes) for _ in range(size)]
    start = 0
    for rank, (own, many) in enumerate(zip(kept, reads, strict=True)):
        rows = [
            i
            for j in range(start, start + own)
            for i in range(-(before + count), count * num + after)
            if j * num - before <= i * den <= j * num + after
        ]
        if own and before + after + 1 >= den:  # every row reads something
            assert many == max(rows) - min(rows) + 1
        for j in range(start, start + own):
            middle = (j * num + shift) // den
            if 0 <= middle < len(owner):
                assert owner[middle] == rank
        start += own
        assert own or not many
    assert start == count


@given(SIZES, st.integers(0, 6), st.integers(0, 6))
def test_rows_around_a_shard_are_those_that_there_are(sizes: tuple[int, ...], before: int, after: int) -> None:
    dim_size, start = sum(sizes), 0
    found = [DERIVATIONS[how]([sizes], before, after) for how in ("halo", "nonempty_halo")]
    ahead = DERIVATIONS["rows_before"]([sizes], before)
    assert all(same == sizes for same, _ in (*found, ahead))
    for size, shown, read, front in zip(sizes, found[0][1], found[1][1], ahead[1], strict=True):
        rows = [r for r in range(dim_size) if start - before <= r < start + size + after] if size else []
        assert read == len(rows) and front == sum(r < start for r in rows)
        assert shown == (len(rows) or before + after + 1)
        start += size


@given(SIZES, st.integers(0, 20))
def test_another_dim_is_divided_as_torch_chunks_it(sizes: tuple[int, ...], size: int) -> None:
    found, starts = DERIVATIONS["rechunk"]([sizes], size, len(sizes))
    pieces = torch.arange(size).chunk(len(sizes)) if size else ()
    assert [n for n in found if n] == [len(p) for p in pieces]
    assert len(found) == len(sizes) and all(sum(found[:i]) == start for i, start in enumerate(starts))
