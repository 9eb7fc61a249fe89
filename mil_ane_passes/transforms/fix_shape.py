"""`--fix-shape`: flexible inputs get one shape, and all consequences are inferred and written.

coremltools infers the types of all values anew. Ops that only compute shapes become consts under the same names, and
unneeded ops are removed. Several shapes make several functions of one, which share the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coremltools import proto
from coremltools.converters.mil.mil import Function as HostFunction

from ..package.weight_plan import WeightPlan
from ..utils.errors import suggest_nearest
from ..utils.option_spelling import format_option
from ..utils.text_format import format_count
from .contract import EditRecord
from .description import Description, Feature, Section
from .document import Document
from .fix_shape_folding import plan_folding
from .fix_shape_inference import get_sizes, infer_function, iterate_rejected_ops
from .fix_shape_inputs import check_shape, fix_feature_shape, fix_type_sizes, has_flexible_size
from .fix_shape_requests import Shape, Variant, format_shape, make_request_error, name_variants, parse_variants
from .fix_shape_writer import WriteResult, write_function
from .program_parts import Function, ValueDeclaration

__all__ = ["FixShape"]

_OPTION = "--fix-shape"
_MIN_VERSION_FUNCTIONS = 9
"The specification version (iOS 18) from which a model may have several functions."
_MAX_NAMES_LISTED = 3


class FixShape:
    """Fixes the shapes of inputs.

    `given` is in the format of `parse_variants`; `function` names a function of the source.
    """

    def __init__(self, given: Any, function: str | None = None) -> None:
        self._variants = parse_variants(given)
        self._function = function

    def apply(self, document: Document) -> list[Document]:
        """Make the edit (see `Edit.apply`).

        The functions made of one replace it; the first becomes the default if it was.
        """
        functions = self._chosen(document)
        several = len(self._variants) > 1 or self._variants[0].name is not None
        if several and len(functions) > 1:
            raise make_request_error(
                f"several functions have these inputs ({_format_names([f.name for f in functions])}); "
                f"expected {format_option('function')} to say which one to make others of"
            )
        for function in functions:
            if several and not (len(self._variants) == 1 and self._variants[0].name == function.name):
                self._make_several(document, function)
            else:
                self._fix_one(document, function)
        return [document]

    def _chosen(self, document: Document) -> list[Function]:
        """Return the functions that have all the named inputs."""
        functions = document.chosen(self._function)
        for name in dict.fromkeys(name for variant in self._variants for name in variant.shapes):
            known = {declared.name for function in functions for declared in function.inputs}
            functions = [each for each in functions if name in {declared.name for declared in each.inputs}]
            if not functions:
                beside = " beside the others" if name in known else ""
                raise make_request_error(
                    f"no input or state '{name}'{beside}; the model has {_format_names(sorted(known))}"
                    f"{suggest_nearest(name, known - {name})}"
                )
        return functions

    def _fix_one(self, document: Document, function: Function) -> None:
        shapes = _select_shapes_to_fix(document, function, self._variants[0])
        if not shapes:
            note = f"fixed already: {_format_shapes(self._variants[0].shapes)}"
            document.done.append(EditRecord(_OPTION, function.name, "", note, changed=False))
            return
        outputs = _fix_function(document, function, shapes)
        for section in document.description.of(function.name):
            _update_section(section, {**shapes, **outputs})

    def _make_several(self, document: Document, function: Function) -> None:
        _check_several_functions(document, function)
        names = name_variants(self._variants, function.name, document.functions.keys() - {function.name})
        made: dict[str, Function] = {}
        description = document.description
        section = _get_own_section(description, function.name)
        sections, was_default = [], description.default in ("", function.name)
        for variant, name in zip(self._variants, names, strict=True):
            twin = function.copy(function.name)
            shapes = _select_shapes_to_fix(document, function, variant)
            twin_section = section.copy(name)
            twin.name = name
            if shapes:
                _update_section(
                    twin_section, {**shapes, **_fix_function(document, twin, shapes, described_as=function.name)}
                )
            sections.append(twin_section)
            made[name] = twin
        place = description.functions.index(section)
        description.functions[place : place + 1] = sections
        if was_default:
            description.default = names[0]
        document.functions = {new: each for name, old in document.functions.items()
                              for new, each in (made.items() if name == function.name else [(name, old)])}


def _check_several_functions(document: Document, function: Function) -> None:
    """Raise InputError if the model cannot have several functions, or if this one cannot be one of them."""
    if document.version < _MIN_VERSION_FUNCTIONS:
        raise make_request_error(
            f"several functions, or one with a name of its own, need a model for iOS 18 or later "
            f"(specification version {_MIN_VERSION_FUNCTIONS}; this one has {document.version}); convert the source "
            f"model with "
            "minimum_deployment_target=ct.target.iOS18, or make a package for each shape"
        )
    if any(section.predicted for section in document.description.of(function.name)):
        raise make_request_error(f"'{function.name}' is a classifier, and coremltools makes none with several "
                                 "functions; make a package for each shape")


def _select_shapes_to_fix(document: Document, function: Function, variant: Variant) -> dict[str, Shape]:
    """Return the shapes of a variant that change something. Raises InputError for one that an input cannot have."""
    features = {feature.name: feature.message for section in document.description.of(function.name)
                for kind in ("input", "state") for feature in section.features(kind)}
    types = {declared.name: declared.message.type for declared in function.inputs}
    return {name: shape for name, shape in variant.shapes.items()
            if check_shape(name, shape, types[name], features.get(name))}


def _fix_function(
    document: Document, function: Function, shapes: dict[str, Shape], described_as: str = ""
) -> dict[str, Shape]:
    """Fix inputs of `function` and infer all other values.

    Returns the shapes of the outputs as far as they are fixed.
    """
    flexible = function.copy(described_as or function.name)
    function.inputs = [ValueDeclaration.of_type(each.name, fix_type_sizes(each.message.type, shapes[each.name]))
                       if each.name in shapes else each for each in function.inputs]
    twin = function.copy(described_as or function.name)
    host = infer_function(document, twin)
    contradicted = _check_inferred(document, flexible, host, shapes)
    if document.plan is None:
        document.plan = WeightPlan(document.files)
    written = write_function(function, host, plan_folding(host, document.version), document.version, document.plan)
    _record_changes(document, function, shapes, written, contradicted)
    sizes = {var.name: get_sizes(var.sym_type) for var in host.outputs}
    return {name: tuple(size for size in each if size is not None)
            for name, each in sizes.items() if each and None not in each}


def _check_inferred(document: Document, flexible: Function, host: HostFunction, shapes: dict[str, Shape]) -> list[str]:
    """Return the values whose declared types coremltools contradicts only since the shapes were fixed.

    Raises InputError where an op cannot have such inputs.
    """
    failed = {op.outputs[0].name: (op, why) for op, why in iterate_rejected_ops(host) if op.outputs}
    if not failed:
        return []
    for op, _ in iterate_rejected_ops(infer_function(document, flexible)):
        for var in op.outputs:
            failed.pop(var.name, None)
    for name, (op, why) in failed.items():
        if why:
            raise make_request_error(f"with {_format_shapes(shapes)} the op '{name}' ({op.op_type.split()[0]}) is "
                                     f"impossible: {why}; expected shapes that go together")
    return list(failed)


def _update_section(section: Section, shapes: dict[str, Shape]) -> None:
    for kind in ("input", "output", "state"):
        features = section.features(kind)
        made = [fix_feature_shape(feature.message, shapes) for feature in features]
        if any(new is not old.message for new, old in zip(made, features)):
            section.put(kind, [old if new is old.message else Feature.of(new) for new, old in zip(made, features)])


def _get_own_section(description: Description, function: str) -> Section:
    """Return the section of `function` alone; it is made of the model's section when the model has one function."""
    own = next((section for section in description.functions if section.name == function), None)
    if own is not None:
        return own
    made = proto.Model_pb2.FunctionDescription(name=function)
    section = Section(made.SerializeToString(), of_function=True)
    for kind in ("input", "output", "state"):
        section.put(kind, description.model.features(kind))
        description.model.put(kind, [])
    description.functions.append(section)
    return section


def _record_changes(
    document: Document, function: Function, shapes: dict[str, Shape], written: WriteResult, contradicted: Sequence[str]
) -> None:
    """Add the actions to the document's list."""
    def done(value: str, note: str, exact: bool | None = True, changed: bool = True) -> None:
        document.done.append(EditRecord(_OPTION, function.name, value, note, changed=changed, exact=exact))

    for name, shape in shapes.items():
        done(name, f"'{name}' fixed to {format_shape(shape)}")
    if written.consts:
        what = f"{_format_op_count(written.consts)} became constants"
        dropped = f"{_format_op_count(written.dropped)} went with them"
        done("", f"{what} and {dropped}; {written.sized} values got their sizes")
        if written.rounded:
            done("", f"{written.rounded} constants hold floats as coremltools computes them here; a device may round "
                 "them otherwise in the last bit", exact=False)
    else:
        done("", f"{written.sized} values got their sizes")
    open_inputs = [each.name for each in function.inputs if has_flexible_size(each.message.type)]
    if open_inputs:
        done("", f"still flexible: {_format_names(open_inputs)}, for which no shape was given", changed=False)
    if written.open:
        names = list(dict.fromkeys(written.open))
        done("", f"{len(names)} values keep a flexible shape, which depends on data, on a flexible input or on "
             f"an op that coremltools cannot follow: {_format_names(names)}", changed=False)
    if contradicted:
        done("", f"coremltools contradicts the file on {len(contradicted)} values, which keep their declared types: "
             f"{_format_names(contradicted)}", changed=False)


def _format_op_count(kinds: Sequence[str]) -> str:
    return f"{format_count(len(kinds), 'op')}"


def _format_names(names: Sequence[str]) -> str:
    return ", ".join(names[:_MAX_NAMES_LISTED]) + (
        f" and {len(names) - _MAX_NAMES_LISTED} more" if len(names) > _MAX_NAMES_LISTED else ""
    )


def _format_shapes(shapes: dict[str, Shape]) -> str:
    return ", ".join(f"{name} = {format_shape(shape)}" for name, shape in shapes.items())
