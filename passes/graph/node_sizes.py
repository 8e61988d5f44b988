"""The sizes of a graph's nodes, and of the process groups of its collectives."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.fx import Node

from shardcompile import compat
from shardcompile.collectives import traffic
from shardcompile.collectives.traffic import Member
from shardcompile.passes.graph.collective import Collective


def members(c: Collective, group_size: int | None) -> list[Member]:
    """Returns what the ranks contribute and get, for each payload of a collective.

    Args:
        c: any.
        group_size: of its group; None if it is unknown, and with it the partitions of torch.chunk.
    """
    return c.descriptor.members_of(c.values, group_size)


def nbytes_of(node: Node) -> int:
    """Returns the bytes of a node's tensors, by hints."""
    value = node.meta.get("val")
    return traffic.nbytes_of(value) if isinstance(value, torch.Tensor) else sum(map(traffic.nbytes_of, tensors(node)))


def tensors(node: Node) -> list[torch.Tensor]:
    """Returns a node's fake tensors."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return [value]
    return [v for v in value if isinstance(v, torch.Tensor)] if isinstance(value, (list, tuple)) else []


def size_of_group(name: str, group_sizes: Mapping[str, int]) -> int | None:
    """Returns the number of ranks of a group; None if it is neither given nor a process group of this process."""
    if name in group_sizes:
        return group_sizes[name]
    try:
        return compat.process_group(name).size()
    except (RuntimeError, ValueError, LookupError):
        return None


def ranks_of_group(name: str) -> list[int] | None:
    """Returns the global ranks of a group; None if it is no process group of this process."""
    try:
        return dist.get_process_group_ranks(compat.process_group(name))
    except (RuntimeError, ValueError, LookupError):
        return None
