"""Ops on sharded tensors: one record for each op states how it runs.

`record` defines the facts that can be stated, `registry` keeps the records, `strategy` and `notation` are the language
of rules. The folders are families of ops. In each, `rule.py` sees layouts only, `sharded.py` has decompositions into
other ops on sharded tensors, and `kernels.py` has what runs on one local shard. `families` imports all of them.
"""

from shardcompile.ops.record import NotServed as NotServed
from shardcompile.ops.record import OpRecord as OpRecord
from shardcompile.ops.record import Order as Order
from shardcompile.ops.record import Rule as Rule
from shardcompile.ops.record import ShardedDecomposition as ShardedDecomposition
from shardcompile.ops.record import always as always
from shardcompile.ops.registry import CONDITIONS as CONDITIONS
from shardcompile.ops.registry import FUNCTIONS as FUNCTIONS
from shardcompile.ops.registry import NAMED_FUNCTIONS as NAMED_FUNCTIONS
from shardcompile.ops.registry import family as family
from shardcompile.ops.registry import find_rule as find_rule
from shardcompile.ops.registry import record_of as record_of
from shardcompile.ops.registry import records as records
from shardcompile.ops.registry import register as register
from shardcompile.ops.registry import registered_ops as registered_ops
from shardcompile.ops.registry import replace_rule as replace_rule
from shardcompile.ops.registry import state as state
from shardcompile.ops.registry import state_function as state_function
from shardcompile.ops.registry import state_named_function as state_named_function
from shardcompile.ops.strategy import OpCall as OpCall
from shardcompile.ops.strategy import Strategy as Strategy
from shardcompile.ops.strategy import TensorArg as TensorArg
from shardcompile.ops.strategy import along as along
from shardcompile.ops.strategy import replicate_all as replicate_all
