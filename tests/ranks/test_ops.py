"""Every case of `op_cases`, in every way its inputs can be laid out, against plain PyTorch on the full tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.placement_types import Shard

import shardcompile as sc
from shardcompile.testing import once
from tests.support import op_check, stated_calls
from tests.support.op_cases import FAMILIES
from tests.support.tiers import often

COMPILED = {
    "unary": 20,
    "binary": 9,
    "casts": 5,
    "in-place": 9,
    "products": 16,
    "reductions": 24,
    "softmax and norms": 5,
    "joins": 6,
    "views": 6,
    "masks": 7,
    "selection": 11,
    "losses": 17,
    "attention": 15,
    "deeper": 3,
    "scans": 4,
    "bags": 4,
    "factories": 5,
    "Fourier transforms": 5,
    "einsums": 5,
    "flattened dims": 7,
    "without rules": 6,
    "out": 4,
}
"""Of each family every so many cases are compiled, most of them at night: a compilation takes a second."""


@pytest.fixture(autouse=True)
def calls_are_noted() -> Iterator[None]:
    with stated_calls.noting():
        yield


@pytest.mark.ranks(3, timeout=400, processes=False)
@pytest.mark.parametrize("part", often(list(range(12)), 1))
@pytest.mark.parametrize("family", list(FAMILIES))
def test_on_three_ranks(family: str, part: int) -> None:
    mesh = init_device_mesh("cpu", (3,))
    failures = [text for case in FAMILIES[family] for text in op_check.check(case, mesh, limit=4, part=(part, 12))]
    assert not (everyone := op_check.agree(failures)), "\n".join(everyone)
    assert not (differing := stated_calls.differences()), differing


@pytest.mark.ranks(4, timeout=400, processes=False)
@pytest.mark.parametrize("part", often(list(range(7)), 1))
@pytest.mark.parametrize("family", list(FAMILIES))
def test_on_two_by_two_ranks(family: str, part: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    failures = [text for case in FAMILIES[family][::3][part::7] for text in op_check.check(case, mesh, limit=2)]
    assert not (everyone := op_check.agree(failures)), "\n".join(everyone)
    assert not (differing := stated_calls.differences()), differing


@pytest.mark.ranks(3, timeout=600, processes=False)
@pytest.mark.parametrize("part", often(list(range(12)), 1))
@pytest.mark.parametrize("family", list(COMPILED))
def test_compiled_with_aot_eager(family: str, part: int) -> None:
    mesh = init_device_mesh("cpu", (3,))

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        once(torch._dynamo.reset)
        return torch.compile(function, fullgraph=True, backend="aot_eager")

    cases = [case for case in FAMILIES[family] if "error" not in case.name][:: COMPILED[family]][part::12]
    failures = [text for case in cases for text in op_check.check(case, mesh, limit=1, wrap=compiled)]
    assert not (everyone := op_check.agree(failures)), "\n".join(everyone)
    assert not (differing := stated_calls.differences()), differing


@pytest.mark.ranks(2, processes=False)
def test_a_wrong_value_would_be_found() -> None:
    mesh = init_device_mesh("cpu", (2,))

    def wrong(x: Tensor) -> Tensor:
        return x.relu() if type(x) is Tensor else x.relu() + 1e-3

    assert op_check.check(op_check.case("wrong", wrong, op_check.F(5, 4)), mesh, limit=2)


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize("name", ["inv_ex", "cholesky_ex", "solve_ex"])
def test_all_ranks_refuse_a_matrix_that_one_of_them_has(name: str) -> None:
    full = torch.eye(4, dtype=torch.float64).repeat(7, 1, 1)
    full[6] = 0
    x = sc.distribute_tensor(full, init_device_mesh("cpu", (3,)), [Shard(0)], sharding_shapes={0: [5, 0, 2]})
    with pytest.raises(torch.linalg.LinAlgError):
        getattr(torch.linalg, name)(*([x, x] if name == "solve_ex" else [x]), check_errors=True)
