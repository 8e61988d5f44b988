"""Makes ranks with an empty shard raise where the kernels of the other ranks raise.

Kernels raise for an unsupported dtype only when they reach the elements. On an empty shard most of them return early,
so that this rank would continue while the others raise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from shardcompile.ops import OpRecord
from shardcompile.ops.support.copied_views import stored_shard
from shardcompile.ops.support.global_meta import tensors_of
from shardcompile.sharded import Sharded

_MOST_ROWS = 16
_IMPLEMENTED: set[object] = set()
"""The calls, by op and dtypes, that kernels are known to support."""


def refuse_on_all_ranks(record: OpRecord, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
    """Raises what a kernel raises for the dtypes of a call, if some ranks have empty shards and others do not.

    The op runs once on a few zeros. Layouts of a trace are not checked: one graph serves ranks with and without
    elements.

    Raises:
        NotImplementedError: no kernel supports the dtypes.
    """
    given = list(tensors_of([*args, *kwargs.values()]))
    if (
        record.op.namespace != "aten"
        or record.op.is_view
        or record.is_random
        or not any(map(_is_empty_somewhere, given))
    ):
        return
    others = (a if isinstance(a, torch.dtype) else type(a) for a in (*args, *kwargs.values()))
    key = (record.op, *[x.dtype for x in given], *others)
    if key in _IMPLEMENTED:
        return
    zeros = iter([torch.zeros([min(n, _MOST_ROWS) for n in x.shape], dtype=x.dtype, device=x.device) for x in given])
    try:
        with torch.no_grad():
            record.op(
                *[_with_tensors(a, zeros) for a in args], **{k: _with_tensors(a, zeros) for k, a in kwargs.items()}
            )
    except NotImplementedError:
        raise
    except (
        RuntimeError,
        ValueError,
        TypeError,
        IndexError,
    ):  # the op refuses the values or the reduced sizes, not the dtypes
        pass
    _IMPLEMENTED.add(key)


def _is_empty_somewhere(x: Tensor) -> bool:
    """Whether some rank has an empty shard of a tensor that is not empty."""
    if not isinstance(x, Sharded) or x._spec.layout.has_symbols or type(stored_shard(x)) is not Tensor:
        return False
    return 0 not in x.shape and any(c is not None and 0 in c.sizes for c in x._spec.layout.partitions)


def _with_tensors(a: object, tensors: Iterator[Tensor]) -> object:
    if isinstance(a, Tensor):
        return next(tensors)
    return [_with_tensors(b, tensors) for b in a] if isinstance(a, (list, tuple)) else a
