"""Has one rank make what several ranks need, over the key-value store of a process group.

The first rank that asks for a key leads, and makes it. The others wait for what it publishes. No rank has to know which
other ranks will ask, so ranks that already have the result, or need another one, cannot be waited for in vain.

A leader counts up a beat while it works. If the beat stands still, because the rank died, was stopped, or hangs outside
of Python, the others say so and elect another leader for the next term. A leader that fails says why, and the others
then make it themselves: the same error would meet one leader after another.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
import zlib

from torch.distributed import Store

_LOG = logging.getLogger("shardcompile")

SILENCE = 7.0
"""Seconds without a beat after which a leader counts as lost."""

_BEAT = 1.0
"""Seconds between beats."""

_SLOW = 60.0
"""Seconds after which those who wait say so, again and again."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.5
"""Seconds between two looks at the store. Pauses grow, so that a long wait of many ranks does not load it."""

_PART = 4 << 20
"""The most bytes of a value. A TCPStore takes no message of more than 8 MiB."""

_DONE, _FAILED = b"done", b"failed"

_LOST: dict[str, int] = {}
"""The beats at which ranks were lost, by rank. One that has not beaten since is not waited for again."""


def _beat_of(rank: str) -> str:
    return f"shardcompile/beat/{rank}"


class Leadership:
    """What the leader holds until it publishes or fails.

    Args:
        store: of the process group.
        term: the prefix of the keys of this election.
        rank: of this process.
    """

    def __init__(self, store: Store, term: str, rank: str) -> None:
        self._store, self._term, self._rank = store, term, rank
        self._ended = threading.Event()
        if store.check([f"{term}/result"]):
            store.delete_key(f"{term}/result")  # this rank led before, and failed
        store.add(_beat_of(rank), 1)
        threading.Thread(target=self._beat, name="shardcompile-leader", daemon=True).start()

    def publish(self, content: bytes | None) -> None:
        """Ends the leadership: the result is made.

        Args:
            content: what the others get; None if there is nothing that they could use.
        """
        parts = _parts(content)
        for i, part in enumerate(parts):
            self._store.set(f"{self._term}/part{i}", part)  # type: ignore[arg-type]  # torch declares str, takes bytes
        self._end(_DONE + b" %d" % len(parts))

    def fail(self, reason: str) -> None:
        """Ends the leadership: this rank cannot make the result."""
        self._end(_FAILED + b" " + reason[:2000].encode())

    def _end(self, result: bytes) -> None:
        self._ended.set()
        self._store.set(f"{self._term}/result", result)  # type: ignore[arg-type]

    def _beat(self) -> None:
        while not self._ended.wait(_BEAT):
            try:
                self._store.add(_beat_of(self._rank), 1)
            except RuntimeError:  # the store has ended, and with it the job
                return


def elect(store: Store, key: str, rank: int, what: str, silence: float = SILENCE) -> Leadership | bytes | None:
    """Elects the rank that makes something, and waits for the result on the others.

    Args:
        store: of a process group with several ranks.
        key: names what is made; the same on all ranks that can share it.
        rank: of this process.
        what: what is made, for messages: ``the compiled code of a graph``.
        silence: seconds without a beat after which another leader is elected.

    Returns:
        On the leader its `Leadership`: it makes the result and publishes it. On another rank, and on the leader if it
        asks again, what was published; None if that is nothing, or the leader failed: then this rank makes it for
        itself.
    """
    try:
        for term in itertools.count():
            name = f"{key}/{term}"
            leader = store.compare_set(f"{name}/leader", "", str(rank)).decode()
            if leader == str(rank):
                made = _published_in(store, name)  # by this rank, which has asked before
                return Leadership(store, name, leader) if made is None else made
            result = _await(store, name, leader, what, silence)
            if result is not None:
                if result.startswith(_FAILED):
                    reason = result.partition(b" ")[2].decode()
                    _LOG.warning("rank %s could not make %s for all ranks: %s", leader, what, reason)
                return _content(store, name, result)
            _LOG.warning(
                "rank %s, which makes %s for all ranks, has not answered for %.0f s: another rank takes over",
                *(leader, what, silence),
            )
    except RuntimeError as error:
        _LOG.warning("the store of the process group failed (%s); rank %d makes %s itself", error, rank, what)
    return None


def published(store: Store, key: str) -> bytes | None:
    """Returns what the leader of a key has published; None if nothing (yet). Does not wait."""
    try:
        for term in itertools.count():
            name = f"{key}/{term}"
            made = _published_in(store, name)
            if made is not None or not store.check([f"{name}/leader"]):
                return made
    except RuntimeError:  # the store has ended
        return None
    return None


def _await(store: Store, name: str, leader: str, what: str, silence: float) -> bytes | None:
    """Waits for the result of a term; returns None if its leader is lost."""
    start = since = time.monotonic()
    beat, pause, said = -1, _FIRST_PAUSE, 0
    lost_at = _LOST.get(leader)
    while not store.check([f"{name}/result"]):
        now = time.monotonic()
        seen = store.add(_beat_of(leader), 0)
        if seen == lost_at:
            return None
        if seen != beat:
            beat, since = seen, now
        elif now - since > silence:
            _LOST[leader] = seen
            return None
        if now - start > _SLOW * (said + 1):
            said += 1
            _LOG.warning("waiting for %s from rank %s for %.0f s", what, leader, now - start)
        time.sleep(pause)
        pause = min(1.5 * pause, _LONGEST_PAUSE)
    return store.get(f"{name}/result")


def _published_in(store: Store, term: str) -> bytes | None:
    return _content(store, term, store.get(f"{term}/result")) if store.check([f"{term}/result"]) else None


def _content(store: Store, name: str, result: bytes) -> bytes | None:
    outcome, _, count = result.partition(b" ")
    parts = [store.get(f"{name}/part{i}") for i in range(int(count))] if outcome == _DONE else []
    return zlib.decompress(b"".join(parts)) if parts else None


def _parts(content: bytes | None) -> list[bytes]:
    if content is None:
        return []
    packed = zlib.compress(content, level=1)
    return [packed[at : at + _PART] for at in range(0, len(packed), _PART)]
