"""Opaque ops: unknown to coremltools, or contradicting its definition.

They are kept with the types that the file declares, and are not interpreted.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from coremltools.converters.mil.mil.input_type import InputSpec, TupleInputType, _InputType
from coremltools.converters.mil.mil.ops.registry import SSAOpRegistry

from ..ir.query import OPAQUE

if TYPE_CHECKING:

    class Operation:
        """Annotations for coremltools' base class, which has none."""

    class AnyInput:
        """Annotations for coremltools' base class, which has none."""

else:
    from coremltools.converters.mil.mil import Operation

    class AnyInput(_InputType):
        """An input that may be anything."""


# Attributes of ops in pymil and the loader, and arguments of functions that make and change ops.
_RESERVED_ATTRIBUTES = frozenset(
    {"self", "name", "enclosing_block", "scopes", "before_op", "blocks", "outputs", "inputs", "declared", "opaque",
     "contradiction", "rejected", "origin", "blob", "synthetic", "no_check_var_types", "symbolic_datatype", "datatype",
     "symbolic_value", "value", "version"}
)


class OpaqueOp(Operation):
    """An op known only by its type's name, its inputs and its declared output types.

    `opaque` distinguishes it from coremltools' ops: its attributes are only those the file binds. If coremltools
    defines an op of that name, `contradiction` is its error on this op.
    """

    opaque = True
    contradiction = ""
    input_spec = InputSpec()
    declared: tuple[Any, ...] = ()

    def type_inference(self) -> tuple[Any, ...]:
        """Return the output types the file declares."""
        return self.declared

    def output_names(self) -> tuple[str, ...]:
        """Return placeholders; the loader replaces them by the names in the file."""
        return tuple(str(index) for index in range(len(self.declared)))


def assign_attribute_names(params: Iterable[str]) -> dict[str, str]:
    """Choose the attribute for each input of an opaque op: the input's name, unless pymil reserves it."""
    names = {param: param for param in params if not _is_reserved(param)}
    for param in params:
        if param not in names:
            shown = f"input_{param}"
            while shown in names.values() or _is_reserved(shown):
                shown += "_"
            names[param] = shown
    return names


def _is_reserved(param: str) -> bool:
    # pymil's private attributes begin with an underscore, and `get_file_inputs` skips inputs that do.
    return param.startswith("_") or param in _RESERVED_ATTRIBUTES or hasattr(OpaqueOp, param)


def get_opaque_type_name(op_type: str) -> str:
    """Return the type name of an opaque op of type `op_type`.

    It is never one of coremltools' types: rewrites expect the inputs of these types, which an opaque op may lack.
    """
    known = op_type in SSAOpRegistry.core_ops or op_type in SSAOpRegistry.dialect_ops
    return f"{op_type}{OPAQUE}" if known else op_type


def make_opaque_class(op_type: str, inputs: Mapping[str, Any], declared: Sequence[Any]) -> Any:
    """Make a class of ops of type `op_type` over `inputs` (a var or a list of vars each) with outputs of types
    `declared`."""
    several = tuple((param, isinstance(var, (list, tuple))) for param, var in inputs.items())
    return _make_class(get_opaque_type_name(op_type), several, tuple(declared))


@functools.lru_cache(maxsize=1 << 10)
def _make_class(shown: str, inputs: tuple[tuple[str, bool], ...], declared: tuple[Any, ...]) -> Any:
    spec = {param: TupleInputType(optional=True) if several else AnyInput() for param, several in inputs}
    # pymil takes an op's inputs from its class.
    made = {"input_spec": InputSpec(**spec), "declared": declared, "op_type": shown}
    return type(OpaqueOp.__name__, (OpaqueOp,), made)
