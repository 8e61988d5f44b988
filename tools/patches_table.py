"""Writes the page of what is changed in torch: ``python -m tools.patches_table``."""

from __future__ import annotations

import re
from pathlib import Path

from shardcompile.compat.fingerprints import KNOWN_VERSIONS, version_of
from shardcompile.compat.patch import Patch
from shardcompile.compat.patches import all_patches
from shardcompile.compat.settings import SETTINGS

REPORTS = Path(__file__).parents[1] / "shardcompile" / "compat" / "reports"
PAGE = Path(__file__).parents[1] / "docs" / "patches.md"

KINDS = {
    "bug": "Faults of PyTorch",
    "sizes": "Sizes of shards",
    "sharing": "One rank compiles for all",
}
WHAT = {
    "bug": "A program is wrong, or does not compile, without the patch.",
    "sizes": "They keep the size of a shard from becoming a number of the graph, or from being guarded on: other ranks "
    "have other sizes. [Unbacked sizes](decisions/unbacked-shard-sizes.md) says what would replace them.",
    "sharing": "They put an election around PyTorch's caches, and make their entries portable.",
}
LINK = re.compile(r"https://github\.com/pytorch/pytorch/(?:issues|pull)/(\d+)")


def written() -> str:
    """The page."""
    patches = all_patches()
    counts = " | ".join(str(sum(p.is_needed_by(version_of(version)) for p in patches)) for version in KNOWN_VERSIONS)
    parts = [
        "# Changes to PyTorch",
        "",
        "shardcompile replaces functions of PyTorch where no hook does. `import shardcompile` replaces nothing. Six "
        "functions (with torch 2.11 seven) are replaced with the first sharded tensor of a process, the others while a graph with sharded "
        "tensors is compiled. `python -m shardcompile doctor` says what is in place on a machine, and whether a "
        "compiled step is right.",
        "",
        "With a version of PyTorch that is newer than those below, a patch is put in if the source of what it replaces "
        "is as it was in the newest one. Otherwise it is left out, with one warning.",
        "",
        f"| version of PyTorch | {' | '.join(KNOWN_VERSIONS)} |",
        f"|---|{'---|' * len(KNOWN_VERSIONS)}",
        f"| patches | {counts} |",
        "",
        "## Which backend guarantees what",
        "",
        '| | `backend="shardcompile"` | Inductor, `aot_eager`, others |',
        "|---|---|---|",
        "| values and gradients | right | right |",
        "| layouts of results | those of eager mode | those of eager mode |",
        "| graphs | one for all partitions | one for all partitions is the aim; some programs compile again |",
        "| order of collectives | decided by one rank for all, overlapped with compute | as written in the program |",
        "| who compiles | one rank for all (`config.compile_on`) | the same, where PyTorch's caches are on |",
        "",
        "## Settings",
        "",
        "They hold while a graph of sharded tensors is compiled.",
        "",
        *(f"- `{name.split(' ')[0]}`: {reason}" for name, reason in SETTINGS),
    ]
    for kind, title in KINDS.items():
        parts += ["", f"## {title}", "", WHAT[kind], ""]
        parts += ["| patch | replaces | without it | reported | versions |", "|---|---|---|---|---|"]
        parts += [_row(patch) for patch in patches if patch.kind == kind]
    return "\n".join(parts) + "\n"


def _row(patch: Patch) -> str:
    cells = patch.name, patch.what, patch.reason, _reported(patch), patch.versions
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _reported(patch: Patch) -> str:
    if patch.upstream.startswith("None: "):
        return "no fault of PyTorch"
    found = [f"[{m.group(1)}]({m.group(0)})" for m in LINK.finditer(patch.upstream)]
    if (REPORTS / f"{patch.name}.md").exists():
        found.append(f"`compat/reports/{patch.name}.md`")
    return ", ".join(found) if found else "not yet"


if __name__ == "__main__":
    PAGE.write_text(written())
