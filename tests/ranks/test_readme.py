"""The example of README.md runs, prints what it says, trains as plain PyTorch does, and leaves a checkpoint."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from shardcompile.testing import rank
from tests.support.pages import ROOT, code_blocks, run_blocks

README = ROOT / "README.md"
EXAMPLE = [block for block in code_blocks(README) if block.language in ("python", "text")]


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """The folder that the example runs in, the same on every rank."""
    return tmp_path


@pytest.mark.ranks(2, timeout=300)
def test_example(work: Path) -> None:
    before = Path.cwd()
    os.chdir(work)
    try:
        model = run_blocks(EXAMPLE)["model"]
        dist.barrier()
        if rank() == 0:
            loaded = {"model": {name: torch.empty_like(p) for name, p in model.state_dict().items()}}
            dcp.load(loaded, checkpoint_id="checkpoint", no_dist=True)
            torch.testing.assert_close(loaded["model"], dict(model.state_dict()), rtol=0, atol=0)
    finally:
        os.chdir(before)


def losses_of_plain_pytorch() -> Iterator[tuple[int, int, float]]:
    """Every 20th step of the same training in one process, eager, in float64 but for the data and the initial values."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 1)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = [torch.Generator().manual_seed(rank) for rank in range(2)]
    for step in range(61):
        rows = [step * 37 % 100, 20]
        x = torch.cat([torch.rand(n, 3, generator=own) for n, own in zip(rows, data, strict=True)]).double()
        loss = (model(x) - x.square().sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            yield step, len(x), loss.item()


def test_the_losses_are_those_of_plain_pytorch() -> None:
    (printed,) = (block.source for block in EXAMPLE if block.language == "text")
    told = re.findall(r"step (\d+): (\d+) rows, loss ([\d.]+)", printed)
    assert told == [(str(step), str(rows), f"{loss:.3f}") for step, rows, loss in losses_of_plain_pytorch()]


def test_it_is_short_and_has_a_picture() -> None:
    text = README.read_text()
    assert len(text.split()) <= 600
    assert "](docs/timeline.svg)" in text
