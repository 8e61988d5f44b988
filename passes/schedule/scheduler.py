"""List scheduling of tasks: goes through time and always takes the best task that could be next.

Collectives start as soon as their group is free and memory allows, the most urgent first. A curve states how much
memory an early start may take: the bytes held at each position of the compute if every collective starts just when it
is needed. A result that comes early is held from its start to its first use. It is allowed where the curve leaves room
for it all that time, so that compute is not delayed later. A payload that waits for its reduction counts too, and
compute waits for reductions where it would exceed the limit.

Groups that use the same link take turns on it. A collective is held back where a more urgent one of another group would
have to wait for its transfer: the last layer's weight is not gathered before the next layer's.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from shardcompile.passes.schedule.outline import Outline, Schedule, SchedulingPolicy
from shardcompile.passes.schedule.simulator import Streams
from shardcompile.passes.schedule.tasks import START, WAIT, WORK

_SIMULTANEOUS = 1e-12

_ROUNDING = 1e-9
"""The relative error allowed for sums of seconds."""


class Scheduler:
    """Makes one schedule.

    Args:
        outline: of the tasks.
        policy: the priorities and limits.
    """

    def __init__(self, outline: Outline, policy: SchedulingPolicy) -> None:
        self.outline, self.policy, self.tasks = outline, policy, outline.tasks
        tasks = self.tasks
        self.now = 0.0
        self.order: list[int] = []
        self.begins = [0.0] * len(tasks.nodes)
        self._taken = [False] * len(tasks.nodes)
        self._kind, self._after, self._tails = tasks.kind, tasks.after, outline.tails
        self._missing = list(outline.missing)
        self._readers = list(tasks.readers)
        self._held = self.peak = tasks.at_start
        fillers = outline.fillers if policy.leads else set()
        self._leading = [n for n in outline.work if n not in fillers]
        self._lead_place = {n: i for i, n in enumerate(self._leading)}
        self._first = 0  # the first leading task that is left
        self._progress = self._place_of_first()  # the progress of the compute: the position of that task
        self._oldest = 0  # a lower bound for the position of the first compute task that is left
        self._fill: list[tuple[float, int]] = []  # tasks that fill gaps
        self._beyond: list[tuple[int, int]] = []  # ready, but beyond the window
        self._work: list[tuple[float, int, int]] = []
        self._unreleased: list[tuple[float, int, int]] = []  # ready, but not released, see `SchedulingPolicy.release`
        self._streams = Streams(tasks.link)
        self._early: list[tuple[float, int]] = []  # collectives that grow, by their due time
        self._growing: dict[str, list[tuple[float, int]]] = {g: [] for g in outline.sharing}
        self._shrinking: dict[str, list[tuple[float, int]]] = {g: [] for g in outline.sharing}
        self._ends: dict[int, float] = {}
        self._waits: list[tuple[float, int]] = []
        self._freeing: list[tuple[float, int]] = []  # waits for collectives that free memory
        self._released: set[int] = set()  # starts of which one wait has run
        self._has_curve = not policy.leads and not math.isinf(policy.limit)
        self._curve = outline.curve.copy() if self._has_curve else np.zeros(0, dtype=np.int64)
        self._queued = 0  # bytes of payloads of reductions that could start
        self._left = outline.seconds  # seconds left on the compute stream
        self._busy_left = dict(outline.busy)
        self._until = policy.until * (1 + _ROUNDING)
        self._least = 0.0  # lower bound of the total

    def run(self) -> Schedule:
        """Returns the schedule."""
        prepares, leading, taken = self.outline.prepares, self._leading, self._taken
        for n, missing in enumerate(self.outline.missing):
            if not missing and n not in prepares:
                self._enqueue(n)
        while len(self.order) < len(taken):
            if self._least > self._until or self.peak > self.policy.most:
                return Schedule([], self._least, self.peak, self.begins)
            if self._first < len(leading) and taken[leading[self._first]]:
                self._advance_first()
            if self._beyond and self._beyond[0][0] < self._first + self.policy.window:
                self._extend_window()
            if self._start_one() or self._await_ended():
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
            return  # no task waited for it
        missing = self._missing
        for a in self._after[n]:
            missing[a] -= 1
            if not missing[a]:
                self._enqueue(a)

    def _prepare(self, task: int) -> None:
        """Runs the preparations of a task that have not run."""
        for n in self.tasks.before[task]:
            if n in self.outline.prepares and not self._taken[n]:
                self._take(n)

    def _run_collective(self, n: int) -> None:
        price, group = self.tasks.price[n], self.tasks.stream[n]
        self.begins[n], end = self._streams.run(group, self.now, price.latency, price.seconds)
        self._ends[n] = end
        self._busy_left[group] -= price.seconds
        self._least = max(self._least, end + self._busy_left[group])
        progress, outline = self._progress, self.outline
        if outline.grows[n]:
            needed = outline.first_use[n]
            if needed > progress and self._has_curve:
                self._curve[progress:needed] += self.tasks.alloc[n]
        else:
            self._queued -= outline.payload[n]
            if self._has_curve:
                until = bisect_left(outline.clock, outline.clock[progress] + end - self.now)
                self._curve[progress:until] += outline.payload[n]

    def _count_memory(self, n: int) -> None:
        """Updates the memory that is held, and its peak."""
        tasks = self.tasks
        alloc, output = tasks.alloc[n], tasks.makes[n]
        held = self._held + alloc
        if held > self.peak:
            self.peak = held
        if output >= 0 and not tasks.readers[output]:
            held -= alloc
        kind = self._kind[n]
        if kind != START:
            held -= self._freed(tasks.reads[n])
        if kind == WAIT and tasks.start_of[n] not in self._released:
            self._released.add(tasks.start_of[n])
            held -= self._freed(tasks.reads[tasks.start_of[n]])
        self._held = held

    def _freed(self, read: Sequence[int]) -> int:
        """Counts one more read of tensors, and returns the bytes of those without further readers."""
        readers, freed = self._readers, 0
        for t in read:
            readers[t] -= 1
            if not readers[t]:
                freed += self.tasks.nbytes[t]
        return freed

    def _enqueue(self, n: int) -> None:
        """Puts a task that is ready into the queue of its kind."""
        tasks, outline = self.tasks, self.outline
        kind = self._kind[n]
        if kind == WORK:
            position = self._lead_place.get(n)
            if position is not None:
                heapq.heappush(self._beyond, (position, n))
            else:
                heapq.heappush(self._fill, (outline.work_place[n], n))
        elif kind == WAIT:
            item = (self._ends[tasks.start_of[n]], n)
            heapq.heappush(self._waits, item)
            if not outline.grows[tasks.start_of[n]]:
                heapq.heappush(self._freeing, item)
        elif outline.grows[n]:
            heapq.heappush(self._early, (self.policy.due[n], n))
        else:
            self._queued += outline.payload[n]
            heapq.heappush(self._shrinking[tasks.stream[n]], (self.policy.urgency[n], n))

    def _advance_first(self) -> None:
        """Finds the first leading task that is left, after the first one has been taken."""
        leading, taken, first = self._leading, self._taken, self._first
        while first < len(leading) and taken[leading[first]]:
            first += 1
        self._first = first
        self._progress = self._place_of_first()

    def _place_of_first(self) -> int:
        outline = self.outline
        return outline.work_place[self._leading[self._first]] if self._first < len(self._leading) else len(outline.work)

    def _extend_window(self) -> None:
        """Moves the tasks that the window has reached to the queue of compute tasks."""
        reach = self._first + self.policy.window
        while self._beyond and self._beyond[0][0] < reach:
            position, n = heapq.heappop(self._beyond)
            if self.policy.release is not None and self.policy.release[n] > self.now:
                heapq.heappush(self._unreleased, (self.policy.release[n], position, n))
            else:
                heapq.heappush(self._work, (self.policy.rank[n], position, n))

    def _release(self) -> None:
        while self._unreleased and self._unreleased[0][0] <= self.now + _SIMULTANEOUS:
            _, position, n = heapq.heappop(self._unreleased)
            heapq.heappush(self._work, (self.policy.rank[n], position, n))

    # ----------------------------------------------------------------------------------- collectives

    def _start_one(self) -> bool:
        """Starts one collective whose group would be idle, and for which there is memory; returns whether there was
        one.
        """
        if self._early:
            clock = self.outline.clock
            progress = clock[min(self._progress + 1, len(clock) - 1)]
            while self._early and self._early[0][0] <= progress:
                n = heapq.heappop(self._early)[1]
                if not self._taken[n]:
                    heapq.heappush(self._growing[self.tasks.stream[n]], (self.policy.urgency[n], n))
        horizon = self.now + _SIMULTANEOUS
        is_computed = False  # whether the horizon has been computed
        for group, growing in self._growing.items():
            shrinking = self._shrinking[group]
            if not growing and not shrinking:
                continue
            free_at = self._streams.free_at(group)
            if free_at >= horizon and not is_computed:
                horizon, is_computed = max(horizon, self._horizon()), True
            if free_at >= horizon:
                continue
            best = self._best(growing, shrinking)
            if best is not None and not (self.policy.yields and self._would_delay(best, group)):
                self._take(best)
                return True
        return False

    def _horizon(self) -> float:
        """Returns when the compute next is idle or waits. Collectives that could only start later are decided then."""
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
        """Returns the more urgent of the two front collectives; one that grows only if there is memory for it."""
        self._front(growing)
        self._front(shrinking)
        if growing and (not shrinking or growing[0][0] <= shrinking[0][0]) and self._fits(growing[0][1]):
            return growing[0][1]
        if shrinking:
            return shrinking[0][1]
        return growing[0][1] if growing and self._fits(growing[0][1]) else None

    def _would_delay(self, n: int, group: str) -> bool:
        """Whether a collective would delay a more urgent one of another group that uses the same link.

        The more urgent one starts when its group is free. If this one is held back, the link is idle until then. So a
        delay counts only if it is longer than that idle time.
        """
        price, urgency = self.tasks.price[n], self.policy.urgency
        begins = self._streams.transfers_at(group, self.now, price.latency)
        for other in self.outline.sharing[group]:
            free_at = self._streams.free_at(other)
            if free_at <= self.now:
                continue
            for heap in (self._growing[other], self._shrinking[other]):
                m = self._front(heap)
                if m is None or urgency[m] >= urgency[n]:
                    continue
                could_begin = self._streams.transfers_at(other, self.now, self.tasks.price[m].latency)
                delay = begins + price.transfer - could_begin
                if delay > max(could_begin - begins, 0.0) and (not self.outline.grows[m] or self._fits(m)):
                    return True
        return False

    def _fits(self, n: int) -> bool:
        """Whether the result of a collective may be held from now to its first use."""
        progress, needed = self._progress, self.outline.first_use[n]
        if needed <= progress or math.isinf(self.policy.limit):
            return True
        if self.policy.leads:  # the compute does not follow the order of the curve
            return self._held + self.tasks.alloc[n] <= self.policy.limit
        most = int(self._curve[progress:needed].max())
        return most + self._queued + self.tasks.alloc[n] <= self.policy.limit

    # ------------------------------------------------------------------------------------------ work

    def _await_ended(self) -> bool:
        """Awaits one collective that has ended, since it holds memory until then; returns whether there was one."""
        while self._waits and self._taken[self._waits[0][1]]:
            heapq.heappop(self._waits)
        if not self._waits or self._waits[0][0] > self.now:
            return False
        self._take(heapq.heappop(self._waits)[1])
        return True

    def _next_work(self) -> int:
        """Returns the best compute task that is ready; where memory is scarce, one that frees some, or the first one
        left.
        """
        self._release()
        while self._work and self._taken[self._work[0][2]]:
            heapq.heappop(self._work)
        while self._fill and self._taken[self._fill[0][1]]:
            heapq.heappop(self._fill)
        best = self._work[0][2] if self._work else None
        if best is not None and self._held + self.tasks.alloc[best] <= self.policy.limit:
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
        """Whether a collective ends before a release time."""
        return self._front(self._waits) is not None and self._waits[0][0] < release

    def _frees_memory(self) -> int | None:
        """Returns a reduction to start or to await, or None."""
        while self._freeing and self._taken[self._freeing[0][1]]:
            heapq.heappop(self._freeing)
        for heap in self._shrinking.values():
            while heap and self._taken[heap[0][1]]:
                heapq.heappop(heap)
            if heap and not self._freeing:
                return heap[0][1]
        return self._freeing[0][1] if self._freeing else None

    def _blocking(self) -> int:
        """Returns a collective to start or to await, so that the first compute task that is left can run.

        Of the running collectives, the one that ends first is awaited, whoever needs it: a task that waits for it may
        be next.
        """
        work = self.outline.work
        while self._taken[work[self._oldest]]:
            self._oldest += 1
        starts = self._starts_before(work[self._oldest])
        if starts:
            return min(starts, key=lambda n: (self.policy.urgency[n], n))
        while self._waits and self._taken[self._waits[0][1]]:
            heapq.heappop(self._waits)
        assert self._waits, "the tasks have a cycle: nothing that runs delays the first one that is left"
        return self._waits[0][1]

    def _front(self, heap: list[tuple[float, int]]) -> int | None:
        """Returns the front task of a heap that is not taken yet, or None."""
        while heap and self._taken[heap[0][1]]:
            heapq.heappop(heap)
        return heap[0][1] if heap else None

    def _starts_before(self, n: int) -> list[int]:
        """Returns the collectives that could be started and that a task needs."""
        pending, seen, starts = [n], {n}, []
        while pending:
            n = pending.pop()
            if not self._missing[n] and self.tasks.kind[n] == START:
                starts.append(n)
            before = [b for b in self.tasks.before[n] if not self._taken[b] and b not in seen]
            pending += before
            seen.update(before)
        return starts
