"""Change the float type of a function's inputs and outputs, with the minimum of casts.

Used by the rewrite `fp16_io` and by `edit --io`.
"""

from __future__ import annotations

from typing import NamedTuple

import coremltools as ct
from coremltools.converters.mil.mil import Function, Operation, Var, types

from .block_editor import BlockEditor, rebind_inputs
from .builder import RewriteBuilder, UniqueNames
from .query import is_const

__all__ = ["FLOAT_TYPES", "Retyped", "find_retype_obstacle", "retype_input", "retype_output"]

FLOAT_TYPES = {"fp16": types.fp16, "fp32": types.fp32}
"The float types of inputs and outputs, by the names that `cast` uses."
_OPS_READING_ANY_FLOAT = ("cast", "shape")
"Ops that accept any float type: they read an input of the new type without a cast."


class Retyped(NamedTuple):
    """The result of a type change: `note` describes the casts; `exact` is true if the results keep the same bits."""

    note: str
    exact: bool


def find_retype_obstacle(function: Function, var: Var) -> str:
    """Return the reason why the type of an input or output must not change; "" if it may."""
    if var.name in _collect_image_names(function):
        return f"'{var.name}' is an image, whose type is set by the model description"
    if var.op is None and var in function.outputs:
        return f"input '{var.name}' is returned directly and has to keep its type"
    return ""


def _collect_image_names(function: Function) -> set[str]:
    """Collect the inputs and outputs that are images in the package, or in the types passed to `ct.convert`."""
    given = [kind.name for kind in function.input_types if isinstance(kind, ct.ImageType)]
    made = [var.name for var, kind in zip(function.outputs, function.output_types or ())
            if isinstance(kind, ct.ImageType)]
    return {*getattr(function, "images", ()), *given, *made}


def retype_input(function: Function, var: Var, dtype: str) -> Retyped:
    """Change the type of the float input `var` to `dtype` ("fp16" or "fp32"; `var` has the other type).

    Casts of `var` to `dtype` are removed. Ops that need the old type read one cast back to it.
    """
    old, new = _get_other(dtype), FLOAT_TYPES[dtype]
    function.placeholder_inputs[var.name].dtype = new
    var._sym_type = types.tensor(new, var.shape)
    readers, inner_blocks = list(dict.fromkeys(var.child_ops)), list(dict.fromkeys(var.consuming_blocks))
    removed = False
    back: Var | None = None
    with function, BlockEditor() as editor:
        mb = RewriteBuilder(function, UniqueNames(function))

        def cast_back(like: Operation) -> Var:
            with mb.at(mb.find_insertion_point(var)):
                made = mb.cast(x=var, dtype=old, name=f"{var.name}_to_{old}")
                mb.adopt_scopes(like.scopes)
            return made

        for op in readers:
            if _is_cast_to(op, new) and not op.outputs[0].consuming_blocks:
                editor.replace(op.outputs[0], var)
                editor.remove_if_unused([op])
                removed = True
            elif op.op_type not in _OPS_READING_ANY_FLOAT:
                back = back or cast_back(op)
                op.set_inputs(no_check_var_types=True, **rebind_inputs(op, var, back))
        for block in inner_blocks:
            back = back or cast_back(block.outer_op)
            block.replace_block_output_var(var, back)
    if back is not None:
        return Retyped(f"it is cast to {old} for its {old} users", dtype == "fp32")
    exact = dtype == "fp32" or all(op.op_type == "shape" for op in readers if not _is_cast_to(op, new))
    return Retyped("its cast is removed" if removed else "its users accept both types", exact)


def retype_output(function: Function, var: Var, dtype: str) -> Retyped:
    """Change the type of the float output `var` to `dtype` ("fp16" or "fp32"); its name is kept.

    If `var` is a cast of an fp16 value and `dtype` is "fp16", this value is returned. Otherwise a cast is added.
    """
    old = _get_other(dtype)
    names = UniqueNames(function)
    name, source = var.name, var.op.x if var.op.op_type == "cast" else None
    # A cast to fp16 rounds: its fp32 operand has other values.
    undone = source is not None and dtype == "fp16" and source.dtype == types.fp16
    with function, BlockEditor() as editor:
        mb = RewriteBuilder(function, names)
        if source is None or not undone:
            new = mb.cast(x=var, dtype=dtype, name=f"{name}_to_{dtype}")
        elif source.op is None or source.consuming_blocks or is_const(source):  # `source` must keep its own name
            new = mb.identity(x=source)
        else:
            new = source
        mb.adopt_scopes(var.op.scopes)
        function.set_outputs([new if each is var else each for each in function.outputs])
        var.name, new.name = names.make_unique_name(f"{name}_in_{old}"), name
        editor.remove_if_unused([var.op])
    if undone:
        return Retyped("its cast is removed", True)
    return Retyped(f"it is computed in {old} and cast", dtype == "fp32")


def _get_other(dtype: str) -> str:
    return "fp32" if dtype == "fp16" else "fp16"


def _is_cast_to(op: Operation, dtype: object) -> bool:
    return bool(op.op_type == "cast" and op.outputs[0].dtype == dtype)
