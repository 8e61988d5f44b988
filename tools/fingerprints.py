"""Writes the fingerprints of what patches replace: ``python -m tools.fingerprints`` with each known version of torch."""

from __future__ import annotations

import json
from pathlib import Path

from torch.fx.experimental.symbolic_shapes import ShapeEnv

from shardcompile.compat.fingerprints import FILE, running_version
from shardcompile.compat.patch import fingerprints_of
from shardcompile.compat.patches import all_patches


def of_running_version() -> dict[str, str]:
    """The fingerprints for the version of torch that runs."""
    return fingerprints_of(all_patches(), ShapeEnv)


def write(file: Path = FILE) -> None:
    """Replaces those of the version of torch that runs."""
    known = json.loads(file.read_text()) if file.exists() else {}
    known[".".join(map(str, running_version()))] = of_running_version()
    file.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")


if __name__ == "__main__":
    write()
