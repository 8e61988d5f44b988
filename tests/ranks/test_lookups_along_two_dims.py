"""Elements named by several index tensors, of which some are sharded like the rows: ``x[samples, places]``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Shard

import shardcompile as sc
from shardcompile.compat.testing import graphs_compiled
from shardcompile.testing import mesh, once
from tests.support.exchanges import count_bytes
from tests.support.tiers import often

LENGTH, WIDTH = 5, 4
TIGHT = {"rtol": 1e-10, "atol": 1e-10}
PARTITIONS = [([4, 0, 3], [4, 0, 3]), ([3, 3, 1], [3, 3, 1]), ([0, 7, 2], [2, 4, 3]), ([1, 8, 3], [6, 5, 1])]
"""Shards of the rows, and of the places; two partitions of the same rows, then others."""


def partition(full: Tensor, sizes: list[int]) -> Any:
    return sc.distribute_tensor(full, mesh(), [Shard(0)], sharding_shapes={0: sizes})


def every(x: Any) -> Tensor:
    return torch.arange(x.shape[0], device=x.device)


def last_of_each(x: Any, places: Any) -> Any:
    return x[every(x), places.argmax(-1)]


def counted_from_the_end(x: Any, places: Any) -> Any:
    return x[every(x), -1 - places.argmax(-1)] * x[every(x) - x.shape[0], places.amin(-1)]


def several_of_each(x: Any, places: Any) -> Any:
    return x[every(x)[:, None], places]


def features_as_well(x: Any, places: Any) -> Any:
    return x[every(x), places.argmax(-1), places[:, 0] % WIDTH]


def rows_of_others(x: Any, places: Any) -> Any:
    return x[(places.sum(-1) * 3) % x.shape[0], places.argmax(-1)]


def sharded_dim_inside(x: Any, places: Any) -> Any:
    rows = (places.sum(-1) * 3) % x.shape[0]
    return x.transpose(0, 1)[places.argmax(-1), rows]


def behind_a_dim(x: Any, places: Any) -> Any:
    return x.movedim(-1, 0)[:, every(x), places.argmax(-1)]


def written(x: Any, places: Any) -> Any:
    out = x.sin()
    out[every(x), places.argmax(-1)] = x[:, 0].cos()
    return out


def added(x: Any, places: Any) -> Any:
    rows = (places.sum(-1) * 3) % x.shape[0]
    return torch.zeros_like(x).index_put((rows, places.argmax(-1)), x[:, 1].exp(), accumulate=True) + x


ALL: list[Callable[..., Any]] = [
    last_of_each,
    rows_of_others,
    written,
    added,
    several_of_each,
    counted_from_the_end,
    features_as_well,
    sharded_dim_inside,
    behind_a_dim,
]


def drawn(rows: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, LENGTH, WIDTH, dtype=torch.float64, generator=draw)
    return x, torch.randint(0, LENGTH, (rows, LENGTH), generator=draw)


def step(run: Any, program: Any, of_rows: list[int], of_places: list[int]) -> None:
    full, places = drawn(sum(of_rows))
    x, plain = partition(full, of_rows).requires_grad_(), full.clone().requires_grad_()
    found, expected = run(x, partition(places, of_places)), program(plain, places)
    found.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(found.full_tensor(), expected, **TIGHT)
    torch.testing.assert_close(x.grad.full_tensor(), plain.grad, **TIGHT)


@pytest.mark.ranks(3, timeout=600, processes=False)
@pytest.mark.parametrize(
    ("backend", "program"),
    [
        *(("", program) for program in ALL),
        *often([(backend, program) for backend in ("aot_eager", "inductor") for program in ALL], 4),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_values_and_gradients_in_one_graph(program: Callable[..., Any], backend: str) -> None:
    run = torch.compile(program, fullgraph=True, backend=backend) if backend else program
    for sizes in PARTITIONS[:3]:
        step(run, program, *sizes)
    before = once(graphs_compiled)
    step(run, program, *PARTITIONS[3])
    assert graphs_compiled() == before


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize("compiled", [False, True])
def test_nothing_but_counts_is_sent_for_elements_of_own_rows(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [4, 0, 3]
    full, places = drawn(sum(sizes))
    x, places = partition(full, sizes).requires_grad_(), partition(places, sizes)
    run = torch.compile(last_of_each, fullgraph=True, backend="aot_eager") if compiled else last_of_each
    run(x, places).square().sum().backward()
    sent = count_bytes(monkeypatch)
    found = run(x, places)
    assert found._spec.layout.describe().endswith("S(0)[4,0,3]")
    found.square().sum().backward()
    assert sum(sent) == 0


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_place_out_of_range_is_no_element_of_the_next_row(compiled: bool) -> None:
    def look_up(x: Any, places: Any) -> Any:
        return x[every(x), places.amax(-1)]

    call = torch.compile(look_up, fullgraph=True, backend="aot_eager") if compiled else look_up
    for bad in (LENGTH, 3 * LENGTH):
        full, places = drawn(9)
        places[:, 0] = bad
        with pytest.raises(IndexError, match="index"):
            call(partition(full, [4, 2, 3]), partition(places, [4, 2, 3]))


def test_the_backward_pass_takes_the_links_of_the_forward_pass() -> None:
    def build(mesh: Any) -> Any:
        sizes = {0: [3, 4, 2]}
        x = sc.ShardTensor.from_local(torch.randn(3, LENGTH, WIDTH), mesh, [Shard(0)], sizes).requires_grad_()
        places = sc.ShardTensor.from_local(torch.randint(0, LENGTH, (3, LENGTH)), mesh, [Shard(0)], sizes)
        return (lambda x, places: last_of_each(x, places).square().sum()), (x, places)

    report = sc.explain(build, world_size=3)
    assert [c.kind for c in report.traced] == ["gather_counts", *["exchange_rows"] * 3]
