"""Counts the collectives of a step and the bytes they move, and the fewest bytes that would do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shardcompile.testing.watch import CollectiveWatch

from .model import PointTransformer


@dataclass(frozen=True)
class Traffic:
    """What one rank communicates in a step.

    Attributes:
        collectives: how many it takes part in.
        sent: bytes that it sends, if each collective is carried out by the algorithm that moves the fewest.
    """

    collectives: int
    sent: float


def traffic_of(function: Callable[[], object], ranks: int) -> Traffic:
    """Run a function and count what this rank communicates, forward and backward.

    Args:
        function: eager or compiled; what it compiles anew is not counted right.
        ranks: size of all process groups used.
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
    """Bytes that this rank sends, at least, so that its input becomes its output.

    Raises:
        NotImplementedError: for a collective that the demo does not use.
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
    """The fewest bytes that all ranks together must send in a step.

    These numbers are sums over all points, so that every rank has a share of them, and every rank needs the result:
    totals and weights of the slices of each layer and the two sums of the loss, in the forward pass; the gradients of
    the attended slice tokens and of all parameters but those that work on tokens, in the backward pass. Summing n
    bytes over w ranks, for all of them, moves 2 (w - 1) n bytes at least, if every rank has a share (Patarasuk and
    Yuan, "Bandwidth optimal all-reduce algorithms", 2009).
    """
    numbers = 2
    for shard in net.shards:
        numbers += _slice_numbers(shard.attention)
    numbers += sum(p.numel() for name, p in net.named_parameters() if "query_key_value" not in name)
    return 2 * (ranks - 1) * numbers * net.head.weight.element_size()


def _slice_numbers(layer: Any) -> int:
    """Numbers of a layer's slices that are summed: [H, S, D] and [H, S] forward, [H, S, D] backward."""
    rows = layer.assign.out_features
    return int(rows * (2 * layer.width + 1))
