"""`ane.convert`: coremltools' own `convert`, with the patched torch frontend, our pipeline, and a check on request."""

from __future__ import annotations

import copy
import inspect
import logging
import sys
from typing import Any

import coremltools as ct
from coremltools import _deps

from ..equivalence.user_inputs import Feeds, Ranges, UserInputs
from ..passes.pipeline import NAMESPACE, pipeline
from ..utils.errors import InputError
from ..utils.locking import synchronized
from ..utils.text_format import escape_text
from .errors import NotConverted
from .export_guards import warn_about_guards
from .failures import locate_failures
from .model_sources import TORCH_FILE_SUFFIXES, check_captured
from .patching import patched
from .training_mode import reject_training_export, warn_about_training_trace

__all__ = ["convert", "is_from_torch"]

_log = logging.getLogger("mil_ane_passes")
_COREMLTOOLS_SIGNATURE = inspect.signature(ct.convert)
_PIPELINE_OPTIONS = ("preset", "target", "passes", "options", "max_growth", "strict")
"Options of ours that `convert` takes in a pipeline."
_WRITTEN_ARGUMENTS = ("inputs", "outputs", "states")
_LOWER_RANK_PASS = f"{NAMESPACE}::lower_rank"


@synchronized
def convert(
    *arguments: Any, check: bool = False, feeds: Feeds | None = None, ranges: Ranges | None = None, **named: Any
) -> Any:
    """Convert with `coremltools.convert`, the patched torch frontend and our pipeline; same arguments, same result.

    Models from other sources than torch are converted without the patches, and without importing torch. Our passes are
    added to `pass_pipeline`; a pipeline that contains some of them already, such as `ane.pipeline(preset="full")`, is
    used unchanged. A neural network, which our passes do not support, gets coremltools' own passes.

    With `check`, the result runs on the reference runtime and is compared with the torch model: on seeded inputs, at
    every enumerated shape and both ends of a range. Raises NotEqual, which names the first part of the module that
    differs and has the model as `mlmodel`, and InputError for a check of a model that is not from torch or is not an ML
    Program, or of a torch model that is random. Programs of torch.export need torch 2.5 or newer, and have to be
    exported in eval mode, else InputError; a norm of a model that was traced in training mode is logged as a warning.

    A torch model in bfloat16 is converted as one in float32, and so is one in float16 that cannot be converted as it
    is; both are logged as a warning.

    Seeded inputs are normal numbers, and for the frontend's program also larger and negative ones, and ties. They do
    not test code that only other values reach (a threshold, a class). `feeds` (a mapping from input name to array, or
    several) and `ranges` (input name to (low, high)) are checked in addition, as in `rewrite`. Values that fp16 cannot
    hold (a square of 300, an angle of thousands) and that change results in these runs are logged as a warning, and
    named in NotEqual.
    """
    inputs = _bind_arguments(*arguments, **named)
    samples = UserInputs.of(feeds, ranges)
    if samples and not check:
        raise InputError("convert: feeds and ranges apply to the check only; pass check=True with them")
    source = inputs.arguments.get("source", "auto")
    from_torch = is_from_torch(inputs.arguments["model"], source)
    if from_torch or source.lower() == "auto":
        check_captured(inputs.arguments["model"])
    if from_torch:
        _check_export_supported(inputs.arguments["model"])
        reject_training_export(inputs.arguments["model"], check)
        warn_about_guards(inputs.arguments["model"])
        if not check:  # which rejects such a trace
            warn_about_training_trace(inputs.arguments["model"])
    if check:
        from .conversion_check import validate_check_arguments

        validate_check_arguments(inputs.arguments, from_torch, _is_neural_network(inputs.arguments))
    if not _is_neural_network(inputs.arguments):
        inputs.arguments["pass_pipeline"] = _add_lower_rank_pass(_add_ane_passes(inputs.arguments.get("pass_pipeline")))
    if not from_torch:
        inputs = _copy_arguments(inputs)
        return ct.convert(*inputs.args, **inputs.kwargs)
    try:
        return _convert_torch_model(inputs, check, samples)
    except NotConverted as error:
        from .patches.bfloat16 import widen_float16  # which imports torch

        model = widen_float16(inputs.arguments["model"])
        if model is inputs.arguments["model"]:
            raise
        _log.warning("the model computes in float16, in which it cannot be converted (%s); it is converted as one that "
                     "computes in float32", escape_text(str(error)))
        inputs.arguments["model"] = model
        return _convert_torch_model(inputs, check, samples)


def _convert_torch_model(given: inspect.BoundArguments, check: bool, samples: UserInputs) -> Any:
    """Convert with the patched frontend, and check the result if requested."""
    inputs = _copy_arguments(given)
    with patched(), locate_failures(inputs.arguments.get("minimum_deployment_target")):
        if check:
            from .conversion_check import convert_and_check

            made = convert_and_check(inputs, samples)
        else:
            made = ct.convert(*inputs.args, **inputs.kwargs)
    program = getattr(made, "_mil_program", None)
    if program is not None and not all(function.outputs for function in program.functions.values()):
        raise InputError("the model returns no tensor, and Core ML loads no model without outputs; expected one or "
                         "more (is a return statement missing in its forward?)")
    return made


def _copy_arguments(given: inspect.BoundArguments) -> inspect.BoundArguments:
    """Copy the arguments; inputs, outputs and states deeply, as coremltools writes dtypes and names into them."""
    copied = copy.copy(given)
    copied.arguments = {name: copy.deepcopy(value) if name in _WRITTEN_ARGUMENTS and isinstance(value, (list, tuple))
                        else value for name, value in given.arguments.items()}
    return copied


def _bind_arguments(*arguments: Any, **named: Any) -> inspect.BoundArguments:
    """Bind the arguments of `coremltools.convert`. Raises TypeError for others, with where options of ours belong."""
    try:
        return _COREMLTOOLS_SIGNATURE.bind(*arguments, **named)
    except TypeError as error:
        ours = [f"{name}=..." for name in _PIPELINE_OPTIONS if name in named]
        advice = f"; expected pass_pipeline=ane.pipeline({', '.join(ours)})" if ours else ""
        raise TypeError(f"convert() {error}{advice}") from None


def is_from_torch(model: Any, source: str = "auto") -> bool:
    """Return whether coremltools will treat `model` as a PyTorch model; does not import torch."""
    if source.lower() != "auto":
        return source.lower() == "pytorch"
    if isinstance(model, str):
        return model.endswith(TORCH_FILE_SUFFIXES)
    return any(kind.__module__.partition(".")[0] in ("torch", "executorch") for kind in type(model).__mro__)


def _check_export_supported(model: Any) -> None:
    """Raise InputError for an exported program with torch before 2.5.

    coremltools accepts exported programs from torch 2.5 on. Before, it asks for a `source`, which would not help.
    """
    if _deps._HAS_TORCH_EXPORT_API or not any(kind.__name__ == "ExportedProgram" for kind in type(model).__mro__):
        return
    found = getattr(sys.modules.get("torch"), "__version__", "of an unknown version")
    raise InputError(f"convert: found a program of torch.export with torch {found}; coremltools supports those from "
                     f"torch 2.5 on: update torch, or use torch.jit.trace")


def _add_ane_passes(base: Any) -> ct.PassPipeline:
    if not (base is None or isinstance(base, ct.PassPipeline)):
        raise InputError(f"pass_pipeline: found {base!r}; expected a ct.PassPipeline, such as "
                         "mil_ane_passes.pipeline(preset='full')")
    ours = base is not None and any(name.startswith(f"{NAMESPACE}::") for name in base.passes)
    return base if ours else pipeline(base)


def _add_lower_rank_pass(pipeline: ct.PassPipeline) -> ct.PassPipeline:
    """Return a copy of `pipeline` in which `lower_rank` runs before all our other passes, at any preset and precision.

    Core ML loads no program with a tensor of rank 6, so a guard must not undo this pass.
    """
    result = copy.deepcopy(pipeline)
    first = next((place for place, name in enumerate(result.passes) if name.startswith(f"{NAMESPACE}::")),
                 len(result.passes))
    result.insert_pass(first, _LOWER_RANK_PASS)
    inputs = {option.option_name: option.option_val for option in result.get_all_options().pop(_LOWER_RANK_PASS, ())}
    result.set_options(_LOWER_RANK_PASS, {"any_extent": "True", **inputs})
    return result


def _is_neural_network(given: dict[str, Any]) -> bool:
    """Return whether coremltools will make the older neural network format."""
    target, required = given.get("minimum_deployment_target"), given.get("convert_to")
    return required == "neuralnetwork" or (
        required is None and isinstance(target, ct.target) and target < ct.target.iOS15)


def _build_signature() -> inspect.Signature:
    own = [parameter for parameter in inspect.signature(convert).parameters.values()
           if parameter.kind is inspect.Parameter.KEYWORD_ONLY]
    return _COREMLTOOLS_SIGNATURE.replace(parameters=[*_COREMLTOOLS_SIGNATURE.parameters.values(), *own])


vars(convert)["__signature__"] = _build_signature()
