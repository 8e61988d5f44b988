"""What an op gives on tensors of the global shapes."""

# The class of sharded tensors arrives as an argument, so that its attributes are unknown here.
# mypy: disable-error-code="attr-defined, union-attr"

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shardcompile import compat
from shardcompile.compat import OpOverload
from shardcompile.dispatch.strides import STORED_AS_A_SUM
from shardcompile.errors import refusal
from shardcompile.rules import is_elementwise


class _Eager(threading.local):
    """A mode is for one thread: it notes in itself that a kernel runs."""

    mode: Any = None


_EAGER = _Eager()
_FOUND: dict[Any, Any] = {}
"""What was found in eager mode: working it out takes longer than most ops. Read only.

What is found in a trace is kept with its mode: the layers of a model ask for the same, formulas on symbols included.
"""

_FOUND_LIMIT = 4096


def global_meta(cls: type, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the op gives on tensors of the global shapes, without computing it.

    Errors that plain PyTorch raises for these shapes are raised here, on all ranks alike.
    """
    mode = compat.detect_fake_mode([_inner(cls, x) for x in tensors_of([*args, *kwargs.values()])])
    known = _FOUND if mode is None else compat.kept_with(mode)
    if mode is None:
        if _EAGER.mode is None:
            _EAGER.mode = compat.FakeTensorMode()
        mode = _EAGER.mode
    key = (op, torch.get_default_dtype(), _key(cls, args), _key(cls, tuple(kwargs.items())))
    try:
        found = known.get(key)
    except TypeError:  # an argument that cannot be hashed
        return _worked_out(mode, cls, op, args, kwargs)
    if found is None:
        if len(known) >= _FOUND_LIMIT:
            known.clear()
        found = known[key] = _worked_out(mode, cls, op, args, kwargs)
    return found


def _key(cls: type, a: Any) -> Any:
    """What a result depends on; 1, 1.0 and True are equal but not the same argument."""
    if isinstance(a, Tensor):
        return _key(cls, tuple(a.shape)), _key(cls, a.stride()), a.dtype, _inner(cls, a).device
    if isinstance(a, (list, tuple)):
        return tuple(_key(cls, b) for b in a)
    if isinstance(a, (torch.SymInt, torch.SymFloat)):  # to compare them would be a guard
        return type(a), a.node.expr
    return type(a), a


def _worked_out(mode: Any, cls: type, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def fake(a: Any) -> Any:
        if isinstance(a, Tensor):
            inner = _inner(cls, a)
            return torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device=inner.device)
        if isinstance(a, (list, tuple)):
            return [fake(b) for b in a]
        return a

    known = compat.refusing_unknown_shapes(mode, op)
    with compat.untraced(), mode, known, torch._C.DisableTorchFunctionSubclass():
        try:
            given = [fake(a) for a in args]
            if is_elementwise(op) and not op._schema.is_mutable:
                given = _with_as_many_dims(given)
            out = op(*given, **{k: fake(a) for k, a in kwargs.items()})
            if op in STORED_AS_A_SUM:
                first, *others = tensors_of(given)  # no other one where that is a number with a symbol
                out = out.new_empty_strided(out.shape, torch.add(first, others[0] if others else 0).stride())
            return out
        except ValueError as error:
            if op is not torch.ops.aten.view.default:
                raise
            # Also where plain PyTorch has a view: a result along a cut dim may have that dim first in memory.
            raise refusal(
                str(op),
                f"a tensor with strides {tuple(args[0].stride())}",
                f"its elements are not in the order that this view needs ({error})",
                "Use reshape, which copies where it has to",
            ) from None


def _with_as_many_dims(args: Sequence[Any]) -> list[Any]:
    """Arguments of an elementwise op, its tensors with as many dims, as its kernel expands them.

    What a kernel gives is stored in an order of dims that follows from the strides of its inputs. Along the dims that
    an input has not got they are 0. torch's fake kernels (2.11 - 2.15) expand it: a dim of extent 1 has another then.
    """
    most = max((a.ndim for a in args if isinstance(a, Tensor)), default=0)

    def one(a: Any) -> Any:
        if not isinstance(a, Tensor) or a.ndim in (0, most):  # one without dims has a say of its own in the dtype
            return a
        missing = most - a.ndim
        return a.as_strided((1,) * missing + a.shape, (0,) * missing + a.stride())

    return [one(a) for a in args]


def _inner(cls: type, x: Tensor) -> Tensor:
    return x._local_tensor if type(x) is cls else x


def tensors_of(values: Sequence[Any]) -> Iterator[Tensor]:
    """All tensors among arguments, those in lists included, in order."""
    for a in values:
        if isinstance(a, Tensor):
            yield a
        elif isinstance(a, (list, tuple)):
            yield from tensors_of(a)
