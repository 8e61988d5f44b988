"""Keeps the compiler's caches from answering with what another version of this library has compiled."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch


def tag_compiler_caches() -> None:
    """Make this library's sources part of the keys of all of torch.compile's caches.

    Rules decide what is traced, and lowerings and patches what Inductor makes of it; neither is in the graph that the
    caches look at.
    """
    tag = f"shardcompile-{_source_digest()}"
    if tag not in torch.compiler.config.cache_key_tag:
        torch.compiler.config.cache_key_tag += tag


def _source_digest() -> str:
    digest = hashlib.blake2b(digest_size=16)
    folder = Path(__file__).parent
    for path in sorted([*folder.rglob("*.py"), *(folder / "passes").glob("*.py")]):  # rglob follows no links
        digest.update(path.read_bytes())
    return digest.hexdigest()
