"""Dispatch: runs an op on sharded tensors by running it on local shards.

It depends on ops only through their records, and on the class of sharded tensors only through its base class.
"""

from shardcompile.dispatch.engine import clear_cache as clear_cache
from shardcompile.dispatch.engine import dispatch as dispatch
from shardcompile.dispatch.engine import path_of as path_of
from shardcompile.dispatch.handlers import Handlers as Handlers
from shardcompile.ops import families

__all__ = ["Handlers", "clear_cache", "dispatch", "families", "path_of"]
