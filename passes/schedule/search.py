"""The best of several schedules within a limit of memory."""

from __future__ import annotations

import heapq
import math
from dataclasses import replace

from shardcompile.passes.schedule.outline import Outline, Plan, Schedule
from shardcompile.passes.schedule.scheduler import Scheduler
from shardcompile.passes.schedule.tasks import START, Tasks

EARLINESS = (math.inf, 1.0)
"""How much earlier a collective is started than just in time, in multiples of the time that it takes."""

EARLINESS_OF_LEADING = (2.0, 8.0, 32.0)
"""The same where fillers are left for gaps: the compute gets further ahead then, in its order."""

WINDOWS = (4, 16, 64, 256)
"""How far tasks may overtake others, in places of the original order, where the compute is reordered as well."""

JUSTIFICATIONS = 3
"""How often the best schedule is justified at most (see `search`)."""

AHEAD = (math.inf, 0.1, 0.01)
"""How much earlier than in the justified schedule work may be done that takes memory, in multiples of its time."""

QUICK_WINDOW, QUICK_EARLINESS = 16, 8.0
"""Those of them that are taken where a few attempts have to do."""

NARROWER = (1.0, 0.985, 0.96, 0.9)
"""The limit that a scheduler is given, relative to the real one: what it decides early can take more than the curve
says.
"""

CLOSE = 1e-3
"""A schedule so close to the bound, relative to it, ends the search."""


def search(tasks: Tasks, limit: float, bound: float) -> Schedule:
    """The fastest schedule that was found within a limit of memory; if none is within it, the one with least memory.

    First the compute keeps its order. Then it is reordered within windows, the longest path first; tasks that no later
    one waits for fill gaps, or do not. At last schedules are justified: such of the longest path first that know no
    limit, and the best. All tasks are put as late as they could be without anything ending later, and those that had to
    be first are taken first (Valls, Ballestin, Quintanilla, "Justification and RCPSP: a technique that pays", 2005).

    Args:
        tasks: of a graph.
        limit: bytes.
        bound: seconds that no schedule can beat.
    """
    finder = _Finder(Outline(tasks), limit, bound)
    outline = finder.outline
    place, needed = _places(tasks), _needed(outline)
    for earliness in EARLINESS:
        finder.attempt(Plan(place, needed, due_times(outline, earliness), 1, limit))
    urgent = [-tail for tail in outline.tails]
    for leads, levels in ((True, EARLINESS_OF_LEADING), (False, EARLINESS[:1])):
        for earliness in levels:
            finder.widen(Plan(urgent, needed, due_times(outline, earliness), 1, limit, leads))
    free = Plan(urgent, needed, due_times(outline, math.inf), len(tasks.nodes), math.inf)
    for leads in (False, True):
        if not finder.done:
            plan = replace(free, leads=leads)
            finder.justify(plan, Scheduler(outline, plan).run())
    for _ in range(JUSTIFICATIONS):
        if finder.done or not finder.justify(finder.plan, finder.best):
            break
    return finder.best


class _Finder:
    """Keeps the best schedule."""

    def __init__(self, outline: Outline, limit: float, bound: float) -> None:
        self.outline, self.limit, self.bound = outline, limit, bound
        self.plan = Plan([], [], [], 1, limit)
        self.best = Schedule([], math.inf, 0, [])

    @property
    def done(self) -> bool:
        """Whether it is close enough to the bound."""
        return self.best.peak_bytes <= self.limit and self.best.total <= self.bound * (1 + CLOSE)

    def attempt(self, plan: Plan) -> bool:
        """Schedule by a plan, with less memory where it takes too much; whether that is the best so far."""
        if self.done:
            return False
        found = self._within(plan)
        if self.best.order and self._score(found) >= self._score(self.best):
            return False
        self.best, self.plan = found, plan
        return True

    def _within(self, plan: Plan) -> Schedule:
        # What takes longer than the best one is none, if that keeps to the limit.
        until = self.best.total if self.best.order and self.best.peak_bytes <= self.limit else math.inf
        for share in NARROWER:
            found = Scheduler(self.outline, replace(plan, limit=self.limit * share, until=until)).run()
            if found.peak_bytes <= self.limit or (self.best.order and found.total >= self.best.total):
                break  # with less memory it would be no faster
        return found

    def widen(self, plan: Plan) -> None:
        """Try windows, from the narrowest to where it gets no better, and one between the last two."""
        best = 0
        for window in WINDOWS:
            if self.attempt(replace(plan, window=window)):
                best = window
            elif best:
                break
        if best:
            self.attempt(replace(plan, window=2 * best))

    def justify(self, plan: Plan, found: Schedule) -> bool:
        """Schedule by the latest times of a schedule, which a plan has led to; whether that is the best so far."""
        late, takes = latest(self.outline.tasks, found), self.outline.takes
        plan = replace(plan, rank=late, urgency=late, window=len(late), limit=self.limit)
        best = False
        for ahead in AHEAD:
            release = [t - ahead * found.total if takes[n] else -math.inf for n, t in enumerate(late)]
            best |= self.attempt(replace(plan, release=release))
        return best

    def _score(self, found: Schedule) -> tuple[float, float, float]:
        over = max(found.peak_bytes - self.limit, 0)
        return over, found.total, found.peak_bytes


def quick_plans(outline: Outline, limit: float) -> list[Plan]:
    """A few plans that tell graphs apart: the compute in its order, and the longest path first.

    Args:
        outline: of the tasks.
        limit: bytes.
    """
    return [quick_plan(outline, limit, longest_first) for longest_first in (False, True)]


def quick_plan(outline: Outline, limit: float, longest_first: bool) -> Plan:
    """One of `quick_plans`."""
    needed = _needed(outline)
    if not longest_first:
        return Plan(_places(outline.tasks), needed, due_times(outline, math.inf), 1, limit)
    urgent = [-tail for tail in outline.tails]
    return Plan(urgent, needed, due_times(outline, QUICK_EARLINESS), QUICK_WINDOW, limit, leads=True)


def due_times(outline: Outline, earliness: float) -> list[float]:
    """By task: how far the compute has to have come before it may start, if it is a collective that grows.

    Args:
        outline: of the tasks.
        earliness: how much earlier than just in time that is, in multiples of the collective's own time.
    """
    due = [-math.inf] * len(outline.tasks.nodes)
    if not math.isinf(earliness):
        for start, place in outline.first_use.items():
            due[start] = outline.clock[place] - (1 + earliness) * outline.tasks.price[start].seconds
    return due


def _places(tasks: Tasks) -> list[float]:
    return [float(n) for n in range(len(tasks.nodes))]


def _needed(outline: Outline) -> list[float]:
    needed = [0.0] * len(outline.tasks.nodes)
    for start, place in outline.first_use.items():
        needed[start] = float(place)
    return needed


def latest(tasks: Tasks, schedule: Schedule) -> list[float]:
    """By task: when it would begin if all were put as late as they could be, nothing ending later than the schedule.

    Goes back through time, and takes what may end last. Compute and collectives may get another order by that: what a
    collective waits for comes before work that a later one waits for.

    Args:
        tasks: of a graph.
        schedule: of them.
    """
    found = [0.0] * len(tasks.nodes)
    place = {n: i for i, n in enumerate(schedule.order)}
    until = [schedule.total] * len(tasks.nodes)
    left = [len(after) for after in tasks.after]
    ready = [(-schedule.total, -place[n], n) for n, count in enumerate(left) if not count]
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
                heapq.heappush(ready, (-until[b], -place[b], b))
    return found
