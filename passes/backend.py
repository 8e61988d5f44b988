"""The `shardcompile` backend: Inductor with the passes of this package."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from shardcompile import compat
from shardcompile.passes.cost.model import CostModel
from shardcompile.passes.pipeline import Pass, Pipeline, before_division, default_passes
from shardcompile.passes.verify import report_failure


def inductor_options(
    passes: Sequence[Pass] | None = None,
    off: Sequence[str] = (),
    *,
    foreign: bool = False,
    model: CostModel | None = None,
) -> dict[str, Any]:
    """Returns the ``options`` of ``torch.compile`` with which Inductor runs the passes.

    Inductor's own overlap passes are switched off, because only one scheduler can be in charge. They estimate costs by
    the size of this rank's local shard, so ranks with unequal shards could order their collectives differently.

    Args:
        passes: replace `default_passes()`.
        off: names of passes to leave out.
        foreign: whether to rewrite the chains that DTensor and others emit for uneven shards (pad, gather, slice) into
            one collective that the passes know. The ranks then agree on the rewrites over the store of the default
            process group, and compiled code is not cached, so that all of them have to compile.
        model: the cost model of `default_passes()`, rank-invariant, such as a calibrated one (``python -m shardcompile
            calibrate``); None for that of the device that a graph runs on.

    Raises:
        PassError: `off` names a pass that does not exist.
    """
    passes = default_passes(model) if passes is None else passes
    pipeline = Pipeline(passes, off)
    return {
        "joint_custom_pre_pass": before_division(pipeline, foreign),
        "post_grad_custom_post_pass": pipeline,
        **_INDUCTOR_OVERLAP_OFF,
    }


_INDUCTOR_OVERLAP_OFF = {
    option: False
    for option in (
        "reorder_for_compute_comm_overlap",
        "aten_distributed_optimizations.enable_overlap_scheduling",
        "aten_distributed_optimizations.enable_simple_overlap",
    )
    if compat.inductor_has(option)
}


def compile_with_passes(
    model: GraphModule, inputs: Sequence[Tensor], *, mode: str | None = None, options: dict[str, Any] | None = None
) -> Callable[..., object]:
    """Compiles a graph: the backend of ``torch.compile(model, backend="shardcompile")``.

    Args:
        model: the graph that Dynamo captured.
        inputs: its example inputs.
        mode: a mode of Inductor, as for Inductor's own backend; `options` override what it sets.
        options: Inductor's options, as for its own backend. They override those that the passes set.
    """
    settings = {name.replace("-", "_"): value for name, value in (options or {}).items()}
    try:
        return compat.compile_with_inductor(model, inputs, inductor_options(), mode, settings)
    except Exception as error:
        report_failure(error)
        raise
