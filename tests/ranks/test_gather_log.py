"""The log of gathers: ops that run on full tensors and inputs that a strategy replicates, not what reads one value."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as nnf
from torch import Tensor
from torch.distributed.tensor.placement_types import Shard

import shardcompile as sc
from shardcompile import config
from shardcompile.errors import UnsupportedOpError
from shardcompile.ops.support import gather_log
from shardcompile.testing import mesh, once

aten = torch.ops.aten


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Lines]:
    monkeypatch.setattr(gather_log, "_LOGGED_BYTES", {})
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


def columns(rows: int, count: int) -> sc.ShardTensor:
    """A batch of one, whose second dim is sharded."""
    sizes = {0: (count - 2, 0, 2)}
    return sc.distribute_tensor(torch.rand(rows, count), mesh(), [Shard(1)], sharding_shapes=sizes)


GATHERS: dict[str, tuple[Callable[..., Tensor], Callable[[], tuple[sc.ShardTensor, ...]], str, str]] = {
    "a product with a small factor": (
        lambda x, y: x.mm(y),
        lambda: (rows(200), rows(3)),
        "aten.mm.default gathers input 1, 72 B: replicated by its cheapest strategy (",
        "input 0: f32[200, 3] 0: S(0)[67,67,66]; input 1: f32[3, 3] 0: S(0)[1,1,1])",
    ),
    "einsum": (
        lambda x, y: torch.einsum("nkc,kcm->nm", x.unsqueeze(2), y.unsqueeze(1)),
        lambda: (rows(200), rows(3)),
        "aten.einsum.default gathers input 1, 72 B: replicated by its cheapest strategy (",
        "input 0: f32[200, 3, 1] 0: S(0)[67,67,66]; input 1: f32[3, 1, 3] 0: S(0)[1,1,1])",
    ),
    "sharded categories": (
        lambda x: torch.multinomial(x, 2),
        lambda: (columns(4, 7),),
        "aten.multinomial.default gathers input 0, 224 B: replicated by its cheapest strategy (",
        "input 0: f32[4, 7] 0: S(1)[5,0,2])",
    ),
    "an index that no decomposition supports": (
        lambda x: x.index_select(0, torch.tensor(3)),
        lambda: (rows(7),),
        "aten.index_select.default gathers input 0, 168 B: replicated by its cheapest strategy; its sharded decomposition "
        "does not serve this call: the index is not 1-d (",
        "input 0: f32[7, 3] 0: S(0)[3,3,1]; input 1: i64[] 0: R)",
    ),
    "a write": (
        lambda x, y: x.clone().add_(y),
        lambda: (rows(4), columns(1, 3)),
        "aten.add_.Tensor gathers input 1, 24 B: replicated by its cheapest strategy (",
        "input 0: f32[4, 3] 0: S(0)[2,2,0]; input 1: f32[1, 3] 0: S(1)[1,0,2])",
    ),
}
"""Calls that replicate a sharded input: function, inputs, and the line that tells so, with the layouts of eager mode."""


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize("name", list(GATHERS))
def test_an_input_that_a_strategy_replicates_is_logged_once(log: _Lines, name: str) -> None:
    function, inputs, line, layouts = GATHERS[name]
    with config.patch(fallback="error"):  # which is about ops that no rule serves
        for _ in range(3):
            function(*inputs())
    assert log.lines == [line + layouts]


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize("name", ["a product with a small factor", "sharded categories"])
def test_compiled_code_logs_what_a_strategy_replicates_when_it_is_traced(log: _Lines, name: str) -> None:
    function, inputs, line, _ = GATHERS[name]
    once(torch.compiler.reset)
    compiled = once(lambda: torch.compile(function, fullgraph=True, backend="aot_eager"))
    for _ in range(3):
        compiled(*inputs())
    (text,) = log.lines
    assert text.startswith(line)


@pytest.mark.ranks(3, processes=False)
def test_what_no_strategy_gathers_is_not_logged(log: _Lines) -> None:
    x, y = rows(7), columns(4, 7)
    (x @ torch.randn(3, 5)).relu().sum().full_tensor()  # terms are added
    x.redistribute(placements=[Shard(1)]).full_tensor()  # the program asks for it
    (y + columns(4, 7).redistribute(sharding_shapes={0: (1, 4, 2)})).exp()  # rows move, and stay sharded
    nnf.scaled_dot_product_attention(*[rows(7).view(1, 1, 7, 3)] * 3)  # reports tell its way
    assert not log.lines
