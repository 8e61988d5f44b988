"""List scheduling of tasks: goes through time, and always takes the best task that could be next.

Collectives start as soon as their group is free and memory allows, the most urgent first. How much memory an early
start may take is told by a curve: by how far the compute has come, what is held if every collective starts just when it
is needed. A result that comes early is held from its start to its first use. It is allowed where the curve leaves room
for it all that time, so that compute is not held up later. A payload that waits for its reduction counts too, and
compute waits for reductions where it would go beyond the limit.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from shardcompile.passes.schedule.outline import Outline, Plan, Schedule
from shardcompile.passes.schedule.simulator import Streams
from shardcompile.passes.schedule.tasks import START, WAIT, WORK

_AT_ONCE = 1e-12

_ROUNDING = 1e-9
"""The relative error that sums of seconds may have."""


class Scheduler:
    """Makes one schedule.

    Args:
        outline: of the tasks.
        plan: what is best.
    """

    def __init__(self, outline: Outline, plan: Plan) -> None:
        self.outline, self.plan, self.tasks = outline, plan, outline.tasks
        tasks = self.tasks
        self.now = 0.0
        self.order: list[int] = []
        self.begins = [0.0] * len(tasks.nodes)
        self._taken = [False] * len(tasks.nodes)
        self._kind, self._after, self._tails = tasks.kind, tasks.after, outline.tails
        self._missing = list(outline.missing)
        self._readers = list(tasks.readers)
        self._held = self.peak = tasks.at_start
        fillers = outline.fillers | outline.results if plan.leads else outline.results
        self._leading = [n for n in outline.work if n not in fillers]
        self._lead_place = {n: i for i, n in enumerate(self._leading)}
        self._first = 0  # of the tasks that lead, the first one that is left
        self._here = self._place_of_first()  # how far the compute has come: the place of that task
        self._oldest = 0  # of all tasks at work, where the first one that is left may be
        self._fill: list[tuple[float, int]] = []  # tasks that fill gaps
        self._beyond: list[tuple[int, int]] = []  # ready, but further than the window reaches
        self._work: list[tuple[float, int, int]] = []
        self._unreleased: list[tuple[float, int, int]] = []  # ready, but too early, see `Plan.release`
        self._streams = Streams(tasks.link)
        groups = list(dict.fromkeys(tasks.stream[n] for n in sorted(tasks.stream)))  # not by names: ranks have others
        self._early: list[tuple[float, int]] = []  # collectives that grow, by the time from which they may start
        self._growing: dict[str, list[tuple[float, int]]] = {g: [] for g in groups}
        self._shrinking: dict[str, list[tuple[float, int]]] = {g: [] for g in groups}
        self._ends: dict[int, float] = {}
        self._waits: list[tuple[float, int]] = []
        self._freeing: list[tuple[float, int]] = []  # waits for collectives that shrink
        self._released: set[int] = set()  # starts of which one wait has come
        self._has_curve = not plan.leads and not math.isinf(plan.limit)
        self._curve = outline.curve.copy() if self._has_curve else np.zeros(0, dtype=np.int64)
        self._queued = 0  # bytes of payloads whose reduction could start
        self._not_before: dict[int, int] = {}  # by start: the place from which memory may allow it
        self._not_with: dict[int, tuple[int, int]] = {}  # the same, as long as no less is queued than so much
        self._left = outline.seconds  # on the compute stream
        self._busy_left = dict(outline.busy)
        self._until = plan.until * (1 + _ROUNDING)
        self._least = 0.0  # seconds that the schedule takes at least

    def run(self) -> Schedule:
        """The schedule."""
        prepares, leading, taken = self.outline.prepares, self._leading, self._taken
        for n, missing in enumerate(self.outline.missing):
            if not missing and n not in prepares:
                self._sort_in(n)
        while len(self.order) < len(taken):
            if self._least > self._until or self.peak > self.plan.most:
                return Schedule([], self._least, self.peak, self.begins)
            if self._first < len(leading) and taken[leading[self._first]]:
                self._move_on()
            if self._beyond and self._beyond[0][0] < self._first + self.plan.window:
                self._reach_further()
            if self._start_one() or self._await_what_has_ended():
                continue
            self._take(self._next_work())
        total = max([self.now, *self._ends.values()])
        return Schedule(self.order, total, self.peak, self.begins)

    # ---------------------------------------------------------------------------------------- taking

    def _take(self, n: int) -> None:
        tasks, kind = self.tasks, self._kind[n]
        if kind == WAIT:
            end = self._ends[tasks.start_of[n]]
            if end > self.now:
                self.now = end
        elif self.outline.missing[n] < len(tasks.before[n]):
            self._prepare(n)
        self.begins[n] = now = self.now
        left, seconds = self._left, tasks.seconds[n]
        least = now + (left if left > self._tails[n] else self._tails[n])
        if least > self._least:
            self._least = least
        self._left = left - seconds
        self.now = now + seconds
        if kind == START:
            self._run_collective(n)
        self.order.append(n)
        self._taken[n] = True
        self._count_memory(n)
        if n in self.outline.prepares:
            return  # nothing waited for it
        missing = self._missing
        for a in self._after[n]:
            missing[a] -= 1
            if not missing[a]:
                self._sort_in(a)

    def _prepare(self, task: int) -> None:
        """Run what is prepared for a collective, or at the end for a collective that the end does not wait for."""
        for n in self.tasks.before[task]:
            if n in self.outline.prepares and not self._taken[n]:
                self._take(n)

    def _run_collective(self, n: int) -> None:
        price, group = self.tasks.price[n], self.tasks.stream[n]
        self.begins[n], end = self._streams.run(group, self.now, price.latency, price.seconds)
        self._ends[n] = end
        self._busy_left[group] -= price.seconds
        self._least = max(self._least, end + self._busy_left[group])
        here, outline = self._here, self.outline
        if outline.grows[n]:
            needed = outline.first_use[n]
            if needed > here and self._has_curve:
                self._curve[here:needed] += self.tasks.alloc[n]
        else:
            self._queued -= outline.payload[n]
            if self._has_curve:
                until = bisect_left(outline.clock, outline.clock[here] + end - self.now)
                self._curve[here:until] += outline.payload[n]

    def _count_memory(self, n: int) -> None:
        """Count the memory."""
        tasks = self.tasks
        alloc, made = tasks.alloc[n], tasks.makes[n]
        held = self._held + alloc
        if held > self.peak:
            self.peak = held
        if made >= 0 and not tasks.readers[made]:
            held -= alloc
        kind = self._kind[n]
        if kind != START:
            held -= self._freed(tasks.reads[n])
        if kind == WAIT and tasks.start_of[n] not in self._released:
            self._released.add(tasks.start_of[n])
            held -= self._freed(tasks.reads[tasks.start_of[n]])
        self._held = held

    def _freed(self, read: Sequence[int]) -> int:
        """Bytes of tensors that have been read once more, and have no more readers now."""
        readers, freed = self._readers, 0
        for t in read:
            readers[t] -= 1
            if not readers[t]:
                freed += self.tasks.nbytes[t]
        return freed

    def _sort_in(self, n: int) -> None:
        tasks, outline = self.tasks, self.outline
        kind = self._kind[n]
        if kind == WORK:
            place = self._lead_place.get(n)
            if place is not None:
                heapq.heappush(self._beyond, (place, n))
            else:
                heapq.heappush(self._fill, (outline.work_place[n], n))
        elif kind == WAIT:
            item = (self._ends[tasks.start_of[n]], n)
            heapq.heappush(self._waits, item)
            if not outline.grows[tasks.start_of[n]]:
                heapq.heappush(self._freeing, item)
        elif outline.grows[n]:
            heapq.heappush(self._early, (self.plan.due[n], n))
        else:
            self._queued += outline.payload[n]
            heapq.heappush(self._shrinking[tasks.stream[n]], (self.plan.urgency[n], n))

    def _move_on(self) -> None:
        """The first task that leads has been taken: look for the first one that is left."""
        leading, taken, first = self._leading, self._taken, self._first
        while first < len(leading) and taken[leading[first]]:
            first += 1
        self._first = first
        self._here = self._place_of_first()

    def _place_of_first(self) -> int:
        outline = self.outline
        return outline.work_place[self._leading[self._first]] if self._first < len(self._leading) else len(outline.work)

    def _reach_further(self) -> None:
        reach = self._first + self.plan.window
        while self._beyond and self._beyond[0][0] < reach:
            place, n = heapq.heappop(self._beyond)
            if self.plan.release is not None and self.plan.release[n] > self.now:
                heapq.heappush(self._unreleased, (self.plan.release[n], place, n))
            else:
                heapq.heappush(self._work, (self.plan.rank[n], place, n))

    def _release(self) -> None:
        while self._unreleased and self._unreleased[0][0] <= self.now + _AT_ONCE:
            _, place, n = heapq.heappop(self._unreleased)
            heapq.heappush(self._work, (self.plan.rank[n], place, n))

    # ----------------------------------------------------------------------------------- collectives

    def _start_one(self) -> bool:
        """Start one collective whose group would be idle, and for which there is memory; whether there was one."""
        if self._early:
            clock = self.outline.clock
            progress = clock[min(self._here + 1, len(clock) - 1)]
            while self._early and self._early[0][0] <= progress:
                n = heapq.heappop(self._early)[1]
                if not self._taken[n]:
                    heapq.heappush(self._growing[self.tasks.stream[n]], (self.plan.urgency[n], n))
        horizon = self.now + _AT_ONCE
        is_sure = False  # whether the horizon has been looked for
        for group, growing in self._growing.items():
            shrinking = self._shrinking[group]
            if not growing and not shrinking:
                continue
            free_at = self._streams.free_at(group)
            if free_at >= horizon and not is_sure:
                horizon, is_sure = max(horizon, self._horizon()), True
            if free_at >= horizon:
                continue
            best = self._best(growing, shrinking)
            if best is not None:
                self._take(best)
                return True
        return False

    def _horizon(self) -> float:
        """When the compute next has nothing to do or waits. What could start later than that is decided then."""
        while self._work and self._taken[self._work[0][2]]:
            heapq.heappop(self._work)
        if self._work:
            return self.now + self.tasks.seconds[self._work[0][2]]
        filler = self._front(self._fill)
        if filler is not None:
            return self.now + self.tasks.seconds[filler]
        if self._unreleased and not self._ends_first(self._unreleased[0][0]):
            return max(self.now, self._unreleased[0][0])
        wait = self._front(self._waits)
        return self.now if wait is None else max(self.now, self._waits[0][0]) + self.tasks.seconds[wait]

    def _best(self, growing: list[tuple[float, int]], shrinking: list[tuple[float, int]]) -> int | None:
        """The more urgent of the two at the front. The first counts only if there is memory for it."""
        for heap in (growing, shrinking):
            while heap and self._taken[heap[0][1]]:
                heapq.heappop(heap)
        if growing and (not shrinking or growing[0][0] <= shrinking[0][0]) and self._fits(growing[0][1]):
            return heapq.heappop(growing)[1]
        if shrinking:
            return heapq.heappop(shrinking)[1]
        return heapq.heappop(growing)[1] if growing and self._fits(growing[0][1]) else None

    def _fits(self, n: int) -> bool:
        """Whether a result may be held from now to its first use."""
        here, needed = self._here, self.outline.first_use[n]
        if needed <= here or math.isinf(self.plan.limit):
            return True
        if self.plan.leads:  # not in the order that the curve is of
            return self._held + self.tasks.alloc[n] <= self.plan.limit
        if here < self._not_before.get(n, 0):
            return False
        until, queued = self._not_with.get(n, (0, 0))
        if here < until and queued <= self._queued:
            return False  # as before: there is less room now than there was, if anything
        room = self.plan.limit - self.tasks.alloc[n]
        curve = self._curve[here:needed]
        most = curve.max()
        if most > room:
            self._not_before[n] = here + int(np.flatnonzero(curve > room)[-1]) + 1
            return False
        if most + self._queued > room:
            self._not_with[n] = here + int(np.flatnonzero(curve > room - self._queued)[-1]) + 1, self._queued
            return False
        return True

    # ------------------------------------------------------------------------------------------ work

    def _await_what_has_ended(self) -> bool:
        """Await one collective that has ended; whether there was one. It holds memory until then."""
        while self._waits and self._taken[self._waits[0][1]]:
            heapq.heappop(self._waits)
        if not self._waits or self._waits[0][0] > self.now:
            return False
        self._take(heapq.heappop(self._waits)[1])
        return True

    def _next_work(self) -> int:
        """The best task on the compute stream that is ready. Where memory is scarce, one that frees some, or the
        first one left.
        """
        self._release()
        while self._work and self._taken[self._work[0][2]]:
            heapq.heappop(self._work)
        while self._fill and self._taken[self._fill[0][1]]:
            heapq.heappop(self._fill)
        best = self._work[0][2] if self._work else None
        if best is not None and self._held + self.tasks.alloc[best] <= self.plan.limit:
            return best
        if self._fill:
            return self._fill[0][1]
        if best is None:
            if not self._unreleased or self._ends_first(self._unreleased[0][0]):
                return self._blocking()
            self.now = self._unreleased[0][0]
            return self._next_work()
        freeing = self._frees_memory()
        if freeing is not None:
            return freeing
        first = self._leading[self._first]
        return self._blocking() if self._missing[first] else first

    def _ends_first(self, release: float) -> bool:
        """Whether a collective ends before a time."""
        return self._front(self._waits) is not None and self._waits[0][0] < release

    def _frees_memory(self) -> int | None:
        """A reduction to start or to await."""
        while self._freeing and self._taken[self._freeing[0][1]]:
            heapq.heappop(self._freeing)
        for heap in self._shrinking.values():
            while heap and self._taken[heap[0][1]]:
                heapq.heappop(heap)
            if heap and not self._freeing:
                return heap[0][1]
        return self._freeing[0][1] if self._freeing else None

    def _blocking(self) -> int:
        """A collective to start or to await, so that the first task at work that is left can go on.

        Of those that run, the one that ends first is awaited, whoever needs it: what it holds up may be next.
        """
        starts = self._starts_before(self._goal())
        if starts:
            return min(starts, key=lambda n: (self.plan.urgency[n], n))
        while self._waits and self._taken[self._waits[0][1]]:
            heapq.heappop(self._waits)
        assert self._waits, "tasks whose first one at work is held up by nothing that runs close a circle"
        return self._waits[0][1]

    def _goal(self) -> int:
        """The first task that is left, of those that lead if there is one."""
        if self._first < len(self._leading):
            return self._leading[self._first]
        work = self.outline.work
        while self._taken[work[self._oldest]]:
            self._oldest += 1
        return work[self._oldest]

    def _front(self, heap: list[tuple[float, int]]) -> int | None:
        while heap and self._taken[heap[0][1]]:
            heapq.heappop(heap)
        return heap[0][1] if heap else None

    def _starts_before(self, n: int) -> list[int]:
        """The collectives that could be started, and that a task needs."""
        if n == self.outline.work[-1] and not self.tasks.after[n]:  # the end needs all: look no further than the heaps
            heaps = (self._early, *self._growing.values(), *self._shrinking.values())
            return [h for heap in heaps if (h := self._front(heap)) is not None]
        pending, seen, starts = [n], {n}, []
        while pending:
            n = pending.pop()
            if not self._missing[n] and self.tasks.kind[n] == START:
                starts.append(n)
            before = [b for b in self.tasks.before[n] if not self._taken[b] and b not in seen]
            pending += before
            seen.update(before)
        return starts
