"""Threads of a program that call ops on sharded tensors and end."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

PROGRAM = """
import threading
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
import shardcompile as sc

dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
x = sc.ShardTensor.from_local(torch.ones(3, 2), init_device_mesh("cpu", (2,)), [Shard(0)], sharding_shapes={0: [3, 4]})
results = []
for _ in range(3):
    thread = threading.Thread(target=lambda: results.append((x + 1).to_local()))
    thread.start()
    thread.join()
held = [bytearray(1 << 16) for _ in range(64)]  # overwrites what ended threads have freed
with FakeTensorMode():
    torch.ones(2)
print([r.sum().item() for r in results])
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU torch keeps CUDA's own device guard")
def test_threads_end_before_the_main_thread_enters_a_fake_tensor_mode() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, "[12.0, 12.0, 12.0]"), done.stderr[-2000:]
