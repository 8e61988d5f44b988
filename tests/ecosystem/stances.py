"""What a compiled function does while `torch.compiler.set_stance` says otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardcompile.compat.testing import graphs_compiled
from tests.ecosystem.case import NOTHING, RIGHT, Case, Setting, gradients, net, values

Call = tuple[int, int]
"""Number of rows of the input, and the dim that is sharded: another one needs another graph."""


def _under(stance: str, first: list[Call], then: list[Call], graphs: int) -> Callable[[Setting], Any]:
    """Steps of a compiled model.

    Args:
        stance: in which the later calls are.
        first: the calls before.
        then: the calls in the stance.
        graphs: how many are compiled in all.
    """

    def run(here: Setting) -> Any:
        model, losses = net(), []
        loss_of = here.compile(lambda x: model(x).square().mean())
        before = graphs_compiled()

        def step(rows: int, dim: int) -> None:
            losses.append(loss_of(here.partition(values(rows, 4, seed=rows), dim)))
            losses[-1].backward()

        for call in first:
            step(*call)
        with torch.compiler.set_stance(stance):
            for call in then:
                step(*call)
        if here.sharded:
            assert graphs_compiled() - before == graphs
        return losses, gradients(model)

    return run


RECOMPILED = "Detected recompile when torch.compile stance is 'fail_on_recompile'"

# Ranks are processes: a stance holds for all threads.
CASES = [
    Case("`torch.compiler.set_stance`", feature, run, eager=NOTHING, compiled=expected, processes=True)
    for feature, run, expected in [
        ("`default`", _under("default", [(7, 0)], [(9, 0), (7, 1)], 2), RIGHT),
        ("`force_eager`", _under("force_eager", [], [(7, 0), (7, 1)], 0), RIGHT),
        ("`eager_on_recompile`", _under("eager_on_recompile", [(7, 0)], [(7, 1), (9, 0)], 1), RIGHT),
        ("`eager_then_compile`", _under("eager_then_compile", [], [(7, 0), (9, 0), (11, 0)], 1), RIGHT),
        ("`fail_on_recompile`, another partition and size", _under("fail_on_recompile", [(7, 0)], [(9, 0)], 1), RIGHT),
        ("`fail_on_recompile`, another dim is sharded", _under("fail_on_recompile", [(7, 0)], [(7, 1)], 1), RECOMPILED),
    ]
]
