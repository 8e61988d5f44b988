"""Run and train PyTorch models on unevenly sharded tensors under `torch.compile`."""

import shardcompile.load_torch  # noqa: F401
from shardcompile import config as config
from shardcompile.api import distribute_module as distribute_module
from shardcompile.api import distribute_tensor as distribute_tensor
from shardcompile.api import empty as empty
from shardcompile.api import full as full
from shardcompile.api import local_map as local_map
from shardcompile.api import ones as ones
from shardcompile.api import rand as rand
from shardcompile.api import randn as randn
from shardcompile.api import register_sharding as register_sharding
from shardcompile.api import scatter_tensor as scatter_tensor
from shardcompile.api import zeros as zeros
from shardcompile.artifacts import load_artifacts as load_artifacts
from shardcompile.artifacts import record_artifacts as record_artifacts
from shardcompile.compat.caches import tag_compiler_caches
from shardcompile.compat.dynamo import name_backend
from shardcompile.compat.raised_errors import let_errors_through
from shardcompile.contractions import einsum as einsum
from shardcompile.contractions import tensordot as tensordot
from shardcompile.contractions import transpose as transpose
from shardcompile.errors import CollectiveError as CollectiveError
from shardcompile.errors import LayoutError as LayoutError
from shardcompile.errors import PassError as PassError
from shardcompile.errors import RedistributeError as RedistributeError
from shardcompile.errors import RuleError as RuleError
from shardcompile.errors import ShardError as ShardError
from shardcompile.errors import UnsupportedOpError as UnsupportedOpError
from shardcompile.inspect import capture as capture
from shardcompile.inspect import explain as explain
from shardcompile.parallel import neighbors as neighbors
from shardcompile.parallel.context_parallel import context_parallel as context_parallel
from shardcompile.parallel.documents import balanced_partition as balanced_partition
from shardcompile.parallel.documents import varlen_attention as varlen_attention
from shardcompile.parallel.gather_plans import GatherPlan as GatherPlan
from shardcompile.parallel.gather_plans import plan_gather as plan_gather
from shardcompile.parallel.halo import halo_map as halo_map
from shardcompile.parallel.replicas import check_replicated as check_replicated
from shardcompile.parallel.replicas import sync_module_over_mesh as sync_module_over_mesh
from shardcompile.parallel.routing import Route as Route
from shardcompile.parallel.routing import route_rows as route_rows
from shardcompile.sharding import Layout as Layout
from shardcompile.tensor import ShardTensor as ShardTensor
from shardcompile.visualize import visualize_sharding as visualize_sharding

__version__ = "0.1.0"

name_backend("shardcompile", "shardcompile.passes:compile_with_passes")
tag_compiler_caches()
let_errors_through()
