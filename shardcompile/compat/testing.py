"""Private names of torch that only `shardcompile.testing` needs. Seen in torch 2.13 and 2.15."""

from __future__ import annotations

import torch
from torch._dynamo.utils import counters as _counters  # 2.13 - 2.15
from torch.testing._comparison import default_tolerances as _default_tolerances  # 2.13 - 2.15
from torch.utils._pytree import (  # 2.13 - 2.15
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_unflatten,
)

from shardcompile.compat.one_process import count_repeated_graphs

__all__ = [
    "default_tolerances",
    "graphs_compiled",
    "keystr",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_leaves",
    "tree_unflatten",
]


def default_tolerances(dtype: torch.dtype) -> tuple[float, float]:
    """The relative and the absolute tolerance of `torch.testing.assert_close` for a dtype."""
    return _default_tolerances(dtype)


def graphs_compiled() -> int:
    """The number of graphs that Dynamo has passed to a backend in this process, without those of backward passes.

    If ranks share the process, a graph that each of them has compiled for itself counts once.
    """
    return int(_counters["stats"]["unique_graphs"]) - count_repeated_graphs()
