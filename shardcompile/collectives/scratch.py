"""A cache of scratch memory for messages on the CPU.

PyTorch has no caching allocator for the CPU: large buffers return to the system when they are freed, and the next
buffer pays a page fault at the first touch of every page. That can take longer than sending its contents.
"""

from __future__ import annotations

import threading
from collections import defaultdict

import torch
from torch import Tensor

LIMIT = 128 * 2**20
"""Upper limit of the bytes that a process keeps unused."""

_SMALLEST = 2**18

_LENT = "_shardcompile_lent"

_free: defaultdict[int, list[torch.UntypedStorage]] = defaultdict(list)
"""Unused storages, keyed by size, a power of two."""

_lock = threading.Lock()
_kept = 0


def borrow(numel: int, like: Tensor) -> Tensor:
    """Returns an uninitialised flat tensor with the dtype and device of `like`, for `give_back` after use.

    A tensor that is not given back is freed like any other.
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
    """Returns borrowed memory to the cache. Neither the tensors nor views of them may be used afterwards.

    Args:
        borrowed: tensors from `borrow`. Other tensors, and those that were already given back, are ignored.
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
