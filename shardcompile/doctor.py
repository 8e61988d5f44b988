"""``python -m shardcompile doctor``: what of torch is changed or set here, and whether a compiled step is right.

It needs no GPU, no network and no other process.
"""

from __future__ import annotations

import platform
import textwrap
from collections.abc import Iterator
from importlib import metadata

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Shard

from shardcompile.compat.fingerprints import KNOWN_VERSIONS, is_known
from shardcompile.compat.patch import UNFIT, state_of
from shardcompile.compat.patches import all_patches
from shardcompile.compat.settings import SETTINGS
from shardcompile.compat.unfit import try_all
from shardcompile.tensor.core import ShardTensor
from shardcompile.testing import LocalRanks, rank

_PACKAGES = ("sympy", "numpy", "depyf", "triton")


def report() -> tuple[str, bool]:
    """Returns the report, and whether the compiled step was right and one graph."""
    backends = [*_backends()]  # ranks in one process have one of their own
    step, is_right = _compiled_step()
    try_all()
    parts = [*_versions(), "", *backends, "", f"compiled step: {step}", "", *_settings(), "", *_patches()]
    return "\n".join(parts), is_right


def _versions() -> Iterator[str]:
    yield f"torch {torch.__version__}, Python {platform.python_version()}, {platform.platform()}"
    known = f"{KNOWN_VERSIONS[0]} to {KNOWN_VERSIONS[-1]}"
    yield f"known versions of torch: {known}" + ("" if is_known() else "; this one is newer")
    for name in _PACKAGES:
        try:
            yield f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            yield f"{name}: not installed"


def _backends() -> Iterator[str]:
    if not dist.is_available():
        yield "torch.distributed is not available"
        return
    found = [name for name in dist.Backend.backend_list if dist.is_backend_available(name)]
    yield "backends: " + ", ".join(name for name in found if name != dist.Backend.UNDEFINED)
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    yield "devices: " + ", ".join(["cpu", *gpus])


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.norm(self.first(x)).relu())
        return out - out.mean(0)


def _compiled_step() -> tuple[str, bool]:
    torch.manual_seed(0)
    model, graphs = _Model().double(), 0

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        nonlocal graphs
        graphs += 1
        return torch._dynamo.lookup_backend("shardcompile")(graph, inputs)

    run = torch.compile(model, fullgraph=True, backend=backend)
    try:
        with LocalRanks(3, processes=False) as ranks:
            ranks(_step, model, run)
    except Exception as error:
        return f"FAILED, {type(error).__name__}: {error}", False
    if graphs != 1:
        return f"values are right, but {graphs} graphs were compiled for three partitions", False
    return "right, forward and backward, on 3 ranks in one process; one graph for three partitions", True


def _step(mesh: DeviceMesh, model: nn.Module, run: nn.Module) -> None:
    full = torch.linspace(-1, 1, 21, dtype=torch.float64).reshape(7, 3)
    for sizes in ([4, 1, 2], [0, 7, 0], [2, 3, 2]):
        plain = full.clone().requires_grad_()
        shard = full.split(sizes)[rank()].clone().requires_grad_()
        x = ShardTensor.from_local(shard, mesh, [Shard(0)], {0: sizes})
        out, expected = run(x), model(plain)
        torch.testing.assert_close(out.full_tensor(), expected)
        out.square().sum().backward()
        (gradient,) = torch.autograd.grad(expected.square().sum(), plain)
        torch.testing.assert_close(shard.grad, gradient.split(sizes)[rank()])


def _settings() -> Iterator[str]:
    yield "Settings of torch while a graph of sharded tensors is compiled:"
    for name, reason in SETTINGS:
        yield f"  {name}"
        yield textwrap.indent(textwrap.fill(reason, 112), "    ")


def _patches() -> Iterator[str]:
    patches = all_patches()
    needed = [p for p in patches if p.is_needed]
    yield f"Changes to torch: {len(needed)} are for this version, of {len(patches)}."
    for patch in patches:
        state = state_of(patch)
        why = f": {UNFIT[patch.name]}" if patch.name in UNFIT else ""
        yield f"  {patch.name} ({patch.kind}): {state}{why}"
        if state == "left out":
            yield textwrap.indent(textwrap.fill(f"Without it: {patch.reason}", 112), "    ")
