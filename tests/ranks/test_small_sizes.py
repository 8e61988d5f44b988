"""Every case of `op_cases` with sizes of 0 and 1 in place of others: values as of plain PyTorch, or its errors."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.placement_types import Shard

import shardcompile as sc
from shardcompile import config
from shardcompile.compat import OpOverload
from shardcompile.errors import UnsupportedOpError
from shardcompile.ops import NotServed, always, state
from shardcompile.testing import mesh, once
from tests.support import op_check, stated_calls
from tests.support.op_cases import FAMILIES
from tests.support.op_check import Case, F, P
from tests.support.tiers import often


def small(case: Case) -> Iterator[Case]:
    """The case with each of its sizes, and with all of them, 0 and 1."""
    sizes = sorted({n for i in case.inputs for n in i.shape if n > 1})
    groups = [[size] for size in sizes] + ([sizes] if len(sizes) > 1 else [])
    for group in groups:
        for size in (0, 1):
            new = dict.fromkeys(group, size)
            inputs = [
                replace(
                    i, shape=tuple(new.get(n, n) for n in i.shape), high=max(new.get(i.high, i.high), min(i.high, 1))
                )
                for i in case.inputs
            ]
            refuses = None if case.refuses is None else ""  # whatever the text
            yield replace(case, name=f"{case.name} with {new}", inputs=tuple(inputs), refuses=refuses)


_FAULTS_OF_TORCH = ("MKL FFT error", "returned an invalid gradient")
"""What kernels of torch raise for a batch of nothing; here there is a value."""

_CRASHES_OF_TORCH = ["embedding_bag cut offsets with {3: 0}"]
"""What ends the process with plain PyTorch (2.13): indices, and no bag that they are in."""


def _tells_nothing(case: Case) -> bool:
    """Whether plain PyTorch is at fault, or an index is out of range: of a sharded one each rank tells by itself."""
    case = copy.deepcopy(case)
    generator = torch.Generator().manual_seed(op_check.seed_of(case.name))
    full = [op_check.fill(i, generator) for i in case.inputs]
    indexed = any(i.kind.endswith("index") and x.numel() for i, x in zip(case.inputs, full, strict=True))
    want = op_check.run_plain_or_error(case, full)
    return isinstance(want, Exception) and (indexed or any(text in str(want) for text in _FAULTS_OF_TORCH))


CASES = [(family, part) for part in range(8) for family in FAMILIES]


@pytest.fixture(autouse=True)
def calls_are_noted() -> Iterator[None]:
    with stated_calls.noting():
        yield


@pytest.mark.ranks(3, timeout=600, processes=False)
@pytest.mark.parametrize(("family", "part"), often(CASES, len(FAMILIES)))
def test_sizes_of_0_and_1(family: str, part: int) -> None:
    ranks, failures = init_device_mesh("cpu", (3,)), []
    cases = [c for case in FAMILIES[family] for c in small(case) if c.name not in _CRASHES_OF_TORCH][part::8]
    for case in cases:
        if not once(lambda case=case: _tells_nothing(case)):  # type: ignore[misc]
            failures += op_check.check(case, ranks, limit=1)
    assert not (everyone := op_check.agree(failures)), "\n".join(everyone)


@pytest.mark.ranks(3, processes=False)
def test_a_roll_of_nothing_runs_by_another_way() -> None:
    full = torch.randn(0, 0)
    x = sc.distribute_tensor(full, mesh(), [Shard(0)])
    rolled = torch.roll(x.norm(dim=-1, keepdim=True), 1)
    assert torch.equal(rolled.full_tensor(), torch.roll(full.norm(dim=-1, keepdim=True), 1))


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize("samples", [0, 2])
def test_a_convolution_without_channels(samples: int) -> None:
    names = ["conv1d", "conv2d", "conv3d"]
    for spatial, name in enumerate(names, 1):
        inputs = (F(samples, 0, *[5] * spatial), P(4, 0, *[3] * spatial), P(4))
        run = getattr(torch.nn.functional, name)
        failures = op_check.check(op_check.case(name, lambda *args, run=run: run(*args, padding=1), *inputs), mesh())
        assert not (everyone := op_check.agree(failures)), "\n".join(everyone)


# A decomposition that serves no call


def first_rank(x: torch.Tensor) -> torch.Tensor:
    """The tensor of rank 0."""
    received = x.clone()
    dist.broadcast(received, src=0)
    return received


def _op(name: str, schema: str, kernel: Any, tags: tuple[torch.Tag, ...] = ()) -> OpOverload:
    torch.library.define(f"shardcompile_small_sizes::{name}", schema, tags=tags)
    torch.library.impl(f"shardcompile_small_sizes::{name}", "CompositeExplicitAutograd", kernel)
    op: OpOverload = getattr(torch.ops.shardcompile_small_sizes, name).default
    state(op, sharded=always(lambda *_: NotServed("it is an example")))
    return op


TWICE = _op("twice", "(Tensor x) -> Tensor", lambda x: x * 2)
DOUBLE = _op("double_", "(Tensor(a!) x) -> ()", lambda x: x.mul_(2) and None)
DRAW = _op("draw", "(Tensor x) -> Tensor", torch.rand_like, (torch.Tag.nondeterministic_seeded,))


@pytest.mark.ranks(3, processes=False)
def test_an_op_whose_decomposition_serves_no_call_is_gathered_or_refused() -> None:
    full = torch.randn(7, 2)
    x = sc.distribute_tensor(full, mesh(), [Shard(0)], sharding_shapes={0: [5, 0, 2]})
    for number in range(2):  # the decision is kept
        assert torch.equal(TWICE(x).full_tensor(), full * 2)
        with (
            config.patch(fallback="error"),
            pytest.raises(UnsupportedOpError, match="does not serve this call: it is an example"),
        ):
            TWICE(x + 0.0 * number)
        with pytest.raises(UnsupportedOpError) as caught:
            DOUBLE(x)
        text = str(caught.value)
        assert str(DOUBLE) in text and "writes to its argument" in text
        assert "S(0)[5,0,2]" in text and "Take full_tensor()" in text
        drawn = DRAW(x).full_tensor()
        assert drawn.shape == full.shape
        assert not op_check.agree([] if torch.equal(drawn, first_rank(drawn)) else ["another draw than rank 0's"])
