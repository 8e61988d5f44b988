"""Dependencies between the nodes of a graph, those between writes and between random ops included."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from torch.fx import Graph, Node

from shardcompile.passes.graph.ops import op_of


class Closure:
    """The transitive dependencies between some nodes, directly or through any nodes, as bit sets.

    A node that writes to memory keeps its position among all others, and random ops keep their order: their effects do
    not show in their arguments.

    Args:
        graph: in a valid order.
        nodes: whose dependencies are tracked. Time and memory grow with the edges of the graph times the number of
            these nodes (in words of bits).
    """

    def __init__(self, graph: Graph, nodes: Iterable[Node]) -> None:
        self._index = {node: i for i, node in enumerate(nodes)}
        self._ancestors = [0] * len(self._index)
        required: dict[Node, int] = {}
        for node, inputs in ordered_inputs(graph).items():
            before = 0
            for i in inputs:
                before |= required[i]
            index = self._index.get(node)
            if index is not None:
                self._ancestors[index] = before
                before |= 1 << index
            required[node] = before

    def ancestors(self, node: Node) -> int:
        """Returns the nodes that a node must come after, as a bit set of their positions among those tracked."""
        return self._ancestors[self._index[node]]

    def copy(self) -> Closure:
        """Returns a copy in which nodes can be tied."""
        new = object.__new__(Closure)
        new._index, new._ancestors = self._index, list(self._ancestors)
        return new

    def needs(self, node: Node, other: Node) -> bool:
        """Whether `node` must come after `other`."""
        return bool(self._ancestors[self._index[node]] >> self._index[other] & 1)

    def independent(self, node: Node, others: Iterable[Node]) -> bool:
        """Whether `node` may run before as well as after each of the others."""
        return not any(self.needs(node, o) or self.needs(o, node) for o in others)

    def independent_set(self) -> IndependentSet:
        """Returns an empty set of mutually independent nodes."""
        return IndependentSet(self._index, self._ancestors)

    def tie(self, nodes: Iterable[Node]) -> None:
        """Treats independent nodes as one from now on: what needs one of them needs all, and all their inputs."""
        indices = [self._index[n] for n in nodes]
        members = before = 0
        for n in indices:
            members |= 1 << n
            before |= self._ancestors[n]
        both = members | before
        self._ancestors = [ancestors | both if ancestors & members else ancestors for ancestors in self._ancestors]
        for n in indices:
            self._ancestors[n] |= before


class IndependentSet:
    """A set of mutually independent nodes; queries take time that does not grow with the size of the set.

    Args:
        index: of each node.
        ancestors: by index: the nodes that a node needs, as a bit set.
    """

    def __init__(self, index: Mapping[Node, int], ancestors: Sequence[int]) -> None:
        self._index, self._ancestors = index, ancestors
        self._members = self._before = 0

    def fits(self, node: Node) -> bool:
        """Whether a node is independent of all nodes of the set."""
        n = self._index[node]
        return not (self._ancestors[n] & self._members or self._before >> n & 1)

    def add(self, node: Node) -> None:
        """Adds a node that is independent of the others."""
        n = self._index[node]
        self._members |= 1 << n
        self._before |= self._ancestors[n]


def ordered_inputs(graph: Graph, chain: Sequence[Node] = ()) -> dict[Node, list[Node]]:
    """Returns the direct dependencies of each node.

    Args:
        graph: any.
        chain: nodes of which each depends on the one before it, besides what it depends on anyway.
    """
    inputs: dict[Node, list[Node]] = {}
    since_barrier: list[Node] = []
    barrier: Node | None = None
    random: Node | None = None
    for node in graph.nodes:
        before = node.all_input_nodes
        if barrier is not None:
            before.append(barrier)
        op = op_of(node)
        if op.writes or node.op == "output":
            before += since_barrier
            barrier, since_barrier = node, []
        else:
            since_barrier.append(node)
        if op.random:
            before += [] if random is None else [random]
            random = node
        inputs[node] = before
    for earlier, later in itertools.pairwise(chain):
        inputs[later].append(earlier)
    return inputs


T = TypeVar("T", bound=Hashable)


def needed_first(
    items: Sequence[T], before: Callable[[T], Iterable[T]], on_demand: Callable[[T], bool] = lambda item: False
) -> list[T]:
    """Returns items in their order, except that everything an item needs is moved before it, in order.

    Args:
        items: each once.
        before: direct dependencies of an item.
        on_demand: whether an item is placed only where another one needs it; the last item needs all of those.
    """
    position = {item: i for i, item in enumerate(items)}
    order: list[T] = []
    done: set[T] = set()
    for item in items:
        if item in done or on_demand(item):
            continue
        if done.issuperset(before(item)):
            done.add(item)
            order.append(item)
            continue
        stack = [[item]]  # pending items, the next one last; what an item needs lies above it
        while stack:
            if not stack[-1]:
                stack.pop()
                continue
            assert len(stack) <= len(items), "the dependencies have a cycle"
            top = stack[-1][-1]
            missing = [] if top in done else _find_missing(top, before, done)
            if missing:
                stack.append(sorted(missing, key=position.__getitem__, reverse=True))
                continue
            stack[-1].pop()
            if top not in done:
                done.add(top)
                order.append(top)
    return order


def _find_missing(item: T, before: Callable[[T], Iterable[T]], done: set[T]) -> set[T]:
    """Returns the transitive dependencies of an item that are not done."""
    found: set[T] = set()
    pending = [item]
    while pending:
        for b in before(pending.pop()):
            if b not in done and b not in found:
                found.add(b)
                pending.append(b)
    return found


def reorder(graph: Graph, inputs: dict[Node, list[Node]], priority: Callable[[Node], float]) -> None:
    """Sorts a graph topologically; of the nodes that could be next, the one of the least priority comes first.

    Args:
        graph: its order is changed.
        inputs: direct dependencies of each node.
        priority: by node; ties are broken by the present order.
    """
    position = {node: i for i, node in enumerate(graph.nodes)}
    missing = {node: len(set(inputs[node])) for node in position}
    users: dict[Node, list[Node]] = {node: [] for node in position}
    for node in position:
        for i in dict.fromkeys(inputs[node]):
            users[i].append(node)
    ready = [(priority(n), position[n], n) for n in position if not missing[n]]
    heapq.heapify(ready)
    order: list[Node] = []
    while ready:
        node = heapq.heappop(ready)[2]
        order.append(node)
        for user in users[node]:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, (priority(user), position[user], user))
    assert len(order) == len(position), "the graph has a cycle"
    move_into(order)


def move_into(order: Sequence[Node]) -> None:
    """Moves all nodes of a graph into an order."""
    for earlier, later in itertools.pairwise(order):
        earlier.append(later)


def writes(node: Node) -> bool:
    """Whether a node writes to one of its arguments."""
    return op_of(node).writes
