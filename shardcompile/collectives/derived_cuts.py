"""Cuts that follow from others, such as that of a slice; inside a trace by an op that works them out at run time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardcompile import compat
from shardcompile.layout import DERIVATIONS, Cut, IntLike, Layout, sizes_of_key

_SIZES, _KEY, _CHUNK, _WHOLE = range(4)
"""How a cut is written as numbers: with the sizes of all blocks, the key of a dynamic cut, an extent that torch.chunk
divides, or an extent that is not divided."""


def derive(
    how: str, cuts: Sequence[Cut | IntLike], numbers: Sequence[IntLike], extent: IntLike, mesh: DeviceMesh
) -> tuple[Cut, IntLike]:
    """The cut that follows from others over the same mesh dims.

    Args:
        how: one of `DERIVATIONS`.
        cuts: what it follows from; an extent stands for a dim that is whole on every rank.
        numbers: the function's other arguments.
        extent: global extent of the result.
        mesh: the mesh.

    Returns:
        The cut, and the row number that the function gives for this rank's block. Inside a trace, where the sizes are
        not known, both hold symbols.
    """
    like = next(c for c in cuts if isinstance(c, Cut))
    for c in cuts:
        if isinstance(c, Cut):
            c.check_in_one_piece()
    if isinstance(extent, int) and extent == 0:  # a trace would learn that its block is 0, and take that for a guess
        return Cut.of_sizes(like.mesh_dims, like.parts, (0,) * math.prod(like.parts), "fixed"), 0
    known = all(isinstance(c, int) if not isinstance(c, Cut) else c.blocks is not None for c in cuts)
    if known and all(isinstance(n, int) for n in numbers):
        sizes, rows = DERIVATIONS[how]([c.sizes if isinstance(c, Cut) else (int(c),) for c in cuts], *numbers)
        fixed = all(c.kind == "fixed" for c in cuts if isinstance(c, Cut)) or compat.is_compiling()
        cut = Cut.of_sizes(like.mesh_dims, like.parts, sizes, "fixed" if fixed else "dynamic")
        return _remembering(like, cut), rows[cut.block_index(compat.coordinate(mesh) or ())]
    groups = ",".join(compat.group_name_of(mesh, m) for m in like.mesh_dims)
    code = [n for c in cuts for n in _code(c)]
    key, block, row = _symbols(how, list(numbers), code, list(like.parts), groups, extent)
    return _remembering(like, Cut.traced(like.mesh_dims, like.parts, extent, key, block)), row


def _remembering(like: Cut, cut: Cut) -> Cut:
    """A cut that follows from `like`, with what that one says of why it was chosen."""
    return replace(cut, home=like.home, makeshift=like.makeshift)


def derive_spread(cut: Cut, begin: IntLike, step: int, extent: IntLike, mesh: DeviceMesh) -> tuple[Cut, IntLike]:
    """The cut of `extent` rows of which row ``begin + i * step`` is row i of a cut, and where this rank's first one is.

    New rows stay with the row before them. If none come between two rows of the cut, the result remembers it.
    """
    found, row = derive("spread", [cut], [begin, step, extent], extent, mesh)
    return (replace(found, core=(cut, begin)) if step == 1 else found), row


def block_size(cut: Cut, mesh: DeviceMesh) -> IntLike:
    """Size of this rank's block of a cut; inside a trace a symbol, the same one wherever it is asked for.

    That of an input, if one is sharded identically, since the compiler does not know that another one is equal to it.
    """
    if cut.block is not None or cut.blocks is not None:
        return cut.local_size(compat.coordinate(mesh) or ())
    if cut.kind == "chunk":
        for of_input in compat.inputs_noted(_name(cut, mesh)):
            if of_input.kind == "chunk" or of_input.guard_chunked():
                return compat.retrace([of_input.block])[0]  # type: ignore[no-any-return]
    block = derive("located", [replace(cut, runs=1)], [], cut.extent, mesh)[0].block
    if block is None:  # of a dim without rows the blocks are known
        return 0
    return block


def block_shape(layout: Layout) -> tuple[IntLike, ...]:
    """Shape of this rank's block; inside a trace with the symbols of `block_size`."""
    return tuple(n if c is None else block_size(c, layout.mesh) for n, c in zip(layout.shape, layout.cuts, strict=True))


def note_partition(cut: Cut, mesh: DeviceMesh) -> None:
    """Inside a trace: have `block_size` use the local shard of this partition of an input for chunked ones.

    A gradient is no such input if the trace itself has made a shard of its size: the forward graph comes before it.
    """
    if isinstance(cut.block, torch.SymInt) and not compat.is_unbacked(cut.block):
        compat.note_input(_name(cut, mesh), cut.block, cut)


def _name(cut: Cut, mesh: DeviceMesh) -> tuple[Any, ...]:
    """What partitions have in common that may be the same one."""
    groups = tuple(compat.group_name_of(mesh, m) for m in cut.mesh_dims)
    return groups, compat.expression_of(cut.extent), compat.expression_of(cut.scale)


def _code(cut: Cut | IntLike) -> list[IntLike]:
    if not isinstance(cut, Cut):
        return [_WHOLE, cut]
    if cut.kind == "chunk":
        return [_CHUNK, cut.extent, cut.scale]
    if cut.kind == "dynamic" and cut.blocks is None:
        return [_KEY, cut.key, cut.inner, cut.scale]
    return [_SIZES, len(cut.sizes), *cut.sizes]


def _decode(code: list[int], parts: list[int]) -> list[tuple[int, ...]]:
    cuts: list[tuple[int, ...]] = []
    rest = iter(code)
    for kind in rest:
        if kind == _WHOLE:
            cuts.append((next(rest),))
        elif kind == _CHUNK:
            extent, scale = next(rest), next(rest)
            cuts.append(Cut.chunk(range(len(parts)), parts, extent // scale).scaled(scale).sizes)
        elif kind == _SIZES:
            cuts.append(tuple(next(rest) for _ in range(next(rest))))
        else:
            cuts.append(sizes_of_key(next(rest), next(rest), next(rest)))
    return cuts


def _symbols(
    how: str, numbers: list[Any], code: list[Any], parts: list[int], groups: str, extent: IntLike
) -> tuple[IntLike, IntLike, IntLike]:
    def make() -> list[Any]:
        with compat.unrecorded_symbols():
            found = torch.ops.shardcompile.derive_cut(how, numbers, code, parts, groups)
            return [n.item() for n in found.unbind()]

    asked = (how, groups, *(compat.expression_of(n) for n in (*numbers, -1, *code)))
    key, block, row = compat.once_in_trace(asked, make)
    for size in (block, row):
        torch._check(size >= 0)
    if isinstance(extent, int) or compat.expression_of(extent).is_symbol:
        # Inductor may not know the symbols of a formula when it writes the check down: no tensor of a block has them.
        torch._check(block <= extent)
    return key, block, row


def _derive_cut(how: str, numbers: list[int], cuts: list[int], parts: list[int], group_names: str) -> Tensor:
    """Key of the derived cut, this rank's block size and row number: [3], int64, on the CPU."""
    sizes, rows = DERIVATIONS[how](_decode(cuts, parts), *numbers)
    index = 0
    for count, name in zip(parts, group_names.split(","), strict=True):
        index = index * count + compat.process_group(name).rank()
    cut = Cut.of_sizes(range(len(parts)), parts, sizes)
    return torch.tensor([cut.key, sizes[index], rows[index]])


_LIBRARY = torch.library.Library("shardcompile", "FRAGMENT")
_LIBRARY.define(
    "derive_cut(str how, SymInt[] numbers, SymInt[] cuts, int[] parts, str group_names) -> Tensor",
    tags=[torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe],
)
_LIBRARY.impl("derive_cut", _derive_cut, "CompositeExplicitAutograd")
torch.library.register_fake("shardcompile::derive_cut", lambda *_: torch.empty([3], dtype=torch.int64), lib=_LIBRARY)
