"""The script of docs/training.md trains as plain PyTorch does, and resumes on another number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader

from shardcompile.testing import LocalRanks
from tests.support.pages import DOCS, code_blocks, run_blocks

EPOCHS, CLOUDS = 4, 3


@pytest.fixture
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def script() -> dict[str, Any]:
    return run_blocks([block for block in code_blocks(DOCS / "training.md") if block.language == "python"])


def train(mesh: DeviceMesh, epochs: int, folder: Path, backend: str) -> tuple[list[Any], list[float]]:
    """Parameters and losses after the script; the schedule is always that of all epochs."""
    names = script()
    new = names["Training"]
    names["Training"] = lambda _: new(EPOCHS)
    options = ["--epochs", epochs, "--clouds", CLOUDS, "--checkpoints", folder, "--backend", backend]
    training, history = names["main"](list(map(str, options)))
    return [p.detach() for p in training.model.parameters()], history


def train_plainly() -> tuple[list[Any], list[float]]:
    """The same on whole clouds in one process."""
    names = script()
    data, training, history = names["Clouds"](CLOUDS, 0, 1), names["Training"](EPOCHS), []
    for epoch in range(EPOCHS):
        order, losses = torch.Generator().manual_seed(epoch), []
        for points, target in DataLoader(data, batch_size=None, shuffle=True, generator=order):
            loss = (training.model(points) - target).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
            training.optimizer.step()
            training.optimizer.zero_grad()
            losses.append(loss.item())
        training.schedule.step()
        history.append(sum(losses) / CLOUDS)
    return [p.detach() for p in training.model.parameters()], history


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("shardcompile", marks=pytest.mark.nightly)])
def test_it_trains_and_resumes_on_other_ranks(tmp_path: Path, float64: None, backend: str) -> None:
    parameters, history = train_plainly()
    with LocalRanks(3, processes=False) as three, LocalRanks(2, processes=False) as two:
        first = three(train, 2, tmp_path, "eager")
        resumed = two(train, EPOCHS, tmp_path, backend)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"epoch-{n:04}" for n in (1, 2, 3, 4)]
    for _, losses in first:
        torch.testing.assert_close(losses, history[:2])
    for found, losses in resumed:
        torch.testing.assert_close(losses, history[2:])
        torch.testing.assert_close(found, parameters)
    dcp_to_torch_save(tmp_path / "epoch-0004", tmp_path / "all.pt")
    model = script()["Surrogate"]()
    model.load_state_dict(torch.load(tmp_path / "all.pt")["model"])
    torch.testing.assert_close([p.detach() for p in model.parameters()], parameters)
