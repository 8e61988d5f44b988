"""Imports all families of ops, which registers their records."""

# ruff: noqa: F401

from shardcompile.ops.attention import sharded as attention
from shardcompile.ops.foreach import sharded as foreach
from shardcompile.ops.fourier import sharded as fourier
from shardcompile.ops.index import counts, in_range, index_add
from shardcompile.ops.index import kernels as index_kernels
from shardcompile.ops.index import rule as index_rule
from shardcompile.ops.index import sharded as index
from shardcompile.ops.linalg import rule as linalg_rule
from shardcompile.ops.linalg import sharded as linalg
from shardcompile.ops.matmul import grouped
from shardcompile.ops.matmul import kernels as matmul_kernels
from shardcompile.ops.matmul import rule as matmul_rule
from shardcompile.ops.matmul import sharded as matmul
from shardcompile.ops.norm import group_norm
from shardcompile.ops.norm import kernels as norm_kernels
from shardcompile.ops.norm import rule as norm_rule
from shardcompile.ops.norm import sharded as norm
from shardcompile.ops.pointwise import kernels as pointwise_kernels
from shardcompile.ops.pointwise import rule as pointwise_rule
from shardcompile.ops.pointwise import sharded as pointwise
from shardcompile.ops.random import kernels as random_kernels
from shardcompile.ops.random import rule as random_rule
from shardcompile.ops.random import sharded as random
from shardcompile.ops.reduce import kernels as reduce_kernels
from shardcompile.ops.reduce import rule as reduce_rule
from shardcompile.ops.reduce import sharded as reduce
from shardcompile.ops.reduce import values
from shardcompile.ops.scan import kernels as scan_kernels
from shardcompile.ops.scan import rule as scan_rule
from shardcompile.ops.scan import sharded as scan
from shardcompile.ops.sort import rule as sort_rule
from shardcompile.ops.sort import sharded as sort
from shardcompile.ops.view import cat, diagonals, dtypes, memory, pad, reshape, slices, strided
from shardcompile.ops.view import kernels as view_kernels
from shardcompile.ops.view import rule as view_rule
from shardcompile.ops.window import interpolation, per_channel, unfold
from shardcompile.ops.window import rule as window_rule
from shardcompile.ops.window import sharded as window
