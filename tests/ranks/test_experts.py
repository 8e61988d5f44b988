"""Experts that lie on different ranks: values and gradients of one process, and each row moves there and back once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as nnf
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.placement_types import Replicate, Shard

import shardcompile as sc
from shardcompile.compat.testing import graphs_compiled
from shardcompile.inspect.offline import trace_offline
from shardcompile.testing import once
from tests.support.tiers import often

WIDTH, HIDDEN, EXPERTS, COPIES = 16, 8, 5, 2
TOKENS = ([9, 0, 5], [1, 12, 1], [0, 0, 8], [3, 3, 4])


def layer(x: Any, chosen: Any, weights: Any, up: Any, down: Any) -> Any:
    """A layer of experts as `transformers` has it: rows in the order of their experts, and back."""
    numbers = chosen.reshape(-1)
    ordered, order = torch.sort(numbers)
    ends = torch.cumsum(torch.histc(ordered.float(), bins=EXPERTS, min=0, max=EXPERTS - 1), 0, dtype=torch.int32)
    rows = x[order // COPIES]
    hidden = nnf.grouped_mm(rows, up, offs=ends).relu()
    out = nnf.grouped_mm(hidden, down, offs=ends) * weights.reshape(-1)[order].unsqueeze(-1)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.size(0))
    return out[back].view(x.shape[0], COPIES, WIDTH).sum(1)


def whole_numbers(low: int, high: int, *shape: int, seed: int) -> Tensor:
    """So small that sums of their products are exact in bfloat16, the only dtype of grouped products that compiles."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, shape, generator=draw).to(torch.bfloat16)


@pytest.mark.ranks(3, 6, timeout=600, processes=False)
@pytest.mark.parametrize("experts", ["a", "b"])
def test_a_layer_of_experts_that_are_partition(experts: str) -> None:
    """Over the ranks that the tokens are sharded over, and over others."""
    compare("", experts)


COMPILED = [("aot_eager", "a"), ("aot_eager", "b"), ("shardcompile", "a"), ("shardcompile", "b")]


@pytest.mark.ranks(3, timeout=600, processes=False)
@pytest.mark.parametrize(("backend", "experts"), often(COMPILED, 0))
def test_one_graph_serves_every_partition_of_the_tokens(backend: str, experts: str) -> None:
    compare(backend, experts)


@pytest.mark.nightly
@pytest.mark.ranks(6, timeout=600, processes=False)
@pytest.mark.parametrize(("backend", "experts"), COMPILED)
def test_one_graph_over_two_mesh_dims(backend: str, experts: str) -> None:
    compare(backend, experts)


def test_a_row_moves_there_and_back_once() -> None:
    """In the forward pass, and its gradient in the backward pass."""

    def build(mesh: DeviceMesh) -> tuple[Any, tuple[Any, ...]]:
        def partition(sizes: list[int], *shape: int, dtype: torch.dtype = torch.bfloat16) -> Any:
            full = torch.zeros(sum(sizes), *shape, dtype=dtype)
            x = sc.distribute_tensor(full, mesh, [Shard(0)], sharding_shapes={0: sizes})
            return x.requires_grad_(dtype.is_floating_point)

        mats = [partition([1, 0, 4], WIDTH, HIDDEN), partition([1, 0, 4], HIDDEN, WIDTH)]
        tokens = TOKENS[0]
        return layer, (
            partition(tokens, WIDTH),
            partition(tokens, COPIES, dtype=torch.int64),
            partition(tokens, COPIES),
            *mats,
        )

    trace = trace_offline(build, world_size=3, device="cpu")
    for graph in (trace.forward, trace.backward):
        assert graph is not None
        exchanges = [node for node in graph.graph.nodes if "exchange_rows" in str(node.target)]
        payloads = [payload for node in exchanges for payload in node.args[0]]
        assert sum(p.meta["val"].is_floating_point() and p.meta["val"].ndim == 2 for p in payloads) == 2


def compare(backend: str, experts: str) -> None:
    """A layer over several partitions of its tokens against one process."""
    on = init_device_mesh("cpu", (3, torch.distributed.get_world_size() // 3), mesh_dim_names=("a", "b"))
    run = torch.compile(layer, fullgraph=True, backend=backend) if backend else layer
    mats = [whole_numbers(-1, 2, EXPERTS, *s, seed=i) for i, s in enumerate([(WIDTH, HIDDEN), (HIDDEN, WIDTH)])]
    where = [Shard(0) if experts == m else Replicate() for m in "ab"]
    at = "ab".index(experts)
    sizes = {at: [[1, 0, 4], [2, 3]][at]} if on.shape[at] > 1 else None
    before = None
    for seed, tokens in enumerate(TOKENS):
        n = sum(tokens)
        full = whole_numbers(-1, 2, n, WIDTH, seed=10 + seed)
        chosen = torch.randint(
            0, [EXPERTS, 1, 2, EXPERTS][seed], (n, COPIES), generator=torch.Generator().manual_seed(seed)
        )
        weights, gradient = whole_numbers(1, 3, n, COPIES, seed=20), whole_numbers(-1, 2, n, WIDTH, seed=30)
        plain = [t.clone().requires_grad_() for t in (full, weights, *mats)]
        expected = layer(plain[0], chosen, *plain[1:])
        expected.backward(gradient)
        x, picked, shares = (
            sc.distribute_tensor(t, on, [Shard(0), Replicate()], sharding_shapes={0: tokens})
            for t in (full, chosen, weights)
        )
        own = [sc.distribute_tensor(m, on, where, sharding_shapes=sizes).requires_grad_() for m in mats]
        x, shares = x.requires_grad_(), shares.requires_grad_()
        out = run(x, picked, shares, *own)
        (out * gradient).sum().backward()
        assert torch.equal(out.detach().full_tensor(), expected.detach()), (seed, tokens)
        for ours, theirs in zip([x, shares, *own], plain, strict=True):
            assert torch.equal(ours.grad.full_tensor(), theirs.grad), (seed, tokens)
        if seed == 1:
            before = once(graphs_compiled)
    assert not backend or once(graphs_compiled) == before
