"""What is said beforehand of the result of an op: its strides are those of PyTorch's kernels."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload

from shardcompile.ops import Order, record_of
from shardcompile.ops.support.global_meta import global_meta
from tests.support.tiers import often

aten = torch.ops.aten


def of_two_tensors() -> Iterator[OpOverload]:
    """Pointwise ops; not `ldexp`, which is others by the time that autograd has seen it."""
    for name in sorted(set(dir(aten)) - {"ldexp"}):
        packet = getattr(aten, name)
        for overload in packet.overloads() if isinstance(packet, torch._ops.OpOverloadPacket) else ():
            op = getattr(packet, overload)
            needed = [str(a.type) for a in op._schema.arguments if not a.has_default_value()]
            if needed == ["Tensor", "Tensor"] and torch.Tag.pointwise in op.tags and not op._schema.is_mutable:
                yield op


def operands(dtype: torch.dtype) -> list[Tensor]:
    rows = torch.ones(5, 4, dtype=dtype)
    return [
        rows,
        torch.ones(4, 5, dtype=dtype).t(),
        rows[:1],
        rows[:, :1].contiguous(),
        rows[0, 0],
        rows.new_ones(2, 5, 4),
    ]


@pytest.mark.parametrize("dtype", often([torch.float64, torch.bool], 1))
def test_strides_of_pointwise_ops(dtype: torch.dtype) -> None:
    seen, wrong = set(), []
    for op in of_two_tensors():
        for a, b in itertools.product(operands(dtype), repeat=2):
            try:
                real = op(a, b)
            except (RuntimeError, NotImplementedError):
                continue  # not for this dtype, or of no such shapes
            if not isinstance(real, Tensor):
                continue
            seen.add(op)
            told = global_meta(op, (a, b), {})
            pairs = zip(real.shape, real.stride(), told.stride(), strict=True)
            if any(n > 1 and s != t for n, s, t in pairs):
                wrong.append(f"{op}{tuple(a.stride()), tuple(b.stride())}: {real.stride()}, told {told.stride()}")
    assert not wrong, "\n".join(wrong)
    assert len(seen) > 25
    assert sum(record_of(op).order is Order.AS_A_SUM for op in seen) > (2 if dtype is torch.bool else 6)


def test_strides_along_sizes_of_1() -> None:
    """Kernels tell the order of dims by them. Of a number, a schema does not say whether it is an operand."""
    x = torch.ones(3, 6, 1, 1).as_strided((3, 6, 1, 1), (6, 1, 6, 6))
    others = [x, 2, torch.ones(()), torch.ones(3, 6, 1, 1)]
    pairs: list[tuple[Any, ...]] = [*((x, y) for y in others), *((y, x) for y in others)]
    calls = [(op, pair) for op in of_two_tensors() for pair in pairs]
    with_numbers = (aten.eq.Scalar, aten.fmod.Scalar, aten.pow.Tensor_Scalar, aten.clamp_max.default, aten.fill.Scalar)
    calls += [(op, (x, 2)) for op in with_numbers]
    calls += [(op, (2, x)) for op in (aten.pow.Scalar, aten.polygamma.default, aten.special_zeta.self_scalar)]
    alone = (aten.abs.default, aten.relu.default, aten.hardtanh.default, aten.nan_to_num.default, aten.deg2rad.default)
    calls += [(op, (x,)) for op in alone]
    seen, wrong = 0, []
    for op, args in calls:
        try:
            real = op(*args)
        except (RuntimeError, NotImplementedError):
            continue  # not for numbers, or not for this dtype
        if not isinstance(real, Tensor):
            continue
        seen += 1
        told = global_meta(op, args, {})
        if real.stride() != told.stride():
            wrong.append(f"{op}{args}: {real.stride()}, told {told.stride()}")
    assert not wrong, "\n".join(wrong)
    assert seen > 150
