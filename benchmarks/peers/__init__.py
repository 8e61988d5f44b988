"""Training steps on sharded inputs against code by hand and against DTensor; run `python -m benchmarks.peers`."""
