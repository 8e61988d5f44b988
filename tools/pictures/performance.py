"""Draws the plots of docs/performance.md and docs/passes.md: ``python -m tools.pictures.performance``.

The numbers are those of the tables in docs/performance.md and in benchmarks/results.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

from tools.pictures.svg import DOCS, WIDTH, Panel, write

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def tables(path: Path) -> list[list[list[str]]]:
    """Returns the tables of a file of Markdown: rows of cells, without the heads."""
    blocks = re.findall(r"(?:^\|.*\n)+", path.read_text() + "\n", re.M)
    return [[_cells(line) for line in block.splitlines()[2:]] for block in blocks]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split(" | ")]


def numbers(text: str) -> list[float]:
    """Returns the numbers in a text."""
    return [float(n.replace(",", "")) for n in re.findall(r"\d[\d,]*(?:\.\d+)?", text)]


def milliseconds(text: str) -> float:
    """Reads a time such as ``74.8 ms`` or ``1.73 s``."""
    number, unit = text.split()
    return float(number) * {"ms": 1, "s": 1000}[unit]


def served() -> Panel:
    """How runs of each family of ops were served, in parts of all runs."""
    (families,) = tables(RESULTS / "2026-11-26-operators.md")
    ways = {"local": "rank0", "sums only": "rank2", "rows exchanged": "rank1", "gathered": "bad"}
    panel = Panel(60 + 18 * len(families))
    x = 0.0
    for name, colour in ways.items():
        panel.rect(x, 4, 11, 11, colour)
        panel.text(x + 15, 10, name)
        x += 26 + 6.6 * len(name)
    left = 148
    for i, (name, _, runs, *counts) in enumerate(families):
        y = 26 + 18 * i
        panel.text(0, y + 8, {"linear algebra and the rest": "linear algebra, the rest"}.get(name, name))
        local, sums, rows, *gathered = map(int, counts)
        x = left
        for count, colour in zip((local, sums, rows, sum(gathered)), ways.values(), strict=True):
            width = (WIDTH - left) * count / int(runs)
            panel.rect(x, y + 1, max(width - 0.6, 0), 15, colour, rounded=0)
            x += width
    bottom = 34 + 18 * len(families)
    for part in (0, 50, 100):
        anchor = {0: "start", 50: "middle", 100: "end"}[part]
        panel.text(left + (WIDTH - left) * part / 100, bottom + 6, f"{part} %", "quiet", anchor=anchor)
    return panel


def ratios(rows: Sequence[Sequence[str]], low: float, high: float, better: str) -> Panel:
    """Ratios on a logarithmic axis: a dot, or a bar from the smallest to the largest; goals as ticks.

    Args:
        rows: of a table: what, against what, measured, goal.
        low: start of the axis.
        high: its end.
        better: what it means to be left of 1.
    """
    step = 56
    panel = Panel(step * len(rows) + 40)

    def x(value: float) -> float:
        return 4 + (WIDTH - 8) * math.log(value / low) / math.log(high / low)

    bottom = step * len(rows) + 8
    for tick in (0.125, 0.25, 0.5, 1, 2, 4):
        if low <= tick <= high:
            panel.line([(x(tick), bottom - 4), (x(tick), bottom)], "quiet")
            panel.text(
                x(tick), bottom + 9, f"{tick:g}", "quiet", anchor={low: "start", high: "end"}.get(tick, "middle")
            )
    panel.line([(x(low), bottom), (x(high), bottom)], "quiet")
    panel.text(x(1) - 6, bottom + 24, better, "quiet", anchor="end")
    for i, (what, against, measured, goal, *_) in enumerate(rows):
        y = 6 + step * i
        found = numbers(measured)
        panel.text(0, y + 6, _plain(what))
        panel.text(0, y + 21, f"against {_plain(against)}", "quiet")
        y += 15
        panel.line([(x(low), y + 24), (x(high), y + 24)], "soft")
        panel.line([(x(1), y + 15), (x(1), y + 33)], "quiet")
        colour = "busy" if max(found) <= 1.25 else "comm"
        panel.rect(x(min(found)) - 4, y + 20, x(max(found)) - x(min(found)) + 8, 8, colour)
        value = f"{min(found):g}" if len(set(found)) == 1 else f"{min(found):g} to {max(found):g}"
        bars = numbers(goal)[:1]
        width = 6.6 * len(value)
        starts = (x(max(found)) + 9, x(min(found)) - 9 - width, max(map(x, (*found, *bars, 1))) + 9)
        lines = [x(1), *map(x, bars)]
        free = [s for s in starts if 0 <= s <= WIDTH - width and not any(s - 4 < at < s + width + 4 for at in lines)]
        panel.text(free[0], y + 24, value)
        for bar in bars:
            panel.line([(x(bar), y + 16), (x(bar), y + 32)], "ink", 2)
    return panel


def _plain(text: str) -> str:
    return text.replace("`", "")


def schedules(world: str) -> Panel:
    """Time of each graph in parts of its bound: before the passes, by PyTorch's scheduling, and by ours."""
    rows = [row for table in tables(RESULTS / "2026-11-27-training-graphs.md")[:2] for row in table]
    rows = [row for row in rows if row[0].split(",")[0].endswith(f" {world}")]
    left, high = 156, 18
    panel = Panel(high * len(rows) + 78)
    most = 3.2

    def x(value: float) -> float:
        return left + (WIDTH - left - 8) * (value - 1) / (most - 1)

    panel.text(0, 10, f"{int(world):,} GPUs, predicted time / bound")
    for i, (colour, name) in enumerate((("busy", "ours"), ("comm", "PyTorch"), ("line", "before"))):
        panel.rect(84 * i, 26, 9, 9, colour, rounded=5)
        panel.text(84 * i + 14, 31, name)
    for i, row in enumerate(rows):
        y = 52 + high * i
        side, _, name = row[0].replace(f" {world}", "").partition(", ")
        panel.text(0, y, f"{name}, {side}".replace("forward", "fwd").replace("backward", "bwd"))
        before, bound, ours, torchs = (milliseconds(row[k]) for k in (3, 4, 5, 9))
        panel.line([(x(1), y), (x(most), y)], "soft")
        for value, colour in ((before, "line"), (torchs, "comm"), (ours, "busy")):
            ratio = value / bound
            if ratio > most:
                panel.text(WIDTH, y, f"{ratio:.1f}", "quiet", anchor="end", size=10)
            else:
                panel.rect(x(ratio) - 4.5, y - 4.5, 9, 9, colour, rounded=5)
    bottom = 46 + high * len(rows)
    panel.line([(x(1), 42), (x(1), bottom)], "quiet")
    for tick in (1, 1.5, 2, 2.5, 3):
        panel.text(x(tick), bottom + 12, f"{tick:g}", "quiet", anchor="middle")
    return panel


def predictions() -> Panel:
    """Predicted steps against measured ones."""
    rows = next(t for t in tables(RESULTS / "2026-11-27-cpu.md") if len(t[0]) == 4 and "ms" in t[0][1])
    step = 36
    panel = Panel(step * len(rows) + 30)
    panel.rect(0, 5, 11, 11, "busy")
    panel.text(16, 10, "predicted")
    panel.rect(96, 5, 11, 11, "line")
    panel.text(112, 10, "measured")
    longest = max(milliseconds(row[2]) for row in rows)
    for i, (name, predicted, measured, ratio) in enumerate(rows):
        y = 28 + step * i
        panel.text(0, y + 4, name)
        panel.text(WIDTH, y + 18, ratio, "quiet", anchor="end")
        for k, (text, colour) in enumerate(((predicted, "busy"), (measured, "line"))):
            panel.rect(0, y + 12 + 8 * k, (WIDTH - 40) * milliseconds(text) / longest, 7, colour, rounded=0)
    return panel


def panels() -> dict[str, Panel]:
    """All plots by the names of their files."""
    faster, costs = (t for t in tables(DOCS / "performance.md") if len(t[0]) == 5)
    return {
        "served": served(),
        "performance-against": ratios(faster, 0.1, 2, "faster than that"),
        "performance-costs": ratios(costs, 0.25, 6, "cheaper than that"),
        "performance-predictions": predictions(),
        "performance-schedules-64": schedules("64"),
        "performance-schedules-1024": schedules("1024"),
    }


if __name__ == "__main__":
    write(panels())
