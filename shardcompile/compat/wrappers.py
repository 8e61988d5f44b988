"""Private names of torch where tensors become DTensors, flat parameters or buckets. Seen in torch 2.11 to 2.15.

These wrappers treat the memory of a tensor as the whole tensor, or as this rank's part of it. For a sharded tensor
neither is right. So a check runs before each of them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
import torch.utils.dlpack
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

from shardcompile.compat.patch import Patch, put_in_for_good, replace

_Args = ParamSpec("_Args")
_T = TypeVar("_T")


class _Attribute(Protocol):
    """An attribute of a class in C++, such as ``Tensor.data``."""

    __doc__: str | None

    def __get__(self, instance: object, owner: type | None = None) -> Any: ...
    def __set__(self, instance: object, value: object) -> None: ...


def check_before_wrapping(
    as_shard: Callable[[object, DeviceMesh], None],
    as_whole: Callable[[object], None],
    as_parameter: Callable[[object, str], None],
    as_input: Callable[[object, str], None],
    as_data: Callable[[torch.Tensor, object], None],
    as_memory: Callable[[object], None],
    as_part: Callable[[object], None],
) -> None:
    """Run these checks before torch's wrappers. They raise if a tensor cannot be wrapped.

    Args:
        as_shard: gets the tensor that `DTensor.from_local` treats as this rank's local shard, and the mesh.
        as_whole: gets the tensor that DTensor's `distribute_tensor` treats as the whole tensor.
        as_parameter: gets each parameter before a wrapper flattens or buckets it, and the wrapper's name.
        as_input: gets each input of a function before a tracer traces it, and the tracer's name.
        as_data: gets a tensor, and the value that is assigned to its ``data``.
        as_memory: gets each tensor whose memory ``to_dlpack`` hands out.
        as_part: gets indices and values of which ``sparse_coo_tensor`` makes a tensor.

    The function is long because each patch states its reason.
    """

    def from_local(_: object, shard: object, mesh: DeviceMesh, *rest: object, **options: object) -> None:
        as_shard(shard, mesh)

    def whole(*args: object, **options: object) -> None:
        for a in args:
            as_whole(a)

    def of_fully_shard(_: object, parameter: object, *rest: object, **options: object) -> None:
        as_parameter(parameter, "fully_shard")

    def of_fsdp(_: object, parameters: Iterable[object], *rest: object, **options: object) -> None:
        for parameter in parameters:
            as_parameter(parameter, "FullyShardedDataParallel")

    def of_ddp(_: object, module: torch.nn.Module, *rest: object, **options: object) -> None:
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

    def of_dlpack(tensor: object, *rest: object, **options: object) -> None:
        as_memory(tensor)

    def of_coo(indices: object = None, values: object = None, *rest: object, **options: object) -> None:
        if not torch.compiler.is_compiling():  # Dynamo refuses the function in words of its own
            for x in (indices, values):
                as_part(x)

    put_in_for_good(
        Patch(
            "memory_of_dlpack",
            "torch.utils.dlpack.to_dlpack, torch.to_dlpack",
            "to_dlpack raises an error about custom kernels, which names no way out.",
            "to_dlpack, unlike Tensor.__dlpack__, asks no `__torch_function__`, and takes the address 0 of a wrapper "
            "subclass for its memory: reading the capsule is a segmentation fault.",
            "2.11 - 2.15",
            _before((torch.utils.dlpack, "to_dlpack", of_dlpack), (torch, "to_dlpack", of_dlpack)),
        ),
        Patch(
            "parts_of_sparse_tensors",
            "torch.sparse_coo_tensor",
            "sparse_coo_tensor raises an error about custom kernels, which names no way out.",
            "sparse_coo_tensor, unlike its methods, asks no `__torch_function__`, and reads the largest index off the "
            "memory of a wrapper subclass.",
            "2.11 - 2.15",
            _before((torch, "sparse_coo_tensor", of_coo)),
        ),
        Patch(
            "inputs_of_make_fx",
            "torch.fx.experimental.proxy_tensor.track_tensor",
            "make_fx makes shards constants of the graph: later calls get the values of the first one.",
            "https://github.com/pytorch/pytorch/pull/118155 says why: "
            "make_fx gives the inner tensors of a subclass no proxies, and silently makes constants of them: it should "
            "refuse a traceable wrapper subclass, or flatten it as AOTAutograd does.",
            "2.11 - 2.15",
            _before((proxy_tensor, "track_tensor", of_make_fx)),
        ),
        Patch(
            "inputs_of_jit_trace",
            "torch.jit._trace._trace_impl",
            "torch.jit.trace makes shards constants of the graph.",
            "torch.jit.trace of a traceable wrapper subclass traces the ops on its inner tensors, whose values become "
            "constants: it should refuse such inputs.",
            "2.11 - 2.15",
            _before((torch.jit._trace, "_trace_impl", of_jit)),  # 2.11 - 2.15
        ),
        Patch(
            "shards_of_dtensors",
            "torch.distributed.tensor._api._FromTorchTensor.forward",
            "DTensor.from_local treats a sharded tensor as one rank's shard, although each rank holds another shard.",
            "DTensor.from_local has no way for a tensor subclass to object to becoming a local tensor.",
            "2.11 - 2.15",
            _before((_FromTorchTensor, "forward", from_local)),
        ),
        Patch(
            "wholes_of_dtensors",
            "Shard._make_shard_tensor, Replicate._make_replicate_tensor",
            "distribute_tensor treats the shard of a sharded tensor as the whole tensor.",
            "distribute_tensor has no way for a tensor subclass to object, or to say how it is laid out.",
            "2.11 - 2.15",
            # They are already bound to their classes.
            _before((Shard, "_make_shard_tensor", whole), (Replicate, "_make_replicate_tensor", whole)),  # 2.11 - 2.15
        ),
        Patch(
            "parameters_of_fully_shard",
            "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam.__init__",
            "fully_shard partitions this rank's local shard as if it were the whole parameter.",
            "FSDPParam asks only DTensor parameters for their layout; another subclass is sharded over its local "
            "memory.",
            "2.11 - 2.15",
            _before((FSDPParam, "__init__", of_fully_shard)),
        ),
        Patch(
            "parameters_of_fsdp",
            "torch.distributed.fsdp._flat_param.FlatParamHandle.__init__",
            "FullyShardedDataParallel flattens this rank's local shard as if it were the whole parameter.",
            "FlatParamHandle flattens any subclass but DTensor by its local memory.",
            "2.11 - 2.15",
            _before((FlatParamHandle, "__init__", of_fsdp)),
        ),
        Patch(
            "parameters_of_ddp",
            "torch.nn.parallel.DistributedDataParallel.__init__",
            "DistributedDataParallel copies the shard of its first rank to the others, and averages gradients.",
            "DistributedDataParallel refuses no tensor subclass, and broadcasts its local memory.",
            "2.11 - 2.15",
            _before((DistributedDataParallel, "__init__", of_ddp)),
        ),
        Patch(
            "data_of_plain_tensors",
            "torch.Tensor.data",
            "After `plain.data = sharded` torch dispatches ops on `plain` to a class that it is no instance of: the "
            "process ends with a segmentation fault.",
            "`plain.data = subclass` asks the plain tensor alone (`__torch_function__`), and `set_data` treats a "
            "wrapper subclass as compatible: the next op on `plain` crashes. A DTensor has the same fault.",
            "2.11 - 2.15",
            lambda stack: replace(stack, torch.Tensor, "data", lambda data: _check_data(data, as_data)),
        ),
    )


def _check_data(data: _Attribute, check: Callable[[torch.Tensor, object], None]) -> property:
    """The attribute ``data`` of tensors, with a check before each assignment."""

    def assign(tensor: torch.Tensor, value: object) -> None:
        check(tensor, value)
        data.__set__(tensor, value)

    return property(data.__get__, assign, doc=data.__doc__)


def _before(*places: tuple[object, str, Callable[..., None]]) -> Callable[[contextlib.ExitStack], None]:
    """A `put_in` that runs a check before functions.

    Args:
        places: for each function its owner, its name, and the check, which raises.
    """

    def put_in(stack: contextlib.ExitStack) -> None:
        for owner, name, check in places:
            static = isinstance(owner, type) and name != "__init__"
            replace(stack, owner, name, functools.partial(_check_first, check=check, static=static))

    return put_in


def _check_first(function: Callable[_Args, _T], check: Callable[_Args, None], static: bool) -> object:
    """A function, or a static method, that runs a check before it does its work."""

    @functools.wraps(function)
    def checked(*args: _Args.args, **kwargs: _Args.kwargs) -> _T:
        check(*args, **kwargs)
        return function(*args, **kwargs)

    return staticmethod(checked) if static else checked


def ranks_of(mesh: DeviceMesh) -> list[int]:
    """The ranks in a mesh, in the order of their coordinates. This works inside a trace, too."""
    with _disable_current_modes():
        ranks: list[int] = mesh.mesh.flatten().tolist()
    return ranks


def is_strided_shard(placement: object) -> bool:
    """Whether a placement's shards lie in another order than that of the mesh dims."""
    return isinstance(placement, _StridedShard)
