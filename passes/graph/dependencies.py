"""What in a graph must come before what."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from torch.fx import Graph, Node

from shardcompile.passes.graph.ops import op_of


class Closure:
    """Which of some nodes depend on which others of them, directly or through any nodes, as sets of bits.

    A node that writes to memory keeps its place among all others, and random ops their order among each other: what
    they do is not told by their arguments.

    Args:
        graph: in a valid order.
        nodes: that are asked about. Time and memory grow with the graph's edges times their number (in words of bits).
    """

    def __init__(self, graph: Graph, nodes: Iterable[Node]) -> None:
        self._number = {node: i for i, node in enumerate(nodes)}
        self._ancestors = [0] * len(self._number)
        behind: dict[Node, int] = {}
        for node, inputs in ordered_inputs(graph).items():
            before = 0
            for i in inputs:
                before |= behind[i]
            here = self._number.get(node)
            if here is not None:
                self._ancestors[here] = before
                before |= 1 << here
            behind[node] = before

    def copy(self) -> Closure:
        """The same, to tie nodes in."""
        new = object.__new__(Closure)
        new._number, new._ancestors = self._number, list(self._ancestors)
        return new

    def needs(self, node: Node, other: Node) -> bool:
        """Whether `node` must come after `other`."""
        return bool(self._ancestors[self._number[node]] >> self._number[other] & 1)

    def independent(self, node: Node, others: Iterable[Node]) -> bool:
        """Whether `node` may run before each of the others as well as after it."""
        return not any(self.needs(node, o) or self.needs(o, node) for o in others)

    def together(self) -> Together:
        """An empty set of nodes that may run in any order."""
        return Together(self._number, self._ancestors)

    def tie(self, nodes: Iterable[Node]) -> None:
        """Reckon with independent nodes as one from now on: what needs one of them needs all, and all their inputs."""
        numbers = [self._number[n] for n in nodes]
        members = before = 0
        for n in numbers:
            members |= 1 << n
            before |= self._ancestors[n]
        both = members | before
        self._ancestors = [ancestors | both if ancestors & members else ancestors for ancestors in self._ancestors]
        for n in numbers:
            self._ancestors[n] |= before


class Together:
    """Nodes none of which needs another one, in a time that does not grow with how many there are.

    Args:
        number: by node.
        ancestors: by a node's number: what it needs, as a set of bits.
    """

    def __init__(self, number: Mapping[Node, int], ancestors: Sequence[int]) -> None:
        self._number, self._ancestors = number, ancestors
        self._members = self._before = 0

    def fits(self, node: Node) -> bool:
        """Whether a node may run before each of the others as well as after it."""
        n = self._number[node]
        return not (self._ancestors[n] & self._members or self._before >> n & 1)

    def add(self, node: Node) -> None:
        """One more, that fits."""
        n = self._number[node]
        self._members |= 1 << n
        self._before |= self._ancestors[n]


def ordered_inputs(graph: Graph) -> dict[Node, list[Node]]:
    """For each node the nodes that it must directly follow."""
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
    return inputs


T = TypeVar("T", bound=Hashable)


def needed_first(
    items: Sequence[T], before: Callable[[T], Iterable[T]], on_demand: Callable[[T], bool] = lambda item: False
) -> list[T]:
    """Items in their order, each behind what it needs: all of that comes before it, in its order, if it has not yet.

    Args:
        items: each once.
        before: what an item needs, directly.
        on_demand: whether an item comes when another one needs it, not before; the last one needs all of those.
    """
    place = {item: i for i, item in enumerate(items)}
    order: list[T] = []
    done: set[T] = set()
    for item in items:
        if item in done or on_demand(item):
            continue
        if done.issuperset(before(item)):
            done.add(item)
            order.append(item)
            continue
        stack = [[item]]  # of what is next, from its end; what an item needs lies above it
        while stack:
            if not stack[-1]:
                stack.pop()
                continue
            assert len(stack) <= len(items), "what is needed closes a circle"
            top = stack[-1][-1]
            missing = [] if top in done else _find_missing(top, before, done)
            if missing:
                stack.append(sorted(missing, key=place.__getitem__, reverse=True))
                continue
            stack[-1].pop()
            if top not in done:
                done.add(top)
                order.append(top)
    return order


def _find_missing(item: T, before: Callable[[T], Iterable[T]], done: set[T]) -> set[T]:
    """What an item needs, also indirectly, and has not come."""
    found: set[T] = set()
    pending = [item]
    while pending:
        for b in before(pending.pop()):
            if b not in done and b not in found:
                found.add(b)
                pending.append(b)
    return found


def reorder(graph: Graph, inputs: dict[Node, list[Node]], priority: Callable[[Node], float]) -> None:
    """Sort a graph: what is needed first, and of the nodes that could be next the one of least priority.

    Args:
        graph: its order is changed.
        inputs: the nodes that each node must directly follow.
        priority: by node; ties are broken by the present order.
    """
    place = {node: i for i, node in enumerate(graph.nodes)}
    missing = {node: len(set(inputs[node])) for node in place}
    users: dict[Node, list[Node]] = {node: [] for node in place}
    for node in place:
        for i in dict.fromkeys(inputs[node]):
            users[i].append(node)
    ready = [(priority(n), place[n], n) for n in place if not missing[n]]
    heapq.heapify(ready)
    order: list[Node] = []
    while ready:
        node = heapq.heappop(ready)[2]
        order.append(node)
        for user in users[node]:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, (priority(user), place[user], user))
    assert len(order) == len(place), "the graph has a cycle"
    for earlier, later in itertools.pairwise(order):
        earlier.append(later)


def writes(node: Node) -> bool:
    return op_of(node).writes
