"""Cuts as arguments of an op: the one place that knows how a cut, or a list of cuts, is written in an op's signature.

A cut is three arguments: block sizes, a key and a nest, see `GroupCut`. A list of cuts is four: the sizes of all of
them, their keys, the nests of all of them, and in `lengths`, for each cut, how many sizes and how many numbers of a
nest are its own. In a graph, nodes stand in place of numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardcompile.layout.cut import GroupCut

CUT_WIDTH = 3
"""Arguments for a cut."""

CUTS_WIDTH = 4
"""Arguments for a list of cuts."""


def cut_schema(prefix: str = "") -> str:
    """The arguments of a cut as an op's schema has them.

    Args:
        prefix: of their names, for an op that has two cuts.
    """
    return f"SymInt[] {prefix}sizes, SymInt {prefix}key, int[] {prefix}nest"


def cuts_schema() -> str:
    """The arguments of a list of cuts as an op's schema has them."""
    return "SymInt[] sizes, SymInt[] keys, int[] nests, int[] lengths"


def write_cut(cut: GroupCut) -> tuple[Any, Any, Any]:
    """A cut as arguments."""
    return cut.sizes, cut.key, cut.nest


def read_cut(arguments: Sequence[Any]) -> GroupCut:
    """The cut that three arguments say."""
    return GroupCut(*arguments)


def write_cuts(cuts: Sequence[GroupCut]) -> tuple[list[Any], list[Any], list[Any], list[int]]:
    """A list of cuts as arguments."""
    sizes = [s for c in cuts for s in c.sizes]
    nests = [n for c in cuts for n in c.nest]
    return sizes, [c.key for c in cuts], nests, [n for c in cuts for n in (len(c.sizes), len(c.nest))]


def read_cuts(arguments: Sequence[Any]) -> list[GroupCut]:
    """The cuts that four arguments say."""
    sizes, keys, nests, lengths = arguments
    cuts: list[GroupCut] = []
    i = j = 0
    for key, n_sizes, n_nest in zip(keys, lengths[::2], lengths[1::2], strict=True):
        cuts.append(GroupCut(sizes[i : i + n_sizes], key, nests[j : j + n_nest]))
        i, j = i + n_sizes, j + n_nest
    return cuts
