"""Memory for messages on the CPU, kept from one collective to the next.

The CPU has no caching allocator: large pieces of memory go back to the system when they are freed. Whoever takes the
next one pays for every page at the first touch. That can take longer than to send what is in it.
"""

from __future__ import annotations

import threading
from collections import defaultdict

import torch
from torch import Tensor

LIMIT = 128 * 2**20
"""Bytes that a process keeps at most while they are not in use."""

_SMALLEST = 2**18

_LENT = "_shardcompile_lent"

_free: defaultdict[int, list[torch.UntypedStorage]] = defaultdict(list)
"""What is not in use, by its size, a power of two."""

_lock = threading.Lock()
_kept = 0


def borrow(numel: int, like: Tensor) -> Tensor:
    """An uninitialised flat tensor with a tensor's dtype and device, to be given back.

    One that is not given back is freed as any other tensor.
    """
    nbytes = numel * like.dtype.itemsize
    if like.device.type != "cpu" or not _SMALLEST <= nbytes <= LIMIT:
        return like.new_empty([numel])
    size = 1 << (nbytes - 1).bit_length()
    storage = _take(size)
    x = like.new_empty([0]).set_(torch.UntypedStorage(size) if storage is None else storage, 0, [numel], [1])
    setattr(x, _LENT, True)
    return x


def give_back(*borrowed: Tensor) -> None:
    """Let other collectives have what was borrowed. Nothing may read or write it any more, nor a view of it.

    Args:
        borrowed: what `borrow` returned. Other tensors, and those that were given back, are left alone.
    """
    global _kept
    for x in borrowed:
        if not getattr(x, _LENT, False):
            continue
        delattr(x, _LENT)
        storage = x.untyped_storage()
        with _lock:
            if _kept + storage.nbytes() <= LIMIT:
                _kept += storage.nbytes()
                _free[storage.nbytes()].append(storage)


def _take(size: int) -> torch.UntypedStorage | None:
    global _kept
    with _lock:
        if not _free[size]:
            return None
        _kept -= size
        return _free[size].pop()
