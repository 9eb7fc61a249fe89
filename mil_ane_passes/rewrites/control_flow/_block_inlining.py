"""Replacing the outputs of an op that has blocks by values of those blocks."""

from __future__ import annotations

from collections.abc import Sequence

from coremltools.converters.mil.mil import Function, Operation, Var, types
from coremltools.converters.mil.mil.types.symbolic import is_symbolic

from ...ir.builder import RewriteBuilder
from ...ir.query import is_const

__all__ = ["can_replace_value", "make_replacement_outputs"]


def can_replace_value(new: Var, old: Var) -> bool:
    """Return whether `new` can replace `old`: the types are compatible, and the same dimensions are symbolic."""
    if not types.is_compatible_type(new.sym_type, old.sym_type):
        return False
    if not (types.is_tensor(new.sym_type) and types.is_tensor(old.sym_type)):
        return True
    return all(is_symbolic(one) == is_symbolic(other) for one, other in zip(new.shape, old.shape))


def make_replacement_outputs(mb: RewriteBuilder, op: Operation, made: Sequence[Var]) -> list[Var]:
    """Return `made` as replacements of the outputs of `op`.

    An output of the model that is a const, or the same value as another output, gets an identity.
    """
    found: list[Var] = []
    for var, old in zip(made, op.outputs):
        returned = any(isinstance(block, Function) for block in old.consuming_blocks)
        found.append(mb.identity(x=var) if returned and (is_const(var) or var in found) else var)
    return found
