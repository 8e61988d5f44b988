"""`explain`: reports on a function that is compiled and run once, or traced offline for a fake process group."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from shardcompile.errors import ShardError
from shardcompile.inspect.capture import STAGES, capture
from shardcompile.inspect.offline import offline_world, trace_step
from shardcompile.inspect.report import Report
from shardcompile.passes.backend import inductor_options
from shardcompile.passes.cost.model import CostModel
from shardcompile.passes.pipeline import Pipeline, default_passes


def explain(
    fn: Callable[..., Any],
    *args: Any,
    stages: Collection[str] = STAGES,
    device: str | None = None,
    world_size: int | None = None,
    mesh_shape: Sequence[int] | None = None,
    mesh_dim_names: Sequence[str] | None = None,
    rank: int = 0,
    backend: str = "shardcompile",
    off: Sequence[str] = (),
    backward: bool = True,
    model: CostModel | None = None,
    **kwargs: Any,
) -> Report:
    """Reports on a compiled function: its graphs and collectives, the work of the passes, and the predicted cost.

    In a process group, this compiles the function and runs it once, forward and backward. Every rank must call this.
    Gradients are discarded, but other side effects of the function remain:

        print(sc.explain(model, x))

    With `world_size` nothing runs, and this needs neither ranks nor a GPU. It calls `fn` with a mesh of that many
    ranks. `fn` returns a function and a tuple of its arguments, as for `shardcompile.inspect.offline.trace_offline`:

        def build(mesh):
            x = sc.rand(4099, 64, device_mesh=mesh, placements=[Shard(0)])
            return torch.nn.Linear(64, 64), (x,)

        print(sc.explain(build, world_size=64, device="cuda"))

    Args:
        fn: a function or module, which may be compiled already. With `world_size`, a function that makes one.
        args: the arguments of the function.
        stages: which graphs to keep as text, see `capture`.
        device: with `world_size`, "cuda" or "cpu"; "cuda" by default.
        world_size: the number of ranks of a fake process group, for offline tracing.
        mesh_shape: with `world_size`, the shape of the mesh; one dim by default.
        mesh_dim_names: with `world_size`, the names of the mesh dims.
        rank: with `world_size`, the rank to trace.
        backend: without `world_size`, the backend of ``torch.compile``.
        off: the names of passes to leave out, see `shardcompile.passes`.
        backward: whether to include the backward pass, if there is one.
        model: the costs for passes and timeline; None for those of the device.
        kwargs: the keyword arguments of the function.

    Raises:
        ShardError: two arguments exclude each other.
    """
    if world_size is None:
        if device is not None or mesh_shape is not None or mesh_dim_names is not None or rank:
            raise ShardError("explain: device, mesh_shape, mesh_dim_names and rank need world_size; give it, too")
        with capture(stages=stages, model=model) as report:
            _run(_compile(fn, backend, off, model), args, kwargs, backward)
        return report
    if args or kwargs or backend != "shardcompile":
        raise ShardError(
            "explain: with world_size nothing runs, so there are no arguments for fn, and no other backend. Give a "
            "function that takes a mesh and returns a function and a tuple of its arguments"
        )
    names = {"mesh_shape": mesh_shape, "mesh_dim_names": mesh_dim_names, "rank": rank}
    with (
        offline_world(world_size, device=device or "cuda", **names) as world,  # type: ignore[arg-type]
        capture(stages=stages, model=model) as report,
    ):
        trace_step(world, fn, pipeline=Pipeline(default_passes(model), off), backward=backward)
    return report


def _compile(
    fn: Callable[..., object], backend: str, off: Sequence[str], model: CostModel | None
) -> Callable[..., object]:
    # A compiled function would not be compiled again, and the report would be empty.
    plain = getattr(fn, "_orig_mod", None) or getattr(fn, "_torchdynamo_orig_callable", fn)
    torch.compiler.reset()
    options = inductor_options(off=off, model=model) if backend == "shardcompile" else None
    return torch.compile(plain, backend=backend, options=options)


def _run(fn: Callable[..., object], args: Sequence[object], kwargs: dict[str, object], backward: bool) -> None:
    with torch.set_grad_enabled(backward and torch.is_grad_enabled()):
        out = fn(*args, **kwargs)
    ends = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]
    leaves = _leaves(ends)
    if leaves:
        torch.autograd.grad(ends, leaves, [torch.ones_like(t) for t in ends], allow_unused=True)


def _leaves(ends: Sequence[Tensor]) -> list[Tensor]:
    """Returns the autograd leaves of some results. `torch.autograd.grad` takes them, so that no gradient is stored."""
    found: list[Tensor] = [t for t in ends if t.is_leaf]
    pending = [t.grad_fn for t in ends]
    seen = set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        pending += [next_node for next_node, _ in node.next_functions]
    return found
