"""What tests, tools and benchmarks import: cases, checks, graphs, and scripts that tests start."""
