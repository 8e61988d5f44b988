"""Draws docs/shards.svg, what a shard is, and docs/served.svg, the table at the end of docs/figures.md."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot  # after the backend is chosen

DOCS = Path(__file__).resolve().parents[1] / "docs"
RANKS = ["#4c78a8", "#f58518", "#54a24b"]
SIZES = [4, 1, 2]
WAYS = {
    "local": "#4c78a8",
    "sums only": "#72b7b2",
    "rows exchanged": "#eeca3b",
    "gathered: one input partition": "#e45756",
    "gathered: several partition": "#ff9da6",
}
"""How an op is served, by the columns of the table, and colours."""


def shards() -> Any:
    """A tensor of 7 rows over three ranks: sharded, replicated, and as a pending sum."""
    figure, axes = pyplot.subplots(1, 4, figsize=(9, 2.6), width_ratios=[1, 1, 3, 3])
    titles = ["the tensor", "S(0)[4,1,2]", "R", "P(sum)"]
    captions = ["shape (7, 2)", "one shard per rank", "the same on each rank", "terms, not yet added up"]
    for ax, title, caption in zip(axes, titles, captions, strict=True):
        ax.set_title(title, fontsize=9)
        ax.text(0.5, -0.04, caption, transform=ax.transAxes, ha="center", va="top", fontsize=8)
        ax.set_axis_off()
        ax.set_ylim(7.6, -0.6)
    rows = [rank for rank, size in enumerate(SIZES) for _ in range(size)]
    for row, rank in enumerate(rows):
        _row(axes[0], 0, row, "#bab0ac")
        _row(axes[1], 0, row + 0.25 * rank, RANKS[rank])
    for ax, joined in ((axes[2], " "), (axes[3], "+")):
        for rank, colour in enumerate(RANKS):
            for row in range(7):
                _row(ax, 3 * rank, row, colour, 1.0 if joined == " " else 0.45)
            if rank:
                ax.text(3 * rank - 0.5, 3.5, joined, ha="center", va="center", fontsize=12)
    axes[1].legend(
        [pyplot.Rectangle((0, 0), 1, 1, color=c) for c in RANKS],
        [f"rank {r}" for r in range(3)],
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
        fontsize=8,
        frameon=False,
    )
    for ax, width in zip(axes, [2, 2, 8, 8], strict=True):
        ax.set_xlim(-0.1, width + 0.1)
    figure.subplots_adjust(left=0.02, right=0.99, bottom=0.1, top=0.88, wspace=0.9)
    return figure


def _row(ax: Any, x: float, y: float, colour: str, strength: float = 1.0) -> None:
    for column in range(2):
        ax.add_patch(pyplot.Rectangle((x + column, y), 1, 1, facecolor=colour, edgecolor="white", alpha=strength))


def served() -> Any:
    """How runs of each family of ops were served, in parts of all runs."""
    lines = re.findall(r"^\| ([a-zA-Z, ]+) \| \d+ \| (\d+ \| \d+ \| \d+ \| \d+ \| \d+ \| \d+) \|$", _figures(), re.M)
    families = {name: [int(n) for n in numbers.split(" | ")] for name, numbers in lines}
    assert len(families) > 10, "the table of docs/figures.md has another form"
    figure, ax = pyplot.subplots(figsize=(9, 4.2))
    for at, (runs, *counts) in enumerate(families.values()):
        left = 0.0
        for count, colour in zip(counts, WAYS.values(), strict=True):
            ax.barh(at, 100 * count / runs, left=left, color=colour, edgecolor="white", linewidth=0.4)
            left += 100 * count / runs
    ax.set_yticks(range(len(families)), list(families), fontsize=8)
    ax.set_xlabel("% of the runs of a family", fontsize=8)
    ax.set_xlim(0, 100)
    ax.invert_yaxis()
    ax.tick_params(labelsize=8)
    ax.spines[["top", "right"]].set_visible(False)
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=c) for c in WAYS.values()]
    ax.legend(handles, list(WAYS), ncols=5, loc="lower center", bbox_to_anchor=(0.45, 1.0), fontsize=8, frameon=False)
    figure.tight_layout()
    return figure


def _figures() -> str:
    return (DOCS / "figures.md").read_text()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=DOCS, help="the folder")
    options = parser.parse_args()
    matplotlib.rcParams["svg.hashsalt"] = "shardcompile"
    for name, figure in (("shards", shards()), ("served", served())):
        figure.savefig(options.out / f"{name}.svg", metadata={"Date": None}, bbox_inches="tight")


if __name__ == "__main__":
    main()
