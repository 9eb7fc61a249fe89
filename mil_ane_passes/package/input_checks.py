"""coremltools' check of an op's inputs, asked once for each combination of types.

It looks at types and at whether an input is constant, nothing else, and takes a sixth of the time of loading when it is
asked for every op.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coremltools.converters.mil.mil import InternalVar, Operation, Var

__all__ = ["InputChecks"]

_MAX_REMEMBERED = 1 << 16


class _AcceptingSpec:
    """Stands in for the `input_spec` of an op whose inputs would pass."""

    def __init__(self, spec: Any) -> None:
        self.input_types = spec.input_types

    def validate_inputs(self, op_name: str, op_type: str, candidate_kvs: Mapping[str, Any]) -> None:
        """They have passed before."""


class InputChecks:
    """What has passed: op classes with the types of their inputs."""

    def __init__(self) -> None:
        self._passed: set[Any] = set()
        self._specs: dict[Any, _AcceptingSpec] = {}

    def begin(self, op: Operation, bound: Mapping[str, Any]) -> Any:
        """Before the inputs of `op` are set. Returns what `end` is to be given."""
        cls = type(op)
        seen = (cls, *((param, _build_check_key(given)) for param, given in bound.items()))
        if seen in self._passed:
            if cls not in self._specs:
                self._specs[cls] = _AcceptingSpec(cls.input_spec)
            op.input_spec = self._specs[cls]
        return seen

    def end(self, op: Operation, seen: Any) -> None:
        """After they were set without an error."""
        if vars(op).pop("input_spec", None) is None and len(self._passed) < _MAX_REMEMBERED:
            self._passed.add(seen)


def _build_check_key(given: Any) -> Any:
    """All that the check sees of one input."""
    if isinstance(given, InternalVar) or not isinstance(given, Var):
        return type(given)
    return given.sym_type, given.is_descendant_of_const
