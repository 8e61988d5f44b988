"""Programs that train models on unevenly sharded inputs: `python -m examples.poisson --ranks 4`, from a checkout."""
