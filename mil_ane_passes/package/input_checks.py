"""Cache of coremltools' check of an op's inputs, which runs once for each combination of types.

The check depends only on types and on whether an input is constant. Run for every op, it takes a sixth of the loading
time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coremltools.converters.mil.mil import InternalVar, Operation, Var

__all__ = ["InputChecks"]

_MAX_REMEMBERED = 1 << 16
"Most combinations of types that are remembered: the cache must not grow without limit in a run over many packages."


class _AcceptingSpec:
    """Replaces the `input_spec` of an op whose inputs are known to pass."""

    def __init__(self, spec: Any) -> None:
        self.input_types = spec.input_types

    def validate_inputs(self, op_name: str, op_type: str, candidate_kvs: Mapping[str, Any]) -> None:
        """Do nothing: inputs of these types have passed before."""


class InputChecks:
    """Combinations of op class and input types that have passed."""

    def __init__(self) -> None:
        self._passed: set[Any] = set()
        self._specs: dict[Any, _AcceptingSpec] = {}

    def begin_op(self, op: Operation, bound: Mapping[str, Any]) -> Any:
        """Prepare `op` before its inputs are set: skip the check if it is known to pass.

        Returns the argument of `end`.
        """
        cls = type(op)
        seen = (cls, *((param, _build_check_key(given)) for param, given in bound.items()))
        if seen in self._passed:
            if cls not in self._specs:
                self._specs[cls] = _AcceptingSpec(cls.input_spec)
            op.input_spec = self._specs[cls]
        return seen

    def end_op(self, op: Operation, seen: Any) -> None:
        """Record that the inputs were set without an error."""
        if vars(op).pop("input_spec", None) is None and len(self._passed) < _MAX_REMEMBERED:
            self._passed.add(seen)


def _build_check_key(given: Any) -> Any:
    """Return everything about one input that the check depends on."""
    if isinstance(given, InternalVar) or not isinstance(given, Var):
        return type(given)
    return given.sym_type, given.is_descendant_of_const
