"""A report of what was compiled: its data, shown as text, page, trace and difference."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardcompile.collectives import MovedRows
from shardcompile.reports.data import (
    Compilation,
    GraphReport,
    IssuedCollective,
    PassStep,
    ReportData,
    Span,
    TracedCollective,
)
from shardcompile.reports.diff import Difference, difference
from shardcompile.reports.folder import save as save_report
from shardcompile.reports.page import page, summary
from shardcompile.reports.text import as_text
from shardcompile.reports.timeline import chrome_trace


@dataclass(repr=False)
class Report(ReportData):
    """What was compiled, as `shardcompile.explain` and `shardcompile.capture` find it.

    It prints as a text for the terminal, and shows as a table in notebooks. Its repr is one line.

    Attributes:
        rank: on which it was made.
        world_size: number of ranks.
        device: that was compiled for.
        torch: its version.
        predicted_for: the device that times are predicted for.
        compilations: what was compiled, in order.
        recompiles: why something was compiled again, in torch's words.
        graph_breaks: why a function became several graphs, in torch's words.
        caches: hits and misses of the compiler's caches; while capturing they are off unless they are asked for.
        moved: rows that went where data says while it was captured, those of all ranks together.
        notes: what is missing, and why.
        error: what ended it, or an empty text.
    """

    @staticmethod
    def from_json(text: str) -> Report:
        """A report that `to_json` has written."""
        data = json.loads(text)
        data["compilations"] = [
            Compilation(**(c | {"graphs": [_graph(g) for g in c["graphs"]]})) for c in data["compilations"]
        ]
        data["moved"] = [_tuples(MovedRows, rows) for rows in data["moved"]]
        return Report(**data)

    def diff(self, other: Report) -> Difference:
        """What is different in another report, see `shardcompile.reports.diff.Difference`."""
        return difference(self, other)

    def perfetto(self) -> dict[str, object]:
        """The predicted timeline as a Chrome trace, which https://ui.perfetto.dev shows; one process for each graph."""
        return chrome_trace(self)

    def to_html(self) -> str:
        """One page that needs nothing else: timeline, graphs, table."""
        return page(self)

    def save(self, folder: str | Path) -> Path:
        """Write everything into a folder, each rank into its own; see `shardcompile.reports.folder.save`."""
        return save_report(self, Path(folder))

    def __repr__(self) -> str:
        # Notebooks store it besides the table, and the texts of all graphs would be in it.
        counts = f"{len(self.graphs)} graphs, {len(self.issued)} collectives, {self.total_bytes} B"
        return f"<Report: rank {self.rank} of {self.world_size}, {self.device}, {counts}>"

    def __str__(self) -> str:
        return as_text(self)

    def _repr_html_(self) -> str:
        return summary(self)


def _tuples(cls: Any, data: dict[str, Any]) -> object:
    """A record whose lists have been tuples."""
    return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in data.items()})


_RECORDS = {"steps": PassStep, "traced": TracedCollective, "issued": IssuedCollective, "spans": Span}


def _graph(data: dict[str, Any]) -> GraphReport:
    records = {name: tuple(_tuples(cls, record) for record in data[name]) for name, cls in _RECORDS.items()}
    return GraphReport(**(data | records | {"ways": tuple(data["ways"])}))
