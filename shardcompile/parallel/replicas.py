"""Checks that the plain parameters and buffers of a module are the same on every rank, and broadcasts them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardcompile import compat
from shardcompile.collectives import broadcast
from shardcompile.errors import LayoutError, UnsupportedOpError
from shardcompile.sharding import digest_of
from shardcompile.tensor import ShardTensor
from shardcompile.tensor.inputs import checksum, gather_rows

_MAX_NAMES = 5
"""How many tensors an error message names."""


def check_replicated(module: nn.Module, mesh: DeviceMesh | None = None) -> None:
    """Raises an error on every rank unless all ranks hold the same plain parameters and buffers, bit by bit.

    Different weights on the ranks are the most common silent mistake: a plain tensor is taken as the same value on
    every rank, and no op checks it. Every rank of the mesh has to call this. Ranks exchange three integers, and only if
    these differ one more for each tensor. Sharded parameters are left out.

    Args:
        module: the module whose parameters and buffers are compared, in the order of `named_parameters` and
            `named_buffers`.
        mesh: the ranks that are compared; the current mesh (``with mesh:``) by default.

    Raises:
        LayoutError: on every rank, naming the first tensors that differ, and the ranks.
    """
    _refuse_traces("check_replicated")
    mesh = mesh or compat.current_mesh()
    state = _plain_state(module)
    if any(compat.is_fake_outside_traces(x) for _, x in state):
        return  # there is one process, and there are no values
    names, values = [_metadata(*entry) for entry in state], [0 if _has_no_values(x) else checksum(x) for _, x in state]
    rows = gather_rows([_digest_of_all(names), _digest_of_all(values), len(state)], mesh)
    _require_same_names(state, names, [(digest, count) for digest, _, count in rows], mesh)
    if len({value for _, value, _ in rows}) > 1:
        _raise_for_different(state, gather_rows(values, mesh), mesh, "differ between the ranks")


def sync_module_over_mesh(module: nn.Module, mesh: DeviceMesh, src_mesh_rank: int = 0, verify: bool = False) -> None:
    """Copies the plain parameters and buffers of one rank to all ranks of a mesh, in place.

    Every rank of the mesh has to call this, before `fully_shard`. Sharded parameters are left as they are.

    Args:
        module: a module of the same structure on every rank, which is checked first.
        mesh: a mesh of one dim, such as ``mesh["domain"]``.
        src_mesh_rank: the position in the mesh of the source rank.
        verify: whether to call `check_replicated` afterwards.

    Raises:
        ValueError: the mesh has several dims, or no such rank.
        LayoutError: on every rank: the modules differ, some tensor has no values yet, or all are sharded.
    """
    _refuse_traces("sync_module_over_mesh")
    if mesh.ndim != 1:
        raise ValueError(f"sync_module_over_mesh takes a mesh of one dim, such as mesh['domain'], got {mesh}")
    if not 0 <= src_mesh_rank < mesh.size():
        raise ValueError(f"src_mesh_rank {src_mesh_rank} is not a position in a mesh of {mesh.size()} ranks")
    state = _plain_state(module)
    if any(compat.is_fake_outside_traces(x) for _, x in state):
        return
    names, empty = [_metadata(*entry) for entry in state], [int(_has_no_values(x)) for _, x in state]
    rows = gather_rows([_digest_of_all(names), len(state), sum(empty)], mesh)
    _require_same_names(state, names, [(digest, count) for digest, count, _ in rows], mesh)
    if any(num_empty for _, _, num_empty in rows):
        table = gather_rows(empty, mesh)
        raise LayoutError(
            f"sync_module_over_mesh: {_listed([n for i, (n, _) in enumerate(state) if any(r[i] for r in table)])} have "
            "no values yet on some rank (device meta, or lazy); first to_empty() and initialize, or a forward pass"
        )
    if not state and [*module.parameters(), *module.buffers()]:
        raise LayoutError(
            "sync_module_over_mesh: all parameters are sharded; call it before fully_shard and distribute_module"
        )
    with torch.no_grad():
        for _, x in state:
            x.copy_(broadcast(x.to(mesh.device_type), src_mesh_rank, mesh.get_group()))
    if verify:
        check_replicated(module, mesh)


def _refuse_traces(what: str) -> None:
    if torch.compiler.is_compiling():
        raise UnsupportedOpError(
            f"{what} reads values, which tracing does not allow; call it outside of the compiled function"
        )


_State = Sequence[tuple[str, Tensor]]


def _plain_state(module: nn.Module) -> _State:
    """Returns the names and values of the parameters and buffers that are not sharded."""
    everything = itertools.chain(module.named_parameters(), module.named_buffers())
    return [(name, x) for name, x in everything if not isinstance(x, (ShardTensor, DTensor))]


def _has_no_values(x: Tensor) -> bool:
    return x.is_meta or nn.parameter.is_lazy(x)


def _metadata(name: str, x: Tensor) -> int:
    return digest_of(repr((name, None if nn.parameter.is_lazy(x) else tuple(x.shape), x.dtype)))


def _digest_of_all(digests: Sequence[int]) -> int:
    return digest_of(repr(digests))


def _require_same_names(state: _State, names: Sequence[int], rows: Sequence[tuple[int, int]], mesh: DeviceMesh) -> None:
    """Raises an error on every rank if names, shapes or dtypes differ between the ranks.

    Args:
        state: the state of this rank.
        names: a digest of the metadata of each tensor of this rank.
        rows: for each rank the digest of all metadata and the number of tensors.
        mesh: the ranks.
    """
    if len(set(rows)) == 1:
        return
    max_count = max(count for _, count in rows)
    padding = [("(none)", torch.empty(0))] * (max_count - len(state))
    table = gather_rows([*names, *[0] * len(padding)], mesh)
    _raise_for_different([*state, *padding], table, mesh, "have another name, shape or dtype on some ranks")


def _raise_for_different(state: _State, table: Sequence[Sequence[int]], mesh: DeviceMesh, what: str) -> None:
    """Raises an error that names the first tensors that differ, and the ranks that differ from the first rank.

    Args:
        state: the state of this rank.
        table: for each rank a digest of each tensor.
        mesh: the ranks.
        what: what differs, as part of the message.
    """
    differing = [i for i in range(len(state)) if len({row[i] for row in table}) > 1]
    first, *others = mesh.mesh.flatten().tolist()
    deviating = [r for r, row in zip(others, table[1:], strict=True) if any(row[i] != table[0][i] for i in differing)]
    raise LayoutError(
        f"parameters and buffers {what}: {_listed([state[i][0] for i in differing])}, {len(differing)} of "
        f"{len(state)}; ranks {deviating} differ from rank {first}. Use the same seed on all ranks before the module "
        "is made, load one checkpoint on all, or call sync_module_over_mesh(module, mesh)"
    )


def _listed(names: Sequence[str]) -> str:
    rest = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f" and {rest} more" if rest > 0 else "")


for _eager in (check_replicated, sync_module_over_mesh):
    compat.keep_from_dynamo(_eager)
