"""``python -m shardcompile selftest``: checks an installation for correct results, and measures its speed.

It runs with several GPUs, with one, or with none. It needs no network, and no package other than torch.
"""

from shardcompile.selftest.checks import traced_collectives as traced_collectives
from shardcompile.selftest.run import Finding as Finding
from shardcompile.selftest.run import Job as Job
from shardcompile.selftest.run import print_table as print_table
from shardcompile.selftest.run import run_checks as run_checks
