"""Inductor with the passes."""

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
    """What to give ``torch.compile(options=...)`` so that Inductor runs the passes.

    Inductor's own overlap passes are off: they price by what a rank holds, so ranks with unequal shards could order
    their collectives differently. One of the two has to be in charge.

    Args:
        passes: in place of `default_passes()`.
        off: names of passes to leave out.
        foreign: whether to turn the chains that DTensor and others emit for uneven shards (pad, gather, slice) into one
            collective, which the passes know. The ranks then agree on what is rewritten, over the store of the default
            process group, and compiled code is not cached: all of them have to compile.
        model: the costs by which `default_passes()` decide, the same on every rank, such as measured ones
            (``python -m shardcompile calibrate``); None for those of the device that a graph runs on.

    Raises:
        PassError: `off` names a pass that is not there.
    """
    passes = default_passes(model) if passes is None else passes
    pipeline = Pipeline(passes, off)
    return {
        "joint_custom_pre_pass": before_division(pipeline, foreign),
        "post_grad_custom_post_pass": pipeline,
        **_INDUCTOR_IS_NOT_IN_CHARGE,
    }


_INDUCTOR_IS_NOT_IN_CHARGE = {
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
    """The backend ``torch.compile(model, backend="shardcompile")``.

    Args:
        model: what Dynamo captured.
        inputs: its example inputs.
        mode: one of Inductor's, as for its own backend; what it stands for comes before `options`.
        options: Inductor's, as for its own backend. What is given here goes before what the passes set.
    """
    settings = {name.replace("-", "_"): value for name, value in (options or {}).items()}
    try:
        return compat.compile_with_inductor(model, inputs, inductor_options(), mode, settings)
    except Exception as error:
        report_failure(error)
        raise
