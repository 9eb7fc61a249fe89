"""An exported program with arguments that are not tensors: `export(model, (ids, None), kwargs={"use_cache": False})`.

torch.export makes constants of numbers, bools, text and None: their placeholders have no users, and the program accepts
no other values. coremltools rejects such programs; here these arguments are not inputs of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..contract import Patch
from ..probes import find_refused_input

PATCH = Patch(code="TORCH181",
              title="exported programs with arguments that are not tensors are rejected", upstream=("none known",))


@PATCH.probe
def probe() -> str | None:
    from torch.export.graph_signature import ConstantArgument

    return find_refused_input(ConstantArgument("flag", True), True)


@PATCH.replace_function("coremltools.converters.mil.frontend.torch.exir_utils", "_extract_inputs_from_exir_program")
def extract_inputs(host: Callable[..., Any], exported_program: Any) -> Any:
    """Extract the inputs with coremltools, without constants."""
    from torch.export.graph_signature import ConstantArgument

    signature = exported_program.graph_signature
    specs = [spec for spec in signature.input_specs if not isinstance(spec.arg, ConstantArgument)]
    return host(_Changed(exported_program, graph_signature=_Changed(signature, input_specs=specs)))


class _Changed:
    """An object with some other attributes."""

    def __init__(self, original: Any, **attributes: Any) -> None:
        self._original = original
        vars(self).update(attributes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)
