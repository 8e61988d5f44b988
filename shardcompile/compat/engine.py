"""The autograd engine, as far as gradients of one backward pass are reduced together. Seen in torch 2.11 to 2.15."""

from __future__ import annotations

import sys

import torch
from torch.autograd.graph import Node


def backward_pass() -> int:
    """A number of the backward pass that runs in this thread, unique in the process; -1 if none does."""
    return torch._C._current_graph_task_id()  # 2.11 - 2.15


def run_after_others(node: Node) -> None:
    """Have the engine run a node after all other nodes that are ready.

    Of the nodes that are ready, the engine runs the one with the largest sequence number, which is the one that was
    made last.
    """
    node._set_sequence_nr(0)  # type: ignore[attr-defined]  # 2.11 - 2.15


def gradients_are_read_while_backward_runs() -> bool:
    """Whether `fully_shard` is used in this process.

    It reads the gradients of a module's parameters as soon as those of the module's inputs are computed, in the
    backward pass of a function of its own.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and bool(fsdp.FSDPModule.__subclasses__())
