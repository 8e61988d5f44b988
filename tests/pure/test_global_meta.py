"""What is said beforehand of the result of an op: its strides are those of PyTorch's kernels."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from tiers import often
from torch import Tensor
from torch._ops import OpOverload

from shardcompile.ops import Order, record_of
from shardcompile.ops.support.global_meta import global_meta

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
