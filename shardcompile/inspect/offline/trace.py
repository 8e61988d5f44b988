"""Traces a function as one rank of a fake process group, and runs the passes on its graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
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
from shardcompile.inspect.offline.world import OfflineError, OfflineWorld, offline_world
from shardcompile.passes.graph.collective import Collective, collectives
from shardcompile.passes.pipeline import Pass, Pipeline, before_division
from shardcompile.tensor import ShardTensor

Build = Callable[[DeviceMesh], tuple[Callable[..., Any], Sequence[Any]]]


@dataclass(frozen=True)
class CollectiveRecord:
    """The properties of a collective that must be equal on all ranks of its group. Only these are compared.

    Attributes:
        kind: see `shardcompile.passes.graph.collective.KINDS`.
        ranks: the ranks of the group, in the order of the group.
        dtypes: the dtypes of the payloads: one, except for coalesced collectives.
        global_bytes: the bytes of the global tensor that the ranks hold together, or that each of them receives.
            Symbolic sizes count by their hints, which are rank-invariant.
        source: the line of the program that led to it. It is not compared.
    """

    kind: str
    ranks: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    global_bytes: int
    source: str = field(default="", compare=False)

    @staticmethod
    def of(collective: Collective) -> CollectiveRecord:
        """Makes the record of a collective. Its process group must exist."""
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

    The graphs are for reading: their nodes have fake values, and cannot run. Passes and cost models that need a process
    group run inside an `offline_world`, see `trace_step`.

    Attributes:
        forward: the graph of the forward pass from which Inductor would generate code.
        backward: the same for the backward pass; None without one, or if `backward` was False.
        world_size: the number of ranks.
        rank: the rank that was traced.
        device: the device type of the trace.
        forward_collectives: the collectives of the forward pass, in the order of their starts.
        backward_collectives: the collectives of the backward pass, in the order of their starts.
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
        """All collectives, forward first. If two ranks of a group differ in them, they wait for each other forever."""
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
    """Traces a function for a fake process group and a device that need not exist, and runs the passes on its graphs.

    This needs neither other ranks nor a GPU, and no memory for tensors. `offline_world` says how it changes the
    process during the trace and afterwards.

    Args:
        build: takes the mesh, and returns the function or module and a tuple of its arguments. Tensors that it makes
            are fake and on `device`. It must state all shard sizes of sharded tensors, since they cannot be exchanged.
        world_size: the number of ranks.
        mesh_shape: the shape of the mesh over all ranks; one dim by default.
        mesh_dim_names: the names of the mesh dims.
        rank: the rank to trace.
        device: "cuda" or "cpu".
        passes: passes in place of `shardcompile.passes.default_passes()`.
        off: the names of passes to leave out.
        backward: whether to trace forward and backward. Otherwise the trace is without gradients.
        inductor: whether Inductor's own passes run around ours, as in a compilation.
        foreign: see `shardcompile.passes.backend.inductor_options`.

    Raises:
        OfflineError: see `offline_world`; the function does not compute with tensors; or a pass fails.
        PassError: `off` names an unknown pass.
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
    """Traces as `trace_offline` does, in an open `offline_world`, so that passes can run on the graphs afterwards.

        with offline_world(256) as world:
            trace = trace_step(world, build, pipeline=Pipeline([]))
            my_pass(trace.forward.graph)

    Args:
        world: the open world.
        build: see `trace_offline`.
        pipeline: a pipeline in place of the default one.
        backward: whether to trace forward and backward.
        inductor: whether Inductor's own passes run around ours.
        foreign: see `shardcompile.passes.backend.inductor_options`.

    Raises:
        OfflineError: the function does not compute with tensors, or a pass fails.
    """
    pipeline = Pipeline() if pipeline is None else pipeline
    with fake_inputs_as_real():
        forward_graph, backward_graph = _capture(
            *build_fake(world, build), backward, before_division(pipeline, foreign)
        )
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
        hint = ". inductor=False leaves Inductor's own passes out" if inductor else ""
        raise OfflineError(f"a pass failed on a traced graph: {error}{hint}") from error
    graph.recompile()


def build_fake(world: OfflineWorld, build: Build) -> tuple[Callable[..., object], Sequence[object]]:
    """Calls `build` with the mesh of the world, so that the tensors that it makes are fake."""
    try:
        modules = _torch.modules_with_fake_parameters()
        with modules, _torch.in_compilation(), _torch.fake_tensors(), torch.device(world.device):
            fn, inputs = build(world.mesh)
    except compat.UNKNOWN_OUTPUT_SHAPE as error:
        raise OfflineError(
            "build(mesh) asks for the value of a tensor, but its tensors are fake and have no values, except for small "
            "ones that follow from Python numbers alone. If ShardTensor.from_local asks, state all shard sizes: "
            "sharding_shapes={mesh dim: sizes}"
        ) from error
    if not callable(fn) or not isinstance(inputs, (tuple, list)):
        raise OfflineError(
            "build(mesh) must return a function and a tuple of its arguments, got "
            f"{type(fn).__name__} and {type(inputs).__name__}"
        )
    return fn, inputs


@contextlib.contextmanager
def fake_inputs_as_real() -> Iterator[None]:
    """Treats fake local shards as real ones inside the context, so that no graph specialises on their sizes.

    Otherwise they would count as the fake shards of an outer trace, and each rank would get its own graph.
    """

    def holds_values(x: ShardTensor) -> bool:
        shard = x._local_tensor
        return type(shard) in (torch.Tensor, torch.nn.Parameter) or compat.is_fake_outside_traces(shard)

    shards_vary = mock.patch.object(ShardTensor, "_holds_values", property(holds_values))
    with shards_vary, _torch.trace_fake_inputs_as_real():
        yield


class _CapturedError(Exception):
    """Ends the call of a compiled function after AOTAutograd has made its graphs."""


def _capture(
    fn: Callable[..., object], inputs: Sequence[object], backward: bool, joint_pass: Callable[[Graph], None]
) -> tuple[GraphModule, GraphModule | None]:
    """Returns the forward and the backward graph of a call, which AOTAutograd partitions and which never run."""
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
        raise OfflineError("there is nothing to trace: the function that build(mesh) returns runs no op on a tensor")
    (graphs,) = found
    return graphs
