"""Results that eager mode keeps with a tensor, for later ops, until the tensor is written to.

Examples are the value of a pending sum, the halos of a convolution and the gather plan of an index. Each of them took a
collective. Ranks find the same results: keys, the order of calls and writes to a tensor do not depend on the rank. A
graph needs nothing of this, since equal collectives of a graph are one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from shardcompile.ops.support.copied_views import Writes, watch
from shardcompile.sharded import Sharded

_MOST = 8
"""How many results one tensor keeps. The least recently used one is dropped."""


class _Kept(NamedTuple):
    value: Any
    state: object
    writes: Writes


def sees_writes(x: Sharded) -> bool:
    """Whether a tensor holds values, and every write to it by an op is seen."""
    local = x._local_tensor
    return type(local) is Tensor and not (x.is_inference() or local.is_inference())


def keep(x: Sharded, key: object, value: object) -> None:
    """Keeps a result with a tensor for which `sees_writes` holds.

    Args:
        x: the tensor.
        key: rank-invariant.
        value: the result.
    """
    results = x._kept = {} if x._kept is None else x._kept
    results.pop(key, None)
    writes = watch(x._local_tensor)
    results[key] = _Kept(value, _state(x, writes), writes)
    if len(results) > _MOST:
        del results[next(iter(results))]


def kept(x: Sharded, key: object) -> Any:
    """Returns what `keep` was given; None if there is nothing, or the tensor has been written to since."""
    found = None if x._kept is None else x._kept.get(key)
    if found is None or found.state != _state(x, found.writes):
        return None
    x._kept[key] = x._kept.pop(key)
    return found.value


def _state(x: Sharded, writes: Writes) -> object:
    """Changes with every write: by ops on this tensor or its views, on others of its storage, on the local shard."""
    return x._version, writes.count, x._local_tensor._version
