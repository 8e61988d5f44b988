"""What CUDA graphs save: training steps of one rank of several, with runs of kernels captured and without. Needs a GPU.

Collectives move nothing, so that a step takes what its kernels, their launches and Python take.
"""

from __future__ import annotations

import argparse
import copy
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor, nn
from torch._inductor import config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.placement_types import Shard

import shardcompile as sc
from benchmarks.common import Call, Times, duration, join_fake_group, leave, median_times, print_table, ratio
from examples.poisson.model import relative_l2
from examples.poisson.training import make_batch, make_net
from shardcompile.compat import cuda_graphs

RANKS = 4
WIDTH, LAYERS = 1024, 2
FEWEST = (1, 4, 8)
"""How many kernels have to follow each other to be captured."""


class LinearAttention(nn.Module):
    """Layers of attention without a softmax of scores. [n, C] -> [n, C]."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList(nn.Linear(width, width) for _ in range(4)) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            query, key, value, out = cast(nn.ModuleList, layer)
            h = norm(x)
            x = x + out(query(h).softmax(-1) @ (key(h).softmax(0).mT @ value(h)))
        return x


def _linear_attention(rows: int, device: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    net = LinearAttention(WIDTH, LAYERS).to(device, torch.bfloat16)
    x, y = (torch.randn(rows, WIDTH, device=device, dtype=torch.bfloat16) for _ in range(2))
    return net, x, y


def _demo(rows: int, device: str) -> tuple[nn.Module, Tensor, Tensor]:
    batch = make_batch(0, RANKS, 0, torch.float32, device)
    times = -(-rows // len(batch.target))
    features, target = batch.features.repeat(times, 1)[:rows], batch.target.repeat(times)[:rows]
    return make_net(0, torch.float32).to(device), features, target


MODELS: dict[str, Callable[[int, str], tuple[nn.Module, Tensor, Tensor]]] = {
    "linear attention": _linear_attention,
    "transformer of the demo": _demo,
}


@contextmanager
def captured(fewest: int | None) -> Iterator[None]:
    """With CUDA graphs of runs of at least this many kernels; None: without CUDA graphs."""
    with ExitStack() as stack:
        stack.enter_context(config.patch({"triton.cudagraphs": fewest is not None, "force_disable_caches": True}))
        if fewest is not None:
            stack.enter_context(mock.patch.object(cuda_graphs, "FEWEST_KERNELS", fewest))
        yield


def measure(model: str, many: list[int], device: str, backend: str, rounds: int) -> dict[int, Times]:
    """Seconds of a step by how it is taken, for each number of rows."""
    net = MODELS[model](1, device)[0]
    mesh = init_device_mesh(device, (RANKS,))
    plain = {n: list(MODELS[model](n, device)[1:]) for n in many}
    partitions = {n: {0: [n, n // 2, 0, n + 3]} for n in many}
    sharded: dict[int, list[Any]] = {
        n: [sc.ShardTensor.from_local(x, mesh, [Shard(0)], sharding_shapes=partitions[n]) for x in shards]
        for n, shards in plain.items()
    }
    calls: dict[int, dict[str, Call]] = {n: {} for n in many}

    def add(name: str, inputs: dict[int, list[Any]], backend: str, fewest: int | None) -> None:
        own = copy.deepcopy(net)

        def loss_of(x: Tensor, y: Tensor) -> Tensor:
            return relative_l2(own(x).flatten(), y.flatten())

        # Dynamo keeps what it compiled with the code object.
        code = loss_of.__code__.replace(co_name=f"loss_of_{len(calls[many[0]])}_{MODELS[model].__name__}")
        alone = types.FunctionType(code, globals(), closure=loss_of.__closure__)
        compiled = torch.compile(alone, fullgraph=True, backend=backend, dynamic=inputs is plain)
        for n in many:
            calls[n][name] = partial(_step, own, compiled, inputs[n], fewest)
            for _ in range(4):  # compilation and recordings
                calls[n][name]()

    add("plain", plain, "inductor", None)
    add("plain, captured", plain, "inductor", 1)
    add("sharded", sharded, backend, None)
    for n in FEWEST:
        add(f"runs of {n}", sharded, backend, n)
    return {n: median_times(calls[n], rounds) for n in many}


def _step(net: nn.Module, loss_of: Callable[..., Tensor], inputs: list[Tensor], fewest: int | None) -> None:
    with captured(fewest):
        torch.compiler.cudagraph_mark_step_begin()
        for p in net.parameters():
            p.grad = None
        loss_of(*inputs).backward()
    if inputs[0].device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rows", type=int, nargs="+", default=[257, 4096])
    parser.add_argument("--backend", choices=["shardcompile", "inductor"], default="shardcompile")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: nothing is captured")
    parser.add_argument("--rounds", type=int, default=51)
    options = parser.parse_args()
    join_fake_group(RANKS)
    for model in options.models:
        lines = []
        found = measure(model, options.rows, options.device, options.backend, options.rounds)
        for rows, times in found.items():
            first = times["sharded"]
            lines.append([model, str(rows), *(f"{duration(t)}  {ratio(t, first)}" for t in times.values())])
        print_table("times of a step, and ratios to 'sharded'", ["model", "rows", *times], lines)
    leave()


if __name__ == "__main__":
    main()
