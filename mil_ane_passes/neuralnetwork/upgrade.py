"""Upgrade of a NeuralNetwork model to an ML Program."""

from __future__ import annotations

import io
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
from coremltools import proto
from coremltools.converters.mil.mil import Builder
from google.protobuf.message import DecodeError

from ..ir.scopes import copy_scopes, fill_layer_scopes
from ..ir.type_inference import limit_evaluation
from ..package import Package, package_of_mlmodel
from ..package.executorch_program import refuse_program
from ..package.files import get_file_stamp
from ..package.limits import MAX_MODEL_BYTES
from ..package.manifest import read_layout
from ..passes.coremltools_setup import silence_coremltools
from ..utils.errors import AnePassesError, InputError
from ..utils.locking import synchronized_property
from ..utils.text_format import add_article
from .interface import Feature
from .layer_converter import BUILDER_ERRORS, format_cause
from .precision import WholeNumbers
from .program import ConvertedNetwork, convert_network, list_stages, make_scores_name

__all__ = ["DEFAULT_TARGET", "TARGETS", "UpgradedModel", "read_network", "upgrade_model"]

TARGETS = ("iOS15", "iOS16", "iOS17", "iOS18")
DEFAULT_TARGET = "iOS16"
"The first that stores compressed weights in ML Programs."

_PRECISIONS = ("fp16", "fp32")
_LEFT_OUT = {"common::add_int16_cast"}
"A pass of coremltools that casts indices to int16 where it cannot know that they fit, such as before a squeeze."
_FILE_ERRORS = ("filesystem error", "MIL FileWriter")
"Words of errors that coremltools' libraries raise where files cannot be written, such as on a full disk."


@dataclass(frozen=True)
class UpgradedModel:
    """The ML Program of a network.

    `model` is a `ct.models.MLModel` that is not loaded, `layers` the number of layers of each kind, and `renamed` the
    names of inputs and outputs that ML Programs do not accept, with the identifiers that replace them. `expanded` lists
    quantized vectors (biases) that were decompressed, by layer, with their sizes.
    """

    source: str
    model: Any
    layers: dict[str, int]
    renamed: dict[str, str]
    expanded: dict[str, int]

    @synchronized_property
    def package(self) -> Package:
        """The model as a package, to edit, verify and save."""
        package = package_of_mlmodel(self.model)
        copy_scopes(self.model._mil_program, package.program)
        fill_layer_scopes(package.program)
        return package


def upgrade_model(
    src: Any, deployment_target: str = DEFAULT_TARGET, precision: str = "fp16", *, where: str | None = None
) -> UpgradedModel:
    """Convert a NeuralNetwork, or a pipeline of networks, to an ML Program of the same interface.

    `src` is the path of an .mlmodel, or of an .mlpackage that holds one, a `ct.models.MLModel` or a Model proto.
    `precision` ("fp16" or "fp32") is that of the ops; arrays of the interface stay fp32 and int32, and doubles, which
    ML Programs do not have, become fp32. `where` names a spec in errors.

    Raises InputError for a model that is not a network, and for layers that have no equivalent in an ML Program.
    """
    if deployment_target not in TARGETS:
        raise InputError(f"deployment target '{deployment_target}'; expected {', '.join(TARGETS)}")
    if precision not in _PRECISIONS:
        raise InputError(f"precision '{precision}'; expected fp16 or fp32")
    opset = ct.target[deployment_target]
    Builder.name_count.clear()  # as coremltools does before each conversion: names do not depend on earlier ones
    with silence_coremltools(), limit_evaluation():
        network, where = _convert_layers(src, opset, where)
        model = _convert_program(network, opset, precision, where)
    renamed = {name: new for name, new in network.names.items() if name != new}
    return UpgradedModel(where, model, network.layers, renamed, network.expanded)


def _convert_layers(src: Any, opset: Any, where: str | None) -> tuple[ConvertedNetwork, str]:
    """Convert the network of `src`; the proto of a file is released on return, before its weights are written."""
    spec, found = read_network(src)
    where = where or found
    try:
        return convert_network(spec, opset, where), where
    except AnePassesError:
        raise
    except BUILDER_ERRORS as error:
        raise InputError(f"{where}: coremltools rejects the network ({format_cause(error)}); expected inputs and "
                         "outputs that fit its layers") from error


def read_network(src: Any) -> tuple[Any, str]:
    """Return the Model proto of a network or of a pipeline of networks, and its name in errors.

    Raises InputError where `src` is neither.
    """
    if isinstance(src, proto.Model_pb2.Model):
        spec, where = src, "the model"
    elif hasattr(src, "get_spec"):
        spec, where = src.get_spec(), "the MLModel"
    elif isinstance(src, (str, os.PathLike)):
        spec, where = _read_file(Path(src)), str(src)
    else:
        raise InputError(
            f"cannot upgrade {add_article(type(src).__name__)}; expected the path of an .mlmodel, an MLModel or "
            "its spec"
        )
    list_stages(spec, where)
    return spec, where


def _read_file(path: Path) -> Any:
    refuse_program(path)
    file = read_layout(path).model if path.is_dir() else path
    try:
        before = file.stat()
        if not stat.S_ISREG(before.st_mode) or before.st_size > MAX_MODEL_BYTES:
            size = before.st_size
            raise InputError(f"{path}: {'no file' if size <= MAX_MODEL_BYTES else f'{size} bytes'}; "
                             f"expected an .mlmodel file of at most {MAX_MODEL_BYTES} bytes")
        raw = file.read_bytes()
        if get_file_stamp(file.stat()) != get_file_stamp(before):
            raise InputError(f"{path}: was modified while it was read; run again when no other process writes to it")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{path}: cannot be read ({reason}); expected the path of an .mlmodel") from error
    try:
        return proto.Model_pb2.Model.FromString(raw)
    except DecodeError as error:
        raise InputError(
            f"{path}: the file is not a Core ML model, or it is damaged ({error}); use a fresh copy"
        ) from error


def _convert_program(network: ConvertedNetwork, opset: Any, precision: str, where: str) -> Any:
    """Convert the program to a model with coremltools' pipeline, and give it the network's interface and metadata."""
    config = _make_classifier_config(network, where)
    options = {"classifier_config": config} if config else {}
    compute_precision: Any = ct.precision.FLOAT32
    if precision == "fp16":
        compute_precision = ct.transform.FP16ComputePrecision(op_selector=WholeNumbers())
    pipeline = ct.PassPipeline.DEFAULT
    pipeline.remove_passes(_LEFT_OUT)
    with _make_temporary_package(where) as package:
        try:
            with redirect_stderr(io.StringIO()):  # three progress bars
                made = ct.convert(
                    network.program, convert_to="mlprogram", minimum_deployment_target=opset, skip_model_load=True,
                    compute_precision=compute_precision, pass_pipeline=pipeline, package_dir=str(package), **options)
        except BUILDER_ERRORS as error:
            if any(words in str(error) for words in _FILE_ERRORS):
                raise _make_temporary_error(where, format_cause(error)) from error
            raise InputError(f"{where}: coremltools cannot save the program ({format_cause(error)}); expected a "
                             "network whose values Core ML supports") from error
        result = made.get_spec()
        if config:
            _rename_probabilities(result, made._mil_program, network)
        _copy_description(result, network)
        read_layout(package).model.write_bytes(result.SerializeToString())
        return ct.models.MLModel(str(package), is_temp_package=True, skip_model_load=True,
                                 mil_program=made._mil_program)


@contextmanager
def _make_temporary_package(where: str) -> Iterator[Path]:
    """Make a folder for the package of a conversion, which is removed if the conversion fails.

    Raises InputError if the folder for temporary files cannot be written.
    """
    path = None
    try:
        path = tempfile.mkdtemp(suffix=".mlpackage")
        yield Path(path)
    except BaseException as error:
        if path is not None:
            shutil.rmtree(path, ignore_errors=True)
        if isinstance(error, OSError):
            raise _make_temporary_error(where, error.strerror or str(error)) from error
        raise


def _make_temporary_error(where: str, reason: str) -> InputError:
    return InputError(f"{where}: the converted program cannot be written to the folder for temporary files, "
                      f"{tempfile.gettempdir()} ({reason}); free some space there, or set TMPDIR to another folder")


def _make_classifier_config(network: ConvertedNetwork, where: str) -> Any:
    if network.labels is None:
        return None
    _check_label_count(network.labels, network, where)
    return ct.ClassifierConfig(
        class_labels=network.labels, predicted_feature_name=_get_label_name(network),
        predicted_probabilities_output=make_scores_name(network.names) if _find_probabilities(network) else None)


def _get_label_name(network: ConvertedNetwork) -> str:
    """Return the name of the label; that of a pipeline of the general type is only among its outputs."""
    name = network.description.predictedFeatureName or next(
        (each.name for each in network.outputs if each.is_label), "classLabel")
    return network.names.get(name, name)


def _find_probabilities(network: ConvertedNetwork) -> Feature | None:
    """Return the output with a classifier's probabilities; None where it declares none."""
    return next((each for each in network.outputs if each.is_dictionary), None)


def _rename_probabilities(result: Any, program: Any, network: ConvertedNetwork) -> None:
    """Give the probabilities of a classifier, which coremltools names after the label, their name in the network."""
    feature, old = _find_probabilities(network), f"{_get_label_name(network)}_probs"
    if feature is None:
        return
    new = network.names[feature.name]
    for each in result.description.output:
        each.name = new if each.name == old else each.name
    result.description.predictedProbabilitiesName = new
    for block in result.mlProgram.functions["main"].block_specializations.values():
        for var in (var for op in block.operations if op.type == "classify" for var in op.outputs):
            var.name = new if var.name == old else var.name
        block.outputs[:] = [new if name == old else name for name in block.outputs]
    for var in program.functions["main"].outputs:
        var.name = new if var.name == old else var.name


def _check_label_count(labels: list[Any], network: ConvertedNetwork, where: str) -> None:
    """Raise InputError where a classifier's labels are not as many as the elements of its probabilities."""
    scores = make_scores_name(network.names)
    for var in network.program.functions["main"].outputs:
        extent = var.shape[0] if var.name == scores and var.rank == 1 else len(labels)
        if not labels or isinstance(extent, (int, np.integer)) and extent != len(labels):
            raise InputError(f"{where}: the classifier has {len(labels)} class labels for {extent} probabilities; "
                             f"expected one label per probability: use a fresh copy of the model")


def _copy_description(result: Any, network: ConvertedNetwork) -> None:
    """Copy descriptions, flexible shapes, images, defaults and metadata of the interface."""
    described = result.description
    described.metadata.MergeFrom(network.description.metadata)
    for features, listed in ((described.input, network.inputs), (described.output, network.outputs)):
        by_name = {each.name: each for each in features}
        for feature in listed:
            made = by_name.get(network.names.get(feature.name, feature.name))
            if made is None:
                continue
            made.shortDescription = feature.proto.shortDescription
            _copy_type(feature, made)
    if network.description.predictedProbabilitiesName and network.labels is not None:
        name = network.names.get(network.description.predictedProbabilitiesName)
        if name:
            described.predictedProbabilitiesName = name


def _copy_type(feature: Feature, made: Any) -> None:
    made.type.isOptional = feature.proto.type.isOptional
    if feature.image is not None:
        made.type.imageType.CopyFrom(feature.proto.type.imageType)
        return
    stored = feature.proto.type.multiArrayType
    array = made.type.multiArrayType
    if None in feature.shape:
        array.ClearField("shape")
        array.shape.extend(stored.shape)
        kind = stored.WhichOneof("ShapeFlexibility")
        getattr(array, kind).CopyFrom(getattr(stored, kind))
    default = stored.WhichOneof("defaultOptionalValue")
    if default is not None:
        number = getattr(stored, default)
        if feature.is_int:
            array.intDefaultValue = int(number)
        else:
            array.floatDefaultValue = float(number)
    elif feature.proto.type.isOptional:
        array.floatDefaultValue = 0.0


