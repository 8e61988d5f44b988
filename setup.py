"""Lists the packages; everything else is in pyproject.toml.

An sdist holds `passes/` but not the link `shardcompile/passes`, so setuptools' own search would leave
`shardcompile.passes` out of a wheel built from it. Here the two folders are searched one by one.
"""

from setuptools import find_packages, setup

core = find_packages(include=["shardcompile", "shardcompile.*"], exclude=["shardcompile.passes*"])
passes = ["shardcompile.passes", *(f"shardcompile.passes.{name}" for name in find_packages("passes"))]

setup(packages=core + passes)
