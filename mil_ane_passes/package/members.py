"""The ML Programs of a model file: the model itself, or the parts of a pipeline, including nested pipelines."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from coremltools import proto

from . import wire

__all__ = ["Member", "Members", "find_members", "get_model_kind", "iterate_parts", "replace_members"]

_MODEL_DESCRIPTOR = proto.Model_pb2.Model.DESCRIPTOR
ML_PROGRAM_FIELD = _MODEL_DESCRIPTOR.fields_by_name["mlProgram"].number
_MODELS_FIELD = proto.Model_pb2.Pipeline.DESCRIPTOR.fields_by_name["models"].number
# A pipeline, or a message that holds one in its field `pipeline`.
_PIPELINE_FIELDS = {name: _MODEL_DESCRIPTOR.fields_by_name[name].number
                    for name in ("pipeline", "pipelineClassifier", "pipelineRegressor")}
_INNER_PIPELINE_FIELD = 1

_PipelinePath = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Member:
    """One ML Program of a model file.

    `path` holds its indices in the pipelines around it; it is empty for a model that is not a pipeline. `prefix`
    precedes the names of its functions to make them unique in the file: empty, or such as `encoder/`. `raw` and `spec`
    are its own model message. `around` are the descriptions of the pipelines around it, the outermost first.
    """

    path: _PipelinePath
    prefix: str
    raw: bytes
    spec: Any
    around: tuple[Any, ...] = ()


@dataclass
class Members:
    """All ML Programs of a model file in file order, and the names, kinds and messages of a pipeline's other parts."""

    programs: list[Member] = field(default_factory=list)
    others: dict[str, str] = field(default_factory=dict)
    specs_of_others: dict[str, Any] = field(default_factory=dict)


def get_model_kind(spec: Any) -> str:
    """Return the kind of a model as the model format names it: `mlProgram`, `pipeline`, `neuralNetwork`, ..."""
    return str(spec.WhichOneof("Type") or "nothing")


def find_members(raw: bytes, spec: Any) -> Members:
    """Find the ML Programs of the model file `raw`, whose message is `spec`."""
    found = Members()
    for name, member in _iterate_models(raw, spec, (), "", ()):
        kind = get_model_kind(member.spec)
        if kind == "mlProgram":
            found.programs.append(member)
        else:
            found.others[name], found.specs_of_others[name] = kind, member.spec
    return found


def _iterate_models(
    raw: bytes, spec: Any, path: _PipelinePath, name: str, around: tuple[Any, ...]
) -> Iterator[tuple[str, Member]]:
    """Yield every model in `raw` that is not a pipeline, with its name."""
    kind = get_model_kind(spec)
    if kind not in _PIPELINE_FIELDS:
        yield name, Member(path, f"{name}/" if path else "", raw, spec, around)
        return
    data, inner = _get_only_payload(raw, _PIPELINE_FIELDS[kind]), getattr(spec, kind)
    if kind != "pipeline":
        data, inner = _get_only_payload(data, _INNER_PIPELINE_FIELD), inner.pipeline
    names = _name_parts(inner)
    for place, (part, part_data) in enumerate(zip(inner.models, wire.get_payloads(data, _MODELS_FIELD), strict=True)):
        below = f"{name}/{names[place]}" if path else names[place]
        yield from _iterate_models(part_data, part, (*path, place), below, (*around, spec.description))


def iterate_parts(spec: Any) -> Iterator[tuple[str, Any]]:
    """Yield the models of a pipeline, not those of pipelines in it, with their names; nothing for other models."""
    kind = get_model_kind(spec)
    if kind in _PIPELINE_FIELDS:
        inner = getattr(spec, kind) if kind == "pipeline" else getattr(spec, kind).pipeline
        yield from zip(_name_parts(inner), inner.models)


def replace_members(raw: bytes, spec: Any, new: Mapping[_PipelinePath, bytes]) -> bytes:
    """Return the model file `raw`, whose message is `spec`, with the models at the paths in `new` replaced by its
    bytes."""
    if () in new:
        return new[()]
    kind = get_model_kind(spec)
    inner = getattr(spec, kind) if kind == "pipeline" else getattr(spec, kind).pipeline
    places = itertools.count()

    def in_pipeline(f: wire.Field, payload: bytes) -> bytes | None:
        if f.number != _MODELS_FIELD:
            return None
        place = next(places)
        below = {path[1:]: data for path, data in new.items() if path[0] == place}
        return replace_members(payload, inner.models[place], below) if below else None

    def in_kind(f: wire.Field, payload: bytes) -> bytes | None:
        return wire.edit_payloads(payload, in_pipeline) if f.number == _INNER_PIPELINE_FIELD else None

    change = in_pipeline if kind == "pipeline" else in_kind
    return wire.edit_payloads(
        raw, lambda f, payload: wire.edit_payloads(payload, change) if f.number == _PIPELINE_FIELDS[kind] else None
    )


def _name_parts(pipeline: Any) -> list[str]:
    """Return a unique name for each part: the one the pipeline gives, else its number."""
    given = [str(name) for name in pipeline.names]
    names: list[str] = []
    for place in range(len(pipeline.models)):
        name = given[place] if place < len(given) and given[place] else f"part{place}"
        names.append(f"{name}_{place}" if name in names or given.count(name) > 1 else name)
    return names


def _get_only_payload(data: bytes, number: int) -> bytes:
    """Return the payload of the only field `number`; ValueError if there are several, which a parser would merge."""
    found = wire.get_payloads(data, number)
    if len(found) != 1:
        raise ValueError(f"found {len(found)} fields {number}; expected one pipeline")
    return found[0]
