"""The page of operators: a line for every op with a rule or a form."""

from __future__ import annotations

from collections.abc import Iterator

from shardcompile.operators.examples import example_of
from shardcompile.operators.outcome import Outcome, Ranks
from shardcompile.ops import OpRecord, records

_OF_TORCH = ("aten", "prims")
_COLUMNS = ("local", "reduced", "exchanged", "gathered")


def table(ranks: Ranks) -> str:
    """The table in Markdown: for each op what is sent if a tensor of an example is sharded along a dim.

    Args:
        ranks: run the examples.
    """
    head = "| op | example | nothing is sent | sums only | rows exchanged | gathered |"
    return "\n".join([head, "|---|---|---|---|---|---|", *_lines(ranks)])


def without_example() -> list[str]:
    """Names of ops with a rule or a form that there is no example of."""
    return [_name(r) for r in _records_of_torch() if example_of(r.op) is None]


def _records_of_torch() -> list[OpRecord]:
    """Records of torch's own ops; those that a program registers are its own affair."""
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
    """``self 0 1, other 0``: the tensors and dims for which a service was had."""
    dims: dict[str, list[str]] = {}
    for s in outcomes:
        if s.how == how:
            name, _, dim = s.partition.partition(" along dim ")
            dims.setdefault(name, []).append(dim)
    return ", ".join(f"{name} {' '.join(d)}" for name, d in dims.items())
