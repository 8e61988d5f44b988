"""Graph passes over functional collectives, imported as `shardcompile.passes`.

There are no passes yet. The folder will hold one module per stage, in the order in which a graph goes
through them: normalise, bucket, schedule, lower, verify. No pass is needed for correctness: each takes a
valid graph and returns a valid graph with the same values, and each can be switched off by its name.
"""
