"""Compile and run something once, or trace it for a world that does not exist, and report it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from shardcompile.errors import ShardError
from shardcompile.offline import offline_world, trace_step
from shardcompile.passes.backend import inductor_options
from shardcompile.passes.cost.model import CostModel
from shardcompile.passes.pipeline import Pipeline, default_passes
from shardcompile.reports.capture import STAGES, capture
from shardcompile.reports.report import Report


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
    """Report what is compiled of a function, what it communicates, what the passes do to it, and what that should cost.

    In a process group, the function is compiled, and run once on its arguments, forward and backward; every rank has to
    call this. Gradients are computed and thrown away, but what else the function changes is changed:

        print(sc.explain(model, x))

    With `world_size` nothing is run, and neither ranks nor a GPU are needed: `fn` is then called with a mesh of that
    many ranks, and returns a function and a tuple of its arguments, as for `shardcompile.offline.trace_offline`:

        def build(mesh):
            x = sc.rand(4099, 64, device_mesh=mesh, placements=[Shard(0)])
            return torch.nn.Linear(64, 64), (x,)

        print(sc.explain(build, world_size=64, device="cuda"))

    Args:
        fn: a function or module, which may be compiled already; or with `world_size` what makes one.
        args: its arguments.
        stages: which graphs to keep as text, see `capture`.
        device: "cuda" or "cpu", with `world_size`; "cuda" if it is left out.
        world_size: number of ranks of a world that need not exist.
        mesh_shape: of the mesh, with `world_size`; one dim if it is left out.
        mesh_dim_names: names of its dims.
        rank: as which rank to trace, with `world_size`.
        backend: of ``torch.compile``, without `world_size`.
        off: passes to leave out, see `shardcompile.passes`.
        backward: whether to look at the backward pass as well, if there is one.
        model: the costs for passes and timeline; None for those of the device.
        kwargs: of the function.

    Raises:
        ShardError: arguments that make no sense together.
    """
    if world_size is None:
        if device is not None or mesh_shape is not None or mesh_dim_names is not None or rank:
            raise ShardError("explain: device, mesh_shape, mesh_dim_names and rank are for a world_size that is traced")
        with capture(stages=stages, model=model) as report:
            _run(_compile(fn, backend, off, model), args, kwargs, backward)
        return report
    if args or kwargs or backend != "shardcompile":
        raise ShardError(
            "explain: with world_size nothing is run, so that fn takes no arguments and there is no other backend; it "
            "is called with a mesh and returns a function and a tuple of its arguments"
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
    # What is compiled already would not be compiled again, and not be seen.
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
    """The leaf tensors that some results were computed from. Gradients are asked for by name, so that none is kept."""
    found: list[Tensor] = [t for t in ends if t.is_leaf]
    waiting = [t.grad_fn for t in ends]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        waiting += [next_node for next_node, _ in node.next_functions]
    return found
