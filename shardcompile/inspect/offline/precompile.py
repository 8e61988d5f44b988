"""Compiles a function as one rank of a fake process group, and writes the code to a file for the ranks of a job."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch

from shardcompile.artifacts import record_artifacts
from shardcompile.compat import artifacts as _artifacts
from shardcompile.inspect.offline.trace import Build, build_fake, fake_inputs_as_real
from shardcompile.inspect.offline.world import OfflineError, offline_world


class _Compiled(Exception):
    """Ends the call of a compiled function before its code runs."""


def precompile(
    build: Build,
    path: str | os.PathLike[str],
    *,
    world_size: int | Sequence[int] = 64,
    mesh_shape: Sequence[int] | None = None,
    mesh_dim_names: Sequence[str] | None = None,
    device: str = "cpu",
    backward: bool = True,
) -> None:
    """Compiles a function without other ranks, and writes its code to a file for `shardcompile.load_artifacts`.

    Nothing runs, and tensors have no memory. The code serves other partitions, and other world sizes except where a
    graph has the number of ranks, as that of a softmax along a sharded dim. For the CPU, run it on a machine with a C++
    compiler and a CPU like those of the job, with the same number of threads (``OMP_NUM_THREADS``; ``torchrun`` sets
    1). For CUDA, it needs one GPU like those of the job.

    Args:
        build: as for `trace_offline`. A function that it returns compiled already, with the options of the job, is
            compiled with those; another one with ``backend="shardcompile"``. In both cases it must be one graph.
        path: the file to write.
        world_size: the number of ranks, or several of them, each of which is compiled for.
        mesh_shape: the shape of the mesh over all ranks; one dim by default.
        mesh_dim_names: the names of the mesh dims.
        device: "cuda" or "cpu".
        backward: whether to compile forward and backward. Otherwise the code is that of a call without gradients.

    Raises:
        OfflineError: see `offline_world`; there is no GPU; or the function runs no op on a tensor.
        ArtifactError: Inductor cannot cache the code.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise OfflineError(
            "to compile for CUDA needs one GPU of the model that the job has, since kernels are compiled and tuned for "
            "it, and this process finds none. Run precompile on one GPU, or record in a job: with "
            "shardcompile.record_artifacts(path) around a step"
        )
    shape = {"mesh_shape": mesh_shape, "mesh_dim_names": mesh_dim_names}
    with record_artifacts(path), fake_inputs_as_real(), _artifacts.run_instead_of_compiled_code(_stop):
        for size in [world_size] if isinstance(world_size, int) else world_size:
            with offline_world(size, device=device, **shape) as world:  # type: ignore[arg-type]
                _compile(*build_fake(world, build), backward)


def _compile(fn: Callable[..., object], inputs: Sequence[object], backward: bool) -> None:
    is_compiled = hasattr(fn, "_orig_mod") or hasattr(fn, "_torchdynamo_orig_callable")
    compiled = fn if is_compiled else torch.compile(fn, fullgraph=True, backend="shardcompile")
    try:
        with torch.inference_mode(False), torch.set_grad_enabled(backward):
            compiled(*inputs)
    except _Compiled:
        return
    raise OfflineError("there is nothing to compile: the function that build(mesh) returns runs no op on a tensor")


def _stop(*_: object) -> None:
    raise _Compiled
