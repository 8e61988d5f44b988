"""Keeps the compiler's caches from answering with what another version, or setting, of this library has made."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch


def tag_compiler_caches() -> None:
    """Make this library's sources part of the keys of all of torch.compile's caches.

    Rules decide what is traced, and lowerings and patches what Inductor makes of it; neither is in the graph that the
    caches look at.
    """
    put_into_keys(f"shardcompile-{_source_digest()}", True)


def put_into_keys(part: str, on: bool) -> None:
    """Have the keys of the caches contain a text, or no longer contain it, whichever thread compiles.

    A setting of torch holds in the thread that assigns it (2.13 - 2.15). Another thread, which the user starts, would
    look for code without it. The default holds in all of them.
    """
    settings: Any = torch.compiler.config
    tag = settings.cache_key_tag.replace(part, "") + (part if on else "")
    settings.cache_key_tag = tag
    settings._config["cache_key_tag"].default = tag  # 2.11 - 2.15


def _source_digest() -> str:
    digest = hashlib.blake2b(digest_size=16)
    for path in sources(Path(__file__).parents[1]):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def sources(folder: Path) -> list[Path]:
    """This library's modules, of its passes as well: in a checkout they lie behind a link, which `rglob` skips."""
    return sorted({*folder.rglob("*.py"), *(folder / "passes").rglob("*.py")})
