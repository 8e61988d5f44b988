"""`Report`: the data of a report on compiled code, shown as text, HTML page, trace and difference."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardcompile.collectives import MovedRows
from shardcompile.inspect.data import (
    Compilation,
    GraphReport,
    IssuedCollective,
    PassStep,
    ReportData,
    Span,
    TracedCollective,
)
from shardcompile.inspect.diff import Difference, difference
from shardcompile.inspect.folder import save as save_report
from shardcompile.inspect.page import page, summary
from shardcompile.inspect.text import as_text
from shardcompile.inspect.timeline import chrome_trace


@dataclass(repr=False)
class Report(ReportData):
    """A report on compiled code, from `shardcompile.explain` or `shardcompile.capture`.

    It prints as text for the terminal, and is displayed as a table in notebooks. Its repr is one line.

    Attributes:
        rank: the rank that made the report.
        world_size: the number of ranks.
        device: the type of the device that the code is compiled for.
        torch: the version of torch.
        predicted_for: the device of the predicted times.
        compilations: the compilations, in order.
        recompiles: torch's reasons of recompiles.
        graph_breaks: torch's reasons of graph breaks.
        caches: the hits and misses of the compiler's caches, which are off unless `capture` has `caches=True`.
        moved: the routing statistics of data-dependent exchanges during the capture, over all ranks.
        notes: what is missing from the report, and why.
        error: the error that ended the capture, or an empty text.
    """

    @staticmethod
    def from_json(text: str) -> Report:
        """Parses a text from `to_json`."""
        data = json.loads(text)
        data["compilations"] = [
            Compilation(**(c | {"graphs": [_graph(g) for g in c["graphs"]]})) for c in data["compilations"]
        ]
        data["moved"] = [_tuples(MovedRows, rows) for rows in data["moved"]]
        return Report(**data)

    def diff(self, other: Report) -> Difference:
        """Compares this report with another, see `shardcompile.inspect.diff.Difference`."""
        return difference(self, other)

    def perfetto(self) -> dict[str, object]:
        """Returns the predicted timeline as a Chrome trace for https://ui.perfetto.dev, one process for each graph."""
        return chrome_trace(self)

    def to_html(self) -> str:
        """Returns one self-contained HTML page: timeline, graphs, table."""
        return page(self)

    def save(self, folder: str | Path) -> Path:
        """Writes the report to a folder, with a subfolder for the rank; see `shardcompile.inspect.folder.save`."""
        return save_report(self, Path(folder))

    def __repr__(self) -> str:
        # Notebooks store the repr beside the table. The default repr would contain the texts of all graphs.
        counts = f"{len(self.graphs)} graphs, {len(self.issued)} collectives, {self.total_bytes} B"
        return f"<Report: rank {self.rank} of {self.world_size}, {self.device}, {counts}>"

    def __str__(self) -> str:
        return as_text(self)

    def _repr_html_(self) -> str:
        return summary(self)


def _tuples(cls: Any, data: dict[str, Any]) -> object:
    """Makes a record from JSON, in which tuples are lists."""
    return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in data.items()})


_RECORDS = {"steps": PassStep, "traced": TracedCollective, "issued": IssuedCollective, "spans": Span}


def _graph(data: dict[str, Any]) -> GraphReport:
    records = {name: tuple(_tuples(cls, record) for record in data[name]) for name, cls in _RECORDS.items()}
    return GraphReport(**(data | records | {"attention_strategies": tuple(data["attention_strategies"])}))
