"""Layouts of results: eager and compiled code give the same, and rows do not pile up on few ranks."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as nnf
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.placement_types import Shard

import shardcompile as sc
from shardcompile import ShardTensor
from shardcompile.compat.testing import graphs_compiled
from shardcompile.testing import once
from shardcompile.testing.arrange import CHUNK, InputLayout, seed_of
from shardcompile.testing.trial import largest_share
from tests.support.op_cases import FAMILIES
from tests.support.op_check import Case, fill, laid_out, single_placements
from tests.support.tiers import often
from tests.zoo.piled_up import MAX_GROWTH

ASKED_FOR = {
    "joins/split": "a slice stays where its rows are",
    "joins/chunk": "a slice stays where its rows are",
    "joins/tensor_split": "a slice stays where its rows are",
    "joins/slice": "a slice stays where its rows are",
    "masks/": "rows that a mask keeps stay where they are",
    "selection/nonzero": "rows that a mask keeps stay where they are",
    "selection/x[mask]": "rows that a mask keeps stay where they are",
    "selection/masked_select": "rows that a mask keeps stay where they are",
    "flattened dims/flat rows sliced": "a slice stays where its rows are",
    "scans/diff": "a difference of slices",
    "scans/cumulative_trapezoid": "a sum of slices",
    "without rules/conv2d": "a row of the result is where the middle of its window is",
    "deeper/module gru": "gates are slices of a product whose columns are sharded, as there are fewer samples than ranks",
}
"""Op cases whose results are less balanced than their inputs, and why."""

NOT_COMPILED = {
    "in-place/in-place on parameter": "Dynamo traces no call of `torch.autograd.grad` unless it is told to",
    "losses/gaussian_nll": "it reads a value",
    "deeper/hessian product": "Dynamo traces no call of `torch.autograd.grad` of a graph of its own",
    "deeper/module gru": "Dynamo does not support it",
    "batches of matrices/solve triangles": "torch decides by the number of rows, which only a run tells",
    "without rules/tolist": "it reads values",
    "without rules/equal": "it reads a value",
    "without rules/allclose": "it reads a value",
    "without rules/cov": "it reads a value",
}
"""Op cases that cannot be one graph, and why."""


def arranged(case: Case) -> Iterator[tuple[InputLayout | None, ...]]:
    """Layouts in which some input is sharded, in the partitions of torch.chunk."""
    options = [single_placements(i) if i.sharded else [None] for i in case.inputs]
    longest = max(options, key=len)
    for n, wanted in enumerate(longest):
        if wanted is not None and any(isinstance(p, Shard) for p in wanted):
            chosen = [None if o == [None] else wanted if wanted in o else o[n % len(o)] for o in options]
            yield tuple(None if c is None else InputLayout(c, CHUNK) for c in chosen)


def results(case: Case, mesh: DeviceMesh, ways: tuple[InputLayout | None, ...], run: Callable[..., Any]) -> list[Any]:
    """Sharded inputs, and results."""
    generator = torch.Generator().manual_seed(seed_of(case.name))
    full = [fill(i, generator) for i in case.inputs]
    inputs = [x.clone() if w is None else laid_out(x, mesh, w, 0) for x, w in zip(full, ways, strict=True)]
    outputs = torch.utils._pytree.tree_leaves(run(*inputs))
    return [inputs, outputs]


@pytest.mark.ranks(3, processes=False, timeout=600)
@pytest.mark.parametrize("family", list(FAMILIES))
def test_rows_do_not_pile_up(family: str) -> None:
    mesh = init_device_mesh("cpu", (3,))
    found, tried, ran = [], 0, 0
    for case in FAMILIES[family]:
        if "error" in case.name or any(f"{family}/{case.name}".startswith(known) for known in ASKED_FOR):
            continue
        for ways in arranged(case):
            tried += 1
            try:
                before, after = results(case, mesh, ways, copy.deepcopy(case).run)
            except Exception:
                continue  # test_ops compares errors with those of plain PyTorch
            ran += 1
            allowed = MAX_GROWTH * max(map(largest_share, before), default=1.0)
            found += [
                f"{case.name} {' '.join(map(str, ways))}: {x.sharding.describe()}"
                for x in after
                if largest_share(x) > allowed
            ]
    assert not found, "\n".join(found)
    assert 2 * ran >= tried


@pytest.mark.ranks(3, processes=False, timeout=900)
@pytest.mark.parametrize("part", often(list(range(24)), 1))
@pytest.mark.parametrize("family", list(FAMILIES))
def test_eager_and_compiled_give_the_same_layouts(family: str, part: int) -> None:
    mesh = init_device_mesh("cpu", (3,))
    found = []
    for case in FAMILIES[family][part::24]:
        if "error" in case.name or f"{family}/{case.name}" in NOT_COMPILED:
            continue
        every = list(arranged(case))
        for ways in every[seed_of(case.name) % max(len(every), 1) :][:1]:
            once(torch._dynamo.reset)
            compiled = torch.compile(case.run, fullgraph=True, backend="aot_eager")
            try:
                eager = results(case, mesh, ways, case.run)[1]
            except Exception:
                continue  # test_ops compares errors with those of plain PyTorch
            graph = results(case, mesh, ways, compiled)[1]
            texts = [
                [x.sharding.describe_placements() if isinstance(x, ShardTensor) else "" for x in outputs]
                for outputs in (eager, graph)
            ]
            if texts[0] != texts[1]:
                found.append(f"{case.name} {' '.join(map(str, ways))}: eager {texts[0]}, compiled {texts[1]}")
    assert not found, "\n".join(found)


# What users of images and of attention write, with few samples


def _image_cases(batch: int) -> dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]], int]]:
    rows, image = (batch, 512, 16), (batch, 8, 16, 16)
    found: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]], int]] = {
        "bmm": (lambda q, k: torch.bmm(q, k.mT), [rows] * 2, 1),
        "matmul": (lambda q, k: q @ k.mT, [rows] * 2, 1),
        "einsum": (lambda q, k: torch.einsum("bid,bjd->bij", q, k), [rows] * 2, 1),
        "einsum of three": (lambda q, k, v: torch.einsum("bid,bjd,bje->bie", q, k, v), [rows] * 3, 1),
        "baddbmm": (lambda q, k: torch.baddbmm(q.new_zeros(1), q, k.mT), [rows] * 2, 1),
        "cdist": (torch.cdist, [rows] * 2, 1),
        "adaptive_avg_pool2d": (lambda x: nnf.adaptive_avg_pool2d(x, (9, 9)), [image], 2),
        "adaptive_max_pool2d": (lambda x: nnf.adaptive_max_pool2d(x, (9, 9)), [image], 2),
        "unfold": (lambda x: nnf.unfold(x, 3, padding=1), [image], 3),
        "fold": (lambda x: nnf.fold(nnf.unfold(x, 3, padding=1), x.shape[-2:], 3, padding=1), [image], 3),
        "pixel_shuffle": (lambda x: nnf.pixel_shuffle(x, 2), [image], 2),
        "layer_norm": (lambda x: nnf.layer_norm(x, x.shape[1:]), [image], 2),
        "group_norm": (lambda x: nnf.group_norm(x, 4), [image], 2),
        "instance_norm": (nnf.instance_norm, [image], 2),
        "conv2d": (lambda x: nnf.conv2d(x, x.new_ones(8, 8, 3, 3), padding=1), [image], 3),
        "conv_transpose2d": (lambda x: nnf.conv_transpose2d(x, x.new_ones(8, 8, 2, 2), stride=2), [image], 2),
        "max_pool2d": (lambda x: nnf.max_pool2d(x, 3, 2, 1), [image], 3),
        "lp_pool2d": (lambda x: nnf.lp_pool2d(x, 2, 3), [image], 2),
        "grid_sample": (
            lambda x: nnf.grid_sample(x, x.new_zeros(len(x), 5, 5, 2), align_corners=False),
            [image],
            2,
        ),
        "attention": (lambda q: nnf.scaled_dot_product_attention(q, q, q), [(batch, 2, 512, 16)], 2),
        "reshape to heads": (lambda q: q.unflatten(2, (2, 8)).transpose(1, 2).softmax(-1), [rows], 1),
    }
    for mode in ("nearest", "nearest-exact", "bilinear", "bicubic", "area"):
        for factor in (2, 1.3, 0.7):
            found[f"interpolate {mode} {factor}"] = (
                lambda x, mode=mode, factor=factor: nnf.interpolate(x, scale_factor=factor, mode=mode),
                [image],
                2 if factor == 2 else 3,
            )
    return found


@pytest.mark.ranks(4, processes=False, timeout=900)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", list(_image_cases(1)))
def test_few_samples_leave_rows_on_all_ranks(name: str, batch: int) -> None:
    function, shapes, dim = _image_cases(batch)[name]
    mesh = init_device_mesh("cpu", (4,))
    full = once(lambda: [torch.randn(shape, dtype=torch.float64) for shape in shapes])
    plain = [x.clone().requires_grad_() for x in full]
    want = function(*plain)
    want.sin().sum().backward()
    layouts = []
    once(torch._dynamo.reset)
    compiled = [function] if batch > 1 else [function, torch.compile(function, fullgraph=True, backend="aot_eager")]
    for run in compiled:
        inputs = [sc.distribute_tensor(x, mesh, [Shard(dim)]).requires_grad_() for x in full]
        got = run(*inputs)
        got.sin().sum().backward()
        torch.testing.assert_close(got.full_tensor(), want)
        for x, p in zip(inputs, plain, strict=True):
            torch.testing.assert_close(x.grad.full_tensor(), p.grad)
        layouts.append(got.sharding)
    assert math.prod(layouts[0].local_shape(mesh.get_coordinate())) > 0
    assert largest_share(got) <= MAX_GROWTH
    assert len({x.describe_placements() for x in layouts}) == 1, layouts


# New tensors of literal sizes

NEW_TENSORS: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros": lambda x: x.new_zeros(7, 3) + x[:, :1].sum(0),
    "ones": lambda x: x.new_ones(7, 3) * x.sum(),
    "full": lambda x: x.new_full((7, 2), 3.0) * x.sum(),
    "empty": lambda x: x.new_empty(7, 3).fill_(2) * x.sum(),
    "strided": lambda x: x.new_empty_strided((7, 3), (1, 7)).fill_(2) * x.sum(),
    "added": lambda x: x.new_zeros(7, 3) + x if len(x) == 7 else x.new_zeros(7, 3) + x.sum(),
    "one dim": lambda x: x.new_ones(7) * x.sum(),
    "a formula": lambda x: x.new_ones(2 * x.shape[0] - 7, 3) * x.sum(),
    "the size of another": lambda x: x.new_ones(x.sum(1).new_empty(7).shape[0], 3) * x.sum(),
}
"""Functions of a tensor of 7 or of other many rows, by what they make."""


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize("name", list(NEW_TENSORS))
def test_a_literal_size_is_that_of_the_sharded_dim_in_eager_and_compiled_code_alike(name: str) -> None:
    function = NEW_TENSORS[name]
    mesh = init_device_mesh("cpu", (3,))
    once(torch.compiler.reset)
    compiled = once(lambda: torch.compile(function, fullgraph=True, backend="aot_eager"))
    before = once(graphs_compiled)
    for sizes in ([5, 0, 2], [1, 4, 2], [4, 5, 0], [0, 0, 9], [7, 0, 0], [2, 2, 4], [3, 3, 1]):
        full = once(lambda sizes=sizes: torch.randn(sum(sizes), 3, dtype=torch.float64))
        plain = full.clone().requires_grad_()
        want = function(plain)
        want.sin().sum().backward()
        layouts = []
        for run in (function, compiled):
            x = sc.distribute_tensor(full, mesh, [Shard(0)], sharding_shapes={0: sizes}).requires_grad_()
            got = run(x)
            got.sin().sum().backward()
            torch.testing.assert_close(got.full_tensor(), want)
            torch.testing.assert_close(x.grad.full_tensor(), plain.grad)
            layouts.append(got.sharding.describe_placements())
        assert layouts[0] == layouts[1], sizes
    assert graphs_compiled() - before <= 2  # one for 7 rows, one for all other numbers
