"""Which collectives meet in buckets: those that make the schedule faster.

A bucket saves the latency of all its members but one. It costs copies, to pack and to unpack, and overlap: it starts
when the last of its payloads is ready, and what needs its first member waits for all of them. Which of the two weighs
more cannot be told from a collective alone, so the buckets are tried. Collectives of one kind and group are divided by
how long a bucket may transfer. The tasks of the graph are joined accordingly (`Tasks.joined`) and scheduled within the
limit of memory. The fastest division is taken. Buckets are smaller at the start, where nothing is there yet to hide
them behind, and at the end, where nothing is left: each transfers no longer than all before it, and no longer than all
after it.

All of it reads `Prices` only, which are the same on every rank.
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
from shardcompile.passes.cost.model import NOMINAL_BYTES, CostModel, Prices, readable
from shardcompile.passes.graph import rank_dependent_sizes
from shardcompile.passes.graph.collective import Collective
from shardcompile.passes.graph.dependencies import Closure
from shardcompile.passes.schedule.edges import Edges
from shardcompile.passes.schedule.outline import Outline, Plan, heads
from shardcompile.passes.schedule.overlap import byte_limit
from shardcompile.passes.schedule.scheduler import Scheduler
from shardcompile.passes.schedule.search import NARROWER, quick_plan
from shardcompile.passes.schedule.tasks import Bucket, Tasks

FIRST_SPAN = 16.0
"""How long a bucket may transfer, in latencies, at the first attempt. Latency is then a 17th of its time."""

STEP = 4.0
"""The factor between one attempt and the next."""

EARLY = 1.0
"""A payload that is ready within so many latencies counts as ready at the start, such as a weight that is cast."""

DEADLINES = (1.02, 1.05, 1.1, 1.2, 1.5, 2.0, 3.0)
"""The first deadlines that are tried, relative to the least time if buckets cost nothing."""

CONTENTION = 0.01
"""An estimate of how much a running collective slows down the compute that hides it."""

WORTH = 1e-3
"""Buckets are tried where the latencies of a kind and group come to this part of a schedule's time."""

Score = tuple[float, float]
"""Bytes that a schedule holds beyond the limit of memory, and its seconds, `CONTENTION` included."""

Divided = list[list["Candidate"]]


@dataclass(frozen=True, eq=False)
class Candidate:
    """A collective that could join a bucket.

    Attributes:
        collective: which.
        task: its start.
        load: what each rank has of it; None if ranks would not agree on that.
        price: of it alone.
        needed: the place of the first work that needs its result.
        before: seconds of compute, in its order, before its payload is ready.
        after: seconds of compute, in its order, from the first that needs its result; 0 if none does.
        nbytes: that all ranks have of it.
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
    """How to divide the candidates of a group.

    Attributes:
        span: seconds that a bucket may transfer.
        all_sizes: whether those join that take longer to copy than a latency.
        deadline: seconds in which all should be done, see `Choice._in_time`; None if it is `span` that divides.
        most: how many may join a bucket; None for as many as there are.
        tapers: whether a bucket may transfer for less than `span` at the start and at the end.
    """

    span: float
    all_sizes: bool = True
    deadline: float | None = None
    most: int | None = None
    tapers: bool = True


_ALL = _Option(math.inf, tapers=False)
"""All candidates of a group in one bucket, as far as they do not depend on each other."""


Pricing = Callable[[Set[str], Load], Traffic]
"""What a bucket moves, by the kinds of its members and by what each rank has of all of them."""


class Choice:
    """Chooses the buckets of one graph.

    Args:
        graph: in a valid order.
        groups: collectives that may meet, by what they have in common.
        model: the costs.
        traffic: of a bucket.
        bucket_bytes: no bucket holds more, over all ranks; None for no limit.
        divides: whether a group may become several buckets. Otherwise it is one, or none.
    """

    def __init__(
        self,
        graph: Graph,
        groups: Mapping[Hashable, Sequence[Collective]],
        model: CostModel,
        traffic: Pricing,
        bucket_bytes: int | None,
        divides: bool = True,
    ) -> None:
        self.graph, self.model, self.traffic, self.bucket_bytes = graph, model, traffic, bucket_bytes
        self.divides = divides
        self._tried: set[tuple[tuple[int, ...], ...]] = set()
        self._too_large: set[Hashable] = set()  # of which buckets were tried that do not fit into memory
        self._prices: dict[str, Callable[[Traffic], Price]] = {}  # by group
        self.closure = Closure(graph, [c.node for group in groups.values() for c in group])
        self.groups = {key: group for key, group in groups.items() if self._may_meet(group)}

    def _may_meet(self, group: Sequence[Collective]) -> bool:
        """Whether there are two next to each other that do not depend on each other."""
        return any(self.closure.independent(b.node, [a.node]) for a, b in itertools.pairwise(group))

    def buckets(self) -> list[list[Node]]:
        """The buckets, each by its members' starts; none if the graph is best without."""
        if not self.groups:
            return []
        self._look()
        chosen: dict[Hashable, _Option] = {}
        worthwhile = [key for key in self.divisible if _latencies(self.divisible[key]) >= WORTH * self.best[1]]
        if not self.divides and self._attempt(dict.fromkeys(worthwhile, _ALL), chosen):
            worthwhile = []
        for key in sorted(worthwhile, key=lambda key: -_latencies(self.divisible[key])):
            if self.divides:
                self._improve(key, chosen)
            else:
                self._attempt({key: _ALL}, chosen)
        return [[c.collective.node for c in bucket] for bucket in self._divided(chosen)]

    def _look(self) -> None:
        """Price and schedule the graph as it is."""
        prices, edges = Prices.of(self.graph, self.model), Edges.of(self.graph)
        self.limit = byte_limit(self.graph, prices)
        self.tasks = Tasks.of(edges, prices)
        outline = Outline(self.tasks)
        number = {node: n for n, node in enumerate(self.tasks.nodes)}
        ready, reached = heads(self.tasks), outline.places_before()
        self.divisible: dict[Hashable, list[Candidate]] = {}
        for key, group in self.groups.items():
            for c in group:
                task = number[c.node]
                place = outline.first_use[task]
                price = self.tasks.price[task]
                before, after = outline.clock[reached[task]], outline.clock[-1] - outline.clock[place]
                candidate = Candidate(
                    c, task, self._load(c, prices.labels), price, place, before, after, c.global_bytes
                )
                # A gather that could run at the start meets only its like: it would wait for the others for nothing.
                early = _gathers(c) and ready[task] <= EARLY * candidate.price.latency
                self.divisible.setdefault((key, early), []).append(candidate)
        for candidates in self.divisible.values():
            candidates.sort(key=lambda c: (c.needed, c.task))
        self.best, self.longest_first = (math.inf, math.inf), False
        for longest_first in (False, True):
            found = self._scored(outline, quick_plan(outline, self.limit, longest_first))
            if found < self.best:
                self.best, self.longest_first = found, longest_first

    def _load(self, c: Collective, labels: Mapping[Node, set[str]]) -> Load | None:
        n = self.model.group_size(c.group_name)
        if n is None:
            return None
        members = rank_dependent_sizes.members(c, n)
        joins = c.descriptor.joins
        return joins.load(members, n) if joins is not None and readable(c, members, labels) else None

    def _improve(self, key: Hashable, chosen: dict[Hashable, _Option]) -> None:
        """Try divisions of one group, from `FIRST_SPAN` to where it gets no better, and such as are done in time."""
        span = FIRST_SPAN * max(c.price.latency for c in self.divisible[key])
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
        """Try buckets of fewer members: all results of a bucket are there at once."""
        most = len(self.divisible[key]) // 2
        while most > 1 and not self._attempt({key: _Option(span, most=most)}, chosen):
            most //= 2
        if most > 1:
            self._attempt({key: _Option(span, most=3 * most // 2)}, chosen)

    def _least(self, candidates: Sequence[Candidate]) -> float:
        """The least time for all work if collectives had no latency and buckets cost nothing."""
        early, least = _are_early(candidates), 0.0
        kinds: set[str] = set()
        ordered = candidates if early else sorted(candidates, key=_from_the_end)
        load = ordered[0].load
        for i, c in enumerate(ordered):
            load = _together(load, c.load) if i else load
            kinds.add(c.collective.kind)
            price = self._price_of(c.collective.group_name, kinds, load)
            least = max(least, price.transfer + (c.after if early else c.before))
        return least

    def _attempt(self, options: Mapping[Hashable, _Option], chosen: dict[Hashable, _Option]) -> bool:
        """Divide groups differently, and keep that if it is better; whether it was."""
        divided = self._divided({**chosen, **options})
        named = tuple(tuple(c.task for c in bucket) for bucket in divided)
        if not divided or named in self._tried:
            return False
        self._tried.add(named)
        score = self._score(divided)
        if score[0] > self.best[0]:
            self._too_large.update(options)
        if score > self.best or (score == self.best and options.keys() <= chosen.keys()):
            return False
        self.best = score
        chosen.update(options)
        return True

    def _score(self, divided: Divided) -> Score:
        """The score of a division. If it is sure to be worse than the best one, any score that is worse."""
        buckets = [Bucket(tuple(c.task for c in bucket), self._price(bucket)) for bucket in divided]
        outline = Outline(self.tasks.joined(buckets))
        return self._scored(outline, quick_plan(outline, self.limit, self.longest_first))

    def _scored(self, outline: Outline, plan: Plan) -> Score:
        over, seconds = self.best
        return score(outline, plan if over else replace(plan, until=seconds - _contention(outline)), self.limit)

    # --------------------------------------------------------------------------------------- dividing

    def _divided(self, chosen: Mapping[Hashable, _Option]) -> Divided:
        """The buckets, as some groups are to be divided; the others stay as they are."""
        closure = self.closure.copy()
        found: Divided = []
        for key, option in chosen.items():
            candidates = self.divisible[key]
            if not option.all_sizes:
                candidates = [c for c in candidates if self._pays(c)]
            if option.deadline is None:
                found += self._parts(candidates, option, closure)
            else:
                found += self._in_time(candidates, option.span, option.deadline, closure)
        return found

    def _parts(self, candidates: Sequence[Candidate], option: _Option, closure: Closure) -> Divided:
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

    def _in_time(self, candidates: Sequence[Candidate], span: float, deadline: float, closure: Closure) -> Divided:
        """As large buckets as allow for a deadline, if they follow each other without a gap.

        What needs the first member of a gather waits for all of it, and is followed by the compute that is left then:
        so long a bucket may take at most. The same backwards for reductions at whose end nobody waits: when the payload
        of the last one is ready, all that are left have to be in time.
        """
        early = _are_early(candidates)
        filling = _Filling(closure)
        price, load, done = Price(0.0, 0.0), None, 0.0
        for c in candidates if early else sorted(candidates, key=_from_the_end):
            bucket = filling.bucket
            if bucket:
                together = _together(load, c.load)
                joined = self._price_of(c.collective.group_name, filling.kinds | {c.collective.kind}, together)
                rest = bucket[0].after if early else bucket[0].before
                late = done + joined.seconds + rest > deadline or joined.transfer > span
                if late or not self._has_room(filling.nbytes, c) or not filling.fits(c):
                    filling.close()
                    done += price.seconds
                else:
                    price, load = joined, together
            if not filling.bucket:
                price, load = c.price, c.load
            filling.add(c)
        filling.close()
        return filling.found

    def _has_room(self, nbytes: int, c: Candidate) -> bool:
        return self.bucket_bytes is None or nbytes + c.nbytes <= self.bucket_bytes

    def _pays(self, c: Candidate) -> bool:
        """Whether it is copied into a bucket and out of it in less than a latency."""
        price = self._price([c])
        return price.packing + price.unpacking < c.price.latency

    def _price(self, bucket: Sequence[Candidate]) -> Price:
        load, kinds = functools.reduce(_together, [c.load for c in bucket]), {c.collective.kind for c in bucket}
        return self._price_of(bucket[0].collective.group_name, kinds, load)

    def _price_of(self, group_name: str, kinds: Set[str], load: Load | None) -> Price:
        """The price of a bucket of such members, which have this load in all."""
        if group_name not in self._prices:
            self._prices[group_name] = self.model.pricing(group_name)
        if load is None:
            n = self.model.group_size(group_name) or 1
            return self._prices[group_name](Traffic(NOMINAL_BYTES, NOMINAL_BYTES * n))
        return self._prices[group_name](self.traffic(kinds, load))


class _Filling:
    """Buckets that are filled one after the other.

    Args:
        closure: in which the members of those that are full are tied.

    Attributes:
        found: those that are full, if they have several members.
        bucket: the one that is filled.
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
        self._together = self._closure.together()

    def fits(self, c: Candidate) -> bool:
        """Whether it depends on none of the members, nor one of them on it."""
        return self._together.fits(c.collective.node)

    def add(self, c: Candidate) -> None:
        """One more member."""
        self.bucket.append(c)
        self.kinds.add(c.collective.kind)
        self.nbytes += c.nbytes
        self._together.add(c.collective.node)

    def close(self) -> None:
        """The next member starts another bucket."""
        if len(self.bucket) > 1:
            self._closure.tie([c.collective.node for c in self.bucket])
            self.found.append(self.bucket)
        self._start()


def _together(a: Load | None, b: Load | None) -> Load | None:
    return None if a is None or b is None else Load(a.nbytes + b.nbytes)


def score(outline: Outline, plan: Plan, limit: float) -> Score:
    """What a plan comes to.

    Args:
        outline: of the tasks.
        plan: to schedule them by.
        limit: bytes.
    """
    found = Scheduler(outline, replace(plan, most=limit)).run()
    # What is decided early can take more than was thought. What was given up for its time would be no faster with less.
    if found.peak_bytes > limit:
        found = Scheduler(outline, replace(plan, limit=NARROWER[1] * limit)).run()
    return max(found.peak_bytes - limit, 0), found.total + _contention(outline)


def _contention(outline: Outline) -> float:
    """Seconds by which collectives slow the compute down."""
    return CONTENTION * sum(price.seconds for price in outline.tasks.price.values())


def _gathers(c: Collective) -> bool:
    """Whether it may run long before its result is needed."""
    joins = c.descriptor.joins
    return joins is not None and joins.bucket == ALL_GATHER_BUCKET.kind


def _are_early(candidates: Sequence[Candidate]) -> bool:
    """Whether all could run at the start, and are needed."""
    return all(c.before <= EARLY * c.price.latency and c.after > 0 for c in candidates)


def _from_the_end(c: Candidate) -> tuple[float, int]:
    return -c.before, -c.task


def _are_late(candidates: Sequence[Candidate]) -> bool:
    """Whether nothing needs their results."""
    return not any(c.after for c in candidates)


def _latencies(candidates: Sequence[Candidate]) -> float:
    """What one bucket of all would save."""
    return sum(c.price.latency for c in candidates[1:])
