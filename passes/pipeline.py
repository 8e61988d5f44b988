"""Passes in their order, as Inductor takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch.fx import Graph

from shardcompile import compat
from shardcompile.errors import PassError
from shardcompile.passes.bucket import BucketAllGathers, BucketAllReduces, BucketAllToAlls, BucketReduceScatters


class Pass(Protocol):
    """A step of the pipeline. Its `repr` says all that its outcome depends on besides the graph."""

    name: str

    def __call__(self, graph: Graph) -> None:
        """Change a valid graph into a valid graph that computes the same."""


def default_passes() -> list[Pass]:
    """The passes that are on by default, in their order."""
    return [BucketAllGathers(), BucketAllToAlls(), BucketReduceScatters(), BucketAllReduces()]


class Pipeline(compat.CustomGraphPass):
    """Runs passes one after the other.

    Args:
        passes: in their order.
        off: names of passes to leave out.

    Raises:
        PassError: `off` names a pass that is not there.
    """

    def __init__(self, passes: Sequence[Pass] | None = None, off: Sequence[str] = ()) -> None:
        passes = default_passes() if passes is None else list(passes)
        names = [p.name for p in passes]
        if unknown := sorted(set(off) - set(names)):
            raise PassError(f"no pass is called {', '.join(unknown)}; there are {', '.join(names)}")
        self.passes = [p for p in passes if p.name not in off]

    def __call__(self, graph: Graph) -> None:
        for graph_pass in self.passes:
            graph_pass(graph)
            graph.lint()

    def uuid(self) -> Any:
        """What compiled code depends on besides this library's sources, by which all of torch's caches are keyed."""
        return repr(self.passes)
