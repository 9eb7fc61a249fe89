"""A model's descriptions of its functions' inputs, outputs and states, edited feature by feature."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from coremltools import proto

from ..package import wire
from .piece import NAME_FIELD, Named

__all__ = ["Description", "Feature", "Section"]

_MODEL_DESCRIPTION, _FUNCTION_DESCRIPTION = proto.Model_pb2.ModelDescription, proto.Model_pb2.FunctionDescription
_FEATURE_KINDS = ("input", "output", "state")
_PREDICTED_NAME_FIELDS = ("predictedFeatureName", "predictedProbabilitiesName")
_FUNCTIONS_FIELD, _DEFAULT_FUNCTION_FIELD = (
    _MODEL_DESCRIPTION.DESCRIPTOR.fields_by_name[name].number for name in ("functions", "defaultFunctionName")
)


class Feature(Named):
    """The description of one input, output or state."""

    __slots__ = ()
    KIND = proto.Model_pb2.FeatureDescription


class Section:
    """The description of one function, or of the entire model; each change is made to `data` at once."""

    def __init__(self, data: bytes, of_function: bool) -> None:
        self.data = data
        kind = _FUNCTION_DESCRIPTION if of_function else _MODEL_DESCRIPTION
        self._numbers = {name: field.number for name, field in kind.DESCRIPTOR.fields_by_name.items()}
        self.name = wire.get_entry_key(data) if of_function else ""

    def features(self, kind: str) -> list[Feature]:
        """Return the features of `kind` ("input", "output" or "state"), in order."""
        return [Feature(data) for data in wire.get_payloads(self.data, self._numbers[kind])]

    def put(self, kind: str, features: Sequence[Feature]) -> None:
        """Replace all features of `kind`."""
        self.data = wire.replace_fields(self.data, self._numbers[kind], [feature.data for feature in features])

    @property
    def predicted(self) -> tuple[str, ...]:
        """The names of a classifier's outputs: the label and the probabilities."""
        found = [wire.get_payloads(self.data, self._numbers[name]) for name in _PREDICTED_NAME_FIELDS]
        return tuple(names[-1].decode() for names in found if names and names[-1])

    def keep_predicted(self, names: Collection[str]) -> None:
        """Remove the names of predicted features that are not in `names`."""
        for field in _PREDICTED_NAME_FIELDS:
            number = self._numbers[field]
            kept = [name for name in wire.get_payloads(self.data, number) if name.decode() in names]
            self.data = wire.replace_fields(self.data, number, kept)

    def rename(self, names: Mapping[str, str]) -> None:
        """Rename features, also in the names of predicted features."""
        for kind in _FEATURE_KINDS:
            self.put(kind, [feature.named(names.get(feature.name, feature.name)) for feature in self.features(kind)])
        for field in _PREDICTED_NAME_FIELDS:
            old = [name.decode() for name in wire.get_payloads(self.data, self._numbers[field])]
            self.data = wire.replace_fields(
                self.data, self._numbers[field], [names.get(name, name).encode() for name in old]
            )

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
        """Return the sections that describe `function`: its own, and the model's where that describes this function."""
        own = [section for section in self.functions if section.name == function]
        whole = not own or (function == self.default and bool(self.model.features("output")))
        return own + ([self.model] if whole else [])

    def emit(self) -> bytes:
        """Return the description's bytes; the original ones when nothing was changed."""
        return wire.replace_fields(self.model.data, _FUNCTIONS_FIELD, [section.data for section in self.functions])
