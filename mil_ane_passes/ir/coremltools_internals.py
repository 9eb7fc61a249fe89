"""Access to private attributes of pymil's vars, ops, blocks and functions, for all other rooms.

coremltools does not document these attributes. They exist in coremltools 8.3 to 9.0, and tests run with both versions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Block, Function, Operation, Var

__all__ = [
    "add_function_input",
    "clear_block_copy",
    "clear_users",
    "evaluate_op",
    "get_input_vars",
    "get_typed_value",
    "is_evaluated_wrongly",
    "remove_function_input",
    "remove_last_user",
    "set_input_var",
    "set_output_vars",
    "set_stored_type",
    "set_typed_value",
]


def get_typed_value(var: Var) -> Any:
    """Return the typed value of `var` as it is stored, without reading it; None if it has no value, not even a symbolic
    one."""
    return var._sym_val


def set_typed_value(var: Var, value: Any) -> None:
    """Set the typed value of `var`, which may be a `LazyValue`, or None."""
    var._sym_val = value


def set_stored_type(var: Var, sym_type: Any) -> None:
    """Set the type of `var`; the types of its users are not inferred again."""
    var._sym_type = sym_type


def evaluate_op(op: Operation, sym_types: Sequence[Any]) -> tuple[Any, ...]:
    """Evaluate `op` and return the typed values of its outputs, whose types are `sym_types`.

    An output that cannot be evaluated from the inputs is None. Raises the exceptions of coremltools' value inference.
    """
    if is_evaluated_wrongly(op):
        return (None,) * len(sym_types)
    keep_dims = getattr(op, "keep_dims", None)
    if keep_dims is None or not isinstance(keep_dims.val, np.bool_):
        return tuple(op._auto_val(tuple(sym_types)))
    try:  # numpy's reductions reject a numpy bool, which the const of a package is
        op.keep_dims = SimpleNamespace(val=bool(keep_dims.val))
        return tuple(op._auto_val(tuple(sym_types)))
    finally:
        op.keep_dims = keep_dims


def is_evaluated_wrongly(op: Operation) -> bool:
    """Return whether coremltools' value inference, and so its constant folding, gives another result than the op.

    It does not interleave the values of a concat, replaces elements in every mode of scatter_along_axis, writes the
    result of thresholded_relu into its operand, takes a negative axis of a gather with batch dimensions to be that of
    the whole table, and sorts integers by their negatives, which wrap for unsigned ones and the smallest. Of an
    exclusive cumsum, of flatten2d at either end and of topk of all elements it raises an exception.
    """
    is_wrong = _EVALUATED_WRONGLY.get(op.op_type)
    return is_wrong is not None and is_wrong(op)


def _get_parameter(op: Operation, name: str) -> Any:
    var = getattr(op, name, None)
    return None if var is None else var.val


def _sorts_wrapped(op: Operation) -> bool:
    values = None if op.x.val is None else np.asarray(op.x.val)
    if values is None or values.dtype.kind not in "iu" or not values.size:
        return False
    return bool(values.dtype.kind == "u" or values.min() == np.iinfo(values.dtype).min)


_EVALUATED_WRONGLY: dict[str, Callable[[Operation], bool]] = {
    "argsort": _sorts_wrapped,
    "concat": lambda op: bool(_get_parameter(op, "interleave")),
    "cumsum": lambda op: bool(_get_parameter(op, "exclusive")),
    "flatten2d": lambda op: True,
    "gather": lambda op: bool(_get_parameter(op, "batch_dims")) and int(_get_parameter(op, "axis") or 0) < 0,
    "scatter_along_axis": lambda op: _get_parameter(op, "mode") not in (None, "update"),
    "thresholded_relu": lambda op: True,
    "topk": lambda op: _get_parameter(op, "k") == -1 or _sorts_wrapped(op),
}
"By op type, the function that returns whether value inference is wrong for an op."


def get_input_vars(op: Operation) -> Mapping[str, Any]:
    """Return the operands of `op` by input name, including internal ones: a var or a tuple of vars each."""
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
    """Remove all users of `var`, a shallow copy, without changing the list of the original."""
    var._child_ops, var.consuming_blocks = [], []


def clear_block_copy(block: Block, inputs: Iterable[Var]) -> None:
    """Detach `block`, a shallow copy, from the original: no internal vars, no outputs, and the inputs `inputs`."""
    block._internal_vars, block._outputs = set(), []
    block._block_inputs = tuple(inputs)


def add_function_input(function: Function, name: str, placeholder: Any) -> None:
    """Add an input to `function`, after the existing ones."""
    function.placeholder_inputs[name] = placeholder
    function._input_dict[name] = placeholder.outputs[0]


def remove_function_input(function: Function, name: str) -> None:
    """Remove an input or state of `function` that has no users."""
    del function.placeholder_inputs[name]
    del function._input_dict[name]
