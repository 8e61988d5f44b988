"""What an op gives on tensors of the global shapes."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shardcompile import compat
from shardcompile.compat import OpOverload
from shardcompile.errors import refusal
from shardcompile.ops import Order, record_of, state
from shardcompile.ops.support.copied_views import shard_as_held
from shardcompile.sharded import Sharded
from shardcompile.sharding import contiguous_stride, is_ordinary

aten = torch.ops.aten
_NO_VIEW = re.compile("not compatible with input tensor's size and stride|Cannot view a tensor")
"""What kernels and fake kernels say of a view that strides forbid."""


class _Eager(threading.local):
    """A mode is for one thread: it notes in itself that a kernel runs."""

    mode: Any = None


_EAGER = _Eager()
_FOUND: dict[Any, Any] = {}
"""What was found in eager mode: working it out takes longer than most ops. Read only.

What is found in a trace is kept with its mode: the layers of a model ask for the same, formulas on symbols included.
"""

_FOUND_LIMIT = 4096
_OPERANDS = ("self", "other", "x", "n")
"""What schemas call the operands of a pointwise op of two; the latter ones those of polynomials."""


def global_meta(op: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
    """What the op gives on tensors of the global shapes, without computing it.

    Errors that plain PyTorch raises for these shapes are raised here, on all ranks alike.
    """
    mode = compat.detect_fake_mode([_hold(x) for x in tensors_of([*args, *kwargs.values()])])
    known = _FOUND if mode is None else compat.memo_of(mode)
    if mode is None:
        if _EAGER.mode is None:
            _EAGER.mode = compat.FakeTensorMode()
        mode = _EAGER.mode
    key = (op, torch.get_default_dtype(), _key(args), _key(tuple(kwargs.items())))
    try:
        found = known.get(key)
    except TypeError:  # an argument that cannot be hashed
        return _work_out(mode, op, args, kwargs)
    if found is None:
        if len(known) >= _FOUND_LIMIT:
            known.clear()
        found = known[key] = _work_out(mode, op, args, kwargs)
    return found


def _key(a: object) -> object:
    """What a result depends on; 1, 1.0 and True are equal but not the same argument."""
    if isinstance(a, Tensor):
        return _key(tuple(a.shape)), _key(a.stride()), a.dtype, a.device
    if isinstance(a, (list, tuple)):
        return tuple(_key(b) for b in a)
    if isinstance(a, (torch.SymInt, torch.SymFloat)):  # to compare them would be a guard
        return type(a), a.node.expr
    if isinstance(a, torch.Generator):
        return type(a)
    return type(a), a


def _work_out(
    mode: compat.FakeTensorMode, op: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]
) -> object:
    """Run an op on stand-ins of the global shapes, and correct what torch's fake kernels say otherwise than kernels do.

    Args:
        mode: of fake tensors: that of the trace, or a standing one for eager mode.
        op: the op.
        args: positional arguments; of their tensors shape, strides, dtype and device count.
        kwargs: keyword arguments.

    Returns:
        Stand-ins for the results.

    Raises:
        UnsupportedOpError: strides forbid a view, and the op's record says what to use instead.
    """
    # Fake kernels of views (2.11 - 2.15) refuse some that PyTorch has, and give others strides that theirs have not.
    as_kernels_do = op.is_view and mode is _EAGER.mode

    def fake(a: object) -> object:
        if isinstance(a, Tensor):
            device = "meta" if as_kernels_do else a.device
            return torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device=device)
        if isinstance(a, (list, tuple)):
            return [fake(b) for b in a]
        return None if isinstance(a, torch.Generator) else a  # shapes are of another device

    record = record_of(op)
    known = compat.refuse_unknown_shapes(mode, op)
    faked = contextlib.nullcontext() if as_kernels_do else mode
    with compat.outside_trace(), faked, known, torch._C.DisableTorchFunctionSubclass():
        try:
            given = [fake(a) for a in args]
            if record.check is not None:
                record.check(op, given)
            if record.elementwise and not op._schema.is_mutable:
                given = _with_as_many_dims(given)
            run: Callable[..., Any] = record.shape_kernel or op
            out = run(*given, **{k: fake(a) for k, a in kwargs.items()})
            as_inputs = isinstance(out, Tensor) and "memory_format" not in kwargs and not op._schema.is_mutable
            if record.order is Order.IN_ROWS:
                out = out.new_empty(out.shape)  # in rows, however the exponents are stored
            if record.order is Order.AS_A_SUM:
                first, *others = tensors_of(given)  # no other one where that is a number with a symbol
                out = out.new_empty_strided(out.shape, torch.add(first, others[0] if others else 0).stride())
            if mode is _EAGER.mode and as_inputs and record.elementwise and not record.keeps_strides:
                out = _in_rows_if_all_are(op, out, given)
            return out
        except AssertionError as error:  # as that of `grid_sampler_2d` (2.11 - 2.15) says that a shape does not fit
            raise RuntimeError(f"{op}: {error}") from error
        except (ValueError, TypeError, RuntimeError) as error:
            strange = next((x.dtype for x in tensors_of([*args, *kwargs.values()]) if not is_ordinary(x.dtype)), None)
            if strange is not None and not isinstance(error, RuntimeError):  # fake kernels stumble over such dtypes
                raise NotImplementedError(f"{op} not implemented for {strange}: {error}") from None
            if not record.instead or not _NO_VIEW.search(str(error)):
                raise
            # Also where plain PyTorch has a view: a result along a sharded dim may have that dim first in memory.
            raise refusal(
                str(op),
                f"a tensor with strides {tuple(next(tensors_of(args)).stride())}",
                f"its elements are not in the order that this view needs ({error})",
                record.instead,
            ) from None


def _with_as_many_dims(args: Sequence[object]) -> list[object]:
    """Arguments of an elementwise op, its tensors with as many dims, as its kernel expands them.

    What a kernel gives is stored in an order of dims that follows from the strides of its inputs. Along the dims that
    an input has not got they are 0. torch's fake kernels (2.11 - 2.15) expand it: a dim of size 1 has another then.
    """
    most = max((a.ndim for a in args if isinstance(a, Tensor)), default=0)

    def one(a: object) -> object:
        if not isinstance(a, Tensor) or a.ndim in (0, most):  # one without dims has a say of its own in the dtype
            return a
        missing = most - a.ndim
        return a.as_strided((1,) * missing + a.shape, (0,) * missing + a.stride())

    return [one(a) for a in args]


def _check_rows(op: OpOverload, given: Sequence[Any]) -> None:
    """Raise, as kernels do, if rows do not fit into a tensor.

    A trace would otherwise learn in the backward pass that two sizes are one number, when it has counted already what
    the forward pass gives.
    """
    x, dim, _, rows = given[:4]
    if not x.ndim or x.ndim != rows.ndim:
        return  # numbers of a tensor without dims; or refused by the fake kernel
    dim = dim % x.ndim
    if any(m != n for d, (m, n) in enumerate(zip(x.shape, rows.shape, strict=True)) if d != dim):
        raise RuntimeError(f"{op}: rows of shape {tuple(rows.shape)} do not fit into {tuple(x.shape)} along dim {dim}")


def _refuse_nothing(op: OpOverload, given: Sequence[Any]) -> None:
    """Raise if there is nothing to take an extremum of. On shards they are reduced by other ops."""
    if any(isinstance(n, int) and n == 0 for n in given[0].shape):
        raise RuntimeError(
            f"{op}: Expected reduction dim to be specified for input.numel() == 0. Specify the reduction dim with the "
            "'dim' argument."
        )


def _refuse_bools(op: OpOverload, given: Sequence[Any]) -> None:
    if given[0].dtype is torch.bool:
        raise RuntimeError(f"{op}: does not support bool input")


def _refuse_integers(op: OpOverload, given: Sequence[Any]) -> None:
    x = given[0]
    if not (x.is_floating_point() or x.is_complex()):
        raise RuntimeError(f"{op}: std and var only support floating point and complex dtypes, not {x.dtype}")


def _refuse_whole_numbers(op: OpOverload, given: Sequence[Any]) -> None:
    x = given[0]
    if not (x.is_floating_point() or x.is_complex()):
        raise NotImplementedError(f"{op} not implemented for {x.dtype}")


def _in_rows_if_all_are(op: OpOverload, out: Tensor, given: Sequence[object]) -> Tensor:
    """The result of an elementwise op, its strides those of rows if all operands are contiguous and of its shape.

    Kernels give it these. Fake kernels (2.11 - 2.15) keep an input's strides along dims of size 1, and other kernels
    tell the order of dims by them. Where an operand is a number kernels keep them too: it has not the result's shape.
    """
    if _is_given_a_number_as_operand(op, given):
        return out
    if all(x.shape == out.shape and x.is_contiguous() for x in tensors_of(given)):
        return out.as_strided(out.shape, contiguous_stride(out.shape))
    return out


def _is_given_a_number_as_operand(op: OpOverload, given: Sequence[object]) -> bool:
    """Whether a number is one of its operands: kernels make it a tensor without dims, unlike an option.

    Nothing in a schema tells one from the other but names. The `exponent` of `pow` and the `max` of `clamp_max` are
    options, though there are overloads with tensors in their place.
    """
    return any(
        isinstance(a, (int, float, complex)) and stated.name in _OPERANDS and str(stated.type) in ("Tensor", "number")
        for stated, a in zip(op._schema.arguments, given, strict=False)
    )


def _hold(x: Tensor) -> Tensor:
    return shard_as_held(x) if isinstance(x, Sharded) else x


def tensors_of(values: Iterable[object]) -> Iterator[Tensor]:
    """All tensors among arguments, those in lists included, in order."""
    for a in values:
        if isinstance(a, Tensor):
            yield a
        elif isinstance(a, (list, tuple)):
            yield from tensors_of(a)


# What kernels refuse and fake kernels (2.11 - 2.15) do not.
state(
    [
        *(aten.index_add.default, aten.index_copy.default, aten.index_reduce.default),
        *(aten.index_add_.default, aten.index_copy_.default, aten.index_reduce_.default),
    ],
    check=_check_rows,
)
state([aten.max.default, aten.min.default], check=_refuse_nothing)
state([aten._softmax.default, aten._log_softmax.default], check=_refuse_whole_numbers)
state([aten.argmax.default, aten.argmin.default], check=_refuse_bools)
state([packet.correction for packet in (aten.std, aten.var, aten.std_mean, aten.var_mean)], check=_refuse_integers)
state(
    [
        *(aten.clone.default, aten._to_copy.default, aten.fill.Scalar, aten.hardtanh.default, aten.nan_to_num.default),
        *(aten.deg2rad.default, aten.rad2deg.default, aten._prelu_kernel.default),
        *(aten._conj.default, aten._neg_view.default, aten.resolve_conj.default, aten.resolve_neg.default),
    ],
    keeps_strides=True,
)
state(aten.view.default, instead="Use reshape, which copies where it has to")
