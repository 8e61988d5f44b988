"""The code in pages: its blocks, and running them as their reader would.

The Python blocks of a page share their names, from the first to the last. A block of text after a Python block is what
that prints on rank 0. Other code (shell commands, output of a terminal) is not run.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist

from tests.support.sources import ROOT

DOCS = ROOT / "docs"
_NUMBERS = itertools.count()


@dataclass(frozen=True)
class CodeBlock:
    """A block of code.

    Attributes:
        page: its file.
        heading: of the section that it stands in.
        language: the word behind the fence.
        source: its lines.
        line: of the page, the one with the fence.
    """

    page: Path
    heading: str
    language: str
    source: str
    line: int

    def compiled(self) -> Any:
        """Bytecode with the line numbers of the page: what is explained has to have its source in a file."""
        return compile("\n" * self.line + self.source, str(self.page), "exec")


def code_blocks(page: Path) -> list[CodeBlock]:
    """All blocks of code of a page, in their order."""
    found, heading, text = [], "", page.read_text()
    for match in re.finditer(
        r"^#+ (?P<heading>[^\n]+)$|^```(?P<language>\w+)[^\n]*\n(?P<source>.*?)^```$", text, re.M | re.S
    ):
        if match["heading"]:
            heading = match["heading"]
        else:
            line = text.count("\n", 0, match.start()) + 1
            found.append(CodeBlock(page, heading, match["language"], match["source"], line))
    return found


def without_versions_and_places(text: str) -> list[str]:
    """What is the same with every version of torch: numbers of nodes, and what follows from them, are not."""
    text = re.sub(r"torch \S+|[\w./-]+\.(py|md):\d+|\d+ nodes|predicted .*", "...", text)
    return [re.sub(r" {2,}", "  ", line).rstrip() for line in text.strip().splitlines()]


def run_blocks(run: Iterable[CodeBlock], cleaned: Callable[[str], list[str]] = str.splitlines) -> dict[str, Any]:
    """Run Python blocks one after the other, and hold what they print against the blocks of text.

    Args:
        run: the blocks; those of other languages are passed over.
        cleaned: what is compared of a text.

    Returns:
        The names that the blocks have defined.
    """
    # Dynamo looks the module of a function's names up by its name; ranks in one process have a module each.
    module = ModuleType(f"page_{next(_NUMBERS)}")
    sys.modules[module.__name__] = module
    printed: list[str] = []
    names = vars(module)
    names["print"] = lambda *words, sep=" ": printed.append(sep.join(map(str, words)))
    for block in run:
        if block.language == "python":
            printed.clear()
            exec(block.compiled(), names)
        elif block.language == "text" and (not dist.is_initialized() or dist.get_rank() == 0):
            said = "\n".join(printed).partition("\nwhat to do")[0]
            assert cleaned(said.strip()) == cleaned(block.source.strip()), (
                f"{block.page.name}:{block.line}, printed:\n{said}"
            )
    return names
