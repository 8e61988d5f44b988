"""An op of PyTorch's operator database on sharded tensors: the value that plain PyTorch gives, or an error that says why not.

With OP_DB_DEVICE set to "cuda" all tensors are on a GPU. With OP_DB_RESULTS set to a file, a line of JSON is added to it
for every op, of which tools/op_table.py makes a table.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from shardcompile.testing import once, rank
from tests.support import op_check, op_db


def sweep(name: str, mesh_shape: tuple[int, ...], count: int, limit: int, backend: str | None = None) -> None:
    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        once(torch._dynamo.reset)
        return torch.compile(function, fullgraph=True, backend=backend)

    mesh = init_device_mesh(op_db.DEVICE, mesh_shape)
    op_check.SERVED.clear()
    failures = [
        text
        for case, full in op_db.samples(name, count)
        for text in op_check.check_values(case, full, mesh, limit, None if backend is None else compiled)
    ]
    everyone = op_check.agree(failures)
    once(torch._dynamo.reset)
    if rank() == 0 and (path := os.environ.get("OP_DB_RESULTS")):
        result = {"op": name, "mesh": mesh_shape, "backend": backend, "failures": everyone, "served": op_check.SERVED}
        with Path(path).open("a") as file:
            file.write(json.dumps(result) + "\n")
    assert not everyone, "\n".join([name, *everyone])
