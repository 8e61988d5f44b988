"""Causal attention whose keys come a block at a time, against gathering them and against one rank with all rows."""

from __future__ import annotations

import argparse
import ctypes
import gc
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as nnf
from common import Call, Times, duration, median_times, print_table, ratio, run_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.placement_types import Replicate, Shard

import shardcompile as sc

HEADS, FEATURES = 8, 64


def peak_of(call: Call) -> int:
    """Bytes of memory that a call needs at its peak besides what was held before it, on the rank that needs most."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # freed memory that the allocator keeps would hide what is allocated
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    call()
    most = torch.tensor([_status("VmHWM") - before])
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most)


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def cut_of(ranks: int, rows: int, even: bool) -> list[int]:
    """Rows of each rank."""
    return (
        [rows * (r + 1) // ranks - rows * r // ranks for r in range(ranks)] if even else sc.balanced_cut([rows], ranks)
    )


def measure(ranks: int, rows: int, rounds: int, even: bool) -> tuple[Times, dict[str, int]]:
    """Median seconds of a forward and backward pass, compiled; bytes that a forward pass needs at its peak."""
    mesh = init_device_mesh("cpu", (ranks,))
    torch.manual_seed(0)
    full = [torch.randn(1, HEADS, rows, FEATURES) for _ in range(3)]
    sizes = cut_of(ranks, rows, even)
    cut = [sc.distribute_tensor(x, mesh, [Shard(2)], sharding_shapes={0: sizes}).requires_grad_() for x in full]
    whole = [x.requires_grad_() for x in full]

    def ring(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nnf.scaled_dot_product_attention(q, k, v, is_causal=True)

    def gathered(q: Any, k: Any, v: Any) -> Tensor:
        k, v = (x.redistribute(placements=[Replicate()]) for x in (k, v))
        return nnf.scaled_dot_product_attention(q, k, v, is_causal=True)

    def alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nnf.scaled_dot_product_attention(q, k, v, is_causal=True)

    def step(compiled: Any, inputs: list[Tensor], way: str) -> None:
        with sc.config.patch(attention=way):
            for x in inputs:
                x.grad = None
            compiled(*inputs).sum().backward()

    def forward(compiled: Any, inputs: list[Tensor], way: str) -> None:
        with sc.config.patch(attention=way):
            compiled(*inputs)

    ways = {"ring": (ring, cut), "gathered": (gathered, cut), "one rank": (alone, whole)}
    calls: dict[str, Call] = {}
    peaks: dict[str, int] = {}
    for name, (function, inputs) in ways.items():
        way = "ring" if name == "ring" else "gather"
        compiled = torch.compile(function, fullgraph=True, backend="shardcompile")
        calls[name] = partial(step, compiled, inputs, way)
        calls[name]()
        peaks[name] = peak_of(partial(forward, compiled, inputs, way))
    return median_times(calls, rounds), peaks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rows", type=int, nargs="+", default=[4096])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--even", action="store_true", help="equal blocks instead of balanced ones")
    options = parser.parse_args()
    lines = []
    for ranks in options.ranks:
        for rows in options.rows:
            times, peaks = run_ranks(measure, ranks, ranks, rows, options.rounds, options.even)
            ours, others = times["ring"], (times["gathered"], times["one rank"])
            block = max(cut_of(ranks, rows, options.even)) * HEADS * FEATURES * 2 * 4
            lines.append(
                [
                    *(str(ranks), str(rows), duration(ours)),
                    *(f"{duration(t)}  {ratio(ours, t)}" for t in others),
                    *(f"{peaks[name] / block:.1f}" for name in ("ring", "gathered")),
                ]
            )
    title = (
        "Causal attention: time of a ring, forward and backward, and of other ways with the ratio to them; what a\n"
        "forward pass needs at its peak besides its inputs, in the largest rank's block of keys and values"
    )
    columns = ("ranks", "rows", "ring", "keys gathered", "one rank, all rows", "memory: ring", "gathered")
    print_table(title, columns, lines)


if __name__ == "__main__":
    main()
