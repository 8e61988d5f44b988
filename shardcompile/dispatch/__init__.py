"""Dispatch: from an op on sharded tensors to the same op on blocks.

Receives the tensor class from its caller and does not import it.
"""

from shardcompile.dispatch.engine import clear_cache as clear_cache
from shardcompile.dispatch.engine import dispatch as dispatch
from shardcompile.dispatch.handlers import Handlers as Handlers
