"""Offline tracing: the graphs of any rank in a fake process group, for CUDA or the CPU, without a GPU.

    def build(mesh):
        sizes = [100 + 7 * r for r in range(mesh.size())]
        local = torch.randn(sizes[mesh.get_local_rank()], 64)  # fake: no memory, any device
        return Net(), (sc.ShardTensor.from_local(local, mesh, [Shard(0)], {0: sizes}),)

    trace = trace_offline(build, world_size=256)
    print(trace)

Tracing runs in this process, with fake tensors and a fake process group, and restores the process afterwards.
"""

from shardcompile.inspect.offline.precompile import precompile as precompile
from shardcompile.inspect.offline.trace import CollectiveRecord as CollectiveRecord
from shardcompile.inspect.offline.trace import OfflineTrace as OfflineTrace
from shardcompile.inspect.offline.trace import trace_offline as trace_offline
from shardcompile.inspect.offline.trace import trace_step as trace_step
from shardcompile.inspect.offline.world import OfflineError as OfflineError
from shardcompile.inspect.offline.world import OfflineWorld as OfflineWorld
from shardcompile.inspect.offline.world import offline_world as offline_world
