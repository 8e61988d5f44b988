"""The node of a graph that defines a symbol, and the same symbols in all runs of a trace. In torch 2.11 to 2.15."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import sympy
import torch
from torch._guards import detect_fake_mode  # 2.11 - 2.15
from torch.fx.experimental.proxy_tensor import (
    PythonKeyTracer,  # 2.11 - 2.15
    _GraphAppendingTracerEx,  # 2.11 - 2.15
    _SympyExprTrackerValue,  # 2.11 - 2.15
    get_proxy_mode,  # 2.11 - 2.15
    py_sym_types,  # 2.11 - 2.15
)
from torch.fx.experimental.symbolic_shapes import (
    ShapeEnv,  # 2.11 - 2.15
    free_unbacked_symbols,  # 2.11 - 2.15
)
from torch.utils._sympy.interp import sympy_interp  # 2.11 - 2.15
from torch.utils._sympy.reference import PythonReferenceAnalysis  # 2.11 - 2.15

from shardcompile.compat.sizes import Formula, IntLike, is_specialised, is_unbacked, size_hint
from shardcompile.compat.tracing import outside_trace

Tracer = PythonKeyTracer | _GraphAppendingTracerEx


def global_sizes(shape: Sequence[IntLike]) -> tuple[Any, ...]:
    """Compute the global sizes of a result again for the graph, see `retrace`. They were computed outside the trace.

    A size of 0 or 1 becomes a number with a guard, as for an input. A dim of size 1 may be broadcast. If a formula
    is 0 in this call only, torch (2.11 - 2.15) divides by it: from ``rows * columns == rows`` it concludes that there
    is one column.
    """
    return tuple(_number_if_small(n) for n in retrace(shape))


def _number_if_small(size: IntLike) -> IntLike:
    small = isinstance(size, torch.SymInt) and not is_unbacked(size) and size_hint(size) in (0, 1)
    return int(size) if small else size


def retrace(sizes: Sequence[IntLike]) -> tuple[Any, ...]:
    """Compute sizes that were computed outside the trace again from sizes that the trace knows."""
    mode = get_proxy_mode()
    if mode is None or not any(isinstance(s, torch.SymInt) for s in sizes):
        return tuple(sizes)
    tracer = mode.tracer
    kept: dict[Formula, Any] = {size.node.expr: size for size in _KEPT_SYMBOLS.get(tracer, ())}  # they may be renamed

    def known(expression: Formula) -> IntLike | None:
        entry = tracer.sympy_expr_tracker.get(expression)  # 2.11 - 2.15
        return kept.get(expression, None if entry is None else entry.value)

    return tuple(_retrace_size(known, s) if isinstance(s, torch.SymInt) else s for s in sizes)


def from_first_symbols(make: Callable[[], IntLike]) -> Any:
    """Compute a size as a formula of the inputs that the trace had first.

    If a size is computed from the size of a gradient, the backward graph reads it off the gradient. Inductor (2.11 -
    2.15) requires that each symbol in the sizes of a graph's inputs is itself an input, or the whole size of one.
    """
    with outside_trace():
        size = make()
    return retrace([size])[0]


class _FirstKept(dict[Any, Any]):
    """A dict that keeps the first value of each key, but finds what `keep_symbol` has kept in its place.

    A kept size may have got its symbol after it was kept, as that of a gradient, which is an input of the joint graph.
    An unbacked size, too: AOTAutograd (2.11 - 2.15) runs an op, and then gives the sizes that it made the symbols that
    they had in the trace before. Gradients of results have these symbols already, but the forward graph cannot read
    sizes off them: an unbacked size is found there only if nothing else has it.
    """

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self._tracer = weakref.ref(tracer)
        self._unbacked: list[_SympyExprTrackerValue] = []
        self._of_inputs = _unbacked_symbols_of_inputs(tracer)
        self._of_gradients: dict[Any, Any] = {}
        self._begun = False

    def __setitem__(self, key: Any, value: Any) -> None:
        if key in self:
            return
        if not (isinstance(value.value, torch.SymInt) and is_unbacked(value.value)):
            super().__setitem__(key, value)
        elif key in self._of_inputs or self._has_begun():
            super().__setitem__(key, value)
            self._unbacked.append(value)
        else:
            self._of_gradients.setdefault(key, value)

    def get(self, key: object, default: Any = None) -> Any:
        tracer = self._tracer()
        if tracer is None:
            return super().get(key, default)
        for size in _KEPT_SYMBOLS.get(tracer, ()):
            if size.node.expr == key and size in tracer.symnode_tracker:
                return _SympyExprTrackerValue(tracer.symnode_tracker[size], size)
        for entry in self._unbacked:
            if entry.value.node.expr == key:
                return entry
        return super().get(key, self._of_gradients.get(key, default))

    def _has_begun(self) -> bool:
        """Whether the trace has come to the first op. Before that it looks at the inputs, and computes their sizes."""
        tracer = self._tracer()
        if not self._begun and tracer is not None:
            ops = (node for node in tracer.graph.nodes if node.op == "call_function")
            self._begun = any(not isinstance(node.meta.get("val"), py_sym_types) for node in ops)
        return self._begun


def _unbacked_symbols_of_inputs(tracer: Tracer) -> set[sympy.Symbol]:
    """The unbacked symbols in the sizes of a graph's inputs, but for the gradients that a joint graph gets."""
    inputs = tracer.graph.find_nodes(op="placeholder")
    values = [node.meta.get("val") for node in inputs if "tangents" not in str(node.target)]  # 2.11 - 2.15
    sizes = [size for v in values for size in (v.shape if isinstance(v, torch.Tensor) else (v,))]
    return {symbol for size in sizes if is_unbacked(size) for symbol in free_unbacked_symbols(size)}


def keep_symbol(size: float | torch.SymInt) -> IntLike:
    """Have `retrace` use this size for its symbol, which gets its value when the graph runs. Returns the size.

    The gradients of the forward graph's results may have the same size. They are the first inputs of the joint graph,
    but the forward graph cannot read the size off them.
    """
    mode = get_proxy_mode()
    if mode is not None and isinstance(size, torch.SymInt):
        _KEPT_SYMBOLS.setdefault(mode.tracer, []).append(size)
    return cast(IntLike, size)  # `item()` of a tensor may be a float for type checkers


_KEPT_SYMBOLS: weakref.WeakKeyDictionary[Any, list[torch.SymInt]] = weakref.WeakKeyDictionary()


def keep_first_proxies() -> None:
    """In the running trace, have the first node that yields a symbol define it.

    The tracer (2.11 - 2.15) takes the last such node: after `a + b`, the result of `(a + b) - b` defines the input `a`.
    A sum that is built anew from `a` and `b` would then depend on itself.
    """
    mode = get_proxy_mode()
    if mode is None or type(mode.tracer.sympy_expr_tracker) is not dict:
        return
    # This includes the inputs of a joint graph. The tracer has visited them by now, the gradients last.
    nodes: dict[Any, Any] = mode.tracer.symnode_tracker.sym_node_dict  # type: ignore[assignment]  # 2.11 - 2.15
    tracker = _FirstKept(mode.tracer)
    for node, proxy in list(nodes.items()):
        if node.pytype is int and node.is_symbolic() and node.expr.is_symbol:
            size = torch.SymInt(node)
            tracker[node.expr] = _SympyExprTrackerValue(proxy, size)
            if is_unbacked(size):  # of a gradient, which may lack it when the graph runs: looked up by its symbol
                del nodes[node]
    for expression, entry in mode.tracer.sympy_expr_tracker.items():
        tracker[expression] = entry
    mode.tracer.sympy_expr_tracker = tracker


def _retrace_size(known: Callable[[Formula], IntLike | None], size: torch.SymInt) -> IntLike:
    if not size.node.is_symbolic():
        return size
    expression = size.node.expr
    if expression.is_number:  # the symbol was specialised
        return int(expression)
    found = known(expression)
    if found is not None:
        return found
    symbols = {s: known(s) for s in expression.free_symbols}
    if None in symbols.values():
        return size
    return cast(IntLike, sympy_interp(_Arithmetic, symbols, expression))


class _Arithmetic(PythonReferenceAnalysis):
    """Torch's arithmetic on sizes, with an `int(x)` that yields a number."""

    @staticmethod
    def trunc_to_int(x: object, dtype: object) -> object:
        """``int(x)``. Torch (2.11 - 2.15) would leave a formula for it."""
        return torch.sym_int(x)


Memo = dict[tuple[object, ...], Sequence[torch.SymInt]]
_MEMOS: weakref.WeakKeyDictionary[object, Memo] = weakref.WeakKeyDictionary()


def once_in_trace(what: tuple[object, ...], make: Callable[[], Sequence[torch.SymInt]]) -> Sequence[Any]:
    """Make symbols that get their value when the graph runs once in a trace, and reuse them in all runs of the trace.

    Dynamo and AOTAutograd run a function several times before they record it, and make the gradients of its results
    from what they found. The sizes of the gradients must be symbols that nodes of the recorded graph define.

    Args:
        what: the key of the symbols: strings, numbers, and formulas from `expression_of`.
        make: makes the symbols.
    """
    mode, shape_env = get_proxy_mode(), _running_shape_env()
    assert shape_env is not None, "such symbols are made in traces alone"
    memo = _MEMOS.setdefault(shape_env if mode is None else mode.tracer, {})
    of_all = _MEMOS.setdefault(shape_env, {})
    for kept in (memo, of_all):
        _follow_replacements(kept, what, shape_env)
    if what not in memo:
        symbols = make()
        if mode is not None:
            for new, known in zip(symbols, of_all.setdefault(what, symbols), strict=True):
                if not isinstance(_known_value(known), int):
                    _rename(shape_env, new, known)
                    _define_by_own_node(mode.tracer, new)
        memo[what] = symbols
    first = of_all.get(what, memo[what])
    return [k if isinstance(k := _known_value(f), int) else s for s, f in zip(memo[what], first, strict=True)]


def _running_shape_env() -> ShapeEnv | None:
    """The shape environment of the trace that is running."""
    mode = detect_fake_mode()
    return None if mode is None else mode.shape_env


def _follow_replacements(memo: Memo, what: tuple[object, ...], shape_env: ShapeEnv) -> None:
    """Have a memo find an entry by a new key, after torch has specialised or replaced a symbol in the old key."""
    if what in memo:
        return
    for name, symbols in list(memo.items()):
        if len(name) == len(what) and what == tuple(
            shape_env.replace(part) if isinstance(part, sympy.Basic) else part
            for part in name  # 2.11 - 2.15
        ):
            memo[what] = symbols
            return


_INPUT_SIZES: weakref.WeakKeyDictionary[Any, dict[Any, list[Any]]] = weakref.WeakKeyDictionary()


def note_input(what: object, size: torch.SymInt, note: object) -> None:
    """Note something of an input under a name, in the trace that one of its sizes belongs to."""
    notes = _INPUT_SIZES.setdefault(size.node.shape_env, {}).setdefault(what, [])
    if note not in notes:
        notes.append(note)


def inputs_noted(what: object) -> Sequence[Any]:
    """What `note_input` noted under a name in the running trace."""
    shape_env = _running_shape_env()
    return () if shape_env is None else _INPUT_SIZES.get(shape_env, {}).get(what, ())


def keep_own_node(size: object) -> None:
    """In a trace, read a size that gets its value when the graph runs off the node that yields it.

    This is `keep_symbol` also for a size that turns out later to be the size of an input of the joint graph.
    """
    mode = get_proxy_mode()
    if mode is not None and isinstance(size, torch.SymInt) and is_unbacked(size):
        _define_by_own_node(mode.tracer, size)


def _known_value(size: torch.SymInt) -> IntLike:
    """A size as a number, if torch has specialised it."""
    return int(size.node.expr) if is_specialised(size) else size


def _rename(shape_env: ShapeEnv, new: torch.SymInt, known: torch.SymInt) -> None:
    a, b = new.node.expr, known.node.expr
    if a == b:
        return
    if isinstance(b, sympy.Symbol) and is_unbacked(known):
        shape_env._rename_unbacked_to(a, b)  # 2.11 - 2.15
    else:  # an earlier run of the trace has found a size of an input, or a formula, for it
        torch._check(new == known)


def _define_by_own_node(tracer: Tracer, size: torch.SymInt) -> None:
    """Have the node that yields a size define its symbol, in place of an input of the joint graph of that size."""
    keep_symbol(size)
    proxy = tracer.symnode_tracker[size]  # 2.11 - 2.15
    dict.__setitem__(tracer.sympy_expr_tracker, size.node.expr, _SympyExprTrackerValue(proxy, size))


def unrecorded_symbols(of: torch.Tensor | None = None) -> contextlib.AbstractContextManager[None]:
    """If no graph is recorded, symbols that are made inside the context need not be in the result of an op.

    In its runs on fake tensors, Dynamo looks for new symbols in the result of the op that made them. These symbols are
    internal to the op, and the run that is recorded makes them anew.

    Args:
        of: a tensor of the trace, if there is one. For a tensor that is not fake the context does nothing.
    """
    if get_proxy_mode() is not None:
        return contextlib.nullcontext()
    mode = None if of is None else detect_fake_mode([of])
    shape_env = _running_shape_env() if of is None else None if mode is None else mode.shape_env
    return contextlib.nullcontext() if shape_env is None else shape_env.ignore_fresh_unbacked_symbols()
