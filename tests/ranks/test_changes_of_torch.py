"""What of torch is replaced, and when: nothing by an import, little by a tensor, and what patches say by a compilation."""

from __future__ import annotations

import subprocess
import sys
import textwrap

START = """
import sys
import torch, torch.distributed as dist
import torch._inductor.compile_fx, torch._inductor.codecache, torch.distributed.fsdp, torch.distributed.tensor.debug
import torch.distributed.checkpoint.state_dict
from tests.support.torch_walk import replaced, snapshot
"""

IMPORT = """
# All that the import loads of torch is loaded before.
import subprocess
code = "import sys, shardcompile; print(*(n for n in sys.modules if n.startswith('torch')))"
for name in subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split():
    try:
        __import__(name)
    except ImportError:
        pass
before = snapshot()
assert len(before) > 50_000
import shardcompile
found = replaced(before, snapshot())
assert not found, found
"""

TENSOR = """
import shardcompile as sc
from shardcompile.testing import LocalRanks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Shard

import shardcompile.testing.one_process
found, names = [], []

def ranks_alone(mesh):
    pass

def eager(mesh):
    shard = torch.ones(mesh.get_local_rank() + 1, 3, requires_grad=True)
    x = sc.ShardTensor.from_local(shard, mesh, [Shard(0)])
    (x @ torch.ones(3, 2)).softmax(0).sum().backward()
    sc.ones(7, 3, device_mesh=mesh, placements=[Shard(0)]).full_tensor()

OF_TORCH_2_11 = set()
if torch.__version__.startswith("2.11."):
    OF_TORCH_2_11 = {"torch._functorch._aot_autograd.schemas.SubclassCreationMeta.compute_outer_size_and_stride"}
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
before = snapshot()
eager(mesh)
found = replaced(before, snapshot())
assert found == {
    "torch.distributed.tensor.DTensor.__init__",
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam.__init__",
    "torch.Tensor.data",
    "torch.distributed._state_dict_utils._iterate_state_dict",
    "torch.distributed.checkpoint.state_dict._state_dict_fn",
    "torch.distributed.tensor.debug.CommDebugMode.__torch_dispatch__",
} | OF_TORCH_2_11, found
"""

COMPILATION = """
import shardcompile as sc
from shardcompile.compat import patch
from shardcompile.compat.patches import all_patches
from torch.distributed.tensor.placement_types import Shard
from torch.fx.experimental.symbolic_shapes import ShapeEnv

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
make = lambda n: sc.ShardTensor.from_local(torch.ones(n, 3, requires_grad=True), mesh, [Shard(0)])
make(2)
during = []

def look(graph):
    during.append(snapshot())

# What Inductor loads, and sets for the process, when it compiles for the first time.
torch.compile(lambda x: x.sin().sum(), backend="inductor")(torch.ones(3, requires_grad=True)).backward()
options = {"post_grad_custom_post_pass": None}
before = snapshot()
patched = patch.fingerprints_of(all_patches(), ShapeEnv)
torch._inductor.config.post_grad_custom_post_pass = look
torch.compile(lambda x: (x @ torch.ones(3, 2)).softmax(0).sum().full_tensor(), fullgraph=True)(make(3)).backward()
torch._inductor.config.post_grad_custom_post_pass = None
assert len(during) == 2
last = lambda name: name.rpartition(".")[2]
stated = {last(name) for name in patched}
for seen in during:
    found = replaced(before, seen)
    assert found and {last(name) for name in found} <= stated, {n for n in found if last(n) not in stated}
left = replaced(before, snapshot())
stay = {
    "_WaitKernel.get_volatile_reads", "Scheduler.should_partition", "Scheduler.graph_partition",
    "Scheduler.maybe_reorder_for_minimizing_partition", "Scheduler.reorder_for_partition_with_simple_dependency",
    "output_code.maybe_handle_backward_generation", "output_code.complex_memory_overlap",
    "Grid2DWithYZOverflow.generate",
}
assert {".".join(n.split(".")[-2:]) for n in left} <= stay, left
"""


def _run(code: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(START) + code], capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr[-3000:]


def test_an_import_replaces_nothing() -> None:
    _run(IMPORT)


def test_six_attributes_with_the_first_tensor() -> None:
    _run(TENSOR)


def test_a_compilation_replaces_what_patches_state() -> None:
    """And puts back all but what cached code needs when it is loaded or run."""
    _run(COMPILATION)
