"""The demo: its three ways to take a step agree, its judgement can fail, and the command runs."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from examples.poisson.__main__ import main
from examples.poisson.handwritten import handwritten_step
from examples.poisson.ranks import RankResult, Single, Trained
from examples.poisson.run import checks
from examples.poisson.traffic import lower_bound, traffic_of
from examples.poisson.training import gradient_vector, make_batch, make_net, sharded_step, whole_step
from shardcompile.launch import RankFailedError, launch
from shardcompile.testing import rank, world_size
from tests.support.tiers import often

EMPTY_AT = 4
"""A step at which one rank gets no points."""


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("step", [0, EMPTY_AT])
def test_sharded_and_handwritten_steps_equal_one_process(step: int) -> None:
    mesh = init_device_mesh("cpu", (world_size(),))
    net, batch = make_net(0, torch.float64), make_batch(step, world_size(), 0, torch.float64)
    assert (min(batch.sizes) == 0) == (step == EMPTY_AT)
    loss = whole_step(net)(batch)
    gradients = gradient_vector(net)
    for way in (sharded_step(net, mesh, None), handwritten_step(net, mesh.get_group(), None)):
        torch.testing.assert_close(way(batch), loss, rtol=1e-12, atol=0)
        torch.testing.assert_close(gradient_vector(net), gradients, rtol=1e-10, atol=1e-13)


@pytest.mark.ranks(3)
def test_handwritten_step_meets_the_lower_bound() -> None:
    group = init_device_mesh("cpu", (3,)).get_group()
    net, batch = make_net(0, torch.float32), make_batch(0, 3, 0, torch.float32)
    step = handwritten_step(net, group, None)
    traffic = traffic_of(lambda: step(batch), ranks=3)
    assert traffic.collectives == 6  # slices forward and backward in two layers, loss, parameters
    assert 3 * traffic.sent == pytest.approx(lower_bound(net, ranks=3))


@pytest.mark.ranks(2)
def test_traffic_sees_the_collectives_of_sharded_tensors() -> None:
    mesh = init_device_mesh("cpu", (2,))
    net, batch = make_net(0, torch.float32), make_batch(0, 2, 0, torch.float32)
    step = sharded_step(net, mesh, None)
    traffic = traffic_of(lambda: step(batch), ranks=2)
    assert traffic.collectives >= 6 and 2 * traffic.sent >= lower_bound(net, ranks=2)


# ---------------------------------------------------------------------------------------------- judgement

GOOD = RankResult(
    trained=Trained([1.0, 0.5], np.array([1.0, 2.0]), 1, [9, 9], Single([1.0, 0.5], np.array([1.0, 2.0]), 1e-7)),
    prediction=np.zeros(3),
    traffic={},
    handwritten_difference=1e-7,
    times={},
)


def other(**changes: object) -> RankResult:
    return dataclasses.replace(GOOD, trained=dataclasses.replace(GOOD.trained, **changes))


def failed(*results: RankResult) -> list[str]:
    return [check.name for check in checks(results, 1e-4) if not check.passed]


@pytest.mark.parametrize(
    "result, name",
    [
        (other(losses=[1.0, 0.501]), "loss of a step, from one process"),
        (other(losses=[1.0, float("nan")]), "loss of a step, from one process"),
        (other(single=Single([1.0, 0.5], np.array([1.0, 2.0]), 1e-2)), "gradient of a step, from one process"),
        (other(single=Single([1.0, 0.5], np.array([1.0, 2.1]), 0)), "parameters, from one process"),
        (dataclasses.replace(GOOD, handwritten_difference=1.0), "gradient, from code written by hand"),
    ],
)
def test_a_difference_fails(result: RankResult, name: str) -> None:
    assert failed(GOOD, GOOD) == []
    assert failed(result, GOOD) == [name]


def test_ranks_that_differ_fail() -> None:
    assert failed(GOOD, other(graphs=2)) == ["graphs compiled, by rank"]
    assert failed(GOOD, other(parameters=np.array([1.0, 2.1]))) == ["parameters, between ranks"]


# ------------------------------------------------------------------------------------------------ processes


def fail_on_rank_1(argument: object) -> None:
    if rank() == 1:
        raise ValueError(f"wrong {argument}")
    torch.distributed.barrier()


def test_a_rank_that_fails_ends_all_with_its_traceback() -> None:
    with pytest.raises(RankFailedError, match=r"rank 1 failed\n(.|\n)*fail_on_rank_1(.|\n)*ValueError: wrong argument"):
        launch(fail_on_rank_1, "argument", ranks=2, backend="gloo")


def run_demo(*options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "examples.poisson", *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2])


@pytest.mark.parametrize("compare", often([["--no-compare"], []], 1), ids=["untimed", "timed"])
def test_command_runs_and_leaves_report_and_picture(compare: list[str], tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    run = run_demo("--ranks", 2, "--steps", 3, "--compile-backend", "aot_eager", "--out", tmp_path, *compare)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.rstrip().endswith("all checks passed")
    assert "step   3/3" in run.stdout
    report = (tmp_path / "report.txt").read_text()
    assert report in run.stdout
    for line in ("graphs compiled, by rank", "bytes, lower bound", "sharded, eager", "written by hand"):
        assert line in report
    assert "1 1  ok, one on every rank" in report and "FAILED" not in report
    pixels = image.imread(tmp_path / "picture.png")
    assert pixels[..., :3].std() > 0.1  # a blank one has 0


def test_options_that_make_no_sense_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for options, words in [(["--ranks", "0"], "at least 1"), (["--backend", "nccl", "--ranks", "99"], "needs a GPU")]:
        with pytest.raises(SystemExit):
            main(options)
        assert words in capsys.readouterr().err
