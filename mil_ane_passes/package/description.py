"""A model's descriptions of its functions' inputs, outputs and states, edited feature by feature."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coremltools import proto

from . import wire

__all__ = ["DESCRIPTION_FIELD", "FEATURE_KINDS", "Description", "Feature", "Section"]

DESCRIPTION_FIELD = proto.Model_pb2.Model.DESCRIPTOR.fields_by_name["description"].number

_MODEL_DESCRIPTION, _FUNCTION_DESCRIPTION = proto.Model_pb2.ModelDescription, proto.Model_pb2.FunctionDescription
NAME_FIELD = 1
FEATURE_KINDS = ("input", "output", "state")
_PREDICTED_NAME_FIELDS = ("predictedFeatureName", "predictedProbabilitiesName")
_FUNCTIONS_FIELD, _DEFAULT_FUNCTION_FIELD = (
    _MODEL_DESCRIPTION.DESCRIPTOR.fields_by_name[name].number for name in ("functions", "defaultFunctionName")
)


class Feature:
    """The description of one input, output or state: its bytes, and the protobuf message they encode."""

    __slots__ = ("_message", "data")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self._message: Any = None

    @classmethod
    def of(cls, message: Any) -> Feature:
        """Make a description of a FeatureDescription message."""
        return cls(message.SerializeToString(deterministic=True))

    @property
    def message(self) -> Any:
        """The message; do not change it (copy it for `of`)."""
        if self._message is None:
            self._message = proto.Model_pb2.FeatureDescription.FromString(self.data)
        return self._message

    @property
    def name(self) -> str:
        return str(self.message.name)

    def with_name(self, name: str) -> Feature:
        """Return the description under another name, the rest byte for byte."""
        return self if name == self.name else Feature(wire.replace_fields(self.data, NAME_FIELD, [name.encode()]))


class Section:
    """The description of one function, or of the entire model; each edit updates the bytes in `data` immediately."""

    def __init__(self, data: bytes, of_function: bool) -> None:
        self.data = data
        kind = _FUNCTION_DESCRIPTION if of_function else _MODEL_DESCRIPTION
        self._numbers = {name: field.number for name, field in kind.DESCRIPTOR.fields_by_name.items()}
        self.name = wire.get_entry_key(data) if of_function else ""

    def get_features(self, kind: str) -> list[Feature]:
        """Return the features of `kind` ("input", "output" or "state"), in order."""
        return [Feature(data) for data in wire.get_payloads(self.data, self._numbers[kind])]

    def set_features(self, kind: str, features: Sequence[Feature]) -> None:
        """Replace all features of `kind`."""
        self.data = wire.replace_fields(self.data, self._numbers[kind], [feature.data for feature in features])

    def rename_predicted(self, names: Mapping[str, str | None]) -> None:
        """Rename predicted features; None removes one, and names that are not in `names` stay."""
        for field in _PREDICTED_NAME_FIELDS:
            old = [name.decode() for name in wire.get_payloads(self.data, self._numbers[field])]
            new = [names.get(name, name) for name in old]
            self.data = wire.replace_fields(
                self.data, self._numbers[field], [name.encode() for name in new if name is not None]
            )

    def rename(self, names: Mapping[str, str]) -> None:
        """Rename features, also in the names of predicted features."""
        for kind in FEATURE_KINDS:
            features = self.get_features(kind)
            self.set_features(kind, [feature.with_name(names.get(feature.name, feature.name)) for feature in features])
        self.rename_predicted(names)

    def copy(self, name: str) -> Section:
        """Return a copy of a function's section under another name."""
        return Section(wire.replace_fields(self.data, NAME_FIELD, [name.encode()]), of_function=True)


class Description:
    """The description of a model: `model` for all of it, and `functions`, a list to edit (empty in older models)."""

    def __init__(self, data: bytes) -> None:
        self.model = Section(data, of_function=False)
        self.functions = [Section(each, of_function=True) for each in wire.get_payloads(data, _FUNCTIONS_FIELD)]

    @property
    def default(self) -> str:
        """The name of the default function, empty if the model does not name one."""
        names = wire.get_payloads(self.model.data, _DEFAULT_FUNCTION_FIELD)
        return names[-1].decode() if names else ""

    @default.setter
    def default(self, name: str) -> None:
        self.model.data = wire.replace_fields(self.model.data, _DEFAULT_FUNCTION_FIELD, [name.encode()])

    def of(self, function: str) -> list[Section]:
        """Return the sections that describe `function`: its own, and the model's if it describes this function."""
        own = [section for section in self.functions if section.name == function]
        whole = not own or (function == self.default and bool(self.model.get_features("output")))
        return own + ([self.model] if whole else [])

    def make_own_section(self, function: str) -> Section:
        """Return the section that describes only `function`; if the model has no sections of functions, make it from
        the model's."""
        own = next((section for section in self.functions if section.name == function), None)
        if own is not None:
            return own
        section = Section(wire.encode_field(NAME_FIELD, function.encode()), of_function=True)
        for kind in FEATURE_KINDS:
            section.set_features(kind, self.model.get_features(kind))
            self.model.set_features(kind, [])
        self.functions.append(section)
        return section

    def emit(self) -> bytes:
        """Return the description's bytes; the original ones when nothing was changed."""
        return wire.replace_fields(self.model.data, _FUNCTIONS_FIELD, [section.data for section in self.functions])
