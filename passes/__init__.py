"""Graph passes over functional collectives, imported as `shardcompile.passes`.

    torch.compile(model, backend="shardcompile")                      # Inductor and these passes
    torch.compile(model, options=shardcompile.passes.inductor_options())

No pass is needed for correctness: each takes a valid graph and returns a valid graph that computes the same, and each
can be switched off by its name.
"""

from shardcompile.passes.backend import compile_with_passes, inductor_options
from shardcompile.passes.bucket import BucketAllGathers, BucketAllReduces, BucketAllToAlls, BucketReduceScatters
from shardcompile.passes.pipeline import Pass, Pipeline, default_passes

__all__ = [
    "BucketAllGathers",
    "BucketAllReduces",
    "BucketAllToAlls",
    "BucketReduceScatters",
    "Pass",
    "Pipeline",
    "compile_with_passes",
    "default_passes",
    "inductor_options",
]
