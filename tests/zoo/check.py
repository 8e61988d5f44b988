"""A model of the zoo against one process, and its communication."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.placement_types import Shard

import shardcompile as sc
from shardcompile.compat import UNKNOWN_OUTPUT_SHAPE
from shardcompile.compat.testing import graphs_compiled
from shardcompile.inspect import GraphReport, Report, explain
from shardcompile.testing import once, rank
from tests.zoo.double_steps import IN_DOUBLE, steps_in_double
from tests.zoo.entry import Entry, Reading
from tests.zoo.piled_up import ASKED_FOR, LargestShards


def _partitions(entry: Entry) -> list[list[int]]:
    """Sizes of three blocks: an empty one in the middle and in front, one of a single row, even ones; another size."""
    n, other = entry.sizes
    return [[n - 3, 0, 3], [0, 1, n - 1], [1, n - 4, 3], [n // 3, n // 3, n - 2 * (n // 3)], [2, other - 2, 0]]


def _model(entry: Entry) -> nn.Module:
    torch.manual_seed(0)
    model = Reading(entry).train()
    return model.double() if entry.dtype is torch.float64 else model.float()  # `to` would make complex weights real


def _shard_parameters(model: nn.Module, entry: Entry, mesh: DeviceMesh) -> nn.Module:
    """The parameters that the entry names sharded: of the last rank most rows, of the one in front of it none."""
    for name, p in list(model.named_parameters()) if entry.shard_parameters else ():
        if entry.shard_parameters in name:
            sizes = [1, *[0] * (mesh.size() - 2), len(p) - 1]
            block = p.detach().split(sizes)[mesh.get_rank()].clone()
            module, _, own_name = name.rpartition(".")
            partition = nn.Parameter(sc.ShardTensor.from_local(block, mesh, [Shard(0)], {0: sizes}))
            setattr(model.get_submodule(module), own_name, partition)
    return model


def _full(entry: Entry, n: int) -> list[Tensor]:
    torch.manual_seed(n)
    return [x.to(entry.dtype) if x.is_floating_point() else x for x in entry.inputs(n)]


def _sharded(entry: Entry, full: Sequence[Tensor], sizes: list[int], mesh: DeviceMesh) -> list[Tensor]:
    placed: list[Tensor] = []
    for i, (x, dim) in enumerate(zip(full, entry.partition, strict=True)):
        if dim is None:
            placed.append(x)
            continue
        blocks = [s * entry.rows_of(i) for s in sizes]
        block = x.split(blocks, dim)[mesh.get_rank()].clone()
        placed.append(sc.ShardTensor.from_local(block, mesh, [Shard(dim)], {0: blocks}))
    return placed


def _weight(x: Tensor) -> Tensor:
    return torch.linspace(-1, 2, x.numel(), dtype=x.dtype).view(x.shape)


def _expected(entry: Entry, n: int, in_double: bool) -> tuple[Tensor, dict[str, Any]]:
    model = _model(entry)
    with steps_in_double(in_double):
        out = model(*_full(entry, n))
    (out * _weight(out)).sum().backward()
    return out.detach(), {name: p.grad for name, p in model.named_parameters()}


def compare(entry: Entry, backend: str | None = None, partitions: int = 5) -> None:
    """Values and gradients of parameters over several partitions; compiled to the graphs that the entry allows.

    Args:
        entry: the model.
        backend: by which it is compiled, if it is.
        partitions: how many of the five partitions.
    """
    mesh = init_device_mesh("cpu", (3,))
    if backend is not None:
        once(torch.compiler.reset)
    in_double = backend == "shardcompile" and entry.name in IN_DOUBLE
    before = once(graphs_compiled)
    model = _shard_parameters(_model(entry), entry, mesh)
    run: Callable[..., Tensor] = model if backend is None else torch.compile(model, fullgraph=True, backend=backend)
    for sizes in _partitions(entry)[:partitions]:
        n = sum(sizes)
        out, gradients = once(lambda n=n: _expected(entry, n, in_double))
        model.zero_grad()
        inputs = _sharded(entry, _full(entry, n), sizes, mesh)
        shards = LargestShards([*inputs, *model.parameters()])
        watched = shards if backend is None else nullcontext()
        with steps_in_double(in_double), watched:
            got = run(*inputs)
        if backend is not None and sizes == _partitions(entry)[0]:
            _same_layout(model, inputs, got)
        whole = got.full_tensor() if isinstance(got, sc.ShardTensor) else got
        told = f"rank {rank()}, blocks {sizes}"
        _close(whole, out, entry, f"{told}: output")
        with watched:
            (whole * _weight(whole)).sum().backward()
        assert not shards.found or entry.name in ASKED_FOR, f"{told}: rows pile up, {shards.found}"
        for name, p in model.named_parameters():
            want = gradients[name]
            if want is not None:
                assert p.grad is not None, f"{told}: {name} has no gradient"
                grad = p.grad.full_tensor() if isinstance(p.grad, sc.ShardTensor) else p.grad
                _close(grad, want, entry, f"{told}: gradient of {name}")
    if backend is not None:
        count = graphs_compiled() - before
        assert count <= entry.graphs, f"{count} graphs"


def _same_layout(model: nn.Module, inputs: Sequence[Tensor], compiled: Tensor) -> None:
    """Eager code gives the result in the layout that compiled code gives."""
    with torch.no_grad():
        eager = model(*inputs)
    texts = [x.sharding.describe_placements() if isinstance(x, sc.ShardTensor) else "" for x in (eager, compiled)]
    assert texts[0] == texts[1], f"eager {texts[0]}, compiled {texts[1]}"


def _close(got: Tensor, want: Tensor, entry: Entry, told: str) -> None:
    limit = entry.tolerance
    torch.testing.assert_close(got, want, rtol=limit, atol=limit, msg=lambda text: f"{told}: {text}")


def communication(entry: Entry) -> str:
    """What a rank of three sends in a forward and a backward pass, before any pass of ours: the golden file."""

    fixed = entry.sizes[0] == entry.sizes[1]  # models of one size
    blocks = _partitions(entry)[0] if fixed else [5, 4, 3]
    n = sum(blocks)
    real = _model(entry).float()

    def build(mesh: DeviceMesh) -> tuple[Any, tuple[Any, ...]]:
        full = [x.float() if x.is_floating_point() else x for x in _full(entry, n)]
        try:
            model = _model(entry).float()
        except UNKNOWN_OUTPUT_SHAPE:  # some models read values while they are made
            model = copy.deepcopy(real)
        return _shard_parameters(model, entry, mesh), tuple(_sharded(entry, full, blocks, mesh))

    report: Report = explain(build, world_size=3, device="cpu", stages=[])
    parameters = sum(p.numel() * 4 for p in real.parameters())
    head = f"{len(report.traced)} collectives, {sum(c.global_bytes for c in report.traced)} B"
    issued = f"{len(report.issued)} after the passes; parameters: {parameters} B"
    graphs = [line for name, g in report.named_graphs() for line in [f"{name}:", *_lines(g)]]
    return "\n".join([f"{head}; {issued}", *graphs]) + "\n"


def _lines(graph: GraphReport) -> list[str]:
    kinds: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for c in graph.traced:
        kinds[c.kind] += 1
        nbytes[c.kind] += c.global_bytes
    counts = [f"  {count} {kind}, {nbytes[kind]} B" for kind, count in sorted(kinds.items())]
    gathers = Counter(
        f"    {c.redistribution}, {c.global_bytes} B, {c.gathered_for or _line(c.source)}"
        for c in graph.traced
        if c.kind.startswith("all_gather")
    )
    return counts + [f"{text}{'' if n == 1 else f' ({n} times)'}" for text, n in sorted(gathers.items())]


def _line(source: str) -> str:
    """The code of a line of the model, without the place that it has on this machine."""
    return source.rpartition(", in ")[2][:90]


def gathers_without_judgement(entry: Entry, text: str) -> list[str]:
    """Lines of gathers of which the entry does not say whether they are needed."""
    gathers = [line for line in text.splitlines() if line.startswith("    ")]
    return [line for line in gathers if not any(part in line for part, _ in entry.gathers)]
