"""Dispatch: from an op on sharded tensors to the same op on blocks.

Receives the tensor class from its caller and does not import it. The engine knows ops by their records only; modules
that are imported here for what they state are listed last.
"""

from shardcompile import rules
from shardcompile.dispatch import (
    attention,
    decompositions,
    index_range,
    interpolation,
    listwise,
    local_ops,
    memory_ops,
    random,
    windows,
)
from shardcompile.dispatch.engine import clear_cache as clear_cache
from shardcompile.dispatch.engine import dispatch as dispatch
from shardcompile.dispatch.engine import way_of as way_of
from shardcompile.dispatch.handlers import Handlers as Handlers

__all__ = [
    "attention",
    "decompositions",
    "index_range",
    "interpolation",
    "listwise",
    "local_ops",
    "memory_ops",
    "random",
    "rules",
    "windows",
]
