"""Transports: what is chosen by sizes, and what NCCL's does, with torch's calls played on the CPU."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardcompile.collectives import transport
from shardcompile.collectives.transport import as_bytes, gpus, nccl, running_ends
from shardcompile.collectives.transport.balance import even_parts, moved_to_even
from shardcompile.collectives.transport.nccl_algorithms import (
    FUSES_BROADCASTS,
    Algorithm,
    costs_to_gather,
    costs_to_reduce,
    gather_algorithm,
    reduce_algorithm,
)
from shardcompile.diagnosis.backends import backend_of
from shardcompile.diagnosis.recorded_calls import Call, Entry
from tests.support.sources import PACKAGE, SOURCES

OLD = (2, 27, 5)
NEW = FUSES_BROADCASTS
MIB = 2**20


def test_equal_shards_are_left_to_torch() -> None:
    for version, size, ranks in itertools.product([OLD, NEW], [1, 7, MIB], [2, 3, 64]):
        assert gather_algorithm((size,) * ranks, version) is Algorithm.EVEN
        assert reduce_algorithm((size,) * ranks) is Algorithm.EVEN


def test_one_large_shard_travels_in_a_ring() -> None:
    """The owner of nine shards in sixteen would send 63 units; a ring moves 15 over its busiest link."""
    sizes = [9 * MIB, *[MIB] * 7]
    costs = costs_to_gather(sizes, NEW)
    assert gather_algorithm(tuple(sizes), NEW) is Algorithm.BROADCASTS
    assert costs[Algorithm.SENDS] > 63 * MIB and 15 * MIB <= costs[Algorithm.BROADCASTS] < 16 * MIB


def test_uneven_shards_move_as_little_as_even_ones() -> None:
    """But for what ranks have more or less than the mean."""
    sizes = [3 * MIB if r % 2 else MIB for r in range(64)]  # 128 MiB in all
    for costs in (costs_to_gather(sizes, OLD), costs_to_reduce(sizes)):
        assert min(costs, key=lambda way: costs[way]) is Algorithm.BALANCED
        assert 126 * MIB <= costs[Algorithm.BALANCED] < 132 * MIB < costs[Algorithm.SENDS]


def test_old_versions_pay_for_each_broadcast() -> None:
    small = (3000, *[1000] * 63)
    assert gather_algorithm(small, NEW) is Algorithm.BROADCASTS
    assert gather_algorithm(small, OLD) is Algorithm.SENDS
    assert gather_algorithm((5 * 2**16, *[4 * 2**16] * 63), OLD) is Algorithm.BALANCED
    assert gather_algorithm((64 * MIB, *[MIB] * 7), OLD) is Algorithm.BROADCASTS


def test_an_even_division_holds_all_rows_in_order() -> None:
    for whole, ranks, unit in itertools.product(range(9), range(1, 5), (1, 2)):
        size, parts = even_parts(whole, ranks, unit)
        assert [n for a, b in parts for n in range(a, b)] == list(range(whole))
        assert all(b - a <= size for a, b in parts) and (whole % ranks or {b - a for a, b in parts} == {size})


def test_what_moves_to_an_even_division_is_counted() -> None:
    """Against the rows of each rank and of its part, one by one."""
    for sizes in itertools.product([0, 1, 2, 5], repeat=3):
        if sum(sizes) % 3:
            continue
        _, parts = even_parts(sum(sizes), 3)
        held = [set(range(a, b)) for a, b in running_ends(sizes)]
        moved = [max(len(h - set(range(*p))), len(set(range(*p)) - h)) for h, p in zip(held, parts, strict=True)]
        assert moved_to_even(sizes) == max(moved)


def test_the_choice_knows_sizes_and_version_alone() -> None:
    """It has to be the same on every rank: no argument tells the rank."""
    assert list(gather_algorithm.__annotations__) == ["nbytes", "version", "return"]
    assert list(reduce_algorithm.__annotations__) == ["nbytes", "return"]


NAMED = re.compile(r"""["'](nccl|gloo)["']""")
STARTS_RANKS = {"plugin.py", "worker.py", "local_ranks.py", "__main__.py", "launch.py"}
"""Files that start ranks, with backends that users name."""


def test_backends_are_named_in_their_own_files() -> None:
    found = {p.relative_to(PACKAGE).as_posix() for p in SOURCES if NAMED.search(p.read_text())}
    assert {p for p in found if Path(p).name not in STARTS_RANKS} == {
        "collectives/transport/gloo.py",
        "collectives/transport/nccl.py",
    }


def test_backends_are_looked_after_as_their_transports_say() -> None:
    gloo, of_nccl = backend_of("gloo"), backend_of("nccl")
    assert gloo is not None and gloo.agrees and not gloo.aborts
    assert of_nccl is not None and of_nccl.aborts and not of_nccl.agrees
    assert backend_of("fake") is None


@pytest.mark.parametrize(
    ("backend", "device"),
    [("gloo", "cpu"), ("nccl", "cuda"), ("cpu:gloo,cuda:nccl", "cuda"), ("fake", "cpu")],
)
def test_devices_follow_from_backends(backend: str, device: str) -> None:
    assert transport.device_type(backend) == device


class _Group:
    """A process group of one rank that is told what the others send."""

    def __init__(self, rank: int, shards: Sequence[Tensor]) -> None:
        self._rank, self.shards = rank, shards

    def name(self) -> str:
        return "nccl"

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return len(self.shards)


class _Done:
    def wait(self) -> bool:
        return True


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Has what NCCL is asked for happen at once, and lists it."""
    asked: list[str] = []

    def even(out: Tensor, rows: Tensor, *, group: _Group, async_op: bool) -> Any:
        asked.append("all_gather_into_tensor")
        assert async_op and out.dtype is rows.dtype is torch.uint8 and out.shape[0] == rows.shape[0] * group.size()
        for r, shard in enumerate(group.shards):
            place, data = out[r * rows.shape[0] :], shard.reshape(-1).view(torch.uint8)
            place[: data.shape[0]].copy_(data)
        return _Done()

    def broadcasts(outs: list[Tensor], rows: Tensor, *, group: _Group, async_op: bool) -> Any:
        asked.append("all_gather")
        assert async_op and len(outs) == group.size() and len({o.shape for o in outs}) > 1
        for out, shard in zip(outs, group.shards, strict=True):
            out.copy_(shard.reshape(-1).view(torch.uint8))
        return _Done()

    def batch(messages: list[Any]) -> list[Any]:
        asked.append(f"batch of {len(messages)}")
        for m in messages:
            if m.op is dist.irecv:
                m.tensor.copy_(m.group.shards[m.group_peer].reshape(-1).view(torch.uint8))
        return [_Done()]

    class Message:
        def __init__(self, op: Any, tensor: Tensor, *, group: _Group, group_peer: int) -> None:
            self.op, self.tensor, self.group, self.group_peer = op, tensor, group, group_peer

    monkeypatch.setattr(dist, "all_gather_into_tensor", even)
    monkeypatch.setattr(dist, "all_gather", broadcasts)
    monkeypatch.setattr(dist, "batch_isend_irecv", batch)
    monkeypatch.setattr(dist, "P2POp", Message)
    monkeypatch.setattr(dist, "all_reduce", lambda x, group: asked.append("all_reduce"))
    monkeypatch.setattr(nccl.Nccl, "device", "cpu")
    monkeypatch.setattr(dist, "irecv", lambda x, group, group_src: asked.append(f"irecv from {group_src}") or _Done())
    monkeypatch.setattr(dist, "isend", lambda x, group, group_dst: asked.append(f"isend to {group_dst}") or _Done())
    return asked


def _call(group: Any, dtype: torch.dtype | None = torch.float32) -> Call:
    return Call(group, None, Entry(0, 0, "all_gather_v", dtype, (), ()))


@pytest.mark.parametrize(
    "way", [w for w in Algorithm if w is not Algorithm.BALANCED]
)  # see tests/ranks/test_nccl_algorithms.py
@pytest.mark.parametrize("dtype", [torch.float64, torch.bool, torch.complex64, torch.bfloat16])
@pytest.mark.parametrize("sizes", [[3, 3, 3], [5, 0, 2], [1, 4, 4], [0, 0, 6]])
def test_every_way_gathers_all_rows(
    way: Algorithm, dtype: torch.dtype, sizes: list[int], played: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if (way is Algorithm.EVEN) != (len(set(sizes)) == 1) and way in (Algorithm.EVEN, Algorithm.BROADCASTS):
        pytest.skip("a way that is not offered for such sizes")
    monkeypatch.setattr(transport.TRANSPORTS["nccl"], "fixed", way)
    shards = [torch.randint(0, 2, (n, 2)).to(dtype) for n in sizes]
    for rank, own in enumerate(shards):
        group: Any = _Group(rank, shards)
        out = torch.zeros([sum(sizes), 2], dtype=dtype)
        works = transport.gather_rows(_call(group), own, sizes, out)
        for work in works:
            work.wait()
        assert torch.equal(out, torch.cat(shards))


def test_rows_without_bytes_are_not_sent(played: list[str]) -> None:
    shards = [torch.empty(n, 0) for n in (2, 1)]
    group: Any = _Group(0, shards)
    assert transport.gather_rows(_call(group), shards[0], [2, 1], torch.empty(3, 0)) == []
    assert played == []


def test_all_ranks_make_the_communicator_before_some_have_nothing_to_send(played: list[str]) -> None:
    """A rank without messages takes no part in a batch, and must not be missing where the communicator is made."""
    shards = [torch.ones(2), torch.ones(2)]
    group: Any = _Group(1, shards)
    assert transport.exchange(_call(group), [], []) == []
    transport.exchange(_call(group), [(0, torch.ones(2))], [(0, torch.empty(2))])
    transport.exchange(_call(group), [(0, torch.ones(2))], [])
    assert played == ["all_reduce", "batch of 2", "batch of 1"]


def test_messages_of_two_ranks_wait_for_no_third(played: list[str]) -> None:
    group: Any = _Group(0, [torch.ones(2), torch.ones(2), torch.ones(2)])
    transport.exchange(_call(group, None), [(1, torch.ones(2)), (2, torch.ones(0))], [])
    transport.exchange(_call(group, None), [], [(2, torch.ones(2))])
    assert played == ["isend to 1", "irecv from 2"]


def test_one_element_has_bytes_whatever_its_stride_is() -> None:
    for x in (
        torch.arange(4.0)[::3][:1],
        torch.arange(6.0).as_strided((1, 1), (1, 5)),
        torch.tensor(2.5),
        torch.ones(0, 3),
    ):
        assert as_bytes(x).numpy().tobytes() == x.numpy().tobytes()
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        as_bytes(torch.ones(3, 2).T)


@pytest.mark.parametrize(
    ("found", "share", "ranks", "enough"),
    [(3, "0", 3, True), (1, "0", 3, False), (1, "1", 3, True), (2, "1", 3, True), (0, "1", 3, False)],
)
def test_ranks_share_a_gpu_if_they_are_told_to(
    found: int, share: str, ranks: int, enough: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found)
    monkeypatch.setenv(gpus.SHARE, share)
    assert gpus.are_enough(ranks) is enough


def test_ranks_that_share_a_gpu_are_hosts_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL refuses two ranks of one host on one GPU."""
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(os, "environ", {})
    gpus.take(1, 2)
    assert taken == [1] and not os.environ
    gpus.take(2, 3)
    assert taken == [1, 0] and os.environ["NCCL_HOSTID"] == "rank-2"
