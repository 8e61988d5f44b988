"""``python -m shardcompile doctor``: what it says of this machine, and what it exits with."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardcompile import doctor
from shardcompile.__main__ import main
from shardcompile.compat.patch import leave_out
from shardcompile.compat.patches import all_patches
from shardcompile.testing import LocalRanks


def test_a_machine_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    with leave_out("parts_own_no_memory"):
        assert main(["doctor"]) == 0
    told = capsys.readouterr().out
    assert f"torch {torch.__version__}" in told and "backends: gloo" in told
    assert "compiled step: right, forward and backward" in told
    listed = [line.split(" ")[2] for line in told.splitlines() if line.startswith("  ") and "): " in line]
    assert listed == [patch.name for patch in all_patches()]
    assert "  parts_own_no_memory (bug): left out\n    Without it: A result that is computed" in told


def test_wrong_values(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    right = doctor._Model.forward

    def wrong(model: doctor._Model, x: Tensor) -> Tensor:
        out = right(model, x)
        return out + 1 if type(x) is Tensor and not torch.compiler.is_compiling() else out

    monkeypatch.setattr(doctor._Model, "forward", wrong)
    assert main(["doctor"]) == 1
    assert "compiled step: FAILED" in capsys.readouterr().out


def test_a_failure(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> None:
        raise RuntimeError("no ranks here")

    monkeypatch.setattr(LocalRanks, "__call__", fails)
    assert main(["doctor"]) == 1
    assert "compiled step: FAILED, RuntimeError: no ranks here" in capsys.readouterr().out
