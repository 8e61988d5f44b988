"""Inductor's code for GPUs of random programs, made without a GPU.

    python -m tools.gpu_code [--programs 20] [--seed 0] [--backend inductor] [--cuda-graphs]

Needs a build of torch with CUDA, and Triton; neither a GPU nor its driver. Programs are those of `fuzz`. Each is compiled
for an H100 from fake inputs, as each of its ranks, up to the first call of the code, which cannot run. What is found are
errors of the compiler: values are compared on a GPU (``FUZZ_DEVICE=cuda python -m tools.fuzz``).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import re
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # before torch is imported

import torch

from shardcompile.compat import offline as fakes
from shardcompile.errors import ShardError
from shardcompile.inspect.offline import offline_world, trace
from tools import fuzz, fuzz_lines

H100: dict[str, Any] = {
    "multi_processor_count": 132,
    "regs_per_multiprocessor": 65536,
    "max_threads_per_multi_processor": 2048,
    "warp_size": 32,
    "major": 9,
}

FACTORY = re.compile(r"(torch\.(?:tensor|arange|ones|zeros|full|eye|empty|linspace)\()((?:[^()]|\([^()]*\))*)\)")
"""Makes a tensor in a line of a program."""


class _Driver:
    """Triton's view of the GPU."""

    def get_current_target(self) -> object:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)


@contextlib.contextmanager
def pretended_h100() -> Iterator[None]:
    """Inside of it Inductor makes code for an H100, and compiles no kernel."""
    import triton
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import async_compile, config, scheduler
    from torch._inductor.runtime.hints import DeviceProperties
    from torch.utils import _triton

    properties = SimpleNamespace(
        name="H100", minor=0, total_memory=1 << 36, L2_cache_size=1 << 25, shared_memory_per_block_optin=232448, **H100
    )
    found = DeviceProperties(type="cuda", index=0, cc=90, **H100)
    kernel = SimpleNamespace(run=lambda *args, **kwargs: None)
    triton.runtime.driver.set_active(_Driver())
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (async_compile.AsyncCompile, "triton", lambda self, *args, **kwargs: kernel),
            (DeviceProperties, "create", classmethod(lambda cls, device: found)),
            (torch.cuda, "get_device_properties", lambda *args: properties),
            (torch.cuda, "get_device_capability", lambda *args: (9, 0)),
            (CudaInterface.Worker, "get_device_properties", staticmethod(lambda *args: properties)),
            (CudaInterface, "get_compute_capability", staticmethod(lambda *args: 90)),
            (CudaInterface, "is_triton_capable", staticmethod(lambda *args: True)),
            (scheduler, "has_triton", lambda *args, **kwargs: True),
            (_triton, "has_triton", lambda *args, **kwargs: True),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        # Constants are folded by computing them, which takes a GPU.
        stack.enter_context(config.patch({"force_disable_caches": True, "joint_graph_constant_folding": False}))
        yield


def drawn(seed: int) -> fuzz.Program:
    """A program whose tensors are on a GPU. To draw one takes values, and so it is drawn on the CPU."""
    with on("cpu"):
        program = fuzz.draw(seed, compiled=True)
    lines = [FACTORY.sub(r"\1\2, device='cuda')", line) for line in program.lines]
    return dataclasses.replace(program, lines=lines)


@contextlib.contextmanager
def on(device: str) -> Iterator[None]:
    """Inside of it programs make their tensors on a device."""
    with mock.patch.object(fuzz, "DEVICE", device), mock.patch.object(fuzz_lines, "DEVICE", device):
        yield


COMPILED, REFUSED, NEEDS_A_GPU, WRONG = "compiled", "refused", "needs a GPU", "wrong"


def compiled(program: fuzz.Program, rank: int, backend: str) -> tuple[str, str]:
    """Compile a program as a rank: how that ends, and the traceback of an error of the compiler."""
    world = offline_world(program.ranks, mesh_shape=program.mesh, rank=rank, device="cuda")
    with on("cuda"), world as here, trace.fake_inputs_as_real():
        with fakes.modules_with_fake_parameters(), fakes.in_compilation(), fakes.fake_tensors(), torch.device("cuda"):
            stated = [dataclasses.replace(i, inferred=False) for i in program.inputs]
            inputs = [i.on(here.mesh, i.full()) for i in stated]
        run = torch.compile(program.function(), fullgraph=True, backend=backend)
        try:
            run(*inputs)
        except Exception as error:
            text = traceback.format_exc()
            if "in call\n" in text and "torchinductor" in text:  # the code runs, and finds no GPU
                return COMPILED, ""
            if isinstance(error, (ShardError, torch._dynamo.exc.Unsupported, torch._dynamo.exc.TorchRuntimeError)):
                return REFUSED, ""
            if "ATen_cuda" in str(error) or "distributed/c10d/init.cpp" in str(error):
                return NEEDS_A_GPU, ""
            return WRONG, text
    return COMPILED, ""


def main() -> None:
    """Compile programs, print what goes wrong, and counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--cuda-graphs", action="store_true", help='as with mode="reduce-overhead"')
    options = parser.parse_args()
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    with pretended_h100(), torch._inductor.config.patch({"triton.cudagraphs": options.cuda_graphs}):
        for seed in range(options.seed, options.seed + options.programs):
            program = drawn(seed)
            for rank in range(program.ranks):
                end, text = compiled(program, rank, options.backend)
                counts[end] += 1
                if end == WRONG:
                    print(f"--- seed {seed}, rank {rank}\n{program}\n{text}", flush=True)
    print(dict(counts))
    sys.exit(bool(counts[WRONG]))


if __name__ == "__main__":
    main()
