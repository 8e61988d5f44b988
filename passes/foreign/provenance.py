"""Tracks which elements of one tensor a value consists of, through views, copies, pads and concatenations."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch.fx import Node

aten = torch.ops.aten


@dataclass(frozen=True)
class Box:
    """A rectangular part of a value that is a part of the source.

    Attributes:
        at: its offset in the value, by the value's dims.
        size: its sizes, by the value's dims.
        axes: the dim of the source along which each dim of the value runs; None where the size is 1 and it does not
            matter.
        start: its offset in the source, by the source's dims.
    """

    at: tuple[int, ...]
    size: tuple[int, ...]
    axes: tuple[int | None, ...]
    start: tuple[int, ...]

    def clipped(self, dim: int, low: int, high: int) -> Box | None:
        """Returns the part within a range of a dim, with offsets from the start of that range; None if it is empty."""
        first, end = max(self.at[dim], low), min(self.at[dim] + self.size[dim], high)
        if end <= first:
            return None
        axis = self.axes[dim]
        start = self.start if axis is None else _replaced(self.start, axis, self.start[axis] + first - self.at[dim])
        at, size = _replaced(self.at, dim, first - low), _replaced(self.size, dim, end - first)
        return Box(at, size, self.axes, start)

    def shifted(self, dim: int, by: int) -> Box:
        """Returns the same part of the source at a larger offset along a dim of the value."""
        return replace(self, at=_replaced(self.at, dim, self.at[dim] + by))

    def permuted(self, dims: Sequence[int]) -> Box:
        """Permutes the dims of the value; dims that are left out have to be of size 1."""
        at, size = (tuple(values[d] for d in dims) for values in (self.at, self.size))
        return Box(at, size, tuple(self.axes[d] for d in dims), self.start)

    def disjoint(self, other: Box) -> bool:
        """Whether no element of the value is in both boxes."""
        ends = zip(self.at, self.size, other.at, other.size, strict=True)
        return any(a + m <= b or b + n <= a for a, m, b, n in ends)


@dataclass(frozen=True)
class Pieces:
    """A value that consists of parts of a source, and of constants elsewhere.

    Attributes:
        shape: of the value.
        boxes: disjoint parts.
        fills: the constants that may occur outside of the boxes.
    """

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    fills: frozenset[Any] = frozenset()

    @staticmethod
    def full(shape: Sequence[int], rows: int) -> Pieces:
        """Returns the source itself, in boxes of `rows` rows of its first dim."""
        axes, rest = tuple(range(len(shape))), tuple(shape[1:])
        zeros = (0,) * len(rest)
        firsts = range(0, shape[0], rows) if rows else ()
        boxes = (Box((r, *zeros), (min(rows, shape[0] - r), *rest), axes, (r, *zeros)) for r in firsts)
        return Pieces(tuple(shape), tuple(boxes) if math.prod(rest) else ())

    def sliced(self, dim: int, low: int, high: int) -> Pieces:
        """Returns a range of a dim."""
        shape = _replaced(self.shape, dim, max(high - low, 0))
        overlapping = (b for b in self.boxes if b.at[dim] < high and b.at[dim] + b.size[dim] > low)
        return Pieces(shape, _not_none(b.clipped(dim, low, high) for b in overlapping), self.fills)


Value = Pieces | tuple[Pieces, ...]
"""The value of a node: one tensor, or several."""


def evaluate(node: Node, known: Mapping[Node, Value]) -> Value | None:
    """Returns the pieces that a node's value consists of.

    Args:
        node: a call of a function.
        known: the pieces of its inputs.

    Returns:
        None if they are unknown: an op that computes, a symbolic size, an unknown tensor.
    """
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        outputs = known.get(node.args[0])  # type: ignore[arg-type]
        return outputs[node.args[1]] if isinstance(outputs, tuple) else None  # type: ignore[index]
    rule = _RULES.get(node.target)  # type: ignore[arg-type]
    arguments = None if rule is None else _static_arguments(node, known)
    return rule(arguments) if rule is not None and arguments is not None else None


def is_tracked(node: Node) -> bool:
    """Whether `evaluate` has a rule for a node."""
    return node.op == "call_function" and (node.target is operator.getitem or node.target in _RULES)


def static_shape(node: Node) -> tuple[int, ...] | None:
    """Returns the shape of a node's tensor, or None if it has symbolic sizes."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or any(type(s) is not int for s in value.shape):
        return None
    return tuple(value.shape)


def arguments_of(node: Node) -> dict[str, Any]:
    """Returns the arguments of a call by name, with defaults."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    given = dict(zip((a.name for a in schema), node.args, strict=False)) | dict(node.kwargs)
    return {a.name: given.get(a.name, a.default_value) for a in schema}


def _static_arguments(node: Node, known: Mapping[Node, Value]) -> dict[str, Any] | None:
    """Returns the arguments with pieces in place of nodes; None if those of one node are unknown."""
    arguments = arguments_of(node)
    nodes = node.all_input_nodes
    values = {n: known.get(n) or evaluate_constant(n) for n in nodes}
    if any(v is None for v in values.values()):
        return None
    return {name: torch.fx.map_arg(a, values.__getitem__) for name, a in arguments.items()}  # type: ignore[arg-type]


def evaluate_constant(node: Node) -> Pieces | None:
    """Returns a tensor of one constant as a value without boxes; None for other nodes."""
    shape = static_shape(node)
    if node.target is not aten.full.default or shape is None:
        return None
    return Pieces(shape, (), frozenset([node.args[1]]))


def _replaced(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])


def _not_none(boxes: Iterable[Box | None]) -> tuple[Box, ...]:
    return tuple(b for b in boxes if b is not None)


def _identity(a: dict[str, Any]) -> Pieces:
    return next(iter(a.values()))


def _slice(a: dict[str, Any]) -> Pieces | None:
    x, dim = a["self"], a["dim"] % len(a["self"].shape)
    low, high, step = slice(a["start"], a["end"], a["step"]).indices(x.shape[dim])
    return x.sliced(dim, low, high) if step == 1 else None


def _select(a: dict[str, Any]) -> Pieces:
    x, dim = a["self"], a["dim"] % len(a["self"].shape)
    index = a["index"] % x.shape[dim]
    kept = [d for d in range(len(x.shape)) if d != dim]
    one = x.sliced(dim, index, index + 1)
    return Pieces(tuple(x.shape[d] for d in kept), tuple(b.permuted(kept) for b in one.boxes), x.fills)


def _ranges(x: Pieces, dim: int, sizes: Sequence[int]) -> tuple[Pieces, ...]:
    ends = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    return tuple(x.sliced(dim, low, high) for low, high in pairwise(ends))


def _split(a: dict[str, Any]) -> tuple[Pieces, ...] | None:
    x, dim, size = a["self"], a["dim"] % len(a["self"].shape), a["split_size"]
    if size <= 0:
        return None
    return tuple(x.sliced(dim, at, min(at + size, x.shape[dim])) for at in range(0, x.shape[dim], size))


def _split_with_sizes(a: dict[str, Any]) -> tuple[Pieces, ...]:
    return _ranges(a["self"], a["dim"] % len(a["self"].shape), a["split_sizes"])


def _unbind(a: dict[str, Any]) -> tuple[Pieces, ...]:
    size = a["self"].shape[a["dim"]]
    return tuple(_select({**a, "index": i}) for i in range(size))


def _cat(a: dict[str, Any]) -> Pieces | None:
    parts = [p for p in a["tensors"] if p.shape != (0,) or len(a["tensors"]) == 1]
    if not parts:
        return None
    dim = a["dim"] % len(parts[0].shape)
    boxes, at = [], 0
    for part in parts:
        boxes += [b.shifted(dim, at) for b in part.boxes]
        at += part.shape[dim]
    return Pieces(_replaced(parts[0].shape, dim, at), tuple(boxes), frozenset().union(*(p.fills for p in parts)))


def _pad(a: dict[str, Any]) -> Pieces:
    x, pads = a["self"], a["pad"]
    for i in range(len(pads) // 2):
        dim, front, back = len(x.shape) - 1 - i, pads[2 * i], pads[2 * i + 1]
        end = x.shape[dim] + back
        inner = x.sliced(dim, max(-front, 0), min(end, x.shape[dim]))
        boxes = tuple(b.shifted(dim, max(front, 0)) for b in inner.boxes)
        x = Pieces(_replaced(x.shape, dim, end + front), boxes, inner.fills)
    return replace(x, fills=x.fills | {a["value"]}) if any(p > 0 for p in pads) else x


def _slice_scatter(a: dict[str, Any]) -> Pieces | None:
    base, src, dim = a["self"], a["src"], a["dim"] % len(a["self"].shape)
    low, high, step = slice(a["start"], a["end"], a["step"]).indices(base.shape[dim])
    if step != 1 or base.sliced(dim, low, high).boxes:
        return None
    boxes = (*base.boxes, *(b.shifted(dim, low) for b in src.boxes))
    return Pieces(base.shape, boxes, base.fills | src.fills)


def _add(a: dict[str, Any]) -> Pieces | None:
    """Returns a sum in which at most one term of each element is nonzero."""
    x, y = a["self"], a["other"]
    if not isinstance(y, Pieces) or a["alpha"] != 1 or x.shape != y.shape or not (x.fills | y.fills) <= {0}:
        return None
    disjoint = all(b.disjoint(c) for b in x.boxes for c in y.boxes)
    return Pieces(x.shape, x.boxes + y.boxes, frozenset([0])) if disjoint else None


def _permute(a: dict[str, Any]) -> Pieces:
    x = a["self"]
    dims = [d % len(x.shape) for d in a["dims"]]
    return Pieces(tuple(x.shape[d] for d in dims), tuple(b.permuted(dims) for b in x.boxes), x.fills)


def _unsqueeze(a: dict[str, Any]) -> Pieces | None:
    x = a["self"]
    dim = a["dim"] % (len(x.shape) + 1)
    return _reshape(x, (*x.shape[:dim], 1, *x.shape[dim:]))


def _view(a: dict[str, Any]) -> Pieces | None:
    x, shape = a["self"], list(a["size"] if "size" in a else a["shape"])
    if -1 in shape:
        num_known = -math.prod(shape)
        if not num_known:
            return None
        shape[shape.index(-1)] = math.prod(x.shape) // num_known
    return _reshape(x, tuple(shape))


def _reshape(x: Pieces, shape: tuple[int, ...]) -> Pieces | None:
    if not math.prod(shape):
        return None
    groups = _regroup(x.shape, shape)
    boxes = [_regroup_box(b, groups, x.shape, shape) for b in x.boxes]
    return None if None in boxes else Pieces(shape, _not_none(boxes), x.fills)


def _regroup(old: Sequence[int], new: Sequence[int]) -> list[tuple[range, range]]:
    """Groups the dims of two shapes so that each group has the same number of elements in both."""
    groups: list[tuple[range, range]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        first = i, j
        m = n = 1
        if i < len(old):
            i, m = i + 1, old[i]
        if m == 1 and first[0] < len(old):
            groups.append((range(first[0], i), range(j, j)))
            continue
        if j < len(new):
            j, n = j + 1, new[j]
        while m != n:
            if m < n:
                i, m = i + 1, m * old[i]
            else:
                j, n = j + 1, n * new[j]
        groups.append((range(first[0], i), range(first[1], j)))
    return groups


def _regroup_box(box: Box, groups: Sequence[tuple[range, range]], old: Sequence[int], new: Sequence[int]) -> Box | None:
    """Returns the box in the new shape; None if it is split, or would run along two dims of the source at once."""
    at: list[int] = []
    size: list[int] = []
    axes: list[int | None] = []
    for before, after in groups:
        long_dims = [d for d in before if box.size[d] > 1]
        if long_dims and long_dims != [before[-1]]:
            return None
        first, length = 0, math.prod(box.size[d] for d in before)
        for d in before:
            first = first * old[d] + box.at[d]
        offsets: list[int] = []
        for d in reversed(after):
            first, offset = divmod(first, new[d])
            offsets.insert(0, offset)
        if after and offsets[-1] + length > new[after[-1]]:
            return None
        at += offsets
        size += [1] * (len(offsets) - 1) + [length] * bool(offsets)
        axes += [None] * (len(offsets) - 1)
        axes += [box.axes[before[-1]] if before else None] * bool(offsets)
    return Box(tuple(at), tuple(size), tuple(axes), box.start)


_RULES: dict[Any, Callable[[dict[str, Any]], Value | None]] = {
    torch.ops._c10d_functional.wait_tensor.default: _identity,
    aten.alias.default: _identity,
    aten.clone.default: _identity,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split_with_sizes,
    aten.unbind.int: _unbind,
    aten.cat.default: _cat,
    aten.constant_pad_nd.default: _pad,
    aten.slice_scatter.default: _slice_scatter,
    aten.add.Tensor: _add,
    aten.permute.default: _permute,
    aten.unsqueeze.default: _unsqueeze,
    aten.view.default: _view,
    aten.reshape.default: _view,
    aten._unsafe_view.default: _view,
}
