"""``python -m shardcompile selftest``: is everything right here, and how fast is it?

Runs on what is there: several GPUs, one, or none. It needs no network and nothing but torch.
"""

from shardcompile.selftest.checks import traced_collectives as traced_collectives
from shardcompile.selftest.run import Finding as Finding
from shardcompile.selftest.run import Job as Job
from shardcompile.selftest.run import print_table as print_table
from shardcompile.selftest.run import run_checks as run_checks
