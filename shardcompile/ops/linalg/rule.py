"""Batches of matrices that are factored, inverted or solved with: the batch may be sharded, a matrix may not.

`_linalg_det`, `_linalg_slogdet` and `_linalg_solve_ex` are in `sharded`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from shardcompile.compat import OpOverload, same_symbol
from shardcompile.ops.registry import register
from shardcompile.ops.strategy import OpCall, Strategy, along

aten = torch.ops.aten

Ways = Callable[[OpCall], Iterable[Strategy]]

Missing = Callable[[OpCall], Sequence[int]]
"""Which outputs a call does not ask for. They come without elements, and so without a batch."""


def batched(dims: Sequence[int], missing: Missing = lambda call: ()) -> Ways:
    """A rule for an op of whose tensors the leading dims count the matrices, alike in all of them.

    Args:
        dims: for each tensor argument, how many dims its matrix or vector has; a number for all matrices has none.
        missing: which outputs a call does not ask for.
    """

    def rule(call: OpCall) -> Iterable[Strategy]:
        if _raises_for_a_matrix(call):
            return []  # all ranks have to raise, and so to see all matrices
        of_each = [t.shape[: t.ndim - n] if n or t.ndim else None for t, n in zip(call.tensors, dims, strict=True)]
        batches = [b for b in of_each if b is not None]
        if len({len(b) for b in batches}) > 1 or not all(all(map(same_symbol, b, batches[0])) for b in batches):
            return []
        gone = missing(call)
        outputs = range(len(call.op._schema.returns))
        return [
            along([None if b is None else d for b in of_each], [None if i in gone else d for i in outputs])
            for d in range(len(batches[0]))
        ]

    return rule


def _raises_for_a_matrix(call: OpCall) -> bool:
    """Whether the op itself raises an error if it cannot factor one of the matrices."""
    arguments = call.op._schema.arguments
    return any(a.name == "check_errors" and call.arg(i, a.name, False) for i, a in enumerate(arguments))


def _without(index: int, name: str, default: bool, *outputs: int) -> Missing:
    """Outputs that are missing where an argument is False."""
    return lambda call: () if call.arg(index, name, default) else outputs


def _unpacked(call: OpCall) -> list[int]:
    """Of ``lu_unpack`` the permutation, and both factors, may be left out."""
    data, pivots = call.arg(2, "unpack_data", True), call.arg(3, "unpack_pivots", True)
    return [*([] if pivots else [0]), *([] if data else [1, 2])]


_OF_ONE: dict[OpOverload, Missing] = {
    aten.linalg_qr.default: lambda call: (0,) if call.arg(1, "mode", "reduced") == "r" else (),
    aten._linalg_svd.default: _without(2, "compute_uv", True, 0, 2),
    aten._linalg_eigh.default: _without(2, "compute_v", True, 1),
    aten.linalg_lu.default: _without(1, "pivot", True, 0),
}

for _op in (
    *(aten.linalg_inv_ex.default, aten.linalg_cholesky_ex.default),
    *(aten.cholesky_inverse.default, aten.linalg_lu_factor_ex.default, aten.linalg_ldl_factor_ex.default),
    *(aten.linalg_eig.default, aten._linalg_eigvals.default, aten.geqrf.default, aten.linalg_matrix_exp.default),
    *_OF_ONE,
):
    register(_op, batched([2], _OF_ONE.get(_op, lambda call: ())))

register(aten.linalg_solve_triangular.default, batched([2, 2]))
register(aten.cholesky_solve.default, batched([2, 2]))
register(aten.linalg_lu_solve.default, batched([2, 1, 2]))
register(aten.linalg_householder_product.default, batched([2, 1]))
register(aten.ormqr.default, batched([2, 1, 2]))
register(aten.linalg_pinv.atol_rtol_tensor, lambda call: batched([2, *[0] * (len(call.tensors) - 1)])(call))
register(aten.lu_unpack.default, batched([2, 1], _unpacked))
