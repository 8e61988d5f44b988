"""Layouts: pure, rank-invariant descriptions of how a tensor is spread over a mesh."""

from shardcompile.layout.arguments import read_cut as read_cut
from shardcompile.layout.arguments import read_cuts as read_cuts
from shardcompile.layout.arguments import write_cut as write_cut
from shardcompile.layout.arguments import write_cuts as write_cuts
from shardcompile.layout.cut import Cut as Cut
from shardcompile.layout.derived import DERIVATIONS as DERIVATIONS
from shardcompile.layout.layout import Layout as Layout
from shardcompile.layout.layout import normalize_placements as normalize_placements
from shardcompile.layout.mesh import Mesh as Mesh
from shardcompile.layout.mesh import MeshShape as MeshShape
from shardcompile.layout.runs import Apart as Apart
from shardcompile.layout.runs import has_runs as has_runs
from shardcompile.layout.runs import in_stretches as in_stretches
from shardcompile.layout.runs import is_cut_once as is_cut_once
from shardcompile.layout.runs import neighbouring as neighbouring
from shardcompile.layout.sizes import CHUNK_KEY as CHUNK_KEY
from shardcompile.layout.sizes import GroupCut as GroupCut
from shardcompile.layout.sizes import IntLike as IntLike
from shardcompile.layout.sizes import chunk_sizes as chunk_sizes
from shardcompile.layout.sizes import digest_of as digest_of
from shardcompile.layout.sizes import sizes_of_key as sizes_of_key
from shardcompile.layout.spec import Spec as Spec
from shardcompile.layout.spec import contiguous_stride as contiguous_stride
from shardcompile.layout.spec import dense_stride as dense_stride
from shardcompile.layout.spec import may_overlap as may_overlap
from shardcompile.layout.spec import order_of as order_of
