"""What the demo shows a person: one picture and one page of plain text.

matplotlib is imported only when a picture is drawn, so the text needs nothing but the standard library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .poisson import Sample

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Array = npt.NDArray[Any]

# ------------------------------------------------------------------------------------------------- text


@dataclass(frozen=True)
class Figures:
    """The measured outcome of a demo run; None where something was not measured.

    Attributes:
        ranks: number of processes the points were split over.
        steps: training steps taken.
        fewest_points: points in the smallest sample.
        most_points: points in the largest sample.
        graphs_compiled: graphs handed to the compiler over the whole run, on one rank.
        collectives_per_step: collectives of one step, forward and backward.
        bytes_per_step: bytes that all ranks together send in one step.
        bytes_lower_bound: the fewest bytes that any plan for this step could send.
        compiled_ms: time of one step, compiled, in milliseconds.
        eager_ms: the same without compilation.
        handwritten_ms: the same with collectives written by hand into the model.
        parameter_difference: largest absolute difference of any parameter from single-process training.
        loss_first: loss at the start, a mean over the first pass through the samples.
        loss_last: loss at the end, a mean over the last pass.
        single_loss_last: the same of single-process training.
    """

    ranks: int
    steps: int
    fewest_points: int
    most_points: int
    graphs_compiled: int
    collectives_per_step: float
    bytes_per_step: float
    bytes_lower_bound: float | None
    compiled_ms: float
    eager_ms: float | None
    handwritten_ms: float | None
    parameter_difference: float
    loss_first: float
    loss_last: float
    single_loss_last: float | None = None


Row = tuple[str, str, str]
"""A label, a value and a remark."""


def text_report(figures: Figures) -> str:
    """A page of aligned columns: label, value, and what the value compares to."""
    sections = {
        "Run": _run_rows(figures),
        "Learning": _learning_rows(figures),
        "Compilation": _compilation_rows(figures),
        "Communication per step, all ranks": _communication_rows(figures),
        "Time per step": _time_rows(figures),
    }
    rows = [row for section in sections.values() for row in section]
    label, value = (max(len(row[i]) for row in rows) for i in (0, 1))
    lines = []
    for title, section in sections.items():
        lines += [title] + [f"  {a:<{label}}  {b:>{value}}  {c}".rstrip() for a, b, c in section] + [""]
    return "\n".join(lines)


def _run_rows(figures: Figures) -> list[Row]:
    return [
        ("ranks", str(figures.ranks), ""),
        ("steps", str(figures.steps), "the points are cut anew at each"),
        ("points per sample", f"{figures.fewest_points} to {figures.most_points}", ""),
    ]


def _learning_rows(figures: Figures) -> list[Row]:
    fall = figures.loss_first / figures.loss_last if figures.loss_last else float("inf")
    single = _optional(figures.single_loss_last, "{:.4f}")
    return [
        ("loss at the start", f"{figures.loss_first:.4f}", ""),
        ("loss at the end", f"{figures.loss_last:.4f}", f"{fall:.1f} times lower"),
        ("loss at the end, one process", single, ""),
        ("largest parameter difference", f"{figures.parameter_difference:.1e}", "from one process"),
    ]


def _compilation_rows(figures: Figures) -> list[Row]:
    return [("graphs compiled", str(figures.graphs_compiled), f"for {figures.steps} steps")]


def _communication_rows(figures: Figures) -> list[Row]:
    bound = figures.bytes_lower_bound
    share = f"{figures.bytes_per_step / bound:.2f} times the lower bound" if bound else ""
    return [
        ("collectives", f"{figures.collectives_per_step:g}", ""),
        ("sent", _size(figures.bytes_per_step), share),
        ("lower bound", _size(bound), ""),
    ]


def _time_rows(figures: Figures) -> list[Row]:
    rivals = [("eager", figures.eager_ms), ("written by hand", figures.handwritten_ms)]
    rows = [("compiled", f"{figures.compiled_ms:.2f} ms", "")]
    for name, milliseconds in rivals:
        ratio = f"{milliseconds / figures.compiled_ms:.2f} times compiled" if milliseconds else ""
        rows.append((name, _optional(milliseconds, "{:.2f} ms"), ratio))
    return rows


def _optional(value: float | None, form: str) -> str:
    return "not measured" if value is None else form.format(value)


def _size(nbytes: float | None) -> str:
    if nbytes is None or nbytes < 1024:
        return _optional(nbytes, "{:.0f} B")
    return f"{nbytes / 1024:.1f} KiB" if nbytes < 1024**2 else f"{nbytes / 1024**2:.2f} MiB"


# ---------------------------------------------------------------------------------------------- picture


def picture(
    path: str,
    sample: Sample,
    prediction: npt.ArrayLike,
    owner: npt.ArrayLike,
    losses: Mapping[str, Sequence[float]],
    ranks: int | None = None,
) -> None:
    """Draw one sample (who held it, target, prediction, error) and the loss curves into a PNG.

    Args:
        path: where to write the file.
        sample: the problem shown, n points.
        prediction: the network's answer in the order of `sample.points`, [n].
        owner: the rank of each point in the same order (see `poisson.owners`), int [n].
        losses: curves by name, one value per step. Later curves are drawn dashed over earlier ones, so two
            that agree can both be seen.
        ranks: number of ranks, to list those that held nothing; by default the highest owner plus one.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 8), layout="constrained")
    FigureCanvasAgg(figure)  # Without pyplot, so a caller's own backend and figures stay as they are.
    axes = figure.subplot_mosaic([["owner", "target", "prediction"], ["error", "loss", "loss"]])
    predicted = np.asarray(prediction)
    _draw_owners(axes["owner"], sample, np.asarray(owner), ranks)
    _draw_fields(axes, sample, predicted)
    _draw_losses(axes["loss"], losses)
    figure.savefig(path, dpi=110)


def _draw_owners(ax: Axes, sample: Sample, owner: Array, ranks: int | None) -> None:
    """Points coloured by rank, with the number of points per rank in the legend."""
    from matplotlib import colormaps

    (x, y), counts = sample.points.T, np.bincount(owner, minlength=ranks or 0)
    ax.triplot(x, y, sample.triangles, color="0.85", linewidth=0.4, zorder=0)
    palette = colormaps["tab10" if len(counts) <= 10 else "tab20"]
    for rank, count in enumerate(counts):
        mine = owner == rank
        ax.scatter(x[mine], y[mine], s=9, color=palette(rank % palette.N), label=f"rank {rank}: {count}")
    ax.legend(
        loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=min(4, (len(counts) + 1) // 2), fontsize=9,
        frameon=False, markerscale=2, handletextpad=0.2, columnspacing=1.0,
    )  # fmt: skip
    _bare(ax, f"{len(owner)} points over {len(counts)} ranks")


def _draw_fields(axes: Mapping[str, Axes], sample: Sample, prediction: Array) -> None:
    """Target and prediction on one colour scale, symmetric around 0; the error on its own, from 0."""
    error = np.abs(prediction - sample.target)
    relative = np.linalg.norm(error) / np.linalg.norm(sample.target)
    limit = float(np.abs(sample.target).max())
    _draw_field(axes["target"], sample, sample.target, "target (finite elements)", -limit, limit, "RdBu_r")
    _draw_field(axes["prediction"], sample, prediction, "prediction", -limit, limit, "RdBu_r")
    title = f"absolute error (relative $L_2$: {relative:.2f})"
    _draw_field(axes["error"], sample, error, title, 0, float(error.max()) or 1.0, "viridis")


def _draw_field(ax: Axes, sample: Sample, values: Array, title: str, low: float, high: float, colour_map: str) -> None:
    x, y = sample.points.T
    limits: dict[str, Any] = {"vmin": low, "vmax": high, "cmap": colour_map}
    drawn = ax.tripcolor(x, y, values, triangles=sample.triangles, shading="gouraud", **limits)
    assert ax.figure is not None
    ax.figure.colorbar(drawn, ax=ax, shrink=0.8)
    _bare(ax, title)


def _draw_losses(ax: Axes, losses: Mapping[str, Sequence[float]]) -> None:
    """The curves, thick and solid first, thin and dashed over it."""
    from matplotlib.ticker import LogLocator

    for i, (name, values) in enumerate(losses.items()):
        style, width = ("-", 3.5) if i == 0 else ("--", 1.4)
        colour = "tab:orange" if i == 0 else "black"
        ax.plot(range(1, len(values) + 1), values, style, linewidth=width, color=colour, label=name)
    ax.set(title="training loss, another sample and another cut at each step", xlabel="step", yscale="log")
    ax.yaxis.set_minor_locator(LogLocator(subs=(2, 3, 5)))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_formatter("{x:g}")
    ax.grid(alpha=0.3, which="both")
    ax.legend()


def _bare(ax: Axes, title: str) -> None:
    ax.set(title=title, aspect="equal")
    ax.set_axis_off()
