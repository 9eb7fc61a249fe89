"""Linear algebra and special functions of constants, computed by torch; triangular equations of computed matrices.

Core ML has no op for determinants, inverses, factorizations or Bessel functions. Models apply them to weights, such as
the determinant of an invertible convolution (Glow) or the exponential of a skew matrix (orthogonal parametrizations).
torch computes them during the conversion. Equations whose matrix is constant, such as those of a normal distribution
with a covariance, become products with its inverse. So do those of a triangular matrix that the model computes, if its
size is fixed and `unitriangular=True` (ones on the diagonal), as in gated delta rules (Qwen3-Next).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import filterfalse
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var
from coremltools.converters.mil.mil.types.symbolic import is_symbolic

from ..contract import Patch
from ..decomposition import resolve_torch_call
from ..errors import NotConverted
from ..lowering import (
    add_result,
    add_results,
    cast_to,
    is_constant,
    name_result,
    promote_operands,
    to_python,
    to_tensor,
)
from ..probes import is_lowered_by_coremltools

PATCH = Patch(code="TORCH192",
              title="linear algebra and special functions are not implemented, not even of constants",
              upstream=("none known",))


_KINDS = (
    "slogdet", "_linalg_slogdet", "linalg_slogdet", "logdet", "det", "linalg_det", "_linalg_det", "inverse",
    "linalg_inv_ex", "pinverse", "linalg_pinv", "linalg_pinv.atol_rtol_tensor", "qr", "linalg_qr",
    "cholesky", "linalg_cholesky", "linalg_cholesky_ex", "cholesky_inverse", "cholesky_solve", "linalg_solve",
    "_linalg_solve_ex", "linalg_solve_ex", "linalg_solve_triangular", "triangular_solve", "linalg_lu",
    "linalg_lu_factor", "linalg_lu_factor_ex", "matrix_exp", "linalg_matrix_exp", "svd", "linalg_svd", "_linalg_svd",
    "linalg_svdvals", "linalg_eigh", "_linalg_eigh", "linalg_eigvalsh", "orgqr", "linalg_householder_product",
    "linalg_lstsq", "lgamma", "digamma", "polygamma", "erfinv", "special_erfinv", "i0", "special_i0", "special_i0e",
    "special_i1", "special_i1e", "special_bessel_j0", "special_bessel_j1", "special_ndtri", "special_log_ndtr",
    "igamma", "igammac", "special_zeta", "mvlgamma", "bincount", "combinations", "cov", "corrcoef",
)


_SOLVED_KINDS = {"linalg_solve_triangular": 0, "linalg_solve": 0, "cholesky_solve": 1}
"Kinds that solve equations, with the place of the matrix among the arguments."


@PATCH.op(*filterfalse(is_lowered_by_coremltools, _KINDS))
def compute_by_torch(context: Any, node: Any) -> None:
    """Compute an op of constants, at fp32. Raises NotConverted where the model computes an operand."""
    import torch

    op, arguments, keywords = resolve_torch_call(context, node)
    made = _solve_by_inverse(node, op, arguments, keywords)
    if made is None and node.kind == "linalg_solve_triangular" and not is_constant(arguments[0]):
        made = _solve_by_blocks(node, *arguments, **keywords)
    if made is not None:
        add_result(context, node, name_result(made, node))
        return
    if not all(map(is_constant, (*arguments, *keywords.values()))):
        raise NotConverted.at(node, "is implemented for constants only, and the model computes its operands",
                              "compute it outside of the model, or write it with ops that Core ML has")
    try:
        with torch.no_grad():
            results = op(*map(_to_torch, arguments), **{name: _to_torch(value) for name, value in keywords.items()})
    except RuntimeError as error:  # such as a matrix that is singular
        raise NotConverted.at(node, f"torch cannot compute it ({str(error).splitlines()[0]})") from error
    if isinstance(results, tuple):
        add_results(context, node, [to_tensor(each.numpy()) for each in results])
    else:
        add_result(context, node, name_result(to_tensor(results.numpy()), node))


def _solve_by_inverse(node: Any, op: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Var | None:
    """Build the solution of equations with a constant matrix and computed right sides; None for other ops.

    torch solves them with the unit matrix at fp64, which gives the inverse, or its transpose's from the other side.
    """
    import torch

    if node.kind not in _SOLVED_KINDS:
        return None
    place = _SOLVED_KINDS[node.kind]
    matrix, sides = arguments[place], arguments[1 - place]
    if is_constant(sides) or not is_constant(matrix) or matrix.rank != sides.rank:
        return None
    values = _to_torch(matrix).double()
    unit = torch.eye(values.shape[-1], dtype=torch.float64).expand(values.shape)
    options = [_to_torch(each) for each in arguments[2:]]
    named = {name: _to_torch(value) for name, value in keywords.items()}
    pair = [unit, unit]
    pair[place] = values
    try:
        inverse = op(*pair, *options, **named).numpy().astype(np.float32)
    except RuntimeError as error:
        raise NotConverted.at(node, f"torch cannot invert its matrix ({str(error).splitlines()[0]})") from error
    if not np.all(np.isfinite(inverse)):
        raise NotConverted.at(node, "has a constant matrix without an inverse")
    from_left = bool(named.get("left", options[0] if node.kind == "linalg_solve" and options else True))
    inverse = to_tensor(inverse)
    return mb.matmul(x=inverse, y=sides) if from_left else mb.matmul(x=sides, y=inverse)


def _solve_by_blocks(node: Any, matrix: Var, sides: Var, *options: Any, **named: Any) -> Var:
    """Build the solution of equations with a computed triangular matrix that has ones on its diagonal.

    If X is the inverse of the blocks of s rows on the diagonal, then X - X C X is that of the blocks of 2s rows, where
    C is the part of the matrix between two blocks of s rows. This needs 2 log2(n) matrix products and is as accurate as
    a substitution. Raises NotConverted for a matrix of flexible size, and for other diagonals: a zero there would make
    all rows of the products NaN, where torch makes only the rows from it on NaN.
    """
    upper, left, unitriangular = (
        bool(to_python(options[place] if place < len(options) else named.get(name, default), node, name))
        for place, (name, default) in enumerate({"upper": False, "left": True, "unitriangular": False}.items()))
    size = matrix.shape[-1]
    if is_symbolic(size):
        raise NotConverted.at(node, "solves equations with a matrix of a flexible size", "fix this size")
    if not unitriangular:
        raise NotConverted.at(node, "solves equations with a computed matrix whose diagonal may have other numbers "
                              "than ones",
                              "divide its rows and those of the right-hand side by the diagonal (with left=False the "
                              "columns), and set unitriangular=True")
    matrix, sides = promote_operands(matrix, sides)
    inverse = cast_to(to_tensor(np.eye(size, dtype=np.float32)), matrix.dtype)
    rows, columns = np.indices((size, size))
    for level in range(max((size - 1).bit_length(), 1)):
        same, after = rows >> level + 1 == columns >> level + 1, rows >> level > columns >> level
        between = (same & (after.T if upper else after)).astype(np.float32)
        part = mb.mul(x=matrix, y=cast_to(to_tensor(between), matrix.dtype))
        change = part if level == 0 else mb.matmul(x=mb.matmul(x=inverse, y=part), y=inverse)
        inverse = mb.sub(x=inverse, y=change)
    return mb.matmul(x=inverse, y=sides) if left else mb.matmul(x=sides, y=inverse)


def _to_torch(value: Any) -> Any:
    import torch

    if isinstance(value, list):
        return [_to_torch(each) for each in value]
    return torch.from_numpy(np.array(value.val)) if isinstance(value, Var) else value
