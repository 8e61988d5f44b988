"""Runs the checks on every rank, keeps what they find, and prints it."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shardcompile.collectives.transport import device_type
from shardcompile.selftest.checks import CHECKS
from shardcompile.selftest.environment import Here
from shardcompile.testing import once


@dataclass(frozen=True)
class Job:
    """What every rank is told.

    Attributes:
        traced: see `shardcompile.selftest.checks.traced_collectives`.
        only: the beginnings of names of checks to run; all if empty.
    """

    traced: list[tuple[str, int]]
    only: tuple[str, ...] = ()


@dataclass(frozen=True)
class Finding:
    """What a check has found.

    Attributes:
        name: of the check.
        problem: what is wrong, on the first rank that has seen it; empty if nothing is.
        figure: what was measured, if anything.
        seconds: that it took.
    """

    name: str
    problem: str
    figure: str
    seconds: float


def run_checks(job: Job) -> list[Finding]:
    """Run the checks. Every rank of the default process group calls it, and gets the same.

    After a check in which ranks have failed while others went on, the process group may be of no use; what comes then
    is reported as not run.
    """
    device = device_type(dist.get_backend())
    here = Here(init_device_mesh(device, (dist.get_world_size(),)), job.traced)
    return list(_findings(here, job.only))


def _findings(here: Here, only: Sequence[str]) -> Iterator[Finding]:
    lost = ""
    for name, check in CHECKS.items():
        if only and not name.startswith(tuple(only)):
            continue
        if lost:
            yield Finding(name, f"not run, since the ranks have parted at: {lost}", "", 0.0)
            continue
        start, problem, figure = time.monotonic(), "", ""
        try:
            figure = check(here)
        except Exception as error:
            file = check.__code__.co_filename
            lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
            problem = f"{type(error).__name__} in {check.__name__}, lines {lines}: {error}"
        told: list[str] = [""] * here.ranks
        try:
            dist.all_gather_object(told, problem)
        except Exception as error:
            told, lost = [problem or f"{type(error).__name__}: {error}"], name
        once(torch.compiler.reset)
        first = next((f"rank {r}: {text}" for r, text in enumerate(told) if text), "")
        yield Finding(name, first, figure, time.monotonic() - start)


def print_table(findings: Sequence[Finding]) -> bool:
    """Print what was found; returns whether all of it is right."""
    width = max((len(f.name) for f in findings), default=0)
    for f in findings:
        print(f"{'WRONG' if f.problem else 'right'}  {f.name:{width}}  {f.seconds:6.1f} s  {f.figure}".rstrip())
        if f.problem:
            print("       " + f.problem.replace("\n", "\n       "))
    wrong = sum(bool(f.problem) for f in findings)
    print(f"{len(findings) - wrong} of {len(findings)} right, {sum(f.seconds for f in findings):.0f} s")
    return not wrong
