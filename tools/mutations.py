"""Faults that the tests have to find: each is planted in a copy of the sources, and a test has to fail.

    python -m tools.mutations            # all of them: some minutes
    python -m tools.mutations 0 3        # two of them

Each is the smallest form of a fault that would hurt: a wrong rule, a lost reduction, collectives in another order on one
rank, a guard that holds on some ranks only.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Mutation(NamedTuple):
    """A fault.

    Attributes:
        what: in words.
        file: where.
        text: what stands there, once.
        fault: what is put in its place.
        tests: arguments of pytest: tests of every push, one of which has to fail.
    """

    what: str
    file: str
    text: str
    fault: str
    tests: Sequence[str]


MUTATIONS = (
    Mutation(
        "a wrong rule: the gradient of an embedding's table is not summed over ranks",
        "shardcompile/ops/index/rule.py",
        'yield from (along([d, d], ["sum"]) for d in range(indices.ndim))',
        "yield from (along([d, d], [None]) for d in range(indices.ndim))",
        ["tests/ranks/test_ops.py", "-k", "test_on_three_ranks and selection"],
    ),
    Mutation(
        "a lost reduction: gradients of plain tensors leave as each rank's term",
        "shardcompile/tensor/autograd.py",
        "ToLocal.apply(redistributed(grad, grad._spec.layout.replicated()), None)",
        "ToLocal.apply(redistributed(grad, grad._spec.layout), None)",
        ["tests/ranks/test_gradient_buckets.py"],
    ),
    Mutation(
        "a lost reduction: gradients in buckets leave as each rank's term",
        "shardcompile/tensor/gradient_buckets.py",
        "brought_to(terms, layout.replicated(), async_op=True)",
        "terms",
        ["tests/ranks/test_gradient_buckets.py"],
    ),
    Mutation(
        "two collectives in another order on one rank",
        "shardcompile/dispatch/run.py",
        "local_args = tuple([localize(cls, a, plans, ordered, fresh) for a in args])",
        "both = list(zip(args, self.plans)) if all(isinstance(a, Tensor) for a in args) else []\n"
        "        local_args = tuple([localize(cls, a, plans, ordered, fresh) for a in args]) if not both "
        "or torch.distributed.get_rank() != 1 else "
        "tuple([localize(cls, a, iter([p]), ordered) for a, p in both[::-1]][::-1])",
        ["tests/ranks/test_ops.py", "-k", "test_on_three_ranks and binary"],
    ),
    Mutation(
        "a guard on the size of a rank's local shard",
        "shardcompile/collectives/derived_partitions.py",
        "return partition.local_size(compat.coordinate(mesh) or ())",
        "size = partition.local_size(compat.coordinate(mesh) or ())\n        return size if size == 2 else size",
        ["tests/ranks/test_compile.py"],
    ),
    Mutation(
        "a wrong offset of the last shards",
        "shardcompile/sharding/partition.py",
        "return sum(self.sizes[: self.shard_index(coordinate)])",
        "return sum(self.sizes[: self.shard_index(coordinate)]) - (self.shard_index(coordinate) > 1)",
        ["tests/pure/test_layout.py", "tests/ranks/test_construction.py"],
    ),
    Mutation(
        "a maximum over ranks that is a sum",
        "shardcompile/collectives/reductions.py",
        '"max": dist.ReduceOp.MAX',
        '"max": dist.ReduceOp.SUM',
        ["tests/ranks/test_collectives.py", "-k", "reduce"],
    ),
    Mutation(
        "a plan over two mesh dims that takes the outer one for the inner one",
        "shardcompile/planning.py",
        "if partition.mesh_dims[-1] != mesh_dim:",
        "if partition.mesh_dims[0] != mesh_dim:",
        ["tests/pure/test_planning.py"],
    ),
    Mutation(
        "a dropped gradient of `to_local`",
        "shardcompile/tensor/autograd.py",
        "return FromLocal.apply(grad, ctx.cls, spec), None",
        "return FromLocal.apply(torch.zeros_like(grad), ctx.cls, spec), None",
        ["tests/ranks/test_construction.py", "tests/ranks/test_usage.py"],
    ),
    Mutation(
        "parts of a bucket that are taken for one another",
        "passes/bucket/buckets.py",
        "for i, m in enumerate(members):",
        "for i, m in enumerate(members[::-1]):",
        ["tests/pure/test_passes.py"],
    ),
    Mutation(
        "a write to a copied view that its source is not told of",
        "shardcompile/dispatch/mutate.py",
        "        target._copied.write_back(target)",
        "        pass",
        ["tests/ranks/test_aliasing.py"],
    ),
    Mutation(
        "a halo that lacks its last row",
        "shardcompile/collectives/ranges.py",
        "last = ((end - 1) * num + after) // den",
        "last = ((end - 1) * num + after) // den - (after > 0)",
        ["tests/ranks/test_collectives.py", "tests/ranks/test_windows.py"],
    ),
    Mutation(
        "parts of a checkpoint that all start at the first row",
        "shardcompile/tensor/checkpoint.py",
        "offsets, sizes = layout.offsets(coordinate), tuple(x._local_tensor.shape)",
        "offsets, sizes = (0,) * x.ndim, tuple(x._local_tensor.shape)",
        ["tests/ranks/test_checkpoint.py"],
    ),
    Mutation(
        "gradients of rows that go by the way that the rows went, not back",
        "shardcompile/collectives/routes.py",
        "a.group_name, back=not a.back)",
        "a.group_name, back=a.back)",
        ["tests/ranks/test_routing.py"],
    ),
)


def plant(m: Mutation, root: Path) -> None:
    """Put a fault into the sources below a folder."""
    path = root / m.file
    source = path.read_text()
    assert source.count(m.text) == 1, f"{m.what}: its text stands {source.count(m.text)} times in {m.file}"
    path.write_text(source.replace(m.text, m.fault))


def is_found(m: Mutation) -> tuple[bool, str]:
    """Whether a test fails with a fault planted, and the end of what pytest printed."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        hidden = shutil.ignore_patterns(".*", "__pycache__", "shardcompile-demo", "site")
        shutil.copytree(ROOT, copy, symlinks=True, ignore=hidden)
        plant(m, copy)
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *m.tests],
            cwd=copy,
            env=os.environ | {"PYTHONPATH": str(copy)},
            capture_output=True,
            text=True,
            timeout=900,
        )
    return run.returncode == 1, run.stdout[-2000:]


def main(numbers: Sequence[int]) -> int:
    missed = 0
    for n in numbers or range(len(MUTATIONS)):
        start = time.monotonic()
        found, printed = is_found(MUTATIONS[n])
        missed += not found
        verdict = "found" if found else "NOT FOUND"
        print(f"{n:2} {verdict} in {time.monotonic() - start:.0f} s: {MUTATIONS[n].what}", flush=True)
        if found:
            print("  ", *[line for line in printed.splitlines() if line.startswith("FAILED")][:1])
        else:
            print(printed)
    return missed


if __name__ == "__main__":
    sys.exit(bool(main([int(a) for a in sys.argv[1:]])))
