"""Functional collectives on local shards of any size.

Each collective is an op of the namespace ``shardcompile``. Like an op of ``_c10d_functional`` it returns a new tensor,
which is complete after a wait. It has a fake and an autograd implementation, and stays one node in a graph. A
`shardcompile.collectives.descriptor.Descriptor` holds all that the library knows about it; importing the module of a
collective registers its op and its descriptor.
"""

import shardcompile.collectives.all_to_all
import shardcompile.collectives.halo_exchange
import shardcompile.collectives.local_shards
import shardcompile.collectives.range_bucket
import shardcompile.collectives.reflection
import shardcompile.collectives.segment_exchange
import shardcompile.collectives.torch_collectives  # noqa: F401
from shardcompile.collectives.buckets import bucket_dtype as bucket_dtype
from shardcompile.collectives.derived_partitions import derive as derive
from shardcompile.collectives.derived_partitions import derive_spread as derive_spread
from shardcompile.collectives.derived_partitions import local_shape_of as local_shape_of
from shardcompile.collectives.derived_partitions import note_partition as note_partition
from shardcompile.collectives.derived_partitions import shard_size as shard_size
from shardcompile.collectives.document_ranges import documents_of as documents_of
from shardcompile.collectives.document_ranges import fetch_named as fetch_named
from shardcompile.collectives.document_ranges import fetch_reached as fetch_reached
from shardcompile.collectives.functional import all_gather_even as all_gather_even
from shardcompile.collectives.functional import all_gather_v as all_gather_v
from shardcompile.collectives.functional import all_reduce as all_reduce
from shardcompile.collectives.functional import all_to_all_v as all_to_all_v
from shardcompile.collectives.functional import broadcast as broadcast
from shardcompile.collectives.functional import fetch_ranges as fetch_ranges
from shardcompile.collectives.functional import receive_shard as receive_shard
from shardcompile.collectives.functional import reduce_scatter_v as reduce_scatter_v
from shardcompile.collectives.functional import send_shards as send_shards
from shardcompile.collectives.gather_plans import LocalGatherPlan as LocalGatherPlan
from shardcompile.collectives.gather_plans import Reduction as Reduction
from shardcompile.collectives.gather_plans import make_gather_plan as make_gather_plan
from shardcompile.collectives.hierarchical import HierarchicalRoute as HierarchicalRoute
from shardcompile.collectives.hierarchical import add_copies as add_copies
from shardcompile.collectives.hierarchical import hierarchical_combine as hierarchical_combine
from shardcompile.collectives.hierarchical import hierarchical_dispatch as hierarchical_dispatch
from shardcompile.collectives.hierarchical import plan_hierarchical_route as plan_hierarchical_route
from shardcompile.collectives.infer_partition import symbolic_partition as symbolic_partition
from shardcompile.collectives.nearest import nearest as nearest
from shardcompile.collectives.pending import Decoded as Decoded
from shardcompile.collectives.pending import Pending as Pending
from shardcompile.collectives.pending import wait as wait
from shardcompile.collectives.reads import Reads as Reads
from shardcompile.collectives.reads import Window as Window
from shardcompile.collectives.ring import PendingShards as PendingShards
from shardcompile.collectives.ring import Ring as Ring
from shardcompile.collectives.routes import counts_in_range as counts_in_range
from shardcompile.collectives.routes import exchange_rows as exchange_rows
from shardcompile.collectives.routes import first_rows as first_rows
from shardcompile.collectives.routes import gather_counts as gather_counts
from shardcompile.collectives.routes import partition_of_sizes as partition_of_sizes
from shardcompile.collectives.routes import rows_from as rows_from
from shardcompile.collectives.routes import shard_starts as shard_starts
from shardcompile.collectives.routing_statistics import MovedRows as MovedRows
from shardcompile.collectives.routing_statistics import recording_rows as recording_rows
from shardcompile.collectives.segments import SegmentOrder as SegmentOrder
from shardcompile.collectives.segments import order_of_segments as order_of_segments
from shardcompile.collectives.sorting import sort_rows as sort_rows
from shardcompile.collectives.sorting import top_rows as top_rows
