"""Finds ranks whose graphs would communicate differently, before they do so and not when they hang.

Each rank writes down the collectives of its graph: kind, dtype, bytes of the global tensor and reduction, in their
order. For every process group the ranks of it compare what they wrote, through the key-value store of the default
process group; nothing is sent over the groups themselves. Collectives on another group count if all ranks of this group
take part in them. So an exchanged order of two groups is found as well.

What was written down is kept beside the compiled code, in the compiler's caches too. Ranks compare it when the code
runs for the first time since it was compiled or loaded: the program calls its graphs in one order on every rank, but
when a graph is compiled is a matter of each rank. A backward graph is loaded from a cache together with its forward
graph, and may be compiled no sooner than in the first backward pass.

A rank that fails to compile says so, and the others raise instead of waiting for it in their first collective.
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
from shardcompile.passes.graph.collective import Collective, collectives

_POLL_SECONDS = 0.01


class OtherRankFailed(PassError):
    """This rank could go on, but another one failed to compile, or did not."""


@dataclass
class _Progress:
    """How far this rank has come in a world.

    Attributes:
        failures: how often a rank failed to compile. The count of graphs starts anew then, on every rank.
        graphs: how many graphs have been compared since, by group.
    """

    failures: int = 0
    graphs: Counter[str] = field(default_factory=Counter)

    def fail(self) -> None:
        """Count a failure."""
        self.failures += 1
        self.graphs.clear()


_PROGRESS: weakref.WeakKeyDictionary[dist.ProcessGroup, _Progress] = weakref.WeakKeyDictionary()


def _progress() -> _Progress:
    world = dist.group.WORLD
    assert world is not None, "there are collectives, so that there is a default process group"
    return _PROGRESS.setdefault(world, _Progress())


def signature(c: Collective) -> str:
    """What has to be the same on every rank of a group: a line of text."""
    size = None if c.descriptor.of_one_rank else c.global_size
    nbytes = f"{size} B" if isinstance(size, int) else "size not known"
    dtypes = " ".join(str(p.meta["val"].dtype).removeprefix("torch.") for p in c.payloads)
    words = [a for a in c.arguments._replace(group_name=None) if isinstance(a, str)]
    told = None if c.descriptor.of_one_rank else c.sizes
    sizes = [] if told is None else ["sharded of", ",".join(map(str, told))]
    return " ".join([c.kind, *words, dtypes, nbytes, *sizes])


Record = tuple[tuple[str, str], ...]
"""For each collective of a graph, in its order: what has to be the same on every rank, and the name of its group."""


def record_of(graph: Graph) -> Record:
    """What to compare of a graph."""
    return tuple((signature(c), c.group_name) for c in collectives(graph))


def is_record(value: object) -> bool:
    """Whether a value is a record; what was read from a file need not be."""
    return isinstance(value, tuple) and all(
        isinstance(entry, tuple) and len(entry) == 2 and all(isinstance(part, str) for part in entry) for entry in value
    )


def verify(record: Record) -> None:
    """Compare the collectives of a graph that is about to run with those of the other ranks of its groups.

    Every rank of a group has to call this for as many graphs with collectives on that group.

    Raises:
        PassError: on every rank of the group, they differ, or a rank failed to compile, or did not compile in time.
    """
    try:
        _compare_by_group(record)
    except PassError as error:
        _tell(error)  # ranks of other groups may be waiting for this one
        raise


def _compare_by_group(record: Record) -> None:
    groups = {name: compat.process_group(name) for _, name in record}
    members = {name: dist.get_process_group_ranks(group) for name, group in groups.items()}
    for name, group in groups.items():
        if group.size() < 2 or group.name() == "fake":
            continue
        shared = [(what, other) for what, other in record if set(members[name]) <= set(members[other])]
        # Groups of the same ranks have the same place in the list on each of them, whatever their names.
        places = {other: i for i, other in enumerate(dict.fromkeys(other for _, other in shared))}
        lines = [f"{what}, group {places[other]} of {len(members[other])} ranks" for what, other in shared]
        _compare(name, members[name], lines)


def agreed(lines: Sequence[str]) -> list[str]:
    """The lines that every rank has, in this rank's order.

    For decisions that one rank's graph cannot tell to be the same on the others. Every rank of the default process
    group has to call this, as often as the others; what it compiles may not come out of a cache.
    """
    if not dist.is_initialized() or dist.get_world_size() < 2 or dist.get_backend() == "fake":
        return list(lines)
    progress = _progress()
    key = f"shardcompile/agree/{progress.failures}/{progress.graphs['']}"  # no group has an empty name
    everywhere = [json.loads(text) for text in _exchange(key, range(dist.get_world_size()), json.dumps(list(lines)))]
    progress.graphs[""] += 1
    return [line for line in lines if all(line in one for one in everywhere)]


def report_failure(error: BaseException) -> None:
    """Tell the ranks that wait for this one that it could not compile."""
    # Without verification, ranks compare only some graphs, and would hear of this failure when it is long over.
    if config.verify:
        _tell(error)


def _tell(error: BaseException) -> None:
    if _is_of_another_rank(error):
        return
    if dist.is_initialized() and dist.get_world_size() > 1 and dist.get_backend() != "fake":
        text = f"rank {dist.get_rank()} failed to compile: {type(error).__name__}: {error}"
        progress = _progress()
        compat.store().set(_failure_key(progress), text[:2000])
        progress.fail()


def _is_of_another_rank(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, OtherRankFailed):
        error = error.__cause__ or error.__context__  # Inductor wraps what it catches
    return error is not None


def _failure_key(progress: _Progress) -> str:
    return f"shardcompile/verify/{progress.failures}/failed"


def _compare(group_name: str, ranks: Sequence[int], lines: Sequence[str]) -> None:
    progress = _progress()
    number = f"{progress.failures}/{progress.graphs[group_name]}"
    key = f"shardcompile/verify/{','.join(map(str, ranks))}/{group_name}/{number}"
    digest = hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()
    digests = _exchange(f"{key}/digest", ranks, digest)
    progress.graphs[group_name] += 1
    if len(set(digests)) == 1:
        return
    texts = [text.split("\n") if text else [] for text in _exchange(f"{key}/text", ranks, "\n".join(lines))]
    other = next(i for i, d in enumerate(digests) if d != digests[0])
    raise PassError(_difference(ranks[0], texts[0], ranks[other], texts[other]))


def _difference(rank: int, lines: Sequence[str], other_rank: int, others: Sequence[str]) -> str:
    same = next(
        (i for i, (a, b) in enumerate(zip(lines, others, strict=False)) if a != b), min(len(lines), len(others))
    )
    at = [x[same] if same < len(x) else "none: there are no more" for x in (lines, others)]
    return (
        f"ranks {rank} and {other_rank} have compiled different collectives, and would wait for one another without "
        f"end. They differ from number {same} on (of {len(lines)} and {len(others)}): rank {rank} has {at[0]}; rank "
        f"{other_rank} has {at[1]}. The program, or a pass, takes a decision by what only one rank knows: the rank, "
        "the size of its shard, or its values. Where it is a pass, torch.compile(backend='inductor') does without"
    )


def _exchange(key: str, ranks: Sequence[int], value: str) -> list[str]:
    """What each rank has set, in the order of `ranks`."""
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
                store.delete_key(f"{key}/{dist.get_rank()}")  # as if it had not been compiled here either
                raise OtherRankFailed(
                    f"rank {rank} did not compile this graph within {config.verify_timeout:.0f} s, as rank "
                    f"{dist.get_rank()} did. It has other guards or other code, or it failed; see its output, or raise "
                    "shardcompile.config.verify_timeout if it only is slow"
                )
            time.sleep(_POLL_SECONDS)
    return [store.get(f"{key}/{rank}").decode() for rank in ranks]
