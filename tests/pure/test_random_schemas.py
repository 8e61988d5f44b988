"""The schemas of the seeded versions of random ops."""

from __future__ import annotations

import pytest
from torch._ops import OpOverload
from torch.fx.operator_schemas import get_signature_for_torch_op

from shardcompile.ops.random.streams import _seeded
from tests.support.random_cases import random_ops


@pytest.mark.parametrize("op", [op for op in random_ops() if "from" in str(op._schema)], ids=str)
def test_inductor_can_read_the_signature_of_a_seeded_op(op: OpOverload) -> None:
    (signature,) = get_signature_for_torch_op(_seeded(op))
    names = [a.name for a in op._schema.arguments if "Generator" not in str(a.type)]
    assert len(signature.parameters) == 2 + len(names)
