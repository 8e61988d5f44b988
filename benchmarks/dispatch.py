"""Eager cost of an op on a ShardTensor, against DTensor and the plain op, where the shard is tiny."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from benchmarks.common import Call, Times, duration, join_fake_group, leave, median_times, print_table, ratio
from shardcompile import ShardTensor

RANKS, ROWS = 4, 4
BAR = 1.3

Operands = tuple[Any, Any]

OPS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, w: x + x,
    "mm": lambda x, w: x @ w,
    "relu": lambda x, w: torch.relu(x),
    "t": lambda x, w: x.t(),
    "sum(1)": lambda x, w: x.sum(1),
    "add_": lambda x, w: x.add_(x),
}


def operands() -> dict[str, Operands]:
    """A sharded and a replicated matrix of each kind."""
    mesh = init_device_mesh("cpu", (RANKS,))

    def shard() -> Tensor:
        return torch.zeros(ROWS, ROWS)  # zeros stay zeros under add_

    return {
        "ShardTensor": (
            ShardTensor.from_local(shard(), mesh, [Shard(0)], {0: [ROWS] * RANKS}),
            ShardTensor.from_local(shard(), mesh, [Replicate()], {}),
        ),
        "DTensor": (DTensor.from_local(shard(), mesh, [Shard(0)]), DTensor.from_local(shard(), mesh, [Replicate()])),
        "plain": (shard(), shard()),
    }


def measure(op: Callable[[Any, Any], Any], inputs: Mapping[str, Operands]) -> Times:
    """Time of one op for each kind of tensor."""
    calls: dict[str, Call] = {kind: partial(op, x, w) for kind, (x, w) in inputs.items()}
    return median_times(calls, rounds=101, repeats=200, clock=time.process_time)


def main() -> None:
    join_fake_group(RANKS)
    rows, inputs = [], operands()
    with torch.no_grad():
        for name, op in OPS.items():
            times = measure(op, inputs)
            ours, dtensor, plain = times["ShardTensor"], times["DTensor"], times["plain"]
            durations = [duration(t) for t in (ours, dtensor, plain)]
            rows.append([name, *durations, ratio(ours, dtensor, BAR), ratio(ours, plain)])
    print_table("eager ops", ["op", "ShardTensor", "DTensor", "plain", "to DTensor", "to plain"], rows)
    leave()


if __name__ == "__main__":
    main()
