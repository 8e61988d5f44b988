"""Which node of a graph gives a symbol, and the same symbols in all passes of a trace. Seen in torch 2.11 to 2.15."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch._guards import detect_fake_mode  # 2.11 - 2.15
from torch.fx.experimental.proxy_tensor import (
    _SympyExprTrackerValue,  # 2.11 - 2.15
    get_proxy_mode,  # 2.11 - 2.15
)
from torch.fx.experimental.symbolic_shapes import ShapeEnv  # 2.11 - 2.15
from torch.utils._sympy.interp import sympy_interp  # 2.11 - 2.15
from torch.utils._sympy.reference import PythonReferenceAnalysis  # 2.11 - 2.15

from shardcompile.compat.sizes import is_specialised, is_unbacked, size_hint
from shardcompile.compat.tracing import untraced


def global_extents(shape: Sequence[object]) -> tuple[Any, ...]:
    """The global extents of a result, which were computed while nothing was traced, computed again: see `retraced`.

    Those of 0 and 1 are numbers, with a guard, as they are where an input has them. A 1 may be broadcast. And where a
    formula is 0 on this call only, torch (2.11 - 2.15) divides by it: from ``rows * columns == rows`` it takes that
    there is one column.
    """
    return tuple(_number_if_small(n) for n in retraced(shape))


def _number_if_small(extent: int | torch.SymInt) -> object:
    small = isinstance(extent, torch.SymInt) and not is_unbacked(extent) and size_hint(extent) in (0, 1)
    return int(extent) if small else extent


def retraced(sizes: Sequence[object]) -> tuple[Any, ...]:
    """Sizes that were computed while nothing was traced, computed again from what the trace knows."""
    mode = get_proxy_mode()
    if mode is None or not any(isinstance(s, torch.SymInt) for s in sizes):
        return tuple(sizes)
    known = {e: entry.value for e, entry in mode.tracer.sympy_expr_tracker.items()}  # 2.11 - 2.15
    known.update((kept.node.expr, kept) for kept in _KEPT_SYMBOLS.get(mode.tracer, ()))  # by now renamed, maybe
    return tuple(_retrace(known, s) if isinstance(s, torch.SymInt) else s for s in sizes)


def from_first_symbols(make: Callable[[], object]) -> Any:
    """A size in terms of the inputs that were there first, whatever it is computed from.

    What is computed from the size of a gradient would be read off the gradient by the backward graph. Inductor
    (2.11 - 2.15) wants every symbol in the sizes of a graph's inputs to be the whole size of one of them, or an input.
    """
    with untraced():
        size = make()
    return retraced([size])[0]


class _FirstKept(dict[Any, Any]):
    """A dict whose entries are never replaced."""

    def __setitem__(self, key: object, value: object) -> None:
        self.setdefault(key, value)


def keep_symbol(size: object) -> Any:
    """Have `retraced` use this size for its symbol, which gets its value when the graph runs; returns it.

    The gradients of the forward graph's results may have the same size. They are inputs of the joint graph and come
    first, but the forward graph cannot read it off them.
    """
    mode = get_proxy_mode()
    if mode is not None and isinstance(size, torch.SymInt):
        _KEPT_SYMBOLS.setdefault(mode.tracer, []).append(size)
    return size


_KEPT_SYMBOLS: weakref.WeakKeyDictionary[Any, list[torch.SymInt]] = weakref.WeakKeyDictionary()


def keep_first_proxies() -> None:
    """In the trace that is going on, have the first node that gives a symbol stay the one that stands for it.

    The tracer (2.11 - 2.15) takes the last one: after `a + b` the result of `(a + b) - b` stands for the input `a`. A
    sum that is built anew from `a` and `b` is then defined by itself, without end.
    """
    mode = get_proxy_mode()
    if mode is None or type(mode.tracer.sympy_expr_tracker) is not dict:
        return
    tracker = _FirstKept()
    # Of the inputs of a joint graph, too: the tracer has gone through them by now, gradients last.
    nodes: dict[Any, Any] = mode.tracer.symnode_tracker.sym_node_dict  # type: ignore[assignment]  # 2.11 - 2.15
    for node, proxy in nodes.items():
        if node.pytype is int and node.is_symbolic() and node.expr.is_symbol:
            tracker[node.expr] = _SympyExprTrackerValue(proxy, torch.SymInt(node))
    for expression, entry in mode.tracer.sympy_expr_tracker.items():
        tracker[expression] = entry
    mode.tracer.sympy_expr_tracker = tracker


def _retrace(known: dict[Any, Any], size: torch.SymInt) -> object:
    if not size.node.is_symbolic():
        return size
    expression = size.node.expr
    if expression.is_number:  # a symbol that is known by now
        return int(expression)
    if expression in known:
        return known[expression]
    symbols = {s: known[s] for s in expression.free_symbols if s in known}
    if len(symbols) < len(expression.free_symbols):
        return size
    return sympy_interp(_Arithmetic, symbols, expression)


class _Arithmetic(PythonReferenceAnalysis):
    """Formulas on sizes."""

    @staticmethod
    def trunc_to_int(x: object, dtype: object) -> object:
        """``int(x)``, for which torch (2.11 - 2.15) would leave a formula in place of a number."""
        return torch.sym_int(x)


_MEMOS: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


def once_in_trace(
    what: tuple[object, ...], like: torch.SymInt, make: Callable[[], Sequence[torch.SymInt]]
) -> Sequence[Any]:
    """Symbols that get their value when the graph runs: made once in a trace, and the same ones in all of its passes.

    Dynamo and AOTAutograd run a function several times before they record it, and make the gradients of its results
    of what they found. These have to have the symbols of the recorded graph, and its nodes have to stand for them.

    Args:
        what: names them: strings, numbers, and formulas as `expression_of` gives them.
        like: any symbol of the trace.
        make: makes them.
    """
    mode = get_proxy_mode()
    shape_env: ShapeEnv = like.node.shape_env  # type: ignore[assignment,unused-ignore]  # torch 2.15: or None
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
                    _stand_for(mode.tracer, new)
        memo[what] = symbols
    first = of_all.get(what, memo[what])
    return [k if isinstance(k := _known_value(f), int) else s for s, f in zip(memo[what], first, strict=True)]


def _follow_replacements(memo: dict[Any, Any], what: Any, shape_env: ShapeEnv) -> None:
    """Have a memo find what it has by another name: an extent was a symbol then, and is known as a number by now."""
    if what in memo:
        return
    for name, symbols in list(memo.items()):
        if len(name) == len(what) and what == tuple(
            shape_env.replace(part) if isinstance(part, sympy.Basic) else part
            for part in name  # 2.11 - 2.15
        ):
            memo[what] = symbols
            return


_INPUT_SIZES: weakref.WeakKeyDictionary[Any, dict[Any, torch.SymInt]] = weakref.WeakKeyDictionary()


def note_input_size(what: object, size: torch.SymInt) -> None:
    """Have `first_input_size` find a size of an input by a name; the first size that has the name keeps it."""
    _INPUT_SIZES.setdefault(size.node.shape_env, {}).setdefault(what, size)


def first_input_size(what: object, like: object) -> torch.SymInt | None:
    """The size that `note_input_size` was given in the trace of the size `like`, or None."""
    found = _INPUT_SIZES.get(like.node.shape_env, {}).get(what) if isinstance(like, torch.SymInt) else None
    return None if found is None else retraced([found])[0]


def stands_for_itself(size: Any) -> None:
    """Have a size that gets its value when the graph runs be read off the node that gives it, in a trace.

    As with `keep_symbol`; also where it turns out to be that of an input of the joint graph only later.
    """
    mode = get_proxy_mode()
    if mode is not None and is_unbacked(size):
        _stand_for(mode.tracer, size)


def _known_value(size: torch.SymInt) -> object:
    """A size as a number, if it is known to be one by now."""
    return int(size.node.expr) if is_specialised(size) else size


def _rename(shape_env: ShapeEnv, new: torch.SymInt, known: torch.SymInt) -> None:
    a, b = new.node.expr, known.node.expr
    if a != b:
        shape_env._rename_unbacked_to(a, b)  # 2.11 - 2.15


def _stand_for(tracer: Any, size: torch.SymInt) -> None:
    """Have the node that gives a size stand for its symbol, in place of an input of the joint graph that has it too."""
    keep_symbol(size)
    proxy = tracer.symnode_tracker[size]  # 2.11 - 2.15
    dict.__setitem__(tracer.sympy_expr_tracker, size.node.expr, _SympyExprTrackerValue(proxy, size))


def unrecorded_symbols(of: object) -> contextlib.AbstractContextManager[None]:
    """While no graph is recorded, as in Dynamo's runs on fake tensors: the symbols made here need not reach a result.

    Dynamo looks for them in the result of the op of which they are an inner matter; the recorded run makes them anew.

    Args:
        of: a size or a tensor of the trace; others are left alone.
    """
    if get_proxy_mode() is not None:
        return contextlib.nullcontext()
    if isinstance(of, torch.Tensor):
        mode = detect_fake_mode([of])
        shape_env: Any = None if mode is None else mode.shape_env
    else:
        shape_env = of.node.shape_env if isinstance(of, torch.SymInt) else None
    return contextlib.nullcontext() if shape_env is None else shape_env.ignore_fresh_unbacked_symbols()
