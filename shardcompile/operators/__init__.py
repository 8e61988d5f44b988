"""Describes how ops run on sharded tensors: ``python -m shardcompile op aten.cumprod``, the page of operators."""

from shardcompile.operators.examples import Example as Example
from shardcompile.operators.examples import example_of as example_of
from shardcompile.operators.outcome import Outcome as Outcome
from shardcompile.operators.outcome import Ranks as Ranks
from shardcompile.operators.page import table as table
from shardcompile.operators.words import describe as describe
from shardcompile.operators.words import ops_named as ops_named
