"""The dispatch engine: looks up the decision for a call in a cache, or makes it, and runs it.

A decision depends only on the op, the layouts and strides of its tensors, and the other arguments. It never depends on
the rank or on local values. In eager mode a decision is cached; while tracing, where sizes are symbols, it is made for
every call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardcompile import compat
from shardcompile.compat import OpOverload
from shardcompile.dispatch.calls import tensors_text
from shardcompile.dispatch.decide import decide
from shardcompile.dispatch.handlers import Handlers
from shardcompile.dispatch.run import Entry
from shardcompile.errors import UnsupportedOpError
from shardcompile.ops.support.global_meta import tensors_of
from shardcompile.sharded import Sharded
from shardcompile.sharding import Layout, Partition

_CACHE: dict[Any, Entry] = {}
_CACHE_LIMIT = 1 << 15


def clear_cache() -> None:
    """Clears the cache of decisions; called after a rule has changed."""
    _CACHE.clear()


def dispatch(
    cls: type[Sharded],
    op: OpOverload,
    types: Sequence[type],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, object] | None = None,
) -> object:
    """Runs an op with at least one sharded tensor among its arguments: the `__torch_dispatch__` of the class.

    Args:
        cls: the class of sharded tensors.
        op: the op overload.
        types: the classes of the tensor arguments.
        args: the positional arguments.
        kwargs: the keyword arguments.
    """
    if torch.is_inference_mode_enabled() and op.is_view and not args[0].is_inference():
        # A view of an ordinary tensor is an ordinary tensor even in inference mode, because both share a version
        # counter.
        with torch.inference_mode(False), torch.no_grad():
            return dispatch(cls, op, types, args, kwargs)
    # The common argument types are inlined, without a function call per argument: every eager op pays for this.
    key: list[Any] = [id(op)]
    for a in args:
        kind = type(a)
        if kind is cls:
            key.append(id(a._spec))
        elif kind is list and a and type(a[0]) is int:
            key.append(tuple(a))
        else:
            _extend_key(key, cls, a)
    if kwargs:
        for name, a in kwargs.items():
            key.append(name)
            _extend_key(key, cls, a)
    else:
        kwargs = {}
    try:
        entry = _CACHE.get(tuple(key))
    except TypeError:  # a symbolic size cannot be hashed
        entry = None
    if entry is None:
        if op in Handlers.ops:
            return Handlers.ops[op](*args, **kwargs)
        try:
            entry = decide(cls, op, args, kwargs)
            _remember(cls, key, entry, args, kwargs)
            out = entry.run(cls, args, kwargs)
        except compat.UNKNOWN_SIZE as error:
            raise UnsupportedOpError(
                f"{op} cannot be compiled where only a run tells the number of rows: torch takes a decision by it "
                f"({tensors_text(cls, args, kwargs)}). Redistribute that dim to Replicate before it, or call it "
                "outside of the compiled function"
            ) from error
        for x in tensors_of([*args, *kwargs.values()]):
            if type(x) is cls and not x._spec.is_plain:
                _refuse_specialised(op, x._spec.layout)
        return out
    return entry.run(cls, args, kwargs)


def _extend_key(key: list[Any], cls: type[Sharded], a: Any) -> None:
    """Extends the cache key by an argument; specs are keyed by identity, and the entry keeps them alive."""
    kind = type(a)
    key.append(kind)  # 1, 1.0 and True are equal but not the same argument
    if kind is cls:
        key.append(id(a._spec))
    elif kind is list or kind is tuple:
        if a and type(a[0]) is int:
            key.append(tuple(a))
            return
        key.append(len(a))
        for b in a:
            _extend_key(key, cls, b)
    elif isinstance(a, Tensor) and a.is_nested:
        key.append([])  # makes the key unhashable: it has no shape, and is refused
    elif isinstance(a, Tensor):
        key.extend((tuple(a.shape), a.stride(), a.dtype, a.device))
    elif kind is torch.Generator:  # the decision is the same for all generators
        return
    else:
        key.append([] if kind is torch.SymFloat or kind is torch.SymBool else a)  # unhashable, like a `SymInt`


def _remember(
    cls: type[Sharded], key: list[object], entry: Entry, args: Sequence[object], kwargs: dict[str, object]
) -> None:
    specs = [x._spec for x in tensors_of([*args, *kwargs.values()]) if type(x) is cls]
    if not all(s.is_plain for s in specs):
        return
    entry.specs_by_id = specs
    if len(_CACHE) >= _CACHE_LIMIT:
        _CACHE.clear()
    try:
        _CACHE[tuple(key)] = entry
    except TypeError:  # a symbolic size among the other arguments
        return


def _refuse_specialised(op: OpOverload, layout: Layout) -> None:
    """Raises, on all ranks, if a trace has specialized the size of this rank's local shard.

    It was specialized on the hint, which all ranks share. The graph would be correct only on the ranks whose local
    shard happens to have this size, and the ranks would diverge.
    """
    for dim, partition in enumerate(layout.partitions):
        if (
            partition is not None
            and partition.is_traced
            and compat.is_specialised(partition.trace.local_size)
            and not _is_known_static(partition)
        ):
            raise UnsupportedOpError(
                f"{op} cannot be compiled on a shard whose size is not known beforehand: it takes the size of dim "
                f"{dim} for a number ({layout.describe()}). Redistribute that dim to Replicate before it, or call it "
                "outside of the compiled function"
            )


def _is_known_static(partition: Partition) -> bool:
    """Whether guards of the trace have established that a partition equals a static one."""
    trace = partition.trace
    return compat.was_specialised(trace.local_size) or (
        partition.kind == "dynamic" and (isinstance(trace.key, int) or compat.is_specialised(trace.key))
    )


def path_of(cls: type[Sharded], op: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> str:
    """Describes how dispatch would run a call, without running it."""
    return decide(cls, op, args, kwargs).path


compat.forget_with_world(clear_cache)
