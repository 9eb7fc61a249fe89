"""`einsum` with an ellipsis, without `->`, to a scalar, and of sizes that broadcast.

coremltools reads the three dots of an ellipsis as three axes of one name: products whose ellipsis stands for three axes
are silently wrong, all others are rejected, as are an equation that leaves out the result, and a sum to a scalar. Here
an ellipsis becomes letters, aligned from the right as torch does, the result of an equation without `->` is that of
torch (ellipsis, then the letters that occur once, sorted), and an axis of size 1 that meets a larger one is removed.
One operand is a diagonal, a sum and a permutation; coremltools multiplies several.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

from coremltools.converters.mil.frontend import _utils
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var, types

from ...passes.severity import Severity
from ..contract import Patch
from ..errors import NotConverted
from ..lowering import add_result, bind_arguments, cast_to, name_result, promote_operands, to_python
from ..probes import find_fault

PATCH = Patch(code="TORCH177", severity=Severity.WRONG,
              title="`einsum` with an ellipsis for three axes is miscompiled; for others, without `->` or to a scalar "
                    "it is rejected",
              upstream=("https://github.com/apple/coremltools/issues/2644",
                        "https://github.com/apple/coremltools/pull/2706"))

_ELLIPSIS = "..."


@PATCH.probe
def probe() -> str | None:
    import torch

    x = torch.arange(24.0).reshape(1, 2, 3, 4)
    return (find_fault(lambda x: torch.einsum("...d,...d->...", x, x), x)
            or find_fault(lambda x: torch.einsum("...ij->...ji", x), x)
            or find_fault(lambda x, y: torch.einsum("ij,ij", x, y), x[0, :, 0], x[0, :1, 0]))


@PATCH.op("einsum")
def einsum(context: Any, node: Any) -> None:
    """Lower einsum(equation, tensors, path=None)."""
    inputs = bind_arguments(context, node, "equation tensors path=None")
    equation = str(to_python(inputs.equation, node, "equation"))
    operands: list[Var] = promote_operands(*inputs.tensors) if len(inputs.tensors) > 1 else list(inputs.tensors)
    terms, output = _parse_equation(equation, [x.rank for x in operands], node)
    if len(operands) == 1:
        add_result(context, node, _reduce_and_permute(operands[0], terms[0], output, node))
        return
    operands, terms = _remove_broadcast_axes(operands, terms)
    letters = dict(zip(dict.fromkeys(label for term in terms for label in term), string.ascii_letters))
    explicit = ["".join(letters[label] for label in term) for term in [*terms, output]]
    add_result(context, node, _utils.build_einsum_mil(
        operands, f"{','.join(explicit[:-1])}->{explicit[-1]}", node.name))


def _parse_equation(equation: str, ranks: Sequence[int], node: Any) -> tuple[list[list[str]], list[str]]:
    """Return the labels of the axes of each operand and of the result; those of an ellipsis are `.0`, `.1`, ...

    They are counted from the last axis of the ellipsis.
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    written = [_split_term(term) for term in left.split(",")]
    if len(written) != len(ranks):
        raise NotConverted.at(node, f"'{equation}' names {len(written)} operands and has {len(ranks)}")
    terms = []
    for term, rank in zip(written, ranks):
        missing = rank - len(term) + (_ELLIPSIS in term)
        if missing < 0 or missing > 0 and _ELLIPSIS not in term:
            raise NotConverted.at(node, f"'{equation}' does not fit an operand of rank {rank}")
        terms.append(_expand_ellipsis(term, missing))
    named = [label for term in terms for label in term]
    widest = max((sum(label.startswith(".") for label in term) for term in terms), default=0)
    if arrow:
        return terms, _expand_ellipsis(_split_term(right), widest)
    once = sorted(label for label in set(named) if named.count(label) == 1 and not label.startswith("."))
    return terms, [*_expand_ellipsis([_ELLIPSIS], widest), *once]


def _split_term(term: str) -> list[str]:
    before, dots, after = term.partition(_ELLIPSIS)
    return [*before, *([dots] if dots else []), *after]


def _expand_ellipsis(term: Sequence[str], count: int) -> list[str]:
    axes = [f".{place}" for place in reversed(range(count))]
    return [label for each in term for label in (axes if each == _ELLIPSIS else [each])]


def _reduce_and_permute(x: Var, term: Sequence[str], output: Sequence[str], node: Any) -> Var:
    """Lower an equation of one operand: the diagonal of repeated labels, sums over others, and a permutation."""
    numbers = {label: number for number, label in enumerate(dict.fromkeys(term))}
    flags = x.dtype == types.bool
    if flags and len(numbers) < len(term):  # gather_nd, by which coremltools takes the diagonal, has no bools
        x = cast_to(x, types.int32)
    (axes, _), (x,) = _utils.solve_diagonal_einsum([[numbers[label] for label in term], []], [x])
    kept = [numbers[label] for label in output]
    summed = [place for place, axis in enumerate(axes) if axis not in kept]
    if summed:
        x = mb.reduce_sum(x=cast_to(x, types.int32) if flags else x, axes=summed, keep_dims=False)
    elif flags:
        x = cast_to(x, types.bool)
    left = [axis for axis in axes if axis in kept]
    perm = [left.index(axis) for axis in kept]
    if perm != sorted(perm):
        x = mb.transpose(x=x, perm=perm)
    return name_result(x, node)


def _remove_broadcast_axes(operands: Sequence[Var], terms: Sequence[list[str]]) -> tuple[list[Var], list[list[str]]]:
    """Remove axes of size 1 of which another operand has more elements."""
    sizes: dict[str, list[Any]] = {}
    for x, term in zip(operands, terms):
        for label, size in zip(term, x.shape):
            sizes.setdefault(label, []).append(size)
    reduced, left = [], []
    for x, term in zip(operands, terms):
        axes = [place for place, label in enumerate(term)
                if x.shape[place] == 1 and any(size != 1 for size in sizes[label])]
        reduced.append(mb.squeeze(x=x, axes=axes) if axes else x)
        left.append([label for place, label in enumerate(term) if place not in axes])
    return reduced, left
