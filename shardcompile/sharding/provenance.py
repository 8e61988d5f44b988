"""`Provenance`: what a partition was derived from, and why it was chosen.

It plays no part in whether two partitions are equal. Ops use it to choose between partitions, and to bring the gradient
of a slice, or the result of an inverse transform, back to the partition that the tensor had before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from shardcompile.sharding.sizes import IntLike

if TYPE_CHECKING:
    from shardcompile.sharding.partition import Partition

_MAX_SLICES = 8


@dataclass(frozen=True)
class Provenance:
    """What a partition was derived from, and why it was chosen.

    Attributes:
        sliced_from: for the partition of a slice: the partition of the sliced dim, the first row and the step.
        unpadded: for a dim that was padded: the partition of the unpadded dim, and the row at which it begins.
        provisional: whether an op chose the partition in place of the one it was given. Any other partition is
            preferred.
        moved_from: for a dim that was sharded in place of another one: the partition that the other dim had.
        indexed_rows: for row indices, and for the rows gathered by them: the partition of the rows that are indexed. A
            result of `index_add` over as many rows takes it over.
    """

    sliced_from: tuple[Partition, IntLike, int] | None = None
    unpadded: tuple[Partition, IntLike] | None = None
    provisional: bool = False
    moved_from: Partition | None = None
    indexed_rows: Partition | None = None

    @property
    def identity(self) -> tuple[object, ...]:
        """All that it holds, hashable and comparable; see `Partition.identity`."""
        sliced_from, unpadded = self.sliced_from, self.unpadded
        return (
            sliced_from and (sliced_from[0].identity, *sliced_from[1:]),
            unpadded and (unpadded[0].identity, unpadded[1]),
            self.provisional,
            self.moved_from and self.moved_from.identity,
            self.indexed_rows and self.indexed_rows.identity,
        )

    @property
    def has_symbols(self) -> bool:
        """Whether `moved_from` or `indexed_rows` contain symbols. A static partition keeps no slice with symbols."""
        partitions = [p for p in (self.moved_from, self.indexed_rows) if p is not None]
        return any(isinstance(p.size, torch.SymInt) or p.has_symbols for p in partitions)

    def with_slice(self, base: Partition, start: IntLike, step: int) -> Provenance:
        """Returns the provenance of rows ``start, start + step, ...`` of `base`; chains of more than 8 are not kept."""
        depth, earlier = 1, base.provenance.sliced_from
        while earlier is not None:
            depth, earlier = depth + 1, earlier[0].provenance.sliced_from
        return self if depth > _MAX_SLICES else replace(self, sliced_from=(base, start, step))

    def of_other_rows(self) -> Provenance:
        """Returns the provenance of a partition whose rows are no longer those of the slice or of the padded dim."""
        return replace(self, sliced_from=None, unpadded=None) if self is not NO_PROVENANCE else self

    def flatten_trailing(self, factor: IntLike) -> Provenance:
        """Returns the provenance after trailing dims of `factor` elements were flattened into the dim.

        A slice with a step other than 1 is lost, because its elements are not consecutive.
        """
        if self.sliced_from is None or self.sliced_from[2] != 1:
            return self.of_other_rows()
        base, start, _ = self.sliced_from
        return replace(self, sliced_from=(base.flatten_trailing(factor), start * factor, 1), unpadded=None)

    def unflatten_trailing(self, factor: IntLike) -> Provenance:
        """Inverse of `flatten_trailing`."""
        if self.sliced_from is None or self.sliced_from[2] != 1:
            return self.of_other_rows()
        base, start = self.sliced_from[0].unflatten_trailing(factor), self.sliced_from[1]
        return replace(self, sliced_from=None if base is None else (base, start // factor, 1), unpadded=None)


NO_PROVENANCE = Provenance()
"""The provenance of a partition that was not derived from another one."""
