"""Ranks that do not do the same: an error on every rank that is left, soon, with the rank and the call in it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from tests.support.sources import ROOT

pytestmark = [pytest.mark.rank_processes, pytest.mark.alone]  # each scene has ranks of its own

SECONDS = 10.0
"""How soon after ranks differ each of them has to know."""

GATHER = "all_gather_v of float64, dim 0, shard sizes 3,0,4"
SUM = r"all_reduce \(sum\) of float64"
DIED = r"has died \(process \d+ of .* is gone\)"

TOLD = {
    "item_on_one_rank": rf"rank 0 has {SUM}, shape ;? ?.*rank [12] has {SUM}, shape 4,4",
    "format_on_one_rank_at_the_end": rf"rank [12] has come to its end; rank 0 waits for it in {SUM}",
    "full_tensor_on_one_rank": rf"number 14 .*rank 1 has {GATHER}",
    "raises_before": "rank 1 has raised ValueError: a bad batch; rank [02] waits for it in " + GATHER,
    "raises_where_the_store_is": "rank 0 has raised ValueError: a bad batch .*rank [12] waits for it in " + GATHER,
    "raises_after_a_long_time": "rank 1 has raised ValueError: a bad batch; rank [02] waits for it in " + GATHER,
    "exits": f"rank 2 has come to its end .*rank [01] waits for it in {GATHER}",
    "killed_before": f"rank 1 {DIED}; rank [02] waits for it in {GATHER}",
    "killed_where_the_store_is": f"(rank 0 {DIED}|store .* rank 0 or a launcher, has ended).*rank [12] waits .*in {GATHER}",
    "killed_inside_a_collective": f"rank 1 {DIED} .*rank [02] waits for it in {GATHER}",
    "killed_between_collectives": f"rank 2 {DIED} .*rank [01] waits for it in {GATHER}",
    "killed_while_saving": f"rank 2 {DIED}.*rank [01] waits for it in a collective that is not shardcompile's",
    "other_layout": rf"rank [01] has {GATHER}.*rank 2 has .*shard sizes 2,1,4",
    "other_dtype": rf"rank [01] has {GATHER}.*rank 2 has all_gather_v of float32",
    "other_dtype_of_a_sum": rf"rank [01] has {SUM}.*rank 2 has all_reduce \(sum\) of float32",
    "other_shape": rf"rank [01] has {GATHER}, other sizes 4.*rank 2 has {GATHER}, other sizes 5",
    "other_shape_of_a_sum": rf"rank [01] has {SUM}, shape 4.*rank 2 has {SUM}, shape 5",
    "other_branch": rf"rank 0 has {SUM}.*rank [12] has all_reduce \(max\)",
    "skipped_call": rf"rank 0 has {GATHER}.*rank 1 has {SUM}|rank 1 has {SUM}.*rank 2 has {GATHER}",
    "error_that_is_swallowed": rf"rank 0 has {GATHER}.*rank 1 has {SUM}|rank 1 has {SUM}.*rank 2 has {GATHER}",
    "index_out_of_range": "RowRangeError: aten.index.Tensor: index out of range: .*; rank 2 of the group has 9",
    "raises_while_tracing": f"rank 1 has raised ValueError: while tracing; rank [02] waits for it in {GATHER}",
    "raises_while_tracing_verified": "rank 1 has raised ValueError: while tracing; rank [02] waits for it",
    "killed_while_compiling": f"rank 1 {DIED}; rank [02] waits for it in {GATHER}",
    "killed_before_a_compiled_sum": f"rank 1 {DIED}.*; rank [02] waits for it in {SUM}, shape 4",
    "another_call_beside_a_compiled_sum": rf"rank 0 has {SUM}, shape 4.*rank 1 has {GATHER}|rank 1 has {GATHER}.*rank 2 has {SUM}",
    "other_shape_of_a_compiled_sum": rf"rank [01] has {SUM}, shape 4.*rank 2 has {SUM}, shape 5",
    "other_shape_of_a_sum_that_was_seen": rf"number 6 .*rank [01] has {SUM}, shape 4.*rank 2 has {SUM}, shape 5",
    "other_branch_compiled": rf"rank 0 has all_to_all_v.*rank 1 has {GATHER}|rank 1 has {GATHER}.*rank 2 has all_to_all_v",
}
"""By scene, what each rank is told that has not ended of itself."""

FINE = ("two_threads", "slow_in_python", "slow_in_a_kernel", "one_rank_alone_does_what_needs_no_other")
"""Scenes in which nothing is wrong."""

BY_DAY = (
    "item_on_one_rank",
    "raises_before",
    "killed_where_the_store_is",
    "killed_inside_a_collective",
    "killed_while_saving",
    "other_shape_of_a_sum",
    "skipped_call",
    "other_shape_of_a_compiled_sum",
    "slow_in_python",
)


def played(names: list[str], folder: Path) -> dict[str, Any]:
    results = folder / "results.json"
    environment = os.environ | {"SCENE_FOLDER": str(folder)}
    command = [sys.executable, "-m", "tests.support.divergence_scenes", str(results), *names]
    subprocess.run(command, check=True, timeout=400, cwd=ROOT, env=environment)
    found: dict[str, Any] = json.loads(results.read_text())
    return found | {"folder": folder}


@pytest.fixture(scope="module")
def by_day(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return played(list(BY_DAY), tmp_path_factory.mktemp("scenes"))


@pytest.fixture(scope="module")
def at_night(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return played([n for n in (*TOLD, *FINE) if n not in BY_DAY], tmp_path_factory.mktemp("scenes"))


def check(name: str, found: dict[str, Any], may_exit: bool = False) -> None:
    """Every rank that has not ended of itself is told why, by an error, or by what it prints before it exits."""
    assert not any(rank["hung"] for rank in found["ranks"]), found
    if name in FINE:
        assert [rank["status"] for rank in found["ranks"]] == [0, 0, 0], found
        return
    told = 0
    for number, rank in enumerate(found["ranks"]):
        if may_exit and rank["status"] == 70:
            assert re.search(TOLD[name], rank["shown"]), f"rank {number}: {rank}"
            told += 1
            continue
        ended_itself = rank["error"] is None or rank["error"].startswith(("ValueError", "SystemExit"))
        if ended_itself:
            continue
        assert rank["status"] == 1, f"rank {number} has not ended with an error: {rank}"
        # Where a collective that is torch's own raises, what we know is added to that.
        text = rank["error"] if rank["error"].startswith("DivergenceError") else rank["shown"]
        assert re.search(TOLD[name], text), f"rank {number}: {text}"
        assert rank["time"] - found["event"] <= SECONDS, f"rank {number}: {rank['time'] - found['event']:.1f} s"
        told += 1
    assert told, found


@pytest.mark.parametrize("name", BY_DAY)
def test_every_rank_is_told(name: str, by_day: dict[str, Any]) -> None:
    check(name, by_day[name])


def test_a_rank_that_is_killed_while_it_saves_leaves_the_checkpoint_before_it(by_day: dict[str, Any]) -> None:
    folder = by_day["folder"]
    whole = torch.load(folder / "whole.pt")
    target = {"x": torch.zeros_like(whole)}
    dcp.load(target, checkpoint_id=folder / "1", no_dist=True)
    assert torch.equal(target["x"], whole)
    assert list((folder / "2").glob("*.distcp")), "it was killed too early to show anything"
    with pytest.raises(CheckpointException, match="metadata"):
        dcp.load(target, checkpoint_id=folder / "2", no_dist=True)


@pytest.mark.nightly
@pytest.mark.parametrize("name", [n for n in (*TOLD, *FINE) if n not in BY_DAY])
def test_every_rank_is_told_in_other_scenes(name: str, at_night: dict[str, Any]) -> None:
    check(name, at_night[name])


QUEUED = [n for n in (*TOLD, *FINE) if n != "two_threads"]
"""Where calls return before they are done, it is not seen which thread makes the next."""

ENDED_BY_GLOO = ("item_on_one_rank", "other_dtype_of_a_sum", "killed_between_collectives")
"""A message of another size than expected ends the process, and the queue may be empty where a rank is killed."""


def queued(tmp_path_factory: pytest.TempPathFactory, names: list[str], **settings: str) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        return played(names, tmp_path_factory.mktemp("scenes"))


@pytest.fixture(scope="module")
def over_nccl(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return queued(tmp_path_factory, QUEUED, SCENE_BACKEND="nccl", SHARDCOMPILE_SHARE_GPUS="1")


@pytest.fixture(scope="module")
def as_over_nccl(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return queued(tmp_path_factory, [n for n in QUEUED if n not in ENDED_BY_GLOO], SCENE_QUEUED="1")


@pytest.mark.nightly
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", QUEUED)
def test_every_rank_is_told_over_nccl(name: str, over_nccl: dict[str, Any]) -> None:
    check(name, over_nccl[name], may_exit=True)


@pytest.mark.nightly
@pytest.mark.parametrize("name", [n for n in QUEUED if n not in ENDED_BY_GLOO])
def test_every_rank_is_told_where_calls_are_queued(name: str, as_over_nccl: dict[str, Any]) -> None:
    check(name, as_over_nccl[name], may_exit=True)
