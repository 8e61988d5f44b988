"""Private names of torch where tensors become DTensors, flat parameters or buckets. Seen in torch 2.11 to 2.15.

These wrappers take the memory of what they are given for the whole of a tensor, or for this rank's part of it. None of
them asks a tensor that is in blocks already whether that is right, so the question is put in front of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo import compiled_autograd  # 2.11 - 2.15
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._flat_param import FlatParamHandle  # 2.11 - 2.15
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam  # 2.11 - 2.15
from torch.distributed.tensor._api import _FromTorchTensor  # 2.11 - 2.15
from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard  # 2.11 - 2.15
from torch.fx.experimental import proxy_tensor  # 2.11 - 2.15
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes  # 2.11 - 2.15
from torch.utils._pytree import tree_leaves


def ask_before_wrapping(
    as_block: Callable[[Any, Any], None],
    as_whole: Callable[[Any], None],
    as_parameter: Callable[[Any, str], None],
    as_input: Callable[[Any, str], None],
) -> None:
    """Have these called in front of torch's wrappers; they raise where a tensor cannot be wrapped.

    Args:
        as_block: with what `DTensor.from_local` is given as this rank's block, and the mesh.
        as_whole: with what DTensor's `distribute_tensor` is given as the whole tensor.
        as_parameter: with each parameter that is about to be flattened or bucketed, and by what.
        as_input: with each input of a function that is about to be traced, and by what.
    """

    def from_local(_: object, block: object, mesh: DeviceMesh, *rest: object, **options: object) -> None:
        as_block(block, mesh)

    def whole(*args: object, **options: object) -> None:
        for a in args:
            as_whole(a)

    def of_fully_shard(_: object, parameter: object, *rest: object, **options: object) -> None:
        as_parameter(parameter, "fully_shard")

    def of_fsdp(_: object, parameters: Any, *rest: object, **options: object) -> None:
        for parameter in parameters:
            as_parameter(parameter, "FullyShardedDataParallel")

    def of_ddp(_: object, module: Any, *rest: object, **options: object) -> None:
        ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())  # 2.11 - 2.15
        for name, parameter in module.named_parameters():
            if name not in ignored:
                as_parameter(parameter, "DistributedDataParallel")

    def of_make_fx(tensor: object, *rest: object, **options: object) -> None:
        by = "compiled autograd" if compiled_autograd.compiled_autograd_enabled else "make_fx"  # 2.11 - 2.15
        as_input(tensor, by)

    def of_jit(_: object, inputs: object = None, *rest: object, **options: object) -> None:
        for x in tree_leaves(inputs):
            as_input(x, "torch.jit.trace")

    _put_before(proxy_tensor, "track_tensor", of_make_fx)
    _put_before(torch.jit._trace, "_trace_impl", of_jit)  # 2.11 - 2.15
    _put_before(_FromTorchTensor, "forward", from_local, staticmethod)
    _put_before(Shard, "_make_shard_tensor", whole, staticmethod)  # 2.11 - 2.15; bound to the class already
    _put_before(Replicate, "_make_replicate_tensor", whole, staticmethod)  # 2.11 - 2.15
    _put_before(FSDPParam, "__init__", of_fully_shard)
    _put_before(FlatParamHandle, "__init__", of_fsdp)
    _put_before(DistributedDataParallel, "__init__", of_ddp)


def _put_before(owner: object, name: str, ask: Callable[..., None], kind: Callable[..., object] = lambda f: f) -> None:
    setattr(owner, name, kind(_asking(getattr(owner, name), ask)))


def _asking(function: Callable[..., object], ask: Callable[..., None]) -> Callable[..., object]:
    @functools.wraps(function)
    def asked(*args: object, **kwargs: object) -> Any:
        ask(*args, **kwargs)
        return function(*args, **kwargs)

    return asked


def ranks_of(mesh: DeviceMesh) -> list[int]:
    """The ranks in a mesh, in the order of their coordinates; also inside a trace."""
    with _disable_current_modes():
        ranks: list[int] = mesh.mesh.flatten().tolist()
    return ranks


def is_strided_shard(placement: object) -> bool:
    """Whether a placement is one of blocks in another order than that of the mesh dims."""
    return isinstance(placement, _StridedShard)
