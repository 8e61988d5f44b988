"""`ShardTensor`: a tensor over a device mesh whose shards may have any size on any rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement

from shardcompile import compat
from shardcompile.collectives.descriptor import own_collectives
from shardcompile.compat import OpOverload, OpOverloadPacket
from shardcompile.dispatch import Handlers, clear_cache, dispatch
from shardcompile.dispatch.foreign import refuse_other_tracers
from shardcompile.errors import LayoutError, RedistributeError, UnsupportedOpError
from shardcompile.ops import CONDITIONS, FUNCTIONS, NAMED_FUNCTIONS
from shardcompile.ops.view.segmented import layout_with_contiguous_shards
from shardcompile.planning import target_layout
from shardcompile.sharding import Layout, Spec, contiguous_stride, has_segments, normalize_placements
from shardcompile.tensor import checkpoint, construct, promotion
from shardcompile.tensor.arguments import (
    IN_PLACE,
    laid_out,
    promoted,
    survey,
    wants_gradient,
    write_to_plain,
)
from shardcompile.tensor.autograd import (
    FromLocal,
    Promote,
    Redistribute,
    ToLocal,
    gradient_layout,
    redistributed,
    with_contiguous_shards,
)
from shardcompile.tensor.backward import WITH_FUNCTIONS_ENABLED, backward
from shardcompile.tensor.foreign import check_convertible, guard_wrappers
from shardcompile.tensor.memory import data_ptr, explain_read, untyped_storage
from shardcompile.tensor.sparse_operands import any_sparse, with_sparse_operands
from shardcompile.tensor.traced import WITH_THE_FIRST, Traced

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import MetadataIndex

ShardingShapes = construct.ShardingShapes


SILENT = promotion.TensorPromotionMode.SILENT
_without_torch_function = torch._C.DisableTorchFunctionSubclass
_NUMBERS = {int, float, bool, complex, type(None), str, torch.dtype, torch.Size, slice}
_FUNCTION_HANDLERS, _NAMED_HANDLERS = Handlers.functions, Handlers.names


class ShardTensor(Traced):
    """A tensor whose shards, of any size, lie on the ranks of a mesh.

    It has the global shape and behaves as the full tensor would; `to_local` returns this rank's local shard. It is
    created by `from_local`, `scatter_tensor`, `distribute_tensor` and the factory functions.
    """

    @staticmethod
    def __new__(cls, local: Tensor, spec: Spec, requires_grad: bool = False) -> ShardTensor:
        """Wraps a local shard; users call `from_local`."""
        self = cls._wrap(local, spec)
        if requires_grad:
            self.requires_grad_()
        return self

    # Ops

    __torch_dispatch__ = classmethod(dispatch)  # type: ignore[assignment]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> object:
        """Runs a torch function: by a handler, by an implementation above autograd, or with parameters promoted."""
        if torch._C._is_tracing() or compat.has_modes():
            refuse_other_tracers(cls, args)
        if _FUNCTION_HANDLERS or _NAMED_HANDLERS:
            handler = Handlers.of_function(func)
            if handler is not None:
                return handler(func, types, args, kwargs or {})
        if func in WITH_FUNCTIONS_ENABLED:
            return WITH_FUNCTIONS_ENABLED[func](*args, **(kwargs or {}))
        special = FUNCTIONS.get(func)
        if special is None and type(func) is OpOverloadPacket:
            special = NAMED_FUNCTIONS.get(str(func))
        if special is not None and func in CONDITIONS and not CONDITIONS[func](args):
            special = None
        kwargs = kwargs or {}
        if special is None:
            for a in (*args, *kwargs.values()) if kwargs else args:
                kind = type(a)
                if a._align_grad if kind is cls else kind not in _NUMBERS:
                    break
            else:  # a fast path for the common case: there is nothing to promote
                try:
                    with _without_torch_function():
                        return func(*args, **kwargs)
                except RuntimeError as error:
                    explain_read(error, func, args, kwargs)
                    refuse_other_tracers(cls, args)
                    raise
        if args and type(args[0]) is not cls and func in IN_PLACE and wants_gradient(args, kwargs):
            return write_to_plain(func, args, kwargs)
        if any_sparse(func, (*args, *kwargs.values())):
            return with_sparse_operands(cls, func, args, kwargs)
        args, kwargs = cls._prepared(func, args, kwargs)
        try:
            with _without_torch_function():
                return func(*args, **kwargs) if special is None else special(func, *args, **kwargs)
        except RuntimeError as error:
            explain_read(error, func, args, kwargs)
            refuse_other_tracers(cls, args)
            raise

    @classmethod
    def _prepared(
        cls, func: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        """Returns the arguments of a function, in which plain tensors that require a gradient are promoted."""
        if promotion.Promotion.mode is not SILENT:
            promotion.report_plain_tensors(func, (args, kwargs))
        mesh, plain = survey(cls, args)
        if kwargs:
            kwargs_mesh, kwargs_plain = survey(cls, kwargs.values())
            mesh, plain = mesh or kwargs_mesh, plain or kwargs_plain
        # A torch.func transform differentiates its own wrappers, and accumulates no gradient into a plain tensor.
        if plain and mesh is not None and not compat.is_transforming():
            args = tuple(promoted(cls, mesh, a) for a in args)
            kwargs = {k: promoted(cls, mesh, a) for k, a in kwargs.items()}
        return args, kwargs

    # Construction and conversion

    @classmethod
    def from_local(
        cls,
        local_tensor: Tensor,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        sharding_shapes: ShardingShapes = "infer",
        *,
        global_shape: Sequence[int] | None = None,
        run_check: bool = False,
    ) -> ShardTensor:
        """Creates a sharded tensor from the local shards of the ranks. Differentiable.

        Args:
            local_tensor: this rank's local shard; sharded dims may have any size, also 0. The result shares the memory
                of a contiguous shard. A shard with other strides (transposed, with gaps, expanded) is copied, so that
                the strides are rank-invariant.
            device_mesh: the mesh; the current one (``with mesh:``) by default.
            placements: one for each mesh dim; Replicate by default.
            sharding_shapes: ``"infer"``: ranks exchange their shapes in one small collective and check them.
                ``"chunk"``: the shards are those of torch.chunk for `global_shape`. Or a mapping from mesh dims to the
                sizes (or shapes) of all shards along them. The last two do not communicate.
            global_shape: required for ``"chunk"``, checked otherwise.
            run_check: whether to compare layout and replicated values across ranks, for any `sharding_shapes`.

        Raises:
            LayoutError: the shards, placements, sizes or ranks do not fit together.
        """
        return _from_local(local_tensor, device_mesh, placements, sharding_shapes, global_shape, run_check)

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        sharding_shapes: Mapping[int, Sequence[object]] | None = None,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> ShardTensor:
        """Returns the same tensor in another layout. Differentiable, also twice.

        Args:
            device_mesh: must be this tensor's mesh, if given.
            placements: one for each mesh dim; the current ones by default.
            sharding_shapes: from a mesh dim to the sizes of all shards along it. Without it a tensor dim that is
                sharded and stays sharded keeps its partition, and a newly sharded dim gets torch.chunk's.
            async_op: whether to return before the last collective is complete; the first op on the result waits.
            forward_dtype: the dtype to cast to before communication; the result has it.
            backward_dtype: the dtype to cast the gradient to before it is communicated. It is then cast to this
                tensor's dtype.

        Raises:
            RedistributeError: the redistribution is not meaningful, e.g. to Partial.
            LayoutError: the placements or sizes do not fit the tensor or the mesh.
        """
        layout = self.sharding if forward_dtype is None else self.sharding.with_dtype(forward_dtype)
        if device_mesh is not None and device_mesh != layout.mesh:
            raise RedistributeError(
                f"redistribution from mesh {layout.mesh} to another mesh {device_mesh} is not supported; go through "
                "full_tensor() and distribute_tensor()"
            )
        wanted = layout.placements if placements is None else normalize_placements(placements, layout.mesh, self.ndim)
        for before, after in zip(layout.placements, wanted, strict=True):
            if isinstance(after, Partial) and before != after:
                raise RedistributeError(f"Partial cannot be a target: {layout.describe()} to {list(wanted)}")
        partitions = construct.stated_partitions(layout, wanted, sharding_shapes, fixed=layout.has_symbols)
        return redistributed(
            with_contiguous_shards(self), target_layout(layout, wanted, partitions), async_op, backward_dtype
        )

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """Returns the local shard of this rank. Differentiable.

        Args:
            grad_placements: placements of the gradient, whose local shard is the gradient of the result; those of this
                tensor by default.

        Raises:
            RedistributeError: a reduction is pending, so the shard is a term and not a value.
            LayoutError: the shards of `grad_placements` have other shapes.
        """
        layout = self.sharding
        if layout.is_partial:
            raise RedistributeError(
                f"the shard of {layout.describe()} is a term of a pending reduction, not a value; "
                "redistribute to Replicate or Shard first, or take full_tensor()"
            )
        grad_layout = None if grad_placements is None else gradient_layout(layout, grad_placements)
        return ToLocal.apply(with_contiguous_shards(self), grad_layout)

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """Returns the full tensor as a plain one, on every rank. Differentiable.

        Args:
            grad_placements: placements of the gradient; Replicate by default.
        """
        replicated = redistributed(self, self._spec.layout.replicated())
        return replicated.to_local(grad_placements=grad_placements)

    @classmethod
    def from_dtensor(cls, x: object) -> ShardTensor:
        """Converts a DTensor to a ShardTensor without communication. Differentiable.

        Raises:
            UnsupportedOpError: its shards are in an order that ShardTensor does not support, or are sharded themselves.
        """
        return _from_dtensor(x)

    def to_dtensor(self) -> Tensor:
        """Converts this tensor to a DTensor without communication. Differentiable.

        Raises:
            LayoutError: a partition is not torch.chunk's, the only one that DTensor supports.
        """
        layout = self.sharding
        for dim, partition in enumerate(layout.partitions):
            if partition is None:
                continue
            chunk = Layout.chunked(layout.mesh, layout.placements, layout.shape, layout.dtype).partitions[dim]
            if not partition.guard_same_shards(chunk):
                raise LayoutError(
                    f"DTensor supports only torch.chunk's partition; dim {dim} of {layout.describe()} has another one. "
                    f"First redistribute(sharding_shapes={{{partition.mesh_dims[-1]}: "
                    f"{list(chunk.sizes if chunk else ())}}})"
                )
        local = ToLocal.apply(with_contiguous_shards(self), None)
        return DTensor.from_local(
            local, layout.mesh, layout.placements, run_check=False, shape=self.shape, stride=self.stride()
        )

    # Queries

    @property
    def sharding(self) -> Layout:
        """The layout: mesh, placements, global shape, dtype and all shard sizes."""
        return layout_with_contiguous_shards(self._spec.layout)

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh."""
        return self._spec.layout.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The placements, one for each mesh dim."""
        return self.sharding.placements

    def offsets(self, mesh_dim: int | None = None) -> tuple[int, ...] | int:
        """Returns the offsets of this rank's local shard in the global tensor, in elements.

        Args:
            mesh_dim: a mesh dim, for the offset along the tensor dim that it shards only; by default the offsets along
                all tensor dims.

        Raises:
            UnsupportedOpError: inside a compiled function, where one graph serves every partition.
        """
        layout = self.sharding
        if layout.has_symbols:
            raise UnsupportedOpError(
                f"offsets() of {layout.describe()} inside a compiled function: one graph serves every partition, so "
                "the offsets of this rank's local shard are not constants of it. Call it outside and pass "
                "torch.tensor(x.offsets()), or compute indices from the shards: torch.ones_like(x).cumsum(dim)"
            )
        coordinate = compat.coordinate(layout.mesh)
        if mesh_dim is None:
            return layout.offsets(coordinate)
        placement = layout.placements[mesh_dim]
        return layout.offset(coordinate, placement.dim) if placement.is_shard() else 0  # type: ignore[attr-defined]

    def backward(
        self,
        gradient: object = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: object = None,
    ) -> None:
        """Runs `torch.Tensor.backward`."""
        backward(self, gradient, retain_graph, create_graph, inputs=inputs)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        grad = ", requires_grad=True" if self.requires_grad else ""
        if self.grad_fn is not None:
            grad = f", grad_fn=<{self.grad_fn.name()}>"
        layout, local = self._spec.layout, self.__dict__.get("_local_tensor")
        segments = "" if not has_segments(layout) else ", in segments"
        if not layout.has_symbols:  # in a trace the graph would get nodes
            layout = layout_with_contiguous_shards(layout)
        # repr neither waits for a collective in flight, nor asks for the rank while tracing.
        if local is None or (segments and not layout.has_symbols):
            shard = layout.local_shape(compat.coordinate(layout.mesh))
        else:
            shard = tuple(local.shape)
        return f"ShardTensor({layout.describe()}, shard {shard}{segments}{grad})"

    def data_ptr(self) -> int:
        """Raises an error: a sharded tensor has no memory of its own.

        Raises:
            UnsupportedOpError: unless torch's own code asks whether there is memory.
        """
        return data_ptr(self)

    def untyped_storage(self) -> torch.UntypedStorage:
        """Raises an error: a sharded tensor has no memory of its own.

        Raises:
            UnsupportedOpError: unless torch's own code asks which tensors are views of one another.
        """
        return untyped_storage(self)

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        is_param = getattr(self, "_is_param", False)
        parts = construct.plain_parts(self._spec)
        return rebuild, (self._local_tensor.detach(), parts, self.requires_grad, is_param, checkpoint.saver())

    def __create_write_items__(self, name: str, _: object) -> list[object]:
        return list(checkpoint.write_items(name, self))

    def __create_chunk_list__(self) -> list[object]:
        return list(checkpoint.chunks(self))

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return checkpoint.shard(self, index)

    # Extension points

    @staticmethod
    def patches_enabled() -> bool:
        """Returns True: torch functions always support sharded tensors. PhysicsNeMo's ShardTensor has a switch."""
        return True

    get_promotion_mode = staticmethod(promotion.get_promotion_mode)
    set_promotion_mode = staticmethod(promotion.set_promotion_mode)
    promotion_mode = staticmethod(promotion.promotion_mode)

    @staticmethod
    def register_dispatch_handler(op: OpOverload, handler: Callable[..., object]) -> None:
        """Registers ``handler(*args, **kwargs)``, which replaces the dispatch of `op` below autograd."""
        Handlers.ops[op] = handler
        clear_cache()

    @staticmethod
    def register_function_handler(function: Callable[..., object], handler: Callable[..., object]) -> None:
        """Registers ``handler(func, types, args, kwargs)``, which replaces a Python torch function above autograd."""
        Handlers.functions[function] = handler

    @staticmethod
    def register_named_function_handler(name: str, handler: Callable[..., object]) -> None:
        """Registers a handler as `register_function_handler` does, for a function or an op that is given by name.

        Args:
            name: the qualified name of a Python function, or of an op's overload, ``my_lib.my_op.default``.
            handler: called as ``handler(func, types, args, kwargs)``.
        """
        Handlers.names[name] = handler


@torch.compiler.allow_in_graph  # one node for Dynamo; AOTAutograd traces what it does
def _from_local(local: Tensor, mesh: DeviceMesh | None, *options: Any) -> ShardTensor:
    """Implements `ShardTensor.from_local`; `options` are the other arguments of `construct.layout_of_shard`."""
    layout = construct.layout_of_shard(local, compat.mesh_itself(mesh), *options)
    return FromLocal.apply(local, ShardTensor, Spec.of(layout, contiguous_stride(layout.shape)))


@torch.compiler.allow_in_graph
def _from_dtensor(x: DTensor) -> ShardTensor:
    check_convertible(x, ShardTensor)
    placements = normalize_placements(x.placements, x.device_mesh, x.ndim)
    layout = Layout.chunked(x.device_mesh, placements, tuple(x.shape), x.dtype)
    return FromLocal.apply(x.to_local(), ShardTensor, Spec.of(layout, tuple(x.stride())))


def rebuild(local: Tensor, parts: construct.PlainParts, requires_grad: bool, is_param: bool, saver: int) -> Tensor:
    """Unpickles a sharded tensor on the rank that has pickled it.

    Raises:
        ShardError: this is another rank.
    """
    spec = construct.spec_of_plain_parts(local.dtype, *parts)
    checkpoint.check_saver(saver, spec.layout)
    tensor = ShardTensor(local, spec)
    return torch.nn.Parameter(tensor, requires_grad) if is_param else tensor.requires_grad_(requires_grad)


# The arguments of `rebuild` are a tensor, placements and a mesh, which are torch's own, and plain numbers.
torch.serialization.add_safe_globals([rebuild])


WITH_THE_FIRST += [
    compat.return_strides_after_sizes,
    lambda: checkpoint.teach(ShardTensor),
    lambda: guard_wrappers(ShardTensor),
    lambda: compat.let_comm_debug_mode_see_through(ShardTensor, own_collectives()),
]
for _called_by_torch in (Traced, ShardTensor, FromLocal, Promote, Redistribute, ToLocal):
    compat.keep_protocol_from_dynamo(_called_by_torch)
compat.keep_from_dynamo(laid_out)
compat.keep_from_dynamo(dispatch)
compat.make_known_to_einops(ShardTensor)
