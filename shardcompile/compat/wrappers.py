"""Private names of torch where tensors become DTensors, flat parameters or buckets. Seen in torch 2.11 to 2.15.

These wrappers take the memory of what they are given for the whole of a tensor, or for this rank's part of it. None of
them asks a tensor that is in blocks already whether that is right, so the question is put in front of them.
"""

from __future__ import annotations

import contextlib
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

from shardcompile.compat.patch import Patch, put_in_for_good, replace


def ask_before_wrapping(
    as_block: Callable[[Any, Any], None],
    as_whole: Callable[[Any], None],
    as_parameter: Callable[[Any, str], None],
    as_input: Callable[[Any, str], None],
    as_data: Callable[[Any, Any], None],
) -> None:
    """Have these called in front of torch's wrappers; they raise where a tensor cannot be wrapped.

    Args:
        as_block: with what `DTensor.from_local` is given as this rank's block, and the mesh.
        as_whole: with what DTensor's `distribute_tensor` is given as the whole tensor.
        as_parameter: with each parameter that is about to be flattened or bucketed, and by what.
        as_input: with each input of a function that is about to be traced, and by what.
        as_data: with a tensor, and with what is assigned to its ``data``.

    It is long because each of the patches says what it is for.
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

    put_in_for_good(
        Patch(
            "inputs_of_make_fx",
            "torch.fx.experimental.proxy_tensor.track_tensor",
            "make_fx takes blocks for constants of the graph: another call gets the values of the first one.",
            "https://github.com/pytorch/pytorch/pull/118155 says why: "
            "make_fx tracks the inner tensors of a subclass with no proxy of their own, and makes constants of them in "
            "silence: it should refuse a traceable wrapper subclass, or flatten it as AOTAutograd does.",
            "2.11 - 2.15",
            _before((proxy_tensor, "track_tensor", of_make_fx)),
        ),
        Patch(
            "inputs_of_jit_trace",
            "torch.jit._trace._trace_impl",
            "torch.jit.trace takes blocks for constants of the graph.",
            "torch.jit.trace of a traceable wrapper subclass traces the ops on its inner tensors, whose values become "
            "constants: it should refuse such inputs.",
            "2.11 - 2.15",
            _before((torch.jit._trace, "_trace_impl", of_jit)),  # 2.11 - 2.15
        ),
        Patch(
            "blocks_of_dtensors",
            "torch.distributed.tensor._api._FromTorchTensor.forward",
            "DTensor.from_local takes a sharded tensor for one rank's block, though ranks hold other blocks of it.",
            "DTensor.from_local has no way for a tensor subclass to object to becoming a local tensor.",
            "2.11 - 2.15",
            _before((_FromTorchTensor, "forward", from_local)),
        ),
        Patch(
            "wholes_of_dtensors",
            "Shard._make_shard_tensor, Replicate._make_replicate_tensor",
            "distribute_tensor takes a sharded tensor for the whole tensor.",
            "distribute_tensor has no way for a tensor subclass to object, or to say how it is laid out.",
            "2.11 - 2.15",
            # They are bound to their classes already.
            _before((Shard, "_make_shard_tensor", whole), (Replicate, "_make_replicate_tensor", whole)),  # 2.11 - 2.15
        ),
        Patch(
            "parameters_of_fully_shard",
            "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam.__init__",
            "fully_shard cuts this rank's block as if that were the whole parameter.",
            "FSDPParam asks only DTensor parameters for their layout; another subclass is cut by its local memory.",
            "2.11 - 2.15",
            _before((FSDPParam, "__init__", of_fully_shard)),
        ),
        Patch(
            "parameters_of_fsdp",
            "torch.distributed.fsdp._flat_param.FlatParamHandle.__init__",
            "FullyShardedDataParallel flattens this rank's block as if that were the whole parameter.",
            "FlatParamHandle flattens any subclass but DTensor by its local memory.",
            "2.11 - 2.15",
            _before((FlatParamHandle, "__init__", of_fsdp)),
        ),
        Patch(
            "parameters_of_ddp",
            "torch.nn.parallel.DistributedDataParallel.__init__",
            "DistributedDataParallel copies the block of its first rank to the others, and averages gradients.",
            "DistributedDataParallel refuses no tensor subclass, and broadcasts its local memory.",
            "2.11 - 2.15",
            _before((DistributedDataParallel, "__init__", of_ddp)),
        ),
        Patch(
            "data_of_plain_tensors",
            "torch.Tensor.data",
            "A plain tensor that gets a sharded one as its `data` is dispatched to a class that it is not of: the "
            "process ends in a segmentation fault.",
            "`plain.data = subclass` asks the plain tensor alone (`__torch_function__`), and `set_data` takes a "
            "wrapper subclass for compatible: the next op on `plain` crashes. With a DTensor alike.",
            "2.11 - 2.15",
            lambda stack: replace(stack, torch.Tensor, "data", lambda data: _check_data(data, as_data)),
        ),
    )


def _check_data(data: Any, ask: Callable[[Any, Any], None]) -> property:
    """The attribute ``data`` of tensors, which asks before something is assigned to it."""

    def assign(tensor: Any, value: object) -> None:
        ask(tensor, value)
        data.__set__(tensor, value)

    return property(data.__get__, assign, doc=data.__doc__)


def _before(*places: tuple[object, str, Callable[..., None]]) -> Callable[[contextlib.ExitStack], None]:
    """Puts a question in front of functions.

    Args:
        places: of each its owner, its name, and the question, which raises.
    """

    def put_in(stack: contextlib.ExitStack) -> None:
        for owner, name, ask in places:
            static = isinstance(owner, type) and name != "__init__"
            replace(stack, owner, name, functools.partial(_ask_first, ask=ask, static=static))

    return put_in


def _ask_first(function: Callable[..., object], ask: Callable[..., None], static: bool) -> object:
    """A function, or a static method, that asks before it does what it did."""

    @functools.wraps(function)
    def asked(*args: object, **kwargs: object) -> Any:
        ask(*args, **kwargs)
        return function(*args, **kwargs)

    return staticmethod(asked) if static else asked


def ranks_of(mesh: DeviceMesh) -> list[int]:
    """The ranks in a mesh, in the order of their coordinates; also inside a trace."""
    with _disable_current_modes():
        ranks: list[int] = mesh.mesh.flatten().tolist()
    return ranks


def is_strided_shard(placement: object) -> bool:
    """Whether a placement is one of blocks in another order than that of the mesh dims."""
    return isinstance(placement, _StridedShard)
