"""Rules of batched linear algebra (factorizations, inverses, solves): batch dims may be sharded, matrix dims may not.

`_linalg_det`, `_linalg_slogdet` and `_linalg_solve_ex` are in `sharded`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from shardcompile.compat import OpOverload, guard_equal
from shardcompile.ops.registry import Strategies, register
from shardcompile.ops.strategy import OpCall, Strategy, along

aten = torch.ops.aten

Missing = Callable[[OpCall], Sequence[int]]
"""Returns the indices of the outputs that a call does not request. They are empty and have no batch dims."""


def batched(dims: Sequence[int], missing: Missing = lambda call: ()) -> Strategies:
    """Returns the rule of an op whose tensors have the same leading batch dims.

    Args:
        dims: for each tensor argument the number of its matrix or vector dims; 0 for a scalar for all matrices.
        missing: returns the indices of the outputs that a call does not request.
    """

    def rule(call: OpCall) -> Iterable[Strategy]:
        if _raises_for_a_matrix(call):
            return []  # all ranks have to raise, so each needs all matrices
        batch_shapes = [t.shape[: t.ndim - n] if n or t.ndim else None for t, n in zip(call.tensors, dims, strict=True)]
        batches = [b for b in batch_shapes if b is not None]
        if len({len(b) for b in batches}) > 1 or not all(all(map(guard_equal, b, batches[0])) for b in batches):
            return []
        absent = missing(call)
        outputs = range(len(call.op._schema.returns))
        return [
            along([None if b is None else d for b in batch_shapes], [None if i in absent else d for i in outputs])
            for d in range(len(batches[0]))
        ]

    return rule


def _raises_for_a_matrix(call: OpCall) -> bool:
    """Whether the op itself raises an error if a matrix cannot be factored."""
    arguments = call.op._schema.arguments
    return any(a.name == "check_errors" and call.arg(i, a.name, False) for i, a in enumerate(arguments))


def _without(index: int, name: str, *outputs: int) -> Missing:
    """Returns a function that lists these outputs as missing if an argument is False."""
    return lambda call: () if call.arg(index, name, True) else outputs


def _missing_of_lu_unpack(call: OpCall) -> list[int]:
    """``lu_unpack`` may omit the permutation, and both factors."""
    data, pivots = call.arg(2, "unpack_data", True), call.arg(3, "unpack_pivots", True)
    return [*([] if pivots else [0]), *([] if data else [1, 2])]


_SINGLE_MATRIX: dict[OpOverload, Missing] = {
    aten.linalg_qr.default: lambda call: (0,) if call.arg(1, "mode", "reduced") == "r" else (),
    aten._linalg_svd.default: _without(2, "compute_uv", 0, 2),
    aten._linalg_eigh.default: _without(2, "compute_v", 1),
    aten.linalg_lu.default: _without(1, "pivot", 0),
}

for _op in (
    *(aten.linalg_inv_ex.default, aten.linalg_cholesky_ex.default),
    *(aten.cholesky_inverse.default, aten.linalg_lu_factor_ex.default, aten.linalg_ldl_factor_ex.default),
    *(aten.linalg_eig.default, aten._linalg_eigvals.default, aten.geqrf.default, aten.linalg_matrix_exp.default),
    *_SINGLE_MATRIX,
):
    register(_op, batched([2], _SINGLE_MATRIX.get(_op, lambda call: ())))

register(aten.linalg_solve_triangular.default, batched([2, 2]))
register(aten.cholesky_solve.default, batched([2, 2]))
register(aten.linalg_lu_solve.default, batched([2, 1, 2]))
register(aten.linalg_householder_product.default, batched([2, 1]))
register(aten.ormqr.default, batched([2, 1, 2]))
register(aten.linalg_pinv.atol_rtol_tensor, lambda call: batched([2, *[0] * (len(call.tensors) - 1)])(call))
register(aten.lu_unpack.default, batched([2, 1], _missing_of_lu_unpack))
