"""Loading of models in every format: an ML Program as it is, a NeuralNetwork as the ML Program `upgrade` makes of it, a
Core ML delegate of an ExecuTorch program as its package.

Every command and function that takes a package opens it here.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

from coremltools import proto

from .. import package as packages
from ..package import Package
from ..package.executorch_blob import MODEL, unpack_folder
from ..package.executorch_program import Blob, ExecutorchProgram, find_address
from ..package.model import NOT_SAVED, NetworkFound
from ..package.write_errors import convert_write_errors
from ..utils.errors import InputError
from ..utils.locking import synchronized
from ..utils.upgraded_source import UpgradedSource
from .program import NETWORK_KINDS, PIPELINE_KINDS, iterate_messages
from .upgrade import DEFAULT_TARGET, TARGETS, UpgradedModel, read_network, upgrade_model

__all__ = ["is_network", "is_network_file", "load", "load_delegate", "load_model", "upgrade_to_package"]

_PRECISION = "fp16"
"That of `upgrade` where none is requested, so that other commands see the program that it writes."


@synchronized
def load(path: str | os.PathLike[str], precision: str = _PRECISION) -> Package:
    """Load the model at `path`: an ML Program package or a pipeline with one; its weights are mapped, not read.

    A NeuralNetwork or a pipeline of them (an .mlmodel, or an .mlpackage that holds one) is upgraded to an ML Program in
    memory, at `precision`, and the attribute `upgraded` of the package describes it. `model.pte/METHOD/N` is a Core ML
    delegate of an ExecuTorch program, `model.pte` its only one. Raises InputError if `path` is none of these, or if the
    model is inconsistent.
    """
    if (address := find_address(path)) is not None:
        program = ExecutorchProgram(address[0])
        return load_delegate(program, program.select_only(address[1]), os.fspath(path), address[1])
    if isinstance(path, (str, os.PathLike)) and is_network_file(path):
        return upgrade_to_package(*read_network(path), precision)
    try:
        return packages.load(path)
    except NetworkFound as found:
        if not is_network(found.spec):
            raise
        return upgrade_to_package(found.spec, os.fspath(path), precision)


class _UnpackedFolder:
    """A temporary folder, removed when the last package that was loaded from it is deleted, or Python ends."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="mil_ane_passes_"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


def load_delegate(program: ExecutorchProgram, blob: Blob, name: str, delegate: str | None = None) -> Package:
    """Load the package of a Core ML delegate, which is unpacked; `name` is what reports call it.

    The function that `delegate`, one of the blob's users, calls is the default one of the loaded program.
    """
    owner = _UnpackedFolder()
    path = owner.path / MODEL
    contents = blob.folder[MODEL]
    assert isinstance(contents, dict)
    try:
        with convert_write_errors(path):
            unpack_folder(contents, path)
        program.check_unchanged()
        package = packages.model.load(path, owner)
    except InputError as error:  # about a path that nobody has heard of
        program.check_unchanged()
        raise InputError(str(error).replace(os.fspath(path), name)) from error
    package.name, package.is_delegate = name, True
    function = blob.users.get(delegate, "") if delegate is not None else ""
    if function and function not in package.program.functions:
        raise InputError(f"{program.path}/{delegate}: calls the function '{function}', which its model does not have; "
                         f"expected {' or '.join(package.program.functions)}: export the program again")
    package.program.default_function_name = function or package.program.default_function_name
    return package


@synchronized
def load_model(mlmodel: Any, precision: str = _PRECISION) -> Package:
    """Return the package of a `ct.models.MLModel`, as `load` does. Raises InputError for the reasons `load` does."""
    if getattr(mlmodel, "package_path", None) is None and is_network(mlmodel.get_spec()):
        return upgrade_to_package(mlmodel.get_spec(), "the MLModel", precision)
    try:
        package = packages.package_of_mlmodel(mlmodel)
    except NetworkFound as found:
        if not is_network(found.spec):
            raise
        return upgrade_to_package(found.spec, "the MLModel", precision)
    if getattr(mlmodel, "is_temp_package", False):  # coremltools removes it at exit: its path is of no use
        package.name = NOT_SAVED
    return package


def is_network_file(path: str | os.PathLike[str]) -> bool:
    """Return whether `path` is an .mlmodel file, and not the model file inside a package."""
    found = Path(path)
    return (found.suffix == ".mlmodel" and found.is_file()
            and packages.destination.find_enclosing_package(found) is None)


def is_network(spec: Any) -> bool:
    """Return whether `spec` is the Model proto of a NeuralNetwork, or of a pipeline without an ML Program."""
    if not isinstance(spec, proto.Model_pb2.Model):
        return False
    kind = spec.WhichOneof("Type")
    if kind in PIPELINE_KINDS:
        pipeline = spec.pipeline if kind == "pipeline" else getattr(spec, kind).pipeline
        return bool(pipeline.models) and all(map(is_network, pipeline.models))
    return kind in NETWORK_KINDS


def upgrade_to_package(spec: Any, source: str, precision: str = _PRECISION) -> Package:
    """Upgrade the network `spec` with the settings that `upgrade` has by default, except for `precision`.

    Where its weights have a scale for each output channel, which the default target cannot store, the target is the
    first that can.
    """
    target = choose_target(spec)
    made: UpgradedModel = upgrade_model(spec, target, precision, where=source)
    package = made.package
    package.upgraded = UpgradedSource(source, spec.WhichOneof("Type"), sum(made.layers.values()), target, precision)
    return package


def choose_target(spec: Any) -> str:
    """Return the oldest deployment target from the default on that stores the weights of `spec` as they are."""
    return TARGETS[-1] if _has_scales_by_channel(spec) else DEFAULT_TARGET


def _has_scales_by_channel(spec: Any) -> bool:
    """Return whether a model has linear quantization with several scales or biases."""
    return any(len(each.scale) > 1 or len(each.bias) > 1 for each in iterate_messages(spec)
               if each.DESCRIPTOR.name == "LinearQuantizationParams")
