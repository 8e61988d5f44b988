"""What the backend ``shardcompile`` hands to Inductor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._inductor import compile_fx, list_mode_options

from shardcompile.passes import Pipeline


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({"mode": "max-autotune-no-cudagraphs"}, list_mode_options("max-autotune-no-cudagraphs")),
        ({"mode": "default"}, {}),
        ({"options": {"max-autotune": True}}, {"max_autotune": True}),
        ({"options": {"post_grad_custom_post_pass": None}}, {"post_grad_custom_post_pass": None}),
    ],
)
def test_modes_and_options_come_along_with_the_passes(
    how: dict[str, Any], expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def compile_nothing(model: Any, inputs: Any, config_patches: dict[str, Any]) -> Any:
        given.update(config_patches)
        return model.forward

    monkeypatch.setattr(compile_fx, "compile_fx", compile_nothing)
    torch._dynamo.reset()
    x = torch.ones(3)
    torch.testing.assert_close(torch.compile(lambda x: x + 1, backend="shardcompile", **how)(x), x + 1)
    assert {name: given[name] for name in expected} == expected
    if "post_grad_custom_post_pass" not in expected:
        assert isinstance(given["post_grad_custom_post_pass"], Pipeline)
