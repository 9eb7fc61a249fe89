"""Inputs and outputs of a function in fp16, with interface casts where its ops read or compute fp32."""

from __future__ import annotations

from collections.abc import Mapping

from coremltools.converters.mil.mil import Function, Operation, Var, types

from ...ir.block_editor import BlockEditor, rebind_inputs
from ...ir.builder import RewriteBuilder, UniqueNames
from ...ir.value_ranges import Range
from ._fp16_constants import FP16_MAX, FP16_MIN_SUBNORMAL

__all__ = ["describe_fp16_loss", "is_fp16_internally", "narrow_input", "narrow_output"]


def is_fp16_internally(var: Var) -> bool:
    """Return whether ops read the input `var` only as fp16, or compute the output `var` from fp16."""
    if var.op is None:
        return all(map(_is_cast_to_fp16, var.child_ops))
    return bool(var.op.op_type == "cast" and var.op.x.dtype == types.fp16)


def describe_fp16_loss(var: Var, seen: Mapping[Var, Range]) -> str:
    """Describe what fp16 cannot represent of an input or output that is fp32 inside the function, or return ""."""
    if var not in seen or is_fp16_internally(var):
        return ""
    largest = seen[var].largest
    if largest > FP16_MAX:
        return f"'{var.name}' reaches {largest:.2g}, fp16 ends at {FP16_MAX:.0f}"
    if 0 < largest < FP16_MIN_SUBNORMAL:
        return f"'{var.name}' ends at {largest:.2g}, below what fp16 holds ({FP16_MIN_SUBNORMAL:.1e})"
    return ""


def narrow_input(function: Function, var: Var) -> None:
    """Declare the fp32 input `var` fp16: drop its casts to fp16, and cast it back for ops that read it in fp32."""
    function.placeholder_inputs[var.name].dtype = types.fp16
    var._sym_type = types.tensor(types.fp16, var.shape)
    with function, BlockEditor() as editor:
        mb = RewriteBuilder(function, UniqueNames(function))
        wide: Var | None = None
        for op in list(dict.fromkeys(var.child_ops)):
            if _is_cast_to_fp16(op):
                if not op.outputs[0].consuming_blocks:
                    editor.replace(op.outputs[0], var)
                    editor.remove_if_unused([op])
                continue
            if op.op_type in ("cast", "shape"):
                continue  # these ops read any float dtype
            if wide is None:
                with mb.at(mb.find_insertion_point(var)):
                    wide = mb.cast(x=var, dtype="fp32", name=f"{var.name}_to_fp32")
                    mb.adopt_scopes(op.scopes)
            assert wide is not None
            op.set_inputs(no_check_var_types=True, **rebind_inputs(op, var, wide))


def narrow_output(function: Function, var: Var) -> None:
    """Return the fp32 output `var` in fp16, under its name: the value it was cast from, or a cast of it."""
    names = UniqueNames(function)
    name, source = var.name, var.op.x if var.op.op_type == "cast" else None
    with function, BlockEditor() as editor:
        mb = RewriteBuilder(function, names)
        if source is None or source.dtype != types.fp16:
            new = mb.cast(x=var, dtype="fp16", name=f"{name}_to_fp16")
        elif source.op is None or source.consuming_blocks:  # it has a name of its own already, which it must keep
            new = mb.identity(x=source)
        else:
            new = source
        mb.adopt_scopes(var.op.scopes)
        function.set_outputs([new if each is var else each for each in function.outputs])
        var.name, new.name = names.make_unique_name(f"{name}_in_fp32"), name
        editor.remove_if_unused([var.op])


def _is_cast_to_fp16(op: Operation) -> bool:
    return bool(op.op_type == "cast" and op.outputs[0].dtype == types.fp16)
