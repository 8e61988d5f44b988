"""What must not depend on the world size, or on the rank: traced on the fake process group, each in its own process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

PROGRAM = """
import json, sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.placement_types import Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
import shardcompile as sc
from shardcompile.demo.model import PointTransformer, mean_squared_error

rank, world = int(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
mesh = init_device_mesh("cpu", (world,))
torch.manual_seed(0)
model = PointTransformer(channels=16, heads=2, slices=4, layers=1)
graphs = []

def keep(gm, inputs):
    graphs.append([str(n.target) for n in gm.graph.nodes if n.op == "call_function"])
    graphs[-1].append(sum(isinstance(i, torch.SymInt) for i in inputs))
    return gm

def step(x, y):
    moved = x.redistribute(placements=[Shard(1)]).redistribute(placements=[Shard(0)])
    return mean_squared_error(model(moved), y)

compiled = torch.compile(step, fullgraph=True, backend=torch._dynamo.backends.common.aot_autograd(
    fw_compiler=keep, bw_compiler=keep))
for extent in (3, 5, 4):
    sizes = [(extent * (r + 1)) % 7 for r in range(world)]
    x = sc.ShardTensor.from_local(torch.randn(sizes[rank], 5), mesh, [Shard(0)], {0: sizes})
    y = sc.ShardTensor.from_local(torch.randn(sizes[rank]), mesh, [Shard(0)], {0: sizes})
    compiled(x, y).backward()
print("RESULT", json.dumps(graphs))
sys.stdout.flush()
import os; os._exit(0)
"""


def traced(rank: int, world: int) -> Any:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(rank), str(world)], capture_output=True, text=True, env=env, timeout=300
    )
    lines = [line for line in run.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, run.stderr[-4000:]
    return json.loads(lines[0].removeprefix("RESULT"))


def test_graphs_are_the_same_at_any_world_size_and_on_any_rank() -> None:
    small, first, last = traced(0, 4), traced(0, 1024), traced(1023, 1024)
    assert len(small) == 2  # one forward and one backward for three layouts
    assert any("all_to_all_v" in str(target) for target in small[0])
    assert small == first  # the same ops, and no symbol more
    assert first == last
