"""The page of operators: tables by family, with a row for every op that has a rule or a sharded decomposition."""

from __future__ import annotations

from collections.abc import Iterator

from shardcompile.operators.examples import example_of
from shardcompile.operators.outcome import Outcome, Ranks
from shardcompile.ops import OpRecord, records

_OF_TORCH = ("aten", "prims")
_FAMILIES = {
    "pointwise": "Pointwise",
    "matmul": "Matrix products",
    "reduce": "Reductions, softmax and losses",
    "norm": "Normalisation",
    "view": "Views, slices, joins and padding",
    "index": "Indexing and embedding",
    "scan": "Cumulative ops, flip, roll and repeat",
    "sort": "Sorting",
    "window": "Convolution, pooling and interpolation",
    "attention": "Attention",
    "linalg": "Linear algebra",
    "fourier": "Fourier transforms",
    "random": "Random numbers",
    "foreach": "Lists of tensors",
}
"""The folders of `shardcompile.ops`, and what the page calls them."""

_OUTCOMES = {"local": "nothing is sent", "reduced": "sums only", "exchanged": "rows exchanged", "gathered": "gathered"}


def table(ranks: Ranks) -> str:
    """Returns the page's tables in Markdown: how an example of each op communicates if a tensor is sharded along a dim.

    Args:
        ranks: the ranks that run the examples.
    """
    families: dict[str, list[OpRecord]] = {title: [] for title in _FAMILIES.values()}
    for record in _records_of_torch():
        families[_family(record)].append(record)
    return "\n\n".join(_section(title, found, ranks) for title, found in families.items() if found)


def _records_of_torch() -> list[OpRecord]:
    """Returns the records of torch's own ops, without those that a program has registered."""
    found = [r for r in records() if r.op.namespace in _OF_TORCH and (r.rule is not None or r.sharded is not None)]
    return sorted(found, key=lambda r: str(r.op))


def _family(record: OpRecord) -> str:
    """Returns the title of the family in which an op is implemented: its decomposition's, or else its rule's."""
    functions = [record.sharded and record.sharded.run, record.rule and record.rule.strategies]
    for function in functions:
        folder = str(getattr(function, "__module__", "")).removeprefix("shardcompile.ops.").partition(".")[0]
        if folder in _FAMILIES:
            return _FAMILIES[folder]
    return _FAMILIES["matmul"]  # a rule in the notation of products


def _section(title: str, found: list[OpRecord], ranks: Ranks) -> str:
    rows = list(_lines(found, ranks))
    others = [f"`{_name(r)}`" for r in found if example_of(r.op) is None]
    lines = [f"### {title}", "", f'<details markdown="1"><summary>{len(found)} ops</summary>', ""]
    if rows:
        lines += ["| op and example | if sharded |", "|---|---|", *rows, ""]
    if others:
        lines += [f"{'Without an example' if rows else 'No examples'}: {', '.join(others)}.", ""]
    return "\n".join([*lines, "</details>"])


def _lines(found: list[OpRecord], ranks: Ranks) -> Iterator[str]:
    for record in found:
        example = example_of(record.op)
        if example is not None:
            outcomes = ranks.outcomes_of(record.op, example)
            cells = [f"{says}: {which}" for how, says in _OUTCOMES.items() if (which := _which(outcomes, how))]
            yield f"| `{_name(record)}`<br>{example} | {'<br>'.join(cells)} |"


def _name(record: OpRecord) -> str:
    return str(record.op).removeprefix("aten.").removesuffix(".default")


def _which(outcomes: list[Outcome], how: str) -> str:
    """Returns the tensors and dims for which an op was served in this way, such as ``self 0 1, other 0``."""
    dims: dict[str, list[str]] = {}
    for outcome in outcomes:
        if outcome.how == how:
            name, _, dim = outcome.partition.partition(" along dim ")
            dims.setdefault(name, []).append(dim)
    return ", ".join(f"{name} {' '.join(d)}" for name, d in dims.items())
