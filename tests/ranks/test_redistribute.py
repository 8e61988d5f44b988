"""`ShardTensor.redistribute` between all pairs of layouts, against the full tensor and plain autograd."""

from __future__ import annotations

import copy
import itertools
import pickle
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from shardcompile import LayoutError, RedistributeError, ShardTensor
from shardcompile.collectives import transport
from shardcompile.testing import rank, world_size

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
SIZES = (7, 5)


@dataclass(frozen=True)
class Case:
    """Placements, and by mesh dim the sizes that are not torch.chunk's."""

    placements: tuple[Placement, ...]
    sizes: Mapping[int, Sequence[int]] | None = None


def mesh_1d() -> DeviceMesh:
    return init_device_mesh("cpu", (world_size(),))


def mesh_2d() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))


def values(shape: Sequence[int] = SIZES) -> Tensor:
    """Whole numbers, so that every order of summation gives the same; the same on every rank."""
    return torch.randint(-9, 10, tuple(shape)).double()


def shard_of(full: Tensor, mesh: DeviceMesh, case: Case) -> Tensor:
    """This rank's shard, sharded with plain torch."""
    coordinate = mesh.get_coordinate()
    for dim in range(full.ndim):
        mesh_dims = [m for m, p in enumerate(case.placements) if isinstance(p, Shard) and p.dim == dim]
        stated = [case.sizes[m] for m in mesh_dims if case.sizes and m in case.sizes]
        if stated:
            index = 0
            for m in mesh_dims:
                index = index * mesh.shape[m] + coordinate[m]
            full = full.split(list(stated[0]), dim)[index]
            continue
        for m in mesh_dims:
            pieces = [*full.chunk(mesh.shape[m], dim), *[full.narrow(dim, 0, 0)] * mesh.shape[m]]
            full = pieces[coordinate[m]]
    return full


def term_of(full: Tensor, mesh: DeviceMesh, case: Case) -> Tensor:
    """This rank's term: all terms together reduce to `full`."""
    for mesh_dim, placement in enumerate(case.placements):
        if isinstance(placement, Partial):
            n, r = mesh.shape[mesh_dim], mesh.get_coordinate()[mesh_dim]
            full = {
                "sum": full - n * (n - 1) / 2 if r == 0 else torch.full_like(full, r),
                "avg": full + 2 * r - (n - 1),
                "max": full - r,
                "min": full + r,
                "product": full / 2 ** (n - 1) if r == 0 else torch.full_like(full, 2),
            }[placement.reduce_op]
    return full


def sharded(full: Tensor, mesh: DeviceMesh, case: Case) -> ShardTensor:
    """`full` in a layout."""
    shard = shard_of(term_of(full, mesh, case), mesh, case)
    return ShardTensor.from_local(shard.contiguous(), mesh, case.placements, global_shape=full.shape)


def check(x: ShardTensor, full: Tensor, mesh: DeviceMesh, case: Case, *what: object) -> None:
    assert isinstance(x, ShardTensor)
    assert x.placements == case.placements, what
    assert (x.shape, x.stride(), x.dtype) == (full.shape, full.stride(), full.dtype), what
    if not any(isinstance(p, Partial) for p in case.placements):
        assert torch.equal(x.to_local(), shard_of(full, mesh, case)), what
    assert torch.equal(x.full_tensor(), full), what


def targets(source: Case, cases: Sequence[Case]) -> Iterator[Case]:
    """A pending reduction cannot be a target, except where it is pending already."""
    for case in cases:
        pairs = zip(source.placements, case.placements, strict=True)
        if all(a == b for a, b in pairs if isinstance(b, Partial)):
            yield case


def cases_1d() -> list[Case]:
    n = world_size()
    return [
        Case((R,)),
        Case((S0,)),
        Case((S0,), {0: [1, 6] if n == 2 else [4, 0, 3]}),
        Case((S0,), {0: [*[0] * (n - 1), 7]}),
        Case((S1,)),
        Case((S1,), {0: [5, 0] if n == 2 else [0, 1, 4]}),
        Case((P,)),
    ]


def cases_2d() -> list[Case]:
    plain = [Case(pair) for pair in itertools.product((R, S0, S1, P), repeat=2)]
    return [
        *plain,
        Case((S0, S0), {1: [2, 0, 1, 4]}),
        Case((S0, S0), {1: [0, 0, 7, 0]}),
        Case((S0, S1), {0: [1, 6], 1: [5, 0]}),
        Case((S1, S1), {1: [0, 2, 2, 1]}),
        Case((R, S0), {1: [6, 1]}),
        Case((S1, R), {0: [0, 5]}),
        Case((P, S0), {1: [0, 7]}),
    ]


# Values


@pytest.mark.ranks(2, 3, processes=False)
def test_all_pairs_on_one_mesh_dim():
    mesh, full = mesh_1d(), values()
    for source in cases_1d():
        x = sharded(full, mesh, source)
        check(x, full, mesh, source, source)
        for case in targets(source, cases_1d()):
            y = x.redistribute(mesh, case.placements, sharding_shapes=case.sizes)
            expected = case
            if case.sizes is None and case.placements == source.placements:
                expected = source  # a dim that stays sharded keeps its partition
            check(y, full, mesh, expected, source, case)


@pytest.mark.ranks(4, timeout=300, processes=False)
def test_all_pairs_on_two_mesh_dims():
    mesh, full = mesh_2d(), values()
    for source in cases_2d():
        x = sharded(full, mesh, source)
        check(x, full, mesh, source, source)
        for case in targets(source, cases_2d()):
            y = x.redistribute(placements=case.placements, sharding_shapes=case.sizes)
            check(y, full, mesh, kept(source, case), source, case)


def kept(source: Case, case: Case) -> Case:
    """The case with the sizes of the source where a dim stays sharded by the same mesh dims."""
    sizes = dict(case.sizes or {})
    for mesh_dim, found in (source.sizes or {}).items():
        dim = source.placements[mesh_dim]
        before = [m for m, p in enumerate(source.placements) if p == dim]
        after = [m for m, p in enumerate(case.placements) if p == dim]
        if before == after and not any(m in sizes for m in after):
            sizes[mesh_dim] = found
    return Case(case.placements, sizes)


@pytest.mark.ranks(2, 3, processes=False)
@pytest.mark.parametrize("op", ["sum", "avg", "max", "min", "product"])
def test_every_reduction(op: str):
    mesh, full = mesh_1d(), values()
    x = sharded(full, mesh, Case((Partial(op),)))
    for case in cases_1d()[:-1]:
        check(x.redistribute(placements=case.placements, sharding_shapes=case.sizes), full, mesh, case, op, case)


@pytest.mark.ranks(3, processes=False)
def test_nan_is_the_largest_and_the_smallest():
    mesh = mesh_1d()
    nan, inf = float("nan"), float("inf")
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        terms = torch.tensor([[1, 2, -inf, -1], [4, nan, 0, -2], [2, 1, inf, nan]], dtype=dtype)
        for op, expected in (("max", terms.amax(0)), ("min", terms.amin(0))):
            x = ShardTensor.from_local(terms[rank()], mesh, [Partial(op)])
            for target in (R, S0):
                y = x.redistribute(placements=[target]).full_tensor()
                torch.testing.assert_close(y, expected, equal_nan=True, rtol=0, atol=0)


@pytest.mark.ranks(3, processes=False)
def test_dtypes():
    mesh = mesh_1d()
    for dtype in (torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64):
        full = values().abs().to(dtype)
        uneven, columns = Case((S0,), {0: [5, 0, 2]}), Case((S1,), {0: [0, 4, 1]})
        for source, case in itertools.permutations((uneven, columns, Case((R,))), 2):
            y = sharded(full, mesh, source).redistribute(placements=case.placements, sharding_shapes=case.sizes)
            check(y, full, mesh, case, dtype)


@pytest.mark.ranks(3, processes=False)
def test_sizes_of_zero_and_one():
    mesh = mesh_1d()
    for shape in ((0, 4), (1, 4), (0, 0), (1, 1)):
        full = values(shape)
        for source, target in itertools.permutations((R, S0, S1), 2):
            y = sharded(full, mesh, Case((source,))).redistribute(placements=[target])
            check(y, full, mesh, Case((target,)), shape, source, target)


@pytest.mark.ranks(2, processes=False)
def test_negative_dims_and_no_dims():
    mesh, full = mesh_1d(), values()
    x = sharded(full, mesh, Case((S0,)))
    check(x.redistribute(placements=[Shard(-1)]), full, mesh, Case((S1,)))
    scalar = ShardTensor.from_local(torch.tensor(float(rank())), mesh, [P])
    assert scalar.redistribute(placements=[R]).to_local() == 1.0


@pytest.mark.ranks(2, processes=False)
def test_strides_are_those_of_the_global_tensor():
    mesh, full = mesh_1d(), values()
    x = sharded(full, mesh, Case((S0,), {0: [2, 5]})).t()
    assert x.stride() == (1, 5)
    check(x.redistribute(placements=[S0]), full.t(), mesh, Case((S0,)))


@pytest.mark.ranks(3, processes=False)
def test_an_empty_shard_that_was_moved_has_strides_that_kernels_accept():
    """Real and imaginary parts lie on two ranks: they are exchanged for shards of rows, of which rank 2 gets none."""
    mesh, full = mesh_1d(), values((4, 2, 2))
    for sizes in ([1, 1, 0], [2, 0, 0]):
        y = torch.view_as_complex(sharded(full, mesh, Case((Shard(2),), {0: sizes})))
        assert 0 in y.sharding.sizes(0)
        assert torch.equal(y.full_tensor(), torch.view_as_complex(full))


# Gradients: those of the identity on the full tensor


def checked_gradients(source: Case, case: Case, full: Tensor, mesh: DeviceMesh) -> None:
    x = sharded(full, mesh, source).detach().requires_grad_()
    plain = full.clone().requires_grad_()
    w, v = values(), values()
    y = x.redistribute(placements=case.placements, sharding_shapes=case.sizes)
    (gradient,) = torch.autograd.grad((y * y * w).sum(), x, create_graph=True)
    (expected,) = torch.autograd.grad((plain * plain * w).sum(), plain, create_graph=True)
    assert torch.equal(gradient.full_tensor(), expected), (source, case)
    if y is not x:
        reduced = tuple(R if isinstance(p, Partial) else p for p in source.placements)
        assert gradient.placements == reduced, (source, case)
        assert gradient.sharding.partitions == x.sharding.partitions, (source, case)
    (twice,) = torch.autograd.grad((gradient * v).sum(), x)
    (expected,) = torch.autograd.grad((expected * v).sum(), plain)
    assert torch.equal(twice.full_tensor(), expected), (source, case)


@pytest.mark.ranks(2, 3, processes=False)
def test_gradients_on_one_mesh_dim():
    mesh, full = mesh_1d(), values()
    for source in cases_1d():
        for case in targets(source, cases_1d()):
            checked_gradients(source, case, full, mesh)


@pytest.mark.ranks(4, timeout=300, processes=False)
def test_gradients_on_two_mesh_dims():
    mesh, full = mesh_2d(), values()
    pairs = [(s, t) for s in cases_2d() for t in targets(s, cases_2d())]
    for source, case in pairs[::3]:
        checked_gradients(source, case, full, mesh)


@pytest.mark.ranks(2, 3, processes=False)
def test_gradients_from_shard_to_shard():
    """The whole way: from_local, redistribute, to_local."""
    mesh, full = mesh_1d(), values()
    w = values()
    for source in cases_1d():
        for case in cases_1d()[:-1]:
            shard = shard_of(term_of(full, mesh, source), mesh, source).clone().requires_grad_()
            x = ShardTensor.from_local(shard, mesh, source.placements)
            y = x.redistribute(placements=case.placements, sharding_shapes=case.sizes)
            expected = kept(source, case)
            (y.to_local() * shard_of(w, mesh, expected)).sum().backward()
            assert torch.equal(shard.grad, shard_of(w, mesh, source)), (source, case)


@pytest.mark.ranks(2, processes=False)
def test_gradient_of_terms():
    """Each term of a sum counts once, of an average its share; of a maximum a term has no gradient of its own."""
    mesh, full = mesh_1d(), values()
    for op, factor in (("sum", 1.0), ("avg", 0.5)):
        term = term_of(full, mesh, Case((Partial(op),))).requires_grad_()
        ShardTensor.from_local(term, mesh, [Partial(op)]).redistribute(placements=[S0]).sum().backward()
        assert torch.equal(term.grad, torch.full_like(term, factor))
    term = full.clone().requires_grad_()
    x = ShardTensor.from_local(term, mesh, [Partial("max")])
    with pytest.raises(RedistributeError, match=r"P\(max\).*only sums and averages"):
        x.redistribute(placements=[R]).sum().backward()


@pytest.mark.ranks(4, processes=False)
def test_gradient_of_terms_on_two_mesh_dims():
    """What a term of a sum of averages, an average of averages and the like counts in plain PyTorch."""
    mesh, full = mesh_2d(), values()
    reduce = {"sum": Tensor.sum, "avg": Tensor.mean}
    for ops in itertools.product(reduce, repeat=2):
        placements = [Partial(op) for op in ops]
        term = term_of(full, mesh, Case(tuple(placements))).requires_grad_()
        x = ShardTensor.from_local(term, mesh, placements)
        assert torch.equal(x.full_tensor().detach(), full), ops
        (x.redistribute(placements=[S0, S1]) * full).sum().backward()
        terms = torch.ones(2, 2, *full.shape, dtype=full.dtype, requires_grad=True)
        (reduce[ops[1]](reduce[ops[0]](terms, 0), 0) * full).sum().backward()
        assert torch.equal(term.grad, terms.grad[0, 0]), ops


# Arguments


@pytest.mark.ranks(2, processes=False)
def test_same_layout_is_the_tensor_itself():
    mesh, full = mesh_1d(), values()
    for case in (Case((R,)), Case((S0,), {0: [3, 4]}), Case((P,))):
        x = sharded(full, mesh, case)
        assert x.redistribute() is x
        assert x.redistribute(mesh, case.placements, sharding_shapes=case.sizes, async_op=True) is x
        assert x.redistribute(forward_dtype=torch.float64) is x
    y = x.redistribute(placements=[R])
    assert y is not x and y.redistribute(placements=[R]) is y


class Traffic:
    """Counts the bytes that this rank sends through `transport.exchange`, and the dtypes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.nbytes, self.dtypes = 0, set[torch.dtype]()
        self._exchange = transport.exchange
        monkeypatch.setattr(transport, "exchange", self._count)

    def _count(self, group: Any, sends: Sequence[tuple[int, Tensor]], receives: Any) -> Any:
        self.nbytes += sum(t.nbytes for _, t in sends)
        self.dtypes |= {t.dtype for _, t in sends}
        return self._exchange(group, sends, receives)

    def taken(self) -> tuple[int, set[torch.dtype]]:
        found = self.nbytes, self.dtypes
        self.nbytes, self.dtypes = 0, set()
        return found


@pytest.mark.ranks(2)
def test_rebalancing_moves_one_row(monkeypatch: pytest.MonkeyPatch):
    mesh, full = mesh_1d(), values((8, 3))
    x = sharded(full, mesh, Case((S0,), {0: [3, 5]}))
    traffic = Traffic(monkeypatch)
    y = x.redistribute(sharding_shapes={0: [4, 4]})
    assert traffic.taken()[0] == [0, 3 * 8][rank()]
    check(y, full, mesh, Case((S0,)))
    assert y.sharding.sizes(0) == (4, 4)


@pytest.mark.ranks(2, processes=False)
def test_whole_shapes_are_sizes_too():
    mesh, full = mesh_1d(), values()
    x = sharded(full, mesh, Case((R,)))
    y = x.redistribute(placements=[S0], sharding_shapes={0: [(1, 5), (6, 5)]})
    check(y, full, mesh, Case((S0,), {0: [1, 6]}))


@pytest.mark.ranks(2)
def test_dtypes_of_forward_and_backward(monkeypatch: pytest.MonkeyPatch):
    mesh, full = mesh_1d(), values()
    traffic = Traffic(monkeypatch)
    for forward, backward in ((None, torch.float32), (torch.bfloat16, None), (torch.float16, torch.float32)):
        x = sharded(full, mesh, Case((S0,), {0: [2, 5]})).detach().requires_grad_()
        y = x.redistribute(placements=[S1], sharding_shapes={0: [1, 4]}, forward_dtype=forward, backward_dtype=backward)
        assert y.dtype == (forward or torch.float64)
        assert traffic.taken()[1] == {y.dtype}
        loss = (y.double() * 3).to_local().sum()
        assert traffic.taken()[1] == set()
        loss.backward()
        assert traffic.taken()[1] == {backward or y.dtype}
        assert x.grad.dtype == torch.float64
        assert torch.equal(x.grad.to_local(), torch.full((2 if rank() == 0 else 5, 5), 3.0).double())


@pytest.mark.ranks(2, processes=False)
def test_gradients_keep_the_precision_in_which_they_were_moved():
    """As a weight in float32 is gathered in bfloat16, and its gradient reduced in float32."""
    mesh, full = mesh_1d(), values()
    x = sharded(full.float(), mesh, Case((S0,), {0: [2, 5]})).detach().requires_grad_()
    y = x.redistribute(placements=[R], forward_dtype=torch.bfloat16, backward_dtype=torch.float32)
    local = y.to_local(grad_placements=[P])
    assert local.dtype is torch.bfloat16
    local.backward(torch.full_like(local, 1.0 + 2**-7 * rank()))
    assert x.grad.to_local().eq(2 + 2**-7).all()  # which bfloat16 does not hold


@pytest.mark.ranks(2, 3, processes=False)
def test_async_op():
    mesh, full = mesh_1d(), values()
    pairs = [(s, t) for s in cases_1d() for t in targets(s, cases_1d())]
    started = [
        sharded(full, mesh, s).redistribute(placements=t.placements, sharding_shapes=t.sizes, async_op=True)
        for s, t in pairs
    ]
    for (source, case), y in reversed(list(zip(pairs, started, strict=True))):
        check(y + 0 if case.placements != (P,) else y, full, mesh, kept(source, case), source, case)
        check(y, full, mesh, kept(source, case), source, case)


@pytest.mark.ranks(2, processes=False)
def test_async_op_does_not_wait_before():
    mesh, full = mesh_1d(), values()
    pairs = [
        (Case((S0,), {0: [0, 7]}), Case((R,))),
        (Case((S0,), {0: [0, 7]}), Case((S0,), {0: [7, 0]})),
        (Case((S0,), {0: [0, 7]}), Case((S1,), {0: [5, 0]})),
        (Case((P,)), Case((R,))),
        (Case((P,)), Case((S0,), {0: [7, 0]})),
    ]
    xs = [sharded(full, mesh, source) for source, _ in pairs]
    for x, (_, case) in zip(xs, pairs, strict=True):
        x.redistribute(placements=case.placements, sharding_shapes=case.sizes).full_tensor()  # plans are made once
        dist.barrier()
        time.sleep(0.2 * rank())
        begin = time.perf_counter()
        y = x.redistribute(placements=case.placements, sharding_shapes=case.sizes, async_op=True)
        assert time.perf_counter() - begin < 0.15, case
        assert torch.equal((y * 2).full_tensor(), full * 2), case


@pytest.mark.ranks(2)
def test_async_op_waits_at_the_first_use():
    mesh, full = mesh_1d(), values()
    x = sharded(full, mesh, Case((S0,), {0: [2, 5]})).detach().requires_grad_()
    in_place = x.detach().redistribute(placements=[R], async_op=True)
    in_place.add_(1)
    assert torch.equal(in_place.to_local(), full + 1)
    assert torch.equal(x.redistribute(placements=[R], async_op=True).to_local(), full)
    for copied in (copy.deepcopy, lambda y: pickle.loads(pickle.dumps(y)), torch.clone):
        assert torch.equal(copied(x.detach().redistribute(placements=[R], async_op=True)).to_local(), full)
    compiled = torch.compile(lambda y: y * 2, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x.redistribute(placements=[R], async_op=True)).to_local(), full * 2)
    x.redistribute(placements=[S1], async_op=True).pow(2).sum().backward()
    assert torch.equal(x.grad.full_tensor(), 2 * full)


# Leaving the sharded world


@pytest.mark.ranks(2, 3, processes=False)
def test_grad_placements():
    mesh, full = mesh_1d(), values()
    weights = [values() for _ in range(world_size())]
    total = torch.stack(weights).sum(0)
    for source in cases_1d():
        x = sharded(full, mesh, source).detach().requires_grad_()
        whole = x.full_tensor(grad_placements=[P])  # every rank adds a term of the loss
        (whole * weights[rank()]).sum().backward()
        assert torch.equal(x.grad.full_tensor(), total), source
    x = sharded(full, mesh, Case((S0,))).detach().requires_grad_()
    (x.full_tensor() * weights[0]).sum().backward()  # every rank computes the same loss
    assert torch.equal(x.grad.full_tensor(), weights[0])
    x = sharded(full, mesh, Case((R,))).detach().requires_grad_()
    (x.to_local(grad_placements=[P]) * weights[rank()]).sum().backward()
    assert torch.equal(x.grad.full_tensor(), total)


@pytest.mark.ranks(2, processes=False)
def test_grad_placements_that_do_not_fit():
    mesh, full = mesh_1d(), values()
    x = sharded(full, mesh, Case((S0,), {0: [2, 5]}))
    for placements in ([R], [S1], [P]):
        with pytest.raises(LayoutError, match=r"grad_placements .* the gradient another local shape than the shard"):
            x.to_local(grad_placements=placements)
    with pytest.raises(LayoutError, match="needs as many placements"):
        x.to_local(grad_placements=[S0, S0])


@pytest.mark.ranks(2, processes=False)
def test_to_local_and_full_tensor_twice_differentiable():
    mesh, full = mesh_1d(), values()
    x = sharded(full, mesh, Case((S0,), {0: [6, 1]})).detach().requires_grad_()
    for leave in (lambda t: t.to_local(), lambda t: t.full_tensor()):
        y = leave(x)
        assert type(y) is Tensor
        (gradient,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
        (twice,) = torch.autograd.grad(gradient.sum(), x)
        assert torch.equal(twice.full_tensor(), 6 * full)


@pytest.mark.ranks(2, processes=False)
def test_terms_are_not_handed_out():
    x = sharded(values(), mesh_1d(), Case((P,)))
    with pytest.raises(RedistributeError, match=r"term of a pending reduction.*take full_tensor\(\)"):
        x.to_local()


# DTensor


@pytest.mark.ranks(4, processes=False)
def test_to_dtensor_and_back():
    mesh, full = mesh_2d(), values()
    for pair in itertools.product((R, S0, S1, P), repeat=2):
        x = sharded(full, mesh, Case(pair)).detach().requires_grad_()
        d = x.to_dtensor()
        assert isinstance(d, DTensor) and d.placements == pair and d.stride() == full.stride()
        if P not in pair:
            assert torch.equal(d.full_tensor(), full), pair
        back = ShardTensor.from_dtensor(d)
        check(back, full, mesh, Case(pair), pair)
        (back * back).sum().backward()
        assert torch.equal(x.grad.full_tensor(), 2 * full), pair


@pytest.mark.ranks(3, processes=False)
def test_from_dtensor():
    mesh = mesh_1d()
    for n in (7, 2, 0):
        full = values((n, 5))
        from torch.distributed.tensor import distribute_tensor

        d = distribute_tensor(full, mesh, [S0]).requires_grad_()
        x = ShardTensor.from_dtensor(d)
        check(x, full, mesh, Case((S0,)), n)
        (x * 2).sum().backward()
        assert isinstance(d.grad, DTensor) and d.grad.placements == (S0,)
        assert torch.equal(d.grad.full_tensor(), torch.full_like(full, 2.0))


@pytest.mark.ranks(2, processes=False)
def test_to_dtensor_of_another_partition():
    mesh, full = mesh_1d(), values()
    x = sharded(full, mesh, Case((S0,), {0: [6, 1]}))
    with pytest.raises(
        LayoutError, match=r"only torch.chunk's partition.*redistribute\(sharding_shapes=\{0: \[4, 3\]\}\)"
    ):
        x.to_dtensor()
    assert torch.equal(x.redistribute(sharding_shapes={0: [4, 3]}).to_dtensor().full_tensor(), full)


# Errors


@pytest.mark.ranks(2, processes=False)
def test_partial_is_no_target():
    mesh, full = mesh_1d(), values()
    for case in (Case((R,)), Case((S0,))):
        with pytest.raises(RedistributeError, match="Partial cannot be a target"):
            sharded(full, mesh, case).redistribute(placements=[P])
    with pytest.raises(RedistributeError, match="Partial cannot be a target"):
        sharded(full, mesh, Case((P,))).redistribute(placements=[Partial("avg")])


@pytest.mark.ranks(4, processes=False)
def test_another_mesh_is_no_target():
    one, two = mesh_1d(), mesh_2d()
    x = sharded(values(), one, Case((S0,)))
    with pytest.raises(RedistributeError, match=r"another mesh .* not supported; go through full_tensor\(\)"):
        x.redistribute(two, [S0, R])
    assert x.redistribute(init_device_mesh("cpu", (4,)), [R]).placements == (R,)  # an equal mesh is the same


@pytest.mark.ranks(2, processes=False)
def test_bad_arguments():
    x = sharded(values(), mesh_1d(), Case((S0,)))
    with pytest.raises(LayoutError, match="mesh of 1 dims needs as many placements, got 2"):
        x.redistribute(placements=[S0, S0])
    with pytest.raises(LayoutError, match=r"\(2\) is out of range for a tensor of 2 dims"):
        x.redistribute(placements=[Shard(2)])
    with pytest.raises(LayoutError, match=r"\[3, 5\] for mesh dim 0 add up to 8, but tensor dim 0 has size 7"):
        x.redistribute(sharding_shapes={0: [3, 5]})
    with pytest.raises(LayoutError, match="needs 2 shard sizes, got 3"):
        x.redistribute(sharding_shapes={0: [3, 3, 1]})
    with pytest.raises(LayoutError, match="must not be negative"):
        x.redistribute(sharding_shapes={0: [-1, 8]})
    with pytest.raises(LayoutError, match="names mesh dim 1, which shards nothing"):
        x.redistribute(sharding_shapes={1: [3, 4]})
    with pytest.raises(LayoutError, match="names mesh dim 0, which shards nothing"):
        x.redistribute(placements=[R], sharding_shapes={0: [3, 4]})
