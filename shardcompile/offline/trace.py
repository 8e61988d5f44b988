"""Tracing a function as a rank of a world that does not exist."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import Graph, GraphModule

from shardcompile import compat
from shardcompile.compat import offline as _torch
from shardcompile.errors import ShardError
from shardcompile.offline.world import OfflineError, OfflineWorld, offline_world
from shardcompile.passes.graph.collective import Collective, collectives
from shardcompile.passes.pipeline import Pass, Pipeline, before_division
from shardcompile.tensor import ShardTensor

Build = Callable[[DeviceMesh], tuple[Callable[..., Any], Sequence[Any]]]


@dataclass(frozen=True)
class CollectiveRecord:
    """A collective, by what all ranks of its group must agree on: records of two ranks are equal if that is.

    Attributes:
        kind: see `shardcompile.passes.graph.collective.KINDS`.
        ranks: of its group, in its order.
        dtypes: of what a rank puts in: one, but for coalesced collectives.
        global_bytes: of the tensor that the ranks hold together, or that each of them gets. By hints, the same on every
            rank, where sizes are symbolic.
        source: the user's line that led to it.
    """

    kind: str
    ranks: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    global_bytes: int
    source: str = field(default="", compare=False)

    @staticmethod
    def of(collective: Collective) -> CollectiveRecord:
        """Write down a collective, while its process group exists."""
        return CollectiveRecord(
            collective.kind,
            tuple(dist.get_process_group_ranks(compat.process_group(collective.group_name))),
            tuple(dict.fromkeys(p.meta["val"].dtype for p in collective.payloads)),
            collective.global_bytes,
            collective.source,
        )

    def __str__(self) -> str:
        dtypes = ", ".join(str(d).removeprefix("torch.") for d in self.dtypes)
        return f"{self.kind} {dtypes} {self.global_bytes} B, {_name(self.ranks)}" + (self.source and f"  {self.source}")


def _name(ranks: tuple[int, ...]) -> str:
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if len(ranks) > 4 and ranks == tuple(range(ranks[0], ranks[-1] + 1, step or 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}" + (f" by {step}" if step > 1 else "")
    return f"ranks {', '.join(map(str, ranks))}"


@dataclass(frozen=True)
class OfflineTrace:
    """The graphs of a function on one rank, after the passes.

    The graphs are for reading: nodes have their fake values, but nothing here can run them. Passes and prices that ask
    for a process group need an `offline_world` around them, see `trace_step`.

    Attributes:
        forward: what runs in the forward pass, as Inductor would generate code for it.
        backward: the same of the backward pass; None if no result requires a gradient, or it was not asked for.
        world_size: number of ranks.
        rank: on which this was traced.
        device: type of the device that it was traced for.
        forward_collectives: in the order in which the forward pass starts them.
        backward_collectives: in the order in which the backward pass starts them.
    """

    forward: GraphModule
    backward: GraphModule | None
    world_size: int
    rank: int
    device: str
    forward_collectives: tuple[CollectiveRecord, ...]
    backward_collectives: tuple[CollectiveRecord, ...]

    @property
    def collectives(self) -> tuple[CollectiveRecord, ...]:
        """All of them, forward first. Equal on all ranks of one mesh dim, or the ranks would wait for each other."""
        return self.forward_collectives + self.backward_collectives

    def __str__(self) -> str:
        lines = [f"Rank {self.rank} of {self.world_size}, {self.device}"]
        for name, graph, issued in (
            ("forward", self.forward, self.forward_collectives),
            ("backward", self.backward, self.backward_collectives),
        ):
            if graph is not None:
                lines.append(f"{name}: {len(graph.graph.nodes)} nodes, {len(issued)} collectives")
                lines += [f"  {record}" for record in issued]
        return "\n".join(lines)


def trace_offline(
    build: Build,
    *,
    world_size: int = 64,
    mesh_shape: Sequence[int] | None = None,
    mesh_dim_names: Sequence[str] | None = None,
    rank: int = 0,
    device: str = "cuda",
    passes: Sequence[Pass] | None = None,
    off: Sequence[str] = (),
    backward: bool = True,
    inductor: bool = True,
    foreign: bool = False,
) -> OfflineTrace:
    """Trace a function for a world and a device that need not exist, and run the passes on its graphs.

    It needs neither ranks nor a GPU, and no memory for tensors. What it leaves behind, and what it does to the process
    meanwhile: see `offline_world`.

    Args:
        build: called with the mesh, returns the function or module and its arguments. Tensors that it makes are fake
            and on `device`; block sizes of sharded ones must be stated, since nobody is there to be asked.
        world_size: number of ranks.
        mesh_shape: of the mesh over them; by default it has one dim.
        mesh_dim_names: names of its dims.
        rank: as which rank to trace.
        device: "cuda" or "cpu".
        passes: in place of `shardcompile.passes.default_passes()`.
        off: names of passes to leave out.
        backward: whether to trace for training; if not, gradients are off.
        inductor: whether Inductor's own passes over such a graph run around ours, as they do in a compilation.
        foreign: see `shardcompile.passes.backend.inductor_options`.

    Raises:
        OfflineError: see `offline_world`; or there is nothing to trace, or Inductor's passes fail.
        PassError: `off` names a pass that is not there.
    """
    pipeline = Pipeline(passes, off)
    with offline_world(
        world_size, mesh_shape=mesh_shape, mesh_dim_names=mesh_dim_names, rank=rank, device=device
    ) as world:
        return trace_step(world, build, pipeline=pipeline, backward=backward, inductor=inductor, foreign=foreign)


def trace_step(
    world: OfflineWorld,
    build: Build,
    *,
    pipeline: Pipeline | None = None,
    backward: bool = True,
    inductor: bool = True,
    foreign: bool = False,
) -> OfflineTrace:
    """What `trace_offline` does, in a world that is there: for work on the graphs that needs it.

        with offline_world(256) as world:
            trace = trace_step(world, build, pipeline=Pipeline([]))
            my_pass(trace.forward.graph)

    Args:
        world: in which this is called.
        build: see `trace_offline`.
        pipeline: in place of the default one.
        backward: whether to trace for training.
        inductor: whether Inductor's own passes run, too.
        foreign: whether the chains of others are made one collective.

    Raises:
        OfflineError: there is nothing to trace, or Inductor's passes fail.
    """
    pipeline = Pipeline() if pipeline is None else pipeline
    with _blocks_vary(), _torch.fake_inputs_as_real_ones():
        forward_graph, backward_graph = _capture(*_build(world, build), backward, before_division(pipeline, foreign))
    issued: list[tuple[CollectiveRecord, ...]] = []
    for graph in (forward_graph, backward_graph):
        if graph is not None:
            _run_passes(graph, pipeline, inductor, is_inference=backward_graph is None)
        issued.append(() if graph is None else tuple(map(CollectiveRecord.of, collectives(graph.graph))))
    return OfflineTrace(forward_graph, backward_graph, world.world_size, world.rank, world.device, *issued)


def _run_passes(graph: GraphModule, pipeline: Pipeline, inductor: bool, is_inference: bool) -> None:
    try:
        if inductor:
            _torch.run_post_grad_passes(graph, pipeline, is_inference)
        else:
            pipeline(graph.graph)
    except ShardError:
        raise
    except Exception as error:
        hint = ". With inductor=False its own passes are left out" if inductor else ""
        raise OfflineError(f"a pass failed on a traced graph: {error}{hint}") from error
    graph.recompile()


def _build(world: OfflineWorld, build: Build) -> tuple[Callable[..., object], Sequence[object]]:
    try:
        modules = _torch.modules_with_fake_parameters()
        with modules, _torch.as_in_a_compilation(), _torch.fake_tensors(), torch.device(world.device):
            fn, inputs = build(world.mesh)
    except compat.UNKNOWN_OUTPUT_SHAPE as error:
        raise OfflineError(
            "build(mesh) asks for the value of a tensor, but tensors are fake there. If it is ShardTensor.from_local "
            "that asks, state the sizes of all blocks: sharding_shapes={mesh dim: sizes}"
        ) from error
    if not callable(fn) or not isinstance(inputs, (tuple, list)):
        raise OfflineError(
            "build(mesh) must return a function and a tuple of its arguments, got "
            f"{type(fn).__name__} and {type(inputs).__name__}"
        )
    return fn, inputs


def _blocks_vary() -> contextlib.AbstractContextManager[object]:
    """Inside of it fake blocks of sharded tensors count as values, whose sizes a graph may not be specialised on.

    Otherwise they would for stand-ins inside of a trace, and each rank would get a graph of its own.
    """

    def holds_values(x: ShardTensor) -> bool:
        block = x._local_tensor
        return type(block) in (torch.Tensor, torch.nn.Parameter) or _torch.is_fake_outside_traces(block)

    return mock.patch.object(ShardTensor, "_holds_values", property(holds_values))


class _CapturedError(Exception):
    """Ends a call of a compiled function when all graphs are there."""


def _capture(
    fn: Callable[..., object], inputs: Sequence[object], backward: bool, joint_pass: Callable[[Graph], None]
) -> tuple[GraphModule, GraphModule | None]:
    """The forward and backward graph of a call. They are taken when AOTAutograd parts them, and never run."""
    found: list[tuple[GraphModule, GraphModule | None]] = []

    def stop(_: object) -> None:
        raise _CapturedError

    backend = _torch.capturing_backend(lambda *graphs: found.append(graphs), stop, joint_pass)
    try:
        with torch.inference_mode(False), torch.set_grad_enabled(backward):
            torch.compile(fn, fullgraph=True, backend=backend)(*inputs)
    except _CapturedError:
        pass
    if not found:
        raise OfflineError("there is nothing to trace: the function does not compute with tensors")
    (graphs,) = found
    return graphs
