"""The best of several schedules within a limit of memory."""

from __future__ import annotations

import math
from collections.abc import Iterator

from shardcompile.passes.scheduler import Outline, Plan, Schedule, Scheduler
from shardcompile.passes.tasks import START, Tasks

HASTE = (math.inf, 2.0, 0.5)
"""How much earlier a collective is started than just in time, in multiples of the time that it takes."""

WINDOWS = (16, 64, 256, 1024)
"""How far tasks may overtake others, in places of the original order, where the compute is reordered as well."""

QUICK_WINDOW = 64
"""The one of them that is taken where a few attempts have to do."""

NARROWER = (1.0, 0.96, 0.9)
"""What a scheduler is told the limit is, relative to it: what it decides early can take more than the curve says."""

CLOSE = 1e-3
"""A schedule that is so close to the bound, relative to it, is good enough to look no further."""


def search(tasks: Tasks, limit: float, bound: float) -> Schedule:
    """The fastest schedule that was found within a limit of memory; if none is within it, the one with least memory.

    Args:
        tasks: of a graph.
        limit: bytes.
        bound: seconds that no schedule can beat.
    """
    finder = _Finder(Outline(tasks), limit)
    for plan in _plans(finder.outline, limit):
        finder.attempt(plan)
        if finder.fits and finder.best.total <= bound * (1 + CLOSE):
            break
    return finder.best


class _Finder:
    """Keeps the best schedule."""

    def __init__(self, outline: Outline, limit: float) -> None:
        self.outline, self.limit = outline, limit
        self.best: Schedule | None = None

    @property
    def fits(self) -> bool:
        return self.best is not None and self.best.peak_bytes <= self.limit

    def attempt(self, plan: Plan) -> None:
        for share in NARROWER:
            told = Plan(plan.rank, plan.urgency, plan.haste, plan.window, self.limit * share)
            found = Scheduler(self.outline, told).run()
            if self.best is None or self._score(found) < self._score(self.best):
                self.best = found
            if found.peak_bytes <= self.limit or (self.fits and found.total >= self.best.total):
                break  # with less memory it would be no faster

    def _score(self, found: Schedule) -> tuple[float, float, float]:
        over = max(found.peak_bytes - self.limit, 0)
        return over, found.total, found.peak_bytes


def _plans(outline: Outline, limit: float) -> Iterator[Plan]:
    place = [float(n) for n in range(len(outline.tasks.nodes))]
    needed = _needed(outline)
    for haste in HASTE:
        yield Plan(place, needed, haste, 1, limit)
    urgent = [-tail for tail in tails(outline.tasks)]
    count = len(outline.tasks.nodes)
    for window in (*WINDOWS, count):
        yield Plan(urgent, urgent, math.inf, window, limit)
    for window in (*WINDOWS, count):
        yield Plan(place, needed, math.inf, window, limit)


def quick_plans(outline: Outline, limit: float) -> list[Plan]:
    """A few plans that tell graphs apart: the compute in its order, and the longest path first.

    Args:
        outline: of the tasks.
        limit: bytes.
    """
    place = [float(n) for n in range(len(outline.tasks.nodes))]
    urgent = [-tail for tail in tails(outline.tasks)]
    return [
        Plan(place, _needed(outline), math.inf, 1, limit),
        Plan(urgent, urgent, math.inf, QUICK_WINDOW, limit),
    ]


def _needed(outline: Outline) -> list[float]:
    needed = [0.0] * len(outline.tasks.nodes)
    for start, place in outline.first_use.items():
        needed[start] = float(place)
    return needed


def tails(tasks: Tasks) -> list[float]:
    """By task: the least time from its start to the end of everything, packing and travelling included."""
    found = [0.0] * len(tasks.nodes)
    for n in range(len(tasks.nodes) - 1, -1, -1):
        after = max((found[a] for a in tasks.after[n]), default=0.0)
        travel = tasks.price[n].seconds if tasks.kind[n] == START else 0.0
        found[n] = after + tasks.seconds[n] + travel
    return found
