"""How many bytes exchanges of rows send."""

from __future__ import annotations

from typing import Any

import pytest

from shardcompile.collectives import transport
from shardcompile.testing import once


def count_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of the messages of all ranks in one process, from now on; all ranks call it."""
    sent: list[int] = once(list)
    real = transport.exchange

    def counted(call: Any, sends: Any, receives: Any) -> Any:
        if call.entry.kind == "exchange_rows":
            sent.extend(t.numel() * t.itemsize for _, t in sends)
        return real(call, sends, receives)

    once(lambda: monkeypatch.setattr(transport, "exchange", counted))
    return sent
