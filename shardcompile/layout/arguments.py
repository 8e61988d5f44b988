"""Cuts as arguments of an op: the one place that knows how a cut, or a list of cuts, is written in an op's signature.

A cut is three arguments: block sizes, a key and a grouping, see `GroupCut`. A list of cuts is four: all sizes, all
keys, all groupings, and lengths. The lengths say for each cut how many of the sizes, and of the numbers of groupings,
are its own. In a graph, nodes stand in place of numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardcompile.layout.sizes import GroupCut

CUT_WIDTH = 3
"""Arguments for a cut."""

CUTS_WIDTH = 4
"""Arguments for a list of cuts."""


def cut_schema(prefix: str = "") -> str:
    """The arguments of a cut as an op's schema has them.

    Args:
        prefix: of their names, for an op that has two cuts.
    """
    return f"SymInt[] {prefix}sizes, SymInt {prefix}key, SymInt[] {prefix}grouping"


def cuts_schema() -> str:
    """The arguments of a list of cuts as an op's schema has them."""
    return "SymInt[] sizes, SymInt[] keys, SymInt[] groupings, int[] lengths"


def write_cut(cut: GroupCut) -> tuple[Any, Any, Any]:
    """A cut as arguments."""
    return cut.sizes, cut.key, cut.grouping


def read_cut(arguments: Sequence[Any]) -> GroupCut:
    """The cut that three arguments say."""
    return GroupCut(*arguments)


def write_cuts(cuts: Sequence[GroupCut]) -> tuple[list[Any], list[Any], list[Any], list[int]]:
    """A list of cuts as arguments."""
    sizes = [s for c in cuts for s in c.sizes]
    groupings = [n for c in cuts for n in c.grouping]
    return sizes, [c.key for c in cuts], groupings, [n for c in cuts for n in (len(c.sizes), len(c.grouping))]


def read_cuts(arguments: Sequence[Any]) -> list[GroupCut]:
    """The cuts that four arguments say."""
    sizes, keys, groupings, lengths = arguments
    cuts: list[GroupCut] = []
    i = j = 0
    for key, n_sizes, n_grouping in zip(keys, lengths[::2], lengths[1::2], strict=True):
        cuts.append(GroupCut(sizes[i : i + n_sizes], key, groupings[j : j + n_grouping]))
        i, j = i + n_sizes, j + n_grouping
    return cuts
