"""The library's source files, for tests that read them. `rglob` skips `shardcompile/passes`, a link to a folder."""

from __future__ import annotations

from pathlib import Path

from shardcompile.compat.caches import source_files

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "shardcompile"
SOURCES = source_files(PACKAGE)
"""Every module of the library, those of the passes by the names under which they are imported."""
