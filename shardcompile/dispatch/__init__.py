"""Dispatch: from an op on sharded tensors to the same op on local shards.

It knows ops by their records only, and the class of sharded tensors by its base.
"""

from shardcompile.dispatch.engine import clear_cache as clear_cache
from shardcompile.dispatch.engine import dispatch as dispatch
from shardcompile.dispatch.engine import way_of as way_of
from shardcompile.dispatch.handlers import Handlers as Handlers
from shardcompile.ops import families

__all__ = ["Handlers", "clear_cache", "dispatch", "families", "way_of"]
