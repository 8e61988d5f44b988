"""Inductor with the passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from shardcompile.passes.pipeline import Pass, Pipeline
from shardcompile.passes.verify import report_failure


def inductor_options(passes: Sequence[Pass] | None = None, off: Sequence[str] = ()) -> dict[str, Any]:
    """What to give ``torch.compile(options=...)`` so that Inductor runs the passes.

    Args:
        passes: in place of `default_passes()`.
        off: names of passes to leave out.

    Raises:
        PassError: `off` names a pass that is not there.
    """
    return {"post_grad_custom_post_pass": Pipeline(passes, off)}


def compile_with_passes(
    model: GraphModule, inputs: Sequence[Tensor], *, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """The backend ``torch.compile(model, backend="shardcompile")``.

    Args:
        model: what Dynamo captured.
        inputs: its example inputs.
        options: Inductor's, as for its own backend.
    """
    from torch._inductor.compile_fx import compile_fx  # heavy, and only needed here

    try:
        return compile_fx(model, inputs, config_patches={**inductor_options(), **(options or {})})  # type: ignore[return-value]
    except Exception as error:
        report_failure(error)
        raise
