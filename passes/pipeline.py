"""Passes in their order, as Inductor takes them."""

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
from shardcompile.compat.shard_symbols import common_hints
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
from shardcompile.passes.cleanup.dead_collectives import DropRepeatedWaits, DropSuperseded, ShareEqualCollectives
from shardcompile.passes.cleanup.inverse_pairs import CancelRoundTrips, DropOwnSlice
from shardcompile.passes.cleanup.local_shards import ReduceThenSlice, SpreadLocalShard
from shardcompile.passes.cleanup.merge import MergeReductions
from shardcompile.passes.cost.model import CostModel, keeping_prices
from shardcompile.passes.foreign.normalise import NormaliseChains
from shardcompile.passes.graph import rank_dependent_sizes
from shardcompile.passes.graph.collective import Seen, collectives, forget_origins
from shardcompile.passes.schedule.control_dependencies import HoldOrder, hold_payloads
from shardcompile.passes.schedule.overlap import ScheduleOverlap
from shardcompile.passes.verify import agreed, is_record, record_of, verify

_LOG = logging.getLogger("shardcompile")

_DECIDING = (
    *(DropSuperseded, ShareEqualCollectives, CancelRoundTrips, DropOwnSlice, ReduceThenSlice, MergeReductions),
    *(BucketAllGathers, BucketAllToAlls, BucketRanges, BucketExchanges, BucketReduceScatters, BucketAllReduces),
    ScheduleOverlap,
)
"""The passes that decide by the graph which collectives there are, and in which order they start."""


class Pass(Protocol):
    """A step of the pipeline. Its `repr` says all that its outcome depends on besides the graph."""

    name: str

    def __call__(self, graph: Graph) -> None:
        """Change a valid graph into a valid graph that computes the same."""


@dataclass(frozen=True)
class Step:
    """What a pass did to a graph.

    Attributes:
        name: of the pass.
        nodes: number of nodes before and after.
        collectives: number of collectives before and after.
        before: the graph as text.
        after: the graph as text.
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
    """The passes that are on by default, in their order.

    Args:
        model: the costs, the same on every rank; None for those of the device that a graph runs on.
    """
    return [
        DropSuperseded(),
        DropRepeatedWaits(),
        ShareEqualCollectives(),
        CancelRoundTrips(),
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
        HoldOrder(),
    ]


def foreign_passes() -> list[Pass]:
    """The passes that make one collective of chains that others emit for uneven shards, for the joint graph.

    They run before the graph is divided into forward and backward: afterwards a rank may find a half of a chain where
    others find all of it.
    """
    return [DropRepeatedWaits(), NormaliseChains(agree=agreed)]


class Pipeline(compat.CustomGraphPass):
    """Runs passes one after the other, and checks the graph after each.

    Args:
        passes: in their order.
        off: names of passes to leave out.
        record: whether to keep in `history`, for every graph, what each pass made of it.
        in_step: whether all ranks have to compile each graph together, because a pass asks the others.
        final: whether what it leaves is the graph that is compiled: such pipelines are watched, and their results
            compared with other ranks'.

    Attributes:
        passes: those that run.
        history: for every graph the steps, if they are recorded.

    Raises:
        PassError: `off` names a pass that is not there.
    """

    def __init__(
        self,
        passes: Sequence[Pass] | None = None,
        off: Sequence[str] = (),
        record: bool = False,
        in_step: bool = False,
        final: bool = True,
    ) -> None:
        passes = default_passes() if passes is None else list(passes)
        names = [p.name for p in passes]
        if unknown := sorted(set(off) - set(names)):
            raise PassError(f"no pass is called {', '.join(unknown)}; there are {', '.join(names)}")
        self.passes = [p for p in passes if p.name not in off]
        self.record = record
        self.in_step = in_step
        self.final = final
        self.history: list[list[Step]] = []

    def __call__(self, graph: Graph) -> None:
        """Run the passes on a graph, in place.

        Raises:
            PassError: a pass failed, or left an invalid graph; the error says how to do without the pass.
        """
        with keeping_prices(), common_hints(), _without_collections():
            self._run(graph)

    def _run(self, graph: Graph) -> None:
        if self.record:
            self.history.append([])
        watchers = _WATCHERS.here() if self.final else []
        for watcher in watchers:
            watcher.begun(graph)
        seen, passes = None, self.passes
        few_rows = rank_dependent_sizes.have_few_rows(graph)
        compared = self.is_verified or (self.final and (few_rows or rank_dependent_sizes.are_marked(graph)))
        if few_rows and rank_dependent_sizes.ranks_may_differ(graph):
            _LOG.info(
                "some ranks have no rows or one of shards whose sizes are known: the graph stays as it was traced"
            )
            passes = [p for p in passes if not isinstance(p, _DECIDING)]
        for graph_pass in passes:
            before = _describe(graph) if self.record else None
            seen = _call(graph_pass, graph, seen)
            for watcher in watchers:
                watcher.passed(graph, graph_pass.name)
            if before is not None:
                self.history[-1].append(_step(graph_pass.name, before, _describe(graph)))
        if self.final and graph.owning_module is not None and not any(isinstance(p, HoldOrder) for p in self.passes):
            hold_payloads(graph)  # no matter of speed
        for watcher in watchers:
            watcher.ended(graph)
        if not self.final:
            forget_origins(graph)
            if few_rows:
                rank_dependent_sizes.mark(graph)
        if compared:
            read_notes_with(_before_first_run)
            leave_note(graph, record_of(graph))

    def __str__(self) -> str:
        return "\n".join(f"{i}. {p.name:<28} {p!r}" for i, p in enumerate(self.passes, 1)) or "no passes"

    def uuid(self) -> object:
        """What compiled code depends on besides this library's sources, by which all of torch's caches are keyed.

        None, so that nothing is cached, where something is to be seen each time that a graph is compiled. What was
        compiled without a record of its collectives is not used where they are compared.
        """
        if self.record or self.in_step or _WATCHERS.here():
            return None
        read_notes_with(_before_first_run)  # torch asks for this before it looks anything up
        if not self.is_verified:
            return repr(self.passes)
        return f"{self.passes!r} and a record of collectives"

    @property
    def is_verified(self) -> bool:
        """Whether ranks compare what it leaves."""
        return config.verify and self.final and not self.in_step


def _before_first_run(notes: tuple[Any, ...]) -> Callable[[], None] | None:
    """What has to be done before a compiled graph runs, by the records that came with it: one for each module."""
    if not notes and not (config.verify and any(p.is_verified for p in custom_post_passes(Pipeline))):
        return None
    if not notes or not all(map(is_record, notes)):
        raise PassError(
            "code from the compiler's cache has lost the record of its collectives, so that it cannot be compared with "
            "what other ranks run. Delete the cache (see TORCHINDUCTOR_CACHE_DIR), compile without caches "
            "(TORCHINDUCTOR_FORCE_DISABLE_CACHES=1), or do without the comparison (SHARDCOMPILE_VERIFY=0)"
        )
    record = tuple(entry for note in notes for entry in note)
    return functools.partial(verify, record) if record else None


def before_division(pipeline: Pipeline, foreign: bool = False) -> Pipeline:
    """What runs on the graph of forward and backward together: some passes of a pipeline, and `foreign_passes()`.

    A round trip between the two would leave its way back in the backward graph, and with it all that is needed to
    compute anew what it sends: for AOTAutograd a wait is something that has to be done, whether it is read or not. So
    would, with torch 2.15, what the backward pass asks for again: it is saved, but its second wait stays.

    Args:
        pipeline: what runs on the divided graphs.
        foreign: whether the chains of others are made one collective first.
    """
    kinds = (DropSuperseded, ShareEqualCollectives, DropRepeatedWaits, CancelRoundTrips, MergeReductions)
    early = [p for kind in kinds for p in pipeline.passes if isinstance(p, kind)]
    return Pipeline([*(foreign_passes() if foreign else ()), *early], in_step=foreign, final=False)


class Watcher(Protocol):
    """Sees every pipeline of its rank at work, see `watching`. It changes nothing."""

    def begun(self, graph: Graph) -> None:
        """A graph as it comes to the first pass."""

    def passed(self, graph: Graph, name: str) -> None:
        """The graph after a pass."""

    def ended(self, graph: Graph) -> None:
        """The graph after the last pass."""


_WATCHERS: Listeners[Watcher] = Listeners()


def watching(watcher: Watcher) -> contextlib.AbstractContextManager[None]:
    """Have every pipeline of this rank tell what it does inside of this."""
    return _WATCHERS.with_one_more(watcher)


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Have no garbage collected meanwhile. A process that has loaded torch looks through millions of objects each time.
    Passes over large graphs make enough objects for that to take a quarter of their time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _call(graph_pass: Pass, graph: Graph, seen: Seen | None) -> Seen:
    """Run a pass, and check what it left, unless that is the graph as it was `seen` after the last check."""
    try:
        graph_pass(graph)
        left = Seen.of(graph)
        if left != seen:
            graph.lint()
        return left
    except Exception as error:
        raise PassError(
            f"the pass {graph_pass.name} failed{_place(error)}: {type(error).__name__}: {error}. "
            f"To compile without it: inductor_options(off=[{graph_pass.name!r}])"
        ) from error


def _place(error: Exception) -> str:
    """The node that was worked on: of the innermost call that has one."""
    found = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        for value in frame.f_locals.values():
            if isinstance(value, Node):
                found = f" at node {value.format_node() or value}"
    return found


_Described = tuple[int, int, str]


def _describe(graph: Graph) -> _Described:
    return len(graph.nodes), len(collectives(graph)), str(graph)


def _step(name: str, before: _Described, after: _Described) -> Step:
    return Step(name, (before[0], after[0]), (before[1], after[1]), before[2], after[2])
