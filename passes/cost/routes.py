"""Guesses the sizes of data-dependent exchanges, for costs: every rank sends, and gets, as many rows as any other.

A mixture of experts that is trained with a balancing loss comes close to that. Sizes that somebody has stated a hint
for (`mark_unbacked`, `hint_override` of torch) keep it.
"""

from __future__ import annotations

import torch
from torch.fx import Graph

from shardcompile import compat
from shardcompile.collectives.torch_collectives import ALL_TO_ALL
from shardcompile.passes.graph.collective import collectives


def assume_balanced_routes(graph: Graph) -> None:
    """Gives hints to the split sizes of a graph that get their values when it runs. They are the same on all ranks.

    Args:
        graph: any. The splits of an exchange sum up to its rows, so each is the rows by the number of splits.
    """
    for c in collectives(graph):
        if c.descriptor is not ALL_TO_ALL:
            continue
        values = c.values
        for rows, splits in (
            (values.input.shape[0], values.input_split_sizes),
            (c.node.meta["val"].shape[0], values.output_split_sizes),
            (values.input.shape[0], values.output_split_sizes),  # as many rows come as go
            (c.node.meta["val"].shape[0], values.input_split_sizes),
        ):
            unknown = [s for s in splits or () if isinstance(s, torch.SymInt) and compat.has_no_hint(s)]
            if unknown and not compat.has_no_hint(rows):
                known = sum(compat.size_hint(s) for s in splits if not compat.has_no_hint(s))
                for s in unknown:
                    compat.suggest_hint(s, max(compat.size_hint(rows) - known, 0) // len(unknown))
