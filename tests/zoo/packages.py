"""Packages of models, imported where a model is made."""

from __future__ import annotations

import importlib
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch


@cache
def _torchvision_without_kernels() -> torch.library.Library | None:
    """State the ops whose schemas torchvision needs to be imported.

    The wheels on PyPI hold kernels for CUDA, which do not load beside a torch for CPUs; timm, PhysicsNeMo and
    transformers import torchvision all the same, and call none of these ops.
    """
    if find_spec("torchvision") is None:
        return None
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        importlib.import_module("torchvision")
        return library
    return None


def of(module: str, name: str) -> Any:
    """What a module of a package calls so.

    Args:
        module: its full name.
        name: in it.
    """
    _torchvision_without_kernels()
    return getattr(importlib.import_module(module), name)
