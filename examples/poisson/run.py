"""The main program of the demo: starts the ranks, checks their results and writes the report."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from examples.poisson.poisson import owners
from examples.poisson.ranks import RankResult, Settings, run_rank
from examples.poisson.report import Check, picture, text_report
from shardcompile.launch import launch

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8}
"""How far losses and gradients (relative) and parameters (absolute) may be from those of one process.

Reductions add the same numbers in another order. Float32 has seven digits: over 200 steps in one process, shuffling the
points changed losses by up to 3e-6 of their size and parameters by 5e-7; in float64 all by less than 1e-13. A wrong
gradient changes its parameter by 5e-4, the learning rate, in the first step of Adam.
"""


def run_demo(settings: Settings) -> bool:
    """Runs the demo, prints the report, and saves it with a picture. Returns whether all checks passed.

    Raises:
        RankFailedError: a rank raised or died.
    """
    print(f"{settings.ranks} ranks over {settings.backend}, {settings.steps} training steps", flush=True)
    settings.out.mkdir(parents=True, exist_ok=True)
    results: list[RankResult] = launch(run_rank, settings, settings.ranks, settings.backend)
    found = checks(results, TOLERANCE[settings.dtype])
    text = text_report(settings, results, found)
    (settings.out / "report.txt").write_text(text)
    _draw(settings, results[0])
    print(f"\n{text}\nwritten to {settings.out / 'report.txt'} and {settings.out / 'picture.png'}")
    failed = [check.name for check in found if not check.passed]
    print(f"CHECKS FAILED: {', '.join(failed)}" if failed else "all checks passed", flush=True)
    return not failed


def checks(results: Sequence[RankResult], tolerance: float) -> list[Check]:
    """Returns the checks that a successful run must pass.

    Args:
        results: the results of all ranks.
        tolerance: see `TOLERANCE`.
    """
    trained, single = results[0].trained, results[0].trained.in_one_process
    parameters = np.stack([result.trained.parameters for result in results])
    losses = np.abs(np.divide(trained.losses, single.losses) - 1).max()
    by_hand = max(result.handwritten_difference for result in results)
    graphs = [result.trained.graphs for result in results]
    return [
        Check.at_most("loss of a step, from one process", losses, tolerance),
        Check.at_most("gradient of a step, from one process", single.gradient_difference, tolerance),
        Check.at_most("parameters, from one process", np.abs(parameters[0] - single.parameters).max(), tolerance),
        Check.at_most("parameters, between ranks", np.ptp(parameters, axis=0).max(), tolerance),
        Check.at_most("gradient, from code written by hand", by_hand, tolerance),
        Check("graphs compiled, by rank", " ".join(map(str, graphs)), "one on every rank", set(graphs) == {1}),
    ]


def _draw(settings: Settings, result: RankResult) -> None:
    batch, trained = settings.batch(settings.steps), result.trained
    losses = {f"{settings.ranks} ranks, compiled": trained.losses, "one process": trained.in_one_process.losses}
    path = str(settings.out / "picture.png")
    picture(path, batch.sample, result.prediction, owners(batch.order, batch.sizes), losses, settings.ranks)
