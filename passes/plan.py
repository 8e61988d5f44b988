"""What the passes decide about a graph, as data: one rank decides, and all ranks apply it.

Buckets and orders follow from costs, and costs from sizes, which may differ between ranks: shards of static sizes, and
plain inputs. Ranks with other buckets, or another order of collectives, would hang. So one rank makes the plan, and the
others apply it. It is kept with the compiled code: before code from a cache runs for the first time, its plan is
compared with that of the other ranks.

A plan speaks of collectives by their positions among those of the graph, which all ranks have in common, with the same
dependencies between them: these are the key of an election (`key_of`). It states an order of all nodes as well. A rank
that has other nodes, such as one without rows, keeps the order of the collectives, and places the rest by itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch.distributed import Store
from torch.fx import Graph, Node
from torch.utils.flop_counter import flop_registry

from shardcompile import compat
from shardcompile.election import Leadership, elect
from shardcompile.errors import PassError
from shardcompile.passes.graph.collective import collectives
from shardcompile.passes.graph.dependencies import Closure

_WHAT = "the plan of a graph"

Decision = list[Any]
"""Of a bucketing pass: for each bucket the positions of its collectives. Of the scheduler: the positions of all
collectives in their order, the positions of all nodes, and the structure that the graph has then.
"""


@dataclass(frozen=True)
class Plan:
    """The decisions of all passes about one graph.

    Attributes:
        key: of the graph that the passes began with, see `key_of`.
        decisions: the name of each pass that decides, and its decision, in order.
    """

    key: str
    decisions: tuple[tuple[str, Decision], ...] = ()

    def dumps(self) -> bytes:
        """Returns the plan as JSON."""
        return json.dumps([self.key, self.decisions]).encode()

    @staticmethod
    def loads(text: bytes) -> Plan:
        """Returns the plan of a JSON text."""
        key, decisions = json.loads(text)
        return Plan(key, tuple((name, found) for name, found in decisions))

    def __str__(self) -> str:
        lines = [f"plan of graph {self.key[:12]}"]
        for name, found in self.decisions:
            if found and isinstance(found[-1], str):
                starts, order, _ = found
                moved = sum(a > b for a, b in itertools.pairwise(order))
                lines.append(f"  {name}: collectives {starts}; {len(order)} nodes, {moved} moved back")
            else:
                lines.append(f"  {name}: {f'buckets {found}' if found else 'none'}")
        return "\n".join(lines)


def key_of(graph: Graph) -> str:
    """Returns a hash of what the collectives of a graph move, of which depend on which, and of the products.

    It is the same on all ranks. Products tell graphs apart that have the same collectives, such as a forward graph and
    its backward graph; torch traces them on every rank, also for a shard without rows.
    """
    groups: dict[str, int] = {}
    found = collectives(graph)
    closure = Closure(graph, [c.node for c in found])
    lines = []
    for c in found:
        group = groups.setdefault(c.group_name, len(groups))
        lines.append(f"{c.signature} over group {group} after {closure.ancestors(c.node):x}")
    packets = (getattr(n.target, "overloadpacket", None) for n in graph.nodes)
    return _hash([*lines, *sorted(str(p) for p in packets if p in flop_registry)])


def structure_of(graph: Graph) -> str:
    """Returns a hash of the ops of a graph, in order."""
    return _hash([f"{n.op} {n.target if n.op == 'call_function' else ''}" for n in graph.nodes])


def _hash(lines: Sequence[str]) -> str:
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


# ---------------------------------------------------------------------------------------------------- deciding


class _Planning:
    """The plan that is being made, or applied. It begins with the first decision, for a graph that is cleaned up.

    Args:
        passes: states the passes, the same on all ranks.
        plan: the plan to apply; None for that of the rank which is elected to plan.
    """

    def __init__(self, passes: str, plan: Plan | None) -> None:
        self._passes, self._plan = passes, plan
        self._key = ""
        self._left: list[tuple[str, Decision]] | None = None
        self._made: list[tuple[str, Decision]] = []
        self._leadership: Leadership | None = None

    @property
    def made(self) -> Plan | None:
        """The decisions so far; None if there are none."""
        return Plan(self._key, tuple(self._made)) if self._key else None

    def decision(self, graph: Graph, name: str, make: Callable[[], Decision]) -> Decision:
        """Returns the decision of a pass: what it makes, or what the plan states.

        Raises:
            PassError: the plan is that of another graph, or of other passes.
        """
        if not self._key:
            self._begin(graph)
        if self._left is None:
            found = make()
        elif self._left and self._left[0][0] == name:
            _, found = self._left.pop(0)
        else:
            raise PassError(f"the plan of another rank has no decision of {name} here: the ranks have other passes")
        self._made.append((name, found))
        return found

    def _begin(self, graph: Graph) -> None:
        self._key, plan, exchange = key_of(graph), self._plan, Exchange.here()
        if plan is not None and plan.key != self._key:
            raise PassError(f"the plan is for graph {plan.key[:12]}, and this is graph {self._key[:12]}")
        if plan is None and exchange is not None:
            found = exchange.elect(self._key, self._passes)
            if isinstance(found, Leadership):
                self._leadership = found
            elif found is not None:
                plan = Plan.loads(found)
        self._left = None if plan is None else list(plan.decisions)

    def end(self, error: BaseException | None) -> None:
        """Tells the ranks that wait for this one."""
        plan = self.made
        if self._leadership is None or plan is None:
            return
        if error is not None:
            self._leadership.fail(f"{type(error).__name__}: {error}")
        else:
            self._leadership.publish(plan.dumps())


_PLANNING: ContextVar[_Planning | None] = ContextVar("planning", default=None)


def decide_buckets(graph: Graph, name: str, make: Callable[[], list[list[Node]]]) -> list[list[Node]]:
    """Returns the buckets of a pass, each as the starts of its members.

    Args:
        graph: that the decision is about.
        name: of the pass.
        make: makes the decision, unless a plan states it.

    Raises:
        PassError: the plan is that of another graph.
    """
    planning = _PLANNING.get()
    if planning is None:
        return make()
    starts = [c.node for c in collectives(graph)]
    index = {start: i for i, start in enumerate(starts)}
    found = planning.decision(graph, name, lambda: [[index[start] for start in bucket] for bucket in make()])
    try:
        return [[starts[i] for i in bucket] for bucket in found]
    except IndexError:
        raise PassError("the plan of another rank names collectives that this rank's graph does not have") from None


def decide_order(
    graph: Graph, name: str, make: Callable[[], list[Node]], make_after: Callable[[Sequence[Node]], list[Node]]
) -> list[Node]:
    """Returns the order of all nodes of a graph.

    Args:
        graph: that the decision is about.
        name: of the pass.
        make: makes the decision, unless a plan states it.
        make_after: makes it for a graph of another structure than that of the plan, with collectives in a given order.

    Raises:
        PassError: the plan is that of another graph.
    """
    planning = _PLANNING.get()
    if planning is None:
        return make()
    nodes, starts = list(graph.nodes), [c.node for c in collectives(graph)]
    structure = structure_of(graph)

    def made() -> Decision:
        order = make()
        index, position = {start: i for i, start in enumerate(starts)}, {node: i for i, node in enumerate(nodes)}
        return [[index[n] for n in order if n in index], [position[n] for n in order], structure]

    in_order, positions, stated = planning.decision(graph, name, made)
    if stated == structure:
        return [nodes[i] for i in positions]
    if sorted(in_order) != list(range(len(starts))):
        raise PassError("the plan of another rank orders other collectives than this rank's graph has")
    return make_after([starts[i] for i in in_order])


# ----------------------------------------------------------------------------------------------------- agreeing


@dataclass(frozen=True)
class Exchange:
    """Where ranks leave plans for one another.

    Attributes:
        store: of the process group.
        rank: of this process.
    """

    store: Store
    rank: int

    @staticmethod
    def here() -> Exchange | None:
        """Returns that of this process; None if it has no process group of several ranks."""
        given = _EXCHANGE.get()
        if given is not None:
            return given
        if compat.ranks_are_threads() or not compat.has_other_ranks():
            return None
        return Exchange(compat.store(), compat.world_rank())

    def elect(self, key: str, passes: str) -> Leadership | bytes | None:
        """Elects the rank that plans, for a graph and for passes, see `shardcompile.election.elect`."""
        return elect(self.store, f"shardcompile/plan/{key}/{_hash([passes])}", self.rank, _WHAT)


_EXCHANGE: ContextVar[Exchange | None] = ContextVar("exchange", default=None)


@contextlib.contextmanager
def exchanging(store: Store, rank: int) -> Iterator[None]:
    """While the context is active, plans are exchanged over a store, such as between ranks that are traced in turn."""
    token = _EXCHANGE.set(Exchange(store, rank))
    try:
        yield
    finally:
        _EXCHANGE.reset(token)


@contextlib.contextmanager
def planning(passes: str, plan: Plan | None = None) -> Iterator[Callable[[], Plan | None]]:
    """While the context is active, passes decide about one graph by a common plan.

    It yields a function that returns the plan; None while nothing is decided.

    Args:
        passes: states the passes, the same on all ranks.
        plan: the plan to apply; None for that of the rank which is elected to plan.
    """
    current = _Planning(passes, plan)
    token = _PLANNING.set(current)
    try:
        yield lambda: current.made
    except BaseException as error:
        current.end(error)
        raise
    finally:
        _PLANNING.reset(token)
    current.end(None)


def compare(passes: str, plan: Plan) -> None:
    """Compares the plan of code that is about to run with that of the other ranks.

    Args:
        passes: those that made it.
        plan: by which the code was compiled.

    Raises:
        PassError: another rank has code of another plan, such as from the cache of another host.
    """
    exchange = Exchange.here()
    found = None if exchange is None else exchange.elect(plan.key, passes)
    if isinstance(found, Leadership):
        found.publish(plan.dumps())
    elif found is not None and found != plan.dumps():
        raise PassError(
            "this rank has code from a cache that was compiled by another plan than that of other ranks, and would "
            "start collectives in another order. Delete the compiler's caches of all hosts (see "
            "TORCHINDUCTOR_CACHE_DIR)"
        )
