"""Orders a graph so that its collectives run while it computes.

A collective is started early enough, and awaited late enough, that it has ended when its result is needed; not much
earlier and not much later, because memory is held in between. Several orders are worked out by list scheduling and
replayed by the simulator; the fastest whose memory stays within the limit is taken. All of it reads `Prices` only,
which are the same on every rank, so that every rank takes the same order.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch.fx import Graph, Node

from shardcompile.passes.collective import collectives
from shardcompile.passes.cost import CostModel, Prices
from shardcompile.passes.edges import Edges, clock_of, first_uses
from shardcompile.passes.simulator import Timeline, known_peak, simulate, tails_of

MEMORY_LIMIT = 1.1
"""Peak memory of a schedule, relative to that of the graph as it came."""

SPARE_BYTES = 1 << 20
"""What a schedule may take beyond the graph's peak memory whatever the limit: of a small graph that is no matter."""

HASTE = (math.inf, 8.0, 4.0, 2.0, 1.0, 0.5, 0.0)
"""How much earlier a collective is started than just in time, in multiples of the time that it takes."""

QUICK_HASTE = (2.0,)
"""The same where a few attempts will do."""

WINDOWS = (16, 64, 256, 1024)
"""How far nodes may overtake others, in places of the original order, where the compute is reordered as well."""


class ScheduleOverlap:
    """Start collectives early, await them late, see the module.

    Legal because every order that respects the graph's edges, the places of writes and the order of random ops computes
    the same. That Inductor keeps to the order is seen to by `HoldOrder`.

    Args:
        model: the costs; None for those of the device that the graph runs on.
        memory_limit: peak memory that is allowed, relative to that of the graph as it came.
    """

    name = "schedule_overlap"

    def __init__(self, model: CostModel | None = None, memory_limit: float = MEMORY_LIMIT) -> None:
        self.model = model
        self.memory_limit = memory_limit

    def __repr__(self) -> str:
        return f"{type(self).__name__}(model={self.model}, memory_limit={self.memory_limit})"

    def __call__(self, graph: Graph) -> None:
        if not collectives(graph):
            return
        prices = Prices.of(graph, self.model or CostModel.of(graph))
        order = best_order(graph, prices, self.memory_limit)[0]
        for earlier, later in itertools.pairwise(order):
            earlier.append(later)


def best_order(
    graph: Graph, prices: Prices, memory_limit: float = MEMORY_LIMIT, quick: bool = False
) -> tuple[list[Node], Timeline]:
    """The fastest order that was found within the memory limit, and what it comes to; the graph's own if none is.

    Args:
        graph: in a valid order.
        prices: of the graph.
        memory_limit: see `ScheduleOverlap`.
        quick: whether a few attempts will do, as to compare graphs.
    """
    edges = Edges.of(graph)
    best = list(graph.nodes)
    timeline = simulate(best, prices)
    limit = byte_limit(graph, prices, memory_limit)
    fits = timeline.peak_bytes <= limit
    for plan in _plans(graph, edges, prices, quick):
        for most in (None, limit, int(0.95 * limit)):
            order = _Scheduler(edges, prices, plan, most).run()
            found = simulate(order, prices)
            if (found.total, found.peak_bytes) >= (timeline.total, timeline.peak_bytes) and fits:
                break  # with less memory it would be no faster
            if found.peak_bytes <= (limit if fits else timeline.peak_bytes):
                best, timeline, fits = order, found, found.peak_bytes <= limit
                break
    return best, timeline


def byte_limit(graph: Graph, prices: Prices, memory_limit: float = MEMORY_LIMIT) -> int:
    """The peak memory that is allowed.

    Args:
        graph: in a valid order.
        prices: of the graph.
        memory_limit: see `ScheduleOverlap`.
    """
    peak = known_peak(graph, prices)
    return max(int(memory_limit * peak), peak + SPARE_BYTES)


@dataclass(frozen=True)
class _Plan:
    """What a scheduler goes by.

    Attributes:
        rank: by node: of two nodes at work that could be next, the one of lower rank is taken.
        urgency: by collective: the same, for one group's stream.
        due: by collective: not to be started before the compute has come so far, unless there is nothing else to do.
        window: a node at work may overtake one less of those that are left.
    """

    rank: dict[Node, float]
    urgency: dict[Node, float]
    due: dict[Node, float]
    window: int


def _plans(graph: Graph, edges: Edges, prices: Prices, quick: bool) -> Iterable[_Plan]:
    place = {node: float(i) for node, i in edges.place.items()}
    needed = first_uses(edges, prices)
    for haste in QUICK_HASTE if quick else HASTE:
        yield _Plan(place, needed, _due_times(edges, prices, needed, haste), 1)
    at_once = dict.fromkeys(prices.group, -math.inf)
    if not quick:
        urgent = {node: -tail for node, tail in tails_of(graph, prices).items()}
        for window in (*WINDOWS, len(edges.order)):
            yield _Plan(urgent, urgent, at_once, window)
    for window in (*(() if quick else WINDOWS), len(edges.order)):
        yield _Plan(place, needed, at_once, window)


def _due_times(edges: Edges, prices: Prices, needed: dict[Node, float], haste: float) -> dict[Node, float]:
    """By collective: the time at which it has to start so that it ends when it is needed, all compute being in order.

    Those that make tensors smaller, such as reductions, are due at once: it is their payload that takes memory.
    """
    clock = clock_of(edges, prices)
    due: dict[Node, float] = {}
    stream: dict[str, float] = {}
    for start in sorted(prices.group, key=lambda n: (needed[n], edges.place[n]), reverse=True):
        if math.isinf(haste) or not _grows(start, prices):
            due[start] = -math.inf
            continue
        group = prices.group[start]
        end = min(clock[int(needed[start])], stream.get(group, math.inf))
        stream[group] = end - prices.seconds[start]
        due[start] = stream[group] - haste * prices.seconds[start]
    return due


def _grows(start: Node, prices: Prices) -> bool:
    return prices.nbytes[start] > sum(prices.nbytes[prices.storage[x]] for x in prices.inputs[start])


class _Held:
    """The memory that is held while an order is made, as `peak_memory` counts it."""

    def __init__(self, edges: Edges, prices: Prices) -> None:
        self.now = 0
        self._prices = prices
        self._reads: dict[Node, int] = {}  # by node that allocates: reads that are left
        self._running: dict[Node, set[Node]] = {}  # by collective: the memory of its payloads
        awaited = set(prices.awaits.values())
        for node in edges.order:
            bases = {prices.storage[x] for x in prices.inputs[node]}
            for base in bases:
                self._reads[base] = self._reads.get(base, 0) + 1
            if node in awaited:
                self._running[node] = bases

    def with_(self, node: Node) -> int:
        """Bytes while a node runs."""
        return self.now + self._prices.nbytes[node]

    def take(self, node: Node) -> None:
        """Run a node."""
        prices = self._prices
        self.now += prices.nbytes[node]
        bases = {prices.storage[x] for x in prices.inputs[node]}
        if node in prices.group:
            bases = set()  # held until the collective is awaited
        elif node in prices.awaits:
            bases |= self._running.pop(prices.awaits[node], set())
        for base in bases:
            self._reads[base] -= 1
            if not self._reads[base] and base.op != "placeholder":
                self.now -= prices.nbytes[base]
        if prices.storage[node] is node and node not in self._reads and node.op != "placeholder":
            self.now -= prices.nbytes[node]


class _Scheduler:
    """Goes through time and takes, of the nodes that could be next, the best.

    Args:
        edges: of the graph.
        prices: of the graph.
        plan: what is best.
        most_bytes: from where on nothing is started early or overtaken, so that memory goes back to what it is in the
            graph's own order. That may take more for a moment: the order that comes out has to be looked at.
    """

    def __init__(self, edges: Edges, prices: Prices, plan: _Plan, most_bytes: int | None = None) -> None:
        self.edges, self.prices = edges, prices
        self.rank, self.urgency, self.due, self.window = plan.rank, plan.urgency, plan.due, plan.window
        self._most_bytes = most_bytes
        self._held = _Held(edges, prices)
        self.now = 0.0
        self.order: list[Node] = []
        self._taken: set[Node] = set()
        self._missing = {node: len(inputs) for node, inputs in edges.before.items()}
        self._clock = clock_of(edges, prices)
        self._at_work = [n for n in edges.order if self._is_work(n)]
        self._work_place = {node: i for i, node in enumerate(self._at_work)}
        self._first = 0  # of the nodes at work, the first one that is left
        self._beyond: list[tuple[int, Node]] = []  # ready, but further than the window reaches
        self._work: list[tuple[float, int, Node]] = []
        self._early: list[tuple[float, int, Node]] = []  # collectives that are not due
        self._due: dict[str, list[tuple[float, int, Node]]] = {group: [] for group in prices.group.values()}
        self._free_at = dict.fromkeys(self._due, 0.0)
        self._ends: dict[Node, float] = {}
        self._waits: list[tuple[float, int, Node]] = []

    def run(self) -> list[Node]:
        """The order."""
        inputs = [n for n in self.edges.order if n.op == "placeholder"]
        roots = [n for n in self.edges.order if n.op != "placeholder" and not self._missing[n]]
        self.order.extend(inputs)
        self._taken.update(inputs)
        for node in inputs:
            self._held.take(node)
        for node in [*roots, *(user for n in inputs for user in self._released(n))]:
            self._admit(node)
        while len(self.order) < len(self.edges.order):
            self._reach_further()
            if self._start_what_is_due() or self._await_what_has_ended():
                continue
            work = self._next_work()
            self._take(self._blocking() if work is None else work)
        return self.order

    def _is_work(self, node: Node) -> bool:
        if node in self.prices.group or node in self.prices.awaits:
            return False
        return bool(self.prices.seconds[node]) or node.op == "output"

    def _take(self, node: Node) -> None:
        prices = self.prices
        if node in prices.group:
            group = prices.group[node]
            self._ends[node] = max(self.now, self._free_at[group]) + prices.seconds[node]
            self._free_at[group] = self._ends[node]
        elif node in prices.awaits:
            self.now = max(self.now, self._ends[prices.awaits[node]])
        else:
            self.now += prices.seconds[node]
        self._settle(node)

    def _settle(self, node: Node) -> None:
        """Put a node into the order, and what it makes ready where it belongs."""
        ready = [node]
        while ready:
            node = ready.pop()
            self.order.append(node)
            self._taken.add(node)
            self._held.take(node)
            for user in self._released(node):
                if self._is_idle(user):
                    ready.append(user)
                else:
                    self._sort_in(user)

    def _released(self, node: Node) -> list[Node]:
        """The nodes that waited for this one alone."""
        for user in self.edges.after[node]:
            self._missing[user] -= 1
        return [user for user in self.edges.after[node] if not self._missing[user]]

    def _is_idle(self, node: Node) -> bool:
        """Whether it takes no time and starts or awaits nothing: it is taken as soon as it can be."""
        return node not in self._work_place and node not in self.prices.group and node not in self.prices.awaits

    def _admit(self, node: Node) -> None:
        if self._is_idle(node):
            self._settle(node)
        else:
            self._sort_in(node)

    def _sort_in(self, node: Node) -> None:
        place = self.edges.place[node]
        if node in self.prices.group:
            heapq.heappush(self._early, (self.due[node], place, node))
        elif node in self.prices.awaits:
            heapq.heappush(self._waits, (self._ends[self.prices.awaits[node]], place, node))
        else:
            heapq.heappush(self._beyond, (self._work_place[node], node))

    def _reach_further(self) -> None:
        while self._first < len(self._at_work) and self._at_work[self._first] in self._taken:
            self._first += 1
        while self._beyond and self._beyond[0][0] < self._first + self.window:
            place, node = heapq.heappop(self._beyond)
            heapq.heappush(self._work, (self.rank[node], place, node))

    def _start_what_is_due(self) -> bool:
        """Start one collective that is due and whose stream would be idle; whether there was one."""
        progress = self._clock[self.edges.place[self._at_work[self._first]] + 1]
        while self._early and self._early[0][0] <= progress:
            _, place, node = heapq.heappop(self._early)
            if node not in self._taken:
                heapq.heappush(self._due[self.prices.group[node]], (self.urgency[node], place, node))
        # What could only start while the next node is at work is decided upon after it.
        work = _first(self._work, self._taken)
        horizon = self.now + (0.0 if work is None else self.prices.seconds[work])
        for group, due in self._due.items():
            start = _first(due, self._taken) if self._free_at[group] <= horizon else None
            if start is not None and not (self._is_too_much(start) and _grows(start, self.prices)):
                self._take(start)
                return True
        return False

    def _is_too_much(self, node: Node) -> bool:
        return self._most_bytes is not None and self._held.with_(node) > self._most_bytes

    def _next_work(self) -> Node | None:
        """The best node at work that is ready; the first one that is left, or none, where memory is scarce."""
        best = _first(self._work, self._taken)
        if best is None or not self._is_too_much(best):
            return best
        first = self._at_work[self._first]
        return None if self._missing[first] else first

    def _await_what_has_ended(self) -> bool:
        """Await one collective that has ended; whether there was one. It holds memory until then."""
        wait = _first(self._waits, self._taken)
        if wait is None or self._ends[self.prices.awaits[wait]] > self.now:
            return False
        self._take(wait)
        return True

    def _blocking(self) -> Node:
        """A collective to start or to await, so that the first node at work that is left can go on.

        Of those that run, the one that ends first is awaited, whoever needs it: what it holds up may be next.
        """
        starts = self._starts_before(self._at_work[self._first])
        if starts:
            return min(starts, key=lambda n: (self.urgency[n], self.edges.place[n]))
        wait = _first(self._waits, self._taken)
        assert wait is not None, "a graph whose first node at work is held up by nothing that runs has a circle"
        return wait

    def _starts_before(self, node: Node) -> list[Node]:
        """The collectives that could be started, and that a node needs."""
        if node.op == "output":  # needs all
            heads = [_first(heap, self._taken) for heap in (self._early, *self._due.values())]
            return [n for n in heads if n is not None]
        pending, seen = [node], {node}
        starts: list[Node] = []
        while pending:
            node = pending.pop()
            if not self._missing[node] and node in self.prices.group:
                starts.append(node)
            before = [n for n in self.edges.before[node] if n not in self._taken and n not in seen]
            pending += before
            seen.update(before)
        return starts


def _first(heap: list[tuple[float, int, Node]], taken: set[Node]) -> Node | None:
    """The least node of a heap that has not been taken; those that have are dropped."""
    while heap and heap[0][2] in taken:
        heapq.heappop(heap)
    return heap[0][2] if heap else None
