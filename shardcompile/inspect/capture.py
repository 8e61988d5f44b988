"""`capture`: makes a report while code compiles."""

from __future__ import annotations

import contextlib
import logging
import time
import types
from collections.abc import Collection, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.fx import Graph, GraphModule

from shardcompile.collectives import recording_rows
from shardcompile.compat import observe
from shardcompile.inspect.analyse import (
    Analysis,
    attention_strategies,
    issued_collectives,
    spans,
    traced_collective,
    with_fates,
)
from shardcompile.inspect.data import Compilation, GraphReport, PassStep
from shardcompile.inspect.debugger import decompile, run_from_files
from shardcompile.inspect.report import Report
from shardcompile.passes.cost.model import CostModel
from shardcompile.passes.graph.collective import collectives, origins
from shardcompile.passes.pipeline import watching
from shardcompile.passes.plan import Plan

_LOG = logging.getLogger("shardcompile")

STAGES = ("dynamo", "bytecode", "joint", "aot", "passes", "code")
"""The texts that a report can hold: the graph that Dynamo captured; Dynamo's bytecode, decompiled by depyf; the
joint graph of AOTAutograd; its forward and backward graphs; the graph after each pass; the code from Inductor."""


@contextlib.contextmanager
def capture(
    *,
    stages: Collection[str] = STAGES,
    model: CostModel | None = None,
    caches: bool = False,
    sources: str | Path | None = None,
) -> Iterator[Report]:
    """Reports everything that is compiled inside the context.

        with shardcompile.capture() as report:
            loss = step(x)
            loss.backward()
        print(report)

    A function that was compiled before is not compiled again, so the report does not contain it. Compilation takes
    longer inside the context. Compiled code runs as fast as without it.

    Args:
        stages: which texts of graphs to keep, a subset of `STAGES`. The others take no memory.
        model: the costs for the predicted timeline; None for those of a graph's device.
        caches: whether code may come from the compiler's caches, as outside the context. For such a graph the report
            has only what Dynamo captured.
        sources: a folder for the code that runs. depyf writes it to a folder for each rank, and Python runs it from
            these files, so that a debugger can step through it.

    Raises:
        ValueError: `stages` names an unknown stage, or `sources` is given and ranks are threads.
    """
    if unknown := sorted(set(stages) - set(STAGES)):
        raise ValueError(f"no stage is called {', '.join(unknown)}; there are {', '.join(STAGES)}")
    report = Report(torch=str(torch.__version__))
    watcher = _Watcher(report, frozenset(stages), model)
    start, breaks, cached = time.time(), observe.graph_breaks(), observe.cache_counts()
    with observe.observe_compilations(watcher, caches), watching(watcher), recording_rows() as moved:
        try:
            with run_from_files(sources, report):
                yield report
        except Exception as error:
            report.error = f"{type(error).__name__}: {error}"
            raise
        finally:
            report.moved = list(moved.values())
            _describe_run(report, start, breaks, cached)


def _describe_run(report: Report, start: float, breaks: dict[str, int], cached: dict[str, int]) -> None:
    if dist.is_initialized():
        report.rank, report.world_size = dist.get_rank(), dist.get_world_size()
    compilations = observe.compilations_since(start)
    report.recompiles = [f"{name} ({place}): {reason}" for name, place, reason in compilations if reason]
    report.graph_breaks = [text for text, n in observe.graph_breaks().items() if n > breaks.get(text, 0)]
    now = observe.cache_counts()
    report.caches = {name: now[name] - cached[name] for name in now}


class _Followed:
    """Follows a graph through the passes."""

    def __init__(self, graph: Graph, side: str, stages: frozenset[str], model: CostModel | None) -> None:
        self.side = side
        self.stages: dict[str, str] = {}
        self._wanted = stages
        self._model = model
        if "aot" in stages:
            self.stages["aot"] = _readable(graph)
        self.begin(graph)

    def begin(self, graph: Graph) -> None:
        """Records the graph as the input of the first pass."""
        self._before = self._after = Analysis.of(graph, self._model)
        self._traced = tuple(map(traced_collective, self._before.found))
        self._attention_strategies = attention_strategies(graph)
        self._gone: dict[str, str] = {}
        self._steps: list[PassStep] = []
        self._text = str(graph)

    def passed(self, graph: Graph, name: str) -> None:
        """Records the graph as the result of a pass."""
        text, found = str(graph), collectives(graph)
        changed = text != self._text
        before = self._steps[-1] if self._steps else None
        nodes = (before.nodes[1] if before else self._before.nodes, len(graph.nodes))
        counts = (before.collectives[1] if before else len(self._before.found), len(found))
        self._steps.append(PassStep(name, nodes, counts, changed))
        if not changed:
            return
        self._text = text
        if "passes" in self._wanted:
            self.stages[name] = _readable(graph)
        present = {origin for c in found for origin in origins(c.node)}
        for c in self._traced:
            if c.name not in present:
                self._gone.setdefault(c.name, name)
        if not observe.is_order_pinned(graph):  # AddControlDependencies hides nodes but keeps the order
            self._after = Analysis.of(graph, self._model)

    def report(self) -> GraphReport:
        """Returns the report of the graph."""
        issued = issued_collectives(self._before, self._after, self._traced)
        timeline = self._after.timeline
        return GraphReport(
            side=self.side,
            nodes=self._after.nodes,
            stages=self.stages,
            steps=tuple(self._steps),
            traced=with_fates(self._traced, issued, self._gone),
            issued=issued,
            spans=spans(timeline),
            total=timeline.total,
            compute=timeline.compute,
            exposed=timeline.exposed,
            bound=self._after.bound,
            peak_bytes=timeline.peak_bytes,
            attention_strategies=self._attention_strategies,
        )


class _Watcher:
    """Fills a report during compilations. It is an `Observer` of torch's compiler and a `Watcher` of pipelines."""

    def __init__(self, report: Report, stages: frozenset[str], model: CostModel | None) -> None:
        self._report = report
        self._stages = stages
        self._model = model
        self._current: Compilation | None = None
        self._compiled: _Followed | None = None
        self._offline: _Followed | None = None
        self._graphs: list[tuple[GraphModule, Compilation, str]] = []  # keeps modules alive, so that ids stay unique

    @contextlib.contextmanager
    def captured(self, function: str, place: str, graph: GraphModule) -> Iterator[None]:
        compilation = self._new_compilation(function, place)
        self._keep(compilation, "dynamo", graph.graph)
        outer, self._current = self._current, compilation
        try:
            yield
        finally:
            self._current = outer

    def current(self) -> Compilation:
        return self._current or self._new_compilation("function")

    def traced(self, of: Compilation, graph: GraphModule) -> None:
        self._keep(of, "joint", graph.graph)

    def partitioned(self, of: Compilation, forward: GraphModule, backward: GraphModule) -> None:
        self._graphs += [(forward, of, "forward"), (backward, of, "backward")]

    @contextlib.contextmanager
    def compiling(self, of: Compilation, graph: GraphModule, side: str) -> Iterator[None]:
        outer, self._compiled = self._compiled, self._follow(graph.graph, side)
        try:
            yield
            _put(of, self._compiled.report())
        finally:
            self._compiled = outer
        if side == "inference":
            self._graphs.append((graph, of, side))

    def generated(self, code: str) -> None:
        if self._compiled is not None and "code" in self._stages:
            self._compiled.stages["code"] = code

    def rewritten(self, function: str, bytecode: types.CodeType) -> None:
        same = [c for c in self._report.compilations if c.function == function]
        if same and "bytecode" in self._stages:
            same[-1].stages["bytecode"] = decompile(bytecode)

    def begun(self, graph: Graph) -> None:
        if self._compiled is None:  # the pipeline runs offline, or a user calls it
            self._offline = self._follow(graph, self._origin(graph)[1])
        else:
            self._compiled.begin(graph)

    def passed(self, graph: Graph, name: str) -> None:
        followed = self._compiled or self._offline
        assert followed is not None, "a pipeline begins before it passes"
        followed.passed(graph, name)

    def planned(self, plan: Plan) -> None:
        followed = self._compiled or self._offline
        if followed is not None and "passes" in self._stages:
            followed.stages["plan"] = str(plan)

    def ended(self, graph: Graph) -> None:
        if self._offline is not None:
            _put(self._origin(graph)[0] or self._new_compilation("graph"), self._offline.report())
            self._offline = None

    def _origin(self, graph: Graph) -> tuple[Compilation | None, str]:
        for module, compilation, side in self._graphs:
            if module is graph.owning_module:
                return compilation, side
        return None, "inference"

    def _follow(self, graph: Graph, side: str) -> _Followed:
        model = CostModel.of(graph) if self._model is None else self._model
        self._report.device = _device_of(graph)
        self._report.predicted_for = model.device.name
        return _Followed(graph, side, self._stages, model)

    def _new_compilation(self, function: str, place: str = "") -> Compilation:
        _LOG.info("capture: compiling %s", function)
        compilation = Compilation(function, place, observe.compile_id())
        self._report.compilations.append(compilation)
        return compilation

    def _keep(self, compilation: Compilation, stage: str, graph: Graph) -> None:
        if stage in self._stages:
            compilation.stages[stage] = _readable(graph)


def _put(compilation: Compilation, report: GraphReport) -> None:
    """Adds the report of a graph, which replaces an earlier report of the same side."""
    compilation.graphs[:] = [g for g in compilation.graphs if g.side != report.side] + [report]


def _readable(graph: Graph) -> str:
    module = graph.owning_module
    if module is None:
        return str(graph)
    return str(module.print_readable(print_output=False, include_stride=True))


def _device_of(graph: Graph) -> str:
    devices = (v.device.type for n in graph.nodes if isinstance(v := n.meta.get("val"), torch.Tensor))
    return next(devices, "")
