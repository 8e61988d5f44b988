"""Patches are put in with the versions that need them, and with newer ones if what they replace has not changed."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import types
from collections.abc import Callable

import pytest
import torch

from shardcompile.compat import fingerprints, patch
from shardcompile.compat.fingerprints import KNOWN_VERSIONS, fingerprint, recorded, running_version
from shardcompile.compat.patch import Patch, put_in, replace
from tools.fingerprints import of_running_version
from tools.patches_table import PAGE, written


def test_those_of_this_version_are_recorded() -> None:
    """``python -m tools.fingerprints`` writes them."""
    known = recorded(".".join(map(str, running_version())))
    if not known:
        pytest.skip(f"none are recorded for torch {torch.__version__}")
    assert known == of_running_version()


def test_those_of_the_newest_version_are_recorded() -> None:
    assert len(recorded(KNOWN_VERSIONS[-1])) > 30


def _plain() -> Callable[[int], int]:
    def add(x: int) -> int:
        return x + 2

    return add


def _commented() -> Callable[[int], int]:
    def add(
        x: int,
    ) -> int:
        """Adds two."""
        # to any number
        return x + 2

    return add


def _another() -> Callable[[int], int]:
    def add(x: int) -> int:
        return x + 3

    return add


def test_layout_and_docstrings_do_not_count() -> None:
    assert fingerprint(_plain()) == fingerprint(_commented()) != fingerprint(_another())


@pytest.mark.parametrize(
    "versions, running, is_needed",
    [
        ("2.11 - 2.14", (2, 13), True),
        ("2.11 - 2.14", (2, 15), False),
        ("2.15", (2, 15), True),
        ("2.11", (2, 12), False),
        ("2.11 - 2.15", (2, 16), True),  # as with the newest that is known
        ("2.11 - 2.14", (2, 16), False),
    ],
)
def test_versions_that_need_a_patch(
    versions: str, running: tuple[int, int], is_needed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patch, "running_version", lambda: running)
    assert Patch("a", "b", "c", "d", versions, lambda stack: None).is_needed is is_needed


def _target() -> str:
    return "torch's"


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module of a version of torch that is not known, with a function that is, and one that has changed."""
    module = types.ModuleType("torch.some")
    module.same = module.changed = _target  # type: ignore[attr-defined]
    known = {"torch.some.same": fingerprint(_target), "torch.some.changed": "another"}
    monkeypatch.setattr(patch, "is_known", lambda: False)
    monkeypatch.setattr(patch, "running_version", lambda: (2, 16))
    monkeypatch.setattr(patch, "recorded", lambda version: known)
    monkeypatch.setattr(patch, "UNFIT", {})
    return module


def _patch(name: str, *places: tuple[types.ModuleType, str]) -> Patch:
    def put(stack: contextlib.ExitStack) -> None:
        for owner, attribute in places:
            replace(stack, owner, attribute, lambda _: lambda: "ours")

    return Patch(name, "torch.some", "Wrong values.", "a report", "2.11 - 2.15", put)


def test_a_newer_version_gets_what_fits(newer: types.ModuleType) -> None:
    with contextlib.ExitStack() as stack:
        put_in([_patch("fits", (newer, "same"))], stack)
        assert newer.same() == "ours" and not patch.UNFIT
    assert newer.same() == "torch's"


@pytest.mark.parametrize("place, why", [("changed", "has changed since torch"), ("gone", "no attribute 'gone'")])
def test_a_newer_version_does_not_get_what_does_not(newer: types.ModuleType, place: str, why: str) -> None:
    with contextlib.ExitStack() as stack:
        with pytest.warns(UserWarning, match=r"not known to work with torch 2\.16.*doctor"):
            put_in([_patch("half", (newer, "same"), (newer, place))], stack)
        assert why in patch.UNFIT["half"]
    assert newer.same() == "torch's"


def test_one_warning(newer: types.ModuleType, recwarn: pytest.WarningsRecorder) -> None:
    with contextlib.ExitStack() as stack:
        for name in ("first", "second", "first"):
            put_in([_patch(name, (newer, "changed"))], stack)
    assert len(recwarn) == 1 and patch.UNFIT.keys() == {"first", "second"}


def test_places_are_named() -> None:
    assert "torch.distributed.tensor.DTensor.__init__" in recorded(KNOWN_VERSIONS[-1])
    assert fingerprints.FILE.exists()


PRETENDED = """
import importlib.util, sys, warnings
import torch
torch.__version__ = "2.16.0"

def with_another_text(name, old, new):
    spec = importlib.util.find_spec(name)
    source = open(spec.origin).read()
    assert old in source
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    setattr(importlib.import_module(parent), child, module)
    renamed = source.replace(old, new).replace(f"import {new}", f"import {old} as {new}")
    exec(compile(renamed, spec.origin, "exec"), vars(module))
    return module

import torch._inductor.fx_passes
with_another_text("torch._inductor.fx_passes.reinplace", "compute_overlapping_tensors", "overlapping_tensors")
import torch._inductor.ir as ir, torch._inductor.sizevars as sizevars
fill, expect = ir.get_fill_order, sizevars.SizeVarAllocator.expect_true
ir.get_fill_order = lambda seq, shape_env=None: fill(seq, shape_env)
sizevars.SizeVarAllocator.expect_true = lambda self, expr: expect(self, expr)

with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    from shardcompile.doctor import report
    text, is_right = report()
print(text)
told = [str(w.message) for w in told if "is not known to work with torch 2.16" in str(w.message)]
assert len(told) == 1, told
assert is_right, text
left_out = {line.split()[0] for line in text.splitlines() if "): left out" in line}
assert left_out == {"overlaps_of_sizes", "fill_order_by_hint", "failed_checks"}, left_out
"""


@pytest.mark.nightly
@pytest.mark.skipif(running_version() != (2, 15), reason="a newer torch is compared with the newest that is known")
def test_a_torch_that_pretends_to_be_newer() -> None:
    subprocess.run([sys.executable, "-c", PRETENDED], check=True, timeout=300)


def test_the_page_lists_all_patches() -> None:
    assert PAGE.read_text() == written(), "python -m tools.patches_table writes it"
