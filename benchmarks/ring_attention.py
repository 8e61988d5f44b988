"""Attention whose keys come a shard at a time: measured against gathering them and against one rank with all rows
(causal); with `--traced`, how much of the transfer a schedule for GPUs hides (a layer of Llama's sizes)."""

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
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.placement_types import Replicate, Shard

import shardcompile as sc
from benchmarks.common import Call, Times, duration, median_times, print_table, ratio, run_ranks

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


def partition_of(ranks: int, rows: int, even: bool) -> list[int]:
    """Rows of each rank."""
    return (
        [rows * (r + 1) // ranks - rows * r // ranks for r in range(ranks)]
        if even
        else sc.balanced_partition([rows], ranks)
    )


def measure(ranks: int, rows: int, rounds: int, even: bool) -> tuple[Times, dict[str, int]]:
    """Median seconds of a forward and backward pass, compiled; bytes that a forward pass needs at its peak."""
    mesh = init_device_mesh("cpu", (ranks,))
    torch.manual_seed(0)
    full = [torch.randn(1, HEADS, rows, FEATURES) for _ in range(3)]
    sizes = partition_of(ranks, rows, even)
    partition = [sc.distribute_tensor(x, mesh, [Shard(2)], sharding_shapes={0: sizes}).requires_grad_() for x in full]
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

    ways = {"ring": (ring, partition), "gathered": (gathered, partition), "one rank": (alone, whole)}
    calls: dict[str, Call] = {}
    peaks: dict[str, int] = {}
    for name, (function, inputs) in ways.items():
        way = "ring" if name == "ring" else "gather"
        compiled = torch.compile(function, fullgraph=True, backend="shardcompile")
        calls[name] = partial(step, compiled, inputs, way)
        calls[name]()
        peaks[name] = peak_of(partial(forward, compiled, inputs, way))
    return median_times(calls, rounds), peaks


class Layer(nn.Module):
    """A transformer layer, 4,096 wide with 32 heads, and its loss: a number for rows [1, n, 4096]."""

    def __init__(self, key_heads: int) -> None:
        super().__init__()
        width, keys = 4096, 128 * key_heads
        sizes = {"q": (width, width), "k": (width, keys), "v": (width, keys), "o": (width, width)}
        sizes |= {"up": (width, 4 * width), "down": (4 * width, width)}
        self.maps = nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})

    def forward(self, x: Tensor) -> Tensor:
        normed = nnf.rms_norm(x, x.shape[-1:])
        q, k, v = (self.maps[name](normed).unflatten(-1, (-1, 128)).transpose(1, 2) for name in "qkv")
        found = nnf.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        x = x + self.maps["o"](found.transpose(1, 2).flatten(2))
        x = x + self.maps["down"](nnf.silu(self.maps["up"](nnf.rms_norm(x, x.shape[-1:]))))
        return x.float().square().mean()


def traced(ranks: int, rows: int, key_heads: int, uneven: bool) -> list[str]:
    """A line of the table of `--traced`. Seconds are predicted for GPUs of the default model, in bfloat16.

    Args:
        ranks: how many, in a world that is not there.
        rows: of each rank; in uneven shards 256 fewer, as many, and 256 more, by turns.
        key_heads: heads of keys and values.
        uneven: whether shards are uneven.
    """

    def build(mesh: DeviceMesh) -> Any:
        sizes = [rows + (256 * (r % 3 - 1) if uneven else 0) for r in range(ranks)]
        with torch.device(mesh.device_type):
            model, shard = Layer(key_heads).bfloat16(), torch.empty(1, sizes[0], 4096, dtype=torch.bfloat16)
        return model, (sc.ShardTensor.from_local(shard, mesh, [Shard(1)], {0: sizes}).requires_grad_(),)

    with sc.config.patch(attention="ring"):
        report = sc.explain(build, world_size=ranks, device="cuda")
    line = [str(ranks), str(rows), str(key_heads), "uneven" if uneven else "even"]
    for graph in report.graphs:
        shards = [c for c in graph.issued if c.kind in ("fetch_shard", "return_shard")]
        whole, waited = sum(c.seconds for c in shards), sum(c.exposed for c in shards)
        line += [duration(graph.compute), duration(whole), f"{1 - waited / whole:.1%}"]
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rows", type=int, nargs="+", default=[4096])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--even", action="store_true", help="equal shards instead of balanced ones")
    parser.add_argument("--traced", type=int, help="ranks of a world that is not there, for which a layer is traced")
    options = parser.parse_args()
    if options.traced:
        title = "A layer whose keys and values go around a ring: predicted compute and transfer, what of it is hidden"
        columns = ["ranks", "rows of a rank", "heads of keys", "shards"]
        columns += [f"{side}: {what}" for side in ("forward", "backward") for what in ("compute", "transfer", "hidden")]
        cases = [(heads, uneven) for heads in (8, 32) for uneven in (False, True)]
        print_table(title, columns, [traced(options.traced, 8192, *case) for case in cases])
        return
    lines = []
    for ranks in options.ranks:
        for rows in options.rows:
            times, peaks = run_ranks(measure, ranks, ranks, rows, options.rounds, options.even)
            ours, others = times["ring"], (times["gathered"], times["one rank"])
            shard = max(partition_of(ranks, rows, options.even)) * HEADS * FEATURES * 2 * 4
            lines.append(
                [
                    *(str(ranks), str(rows), duration(ours)),
                    *(f"{duration(t)}  {ratio(ours, t)}" for t in others),
                    *(f"{peaks[name] / shard:.1f}" for name in ("ring", "gathered")),
                ]
            )
    title = (
        "Causal attention: time of a ring, forward and backward, and of other ways with the ratio to them; what a\n"
        "forward pass needs at its peak besides its inputs, in the largest rank's shard of keys and values"
    )
    columns = ["ranks", "rows", "ring", "keys gathered", "one rank, all rows", "memory: ring", "gathered"]
    print_table(title, columns, lines)


if __name__ == "__main__":
    main()
