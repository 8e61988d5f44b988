"""The cost of calling a compiled function with 50 sharded tensors: guards, unwrapping and wrapping."""

from __future__ import annotations

import time
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.common import Call, Times, duration, join_fake_group, leave, median_times, print_table, ratio
from shardcompile import ShardTensor

RANKS, TENSORS = 4, 50
SHARD = (2, 4)
BAR = 0.7


def add_all(*tensors: Any) -> Any:
    """The function that is compiled."""
    total = tensors[0]
    for t in tensors[1:]:
        total = total + t
    return total


def _compiled(name: str, backend: str) -> Callable[..., Any]:
    """`add_all` compiled on its own: Dynamo keeps what it compiled, and its guards, with the code object."""
    code = add_all.__code__.replace(co_name=name)
    return torch.compile(types.FunctionType(code, globals()), fullgraph=True, backend=backend)


def inputs() -> dict[str, list[Any]]:
    """50 tensors of each kind."""
    mesh = init_device_mesh("cpu", (RANKS,))
    shards = [torch.zeros(SHARD) for _ in range(TENSORS)]
    shape, partition = (RANKS * SHARD[0], SHARD[1]), {0: [SHARD[0], 1, 4, 1]}
    return {
        "parameters": [
            nn.Parameter(ShardTensor.from_local(b, mesh, [Shard(0)], "chunk", global_shape=shape)) for b in shards
        ],
        "inputs": [ShardTensor.from_local(b, mesh, [Shard(0)], partition) for b in shards],
        "DTensor": [nn.Parameter(DTensor.from_local(b, mesh, [Shard(0)])) for b in shards],
        "plain": [nn.Parameter(b.clone()) for b in shards],
    }


def measure(backend: str, tensors: dict[str, list[Any]]) -> Times:
    """Time of one call for each kind of tensor."""
    calls: dict[str, Call] = {
        kind: partial(_compiled(f"add_{kind}_{backend}", backend), *values) for kind, values in tensors.items()
    }
    return median_times(calls, rounds=101, repeats=20, clock=time.process_time)


def main() -> None:
    join_fake_group(RANKS)
    rows, tensors = [], inputs()
    with torch.no_grad():
        for backend in ("aot_eager", "inductor"):
            times = measure(backend, tensors)
            reference = times["DTensor"]
            for kind, bar in (("parameters", BAR), ("inputs", None), ("plain", None)):
                cells = [duration(times[kind]), duration(reference), ratio(times[kind], reference, bar)]
                rows.append([backend, kind, *cells])
    title = f"a compiled call with {TENSORS} tensors: sharded parameters, dynamically sharded inputs, plain parameters"
    print_table(title, ["backend", "tensors", "call", "DTensor's", "to DTensor"], rows)
    leave()


if __name__ == "__main__":
    main()
