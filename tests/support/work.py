"""How much work something is, in measures that do not depend on the machine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from typing import Any

Run = Callable[[], object]


def calls(run: Run) -> int:
    """Calls of functions, Python's and built-in ones."""
    return _events(run, ("call", "c_call"), sys.getprofile, sys.setprofile)


def lines(run: Run) -> int:
    """Lines of Python."""
    return _events(run, ("line",), sys.gettrace, sys.settrace)


def _events(run: Run, kinds: Collection[str], get: Callable[[], Any], put: Callable[[Any], object]) -> int:
    """Counts events of the profiler, or of the tracer, which asks for a function for each frame."""
    count = 0

    def see(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        count += event in kinds
        return see

    before = get()
    put(see)
    try:
        run()
    finally:
        put(before)
    return count
