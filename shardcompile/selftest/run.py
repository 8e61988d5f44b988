"""Runs the checks on every rank, collects their findings, and prints them."""

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
from shardcompile.selftest.environment import Environment
from shardcompile.testing import once


@dataclass(frozen=True)
class Job:
    """The argument of `run_checks`, the same on every rank.

    Attributes:
        traced: see `shardcompile.selftest.checks.traced_collectives`.
        only: prefixes of the names of the checks to run; empty for all checks.
    """

    traced: list[tuple[str, int]]
    only: tuple[str, ...] = ()


@dataclass(frozen=True)
class Finding:
    """The result of a check.

    Attributes:
        name: the name of the check.
        problem: the error of the first rank that has one; empty if the check passed.
        figure: the measurements, if any.
        seconds: the duration.
    """

    name: str
    problem: str
    figure: str
    seconds: float


def run_checks(job: Job) -> list[Finding]:
    """Runs the checks. Every rank of the default process group calls this, and gets the same findings.

    If some ranks fail a check while others go on, the process group may be unusable. Later checks are then reported as
    not run.
    """
    device = device_type(dist.get_backend())
    env = Environment(init_device_mesh(device, (dist.get_world_size(),)), job.traced)
    return list(_findings(env, job.only))


def _findings(env: Environment, only: Sequence[str]) -> Iterator[Finding]:
    lost = ""
    for name, check in CHECKS.items():
        if only and not name.startswith(tuple(only)):
            continue
        if lost:
            yield Finding(name, f"not run, since the ranks are out of step after: {lost}", "", 0.0)
            continue
        start, problem, figure = time.monotonic(), "", ""
        try:
            figure = check(env)
        except Exception as error:
            file = check.__code__.co_filename
            lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
            problem = f"{type(error).__name__} in {check.__name__}, lines {lines}: {error}"
        problems: list[str] = [""] * env.ranks
        try:
            dist.all_gather_object(problems, problem)
        except Exception as error:
            problems, lost = [problem or f"{type(error).__name__}: {error}"], name
        once(torch.compiler.reset)
        first = next((f"rank {r}: {text}" for r, text in enumerate(problems) if text), "")
        yield Finding(name, first, figure, time.monotonic() - start)


def print_table(findings: Sequence[Finding]) -> bool:
    """Prints the findings, and returns whether all checks passed."""
    width = max((len(f.name) for f in findings), default=0)
    for f in findings:
        print(f"{'WRONG' if f.problem else 'right'}  {f.name:{width}}  {f.seconds:6.1f} s  {f.figure}".rstrip())
        if f.problem:
            print("       " + f.problem.replace("\n", "\n       "))
    wrong = sum(bool(f.problem) for f in findings)
    print(f"{len(findings) - wrong} of {len(findings)} right, {sum(f.seconds for f in findings):.0f} s")
    return not wrong
