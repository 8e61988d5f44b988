"""What the passes schedule is what Inductor's code does, and computes the same."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

import shardcompile as sc
from shardcompile.passes import LowerEvenGathers, Pipeline, default_passes, inductor_options
from shardcompile.testing import rank, world_size
from tests.support.after_passes import graph_after_passes

WIDTH, LAYERS = 512, 4
PARTITIONS = {2: [400, 112], 3: [400, 0, 112]}

_STEPS = {
    "gather": r"= torch\.ops\.shardcompile\.all_gather\w+\.default\(|\.all_gather_into_tensor\.default\(",
    "scatter": r"= torch\.ops\.shardcompile\.reduce_scatter\w+\.default\(",
    "wait": r"_c10d_functional\.wait_tensor\.default\(",
    "product": r"extern_kernels\.(add)?mm\(",
}


def steps_of(code: str) -> list[str]:
    """The communication and the matrix products of generated code, in its order."""
    called = code[code.index("def call") :]
    found = [(m.start(), step) for step, pattern in _STEPS.items() for m in re.finditer(pattern, called)]
    return [step for _, step in sorted(found)]


def parameters(sizes: list[int]) -> list[nn.Parameter]:
    mesh = init_device_mesh("cpu", (world_size(),))
    torch.manual_seed(0)
    whole = [torch.randn(WIDTH, WIDTH) / WIDTH**0.5 for _ in range(LAYERS)]
    return [nn.Parameter(sc.distribute_tensor(w, mesh, [Shard(0)], sharding_shapes={0: sizes})) for w in whole]


def stacked(x: Tensor, *weights: Tensor) -> Tensor:
    for w in weights:
        x = torch.tanh(x @ w.full_tensor().mT)  # type: ignore[attr-defined]
    return x.square().sum()


def step(options: dict[str, Any], weights: list[nn.Parameter], x: Tensor) -> tuple[list[Tensor], list[str]]:
    """Loss and gradients of a compiled step, and the generated code."""
    torch._dynamo.reset()
    for w in weights:
        w.grad = None
    compiled = torch.compile(stacked, fullgraph=True, options=options)

    def both() -> Tensor:
        loss = compiled(x, *weights)
        loss.backward()
        return loss

    loss, codes = run_and_get_code(both)
    gradients = [w.grad.full_tensor() for w in weights]  # type: ignore[union-attr]
    return [loss.detach(), *gradients], codes


@pytest.mark.ranks(3, timeout=300)
def test_generated_code_gathers_ahead_and_computes_the_same() -> None:
    weights, x = (
        parameters(PARTITIONS[world_size()]),
        torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1)),
    )
    names = [p.name for p in default_passes()]
    plain, codes = step(inductor_options(off=names), weights, x)
    assert steps_of(codes[0]) == ["gather", "wait", "product"] * LAYERS
    passed, codes = step(inductor_options(), weights, x)
    for a, b in zip(passed, plain, strict=True):
        assert torch.equal(a, b)
    forward = steps_of(codes[0])
    assert forward.count("product") == LAYERS and forward.count("gather") == forward.count("wait")
    ahead = [forward[:i].count("gather") - forward[:i].count("wait") for i, s in enumerate(forward) if s == "product"]
    assert max(ahead) > 0, forward  # some product runs while a gather does
    everyone: list[Any] = [None] * world_size()
    dist.all_gather_object(everyone, [steps_of(code) for code in codes])
    assert all(steps == everyone[0] for steps in everyone)


@pytest.mark.ranks(2, timeout=300)
def test_even_gathers_become_those_of_torch_where_a_backend_is_better_at_them() -> None:
    weights, x = parameters([256, 256]), torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1))
    plain, _ = step(inductor_options(off=[p.name for p in default_passes()]), weights, x)
    lowered, codes = step({"post_grad_custom_post_pass": Pipeline([LowerEvenGathers(backends=("gloo",))])}, weights, x)
    assert ".all_gather_into_tensor_out.default(" in codes[0] or ".all_gather_into_tensor.default(" in codes[0]
    assert ".all_gather_v.default(" not in codes[0]
    for a, b in zip(lowered, plain, strict=True):
        assert torch.equal(a, b)


@pytest.mark.ranks(2, timeout=300)
def test_a_shared_cache_of_compiled_code_serves_ranks_with_other_shards(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = [str(tmp_path)]
    dist.broadcast_object_list(folder)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", folder[0])
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1))
    for sizes in ([400, 112], [112, 400], [400, 112]):
        weights = parameters(sizes)
        passed, _ = step(inductor_options(), weights, x)
        whole = [w.detach().full_tensor().requires_grad_() for w in weights]
        reference = x
        for w in whole:
            reference = torch.tanh(reference @ w.mT)
        loss = reference.square().sum()
        loss.backward()
        torch.testing.assert_close(passed[0], loss.detach(), rtol=1e-4, atol=1e-4)
        for a, w in zip(passed[1:], whole, strict=True):
            torch.testing.assert_close(a, w.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.ranks(4, timeout=300)
def test_sizes_of_plain_inputs_that_differ_by_rank_do_not_change_the_plan() -> None:
    """Each rank has edges of its own in plain tensors, a few or many: more than all of its communication takes."""
    mesh, ranks, width = init_device_mesh("cpu", (world_size(),)), world_size(), 64
    sizes, edges = [200, 400, 600, 800], [[11_000, 70_000, 130_000, 190_000][r] for r in range(ranks)]
    first, count = sum(sizes[: rank()]), edges[rank()]
    draw = torch.Generator().manual_seed(rank())
    source = torch.randint(sum(sizes), (count,), generator=draw)
    target = torch.randint(sizes[rank()], (count,), generator=draw)
    whole = torch.randn(sum(sizes), width, generator=torch.Generator().manual_seed(7))
    weights = [(torch.eye(width) * (1 + i / 8)).requires_grad_() for i in range(LAYERS)]

    def layers(x: Any, source: Tensor, target: Tensor, weights: list[Tensor]) -> Any:
        def sums(everything: Tensor, shard: Tensor) -> Tensor:
            return torch.zeros_like(shard).index_add(0, target, everything.index_select(0, source))

        run = sc.local_map(sums, [Shard(0)])
        for weight in weights:
            everything = x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
            x = x + (x @ weight + run(everything, x) / 1000).relu()
        return x.square().mean()

    x = sc.distribute_tensor(whole, mesh, [Shard(0)], sharding_shapes={0: sizes}).requires_grad_()
    compiled = torch.compile(layers, fullgraph=True, dynamic=True, backend=graph_after_passes())
    compiled(x, source, target, weights).backward()

    full = whole.clone().requires_grad_()
    y = full
    all_edges = [gathered(source), gathered(target + first)]
    for weight in weights:
        detached = weight.detach()
        y = y + (y @ detached + torch.zeros_like(y).index_add(0, all_edges[1], y[all_edges[0]]) / 1000).relu()
    y.square().mean().backward()
    torch.testing.assert_close(x.grad.full_tensor(), full.grad, rtol=1e-3, atol=1e-7)


def gathered(numbers: Tensor) -> Tensor:
    """Those of all ranks."""
    found: list[Any] = [None] * world_size()
    dist.all_gather_object(found, numbers)
    return torch.cat(found)
