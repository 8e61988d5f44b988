"""The page of operators: a table with a row for every op that has a rule or a sharded decomposition."""

from __future__ import annotations

from collections.abc import Iterator

from shardcompile.operators.examples import example_of
from shardcompile.operators.outcome import Outcome, Ranks
from shardcompile.ops import OpRecord, records

_OF_TORCH = ("aten", "prims")
_COLUMNS = ("local", "reduced", "exchanged", "gathered")


def table(ranks: Ranks) -> str:
    """Returns the table in Markdown: how an example of each op communicates if a tensor is sharded along a dim.

    Args:
        ranks: the ranks that run the examples.
    """
    head = "| op | example | nothing is sent | sums only | rows exchanged | gathered |"
    return "\n".join([head, "|---|---|---|---|---|---|", *_lines(ranks)])


def without_example() -> list[str]:
    """Returns the names of ops that have a rule or a sharded decomposition, but no example."""
    return [_name(r) for r in _records_of_torch() if example_of(r.op) is None]


def _records_of_torch() -> list[OpRecord]:
    """Returns the records of torch's own ops, without those that a program has registered."""
    found = [r for r in records() if r.op.namespace in _OF_TORCH and (r.rule is not None or r.sharded is not None)]
    return sorted(found, key=lambda r: str(r.op))


def _lines(ranks: Ranks) -> Iterator[str]:
    for record in _records_of_torch():
        example = example_of(record.op)
        if example is None:
            continue
        outcomes = ranks.outcomes_of(record.op, example)
        cells = " | ".join(_cell(outcomes, how) for how in _COLUMNS)
        yield f"| `{_name(record)}` | {example} | {cells} |"


def _name(record: OpRecord) -> str:
    return str(record.op).removeprefix("aten.").removesuffix(".default")


def _cell(outcomes: list[Outcome], how: str) -> str:
    """Returns the tensors and dims for which an op was served in this way, such as ``self 0 1, other 0``."""
    dims: dict[str, list[str]] = {}
    for outcome in outcomes:
        if outcome.how == how:
            name, _, dim = outcome.partition.partition(" along dim ")
            dims.setdefault(name, []).append(dim)
    return ", ".join(f"{name} {' '.join(d)}" for name, d in dims.items())
