"""Access to private attributes of pymil's vars, ops, blocks and functions, for all rooms besides this one.

coremltools states neither of them; they are those of coremltools 8.3 to 9.0, and tests of both versions read them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from coremltools.converters.mil.mil import Block, Function, Operation, Var

__all__ = [
    "add_function_input",
    "clear_block_copy",
    "clear_users",
    "evaluate_op",
    "get_input_vars",
    "get_typed_value",
    "remove_function_input",
    "remove_last_user",
    "set_input_var",
    "set_output_vars",
    "set_stored_type",
    "set_typed_value",
]


def get_typed_value(var: Var) -> Any:
    """Return the typed value of `var` as it is stored, unread; None where it has none, not even a symbolic one."""
    return var._sym_val


def set_typed_value(var: Var, value: Any) -> None:
    """Set the typed value of `var`, which may be a `LazyValue`, or None."""
    var._sym_val = value


def set_stored_type(var: Var, sym_type: Any) -> None:
    """Set the type of `var`; readers are not inferred anew."""
    var._sym_type = sym_type


def evaluate_op(op: Operation, sym_types: Sequence[Any]) -> tuple[Any, ...]:
    """Return the typed values of the outputs of types `sym_types`, None for each that does not follow from inputs.

    Raises what coremltools' value inference raises.
    """
    return tuple(op._auto_val(tuple(sym_types)))


def get_input_vars(op: Operation) -> Mapping[str, Any]:
    """Return the operands of `op` by name as they are bound, internal ones included."""
    bound: Mapping[str, Any] = op._input_vars
    return bound


def set_input_var(op: Operation, name: str, operand: Any) -> None:
    """Bind the input `name` of `op` without adding `op` to the users of `operand`."""
    op._input_vars[name] = operand
    setattr(op, name, operand)


def set_output_vars(op: Operation, outputs: list[Var] | None) -> None:
    """Set the outputs of `op`; None lets coremltools make them."""
    op._output_vars = outputs


def remove_last_user(var: Var) -> None:
    """Remove the user of `var` that was added last."""
    var._child_ops.pop()


def clear_users(var: Var) -> None:
    """Make `var`, a shallow copy, a var without users."""
    var._child_ops, var.consuming_blocks = [], []


def clear_block_copy(block: Block, inputs: Iterable[Var]) -> None:
    """Make `block`, a shallow copy, a block of its own without outputs and with `inputs`."""
    block._internal_vars, block._outputs = set(), []
    block._block_inputs = tuple(inputs)


def add_function_input(function: Function, name: str, placeholder: Any) -> None:
    """Add an input to `function`, after those that it has."""
    function.placeholder_inputs[name] = placeholder
    function._input_dict[name] = placeholder.outputs[0]


def remove_function_input(function: Function, name: str) -> None:
    """Remove an input or state of `function` that nothing reads."""
    del function.placeholder_inputs[name]
    del function._input_dict[name]
