"""Searches for the best of several list schedules within a memory limit."""

from __future__ import annotations

import heapq
import math
from dataclasses import replace

from shardcompile.passes.schedule.outline import Outline, Schedule, SchedulingPolicy
from shardcompile.passes.schedule.scheduler import Scheduler
from shardcompile.passes.schedule.tasks import START, Tasks

EARLINESS = (2.0, 8.0)
"""How much earlier than just in time a collective is started, in multiples of its own time, where fillers are left for
gaps: the compute then gets ahead of its order. Elsewhere it is started as early as memory allows.
"""

WINDOWS = (4, 16, 64, 256)
"""How far tasks may overtake others, in positions of the original order, where the compute is reordered as well."""

RELEASE_LEADS = (math.inf, 0.01)
"""How much earlier than in the justified schedule memory-allocating work may run, as a fraction of its total time."""

QUICK_WINDOW, QUICK_EARLINESS = 16, 8.0
"""The window and the earliness that are taken where only a few attempts are made."""

NARROWER = (1.0, 0.9)
"""Limits for the scheduler, relative to the real one: early decisions can take more memory than the curve says."""

CLOSE = 1e-3
"""A schedule whose time exceeds the bound by no more than this fraction ends the search."""


def search(tasks: Tasks, limit: float, bound: float) -> Schedule:
    """Returns the fastest schedule found within the memory limit; if none is within it, the one of least memory.

    First the compute keeps its order. Then it is reordered within windows, by the longest path first; tasks that no
    later one waits for fill gaps, or do not. Last, a schedule by the longest path first that ignores the limit is
    justified: all tasks are shifted as late as they could be without anything ending later, and those that had to be
    first are taken first (Valls, Ballestin, Quintanilla, "Justification and RCPSP: a technique that pays", 2005).

    Args:
        tasks: of a graph.
        limit: bytes.
        bound: seconds that no schedule can beat.
    """
    finder = _Finder(Outline(tasks), limit, bound)
    outline = finder.outline
    needed, at_once = _first_uses(outline), due_times(outline, math.inf)
    finder.attempt(SchedulingPolicy(_positions(tasks), needed, at_once, 1, limit))
    urgent = [-tail for tail in outline.tails]
    for earliness in EARLINESS:
        finder.widen(SchedulingPolicy(urgent, needed, due_times(outline, earliness), 1, limit, leads=True))
    longest_first = SchedulingPolicy(urgent, needed, at_once, 1, limit)
    finder.widen(longest_first)
    if not finder.done:
        finder.justify(longest_first)
    return finder.best


class _Finder:
    """Makes schedules and keeps the best one."""

    def __init__(self, outline: Outline, limit: float, bound: float) -> None:
        self.outline, self.limit, self.bound = outline, limit, bound
        self.best = Schedule([], math.inf, 0, [])

    @property
    def done(self) -> bool:
        """Whether the best schedule is within the limit and close enough to the bound."""
        return self.best.peak_bytes <= self.limit and self.best.total <= self.bound * (1 + CLOSE)

    def attempt(self, policy: SchedulingPolicy) -> bool:
        """Schedules by a policy, with less memory where it exceeds the limit; returns whether it is the best so far."""
        is_better = False
        for yields in () if self.done else self.outline.yield_variants:
            found = self._schedule_within_limit(replace(policy, yields=yields))
            if not self.best.order or self._score(found) < self._score(self.best):
                self.best, is_better = found, True
        return is_better

    def _schedule_within_limit(self, policy: SchedulingPolicy) -> Schedule:
        # Where the best one keeps to the limit, a slower schedule is no candidate.
        until = self.best.total if self.best.order and self.best.peak_bytes <= self.limit else math.inf
        for share in NARROWER:
            found = Scheduler(self.outline, replace(policy, limit=self.limit * share, until=until)).run()
            if found.peak_bytes <= self.limit or (self.best.order and found.total >= self.best.total):
                break  # with less memory it would be no faster
        return found

    def widen(self, policy: SchedulingPolicy) -> None:
        """Tries windows, from the narrowest on until the schedule gets no better."""
        is_better = False
        for window in WINDOWS:
            if self.attempt(replace(policy, window=window)):
                is_better = True
            elif is_better:
                break

    def justify(self, policy: SchedulingPolicy) -> None:
        """Schedules by the latest times of the schedule that a policy leads to without a window and a limit."""
        tasks, takes = self.outline.tasks, self.outline.takes
        policy = replace(policy, window=len(tasks.nodes))
        found = Scheduler(self.outline, replace(policy, limit=math.inf)).run()
        late = latest(tasks, found)
        for lead in RELEASE_LEADS:
            release = [t - lead * found.total if takes[n] else -math.inf for n, t in enumerate(late)]
            self.attempt(replace(policy, rank=late, urgency=late, release=release))

    def _score(self, found: Schedule) -> tuple[float, float, float]:
        over = max(found.peak_bytes - self.limit, 0)
        return over, found.total, found.peak_bytes


def quick_policies(outline: Outline, limit: float) -> list[SchedulingPolicy]:
    """Returns a few policies to compare graphs by: the compute in its order, and the longest path first.

    Args:
        outline: of the tasks.
        limit: bytes.
    """
    return [quick_policy(outline, limit, longest_first) for longest_first in (False, True)]


def quick_policy(outline: Outline, limit: float, longest_first: bool) -> SchedulingPolicy:
    """Returns one of `quick_policies`."""
    needed = _first_uses(outline)
    if not longest_first:
        return SchedulingPolicy(_positions(outline.tasks), needed, due_times(outline, math.inf), 1, limit)
    urgent = [-tail for tail in outline.tails]
    return SchedulingPolicy(urgent, needed, due_times(outline, QUICK_EARLINESS), QUICK_WINDOW, limit, leads=True)


def due_times(outline: Outline, earliness: float) -> list[float]:
    """Returns, for each collective that grows, the time of the compute before which it may not start.

    Args:
        outline: of the tasks.
        earliness: how much earlier than just in time that is, in multiples of the collective's own time.
    """
    due = [-math.inf] * len(outline.tasks.nodes)
    if not math.isinf(earliness):
        for start, place in outline.first_use.items():
            due[start] = outline.clock[place] - (1 + earliness) * outline.tasks.price[start].seconds
    return due


def _positions(tasks: Tasks) -> list[float]:
    return [float(n) for n in range(len(tasks.nodes))]


def _first_uses(outline: Outline) -> list[float]:
    needed = [0.0] * len(outline.tasks.nodes)
    for start, place in outline.first_use.items():
        needed[start] = float(place)
    return needed


def latest(tasks: Tasks, schedule: Schedule) -> list[float]:
    """Returns, for each task, when it would begin if all tasks were as late as possible.

    Nothing ends later than in the schedule. The pass over the tasks goes back through time and takes the task that may
    end last. The order of compute and collectives may change: what a collective waits for comes before work that a
    later one waits for.

    Args:
        tasks: of a graph.
        schedule: of them.
    """
    found = [0.0] * len(tasks.nodes)
    position = {n: i for i, n in enumerate(schedule.order)}
    until = [schedule.total] * len(tasks.nodes)
    left = [len(after) for after in tasks.after]
    ready = [(-schedule.total, -position[n], n) for n, count in enumerate(left) if not count]
    heapq.heapify(ready)
    compute = schedule.total
    groups = dict.fromkeys(tasks.stream.values(), schedule.total)
    while ready:
        _, _, n = heapq.heappop(ready)
        if tasks.kind[n] == START:
            group = tasks.stream[n]
            groups[group] = min(until[n], groups[group]) - tasks.price[n].seconds
            found[n] = groups[group] - tasks.seconds[n]
        else:
            compute = found[n] = min(until[n], compute) - tasks.seconds[n]
        for b in tasks.before[n]:
            until[b] = min(until[b], found[n])
            left[b] -= 1
            if not left[b]:
                heapq.heappush(ready, (-until[b], -position[b], b))
    return found
