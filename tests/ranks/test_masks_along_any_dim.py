"""Masks along any sharded dim: rows stay on their ranks, and only counts, or the rows that are kept, are exchanged."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

import shardcompile as sc
from shardcompile.compat.testing import graphs_compiled
from shardcompile.ops.support import gather_log
from shardcompile.testing import mesh, once
from tests.support.sent import Sent
from tests.support.tiers import often

TIGHT = {"rtol": 1e-12, "atol": 1e-12}
COUNTS, EXCHANGE = "gather_counts", "exchange_rows"

FOR_OTHER_OPS = {"all_reduce"}
"""Collectives of sums that the functions take beside what they do with a mask."""

PARTITIONS = [[4, 0, 5], [0, 9, 0], [2, 3, 4], [1, 1, 7]]
"""Of the sequence, which has nine rows."""

Run = Callable[[Any, Any], Any]


def sample(seed: int, batch: int) -> tuple[Tensor, Tensor]:
    """Values [batch, 9, 4] and a mask of the sequence: some, none or all of it."""
    draw = torch.Generator().manual_seed(seed)
    full = torch.randn(batch, 9, 4, dtype=torch.float64, generator=draw)
    mask = torch.rand(9, generator=draw) < (0.5, 0.0, 1.0, 0.3)[seed % 4]
    return full, mask


SAMPLES = [(sizes, seed) for seed, sizes in enumerate(PARTITIONS)]


def sharded(full: Tensor, dim: int, sizes: Sequence[int]) -> Any:
    return sc.distribute_tensor(full, mesh(), [Shard(dim)], sharding_shapes={0: list(sizes)})


def step(run: Run, plain: Run, full: Tensor, mask: Tensor, sizes: Sequence[int], mask_dim: int = 0) -> Any:
    """A function of values by Shard(1) and a mask that is sharded alike, forward and backward; returns the result."""

    def expected() -> tuple[Tensor, Tensor]:
        x = full.clone().requires_grad_()
        y = plain(x, mask)
        y.sin().sum().backward()
        return y.detach(), x.grad

    x = sharded(full, 1, sizes).requires_grad_()
    y = run(x, sharded(mask, mask_dim, sizes))
    y.sin().sum().backward()
    assert x.grad.sharding.partitions[1].sizes == tuple(sizes)
    for ours, theirs in zip((y.detach(), x.grad), once(expected), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs, **TIGHT)
    return y


def put(x: Tensor, *index_and_values: Any) -> Tensor:
    x = x.clone()
    x[index_and_values[:-1]] = index_and_values[-1]
    return x


ROWS_STAY: dict[str, tuple[Run, int]] = {
    "x[:, m]": (lambda x, m: x[:, m], 1),
    "x[0, m]": (lambda x, m: x[0, m], 0),
    "x[:, m, 0]": (lambda x, m: x[:, m, 0], 1),
    "x[:, m, 1:]": (lambda x, m: x[:, m, 1:], 1),
    "x[..., m, :]": (lambda x, m: x[..., m, :], 1),
    "x[None, :, m]": (lambda x, m: x[None, :, m], 2),
    "x[-1, m, None]": (lambda x, m: x[-1, m, None], 0),
    "x[1:, m]": (lambda x, m: x[1:, m], 1),
    "0/1 mask": (lambda x, m: x[:, m.to(torch.uint8)], 1),
    "elements of two dims": (lambda x, m: x[:, (m[:, None] & (x.detach()[0] > 0))], 1),
    "masked_select": (lambda x, m: x[0].masked_select(m[:, None]), 0),
    "masked_select of a row": (lambda x, m: x[0, :, 0].masked_select(m), 0),
    "masked_select of batch 1": (lambda x, m: x[:1].masked_select(m[:, None]), 0),
    "batch 1": (lambda x, m: x[:1][m[None]], 0),
    "indices": (lambda x, m: m.nonzero() * x.sum(), 0),
    "indices of where": (lambda x, m: torch.where(m)[0] * x.sum(), 0),
    "indices of argwhere": (lambda x, m: torch.argwhere(m[None]) * x.sum(), 0),
    "written": (lambda x, m: put(x, slice(None), m, x[:, m] * 2), 1),
    "written into a row": (lambda x, m: put(x, 0, m, x[-1, m] * 2), 1),
    "one value written": (lambda x, m: put(x, slice(None), m, x.detach().new_ones(())), 1),
    "a number written": (lambda x, m: put(x, slice(None), m, 0, 2.0), 1),
    "a row written": (lambda x, m: put(x, slice(None), m, torch.arange(4.0, dtype=torch.float64)), 1),
    "added": (lambda x, m: x[0].index_put((m,), x[0][m], accumulate=True), 0),
    "scattered": (lambda x, m: x[:1].masked_scatter(m[:, None], x[1:, m] if len(x) > 1 else x[:1, m]), 1),
}
"""Functions of values [batch, 9, 4] by Shard(1) and a mask of the nine, and the sharded dim of the result."""


BESIDE_OTHER_OPS = ("indices", "indices of where", "indices of argwhere", "scattered")
"""Functions whose other ops, a view or a product, give up the partition of what has no elements."""


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize("name", ROWS_STAY)
def test_rows_stay_and_counts_travel(name: str) -> None:
    plain, dim = ROWS_STAY[name]
    for (sizes, seed), batch in [(s, b) for s in SAMPLES for b in (1, 2)]:
        full, mask = sample(seed, batch)
        x, m = sharded(full, 1, sizes), sharded(mask, 0, sizes)
        with Sent() as sent:
            plain(x, m)
        y = step(plain, plain, full, mask, sizes)
        if not mask.any() and name in BESIDE_OTHER_OPS:
            continue
        assert {n for n in sent.names if n not in FOR_OTHER_OPS} <= {COUNTS}, sent.names
        assert y.placements == (Shard(dim),)
        alone = [plain(*parts).shape[dim] for parts in zip(full.split(sizes, 1), mask.split(sizes), strict=True)]
        assert y.sharding.partitions[dim].sizes == tuple(alone)


ROWS_MOVE: dict[str, tuple[Run, int]] = {
    "two dims": (lambda x, m: x[m], 32),
    "elements": (lambda x, m: x[(m[..., None] & (x.detach() > 0))], 8),
    "masked_select": (lambda x, m: x.masked_select(m[..., None]), 32),
    "masked_select of columns": (lambda x, m: x[:, :, 0].masked_select(m[0]), 8),
    "indices": (lambda x, m: m.nonzero() * x.sum(), 16),
    "written": (lambda x, m: put(x, m, x[m] * 2), 64),
}
"""Functions of values [2, 9, 4] by Shard(1) and a mask [2, 9], and the bytes that they move of each element that is kept."""


def masks_of_batch(seed: int) -> tuple[Tensor, Tensor]:
    full, mask = sample(seed, 2)
    other = torch.rand(9, generator=torch.Generator().manual_seed(seed + 10)) < 0.5
    return full, torch.stack([mask, other])


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize("name", ROWS_MOVE)
def test_rows_of_several_segments_move_once(name: str) -> None:
    """The row-major order of what is kept is not that of the ranks."""
    plain, width = ROWS_MOVE[name]
    for sizes, seed in SAMPLES:
        full, mask = masks_of_batch(seed)
        x, m = sharded(full, 1, sizes), sharded(mask, 1, sizes)
        with Sent() as sent:
            plain(x, m)
        assert {n for n in sent.names if n not in FOR_OTHER_OPS} <= {COUNTS, EXCHANGE}, sent.names
        segments = 9 * 3 if name == "elements" else 3
        assert sent.nbytes <= 2 * 8 * segments + width * m.to_local().sum() * (4 if name == "elements" else 2)
        y = step(plain, plain, full, mask, sizes, 1)
        if name != "written":
            assert y.placements == (Shard(0),)
            alone = [plain(*parts).shape[0] for parts in zip(full.split(sizes, 1), mask.split(sizes, 1), strict=True)]
            assert name == "masked_select of columns" or y.sharding.partitions[0].sizes == tuple(alone)


# Other layouts


LAYOUTS: dict[str, tuple[Any, Any, Any]] = {
    "mask whole": ((Shard(1), [4, 0, 5]), None, Shard(1)),
    "tensor whole": (None, (Shard(0), [4, 0, 5]), Shard(1)),
    "tensor replicated": ((Replicate(), None), (Shard(0), [4, 0, 5]), Shard(1)),
    "another partition": ((Shard(1), [4, 0, 5]), (Shard(0), [2, 3, 4]), Shard(1)),
    "batch sharded": ((Shard(0), [1, 0, 1]), (Shard(0), [4, 0, 5]), Shard(0)),
    "channels sharded": ((Shard(2), [1, 3, 0]), (Shard(0), [4, 0, 5]), Shard(2)),
    "tensor pending": ((Partial("sum"), None), (Shard(0), [4, 0, 5]), Shard(1)),
}
"""Of values [2, 9, 4] and of a mask [9]: placement and shard sizes, or None for a plain tensor; and of ``x[:, mask]``."""


def given(full: Tensor, way: Any, grad: bool = False) -> Any:
    if way is None:
        return full.clone().requires_grad_(grad)
    placement, sizes = way
    if isinstance(placement, Partial):
        return sc.ShardTensor.from_local(full / 3, mesh(), [placement]).detach().requires_grad_(grad)
    shapes = None if sizes is None else {0: sizes}
    return sc.distribute_tensor(full, mesh(), [placement], sharding_shapes=shapes).requires_grad_(grad)


USES: dict[str, Run] = {
    "kept": lambda x, m: x[:, m],
    "written": lambda x, m: put(x, slice(None), m, x[:, m].cos()),
    "scattered": lambda x, m: x.masked_scatter(m[:, None], x.sin() * 2),
    "selected": lambda x, m: x.masked_select(m[:, None]),
}


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_tensor_and_mask_in_different_layouts(name: str, use: str) -> None:
    of_x, of_mask, wanted = LAYOUTS[name]
    for seed in range(4):
        full, mask = sample(seed, 2)
        x, m, plain = given(full, of_x, True), given(mask, of_mask), full.clone().requires_grad_()
        y, expected = USES[use](x, m), USES[use](plain, mask)
        if use == "kept":
            assert y.placements == (wanted,)
        y.sin().sum().backward()
        expected.sin().sum().backward()
        found = [t.full_tensor() if isinstance(t, sc.ShardTensor) else t for t in (y.detach(), x.grad)]
        for ours, theirs in zip(found, (expected.detach(), plain.grad), strict=True):
            torch.testing.assert_close(ours, theirs, **TIGHT)


ON_TWO_MESH_DIMS: dict[str, tuple[Run, int, int]] = {
    "x[mask]": (lambda x, m: x[m], 0, 2),
    "x[:, mask]": (lambda x, m: x[:, m], 1, 2),
    "x[mask] of three dims": (lambda x, m: x[m[None] & (x.detach().sum(-1) > 0)], 0, 3),
    "written": (lambda x, m: put(x, slice(None), m, x[:, m].cos()), 1, 2),
    "indices": (lambda x, m: (m[None] & (x.detach().sum(-1) > 0)).nonzero() * x.sum(), 0, 3),
}
"""Functions of values [batch, 5, 7, 3] and a mask [5, 7]."""


@pytest.mark.ranks(4, processes=False)
@pytest.mark.parametrize("placements", [(Shard(1), Shard(2)), (Shard(2), Shard(1)), (Shard(2), Shard(2)), (Shard(0), Shard(2)),
                                        (Shard(1), Shard(3)), (Replicate(), Shard(2)), (Shard(1), Shard(1))], ids=str)  # fmt: skip
def test_masks_on_two_mesh_dims(placements: tuple[Any, ...]) -> None:
    on = init_device_mesh("cpu", (2, 2))
    draw = torch.Generator().manual_seed(3)
    for (name, (run, _, _)), batch in [(item, b) for item in ON_TWO_MESH_DIMS.items() for b in (1, 2)]:
        full = torch.randn(batch, 5, 7, 3, dtype=torch.float64, generator=draw)
        for mask in (torch.rand(5, 7, generator=draw) < 0.5, torch.zeros(5, 7) > 0, torch.ones(5, 7) > 0):
            if name == "x[mask]":
                mask = mask[None].expand(batch, 5, 7)
            x = sc.distribute_tensor(full, on, placements).requires_grad_()
            of_mask = [p if name == "x[mask]" or isinstance(p, Replicate) else Shard(p.dim - 1) for p in placements]
            fits = [p if not isinstance(p, Shard) or 0 <= p.dim < mask.ndim else Replicate() for p in of_mask]
            y = run(x, sc.distribute_tensor(mask, on, fits))
            plain = full.clone().requires_grad_()
            expected = run(plain, mask)
            y.sin().sum().backward()
            expected.sin().sum().backward()
            torch.testing.assert_close(y.detach().full_tensor(), expected.detach(), **TIGHT)
            torch.testing.assert_close(x.grad.full_tensor(), plain.grad, **TIGHT)


@pytest.mark.ranks(4, processes=False)
def test_kept_pixels_of_an_image_stay_in_its_rows() -> None:
    """Both dims of an image are sharded: pixels are exchanged along the inner one, and stay in the outer shard."""
    on = init_device_mesh("cpu", (2, 2))
    full = torch.arange(35.0).view(1, 5, 7)
    x = sc.distribute_tensor(full, on, [Shard(1), Shard(2)], sharding_shapes={0: [4, 1], 1: [2, 5]})
    mask = full.remainder(3) > 0
    kept = [int(mask[:, a:b, c:d].sum()) for a, b in ((0, 4), (4, 5)) for c, d in ((0, 2), (2, 7))]
    with Sent() as sent:
        y = x[mask]
    assert sent.names == [COUNTS, COUNTS, EXCHANGE]
    assert y.placements == (Shard(0), Shard(0)) and y.sharding.partitions[0].sizes == tuple(kept)
    assert torch.equal(y.full_tensor(), full[mask])


@pytest.mark.ranks(3, processes=False)
def test_results_are_stored_as_those_of_plain_pytorch() -> None:
    full, mask = sample(0, 2)
    for dims in ((0, 1, 2), (1, 0, 2), (2, 1, 0), (1, 2, 0)):
        x, m = sharded(full, 1, [4, 0, 5]).permute(dims), sharded(mask, 0, [4, 0, 5])
        plain, at = full.permute(dims), dims.index(1)
        index = (*[slice(None)] * at, m)
        wide, of_plain = (t[(..., *[None] * (2 - at))] for t in (m, mask))
        pairs = [
            (x[index], plain[(*index[:-1], mask)]),
            (x.masked_scatter(wide, x * 2), plain.masked_scatter(of_plain, plain * 2)),
            ((x > 0).nonzero(), (plain > 0).nonzero()),
            (torch.where(x > 0)[1], torch.where(plain > 0)[1]),
        ]
        if at == 0:
            pairs.append((x.index_put((m,), x[m]), plain.index_put((mask,), plain[mask])))
        for ours, theirs in pairs:
            assert ours.stride() == theirs.stride()
            assert torch.equal(ours.full_tensor(), theirs)


# Images in a sequence


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize("expanded", [False, True])
@pytest.mark.parametrize("images", ["plain", "sharded"])
def test_images_are_scattered_into_a_sequence(images: str, expanded: bool) -> None:
    """Each rank fetches the rows of its own positions, from where they are; a parameter's gradient is complete."""
    for (sizes, seed), batch in [(s, b) for s in SAMPLES for b in (1, 2)]:
        full, mask = sample(seed, batch)
        mask = torch.stack([mask, mask.flip(0)])[:batch, :, None]
        count = int(mask.sum())
        rows = torch.randn(count + seed % 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        parts = [count // 2, 0, len(rows) - count // 2]
        hidden, m = sharded(full, 1, sizes).requires_grad_(), sharded(mask, 1, sizes)
        source: Any = sharded(rows, 0, parts) if images == "sharded" else rows.clone()
        source.requires_grad_()
        with Sent() as sent:
            y = hidden.masked_scatter(m.expand(batch, 9, 4) if expanded else m, source)
        moves = [EXCHANGE] * (batch > 1) + ["all_to_all_v", "fetch_ranges"] * (images == "sharded")
        assert set(sent.names) <= {COUNTS, *moves}, sent.names
        assert y.placements == (Shard(1),) and y.sharding.partitions[1].sizes == tuple(sizes)
        plain, plain_rows = full.clone().requires_grad_(), rows.clone().requires_grad_()
        expected = plain.masked_scatter(mask, plain_rows)
        y.sin().sum().backward()
        expected.sin().sum().backward()
        gradient = source.grad.full_tensor() if images == "sharded" else source.grad
        found = (y.detach().full_tensor(), hidden.grad.full_tensor(), gradient)
        for ours, theirs in zip(found, (expected.detach(), plain.grad, plain_rows.grad), strict=True):
            torch.testing.assert_close(ours, theirs, **TIGHT)


# Compiled


def _scattered(x: Any, m: Any) -> Any:
    """As a vision-language model writes images into the sequence; they are as many as the positions at least."""
    return x[:1].masked_scatter(m[None, :, None].expand(1, 9, 4), x.detach()[0].cos() * x.sum())


def _normalised(x: Any, m: Any) -> Any:
    kept = x[:, m]
    return put(x, slice(None), m, kept.softmax(-1) + kept.sum(1, keepdim=True))


def _changed(x: Any, m: Any) -> Any:
    """A mask is written to between two uses."""
    here = m & True
    first = x.detach()[:, here]
    here.logical_not_()
    return torch.cat([first, x[:, here]], 1)


COMPILED: dict[str, Run] = {
    "x[:, m]": ROWS_STAY["x[:, m]"][0],
    "two dims": lambda x, m: x[torch.stack([m, ~m])],
    "scattered": _scattered,
    "x[0, m]": ROWS_STAY["x[0, m]"][0],
    "written": _normalised,
    "masked_select": lambda x, m: x.masked_select(m[:, None]),
    "indices": lambda x, m: x[:, m] * torch.where(m)[0][:, None] + x.sin()[:, m],
    "masks that change": _changed,
    "written, then masked": lambda x, m: put(x, slice(None), m, x.detach().cos()[:, m] * x.sum())[:, m],
    "scattered into what is kept": lambda x, m: (lambda y: y.masked_scatter(y.detach()[..., :1] > 0, x))(x[:, m]),
    "beside other indices": lambda x, m: x[:, m, m.nonzero()[:, 0] % 4],
}


@pytest.mark.ranks(3, timeout=300, processes=False)
@pytest.mark.parametrize(
    ("name", "backend"),
    often(
        [*((n, "aot_eager") for n in COMPILED), ("written", "shardcompile"), *((n, "inductor") for n in COMPILED)], 4
    ),
)
def test_one_graph_serves_every_mask_and_every_partition(name: str, backend: str) -> None:
    once(torch._dynamo.reset)
    plain = COMPILED[name]
    compiled = torch.compile(plain, fullgraph=True, backend=backend)
    before = once(graphs_compiled)
    for sizes, seed in [*SAMPLES, ([9, 0, 0], 0)]:
        full, mask = sample(seed, 2)
        y = step(compiled, plain, full, mask, sizes)
        eager = plain(sharded(full, 1, sizes), sharded(mask, 0, sizes))
        assert y.sharding.describe_placements() == eager.sharding.describe_placements()
    assert once(graphs_compiled) - before == 1


# Errors, and the log


@pytest.mark.ranks(3, processes=False)
def test_what_does_not_fit_is_an_error_on_every_rank() -> None:
    full, mask = sample(0, 2)
    x, m = sharded(full, 1, [4, 0, 5]), sharded(mask, 0, [4, 0, 5])
    with pytest.raises(IndexError, match="mask"):
        x[m]
    with pytest.raises(RuntimeError, match="number of elements of source"):
        x.masked_scatter(m[:, None], torch.zeros(3, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="shape mismatch"):
        x[:, m] = torch.zeros(int(mask.sum()) + 1, 4, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="dtypes match"):
        x[:, m] = torch.zeros(int(mask.sum()), 4, dtype=torch.int64)


@pytest.mark.ranks(3, processes=False)
def test_an_op_that_has_a_strategy_for_other_arguments_is_not_said_to_have_no_rule(
    caplog: pytest.LogCaptureFixture,
) -> None:
    full, mask = sample(0, 2)
    x, m = sharded(full, 1, [4, 0, 5]), sharded(mask, 0, [4, 0, 5])
    with caplog.at_level(logging.INFO, "shardcompile"), torch._C.DisableTorchFunctionSubclass():
        once(lambda: gather_log._LOGGED_BYTES.clear())
        assert torch.equal(x.masked_select(m[:, None]).full_tensor(), full.masked_select(mask[:, None]))
    told = [r.getMessage() for r in caplog.records if "masked_select" in r.getMessage()]
    assert all("decomposition of it serves this call" in text and "has no sharding rule" not in text for text in told)
