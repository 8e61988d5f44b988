"""Ops of the namespace `shardcompile`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

LIBRARY = torch.library.Library("shardcompile", "FRAGMENT")


def define_op(
    schema: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    capturable: bool = False,
    any_strides: bool = True,
) -> torch._ops.OpOverload:
    """Defines an op with one kernel for all devices, and returns it.

    Args:
        schema: its name, arguments and results.
        kernel: computes it, below autograd.
        fake: computes the metadata of the results.
        capturable: whether a CUDA graph may capture it: the host decides nothing by the values of tensors.
        any_strides: whether Inductor may choose the strides of its inputs.
    """
    name = schema.partition("(")[0]
    tags = [torch.Tag.pt2_compliant_tag]
    tags += [] if capturable else [torch.Tag.cudagraph_unsafe]
    tags += [torch.Tag.flexible_layout] if any_strides else []
    LIBRARY.define(schema, tags=tags)
    LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"shardcompile::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.shardcompile, name).default  # type: ignore[no-any-return]
