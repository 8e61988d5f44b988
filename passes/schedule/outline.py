"""What all schedules of the same tasks share (`Outline`), the options of list scheduling (`SchedulingPolicy`), and its
result (`Schedule`).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardcompile.passes.schedule.tasks import START, WAIT, WORK, Tasks

LEADING_TAIL = 4.0
"""A collective leads if the work after it takes at least this multiple of its own time: then the path through it
matters.
"""


@dataclass(frozen=True)
class SchedulingPolicy:
    """The priorities and limits of one list schedule.

    Attributes:
        rank: by task: of two compute tasks that could be next, the one of lower rank is taken.
        urgency: by task: the same for the collectives of one group.
        due: by task: a collective that grows does not start before the leading compute has reached this time of
            `Outline.clock`.
        window: how far a compute task may overtake others, in positions among the leading tasks that are left.
        limit: bytes that should be held at most.
        leads: whether tasks that no later work waits for, such as the gradients of weights, fill gaps: they run when
            nothing else can, or when memory is scarce. Otherwise all tasks lead.
        release: by compute task: the time before which it is not taken; it may be taken later. None for no such times.
        yields: whether a collective is held back where a more urgent one of another group on its link would wait for
            it.
        until: a schedule that takes longer is useless: it is given up as soon as that is certain.
        most: the same for a schedule that holds more bytes.
    """

    rank: Sequence[float]
    urgency: Sequence[float]
    due: Sequence[float]
    window: int
    limit: float
    leads: bool = False
    release: Sequence[float] | None = None
    yields: bool = True
    until: float = math.inf
    most: float = math.inf


@dataclass(frozen=True)
class Schedule:
    """An order of tasks, with its time and memory.

    Attributes:
        order: all tasks; empty if the schedule was given up, see `SchedulingPolicy`.
        total: seconds until everything has ended, or a lower bound of them.
        peak_bytes: the peak memory, or a lower bound of it.
        begins: by task, the time at which its compute or its collective begins.
    """

    order: list[int]
    total: float
    peak_bytes: int
    begins: list[float]


class Outline:
    """Derived properties of tasks that all their schedules share.

    Attributes:
        prepares: compute tasks that need only inputs, and that more than the end reads, such as constants, or the cast
            of a weight that is gathered: they run when the first task that reads them does, whatever their position.
            They may be results as well, like casts that are saved for the backward pass.
        work: the other compute tasks, in order, without waits.
        work_place: by compute task: its position in `work`.
        fillers: those of `work` from which no collective leads to much later work.
        clock: by position: the time at which the task would begin if nothing delayed the compute; last, the end of all.
        first_use: by start: the position of the first compute task that needs its result.
        payload: by start: bytes of its payload.
        grows: by start: whether it allocates more than it frees.
        curve: by position: bytes held while that task runs, if every collective runs just when it is needed.
        takes: by task: whether it is a compute task that allocates more memory than it frees.
        tails: by task, see `tails`.
        missing: by task: the number of tasks that it has to follow, `prepares` not counted.
        sharing: by group: the others that use the same link.
        seconds: total of all tasks on the compute stream.
        busy: by group: total seconds of its collectives.
    """

    def __init__(self, tasks: Tasks) -> None:
        self.tasks = tasks
        self.prepares = _preparations(tasks)
        self.work = [n for n, kind in enumerate(tasks.kind) if kind == WORK and n not in self.prepares]
        self.work_place = {n: i for i, n in enumerate(self.work)}
        self.clock = list(itertools.accumulate((tasks.seconds[n] for n in self.work), initial=0.0))
        self.tails = tails(tasks)
        self.first_use = self._first_uses()
        self.payload = {s: tasks.payload_bytes(s) for s in tasks.stream}
        self.grows = {s: tasks.alloc[s] > self.payload[s] for s in tasks.stream}
        prepares = self.prepares
        self.missing = [
            len(b) if prepares.isdisjoint(b) else len(b) - len(prepares.intersection(b)) for b in tasks.before
        ]
        # Groups are ordered by their first start, since their names differ between ranks.
        groups = list(dict.fromkeys(tasks.stream[n] for n in sorted(tasks.stream)))
        link = {g: tasks.link.get(g) or g for g in groups}
        self.sharing = {g: [h for h in groups if h != g and link[h] == link[g]] for g in groups}
        self.seconds = math.fsum(tasks.seconds)
        self.busy = dict.fromkeys(tasks.stream.values(), 0.0)
        for s, group in tasks.stream.items():
            self.busy[group] += tasks.price[s].seconds

    def _first_uses(self) -> dict[int, int]:
        tasks, end = self.tasks, len(self.work)
        use = [end] * len(tasks.nodes)
        first = dict.fromkeys(tasks.stream, end)
        for n in range(len(tasks.nodes) - 1, -1, -1):
            place = self.work_place.get(n)
            if place is not None:
                use[n] = place
                continue
            for a in tasks.after[n]:
                if use[a] < use[n]:
                    use[n] = use[a]
            if tasks.kind[n] == WAIT:
                start = tasks.start_of[n]
                first[start] = min(first[start], use[n])
        return first

    @property
    def yield_variants(self) -> tuple[bool, ...]:
        """The values of `SchedulingPolicy.yields` that may make a difference."""
        return (True, False) if any(self.sharing.values()) else (True,)

    @functools.cached_property
    def fillers(self) -> set[int]:
        """See the attributes of the class."""
        tasks, tail = self.tasks, self.tails
        leads = [False] * len(tasks.nodes)
        for n in range(len(tasks.nodes) - 1, -1, -1):
            for a in tasks.after[n]:
                if leads[a]:
                    leads[n] = True
                    break
            if tasks.kind[n] == START and not leads[n]:
                leads[n] = any(tail[wait] > LEADING_TAIL * tasks.price[n].seconds for wait in tasks.after[n])
        return {n for n in self.work if not leads[n]}

    @functools.cached_property
    def takes(self) -> list[bool]:
        """See the attributes of the class."""
        tasks = self.tasks
        return [kind == WORK and tasks.alloc[n] > tasks.last_reads(n) for n, kind in enumerate(tasks.kind)]

    @functools.cached_property
    def curve(self) -> np.ndarray:
        """Sums up, over the positions, the bytes that are allocated there minus those that are read there last."""
        tasks, end = self.tasks, len(self.work)
        allocated_at = [end] * len(tasks.nbytes)
        freed_at = [0] * len(tasks.nbytes)
        for t in tasks.saved:
            allocated_at[t] = 0
        reached = 0
        positions: list[int] = []
        for n, kind in enumerate(tasks.kind):
            if kind == WAIT:
                current = positions[tasks.start_of[n]]
            elif kind == START:
                needed = self.first_use[n]
                current = max(reached, needed if self.grows[n] and needed < end else 0)
            elif n in self.prepares:
                readers = [self.first_use.get(a, self.work_place.get(a)) for a in tasks.after[n]]
                current = min((r for r in readers if r is not None), default=reached)
            else:
                current = reached = self.work_place[n]
            positions.append(current)
            if tasks.makes[n] >= 0:
                allocated_at[tasks.makes[n]] = current
                freed_at[tasks.makes[n]] = max(freed_at[tasks.makes[n]], current)
            for t in tasks.reads[n]:
                if freed_at[t] < current:
                    freed_at[t] = current
        steps = np.zeros(end + 2, dtype=np.int64)
        nbytes = np.array(tasks.nbytes, dtype=np.int64)
        np.add.at(steps, np.minimum(np.array(allocated_at, dtype=np.int64), end), nbytes)
        np.subtract.at(steps, np.minimum(np.array(freed_at, dtype=np.int64), end) + 1, nbytes)
        return np.cumsum(steps)[: end + 1] + tasks.fixed

    def places_before(self) -> list[int]:
        """Returns, for each task, how many positions of the work precede the point at which its inputs are ready."""
        found = [0] * len(self.tasks.nodes)
        for n, before in enumerate(self.tasks.before):
            for b in before:
                found[n] = max(found[n], self.work_place[b] + 1 if b in self.work_place else found[b])
        return found


def heads(tasks: Tasks) -> list[float]:
    """Returns, for each task, the least time before its start."""
    found = [0.0] * len(tasks.nodes)
    for n, before in enumerate(tasks.before):
        for b in before:
            found[n] = max(found[n], found[b] + tasks.seconds[b])
        if tasks.kind[n] == WAIT:
            start = tasks.start_of[n]
            found[n] = max(found[n], found[start] + tasks.seconds[start] + tasks.price[start].seconds)
    return found


def tails(tasks: Tasks) -> list[float]:
    """Returns, for each task, the least time from its start to the end of everything, packing and transfer included."""
    found = [0.0] * len(tasks.nodes)
    for n in range(len(tasks.nodes) - 1, -1, -1):
        after = 0.0
        for a in tasks.after[n]:
            if found[a] > after:
                after = found[a]
        transfer = tasks.price[n].seconds if tasks.kind[n] == START else 0.0
        found[n] = after + tasks.seconds[n] + transfer
    return found


def _preparations(tasks: Tasks) -> set[int]:
    """Returns the tasks of `Outline.prepares`."""
    made = (n for n, kind in enumerate(tasks.kind) if kind == WORK and tasks.makes[n] >= 0)
    return {
        n for n in made if not tasks.before[n] and not tasks.reads[n] and any(tasks.after[a] for a in tasks.after[n])
    }
