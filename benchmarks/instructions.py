"""Instructions of an eager op on a ShardTensor, against DTensor and the plain op, counted by callgrind.

Counts do not depend on what else the machine does. Needs valgrind, with `callgrind_control`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import join_fake_group, leave, print_table, ratio
from benchmarks.dispatch import OPS, RANKS, operands

CALLS, WARM_UP = 200, 50
COUNTED: dict[str, Callable[[Any, Any], Any]] = {
    **OPS,
    "layer_norm": lambda x, w: torch.nn.functional.layer_norm(x, x.shape[1:]),
}


def _control(*options: str) -> None:
    subprocess.run(["callgrind_control", *options, str(os.getpid())], check=True, stdout=subprocess.DEVNULL)


def _count(call: Callable[[], object], label: object) -> None:
    """Has callgrind write the instructions of `CALLS` calls under a label, which a shell reads."""
    for _ in range(WARM_UP):
        call()
    _control("--zero")
    for _ in range(CALLS):
        call()
    _control(f"--dump={label}")


def run_counted() -> None:
    """Runs all ops; called in a process under callgrind."""
    join_fake_group(RANKS)
    inputs = operands()
    with torch.no_grad():
        _count(lambda: None, "nothing")
        for n, op in enumerate(COUNTED.values()):
            for kind, (x, w) in inputs.items():
                _count(partial(op, x, w), f"{n}-{kind}")
    leave()


def counts(folder: Path) -> dict[str, int]:
    """Returns the instructions of one call, by number of the op and kind, from what callgrind has written."""
    found = {}
    for file in folder.iterdir():
        text = file.read_text()
        name, total = re.search(r"^desc: Trigger: dump (.*)$", text, re.M), re.search(r"^summary: (\d+)$", text, re.M)
        if name and total:
            found[name[1]] = int(total[1])
    nothing = found.pop("nothing")
    return {name: (total - nothing) // CALLS for name, total in found.items()}


def main() -> None:
    if "--counted" in sys.argv:
        run_counted()
        return
    with tempfile.TemporaryDirectory() as folder:
        command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={folder}/out"]
        module = [sys.executable, "-W", "ignore", "-m", "benchmarks.instructions", "--counted"]
        subprocess.run([*command, *module], check=True, stderr=subprocess.DEVNULL)
        found = counts(Path(folder))
    rows = []
    for n, name in enumerate(COUNTED):
        ours, dtensor, plain = (found[f"{n}-{kind}"] for kind in ("ShardTensor", "DTensor", "plain"))
        above = ratio(ours - plain, dtensor - plain)
        rows.append([name, *(f"{n:,}" for n in (ours, dtensor, plain)), above])
    print_table("instructions of an eager op", ["op", "ShardTensor", "DTensor", "plain", "above plain, ratio"], rows)


if __name__ == "__main__":
    main()
