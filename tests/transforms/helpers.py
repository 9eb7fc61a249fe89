"""What the tests of edits share: how to compare what goes in with what comes out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
from coremltools import proto

import mil_ane_passes as ane
from tests.package.helpers import MODEL, host_program, main_block, proto_ops, spec_of, tree

ONLY_MODEL = {MODEL}
_TYPES = {proto.MIL_pb2.FLOAT16: np.float16, proto.MIL_pb2.FLOAT32: np.float32, proto.MIL_pb2.INT32: np.int32}


def feeds_of(path: Path, function: str | None = None, dtype: Any = None) -> dict[str, np.ndarray]:
    """Normal draws, the same each time, for the inputs of a package; rounded to `dtype` and back where it is given."""
    program = ane.load(path).program
    name = function or program.default_function_name
    rng, feeds = np.random.default_rng(0), {}
    for declared in spec_of(path).mlProgram.functions[name].inputs:
        if declared.type.HasField("stateType"):
            continue
        tensor = declared.type.tensorType
        shape = [each.constant.size if each.HasField("constant") else 2 for each in tensor.dimensions]
        drawn = (4 * rng.standard_normal(shape)).astype(_TYPES[tensor.dataType])
        feeds[declared.name] = drawn if dtype is None else drawn.astype(dtype).astype(drawn.dtype)
    return feeds


def run(path: Path, feeds: Mapping[str, Any], function: str | None = None) -> dict[str, Any]:
    """The outputs with every value rounded to its type, as far as they are arrays, and the states that are left."""
    state: dict[str, Any] = {}
    found = ane.run(path, feeds, function=function, precision="float16", state=state)
    return {**found, **{f"state {name}": value for name, value in state.items()}}


def same(value: Any, other: Any) -> bool:
    """Whether two results are one: arrays to the bit, what a classifier gives by value."""
    if isinstance(value, np.ndarray) and isinstance(other, np.ndarray):
        return value.dtype == other.dtype and value.shape == other.shape and value.tobytes() == other.tobytes()
    return bool(value == other)


def same_outputs(
    before: Path, after: Path, renamed: Mapping[str, str] | None = None, function: str | None = None
) -> dict[str, Any]:
    """Asserts that each output and state of `before` that `after` has under its new name is the same to the bit.

    Returns what `after` gave, by its own names.
    """
    names = dict(renamed or {})
    names |= {f"state {old}": f"state {new}" for old, new in names.items()}
    feeds = feeds_of(before, function)
    old = run(before, feeds, function)
    new = run(after, {names.get(name, name): value for name, value in feeds.items()}, function)
    shared = {name: names.get(name, name) for name in old if names.get(name, name) in new}
    assert shared, f"{sorted(old)} have nothing in common with {sorted(new)}"
    assert all(same(old[name], new[other]) for name, other in shared.items()), shared
    return new


def host_takes(path: Path) -> Any:
    """Loads the package as coremltools does, its program too; returns the MLModel's spec."""
    host_program(path)
    return ct.models.MLModel(str(path), skip_model_load=True).get_spec()


def changed_ops(before: Path, after: Path, function: str = "main") -> set[str]:
    """The ops, by their first output's name, whose bytes differ, are new or are gone."""
    old, new = proto_ops(before, function), proto_ops(after, function)
    return {name for name in {*old, *new} if old.get(name) != new.get(name)}


def changed_files(before: Path, after: Path) -> set[str]:
    """The files of a package that differ."""
    old, new = tree(before), tree(after)
    return {name for name in {*old, *new} if old.get(name) != new.get(name)}


def ops_of(path: Path, function: str = "main") -> list[str]:
    """The types of the ops at the top of a function, but for consts, in order."""
    return [op.type for op in main_block(spec_of(path), function).operations if op.type != "const"]


def described(path: Path) -> tuple[list[str], list[str]]:
    """The names of inputs and outputs as the model describes them."""
    ends = spec_of(path).description
    return [each.name for each in ends.input], [each.name for each in ends.output]
