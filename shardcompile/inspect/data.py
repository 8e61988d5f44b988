"""The data of a report, which text, HTML, JSON and tests read."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass, field

from shardcompile.collectives import MovedRows


@dataclass(frozen=True)
class TracedCollective:
    """A collective as it was traced, before the passes of this library.

    Attributes:
        name: the name of its node.
        kind: its kind, such as ``all_gather_v``; see `shardcompile.passes.graph.collective.KINDS`.
        ranks: the ranks of its group, in the order of the group.
        mesh_dim: the name or number of the group's mesh dim, or an empty text.
        dtypes: the dtypes of its payloads.
        global_bytes: the bytes of the global tensor that the ranks hold together, or that each of them receives.
        least_bytes: the bytes of the smallest payload of a rank.
        most_bytes: the bytes of the largest payload of a rank.
        redistribution: the placements before and after, such as ``S(0)[3,5] -> R``, or an empty text.
        op: the op that needs its result.
        gathered_for: the op without a sharding rule, which runs on full tensors, or an empty text.
        source: the line of the program that led to it, or an empty text.
        module: the path of the module that it was traced in, or an empty text.
        fate: a description of what the passes did to it; empty if they did nothing.
        written_to: "plain" if its result is written into a plain tensor, or an empty text.
    """

    name: str
    kind: str
    ranks: tuple[int, ...]
    mesh_dim: str
    dtypes: tuple[str, ...]
    global_bytes: int
    least_bytes: int
    most_bytes: int
    redistribution: str
    op: str
    gathered_for: str
    source: str
    module: str
    fate: str = ""
    written_to: str = ""


@dataclass(frozen=True)
class IssuedCollective:
    """A collective as it is issued, after all passes. Times are predicted, in seconds.

    Attributes:
        name: the name of its node.
        kind: its kind, such as ``all_gather_bucket``.
        ranks: the ranks of its group.
        dtypes: the dtypes of its payloads.
        global_bytes: see `TracedCollective`.
        least_bytes: see `TracedCollective`.
        most_bytes: see `TracedCollective`.
        members: the indices of the traced collectives that it replaces.
        start: its start, since the start of the graph.
        end: its end, since the start of the graph.
        exposed: how long the compute stream waits for it.
        overlappable: seconds of compute between its start and its wait, which can hide it, before and after the passes.
        overlaps: the matmuls, convolutions and attentions between its start and its wait, in order.
    """

    name: str
    kind: str
    ranks: tuple[int, ...]
    dtypes: tuple[str, ...]
    global_bytes: int
    least_bytes: int
    most_bytes: int
    members: tuple[int, ...]
    start: float
    end: float
    exposed: float
    overlappable: tuple[float, float]
    overlaps: tuple[str, ...]

    @property
    def seconds(self) -> float:
        """Its duration."""
        return self.end - self.start


@dataclass(frozen=True)
class Span:
    """One bar of the predicted timeline. Times are in seconds since the start of the graph."""

    label: str
    stream: str
    start: float
    end: float


@dataclass(frozen=True)
class PassStep:
    """The effect of a pass: the numbers of nodes and of collectives before and after it."""

    name: str
    nodes: tuple[int, int]
    collectives: tuple[int, int]
    changed: bool


@dataclass(frozen=True)
class GraphReport:
    """One graph that runs: a forward pass, a backward pass, or an inference. Times are in seconds.

    Attributes:
        side: "forward", "backward" or "inference".
        nodes: the number of nodes after all passes.
        stages: the graph as text: "aot", then after each pass that changed it, by name. "plan" is what the passes
            decided, and "code" is Inductor's code.
        steps: the effect of each pass.
        traced: the collectives before the passes.
        issued: the collectives after the passes, in the order of their starts.
        spans: the predicted timeline.
        total: the time until everything has ended.
        compute: the work of the compute stream.
        exposed: how long the compute stream waits or has nothing to do.
        bound: a lower bound on the time, for any order of the nodes.
        peak_bytes: the peak memory in bytes.
        attention_strategies: the strategies of its attentions, with the reasons; see `shardcompile.config.attention`.
    """

    side: str
    nodes: int
    stages: dict[str, str]
    steps: tuple[PassStep, ...]
    traced: tuple[TracedCollective, ...]
    issued: tuple[IssuedCollective, ...]
    spans: tuple[Span, ...]
    total: float
    compute: float
    exposed: float
    bound: float
    peak_bytes: int
    attention_strategies: tuple[str, ...] = ()

    def sources_of(self, c: IssuedCollective) -> str:
        """Returns the lines of the program that led to an issued collective, or an empty text."""
        return " and ".join(dict.fromkeys(source for m in c.members if (source := self.traced[m].source)))


@dataclass
class Compilation:
    """A graph that Dynamo captured, and the graphs that were compiled from it.

    Attributes:
        function: the name of the function.
        place: the file and line of the function, or an empty text.
        compile_id: torch's compile id: the frame, and the number of its earlier compilations.
        stages: texts: "dynamo" is the captured graph, "bytecode" is Dynamo's bytecode for the function, "joint" is the
            joint graph of forward and backward.
        graphs: the graphs that run. Empty if the code came from a cache, or if the backend does not use AOTAutograd.
    """

    function: str
    place: str
    compile_id: str
    stages: dict[str, str] = field(default_factory=dict)
    graphs: list[GraphReport] = field(default_factory=list)


@dataclass(repr=False)
class ReportData:
    """The data of a report. `Report` documents the attributes and shows them."""

    rank: int = 0
    world_size: int = 1
    device: str = ""
    torch: str = ""
    predicted_for: str = ""
    compilations: list[Compilation] = field(default_factory=list)
    recompiles: list[str] = field(default_factory=list)
    graph_breaks: list[str] = field(default_factory=list)
    caches: dict[str, int] = field(default_factory=dict)
    moved: list[MovedRows] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    error: str = ""

    @property
    def graphs(self) -> list[GraphReport]:
        """The graphs of all compilations."""
        return [graph for compilation in self.compilations for graph in compilation.graphs]

    @property
    def traced(self) -> list[TracedCollective]:
        """The collectives of all graphs as they were traced."""
        return [c for graph in self.graphs for c in graph.traced]

    @property
    def issued(self) -> list[IssuedCollective]:
        """The collectives of all graphs as they are issued."""
        return [c for graph in self.graphs for c in graph.issued]

    @property
    def total_bytes(self) -> int:
        """The global bytes of all issued collectives together."""
        return sum(c.global_bytes for c in self.issued)

    @property
    def exposed(self) -> float:
        """The exposed time of all graphs together, predicted, in seconds."""
        return sum(graph.exposed for graph in self.graphs)

    def named_graphs(self) -> Iterator[tuple[str, GraphReport]]:
        """Yields all graphs, each with a name that is the same on every rank and in every run of a program."""
        for i, compilation in enumerate(self.compilations):
            for graph in compilation.graphs:
                yield f"{i} {compilation.function} {graph.side}", graph

    def to_json(self) -> str:
        """Returns the full report as JSON."""
        return json.dumps(dataclasses.asdict(self), indent=1)
