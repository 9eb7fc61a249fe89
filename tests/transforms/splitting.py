"""What the tests of cuts share: a package is cut, both parts run one after the other, and the whole is compared."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from coremltools import proto
from coremltools.converters.mil.mil import types

import mil_ane_passes as ane
from mil_ane_passes.transforms.split_at import FunctionGraph
from tests.package.helpers import proto_ops

from .helpers import host_takes


def values(path: Path, function: str = "main") -> list[str]:
    """All values a cut can be asked for at."""
    return FunctionGraph(ane.load(path).program.functions[function]).values()


def draws(path: Path, function: str | None = None, sizes: Mapping[str, Any] = {}, seed: int = 0) -> dict:
    """Numbers for each input of a package."""
    program = ane.load(path).program
    rng = np.random.default_rng(seed)
    feeds = {}
    for name, var in program.functions[function or program.default_function_name].inputs.items():
        if types.is_state(var.sym_type):
            continue
        shape = sizes.get(name) or tuple(int(size) for size in var.shape)
        kind = types.nptype_from_builtin(var.dtype)
        drawn = rng.integers(0, 3, shape) if types.is_int(var.dtype) else rng.standard_normal(shape)
        feeds[name] = drawn.astype(kind)
    return feeds


def takes(path: Path, function: str | None = None) -> list[str]:
    package = ane.load(path)
    return [each.name for each in package.description(function or package.program.default_function_name).input]


def gives(path: Path, function: str | None = None) -> list[str]:
    package = ane.load(path)
    return [each.name for each in package.description(function or package.program.default_function_name).output]


def chained(parts: Sequence[Path], feeds: dict[str, Any], function: str | None = None) -> dict[str, Any]:
    """The outputs of the parts, each given what the ones before it made, with no names changed."""
    known = dict(feeds)
    for part in parts:
        known |= ane.run(part, {name: known[name] for name in takes(part, function)}, function=function, state={})
    return known


def same(whole: dict[str, Any], made: dict[str, Any]) -> None:
    for name, value in whole.items():
        if isinstance(value, np.ndarray):
            assert made[name].dtype == value.dtype and made[name].shape == value.shape
            assert made[name].tobytes() == value.tobytes(), name
        else:
            assert str(made[name]) == str(value), name


def cut(path: Path, named: Sequence[str], folder: Path, **options: Any) -> tuple[Any, list[Path]]:
    report = ane.edit(path, folder / "out.mlpackage", split_at=named, **options)
    assert report.outputs == [str(folder / "out_1.mlpackage"), str(folder / "out_2.mlpackage")]
    return report, [Path(each) for each in report.outputs]


def check_parts(path: Path, parts: Sequence[Path], function: str = "main", host: bool = True) -> None:
    """Every output in one part, every op as it was, both loaded by coremltools, no weights beyond those in use."""
    outputs = [gives(part, function) for part in parts]
    crossing = set(outputs[0]) & set(takes(parts[1], function))
    assert set(gives(path, function)) == (set(outputs[0]) - crossing | set(outputs[0]) & set(gives(path, function))
                                          | set(outputs[1]))
    old = proto_ops(path, function)
    for part in parts:
        for name, data in proto_ops(part, function).items():
            carried = part == parts[1] and any(each.startswith(f"{name}_") for each in takes(part, function))
            if name in old and not carried:
                assert _without_offsets(data) == _without_offsets(old[name]), name
        if host:
            host_takes(part)


def _without_offsets(data: bytes) -> bytes:
    op = proto.MIL_pb2.Operation.FromString(data)
    bound = [binding.value for argument in op.inputs.values() for binding in argument.arguments
             if binding.HasField("value")]
    for value in [*op.attributes.values(), *bound]:
        if value.HasField("blobFileValue"):
            value.blobFileValue.offset = 0
    return op.SerializeToString(deterministic=True)


@contextmanager
def folder() -> Iterator[Path]:
    """A folder for one example of many, in memory where there is such a place: each package written waits for it."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as made:
        yield Path(made)
