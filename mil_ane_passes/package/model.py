"""The loaded package: its program as pymil, its mapped weights, and the source it was loaded from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from coremltools import proto
from coremltools.converters.mil.mil import Program
from google.protobuf.message import DecodeError

from ..utils.errors import InputError
from ..utils.garbage_collection import pause_garbage_collection
from ..utils.locking import synchronized
from ..utils.text_format import add_article
from ..utils.upgraded_source import UpgradedSource
from .blobs import WeightFiles
from .debug_handles import attach_debug_handles
from .files import get_file_stamp
from .manifest import Layout, advise_upgrade, read_layout
from .members import Members, find_members, get_model_kind
from .model_emitter import emit_model
from .program_reader import FunctionOrigin, ProgramReader
from .weight_plan import WeightPlan


class NetworkFound(InputError):
    """The model of a package, `spec`, is a NeuralNetwork or a pipeline of other models, not an ML Program."""

    def __init__(self, text: str, spec: Any) -> None:
        super().__init__(text)
        self.spec = spec


NOT_SAVED = "a model in memory"
"The name in reports of a model that is at no path."


class Package:
    """An .mlpackage: its program as pymil, weights mapped, and all that is needed to save it again.

    `path` is the source folder, `spec` the parsed model file (never changed), `program` the program to edit,
    `functions` the names of its functions in file order. The ML Programs of a pipeline are one program, whose functions
    are called `PART/FUNCTION`; `members` holds their paths and the names of parts that are not ML Programs.
    `program.chain` names the function of each part that runs; it is empty for a model that is not a pipeline.
    `upgraded` describes the NeuralNetwork from which the package was made in memory; None for a package on disk. `name`
    is the name of the model in reports, if that is not its path: `NOT_SAVED` for a model in memory. `is_delegate` is
    true for the package of a delegate in an ExecuTorch program: the program declares its inputs and outputs, too.
    """

    upgraded: UpgradedSource | None = None
    name: str | None = None
    is_delegate: bool = False

    @synchronized
    def __init__(self, layout: Layout, raw: bytes, stamp: tuple[int, int, int], owner: object = None) -> None:
        self.path = layout.root
        self.layout = layout
        self.raw = raw
        self.spec: Any = parse_model(raw, layout.root)
        self.members = require_ml_programs(raw, self.spec, layout)
        self.files = WeightFiles(layout)
        # The owner of a temporary package removes it when it is deleted, so it is kept alive here.
        self._owner = owner
        self.files.stamps[layout.model] = stamp
        reader = ProgramReader(self.files, str(layout.root))
        self.program: Program
        self.origins: dict[str, FunctionOrigin]
        try:
            with pause_garbage_collection():
                self.program, self.origins = reader.read_program(self.members.programs)
        except (ValueError, UnicodeDecodeError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{self.path}: {layout.model} is damaged ({error}); use a fresh copy") from error
        attach_debug_handles(layout.root, self.program)
        self.functions = tuple(self.origins)
        self.check_source()  # the source may have changed between opening the model file and the weights

    def description(self, function: str) -> Any:
        """Return the ModelDescription or FunctionDescription proto for the inputs and outputs of `function`."""
        origin = self.origins.get(function)
        described = (self if origin is None else origin.member).spec.description
        name = function if origin is None else origin.name
        return next((found for found in described.functions if found.name == name), described)

    @property
    def is_pipeline(self) -> bool:
        """True if the model is a pipeline; its functions are then called `PART/FUNCTION`."""
        return bool(self.members.programs[0].path)

    @property
    def weight_bytes(self) -> int:
        """The total size in bytes of the weight files the program refers to."""
        return sum(file.size for file in self.files.files.values())

    @synchronized
    def emit(self, *, interface: bool = False) -> tuple[bytes, WeightPlan]:
        """Return the model file for the program as it is now, and the plan for its weights.

        With `interface`, functions, inputs, outputs and states may differ from the loaded ones.
        """
        plan = WeightPlan(self.files)
        model = emit_model(self.raw, self.spec, self.program, self.origins, plan, interface)
        return model, plan

    @synchronized
    def is_unchanged(self) -> bool:
        """Return whether saving would write the same model file: the program is still as it was loaded."""
        try:
            model, _ = self.emit()
        except InputError:
            # The interface or the set of functions changed; `save` reports that.
            return False
        return model == self.raw

    def check_source(self) -> None:
        """Raise InputError if the source's files differ from the loaded ones."""
        self.files.check_unchanged()


@synchronized
def load(path: str | os.PathLike[str], owner: object = None) -> Package:
    """Load the package at `path`, an ML Program or a pipeline that contains one; its weights are mapped, not read.

    `owner` removes the files when it is deleted, so the package keeps it alive. Raises InputError if `path` is not an
    ML Program package, or the package is inconsistent.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise InputError(f"cannot load {add_article(type(path).__name__)}; expected the path of an .mlpackage (lint, "
                         "rewrite and verify take an MLModel as well)")
    layout = read_layout(path)
    return Package(layout, *read_model(layout), owner)


@synchronized
def package_of_mlmodel(mlmodel: Any) -> Package:
    """Return the package of a `ct.models.MLModel`, with the changes made to its spec since it was created.

    Raises InputError if the model has no package, and for the same reasons as `load`.
    """
    path = getattr(mlmodel, "package_path", None)
    if path is None:
        raise InputError(
            "the MLModel has no package on disk; expected an MLModel of an ML Program: convert the source model with "
            'coremltools (convert_to="mlprogram"), or save it as .mlpackage and load that'
        )
    layout = read_layout(path)
    raw, stamp = read_model(layout)
    spec = mlmodel.get_spec()
    changed = spec != parse_model(raw, layout.root)
    return Package(layout, spec.SerializeToString(deterministic=True) if changed else raw, stamp, mlmodel)


def read_model(layout: Layout) -> tuple[bytes, tuple[int, int, int]]:
    """Return the bytes of the model file and its stamp when it was opened. Raises InputError if it cannot be read."""
    try:
        with open(layout.model, "rb") as file:
            stamp = get_file_stamp(os.fstat(file.fileno()))
            return file.read(), stamp
    except OSError as error:
        raise InputError(f"{layout.root}: {layout.model} cannot be read ({error.strerror})") from error


def parse_model(raw: bytes, root: Path) -> Any:
    """Return the Model proto of a model file. Raises InputError when it is not a Core ML model."""
    try:
        spec = proto.Model_pb2.Model.FromString(raw)
    except DecodeError as error:
        raise InputError(
            f"{root}: the model file is not a Core ML model ({error}); use a fresh copy, saved by coremltools"
        ) from error
    return spec


def require_ml_programs(raw: bytes, spec: Any, layout: Layout) -> Members:
    """Return the ML Programs of the model. Raises InputError if it has none."""
    root = layout.root
    try:
        found = find_members(raw, spec)
    except (ValueError, UnicodeDecodeError) as error:
        raise InputError(f"{root}: {layout.model} is damaged ({error}); use a fresh copy") from error
    if found.programs:
        return found
    kind = get_model_kind(spec)
    if kind.startswith("neuralNetwork"):
        raise NetworkFound(
            f"{root}: the model is a NeuralNetwork ({kind}); expected an ML Program: {advise_upgrade(root)}", spec)
    if kind.startswith("pipeline"):
        parts = ", ".join(f"{name} is {add_article(part)}" for name, part in found.others.items()) or "it has no parts"
        raise NetworkFound(
            f"{root}: the model is a pipeline ({kind}) without an ML Program: {parts}; expected one with at least one "
            "ML Program (mlProgram)", spec)
    raise InputError(
        f"{root}: the model is of type {kind}; expected an ML Program (mlProgram), or a pipeline with one"
    )
