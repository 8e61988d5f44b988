"""How long 64 GPUs wait for rows that go where data says: experts and graph networks, traced and simulated.

    python -m benchmarks.rows_at_scale [--only NAME ...] [--layers N]

Needs neither ranks nor a GPU: graphs are for CUDA, costs those of H100s, eight in a node. Experts are layers of a
decoder on 8,192 tokens a GPU, in bfloat16. Their weights lie over the 8 GPUs of a node or over all 64, those of the
attention on each GPU. Over 64, rows go straight, or between nodes first and then within, and tokens may be routed in
parts. What data parallelism adds up over the nodes is not in the graphs. A graph network is a MeshGraphNet on 16,384
nodes a GPU, in float32, whose links were made before. Edges lie with their targets. A rank of a surface (2-D) asks for
512 rows of others, one of a volume (3-D) for 3,872, as shards of that size do.

`exposed` is the part of the predicted time in which a GPU has nothing to do, without passes and with them.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Shard

import shardcompile as sc
from benchmarks.common import duration, print_table, ratio
from shardcompile.inspect.offline import offline_world, trace_step
from shardcompile.passes import CostModel, GraphCosts, Pipeline, simulate

RANKS, NODE = 64, 8
BAR = 0.15
BF16 = torch.bfloat16


# -------------------------------------------------------------------------------------------- experts


@dataclass(frozen=True)
class Shape:
    """Of a decoder with experts: widths, how many experts there are, and how many a token goes to."""

    width: int
    hidden: int
    experts: int
    copies: int
    tokens: int = 8192
    sequence: int = 4096


MIXTRAL, OLMOE = Shape(4096, 14336, 8, 2), Shape(2048, 1024, 64, 8)


class ExpertLayer(nn.Module):
    """Attention within sequences, then the experts that a gate chooses; the experts lie on the ranks of a mesh."""

    def __init__(self, shape: Shape, mesh: DeviceMesh, parts: int = 1) -> None:
        super().__init__()
        self.parts = parts
        self.shape, self.own, width = shape, shape.experts // mesh.size(), shape.width
        self.rows = [Shard(0)] * mesh.ndim
        self.norms = nn.ModuleList(nn.RMSNorm(width, dtype=BF16) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width, False, dtype=BF16), nn.Linear(width, width, False, dtype=BF16)
        self.gate = nn.Linear(width, shape.experts, False, dtype=BF16)
        self.up = nn.Parameter(torch.randn(self.own, width, 2 * shape.hidden, dtype=BF16))
        self.down = nn.Parameter(torch.randn(self.own, shape.hidden, width, dtype=BF16))

    def _experts(self, rows: Tensor, numbers: Tensor, up: Tensor, down: Tensor) -> Tensor:
        order = numbers.argsort(stable=True)
        counts = numbers.new_zeros(self.own).scatter_add(0, numbers, torch.ones_like(numbers))
        ends = counts.cumsum(0).int()
        gate, value = torch._grouped_mm(rows.index_select(0, order), up, offs=ends).chunk(2, -1)
        out = torch._grouped_mm(F.silu(gate) * value, down, offs=ends)
        return torch.zeros_like(out).index_copy(0, order, out)

    def forward(self, x: Any) -> Any:
        """x: [sequences, rows, width], sharded along dim 0."""
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, -1, 128)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return torch.cat([self._routed(part) for part in x.chunk(self.parts, 1)], 1)

    def _routed(self, x: Any) -> Any:
        h = self.norms[1](x).flatten(0, 1)
        weights, numbers = self.gate(h).float().softmax(-1).topk(self.shape.copies)
        rows, own, route = sc.route_rows(h, numbers // self.own, each=[numbers % self.own])
        run = sc.local_map(lambda r, n: self._experts(r, n, self.up, self.down), self.rows)
        return x + route.combine(run(rows, own), weights=weights.to(BF16)).view_as(x)


def experts(shape: Shape, mesh: DeviceMesh, layers: int, parts: int = 1) -> tuple[nn.Module, tuple[Any, ...]]:
    batch, rows = shape.tokens // shape.sequence, [Shard(0)] * mesh.ndim
    model = nn.Sequential(*(ExpertLayer(shape, mesh, parts) for _ in range(layers)))
    shard = torch.randn(batch, shape.sequence, shape.width, dtype=BF16)
    return model, (sc.ShardTensor.from_local(shard, mesh, rows, {0: [batch] * mesh.size()}),)


# --------------------------------------------------------------------------------------------- graphs

NODES, EDGES, CHANNELS = 16_384, 6 * 16_384, 128


def perceptron(features: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(features, CHANNELS), nn.SiLU(), nn.Linear(CHANNELS, CHANNELS), nn.LayerNorm(CHANNELS)
    )


class MeshLayer(nn.Module):
    """A MeshGraphNet's: edges from their ends, nodes from the sums of their edges."""

    def __init__(self) -> None:
        super().__init__()
        self.edge, self.node = perceptron(3 * CHANNELS), perceptron(2 * CHANNELS)

    def forward(self, x: Any, e: Any, sources: sc.GatherPlan, targets: sc.GatherPlan) -> tuple[Any, Any]:
        e = e + self.edge(torch.cat([e, sources.gather(x), targets.gather(x)], -1))
        return x + self.node(torch.cat([x, targets.scatter_add(e)], -1)), e


class MeshNet(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MeshLayer() for _ in range(layers))

    def forward(self, x: Any, e: Any, *parts: Tensor) -> Any:
        sources, targets = sc.GatherPlan(*parts[:5]), sc.GatherPlan(*parts[5:])
        for layer in self.layers:
            x, e = layer(x, e, sources, targets)
        return x.square().mean()


def links(mesh: DeviceMesh, boundary: int) -> sc.GatherPlan:
    """As `plan_gather` makes them where each rank asks others for so many rows. Edges lie with their targets."""

    def numbers(rows: int) -> Any:
        shard = torch.zeros(rows, dtype=torch.int64)
        return sc.ShardTensor.from_local(shard, mesh, [Shard(0)], {0: [rows] * mesh.size()})

    asked = torch.zeros(mesh.size(), mesh.size(), dtype=torch.int64, device="cpu")
    return sc.GatherPlan(numbers(NODES), asked, numbers(boundary), numbers(boundary), numbers(EDGES))


def mesh_net(boundary: int, mesh: DeviceMesh, layers: int) -> tuple[nn.Module, tuple[Any, ...]]:
    def rows(count: int) -> Any:
        return sc.ShardTensor.from_local(torch.randn(count, CHANNELS), mesh, [Shard(0)], {0: [count] * mesh.size()})

    return MeshNet(layers), (rows(NODES), rows(EDGES), *links(mesh, boundary), *links(mesh, 0))


# --------------------------------------------------------------------------------------------- tables

Build = Callable[[DeviceMesh, int], tuple[nn.Module, tuple[Any, ...]]]

MODELS: dict[str, tuple[Build, tuple[int, ...]]] = {
    "Mixtral 8x7B, experts over a node": (partial(experts, MIXTRAL), (NODE,)),
    "OLMoE, experts over a node": (partial(experts, OLMOE), (NODE,)),
    "OLMoE, experts over 64 GPUs": (partial(experts, OLMOE), (RANKS,)),
    "OLMoE, experts over 64 GPUs, by nodes": (partial(experts, OLMOE), (RANKS // NODE, NODE)),
    "OLMoE, the same, tokens in four parts": (partial(experts, OLMOE, parts=4), (RANKS // NODE, NODE)),
    "MeshGraphNet, surface": (partial(mesh_net, 512), (RANKS,)),
    "MeshGraphNet, volume": (partial(mesh_net, 3872), (RANKS,)),
}
"""What is built, and the mesh along which its rows travel."""


def predicted(build: Build, over: tuple[int, ...], layers: int, pipeline: Pipeline) -> tuple[float, float]:
    """Seconds of a step, and those in which the GPU waits."""
    names = ("nodes", "rows")[-len(over) :]
    shape = (RANKS // math.prod(over), *over)
    with offline_world(RANKS, mesh_shape=shape, mesh_dim_names=("copy", *names)) as world:
        trace = trace_step(world, lambda mesh: build(mesh[names], layers), pipeline=pipeline)
        total = exposed = 0.0
        for module in (trace.forward, trace.backward):
            assert module is not None
            graph = module.graph
            timeline = simulate(list(graph.nodes), GraphCosts.of(graph, CostModel.of(graph)))
            total, exposed = total + timeline.total, exposed + timeline.exposed
    return total, exposed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--layers", type=int, default=2)
    options = parser.parse_args()
    lines = []
    for name in options.only:
        cells = [name]
        # With control dependencies, waits are hidden, and so what they cost.
        for pipeline in (Pipeline([]), Pipeline(off=["add_control_dependencies"])):
            total, exposed = predicted(*MODELS[name], options.layers, pipeline)
            cells += [duration(total), ratio(exposed, total, BAR)]
        lines.append(cells)
    print_table(
        f"a step of {options.layers} layers on {RANKS} GPUs, predicted",
        ["", "without passes", "exposed", "with passes", "exposed"],
        lines,
    )


if __name__ == "__main__":
    main()
