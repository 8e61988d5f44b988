"""What a report holds: plain data, the same for text, HTML, JSON and tests."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass, field

from shardcompile.collectives import MovedRows


@dataclass(frozen=True)
class TracedCollective:
    """A collective as it was traced, before any pass of this library.

    Attributes:
        name: of its node.
        kind: such as ``all_gather_v``, see `shardcompile.passes.graph.collective.KINDS`.
        ranks: of its group, in its order.
        mesh_dim: name or number of the mesh dim that the group lies along, or an empty text.
        dtypes: of what a rank puts in.
        global_bytes: of the tensor that the group's ranks hold together, or that each of them gets.
        least_bytes: that a rank of the group puts in.
        most_bytes: that a rank of the group puts in.
        redistribution: from which placements to which, such as ``S(0)[3,5] -> R``, or an empty text.
        op: the op that was being traced.
        gathered_for: an op without a rule, for which full values had to be gathered, or an empty text.
        source: the user's line that led to it, or an empty text.
        module: path of the module that it was traced in, or an empty text.
        fate: what the passes made of it, in words; an empty text if they left it alone.
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


@dataclass(frozen=True)
class IssuedCollective:
    """A collective as it is issued, after all passes. Times in seconds, predicted.

    Attributes:
        name: of its node.
        kind: such as ``all_gather_bucket``.
        ranks: of its group.
        dtypes: of what a rank puts in.
        global_bytes: see `TracedCollective`.
        least_bytes: that a rank of the group puts in.
        most_bytes: that a rank of the group puts in.
        members: which of the traced collectives it stands for.
        start: when it starts.
        end: when it ends.
        exposed: how long the compute stream waits for it.
        behind: seconds of compute between its start and its wait, before the passes and after them.
        overlaps: the matrix products, convolutions and attentions between its start and its wait, in their order.
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
    behind: tuple[float, float]
    overlaps: tuple[str, ...]

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return self.end - self.start


@dataclass(frozen=True)
class Span:
    """A piece of the predicted timeline, in seconds since the start of its graph."""

    label: str
    stream: str
    start: float
    end: float


@dataclass(frozen=True)
class PassStep:
    """What a pass did: numbers of nodes and of collectives, before and after it."""

    name: str
    nodes: tuple[int, int]
    collectives: tuple[int, int]
    changed: bool


@dataclass(frozen=True)
class GraphReport:
    """One graph that runs: a forward pass, a backward pass, or an inference. Times in seconds, memory in bytes.

    Attributes:
        side: "forward", "backward" or "inference".
        nodes: how many, after all passes.
        stages: graphs as text by what made them: "aot", then the passes that changed something; "code" is Inductor's.
        steps: what each pass did.
        traced: its collectives before the passes.
        issued: its collectives after them, in the order in which they start.
        spans: the predicted timeline.
        total: until everything has ended.
        compute: work of the compute stream.
        exposed: how long the compute stream has nothing to do.
        bound: what no order of the graph can beat.
        peak_bytes: the most memory at any time.
        ways: which ways attention goes in it, and why, see `shardcompile.config.attention`.
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
    ways: tuple[str, ...] = ()

    def sources_of(self, c: IssuedCollective) -> str:
        """The user's lines that led to an issued collective, or an empty text."""
        return " and ".join(dict.fromkeys(source for m in c.members if (source := self.traced[m].source)))


@dataclass
class Compilation:
    """A graph that Dynamo captured, and what became of it.

    Attributes:
        function: its name.
        place: its file and line, or an empty text.
        compile_id: of torch: which frame, and how often it has been compiled before.
        stages: as text: "dynamo", what was captured; "bytecode", what runs in place of the function's own;
            "joint", forward and backward together.
        graphs: that run. None if the code came out of a cache, or its backend does not use AOTAutograd.
    """

    function: str
    place: str
    compile_id: str
    stages: dict[str, str] = field(default_factory=dict)
    graphs: list[GraphReport] = field(default_factory=list)


@dataclass(repr=False)
class ReportData:
    """The data of a report. `Report` says what each attribute is, and shows them."""

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
        """The sum of what all issued collectives hold together."""
        return sum(c.global_bytes for c in self.issued)

    @property
    def exposed(self) -> float:
        """Predicted seconds in which the compute stream has nothing to do, of all graphs."""
        return sum(graph.exposed for graph in self.graphs)

    def named_graphs(self) -> Iterator[tuple[str, GraphReport]]:
        """Graphs by a name that is the same on every rank and in every run of a program."""
        for i, compilation in enumerate(self.compilations):
            for graph in compilation.graphs:
                yield f"{i} {compilation.function} {graph.side}", graph

    def to_json(self) -> str:
        """The whole report as JSON."""
        return json.dumps(dataclasses.asdict(self), indent=1)
