"""Records of collectives, which each rank makes before it sends anything, as NCCL's flight recorder does."""

from __future__ import annotations

import functools
import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardcompile.diagnosis.backends import backend_of
from shardcompile.diagnosis.states import key_of
from shardcompile.diagnosis.watcher import World, is_watched, world_of
from shardcompile.errors import CollectiveError, DivergenceError

_T = TypeVar("_T")
_RECENT = 32
_TAG_BITS = 0x7FFFFFFF
_PAIRS = 1 << 16
"""The most pairs of successive torch collectives that a group remembers."""


class Entry(NamedTuple):
    """The record of a call. It does not refer to the group, which may be destroyed.

    Attributes:
        number: the sequence number of the call in its group.
        tag: the tag of its messages.
        kind: the name of the op.
        dtype: the dtype of the elements; None for messages between two ranks.
        labels: the names of the recorded values.
        stated: the recorded values: numbers, or tuples of numbers.
    """

    number: int
    tag: int
    kind: str
    dtype: torch.dtype | None
    labels: Sequence[str]
    stated: tuple[object, ...]

    def text(self) -> str:
        """Describes the collective."""
        if self.dtype is None:
            return self.kind
        dtype = str(self.dtype).removeprefix("torch.")
        details = [f"{label} {_value(v)}" for label, v in zip(self.labels, self.stated, strict=True)]
        return ", ".join([f"{self.kind} of {dtype}", *details])


class Call:
    """A collective that this rank has entered.

    Attributes:
        group: the process group.
        entry: the record of the call.
        members: this rank's calls of the group; None if the group is not watched.
    """

    __slots__ = ("entry", "group", "members")

    def __init__(self, group: ProcessGroup, members: Members | None, entry: Entry) -> None:
        self.group = group
        self.members = members
        self.entry = entry

    @property
    def tag(self) -> int:
        """The tag of its messages: a hash of the record, which is the same on all ranks of the group."""
        return self.entry.tag

    @staticmethod
    def between_two(group: ProcessGroup) -> Call:
        """Makes a call for messages between two ranks. It has no sequence number among the collectives of the group."""
        members = _members_of(group)
        return Call(group, members, Entry(0, 0, "messages between two ranks", None, (), ()))

    @property
    def of_all(self) -> bool:
        """Whether all ranks of the group take part."""
        return self.entry.dtype is not None

    def agree(self) -> None:
        """Waits until all ranks are about to run this torch collective, whose messages do not carry the tag."""
        if self.has_to_meet():
            self.meet()

    def has_to_meet(self) -> bool:
        """Returns whether the ranks must `meet` before this torch collective. Call it once for each collective.

        They need not if the group has already run this collective right after the previous one.
        """
        backend = None if self.members is None else backend_of(self.group.name())
        if self.members is None or backend is None or not backend.agrees:
            return False
        return self.members.is_new(self.tag)

    def meet(self) -> None:
        """Waits until all ranks of the group have arrived at this call.

        This is a dissemination barrier (Hensgen, Finkel, Manber, "Two algorithms for barrier synchronization", 1988).
        In round i, each rank sends to the rank at distance 2 ** i. It takes as long as a small collective.
        """
        rank, ranks = self.group.rank(), self.group.size()
        for step in (1 << i for i in range((ranks - 1).bit_length())):
            sent, received = torch.zeros(1), torch.zeros(1)
            works = self.run(
                [
                    functools.partial(self.group.recv, [received], (rank - step) % ranks, self.tag),
                    functools.partial(self.group.send, [sent], (rank + step) % ranks, self.tag),
                ]
            )
            self.run([work.wait for work in works])

    def run(self, steps: Iterable[Callable[[], _T]]) -> list[_T]:
        """Starts messages, or waits for them. If another rank does not take part, raises an error that says why.

        Args:
            steps: functions that send a message, receive one, or wait for one.

        Returns:
            The results of the steps.

        Raises:
            DivergenceError: another rank does not take part.
        """
        if self.members is None:
            return [step() for step in steps]
        world = self.members.world
        world.waits[self] = time.monotonic(), threading.get_ident()
        try:
            results = [step() for step in steps]
        except RuntimeError as error:
            raise world.explain_failure(self.entry.text(), error) from error
        finally:
            world.waits.pop(self, None)
        if self.members.mark is not None:
            world.queued.note(self, self.members.mark())
        return results


class Members:
    """The calls of one process group that this rank has made.

    Attributes:
        world: the watch over the default process group.
        group: a weak reference to the group.
        key: the key of the group, which is the same on all of its ranks.
        mark: see `Backend`.
        number: the number of calls so far.
        recent: the records of the last calls.
    """

    def __init__(self, world: World, group: ProcessGroup, key: str) -> None:
        self.world = world
        self.group = weakref.ref(group)
        backend = backend_of(group.name())
        self.mark = None if backend is None else backend.mark
        self.key = key
        self.number = 0
        self.recent: deque[Entry] = deque(maxlen=_RECENT)
        self._pairs: set[tuple[int, int]] = set()
        self._previous_tag = 0

    def is_new(self, tag: int) -> bool:
        """Returns whether a call with this tag follows the previous call for the first time."""
        pair = self._previous_tag, tag
        self._previous_tag = tag
        if pair in self._pairs:
            return False
        if len(self._pairs) >= _PAIRS:  # shapes keep varying; all ranks clear the set at the same call
            self._pairs.clear()
        self._pairs.add(pair)
        return True


_MEMBERS: weakref.WeakKeyDictionary[ProcessGroup, Members | None] = weakref.WeakKeyDictionary()
_UNKNOWN = object()
_HASHES: dict[object, int] = {}


def enter(group: ProcessGroup, kind: str, dtype: torch.dtype, labels: Sequence[str], *stated: object) -> Call:
    """Records a collective before anything is sent.

    Args:
        group: the process group.
        kind: the name of the op.
        dtype: the dtype of the elements.
        labels: the names of the recorded values, for messages.
        stated: the values to record: rank-invariant numbers, or tuples of numbers.

    Raises:
        DivergenceError: the ranks are already known to differ.
        CollectiveError: another thread of this rank waits in a collective of the group.
    """
    tag = hash((_stable_hash(kind), _stable_hash(dtype), stated)) & _TAG_BITS
    members = _members_of(group)
    if members is None:
        return Call(group, None, Entry(0, tag, kind, dtype, labels, stated))
    world = members.world
    if world.diagnosis is not None:
        raise DivergenceError(world.diagnosis)
    if world.waits:
        _refuse_another_thread(members, kind)
    members.number += 1
    entry = Entry(members.number, tag, kind, dtype, labels, stated)
    members.recent.append(entry)
    return Call(group, members, entry)


def _refuse_another_thread(members: Members, kind: str) -> None:
    """Raises if another thread of this rank waits in a collective of the group."""
    for call, (_, thread) in list(members.world.waits.items()):
        if call.members is members and thread != threading.get_ident():
            raise CollectiveError(
                f"{kind}: another thread of this rank is in {call.entry.text()} of the same group. Threads may come to "
                "collectives in another order on other ranks. Run all collectives in one thread, or give each thread "
                "its own mesh"
            )


def _members_of(group: ProcessGroup) -> Members | None:
    found = _MEMBERS.get(group, _UNKNOWN)
    return _join(group) if found is _UNKNOWN else found  # type: ignore[return-value]


def _stable_hash(name: object) -> int:
    """Hashes a name to a number that is the same in every process."""
    found = _HASHES.get(name)
    if found is None:
        found = _HASHES[name] = zlib.crc32(str(name).encode())
    return found


def _join(group: ProcessGroup) -> Members | None:
    """Starts to watch a group, and returns its calls; None if it needs no watch."""
    members = None
    world = world_of() if is_watched(group) else None
    if world is not None:
        ranks = dist.get_process_group_ranks(group)
        ordinal = sum(m.key.startswith(key_of(ranks, 0)[:-1]) for m in world.members)
        members = Members(world, group, key_of(ranks, ordinal))
        world.members.append(members)
    _MEMBERS[group] = members
    return members


def _value(x: object) -> str:
    return ",".join(map(str, x)) if isinstance(x, tuple) else str(x)
