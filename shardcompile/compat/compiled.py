"""Notes that Inductor keeps with the code that it compiles. Its caches store a note with the code, and return both."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from torch._inductor import config  # 2.11 - 2.15
from torch._inductor.output_code import CompiledFxGraph  # 2.11 - 2.15
from torch.fx import Graph, GraphModule

from shardcompile.compat.tracing import below_autograd

_NOTE = "_shardcompile_note"
_NOTES = "_shardcompile_notes"

Reader = Callable[[tuple[Any, ...]], Callable[[], None] | None]
"""Takes the notes of a compiled graph. It returns None, or a function to call before the graph's first run."""
_T = TypeVar("_T")


def leave_note(graph: Graph, note: object) -> None:
    """Have Inductor keep a note with the code that it compiles from a graph. Passes call this; see `read_notes_with`.

    Args:
        graph: if no module owns it, Inductor compiles nothing, and the note is dropped.
        note: must be picklable.
    """
    if graph.owning_module is not None:
        graph.owning_module.meta[_NOTE] = note


@functools.cache
def read_notes_with(reader: Reader) -> None:
    """Keep notes from now on, and call `reader` for each graph that is compiled or loaded from a cache.

    The notes are an attribute of the compiled graph. The caches of FX graphs and of AOTAutograd, local and remote,
    store this object, so code and notes stay together. Each time that a graph is compiled or loaded, torch calls its
    `post_compile` once.

    Args:
        reader: gets the notes of all of the graph's modules. If it raises, the graph is not used. If the function that
            it returns raises, the graph does not run, and the next run calls the function again.
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
    def read_and_finish(self: CompiledFxGraph, *args: object, **named: object) -> None:
        notes = getattr(self, _NOTES, ())
        first = reader(notes)
        finish(self, *args, **named)
        loaded = cast(Callable[[Sequence[Any]], Any], self.current_callable)
        if first is not None:
            loaded = _after(first, loaded)
        self.current_callable = _below_autograd(loaded) if notes else loaded

    cls.__init__, cls.post_compile = make_with_notes, read_and_finish


def _after(
    first: Callable[[], None], run: Callable[[Sequence[object]], object]
) -> Callable[[Sequence[object]], object]:
    """A function that calls `first` before it calls `run` for the first time."""
    done = False

    def run_after(inputs: Sequence[object]) -> object:
        nonlocal done
        if not done:
            first()
            done = True
        return run(inputs)

    return run_after


def _below_autograd(run: Callable[[Sequence[object]], object]) -> Callable[[Sequence[object]], object]:
    """A function that calls `run` below autograd, which AOTAutograd has traced already.

    Autograd kernels of ops that are defined in Python are themselves in Python, and took half the time of an exchange
    in which nothing travels.
    """

    def run_below_autograd(inputs: Sequence[object]) -> object:
        with below_autograd():
            return run(inputs)

    return run_below_autograd


def custom_post_passes(kind: type[_T]) -> list[_T]:
    """The custom passes of this class that Inductor's present settings have it run after its own passes."""
    passes = cast(object, config.post_grad_custom_post_pass)  # 2.11 - 2.15; 2.13 takes several
    return [p for p in (passes if isinstance(passes, (list, tuple)) else [passes]) if isinstance(p, kind)]
