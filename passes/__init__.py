"""Graph passes over functional collectives, imported as `shardcompile.passes`.

    torch.compile(model, backend="shardcompile")                      # Inductor and these passes
    torch.compile(model, options=shardcompile.passes.inductor_options())

The passes run in this order: chains of ops that other libraries emit for uneven shards become one collective; repeated
and dead collectives are removed; small collectives are merged into buckets; the remaining collectives are scheduled to
overlap with compute, and control dependencies make Inductor keep that order. No pass is needed for correctness: each
takes a valid graph and returns a valid graph that computes the same values, and each can be switched off by its name.
"""

from shardcompile.machines import Device as Device
from shardcompile.machines import Link as Link
from shardcompile.passes.backend import compile_with_passes as compile_with_passes
from shardcompile.passes.backend import inductor_options as inductor_options
from shardcompile.passes.bucket.buckets import BucketAllGathers as BucketAllGathers
from shardcompile.passes.bucket.buckets import BucketAllReduces as BucketAllReduces
from shardcompile.passes.bucket.buckets import BucketAllToAlls as BucketAllToAlls
from shardcompile.passes.bucket.buckets import BucketRanges as BucketRanges
from shardcompile.passes.bucket.buckets import BucketReduceScatters as BucketReduceScatters
from shardcompile.passes.bucket.exchanges import BucketExchanges as BucketExchanges
from shardcompile.passes.bucket.lower import LowerEvenGathers as LowerEvenGathers
from shardcompile.passes.cleanup.dead_collectives import DropDeadCollectives as DropDeadCollectives
from shardcompile.passes.cleanup.dead_collectives import DropRepeatedWaits as DropRepeatedWaits
from shardcompile.passes.cleanup.dead_collectives import ShareEqualCollectives as ShareEqualCollectives
from shardcompile.passes.cleanup.inverse_pairs import CancelInversePairs as CancelInversePairs
from shardcompile.passes.cleanup.inverse_pairs import DropOwnSlice as DropOwnSlice
from shardcompile.passes.cleanup.local_shards import ReduceThenSlice as ReduceThenSlice
from shardcompile.passes.cleanup.local_shards import SpreadLocalShard as SpreadLocalShard
from shardcompile.passes.cleanup.merge import MergeReductions as MergeReductions
from shardcompile.passes.cost.calibrate import measure_link as measure_link
from shardcompile.passes.cost.model import CostModel as CostModel
from shardcompile.passes.cost.model import GraphCosts as GraphCosts
from shardcompile.passes.foreign.normalise import NormaliseChains as NormaliseChains
from shardcompile.passes.graph.collective import Collective as Collective
from shardcompile.passes.graph.collective import collectives as collectives
from shardcompile.passes.pipeline import Pass as Pass
from shardcompile.passes.pipeline import Pipeline as Pipeline
from shardcompile.passes.pipeline import Step as Step
from shardcompile.passes.pipeline import default_passes as default_passes
from shardcompile.passes.schedule.bounds import bucket_bound as bucket_bound
from shardcompile.passes.schedule.bounds import lower_bound as lower_bound
from shardcompile.passes.schedule.control_dependencies import AddControlDependencies as AddControlDependencies
from shardcompile.passes.schedule.overlap import ScheduleOverlap as ScheduleOverlap
from shardcompile.passes.schedule.simulator import Timeline as Timeline
from shardcompile.passes.schedule.simulator import simulate as simulate
