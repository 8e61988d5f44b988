"""How many rows went where, as runs tell: for a graph whose rows go where data says, nothing else does."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from shardcompile.sharding import short_dtype


@dataclass
class MovedRows:
    """The exchanges over one group of rows that have the same parts.

    Attributes:
        ranks: of the group, in its order.
        row: what a row is made of, such as ``f32[64]``.
        row_bytes: of all its parts.
        calls: how many exchanges.
        rows: of all ranks and calls, those included that stay where they are.
        moved: those that went to another rank.
        unevenness: the most rows that a rank was given in a call, divided by the mean of the ranks; the largest of all
            calls.
    """

    ranks: tuple[int, ...]
    row: str
    row_bytes: int
    calls: int = 0
    rows: int = 0
    moved: int = 0
    unevenness: float = 0.0

    def add(self, counts: Tensor, back: bool) -> None:
        """Count an exchange.

        Args:
            counts: how many rows go from rank i to rank j of the group: [i, j].
            back: whether they go from j to i.
        """
        total = int(counts.sum())
        self.calls += 1
        self.rows += total
        self.moved += total - int(counts.diagonal().sum())
        if total:
            given = counts.sum(1 if back else 0)
            self.unevenness = max(self.unevenness, float(given.max()) * len(given) / total)


class _Recorder:
    def __init__(self) -> None:
        # Other ranks may be threads of this process.
        self.rank = dist.get_rank() if dist.is_initialized() else None
        self.found: dict[tuple[str, str], MovedRows] = {}


_RECORDERS: list[_Recorder] = []


@contextlib.contextmanager
def recording_rows() -> Iterator[dict[tuple[str, str], MovedRows]]:
    """Count the rows that exchanges of this rank move meanwhile; by the name of the group and what a row is made of."""
    recorder = _Recorder()
    _RECORDERS.append(recorder)
    try:
        yield recorder.found
    finally:
        _RECORDERS.remove(recorder)


def note_rows(group: ProcessGroup, inputs: Sequence[Tensor], counts: Tensor, back: bool) -> None:
    """Say that an exchange has begun; costs nothing where nobody records.

    Args:
        group: over which.
        inputs: what travels: [n, ...] each.
        counts: see `MovedRows.add`.
        back: see there.
    """
    for recorder in _RECORDERS:
        if recorder.rank in (None, dist.get_rank()):
            parts = [f"{short_dtype(x.dtype)}[{','.join(map(str, x.shape[1:]))}]" for x in inputs]
            key = group.group_name, ", ".join(parts)
            if key not in recorder.found:
                nbytes = sum(math.prod(x.shape[1:]) * x.itemsize for x in inputs)
                recorder.found[key] = MovedRows(tuple(dist.get_process_group_ranks(group)), key[1], nbytes)
            recorder.found[key].add(counts, back)
