"""`halo_map`: neighbourhood attention and stencils as local functions, against the same on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

import shardcompile as sc
from shardcompile.compat.testing import graphs_compiled
from shardcompile.testing import mesh, once
from tests.support.sent import Sent
from tests.support.tiers import often

TIGHT = {"rtol": 1e-12, "atol": 1e-12}
NEAR = 5


def windows(n: Any, size: int) -> Tensor:
    """Of each row those that it attends to: around it, moved inwards at the edges, as natten has it."""
    first = (torch.arange(n) - size // 2).clamp(min=0).clamp(max=n - size)
    return first.unsqueeze(1) + torch.arange(size)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Neighbourhood attention along dim 0: [n, heads, width]."""
    near = windows(q.shape[0], NEAR)
    weights = (q.unsqueeze(1) * k[near]).sum(-1, keepdim=True).softmax(1)
    return (weights * v[near]).sum(1)


def attention_2d(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same in a window of NEAR x 3 of an image: [rows, columns, width]."""
    down, across = windows(q.shape[0], NEAR), windows(q.shape[1], 3)
    of_k, of_v = (t[down][:, :, across].movedim(1, 2) for t in (k, v))  # [rows, columns, NEAR, 3, width]
    weights = (q[:, :, None, None] * of_k).sum(-1).flatten(2).softmax(-1).view(*of_k.shape[:4], 1)
    return (weights * of_v).sum((2, 3))


def laplacian(x: Tensor) -> Tensor:
    """Of a 3-D field with zeros around it, from which the outermost rows are taken off."""
    near = -6 * x[1:-1, 1:-1, 1:-1]
    near = near + x[2:, 1:-1, 1:-1] + x[:-2, 1:-1, 1:-1] + x[1:-1, 2:, 1:-1] + x[1:-1, :-2, 1:-1]
    return near + x[1:-1, 1:-1, 2:] + x[1:-1, 1:-1, :-2]


def partition(full: Tensor, sizes: list[int], on: DeviceMesh) -> Any:
    return sc.distribute_tensor(full, on, [Shard(0)], sharding_shapes={0: sizes})


def neighbourhood(q: Any, k: Any, v: Any) -> Any:
    return sc.halo_map(attention, q, k, v, halo={0: (NEAR - 1, NEAR - 1)})


def stencil(x: Any) -> Any:
    return sc.halo_map(laplacian, x, halo=dict.fromkeys(range(3), (1, 1)), fill=0.0, crop=False)


def box(x: Tensor) -> Tensor:
    """Of each row of a 2-D field a weighted sum of the 3 x 4 rows around it, which are taken off at the edges."""
    n, m = x.shape[0] - 2, x.shape[1] - 3
    return sum((3 * i + j + 1) * x[i : i + n, j : j + m] for i in range(3) for j in range(4))  # type: ignore[return-value]


def periodic_box(x: Any) -> Any:
    return sc.halo_map(box, x, halo={0: (1, 1), 1: (2, 1)}, fill="circular", crop=False)


def box_by_rolls(x: Tensor) -> Tensor:
    return sum((3 * i + j + 1) * x.roll((1 - i, 2 - j), (0, 1)) for i in range(3) for j in range(4))  # type: ignore[return-value]


def smoothed(x: Any) -> Any:
    """Two results, and another number of rows in front than behind."""

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        steps = x.cumsum(0)
        back = torch.cat([steps[:2], steps[2:] - steps[:-2]])
        return back, (x * 2).sum(1)

    return sc.halo_map(fn, x, halo={0: (3, 0)}, fill=0.0)


def check(run: Any, plain: Any, fulls: list[Tensor], place: Any) -> None:
    """Values, layouts and gradients against one device."""

    def outs(results: Any) -> tuple[Any, ...]:
        return results if isinstance(results, tuple) else (results,)

    def expected() -> list[Tensor]:
        given = [f.clone().requires_grad_() for f in fulls]
        results = outs(plain(*given))
        sum(r.sin().sum() for r in results).backward()
        return [*(r.detach() for r in results), *(g.grad for g in given)]

    given = [place(f).requires_grad_() for f in fulls]
    results = outs(run(*given))
    assert all(r.sharding.partitions[0].sizes == given[0].sharding.partitions[0].sizes for r in results)
    sum(r.sin().sum() for r in results).backward()
    for ours, theirs in zip([*results, *(g.grad for g in given)], once(expected), strict=True):
        torch.testing.assert_close(ours.detach().full_tensor(), theirs, **TIGHT)


PARTITIONS = [[5, 0, 2], [0, 7, 0], [1, 1, 9], [4, 6, 3], [0, 0, 5]]


def rows(size: int, *rest: int, seed: int = 0) -> Tensor:
    return torch.randn(size, *rest, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize("sizes", PARTITIONS, ids=str)
def test_functions_on_shards_give_what_they_give_on_one_device(sizes: list[int]) -> None:
    qkv = [rows(sum(sizes), 2, 3, seed=s) for s in range(3)]
    check(neighbourhood, attention, qkv, lambda f: partition(f, sizes, mesh()))
    x = rows(sum(sizes), 4)
    check(smoothed, smoothed, [x], lambda f: partition(f, sizes, mesh()))
    field = rows(sum(sizes), 3, 2)
    padded = lambda f: laplacian(torch.nn.functional.pad(f, [1] * 6))  # noqa: E731
    check(stencil, padded, [field], lambda f: partition(f, sizes, mesh()))
    torch.testing.assert_close(stencil(field), padded(field))  # all of it plain
    check(periodic_box, box_by_rolls, [x], lambda f: partition(f, sizes, mesh()))
    torch.testing.assert_close(periodic_box(x), box_by_rolls(x))


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize("sizes", [[1, 0, 0], [0, 1, 1], [3, 0, 2], [0, 0, 0]], ids=str)
def test_rows_at_the_other_end_come_as_often_as_they_are_wanted(sizes: list[int]) -> None:
    total = sum(sizes)

    def sums(x: Any) -> Any:
        """Of seven rows: all of them again and again where there are fewer."""

        def fn(a: Tensor) -> Any:
            return sum(a[j : j + a.shape[0] - 6] for j in range(7))

        return sc.halo_map(fn, x, halo={0: (4, 2)}, fill="circular", crop=False)

    def expected(x: Tensor) -> Tensor:
        found = [x[[(i + j) % total for j in range(-4, 3)]].sum(0) for i in range(total)]
        return torch.stack(found) if found else x * 2

    check(sums, expected, [rows(total, 2)], lambda f: partition(f, sizes, mesh()))
    torch.testing.assert_close(sums(rows(total, 2)), expected(rows(total, 2)))


@pytest.mark.ranks(3, processes=False)
def test_a_periodic_halo_is_one_exchange() -> None:
    x = partition(rows(9, 2), [2, 3, 4], mesh()).requires_grad_()
    with Sent() as watch:
        out = sc.halo_map(lambda a: a[:-2] + a[1:-1] + a[2:], x, halo={0: (1, 1)}, fill="circular", crop=False)
        out.sin().sum().backward()
    assert [name for name in watch.names if "around" in name] == ["fetch_around", "return_around"]
    assert watch.names == ["fetch_around", "return_around"]


@pytest.mark.ranks(3, timeout=600, processes=False)
@pytest.mark.parametrize(
    ("backend", "run", "plain", "shape"),
    often(
        [
            ("aot_eager", neighbourhood, attention, (2, 3)),
            ("aot_eager", smoothed, smoothed, (4,)),
            ("aot_eager", periodic_box, box_by_rolls, (4,)),
            ("inductor", periodic_box, box_by_rolls, (4,)),
            ("inductor", neighbourhood, attention, (2, 3)),
            ("inductor", smoothed, smoothed, (4,)),
        ],
        1,
    ),
)
def test_one_graph_serves_every_partition(backend: str, run: Any, plain: Any, shape: tuple[int, ...]) -> None:
    compiled = torch.compile(run, fullgraph=True, backend=backend)
    many = 3 if run is neighbourhood else 1
    for count, sizes in enumerate([*PARTITIONS, [2, 3, 1], [9, 0, 8]]):
        if count == 3:
            before = once(graphs_compiled)
        check(
            compiled,
            plain,
            [rows(sum(sizes), *shape, seed=s) for s in range(many)],
            lambda f, n=sizes: partition(f, n, mesh()),
        )
    assert graphs_compiled() == before


@pytest.mark.ranks(4, processes=False)
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_two_partition_dims_bring_their_corners(compiled: bool) -> None:
    on = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))

    def place(full: Tensor) -> Any:
        return sc.distribute_tensor(full, on, [Shard(0), Shard(1)], sharding_shapes={0: [5, 2], 1: [1, 5]})

    def image(q: Any, k: Any, v: Any) -> Any:
        return sc.halo_map(attention_2d, q, k, v, halo={0: (NEAR - 1, NEAR - 1), 1: (2, 2)})

    runs = [
        torch.compile(r, fullgraph=True, backend="aot_eager") if compiled else r for r in (image, stencil, periodic_box)
    ]
    check(runs[0], attention_2d, [rows(7, 6, 3, seed=s) for s in range(3)], place)
    check(runs[1], lambda f: laplacian(torch.nn.functional.pad(f, [1] * 6)), [rows(7, 6, 4)], place)
    check(runs[2], box_by_rolls, [rows(7, 6)], place)


@pytest.mark.ranks(3, processes=False)
def test_pending_sums_plain_tensors_and_what_does_not_fit() -> None:
    full, on = rows(7, 2), mesh()
    x = partition(full, [5, 0, 2], on)
    twice = sc.halo_map(lambda a, b: a + b, x, full, halo={0: (1, 1)})
    torch.testing.assert_close(twice.full_tensor(), 2 * full)
    terms = sc.ShardTensor.from_local(full / 3, on, [Partial()])
    torch.testing.assert_close(sc.halo_map(lambda a: a, terms, halo={0: (1, 1)}).full_tensor(), full)
    whole = x.redistribute(placements=[Replicate()])
    assert sc.halo_map(lambda a: a[1:-1], whole, halo={0: (1, 1)}, fill=0.0, crop=False).full_tensor().equal(full)
    for given, halo, message in (
        ((x,), {2: (1, 1)}, "there is no dim 2"),
        ((x,), {0: (-1, 1)}, "at least 0"),
        ((x,), {0: 1}, "width of the halo before and after"),
        ((x, full[:6]), {0: (1, 1)}, "does not have the same size"),
        ((), {0: (1, 1)}, "needs a tensor"),
    ):
        with pytest.raises(sc.LayoutError, match=message):
            sc.halo_map(lambda *a: a[0], *given, halo=halo)
    for fn, crop in ((lambda a: a[1:-1], True), (lambda a: a, False)):
        with pytest.raises(sc.LayoutError, match=r"the function has returned .* rows are expected"):
            sc.halo_map(fn, x, halo={0: (1, 1)}, fill=0.0, crop=crop)
    with pytest.raises(sc.LayoutError, match="a number, \"circular\" or None, got 'around'"):
        sc.halo_map(lambda a: a, x, halo={0: (1, 1)}, fill="around")
