"""Plays lines of the findings and says what each gives: right, refused in which words, or wrong."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardcompile.testing import LocalRanks
from tests.findings.line import Line
from tests.support.sources import ROOT

SKIPPED = "not played: {} is not installed"


def as_rank(mesh: DeviceMesh, name: str) -> str:
    """What a line gives on this rank."""
    from tests.findings import LINES

    found = LINES[name]
    if found.ranks == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    try:
        assert found.run is not None
        found.run(mesh)
    except AssertionError as error:
        return f"WRONG: {_words(error)}"
    except Exception as error:
        told = f"{type(error).__name__}: {_words(error)}"
        as_expected = bool(found.refused) and re.search(found.refused, str(error), re.DOTALL)
        return f"refused: {told}" if as_expected else f"WRONG: {told}"
    return "WRONG: it is accepted" if found.refused else "right"


def _words(error: BaseException) -> str:
    return " ".join(str(error).split())


def judged(found: Line, verdict: str) -> str:
    """A verdict, with what is known about the line."""
    if not found.known or not verdict.startswith(("WRONG", "right")):
        return verdict
    if verdict == "right":
        return f"WRONG: it is right now, and {found.known} says that it is not"
    return f"a limit, as {found.known} says: {verdict.removeprefix('WRONG: ')}"


class Ranks:
    """Ranks for lines: one pool for each kind of them."""

    def __init__(self) -> None:
        self._pools: dict[tuple[int, bool], LocalRanks] = {}

    def play(self, found: Line) -> str:
        """What a line gives: one verdict for all ranks."""
        return judged(found, self._told(found))

    def _told(self, found: Line) -> str:
        if found.needs and importlib.util.find_spec(found.needs) is None:
            return SKIPPED.format(found.needs)
        kind = found.ranks, found.processes
        ranks = self._pools.get(kind) or LocalRanks(found.ranks, processes=found.processes)
        self._pools[kind] = ranks
        try:
            told = ranks(as_rank, found.name, timeout=400.0)
        except Exception as error:
            return f"WRONG: {_words(error)[-600:]}"
        wrong = [t for t in told if t.startswith("WRONG")]
        return wrong[0] if wrong else told[-1]

    def close(self) -> None:
        for ranks in self._pools.values():
            ranks.close()


def scenes(lines: list[Line]) -> Iterator[tuple[Line, str]]:
    """What lines give that are scenes of divergence: what the ranks are told that have not ended of themselves."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        command = [sys.executable, "-m", "tests.support.divergence_scenes", str(results), *(x.scene for x in lines)]
        subprocess.run(command, check=True, cwd=ROOT)
        found: dict[str, Any] = json.loads(results.read_text())
    for line in lines:
        ranks = found[line.scene]["ranks"]
        yield line, judged(line, _told(ranks))


def _told(ranks: list[dict[str, Any]]) -> str:
    waiting = [n for n, rank in enumerate(ranks) if rank["hung"]]
    killed = [n for n, rank in enumerate(ranks) if rank["status"] is not None and rank["status"] < 0]
    if waiting:
        return f"WRONG: ranks {waiting} wait"
    told = [r["error"] or "" for r in ranks]
    texts = [*told, *(r["shown"] for r in ranks)]
    shown = [m.group(0) for text in texts if (m := re.search(r"(Divergence|RowRange)Error: [^\n]*", text))]
    if not any(told):
        return "right" if not killed else f"WRONG: ranks {killed} died of signals"
    return f"refused: {shown[0]}" if shown else f"WRONG: {told}"
