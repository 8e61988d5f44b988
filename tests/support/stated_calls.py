"""Notes what each rank states of its collectives, where ranks are threads: all ranks of a group have to state the same."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardcompile.diagnosis import recorded_calls
from shardcompile.diagnosis.states import key_of, members_of


class _Noted(recorded_calls.Members):
    """The calls of a group, all of them."""

    def __init__(self, group: ProcessGroup) -> None:
        quiet: Any = SimpleNamespace(diagnosis=None, waits={}, explain_failure=lambda what, error: error)
        super().__init__(quiet, group, key_of(dist.get_process_group_ranks(group), 0))
        self.rank = dist.get_rank()
        self.recent = []  # type: ignore[assignment]


_NOTED: dict[ProcessGroup, _Noted] = {}


@contextlib.contextmanager
def noting() -> Iterator[None]:
    """Note the calls of all groups inside of this, from the beginning."""

    def members(group: ProcessGroup) -> _Noted:
        if group not in _NOTED:
            _NOTED[group] = _Noted(group)
        return _NOTED[group]

    _NOTED.clear()
    with mock.patch.object(recorded_calls, "_members_of", members):
        yield


def differences() -> list[str]:
    """For each group the first call that ranks have stated differently; to be called on every rank."""
    mine: dict[str, list[tuple[int, str]]] = {}
    for noted in list(_NOTED.values()):
        if noted.rank == dist.get_rank():
            mine.setdefault(noted.key, []).extend((e.tag, e.text()) for e in noted.recent)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    found = []
    for key in {k for calls_of in everyone for k in calls_of}:
        first, *others = members_of(key)
        for other in others:
            a, b = everyone[first].get(key, []), everyone[other].get(key, [])
            same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            if len(a) != len(b) or same < len(a):
                what = [c[same][1] if same < len(c) else "none" for c in (a, b)]
                found.append(f"call {same} of {len(a)} and {len(b)}: rank {first} {what[0]}; rank {other} {what[1]}")
    return found
