"""Ops the host has no definition for: kept, typed as the file declares them, never looked into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from coremltools.converters.mil.mil.input_type import InputSpec, TupleInputType, _InputType

if TYPE_CHECKING:

    class Operation:
        """The host's base class, which has no annotations."""

    class AnyInput:
        """The host's base class, which has no annotations."""

else:
    from coremltools.converters.mil.mil import Operation

    class AnyInput(_InputType):
        """An input that may be anything."""


_TAKEN = frozenset(
    {"name", "enclosing_block", "scopes", "before_op", "blocks", "outputs", "inputs", "declared", "opaque"}
)


class OpaqueOp(Operation):
    """An op known by its type's name, its inputs and its declared output types alone.

    `opaque` tells it from the host's ops of the same type: its attributes are only those the file binds.
    """

    opaque = True
    input_spec = InputSpec()
    declared: tuple[Any, ...] = ()

    def type_inference(self) -> tuple[Any, ...]:
        """The output types the file declares."""
        return self.declared

    def output_names(self) -> tuple[str, ...]:
        """Placeholders; the loader gives the outputs the file's names."""
        return tuple(str(index) for index in range(len(self.declared)))


def attribute_of(param: str) -> str:
    """The attribute an opaque op shows input `param` as: its name, unless pymil's ops use that for something else."""
    return f"{param}_" if param in _TAKEN or hasattr(OpaqueOp, param) else param


def opaque_class(op_type: str, inputs: Mapping[str, Any], declared: Sequence[Any]) -> Any:
    """A class of ops of type `op_type` over `inputs` (var, or list of vars) whose outputs have the types `declared`."""
    spec = {
        param: TupleInputType(optional=True) if isinstance(var, (list, tuple)) else AnyInput()
        for param, var in inputs.items()
    }
    # pymil takes an op's type from its class's name, and its inputs from its class.
    return type(op_type, (OpaqueOp,), {"input_spec": InputSpec(**spec), "declared": tuple(declared)})
