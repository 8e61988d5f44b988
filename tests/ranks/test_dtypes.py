"""Every dtype that torch has: what plain PyTorch does with it is done, and what it refuses is refused on every rank."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

import shardcompile as sc
from shardcompile.compat.testing import graphs_compiled
from shardcompile.sharding import is_ordinary, transfer_dtype_of
from shardcompile.testing import mesh, once
from tests.support.every_dtype import DENSE, DTYPES, NUMBERS, QUANTIZED, SHELLS, as_integers, bits, values
from tests.support.tiers import often

Run = Callable[[Tensor], Any]

pytestmark = pytest.mark.filterwarnings(
    "ignore:Casting complex values", "ignore:ComplexHalf support", "ignore:.*quantize"
)

PLACED = {
    "rows": ([Shard(0)], {0: [5, 0, 2]}),
    "columns": ([Shard(1)], {0: [0, 2, 6]}),
    "replicated": ([Replicate()], None),
}
_PLACES = torch.tensor([1, 0, 1])
_ROWS = torch.arange(7) % 2 == 0

MOVES: dict[str, Run] = {
    "clone": lambda x: x.clone(),
    "contiguous": lambda x: x.t().contiguous(),
    "t": lambda x: x.t(),
    "flatten": lambda x: x.reshape(-1),
    "cat rows": lambda x: torch.cat([x, x]),
    "cat columns": lambda x: torch.cat([x, x], 1),
    "stack": lambda x: torch.stack([x, x]),
    "rows": lambda x: x[1:],
    "columns": lambda x: x[:, 1:],
    "row": lambda x: x[2],
    "index_select": lambda x: x.index_select(0, _PLACES),
    "index": lambda x: x[_PLACES],
    "gather": lambda x: x.gather(0, torch.zeros(2, 8, dtype=torch.int64)),
    "flip": lambda x: x.flip(0),
    "roll": lambda x: x.roll(1, 0),
    "repeat": lambda x: x.repeat(2, 1),
    "expand": lambda x: x[None].expand(2, 7, 8),
    "mask": lambda x: x[_ROWS],
    "tril": lambda x: x.tril(),
    "where": lambda x: torch.where(_ROWS[:, None], x, x),
    "chunk": lambda x: x.chunk(2),
    "diagonal": lambda x: x.diagonal(),
    "unfold": lambda x: x.unfold(0, 2, 2),
    "zeros_like": lambda x: torch.zeros_like(x),
    "new_zeros": lambda x: x.new_zeros(x.shape),
    "zero_": lambda x: x.clone().zero_(),
    "to cpu": lambda x: x.to("cpu"),
}
"""Functions that move elements, so that they do the same to integers of their size."""

COUNTS: dict[str, Run] = {
    "ones_like": lambda x: torch.ones_like(x),
    "new_full": lambda x: x.new_full(x.shape, 1),
    "fill_": lambda x: x.clone().fill_(1),
    "copy_": lambda x: x.clone().copy_(x.flip(0)),
    "set": lambda x: x.clone().__setitem__(0, x[1]),
    "add": lambda x: x + x,
    "add number": lambda x: x + 1,
    "eq": lambda x: x == x,
    "neg": lambda x: -x,
    "isnan": lambda x: x.isnan(),
    "max": lambda x: x.max(),
    "amax": lambda x: x.amax(0),
    "any": lambda x: x.any(),
    "sort": lambda x: torch.sort(x, dim=0, stable=True),
    "unique": lambda x: x.unique(),
    "bitwise": lambda x: x & x,
    "tolist": lambda x: x.tolist(),
    "item": lambda x: x[0, 0].item(),
    "masked_fill": lambda x: x.masked_fill(_ROWS[:, None], 0),
}
"""Functions of numbers whose results are exact."""

REFUSED_WHERE_PLAIN_REFUSES: dict[str, Run] = {
    "sum": lambda x: x.sum(),
    "sum of rows": lambda x: x.sum(0),
    "mean": lambda x: x.mean(0),
    "mul": lambda x: x * x,
    "exp": lambda x: x.exp(),
    "softmax": lambda x: x.softmax(0),
    "cumsum": lambda x: x.cumsum(0),
    "product": lambda x: x @ x.t(),
}
"""Functions that round: of these only whether there is a result is compared."""


def attempt(run: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """A result, or the error in its place."""
    try:
        return run(), None
    except Exception as error:
        return None, error


def placed(x: Tensor, on: str, device_mesh: DeviceMesh | None = None) -> sc.ShardTensor:
    placements, sizes = PLACED[on]
    return sc.distribute_tensor(x, device_mesh or mesh(), placements, sharding_shapes=sizes)


def compare(name: str, run: Run, full: Tensor, x: sc.ShardTensor, problems: list[str], *, exact: bool = True) -> None:
    """Note where a function of a sharded tensor does not do what it does to the full one."""
    want, refused = attempt(lambda: run(as_integers(full).clone().view(full.dtype)))
    got, error = attempt(lambda: bits(run(x)))  # what is gathered tells that all ranks have a result
    what = f"{name} of {x.sharding.describe()}"
    if refused is None and error is not None:
        problems.append(f"{what}: {type(error).__name__}: {error}")
    elif refused is None and exact and got != bits(want):
        problems.append(f"{what}: {str(got)[:200]}, not {str(bits(want))[:200]}")
    elif refused is not None and error is None:
        moved = attempt(lambda: bits(run(as_integers(full))))[0] if name in MOVES else None
        if moved is None or list(_bytes_of(moved)) != list(_bytes_of(got)):
            problems.append(f"{what}: {str(got)[:200]}, where plain PyTorch has {refused}")
    elif error is not None and (
        not isinstance(error, (RuntimeError, type(refused))) or "no rank can go on" in str(error)
    ):
        problems.append(f"{what}: {type(error).__name__}: {error}, where plain PyTorch has {refused}")


def _bytes_of(found: Any) -> Iterator[Any]:
    """The bytes of tensors, without dtypes."""
    if isinstance(found, tuple) and found and isinstance(found[0], torch.dtype):
        yield found[1:]
    elif isinstance(found, list):
        for one in found:
            yield from _bytes_of(one)


def test_every_dtype_is_sorted():
    """A dtype that torch adds has to be looked at: whether its elements are added up, and as what they travel."""
    known = {"float64", "float32", "float16", "bfloat16", "complex32", "complex64", "complex128", "bool"}
    known |= {"bcomplex32"}  # 2.15: experimental; it has few kernels, so that it travels as integers
    known |= {f"{s}int{n}" for s in ("", "u") for n in (8, 16, 32, 64)}
    known |= {f"float8_{k}" for k in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")}
    names = {str(d).removeprefix("torch.") for d in NUMBERS}
    assert names <= known, f"look at {names - known} in shardcompile/sharding/dtypes.py, then add them here"
    for dtype in DENSE:
        assert transfer_dtype_of(dtype).itemsize == dtype.itemsize
        assert is_ordinary(transfer_dtype_of(dtype))
    assert all(not is_ordinary(d) for d in [*SHELLS, *QUANTIZED])
    assert {*SHELLS, *NUMBERS, *QUANTIZED} == set(DTYPES)


def check_functions(dtype: torch.dtype, exact: dict[str, Run], rounded: dict[str, Run]) -> None:
    """Functions of a sharded tensor do what they do to the full one."""
    full, problems = values(dtype, 7, 8), []
    for on in PLACED:
        x = placed(full, on)
        assert bits(x) == bits(full)
        for name, run in (exact | rounded).items():
            compare(name, run, full, x, problems, exact=name in exact)
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("dtype", DENSE, ids=str)
@pytest.mark.ranks(3, processes=False)
def test_what_plain_pytorch_does_with_a_dtype(dtype: torch.dtype):
    check_functions(dtype, MOVES | COUNTS, REFUSED_WHERE_PLAIN_REFUSES)


@pytest.mark.parametrize("dtype", DENSE, ids=str)
@pytest.mark.ranks(3, processes=False)
def test_casts_to_and_from_every_dtype(dtype: torch.dtype):
    check_functions(dtype, {f"to {to}": lambda x, to=to: x.to(to) for to in DENSE}, {})


@pytest.mark.parametrize("dtype", DENSE, ids=str)
@pytest.mark.ranks(3, processes=False)
def test_layouts_of_every_dtype(dtype: torch.dtype):
    layouts = [
        ([Replicate()], None), ([Shard(0)], {0: [5, 0, 2]}), ([Shard(0)], {0: [0, 1, 6]}),
        ([Shard(1)], {0: [3, 1, 4]}), ([Shard(1)], None),
    ]  # fmt: skip
    full = values(dtype, 7, 8)
    for placements, sizes in layouts:
        x = sc.scatter_tensor(full if mesh().get_rank() == 1 else None, 1, mesh(), placements, sharding_shapes=sizes)
        local = x.to_local()
        for again in ("infer", "run_check"):
            y = sc.ShardTensor.from_local(local, mesh(), placements, run_check=again == "run_check")
            assert y.dtype is local.dtype is dtype
            for to, stated in layouts:
                moved = y.redistribute(placements=to, sharding_shapes=stated)
                assert bits(moved) == bits(full), f"{placements} {sizes} to {to} {stated}"
        assert bits(x.clone()) == bits(full)


@pytest.mark.parametrize("dtype", DENSE, ids=str)
@pytest.mark.ranks(4, processes=False)
def test_layouts_over_two_mesh_dims(dtype: torch.dtype):
    grid, full = init_device_mesh("cpu", (2, 2)), values(dtype, 7, 8)
    for placements in ([Shard(0), Shard(1)], [Shard(0), Shard(0)], [Replicate(), Shard(1)]):
        x = sc.distribute_tensor(full, grid, placements)
        assert bits(x) == bits(full)
        assert bits(x.redistribute(placements=[Shard(1), Shard(0)])) == bits(full)
        assert bits(x.view(transfer_dtype_of(dtype))) == bits(full.view(transfer_dtype_of(dtype)))


@pytest.mark.ranks(2)
def test_gloo_moves_every_dtype():
    for dtype in DENSE:
        full = values(dtype, 5, 4)
        x = sc.distribute_tensor(full, mesh(), [Shard(0)], sharding_shapes={0: [4, 1]})
        moved = x.redistribute(placements=[Shard(1)], sharding_shapes={0: [1, 3]})
        again = moved.redistribute(placements=[Shard(1)], sharding_shapes={0: [4, 0]})
        assert bits(x) == bits(moved) == bits(again) == bits(full), dtype
        whole = sc.distribute_tensor(full, mesh(), [Replicate()])
        assert bits(whole.redistribute(placements=[Shard(0)])) == bits(full), dtype
        assert bits(x[1:].flip(0)) == bits(as_integers(full)[1:].flip(0).view(dtype)), dtype


def _filled(name: str, *more: Any, **options: Any) -> Any:
    return bits(getattr(sc, name)((7, 3), *more, **options))


@pytest.mark.parametrize("dtype", DENSE, ids=str)
@pytest.mark.ranks(3, processes=False)
def test_factories_of_every_dtype(dtype: torch.dtype):
    for on in (None, {0: [5, 0, 2]}):
        laid: dict[str, Any] = {"device_mesh": mesh(), "placements": [Shard(0)], "sharding_shapes": on}
        for name, more in (("zeros", ()), ("ones", ()), ("full", (1,))):
            want, refused = attempt(functools.partial(getattr(torch, name), (7, 3), *more, dtype=dtype))
            got, error = attempt(functools.partial(_filled, name, *more, dtype=dtype, **laid))
            if refused is not None:
                assert isinstance(error, (type(refused), sc.UnsupportedOpError)), f"{name}: {error} {got}"
            else:
                assert error is None, f"{name}: {error}"
                assert got == bits(want), name
        empty = sc.empty(7, 3, dtype=dtype, **laid)
        assert empty.dtype is dtype and empty.to_local().dtype is dtype


# Views


VIEWED = [torch.uint8, torch.float8_e4m3fn, torch.int4, torch.int16, torch.bits16, torch.float32, torch.int64,
          torch.complex64, torch.complex128]  # fmt: skip
WHOLE = {
    "rows": ([Shard(0)], {0: [3, 0, 1]}),
    "whole elements": ([Shard(1)], {0: [16, 0, 32]}),
    "parts of elements": ([Shard(1)], {0: [5, 0, 43]}),
    "replicated": ([Replicate()], None),
}


@pytest.mark.parametrize("to", VIEWED, ids=str)
@pytest.mark.ranks(3, processes=False)
def test_views_as_another_dtype(to: torch.dtype):
    for dtype in VIEWED:
        full = values(torch.uint8, 4, 48 * dtype.itemsize).view(dtype)
        for name, (placements, sizes) in WHOLE.items():
            x = sc.distribute_tensor(full, mesh(), placements, sharding_shapes=sizes)
            y, want = x.view(to), full.view(to)
            assert (y.shape, y.stride(), y.dtype) == (want.shape, want.stride(), want.dtype)
            assert bits(y) == bits(want), f"{dtype} {name}"
            assert name == "parts of elements" or y.placements == x.placements, f"{dtype} {name}"
            assert bits(y[1:].view(dtype)) == bits(as_integers(full)[1:].view(dtype)), f"{dtype} {name}"


@pytest.mark.ranks(3, processes=False)
def test_what_is_written_to_a_view_of_another_dtype():
    full = torch.arange(96, dtype=torch.int16).view(4, 24)
    for to in (torch.uint8, torch.float16, torch.int32, torch.int64):
        for placements, sizes in WHOLE.values():
            sizes = sizes and {0: [n // 2 for n in sizes[0]] if placements == [Shard(1)] else sizes[0]}
            if sizes and placements == [Shard(1)]:
                sizes = {0: [*sizes[0][:2], 24 - sum(sizes[0][:2])]}
            for take in (lambda t: t, lambda t: t[1:], lambda t: t[:, 4:]):
                x = sc.distribute_tensor(full, mesh(), placements, sharding_shapes=sizes)
                plain = full.clone()
                for t in (x, plain):
                    take(t).view(to)[:, 1:].fill_(1)
                assert torch.equal(x.full_tensor(), plain), f"{to} {placements} {sizes}"


@pytest.mark.ranks(3, processes=False)
def test_views_that_plain_pytorch_refuses():
    full = torch.arange(21, dtype=torch.uint8).view(3, 7)
    x = sc.distribute_tensor(full, mesh(), [Shard(1)])
    for run in (lambda t: t.view(torch.int16), lambda t: t.t().view(torch.int16)):
        with pytest.raises(RuntimeError):
            run(full)
        with pytest.raises(RuntimeError):
            run(x)


# Training


def _through_float8(x: Tensor, weight: Tensor) -> Tensor:
    """What float8 training does, with products in the wider dtype."""
    scale = 448.0 / x.detach().abs().amax().clamp(min=1e-6)
    small = (x * scale).to(torch.float8_e4m3fn).to(x.dtype) / scale
    return small @ weight.to(torch.float8_e5m2).to(x.dtype).t()


def _trained(full: Tensor, weight: Tensor) -> list[Any]:
    x, w = full.clone().requires_grad_(), weight.clone().requires_grad_()
    y = _through_float8(x, w)
    y.sin().sum().backward()
    return [y.detach(), x.grad, w.grad]


@pytest.mark.parametrize("backend", often(["eager mode", "aot_eager", "inductor"], 2))
@pytest.mark.ranks(3, processes=False)
def test_float8_casts_forward_and_backward(backend: str):
    run: Any = (
        _through_float8 if backend == "eager mode" else torch.compile(_through_float8, backend=backend, fullgraph=True)
    )
    before = graphs_compiled()
    for rows, sizes in ((7, [5, 0, 2]), (7, [0, 1, 6]), (7, [3, 3, 1])):
        full, weight = values(torch.float32, rows, 8), values(torch.float32, 4, 8)

        x = sc.distribute_tensor(full, mesh(), [Shard(0)], sharding_shapes={0: sizes}).requires_grad_()
        w = weight.clone().requires_grad_()
        y = run(x, w)
        assert y.placements == x.placements
        y.sin().sum().backward()
        for got, want in zip(
            [y.detach().full_tensor(), x.grad.full_tensor(), w.grad],
            once(functools.partial(_trained, full, weight)),
            strict=True,
        ):
            torch.testing.assert_close(got, want)
    if backend != "eager mode":
        assert graphs_compiled() - before == 1


def _whole(*shape: int) -> Tensor:
    return torch.arange(20, dtype=torch.float32).reshape(shape) - 5


@pytest.mark.ranks(3, processes=False)
def test_terms_are_added_up_before_they_are_rounded():
    term = _whole(4, 5) * (mesh().get_rank() + 1)
    x = sc.ShardTensor.from_local(term, mesh(), [Partial()])
    for to in NUMBERS:
        if not to.is_complex:
            assert bits(x.abs().to(to)) == bits((_whole(4, 5) * 6).abs().to(to)), to
            assert bits(x.to(torch.float64).to(torch.float32)) == bits(_whole(4, 5) * 6)


def check_compiled(
    function: Callable[[Tensor], list[Tensor]], backend: str, full: Tensor, placed: Iterable[sc.ShardTensor]
) -> None:
    """A compiled function gives the values of the full tensor, and the layouts that it gives in eager mode."""
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    for x in placed:
        got, eager = compiled(x), function(x)
        assert bits(got) == bits(function(full))
        assert [g.sharding.describe() for g in got] == [e.sharding.describe() for e in eager]


@pytest.mark.parametrize("backend", ["aot_eager"])
@pytest.mark.ranks(3, processes=False)
def test_compiled_casts_through_every_dtype(backend: str):
    real = [d for d in NUMBERS if d is not torch.complex32]

    def casts(x: Tensor) -> list[Tensor]:
        return [x.to(d).to(torch.float64).flip(0) for d in real if not d.is_complex]

    full = values(torch.float32, 7, 8).abs()
    check_compiled(casts, backend, full, (placed(full, on) for on in ("rows", "columns")))


@pytest.mark.ranks(3, processes=False)
def test_compiled_views_as_another_dtype():
    def views(x: Tensor) -> list[Tensor]:
        return [x.view(torch.float8_e4m3fn).float(), x.view(torch.int64) + 1, x.view(torch.float32) * 2]

    full = values(torch.float32, 4, 24)
    partitions = [(0, [3, 0, 1]), (0, [1, 1, 2]), (1, [6, 0, 18]), (1, [5, 0, 19])]
    placed = (sc.distribute_tensor(full, mesh(), [Shard(dim)], sharding_shapes={0: sizes}) for dim, sizes in partitions)
    check_compiled(views, "aot_eager", full, placed)


@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scaled", ["one scale", "a scale for each row"])
@pytest.mark.ranks(3, processes=False)
def test_products_of_scaled_float8(scaled: str, out: torch.dtype):
    a, b = (values(torch.float32, 16, 32).to(torch.float8_e4m3fn) for _ in range(2))
    scales: tuple[Tensor, ...] = (torch.tensor(0.5), torch.tensor(2.0))
    if scaled != "one scale":
        scales = torch.arange(1, 17) / 16, torch.arange(1, 17) / 4
        scales = scales[0][:, None], scales[1][None]
    want, refused = attempt(lambda: torch._scaled_mm(a, b.t(), *scales, out_dtype=out))
    for left, right in ((Shard(0), Replicate()), (Replicate(), Shard(0)), (Shard(1), Shard(1)), (Shard(0), Shard(0))):
        x, y = (sc.distribute_tensor(t, mesh(), [p]) for t, p in ((a, left), (b, right)))
        got, error = attempt(functools.partial(_scaled, x, y, scales, out))
        assert (error is None) is (refused is None), f"{error} {refused}"
        if refused is None:
            torch.testing.assert_close(got, want)


def _scaled(x: Any, y: Any, scales: tuple[Tensor, ...], out: torch.dtype) -> Tensor:
    return torch._scaled_mm(x, y.t(), *scales, out_dtype=out).full_tensor()


# What is refused


@pytest.mark.ranks(2, processes=False)
def test_quantized_tensors_are_refused_in_words():
    full = torch.quantize_per_tensor(torch.randn(4, 3), 0.1, 0, torch.qint8)
    makers: list[Callable[[], object]] = [
        lambda: sc.distribute_tensor(full, mesh(), [Shard(0)]),
        lambda: sc.distribute_tensor(full, mesh(), [Shard(0)], src_data_rank=None),
        lambda: sc.ShardTensor.from_local(full, mesh(), [Shard(0)]),
        lambda: sc.scatter_tensor(full, 0, mesh(), [Shard(0)]),
    ]
    for make in makers:
        with pytest.raises(sc.LayoutError, match=r"quantized.*[Ff]irst .*dequantize\(\)"):
            make()
    x = sc.distribute_tensor(torch.randn(4, 3), mesh(), [Shard(0)])
    for run in (lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8), lambda t: t.view(torch.qint8)):
        with pytest.raises(sc.UnsupportedOpError, match="quantized"):
            run(x)


@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
@pytest.mark.ranks(2, processes=False)
def test_factories_of_quantized_dtypes_are_refused_in_words(dtype: torch.dtype):
    for make in (sc.empty, sc.zeros, sc.ones):
        with pytest.raises((sc.UnsupportedOpError, sc.LayoutError), match="quantized"):
            make(4, 3, dtype=dtype, device_mesh=mesh(), placements=[Shard(0)])
    x = sc.distribute_tensor(torch.randn(4, 3), mesh(), [Shard(0)])
    with pytest.raises((sc.UnsupportedOpError, NotImplementedError), match="quantized"):
        x.to(dtype)
