"""What is said of ops is what dispatch does: ``python -m shardcompile op``, and docs/operators.md."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Replicate, Shard

from shardcompile.__main__ import main
from shardcompile.operators import Ranks, describe, example_of, ops_named, table
from shardcompile.ops import records
from shardcompile.testing import LocalRanks
from shardcompile.testing.arrange import lay_out, uneven_sizes
from shardcompile.testing.watch import CollectiveWatch

aten = torch.ops.aten
PAGE = Path(__file__).parents[2] / "docs" / "operators.md"


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks() as threads:
        yield threads


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the page is made with torch 2.13")
def test_the_page_is_what_the_records_say(ranks: Ranks) -> None:
    text = PAGE.read_text()
    written = text.partition("<!-- table -->\n")[2].partition("\n<!-- end of table -->")[0]
    assert written == table(ranks), "python -m shardcompile op --table prints the tables anew"
    command, _, printed = text.partition("```console\n$ ")[2].partition("```")[0].partition("\n")
    assert command == "python -m shardcompile op aten.softmax.int"
    assert printed.strip() == describe(aten.softmax.int, ranks)


class _Sent(CollectiveWatch):
    """Whether anything was sent, by the names of collectives alone."""

    NOTHING = ("wait_tensor", "take_shard", "place_shard", "derive_partition", "seeded_", "shard_starts", "local_range",
               "convolution", "attend", "max_pool", "sum_pool", "partition_of_sizes")  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def saw(self, name: str, x: object, out: object) -> None:
        if not name.partition("::")[2].startswith(self.NOTHING):
            self.names.append(name)


_CHECKED = (
    *("add.Tensor", "mul.Tensor", "mm", "bmm", "addmm", "sum.dim_IntList", "amax", "mean.dim", "_softmax", "cumprod"),
    *("cumsum", "logcumsumexp", "sort", "topk", "cat", "flip", "roll", "repeat", "permute", "view", "index_select"),
    *("index.Tensor", "gather", "scatter.src", "index_add", "embedding", "native_layer_norm", "convolution", "tril"),
    *("_scaled_dot_product_flash_attention_for_cpu", "native_dropout", "where.self", "bincount", "unfold"),
)


@pytest.mark.parametrize("style", [1, 2])
def test_rows_stay_where_it_is_said_that_nothing_is_sent(ranks: Ranks, style: int) -> None:
    """In other partitions, with an empty shard and one of one row, and by another count of what is sent."""
    ops = [op for name in _CHECKED for op in ops_named(f"aten.{name}")[:1]]
    said = {op: {s.partition: s.how for s in ranks.outcomes_of(op, example_of(op))} for op in ops}

    def run(mesh: object) -> list[tuple[str, str, bool, bool]]:
        found = []
        for op in ops:
            example = example_of(op)
            for i, (name, x) in enumerate(example.tensors):
                for dim in range(x.ndim):
                    laid_out = [
                        lay_out(
                            t.clone(),
                            mesh,
                            [Shard(dim) if j == i else Replicate()],
                            {0: uneven_sizes(t.shape[dim], 3, style)} if j == i else {},
                            0,
                        )
                        for j, (_, t) in enumerate(example.tensors)
                    ]
                    with _Sent() as sent, torch.no_grad():
                        out = op(*example.with_tensors(laid_out))
                    right = str(op) == "aten.native_dropout.default" or _equal(out, op(*example.args))
                    found.append((str(op), f"{name} along dim {dim}", not sent.names, right))
        return found

    with LocalRanks(3, processes=False) as threads:
        (found, *others) = threads(run)
    assert all(other == found for other in others)
    wrong = [(op, partition) for op, partition, _, right in found if not right]
    assert not wrong, wrong
    ways = {(str(op), partition): how for op, partitions in said.items() for partition, how in partitions.items()}
    differing = [
        (op, partition, ways[op, partition])
        for op, partition, silent, _ in found
        if silent != (ways[op, partition] == "local")
    ]
    assert not differing, differing
    assert set(ways.values()) == {"local", "reduced", "exchanged", "gathered"}


def _equal(out: object, expected: object) -> bool:
    outs, wanted = (x if isinstance(x, (tuple, list)) else [x] for x in (out, expected))
    pairs = list(zip(outs, wanted, strict=True))[:1]
    return all(
        torch.allclose(a.full_tensor(), b, rtol=1e-4, atol=1e-6)
        for a, b in pairs
        if isinstance(b, Tensor) and b.numel()
    )


@pytest.mark.nightly  # the page of all ops is made on every push
def test_every_record_says_something(ranks: Ranks) -> None:
    for record in records():
        if record.op.namespace.startswith("shardcompile_tests"):
            continue  # of another test, whose rules may be meant to fail
        lines = describe(record.op, ranks).splitlines()
        assert lines[0] == str(record.op._schema) and any(line and line[0] != " " for line in lines[2:]), lines


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["op", "aten.cumprod", "torch.ops.aten.mm.default"]) == 0
    printed = capsys.readouterr().out
    assert "self along dim 0  nothing is sent, on local shards; the result is sharded along dim 0" in printed
    assert (
        "self along dim 1  rows go to ranks that need them; no tensor is gathered, by its sharded decomposition"
        in printed
    )
    assert "self sharded along dim 1, mat2 sharded along dim 0 -> a pending sum" in printed
    assert "cumprod (shardcompile/ops/" in printed and "torch" not in printed.partition("aten::mm")[0].split("\n")[0]
    with pytest.raises(SystemExit):
        main(["op", "aten.no_such_op"])
    assert "torch has no op 'aten.no_such_op'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["op"])
