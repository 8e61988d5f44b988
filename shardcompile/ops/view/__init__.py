"""View ops: reshapes, slices, concatenation, padding."""
