"""What the tests of edits share: packages to edit, and how to compare what comes out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np

import mil_ane_passes as ane
from tests.package.helpers import MODEL, host_program, proto_ops, tree


def feeds_for(path: Path, function: str | None = None, seed: int = 0, renamed: Mapping[str, str] = {}) -> dict[str, Any]:
    """Normal draws for each array input of a package, the same for the same seed; under new names where `renamed`."""
    package = ane.load(path)
    name = function or package.program.default_function_name
    rng = np.random.default_rng(seed)
    feeds = {}
    for feature in package.description(name).input:
        array = feature.type.multiArrayType
        shape = list(array.shape)
        drawn = rng.standard_normal(shape).astype(np.float32)
        feeds[renamed.get(feature.name, feature.name)] = drawn
    return feeds


def same_outputs(before: Path, after: Path, renamed: Mapping[str, str] = {}, function: str | None = None) -> None:
    """Asserts that both give the same bits, under the new names, on the reference runtime."""
    old = ane.run(before, feeds_for(before, function), function=function)
    given = {renamed.get(name, name): value for name, value in feeds_for(before, function).items()}
    new = ane.run(after, given, function=function)
    assert set(new) >= {renamed.get(name, name) for name in old} or set(new) <= set(old)
    for name, value in old.items():
        if renamed.get(name, name) in new:
            got = new[renamed.get(name, name)]
            assert got.dtype == value.dtype and got.tobytes() == value.tobytes(), name


def host_takes(path: Path) -> Any:
    """The package as coremltools loads it: the MLModel, and its own reader of the program."""
    host_program(path)
    return ct.models.MLModel(str(path), skip_model_load=True)


def changed_ops(before: Path, after: Path, function: str = "main") -> set[str]:
    """The ops, by their first output's name, whose bytes differ, are new or are gone."""
    old, new = proto_ops(before, function), proto_ops(after, function)
    return {name for name in {*old, *new} if old.get(name) != new.get(name)}


def changed_files(before: Path, after: Path) -> set[str]:
    """The files of a package that differ."""
    old, new = tree(before), tree(after)
    return {name for name in {*old, *new} if old.get(name) != new.get(name)}


ONLY_MODEL = {MODEL}
