"""Causal attention over a sequence in uneven shards: torch's fused kernels on local shards, against products and one
rank.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as nnf
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.placement_types import Shard
from torch.nn.attention import SDPBackend, sdpa_kernel

import shardcompile as sc
from benchmarks.common import Call, Times, compare_over_rows, median_times, rising_shards

HEADS, FEATURES = 8, 64


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return nnf.scaled_dot_product_attention(q, k, v, is_causal=True)


def by_products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return nnf.scaled_dot_product_attention(q, k, v, is_causal=True)


def measure(ranks: int, rows: int, rounds: int) -> Times:
    """Median seconds of a forward and backward pass, compiled; shards rise evenly from rank to rank."""
    mesh = init_device_mesh("cpu", (ranks,))
    torch.manual_seed(0)
    full = [torch.randn(1, HEADS, rows, FEATURES) for _ in range(3)]
    sizes = rising_shards(rows, ranks)
    partition = [sc.distribute_tensor(x, mesh, [Shard(2)], sharding_shapes={0: sizes}).requires_grad_() for x in full]
    whole = [x.requires_grad_() for x in full]

    def step(compiled: Call, inputs: list[Tensor]) -> None:
        for x in inputs:
            x.grad = None
        compiled(*inputs).sum().backward()  # type: ignore[call-arg, attr-defined]

    def compiled(function: Call) -> Call:
        return torch.compile(function, fullgraph=True, backend="shardcompile")

    calls = {
        "shards": partial(step, compiled(attention), partition),
        "products": partial(step, compiled(by_products), partition),
        "one rank": partial(step, compiled(attention), whole),
    }
    return median_times(calls, rounds)


def main() -> None:
    title = "Causal attention, forward and backward: time on local shards, and other ways with the ratio to them"
    compare_over_rows(__doc__, measure, (1024, 4096), title, ("on local shards", "by products", "whole on one rank"))


if __name__ == "__main__":
    main()
