"""A warm start finds the compiled code of an earlier process in the compiler's caches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardcompile.compat import caches

PROGRAM = """
import json, sys, torch, torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.placement_types import Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
import shardcompile as sc

rank = int(sys.argv[1])
dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=3)
mesh = init_device_mesh("cpu", (3,))
torch.manual_seed(0)
weight = torch.randn(3, 4, requires_grad=True)
sizes = json.loads(sys.argv[2])
x = sc.ShardTensor.from_local(torch.ones(sizes[rank], 3), mesh, [Shard(0)], {0: sizes})
out = torch.compile(lambda x: x @ weight, fullgraph=True)(x)  # no kernel, so that no C++ is compiled
out.backward(torch.ones_like(out))
print("RESULT", json.dumps({k: v for k, v in counters["aot_autograd"].items() if "cache" in k}))
sys.stdout.flush()
import os; os._exit(0)
"""


def counted(rank: int, sizes: list[int], folder: Path) -> Any:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(folder)}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(rank), json.dumps(sizes)],
        capture_output=True,
        text=True,
        env=env,
        timeout=300,
    )
    lines = [line for line in run.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, run.stderr[-4000:]
    return json.loads(lines[0].removeprefix("RESULT"))


@pytest.mark.nightly
def test_a_second_process_hits_the_cache_and_another_rank_does_not_share_it(tmp_path: Path) -> None:
    cold = counted(0, [5, 0, 2], tmp_path)
    assert cold.get("autograd_cache_miss") == 1 and "autograd_cache_bypass" not in cold, cold
    warm = counted(0, [5, 0, 2], tmp_path)
    assert warm.get("autograd_cache_hit") == 1 and "autograd_cache_miss" not in warm, warm
    other_partition = counted(0, [1, 3, 3], tmp_path)
    assert other_partition.get("autograd_cache_hit") == 1 and "autograd_cache_miss" not in other_partition, (
        other_partition
    )
    other = counted(1, [5, 0, 2], tmp_path)
    assert other.get("autograd_cache_miss") == 1, other


def test_keys_tell_of_every_module_behind_a_link_too(tmp_path: Path) -> None:
    library, linked = tmp_path / "library", tmp_path / "linked"
    for folder in (library / "ops", linked / "cleanup"):
        folder.mkdir(parents=True)
    (library / "passes").symlink_to(linked)
    modules = {library / "ops" / "rule.py", library / "passes" / "pipeline.py", library / "passes" / "cleanup" / "m.py"}
    for path in modules:
        path.touch()
    assert caches.source_files(library) == sorted(modules)
