"""Plain sparse tensors beside sharded dense ones: as plain PyTorch has it, or refused in words."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as nnf
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

import shardcompile as sc
from shardcompile.testing import mesh, once, rank
from tests.support.sent import Sent

pytestmark = pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def matrix(rows: int, columns: int) -> Tensor:
    """Two fifths of it are zeros."""
    full = numbers(1, rows, columns)
    return full * (numbers(2, rows, columns) > -0.25)


def uncoalesced() -> Tensor:
    once_, twice = matrix(5, 7).to_sparse(), (2 * matrix(5, 7)).to_sparse()
    return torch.sparse_coo_tensor(
        torch.cat([once_.indices(), twice.indices()], 1), torch.cat([once_.values(), twice.values()]), (5, 7)
    )


STORED: dict[str, Callable[[], Tensor]] = {
    "coo": lambda: matrix(5, 7).to_sparse(),
    "coo, elements twice": uncoalesced,
    "coo of nothing": lambda: torch.zeros(5, 7, dtype=torch.float64).to_sparse(),
    "csr": lambda: matrix(5, 7).to_sparse_csr(),
    "csc": lambda: matrix(5, 7).to_sparse_csc(),
    "bsr": lambda: matrix(6, 8).to_sparse_bsr((2, 2)),
}


@dataclass
class Operands:
    """Dense operands of a sparse matrix of `n` rows and `m` columns.

    Attributes:
        right: [m, 6].
        left: [6, n].
        like: [n, m].
        out: [n, 6].
    """

    right: Any
    left: Any
    like: Any
    out: Any

    @staticmethod
    def full(sparse: Tensor) -> Operands:
        n, m = sparse.shape
        return Operands(numbers(3, m, 6), numbers(4, 6, n), numbers(5, n, m), numbers(6, n, 6))

    def each(self, change: Callable[[Tensor], Any]) -> Operands:
        return Operands(change(self.right), change(self.left), change(self.like), change(self.out))

    def all(self) -> list[Any]:
        return [self.right, self.left, self.like, self.out]


Run = Callable[[Tensor, Operands], Any]

PRODUCTS: dict[str, Run] = {
    "s @ x": lambda s, d: s @ d.right,
    "mm": lambda s, d: torch.mm(s, d.right),
    "method": lambda s, d: s.matmul(d.right),
    "sparse.mm": lambda s, d: torch.sparse.mm(s, d.right),
    "x @ s": lambda s, d: d.left @ s,
    "s.mT @ x": lambda s, d: s.mT @ d.out,
    "x.T @ s": lambda s, d: d.out.T @ s,
    "x @ s.mT": lambda s, d: d.right.T @ s.mT,
    "linear": lambda s, d: nnf.linear(d.right.T, s),
    "vector": lambda s, d: s @ d.right[:, 0],
    "mv": lambda s, d: torch.mv(s, d.right[:, 0]),
    "sparse.addmm": lambda s, d: torch.sparse.addmm(d.out, s, d.right),
    "sparse.addmm with factors": lambda s, d: torch.sparse.addmm(d.out, s, d.right, beta=0.5, alpha=3),
    "addmm": lambda s, d: torch.addmm(d.out, s, d.right, beta=2, alpha=0.5),
    "addmm without": lambda s, d: torch.addmm(d.out, s, d.right, beta=0),
    "bmm": lambda s, d: torch.bmm(torch.stack([s, s]), torch.stack([d.right, d.right])),
    "smoothed twice": lambda s, d: s.mT @ (s @ d.right).relu(),
}
OTHERS: dict[str, Run] = {
    "x + s": lambda s, d: d.like + s,
    "x - s": lambda s, d: d.like - s,
    "add_": lambda s, d: d.like.clone().add_(s),
    "iadd": lambda s, d: d.like.clone().__iadd__(s),
    "s.to_dense": lambda s, d: s.to_dense() * d.like,
    "softmax and back": lambda s, d: torch.sparse.softmax(s, 1).to_dense() + d.like,
    "values": lambda s, d: d.like * s.sum(),
}
GIVES_SPARSE: dict[str, Run] = {
    "s * x": lambda s, d: s * d.like,
    "x * s": lambda s, d: d.like * s,
    "sparse_mask": lambda s, d: d.like.sparse_mask(s),
    "hspmm": lambda s, d: torch.hspmm(s, d.right),
    "smm": lambda s, d: torch.smm(s, d.right),
    "sampled_addmm": lambda s, d: torch.sparse.sampled_addmm(s, d.out, d.right.T),
    "to_sparse": lambda s, d: d.like.to_sparse(),
    "to_sparse_csr": lambda s, d: d.like.to_sparse_csr(),
    "softmax": lambda s, d: torch.sparse.softmax(d.like.to_sparse(), 1),
    "indices": lambda s, d: torch.sparse_coo_tensor((d.like[:2] > 0).long(), torch.ones(s.shape[1]), s.shape),
    "numbers": lambda s, d: torch.sparse_coo_tensor([[0, 1], [1, 0]], d.like[0, :2], s.shape),
}

PLACED: dict[str, tuple[Any, Callable[[Tensor], Any]]] = {
    "rows": ([Shard(0)], lambda x: None),
    "uneven rows": ([Shard(0)], lambda x: {0: [x.shape[0] - 2, 0, 2]}),
    "columns": ([Shard(1)], lambda x: None),
    "uneven columns": ([Shard(1)], lambda x: {0: [0, 1, x.shape[1] - 1]}),
    "replicated": ([Replicate()], lambda x: None),
}


def place(x: Tensor, where: str) -> sc.ShardTensor:
    placements, sizes = PLACED[where]
    return sc.distribute_tensor(x, mesh(), placements, sharding_shapes=sizes(x))


def dense(x: Any) -> Any:
    """A full dense value, without its graph."""
    if isinstance(x, sc.ShardTensor):
        x = x.full_tensor()
    return x.detach().to_dense() if isinstance(x, Tensor) and x.layout is not torch.strided else x


def outcome(run: Run, sparse: Tensor, operands: Operands, trained: bool) -> list[Any]:
    """What a function gives, and the gradients of its operands."""
    sparse = sparse.detach().requires_grad_(trained)
    given = operands.each(lambda x: x.detach().requires_grad_(trained))
    y = run(sparse, given)
    if trained:
        y.sin().sum().backward()
    return [dense(x) for x in [y.detach(), *(x.grad for x in [sparse, *given.all()])]]


def plain(run: Run, stored: str, trained: bool) -> Any:
    """The same of plain PyTorch; the error in its place where it refuses."""
    sparse = STORED[stored]()
    try:
        return outcome(run, sparse, Operands.full(sparse), trained)
    except (RuntimeError, NotImplementedError) as error:
        return error


@pytest.mark.parametrize("trained", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("name", [*PRODUCTS, *OTHERS])
@pytest.mark.ranks(3, processes=False)
def test_functions_of_a_sparse_operand(name: str, stored: str, trained: bool):
    run = {**PRODUCTS, **OTHERS}[name]
    want = once(functools.partial(plain, run, stored, trained))
    sparse = STORED[stored]()
    for where in PLACED:
        operands = Operands.full(sparse).each(functools.partial(place, where=where))
        if isinstance(want, Exception):
            with pytest.raises(RuntimeError):
                outcome(run, sparse, operands, trained)
            continue
        for got, expected in zip(outcome(run, sparse, operands, trained), want, strict=True):
            assert (got is None) is (expected is None), where
            if expected is not None:
                torch.testing.assert_close(got, expected, msg=lambda m, where=where: f"{where}: {m}")


@pytest.mark.parametrize("stored", ["coo", "csr"])
@pytest.mark.parametrize("name", GIVES_SPARSE)
@pytest.mark.ranks(2, processes=False)
def test_sparse_results_are_refused_in_words(name: str, stored: str):
    sparse = STORED[stored]()
    operands = Operands.full(sparse).each(lambda x: sc.distribute_tensor(x, mesh(), [Shard(0)]))
    if isinstance(once(lambda: plain(GIVES_SPARSE[name], stored, False)), Exception):
        pytest.skip("plain PyTorch refuses it")
    with pytest.raises(sc.UnsupportedOpError, match=r"returns a torch.sparse_\w+ tensor.*full_tensor\(\)"):
        GIVES_SPARSE[name](sparse, operands)


@pytest.mark.ranks(2, processes=False)
def test_writes_of_sparse_tensors_are_refused_in_words():
    x = sc.distribute_tensor(numbers(1, 5, 7), mesh(), [Shard(0)])
    with pytest.raises(sc.UnsupportedOpError, match=r"copy_ of f64\[5, 7\].*to_dense"):
        x.copy_(STORED["coo"]())
    with pytest.raises(sc.UnsupportedOpError, match="out="):
        torch.add(x, STORED["coo"](), out=torch.empty(5, 7, dtype=torch.float64))
    with (
        pytest.raises(sc.UnsupportedOpError, match=r"aten.add.Tensor mixes a ShardTensor and a plain torch.sparse_coo"),
        torch._C.DisableTorchFunctionSubclass(),
    ):
        torch.ops.aten.add.Tensor(x, STORED["coo"]())


@pytest.mark.parametrize(
    "placements", [[Shard(0), Shard(1)], [Shard(1), Shard(0)], [Shard(1), Shard(1)], [Replicate(), Shard(1)]], ids=str
)
@pytest.mark.ranks(4, processes=False)
def test_products_over_two_mesh_dims(placements: list[Any]):
    grid, sparse = init_device_mesh("cpu", (2, 2)), STORED["csr"]()
    want = once(functools.partial(plain, PRODUCTS["s @ x"], "csr", True))
    operands = Operands.full(sparse).each(lambda x: sc.distribute_tensor(x, grid, placements))
    for got, expected in zip(outcome(PRODUCTS["s @ x"], sparse, operands, True), want, strict=True):
        if expected is not None:
            torch.testing.assert_close(got, expected)


@pytest.mark.ranks(3, processes=False)
def test_a_pending_sum_is_multiplied():
    sparse = STORED["coo"]()
    x = sc.ShardTensor.from_local(numbers(mesh().get_rank(), 7, 6), mesh(), [Partial()])
    torch.testing.assert_close((sparse @ x).full_tensor(), sparse @ sum(numbers(r, 7, 6) for r in range(3)))


@pytest.mark.ranks(3, processes=False)
def test_what_products_send(monkeypatch: pytest.MonkeyPatch):
    sparse, full = STORED["coo"](), numbers(3, 7, 6)
    rows = sc.distribute_tensor(full, mesh(), [Shard(0)])
    columns = sc.distribute_tensor(full, mesh(), [Shard(1)], sharding_shapes={0: [0, 1, 5]})
    for x, names in ((columns, []), (rows, ["all_gather_v"])):
        with Sent() as sent:
            y = sparse @ x
        assert sent.names == names
    with Sent() as sent:
        y = sparse @ columns
    assert y.sharding.describe_placements() == columns.sharding.describe_placements()
    monkeypatch.setattr(sc.config, "fallback", "error")
    assert torch.equal((sparse @ columns).full_tensor(), sparse @ full)
    with pytest.raises(sc.UnsupportedOpError, match=r"matmul of plain torch.sparse_coo .* gathered.*summed over"):
        sparse @ rows


@pytest.mark.ranks(2, processes=False)
def test_a_gather_is_told_once(caplog: pytest.LogCaptureFixture):
    x = sc.distribute_tensor(numbers(3, 5, 7), mesh(), [Shard(0)])
    told = "subtract of f64[5, 7]"
    with caplog.at_level(logging.INFO, "shardcompile"):
        for _ in range(2):
            torch.subtract(x, STORED["coo"]())
    assert sum(told in r.getMessage() for r in caplog.records) <= 1
    assert rank() or any(told in r.getMessage() for r in caplog.records)


@pytest.mark.parametrize("backend", ["aot_eager"])
@pytest.mark.ranks(2, processes=False)
def test_compiled_as_plain_pytorch_compiles_it(backend: str):
    """What Dynamo cannot trace runs as in eager mode, or is refused as it refuses plain tensors."""

    def smooth(s: Tensor, x: Tensor) -> Tensor:
        return ((s @ x.sin()) * 2).cos()

    sparse, full = STORED["coo"](), numbers(3, 7, 6)
    x = sc.distribute_tensor(full, mesh(), [Shard(1)])
    got = torch.compile(smooth, backend=backend)(sparse, x)
    torch.testing.assert_close(got.full_tensor(), smooth(sparse, full))


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize("which", ["indices", "values", "both"])
def test_a_sparse_tensor_of_sharded_parts_is_refused_and_one_of_full_parts_is_plain(which: str):
    places, values = torch.tensor([[0, 1, 2, 2, 0, 1, 3], [0, 1, 2, 0, 2, 2, 1]]), numbers(1, 7)
    parts = [
        sc.distribute_tensor(x, mesh(), [Shard(x.ndim - 1)], sharding_shapes={0: (5, 0, 2)}) if sharded else x
        for x, sharded in ((places, which != "values"), (values, which != "indices"))
    ]
    for options in ([], [(4, 3)]):
        with pytest.raises(RuntimeError, match=r"returns a torch.sparse_coo|its data is not allocated yet"):
            torch.sparse_coo_tensor(*parts, *options)
        full = [x.full_tensor() if isinstance(x, sc.ShardTensor) else x for x in parts]
        made = torch.sparse_coo_tensor(*full, *options)
        assert torch.equal(made.to_dense(), torch.sparse_coo_tensor(places, values, *options).to_dense())
    compiled = torch.compile(torch.sparse_coo_tensor, fullgraph=True, backend="aot_eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="sparse_coo_tensor"):
        compiled(*parts, (4, 3))
