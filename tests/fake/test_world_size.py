"""What must not depend on the world size, or on the rank: traced offline, on the fake process group."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.tensor.placement_types import Shard
from torch.fx import GraphModule

import shardcompile as sc
from examples.poisson.model import PointTransformer, mean_squared_error
from shardcompile.inspect.offline import offline_world


def traced(rank: int, world_size: int) -> list[list[str]]:
    """The ops of each graph that three layouts need, and how many symbols it takes."""
    graphs: list[list[str]] = []

    def keep(module: GraphModule, inputs: list[object]) -> GraphModule:
        ops = [str(n.target) for n in module.graph.nodes if n.op == "call_function"]
        graphs.append([*ops, f"{sum(isinstance(i, torch.SymInt) for i in inputs)} symbols"])
        return module

    torch.manual_seed(0)
    model = PointTransformer(channels=16, heads=2, slices=4, layers=1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        moved = x.redistribute(placements=[Shard(1)]).redistribute(placements=[Shard(0)])  # type: ignore[attr-defined]
        return mean_squared_error(model(moved), y)

    with offline_world(world_size, rank=rank, device="cpu") as world:
        mesh = world.mesh
        compiled = torch.compile(step, fullgraph=True, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep))
        for size in (3, 5, 4):
            sizes = [(size * (r + 1)) % 7 for r in range(world_size)]
            x, y = (
                sc.ShardTensor.from_local(torch.randn(sizes[rank], *columns), mesh, [Shard(0)], {0: sizes})
                for columns in ((5,), ())
            )
            compiled(x, y).backward()
    return graphs


def test_graphs_are_the_same_at_any_world_size_and_on_any_rank() -> None:
    small, large = traced(0, 4), traced(1023, 1024)
    assert len(small) == 2  # one forward and one backward for three layouts
    assert any("all_to_all_v" in target for target in small[0])
    assert small == large  # the same ops, and no symbol more
