"""Finds out which patches do not fit the running version of torch."""

from __future__ import annotations

import contextlib

from torch.fx.experimental.symbolic_shapes import ShapeEnv

from shardcompile.compat.patch import put_in
from shardcompile.compat.patches import OF_A_TRACE, all_patches


def try_all() -> None:
    """Puts all patches in, and takes them out: those that do not fit are in `patch.UNFIT` then."""
    with contextlib.ExitStack() as stack:
        put_in(OF_A_TRACE, ShapeEnv())
        put_in([patch for patch in all_patches() if patch not in OF_A_TRACE], stack)
