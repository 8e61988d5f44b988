"""`visualize_sharding` prints which rank holds which part of a sharded tensor."""

from __future__ import annotations

import itertools

from shardcompile.sharding import Layout
from shardcompile.tensor import ShardTensor


def visualize_sharding(x: ShardTensor | Layout) -> str:
    """Returns a table of the shards: for each mesh coordinate its slice of each dim. Rank 0 of the mesh also prints it.

    Args:
        x: a sharded tensor, or its layout.
    """
    layout = x if isinstance(x, Layout) else x.sharding
    lines = [layout.describe()]
    for coordinate in itertools.product(*[range(n) for n in layout.mesh.shape]):
        slices = ", ".join(f"{s.start}:{s.stop}" for s in layout.shard_slices(coordinate))
        lines.append(f"  {coordinate}  [{slices}]  {tuple(layout.local_shape(coordinate))}")
    text = "\n".join(lines)
    my_coordinate = getattr(layout.mesh, "get_coordinate", lambda: None)()
    if my_coordinate is None or not any(my_coordinate):
        print(text)
    return text
