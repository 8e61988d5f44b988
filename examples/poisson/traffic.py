"""Counts the collectives of a step and the bytes that they send, and gives a lower bound on these bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from examples.poisson.model import PointTransformer
from shardcompile.testing.watch import CollectiveWatch


@dataclass(frozen=True)
class Traffic:
    """The communication of one rank in a step.

    Attributes:
        collectives: the number of collectives.
        sent: the bytes that the rank sends, if each collective uses the algorithm that moves the fewest bytes.
    """

    collectives: int
    sent: float


def traffic_of(function: Callable[[], object], ranks: int) -> Traffic:
    """Runs a function and counts the communication of this rank, forward and backward.

    Args:
        function: eager or compiled. If it compiles anew, the counts are wrong.
        ranks: the size of all process groups that it uses.
    """
    counter = _Counter(ranks)
    with counter:
        function()
    return Traffic(counter.collectives, counter.sent)


class _Counter(CollectiveWatch):
    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks, self.collectives, self.sent = ranks, 0, 0.0

    def saw(self, name: str, x: Any, out: Any) -> None:
        self.collectives += 1
        self.sent += _bytes_sent(name, x, out, self.ranks)


def _bytes_sent(name: str, x: Tensor | list[Tensor], out: Tensor, ranks: int) -> float:
    """Returns the fewest bytes that this rank must send in a collective.

    Raises:
        NotImplementedError: the demo does not use this collective.
    """
    others = ranks - 1
    held = sum(t.nbytes for t in x) if isinstance(x, list) else x.nbytes
    match name.rpartition("::")[2]:
        case "all_reduce" | "all_reduce_":  # its share of 2 (w - 1) n, see `shardcompile.planning.moved_bytes`
            return 2 * others / ranks * held
        case "all_gather_v" | "all_gather_bucket" | "all_gather_into_tensor":  # its shard to each of the others
            return others * held
        case "reduce_scatter_v" | "reduce_scatter_bucket":  # all but its local shard
            return held - out.nbytes
        case _:
            raise NotImplementedError(f"the bytes that {name} sends are not known to the demo")


def lower_bound(net: PointTransformer, ranks: int) -> int:
    """Returns a lower bound on the bytes that all ranks together send in a step.

    The following values are sums over all points, to which every rank contributes and which every rank needs. Forward:
    totals and weights of the slices of each layer, and the two sums of the loss. Backward: the gradients of the
    attended slice tokens and of all parameters but those that act on tokens. An all-reduce of n bytes over w ranks
    moves at least 2 (w - 1) n bytes (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", 2009).
    """
    numel = 2
    for block in net.blocks:
        numel += _slice_numel(block.attention)
    numel += sum(p.numel() for name, p in net.named_parameters() if "query_key_value" not in name)
    return 2 * (ranks - 1) * numel * net.head.weight.element_size()


def _slice_numel(layer: Any) -> int:
    """Returns the number of reduced elements of a layer's slices: [H, S, D] and [H, S] forward, [H, S, D] backward."""
    rows = layer.assign.out_features
    return int(rows * (2 * layer.width + 1))
