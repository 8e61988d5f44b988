"""Private names of torch where tensors become DTensors or parameters of FSDP2. Seen in torch 2.11 to 2.15.

These wrappers treat the memory of a tensor as the whole tensor, or as this rank's part of it. For a sharded tensor
neither is right, and none of them asks a tensor subclass. So a check runs before each of them, from the first sharded
tensor on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam  # 2.11 - 2.15
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec  # 2.11 - 2.15
from torch.distributed.tensor.placement_types import _StridedShard  # 2.11 - 2.15
from torch.utils._python_dispatch import _disable_current_modes  # 2.11 - 2.15

from shardcompile.compat.patch import Patch, put_in_once, replace

Function = Callable[..., Any]


class _Attribute(Protocol):
    """An attribute of a class in C++, such as ``Tensor.data``."""

    __doc__: str | None

    def __get__(self, instance: object, owner: type | None = None) -> Any: ...
    def __set__(self, instance: object, value: object) -> None: ...


@dataclass
class _Checks:
    """What raises if a tensor cannot be wrapped."""

    as_shard: Callable[[object, DeviceMesh], None]
    as_parameter: Callable[[object], None]
    as_data: Callable[[torch.Tensor, object], None]


_CHECKS: list[_Checks] = []


def check_before_wrapping(
    as_shard: Callable[[object, DeviceMesh], None],
    as_parameter: Callable[[object], None],
    as_data: Callable[[torch.Tensor, object], None],
) -> None:
    """Run these checks before torch's wrappers. They raise if a tensor cannot be wrapped.

    Args:
        as_shard: gets the tensor that a DTensor treats as this rank's local shard, and the mesh.
        as_parameter: gets each parameter before `fully_shard` shards it.
        as_data: gets a tensor, and the value that is assigned to its ``data``.
    """
    _CHECKS[:] = [_Checks(as_shard, as_parameter, as_data)]
    for patch in OF_WRAPPERS:
        put_in_once(patch)


def _checking_shards(init: Function) -> Function:
    @functools.wraps(init)
    def checked(self: DTensor, local_tensor: object, spec: DTensorSpec, *rest: object, **options: object) -> None:
        _CHECKS[0].as_shard(local_tensor, spec.mesh)
        init(self, local_tensor, spec, *rest, **options)

    return checked


def _checking_parameters(init: Function) -> Function:
    @functools.wraps(init)
    def checked(self: FSDPParam, param: object, *rest: object, **options: object) -> None:
        _CHECKS[0].as_parameter(param)
        init(self, param, *rest, **options)

    return checked


def _checking_data(data: _Attribute) -> property:
    """The attribute ``data`` of tensors, with a check before each assignment."""

    def assign(tensor: torch.Tensor, value: object) -> None:
        _CHECKS[0].as_data(tensor, value)
        data.__set__(tensor, value)

    return property(data.__get__, assign, doc=data.__doc__)


OF_WRAPPERS = (
    Patch(
        "shards_of_dtensors",
        "torch.distributed.tensor.DTensor.__init__",
        "DTensor.from_local treats a sharded tensor as one rank's shard, although each rank holds another shard. "
        "So does distribute_tensor with src_data_rank=None.",
        "DTensor has no way for a tensor subclass to object to becoming a local tensor.",
        "2.11 - 2.15",
        lambda stack: replace(stack, DTensor, "__init__", _checking_shards),
    ),
    Patch(
        "parameters_of_fully_shard",
        "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam.__init__",
        "fully_shard takes another chunk of a sharded parameter on each rank: ranks redistribute different tensors, "
        "and wait for one another.",
        "FSDPParam asks only DTensor parameters for their layout; another subclass is chunked as a plain tensor.",
        "2.11 - 2.15",
        lambda stack: replace(stack, FSDPParam, "__init__", _checking_parameters),
    ),
    Patch(
        "data_of_plain_tensors",
        "torch.Tensor.data",
        "After `plain.data = sharded` torch dispatches ops on `plain` to a class that it is no instance of: the "
        "process ends with a segmentation fault.",
        "`plain.data = subclass` asks the plain tensor alone (`__torch_function__`), and `set_data` treats a "
        "wrapper subclass as compatible: the next op on `plain` crashes. A DTensor has the same fault.",
        "2.11 - 2.15",
        lambda stack: replace(stack, torch.Tensor, "data", _checking_data),
    ),
)
"""Put in with the first sharded tensor."""


def ranks_of(mesh: DeviceMesh) -> list[int]:
    """The ranks in a mesh, in the order of their coordinates. This works inside a trace, too."""
    with _disable_current_modes():
        ranks: list[int] = mesh.mesh.flatten().tolist()
    return ranks


def is_strided_shard(placement: object) -> bool:
    """Whether a placement's shards lie in another order than that of the mesh dims."""
    return isinstance(placement, _StridedShard)
