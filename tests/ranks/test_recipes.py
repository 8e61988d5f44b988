"""The recipes of docs/recipes.md train as plain PyTorch does in one process, in float64."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.pages import DOCS, code_blocks, run_blocks

SHARDS = code_blocks(DOCS / "recipes.md")
COMMON, HEADINGS = "The model and the data", [shard.heading for shard in SHARDS if shard.language == "python"]
PROCESSES = ["DDP", "Lightning", "Accelerate"]  # one state of torch's for all threads
THREADS = [heading for heading in HEADINGS if heading not in [COMMON, *PROCESSES]]


def of(heading: str, backend: str = "aot_eager") -> Any:
    """The shards of a section; by aot_eager, which compiles in a tenth of the time."""
    found = [shard for shard in SHARDS if shard.heading == heading]
    return [replace(shard, source=shard.source.replace('"shardcompile"', f'"{backend}"')) for shard in found]


@pytest.fixture
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def losses_of_plain_pytorch(names: dict[str, Any], model: nn.Module, at_once: int, clip: bool) -> list[list[float]]:
    """What each cloud's loss is in the three steps of training on whole clouds, in one process.

    Args:
        names: of the common section.
        model: with its first parameters.
        at_once: clouds in a step; the gradient is the mean of theirs.
        clip: whether gradients are clipped.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(3):
        clouds = [names["cloud"](at_once * step + i) for i in range(at_once)]
        now = [(model(points) - target).square().mean() for points, target in clouds]
        (sum(now) / at_once).backward()  # type: ignore[union-attr]
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append([loss.item() for loss in now])
    return losses


def check(heading: str, backend: str = "aot_eager") -> None:
    names = run_blocks([*of(COMMON, backend), *of(heading, backend)])
    at_once, mine = (2, names["mesh"].get_local_rank("data")) if heading in ("DDP", "FSDP2") else (1, 0)
    torch.manual_seed(0)
    plain = names["Perceptron" if "Perceptron" in names else "Surrogate"]()
    expected = losses_of_plain_pytorch(names, plain, at_once, clip="Perceptron" not in names)
    torch.testing.assert_close(names["losses"], [losses[mine] for losses in expected])
    assert names["losses"][0] != names["losses"][2]


def test_no_recipe_is_left_out() -> None:
    assert len(THREADS) >= 4 and set(HEADINGS) == {COMMON, *PROCESSES, *THREADS}


@pytest.mark.ranks(4, processes=False)
@pytest.mark.parametrize("heading", THREADS)
def test_recipe(heading: str, float64: None) -> None:
    check(heading)


@pytest.mark.ranks(4, timeout=300)
@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("heading", PROCESSES)
def test_recipe_on_processes(heading: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if heading != "DDP":
        pytest.importorskip(heading.lower())
    # What torchrun sets.
    here, world = str(dist.get_rank()), str(dist.get_world_size())
    torchrun = {"RANK": here, "LOCAL_RANK": here, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    for name, value in (torchrun | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29513"}).items():
        monkeypatch.setitem(os.environ, name, value)
    torch.set_default_dtype(torch.float64)
    try:
        check(heading, backend)
    finally:
        torch.set_default_dtype(torch.float32)
