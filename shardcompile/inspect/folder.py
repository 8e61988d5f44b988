"""Saves a report as a folder of files."""

from __future__ import annotations

import json
from pathlib import Path

from shardcompile.inspect.data import ReportData
from shardcompile.inspect.page import page
from shardcompile.inspect.text import as_text
from shardcompile.inspect.timeline import chrome_trace


def save(report: ReportData, folder: Path) -> Path:
    """Writes a report to a folder, with a subfolder for each rank.

    The files are ``report.txt``, ``report.json``, ``report.html``, ``timeline.json`` for https://ui.perfetto.dev, and
    in ``graphs`` each stage of each graph as Python. For files that a debugger steps through, see
    `capture(sources=...)`.

    Args:
        report: the report of one rank.
        folder: the folder, which need not exist. Files of an earlier report in it are overwritten.

    Returns:
        The folder of this rank.
    """
    rank_folder = folder / f"rank{report.rank}"
    (rank_folder / "graphs").mkdir(parents=True, exist_ok=True)
    (rank_folder / "report.txt").write_text(f"{as_text(report)}\n", encoding="utf-8")
    (rank_folder / "report.json").write_text(report.to_json(), encoding="utf-8")
    (rank_folder / "report.html").write_text(page(report), encoding="utf-8")
    (rank_folder / "timeline.json").write_text(json.dumps(chrome_trace(report)), encoding="utf-8")
    for name, text in _texts(report).items():
        (rank_folder / "graphs" / f"{name}.py").write_text(text, encoding="utf-8")
    return rank_folder


def _texts(report: ReportData) -> dict[str, str]:
    texts = {}
    for i, compilation in enumerate(report.compilations):
        function = "".join(letter if letter.isalnum() else "_" for letter in compilation.function)
        for stage, text in compilation.stages.items():
            texts[f"{i}_{function}_{stage}"] = text
        for graph in compilation.graphs:
            for j, (stage, text) in enumerate(graph.stages.items()):
                texts[f"{i}_{function}_{graph.side}_{j:02}_{stage}"] = text
    return texts
