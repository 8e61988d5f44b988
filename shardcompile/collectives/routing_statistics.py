"""Routing statistics: records at run time how many rows data-dependent exchanges move, which no graph can tell."""

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
    """Statistics of the exchanges over one group with the same payloads.

    Attributes:
        ranks: global ranks of the group, in its order.
        row: dtype and shape of the payloads of a row, such as ``f32[64]``.
        row_bytes: bytes of a row in all payloads.
        calls: number of exchanges.
        rows: number of rows over all ranks and calls, including those that stay on their rank.
        moved: number of rows that went to another rank.
        unevenness: imbalance: the most rows that a rank received in a call, divided by the mean over ranks; the maximum
            over all calls.
    """

    ranks: tuple[int, ...]
    row: str
    row_bytes: int
    calls: int = 0
    rows: int = 0
    moved: int = 0
    unevenness: float = 0.0

    def add(self, counts: Tensor, back: bool) -> None:
        """Adds an exchange to the statistics.

        Args:
            counts: counts[i, j] rows go from rank i to rank j of the group.
            back: whether they go from j to i instead.
        """
        total = int(counts.sum())
        self.calls += 1
        self.rows += total
        self.moved += total - int(counts.diagonal().sum())
        if total:
            received = counts.sum(1 if back else 0)
            self.unevenness = max(self.unevenness, float(received.max()) * len(received) / total)


class _Recorder:
    def __init__(self) -> None:
        # Other ranks may run as threads of this process.
        self.rank = dist.get_rank() if dist.is_initialized() else None
        self.found: dict[tuple[str, str], MovedRows] = {}


_RECORDERS: list[_Recorder] = []


@contextlib.contextmanager
def recording_rows() -> Iterator[dict[tuple[str, str], MovedRows]]:
    """Records the exchanges of this rank inside the context, keyed by group name and description of the payloads."""
    recorder = _Recorder()
    _RECORDERS.append(recorder)
    try:
        yield recorder.found
    finally:
        _RECORDERS.remove(recorder)


def note_rows(group: ProcessGroup, inputs: Sequence[Tensor], counts: Tensor, back: bool) -> None:
    """Notes that an exchange has started; free of cost if nothing is being recorded.

    Args:
        group: the process group.
        inputs: the payloads, each [n, ...].
        counts: see `MovedRows.add`.
        back: see `MovedRows.add`.
    """
    for recorder in _RECORDERS:
        if recorder.rank in (None, dist.get_rank()):
            parts = [f"{short_dtype(x.dtype)}[{','.join(map(str, x.shape[1:]))}]" for x in inputs]
            key = group.group_name, ", ".join(parts)
            if key not in recorder.found:
                nbytes = sum(math.prod(x.shape[1:]) * x.itemsize for x in inputs)
                recorder.found[key] = MovedRows(tuple(dist.get_process_group_ranks(group)), key[1], nbytes)
            recorder.found[key].add(counts, back)
