"""An index that is out of range is an error that names op, index and size, on every rank that has the index."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

import shardcompile as sc
from shardcompile.errors import CollectiveError, IndexRangeError

Op = Callable[[Tensor, Tensor], Any]

WRAP: dict[str, Op] = {
    "index": lambda x, i: x[i],
    "take": lambda x, i: x.take(i * 2),
    "index_fill": lambda x, i: x.index_fill(0, i, 2.0),
    "index_put": lambda x, i: x.index_put((i,), torch.ones(2)),
    "index_put_": lambda x, i: x.clone().index_put_((i,), torch.ones(5, 2), accumulate=True),
}
OPS: dict[str, Op] = {
    **WRAP,
    "embedding": lambda x, i: F.embedding(i, x),
    "index_select": lambda x, i: x.index_select(0, i),
    "gather": lambda x, i: x.gather(0, i[:, None].expand(-1, 2)),
    "index_add": lambda x, i: x.index_add(0, i, i[:, None] * torch.ones(2)),
    "index_add_": lambda x, i: x.clone().index_add_(0, i, torch.ones(5, 2)),
    "scatter_add": lambda x, i: x.scatter_add(0, i[:, None].expand(-1, 2), i[:, None] * torch.ones(2)),
    "scatter_": lambda x, i: x.clone().scatter_(0, i[:, None].expand(-1, 2), 2.0),
    "index_copy": lambda x, i: x.index_copy(0, i, torch.ones(5, 2)),
    "cross_entropy": lambda x, i: F.cross_entropy(torch.ones(5, 1) * x.sum(1), i),
}
PLACED: list[tuple[Any, Any]] = [(Replicate(), None), (Shard(0), {0: [3, 0, 4]}), (Shard(1), {0: [1, 1, 0]})]


@pytest.mark.ranks(3, timeout=200, processes=False)
@pytest.mark.parametrize("where", range(3))
@pytest.mark.parametrize("numbers", [[0, 1, 2, 9, 3], [0, -1, 2, 1, 3], [0, 1, 2, 3, -9], [0, 3, 1, 2, 6]])
def test_out_of_range_is_an_error_on_every_rank(numbers: list[int], where: int) -> None:
    mesh = init_device_mesh("cpu", (3,))
    full, index = torch.arange(14.0).reshape(7, 2), torch.tensor(numbers)
    x = sc.distribute_tensor(full, mesh, [PLACED[where][0]], sharding_shapes=PLACED[where][1])
    everywhere = sc.distribute_tensor(index, mesh, [Replicate()])
    partition = sc.distribute_tensor(index, mesh, [Shard(0)], sharding_shapes={0: [2, 0, 3]})
    for name, op in OPS.items():
        wrong = next((n for n in numbers if n > 6 or n < (-7 if name in WRAP else 0)), None)
        if wrong is None:
            torch.testing.assert_close(op(x, partition).full_tensor(), op(full, index))
        for i in (index, everywhere):
            if wrong is None:
                torch.testing.assert_close(op(x, i).full_tensor(), op(full, index))
                continue
            with pytest.raises((IndexError, RuntimeError)):
                op(full, index)
            # `take` counts elements.
            said = "index (18|-18)" if name == "take" else f"index {wrong}"
            with pytest.raises(IndexRangeError, match=rf"aten.*: {said} is out of range for dim \d of size"):
                op(x, i)


@pytest.mark.ranks(3, processes=False)
def test_each_rank_looks_at_its_part_of_an_index() -> None:
    mesh, rows = init_device_mesh("cpu", (3,)), torch.arange(14.0).reshape(7, 2)
    table = sc.distribute_tensor(rows, mesh, [Replicate()])
    partition = sc.distribute_tensor(torch.tensor([0, 1, 2, 9, 3]), mesh, [Shard(0)], sharding_shapes={0: [2, 0, 3]})
    if mesh.get_rank() < 2:
        found = F.embedding(partition, table).to_local()
        torch.testing.assert_close(found, rows[: 2 if mesh.get_rank() == 0 else 0])
        return
    with pytest.raises(IndexRangeError, match="index 9 is out of range for dim 0 of size 7"):
        F.embedding(partition, table)


@pytest.mark.ranks(3, timeout=200, processes=False)
@pytest.mark.parametrize("op", ["index_select", "embedding", "gather"])
@pytest.mark.parametrize("number", [9, -1])
def test_a_graph_does_not_look_up_what_is_not_there(op: str, number: int) -> None:
    mesh = init_device_mesh("cpu", (3,))
    x = sc.distribute_tensor(torch.arange(14.0).reshape(7, 2), mesh, [Shard(0)], sharding_shapes={0: [3, 0, 4]})
    run = torch.compile(OPS[op], fullgraph=True, backend="aot_eager")
    assert run(x, torch.tensor([0, 6, 2])).shape == (3, 2)
    with pytest.raises((IndexError, RuntimeError), match="index"):
        run(x, torch.tensor([0, number, 2]))


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize("dtype", [torch.int16, torch.uint16, torch.uint32, torch.complex32], ids=str)
def test_terms_of_dtypes_that_backends_do_not_reduce(dtype: torch.dtype) -> None:
    mesh = init_device_mesh("cpu", (3,))
    terms = [torch.arange(1, 6).mul(n + 1).to(dtype) for n in range(3)]
    wide = torch.stack([t.to(torch.complex64 if dtype.is_complex else torch.int64) for t in terms])
    expected = {"sum": wide.sum(0), "product": wide.prod(0), "max": wide.real.amax(0), "min": wide.real.amin(0)}
    for reduce_op in ["sum"] if dtype.is_complex else list(expected):
        x = sc.ShardTensor.from_local(terms[mesh.get_rank()], mesh, [Partial(reduce_op)], {})
        for placement, sizes in ((Replicate(), None), (Shard(0), {0: [3, 0, 2]})):
            out = x.redistribute(placements=[placement], sharding_shapes=sizes)
            assert out.dtype is dtype
            wide = torch.complex64 if dtype.is_complex else torch.int64
            same = torch.equal(out.full_tensor().to(wide), expected[reduce_op].to(dtype).to(wide))
            assert same, (reduce_op, placement)


@pytest.mark.ranks(3, processes=False)
def test_sums_of_small_integers_wrap_around() -> None:
    mesh = init_device_mesh("cpu", (3,))
    x = sc.ShardTensor.from_local(torch.full((2,), 30000, dtype=torch.int16), mesh, [Partial("sum")], {})
    assert x.full_tensor().tolist() == [90000 - 65536] * 2


@pytest.mark.ranks(2, processes=False)
@pytest.mark.parametrize(("dtype", "reduce_op"), [(torch.uint64, "sum"), (torch.complex64, "product")])
def test_what_cannot_be_reduced_is_refused(dtype: torch.dtype, reduce_op: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    x = sc.ShardTensor.from_local(torch.ones(2).to(dtype), mesh, [Partial(reduce_op)], {})
    with pytest.raises(CollectiveError, match=str(dtype)):
        x.full_tensor()


@pytest.mark.ranks(3, processes=False)
def test_the_gradient_of_logcumsumexp_is_as_near_as_plain_pytorchs() -> None:
    mesh = init_device_mesh("cpu", (3,))

    def gradient(x: Any, w: Any) -> Any:
        x = x.detach().requires_grad_()
        (x.logcumsumexp(0) * w).sum().backward()
        return x.grad

    ours, plain = [], []
    for seed in range(20):
        torch.manual_seed(seed)
        x, w = torch.randn(20, 3) * 3, torch.randn(20, 3)
        truth = gradient(x.double(), w.double())
        partition = [sc.distribute_tensor(t, mesh, [Shard(0)], sharding_shapes={0: [16, 0, 4]}) for t in (x, w)]
        ours.append((gradient(*partition).full_tensor() - truth).abs().max().item())
        plain.append((gradient(x, w) - truth).abs().max().item())
    assert sum(ours) <= 1.5 * sum(plain), (sum(ours), sum(plain))
