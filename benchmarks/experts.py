"""A layer of experts on tokens in uneven shards: `route_rows`, against the same by hand, and against padding.

16 experts over the ranks, two for each token, more tokens for the first experts than for the last. By hand means
`all_to_all_single` with split sizes that are read from a tensor; padding means messages of one size, that of the
largest, so that no token is dropped. All three compiled by Inductor, forward and backward, and all add up the loss
and the gradient of the gate over the ranks.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.placement_types import Shard

import shardcompile as sc
from benchmarks.common import duration, median_times, print_table, ratio, rising_shards, run_ranks

EXPERTS, COPIES, WIDTH, HIDDEN = 16, 2, 256, 512


def experts(rows: Tensor, numbers: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Each row through the expert that its number says: [m, WIDTH]."""
    order = numbers.argsort(stable=True)
    counts = numbers.new_zeros(len(first)).scatter_add(0, numbers, torch.ones_like(numbers))
    ends = counts.cumsum(0).int()
    hidden = torch._grouped_mm(rows.index_select(0, order), first, offs=ends).relu()
    out = torch._grouped_mm(hidden, second, offs=ends)
    return torch.zeros_like(out).index_copy(0, order, out)


def chosen(x: Any, gate: Tensor, bias: Tensor) -> Any:
    """Weights and numbers of the experts of each token: [n, COPIES]."""
    return ((x @ gate).float() + bias).softmax(-1).topk(COPIES)


def routed(x: Any, gate: Tensor, bias: Tensor, first: Tensor, second: Tensor) -> Any:
    weights, numbers = chosen(x, gate, bias)
    on_rank = len(first)
    rows, own, route = sc.route_rows(x, numbers // on_rank, each=[numbers % on_rank])
    run = sc.local_map(lambda r, n: experts(r, n, first, second), [Shard(0)])
    return route.combine(run(rows, own), weights=weights.to(x.dtype))


def by_hand(x: Tensor, gate: Tensor, bias: Tensor, first: Tensor, second: Tensor) -> Tensor:
    weights, numbers = chosen(x, gate, bias)
    group, ranks, on_rank = dist.group.WORLD, dist.get_world_size(), len(first)
    assert group is not None
    flat = numbers.flatten()
    owner = flat // on_rank
    order = owner.argsort(stable=True)
    sent = owner.new_zeros(ranks).scatter_add(0, owner, torch.ones_like(owner))
    came = fc.wait_tensor(fc.all_to_all_single(sent, None, None, group))
    out_sizes, in_sizes = came.tolist(), sent.tolist()
    for n in (*out_sizes, *in_sizes):
        torch._check(n >= 0)
    torch._check(sum(in_sizes) == order.shape[0])
    given = x.index_select(0, order // COPIES)
    rows = fc.wait_tensor(fc.all_to_all_single_autograd(given, out_sizes, in_sizes, group))
    own = fc.wait_tensor(fc.all_to_all_single(flat.index_select(0, order) % on_rank, out_sizes, in_sizes, group))
    y = experts(rows, own, first, second)
    home = fc.wait_tensor(fc.all_to_all_single_autograd(y, in_sizes, out_sizes, group))
    return _weighted(home, order, weights, x)


def _weighted(home: Tensor, order: Tensor, weights: Tensor, x: Tensor) -> Tensor:
    copies = home.new_zeros(len(x) * COPIES, WIDTH).index_copy(0, order, home)
    return (copies.view(len(x), COPIES, WIDTH) * weights.to(x.dtype).unsqueeze(-1)).sum(1)


def padded(x: Tensor, gate: Tensor, bias: Tensor, first: Tensor, second: Tensor, capacity: int) -> Tensor:
    weights, numbers = chosen(x, gate, bias)
    group, ranks, on_rank = dist.group.WORLD, dist.get_world_size(), len(first)
    assert group is not None
    flat = numbers.flatten()
    owner = flat // on_rank
    order = owner.argsort(stable=True)
    sent = owner.new_zeros(ranks).scatter_add(0, owner, torch.ones_like(owner))
    within = torch.arange(len(flat)) - (sent.cumsum(0) - sent)[owner[order]]
    place = owner[order] * capacity + within
    empty = x.new_zeros(ranks * capacity, WIDTH)
    given = empty.index_copy(0, place, x.index_select(0, order // COPIES))
    labels = flat.new_full([ranks * capacity], on_rank - 1).index_copy(0, place, flat[order] % on_rank)
    rows = fc.wait_tensor(fc.all_to_all_single_autograd(given, None, None, group))
    own = fc.wait_tensor(fc.all_to_all_single(labels, None, None, group))
    home = fc.wait_tensor(fc.all_to_all_single_autograd(experts(rows, own, first, second), None, None, group))
    return _weighted(home.index_select(0, place), order, weights, x)


def measure(tokens: int, rounds: int) -> dict[str, float]:
    torch._dynamo.config.capture_scalar_outputs = True  # by hand
    ranks, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (ranks,))
    torch.manual_seed(0)
    full = torch.randn(tokens, WIDTH).bfloat16()
    gate = (torch.randn(WIDTH, EXPERTS) / 16).bfloat16().requires_grad_()
    bias = torch.linspace(1.5, -1.5, EXPERTS)
    first = torch.randn(EXPERTS, WIDTH, HIDDEN).bfloat16() / 16
    second = torch.randn(EXPERTS, HIDDEN, WIDTH).bfloat16() / 16
    mine = [w.chunk(ranks)[rank].clone().requires_grad_() for w in (first, second)]
    sizes = rising_shards(tokens, ranks)
    x = sc.distribute_tensor(full, mesh, [Shard(0)], sharding_shapes={0: sizes}).requires_grad_()
    shard = full.split(sizes)[rank].clone().requires_grad_()
    owners = chosen(shard.detach(), gate.detach(), bias)[1].flatten() // (EXPERTS // ranks)
    capacity = owners.bincount(minlength=ranks).max()
    dist.all_reduce(capacity, dist.ReduceOp.MAX)

    def step(run: Any, given: Any) -> Any:
        for t in (given, gate, *mine):
            t.grad = None
        out = run(given, gate, bias, *mine)
        loss = out.square().sum() / full.numel()
        if given is shard:  # what a sharded tensor does by itself
            dist.all_reduce(loss.detach())
        loss.backward()
        if given is shard:
            dist.all_reduce(gate.grad)
        return out, given.grad, gate.grad

    calls = {
        "route_rows": partial(step, torch.compile(routed, fullgraph=True, dynamic=True, backend="shardcompile"), x),
        "by hand": partial(step, torch.compile(by_hand, fullgraph=True, dynamic=True), shard),
        "padded": partial(
            step, torch.compile(partial(padded, capacity=int(capacity)), fullgraph=True, dynamic=True), shard
        ),
    }
    for name in ("by hand", "padded"):
        ours, theirs = calls["route_rows"](), calls[name]()
        shards = [t.to_local() if isinstance(t, sc.ShardTensor) else t for t in ours]
        for a, b in zip(shards, theirs, strict=True):
            torch.testing.assert_close(a.float(), b.float(), rtol=2e-2, atol=2e-2 * float(b.abs().max()))
    return median_times(calls, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    lines = []
    for tokens in options.tokens:
        times = run_ranks(measure, options.ranks, tokens, options.rounds)
        ours = times["route_rows"]
        lines.append(
            [
                str(tokens),
                duration(ours),
                f"{duration(times['by hand'])}  {ratio(ours, times['by hand'], 1.05)}",
                f"{duration(times['padded'])}  {ratio(ours, times['padded'], 0.7)}",
            ]
        )
    print_table(
        f"A layer of {EXPERTS} experts on {options.ranks} ranks, a step: ours, and ours against the others",
        ["tokens", "route_rows", "by hand", "padded"],
        lines,
    )


if __name__ == "__main__":
    main()
