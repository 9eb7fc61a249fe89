"""The ML Programs of a model file: the model itself, or the parts of a pipeline, also of pipelines in pipelines."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from coremltools import proto

from . import wire

__all__ = ["Member", "Members", "find_members", "kind_of", "with_members"]

_MODEL = proto.Model_pb2.Model.DESCRIPTOR
ML_PROGRAM = _MODEL.fields_by_name["mlProgram"].number
_MODELS = proto.Model_pb2.Pipeline.DESCRIPTOR.fields_by_name["models"].number
# A pipeline, or a message that holds one in its field `pipeline`.
_PIPELINES = {name: _MODEL.fields_by_name[name].number
              for name in ("pipeline", "pipelineClassifier", "pipelineRegressor")}
_INNER = 1

_Path = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Member:
    """One ML Program of a model file.

    `path` are its places in the pipelines around it, none for a model that is no pipeline. `prefix` stands before the
    names of its functions, so that no two of a file are one: empty, or such as `encoder/`. `raw` and `spec` are its own
    model message.
    """

    path: _Path
    prefix: str
    raw: bytes
    spec: Any


@dataclass
class Members:
    """All ML Programs of a model file in its order, and the names and kinds of a pipeline's parts that are none."""

    programs: list[Member] = field(default_factory=list)
    others: dict[str, str] = field(default_factory=dict)


def kind_of(spec: Any) -> str:
    """What a model is, as the model format calls it: `mlProgram`, `pipeline`, `neuralNetwork`, ..."""
    return str(spec.WhichOneof("Type") or "nothing")


def find_members(raw: bytes, spec: Any) -> Members:
    """The ML Programs of the model file `raw`, of which `spec` is the message."""
    found = Members()
    for path, name, data, part in _models(raw, spec, (), ""):
        kind = kind_of(part)
        if kind == "mlProgram":
            found.programs.append(Member(path, f"{name}/" if path else "", data, part))
        else:
            found.others[name] = kind
    return found


def _models(raw: bytes, spec: Any, path: _Path, name: str) -> Iterator[tuple[_Path, str, bytes, Any]]:
    """Place, name, bytes and message of every model in `raw` that is no pipeline."""
    kind = kind_of(spec)
    if kind not in _PIPELINES:
        yield path, name, raw, spec
        return
    data, inner = _one(raw, _PIPELINES[kind]), getattr(spec, kind)
    if kind != "pipeline":
        data, inner = _one(data, _INNER), inner.pipeline
    names = _part_names(inner)
    for place, (part, part_data) in enumerate(zip(inner.models, wire.payloads(data, _MODELS), strict=True)):
        below = f"{name}/{names[place]}" if path else names[place]
        yield from _models(part_data, part, (*path, place), below)


def with_members(raw: bytes, spec: Any, new: Mapping[_Path, bytes]) -> bytes:
    """The model file `raw`, of which `spec` is the message, with other bytes for the models at the places of `new`."""
    if () in new:
        return new[()]
    kind = kind_of(spec)
    inner = getattr(spec, kind) if kind == "pipeline" else getattr(spec, kind).pipeline
    places = itertools.count()

    def in_pipeline(f: wire.Field, payload: bytes) -> bytes | None:
        if f.number != _MODELS:
            return None
        place = next(places)
        below = {path[1:]: data for path, data in new.items() if path[0] == place}
        return with_members(payload, inner.models[place], below) if below else None

    def in_kind(f: wire.Field, payload: bytes) -> bytes | None:
        return wire.edit(payload, in_pipeline) if f.number == _INNER else None

    change = in_pipeline if kind == "pipeline" else in_kind
    return wire.edit(raw, lambda f, payload: wire.edit(payload, change) if f.number == _PIPELINES[kind] else None)


def _part_names(pipeline: Any) -> list[str]:
    """A name for each part, no two alike: the one the pipeline gives, else its number."""
    given = [str(name) for name in pipeline.names]
    names: list[str] = []
    for place in range(len(pipeline.models)):
        name = given[place] if place < len(given) and given[place] else f"part{place}"
        names.append(f"{name}_{place}" if name in names or given.count(name) > 1 else name)
    return names


def _one(data: bytes, number: int) -> bytes:
    """The payload of the only field `number`; ValueError where there are several, which one message would merge."""
    found = wire.payloads(data, number)
    if len(found) != 1:
        raise ValueError(f"{len(found)} fields {number} where one pipeline is expected")
    return found[0]
