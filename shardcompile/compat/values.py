"""Which tensors of a trace hold equal values in every run, so that results that follow from them are computed once."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch._subclasses.functional_tensor import FunctionalTensor  # 2.11 - 2.15
from torch.fx.experimental.proxy_tensor import (
    _ProxyTensor,  # 2.11 - 2.15
    get_proxy_mode,  # 2.11 - 2.15
)
from torch.fx.experimental.symbolic_shapes import statically_known_true  # 2.11 - 2.15
from torch.utils.weak import WeakIdKeyDictionary  # 2.11 - 2.15

from shardcompile.compat.sizes import IntLike
from shardcompile.compat.symbols import Tracer

aten, prims = torch.ops.aten, torch.ops.prims
_T = TypeVar("_T")
_DEPTH = 64
"""How many nodes back two computations are compared."""


class _NotRecorded:
    """In place of the tracer of a run that records no graph."""


_NOT_RECORDED = _NotRecorded()


class _Memo:
    """What is known of one graph while it is recorded."""

    def __init__(self) -> None:
        self.numbers: dict[object, int] = {}
        self.made: dict[object, Any] = {}

    def number(self, node: torch.fx.Node, depth: int = 0) -> int:
        """A number that is equal for nodes that compute the same function of the same inputs."""
        node = _before_conversion(node)
        known = self.numbers.get(node)
        if known is None:
            known = self.numbers[node] = self._of_key(self._key(node, depth) if depth < _DEPTH else node)
        return known

    def _of_key(self, key: object) -> int:
        return self.numbers.setdefault(key, len(self.numbers))

    def _key(self, node: torch.fx.Node, depth: int) -> object:
        target, found = node.target, node.meta.get("val")
        if isinstance(found, torch.SymInt):
            return "size", found.node.expr
        if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
            return node
        is_known = target.namespace in ("aten", "prims") or target in _LOCAL
        if not is_known or target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags:
            return node
        if (target in _PARTS or target in _LOCAL) and _is_of_known_size(found):
            return node  # parts of a shard of known size may be equal on some ranks only

        def value(a: object) -> object:
            if isinstance(a, torch.fx.Node):
                return "node", self.number(a, depth + 1)
            if isinstance(a, (list, tuple)):
                return tuple(value(b) for b in a)
            return type(a), a

        key = (target, value(node.args), tuple((k, value(v)) for k, v in node.kwargs.items()))
        try:
            hash(key)
        except TypeError:
            return node
        return key


DEAD_EXCHANGE = "shardcompile: dead exchange"
"""The note in a wait that is not needed unless something reads it."""

_LOCAL: set[torch._ops.OpOverload] = set()
"""This library's ops that send nothing. They take parts of tensors."""
_OF_TENSORS: Any = WeakIdKeyDictionary()
_MEMOS: weakref.WeakKeyDictionary[Any, _Memo] = weakref.WeakKeyDictionary()


def note_local(op: torch._ops.OpOverload) -> None:
    """Note that an op of this library sends nothing: equal arguments give equal results."""
    _LOCAL.add(op)


def once_for_value(x: torch.Tensor, what: tuple[object, ...], make: Callable[[], _T]) -> _T:
    """Compute what follows from a tensor's values, in a trace once for all tensors that hold equal values in every run.

    Ranks must agree on which tensors these are. They agree if the size of `x` is a symbol, which all ranks share. If
    the size is a number, it may be the size of this rank's local shard, and nothing is shared.

    Args:
        x: the tensor.
        what: the key of the result.
        make: computes the result.
    """
    made, number = _made_of(x)
    if made is None:
        return make()
    if (number, *what) not in made:
        made[number, *what] = make()
    return made[number, *what]  # type: ignore[no-any-return]


def made_for_value(x: torch.Tensor, what: tuple[object, ...]) -> object:
    """What `once_for_value` has computed of a tensor of these values; None if it has not.

    Args:
        x: the tensor.
        what: the key of the result.
    """
    made, number = _made_of(x)
    return None if made is None else made.get((number, *what))


def _made_of(x: torch.Tensor) -> tuple[dict[object, Any] | None, int]:
    """What has been computed in this trace, and the number of a tensor's values in it; None outside a trace."""
    mode = None if _is_of_known_size(x) else get_proxy_mode()
    node = None if mode is None else _node_of(x, mode.tracer)
    if node is None or mode is None:
        return None, 0
    memo = _MEMOS.setdefault(mode.tracer, _Memo())
    return memo.made, memo.number(_same_elements(node))


def mark_dead(x: torch.Tensor, made_of: Iterable[torch.Tensor]) -> None:
    """Note in a trace that the collectives on the way to a tensor are needed only if something reads the tensor.

    Args:
        x: the tensor.
        made_of: where the way begins.
    """
    mode = get_proxy_mode()
    if mode is None:
        return
    seen = {_node_of(a, mode.tracer) for a in made_of}
    ahead = [_node_of(x, mode.tracer)]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        ahead.extend(node.all_input_nodes)
        if node.target is torch.ops._c10d_functional.wait_tensor.default:
            node.meta[DEAD_EXCHANGE] = True


def is_new_zeros(x: torch.Tensor) -> bool:
    """Whether a tensor of a trace has just been made, of zeros."""
    mode = get_proxy_mode()
    node = None if mode is None else _node_of(x, mode.tracer)
    while node is not None and node.op == "call_function" and node.target in _COPIES:
        node = node.args[0]  # type: ignore[assignment]
    return node is not None and node.op == "call_function" and _makes_zeros(node)


def _makes_zeros(node: torch.fx.Node) -> bool:
    if node.target in (aten.full.default, aten.new_full.default, aten.full_like.default):
        return bool(node.args[-1] == 0)
    return node.target in _ZEROS


def once_for_tensor(x: torch.Tensor, what: tuple[object, ...], make: Callable[[], _T], keep: bool = True) -> _T:
    """Compute what follows from a tensor, in each run of a trace once for this tensor.

    Unlike `once_for_value` it may make sizes that the results of a function have: Dynamo, which runs functions one by
    one, notes a new size where it first sees one. So its runs have to find what the runs of AOTAutograd find.

    Args:
        x: the tensor.
        what: the key of the result.
        make: computes the result.
        keep: whether the results of the function have the sizes. If not, a run of Dynamo's, which notes none, does not
            keep what it has made.
    """
    mode = get_proxy_mode()
    run = _NOT_RECORDED if mode is None else mode.tracer
    made = _OF_TENSORS.setdefault(x, weakref.WeakKeyDictionary()).setdefault(run, {})
    if what in made:
        return made[what]  # type: ignore[no-any-return]
    found = make()
    if keep or mode is not None:
        made[what] = found
    return found


def _is_of_known_size(x: object) -> bool:
    return not isinstance(x, torch.Tensor) or all(isinstance(n, int) for n in x.shape)


_PARTS = (
    *(aten.slice.Tensor, aten.select.int, aten.narrow.default, aten.as_strided.default, aten.diagonal.default),
    *(aten.split.Tensor, aten.split_with_sizes.default, aten.index_select.default, aten.roll.default),
    *(aten.constant_pad_nd.default, aten.arange.start_step, prims.iota.default),
)

_ZEROS = (aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default)
_COPIES = (aten.alias.default, aten.detach.default, aten.clone.default)

_REARRANGED = (
    *(*_COPIES, aten.view.default, aten._unsafe_view.default),
    *(aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.expand.default),
)


def _same_elements(node: torch.fx.Node) -> torch.fx.Node:
    """The first of the nodes that this node is a view or a copy of, with the same elements in the same order."""
    found, elements = node, _elements(node)
    while node.op == "call_function" and (node.target in _REARRANGED or _undoes_expansion(node) or _is_all(node)):
        parent = node.args[0]
        assert isinstance(parent, torch.fx.Node), "the first argument of a view is a tensor"
        node = parent
        if statically_known_true(_elements(node) == elements):
            found = node
    return found


def _before_conversion(node: torch.fx.Node) -> torch.fx.Node:
    """The node itself, or what it converts, if that has the same dtype already."""
    while node.target is prims.convert_element_type.default and _dtype(node) is _dtype(node.args[0]):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _dtype(node: object) -> object:
    found = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    return found.dtype if isinstance(found, torch.Tensor) else node  # of no tensor: like no other


def _undoes_expansion(node: torch.fx.Node) -> bool:
    """Whether a node takes one of several equal slices."""
    if node.target is not aten.select.int or node.args[2] != 0:
        return False
    stride: Any = node.args[0].meta["val"].stride()[node.args[1]]  # type: ignore[union-attr,index]
    return isinstance(stride, int) and stride == 0


def _is_all(node: torch.fx.Node) -> bool:
    """Whether a slice takes the whole tensor."""
    if node.target is not aten.slice.Tensor:
        return False
    return statically_known_true(_elements(node) == _elements(node.args[0]))  # type: ignore[arg-type]


def _elements(node: torch.fx.Node) -> IntLike:
    return math.prod(node.meta["val"].shape)


def _node_of(x: torch.Tensor, tracer: Tracer) -> torch.fx.Node | None:
    """The node that yields a tensor in the graph that is recorded, or None."""
    if isinstance(x, FunctionalTensor):
        torch._sync(x)
        x = torch._from_functional_tensor(x.elem)
    slot = tracer.tensor_tracker.get(x)
    return slot.proxy.node if isinstance(slot, _ProxyTensor) else None
