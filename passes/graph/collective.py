"""The collectives of an FX graph, described by what they do rather than by the names of their nodes."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.fx import Graph, Node

from shardcompile import compat
from shardcompile.collectives.arguments import map_arguments
from shardcompile.collectives.descriptor import STARTS, Descriptor, descriptor_of, descriptors, payloads_of
from shardcompile.collectives.reductions import ALL_REDUCE
from shardcompile.collectives.traffic import is_number, nbytes_of, size_of
from shardcompile.errors import ShardError
from shardcompile.passes.graph.ops import WAIT as WAIT
from shardcompile.sharding import CHUNK_KEY, GroupPartition, IntLike

KINDS = {op: d.kind for d in descriptors() if d.communicates for op in d.overloads}
"""The functional collectives, torch's and ours. All take their payload first and the name of the group last."""

NOTES = "shardcompile"
"""The key of ``node.meta["custom"]`` that states why a collective is there, see `shardcompile.compat.annotate_nodes`.
"""

_ORIGINS = "shardcompile_origins"
_INHERITED = (
    "stack_trace",
    "nn_module_stack",
    "fwd_nn_module_stack",
    "source_fn_stack",
    "autograd_backward",
    "partitioner_tag",
    "seq_nr",
    "custom",
)


@dataclass(frozen=True, eq=False)
class Collective:
    """A collective of a graph.

    Attributes:
        node: its start.
        descriptor: what it does.
        payloads: the tensors that this rank contributes: one, except for coalesced collectives.
        group_name: name of its process group.
        waits: the nodes that complete it, in graph order. Torch 2.15 repeats the wait for a result that the backward
            pass needs.
        functional: whether it writes to none of its arguments. Passes leave the others alone.
    """

    node: Node
    descriptor: Descriptor[Any]
    payloads: tuple[Node, ...]
    group_name: str
    waits: tuple[Node, ...]
    functional: bool

    @staticmethod
    def of(node: Node) -> Collective | None:
        """Returns the collective that a node starts, or None."""
        found = _started_descriptor(node)
        if found is None:
            return None
        arguments = found.signature.read(node.args)
        payloads, group_name = tuple(payloads_of(arguments)), compat.common_name(arguments.group_name)
        assert isinstance(group_name, str) and all(isinstance(p, Node) for p in payloads), (
            f"unknown arguments of {node}"
        )
        results = [node, *(u for u in node.users if u.target is operator.getitem)]
        waits = tuple(u for r in results for u in r.users if u.target is WAIT)
        functional = not node.target._schema.is_mutable  # type: ignore[union-attr]
        return Collective(node, found, payloads, group_name, waits, functional)

    @property
    def kind(self) -> str:
        """The name of what it does; see `KINDS`."""
        return self.descriptor.kind

    @property
    def arguments(self) -> Any:
        """Its arguments by name, as they are in the graph now: nodes in place of tensors and symbols."""
        return self.descriptor.signature.read(self.node.args)

    @property
    def values(self) -> Any:
        """Its arguments by name, with the values of nodes: fake tensors and symbols."""
        return map_arguments(value_of, self.arguments)

    @property
    def parts(self) -> Any:
        """Its arguments by name, with payloads as fake tensors, and nodes in place of symbols."""
        first, *rest = arguments = self.arguments
        is_coalesced = isinstance(first, (list, tuple))
        return type(arguments)([value_of(p) for p in first] if is_coalesced else value_of(first), *rest)

    @property
    def payload(self) -> Node:
        """The only tensor that this rank contributes."""
        (payload,) = self.payloads
        return payload

    @property
    def value(self) -> torch.Tensor:
        """The payload as a fake tensor."""
        return self.payload.meta["val"]

    @property
    def nbytes(self) -> int:
        """Bytes that this rank contributes; by the hints of symbolic sizes.

        Not rank-invariant where shards have static, unequal sizes: decisions read `global_bytes`.
        """
        return sum(nbytes_of(p.meta["val"]) for p in self.payloads)

    @cached_property
    def global_size(self) -> Any:
        """Bytes of the tensor that the group's ranks hold together, or that each of them gets; may be symbolic.

        Halos are not counted.
        """
        if self.descriptor.whole is not None:
            return self.descriptor.whole(self.values)
        total = sum(size_of(p.meta["val"]) for p in self.payloads)
        return total * self.group_size if self.descriptor.of_one_rank else total

    @property
    def global_bytes(self) -> int:
        """`global_size` as an integer, by the hints of symbolic sizes. Rank-invariant."""
        return _hint(self.global_size)

    @property
    def signature(self) -> str:
        """What has to be the same on every rank of the group, as one line of text."""
        is_known = not self.descriptor.of_one_rank
        nbytes = f"{self.global_size} B" if is_known and isinstance(self.global_size, int) else "unknown size"
        dtypes = " ".join(str(p.meta["val"].dtype).removeprefix("torch.") for p in self.payloads)
        words = [a for a in self.arguments._replace(group_name=None) if isinstance(a, str)]
        sizes = ["shard sizes", ",".join(map(str, self.sizes))] if is_known and self.sizes is not None else []
        return " ".join([self.kind, *words, dtypes, nbytes, *sizes])

    @property
    def group_size(self) -> int:
        """Number of ranks of the group."""
        return compat.process_group(self.group_name).size()

    @property
    def sizes(self) -> tuple[int, ...] | None:
        """Shard sizes along the sharded dim in group order, or None if they are not static. Rank-invariant.

        For an all-to-all or a fetch they are those of its source.
        """
        source = self._source()
        if source is None:
            return None
        total, partition = source
        unknown = not all(map(is_number, partition.sizes)) if partition.sizes else not is_number(partition.key)
        if unknown or (not partition.sizes and partition.key == CHUNK_KEY and not is_number(total)):
            return None
        return partition.shards(total, self.group_size)

    def hinted_sizes(self) -> tuple[int, ...] | None:
        """Returns `sizes`, with symbolic ones as in the call that was traced; for reports, not for decisions."""
        source = self._source()
        if source is None:
            return None
        total, partition = source
        hinted = GroupPartition(
            [_hint(s) for s in partition.sizes], _hint(partition.key), [_hint(n) for n in partition.grouping]
        )
        try:
            return hinted.shards(_hint(total), self.group_size)
        except (LookupError, ShardError):  # the key of another process
            return None

    def _source(self) -> tuple[Any, GroupPartition] | None:
        return None if self.descriptor.source is None else self.descriptor.source(self.values)

    @property
    def backward(self) -> bool:
        """Whether it is part of a backward pass."""
        return _is_backward(self.node)

    @property
    def source(self) -> str:
        """The user's line of code that led to it, or an empty string."""
        lines = [line.strip() for line in str(self.node.meta.get("stack_trace") or "").splitlines()]
        files = [i for i, line in enumerate(lines) if line.startswith("File ")]
        return " ".join(lines[files[-1] : files[-1] + 2]) if files else ""

    @property
    def notes(self) -> dict[str, str]:
        """Why it is there: ``redistribution``, ``mesh_dim``, ``gathered_for``, as far as they are known."""
        return notes_of(self.node)

    @property
    def module(self) -> str:
        """The path of the module in which it was traced, or an empty string."""
        stack = self.node.meta.get("nn_module_stack") or self.node.meta.get("fwd_nn_module_stack") or {}
        return str(list(stack.values())[-1][0]) if stack else ""

    def __str__(self) -> str:
        side = "backward" if self.backward else "forward"
        return f"{self.kind} {self.node.name} ({self.global_bytes} B, group {self.group_name}, {side})"


def notes_of(node: Node) -> dict[str, str]:
    """Returns the notes that were recorded when a node was traced, see `shardcompile.compat.annotate_nodes`."""
    key = f"{NOTES}_backward" if _is_backward(node) else NOTES
    return dict(node.meta.get("custom", {}).get(key, {}))


def _is_backward(node: Node) -> bool:
    return bool(node.meta.get("autograd_backward")) or node.meta.get("partitioner_tag") == "is_backward"


def kind_of(node: Node) -> str | None:
    """Returns the kind of the collective that a node starts, or None."""
    found = _started_descriptor(node)
    return None if found is None else found.kind


def reduction_of(c: Collective) -> str | None:
    """Returns the reduction of a functional all-reduce of one tensor; None for other collectives."""
    is_eligible = c.descriptor is ALL_REDUCE and c.functional and len(c.payloads) == 1
    return c.arguments.reduce_op if is_eligible else None


def _started_descriptor(node: Node) -> Descriptor[Any] | None:
    found = descriptor_of(node.target) if node.op == "call_function" else None
    return found if found is not None and found.communicates else None


def value_of(argument: object) -> Any:
    """Returns the fake tensor or symbol of an argument that is a node; other arguments as they are."""
    return argument.meta["val"] if isinstance(argument, Node) else argument


def called(node: Node, descriptor: Descriptor[Any]) -> Any:
    """Returns the arguments by name of a node that calls an op; None if it calls another one."""
    return descriptor.signature.read(node.args) if node.target is descriptor.target else None


def add_call(graph: Graph, descriptor: Descriptor[Any], **arguments: object) -> Node:
    """Adds a call of an op, with its arguments by name, at the insertion point, see `add_node`."""
    return add_node(graph, descriptor.target, *descriptor.signature.write(descriptor.arguments(**arguments)))


def collectives(graph: Graph) -> list[Collective]:
    """Returns all collectives of a graph, in graph order."""
    return [c for node in graph.nodes if id(node.target) in STARTS and (c := Collective.of(node)) is not None]


class Seen:
    """A snapshot of a graph that tells whether the graph has changed."""

    def __init__(self, nodes: list[tuple[Node, Any, Any]]) -> None:
        self._nodes = nodes

    @staticmethod
    def of(graph: Graph) -> Seen:
        """Takes a snapshot of a graph."""
        return Seen([(node, node.args, node.kwargs) for node in graph.nodes])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Seen) or len(self._nodes) != len(other._nodes):
            return False
        # A node gets new tuples of arguments whenever an argument is replaced.
        return all(
            a is b and args is others and kwargs is named
            for (a, args, kwargs), (b, others, named) in zip(self._nodes, other._nodes, strict=True)
        )

    __hash__ = None  # type: ignore[assignment]


def inherit(start: Node, from_: Sequence[Collective]) -> None:
    """Marks a collective as the successor of the ones that it replaces; it keeps the metadata of the last one."""
    last = from_[-1].node
    start.meta |= {what: last.meta[what] for what in _INHERITED if what in last.meta}
    start.meta[_ORIGINS] = tuple(origin for c in from_ for origin in origins(c.node))


def origins(start: Node) -> tuple[str, ...]:
    """Returns the names, before any pass, of the collectives that this one replaces."""
    return start.meta.get(_ORIGINS, (start.name,))


def forget_origins(graph: Graph) -> None:
    """Makes the current collectives of a graph the origins of those that later passes add."""
    for c in collectives(graph):
        c.node.meta.pop(_ORIGINS, None)


def add_node(graph: Graph, target: Any, *args: Any, **kwargs: Any) -> Node:
    """Adds a call at the insertion point, with the fake value that later passes and Inductor read."""
    node = graph.call_function(target, args, kwargs)
    values, fake_kwargs = torch.fx.map_arg((args, kwargs), lambda n: n.meta["val"])
    mode = compat.detect_fake_mode(_tensors((values, fake_kwargs)))
    assert mode is not None, "a collective's payload is a fake tensor"
    with mode:
        node.meta["val"] = target(*values, **fake_kwargs)
    return node


def add_number(graph: Graph, number: float, like: Node) -> Node:
    """Adds a tensor of one element at the insertion point, with the dtype and device of another one."""
    value = like.meta["val"]
    options = {"dtype": value.dtype, "layout": torch.strided, "device": value.device, "pin_memory": False}
    node = graph.call_function(torch.ops.aten.full.default, ([1], number), options)
    node.meta["val"] = value.new_full([1], number)
    return node


def _tensors(values: object) -> list[torch.Tensor]:
    flat, _ = torch.utils._pytree.tree_flatten(values)
    return [v for v in flat if isinstance(v, torch.Tensor)]


def _hint(size: IntLike) -> int:
    return compat.size_hint(size)
