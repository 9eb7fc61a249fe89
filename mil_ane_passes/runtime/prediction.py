"""`predictor`: an object with `MLModel.predict`'s and `make_state`'s signatures that works on any machine.

coremltools' own methods check and coerce the inputs, so invalid inputs raise the same messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import numpy as np
from coremltools.models.model import MLModel, MLState

from ..utils.budget import DEFAULT_MAX_STEPS, share_budget
from ..utils.errors import InputError
from ..utils.locking import synchronized
from ..utils.text_format import add_article
from .engine import Runtime
from .feeds import get_numpy_dtype, split_inputs
from .images import image_from_array, is_image
from .model_description import get_array_dtype
from .pipeline import PipelineRuntime

__all__ = ["PredictError", "Predictor", "predictor"]

Array = np.ndarray[Any, Any]


class PredictError(InputError, RuntimeError):
    """Invalid inputs that Core ML itself rejects, also with a RuntimeError."""


@synchronized
def predictor(
    mlmodel: MLModel | str | PathLike[str], *, function: str | None = None, precision: str = "float16",
    quirks: Sequence[str] = (), max_steps: int | None = DEFAULT_MAX_STEPS, max_seconds: float | None = None,
) -> Predictor:
    """Make an object that predicts on any machine as `mlmodel` would on a Mac, up to rounding.

    `mlmodel` is an `MLModel`, or the path of an .mlpackage or .mlmodel. An `MLModel` with several functions runs the
    function it was loaded with. A NeuralNetwork predicts as the ML Program into which `upgrade` converts it. `function`
    selects a function of the package at a path (default: its default function). `precision` "float16" rounds each value
    to its declared dtype; see `Runtime`. A prediction that exceeds `max_steps` loop steps or `max_seconds` raises
    LimitReached; None means no limit. Raises InputError if the model is neither an ML Program nor a NeuralNetwork,
    NotSupported if it has an op that the reference runtime does not support.
    """
    if isinstance(mlmodel, (str, PathLike)):
        if not Path(mlmodel).exists():
            raise InputError(f"no file or folder '{fspath(mlmodel)}'; expected the path of an .mlpackage")
        mlmodel = MLModel(fspath(mlmodel), skip_model_load=True, **({"function_name": function} if function else {}))
    if not isinstance(mlmodel, MLModel):
        raise InputError(f"found {add_article(type(mlmodel).__name__)}; expected an MLModel or the path of an "
                         ".mlpackage")
    return Predictor(mlmodel, precision, quirks, max_steps=max_steps, max_seconds=max_seconds)


class Predictor:
    """Predictions of one function of an `MLModel`, or of a pipeline."""

    @synchronized
    def __init__(
        self, mlmodel: MLModel, precision: str = "float16", quirks: Sequence[str] = (), *,
        max_steps: int | None = DEFAULT_MAX_STEPS, max_seconds: float | None = None,
    ) -> None:
        from ..neuralnetwork.loading import load_model

        self._limits = max_steps, max_seconds

        self._model = mlmodel
        package = load_model(mlmodel)
        if package.upgraded is not None:  # `upgrade` changes names that are not identifiers
            self._model = MLModel(str(package.path), skip_model_load=True)
        if package.is_pipeline:
            self._proxy = _FrameworkModel({}, package.spec.description, PipelineRuntime(
                package, precision=precision, quirks=quirks))
            return
        name = getattr(mlmodel, "function_name", None) or None
        if name is not None and name not in package.functions:
            name = None
        name = name or package.program.default_function_name
        states = split_inputs(package.program.functions[name])[1]
        self._proxy = _FrameworkModel(states, package.description(name), Runtime(
            package.program, function=name, precision=precision, quirks=quirks, description=package.description(name)))

    @synchronized
    def predict(self, data: dict[str, Any] | list[dict[str, Any]], state: MLState | None = None) -> Any:
        """Return the outputs by name for a dictionary of inputs, or a list of such dicts for a list of dictionaries.

        Inputs are lists, numpy arrays, torch tensors or PIL images, as for `MLModel.predict`, and are not changed.
        Raises TypeError and KeyError as `MLModel.predict` does, and PredictError (a RuntimeError) for shapes, sizes or
        states that Core ML rejects.
        """
        MLModel._check_predict_data(data)
        copied: Any = dict(data) if isinstance(data, dict) else [dict(each) for each in data]
        with share_budget(*self._limits):
            return MLModel._get_predictions(self._proxy, self._prepare_data, copied, state)

    def make_state(self) -> MLState:
        """Make new states, all zero, for `predict`; `read_state` and `write_state` behave as those of coremltools."""
        return self._proxy.make_new_state()

    def _prepare_data(self, data: dict[str, Any]) -> None:
        self._model._verify_input_dict(data)
        self._model._convert_tensor_to_numpy(data)
        self._model._update_float16_multiarray_input_to_float32(data)


class _FrameworkState:
    """Replaces the framework's state object that `MLState` wraps."""

    def __init__(self, states: Mapping[str, Any]) -> None:
        self.arrays: dict[str, Array] = {
            name: np.zeros(tuple(int(extent) for extent in var.shape), get_numpy_dtype(var))
            for name, var in states.items()}

    def read_state(self, name: str) -> Array:
        return self.arrays[self._check_name(name)].copy()

    def write_state(self, name: str, value: Any) -> None:
        held, array = self.arrays[self._check_name(name)], np.asarray(value)
        if array.shape != held.shape:
            raise PredictError(f"state '{name}': found shape {array.shape}, expected {held.shape}")
        self.arrays[name] = array.astype(held.dtype)

    def _check_name(self, name: str) -> str:
        if name not in self.arrays:
            raise PredictError(f"state '{name}': no such state (states: {', '.join(self.arrays) or 'none'})")
        return name


class _FrameworkModel:
    """Replaces the framework's model object that `MLModel` wraps."""

    def __init__(self, states: Mapping[str, Any], description: Any, runtime: Runtime | PipelineRuntime) -> None:
        self._runtime = runtime
        self._description = description
        self._states = states

    def make_new_state(self) -> MLState:
        held = _FrameworkState(self._states)
        state = MLState(held)
        if not hasattr(state, "read_state"):  # before coremltools 9.0
            state.read_state, state.write_state = held.read_state, held.write_state
        return state

    def predict(self, data: Mapping[str, Any], state: _FrameworkState | None = None) -> dict[str, Any]:
        if self._states and state is None:
            raise PredictError(f"the model has states ({', '.join(self._states)}); pass state=make_state() to predict")
        feeds = {feature.name: _coerce_feed(feature, data[feature.name])
                 for feature in self._description.input if feature.name in data}
        arrays = None if state is None else state.arrays
        try:
            self._runtime.check(feeds, arrays)
        except InputError as error:
            raise PredictError(str(error)) from error
        try:
            found = self._runtime(feeds, arrays)
        except InputError as error:  # the text starts with Core ML's message, which tests and callers search for
            raise PredictError(f"Unable to compute the prediction using ML Program. {error}") from error
        return {feature.name: _convert_result(feature, found[feature.name]) for feature in self._description.output}

    def batchPredict(self, data: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Predict each item of a list; the name is that of the framework's method."""
        return [self.predict(each) for each in data]


def _coerce_feed(feature: Any, value: Any) -> Any:
    """Convert any numbers to the described dtype, as MLMultiArray does."""
    if is_image(value) or not feature.type.HasField("multiArrayType"):
        return value
    dtype = get_array_dtype(feature.type.multiArrayType)
    try:
        array = np.asarray(value)
        if array.dtype.kind == "c":
            raise TypeError("found complex numbers")
        return array if dtype is None else array.astype(dtype)
    except (TypeError, ValueError) as error:
        required = "numbers" if dtype is None else np.dtype(dtype).name
        raise PredictError(f"feed '{feature.name}': {error}; expected an array of {required}") from error


def _convert_result(feature: Any, value: Any) -> Any:
    """Convert a result to what the framework returns: described dtype, rank 1 at least, images as PIL images."""
    if isinstance(value, Mapping) or not isinstance(value, np.ndarray):
        return value
    if feature.type.HasField("imageType"):
        return image_from_array(value, feature.type.imageType.colorSpace)
    dtype = get_array_dtype(feature.type.multiArrayType)
    with np.errstate(over="ignore"):  # numbers that fp16 cannot hold become infinities, as in Core ML
        return np.atleast_1d(value if dtype is None else value.astype(dtype))
