"""Errors of ours keep their type and their text inside compiled functions, at each stage that can raise them."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Partial, Shard

import shardcompile as sc
from shardcompile import config
from shardcompile.errors import (
    DivergenceError,
    IndexRangeError,
    LayoutError,
    PassError,
    RedistributeError,
    RowRangeError,
    ShardError,
    UnsupportedOpError,
)
from shardcompile.passes import inductor_options
from shardcompile.testing import mesh
from tests.support.tiers import often

SIZES = [5, 0, 2]


def sharded(full: Tensor) -> sc.ShardTensor:
    return sc.distribute_tensor(full, mesh(), [Shard(0)], sharding_shapes={0: SIZES})


def _to_partial(x: Any) -> Any:
    return x.redistribute(placements=[Partial()])


@torch.library.custom_op("shardcompile_errors::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda ctx, grad: _to_partial(grad))


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _to_partial(grads[0])


def _branch(x: Tensor) -> Any:
    return torch.cond(torch.tensor(True), lambda y: _to_partial(y) * 2, lambda y: y + 1, (x,))


def _checkpointed(x: Tensor) -> Any:
    return torch.utils.checkpoint.checkpoint(_to_partial, x, use_reentrant=False)


def _selected(x: Any) -> Any:
    return x.index_select(0, sharded(torch.tensor([0, 1, 2, 9, 3, 1, 1])))


SCENES: dict[str, tuple[Callable[[Any], Any], type[ShardError], str]] = {
    "an op without a rule": (torch.pdist, UnsupportedOpError, "Register a rule: register_sharding"),
    "a redistribution": (_to_partial, RedistributeError, "Partial cannot be a target"),
    "a term": (lambda x: x.sum(0).to_local(), RedistributeError, "take full_tensor()"),
    "a layout": (lambda x: sc.ShardTensor.from_local(x, mesh(), [Shard(5)]), LayoutError, "S(5) is out of range"),
    "a method": (lambda x: x * x.offsets()[0], UnsupportedOpError, "Call it outside and pass torch.tensor"),
    "a checkpoint": (_checkpointed, RedistributeError, "Partial cannot be a target"),
    "a branch": (_branch, RedistributeError, "Partial cannot be a target"),
    "the backward pass of a function": (lambda x: _Backward.apply(x).sum(), RedistributeError, "cannot be a target"),
    "the backward pass of an op": (lambda x: twice(x).sum(), RedistributeError, "cannot be a target"),
    "a run": (_selected, RowRangeError, "less than the number of rows; rank 0 of the group has 9"),
}


@pytest.mark.ranks(3, timeout=300, processes=False)
@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("scene", often(["an op without a rule", "the backward pass of an op", "a branch", *SCENES], 3))
def test_type_and_text_are_kept(scene: str, fullgraph: bool) -> None:
    run, kind, text = SCENES[scene]
    x = sharded(torch.randn(7, 4)).requires_grad_("backward" in scene)
    local = x.to_local() if scene == "a layout" else x
    fallback = "error" if scene == "an op without a rule" else "replicate"
    with config.patch(fallback=fallback), pytest.raises(kind) as caught:
        out = torch.compile(run, fullgraph=fullgraph, backend="aot_eager")(local)
        out.sum().backward()
    error = caught.value
    assert type(error).__qualname__ == kind.__qualname__ and type(error).__module__ == kind.__module__
    assert text in str(error) and "running in eager" not in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind and text in str(again)


@pytest.mark.ranks(2, timeout=300, processes=False)
@pytest.mark.parametrize("kind", [PassError, DivergenceError, UnsupportedOpError, IndexRangeError])
@pytest.mark.parametrize("fullgraph", [True, False])
def test_what_a_backend_raises_is_kept(kind: type[ShardError], fullgraph: bool) -> None:
    def backend(*_: object) -> Any:
        raise kind("no such pass")

    with pytest.raises(kind, match="no such pass"):
        torch.compile(lambda x: x * 2, fullgraph=fullgraph, backend=backend)(torch.ones(3))


@pytest.mark.ranks(2, timeout=300, processes=False)
def test_what_a_pass_raises_is_kept() -> None:
    class Failing:
        name = "failing"

        def __call__(self, graph: object) -> None:
            raise PassError("this graph is not for me")

        def __repr__(self) -> str:
            return "Failing()"

    options = inductor_options(passes=[Failing()])
    x = sc.distribute_tensor(torch.ones(7, 2), mesh(), [Shard(0)])
    with pytest.raises(PassError, match="this graph is not for me"):
        torch.compile(lambda x: (x * 2).sum(), fullgraph=True, options=options)(x)


@pytest.mark.ranks(2, processes=False)
def test_errors_outside_of_compiled_code_are_of_their_classes() -> None:
    with pytest.raises(RedistributeError) as caught:
        _to_partial(sc.distribute_tensor(torch.ones(7, 2), mesh(), [Shard(0)]))
    assert type(caught.value) is RedistributeError
