"""Predicted against measured time of a training step, ten models, on gloo.

    python -m benchmarks.predictions [--only points mlp] [--rounds 15] [--calibration FILE]

Forward and backward pass, compiled with the passes. What the machine can do is measured first, on the same ranks
(`passes/cost/calibrate.py`), or read from a file that an earlier run has written. Predictions are those that `explain`
prints; they are made when a model is compiled, before it is timed. The fastest of all rounds counts, as it does when
the machine is measured: other work only ever adds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as nnf
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.placement_types import Replicate, Shard

import shardcompile as sc
from benchmarks.common import duration, print_table, run_ranks
from benchmarks.experts import EXPERTS, HIDDEN, WIDTH, routed
from benchmarks.graphs import linked, parameters, sheet
from examples.poisson.model import PointTransformer, relative_l2
from shardcompile.machines import Device
from shardcompile.passes import CostModel, inductor_options
from shardcompile.passes.cost.calibrate import load_device, measure_device, save

BAR_MEDIAN, BAR_WORST = 0.20, 0.40

Built = tuple[Callable[..., Any], tuple[Any, ...]]
"""What gives a loss, and its arguments; parameters are among these, or in the function."""


def shards(rows: int, ranks: int) -> list[int]:
    """Uneven sizes: the first shard has three parts where the others have four."""
    first = 3 * rows // (4 * ranks - 1)
    rest = rows - first
    return [first, *(rest // (ranks - 1) + (r < rest % (ranks - 1)) for r in range(ranks - 1))]


def partition(x: Tensor, mesh: DeviceMesh, dim: int = 0) -> Any:
    """A full value in uneven shards along a dim."""
    sizes = shards(x.shape[dim], mesh.size())
    return sc.distribute_tensor(x, mesh, [Shard(dim)], sharding_shapes={0: sizes})


# ------------------------------------------------------------------------------------------------ models


class LinearAttention(nn.Module):
    """Attention that is linear in the rows, with a residual. [n, C] -> [n, C]."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads, self.take, self.give = heads, nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(0, 1) for t in self.take(x).chunk(3, -1))
        y = q.softmax(-1) @ (k.softmax(1).transpose(1, 2) @ v)
        result: Tensor = x + self.give(y.transpose(0, 1).flatten(1))
        return result


def linear_attention(mesh: DeviceMesh) -> Built:
    net = nn.Sequential(*(LinearAttention(64, 4) for _ in range(3)))
    return lambda x: net(x).square().mean(), (partition(torch.randn(8192, 64), mesh),)


def mlp(mesh: DeviceMesh) -> Built:
    layers = (nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(3))
    net = nn.Sequential(*layers)
    return lambda x: net(x).square().mean(), (partition(torch.randn(2048, 256), mesh),)


def points(mesh: DeviceMesh) -> Built:
    net = PointTransformer()
    x, target = partition(torch.randn(11376, 5), mesh), partition(torch.randn(11376), mesh)
    return lambda x, y: relative_l2(net(x), y), (x, target)


def weights(mesh: DeviceMesh) -> Built:
    held = [nn.Parameter(partition(torch.randn(512, 512) / 512**0.5, mesh)) for _ in range(8)]

    def loss(x: Any, *held: Any) -> Tensor:
        for w in held:
            x = torch.tanh(x @ w.full_tensor().mT)
        return x.square().mean()

    return loss, (partition(torch.randn(1024, 512), mesh), *held)


def parallel_products(mesh: DeviceMesh) -> Built:
    """Hidden features sharded: what a rank has of them is added up over the ranks."""
    held = [nn.Parameter(partition(torch.randn(1024, 256) / 16, mesh)) for _ in range(4)]
    back = [nn.Parameter(partition(torch.randn(256, 1024) / 32, mesh, 1)) for _ in range(4)]

    def loss(x: Any, *held: Any) -> Tensor:
        for first, second in zip(held[:4], held[4:], strict=True):
            x = x + nnf.gelu(x @ first.mT) @ second.mT
        return x.square().mean()

    x = sc.distribute_tensor(torch.randn(1024, 256), mesh, [Replicate()])
    return loss, (x, *held, *back)


def sequence(mesh: DeviceMesh) -> Built:
    """Causal attention along a sequence sharded."""
    qkv = [partition(torch.randn(1, 8, 2048, 64), mesh, 2).requires_grad_() for _ in range(3)]
    return lambda q, k, v: nnf.scaled_dot_product_attention(q, k, v, is_causal=True).square().mean(), tuple(qkv)


def encoder(mesh: DeviceMesh) -> Built:
    """Transformer layers; the batch is sharded."""
    layers = (nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True) for _ in range(2))
    net = nn.Sequential(*layers)
    return lambda x: net(x).square().mean(), (partition(torch.randn(14, 128, 128), mesh),)


def image(mesh: DeviceMesh) -> Built:
    """Convolutions over an image whose rows are sharded."""
    convolutions = (nn.Conv2d(32, 32, 3, padding=1) for _ in range(3))
    net = nn.Sequential(*(part for c in convolutions for part in (c, nn.ReLU())))
    return lambda x: net(x).square().mean(), (partition(torch.randn(1, 32, 192, 128), mesh, 2),)


def mesh_network(mesh: DeviceMesh) -> Built:
    """Messages along the edges of a sheet whose nodes are sharded."""
    source, target = sheet(100, 80)
    x = partition(torch.randn(8000, 64), mesh)
    ends = torch.tensor(shards(8000, mesh.size())).cumsum(0)
    edges = torch.bincount(torch.bucketize(target, ends, right=True), minlength=mesh.size()).tolist()
    parts = [sc.distribute_tensor(e, mesh, [Shard(0)], sharding_shapes={0: edges}) for e in (source, target)]
    return linked, (x, *(sc.plan_gather(x, part) for part in parts), parameters(64))


def experts(mesh: DeviceMesh) -> Built:
    """Tokens that go where a gate sends them."""
    on_rank = EXPERTS // mesh.size()
    gate, first, second = (
        (torch.randn(*shape) / 16).bfloat16().requires_grad_()
        for shape in ((WIDTH, EXPERTS), (on_rank, WIDTH, HIDDEN), (on_rank, HIDDEN, WIDTH))
    )
    x = partition(torch.randn(1024, WIDTH).bfloat16(), mesh)
    return lambda *a: routed(*a).float().square().mean(), (x, gate, torch.zeros(EXPERTS), first, second)


MODELS: dict[str, Callable[[DeviceMesh], Built]] = {
    "3 linear-attention layers, 8,192 rows": linear_attention,
    "3 wide pairs of layers, 2,048 rows": mlp,
    "the demo's model, 11,376 points": points,
    "8 layers with weights of 512 sharded": weights,
    "4 pairs of layers, hidden features sharded": parallel_products,
    "causal attention over 2,048 rows sharded": sequence,
    "2 transformer layers, 14 texts of 128": encoder,
    "3 convolutions over 192 rows sharded": image,
    "4 graph layers on 8,000 nodes": mesh_network,
    "16 experts, 1,024 tokens": experts,
}

# ----------------------------------------------------------------------------------------------- measuring


def _leaves(values: Iterable[object]) -> list[Tensor]:
    flat = torch.utils._pytree.tree_leaves(list(values))
    return [t for t in flat if isinstance(t, Tensor) and t.requires_grad]


def compare(
    build: Callable[[DeviceMesh], Built], mesh: DeviceMesh, model: CostModel, rounds: int
) -> tuple[float, float]:
    """Seconds of a step of a model, predicted and measured."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    loss, arguments = build(mesh)
    leaves = _leaves(arguments)
    compiled = torch.compile(loss, fullgraph=True, options=inductor_options(model=model))

    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        compiled(*arguments).backward()

    with sc.capture(stages=(), model=model) as report:
        step()
    predicted = sum(g.total for g in report.graphs)
    return predicted, fastest(step, rounds)


def fastest(step: Callable[[], None], rounds: int) -> float:
    """Seconds of the fastest of many rounds, of each the slowest rank: other work on the machine only ever adds."""
    times = torch.zeros(rounds, dtype=torch.float64)
    for r in range(rounds):
        dist.barrier()
        start = time.perf_counter()
        step()
        times[r] = time.perf_counter() - start
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return float(times.min())


def measure(names: list[str], calibration: str, rounds: int) -> list[tuple[str, float, float]]:
    """Of each model its name and the seconds of a step, predicted and measured, on one rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if calibration and Path(calibration).exists():
        device = load_device(calibration)
    else:
        device = measure_device()
        if calibration and dist.get_rank() == 0:
            save(device, calibration)
    if dist.get_rank() == 0:
        print(_described(device), flush=True)
    found = []
    for name in names:
        predicted, measured = compare(MODELS[name], mesh, CostModel(device), rounds)
        found.append((name, predicted, measured))
        if dist.get_rank() == 0:
            print(f"{name}: {duration(predicted)}, {duration(measured)}", flush=True)
    return found


def _described(device: Device) -> str:
    link, rate = device.intra, device.flops[torch.float32] / 1e9
    return (
        f"a core: {rate:.0f} GFLOP/s, {device.memory / 1e9:.0f} GB/s, exp {1e9 * device.element:.2f} ns, a kernel "
        f"{duration(device.kernel)}, a graph {duration(device.call)}; a collective: {duration(link.latency(2))}, "
        f"{duration(link.host)} of it to start, {link.bandwidth / 1e9:.2f} GB/s, {link.busy:.0%} of that by these cores"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="models whose names hold one of these words")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--calibration", default="", help="file that says what the machine can do, or will")
    options = parser.parse_args()
    names = [name for name in MODELS if any(word in name for word in options.only)]
    found = run_ranks(measure, 2, names, options.calibration, options.rounds)
    rows = [[name, duration(p), duration(m), f"{p / m:.2f}"] for name, p, m in found]
    print_table("a step on 2 gloo ranks", ["model", "predicted", "measured", "predicted to measured"], rows)
    errors = sorted(abs(p / m - 1) for _, p, m in found)
    for what, error, bar in (("median", statistics.median(errors), BAR_MEDIAN), ("worst", errors[-1], BAR_WORST)):
        print(f"{what} error {error:.0%} {'ok' if error <= bar else 'OVER'} (bar {bar:.0%})")


if __name__ == "__main__":
    main()
