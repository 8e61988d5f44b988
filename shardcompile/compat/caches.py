"""Keep the compiler's caches from returning code that another version, or another setting, of this library has made."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch


def tag_compiler_caches() -> None:
    """Make this library's sources part of the keys of all of torch.compile's caches.

    The caches look up a graph. The rules that led to it, and the lowerings and patches that Inductor applies to it, are
    not in the graph.
    """
    set_in_cache_keys(f"shardcompile-{source_digest()}", True)


def set_in_cache_keys(part: str, on: bool) -> None:
    """Put a text into the keys of the caches, or take it out, for all threads.

    In torch 2.13 to 2.15 a setting holds in the thread that assigns it. A thread that the user starts would look up
    code without it. So the default is changed as well, which holds in all threads.
    """
    settings: Any = torch.compiler.config
    tag = settings.cache_key_tag.replace(part, "") + (part if on else "")
    settings.cache_key_tag = tag
    settings._config["cache_key_tag"].default = tag  # 2.11 - 2.15


def source_digest() -> str:
    """Returns a digest of the sources of this library."""
    digest = hashlib.blake2b(digest_size=16)
    for path in source_files(Path(__file__).parents[1]):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def source_files(folder: Path) -> list[Path]:
    """The files of this library's modules. In a checkout, `passes` is a link to a folder, which `rglob` skips."""
    return sorted({*folder.rglob("*.py"), *(folder / "passes").rglob("*.py")})
