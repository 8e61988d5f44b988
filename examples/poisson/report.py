"""The report of the demo: one picture and one page of plain text.

matplotlib is imported only when a picture is drawn, so the text needs nothing but the standard library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from examples.poisson.poisson import Sample
from examples.poisson.ranks import RankResult, Settings, Trained
from examples.poisson.traffic import lower_bound
from shardcompile.inspect.text import columns

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


Row = tuple[str, str, str]
"""A label, a value and a remark."""

Section = tuple[str, Sequence[Row], str]
"""A title, rows and a note."""

_COMMUNICATION = """\
The lower bound: whatever the algorithm, to add up n bytes of which every rank has a share, and to
bring the sum to every rank, takes 2 (ranks - 1) n bytes. In this step n holds the slice totals and
loss terms on the way forward, and the gradients of slice tokens and parameters on the way back.
A collective is counted with the bytes that its best algorithm sends."""

_TIME = """\
Medians of forward and backward passes, slowest rank, taken in turns in one run on samples that were
not trained on. The ratios are noisy, most of all where ranks share cores."""


def text_report(settings: Settings, results: Sequence[RankResult], checks: Sequence[Check]) -> str:
    """Returns the report as aligned columns: label, value, and what the value compares to.

    Args:
        settings: the settings of the run.
        results: the results of all ranks.
        checks: the results of the checks.
    """
    sections: list[Section] = [
        ("Run", _run_rows(settings, results[0].trained), ""),
        ("Learning", _learning_rows(settings, results[0]), ""),
        ("Checks", [(c.name, c.found, f"{'ok' if c.passed else 'FAILED'}, {c.wanted}") for c in checks], ""),
        ("Communication in one step, all ranks", _communication_rows(settings, results), _COMMUNICATION),
    ]
    if settings.compare:
        sections.append(("Time of one step", _time_rows(results), _TIME))
    rows = [row for _, section, _ in sections for row in section]
    aligned = columns(rows, left=(0, 2))
    lines = []
    for title, section, note in sections:
        lines += [title, *(f"  {next(aligned)}" for _ in section), *(f"  {line}" for line in note.splitlines()), ""]
    return "\n".join(lines)


def _run_rows(settings: Settings, trained: Trained) -> list[Row]:
    dtype = "float64" if settings.double else "float32"
    return [
        ("ranks", str(settings.ranks), f"{settings.backend}, {dtype}, {settings.compiler}"),
        ("steps", str(settings.steps), "each on another sample and in another uneven partition"),
        ("points per sample", f"{min(trained.points)} to {max(trained.points)}", ""),
    ]


def _learning_rows(settings: Settings, result: RankResult) -> list[Row]:
    trained, target = result.trained, settings.batch(settings.steps).sample.target
    window = max(1, settings.steps // 10)
    first, last = _first_and_last(trained.losses, window)
    single_first, single_last = _first_and_last(trained.in_one_process.losses, window)
    fall = first / last if last else float("inf")
    error = np.linalg.norm(result.prediction - target) / np.linalg.norm(target)
    mean = f"mean of {window} steps"
    return [
        ("loss at the start", f"{first:.4f}", f"{mean}; one process {single_first:.4f}"),
        ("loss at the end", f"{last:.4f}", f"{mean}; one process {single_last:.4f}; {fall:.1f} times lower"),
        ("error on a new sample", f"{error:.4f}", "relative, in the mean square; see the picture"),
    ]


def _first_and_last(losses: Sequence[float], window: int) -> tuple[float, float]:
    return float(np.mean(losses[:window])), float(np.mean(losses[-window:]))


def _communication_rows(settings: Settings, results: Sequence[RankResult]) -> list[Row]:
    variants = {"sharded": "compiled", "sharded, eager": "eager", "written by hand": "handwritten"}
    traffic = {name: [result.traffic[variant] for result in results] for name, variant in variants.items()}
    nbytes = {name: sum(t.sent for t in of_ranks) for name, of_ranks in traffic.items()}
    bound = lower_bound(settings.net(), settings.ranks)
    return [
        *((f"collectives, {name}", str(of_ranks[0].collectives), "") for name, of_ranks in traffic.items()),
        *(
            (f"bytes, {name}", _size(n), f"{n / bound:.3f} times the lower bound" if bound else "")
            for name, n in nbytes.items()
        ),
        ("bytes, lower bound", _size(bound), ""),
    ]


def _ratio(nbytes: float, bound: int) -> str:
    return f"{nbytes / bound:.3f} times the lower bound" if bound else ""


def _time_rows(results: Sequence[RankResult]) -> list[Row]:
    compiled, eager, by_hand = (
        max(result.times[variant] for result in results) for variant in ("compiled", "eager", "handwritten")
    )
    baselines = [("sharded, eager", eager), ("written by hand, compiled", by_hand)]
    rows = [(name, f"{ms:.1f} ms", f"{ms / compiled:.2f} times sharded, compiled") for name, ms in baselines]
    return [("sharded, compiled", f"{compiled:.1f} ms", ""), *rows]


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
