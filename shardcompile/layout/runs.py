"""Layouts whose cut dims had leading dims flattened into them: takes such dims apart, and puts them together again.

Rows of such a block are not neighbours in the whole dim. With the leading dims apart they are neighbours, and
everything that moves rows works on that view.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard

from torch.distributed.tensor.placement_types import Placement, Shard

from shardcompile.compat import is_one
from shardcompile.layout.cut import Cut
from shardcompile.layout.layout import Layout
from shardcompile.layout.sizes import IntLike


def has_runs(layout: Layout) -> bool:
    """Whether some block is no run of neighbouring rows."""
    return any(c is not None and not is_one(c.runs) for c in layout.cuts)


def neighbouring(cut: Cut) -> Cut:
    """The cut into blocks of the same sizes, each of neighbouring rows."""
    return cut if is_one(cut.runs) else replace(cut, runs=1, origin=None, core=None, home=None)


def in_stretches(runs: IntLike, cut: Cut) -> Cut | None:
    """The cut into blocks of the same sizes, each of which has equally many rows of each of `runs` stretches.

    None if sizes do not divide, if the cut has stretches already, or if several mesh dims cut.
    """
    if cut.kind == "chunk" or not is_cut_once(cut) or cut.unscaled(runs) is None:
        return None
    return replace(cut, runs=runs, origin=None, core=None, home=None)


def is_cut_once(cut: Cut | None) -> TypeGuard[Cut]:
    """Whether one mesh dim cuts a dim, into blocks that are runs of neighbouring rows."""
    return cut is not None and len(cut.mesh_dims) == 1 and is_one(cut.runs)


@dataclass(frozen=True)
class Apart:
    """How dims are taken apart.

    Attributes:
        runs: for each dim the extent of the leading dim that it is given; 1 for none.
    """

    runs: tuple[IntLike, ...]

    @staticmethod
    def of(layout: Layout) -> Apart:
        """As the cuts of a layout ask for."""
        return Apart(tuple(1 if c is None else c.runs for c in layout.cuts))

    def dim(self, dim: int) -> int:
        """Where a dim is afterwards."""
        return dim + sum(not is_one(n) for n in self.runs[: dim + 1])

    def shape(self, shape: Sequence[IntLike]) -> list[IntLike]:
        """A shape, that of a block too."""
        parts = ([n] if is_one(runs) else [runs, n // runs] for n, runs in zip(shape, self.runs, strict=True))
        return [n for several in parts for n in several]

    def layout(self, layout: Layout) -> Layout:
        """The layout of the tensor with these dims apart; dims that are cut otherwise are whole or cut as here."""
        cuts: list[Cut | None] = []
        for cut, runs in zip(layout.cuts, self.runs, strict=True):
            cuts += ([] if is_one(runs) else [None]) + [cut if cut is None else cut.parted(runs)]
        return Layout.of(
            layout.mesh, [self._placement(p) for p in layout.placements], self.shape(layout.shape), layout.dtype, cuts
        )

    def _placement(self, placement: Placement) -> Placement:
        return Shard(self.dim(placement.dim)) if isinstance(placement, Shard) else placement
