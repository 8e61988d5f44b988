"""Settings within contexts."""

from __future__ import annotations

import pytest

from shardcompile import config


def test_contexts_that_threads_enter_and_leave_in_turns() -> None:
    before = config.ring_steps
    first, second = config.patch(ring_steps=before + 1), config.patch(ring_steps=before + 2)
    with config.patch(ring_steps=before + 3):
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert config.ring_steps == before + 2
        second.__exit__(None, None, None)
        assert config.ring_steps == before + 3
    assert config.ring_steps == before


def test_a_value_that_is_not_allowed_changes_nothing() -> None:
    before = config.ring_steps, config.attention
    with pytest.raises(ValueError, match="one of"), config.patch(ring_steps=before[0] + 1, attention="rings"):
        pass
    assert (config.ring_steps, config.attention) == before
    with pytest.raises(ValueError, match="no setting"), config.patch(ring_steps=before[0] + 1, attentions="ring"):
        pass
    assert (config.ring_steps, config.attention) == before
