"""Failures of a conversion, with the op, the module and the source line at which they happen.

coremltools raises whatever error its lowering of an op caused: a KeyError of a table, an AttributeError of None. The
patch `located_failures` names the op where one was being converted. `locate_failures` names it for later failures, in a
pass or while the program is written, where the exception's frames contain an op.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from traceback import walk_tb
from types import FrameType, SimpleNamespace
from typing import Any

import coremltools as ct
from coremltools.converters.mil.mil import Operation, Var, types
from coremltools.converters.mil.mil.scope import ScopeSource
from coremltools.converters.mil.mil.types.symbolic import any_symbolic

from ..ir.scopes import find_origin
from ..utils.errors import AnePassesError
from ..utils.text_format import format_count
from .errors import NotConverted, describe_node_location
from .input_shapes import describe_unexpected_shape, describe_unrecorded_shapes

__all__ = [
    "describe_input_shapes",
    "describe_op_location",
    "find_producer",
    "format_cause",
    "is_reported_unchanged",
    "locate_failures",
    "record_model",
    "record_node",
]

_converted_nodes: ContextVar[dict[str, Any] | None] = ContextVar("mil_ane_passes_nodes", default=None)
"The nodes of the torch graph converted so far, by the keys that the scopes of their MIL ops contain."
_converted_model: ContextVar[tuple[Any, Any] | None] = ContextVar("mil_ane_passes_model", default=None)
"The torch model that is converted, and the user's inputs."

_ADVICE_IN_PASS = ("use a pass_pipeline without this pass, other ops in that part of the model, or, in a conversion to "
                   "float16, compute_precision=coremltools.precision.FLOAT32")
_ADVICE_IN_TORCH_PASS = ("fixed input sizes, or a constant scale_factor instead of a computed size, or other ops in "
                         "that part of the model")
_TORCH_PASS_TARGET = ct.target.iOS17
"The first target whose resizes accept computed scales, in which the passes of the torch dialect lower more."
_NAMES_PASS = "common::dedup_op_and_var_names"
_ADVICE_ABOUT_NAMES = ("give that input another name, or each output a name of its own "
                       "(outputs=[coremltools.TensorType(name=...)])")
_TORCH_PASS_PREFIX = "torch::"
"The prefix of passes that lower ops of the torch dialect: no pipeline and no precision can do without them."
_ADVICE_IN_READING = ("use other ops in that part of the model, or convert the result of torch.export in place of that "
                      "of torch.jit.trace, or the other way round")
_ADVICE_AT_END = "use another form of that op"
_ADVICE_NEWER_TARGET = ", or a newer minimum_deployment_target"
_SHAPE_ERRORS = (ValueError, IndexError)
"What coremltools raises for shapes that do not fit."
_MAX_MESSAGE_LENGTH = 400
"The most characters of an exception's text that an error repeats: enough for any sentence, too few for a program."


def record_node(node: Any) -> None:
    """Record a node of coremltools' torch graph, so that failures after the frontend can name its source line."""
    nodes = _converted_nodes.get()
    if nodes is not None:
        nodes.update(dict.fromkeys(getattr(node, "outputs", None) or (), node))
        nodes[node.name] = node
        if trace := (node.meta or {}).get("stack_trace"):
            nodes[trace] = node


def find_producer(name: Any) -> Any:
    """Return the recorded node that has a result of this name, or None."""
    return (_converted_nodes.get() or {}).get(name)


def record_model(model: Any, inputs: Any) -> None:
    """Record the torch model and the user's inputs, so that a failure can name a shape that the model does not have."""
    if _converted_nodes.get() is not None:
        _converted_model.set((model, inputs))


def describe_input_shapes(error: Exception) -> str:
    """Describe how the shapes in `inputs=` may have caused the failure of a lowering; "" where they cannot have."""
    recorded = _converted_model.get()
    if recorded is None:
        return ""
    unexpected = describe_unexpected_shape(*recorded)
    return unexpected or (describe_unrecorded_shapes(*recorded) if isinstance(error, _SHAPE_ERRORS) else "")


@contextmanager
def locate_failures(target: ct.target | None = None) -> Iterator[None]:
    """Turn failures in a pass or at the end of a conversion into NotConverted, with the exception as cause.

    `target` is the minimum_deployment_target of the conversion; None is coremltools' default.
    """
    token, model_token = _converted_nodes.set({}), _converted_model.set(None)
    try:
        yield
    except Exception as error:
        place = _describe_failure_location(error)
        stage, advice = _find_failed_stage(error, place, target)
        if is_reported_unchanged(error) or not stage:
            raise
        raise NotConverted(f"{place + ': ' if place else ''}{stage} fails: {format_cause(error)}"
                           f"{'; ' + advice if advice else ''}") from error
    finally:
        _converted_nodes.reset(token)
        _converted_model.reset(model_token)


def is_reported_unchanged(error: BaseException) -> bool:
    """Return whether an exception is reported unchanged: our own errors, and errors unrelated to the model."""
    return isinstance(error, AnePassesError | MemoryError | RecursionError)


def format_cause(error: BaseException) -> str:
    """Format `KeyError: 'x'`, on one line."""
    text = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {text if len(text) <= _MAX_MESSAGE_LENGTH else text[:_MAX_MESSAGE_LENGTH] + '...'}"


def describe_op_location(op: Operation) -> str:
    """Format the torch op behind a MIL op with its module and line, as far as they are known."""
    nodes = _converted_nodes.get() or {}
    for name in reversed(op.scopes.get(ScopeSource.TORCHSCRIPT_MODULE_NAME) or ()):
        if name in nodes:
            return describe_node_location(nodes[name])
    for trace in op.scopes.get(ScopeSource.EXIR_STACK_TRACE) or ():
        if trace in nodes:  # one line may have many nodes; most ops are named after their node
            own = next((nodes[name] for name in _collect_op_names(op) if name in nodes), None)
            return describe_node_location(own or SimpleNamespace(kind=op.op_type, meta=nodes[trace].meta))
    known = find_origin(op)
    return f"op '{op.op_type}' of {known}" if known else f"op '{op.op_type}' '{op.name}'"


def _collect_op_names(op: Operation) -> list[str]:
    return [name.removesuffix("_cast_fp16") for name in (op.name, *(var.name for var in op.outputs))]


def _find_failed_stage(error: Exception, place: str, target: ct.target | None) -> tuple[str, str]:
    """Return the failed stage and the advice for it; "" while the user's arguments are read.

    `place` is the location of the op that fails, "" where none does.
    """
    frames = [(frame, frame.f_globals.get("__name__", ""), frame.f_code.co_name)
              for frame, _ in walk_tb(error.__traceback__)]
    if _fails_in_reading([(module, function) for _, module, function in frames]):
        return "reading the torch graph", _ADVICE_IN_READING
    stage = "", ""
    for frame, module, function in frames:
        if function == "apply_pipeline":
            name = str(frame.f_locals.get("pass_name"))
            if name == _NAMES_PASS:
                advice = _ADVICE_ABOUT_NAMES
            else:
                advice = (_format_torch_pass_advice(target) if name.startswith(_TORCH_PASS_PREFIX)
                          else _ADVICE_IN_PASS)
            stage = f"the pass '{name}'", advice
        elif not stage[0] and (module.startswith(_BACKEND_MODULE_PREFIX) or function == _PROGRAM_CHECK_FUNCTION):
            stage = "writing the program", _format_end_advice(error, place, target)
        elif not stage[0] and (module, function) == (_FRONTEND_MODULE, "convert"):
            stage = "converting the torch graph", _format_end_advice(error, place, target)
    return stage


def _format_torch_pass_advice(target: ct.target | None) -> str:
    newer = target is None or target < _TORCH_PASS_TARGET
    use = f"minimum_deployment_target=coremltools.target.{_TORCH_PASS_TARGET.name} or newer, " if newer else ""
    return f"use {use}{_ADVICE_IN_TORCH_PASS}"


def _format_end_advice(error: Exception, place: str, target: ct.target | None) -> str:
    """Format the advice for a failure after the passes: on the user's argument that causes it, or on the op at `place`;
    "" where it is of neither."""
    for frame, _ in walk_tb(error.__traceback__):
        if frame.f_code.co_name == _CLASSIFIER_FUNCTION:
            return _format_label_advice(frame.f_locals)
    found = _find_innermost(error).f_locals.get("var")
    if isinstance(found, Var) and types.is_state(found.sym_type) and found.dtype != types.fp16:
        shape = found.sym_type.wrapped_type().get_shape()
        return (f"declare the state with dtype=np.float16: ct.StateType(ct.TensorType(shape={shape}, "
                f"dtype=np.float16), name='{found.name}')")
    if not place:
        return ""
    return _ADVICE_AT_END + (_ADVICE_NEWER_TARGET if target is None or target < max(ct.target) else "")


def _format_label_advice(values: Mapping[str, Any]) -> str:
    """Format the number of class labels and of scores from the variables of coremltools' function, if they differ."""
    labels, scores = values.get("classes"), values.get("original_probability_var")
    if not isinstance(labels, list) or scores is None or any_symbolic(scores.shape):
        return ""
    size = math.prod(scores.shape)
    return "" if size == len(labels) else (
        f"classifier_config has {format_count(len(labels), 'class label')}, and the output '{scores.name}' that they "
        f"are for has {format_count(size, 'element')}: pass one label for each element, or the name of another output "
        "as predicted_probabilities_output")


def _fails_in_reading(calls: list[tuple[str, str]]) -> bool:
    """Return whether these calls, outermost first, end where coremltools reads the graph of a torch model.

    Errors raised by the readers themselves, and by the checks of the user's types, are about the arguments of `convert`
    and stay unchanged.
    """
    if (_FRONTEND_MODULE, "__init__") not in calls:
        return False
    inner = [function for _, function in calls[calls.index((_FRONTEND_MODULE, "__init__")) + 1:]]
    return bool(inner) and inner[0] not in _CHECKS_ARGUMENTS and inner[-1] not in _READERS


_READERS = ("from_torchscript", "from_exir")
_CHECKS_ARGUMENTS = ("_convert_to_torch_inputtype", "_adjust_default_input_to_fp16", "get_output_names",
                     "_match_user_exir_inputs", "_validate_states")
_BACKEND_MODULE_PREFIX = "coremltools.converters.mil.backend."
_FRONTEND_MODULE = "coremltools.converters.mil.frontend.torch.converter"
_PROGRAM_CHECK_FUNCTION = "_check_early_error_out_for_invalid_program"
_CLASSIFIER_FUNCTION = "_add_classify_op"
"The function that adds an op for the user's classifier_config: its failures are of that argument, not of the model."


def _find_innermost(error: Exception) -> FrameType:
    """Return the frame that raised `error`."""
    *_, (frame, _) = walk_tb(error.__traceback__)
    return frame


def _describe_failure_location(error: Exception) -> str:
    """Format the location of the innermost op found in a frame of the exception; "" where no op of the model fails."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    if any(frame.f_code.co_name == _CLASSIFIER_FUNCTION for frame in frames):
        return ""
    for frame in reversed(frames):
        for name in ("op", "self", "_op", "operation"):
            if isinstance(op := frame.f_locals.get(name), Operation):
                return describe_op_location(op)
    return ""
