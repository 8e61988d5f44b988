"""Chooses which collectives share buckets: those that make the schedule faster.

A bucket saves the latency of all its members but one. It costs copies, to pack and to unpack, and overlap: it starts
when the last of its payloads is ready, and the readers of its first member wait for all of them. Which weighs more
cannot be decided from a collective alone, so the buckets are tried. The candidates of one kind and group are divided by
how long a bucket may transfer; the tasks of the graph are joined accordingly (`Tasks.joined`) and scheduled within the
memory limit; the fastest division is taken. Buckets are smaller at the start, where there is no compute yet to overlap
with, and at the end, where none is left: each transfers no longer than all before it, and no longer than all after it.

One rank decides for all, see `shardcompile.passes.plan`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from torch.fx import Graph, Node

from shardcompile.collectives.buckets import ALL_GATHER_BUCKET
from shardcompile.collectives.traffic import Load, Traffic
from shardcompile.machines import Price
from shardcompile.passes.cost.model import NOMINAL_BYTES, CostModel, GraphCosts
from shardcompile.passes.graph import node_sizes
from shardcompile.passes.graph.collective import Collective
from shardcompile.passes.graph.dependencies import Closure
from shardcompile.passes.schedule.edges import Edges
from shardcompile.passes.schedule.outline import Outline, SchedulingPolicy, heads
from shardcompile.passes.schedule.overlap import byte_limit
from shardcompile.passes.schedule.scheduler import Scheduler
from shardcompile.passes.schedule.search import NARROWER, quick_policy
from shardcompile.passes.schedule.tasks import Bucket, Tasks

FIRST_SPAN = 16.0
"""How long a bucket may transfer at the first attempt, in latencies. Latency is then a 17th of its time."""

JOINT_SPANS = (1.0, 1 / 8, 1 / 16)
"""Spans that are tried first, for all groups at once, relative to `FIRST_SPAN`: where two groups hold up the same work,
buckets of one alone gain nothing.
"""

STEP = 4.0
"""The factor between one attempt and the next."""

EARLY = 1.0
"""A payload that is ready within this many latencies counts as ready at the start, such as a cast weight."""

DEADLINES = (1.02, 1.05, 1.1, 1.2, 1.5, 2.0, 3.0)
"""The deadlines that are tried first, relative to the least time if buckets cost nothing."""

CONTENTION = 0.01
"""An estimate of how much a running collective slows down the compute that hides it."""

MIN_LATENCY_SHARE = 1e-3
"""Buckets are tried where the latencies of a kind and group are at least this fraction of the schedule's time."""

Score = tuple[float, float]
"""Bytes that a schedule holds beyond the memory limit, and its seconds, `CONTENTION` included."""

Divided = list[list["Candidate"]]


@dataclass(frozen=True, eq=False)
class Candidate:
    """A collective that could join a bucket.

    Attributes:
        collective: the collective.
        task: its start.
        load: what each rank has of it; None if the size of the group is unknown.
        price: its cost alone.
        needed: the position of the first work that needs its result.
        before: seconds of compute, in order, before its payload is ready.
        after: seconds of compute, in order, from the first work that needs its result; 0 if none does.
        nbytes: its bytes over all ranks.
    """

    collective: Collective
    task: int
    load: Load | None
    price: Price
    needed: int
    before: float
    after: float
    nbytes: int


@dataclass(frozen=True)
class _Option:
    """One way to divide the candidates of a group into buckets.

    Attributes:
        span: seconds that a bucket may transfer.
        all_sizes: whether candidates join that take longer to copy than a latency.
        deadline: seconds in which all buckets should have ended, see `BucketSearch._divide_by_deadline`; None if `span`
            divides.
        most: how many candidates may join a bucket; None for any number.
        tapers: whether a bucket may transfer for less than `span` at the start and at the end.
    """

    span: float
    all_sizes: bool = True
    deadline: float | None = None
    most: int | None = None
    tapers: bool = True


_ONE_BUCKET = _Option(math.inf, tapers=False)
"""All candidates of a group in one bucket, as far as they are independent of each other."""


BucketTraffic = Callable[[Set[str], Load], Traffic]
"""What a bucket moves, by the kinds of its members and the load of each rank over all of them."""


class BucketSearch:
    """Searches for the fastest buckets of one graph.

    Args:
        graph: in a valid order.
        groups: candidates that may share a bucket, by what they have in common.
        model: the cost model.
        traffic: what a bucket moves.
        bucket_bytes: the most bytes of a bucket, over all ranks; None for no limit.
        divides: whether a group may become several buckets. Otherwise each becomes one, or none does.
    """

    def __init__(
        self,
        graph: Graph,
        groups: Mapping[Hashable, Sequence[Collective]],
        model: CostModel,
        traffic: BucketTraffic,
        bucket_bytes: int | None,
        divides: bool = True,
    ) -> None:
        self.graph, self.model, self.traffic, self.bucket_bytes = graph, model, traffic, bucket_bytes
        self.divides = divides
        self._cost_functions: dict[str, Callable[[Traffic], Price]] = {}  # by group
        self.closure = Closure(graph, [c.node for group in groups.values() for c in group])
        self.groups = {key: group for key, group in groups.items() if self._may_share(group)}

    def _may_share(self, group: Sequence[Collective]) -> bool:
        """Whether two neighbouring candidates are independent of each other."""
        return any(self.closure.independent(b.node, [a.node]) for a, b in itertools.pairwise(group))

    def buckets(self) -> list[list[Node]]:
        """Returns the buckets, each as the starts of its members; none if the graph is fastest without."""
        if not self.groups:
            return []
        outline = self._prepare()
        found = [(self._search(outline, yields), self.best) for yields in outline.yield_variants]
        chosen = min(found, key=lambda each: each[1])[0]
        return [[c.collective.node for c in bucket] for bucket in self._divide(chosen)]

    def _search(self, outline: Outline, yields: bool) -> dict[Hashable, _Option]:
        """Returns the fastest options for schedules that yield, or for those that do not."""
        self._tried: set[tuple[tuple[int, ...], ...]] = set()
        self._too_large: set[Hashable] = set()  # groups whose tried buckets exceeded the memory limit
        self._evaluate_input(outline, yields)
        chosen: dict[Hashable, _Option] = {}
        worthwhile = [
            key for key in self.divisible if _saved_latency(self.divisible[key]) >= MIN_LATENCY_SHARE * self.best[1]
        ]
        if self.divides:
            for share in JOINT_SPANS:
                self._attempt({key: _Option(share * self._first_span(key)) for key in worthwhile}, chosen)
            for key in sorted(worthwhile, key=lambda key: -_saved_latency(self.divisible[key])):
                self._improve(key, chosen)
        else:
            self._attempt(dict.fromkeys(worthwhile, _ONE_BUCKET), chosen)
        return chosen

    def _prepare(self) -> Outline:
        """Computes the costs and the candidates of the input graph."""
        costs, edges = GraphCosts.of(self.graph, self.model), Edges.of(self.graph)
        self.limit = byte_limit(self.graph, costs)
        self.tasks = Tasks.of(edges, costs)
        outline = Outline(self.tasks)
        index = {node: n for n, node in enumerate(self.tasks.nodes)}
        ready, reached = heads(self.tasks), outline.places_before()
        self.divisible: dict[Hashable, list[Candidate]] = {}
        for key, group in self.groups.items():
            for c in group:
                task = index[c.node]
                position = outline.first_use[task]
                price = self.tasks.price[task]
                before, after = outline.clock[reached[task]], outline.clock[-1] - outline.clock[position]
                candidate = Candidate(c, task, self._load(c), price, position, before, after, c.global_bytes)
                # A gather that could run at the start shares buckets only with its like: it would wait for the others.
                early = _is_gather(c) and ready[task] <= EARLY * candidate.price.latency
                self.divisible.setdefault((key, early), []).append(candidate)
        for candidates in self.divisible.values():
            candidates.sort(key=lambda c: (c.needed, c.task))
        return outline

    def _evaluate_input(self, outline: Outline, yields: bool) -> None:
        """Schedules the input graph by two policies, and keeps the better one for its buckets."""
        self.best, self.longest_first, self.yields = (math.inf, math.inf), False, yields
        for longest_first in (False, True):
            found = self._score_of(outline, longest_first)
            if found < self.best:
                self.best, self.longest_first = found, longest_first

    def _load(self, c: Collective) -> Load | None:
        n, joins = self.model.group_size(c.group_name), c.descriptor.joins
        return None if n is None or joins is None else joins.load(node_sizes.members(c, n), n)

    def _first_span(self, key: Hashable) -> float:
        """Returns `FIRST_SPAN` of a group in seconds."""
        return FIRST_SPAN * max(c.price.latency for c in self.divisible[key])

    def _improve(self, key: Hashable, chosen: dict[Hashable, _Option]) -> None:
        """Tries divisions of one group: spans from `FIRST_SPAN` on until the score gets no better, and deadlines."""
        span = self._first_span(key)
        self._attempt({key: _Option(span)}, chosen)
        factor = 1 / STEP
        if self._attempt({key: _Option(span * STEP)}, chosen):
            factor, span = STEP, span * STEP
        while self._attempt({key: _Option(span * factor)}, chosen):
            span *= factor
        self._improve_by_deadline(key, chosen)
        if key not in chosen and key in self._too_large:
            self._improve_in_less_memory(key, span, chosen)
        if not all(map(self._pays, self.divisible[key])):
            kept = chosen.get(key, _Option(span))
            self._attempt({key: replace(kept, all_sizes=False)}, chosen)

    def _improve_by_deadline(self, key: Hashable, chosen: dict[Hashable, _Option]) -> None:
        candidates = self.divisible[key]
        if not (_are_early(candidates) or _are_late(candidates)):
            return
        least = self._least(candidates)
        for span in [math.inf, *([chosen[key].span] if key in chosen else [])]:
            results = [self._attempt({key: _Option(span, deadline=share * least)}, chosen) for share in DEADLINES]
            if any(results):
                return

    def _improve_in_less_memory(self, key: Hashable, span: float, chosen: dict[Hashable, _Option]) -> None:
        """Tries buckets of fewer members: the results of a bucket are all held at once."""
        most = len(self.divisible[key]) // 2
        while most > 1 and not self._attempt({key: _Option(span, most=most)}, chosen):
            most //= 2
        if most > 1:
            self._attempt({key: _Option(span, most=3 * most // 2)}, chosen)

    def _least(self, candidates: Sequence[Candidate]) -> float:
        """Returns the least time of all work if collectives had no latency and buckets cost nothing."""
        early, least = _are_early(candidates), 0.0
        kinds: set[str] = set()
        ordered = candidates if early else sorted(candidates, key=_last_payload_first)
        load = ordered[0].load
        for i, c in enumerate(ordered):
            load = _add_loads(load, c.load) if i else load
            kinds.add(c.collective.kind)
            price = self._cost_of(c.collective.group_name, kinds, load)
            least = max(least, price.transfer + (c.after if early else c.before))
        return least

    def _attempt(self, options: Mapping[Hashable, _Option], chosen: dict[Hashable, _Option]) -> bool:
        """Divides groups differently and keeps that if it is better; returns whether it is."""
        divided = self._divide({**chosen, **options})
        members = tuple(tuple(c.task for c in bucket) for bucket in divided)
        if not divided or members in self._tried:
            return False
        self._tried.add(members)
        score = self._score(divided)
        if score[0] > self.best[0]:
            self._too_large.update(options)
        if score > self.best or (score == self.best and options.keys() <= chosen.keys()):
            return False
        self.best = score
        chosen.update(options)
        return True

    def _score(self, divided: Divided) -> Score:
        """Returns the score of a division, or any worse score if it is certainly worse than the best one."""
        buckets = [Bucket(tuple(c.task for c in bucket), self._bucket_cost(bucket)) for bucket in divided]
        outline = Outline(self.tasks.joined(buckets))
        return self._score_of(outline, self.longest_first)

    def _score_of(self, outline: Outline, longest_first: bool) -> Score:
        over, seconds = self.best
        policy = replace(quick_policy(outline, self.limit, longest_first), yields=self.yields)
        return score(outline, policy if over else replace(policy, until=seconds - _contention(outline)), self.limit)

    # --------------------------------------------------------------------------------------- dividing

    def _divide(self, chosen: Mapping[Hashable, _Option]) -> Divided:
        """Returns the buckets for the given options; the other groups stay unbucketed."""
        closure = self.closure.copy()
        found: Divided = []
        for key, option in chosen.items():
            candidates = self.divisible[key]
            if not option.all_sizes:
                candidates = [c for c in candidates if self._pays(c)]
            if option.deadline is None:
                found += self._divide_by_span(candidates, option, closure)
            else:
                found += self._divide_by_deadline(candidates, option.span, option.deadline, closure)
        return found

    def _divide_by_span(self, candidates: Sequence[Candidate], option: _Option, closure: Closure) -> Divided:
        least = max((c.price.latency for c in candidates), default=0.0)
        before, after = 0.0, sum(c.price.transfer for c in candidates)
        filling = _Filling(closure)
        transfer = 0.0
        for c in candidates:
            longest = min(max(least, before), max(least, after), option.span) if option.tapers else option.span
            full = transfer + c.price.transfer > longest or not self._has_room(filling.nbytes, c)
            full = full or len(filling.bucket) == option.most
            if filling.bucket and (full or not filling.fits(c)):
                filling.close()
                before, transfer = before + transfer, 0.0
            filling.add(c)
            transfer += c.price.transfer
            after -= c.price.transfer
        filling.close()
        return filling.found

    def _divide_by_deadline(
        self, candidates: Sequence[Candidate], span: float, deadline: float, closure: Closure
    ) -> Divided:
        """Returns the largest buckets that meet a deadline if they follow each other without a gap.

        The readers of the first member of a gather bucket wait for the whole bucket, and are followed by the compute
        that is left then: that bounds how long a bucket may take. For reductions whose results nobody waits for, the
        same holds backwards: once the payload of the last one is ready, all remaining buckets have to meet the
        deadline.
        """
        early = _are_early(candidates)
        filling = _Filling(closure)
        price, load, done = Price(0.0, 0.0), None, 0.0
        for c in candidates if early else sorted(candidates, key=_last_payload_first):
            bucket = filling.bucket
            if bucket:
                total = _add_loads(load, c.load)
                joined = self._cost_of(c.collective.group_name, filling.kinds | {c.collective.kind}, total)
                rest = bucket[0].after if early else bucket[0].before
                late = done + joined.seconds + rest > deadline or joined.transfer > span
                if late or not self._has_room(filling.nbytes, c) or not filling.fits(c):
                    filling.close()
                    done += price.seconds
                else:
                    price, load = joined, total
            if not filling.bucket:
                price, load = c.price, c.load
            filling.add(c)
        filling.close()
        return filling.found

    def _has_room(self, nbytes: int, c: Candidate) -> bool:
        return self.bucket_bytes is None or nbytes + c.nbytes <= self.bucket_bytes

    def _pays(self, c: Candidate) -> bool:
        """Whether copying it into a bucket and out of it takes less than a latency."""
        price = self._bucket_cost([c])
        return price.packing + price.unpacking < c.price.latency

    def _bucket_cost(self, bucket: Sequence[Candidate]) -> Price:
        load, kinds = functools.reduce(_add_loads, [c.load for c in bucket]), {c.collective.kind for c in bucket}
        return self._cost_of(bucket[0].collective.group_name, kinds, load)

    def _cost_of(self, group_name: str, kinds: Set[str], load: Load | None) -> Price:
        """Returns the cost of a bucket, given the kinds of its members and their total load."""
        if group_name not in self._cost_functions:
            self._cost_functions[group_name] = self.model.pricing(group_name)
        if load is None:
            n = self.model.group_size(group_name) or 1
            return self._cost_functions[group_name](Traffic(NOMINAL_BYTES, NOMINAL_BYTES * n))
        return self._cost_functions[group_name](self.traffic(kinds, load))


class _Filling:
    """Fills buckets one after the other.

    Args:
        closure: merges the members of full buckets into one node.

    Attributes:
        found: the full buckets of at least two members.
        bucket: the bucket that is being filled.
        kinds: of its members.
        nbytes: of its members, over all ranks.
    """

    def __init__(self, closure: Closure) -> None:
        self._closure = closure
        self.found: Divided = []
        self._start()

    def _start(self) -> None:
        self.bucket: list[Candidate] = []
        self.kinds: set[str] = set()
        self.nbytes = 0
        self._members = self._closure.independent_set()

    def fits(self, c: Candidate) -> bool:
        """Whether a candidate is independent of all members."""
        return self._members.fits(c.collective.node)

    def add(self, c: Candidate) -> None:
        """Adds a member."""
        self.bucket.append(c)
        self.kinds.add(c.collective.kind)
        self.nbytes += c.nbytes
        self._members.add(c.collective.node)

    def close(self) -> None:
        """Closes the bucket; the next member starts another one."""
        if len(self.bucket) > 1:
            self._closure.tie([c.collective.node for c in self.bucket])
            self.found.append(self.bucket)
        self._start()


def _add_loads(a: Load | None, b: Load | None) -> Load | None:
    return None if a is None or b is None else Load(a.nbytes + b.nbytes)


def score(outline: Outline, policy: SchedulingPolicy, limit: float) -> Score:
    """Returns the score of the schedule that a policy leads to.

    Args:
        outline: of the tasks.
        policy: to schedule them by.
        limit: bytes.
    """
    found = Scheduler(outline, replace(policy, most=limit)).run()
    # Early decisions can take more memory than estimated. A schedule given up for its time is no faster with less.
    if found.peak_bytes > limit:
        found = Scheduler(outline, replace(policy, limit=NARROWER[-1] * limit)).run()
    return max(found.peak_bytes - limit, 0), found.total + _contention(outline)


def _contention(outline: Outline) -> float:
    """Returns the seconds by which running collectives slow the compute down."""
    return CONTENTION * sum(price.seconds for price in outline.tasks.price.values())


def _is_gather(c: Collective) -> bool:
    """Whether it may run long before its result is needed."""
    joins = c.descriptor.joins
    return joins is not None and joins.bucket == ALL_GATHER_BUCKET.kind


def _are_early(candidates: Sequence[Candidate]) -> bool:
    """Whether all could run at the start, and all results are needed."""
    return all(c.before <= EARLY * c.price.latency and c.after > 0 for c in candidates)


def _last_payload_first(c: Candidate) -> tuple[float, int]:
    return -c.before, -c.task


def _are_late(candidates: Sequence[Candidate]) -> bool:
    """Whether no result is needed by later work."""
    return not any(c.after for c in candidates)


def _saved_latency(candidates: Sequence[Candidate]) -> float:
    """Returns the latency that one bucket of all candidates would save."""
    return sum(c.price.latency for c in candidates[1:])
