"""`return y, y`: a tensor that a model returns twice, or under two names.

coremltools gives both outputs one name. A model with two outputs of one name cannot be loaded, and its outputs could
not be distinguished. Here the second is a copy with a name of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Function, Var
from coremltools.converters.mil.mil.scope import ScopeInfo, ScopeSource

from ..contract import Patch
from ..probes import convert_to_mil, trace_function

PATCH = Patch(code="TORCH135",
              title="a tensor returned twice makes two outputs of one name", upstream=("none known",))


@PATCH.probe
def probe() -> str | None:
    import torch

    def twice(x: Any) -> Any:
        y = x + 1
        return y, y

    x = torch.zeros(2)
    outputs = convert_to_mil(trace_function(twice, x), x).functions["main"].outputs
    return "both outputs have one name" if len({output.name for output in outputs}) < len(outputs) else None


@PATCH.replace_function("coremltools.converters.mil.mil.block", "Block.set_outputs")
def set_outputs(host: Callable[..., Any], block: Any, outputs: Sequence[Var]) -> Any:
    """Set the outputs of a block; each output of a function becomes a Var of its own."""
    return host(block, _copy_repeated_outputs(outputs, block) if isinstance(block, Function) else outputs)


def _copy_repeated_outputs(outputs: Sequence[Var], block: Any) -> list[Var]:
    own: list[Var] = []
    for var in outputs:
        if any(var is other for other in own):
            with mb.scope(*_infer_scopes(var, block)):
                var = mb.identity(x=var, name=f"{var.name}_{len(own)}")
        own.append(var)
    return own


def _infer_scopes(var: Var, block: Any) -> list[ScopeInfo]:
    """Infer the scopes of a new op, which coremltools requires: those of the Var's op.

    For an input, which has no op, those of any other op.
    """
    makers = [op for op in (var.op, *reversed(block.operations)) if op is not None and op.scopes]
    scopes = makers[0].scopes if makers else _DEFAULT_SCOPES
    return [ScopeInfo(source=source, data=data) for source, data in scopes.items()]



_DEFAULT_SCOPES = {ScopeSource.TORCHSCRIPT_MODULE_NAME: ["output"], ScopeSource.TORCHSCRIPT_MODULE_TYPE: ["output"],
                   ScopeSource.EXIR_STACK_TRACE: [None], ScopeSource.EXIR_DEBUG_HANDLE: [None]}
