"""The compiler's view of a sharded tensor: the traceable wrapper subclass protocol, and which sizes are dynamic."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from shardcompile import compat
from shardcompile.collectives import wait
from shardcompile.dispatch.foreign import refuse_compiled_autograd
from shardcompile.errors import RedistributeError, UnsupportedOpError
from shardcompile.ops.support.copied_views import CopiedView, GivenCopy
from shardcompile.ops.support.strides import in_order
from shardcompile.planning import target_layout
from shardcompile.sharded import Sharded
from shardcompile.sharding import IntLike, Layout, Spec
from shardcompile.tensor.autograd import redistributed
from shardcompile.tensor.metadata import (
    Metadata,
    as_stated_by,
    gaps_along_partitions,
    identity_of,
    is_stated_by,
    make_keys_tensor,
    metadata_of,
    of_input,
    shard_hints,
    size_hints,
    spec_from_parts,
    stable_hash,
    uneven_shard_hints,
    with_shard_symbols,
    with_stated_strides,
)

_make_wrapper = torch.Tensor._make_wrapper_subclass
_refuse_pointer = compat.refuse_pointer
_T = TypeVar("_T", bound="Traced")

WITH_THE_FIRST: list[Callable[[], None]] = []
"""What is called before the process makes its first sharded tensor: changes to torch that an import must not make."""

_UNMARKED = AttributeError("no dim of this tensor is dynamic")


def _with_small_sizes(local: Tensor, spec: Spec) -> Tensor:
    """Returns a local shard whose unsharded dims have the global size where that is 0 or 1.

    A global size of 0 or 1 is a number in a trace. In the shard it may still be a formula, such as ``s // 2``, which an
    op would not broadcast.
    """
    for dim, (size, partition) in enumerate(zip(spec.shape, spec.layout.partitions, strict=True)):
        if partition is None and isinstance(size, int) and size < 2 and isinstance(local.shape[dim], torch.SymInt):
            local = local.select(dim, 0).unsqueeze(dim) if size else local.narrow(dim, 0, 0)
    return local


class _LocalShard:
    """The descriptor of `_local_tensor`, for shards that are not set on construction.

    These are copied views, which are brought up to date, and shards whose collective is in flight, which is waited for.
    """

    def __get__(self, x: Sharded | None, owner: type | None = None) -> object:
        if x is None:
            return self
        if x._copied is not None:
            return x._copied.current()
        x.__dict__["_local_tensor"] = shard = in_order(wait(x._in_flight), x._spec.stride)
        return shard


class Traced(Sharded):
    """A sharded tensor with the protocols of autograd, Dynamo and AOTAutograd."""

    # Defaults are on the class, so that an eager op does not pay for setting them.
    _keys: Tensor | None = None
    _flat: tuple[list[str], Metadata] | None = None
    _flat_as_static: bool = False
    _may_vary: bool = True
    _hints: dict[int, int] | None = None
    _marked: set[int] | None = None
    _belongs_to_parameter: bool = False

    @classmethod
    def _wrap(cls, local: Tensor, spec: Spec) -> Self:
        while WITH_THE_FIRST:
            WITH_THE_FIRST.pop(0)()
        self = _make_wrapper(cls, spec.shape, strides=spec.stride, dtype=local.dtype, device=local.device)
        self._local_tensor = local
        self._spec = spec
        if type(local) is not Tensor:
            self._carry_keys()
        else:
            _refuse_pointer(self)
        return self

    def _carry_keys(self) -> None:
        """Creates the inner tensor that carries the keys; while tracing that happens along with the result."""
        compat.note_trace()
        compat.keep_first_proxies()
        self._local_tensor = _with_small_sizes(self._local_tensor, self._spec)
        self._spec = with_shard_symbols(self._spec, self._local_tensor)
        layout = self._spec.layout
        metadata = metadata_of(layout)
        if metadata.has_keys:
            self._keys = make_keys_tensor(layout, metadata, self._local_tensor)

    def _stand_in(self) -> Self:
        """Returns another wrapper of the same local shard."""
        other = self._wrap(self._local_tensor, self._spec)
        if self._copied is not None:
            del other.__dict__["_local_tensor"]
            other._copied = self._copied
        return other

    def _turn_into(self, other: Self) -> None:
        """Takes over the local shard and the spec of `other`; the caller sets the sizes of the wrapper."""
        self._local_tensor, self._spec, self._keys, self._flat = other._local_tensor, other._spec, other._keys, None
        if other._copied is not None:
            del self.__dict__["_local_tensor"]
        self._copied, self._borrows, self._kept, self._elements = other._copied, other._borrows, None, None

    @staticmethod
    def _wrap_like(x: _T, local: Tensor) -> _T:
        layout = x._spec.layout.with_dtype(local.dtype)
        return type(x)._wrap(local, Spec.of(layout, x._spec.stride))

    _local_tensor: Any = _LocalShard()

    @property
    def _holds_values(self) -> bool:
        """Whether the local shard is a real tensor, not a fake or functional one of a trace."""
        shard = self._local_tensor if self._copied is None else self._copied.shard
        return type(shard) in (Tensor, torch.nn.Parameter)

    # The protocol of traceable wrapper subclasses

    def __tensor_flatten__(self) -> tuple[list[str], Metadata]:
        flat = self._flat
        if flat is None or self._flat_as_static is not self._is_static:
            # Dynamo may flatten an input for the first time inside of a torch.func transform.
            with compat.outside_transforms():
                flat = self._flat = self._first_flattened()
        if type(self._copied) is CopiedView and self._holds_values and self._copied.is_stale:
            return flat[0], self._stale_metadata(flat[1])
        if compat.is_compiling():
            if compat.compiles_backward_passes():
                refuse_compiled_autograd(self._spec.layout)
            compat.make_decisions_rank_invariant()
            if self._may_vary:
                self._prepare_trace(flat[1])
        return flat

    def _stale_metadata(self, metadata: Metadata) -> Metadata:
        """Returns metadata that matches no graph, for a copied view that is out of date.

        Dynamo calls this while it evaluates guards or compiles, where communication is not allowed.

        Raises:
            UnsupportedOpError: during compilation.
        """
        if compat.is_compiling():
            raise UnsupportedOpError(
                f"{self._spec.layout.describe()} is passed to a compiled function as a view that had to be copied, and "
                "its base has been written to since. Take the view again, or inside of the function"
            )
        return replace(metadata, epoch=-1)

    @property
    def _is_static(self) -> bool:
        """Whether the layout is static, since later calls see this very tensor, or one of the same layout.

        As everywhere in torch this holds for parameters, and therefore for the state of optimizers and for gradients:
        in a compiled optimizer step all of them have to be static. A graph has numbers for global sizes, keys and even
        shards, and symbols for uneven shards.
        """
        return getattr(self, "_is_param", False) or self._belongs_to_parameter or compat.has_guarded_address(self)

    @property
    def _layout_in_graphs(self) -> Layout:
        """The layout that this tensor has as an input of a graph."""
        layout = self._spec.layout
        return of_input(layout) if self._holds_values and not self._is_static else layout

    def _first_flattened(self) -> tuple[list[str], Metadata]:
        """Computes the result of `__tensor_flatten__`, and normalizes the local shard, once for each tensor."""
        # A tensor inside of a trace has no dynamic dims to mark.
        is_real = self._holds_values
        is_copy = self._copied is not None and (is_real or isinstance(self._copied, GivenCopy))
        self._flat_as_static = self._is_static
        layout = self._layout_in_graphs
        metadata = metadata_of(layout, is_copy)
        self._may_vary = is_real and bool(metadata.partitions)
        if self._may_vary and not is_copy:
            self._local_tensor = compat.without_base(with_stated_strides(self._local_tensor, self._spec))
        if is_real and 0 in self._spec.shape:
            compat.give_storage(self)
        if is_real and metadata.dynamic_dims and self._keys is None:
            with compat.outside_transforms():
                self._keys = make_keys_tensor(layout, metadata, self._local_tensor)
        return _inner_names(metadata), metadata

    def _prepare_trace(self, metadata: Metadata) -> None:
        """Marks sizes of the local shard and keys as dynamic, or as static, for a trace that is starting."""
        compat.note_trace(guarded=True)  # the metadata guards on the epoch
        if self._is_static:
            compat.mark_static(self._local_tensor)
            if metadata.dynamic_dims:
                compat.mark_static(self._partition_keys)
            if hints := uneven_shard_hints(self._spec.layout):
                # Ranks have shards of other sizes, but the same graph.
                compat.trace_size_obliviously()
                # A gradient is an input of the optimizer's graph, and Dynamo (2.11 - 2.15) cannot read the size of an
                # input off a parameter, which is an attribute there.
                shards = {d: (self._belongs_to_parameter, *identity_of(self._spec.layout, d)) for d in hints}
                compat.mark_weakly_dynamic(self._local_tensor, hints, gaps_along_partitions(self._spec), shards)
            return
        compat.trace_size_obliviously()
        compat.note_imbalance(self._spec.layout.imbalance)
        compat.mark_weakly_dynamic(
            self._local_tensor, shard_hints(self._spec.layout), gaps_along_partitions(self._spec)
        )
        if metadata.dynamic_dims:
            keys = self._partition_keys
            # Keys have no hints: these would become part of the keys of the compiler's caches.
            compat.mark_weakly_dynamic(keys, dict.fromkeys(range(1, keys.ndim)))

    @property
    def _partition_keys(self) -> Tensor:
        if self._keys is None:
            layout = self._layout_in_graphs
            keys = make_keys_tensor(layout, metadata_of(layout), self._local_tensor, with_sizes=self._holds_values)
            if self._holds_values:
                return keys  # a graph of Dynamo that runs uncompiled reads the data-dependent sizes here
            self._keys = keys
        return self._keys

    @_partition_keys.setter
    def _partition_keys(self, keys: Tensor) -> None:
        """Set by AOTAutograd, which gives the inner tensors of a tangent the strides that it has traced."""
        self._keys = keys

    def _is_view(self) -> bool:
        """Returns whether autograd has this as a view of another tensor; False for an input of a compiled function.

        Torch would recreate an input that is a view from a fake tensor of its base. Which views a local shard can be,
        and what its base is, differs between ranks. A slice along a sharded dim is not a view in memory. A graph does
        not write to a copied view.
        """
        is_graph_input = self._holds_values and compat.is_compiling()
        return not is_graph_input and super()._is_view()

    # Dynamo reads these on the outer tensor. They are properties, so that eager ops do not pay for setting them.

    @property
    def _dynamo_hint_overrides(self) -> dict[int, int]:
        hints = self._hints
        if hints is None:
            hints = self._hints = size_hints(self._spec.layout)
        if not hints or self._is_static:
            raise _UNMARKED
        return hints

    @_dynamo_hint_overrides.setter
    def _dynamo_hint_overrides(self, hints: dict[int, int]) -> None:
        """Ignored: Dynamo copies these attributes between tensors; here they follow from the layout."""

    @property
    def _dynamo_static_indices(self) -> set[int]:
        if not self._is_static:
            raise _UNMARKED
        return set(range(self.ndim))

    @property
    def _dynamo_weak_dynamic_indices(self) -> set[int]:
        """The dynamic dims: those that are sharded, and those that a user adds with `maybe_mark_dynamic`."""
        if self._marked is None or self._is_static:
            self._marked = set(self._dynamo_hint_overrides)
        return self._marked

    @_dynamo_weak_dynamic_indices.setter
    def _dynamo_weak_dynamic_indices(self, dims: set[int]) -> None:
        if not size_hints(self._spec.layout):
            self._marked = dims

    @property
    def _has_dynamo_dim_marking(self) -> bool:
        if self._may_vary and self._is_static:
            return True
        if not self._may_vary and self._marked is None:
            raise _UNMARKED
        return bool(self._dynamo_weak_dynamic_indices)

    @_has_dynamo_dim_marking.setter
    def _has_dynamo_dim_marking(self, value: bool) -> None: ...

    @classmethod
    def __tensor_unflatten__(
        cls, inner: Mapping[str, Tensor], metadata: Metadata, shape: Sequence[IntLike], stride: Sequence[IntLike]
    ) -> Self:
        local = inner["_local_tensor"]
        if type(local) is not Tensor:
            compat.keep_first_proxies()
            # The sizes that AOTAutograd passes for a gradient were traced in another pass.
            shape, stride = compat.retrace(shape), compat.retrace(stride)
        keys = inner.get("_partition_keys")
        spec = spec_from_parts(metadata, local, keys, shape, stride)
        self = _make_wrapper(cls, spec.shape, strides=spec.stride, dtype=local.dtype, device=local.device)
        self._local_tensor, self._spec = local, spec
        if compat.is_compiling():
            self._keys = keys
            if metadata.copied:
                del self.__dict__["_local_tensor"]
                self._copied = GivenCopy(local)
        else:
            _refuse_pointer(self)
            if metadata.has_stated_sizes:
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

    def __coerce_tangent_metadata__(self) -> Self:
        layout = self._spec.layout
        return redistributed(self, layout.reduced()) if layout.is_partial else self

    def __coerce_same_metadata_as_tangent__(
        self, metadata: Metadata, expected_type: type | None = None
    ) -> Tensor | None:
        if expected_type is Tensor:
            # The tangent of an input that a graph mutates. Torch (2.11 - 2.15) assumes that nothing reads the mutated
            # value, and traces a plain gradient of zeros; if something does, the plain gradient has this value.
            return redistributed(self, self._spec.layout.replicated())._local_tensor
        if expected_type is not None and expected_type is not type(self):
            return None
        layout = target_layout(self._spec.layout, metadata.placements)
        expected = as_stated_by(layout.with_dtype(metadata.dtype), metadata)
        if not is_stated_by(expected, metadata):
            raise RedistributeError(
                f"a gradient in the layout {self._spec.layout.describe()} reached a compiled function whose output "
                f"has placements {metadata.placements} and another partition; redistribute the gradient to the "
                "output's layout"
            )
        out = redistributed(self, layout)
        out = out._stand_in() if out is self else out
        if metadata.has_keys:
            out._keys = make_keys_tensor(expected, metadata, out._local_tensor)
        out._flat, out._flat_as_static = (_inner_names(metadata), metadata), out._is_static
        return out


def _inner_names(metadata: Metadata) -> list[str]:
    return ["_local_tensor", "_partition_keys"] if metadata.has_keys else ["_local_tensor"]
