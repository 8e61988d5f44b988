"""The sweep over PyTorch's operator database: the value that plain PyTorch gives, or an error that says why not.

A sample of the ops runs with the other tests; all of them with ``-m sweep``. With OP_DB_RESULTS set to a file, a line of
JSON is added to it for every op, of which tests/op_table.py makes a table.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import op_check
import op_db

from shardcompile.testing import once, rank

SAMPLE = sorted(op_db.OPS)[1::20]


def sweep(name: str, mesh_shape: tuple[int, ...], count: int, limit: int, backend: str | None = None) -> None:
    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        once(torch._dynamo.reset)
        return torch.compile(function, fullgraph=True, backend=backend)

    mesh = init_device_mesh("cpu", mesh_shape)
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
    assert not everyone, "\n".join(everyone)


@pytest.mark.ranks(3, timeout=45, processes=False)
@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_of_the_ops(name: str) -> None:
    sweep(name, (3,), count=2, limit=4)


@pytest.mark.sweep
@pytest.mark.ranks(3, timeout=45, processes=False)
@pytest.mark.parametrize("name", sorted(op_db.OPS))
def test_every_op_on_three_ranks(name: str) -> None:
    sweep(name, (3,), count=4, limit=8)


@pytest.mark.sweep
@pytest.mark.ranks(4, timeout=45, processes=False)
@pytest.mark.parametrize("name", sorted(op_db.OPS))
def test_every_op_on_two_by_two_ranks(name: str) -> None:
    sweep(name, (2, 2), count=3, limit=4)


@pytest.mark.sweep
@pytest.mark.ranks(3, timeout=200, processes=False)
@pytest.mark.parametrize("name", sorted(op_db.OPS))
def test_every_op_compiled_with_aot_eager(name: str) -> None:
    sweep(name, (3,), count=1, limit=2, backend="aot_eager")


@pytest.mark.sweep
@pytest.mark.ranks(3, timeout=300, processes=False)
@pytest.mark.parametrize("name", sorted(op_db.OPS)[::4])
def test_a_sample_of_the_ops_compiled_with_inductor(name: str) -> None:
    sweep(name, (3,), count=1, limit=1, backend="inductor")
