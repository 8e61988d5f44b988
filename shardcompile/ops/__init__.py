"""Ops: one record for each says what happens to it.

`record` says what can be stated, `registry` keeps the one table, `strategy` and `notation` are the language of rules.
The folders are families of ops: `rule.py` knows layouts only, `sharded.py` has forms on sharded tensors, `kernels.py`
what runs on one shard. `families` imports all of them.
"""

from shardcompile.ops.record import Form as Form
from shardcompile.ops.record import OpRecord as OpRecord
from shardcompile.ops.record import Order as Order
from shardcompile.ops.record import Rule as Rule
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
