"""The collectives of an FX graph, by what they do instead of by their nodes' names."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.fx import Graph, Node

from shardcompile import compat
from shardcompile.errors import ShardError
from shardcompile.layout import CHUNK_KEY, GroupCut
from shardcompile.passes.ops import WAIT as WAIT

_c10d = torch.ops._c10d_functional
_ours = torch.ops.shardcompile

KINDS = {
    _c10d.all_reduce.default: "all_reduce",
    _c10d.all_reduce_.default: "all_reduce",
    _c10d.all_reduce_coalesced.default: "all_reduce",
    _c10d.all_reduce_coalesced_.default: "all_reduce",
    _c10d.all_gather_into_tensor.default: "all_gather",
    _c10d.all_gather_into_tensor_out.default: "all_gather",
    _c10d.all_gather_into_tensor_coalesced.default: "all_gather",
    _c10d.reduce_scatter_tensor.default: "reduce_scatter",
    _c10d.reduce_scatter_tensor_coalesced.default: "reduce_scatter",
    _c10d.all_to_all_single.default: "all_to_all",
    _c10d.broadcast.default: "broadcast",
    _c10d.broadcast_.default: "broadcast",
    _ours.all_gather_v.default: "all_gather_v",
    _ours.reduce_scatter_v.default: "reduce_scatter_v",
    _ours.all_to_all_v.default: "all_to_all_v",
    _ours.fetch_ranges.default: "fetch_ranges",
    _ours.return_ranges.default: "return_ranges",
    _ours.mirror_blocks.default: "mirror_blocks",
    _ours.fetch_block.default: "fetch_block",
    _ours.return_block.default: "return_block",
    _ours.gather_cut.default: "gather_cut",
    _ours.gather_counts.default: "gather_counts",
    _ours.exchange_rows.default: "exchange_rows",
    _ours.fetch_spans.default: "fetch_spans",
    _ours.return_spans.default: "return_spans",
    _ours.nearest.default: "nearest",
    _ours.all_gather_bucket.default: "all_gather_bucket",
    _ours.reduce_scatter_bucket.default: "reduce_scatter_bucket",
    _ours.all_to_all_bucket.default: "all_to_all_bucket",
}
"""The functional collectives, torch's and ours. All of them take their payload first and the group's name last."""

_KIND_BY_ID = {id(target): kind for target, kind in KINDS.items()}
"""The same by the op's id: torch hashes ops in Python, and every pass asks about every node."""

_CUT_AT = {
    "all_gather_v": 3,
    "reduce_scatter_v": 4,
    "all_to_all_v": 5,
    "fetch_ranges": 4,
    "return_ranges": 4,
    "fetch_block": 6,
    "return_block": 6,
}
"""Which of the arguments is the first of the (source) cut: sizes, key and nest."""

OF_ONE_RANK = {
    *("all_to_all", "mirror_blocks", "gather_cut", "gather_counts", "exchange_rows", "nearest"),
    *("fetch_spans", "return_spans"),
}
"""Kinds of which a graph tells what this rank puts in only. What all of them do is taken for as much from each."""

NOTES = "shardcompile"
"""Under ``node.meta["custom"]``: why a collective is there, see `shardcompile.compat.noted`."""

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
        node: where it starts.
        kind: see `KINDS`.
        payloads: the tensors that this rank puts in: one, but for the coalesced forms.
        group_name: name of its process group.
        waits: the nodes that complete it, in the graph's order. Torch 2.15 repeats the wait for a result that the
            backward pass needs.
        functional: whether it writes to none of its arguments. Passes leave the others alone.
    """

    node: Node
    kind: str
    payloads: tuple[Node, ...]
    group_name: str
    waits: tuple[Node, ...]
    functional: bool

    @staticmethod
    def of(node: Node) -> Collective | None:
        """The collective that a node starts, or None."""
        kind = kind_of(node)
        if kind is None:
            return None
        first = node.args[0]
        payloads = tuple(first) if isinstance(first, (list, tuple)) else (first,)
        group_name = node.args[-1]
        assert isinstance(group_name, str) and all(isinstance(p, Node) for p in payloads), f"unknown form of {node}"
        results = [node, *(u for u in node.users if u.target is operator.getitem)]
        waits = tuple(u for r in results for u in r.users if u.target is WAIT)
        functional = not node.target._schema.is_mutable  # type: ignore[union-attr]
        return Collective(node, kind, payloads, group_name, waits, functional)  # type: ignore[arg-type]

    @property
    def payload(self) -> Node:
        """The only tensor that this rank puts in."""
        (payload,) = self.payloads
        return payload

    @property
    def value(self) -> torch.Tensor:
        """The payload as a fake tensor."""
        return self.payload.meta["val"]

    @property
    def nbytes(self) -> int:
        """Bytes that this rank puts in; where there are symbolic sizes, by their hints.

        Not the same on every rank where blocks are of fixed, unequal sizes: decisions read `global_bytes`.
        """
        return sum(_hint(_nbytes(p.meta["val"])) for p in self.payloads)

    @cached_property
    def global_size(self) -> Any:
        """Bytes of the tensor that the group's ranks hold together, or that each of them gets; may be symbolic.

        Halos are not counted.
        """
        if self.kind in ("all_gather", "all_gather_v", "all_gather_bucket"):
            return sum(_nbytes(v) for v in _tensors(self.node.meta["val"]))
        args: tuple[Any, ...] = self.node.args
        if self.kind in ("all_to_all_v", "fetch_ranges", "return_ranges", "fetch_block", "return_block"):
            return _with_extent(self.value, args[1], args[3] if self.kind == "all_to_all_v" else args[2])
        if self.kind == "all_to_all_bucket":
            dims, totals = args[1][::2], args[2][::2]
            values = [p.meta["val"] for p in self.payloads]
            return sum(_with_extent(v, d, t) for v, d, t in zip(values, dims, totals, strict=True))
        whole = sum(_nbytes(p.meta["val"]) for p in self.payloads)
        return whole * self.group_size if self.kind in OF_ONE_RANK else whole

    @property
    def global_bytes(self) -> int:
        """`global_size` as a number, by hints where it is symbolic. The same on every rank."""
        return _hint(self.global_size)

    @property
    def group_size(self) -> int:
        """Ranks in the group."""
        return compat.process_group(self.group_name).size()

    @property
    def sizes(self) -> tuple[int, ...] | None:
        """Block sizes along the cut dim in group order, where they are known to the compiler; None if they are not.

        Of an all-to-all or a fetch those of its source. The same on every rank.
        """
        if self.kind in ("all_gather", "reduce_scatter"):
            rows = self.value.shape[0] if self.value.ndim else 1
            rows = rows // self.group_size if self.kind == "reduce_scatter" else rows
            return (rows,) * self.group_size if isinstance(rows, int) else None
        if self.kind not in _CUT_AT:
            return None
        total, sizes, key, nest = self._cut()
        unknown = any(isinstance(s, Node) for s in sizes) if sizes else isinstance(key, Node)
        if unknown or (not sizes and key == CHUNK_KEY and not isinstance(total, int)):
            return None
        return GroupCut.resolve(total, sizes, key, nest, self.group_size)

    def hinted_sizes(self) -> tuple[int, ...] | None:
        """`sizes`, dynamic ones as they were in the call that led to the trace; for looking at, not for decisions."""
        if self.kind not in _CUT_AT:
            return self.sizes
        total, sizes, key, nest = (_hinted(a) for a in self._cut())
        try:
            return GroupCut.resolve(total, sizes, key, nest, self.group_size)
        except (LookupError, ShardError):  # the key of another process
            return None

    def _cut(self) -> tuple[Any, Any, Any, Any]:
        """Extent, sizes, key and nest of the (source) cut, as they are written in the graph."""
        args: tuple[Any, ...] = self.node.args
        first = _CUT_AT[self.kind]
        sizes, key, nest = args[first : first + 3]
        if self.kind == "reduce_scatter_v":
            total = self.value.shape[args[1]]  # type: ignore[index]
        else:
            total = args[3] if self.kind == "all_to_all_v" else args[2]
        return total, sizes, key, nest

    @property
    def backward(self) -> bool:
        """Whether it is part of a backward pass."""
        return bool(self.node.meta.get("autograd_backward")) or self.node.meta.get("partitioner_tag") == "is_backward"

    @property
    def source(self) -> str:
        """The user's line that led to it, or an empty text."""
        lines = [line.strip() for line in str(self.node.meta.get("stack_trace") or "").splitlines()]
        files = [i for i, line in enumerate(lines) if line.startswith("File ")]
        return " ".join(lines[files[-1] : files[-1] + 2]) if files else ""

    @property
    def notes(self) -> dict[str, str]:
        """Why it is there: ``redistribution``, ``mesh_dim``, ``gathered_for``, as far as they are known."""
        key = f"{NOTES}_backward" if self.backward else NOTES
        return dict(self.node.meta.get("custom", {}).get(key, {}))

    @property
    def module(self) -> str:
        """The path of the module that it was traced in, or an empty text."""
        stack = self.node.meta.get("nn_module_stack") or self.node.meta.get("fwd_nn_module_stack") or {}
        return str(list(stack.values())[-1][0]) if stack else ""

    def __str__(self) -> str:
        side = "backward" if self.backward else "forward"
        return f"{self.kind} {self.node.name} ({self.global_bytes} B, group {self.group_name}, {side})"


def kind_of(node: Node) -> str | None:
    """The kind of the collective that a node starts, or None."""
    return _KIND_BY_ID.get(id(node.target)) if node.op == "call_function" else None


def collectives(graph: Graph) -> list[Collective]:
    """All collectives of a graph, in its order."""
    return [c for node in graph.nodes if kind_of(node) is not None and (c := Collective.of(node)) is not None]


class Seen:
    """What a graph was like, to tell whether it has changed."""

    def __init__(self, nodes: list[tuple[Node, Any, Any]]) -> None:
        self._nodes = nodes

    @staticmethod
    def of(graph: Graph) -> Seen:
        """A graph as it is now."""
        return Seen([(node, node.args, node.kwargs) for node in graph.nodes])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Seen) or len(self._nodes) != len(other._nodes):
            return False
        # A node gets new tuples for arguments whenever one is replaced.
        return all(
            a is b and args is others and kwargs is named
            for (a, args, kwargs), (b, others, named) in zip(self._nodes, other._nodes, strict=True)
        )

    __hash__ = None  # type: ignore[assignment]


def inherit(start: Node, from_: Sequence[Collective]) -> None:
    """Make a collective that takes the place of others known as their successor; it stands where the last one was."""
    last = from_[-1].node
    start.meta |= {what: last.meta[what] for what in _INHERITED if what in last.meta}
    start.meta[_ORIGINS] = tuple(origin for c in from_ for origin in origins(c.node))


def origins(start: Node) -> tuple[str, ...]:
    """Names that the collectives had, before any pass, in whose place this one is."""
    return start.meta.get(_ORIGINS, (start.name,))


def forget_origins(graph: Graph) -> None:
    """Take the collectives of a graph as what the next passes start from."""
    for c in collectives(graph):
        c.node.meta.pop(_ORIGINS, None)


def add_node(graph: Graph, target: Any, *args: Any, **kwargs: Any) -> Node:
    """A call at the graph's insertion point, with the fake value that later passes and Inductor read."""
    node = graph.call_function(target, args, kwargs)
    values, named = torch.fx.map_arg((args, kwargs), lambda n: n.meta["val"])
    mode = compat.detect_fake_mode(_tensors((values, named)))
    assert mode is not None, "a collective's payload is a fake tensor"
    with mode:
        node.meta["val"] = target(*values, **named)
    return node


def add_number(graph: Graph, number: float, like: Node) -> Node:
    """A tensor of one element at the graph's insertion point, of the dtype and on the device of another."""
    value = like.meta["val"]
    options = {"dtype": value.dtype, "layout": torch.strided, "device": value.device, "pin_memory": False}
    node = graph.call_function(torch.ops.aten.full.default, ([1], number), options)
    node.meta["val"] = value.new_full([1], number)
    return node


def _tensors(values: Any) -> list[torch.Tensor]:
    flat, _ = torch.utils._pytree.tree_flatten(values)
    return [v for v in flat if isinstance(v, torch.Tensor)]


def _nbytes(value: torch.Tensor) -> Any:
    return math.prod(value.shape) * value.dtype.itemsize


def _with_extent(value: torch.Tensor, dim: Any, extent: Any) -> Any:
    """Bytes of a tensor, had it this extent along a dim."""
    extent = extent.meta["val"] if isinstance(extent, Node) else extent
    rest = [s for d, s in enumerate(value.shape) if d != dim]
    return math.prod((extent, *rest)) * value.dtype.itemsize


def _hinted(argument: Any) -> Any:
    """A number, node or list of these as numbers, by hints."""
    if isinstance(argument, (list, tuple)):
        return [_hinted(a) for a in argument]
    return _hint(argument.meta["val"] if isinstance(argument, Node) else argument)


def _hint(size: Any) -> int:
    return compat.size_hint(size)
