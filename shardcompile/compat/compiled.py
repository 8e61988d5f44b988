"""Notes beside code that Inductor has compiled, which go into its caches and come out of them with the code."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch._inductor import config  # 2.11 - 2.15
from torch._inductor.output_code import CompiledFxGraph  # 2.11 - 2.15
from torch.fx import Graph, GraphModule

_NOTE = "_shardcompile_note"
_NOTES = "_shardcompile_notes"

Look = Callable[[tuple[Any, ...]], Callable[[], None] | None]
"""Looks at the notes of a compiled graph. What it returns is called before the graph runs for the first time."""


def leave_note(graph: Graph, note: object) -> None:
    """Have Inductor keep a note with the code that it makes of a graph. For a pass over the graph; see `look_at_notes`.

    Args:
        graph: of a module, or there is nothing that Inductor could compile.
        note: can be pickled.
    """
    if graph.owning_module is not None:
        graph.owning_module.meta[_NOTE] = note


@functools.cache
def look_at_notes(look: Look) -> None:
    """From now on keep the notes, and have them looked at with each graph that is compiled or comes out of a cache.

    The compiled graph is the one object that the caches of FX graphs and of AOTAutograd store, locally or remote. What
    it holds cannot be lost without the code. All ways to it end in `post_compile`, once for each time that it is
    compiled or loaded.

    Args:
        look: gets a note for each of the graph's modules that has one. If it raises, the graph is not used; if what it
            returns raises, the graph does not run, and the next run tries again.
    """
    cls: Any = CompiledFxGraph
    make, finish = cls.__init__, cls.post_compile  # 2.11 - 2.15

    @functools.wraps(make)
    def make_with_notes(
        self: object, run: object, graph: object, gm: GraphModule, *rest: object, **named: object
    ) -> None:
        make(self, run, graph, gm, *rest, **named)
        notes = [m.meta[_NOTE] for m in gm.modules() if isinstance(m, GraphModule) and _NOTE in m.meta]
        setattr(self, _NOTES, tuple(notes))

    @functools.wraps(finish)
    def look_and_finish(self: Any, *args: object, **named: object) -> None:
        first = look(getattr(self, _NOTES, ()))
        finish(self, *args, **named)
        if first is not None:
            self.current_callable = _after(first, self.current_callable)

    cls.__init__, cls.post_compile = make_with_notes, look_and_finish


def _after(first: Callable[[], None], run: Callable[[object], object]) -> Callable[[object], object]:
    """A function that has something done before it runs for the first time."""
    done = False

    def run_after(inputs: object) -> object:
        nonlocal done
        if not done:
            first()
            done = True
        return run(inputs)

    return run_after


def runs_behind(kind: type) -> list[Any]:
    """The passes of this kind that Inductor, as it is set up at the moment, has at the end of its own."""
    passes: Any = config.post_grad_custom_post_pass  # 2.11 - 2.15; 2.13 takes several
    return [p for p in (passes if isinstance(passes, (list, tuple)) else [passes]) if isinstance(p, kind)]
