"""Graph passes over functional collectives, imported as `shardcompile.passes`.

    torch.compile(model, backend="shardcompile")                      # Inductor and these passes
    torch.compile(model, options=shardcompile.passes.inductor_options())

The passes run in this order: chains of ops that other libraries emit for uneven shards become one collective; repeated
and dead collectives are removed; small collectives are merged into buckets; the remaining collectives are scheduled to
overlap with compute, and control dependencies make Inductor keep that order. No pass is needed for correctness: each
takes a valid graph and returns a valid graph that computes the same values, and each can be switched off by its name.
"""

from shardcompile.machines import Device, Link
from shardcompile.passes.backend import compile_with_passes, inductor_options
from shardcompile.passes.bucket.buckets import (
    BucketAllGathers,
    BucketAllReduces,
    BucketAllToAlls,
    BucketRanges,
    BucketReduceScatters,
)
from shardcompile.passes.bucket.exchanges import BucketExchanges
from shardcompile.passes.bucket.lower import LowerEvenGathers
from shardcompile.passes.cleanup.dead_collectives import DropDeadCollectives, DropRepeatedWaits, ShareEqualCollectives
from shardcompile.passes.cleanup.inverse_pairs import CancelInversePairs, DropOwnSlice
from shardcompile.passes.cleanup.local_shards import ReduceThenSlice, SpreadLocalShard
from shardcompile.passes.cleanup.merge import MergeReductions
from shardcompile.passes.cost.calibrate import measure_link
from shardcompile.passes.cost.model import CostModel, GraphCosts
from shardcompile.passes.foreign.normalise import NormaliseChains
from shardcompile.passes.graph.collective import Collective, collectives
from shardcompile.passes.pipeline import Pass, Pipeline, Step, default_passes
from shardcompile.passes.schedule.bounds import bucket_bound, lower_bound
from shardcompile.passes.schedule.control_dependencies import AddControlDependencies
from shardcompile.passes.schedule.overlap import ScheduleOverlap
from shardcompile.passes.schedule.simulator import Timeline, perfetto, simulate

__all__ = [
    "AddControlDependencies",
    "BucketAllGathers",
    "BucketAllReduces",
    "BucketAllToAlls",
    "BucketExchanges",
    "BucketRanges",
    "BucketReduceScatters",
    "CancelInversePairs",
    "Collective",
    "CostModel",
    "Device",
    "DropDeadCollectives",
    "DropOwnSlice",
    "DropRepeatedWaits",
    "GraphCosts",
    "Link",
    "LowerEvenGathers",
    "MergeReductions",
    "NormaliseChains",
    "Pass",
    "Pipeline",
    "ReduceThenSlice",
    "ScheduleOverlap",
    "ShareEqualCollectives",
    "SpreadLocalShard",
    "Step",
    "Timeline",
    "bucket_bound",
    "collectives",
    "compile_with_passes",
    "default_passes",
    "inductor_options",
    "lower_bound",
    "measure_link",
    "perfetto",
    "simulate",
]
