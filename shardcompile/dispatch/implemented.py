"""Has a rank with an empty shard refuse what the kernels of the other ranks refuse.

Kernels that do not know a dtype say so when they come to the elements. On an empty shard most of them return at once,
and the rank would go on alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from shardcompile.ops import OpRecord
from shardcompile.ops.support.copied_views import shard_as_held
from shardcompile.ops.support.global_meta import tensors_of
from shardcompile.sharded import Sharded

_MOST_ROWS = 16
_IMPLEMENTED: set[object] = set()
"""The calls, by op and dtypes, that kernels are known to take."""


def refuse_on_all_ranks(record: OpRecord, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
    """Raise what a kernel raises for the dtypes of a call, if some ranks have elements and others none.

    The op runs on a few zeros. Not in a trace: a graph serves ranks with and without elements.

    Raises:
        NotImplementedError: there is no kernel.
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
    except (RuntimeError, ValueError, TypeError, IndexError):  # zeros, or so few, are not what it wants
        pass
    _IMPLEMENTED.add(key)


def _is_empty_somewhere(x: Tensor) -> bool:
    """Whether a tensor with elements has an empty shard."""
    if not isinstance(x, Sharded) or x._spec.layout.is_traced or type(shard_as_held(x)) is not Tensor:
        return False
    return 0 not in x.shape and any(c is not None and 0 in c.sizes for c in x._spec.layout.partitions)


def _with_tensors(a: object, tensors: Iterator[Tensor]) -> object:
    if isinstance(a, Tensor):
        return next(tensors)
    return [_with_tensors(b, tensors) for b in a] if isinstance(a, (list, tuple)) else a
