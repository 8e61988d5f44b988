"""Finds ranks whose compiled graphs would communicate differently, before they run and hang.

It runs with ``SHARDCOMPILE_VERIFY=1``, or with `config.verify`. Without it, `shardcompile.diagnosis` raises a
`DivergenceError` when such ranks meet. What makes graphs equal in the first place are decisions by rank-invariant data
(`shardcompile.dispatch`), the plans of `shardcompile.passes.plan`, and the patches of `shardcompile.compat.compiling`.

Each rank records the collectives of its graph in order: kind, dtype, bytes of the global tensor and reduction. The
ranks of every process group compare their records through the key-value store of the default process group; nothing is
sent over the groups themselves. Collectives of another group are included in the comparison if all ranks of this group
take part in them, so that a swapped order of two groups is found as well.

The record is stored with the compiled code, in the compiler's caches too. Ranks compare it when the code runs for the
first time since it was compiled or loaded: the program calls its graphs in the same order on every rank, but each rank
compiles them at its own time. A backward graph is loaded from a cache together with its forward graph, and may be
compiled as late as in the first backward pass.

A rank that fails to compile reports it, and the others raise instead of waiting for it in their first collective.
"""

from __future__ import annotations

import hashlib
import json
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.distributed as dist
from torch.fx import Graph

from shardcompile import compat, config
from shardcompile.errors import PassError
from shardcompile.passes.graph.collective import collectives

_POLL_SECONDS = 0.01


class OtherRankFailed(PassError):
    """Raised on a rank that could go on, when another rank failed to compile or did not compile."""


@dataclass
class _Progress:
    """Counts what this rank has compared with the ranks of one default process group.

    Attributes:
        failures: how often a rank failed to compile. The count of graphs then restarts on every rank.
        graphs: how many graphs have been compared since the last failure, by group.
    """

    failures: int = 0
    graphs: Counter[str] = field(default_factory=Counter)

    def fail(self) -> None:
        """Counts a failure and restarts the count of graphs."""
        self.failures += 1
        self.graphs.clear()


_PROGRESS: weakref.WeakKeyDictionary[dist.ProcessGroup, _Progress] = weakref.WeakKeyDictionary()


def _progress() -> _Progress:
    world = dist.group.WORLD
    assert world is not None, "there are collectives, so that there is a default process group"
    return _PROGRESS.setdefault(world, _Progress())


Record = tuple[tuple[str, str], ...]
"""The collectives of a graph in order: for each its signature and the name of its group."""


def record_of(graph: Graph) -> Record:
    """Returns the record of a graph."""
    return tuple((c.signature, c.group_name) for c in collectives(graph))


def verify(record: Record) -> None:
    """Compares the collectives of a graph that is about to run with those of the other ranks of its groups.

    Every rank of a group has to call this once for each of its graphs with collectives on that group.

    Raises:
        PassError: on every rank of the group, if the records differ, or a rank failed to compile or timed out.
    """
    try:
        _compare_by_group(record)
    except PassError as error:
        _report(error)  # ranks of other groups may be waiting for this one
        raise


def _compare_by_group(record: Record) -> None:
    groups = {name: compat.process_group(name) for _, name in record}
    members = {name: dist.get_process_group_ranks(group) for name, group in groups.items()}
    for name, group in groups.items():
        if group.size() < 2 or group.name() == "fake":
            continue
        shared = [(line, other) for line, other in record if set(members[name]) <= set(members[other])]
        # A group has the same position in this list on all of its ranks, whatever its name there.
        positions = {other: i for i, other in enumerate(dict.fromkeys(other for _, other in shared))}
        lines = [f"{line}, group {positions[other]} of {len(members[other])} ranks" for line, other in shared]
        _compare(name, members[name], lines)


def agreed(lines: Sequence[str]) -> list[str]:
    """Returns the lines that every rank has, in this rank's order.

    It serves decisions whose rank-invariance does not follow from this rank's graph. Every rank of the default process
    group has to call it equally often, so code that depends on it may not be cached.
    """
    if not compat.has_other_ranks():
        return list(lines)
    progress = _progress()
    key = f"shardcompile/agree/{progress.failures}/{progress.graphs['']}"  # no group has an empty name
    everywhere = [json.loads(text) for text in _exchange(key, range(dist.get_world_size()), json.dumps(list(lines)))]
    progress.graphs[""] += 1
    return [line for line in lines if all(line in one for one in everywhere)]


def report_failure(error: BaseException) -> None:
    """Tells the ranks that wait for this one that it failed to compile."""
    # Without verification, ranks compare only some graphs, and would read of this failure long after it.
    if config.verify:
        _report(error)


def _report(error: BaseException) -> None:
    if _is_from_another_rank(error):
        return
    if compat.has_other_ranks():
        text = f"rank {dist.get_rank()} failed to compile: {type(error).__name__}: {error}"
        progress = _progress()
        compat.store().set(_failure_key(progress), text[:2000])
        progress.fail()


def _is_from_another_rank(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, OtherRankFailed):
        error = error.__cause__ or error.__context__  # Inductor wraps what it catches
    return error is not None


def _failure_key(progress: _Progress) -> str:
    return f"shardcompile/verify/{progress.failures}/failed"


def _compare(group_name: str, ranks: Sequence[int], lines: Sequence[str]) -> None:
    progress = _progress()
    position = f"{progress.failures}/{progress.graphs[group_name]}"
    key = f"shardcompile/verify/{','.join(map(str, ranks))}/{group_name}/{position}"
    digest = hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()
    digests = _exchange(f"{key}/digest", ranks, digest)
    progress.graphs[group_name] += 1
    if len(set(digests)) == 1:
        return
    texts = [text.split("\n") if text else [] for text in _exchange(f"{key}/text", ranks, "\n".join(lines))]
    other = next(i for i, d in enumerate(digests) if d != digests[0])
    raise PassError(_difference(ranks[0], texts[0], ranks[other], texts[other]))


def _difference(rank: int, lines: Sequence[str], other_rank: int, others: Sequence[str]) -> str:
    first = next(
        (i for i, (a, b) in enumerate(zip(lines, others, strict=False)) if a != b), min(len(lines), len(others))
    )
    at = [x[first] if first < len(x) else "none: there are no more" for x in (lines, others)]
    return (
        f"ranks {rank} and {other_rank} have compiled different collectives and would hang. They differ from "
        f"collective number {first} on (of {len(lines)} and {len(others)}): rank {rank} has {at[0]}; rank "
        f"{other_rank} has {at[1]}. The program, or a pass, decides by something that is not rank-invariant: the rank, "
        "the size of its local shard, or its values. If it is a pass, torch.compile(backend='inductor') does without it"
    )


def _exchange(key: str, ranks: Sequence[int], value: str) -> list[str]:
    """Publishes this rank's value and returns those of all ranks, in the order of `ranks`."""
    store, progress = compat.store(), _progress()
    failed = _failure_key(progress)
    store.set(f"{key}/{dist.get_rank()}", value)
    end = time.monotonic() + config.verify_timeout
    for rank in ranks:
        while not store.check([f"{key}/{rank}"]):
            if store.check([failed]):
                progress.fail()
                raise OtherRankFailed(store.get(failed).decode())
            if time.monotonic() > end:
                store.delete_key(f"{key}/{dist.get_rank()}")  # as if this rank had not compiled it either
                raise OtherRankFailed(
                    f"rank {rank} did not compile this graph within {config.verify_timeout:.0f} s, as rank "
                    f"{dist.get_rank()} did. It has other guards or other code, or it failed; see its output, or raise "
                    "shardcompile.config.verify_timeout if it only is slow"
                )
            time.sleep(_POLL_SECONDS)
    return [store.get(f"{key}/{rank}").decode() for rank in ranks]
