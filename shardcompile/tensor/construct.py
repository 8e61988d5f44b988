"""Finding the layout of a tensor that is put together from blocks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from shardcompile.collectives import all_gather_even
from shardcompile.errors import LayoutError
from shardcompile.layout import Cut, Layout, normalize_placements

ShardingShapes = Literal["infer", "chunk"] | Mapping[int, Sequence[Any]]
_MAX_DIMS = 16
_DTYPES = sorted((d for d in vars(torch).values() if isinstance(d, torch.dtype)), key=str)


def layout_of_block(
    local: Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement] | None,
    sharding_shapes: ShardingShapes,
    global_shape: Sequence[int] | None,
    run_check: bool,
) -> Layout:
    """The layout of the tensor of which `local` is this rank's block.

    Raises:
        LayoutError: anything does not fit together.
    """
    if placements is None:
        placements = [Replicate()] * mesh.ndim
    stated = normalize_placements(placements, mesh, local.ndim)
    if sharding_shapes == "infer":
        layout = _inferred(local, mesh, stated)
    elif sharding_shapes == "chunk":
        if global_shape is None:
            raise LayoutError('sharding_shapes="chunk" needs global_shape')
        layout = Layout.chunked(mesh, stated, tuple(global_shape), local.dtype)
    elif isinstance(sharding_shapes, Mapping):
        layout = _stated(local, mesh, stated, sharding_shapes)
    else:
        raise LayoutError(f'sharding_shapes must be "infer", "chunk" or a mapping, got {sharding_shapes!r}')
    problem = _problem(local, layout, global_shape)
    if run_check:
        _check_ranks(local, layout, problem)
    if problem:
        raise LayoutError(problem)
    return layout


def _problem(local: Tensor, layout: Layout, global_shape: Sequence[int] | None) -> str | None:
    expected = layout.local_shape(layout.mesh.get_coordinate())
    if len(expected) != local.ndim or any(a != b for a, b in zip(expected, local.shape, strict=True)):
        return (
            f"this rank's block has shape {tuple(local.shape)}, but {layout.describe()} gives it {expected}: "
            "sharding_shapes or global_shape do not match the tensor"
        )
    if global_shape is not None and tuple(global_shape) != layout.shape:
        return f"global_shape is {tuple(global_shape)}, but the blocks add up to {layout.shape} ({layout.describe()})"
    return None


def stated_cuts(
    now: Layout, placements: Sequence[Placement], shapes: Mapping[int, Sequence[Any]] | None, fixed: bool
) -> dict[int, Cut]:
    """Cuts by tensor dim that a mapping from mesh dim to block sizes stands for.

    Args:
        now: for the mesh and the global shape.
        placements: of the layout that is described.
        shapes: as a user gives them: ints, or whole block shapes.
        fixed: whether the sizes become part of the program, as they do inside a trace.

    Raises:
        LayoutError: a mesh dim shards nothing, or the sizes do not add up to the global extent.
    """
    cuts: dict[int, Cut] = {}
    for mesh_dim, values in (shapes or {}).items():
        placement = placements[mesh_dim] if -len(placements) <= mesh_dim < len(placements) else None
        if not isinstance(placement, Shard):
            raise LayoutError(f"sharding_shapes names mesh dim {mesh_dim}, which shards nothing in {list(placements)}")
        dim = placement.dim
        cut = _stated_cut(now.mesh, placements, dim, values, fixed)
        if isinstance(now.shape[dim], int) and cut.extent != now.shape[dim]:
            raise LayoutError(
                f"sharding_shapes {list(cut.sizes)} for mesh dim {mesh_dim} add up to {cut.extent}, but tensor dim "
                f"{dim} has extent {now.shape[dim]} ({now.describe()})"
            )
        cuts[dim] = cut
    return cuts


def _stated_cut(mesh: DeviceMesh, placements: Sequence[Placement], dim: int, values: Sequence[Any], fixed: bool) -> Cut:
    mesh_dims = [m for m, p in enumerate(placements) if isinstance(p, Shard) and p.dim == dim]
    sizes = [v if isinstance(v, int) else v[dim] for v in values]
    return Cut.of_sizes(mesh_dims, [mesh.shape[m] for m in mesh_dims], sizes, "fixed" if fixed else "dynamic")


def _stated(
    local: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], shapes: Mapping[int, Sequence[Any]]
) -> Layout:
    shape = list(local.shape)
    cuts: list[Cut | None] = [None] * local.ndim
    for mesh_dim, placement in enumerate(placements):
        if not isinstance(placement, Shard) or cuts[placement.dim] is not None:
            continue
        mesh_dims = [m for m, p in enumerate(placements) if p == placement]
        values = next((shapes[m] for m in reversed(mesh_dims) if m in shapes), None)
        if values is None:
            raise LayoutError(f"sharding_shapes {dict(shapes)} says nothing of mesh dim {mesh_dim}, which shards "
                              f"tensor dim {placement.dim}")
        cut = _stated_cut(mesh, placements, placement.dim, values, fixed=False)
        cuts[placement.dim] = cut
        shape[placement.dim] = cut.extent  # type: ignore[assignment]
    return Layout.of(mesh, placements, shape, local.dtype, cuts)


# Exchanging shapes


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


def _row(local: Tensor, placements: Sequence[Placement], extra: int) -> list[int]:
    """What a rank tells the others: digests, dtype, number of dims, shape."""
    shape = [*local.shape, *[0] * (_MAX_DIMS - local.ndim)]
    return [_digest(str(list(placements))), extra, _DTYPES.index(local.dtype), local.ndim, *shape]


def _exchange(row: list[int], mesh: DeviceMesh) -> dict[tuple[int, ...], list[int]]:
    """The rows of all ranks, by mesh coordinate."""
    table = torch.tensor([row], dtype=torch.int64, device=mesh.device_type)
    for mesh_dim in reversed(range(mesh.ndim)):
        table = all_gather_even(table, mesh.get_group(mesh_dim))
    rows = table.tolist()
    coordinates = torch.cartesian_prod(*[torch.arange(n) for n in mesh.shape]).view(len(rows), -1).tolist()
    return {tuple(c): r for c, r in zip(coordinates, rows, strict=True)}


def _inferred(local: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Layout:
    if local.ndim > _MAX_DIMS:
        raise LayoutError(f"tensors of more than {_MAX_DIMS} dims cannot be inferred; state sharding_shapes")
    rows = _exchange(_row(local, placements, 0), mesh)
    _require_same(rows, 0, "other placements", lambda r: f"digest {r[0]:x}; here {list(placements)}")
    _require_same(rows, 2, "another dtype", lambda r: str(_DTYPES[r[2]]))
    _require_same(rows, 3, "another number of dims", lambda r: str(r[3]))
    return _layout_of_shapes({c: r[4 : 4 + r[3]] for c, r in rows.items()}, mesh, placements, local.dtype)


def _require_same(rows: dict[tuple[int, ...], list[int]], column: int, what: str, show: Any) -> None:
    first = next(iter(rows))
    for coordinate, row in rows.items():
        if row[column] != rows[first][column]:
            raise LayoutError(
                f"the blocks do not belong together: mesh coordinate {coordinate} has {what} than {first} "
                f"({show(row)} against {show(rows[first])})"
            )


def _layout_of_shapes(
    shapes: dict[tuple[int, ...], list[int]], mesh: DeviceMesh, placements: tuple[Placement, ...], dtype: torch.dtype
) -> Layout:
    ndim = len(next(iter(shapes.values())))
    extents: list[int] = []
    cuts: list[Cut | None] = []
    for dim in range(ndim):
        mesh_dims = [m for m, p in enumerate(placements) if isinstance(p, Shard) and p.dim == dim]
        sizes = _sizes_along(shapes, mesh_dims, dim)
        if mesh_dims:
            cuts.append(Cut.of_sizes(mesh_dims, [mesh.shape[m] for m in mesh_dims], sizes))
            extents.append(sum(sizes))
        else:
            cuts.append(None)
            extents.append(sizes[0])
    return Layout.of(mesh, placements, extents, dtype, cuts)


def _sizes_along(shapes: dict[tuple[int, ...], list[int]], mesh_dims: list[int], dim: int) -> list[int]:
    """Block sizes along a tensor dim, after checking that nothing else decides them."""
    sizes: dict[tuple[int, ...], tuple[int, tuple[int, ...]]] = {}
    for coordinate, shape in sorted(shapes.items()):
        block = tuple(coordinate[m] for m in mesh_dims)
        size, where = sizes.setdefault(block, (shape[dim], coordinate))
        if size != shape[dim]:
            raise LayoutError(
                f"the blocks do not fit together: dim {dim} has extent {size} at mesh coordinate {where} and "
                f"{shape[dim]} at {coordinate}; it is sharded by mesh dims {mesh_dims} only"
            )
    return [sizes[b][0] for b in sorted(sizes)]


def _check_ranks(local: Tensor, layout: Layout, problem: str | None) -> None:
    """Compare what the ranks believe; raise on all of them alike.

    Raises:
        LayoutError: layouts differ, a block does not fit on some rank, or replicated values differ.
    """
    rows = _exchange([_digest(layout.describe()), int(problem is not None), _checksum(local)], layout.mesh)
    _require_same(rows, 0, "another layout", lambda r: f"digest {r[0]:x}; here {layout.describe()}")
    bad = [c for c, r in rows.items() if r[1]]
    if bad:
        raise LayoutError(problem or f"the block at mesh coordinate {bad[0]} does not fit {layout.describe()}")
    sharding = [m for m, p in enumerate(layout.placements) if isinstance(p, Shard)]
    if layout.is_partial:
        return
    groups: dict[tuple[int, ...], tuple[int, tuple[int, ...]]] = {}
    for coordinate, row in rows.items():
        block = tuple(coordinate[m] for m in sharding)
        value, where = groups.setdefault(block, (row[2], coordinate))
        if value != row[2]:
            raise LayoutError(f"replicated values differ between mesh coordinates {where} and {coordinate}")


def _checksum(local: Tensor) -> int:
    data = local.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
    return int.from_bytes(hashlib.blake2b(bytes(data.tolist()), digest_size=7).digest(), "big")


def agreed_metadata(
    tensor: Tensor | None, source: tuple[int, ...], mesh: DeviceMesh, request: str, everywhere: bool = False
) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of the tensor that one rank holds, after checking that all ranks ask for the same.

    Args:
        tensor: what this rank holds.
        source: mesh coordinate of the rank that counts.
        mesh: the mesh.
        request: the other arguments of the call, as text.
        everywhere: whether every rank must hold a tensor of that shape and dtype.

    Raises:
        LayoutError: on every rank.
    """
    held = [-1] * (2 + _MAX_DIMS) if tensor is None else [_DTYPES.index(tensor.dtype), tensor.ndim]
    shape = [] if tensor is None else [*tensor.shape, *[0] * (_MAX_DIMS - tensor.ndim)]
    rows = _exchange([_digest(request), *held, *shape], mesh)
    _require_same(rows, 0, "other arguments", lambda r: f"digest {r[0]:x}; here {request}")
    announced = rows[source]
    if announced[2] < 0:
        raise LayoutError(f"the source at mesh coordinate {source} holds no tensor")
    if everywhere:
        for coordinate, row in rows.items():
            if row != announced:
                raise LayoutError(
                    f"the ranks hold different tensors: shape {row[3 : 3 + max(row[2], 0)]} at mesh coordinate "
                    f"{coordinate}, {announced[3 : 3 + announced[2]]} at {source} (or another dtype)"
                )
    return tuple(announced[3 : 3 + announced[2]]), _DTYPES[announced[1]]
