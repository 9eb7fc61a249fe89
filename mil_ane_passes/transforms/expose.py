"""Exposure of intermediate values as outputs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import coremltools as ct
from coremltools.converters.mil.mil import Builder, Function, Var, types

from ..ir.printer import format_dtype
from ..package.interface import get_specification_version
from ..package.names import make_free_name
from ..passes.interface_change import InterfaceChange
from ..utils.errors import InputError
from ..utils.option_spelling import format_option_values
from .contract import Draft, EditRecord, Transform
from .names import collect_names, find_value, make_unknown_name_error

__all__ = ["Expose", "can_have_fp16_interface", "choose_interface_dtype", "describe_opset", "get_dtype",
           "get_type_kind"]

_OPTION = "--expose"
_MIN_VERSION_FP16, _MIN_VERSION_INT8 = 7, 10
"The specification versions (iOS16, iOS26) from which outputs may be arrays of fp16 and of int8."
_EXACT_CAST_TYPES = {types.fp16: "fp32", types.bool: "int32", types.int8: "int32", types.uint8: "int32",
                     types.int16: "int32", types.uint16: "int32"}
"For dtypes that outputs cannot have: a dtype to which they can be cast without loss."
_CAST_TYPES_FROM_IOS17 = (types.int8, types.uint8, types.int16, types.uint16)
"Types that `cast` accepts only from iOS17 on."


@dataclass(frozen=True)
class Expose(Transform):
    """Makes values additional outputs, after the existing ones, in each function that has them or in `function`."""

    values: Sequence[str]
    function: str | None = None

    def apply(self, draft: Draft) -> list[Draft]:
        """Add the outputs in place. Raises InputError for an unknown value, or one that cannot be an output."""
        functions = draft.select_functions(self.function)
        for value in dict.fromkeys(self.values):
            having = {name: var for name, each in functions.items() if (var := find_value(each, value)) is not None}
            if not having:
                raise _make_absent_error(value, functions.values(), draft.gone)
            for name, var in having.items():
                _expose_value(draft, name, functions[name], var)
        return [draft]


def can_have_fp16_interface(function: Function) -> bool:
    """Return whether inputs and outputs of a function may be fp16: from iOS16 on."""
    return get_specification_version(function) >= _MIN_VERSION_FP16 and function.opset_version >= ct.target.iOS16


def describe_opset(function: Function) -> str:
    """Return the name of a function's opset as in the file."""
    origin = getattr(function, "origin", None)
    return str(function.opset_version.name if origin is None else origin.opset)


def get_dtype(var: Var) -> object | None:
    """Return the element type of a tensor or scalar; None for other types."""
    return var.dtype if types.is_tensor(var.sym_type) or types.is_scalar(var.sym_type) else None


def get_type_kind(var: Var) -> str:
    """Return the kind of a type that is not a tensor, as the model format names it."""
    checks = {"list": types.is_list, "dictionary": types.is_dict, "tuple": types.is_tuple, "state": types.is_state}
    return next((kind for kind, check in checks.items() if check(var.sym_type)), "value of unknown type")


def _make_absent_error(value: str, functions: Collection[Function], gone: Mapping[str, str]) -> InputError:
    names = set().union(*map(collect_names, functions))
    if value in names:
        return InputError(
            f"{format_option_values('expose', value)}: '{value}' is made inside a nested block, of a condition or a "
            "loop; only values at the top of a function can be outputs"
        )
    return make_unknown_name_error(value, format_option_values("expose", value), names, gone=gone,
                                   functions=functions)


def _expose_value(draft: Draft, name: str, function: Function, var: Var) -> None:
    value = var.name
    if var in function.outputs:
        draft.done.append(EditRecord(_OPTION, name, value, f"'{value}' is an output already", changed=False))
        return
    who = format_option_values("expose", value)
    _check_value(name, var, who)
    cast = _choose_cast(name, function, var, who)
    if cast:
        with function:
            var = Builder.cast(x=var, dtype=cast, name=make_free_name(f"{value}_{cast}", collect_names(function)))
    function.set_outputs([*function.outputs, var])
    draft.change_interface(name, InterfaceChange("output", None, var.name, "added"))
    note = f"'{value}' is an output" + (f", cast to {cast} and called '{var.name}': {_explain_cast(cast)}" if cast
                                        else "")
    draft.done.append(EditRecord(_OPTION, name, var.name, note))


def _check_value(function: str, var: Var, who: str) -> None:
    """Raise InputError if `var` cannot be an output."""
    if var.op is None:
        raise InputError(f"{who}: '{var.name}' is already an input of function '{function}', so the caller has its "
                         "value")
    if var.op.op_type == "const" or var.op.op_type.startswith("constexpr_"):
        raise InputError(f"{who}: '{var.name}' is a constant of function '{function}'; read it from the package")
    if get_dtype(var) is None:
        raise InputError(f"{who}: '{var.name}' is a {get_type_kind(var)}; only tensors can be made outputs")


def choose_interface_dtype(function: Function, dtype: object) -> str | None:
    """Return the dtype to which a value of `dtype` must be cast before it can be an input or output.

    Returns "" if no cast is needed, and None if no such cast is possible.
    """
    if dtype in (types.fp32, types.int32) or (dtype == types.fp16 and can_have_fp16_interface(function)):
        return ""
    late = dtype in _CAST_TYPES_FROM_IOS17 and function.opset_version < ct.target.iOS17
    return None if late else _EXACT_CAST_TYPES.get(dtype)


def _choose_cast(name: str, function: Function, var: Var, who: str) -> str:
    dtype = get_dtype(var)
    if dtype == types.int8 and get_specification_version(function) >= _MIN_VERSION_INT8:
        return ""
    cast = choose_interface_dtype(function, dtype)
    if cast is None:
        raise InputError(f"{who}: the value is {format_dtype(dtype)}; Core ML does not support outputs of this type, "
                         f"and it cannot be cast in function '{name}' (for {describe_opset(function)})")
    return cast


def _explain_cast(cast: str) -> str:
    return "fp16 outputs need iOS16" if cast == "fp32" else "there are no outputs of its type"
