"""A picture of a layout in text."""

from __future__ import annotations

import itertools

from shardcompile.sharding import Layout
from shardcompile.tensor import ShardTensor


def visualize_sharding(x: ShardTensor | Layout) -> str:
    """A table of the shards: which rank holds which rows of which dim. Also printed, by rank 0 of the mesh.

    Args:
        x: a sharded tensor, or its layout.
    """
    layout = x if isinstance(x, Layout) else x.sharding
    lines = [layout.describe()]
    for coordinate in itertools.product(*[range(n) for n in layout.mesh.shape]):
        slices = ", ".join(f"{s.start}:{s.stop}" for s in layout.shard_slices(coordinate))
        lines.append(f"  {coordinate}  [{slices}]  {tuple(layout.local_shape(coordinate))}")
    text = "\n".join(lines)
    coordinate_here = getattr(layout.mesh, "get_coordinate", lambda: None)()
    if coordinate_here is None or not any(coordinate_here):
        print(text)
    return text
