"""Ops coremltools has no definition for, or that are not as it defines them: kept, typed as the file declares them,
never looked into."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from coremltools.converters.mil.mil.input_type import InputSpec, TupleInputType, _InputType
from coremltools.converters.mil.mil.ops.registry import SSAOpRegistry

from ..core.query import OPAQUE

if TYPE_CHECKING:

    class Operation:
        """coremltools' base class, which has no annotations."""

    class AnyInput:
        """coremltools' base class, which has no annotations."""

else:
    from coremltools.converters.mil.mil import Operation

    class AnyInput(_InputType):
        """An input that may be anything."""


# What pymil and the loader call something else on an op, or in the arguments of those who make and change one.
_RESERVED_ATTRIBUTES = frozenset(
    {"self", "name", "enclosing_block", "scopes", "before_op", "blocks", "outputs", "inputs", "declared", "opaque",
     "contradiction", "rejected", "origin", "blob", "synthetic", "no_check_var_types", "symbolic_datatype", "datatype",
     "symbolic_value", "value", "version"}
)


class OpaqueOp(Operation):
    """An op known by its type's name, its inputs and its declared output types alone.

    `opaque` tells it from coremltools' ops: its attributes are only those the file binds. `contradiction` is what
    coremltools says against it where it has an op of that name.
    """

    opaque = True
    contradiction = ""
    input_spec = InputSpec()
    declared: tuple[Any, ...] = ()

    def type_inference(self) -> tuple[Any, ...]:
        """The output types the file declares."""
        return self.declared

    def output_names(self) -> tuple[str, ...]:
        """Placeholders; the loader gives the outputs the file's names."""
        return tuple(str(index) for index in range(len(self.declared)))


def assign_attribute_names(params: Iterable[str]) -> dict[str, str]:
    """The attribute an opaque op shows each of its inputs as: its name, unless pymil uses that for something else."""
    names = {param: param for param in params if not _is_reserved(param)}
    for param in params:
        if param not in names:
            shown = f"input_{param}"
            while shown in names.values() or _is_reserved(shown):
                shown += "_"
            names[param] = shown
    return names


def _is_reserved(param: str) -> bool:
    # pymil keeps its own things, and we look away from inputs, under names that begin so.
    return param.startswith("_") or param in _RESERVED_ATTRIBUTES or hasattr(OpaqueOp, param)


def get_opaque_type_name(op_type: str) -> str:
    """The type an opaque op of type `op_type` shows: never that of coremltools', whose ops have inputs it may lack."""
    known = op_type in SSAOpRegistry.core_ops or op_type in SSAOpRegistry.dialect_ops
    return f"{op_type}{OPAQUE}" if known else op_type


def make_opaque_class(op_type: str, inputs: Mapping[str, Any], declared: Sequence[Any]) -> Any:
    """A class of ops of type `op_type` over `inputs` (var, or list of vars) whose outputs have the types `declared`."""
    several = tuple((param, isinstance(var, (list, tuple))) for param, var in inputs.items())
    return _make_class(get_opaque_type_name(op_type), several, tuple(declared))


@functools.lru_cache(maxsize=1 << 10)
def _make_class(shown: str, inputs: tuple[tuple[str, bool], ...], declared: tuple[Any, ...]) -> Any:
    spec = {param: TupleInputType(optional=True) if several else AnyInput() for param, several in inputs}
    # pymil takes an op's inputs from its class.
    made = {"input_spec": InputSpec(**spec), "declared": declared, "op_type": shown}
    return type(OpaqueOp.__name__, (OpaqueOp,), made)
