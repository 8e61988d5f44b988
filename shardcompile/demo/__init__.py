"""A demonstration: a point-cloud transformer learns finite element solutions, with a new cut at each step."""
