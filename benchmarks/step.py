"""A compiled training step of the demo's model on uneven points, against other ways to take the same step."""

from __future__ import annotations

import argparse
import copy
import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from benchmarks.common import Call, Times, duration, median_times, print_table, ratio, run_ranks
from examples.poisson.handwritten import handwritten_step
from examples.poisson.model import relative_l2
from examples.poisson.training import (
    Batch,
    Compiler,
    Step,
    gradient_vector,
    make_batch,
    make_net,
    relative_difference,
    sharded_step,
)

RANKS = 2
BATCHES = 3
REPETITIONS = (1, 16)
"""How often each point of a batch of the demo is taken."""

BAR = 1.05
TOLERANCE = 1e-3

# ----------------------------------------------------------------------------------------------- batches


def uneven_batches(repetitions: int) -> list[Batch]:
    """Batches of the demo that leave no rank empty: for those the code written by hand is compiled once more."""
    batches = (make_batch(step, RANKS, 0, torch.float32) for step in itertools.count())
    chosen = itertools.islice((b for b in batches if min(b.sizes) > 1), BATCHES)
    return [
        replace(
            b,
            sizes=[n * repetitions for n in b.sizes],
            features=b.features.repeat(repetitions, 1),
            target=b.target.repeat(repetitions),
        )
        for b in chosen
    ]


def even_batch(batch: Batch) -> Batch:
    """The same points, sharded evenly; those left over are dropped."""
    size = sum(batch.sizes) // RANKS
    rows = slice(0, size * RANKS)
    return replace(batch, sizes=[size] * RANKS, features=batch.features[rows], target=batch.target[rows])


# ------------------------------------------------------------------------------------------------- steps


def dtensor_step(net: nn.Module, mesh: DeviceMesh, compiler: Compiler) -> Step:
    """The step on DTensors. The parameters of `net` become replicated DTensors."""
    _replicate_parameters(net, mesh)
    loss_fn = torch.compile(lambda x, y: relative_l2(net(x), y), fullgraph=True, backend=compiler)

    def step(batch: Batch) -> Tensor:
        features, target = (DTensor.from_local(b, mesh, [Shard(0)]) for b in batch.shard(mesh.get_local_rank()))
        net.zero_grad()
        loss = loss_fn(features, target)
        loss.backward()
        for p in net.parameters():
            gradient = cast(DTensor, p.grad)
            p.grad = gradient.redistribute(placements=[Replicate()])
        return loss.detach().full_tensor()

    return step


def _replicate_parameters(net: nn.Module, mesh: DeviceMesh) -> None:
    for module in net.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(distribute_tensor(p.detach(), mesh, [Replicate()])))


def _check_gradients(net: nn.Module, batch: Batch, step: Step, reference: Step) -> None:
    reference(batch)
    expected = gradient_vector(net)
    step(batch)
    assert relative_difference(gradient_vector(net), expected) < TOLERANCE, "the steps differ in their gradients"


def _run(step: Step, batches: Sequence[Batch]) -> None:
    for batch in batches:
        step(batch).item()


# -------------------------------------------------------------------------------------------- measurement


def measure(compiler: Compiler, rounds: int) -> dict[str, Any]:
    """On one rank: the times of one step on uneven points, by repetitions, and on evenly sharded ones."""
    mesh = init_device_mesh("cpu", (RANKS,))
    net = make_net(0, torch.float32)
    steps = {
        "compiled": sharded_step(net, mesh, compiler),
        "by hand": handwritten_step(net, mesh.get_group(), compiler),
        "eager": sharded_step(net, mesh, None),
    }
    _say("compiling")
    _check_gradients(net, uneven_batches(1)[0], steps["compiled"], steps["by hand"])
    _say("timing")
    uneven = {k: _times(steps, uneven_batches(k), rounds) for k in REPETITIONS}
    batches = [even_batch(uneven_batches(k)[0]) for k in REPETITIONS]
    _say("compiling with DTensors")
    by_dtensor = dtensor_step(copy.deepcopy(net), mesh, compiler)
    try:
        _run(by_dtensor, batches)
    except Exception as error:  # whatever stops it is the outcome
        return {"uneven": uneven, "failure": f"{type(error).__name__}: {error}".splitlines()[0]}
    against = {"compiled": steps["compiled"], "DTensor": by_dtensor}
    even = {k: _times(against, [b], rounds) for k, b in zip(REPETITIONS, batches, strict=True)}
    return {"uneven": uneven, "even": even}


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def _times(steps: dict[str, Step], batches: list[Batch], rounds: int) -> Times:
    calls: dict[str, Call] = {name: partial(_run, step, batches) for name, step in steps.items()}
    return {name: t / len(batches) for name, t in median_times(calls, rounds).items()}


def report(results: dict[str, Any]) -> None:
    """Print the tables."""
    points = {k: sum(sum(b.sizes) for b in uneven_batches(k)) // BATCHES for k in REPETITIONS}
    rows = []
    for k, times in results["uneven"].items():
        ours, by_hand, eager = times["compiled"], times["by hand"], times["eager"]
        durations = [duration(t) for t in (ours, by_hand, eager)]
        rows.append([str(points[k]), *durations, ratio(ours, by_hand, BAR), ratio(ours, eager)])
    columns = ["points", "compiled", "by hand", "eager", "to by hand", "to eager"]
    print_table(f"a compiled training step on uneven points, {RANKS} ranks", columns, rows)
    if "failure" in results:
        print(f"\nDTensor does not take this step: {results['failure']}")
        return
    rows = [
        [str(points[k]), duration(t["compiled"]), duration(t["DTensor"]), ratio(t["compiled"], t["DTensor"])]
        for k, t in results["even"].items()
    ]
    print_table("the same on an even partition", ["points", "ShardTensor", "DTensor", "to DTensor"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compiler", choices=["shardcompile", "inductor", "aot_eager"], default="shardcompile")
    parser.add_argument("--rounds", type=int, default=21)
    options = parser.parse_args()
    report(run_ranks(measure, RANKS, options.compiler, options.rounds))


if __name__ == "__main__":
    main()
