"""A demonstration: a point-cloud transformer learns finite element solutions, with a new partition at each step."""
