"""Causal attention over a sequence in uneven blocks: torch's fused kernels on blocks, against products and one rank."""

from __future__ import annotations

import argparse
from functools import partial

import torch
import torch.nn.functional as nnf
from common import Call, Times, duration, median_times, print_table, ratio, run_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.placement_types import Shard
from torch.nn.attention import SDPBackend, sdpa_kernel

import shardcompile as sc

HEADS, FEATURES = 8, 64


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return nnf.scaled_dot_product_attention(q, k, v, is_causal=True)


def by_products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return nnf.scaled_dot_product_attention(q, k, v, is_causal=True)


def measure(ranks: int, rows: int, rounds: int) -> Times:
    """Median seconds of a forward and backward pass, compiled; blocks rise evenly from rank to rank."""
    mesh = init_device_mesh("cpu", (ranks,))
    torch.manual_seed(0)
    full = [torch.randn(1, HEADS, rows, FEATURES) for _ in range(3)]
    ends = [rows * (r + 1) * (r + 2) // (ranks * (ranks + 1)) for r in range(ranks)]
    sizes = [b - a for a, b in zip([0, *ends], ends, strict=False)]
    cut = [sc.distribute_tensor(x, mesh, [Shard(2)], sharding_shapes={0: sizes}).requires_grad_() for x in full]
    whole = [x.requires_grad_() for x in full]

    def step(compiled: Call, inputs: list[Tensor]) -> None:
        for x in inputs:
            x.grad = None
        compiled(*inputs).sum().backward()  # type: ignore[call-arg, attr-defined]

    def compiled(function: Call) -> Call:
        return torch.compile(function, fullgraph=True, backend="shardcompile")

    calls = {
        "blocks": partial(step, compiled(attention), cut),
        "products": partial(step, compiled(by_products), cut),
        "one rank": partial(step, compiled(attention), whole),
    }
    return median_times(calls, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--rows", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    lines = []
    for ranks in options.ranks:
        for rows in options.rows:
            times = run_ranks(measure, ranks, ranks, rows, options.rounds)
            blocks, others = times.pop("blocks"), times
            against = [f"{duration(t)}  {ratio(blocks, t)}" for t in others.values()]
            lines.append([str(ranks), str(rows), duration(blocks), *against])
    print_table(
        "Causal attention, forward and backward: time on blocks, and other ways with the ratio to them",
        ["ranks", "rows", "on blocks", "by products", "whole on one rank"],
        lines,
    )


if __name__ == "__main__":
    main()
