"""The tasks of a graph for the search of schedules: only nodes that take time or memory, by index.

Other nodes (views, parts of results, sizes) are left out; what depends on one depends on its dependencies.
`nodes_in_order` puts them back. Collectives can be joined here before they are in the graph, so that many divisions
into buckets can be tried.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch.fx import Node

from shardcompile.machines import Price
from shardcompile.passes.cost.model import GraphCosts, computes_nothing
from shardcompile.passes.graph.dependencies import needed_first
from shardcompile.passes.schedule.edges import Edges

WORK, START, WAIT = range(3)


@dataclass
class Tasks:
    """Tasks by index, in a valid order, and the tensors that they allocate and read, by index as well.

    Attributes:
        nodes: by task: the node; for a bucket that of its last member.
        kind: by task: `WORK` on the compute stream, `START` of a collective, or `WAIT` for one.
        idle: by task: whether it is a view or an allocation, which is not needed before its first reader.
        seconds: by task: on the compute stream; of a start what it packs, of a wait what it unpacks.
        before: by task: the tasks that it must follow.
        after: by task: the tasks that must follow it.
        alloc: by task: bytes that it allocates.
        makes: by task: the tensor that it allocates, or -1.
        reads: by task: the tensors that it reads. Those of a start are held until its first wait.
        nbytes: by tensor.
        readers: by tensor: the number of tasks that read it.
        start_of: by wait: the collective that it completes.
        stream: by start: its group.
        price: by start: its cost.
        link: by group, see `GraphCosts`.
        fixed: bytes of the inputs that are never freed.
        saved: the tensors that exist from the start and are freed after their last use.
        awaited: the starts that have a wait.
    """

    nodes: list[Node] = field(default_factory=list)
    kind: list[int] = field(default_factory=list)
    idle: list[bool] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    before: list[list[int]] = field(default_factory=list)
    after: list[list[int]] = field(default_factory=list)
    alloc: list[int] = field(default_factory=list)
    makes: list[int] = field(default_factory=list)
    reads: list[list[int]] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)
    readers: list[int] = field(default_factory=list)
    start_of: dict[int, int] = field(default_factory=dict)
    stream: dict[int, str] = field(default_factory=dict)
    price: dict[int, Price] = field(default_factory=dict)
    link: Mapping[str, str] = field(default_factory=dict)
    fixed: int = 0
    saved: list[int] = field(default_factory=list)

    @staticmethod
    def of(edges: Edges, costs: GraphCosts) -> Tasks:
        """Returns the tasks of a graph."""
        tasks = Tasks(link=costs.link)
        index: dict[Node, int] = {}
        required: dict[Node, set[int]] = {}  # by node that is no task: the tasks that it follows
        tensor: dict[Node, int] = {}
        for node in edges.order:
            if node.op == "placeholder":
                required[node] = set()
                if node in costs.freed and costs.nbytes[node]:
                    tensor[node] = tasks._add_tensor(costs.nbytes[node])
                    tasks.saved.append(tensor[node])
                else:
                    tasks.fixed += costs.nbytes[node]
                continue
            before: set[int] = set()
            for b in edges.before[node]:
                if b in index:
                    before.add(index[b])
                else:
                    before |= required[b]
            if not _is_task(node, costs):
                required[node] = before
                continue
            index[node] = tasks._add(node, sorted(before), costs, index)
            if costs.nbytes[node]:
                tensor[node] = tasks._allocate(index[node], costs.nbytes[node])
            read = dict.fromkeys(tensor[b] for x in costs.inputs[node] if (b := costs.storage[x]) in tensor)
            tasks.reads[-1] = list(read)
            for t in read:
                tasks.readers[t] += 1
        tasks.saved = [t for t in tasks.saved if tasks.readers[t]]  # unread ones are freed before the first task
        return tasks

    def _add(self, node: Node, before: list[int], costs: GraphCosts, index: Mapping[Node, int]) -> int:
        n = len(self.nodes)
        self.nodes.append(node)
        is_start = node in costs.group
        self.kind.append(START if is_start else WAIT if node in costs.awaits else WORK)
        self.idle.append(computes_nothing(node))
        self.seconds.append(costs.packing.get(node, 0.0) if is_start else costs.seconds[node])
        self.before.append(before)
        self.after.append([])
        for b in before:
            self.after[b].append(n)
        self.alloc.append(0)
        self.makes.append(-1)
        self.reads.append([])
        if is_start:
            latency = costs.latency.get(node, 0.0)
            self.stream[n] = costs.group[node]
            self.price[n] = Price(latency, costs.seconds[node] - latency)
        elif node in costs.awaits:
            self.start_of[n] = index[costs.awaits[node]]
        return n

    def _allocate(self, task: int, nbytes: int) -> int:
        self.makes[task], self.alloc[task] = self._add_tensor(nbytes), nbytes
        return self.makes[task]

    def _add_tensor(self, nbytes: int) -> int:
        self.nbytes.append(nbytes)
        self.readers.append(0)
        return len(self.nbytes) - 1

    @property
    def at_start(self) -> int:
        """Bytes that are held before the first task."""
        return self.fixed + sum(self.nbytes[t] for t in self.saved)

    @property
    def awaited(self) -> set[int]:
        return set(self.start_of.values())

    def last_reads(self, task: int) -> int:
        """Returns the bytes of the tensors that only this task reads."""
        return sum(self.nbytes[t] for t in self.reads[task] if self.readers[t] == 1)

    def payload_bytes(self, start: int) -> int:
        """Returns the bytes that a collective holds besides its result, until it is awaited."""
        return sum(self.nbytes[t] for t in self.reads[start])

    def joined(self, buckets: Sequence[Bucket]) -> Tasks:
        """Returns the tasks if some collectives share buckets. The results of a bucket are one tensor.

        Args:
            buckets: of collectives that are independent of each other, also through other buckets.
        """
        new = _Joining(self, buckets)
        return new.tasks()


class Bucket(NamedTuple):
    """Collectives that become one.

    Attributes:
        members: their starts, by task.
        price: the cost of the bucket.
    """

    members: tuple[int, ...]
    price: Price


class _Joining:
    """Computes the tasks of a graph with buckets, see `Tasks.joined`: the first member represents its bucket."""

    def __init__(self, old: Tasks, buckets: Sequence[Bucket]) -> None:
        self.old, self.buckets = old, buckets
        self.first = list(range(len(old.nodes)))  # by task: the one that represents it
        self.tensor = list(range(len(old.nbytes)))
        self.costs = {bucket.members[0]: bucket.price for bucket in buckets}
        waits: dict[int, list[int]] = {}
        for wait, start in old.start_of.items():
            waits.setdefault(start, []).append(wait)
        self.unpacks: dict[int, float] = {}
        self.makes: dict[int, int] = {}
        for bucket in buckets:
            first = bucket.members[0]
            outputs = [old.makes[m] for m in bucket.members if old.makes[m] >= 0]  # an empty result takes no memory
            self.makes[first] = outputs[0] if outputs else -1
            for t in outputs:
                self.tensor[t] = outputs[0]
            for m in bucket.members:
                self.first[m] = first
                for wait in waits[m]:
                    self.first[wait] = waits[first][0]
            self.unpacks[waits[first][0]] = bucket.price.unpacking
        self.shared = {first for n, first in enumerate(self.first) if first != n}  # those that represent several

    def tasks(self) -> Tasks:
        old, first = self.old, self.first
        before, reads = self._relabel(old.before, first), self._relabel(old.reads, self.tensor)
        last = {n: i for i, n in enumerate(first)}  # the last member of each bucket
        tasks = [n for i, n in enumerate(first) if last[n] == i]
        order = needed_first(tasks, before.__getitem__, on_demand=old.idle.__getitem__)
        index = [-1] * len(first)
        for i, n in enumerate(order):
            index[n] = i
        new = Tasks(link=old.link, fixed=old.fixed, saved=old.saved, nbytes=[0] * len(old.nbytes))
        new.readers = [0] * len(old.nbytes)
        for t, nbytes in enumerate(old.nbytes):
            new.nbytes[self.tensor[t]] += nbytes
        new.nodes = [old.nodes[n] for n in order]
        new.kind, new.idle = [old.kind[n] for n in order], [old.idle[n] for n in order]
        new.seconds = [self.costs[n].before if n in self.costs else self.unpacks.get(n, old.seconds[n]) for n in order]
        new.before = [[index[b] for b in before[n]] for n in order]
        new.after = [[] for _ in order]
        for i, inputs in enumerate(new.before):
            for b in inputs:
                new.after[b].append(i)
        new.makes = [self.makes.get(n, old.makes[n]) for n in order]
        new.alloc = [new.nbytes[made] if made >= 0 else 0 for made in new.makes]
        new.reads = [reads[n] for n in order]
        for read in new.reads:
            for t in read:
                new.readers[t] += 1
        new.start_of = {index[w]: index[first[s]] for w, s in old.start_of.items() if first[w] == w}
        new.stream = {index[s]: group for s, group in old.stream.items() if first[s] == s}
        new.price = {index[s]: self.costs.get(s, p) for s, p in old.price.items() if first[s] == s}
        return new

    def _relabel(self, lists: Sequence[list[int]], new: Sequence[int]) -> list[list[int]]:
        """Merges the lists of tasks that share a representative, and renames their entries; most stay as they are."""
        found = list(lists)
        renamed = {old for old, name in enumerate(new) if old != name}
        for n in self.shared:
            found[n] = list(lists[n])
        for n, first in enumerate(self.first):
            if first != n:
                found[first] += lists[n]
        for n, names in enumerate(found):
            if not renamed.isdisjoint(names) or n in self.shared:
                found[n] = list(dict.fromkeys([new[name] for name in names]))
        return found


def _is_task(node: Node, costs: GraphCosts) -> bool:
    takes = costs.seconds[node] or costs.nbytes[node]
    return bool(takes) or node in costs.group or node in costs.awaits or node.op == "output"


def nodes_in_order(edges: Edges, tasks: Tasks, order: Sequence[int]) -> list[Node]:
    """Returns all nodes of a graph in the order of its tasks; other nodes follow as soon as they can.

    Args:
        edges: of the graph.
        tasks: of the graph.
        order: all tasks.
    """
    found = [n for n in edges.order if n.op == "placeholder"]
    missing = {node: len(inputs) for node, inputs in edges.before.items()}
    is_task = set(tasks.nodes)

    def settle(ready: list[Node]) -> None:
        while ready:
            found.append(ready.pop())
            ready += released(found[-1])

    def released(node: Node) -> list[Node]:
        for user in edges.after[node]:
            missing[user] -= 1
        return [u for u in edges.after[node] if not missing[u] and u not in is_task]

    for node in list(found):
        settle(released(node))
    settle([n for n in edges.order if n.op != "placeholder" and not edges.before[n] and n not in is_task])
    for n in order:
        settle([tasks.nodes[n]])
    return found
