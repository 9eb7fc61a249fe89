"""Change of the float type of inputs and outputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..utils.errors import InputError
from ..utils.option_spelling import format_option_values
from .casts import ARRAY_DTYPES, DTYPES, get_dtype
from .contract import EditRecord
from .description import Feature, Section
from .document import Document
from .expose import can_have_fp16_interface
from .interface_casts import InterfaceCasts
from .names import make_unknown_name_error
from .program_parts import Function

__all__ = ["Io"]

_FLOAT_NAMES = {DTYPES["fp16"]: "fp16", DTYPES["fp32"]: "fp32"}
_FP16_MAX = 65504
_DEFAULT_VALUE_FIELDS = ("floatDefaultValue", "doubleDefaultValue")


@dataclass(frozen=True)
class Io:
    """Changes inputs and outputs to `dtype` ("fp16" or "fp32"): those in `names`, or all that are arrays of floats."""

    dtype: str
    names: Sequence[str] = ()
    function: str | None = None

    def apply(self, document: Document) -> list[Document]:
        """Change them in place. InputError for an unknown input or output, and for one whose type must stay."""
        if self.dtype not in _FLOAT_NAMES.values():
            raise InputError(
                f"{format_option_values('io')}: {self.dtype!r} is no type that it makes; expected fp16 or fp32"
            )
        functions = document.chosen(self.function)
        present = {name for function in functions for name in _iterate_interface_names(function)}
        for name in self.names:
            if name not in present:
                raise make_unknown_name_error(
                    name, format_option_values("io", self.dtype, name), present, "input or output", document.gone
                )
        for function in functions:
            _FunctionChange(self, document, function).apply()
        return [document]


class _FunctionChange:
    """The change of float types in one function."""

    def __init__(self, asked: Io, document: Document, function: Function) -> None:
        self._dtype, self._names = asked.dtype, asked.names
        self._document, self._function = document, function
        self._sections = document.description.of(function.name)
        self._features = {each.name: each for section in self._sections for each in _list_features(section)}

    def apply(self) -> None:
        ends = list(
            dict.fromkeys(
                name for name in _iterate_interface_names(self._function) if not self._names or name in self._names
            )
        )
        changing = [name for name in ends if self._needs_change(name)]
        if not changing:
            if not self._names:
                self._done("", f"no input or output is an array of the other float type than {self._dtype}",
                           changed=False)
            return
        if self._dtype == "fp16" and not can_have_fp16_interface(self._document, self._function):
            raise InputError(f"{format_option_values('io', 'fp16')}: inputs and outputs in fp16 need iOS16; function "
                             f"'{self._function.name}' is for {self._function.opset}, the model for specification "
                             f"{self._document.version}; convert the source model for iOS16 or later")
        border = InterfaceCasts(self._function, self._dtype)
        for name in changing:
            self._check_default(name)
            is_input = name in {each.name for each in self._function.inputs}
            note, exact = border.change_input(name) if is_input else border.change_output(name)
            self._describe(name)
            self._done(name, f"{'input' if is_input else 'output'} '{name}' is {self._dtype}; {note}", exact=exact)
        self._document.repack = self._document.repack or border.removed

    def _needs_change(self, name: str) -> bool:
        """Return whether an input or output is an array of the other float type.

        Named ones that have the type already, and floats whose type cannot change, are recorded as unchanged; a named
        one whose type cannot change raises InputError.
        """
        found = get_dtype(self._function.get_type(name))
        if found is not None and _FLOAT_NAMES.get(found) == self._dtype:
            if self._names:
                self._done(name, f"'{name}' is {self._dtype} already", changed=False)
            return False
        reason = self._reason(name, found)
        if reason and name in self._names:
            raise InputError(f"{format_option_values('io', self._dtype, name)}: {reason}")
        if reason and found in _FLOAT_NAMES:
            self._done(name, f"{reason}; it stays as it is", changed=False)
        return not reason

    def _reason(self, name: str, dtype: int | None) -> str:
        """Return why the type of an input or output cannot be changed, empty when it can."""
        feature = self._features.get(name)
        if feature is None:
            return f"the model's description has no '{name}'"
        if feature.message.type.HasField("imageType"):
            return f"'{name}' is an image, which has the type that the description gives"
        if dtype is None or not feature.message.type.HasField("multiArrayType"):
            return f"'{name}' is no array"
        if dtype not in _FLOAT_NAMES:
            return f"'{name}' holds no floats"
        if name in {each.name for each in self._function.inputs} and name in self._function.block.outputs:
            return f"input '{name}' is returned as it is and has to keep its type"
        return ""

    def _check_default(self, name: str) -> None:
        """Raise InputError when fp16 cannot hold the default value of an optional input."""
        array = self._features[name].message.type.multiArrayType
        value = next((getattr(array, field) for field in _DEFAULT_VALUE_FIELDS if array.HasField(field)), 0.0)
        if self._dtype == "fp16" and _FP16_MAX < abs(value) < float("inf"):
            raise InputError(
                f"{format_option_values('io', 'fp16')}: input '{name}' is {value:g} where nobody gives it, fp16 ends "
                f"at "
                f"{_FP16_MAX}; expected fp16 with the names of others"
            )

    def _describe(self, name: str) -> None:
        for section in self._sections:
            for kind in ("input", "output"):
                features = section.features(kind)
                section.put(kind, [self._typed(each) if each.name == name else each for each in features])

    def _typed(self, feature: Feature) -> Feature:
        made = type(feature.message)()
        made.CopyFrom(feature.message)
        made.type.multiArrayType.dataType = ARRAY_DTYPES[DTYPES[self._dtype]]
        return Feature.of(made)

    def _done(self, name: str, note: str, changed: bool = True, exact: bool | None = True) -> None:
        self._document.done.append(EditRecord("--io", self._function.name, name, note, changed, exact))


def _iterate_interface_names(function: Function) -> Iterable[str]:
    """Yield the names of inputs and outputs; states are neither."""
    yield from (each.name for each in function.inputs if not each.message.type.HasField("stateType"))
    yield from function.block.outputs


def _list_features(section: Section) -> list[Feature]:
    return [*section.features("input"), *section.features("output")]
