"""Eager lookups by the same index plan their communication once, until the index is written to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Shard

import shardcompile as sc
from shardcompile.errors import IndexRangeError, LayoutError
from shardcompile.testing import mesh, rank
from tests.support.sent import Sent
from tests.support.tiers import often

ROWS, EDGES = [4, 0, 3], [0, 7, 3]
_INDEX = [[0, 6], [3, 3], [6, 1], [5, 0], [2, 2], [2, 5], [4, 6], [1, 6], [0, 0], [6, 3]]


def _inputs() -> tuple[tuple[Tensor, Tensor], tuple[Any, Any]]:
    """Returns rows, [7, 3], and edges, [10, 2]: whole, and sharded."""
    x = torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    edges = torch.tensor(_INDEX)
    sharded = sc.distribute_tensor(x, mesh(), [Shard(0)], sharding_shapes={0: ROWS})
    of_edges = sc.distribute_tensor(edges, mesh(), [Shard(0)], sharding_shapes={0: EDGES})
    return (x, edges), (sharded, of_edges)


def _sums(x: Any, index: Any, values: Any) -> Any:
    return torch.zeros_like(x).index_add(0, index, values)


def _layers(x: Any, edges: Any) -> list[Any]:
    start, end = edges.unbind(1)
    for _ in range(3):
        x = x + _sums(x, end, x[start] * x[end])
    return [x]


def _views_anew(x: Any, edges: Any) -> list[Any]:
    for _ in range(2):
        index = edges[:, 1].view(-1, 1).expand(-1, 3)
        x = x + torch.zeros_like(x).scatter_add(0, index, x.index_select(0, edges[:, 0]))
        x = x + x.gather(0, edges.t()[1].unsqueeze(1).expand(-1, 3)).mean(0)
    return [x]


def _other_parts(x: Any, edges: Any) -> list[Any]:
    start = edges.select(1, 0)
    return [x[start], x[edges.select(-1, 1)], x[edges], x[edges.view(-1)], x[edges.t()], x[edges.unbind(1)[0]]]


def _many_parts(x: Any, edges: Any) -> list[Any]:
    return [x[edges[:, 0].view(1, -1).expand(n, -1)] for n in range(1, 12)] * 2


def _written(x: Any, edges: Any) -> list[Any]:
    start = edges[:, 0]
    found = [x[start]]
    edges.sub_(1).remainder_(7)
    found.append(x[start])
    start.fill_(2)
    found += [x[start], x[edges[:, 0]]]
    edges.data.copy_(torch.zeros_like(edges))
    found.append(x[start])
    torch._foreach_add_([edges], 1)
    found += [x[start], x[edges[:, 1]]]
    torch.add(start, 1, out=start)
    return [*found, x[edges[:, 0]]]


def _turned(x: Any, edges: Any) -> list[Any]:
    edges, start = edges[:2].clone(), edges[:, 0]
    found = [x[edges[:, 0]], x[edges.flatten()]]
    edges.t_()
    return [*found, x[edges[:, 0]], x[edges.flatten()], x[start]]


def _other_rows(x: Any, edges: Any) -> list[Any]:
    start, more = edges[:, 0], torch.cat([x, x[:2]])
    return [more[start], x[start], more[start - 9]]


def _reduced(x: Any, edges: Any) -> list[Any]:
    index = edges[:, 1].unsqueeze(1).expand(-1, 3)
    found = x[edges[:, 1]]
    return [x.scatter_reduce(0, index, found, kind) for kind in ("mean", "amax")] + [x.index_fill(0, edges[:, 1], 2.0)]


PROGRAMS: dict[str, tuple[Callable[[Any, Any], list[Any]], int | None]] = {
    "layers": (_layers, 2),
    "views made anew": (_views_anew, 3),
    "other parts": (_other_parts, None),
    "many parts": (_many_parts, None),
    "written": (_written, None),
    "turned": (_turned, None),
    "other rows": (_other_rows, None),
    "reduced": (_reduced, None),
}
"""Programs of rows and edges, and how many plans they need."""


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize("mode", ["grad", "no grad", "inference"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_in_plain_pytorch(name: str, mode: str) -> None:
    run, plans = PROGRAMS[name]
    with torch.inference_mode(mode == "inference"), torch.set_grad_enabled(mode == "grad"):
        whole, sharded = _inputs()
        for inputs in (whole, sharded):
            inputs[0].requires_grad_(mode == "grad")
        want = run(*whole)
        with Sent() as sent:
            got = run(*sharded)
            for a, b in zip(got, want, strict=True):
                torch.testing.assert_close(a.full_tensor(), b)
            if mode == "grad" and name not in ("written", "turned"):
                _weighted(got).backward()
                _weighted(want).backward()
                torch.testing.assert_close(sharded[0].grad.full_tensor(), whole[0].grad)
    if plans is not None and mode != "inference":
        assert sent.names.count("gather_counts") == plans


def _weighted(xs: list[Any]) -> Any:
    return sum((x * torch.linspace(-1, 2, x.shape[-1], dtype=x.dtype)).sum() for x in xs)


@pytest.mark.ranks(3, processes=False)
def test_the_next_step_needs_no_plan() -> None:
    _, (x, edges) = _inputs()
    _layers(x, edges)
    with Sent() as sent:
        _layers(x, edges)
    assert "gather_counts" not in sent.names


@pytest.mark.ranks(3, processes=False)
def test_a_plan_of_an_op_that_takes_negative_indices_serves_another_that_refuses_them() -> None:
    (x, _), (sharded, _) = _inputs()
    index = torch.tensor([0, -1, 6, 3, -7])
    of_index = sc.distribute_tensor(index, mesh(), [Shard(0)], sharding_shapes={0: [1, 1, 3]})
    torch.testing.assert_close(sharded[of_index].full_tensor(), x[index])
    for refused in (sharded.index_select, lambda d, i: _sums(sharded, i, sharded[i])):
        with pytest.raises(IndexRangeError, match="rank 1 of the group has -1, rank 2 of the group has -7"):
            refused(0, of_index)
    torch.testing.assert_close(sharded[of_index].full_tensor(), x[index])


@pytest.mark.ranks(3, processes=False)
def test_memory_of_the_user() -> None:
    (x, _), (sharded, _) = _inputs()
    memory = torch.tensor([rank(), 6, 0])
    index = sc.ShardTensor.from_local(memory, mesh(), [Shard(0)], {0: [3, 3, 3]})

    def check(whole: list[int]) -> None:
        torch.testing.assert_close(sharded[index].full_tensor(), x[torch.tensor(whole)])

    check([0, 6, 0, 1, 6, 0, 2, 6, 0])
    with Sent() as sent:
        check([0, 6, 0, 1, 6, 0, 2, 6, 0])
    assert "gather_counts" not in sent.names
    memory[0] = 5
    check([5, 6, 0] * 3)
    memory.numpy()[1] = 2
    with pytest.raises(LayoutError, match="Pass that memory to from_local again"):
        check([5, 2, 0] * 3)
    index = sc.ShardTensor.from_local(memory, mesh(), [Shard(0)], {0: [3, 3, 3]})
    check([5, 2, 0] * 3)


@pytest.mark.ranks(3, processes=False)
def test_writes_to_the_local_shard_are_seen() -> None:
    (x, whole), (sharded, edges) = _inputs()
    start = edges[:, 0]
    assert torch.equal(sharded[start].full_tensor(), x[whole[:, 0]])
    edges.to_local().zero_()
    assert torch.equal(sharded[start].full_tensor(), x[whole[:, 0] * 0])


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_writes_of_a_compiled_function_are_seen(backend: str) -> None:
    (x, whole), (sharded, edges) = _inputs()
    start = edges[:, 0]
    assert torch.equal(sharded[start].full_tensor(), x[whole[:, 0]])
    torch.compile(lambda edges: edges.mul_(0), fullgraph=True, backend=backend)(edges)
    assert torch.equal(sharded[start].full_tensor(), x[whole[:, 0] * 0])


def _filled(x: Any, index: Any) -> Any:
    return x.scatter(0, index.unsqueeze(1).expand(-1, 3), 2.0)


REFUSING: dict[str, Callable[[Any, Any], Any]] = {
    "index_select": lambda x, index: x.index_select(0, index),
    "gather": lambda x, index: x.gather(0, index.unsqueeze(1).expand(-1, 3)),
    "index_add": lambda x, index: _sums(x, index, x[index].cos()),
    "scatter_add": lambda x, index: x.scatter_add(0, index.unsqueeze(1).expand(-1, 3), x[index].cos()),
    "scatter_reduce": lambda x, index: x.scatter_reduce(0, index.unsqueeze(1).expand(-1, 3), x[index].cos(), "amax"),
    "scatter a number": _filled,
    "scatter a number after a lookup": lambda x, index: _filled(x, index) * x[index].sum(),
}
"""Functions that plain PyTorch refuses for negative indices."""


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize("backend", [None, *often(["aot_eager", "inductor"], 1)])
@pytest.mark.parametrize("name", REFUSING)
def test_negative_indices_are_refused(name: str, backend: str | None) -> None:
    (x, _), (sharded, _) = _inputs()
    function, index = REFUSING[name], torch.tensor([0, -1, 6, 3, 2])
    with pytest.raises((RuntimeError, IndexError)):
        function(x, index)
    run = function if backend is None else torch.compile(function, fullgraph=True, backend=backend)

    def of(index: Tensor) -> Any:
        return sc.distribute_tensor(index, mesh(), [Shard(0)], sharding_shapes={0: [1, 1, 3]})

    torch.testing.assert_close(run(sharded, of(index.abs())).full_tensor(), function(x, index.abs()))
    with pytest.raises(IndexRangeError, match="-1"):
        run(sharded, of(index))
