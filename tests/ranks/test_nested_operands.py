"""Plain nested tensors beside sharded ones: the result of plain PyTorch, or an error that names op, layouts, way out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as nnf
from torch import Tensor
from torch.distributed.tensor.placement_types import Shard

import shardcompile as sc
from shardcompile.testing import mesh, once

SIZES = (5, 0, 2)
_PARTS = [torch.arange(6.0, dtype=torch.float64).reshape(2, 3).cos(), torch.arange(12.0).double().reshape(4, 3).sin()]
_FULL = torch.linspace(-1, 1, 21, dtype=torch.float64).reshape(7, 3)


def nested(layout: torch.layout) -> Tensor:
    return torch.nested.nested_tensor(_PARTS, layout=layout, requires_grad=True)


def sharded() -> Tensor:
    return sc.distribute_tensor(_FULL, mesh(), [Shard(0)], sharding_shapes={0: SIZES}).requires_grad_()


def dense(x: Tensor) -> Tensor:
    x = x.values() if x.is_nested else x
    return x.full_tensor() if isinstance(x, sc.ShardTensor) else x


# Jagged ones keep their values as one tensor, which may be sharded

RIGHT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": lambda x, n: nnf.linear(n, x),
    "matmul": lambda x, n: n @ x.mT[:, :3],
    "mul": lambda x, n: torch.mul(n, x[0]),
    "a part": lambda x, n: nnf.linear(n, x).unbind()[1],
    "sum": lambda x, n: nnf.linear(n, x).sum(),
}


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize("name", list(RIGHT))
def test_jagged_values_are_those_of_plain_pytorch(name: str) -> None:
    function = RIGHT[name]
    once(torch.compiler.reset)
    compiled = once(lambda: torch.compile(function, fullgraph=True, backend="aot_eager"))
    found = []
    for run, x in ((function, _FULL.clone().requires_grad_()), (function, sharded()), (compiled, sharded())):
        n = nested(torch.jagged)
        out = run(x, n)
        sum(part.sin().sum() for part in (out.unbind() if out.is_nested else [out])).backward()
        found.append([dense(t).detach() for t in (out, x.grad, n.grad)])
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[2], found[0])


def offsets() -> Tensor:
    return torch.tensor([0, 2, 7])


REFUSED: dict[str, tuple[Callable[[Tensor, Tensor], object], str]] = {
    "mean": (lambda x, n: nnf.linear(n, x).mean(-1).values().sum().backward(), "_nested_view_from_jagged"),
    "chunk": (lambda x, n: nnf.linear(n, x).chunk(2, -1)[1].values().sum().backward(), "_nested_view_from_jagged"),
    "made of one": (lambda x, n: torch.nested.nested_tensor_from_jagged(x, offsets()), "_nested_view_from_jagged"),
    "looked up": (lambda x, n: nnf.embedding((n * 0).long()[..., 0], x), "embedding"),
}


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize("name", list(REFUSED))
def test_what_jagged_tensors_cannot_do_is_refused(name: str) -> None:
    function, op = REFUSED[name]
    function(_FULL.clone().requires_grad_(), nested(torch.jagged))  # plain PyTorch can
    with pytest.raises(sc.UnsupportedOpError, match=rf"{op}.*f64\[.*nested tensor of shape.*full_tensor\(\)"):
        function(sharded(), nested(torch.jagged))


@pytest.mark.ranks(3, processes=False)
def test_a_compiled_function_refuses_a_jagged_index_in_the_same_words() -> None:
    function, op = REFUSED["looked up"]
    once(torch.compiler.reset)
    compiled = once(lambda: torch.compile(function, fullgraph=True, backend="aot_eager"))
    with pytest.raises(sc.UnsupportedOpError, match=rf"{op}.*nested tensor of shape.*full_tensor\(\)"):
        compiled(sharded(), nested(torch.jagged))


# Strided ones have no shape

STRIDED: dict[str, Callable[[Tensor, Tensor], object]] = {
    "a number": lambda x, n: n * x.sum(),
    "linear": lambda x, n: nnf.linear(n, x),
    "in place": lambda x, n: n.detach().clone().mul_(x.detach().sum()),
    "made of some": lambda x, n: torch.nested.as_nested_tensor([x, x]),
}


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize("name", list(STRIDED))
def test_strided_nested_results_are_refused(name: str) -> None:
    function = STRIDED[name]
    assert function(_FULL, nested(torch.strided)).is_nested  # type: ignore[attr-defined]
    with pytest.raises(sc.UnsupportedOpError, match=r"returns a nested tensor.*full_tensor\(\) of the"):
        function(sharded(), nested(torch.strided))


@pytest.mark.ranks(3, processes=False)
def test_an_op_refuses_a_strided_nested_tensor_below_functions_too() -> None:
    with (
        pytest.raises(
            sc.UnsupportedOpError,
            match=r"aten.add.Tensor mixes.*plain nested tensor of 2 tensors \(input 0: f64\[7, 3\] .*full_tensor\(\)",
        ),
        torch._C.DisableTorchFunctionSubclass(),
    ):
        torch.add(sharded(), nested(torch.strided))


OF_NO_USE: dict[str, Callable[[Tensor, Tensor], object]] = {
    "add": torch.add,
    "cat": lambda x, n: torch.cat([x, n]),
    "where": lambda x, n: torch.where(x > 0, x, n),
    "copy": lambda x, n: x.detach().copy_(n),
    "foreach": lambda x, n: torch._foreach_add([x], [n]),
    "attention": lambda x, n: nnf.scaled_dot_product_attention(x, n, n),
}


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize("name", list(OF_NO_USE))
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_what_plain_pytorch_refuses_is_an_error_on_every_rank(layout: torch.layout, name: str) -> None:
    for x in (_FULL, sharded().detach()):
        with pytest.raises((RuntimeError, ValueError, NotImplementedError)) as error:
            OF_NO_USE[name](x, nested(layout).detach())
    assert "Internal error" not in str(error.value)
