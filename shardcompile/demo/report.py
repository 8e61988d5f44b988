"""The report of the demo: one picture and one page of plain text.

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
class Check:
    """The result of one check.

    Attributes:
        name: what was checked.
        found: the value that was found.
        wanted: the expected value.
        passed: whether the check passed.
    """

    name: str
    found: str
    wanted: str
    passed: bool

    @classmethod
    def at_most(cls, name: str, difference: float, limit: float) -> Check:
        """Checks that a difference is not larger than a limit. NaN fails."""
        return cls(name, f"{difference:.1e}", f"at most {limit:.0e}", difference <= limit)


@dataclass(frozen=True)
class Communication:
    """The communication of one step.

    Attributes:
        collectives: the number of collectives of a rank, forward and backward.
        nbytes: the bytes that all ranks send together.
    """

    collectives: int
    nbytes: float


@dataclass(frozen=True)
class Figures:
    """The measurements of a demo run; None if something was not measured.

    Attributes:
        ranks: the number of processes that the points were sharded over.
        setting: backend, precision and compiler, as text.
        steps: the number of training steps.
        fewest_points: the number of points in the smallest sample.
        most_points: the number of points in the largest sample.
        loss_window: the number of steps that a loss is averaged over.
        losses: the losses at the start and at the end.
        single_losses: the losses of single-process training.
        new_sample_error: relative error of the prediction for a sample that was not trained on.
        checks: the results of the checks.
        sharded: the communication of the sharded step, compiled.
        eager: the communication of the sharded step in eager mode.
        handwritten: the communication of the hand-written step.
        bytes_lower_bound: a lower bound on the bytes that all ranks together send in a step.
        compiled_ms: the time of one sharded step, compiled, in milliseconds.
        eager_ms: the time of one sharded step in eager mode.
        handwritten_ms: the time of one hand-written step, compiled.
    """

    ranks: int
    setting: str
    steps: int
    fewest_points: int
    most_points: int
    loss_window: int
    losses: tuple[float, float]
    single_losses: tuple[float, float]
    new_sample_error: float
    checks: Sequence[Check]
    sharded: Communication
    eager: Communication
    handwritten: Communication
    bytes_lower_bound: int
    compiled_ms: float | None = None
    eager_ms: float | None = None
    handwritten_ms: float | None = None


Row = tuple[str, str, str]
"""A label, a value and a remark."""

_COMMUNICATION = """\
The lower bound: whatever the algorithm, to add up n bytes of which every rank has a share, and to
bring the sum to every rank, takes 2 (ranks - 1) n bytes. In this step n holds the slice totals and
loss terms on the way forward, and the gradients of slice tokens and parameters on the way back.
A collective is counted with the bytes that its best algorithm sends."""

_TIME = """\
Medians of forward and backward passes, slowest rank, taken in turns in one run on samples that were
not trained on. The ratios are noisy, most of all where ranks share cores."""


def text_report(figures: Figures) -> str:
    """Returns the report as aligned columns: label, value, and what the value compares to."""
    sections = [
        ("Run", _run_rows(figures), ""),
        ("Learning", _learning_rows(figures), ""),
        ("Checks", _check_rows(figures), ""),
        ("Communication in one step, all ranks", _communication_rows(figures), _COMMUNICATION),
    ]
    if figures.compiled_ms is not None:
        sections.append(("Time of one step", _time_rows(figures, figures.compiled_ms), _TIME))
    rows = [row for _, section, _ in sections for row in section]
    label, value = (max(len(row[i]) for row in rows) for i in (0, 1))
    lines = []
    for title, section, note in sections:
        lines += [title] + [f"  {a:<{label}}  {b:>{value}}  {c}".rstrip() for a, b, c in section]
        lines += [f"  {line}" for line in note.splitlines()] + [""]
    return "\n".join(lines)


def _run_rows(figures: Figures) -> list[Row]:
    return [
        ("ranks", str(figures.ranks), figures.setting),
        ("steps", str(figures.steps), "each on another sample and in another uneven partition"),
        ("points per sample", f"{figures.fewest_points} to {figures.most_points}", ""),
    ]


def _learning_rows(figures: Figures) -> list[Row]:
    (first, last), single = figures.losses, figures.single_losses
    fall = first / last if last else float("inf")
    mean = f"mean of {figures.loss_window} steps"
    return [
        ("loss at the start", f"{first:.4f}", f"{mean}; one process {single[0]:.4f}"),
        ("loss at the end", f"{last:.4f}", f"{mean}; one process {single[1]:.4f}; {fall:.1f} times lower"),
        ("error on a new sample", f"{figures.new_sample_error:.4f}", "relative, in the mean square; see the picture"),
    ]


def _check_rows(figures: Figures) -> list[Row]:
    return [(c.name, c.found, f"{'ok' if c.passed else 'FAILED'}, {c.wanted}") for c in figures.checks]


def _communication_rows(figures: Figures) -> list[Row]:
    variants = {"sharded": figures.sharded, "sharded, eager": figures.eager, "written by hand": figures.handwritten}
    bound = figures.bytes_lower_bound
    return [
        *((f"collectives, {name}", str(c.collectives), "") for name, c in variants.items()),
        *((f"bytes, {name}", _size(c.nbytes), _ratio(c.nbytes, bound)) for name, c in variants.items()),
        ("bytes, lower bound", _size(bound), ""),
    ]


def _ratio(nbytes: float, bound: int) -> str:
    return f"{nbytes / bound:.3f} times the lower bound" if bound else ""


def _time_rows(figures: Figures, compiled_ms: float) -> list[Row]:
    baselines = [("sharded, eager", figures.eager_ms), ("written by hand, compiled", figures.handwritten_ms)]
    rows = [("sharded, compiled", f"{compiled_ms:.1f} ms", "")]
    for name, milliseconds in baselines:
        if milliseconds is not None:
            rows.append((name, f"{milliseconds:.1f} ms", f"{milliseconds / compiled_ms:.2f} times sharded, compiled"))
    return rows


def _size(nbytes: float) -> str:
    if nbytes < 1024:
        return f"{nbytes:.0f} B"
    return f"{nbytes / 1024:.1f} KiB" if nbytes < 1024**2 else f"{nbytes / 1024**2:.3f} MiB"


# ---------------------------------------------------------------------------------------------- picture


def picture(
    path: str,
    sample: Sample,
    prediction: npt.ArrayLike,
    owner: npt.ArrayLike,
    losses: Mapping[str, Sequence[float]],
    ranks: int | None = None,
) -> None:
    """Draws one sample (owner ranks, target, prediction, error) and the loss curves into a PNG.

    Args:
        path: where to write the file.
        sample: the problem shown, n points.
        prediction: the network's answer in the order of `sample.points`, [n].
        owner: the rank of each point in the same order (see `poisson.owners`), int [n].
        losses: curves by name, one value per step. Later curves are drawn dashed over earlier ones, so two
            that agree can both be seen.
        ranks: number of ranks, to list those that held nothing; by default the highest owner plus one.
    """
    # An optional package.
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
    # An optional package.
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
    # An optional package.
    from matplotlib.ticker import LogLocator

    for i, (name, values) in enumerate(losses.items()):
        style, width = ("-", 3.5) if i == 0 else ("--", 1.4)
        colour = "tab:orange" if i == 0 else "black"
        ax.plot(range(1, len(values) + 1), values, style, linewidth=width, color=colour, label=name)
    ax.set(title="training loss, another sample and another partition at each step", xlabel="step", yscale="log")
    ax.yaxis.set_minor_locator(LogLocator(subs=(2, 3, 5)))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_formatter("{x:g}")
    ax.grid(alpha=0.3, which="both")
    ax.legend()


def _bare(ax: Axes, title: str) -> None:
    ax.set(title=title, aspect="equal")
    ax.set_axis_off()
