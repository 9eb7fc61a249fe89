"""`return y, y`: a tensor that a model returns twice, or under two names; `return x.split(2)` of a script.

coremltools gives both outputs one name, the last one given in `outputs=`. A model with two outputs of one name cannot
be loaded, and its outputs could not be distinguished. Here the second is a copy with a name of its own, also where
outputs are float16 and the pass `cast_optimization` merges the casts that make them so. A list that an op makes and a
script returns is an output for each of its tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Function, Var
from coremltools.converters.mil.mil.scope import ScopeInfo, ScopeSource

from ..contract import Patch
from ..probes import convert_to_mil, trace_function

PATCH = Patch(code="TORCH135",
              title="a tensor returned twice makes two outputs of one name", upstream=("none known",))
_requested_names: ContextVar[Sequence[str | None] | None] = ContextVar("requested_names", default=None)
"The names of the outputs that `outputs=` gives, during a conversion; None where it gives none."


@PATCH.probe
def probe() -> str | None:
    import torch

    def twice(x: Any) -> Any:
        y = x + 1
        return y, y

    x = torch.zeros(2)
    outputs = convert_to_mil(trace_function(twice, x), x).functions["main"].outputs
    return "both outputs have one name" if len({output.name for output in outputs}) < len(outputs) else None


@PATCH.replace_function("coremltools.converters.mil.frontend.torch.converter", "TorchConverter.convert")
def convert(host: Callable[..., Any], converter: Any) -> Any:
    """Convert the graph; a tensor that is returned twice has each of the names that `outputs=` gives it."""
    token = _requested_names.set(converter.output_names)
    try:
        return host(converter)
    finally:
        _requested_names.reset(token)


@PATCH.replace_function("coremltools.converters.mil.mil.block", "Block.set_outputs")
def set_outputs(host: Callable[..., Any], block: Any, outputs: list[Any]) -> Any:
    """Set the outputs of a block; each output of a function becomes a Var of its own.

    An input that is returned under another name keeps its name; the output is a copy.
    """
    if isinstance(block, Function):
        if any(isinstance(each, list | tuple) for each in outputs):
            # In place: the converter reads the dtypes of its list afterwards.
            outputs[:] = [var for each in outputs for var in (each if isinstance(each, list | tuple) else [each])]
        names = _requested_names.get()
        renamed = _restore_input_names(block) if names else []
        if renamed or len(set(outputs)) < len(outputs):
            outputs = _copy_repeated_outputs(outputs, block, names, renamed)
    return host(block, outputs)


@PATCH.replace_function("coremltools.converters.mil.mil.passes.defs.optimize_repeat_ops", "cast_optimization.apply")
def merge_casts(host: Callable[..., None], graph_pass: Any, program: Any) -> None:
    """Merge casts; two outputs that are casts of one Var to the same dtype stay two Vars, with their names."""
    names = {name: [var.name for var in function.outputs] for name, function in program.functions.items()}
    host(graph_pass, program)
    for name, function in program.functions.items():
        outputs = function.outputs
        if len(set(outputs)) < len(outputs) == len(set(names[name])):
            with function:
                function.set_outputs(_copy_repeated_outputs(outputs, function, names[name]))


def _restore_input_names(function: Function) -> list[Var]:
    """Give inputs that were renamed, as results, their names again; return them."""
    renamed = [var for name, var in function.inputs.items() if var.name != name]
    for name, var in function.inputs.items():
        var.name = name
    return renamed


def _copy_repeated_outputs(outputs: Sequence[Var], block: Any, names: Sequence[str | None] | None,
                           copied: Sequence[Var] = ()) -> list[Var]:
    """Return the outputs with a copy for each of `copied`, and for each that repeats an earlier one.

    `names` are those of all outputs.
    """
    own: list[Var] = []
    wanted = names or [None] * len(outputs)
    for var, name in zip(outputs, wanted, strict=True):
        if var in own or var in copied:
            with mb.scope(*_infer_scopes(var, block)):
                var = mb.identity(x=var, name=name or f"{var.name}_{len(own)}")
        elif name:
            var.name = name
        own.append(var)
    return own


def _infer_scopes(var: Var, block: Any) -> list[ScopeInfo]:
    """Infer the scopes of a new op, which coremltools requires: those of the Var's op, without the passes that made it.

    For an input, which has no op, those of any other op.
    """
    makers = [op for op in (var.op, *reversed(block.operations)) if op is not None and op.scopes]
    scopes = makers[0].scopes if makers else _DEFAULT_SCOPES
    return [ScopeInfo(source=source, data=data) for source, data in scopes.items()
            if source != ScopeSource.COREMLTOOLS_GRAPH_PASS]


_DEFAULT_SCOPES = {ScopeSource.TORCHSCRIPT_MODULE_NAME: ["output"], ScopeSource.TORCHSCRIPT_MODULE_TYPE: ["output"],
                   ScopeSource.EXIR_STACK_TRACE: [None], ScopeSource.EXIR_DEBUG_HANDLE: [None]}
