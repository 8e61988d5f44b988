"""Kernels and shape kernels of random ops, where torch's own (2.11 - 2.15) do not support shards or symbolic sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardcompile.compat import OpOverload
from shardcompile.compat.own_ops import define_op
from shardcompile.ops.registry import state

aten = torch.ops.aten


def _contiguous_like(x: Tensor, *_: object) -> Tensor:
    """Returns a contiguous result, whatever the strides of the first input."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _rrelu(x: Tensor, noise: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
    """`rrelu_with_noise_functional`, whose fake kernel wrongly gives the result the strides of the input."""
    return _contiguous_like(x), torch.empty_like(noise)


def _randint_like(x: Tensor, high: Tensor, **options: Any) -> Tensor:
    """`randint_like` with a tensor bound, whose value a fake tensor does not have."""
    options.pop("generator", None)
    return torch.empty_like(x, **options)


def _native_dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """`native_dropout`, whose kernel returns a float mask for an empty tensor."""
    if not x.numel():
        return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)
    out, mask = aten.native_dropout.default(x, p, train)
    return out, mask


def _with_fake_kernel(op: OpOverload) -> Callable[..., object]:
    """Defines an op in our namespace that calls `op` and has a fake kernel."""
    schema = str(op._schema).removeprefix("aten::_")
    return define_op(schema, op, _contiguous_like, capturable=True, any_strides=False)


for _op in (aten.poisson, aten.binomial, aten._standard_gamma, aten._sample_dirichlet):
    state(_op.default, shape_kernel=_contiguous_like)
state(aten.rrelu_with_noise_functional.default, shape_kernel=_rrelu)
for _name in aten.randint_like.overloads():
    if _name.startswith("Tensor") and not getattr(aten.randint_like, _name)._schema.is_mutable:
        state(getattr(aten.randint_like, _name), shape_kernel=_randint_like)
state(aten.native_dropout.default, kernel=_native_dropout)
# These are not random, so that they run on local shards; torch has no fake kernels for them.
for _op in (aten._standard_gamma_grad, aten._dirichlet_grad):
    state(_op.default, shape_kernel=_contiguous_like, kernel=_with_fake_kernel(_op.default))
