"""`ShardTensor`: a tensor over a device mesh whose blocks may have any size on any rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsIndex

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial, Placement

from shardcompile import compat
from shardcompile.collectives import wait
from shardcompile.compat import OpOverload
from shardcompile.dispatch import Handlers, clear_cache, dispatch
from shardcompile.errors import LayoutError, RedistributeError, UnsupportedOpError
from shardcompile.layout import IntLike, Layout, Spec, contiguous_stride, normalize_placements
from shardcompile.ops import CONDITIONS, FUNCTIONS
from shardcompile.ops.support.strides import in_order
from shardcompile.ops.view.joined import layout_in_one_piece
from shardcompile.plan import target_layout
from shardcompile.sharded import Sharded
from shardcompile.tensor import checkpoint, construct
from shardcompile.tensor.arguments import (
    IN_PLACE,
    TAKES_LEAVES,
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
    in_one_piece,
    redistributed,
)
from shardcompile.tensor.foreign import check_convertible, guard_wrappers
from shardcompile.tensor.metadata import (
    Metadata,
    block_hints,
    extent_hints,
    keys_tensor,
    metadata_of,
    spec_from_parts,
    stable_hash,
    with_block_symbols,
    with_stated_strides,
)

ShardingShapes = construct.ShardingShapes


_make_wrapper = torch.Tensor._make_wrapper_subclass
_without_torch_function = torch._C.DisableTorchFunctionSubclass
_UNMARKED = AttributeError("no dim of this tensor may vary")
_FUNCTION_HANDLERS, _NAMED_HANDLERS = Handlers.functions, Handlers.names


class _Block:
    """This rank's block: an attribute that is set on construction, but for the cases that are found here on use."""

    def __get__(self, x: Any, owner: type | None = None) -> object:
        if x is None:
            return self
        if x._copied is not None:
            return x._copied.current()
        x.__dict__["_local_tensor"] = block = in_order(wait(x._in_flight), x._spec.stride)
        return block


class ShardTensor(Sharded):
    """A tensor whose blocks, of any size, lie on the ranks of a mesh.

    It has the global shape and behaves as the plain tensor would; `to_local` gives this rank's block. Made by
    `from_local`, `scatter_tensor`, `distribute_tensor` and the factories.
    """

    # Defaults on the class: an eager op sets only what it has to.
    _keys: Tensor | None = None
    _flat: tuple[list[str], Metadata] | None = None
    _may_vary: bool = True
    _hints: dict[int, int] | None = None
    _beside_parameter: bool = False

    @staticmethod
    def __new__(cls, local: Tensor, spec: Spec, requires_grad: bool = False) -> ShardTensor:
        """Wrap a block; for users there is `from_local`."""
        self = cls._wrap(local, spec)
        if requires_grad:
            self.requires_grad_()
        return self

    @classmethod
    def _wrap(cls, local: Tensor, spec: Spec) -> ShardTensor:
        self = _make_wrapper(cls, spec.shape, strides=spec.stride, dtype=local.dtype, device=local.device)
        self._local_tensor = local
        self._spec = spec
        if type(local) is not Tensor:
            self._carry_keys()
        return self

    def _carry_keys(self) -> None:
        """Inside a trace the tensor that carries the keys is made along with the result, while tracing is on."""
        compat.note_trace()
        compat.keep_first_proxies()
        self._spec = with_block_symbols(self._spec, self._local_tensor)
        layout = self._spec.layout
        metadata = metadata_of(layout)
        if metadata.dynamic_dims:
            self._keys = keys_tensor(layout, metadata, self._local_tensor)

    def _stand_in(self) -> ShardTensor:
        """Another wrapper of the same block."""
        other = self._wrap(self._local_tensor, self._spec)
        if self._copied is not None:
            del other.__dict__["_local_tensor"]
            other._copied = self._copied
        return other

    def _turn_into(self, other: ShardTensor) -> None:
        """Take over block and layout; the sizes of the wrapper itself are set elsewhere."""
        self._local_tensor, self._spec, self._keys, self._flat = other._local_tensor, other._spec, other._keys, None
        if other._copied is not None:
            del self.__dict__["_local_tensor"]
        self._copied = other._copied

    @staticmethod
    def _wrap_like(x: ShardTensor, local: Tensor) -> ShardTensor:
        layout = x._spec.layout.with_dtype(local.dtype)
        return type(x)._wrap(local, Spec.of(layout, x._spec.stride))

    _local_tensor: Any = _Block()

    @property
    def _holds_values(self) -> bool:
        """Whether this is no stand-in inside of a trace."""
        return type(self._local_tensor) in (Tensor, torch.nn.Parameter)

    # What the compiler asks for

    def __tensor_flatten__(self) -> tuple[list[str], Metadata]:
        flat = self._flat
        if flat is None:
            # Dynamo may come to an input as late as inside of a transform of torch.func.
            with compat.outside_transforms():
                flat = self._flat = self._first_flattened()
        if self._may_vary and compat.is_compiling():
            self._prepare_trace(flat[1])
        return flat

    @property
    def _is_static(self) -> bool:
        """Whether later calls see this very tensor, or one that is laid out like it.

        So it is for parameters, as everywhere in torch, and therefore for what optimizers keep beside them and for
        their gradients: where they meet in a compiled step all of them have to be known alike.
        """
        return getattr(self, "_is_param", False) or self._beside_parameter or compat.has_guarded_address(self)

    def _first_flattened(self) -> tuple[list[str], Metadata]:
        """The parts, and what is settled once for each tensor."""
        metadata = metadata_of(self._spec.layout)
        # A tensor inside a trace does not vary.
        plain = self._holds_values
        self._may_vary = plain and bool(metadata.cuts)
        if self._may_vary:
            self._local_tensor = compat.without_base(with_stated_strides(self._local_tensor, self._spec))
        if plain and 0 in self._spec.shape:
            compat.give_storage(self)
        if plain and metadata.dynamic_dims and self._keys is None:
            with compat.outside_transforms():
                self._keys = keys_tensor(self._spec.layout, metadata, self._local_tensor)
        return ["_local_tensor", "_cut_keys"] if metadata.dynamic_dims else ["_local_tensor"], metadata

    def _prepare_trace(self, metadata: Metadata) -> None:
        """Have a trace that is starting treat sharded extents, blocks and keys as dynamic, or as static."""
        compat.note_trace(guarded=True)  # by the metadata
        if self._is_static:
            compat.mark_static(self._local_tensor)
            if metadata.dynamic_dims:
                compat.mark_static(self._cut_keys)
            return
        compat.trace_size_obliviously()
        compat.mark_weakly_dynamic(self._local_tensor, block_hints(self._spec.layout))
        if metadata.dynamic_dims:
            keys = self._cut_keys
            # Without hints: those are part of what the compiler's caches ask for.
            compat.mark_weakly_dynamic(keys, dict.fromkeys(range(1, keys.ndim)))

    @property
    def _cut_keys(self) -> Tensor:
        if self._keys is None:
            layout = self._spec.layout
            keys = keys_tensor(layout, metadata_of(layout), self._local_tensor, with_extents=self._holds_values)
            if self._holds_values:
                return keys  # a graph of Dynamo's that runs as it is reads the extents here that a run gives
            self._keys = keys
        return self._keys

    @_cut_keys.setter
    def _cut_keys(self, keys: Tensor) -> None:
        """AOTAutograd gives a tangent's inner tensors the strides that it has traced them with."""
        self._keys = keys

    def _is_view(self) -> bool:
        """Whether autograd has this as a view of another tensor; not what a compiled function gets.

        Torch would make an input that is a view by viewing a stand-in of its base. Which views a block can hold, and
        what its base is, is a matter of each rank, and a slice along a cut dim is none that memory could have. A copied
        view stays one: what a graph writes to it would not reach its base.
        """
        given = self._copied is None and self._holds_values and compat.is_compiling()
        return not given and super()._is_view()

    # Read by Dynamo on the outer tensor. Properties, so that eager ops do not pay for setting them.

    @property
    def _dynamo_hint_overrides(self) -> dict[int, int]:
        hints = self._hints
        if hints is None:
            hints = self._hints = extent_hints(self._spec.layout)
        if not hints or self._is_static:
            raise _UNMARKED
        return hints

    @_dynamo_hint_overrides.setter
    def _dynamo_hint_overrides(self, hints: dict[int, int]) -> None:
        """Dynamo copies these attributes between tensors; ours follow from the layout."""

    @property
    def _dynamo_weak_dynamic_indices(self) -> set[int]:
        return set(self._dynamo_hint_overrides)

    @_dynamo_weak_dynamic_indices.setter
    def _dynamo_weak_dynamic_indices(self, dims: set[int]) -> None: ...

    @property
    def _has_dynamo_dim_marking(self) -> bool:
        if not self._may_vary:
            raise _UNMARKED
        return bool(self._dynamo_hint_overrides)

    @_has_dynamo_dim_marking.setter
    def _has_dynamo_dim_marking(self, value: bool) -> None: ...

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, Tensor], metadata: Metadata, shape: Sequence[IntLike], stride: Sequence[IntLike]
    ) -> ShardTensor:
        local = inner["_local_tensor"]
        if type(local) is not Tensor:
            compat.keep_first_proxies()
            # What AOTAutograd hands over for a gradient was computed in another pass.
            shape, stride = compat.retraced(shape), compat.retraced(stride)
        keys = inner.get("_cut_keys")
        spec = spec_from_parts(metadata, local, keys, shape, stride)
        self = _make_wrapper(ShardTensor, spec.shape, strides=spec.stride, dtype=local.dtype, device=local.device)
        self._local_tensor, self._spec = local, spec
        if compat.is_compiling():
            self._keys = keys
        elif metadata.has_stated_sizes:
            self._align_grad = True
            if keys is not None and keys.ndim == 1 + len(metadata.dynamic_dims):
                self._keys = keys
        return self

    @classmethod
    def __metadata_guard__(cls, saved: Metadata, now: Metadata) -> bool:
        return saved is now

    def _stable_hash_for_caching(self) -> str:
        names, metadata = self.__tensor_flatten__()
        return stable_hash(metadata, [self, *(getattr(self, n) for n in names)], self.requires_grad)

    def __coerce_tangent_metadata__(self) -> ShardTensor:
        layout = self._spec.layout
        return redistributed(self, layout.reduced()) if layout.is_partial else self

    def __coerce_same_metadata_as_tangent__(
        self, metadata: Metadata, expected_type: type | None = None
    ) -> ShardTensor | None:
        if expected_type is not None and expected_type is not type(self):
            return None
        layout = target_layout(self._spec.layout, metadata.placements)
        if metadata_of(layout.with_dtype(metadata.dtype)) is not metadata:
            raise RedistributeError(
                f"a gradient in the layout {self._spec.layout.describe()} reached a compiled function whose output "
                f"has placements {metadata.placements} and other blocks; redistribute the gradient to the output's "
                "layout"
            )
        return redistributed(self, layout)

    # Ops

    __torch_dispatch__ = classmethod(dispatch)  # type: ignore[assignment]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> object:
        if _FUNCTION_HANDLERS or _NAMED_HANDLERS:
            handler = Handlers.of_function(func)
            if handler is not None:
                return handler(func, types, args, kwargs or {})
        special = FUNCTIONS.get(func)
        if special is not None and func in CONDITIONS and not CONDITIONS[func](args):
            special = None
        if not kwargs and special is None:
            for a in args:
                if type(a) is not cls or a._align_grad:
                    break
            else:  # the common case first, and without a call for each argument
                with _without_torch_function():
                    return func(*args)
        kwargs = kwargs or {}
        if args and type(args[0]) is not cls and func in IN_PLACE and wants_gradient(args, kwargs):
            return write_to_plain(func, args, kwargs)
        args, kwargs = cls._prepared(func, args, kwargs)
        with _without_torch_function():
            return func(*args, **kwargs) if special is None else special(func, *args, **kwargs)

    @classmethod
    def _prepared(
        cls, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        """The arguments of a function with plain tensors promoted that want a gradient."""
        mesh, plain = survey(cls, args)
        if kwargs:
            also_mesh, also_plain = survey(cls, kwargs.values())
            mesh, plain = mesh or also_mesh, plain or also_plain
        # A transform of torch.func differentiates what it has wrapped itself, and puts no gradient into a plain tensor.
        if plain and mesh is not None and func not in TAKES_LEAVES and not compat.is_transforming():
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
        """The sharded tensor of which every rank holds a block. Differentiable.

        Args:
            local_tensor: this rank's block; any number of rows along sharded dims, also none. The tensor shares the
                memory of a block that is contiguous. One that is stored otherwise (transposed, with gaps, expanded) is
                copied, so that all ranks hold blocks of one order whatever they were given.
            device_mesh: the mesh; the current one (``with mesh:``) by default.
            placements: one for each mesh dim; Replicate by default.
            sharding_shapes: ``"infer"``: ranks exchange their shapes in one small collective and check them.
                ``"chunk"``: the blocks are those of torch.chunk for `global_shape`. Or a mapping from mesh dim to the
                sizes (or whole shapes) of all blocks along it. The last two do not communicate.
            global_shape: needed for ``"chunk"``, checked otherwise.
            run_check: compare layout and replicated values across ranks, whatever `sharding_shapes` is.

        Raises:
            LayoutError: the blocks, placements, sizes or ranks do not fit together.
        """
        mesh = device_mesh or compat.current_mesh()
        return _from_local(local_tensor, mesh, placements, sharding_shapes, global_shape, run_check)

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        sharding_shapes: Mapping[int, Sequence[Any]] | None = None,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> ShardTensor:
        """The same tensor in another layout. Differentiable, also twice.

        Args:
            device_mesh: must be this tensor's mesh, if given.
            placements: one for each mesh dim; the present ones by default.
            sharding_shapes: from mesh dim to the sizes of all blocks along it. Without it a tensor dim that is sharded
                and stays sharded keeps its cut, and a newly sharded one gets torch.chunk's.
            async_op: do not wait for the last collective; the first op on the result does.
            forward_dtype: cast to it before anything is moved; the result has it.
            backward_dtype: cast the gradient to it before it is moved back. After that it gets this tensor's dtype.

        Raises:
            RedistributeError: there is no meaningful way, e.g. to Partial.
            LayoutError: the placements or sizes do not fit the tensor or the mesh.
        """
        now = self.sharding if forward_dtype is None else self.sharding.with_dtype(forward_dtype)
        if device_mesh is not None and device_mesh != now.mesh:
            raise RedistributeError(
                f"redistribution from mesh {now.mesh} to another mesh {device_mesh} is not supported; go through "
                "full_tensor() and distribute_tensor()"
            )
        wanted = now.placements if placements is None else normalize_placements(placements, now.mesh, self.ndim)
        for before, after in zip(now.placements, wanted, strict=True):
            if isinstance(after, Partial) and before != after:
                raise RedistributeError(f"Partial cannot be a target: {now.describe()} to {list(wanted)}")
        cuts = construct.stated_cuts(now, wanted, sharding_shapes, fixed=now.is_traced)
        return redistributed(in_one_piece(self), target_layout(now, wanted, cuts), async_op, backward_dtype)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """This rank's block. Differentiable.

        Args:
            grad_placements: placements that the gradient of the block will have; this tensor's by default.

        Raises:
            RedistributeError: a reduction is pending, so that the block is a term and not a value.
            LayoutError: the blocks of `grad_placements` have other shapes.
        """
        layout = self.sharding
        if layout.is_partial:
            raise RedistributeError(
                f"the block of {layout.describe()} is a term of a pending reduction, not a value; "
                "redistribute to Replicate or Shard first, or take full_tensor()"
            )
        placed = None if grad_placements is None else gradient_layout(layout, grad_placements)
        return ToLocal.apply(in_one_piece(self), placed)

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """The whole tensor, as a plain one, on every rank. Differentiable.

        Args:
            grad_placements: placements that the gradient will have; Replicate by default.
        """
        whole = redistributed(self, self._spec.layout.replicated())
        return whole.to_local(grad_placements=grad_placements)

    @classmethod
    def from_dtensor(cls, x: Any) -> ShardTensor:
        """A DTensor as a ShardTensor; no data moves. Differentiable.

        Raises:
            UnsupportedOpError: its blocks lie in an order that ShardTensor does not have, or are sharded themselves.
        """
        check_convertible(x, cls)
        placements = normalize_placements(x.placements, x.device_mesh, x.ndim)
        layout = Layout.chunked(x.device_mesh, placements, tuple(x.shape), x.dtype)
        return FromLocal.apply(x.to_local(), cls, Spec.of(layout, tuple(x.stride())))

    def to_dtensor(self) -> Tensor:
        """This tensor as a DTensor; no data moves. Differentiable.

        Raises:
            LayoutError: a cut is not torch.chunk's, the only one that DTensor knows.
        """
        from torch.distributed.tensor import DTensor

        layout = self.sharding
        for dim, cut in enumerate(layout.cuts):
            if cut is None:
                continue
            chunk = Layout.chunked(layout.mesh, layout.placements, layout.shape, layout.dtype).cuts[dim]
            if not cut.same_blocks(chunk):
                raise LayoutError(
                    f"DTensor knows only torch.chunk's cut; dim {dim} of {layout.describe()} has another. First "
                    f"redistribute(sharding_shapes={{{cut.mesh_dims[-1]}: {list(chunk.sizes if chunk else ())}}})"
                )
        local = ToLocal.apply(in_one_piece(self), None)
        return DTensor.from_local(
            local, layout.mesh, layout.placements, run_check=False, shape=self.shape, stride=self.stride()
        )

    # Queries

    @property
    def sharding(self) -> Layout:
        """Mesh, placements, global shape, dtype and all block sizes."""
        return layout_in_one_piece(self._spec.layout)

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh."""
        return self._spec.layout.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One for each mesh dim."""
        return self.sharding.placements

    def offsets(self, mesh_dim: int | None = None) -> tuple[int, ...] | int:
        """Where this rank's block starts, in elements.

        Args:
            mesh_dim: only along the tensor dim that this mesh dim shards; for all tensor dims by default.

        Raises:
            UnsupportedOpError: inside a compiled function, where one graph serves every cut.
        """
        layout = self.sharding
        if layout.is_traced:
            raise UnsupportedOpError(
                f"offsets() of {layout.describe()} inside a compiled function: one graph serves every cut, and where "
                "this rank's block starts is not known in it. Call it outside and pass torch.tensor(x.offsets()), or "
                "let rows be numbered where they are: torch.ones_like(x).cumsum(dim)"
            )
        coordinate = compat.coordinate(layout.mesh)
        if mesh_dim is None:
            return layout.offsets(coordinate)
        placement = layout.placements[mesh_dim]
        return layout.offset(coordinate, placement.dim) if placement.is_shard() else 0  # type: ignore[attr-defined]

    def backward(
        self, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None
    ) -> None:
        """As `torch.Tensor.backward`; a pending reduction is carried out first, so that its gradient is the whole's."""
        source = redistributed(self, self._spec.layout.reduced())
        gradient = laid_out(gradient, source._spec.layout, type(self))
        with torch._C.DisableTorchFunctionSubclass():
            torch.Tensor.backward(source, gradient, retain_graph, create_graph, inputs)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        grad = ", requires_grad=True" if self.requires_grad else ""
        if self.grad_fn is not None:
            grad = f", grad_fn=<{self.grad_fn.name()}>"
        layout, local = self._spec.layout, self.__dict__.get("_local_tensor")
        # A block that is still on its way is not waited for. One in a trace is not asked which rank it is of.
        block = layout.local_shape(compat.coordinate(layout.mesh)) if local is None else tuple(local.shape)
        return f"ShardTensor({layout.describe()}, block {block}{grad})"

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        is_param = getattr(self, "_is_param", False)
        parts = construct.plain_parts(self._spec)
        return rebuild, (self._local_tensor.detach(), parts, self.requires_grad, is_param, checkpoint.saver())

    def __create_write_items__(self, name: str, _: object) -> list[object]:
        return list(checkpoint.write_items(name, self))

    def __create_chunk_list__(self) -> list[object]:
        return list(checkpoint.chunks(self))

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        return checkpoint.block(self, index)

    # Extension points

    @staticmethod
    def register_dispatch_handler(op: OpOverload, handler: Callable[..., object]) -> None:
        """Have ``handler(*args, **kwargs)`` run in place of our dispatch of `op`, below autograd."""
        Handlers.ops[op] = handler
        clear_cache()

    @staticmethod
    def register_function_handler(function: Callable[..., object], handler: Callable[..., object]) -> None:
        """Have ``handler(func, types, args, kwargs)`` run in place of a Python function of torch, above autograd."""
        Handlers.functions[function] = handler

    @staticmethod
    def register_named_function_handler(name: str, handler: Callable[..., object]) -> None:
        """As `register_function_handler`, for functions and ops that are known by name only.

        Args:
            name: the qualified name of a Python function, or of an op's overload, ``my_lib.my_op.default``.
            handler: called as ``handler(func, types, args, kwargs)``.
        """
        Handlers.names[name] = handler


@torch.compiler.allow_in_graph  # one node for Dynamo; AOTAutograd traces what it does
def _from_local(local: Tensor, *asked: Any) -> ShardTensor:
    """`asked`: the other arguments of `construct.layout_of_block`."""
    layout = construct.layout_of_block(local, *asked)
    return FromLocal.apply(local, ShardTensor, Spec.of(layout, contiguous_stride(layout.shape)))


def rebuild(local: Tensor, parts: tuple[Any, ...], requires_grad: bool, is_param: bool, saver: int) -> Tensor:
    """Inverse of pickling, on the rank that has pickled.

    Raises:
        ShardError: on another one.
    """
    spec = construct.spec_of_plain_parts(local.dtype, *parts)
    checkpoint.check_saver(saver, spec.layout)
    tensor = ShardTensor(local, spec)
    return torch.nn.Parameter(tensor, requires_grad) if is_param else tensor.requires_grad_(requires_grad)


# What a rank has saved of a tensor: itself, placements and a mesh, for which torch answers, and numbers.
torch.serialization.add_safe_globals([rebuild])


checkpoint.teach(ShardTensor)
guard_wrappers(ShardTensor)
compat.let_comm_debug_mode_see_through(ShardTensor)
for _called_by_torch in (ShardTensor, FromLocal, Promote, Redistribute, ToLocal):
    compat.keep_protocol_from_dynamo(_called_by_torch)
compat.keep_from_dynamo(laid_out)
compat.keep_from_dynamo(dispatch)
