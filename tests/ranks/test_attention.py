"""`scaled_dot_product_attention` on local shards: by which dims its tensors may be sharded, and what that costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as nnf
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Replicate, Shard
from torch.nn.attention import SDPBackend, sdpa_kernel

import shardcompile as sc
from shardcompile.testing import assert_matches_single_device, mesh
from tests.support.tiers import often

BATCH, HEADS, ROWS, FEATURES = Shard(0), Shard(1), Shard(2), Shard(3)
WHOLE = Replicate()

ON_TWO_DIMS = [
    ([ROWS, HEADS], [ROWS, HEADS]),
    ([ROWS, ROWS], [ROWS, ROWS]),
    ([BATCH, ROWS], [BATCH, ROWS]),
    ([ROWS, WHOLE], [WHOLE, ROWS]),
    ([WHOLE, WHOLE], [ROWS, ROWS]),
]
"""How queries, and keys, are laid out."""


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # an error where it does not run
        return nnf.scaled_dot_product_attention(q.sin(), k.sin(), v.sin(), mask, **options)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v, is_causal=True)


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v, enable_gqa=True, is_causal=True)


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return attention(q, k, v, mask.detach())


@pytest.mark.ranks(3, timeout=300, processes=False)
@pytest.mark.parametrize(
    "partition", often([ROWS, HEADS, BATCH, FEATURES], 2), ids=["rows", "heads", "batch", "features"]
)
def test_tensors_that_are_partition_alike(partition: Shard) -> None:
    torch.manual_seed(0)
    q, k, v = (random(7, 7, 7, 4) for _ in range(3))
    assert_matches_single_device(attention, [q, k, v], [partition] * 3, steps=3, backend="aot_eager")


@pytest.mark.ranks(3, timeout=300, processes=False)
@pytest.mark.parametrize("partition", often([ROWS, BATCH, HEADS, FEATURES], 1), ids=str)
def test_causal_attention_through_inductor(partition: Shard) -> None:
    torch.manual_seed(0)
    q, k, v = (random(7, 7, 7, 4) for _ in range(3))
    assert_matches_single_device(causal, [q, k, v], [partition] * 3, steps=3)


@pytest.mark.ranks(3, timeout=300, processes=False)
@pytest.mark.parametrize("function", often([causal, attention], 1))
def test_queries_that_are_whole_and_keys_in_shards(function: Any) -> None:
    torch.manual_seed(0)
    q, k, v = random(2, 2, 5, 4), random(2, 2, 7, 4), random(2, 2, 7, 4)
    assert_matches_single_device(function, [q, k, v], [None, ROWS, ROWS], steps=3, backend="aot_eager")


@pytest.mark.ranks(3, timeout=300, processes=False)
@pytest.mark.parametrize("partition", often([ROWS, HEADS, BATCH], 2), ids=["rows", "heads", "batch"])
def test_fewer_heads_of_keys(partition: Shard) -> None:
    torch.manual_seed(0)
    q, k, v = random(7, 6, 7, 4), random(7, 3, 7, 4), random(7, 3, 7, 4)
    assert_matches_single_device(grouped, [q, k, v], [partition] * 3, steps=3, backend="aot_eager")


@pytest.mark.ranks(3, timeout=300, processes=False)
@pytest.mark.parametrize(
    ("of_query", "of_keys", "shape", "of_mask"),
    [
        (ROWS, ROWS, (7, 7), Shard(0)),
        (ROWS, ROWS, (7, 7), None),
        (ROWS, ROWS, (2, 1, 7, 7), ROWS),
        (BATCH, BATCH, (7, 1, 1, 7), BATCH),
        *often([(HEADS, HEADS, (7, 7), None), (None, ROWS, (1, 2, 7, 7), Shard(3))], 1),
    ],
)
def test_masks(of_query: Any, of_keys: Any, shape: tuple[int, ...], of_mask: Any) -> None:
    torch.manual_seed(0)
    q, k, v = (random(7 if of_query == BATCH else 2, 2, 7, 4) for _ in range(3))
    mask = random(*shape)
    mask[..., 2] = -float("inf")
    if shape[-2] == 7:
        mask[..., 4, :] = -float("inf")
    placements = [of_query, of_keys, of_keys, of_mask]
    assert_matches_single_device(masked, [q, k, v, mask], placements, steps=2, backend="aot_eager")


@pytest.mark.ranks(4, mesh=(2, 2), timeout=300, processes=False)
@pytest.mark.parametrize(("of_query", "of_keys"), ON_TWO_DIMS)
def test_two_mesh_dims(of_query: Any, of_keys: Any) -> None:
    torch.manual_seed(0)
    q, k, v = (random(3, 4, 7, 4) for _ in range(3))
    placements = [of_query, of_keys, of_keys]
    assert_matches_single_device(causal, [q, k, v], placements, mesh=mesh(), compiled=False)


@pytest.mark.ranks(4, mesh=(2, 2), timeout=300, processes=False)
@pytest.mark.parametrize(("of_query", "of_keys"), often(ON_TWO_DIMS, 1))
def test_two_mesh_dims_compiled(of_query: Any, of_keys: Any) -> None:
    torch.manual_seed(0)
    q, k, v = (random(3, 4, 7, 4) for _ in range(3))
    placements = [of_query, of_keys, of_keys]
    backend = "inductor" if of_query == [WHOLE, WHOLE] else "aot_eager"
    assert_matches_single_device(causal, [q, k, v], placements, mesh=mesh(), steps=2, backend=backend)


@pytest.mark.ranks(3, timeout=300, processes=False)
def test_half_precision() -> None:
    torch.manual_seed(0)
    q, k, v = (random(2, 2, 7, 8).bfloat16() for _ in range(3))
    assert_matches_single_device(causal, [q, k, v], [ROWS] * 3, steps=2, backend="aot_eager", rtol=0.03, atol=0.03)


def rows_in_shards(mesh: DeviceMesh) -> tuple[Any, tuple[Tensor, ...]]:
    sizes = [3, 0, 4]
    shards = [random(2, 2, sizes[mesh.get_rank()], 4) for _ in range(3)]
    return causal, tuple(sc.ShardTensor.from_local(b, mesh, [ROWS], {0: sizes}).requires_grad_() for b in shards)


def test_rows_stay_where_they_are_and_scores_are_not_held() -> None:
    report = sc.explain(rows_in_shards, world_size=3, device="cpu", stages=[])
    assert not report.graph_breaks
    forward, backward = report.graphs
    assert [c.kind for c in forward.traced] == ["all_gather_v"] * 2
    assert [c.kind for c in backward.traced] == ["reduce_scatter_v"] * 2  # what was gathered is saved


@pytest.mark.ranks(2, processes=False)
def test_the_gradient_of_an_added_mask() -> None:
    aten = torch.ops.aten
    torch.manual_seed(0)
    q, k, v, grad = (random(2, 2, 7, 4) for _ in range(4))
    bias = random(2, 1, 7, 7).requires_grad_()
    expected = nnf.scaled_dot_product_attention(q, k, v, bias)
    (expected_grad,) = torch.autograd.grad(expected, bias, grad)
    q, k, v, grad, mask = (sc.distribute_tensor(x.detach(), mesh(), [ROWS]) for x in (q, k, v, grad, bias))
    out, lse, seed, offset = aten._scaled_dot_product_efficient_attention(q, k, v, mask, True)
    wanted = [False, False, False, True]
    *_, found = aten._scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, mask, out, lse, seed, offset, 0.0, wanted
    )
    torch.testing.assert_close(out.full_tensor(), expected.detach())
    torch.testing.assert_close(found.full_tensor(), expected_grad)


@pytest.mark.ranks(3, timeout=300, processes=False)
def test_heads_that_are_exchanged_for_rows() -> None:
    torch.manual_seed(0)
    full = [random(2, 6, 7, 4) for _ in range(3)]
    assert_matches_single_device(causal, full, [ROWS] * 3, steps=2, backend="aot_eager")
    assert causal(*(sc.distribute_tensor(x, mesh(), [ROWS]) for x in full)).placements == (ROWS,)


def six_heads(mesh: DeviceMesh) -> tuple[Any, tuple[Tensor, ...]]:
    sizes = [3, 3, 1]
    shards = [random(2, 6, sizes[mesh.get_rank()], 4) for _ in range(3)]
    return causal, tuple(sc.ShardTensor.from_local(b, mesh, [ROWS], {0: sizes}).requires_grad_() for b in shards)


def test_heads_are_exchanged_for_rows_where_that_moves_less() -> None:
    forward, backward = sc.explain(six_heads, world_size=3, device="cpu", stages=[]).graphs
    assert [c.kind for c in forward.issued] == ["all_to_all_bucket", "all_to_all_v"]
    assert sum(len(c.members) for c in forward.issued) == 4

    assert [c.kind for c in backward.traced] == ["all_to_all_v"] * 4
