"""What `torch.export.export` returns converts without `run_decompositions({})` by hand.

Newer torch exports in the dialect TRAINING, which the host refuses with the advice to call that. It is called here: on
the way into the converter, into a program of its own, so that the user's object stays as it is. What export checked
of a tensor's type (`_assert_tensor_metadata`), which coremltools knows from 9.0 on, leaves no op.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.export import ExportedProgram

from ..contract import Patch

_ENTRY = "coremltools.converters._converters_entry"
_DIALECT = "TRAINING"

PATCH = Patch(code="TORCH146",
              title="exported programs of dialect TRAINING, torch's default, are refused", upstream=("https://github.com/apple/coremltools/pull/2743",))


@PATCH.probe
def probe() -> str | None:
    from coremltools.converters._converters_entry import _validate_conversion_arguments

    try:
        _validate_conversion_arguments(_stand_in(_DIALECT), "pytorch", "mlprogram", None, None, None, None, "mlprogram",
                                       None)
    except NotImplementedError:
        return "fails: refuses what torch.export.export returns"
    return None


@PATCH.replaces(_ENTRY, "_validate_conversion_arguments")
def validate(host: Callable[..., None], model: Any, *arguments: Any, **named: Any) -> None:
    """The host's checks of what `ct.convert` was given; of an exported program it looks at nothing but the dialect."""
    host(_stand_in("ATEN") if _is_training(model) else model, *arguments, **named)


@PATCH.replaces("coremltools.converters.mil.frontend.torch.converter", "TorchConverter.__init__")
def converter(host: Callable[..., None], self: Any, loaded_model: Any, *arguments: Any, **named: Any) -> None:
    """The host's converter of a loaded model, given the decomposed program."""
    host(self, loaded_model.run_decompositions({}) if _is_training(loaded_model) else loaded_model, *arguments, **named)


@PATCH.op("_assert_tensor_metadata")
def checked(context: Any, node: Any) -> None:
    """_assert_tensor_metadata(a, ...): held when the model was exported; nothing reads its result."""
    context.add(context[node.inputs[0]], node.name)


def _is_training(model: Any) -> bool:
    return isinstance(model, ExportedProgram) and model.dialect == _DIALECT


def _stand_in(dialect: str) -> ExportedProgram:
    """An exported program with no content but its dialect."""
    kind = type("StandIn", (ExportedProgram,), {"dialect": dialect})
    program: ExportedProgram = object.__new__(kind)
    return program
