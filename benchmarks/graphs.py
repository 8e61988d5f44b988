"""A graph network on a mesh whose nodes lie on several ranks: `plan_gather`, against gathering the nodes.

A triangulated sheet of about 20,000 nodes, sharded into strips of unequal width; edges lie with their targets. Each
layer adds to a node a function of the mean of its neighbours. By links each node on a border travels once to each rank
that needs it, and its gradient back; gathered, each rank gets all nodes in each layer, and adds up for its own. By
index is the same function as it stands in a program for one device, on sharded tensors: `x[source]`, `index_add`. The
last way is one rank with the whole graph. A step is forward and backward. Bytes are counted where messages are sent.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

import shardcompile as sc
from benchmarks.common import duration, median_times, print_table, ratio, rising_shards, run_ranks
from shardcompile.collectives import routes

ROWS, COLUMNS, LAYERS = 100, 200, 4


def sheet(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Sources and targets of the edges of a triangulated sheet, numbered column by column, both directions."""
    number = torch.arange(rows * columns).view(columns, rows).t()
    pairs = [(number[:, :-1], number[:, 1:]), (number[:-1], number[1:]), (number[:-1, :-1], number[1:, 1:])]
    ends = torch.cat([torch.stack([a.flatten(), b.flatten()]) for a, b in pairs], 1)
    both = torch.cat([ends, ends.flip(0)], 1)
    source, target = both[:, both[1].argsort(stable=True)]
    return source, target


def parameters(width: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [(torch.randn(2, width, width, generator=draw) / width**0.5).requires_grad_() for _ in range(LAYERS)]


def layer(x: Any, mean: Any, weight: Tensor) -> Any:
    return x + (x @ weight[0] + mean @ weight[1]).relu()


def linked(x: Any, sources: sc.GatherPlan, targets: sc.GatherPlan, weights: list[Tensor]) -> Any:
    share = 1 / targets.degree.unsqueeze(1)
    for weight in weights:
        x = layer(x, targets.scatter_add(sources.gather(x)) * share, weight)
    return x.square().mean()


def _mean_of_shard(whole: Tensor, source: Tensor, target: Tensor, like: Tensor) -> Tensor:
    sums = torch.zeros_like(like).index_add(0, target, whole.index_select(0, source))
    counts = torch.zeros_like(like[:, :1]).index_add(0, target, torch.ones_like(source, dtype=like.dtype).unsqueeze(1))
    return sums / counts


def gathered(x: Any, source: Tensor, target: Tensor, weights: list[Tensor]) -> Any:
    """Sources are numbers of all nodes, targets those of the nodes of this rank."""
    # Each rank uses all nodes for its own edges: of their gradient it has a term.
    run = sc.local_map(lambda whole, shard: _mean_of_shard(whole, source, target, shard), [Shard(0)])
    for weight in weights:
        whole = x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        x = layer(x, run(whole, x), weight)
    return x.square().mean()


def by_index(x: Any, source: Any, target: Any, weights: list[Tensor]) -> Any:
    """Sources and targets are sharded, and numbers of all nodes."""
    ones = torch.ones_like(source, dtype=x.dtype).unsqueeze(1)
    share = 1 / torch.zeros_like(x[:, :1]).index_add(0, target, ones)
    for weight in weights:
        x = layer(x, torch.zeros_like(x).index_add(0, target, x[source]) * share, weight)
    return x.square().mean()


def alone(x: Tensor, source: Tensor, target: Tensor, weights: list[Tensor]) -> Tensor:
    for weight in weights:
        x = layer(x, _mean_of_shard(x, source, target, x), weight)
    return x.square().mean()


def measure(width: int, rounds: int, backend: str) -> dict[str, Any]:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (ranks,))
    source, target = sheet(ROWS, COLUMNS)
    sizes = [ROWS * c for c in rising_shards(COLUMNS, ranks)]
    ends = torch.tensor(sizes).cumsum(0)
    owner = torch.searchsorted(ends, target, right=True)
    edges = torch.bincount(owner, minlength=ranks).tolist()
    torch.manual_seed(0)
    full = torch.randn(ROWS * COLUMNS, width)

    def partition(t: Tensor, shards: list[int]) -> Any:
        return sc.distribute_tensor(t, mesh, [Shard(0)], sharding_shapes={0: shards})

    x, weights = partition(full, sizes).requires_grad_(), parameters(width)
    spread = [partition(t, edges) for t in (source, target)]
    links = [sc.plan_gather(x, t) for t in spread]
    mine = slice(sum(edges[:rank]), sum(edges[: rank + 1]))
    own = source[mine], target[mine] - int(ends[rank]) + sizes[rank]
    plain = full.clone().requires_grad_()

    def step(run: Any, given: Any, *rest: Any) -> list[Tensor]:
        for t in (given, *weights):
            t.grad = None
        run(given, *rest, weights).backward()
        return [given.grad, *(w.grad for w in weights)]

    def compiled(run: Any) -> Any:
        return run if backend == "none" else torch.compile(run, fullgraph=True, dynamic=True, backend=backend)

    calls = {
        "linked": partial(step, compiled(linked), x, *links),
        "gathered": partial(step, compiled(gathered), x, *own),
        "by index": partial(step, compiled(by_index), x, *spread),
        "alone": partial(step, compiled(alone), plain, source, target),
    }
    wanted = calls["alone"]()
    for name in ("linked", "gathered", "by index"):
        for ours, theirs in zip(calls[name](), wanted, strict=True):
            whole = ours.full_tensor() if isinstance(ours, sc.ShardTensor) else ours
            # Sums in float32 of hundreds of terms in another order, which may cancel.
            torch.testing.assert_close(whole, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))
    moved = torch.tensor(_bytes_of(calls["linked"]))
    dist.all_reduce(moved)
    named = [set(s.tolist()) for s in source.split(edges)]
    first = [0, *ends.tolist()]
    border = sum(not first[r] <= n < first[r + 1] for r, numbers in enumerate(named) for n in numbers)
    times: dict[str, Any] = dict(median_times({k: calls[k] for k in ("linked", "gathered", "by index")}, rounds))
    dist.barrier()
    if rank == 0:  # the others wait, so that it has the machine to itself
        times["alone"] = _alone(calls["alone"], rounds)
    dist.barrier()
    return times | {"moved": int(moved), "border": border, "fewest": border * width * 4 * LAYERS * 2}


def _alone(call: Any, rounds: int) -> float:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _bytes_of(call: Any) -> int:
    """Bytes of rows that this rank sends to others in a call."""
    sent, real = [], routes._start

    def counted(group: Any, inputs: Any, packed: Tensor, lengths: list[int], *rest: Any) -> Any:
        row = packed[:1].numel() * packed.itemsize
        sent.append(row * sum(n for peer, n in enumerate(lengths) if peer != group.rank()))
        return real(group, inputs, packed, lengths, *rest)

    routes._start = counted
    try:
        call()
    finally:
        routes._start = real
    return sum(sent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--backend", default="shardcompile", help="none: eager")
    options = parser.parse_args()
    lines = []
    for width in options.widths:
        found = run_ranks(measure, options.ranks, width, options.rounds, options.backend)
        ours = found["linked"]
        lines.append(
            [
                str(width),
                duration(ours),
                f"{duration(found['gathered'])}  {ratio(ours, found['gathered'], 0.5)}",
                f"{duration(found['by index'])}  {ratio(ours, found['by index'])}",
                f"{duration(found['alone'])}  {ratio(ours, found['alone'])}",
                str(found["border"]),
                f"{found['moved']}  {ratio(found['moved'], found['fewest'], 1.0)}",
            ]
        )
    print_table(
        f"{LAYERS} layers on {ROWS * COLUMNS} nodes, {options.ranks} ranks, a step ({options.backend}): ours, and ours "
        "against the others; bytes of rows against distinct boundary rows x width x layers x 2",
        ["width", "linked", "gathered", "by index", "one rank", "boundary rows", "bytes"],
        lines,
    )


if __name__ == "__main__":
    main()
