"""Change of the float type of inputs and outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from coremltools.converters.mil.mil import Function, Var, types

from ..ir.interface_casts import FLOAT_TYPES, find_retype_obstacle, retype_input, retype_output
from ..package.interface import get_feature, get_specification_version
from ..passes.interface_change import change_dtype
from ..utils.errors import InputError
from ..utils.option_spelling import format_option_values
from .contract import Draft, EditRecord, Transform
from .expose import can_have_fp16_interface, describe_opset, get_dtype
from .names import get_interface_vars, make_unknown_name_error

__all__ = ["Io"]

_FP16_MAX = 65504
_DEFAULT_VALUE_FIELDS = ("floatDefaultValue", "doubleDefaultValue")


@dataclass(frozen=True)
class Io(Transform):
    """Changes inputs and outputs to `dtype` ("fp16" or "fp32"): those in `names`, or all that are arrays of floats."""

    dtype: str
    names: Sequence[str] = ()
    function: str | None = None

    def apply(self, draft: Draft) -> list[Draft]:
        """Change them in place. Raises InputError for an unknown input or output, and for one whose type cannot change.
        """
        if self.dtype not in FLOAT_TYPES:
            raise InputError(
                f"{format_option_values('io')}: {self.dtype!r} is not a supported type; expected fp16 or fp32"
            )
        functions = draft.select_functions(self.function)
        present = {name for function in functions.values() for name in _list_ends(function)}
        for name in self.names:
            if name not in present:
                raise make_unknown_name_error(
                    name, format_option_values("io", self.dtype, name), present, "input or output", draft.gone
                )
        for name, function in functions.items():
            _FunctionChange(self, draft, name, function).apply()
        return [draft]


class _FunctionChange:
    """The change of float types in one function."""

    def __init__(self, requested: Io, draft: Draft, name: str, function: Function) -> None:
        self._dtype, self._names = requested.dtype, requested.names
        self._draft, self._name, self._function = draft, name, function

    def apply(self) -> None:
        ends = {name: var for name, var in _list_ends(self._function).items()
                if not self._names or name in self._names}
        changing = [var for var in ends.values() if self._needs_change(var)]
        if not changing:
            if not self._names:
                self._done("", f"no input or output is an array of the other float type than {self._dtype}",
                           changed=False)
            return
        if self._dtype == "fp16" and not can_have_fp16_interface(self._function):
            raise InputError(f"{format_option_values('io', 'fp16')}: inputs and outputs in fp16 need iOS16; function "
                             f"'{self._name}' is for {describe_opset(self._function)}, the model for specification "
                             f"{get_specification_version(self._function)}; convert the source model for iOS16 or "
                             "later")
        for var in changing:
            self._change(var.name, var)

    def _change(self, name: str, var: Var) -> None:
        self._check_default(name)
        is_input = var.op is None
        kind: Literal["input", "output"] = "input" if is_input else "output"
        old, new = (types.nptype_from_builtin(each) for each in (var.dtype, FLOAT_TYPES[self._dtype]))
        note, exact = (retype_input if is_input else retype_output)(self._function, var, self._dtype)
        self._draft.change_interface(self._name, change_dtype(kind, name, old, new))
        self._done(name, f"{kind} '{name}' is {self._dtype}; {note}", exact=exact)

    def _needs_change(self, var: Var) -> bool:
        """Return whether an input or output is an array of the other float type.

        Floats whose type cannot change, and named arrays that already have the type, are recorded as unchanged. Raises
        InputError for a named one whose type cannot change.
        """
        name, found = var.name, get_dtype(var)
        if found == FLOAT_TYPES[self._dtype]:
            if self._names:
                self._done(name, f"'{name}' is {self._dtype} already", changed=False)
            return False
        reason = self._find_obstacle(var, found)
        if reason and name in self._names:
            raise InputError(f"{format_option_values('io', self._dtype, name)}: {reason}")
        if reason and found in FLOAT_TYPES.values():
            self._done(name, f"{reason}; it stays as it is", changed=False)
        return not reason

    def _find_obstacle(self, var: Var, dtype: object | None) -> str:
        """Return the reason why the type of an input or output cannot be changed; "" if it can."""
        feature = get_feature(self._function, var.name)
        if feature is None and self._draft.package is not None and var.name not in self._added:
            return f"the model's description has no '{var.name}'"
        if feature is not None and feature.type.HasField("imageType"):
            return find_retype_obstacle(self._function, var)
        if dtype is None or (feature is not None and not feature.type.HasField("multiArrayType")):
            return f"'{var.name}' is not an array"
        if dtype not in FLOAT_TYPES.values():
            return f"'{var.name}' is not an array of floats"
        return find_retype_obstacle(self._function, var)

    @property
    def _added(self) -> set[str | None]:
        return {change.new for change in self._draft.interfaces[self._name].changes if change.action == "added"}

    def _check_default(self, name: str) -> None:
        """Raise InputError if fp16 cannot represent the default value of an optional input."""
        feature = get_feature(self._function, name)
        if feature is None:
            return
        array = feature.type.multiArrayType
        value = next((getattr(array, field) for field in _DEFAULT_VALUE_FIELDS if array.HasField(field)), 0.0)
        if self._dtype == "fp16" and _FP16_MAX < abs(value) < float("inf"):
            raise InputError(
                f"{format_option_values('io', 'fp16')}: input '{name}' has the default value {value:g}, above the fp16 "
                f"maximum of {_FP16_MAX}; expected fp16 with the names of other inputs and outputs"
            )

    def _done(self, name: str, note: str, changed: bool = True, exact: bool | None = True) -> None:
        self._draft.done.append(EditRecord("--io", self._name, name, note, changed, exact))


def _list_ends(function: Function) -> dict[str, Var]:
    """Return inputs and outputs by name, without states."""
    return {name: var for name, var in get_interface_vars(function).items() if not types.is_state(var.sym_type)}
