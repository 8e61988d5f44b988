"""Runs ops on fake tensors of the global shapes, for the shapes, strides and dtypes of their results."""

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
from shardcompile.ops.support.copied_views import stored_shard
from shardcompile.sharded import Sharded
from shardcompile.sharding import contiguous_stride, is_ordinary

aten = torch.ops.aten
_NO_VIEW = re.compile("not compatible with input tensor's size and stride|Cannot view a tensor")
"""The errors of kernels and fake kernels for a view that strides forbid."""


class _Eager(threading.local):
    """The fake tensor mode of eager code, one for each thread: a mode has state while a kernel runs."""

    mode: Any = None


_EAGER = _Eager()
_CACHE: dict[Any, Any] = {}
"""Results of eager mode, cached because fake kernels take longer than most ops. The results are read only.

Results of a trace are cached with its mode: the layers of a model repeat the same calls, with the same symbols.
"""

_CACHE_LIMIT = 4096
_OPERANDS = ("self", "other", "x", "n")
"""The names of operands in the schemas of pointwise ops of two operands; the last two are those of polynomials."""


def global_meta(op: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
    """Returns fake results of an op on tensors of the global shapes, without computing it.

    Errors that plain PyTorch raises for these shapes are raised here, on all ranks.
    """
    mode = compat.detect_fake_mode([_stored_shard(x) for x in tensors_of([*args, *kwargs.values()])])
    cache = _CACHE if mode is None else compat.memo_of(mode)
    if mode is None:
        if _EAGER.mode is None:
            _EAGER.mode = compat.FakeTensorMode()
        mode = _EAGER.mode
    key = (op, torch.get_default_dtype(), _key(args), _key(tuple(kwargs.items())))
    try:
        result = cache.get(key)
    except TypeError:  # an argument that cannot be hashed
        return _run_fake(mode, op, args, kwargs)
    if result is None:
        if len(cache) >= _CACHE_LIMIT:
            cache.clear()
        result = cache[key] = _run_fake(mode, op, args, kwargs)
    return result


def _key(a: object) -> object:
    """The cache key of an argument; 1, 1.0 and True are equal but not the same argument."""
    if isinstance(a, Tensor):
        return _key(tuple(a.shape)), _key(a.stride()), a.dtype, a.device
    if isinstance(a, (list, tuple)):
        return tuple(_key(b) for b in a)
    if isinstance(a, (torch.SymInt, torch.SymFloat)):  # comparing them would install a guard
        return type(a), a.node.expr
    if isinstance(a, torch.Generator):
        return type(a)
    return type(a), a


def _run_fake(
    mode: compat.FakeTensorMode, op: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]
) -> object:
    """Runs an op on fake tensors of the global shapes, and corrects results in which fake kernels differ from kernels.

    Args:
        mode: the fake tensor mode: that of the trace, or that of eager mode.
        op: the op.
        args: positional arguments; only the shape, strides, dtype and device of tensors matter.
        kwargs: keyword arguments.

    Returns:
        The fake results.

    Raises:
        UnsupportedOpError: strides forbid a view, and the op's record says what to use instead.
    """
    # Fake kernels of views (2.11 - 2.15) refuse some views that PyTorch has, and give others wrong strides.
    on_meta = op.is_view and mode is _EAGER.mode

    def fake(a: object) -> object:
        if isinstance(a, Tensor):
            device = "meta" if on_meta else a.device
            return torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device=device)
        if isinstance(a, (list, tuple)):
            return [fake(b) for b in a]
        return None if isinstance(a, torch.Generator) else a  # its device is not that of the fake tensors

    record = record_of(op)
    no_unknown_shapes = compat.refuse_unknown_shapes(mode, op)
    faked = contextlib.nullcontext() if on_meta else mode
    compat.hold_device_guard()
    with compat.outside_trace(), faked, no_unknown_shapes, torch._C.DisableTorchFunctionSubclass():
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
                out = out.new_empty(out.shape)  # contiguous, however the exponents are stored
            if record.order is Order.AS_A_SUM:
                first, *others = tensors_of(given)  # no others if the other operand is a symbolic scalar
                out = out.new_empty_strided(out.shape, torch.add(first, others[0] if others else 0).stride())
            if mode is _EAGER.mode and as_inputs and record.elementwise and not record.keeps_strides:
                out = _contiguous_like_inputs(op, out, given)
            return out
        except AssertionError as error:  # by which `grid_sampler_2d` (2.11 - 2.15) rejects a shape
            raise RuntimeError(f"{op}: {error}") from error
        except (ValueError, TypeError, RuntimeError) as error:
            unusual = next((x.dtype for x in tensors_of([*args, *kwargs.values()]) if not is_ordinary(x.dtype)), None)
            if unusual is not None and not isinstance(error, RuntimeError):  # fake kernels fail on such dtypes
                raise NotImplementedError(f"{op} not implemented for {unusual}: {error}") from None
            if not record.instead or not _NO_VIEW.search(str(error)):
                raise
            # Plain PyTorch may have this view: a result of ours along a sharded dim may have that dim first in memory.
            raise refusal(
                str(op),
                f"a tensor with strides {tuple(next(tensors_of(args)).stride())}",
                f"its elements are not in the order that this view needs ({error})",
                record.instead,
            ) from None


def _with_as_many_dims(args: Sequence[object]) -> list[object]:
    """Adds leading dims of stride 0 to the tensors of an elementwise op until all have as many, as its kernel does.

    The order of dims in which a kernel stores its result follows from the strides of its inputs, which are 0 along
    dims that an input lacks. torch's fake kernels (2.11 - 2.15) expand the input, which gives dims of size 1 other
    strides.
    """
    most = max((a.ndim for a in args if isinstance(a, Tensor)), default=0)

    def expanded(a: object) -> object:
        if not isinstance(a, Tensor) or a.ndim in (0, most):  # type promotion treats 0-dim tensors in its own way
            return a
        missing = most - a.ndim
        return a.as_strided((1,) * missing + a.shape, (0,) * missing + a.stride())

    return [expanded(a) for a in args]


def _check_rows(op: OpOverload, given: Sequence[Any]) -> None:
    """Raises, as kernels do, if rows do not fit into a tensor.

    A trace would otherwise find in the backward pass that two sizes are equal, after the outputs of the forward pass
    have been determined.
    """
    x, dim, index, rows = given[:4]
    if not x.ndim or x.ndim != rows.ndim:
        return  # indices of a 0-dim tensor; or refused by the fake kernel
    dim = dim % x.ndim
    num_indices, num_rows = index.shape[0] if index.ndim else 1, rows.shape[dim]
    if isinstance(num_indices, int) and isinstance(num_rows, int) and num_indices != num_rows:  # 2.11
        raise RuntimeError(f"{op}: {num_indices} indices and {num_rows} rows along dim {dim}")
    if any(m != n for d, (m, n) in enumerate(zip(x.shape, rows.shape, strict=True)) if d != dim):
        raise RuntimeError(f"{op}: rows of shape {tuple(rows.shape)} do not fit into {tuple(x.shape)} along dim {dim}")


def _refuse_empty(op: OpOverload, given: Sequence[Any]) -> None:
    """Raises if an extremum of no elements is asked for. The local kernels, which are other ops, do not raise."""
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


def _refuse_non_floating(op: OpOverload, given: Sequence[Any]) -> None:
    x = given[0]
    if not (x.is_floating_point() or x.is_complex()):
        raise NotImplementedError(f"{op} not implemented for {x.dtype}")


def _contiguous_like_inputs(op: OpOverload, out: Tensor, given: Sequence[object]) -> Tensor:
    """Gives the result of an elementwise op contiguous strides if all operands are contiguous and have its shape.

    Kernels do so. Fake kernels (2.11 - 2.15) keep an input's strides along dims of size 1, and other kernels derive an
    order of dims from them. Where an operand is a scalar, which lacks the result's shape, kernels keep them, too.
    """
    if _has_scalar_operand(op, given):
        return out
    if all(x.shape == out.shape and x.is_contiguous() for x in tensors_of(given)):
        return out.as_strided(out.shape, contiguous_stride(out.shape))
    return out


def _has_scalar_operand(op: OpOverload, given: Sequence[object]) -> bool:
    """Whether one of the operands is a scalar: kernels make it a 0-dim tensor, unlike a scalar option.

    Only names in a schema tell operands from options. The `exponent` of `pow` and the `max` of `clamp_max` are options,
    though there are overloads with tensors in their place.
    """
    return any(
        isinstance(a, (int, float, complex)) and arg.name in _OPERANDS and str(arg.type) in ("Tensor", "number")
        for arg, a in zip(op._schema.arguments, given, strict=False)
    )


def _stored_shard(x: Tensor) -> Tensor:
    return stored_shard(x) if isinstance(x, Sharded) else x


def tensors_of(values: Iterable[object]) -> Iterator[Tensor]:
    """All tensors among arguments, those in lists included, in order."""
    for a in values:
        if isinstance(a, Tensor):
            yield a
        elif isinstance(a, (list, tuple)):
            yield from tensors_of(a)


# Checks that kernels make and fake kernels (2.11 - 2.15) do not.
state(
    [
        *(aten.index_add.default, aten.index_copy.default, aten.index_reduce.default),
        *(aten.index_add_.default, aten.index_copy_.default, aten.index_reduce_.default),
    ],
    check=_check_rows,
)
state([aten.max.default, aten.min.default], check=_refuse_empty)
state([aten._softmax.default, aten._log_softmax.default], check=_refuse_non_floating)
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
