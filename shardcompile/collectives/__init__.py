"""Functional collectives on blocks of any size.

Each one is an op of the namespace ``shardcompile``: it returns a new tensor, which is complete after a wait, as with
``_c10d_functional``. It has a fake and an autograd implementation, and stays one node in a graph. Its descriptor says
all of it: `shardcompile.collectives.descriptor`. Importing its module registers the op and tells the passes about it.
"""

import shardcompile.collectives.around
import shardcompile.collectives.mirrors
import shardcompile.collectives.of_torch
import shardcompile.collectives.own_blocks
import shardcompile.collectives.range_bucket
import shardcompile.collectives.stretches
import shardcompile.collectives.turns  # noqa: F401
from shardcompile.collectives.buckets import bucket_dtype as bucket_dtype
from shardcompile.collectives.cuts_of_blocks import symbolic_cut as symbolic_cut
from shardcompile.collectives.derived_cuts import block_shape as block_shape
from shardcompile.collectives.derived_cuts import block_size as block_size
from shardcompile.collectives.derived_cuts import derive as derive
from shardcompile.collectives.derived_cuts import derive_spread as derive_spread
from shardcompile.collectives.derived_cuts import note_partition as note_partition
from shardcompile.collectives.functional import all_gather_even as all_gather_even
from shardcompile.collectives.functional import all_gather_v as all_gather_v
from shardcompile.collectives.functional import all_reduce as all_reduce
from shardcompile.collectives.functional import all_to_all_v as all_to_all_v
from shardcompile.collectives.functional import broadcast as broadcast
from shardcompile.collectives.functional import fetch_ranges as fetch_ranges
from shardcompile.collectives.functional import receive_block as receive_block
from shardcompile.collectives.functional import reduce_scatter_v as reduce_scatter_v
from shardcompile.collectives.functional import send_blocks as send_blocks
from shardcompile.collectives.levels import Levels as Levels
from shardcompile.collectives.levels import add_copies as add_copies
from shardcompile.collectives.levels import find_levels as find_levels
from shardcompile.collectives.levels import return_by_levels as return_by_levels
from shardcompile.collectives.levels import send_by_levels as send_by_levels
from shardcompile.collectives.links import Links as Links
from shardcompile.collectives.links import Reduction as Reduction
from shardcompile.collectives.links import add_rows as add_rows
from shardcompile.collectives.links import find_links as find_links
from shardcompile.collectives.links import named_rows as named_rows
from shardcompile.collectives.links import reduce_rows as reduce_rows
from shardcompile.collectives.links import rows_travel as rows_travel
from shardcompile.collectives.links import take_rows as take_rows
from shardcompile.collectives.moved import MovedRows as MovedRows
from shardcompile.collectives.moved import recording_rows as recording_rows
from shardcompile.collectives.nearest import nearest as nearest
from shardcompile.collectives.pending import Decoded as Decoded
from shardcompile.collectives.pending import Pending as Pending
from shardcompile.collectives.pending import wait as wait
from shardcompile.collectives.reads import Reads as Reads
from shardcompile.collectives.reads import Window as Window
from shardcompile.collectives.ring import PendingBlocks as PendingBlocks
from shardcompile.collectives.ring import Ring as Ring
from shardcompile.collectives.routes import block_starts as block_starts
from shardcompile.collectives.routes import counts_in_range as counts_in_range
from shardcompile.collectives.routes import cut_of_sizes as cut_of_sizes
from shardcompile.collectives.routes import exchange_rows as exchange_rows
from shardcompile.collectives.routes import first_rows as first_rows
from shardcompile.collectives.routes import gather_counts as gather_counts
from shardcompile.collectives.routes import rows_from as rows_from
from shardcompile.collectives.segments import SegmentOrder as SegmentOrder
from shardcompile.collectives.segments import order_of_segments as order_of_segments
from shardcompile.collectives.sorting import sort_rows as sort_rows
from shardcompile.collectives.sorting import top_rows as top_rows
from shardcompile.collectives.spans import documents_of as documents_of
from shardcompile.collectives.spans import fetch_named as fetch_named
from shardcompile.collectives.spans import fetch_reached as fetch_reached
