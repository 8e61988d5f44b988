"""Rules of random ops: which dims may be sharded. `streams` seeds the generators of local shards."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from shardcompile.compat import OpOverload, OpOverloadPacket
from shardcompile.ops.pointwise.rule import pointwise, value_free
from shardcompile.ops.registry import overloads, register
from shardcompile.ops.strategy import OpCall, Strategy, along

aten = torch.ops.aten


def _by_distribution(call: OpCall) -> Iterable[Strategy]:
    """Dims other than the last stay sharded if the input is: a row along the last dim is one distribution."""
    for dim, partition in enumerate(call.tensors[0].layout.partitions[:-1]):
        if partition is not None:
            yield along([dim], [dim])


def _randint_like(call: OpCall) -> Iterable[Strategy]:
    """`randint_like` whose bound is a tensor of one element."""
    for dim in range(call.tensors[0].ndim):
        yield along([dim, None], [dim])


def _functional(packet: OpOverloadPacket) -> list[OpOverload]:
    return [op for op in overloads(packet) if not op._schema.is_mutable]


def _has_tensor_bound(op: OpOverload) -> bool:
    return str(op._schema.arguments[1].type) == "Tensor"


register(
    [
        *(aten.poisson.default, aten.binomial.default, aten._standard_gamma.default, aten.bernoulli.default),
        *(aten.bernoulli.Tensor, aten.normal.Tensor_Tensor, aten.normal.Tensor_float, aten.normal.float_Tensor),
        *(aten.native_dropout.default, aten._fused_dropout.default, aten.rrelu_with_noise_functional.default),
    ],
    pointwise,
)
register(
    [
        *(aten.uniform.default, aten.normal_functional.default, aten.log_normal.default, aten.exponential.default),
        *(aten.cauchy.default, aten.geometric.default, aten.bernoulli.p),
        *(op for packet in (aten.random, aten.rand_like, aten.randn_like) for op in _functional(packet)),
        *(op for op in _functional(aten.randint_like) if not _has_tensor_bound(op)),
    ],
    value_free,
)
register([op for op in _functional(aten.randint_like) if _has_tensor_bound(op)], _randint_like)
register([aten._dirichlet_grad.default, aten._standard_gamma_grad.default], pointwise)
register([aten.multinomial.default, aten._sample_dirichlet.default], _by_distribution)
