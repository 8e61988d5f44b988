"""The log of ops that run on full tensors: what gathers is there, and what reads one value is not."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from torch.distributed.tensor.placement_types import Shard

import shardcompile as sc
from shardcompile import config
from shardcompile.dispatch import gather
from shardcompile.errors import UnsupportedOpError
from shardcompile.testing import mesh

aten = torch.ops.aten


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Lines]:
    monkeypatch.setattr(gather, "_LOGGED_BYTES", {})
    logger, handler = logging.getLogger("shardcompile"), _Lines()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.setLevel(level)
    logger.removeHandler(handler)


def rows(count: int) -> sc.ShardTensor:
    return sc.distribute_tensor(torch.randn(count, 3), mesh(), [Shard(0)])


@pytest.mark.ranks(2, processes=False)
def test_reading_a_value_is_neither_logged_nor_refused(log: _Lines) -> None:
    x = rows(7)
    with config.patch(fallback="error"):
        assert x.sum().item() == float(x.sum()) == x.sum().full_tensor()
        assert bool((x == x).all()) and torch.allclose(x, x)
        torch._assert_async(x.sum() < 1e9)
        with pytest.raises(RuntimeError, match="far too much"):
            torch._assert_async(x.sum() > 1e9, "far too much")
        number, whole = torch.zeros(()), torch.zeros(7, 3)
        number.copy_(x.mean())
        whole.copy_(x)
    assert torch.equal(number, x.mean().full_tensor()) and torch.equal(whole, x.full_tensor())
    assert not log.lines


@pytest.mark.ranks(2, processes=False)
def test_a_copy_runs_on_shards() -> None:
    x = rows(7)
    copied = aten.copy.default(x, x[:1].double())
    assert copied.sharding == x.sharding
    assert torch.equal(copied.full_tensor(), x[:1].full_tensor().expand(7, 3))


@pytest.mark.ranks(1, processes=False)
def test_nothing_is_sent_by_one_rank_and_nothing_logged(log: _Lines) -> None:
    torch.pdist(sc.distribute_tensor(torch.randn(7, 3), mesh(), [Shard(0)]))
    assert not log.lines


@pytest.mark.ranks(2, processes=False)
def test_a_gather_is_logged_once_and_again_where_it_is_far_larger(log: _Lines) -> None:
    for count in (3, 4, 50, 40, 600, 7):
        torch.pdist(rows(count))
    for line in log.lines:
        assert line.startswith("aten._pdist_forward.default runs on full tensors on every rank, ")
        assert " B gathered: it has no sharding rule (input 0: f32[" in line
    assert [line.partition("input 0: ")[2].partition(",")[0] for line in log.lines] == ["f32[3", "f32[50", "f32[600"]


@pytest.mark.ranks(2, processes=False)
def test_the_log_the_refusal_and_the_report_use_the_same_words() -> None:
    with config.patch(fallback="error"), pytest.raises(UnsupportedOpError, match="runs on full tensors on every rank"):
        torch.pdist(rows(7))
    report = sc.explain(torch.pdist, rows(7))
    assert "_pdist_forward.default runs on full tensors on every rank, " in str(report)
