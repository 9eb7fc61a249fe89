"""Renaming of inputs, outputs, states and intermediate values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from coremltools.converters.mil.mil import Function, types

from ..ir.query import iterate_nested_ops
from ..package.interface import rename_features
from ..package.members import get_model_kind
from ..package.names import rename_var
from ..passes.interface_change import InterfaceChange
from ..utils.errors import InputError
from ..utils.option_spelling import format_option, format_option_values
from .contract import Draft, EditRecord, Transform
from .names import check_identifier, collect_names, make_unknown_name_error

__all__ = ["Rename"]

_OPTION = "--rename"


@dataclass(frozen=True)
class Rename(Transform):
    """Renames values in each function that has them, or only in `function`; all at once, so that names can be swapped.

    A name refers to all values of this name in a function, because values in nested blocks may have the same name.
    """

    names: Mapping[str, str]
    function: str | None = None
    in_pipelines: ClassVar[bool] = True

    def apply(self, draft: Draft) -> list[Draft]:
        """Rename in place. Raises InputError for a name that is unknown, in use, or not accepted by Core ML."""
        for old, new in self.names.items():
            check_identifier(new, _format_option(old, new))
        functions = draft.select_functions(self.function)
        present = {name: collect_names(function) for name, function in functions.items()}
        for old, new in self.names.items():
            if not any(old in names for names in present.values()):
                known: set[str] = set().union(*present.values())
                raise make_unknown_name_error(old, _format_option(old, new), known, gone=draft.gone,
                                              functions=functions.values())
        if draft.is_pipeline:
            _check_pipeline(draft, self.names, self.function)
        for name, function in functions.items():
            names = {old: new for old, new in self.names.items() if old in present[name] and old != new}
            _check_free(names, name, present[name])
            kinds = _classify_interface(function)
            draft.done += _record_renames(name, kinds, {old: new for old, new in self.names.items()
                                                        if old in present[name]})
            draft.change_interface(name, *(InterfaceChange(kind, old, new, "renamed")
                                           for old, new in names.items() for kind in kinds.get(old, ())))
            rename_values(function, names)
            draft.rounded[name] = {names.get(key, key): each for key, each in draft.rounded.get(name, {}).items()}
        return [draft]


def rename_values(function: Function, names: Mapping[str, str]) -> None:
    """Rename values of a function (old to new), all at once; inputs, outputs and states keep their descriptions."""
    if not names:
        return
    for var in function.inputs.values():
        var.name = names.get(var.name, var.name)
    for op in iterate_nested_ops(function):
        for var in (*op.outputs, *(var for block in op.blocks for var in block.inputs)):
            if var.name in names and not getattr(op, "synthetic", False):
                rename_var(op, var, names[var.name])
    for inputs in ("_input_dict", "placeholder_inputs"):
        held = getattr(function, inputs)
        setattr(function, inputs, type(held)((names.get(name, name), each) for name, each in held.items()))
    for name, placeholder in function.placeholder_inputs.items():
        placeholder.name = name
    rename_features(function, names)


def _format_option(old: str, new: str) -> str:
    return format_option_values("rename", f"{old}={new}")


def _check_free(names: Mapping[str, str], function: str, present: set[str]) -> None:
    taken = present - names.keys()
    for old, new in names.items():
        if new in taken:
            raise InputError(f"{_format_option(old, new)}: function '{function}' has a value '{new}' already; "
                             "expected a name that is free, or that is renamed too")
        taken.add(new)


def _record_renames(function: str, kinds: Mapping[str, list[Any]], names: Mapping[str, str]) -> Iterator[EditRecord]:
    for old, new in names.items():
        if old == new:
            yield EditRecord(_OPTION, function, old, f"'{old}' has this name already", changed=False)
        else:
            yield EditRecord(_OPTION, function, new, f"{' and '.join(kinds.get(old, ['value']))} '{old}' is "
                             f"called '{new}'")


def _classify_interface(function: Function) -> dict[str, list[Any]]:
    """Return the kinds ("input", "output" or "state") of each interface value; an input may be an output, too."""
    found: dict[str, list[Any]] = {name: ["state" if types.is_state(var.sym_type) else "input"]
                                   for name, var in function.inputs.items()}
    for name in dict.fromkeys(var.name for var in function.outputs):
        found.setdefault(name, []).append("output")
    return found


def _check_pipeline(draft: Draft, names: Mapping[str, str], function: str | None) -> None:
    """Raise InputError for a rename that would break the connections between parts, before anything is renamed."""
    assert draft.package is not None
    spec = draft.package.spec
    ours = {each.path for each in draft.package.members.programs}
    inside, outside = set(), _collect_interface_names(spec.description)
    for path, name, part in _iterate_models(spec):
        if path in ours:
            inside |= _collect_interface_names(part.description)
            continue
        for old in names.keys() & _collect_interface_names(part.description):
            raise InputError(f"{_format_option(old, names[old])}: part '{name}' of the pipeline has the input or "
                             f"output '{old}', but is not an ML Program, so it cannot be renamed there")
        outside |= _collect_interface_names(part.description)
    for old, new in names.items():
        if function is not None and old in inside | outside:
            raise InputError(f"{_format_option(old, new)}: '{old}' is passed between parts of the pipeline; remove "
                             f"{format_option('function')}, so that all of them get the new name")
        if new in (inside | outside) - names.keys():
            raise InputError(f"{_format_option(old, new)}: the pipeline has a feature '{new}' already; expected a name "
                             "that is free, or that is renamed too")


def _collect_interface_names(description: Any) -> set[str]:
    """Return the names of the inputs and outputs of a model and of its functions."""
    found = {each.name for each in (*description.input, *description.output)}
    return found.union(*(_collect_interface_names(each) for each in getattr(description, "functions", ())))


def _iterate_models(
    spec: Any, path: tuple[int, ...] = (), name: str = ""
) -> Iterator[tuple[tuple[int, ...], str, Any]]:
    """Yield path, name and message of all models in a pipeline, and of those in nested pipelines."""
    kind = get_model_kind(spec)
    if not kind.startswith("pipeline"):
        return
    inner = spec.pipeline if kind == "pipeline" else getattr(spec, kind).pipeline
    for place, model in enumerate(inner.models):
        called = inner.names[place] if place < len(inner.names) else str(place)
        yield (*path, place), f"{name}{called}", model
        yield from _iterate_models(model, (*path, place), f"{name}{called}/")
