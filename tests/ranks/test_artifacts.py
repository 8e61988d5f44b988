"""Code that one process compiles before a job serves all of its ranks, at any world size and partition."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import shardcompile as sc
from shardcompile import compat
from shardcompile.artifacts import ArtifactError, Artifacts, environment
from shardcompile.launch import RankFailedError, launch
from shardcompile.testing import rank, world_size
from tests.support.precompiled import Job, Outcome, net, points, record, run, step_of
from tests.support.tiers import needs_compiler


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made for 4 ranks by another process, whose cache no rank sees."""
    return precompiled(tmp_path_factory.mktemp("precompiled"), "build", "--world-size", "4")


def precompiled(folder: Path, build: str, *options: str) -> Path:
    command = [sys.executable, "-m", "shardcompile", "precompile", f"tests.support.precompiled:{build}"]
    command += ["--out", str(folder / "step.artifacts")]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}
    cwd = Path(__file__).parents[2]
    made = subprocess.run([*command, *options], capture_output=True, text=True, timeout=600, cwd=cwd, env=env)
    assert made.returncode == 0, made.stdout + made.stderr
    return folder / "step.artifacts"


def without_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Has every C++ compiler fail, and write that it was called to the file that is returned."""
    calls = folder / "calls"
    (folder / "bin").mkdir()
    for name in ("c++", "g++", "clang++", "gcc", "clang"):
        (folder / "bin" / name).write_text(f'#!/bin/sh\necho "$0 $@" >> "{calls}"\nexit 1\n')
        (folder / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder / "bin"), prepend=os.pathsep)
    return calls


@needs_compiler
@pytest.mark.parametrize("sizes", [[5, 6, 7, 8], [1, 0, 40]], ids=["4 ranks", "3 ranks, another partition"])
def test_ranks_compile_nothing(sizes: list[int], made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = without_compiler(tmp_path, monkeypatch)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    check(launch(run, Job(made, tmp_path, sizes), len(sizes), "gloo"), sizes)
    assert not calls.exists(), calls.read_text()


@needs_compiler
@pytest.mark.nightly
@pytest.mark.parametrize("sizes", [[5, 6], [1, 0, 40]], ids=["4 ranks", "6 ranks, another partition"])
def test_ranks_of_a_mesh_of_two_dims_compile_nothing(
    sizes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = "--world-size", "4", "--mesh", "2x2"
    path = precompiled(tmp_path, "build_grid", *grid)
    calls = without_compiler(tmp_path, monkeypatch)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    check(launch(run, Job(path, tmp_path, sizes, columns=2), 2 * len(sizes), "gloo"), sizes)
    assert not calls.exists(), calls.read_text()


@needs_compiler
@pytest.mark.nightly
def test_a_job_records_what_another_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    path, sizes = tmp_path / "step.artifacts", [2, 9, 0]
    launch(record, Job(path, tmp_path, [4, 3]), 2, "gloo")
    (tmp_path / "empty").mkdir()
    calls = without_compiler(tmp_path, monkeypatch)
    check(launch(run, Job(path, tmp_path / "empty", sizes), 3, "gloo"), sizes)
    assert not calls.exists(), calls.read_text()


@needs_compiler
@pytest.mark.nightly
@pytest.mark.parametrize("patch", ["portable_keys", "kept_libraries"])
def test_ranks_compile_without_this_patch(
    patch: str, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_compiler(tmp_path, monkeypatch)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with pytest.raises(RankFailedError, match="No working C\\+\\+ compiler"):
        launch(run, Job(made, tmp_path, [1, 7], without=patch), 2, "gloo")


def check(outcomes: Sequence[Outcome], sizes: list[int]) -> None:
    """Compares with plain PyTorch in one process."""
    model = net()
    loss = step_of(model)(points(sizes))
    loss.backward()
    for found in outcomes:
        assert found.is_used and (found.misses, found.hits) == (0, 2), found  # forward and backward
        torch.testing.assert_close(found.loss, loss.detach(), rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(found.gradients, [p.grad for p in model.parameters()], rtol=1e-10, atol=1e-13)


def written(folder: Path, graphs: dict[str, str]) -> Path:
    path = folder / f"{rank()}.artifacts"
    path.write_bytes(Artifacts(environment(), graphs, {}, b"").to_bytes())
    return path


@contextlib.contextmanager
def warnings() -> Iterator[list[str]]:
    """The warnings of this library on this rank."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("shardcompile")
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)


@pytest.mark.ranks(3)
def test_a_rank_that_cannot_use_them_keeps_all_from_it(tmp_path: Path) -> None:
    path = written(tmp_path, {})
    if rank() == 1:
        path.write_bytes(path.read_bytes()[:-9])
    with warnings() as said:
        assert not sc.load_artifacts(path)
    (message,) = said
    assert "ignored" in message and "rank 1: the file is damaged" in message


@pytest.mark.ranks(3)
def test_different_files_are_refused(tmp_path: Path) -> None:
    with warnings() as said:
        assert not sc.load_artifacts(written(tmp_path, {"graph": str(rank() // 2)}))
    assert len(said) == 1 and "the ranks have different files" in said[0]


@pytest.mark.ranks(3)
def test_a_rank_that_does_not_load_them_is_no_hang(tmp_path: Path) -> None:
    store = compat.store()
    timeout = store.timeout
    store.set_timeout(timedelta(seconds=1))
    try:
        if rank() < 2:
            with pytest.raises(ArtifactError, match=f"only 2 of {world_size()} ranks have called it"):
                sc.load_artifacts(tmp_path / "none")
    finally:
        store.set_timeout(timeout)
    dist.barrier()
    if rank() == 2:
        assert not sc.load_artifacts(tmp_path / "none")  # so that ranks have made the same calls
