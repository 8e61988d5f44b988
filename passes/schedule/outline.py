"""What all schedules of the same tasks share (`Outline`), what a scheduler decides by (`Plan`), and its result
(`Schedule`).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardcompile.passes.schedule.tasks import START, WAIT, WORK, Tasks

LEADS = 4.0
"""A collective leads if the work after it takes at least so many times its own time: then the path through it
matters.
"""

SMALL_BYTES = 1 << 16
"""A result that takes no more memory than that may be there as early as it likes, such as a table of counts."""


@dataclass(frozen=True)
class Plan:
    """What a scheduler decides by.

    Attributes:
        rank: by task: of two at work that could be next, the one of lower rank is taken.
        urgency: by task: the same, for the collectives of one group.
        due: by task: a collective that grows does not start before the compute has come so far in `Outline.clock`,
            of those that lead.
        window: a task at work may overtake one less of those that are left, of those that lead.
        limit: bytes that should be held at most.
        leads: whether tasks that no later work waits for, such as the gradients of weights, fill gaps: they run when
            nothing else can, or when memory is scarce. Otherwise all tasks lead.
        release: by task at work: it is not taken earlier; it may be late all the same. None if all may be.
        until: a schedule that ends later is of no use: it is given up as soon as it is sure to.
        most: the same of one that holds more bytes.
    """

    rank: Sequence[float]
    urgency: Sequence[float]
    due: Sequence[float]
    window: int
    limit: float
    leads: bool = False
    release: Sequence[float] | None = None
    until: float = math.inf
    most: float = math.inf


@dataclass(frozen=True)
class Schedule:
    """An order of tasks and what it comes to.

    Attributes:
        order: all tasks; none if it was given up, see `Plan`.
        total: seconds until everything has ended, or what they are at least.
        peak_bytes: the most that is held, or what that is at least.
        begins: by task, when its compute begins, or its collective.
    """

    order: list[int]
    total: float
    peak_bytes: int
    begins: list[float]


class Outline:
    """What many schedules of the same tasks have in common.

    Attributes:
        prepares: tasks on the compute stream that need nothing but inputs, and that only collectives need, such as the
            cast of a weight that is gathered: they run when their collective starts, whatever their place. They may be
            results as well, as casts are that are saved for the backward pass.
        work: the other tasks on the compute stream, in order; waits are not among them.
        work_place: by task at work: its place among them.
        fillers: those of them that no collective leads from to much later work.
        results: those of them that compute nothing, and that only the end reads: nobody waits for them.
        clock: by place: when it would begin if nothing held compute up; at last, when all would have ended.
        first_use: by start: the place of the first task at work that needs its result.
        grows: by start: whether it holds more than it frees, small results not counted.
        curve: by place: bytes held while that task runs, if every collective runs just when it is needed.
        tails: by task, see `tails`.
        missing: by task: how many it has to follow, `prepares` not counted.
        seconds: of all tasks on the compute stream.
        busy: by group: seconds of its collectives.
    """

    def __init__(self, tasks: Tasks) -> None:
        self.tasks = tasks
        self.prepares = _preparations(tasks)
        self.work = [n for n, kind in enumerate(tasks.kind) if kind == WORK and n not in self.prepares]
        self.work_place = {n: i for i, n in enumerate(self.work)}
        self.results = {n for n in self.work[:-1] if tasks.idle[n] and self._is_read_last(n)}
        self.clock = list(itertools.accumulate((tasks.seconds[n] for n in self.work), initial=0.0))
        self.tails = tails(tasks)
        self.first_use = self._first_uses()
        self.payload = {s: tasks.payload_bytes(s) for s in tasks.stream}
        self.grows = {s: tasks.alloc[s] > self.payload[s] + SMALL_BYTES for s in tasks.stream}
        prepares = self.prepares
        self.missing = [
            len(b) if prepares.isdisjoint(b) else len(b) - len(prepares.intersection(b)) for b in tasks.before
        ]
        self.seconds = math.fsum(tasks.seconds)
        self.busy = dict.fromkeys(tasks.stream.values(), 0.0)
        for s, group in tasks.stream.items():
            self.busy[group] += tasks.price[s].seconds

    def _is_read_last(self, n: int) -> bool:
        end = self.work[-1]
        return all(a == end for a in self.tasks.after[n])

    def _first_uses(self) -> dict[int, int]:
        tasks, end = self.tasks, len(self.work)
        use = [end] * len(tasks.nodes)
        first = dict.fromkeys(tasks.stream, end)
        for n in range(len(tasks.nodes) - 1, -1, -1):
            place = self.work_place.get(n)
            if place is not None and n not in self.results:
                use[n] = place
                continue
            for a in tasks.after[n]:
                if use[a] < use[n]:
                    use[n] = use[a]
            if tasks.kind[n] == WAIT:
                start = tasks.start_of[n]
                first[start] = min(first[start], use[n])
        return first

    @functools.cached_property
    def fillers(self) -> set[int]:
        """See above."""
        tasks, tail = self.tasks, self.tails
        leads = [False] * len(tasks.nodes)
        for n in range(len(tasks.nodes) - 1, -1, -1):
            for a in tasks.after[n]:
                if leads[a]:
                    leads[n] = True
                    break
            if tasks.kind[n] == START and not leads[n]:
                leads[n] = any(tail[wait] > LEADS * tasks.price[n].seconds for wait in tasks.after[n])
        return {n for n in self.work if not leads[n]}

    @functools.cached_property
    def takes(self) -> list[bool]:
        """By task: whether it is work that takes more memory than it frees."""
        tasks = self.tasks
        return [kind == WORK and tasks.alloc[n] > tasks.last_reads(n) for n, kind in enumerate(tasks.kind)]

    @functools.cached_property
    def curve(self) -> np.ndarray:
        """It grows and falls by what is made at a place and what is read there last."""
        tasks, end = self.tasks, len(self.work)
        made = [end] * len(tasks.nbytes)
        freed = [0] * len(tasks.nbytes)
        for t in tasks.saved:
            made[t] = 0
        reached = 0
        place: list[int] = []
        for n, kind in enumerate(tasks.kind):
            if kind == WAIT:
                here = place[tasks.start_of[n]]
            elif kind == START:
                needed = self.first_use[n]
                here = max(reached, needed if self.grows[n] and needed < end else 0)
            elif n in self.prepares:
                readers = [self.first_use.get(a, self.work_place.get(a)) for a in tasks.after[n]]
                here = min((r for r in readers if r is not None), default=reached)
            else:
                here = reached = self.work_place[n]
            place.append(here)
            if tasks.makes[n] >= 0:
                made[tasks.makes[n]] = here
                freed[tasks.makes[n]] = max(freed[tasks.makes[n]], here)
            for t in tasks.reads[n]:
                if freed[t] < here:
                    freed[t] = here
        steps = np.zeros(end + 2, dtype=np.int64)
        nbytes = np.array(tasks.nbytes, dtype=np.int64)
        np.add.at(steps, np.minimum(np.array(made, dtype=np.int64), end), nbytes)
        np.subtract.at(steps, np.minimum(np.array(freed, dtype=np.int64), end) + 1, nbytes)
        return np.cumsum(steps)[: end + 1] + tasks.fixed

    def places_before(self) -> list[int]:
        """By task: how many places of the work come before what it needs is there."""
        found = [0] * len(self.tasks.nodes)
        for n, before in enumerate(self.tasks.before):
            for b in before:
                found[n] = max(found[n], self.work_place[b] + 1 if b in self.work_place else found[b])
        return found


def heads(tasks: Tasks) -> list[float]:
    """By task: the least time before its start."""
    found = [0.0] * len(tasks.nodes)
    for n, before in enumerate(tasks.before):
        for b in before:
            found[n] = max(found[n], found[b] + tasks.seconds[b])
        if tasks.kind[n] == WAIT:
            start = tasks.start_of[n]
            found[n] = max(found[n], found[start] + tasks.seconds[start] + tasks.price[start].seconds)
    return found


def tails(tasks: Tasks) -> list[float]:
    """By task: the least time from its start to the end of everything, packing and travelling included."""
    found = [0.0] * len(tasks.nodes)
    for n in range(len(tasks.nodes) - 1, -1, -1):
        after = 0.0
        for a in tasks.after[n]:
            if found[a] > after:
                after = found[a]
        travel = tasks.price[n].seconds if tasks.kind[n] == START else 0.0
        found[n] = after + tasks.seconds[n] + travel
    return found


def _preparations(tasks: Tasks) -> set[int]:
    found: set[int] = set()
    for n, kind in enumerate(tasks.kind):
        if kind == WORK and tasks.after[n] and found.issuperset(tasks.before[n]):
            found.add(n)
    left = 0
    while len(found) != left:  # rarely more than twice
        left = len(found)
        for n in sorted(found, reverse=True):
            readers = [a for a in tasks.after[n] if tasks.after[a] or tasks.kind[a] == START]  # the end reads results
            if not readers or not all(tasks.kind[a] == START or a in found for a in readers):
                found.remove(n)
        for n in sorted(found):
            if not found.issuperset(tasks.before[n]):
                found.remove(n)
    return found | _constants(tasks)


def _constants(tasks: Tasks) -> set[int]:
    """What is made of nothing, and read by more than the end."""
    made = (n for n, kind in enumerate(tasks.kind) if kind == WORK and tasks.makes[n] >= 0)
    return {
        n for n in made if not tasks.before[n] and not tasks.reads[n] and any(tasks.after[a] for a in tasks.after[n])
    }
