"""Ways from a tensor to its memory, each tried in a process of its own, so that one that dies is told by name.

``python -m tests.support.memory_ways`` prints, as JSON, what each of them comes to: what it gives, or the text of its error.
"""

from __future__ import annotations

import copy
import ctypes
import io
import json
import os
import pickle
import sys
import tempfile
import warnings
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor.placement_types import Shard
from torch.utils.dlpack import to_dlpack  # before shardcompile is imported, as programs do

import shardcompile as sc
from shardcompile.testing import LocalRanks

Way = Callable[[Any], Any]


def _saved(x: Any, zipped: bool) -> Any:
    file = io.BytesIO()
    torch.save(x, file, _use_new_zipfile_serialization=zipped)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _safetensors(name: str, x: Any) -> Any:
    # Not everybody has it.
    import safetensors.numpy
    import safetensors.torch

    with tempfile.TemporaryDirectory() as folder:
        if name == "save":
            return len(safetensors.torch.save({"x": x}))
        if name == "numpy":
            return len(safetensors.numpy.save({"x": np.asarray(x)}))
        if name == "save_file":
            return safetensors.torch.save_file({"x": x}, f"{folder}/x")
        return safetensors.torch.save_model(_module(x), f"{folder}/x")


def _module(x: Any) -> nn.Module:
    module = nn.Module()
    module.register_parameter("weight", nn.Parameter(x))
    return module


REFUSED: dict[str, Way] = {
    "from_dlpack": lambda x: torch.from_dlpack(x).sum(),
    "np.from_dlpack": lambda x: np.from_dlpack(x).sum(),
    "__dlpack__": lambda x: x.__dlpack__(),
    "data_ptr": lambda x: x.data_ptr(),
    "Tensor.data_ptr": lambda x: torch.Tensor.data_ptr(x),
    "ctypes": lambda x: ctypes.c_float.from_address(x.data_ptr()).value,
    "of a view": lambda x: x[1:].t().data_ptr(),
    "of a parameter": lambda x: nn.Parameter(x).data_ptr(),
    "of a result": lambda x: (x * 2).requires_grad_().data_ptr(),
    "untyped_storage": lambda x: x.untyped_storage().data_ptr(),
    "Tensor.untyped_storage": lambda x: torch.Tensor.untyped_storage(x),
    "set_ to a storage": lambda x: torch.empty(0).set_(x.untyped_storage()).sum(),
    "set_ of a tensor": lambda x: torch.empty(0).set_(x).sum(),
    "resize_ of a storage": lambda x: x.untyped_storage().resize_(0),
    "storage": lambda x: x.storage()[0],
    "share_memory_": lambda x: x.share_memory_(),
    "Module.share_memory": lambda x: _module(x).share_memory(),
    "apply_": lambda x: x.apply_(lambda a: a + 1),
    "map_": lambda x: x.map_(x, lambda a, b: a + b),
    "map_ of a plain tensor": lambda x: torch.ones(7, 3).map_(x, lambda a, b: a + b),
    "map2_": lambda x: x.map2_(x, x, lambda a, b, c: a + b + c),
    "numpy": lambda x: x.numpy(),
    "cpu().numpy": lambda x: x.cpu().numpy(),
    "numpy, forced": lambda x: x.numpy(force=True),
    "np.asarray": lambda x: np.asarray(x),
    "np.array": lambda x: np.array(x),
    "np.array of a list": lambda x: np.array([x, x]),
    "__array__": lambda x: x.__array__(np.float64),
    "np.sqrt": lambda x: np.sqrt(x),
    "np.concatenate": lambda x: np.concatenate([x, x]),
    "np.testing": lambda x: np.testing.assert_allclose(x, np.ones((7, 3))),
    "times an array": lambda x: x * np.ones((7, 3)),
    "safetensors.save": lambda x: _safetensors("save", x),
    "safetensors.save_file": lambda x: _safetensors("save_file", x),
    "safetensors.save_model": lambda x: _safetensors("save_model", x),
    "safetensors.numpy": lambda x: _safetensors("numpy", x),
}
"""Refused by an error that names the layout and the way out."""

AS_PLAIN: dict[str, Way] = {
    "memoryview": memoryview,
    "bytes": bytes,
    "frombuffer": lambda x: torch.frombuffer(x, dtype=torch.float32),
    "ctypes.from_buffer": lambda x: ctypes.c_float.from_buffer(x),
    "__array_interface__": lambda x: x.__array_interface__,
    "__cuda_array_interface__": lambda x: x.__cuda_array_interface__,
}
"""Refused by the error that a plain tensor on the CPU has."""

RAISES: dict[str, Way] = {
    "to_dlpack": lambda x: torch.from_dlpack(torch.utils.dlpack.to_dlpack(x)).sum(),
    "torch.to_dlpack": lambda x: torch.to_dlpack(x),
    "to_dlpack, imported before": lambda x: to_dlpack(x),
    "_to_dlpack": lambda x: torch._C._to_dlpack(x),
    "_to_dlpack_versioned": lambda x: torch._C._to_dlpack_versioned(x),
    "of a result": lambda x: to_dlpack((x * 2).sum(0)),
    "of a gradient": lambda x: to_dlpack(torch.autograd.grad(x.requires_grad_().square().sum(), x)[0]),
    "of a compiled result": lambda x: to_dlpack(torch.compile(torch.sin, backend="aot_eager")(x)),
}
"""Raises whatever error: here C++ takes the address without asking."""

RIGHT: dict[str, Way] = {
    "torch.save": lambda x: _saved(x, True),
    "torch.save, old": lambda x: _saved(x, False),
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "multiprocessing": lambda x: pickle.loads(ForkingPickler.dumps(x)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "deepcopy of a module": lambda x: copy.deepcopy(_module(x)).weight.detach(),
    "deepcopy with a gradient": lambda x: _deep_copy_of_gradient(x),
    "swap_tensors": lambda x: _swapped(x),
    "is_shared": lambda x: x if not x.is_shared() else None,
    "nbytes": lambda x: x if (x.nbytes, x.element_size(), x.storage_offset()) == (84, 4, 0) else None,
}
"""Gives the tensor again."""


def _deep_copy_of_gradient(x: Any) -> Any:
    y = x.clone().requires_grad_()
    (y * y).sum().backward()
    return copy.deepcopy(y).grad / 2


def _swapped(x: Any) -> Any:
    other = x.clone()
    torch.utils.swap_tensors(x, other)
    return other


def _try(way: Way) -> str:
    """What a way comes to, on two ranks alike."""

    def on_rank(mesh: Any) -> str:
        full = torch.arange(21.0).view(7, 3)
        x = sc.distribute_tensor(full, mesh, [Shard(0)], sharding_shapes={0: [5, 2]})
        try:
            got = way(x)
        except ModuleNotFoundError as error:
            return f"absent: {error}"
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        same = isinstance(got, sc.ShardTensor) and torch.equal(got.full_tensor(), full)
        return "the tensor" if same else f"something else: {got!r}"

    told = set(LocalRanks(2, processes=False)(on_rank))
    return told.pop() if len(told) == 1 else f"ranks differ: {sorted(told)}"


def _in_a_process(way: Way) -> str:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, _try(way).encode()[:60_000])
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        told = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    return f"died with status {status}" if status else told


def main() -> None:
    """Try all ways."""
    warnings.simplefilter("ignore")
    tables = {"REFUSED": REFUSED, "AS_PLAIN": AS_PLAIN, "RAISES": RAISES, "RIGHT": RIGHT}
    told = {f"{table}: {name}": _in_a_process(way) for table, ways in tables.items() for name, way in ways.items()}
    json.dump(told, sys.stdout)


if __name__ == "__main__":
    main()
