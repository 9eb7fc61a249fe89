"""Comparison of two pipelines beyond their ML Programs: how parts are connected, and parts of other kinds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..utils.errors import InputError
from ..utils.text_format import add_article
from .members import Members, get_model_kind, iterate_parts

__all__ = ["check_connections", "find_differing_parts"]


def check_connections(before: Any, after: Any) -> None:
    """Raise InputError where two pipelines (specs) of the same parts connect these differently."""
    old, new = _find_connections(before), _find_connections(after)
    for end in (*old, *new):
        sources = [found.get(end, "not there") for found in (old, new)]
        if sources[0] != sources[1]:
            raise InputError(f"the two pipelines connect their parts differently: {end} is {sources[0]} in the first "
                             f"and {sources[1]} in the second; expected the same connections")


def find_differing_parts(before: Members, after: Members) -> str:
    """Describe a part that is not an ML Program and differs between two pipelines; "" if there is none.

    Raises InputError for one that only one of them has.
    """
    models: list[Mapping[str, Any]] = [before.specs_of_others, after.specs_of_others]
    for name, kind in (before.others | after.others).items():
        if not all(name in each for each in models):
            which = "first" if name in models[0] else "second"
            raise InputError(f"part '{name}', {add_article(kind)}, is in the {which} only; expected the same parts "
                             "in both")
        if models[0][name] != models[1][name]:
            return (f"part '{name}', {add_article(kind)}, differs between the pipelines, and only ML Programs are "
                    "compared")
    return ""


def _find_connections(spec: Any) -> dict[str, str]:
    """Find what each input of a part of the pipeline `spec`, and each of its outputs, reads: of which part's output, or
    which input of the pipeline."""
    found: dict[str, str] = {}
    known = {each.name: f"input '{each.name}' of the pipeline" for each in spec.description.input}
    outputs = _connect(spec, "", known, found)
    return found | {f"output '{name}' of the pipeline": source for name, source in outputs.items()}


def _connect(spec: Any, name: str, known: Mapping[str, str], found: dict[str, str]) -> dict[str, str]:
    """Add the connections of the inputs of a model, and of its parts, to `found`; return the sources of its outputs.

    `known` holds the sources of the values that the model can read, by name.
    """
    described = _get_default_description(spec.description)
    sources = {each.name: known[each.name] for each in described.input if each.name in known}
    if not get_model_kind(spec).startswith("pipeline"):
        found.update({f"input '{read}' of part '{name}'": source for read, source in sources.items()})
        return {each.name: f"output '{each.name}' of part '{name}'" for each in described.output}
    for called, part in iterate_parts(spec):
        sources |= _connect(part, f"{name}/{called}" if name else called, sources, found)
    return {each.name: sources.get(each.name, "nothing") for each in described.output}


def _get_default_description(description: Any) -> Any:
    """Return what a model declares of the function that runs by default."""
    default = description.defaultFunctionName
    return next((each for each in description.functions if each.name == default), description)
