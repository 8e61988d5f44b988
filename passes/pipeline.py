"""The pipeline: runs the passes in order, as one custom graph pass of Inductor."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch.fx import Graph, Node

from shardcompile import compat, config
from shardcompile.compat.compiled import custom_post_passes, leave_note, read_notes_with
from shardcompile.compat.threads import Listeners
from shardcompile.errors import PassError
from shardcompile.passes.bucket.buckets import (
    BucketAllGathers,
    BucketAllReduces,
    BucketAllToAlls,
    BucketRanges,
    BucketReduceScatters,
)
from shardcompile.passes.bucket.exchanges import BucketExchanges
from shardcompile.passes.bucket.lower import LowerEvenGathers
from shardcompile.passes.cleanup.dead_collectives import DropDeadCollectives, DropRepeatedWaits, ShareEqualCollectives
from shardcompile.passes.cleanup.inverse_pairs import CancelInversePairs, DropOwnSlice
from shardcompile.passes.cleanup.local_shards import ReduceThenSlice, SpreadLocalShard
from shardcompile.passes.cleanup.merge import MergeReductions
from shardcompile.passes.cost.model import CostModel, caching_costs
from shardcompile.passes.cost.routes import assume_balanced_routes
from shardcompile.passes.foreign.normalise import NormaliseChains
from shardcompile.passes.graph.collective import Seen, collectives, forget_origins
from shardcompile.passes.plan import Plan, compare, planning
from shardcompile.passes.schedule.control_dependencies import AddControlDependencies, hold_payloads
from shardcompile.passes.schedule.overlap import ScheduleOverlap
from shardcompile.passes.verify import Record, agreed, record_of, verify

_LOG = logging.getLogger("shardcompile")


class Pass(Protocol):
    """One step of the pipeline. Its `repr` states everything besides the graph that its outcome depends on."""

    name: str

    def __call__(self, graph: Graph) -> None:
        """Transforms a valid graph, in place, into a valid graph that computes the same values."""


@dataclass(frozen=True)
class Step:
    """Records what one pass did to a graph.

    Attributes:
        name: of the pass.
        nodes: number of nodes before and after.
        collectives: number of collectives before and after.
        before: the graph before the pass, as text.
        after: the graph after the pass, as text.
    """

    name: str
    nodes: tuple[int, int]
    collectives: tuple[int, int]
    before: str
    after: str

    def __str__(self) -> str:
        counts = "collectives {} -> {}, nodes {} -> {}".format(*self.collectives, *self.nodes)
        return f"{self.name:<28} {counts if self.before != self.after else 'no change'}"


def default_passes(model: CostModel | None = None) -> list[Pass]:
    """Returns the passes that run by default, in order.

    Args:
        model: the cost model, rank-invariant; None for that of the device that a graph runs on.
    """
    return [
        DropDeadCollectives(),
        DropRepeatedWaits(),
        ShareEqualCollectives(),
        CancelInversePairs(),
        DropOwnSlice(),
        ReduceThenSlice(),
        SpreadLocalShard(),
        MergeReductions(model=model),
        BucketAllGathers(model=model),
        BucketAllToAlls(model=model),
        BucketRanges(model=model),
        BucketExchanges(model=model),
        BucketReduceScatters(model=model),
        BucketAllReduces(model=model),
        LowerEvenGathers(),
        ScheduleOverlap(model=model),
        AddControlDependencies(),
    ]


def foreign_passes() -> list[Pass]:
    """Returns the passes for the joint graph that rewrite the chains that others emit for uneven shards into one
    collective.

    They run before the joint graph is partitioned into forward and backward: afterwards one rank may hold half of a
    chain where others hold all of it.
    """
    return [DropRepeatedWaits(), NormaliseChains(agree=agreed)]


class Pipeline(compat.CustomGraphPass):
    """Runs passes one after the other and checks the graph after each.

    Args:
        passes: in order.
        off: names of passes to leave out.
        record: whether to keep in `history`, for every graph, the step of each pass.
        in_step: whether all ranks have to compile each graph together, because a pass communicates with the other
            ranks.
        final: whether its output graph is the one that is compiled: such pipelines are watched, and their collectives
            are compared between ranks.
        plan: the plan to apply, to a graph of the same structure; None to make one, on one rank for all.

    Attributes:
        passes: the passes that run.
        history: the steps of each graph, if they are recorded.

    Raises:
        PassError: `off` names a pass that does not exist.
    """

    def __init__(
        self,
        passes: Sequence[Pass] | None = None,
        off: Sequence[str] = (),
        record: bool = False,
        in_step: bool = False,
        final: bool = True,
        plan: Plan | None = None,
    ) -> None:
        passes = default_passes() if passes is None else list(passes)
        names = [p.name for p in passes]
        if unknown := sorted(set(off) - set(names)):
            raise PassError(f"no pass is called {', '.join(unknown)}; there are {', '.join(names)}")
        self.passes = [p for p in passes if p.name not in off]
        self.record = record
        self.in_step = in_step
        self.final = final
        self.plan = plan
        self.history: list[list[Step]] = []

    def __call__(self, graph: Graph) -> None:
        """Runs the passes on a graph, in place.

        Raises:
            PassError: a pass failed or left an invalid graph; the message says how to switch the pass off.
        """
        with caching_costs(), _without_garbage_collection():
            self._run(graph)

    def _run(self, graph: Graph) -> None:
        """Runs the passes by a common plan, tells watchers, and leaves a note for the compiled code."""
        if self.record:
            self.history.append([])
        watchers = _WATCHERS.here() if self.final else []
        for watcher in watchers:
            watcher.begun(graph)
        if self.final:
            assume_balanced_routes(graph)
        seen = None
        stated = " ".join(p.name if _is_known_by_address(p) else repr(p) for p in self.passes)
        with planning(stated, self.plan) as plan_so_far:
            for graph_pass in self.passes:
                before = _describe(graph) if self.record else None
                seen = _call(graph_pass, graph, seen)
                for watcher in watchers:
                    watcher.passed(graph, graph_pass.name)
                if before is not None:
                    self.history[-1].append(_step(graph_pass.name, before, _describe(graph)))
        plan = plan_so_far()
        if plan is not None:
            for watcher in watchers:
                watcher.planned(plan)
        if (
            self.final
            and graph.owning_module is not None
            and not any(isinstance(p, AddControlDependencies) for p in self.passes)
        ):
            hold_payloads(graph)  # needed for correctness
        for watcher in watchers:
            watcher.ended(graph)
        if not self.final:
            forget_origins(graph)
        if self.is_verified or plan is not None:
            read_notes_with(_before_first_run)
            leave_note(graph, Note(record_of(graph) if self.is_verified else None, stated, plan))

    def __str__(self) -> str:
        return "\n".join(f"{i}. {p.name:<28} {p!r}" for i, p in enumerate(self.passes, 1)) or "no passes"

    def uuid(self) -> object:
        """Returns the key by which torch's caches tell pipelines apart, besides the sources of this library.

        It is None, so that nothing is cached, where every compilation has to be observed, or where the `repr` of a pass
        does not state what its outcome depends on. Code that was compiled without a record of its collectives is not
        reused where records are compared.
        """
        if self.record or self.in_step or self.plan or _WATCHERS.here() or any(map(_is_known_by_address, self.passes)):
            return None
        read_notes_with(_before_first_run)  # torch asks for the key before any cache lookup
        if not self.is_verified:
            return repr(self.passes)
        return f"{self.passes!r} and a record of collectives"

    @property
    def is_verified(self) -> bool:
        """Whether the ranks compare the collectives of its output graph."""
        return config.verify and self.final and not self.in_step


@dataclass(frozen=True)
class Note:
    """What is kept with compiled code.

    Attributes:
        record: the collectives of the graph, if ranks compare them.
        passes: states the passes.
        plan: the plan that it was compiled by, if there was anything to decide.
    """

    record: Record | None
    passes: str
    plan: Plan | None


def _before_first_run(notes: tuple[Any, ...]) -> Callable[[], None] | None:
    """Returns the check to run before the first call of a compiled graph, or None.

    Args:
        notes: those that were stored with the code, one for each module.
    """
    records = [n.record for n in notes if isinstance(n, Note) and n.record is not None]
    is_verified = config.verify and any(p.is_verified for p in custom_post_passes(Pipeline))
    if any(not isinstance(n, Note) for n in notes) or (is_verified and len(records) < max(len(notes), 1)):
        raise PassError(
            "code from the compiler's cache has lost the record of its collectives, so that it cannot be compared with "
            "what other ranks run. Delete the cache (see TORCHINDUCTOR_CACHE_DIR), compile without caches "
            "(TORCHINDUCTOR_FORCE_DISABLE_CACHES=1), or do without the comparison (SHARDCOMPILE_VERIFY=0)"
        )
    record = tuple(entry for one in records for entry in one)
    plans = [(n.passes, n.plan) for n in notes if n.plan is not None]
    return functools.partial(_check, record, plans) if record or plans else None


def _check(record: Record, plans: Sequence[tuple[str, Plan]]) -> None:
    if record:
        verify(record)
    for passes, plan in plans:
        compare(passes, plan)


def before_division(pipeline: Pipeline, foreign: bool = False) -> Pipeline:
    """Returns the pipeline for the joint graph, before it is partitioned into forward and backward.

    It holds some passes of a pipeline, and `foreign_passes()`. An inverse pair between forward and backward would leave
    its second collective in the backward graph, with everything needed to recompute what it sends: for AOTAutograd a
    wait has a side effect, whether its result is read or not. The same holds, with torch 2.15, for a collective that
    the backward pass repeats: its result is saved, but its second wait stays.

    Args:
        pipeline: the one that runs on the partitioned graphs.
        foreign: whether foreign chains are rewritten into one collective first.
    """
    kinds = (DropDeadCollectives, ShareEqualCollectives, DropRepeatedWaits, CancelInversePairs, MergeReductions)
    early = [p for kind in kinds for p in pipeline.passes if isinstance(p, kind)]
    return Pipeline([*(foreign_passes() if foreign else ()), *early], in_step=foreign, final=False)


class Watcher(Protocol):
    """Observes every pipeline of its rank, see `watching`, and changes nothing."""

    def begun(self, graph: Graph) -> None:
        """Called with the input graph of the first pass."""

    def passed(self, graph: Graph, name: str) -> None:
        """Called with the graph after each pass."""

    def planned(self, plan: Plan) -> None:
        """Called with the plan after the last pass, if there was anything to decide."""

    def ended(self, graph: Graph) -> None:
        """Called with the output graph of the last pass."""


_WATCHERS: Listeners[Watcher] = Listeners()


def watching(watcher: Watcher) -> contextlib.AbstractContextManager[None]:
    """Registers a watcher of every pipeline of this rank while the context is active."""
    return _WATCHERS.with_one_more(watcher)


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Disables garbage collection while the context is active.

    A process that has loaded torch scans millions of objects in each collection. Passes over large graphs allocate
    enough objects for that to take a quarter of their time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _call(graph_pass: Pass, graph: Graph, seen: Seen | None) -> Seen:
    """Runs a pass and lints the graph, unless it equals `seen`, the graph after the last check."""
    try:
        graph_pass(graph)
        result = Seen.of(graph)
        if result != seen:
            graph.lint()
        return result
    except Exception as error:
        raise PassError(
            f"the pass {graph_pass.name} failed{_failing_node(error)}: {type(error).__name__}: {error}. "
            f"To compile without it: inductor_options(off=[{graph_pass.name!r}])"
        ) from error


def _failing_node(error: Exception) -> str:
    """Describes the node that was being processed: that of the innermost frame that has one."""
    found = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        for value in frame.f_locals.values():
            if isinstance(value, Node):
                found = f" at node {value.format_node() or value}"
    return found


def _is_known_by_address(graph_pass: Pass) -> bool:
    """Whether a pass has the `repr` that Python gives to objects.

    Other objects may have the same address: those of forked processes, as ranks may be, and those that are made later.
    """
    return " at 0x" in repr(graph_pass)


_Described = tuple[int, int, str]


def _describe(graph: Graph) -> _Described:
    return len(graph.nodes), len(collectives(graph)), str(graph)


def _step(name: str, before: _Described, after: _Described) -> Step:
    return Step(name, (before[0], after[0]), (before[1], after[1]), before[2], after[2])
