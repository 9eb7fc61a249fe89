"""A model that writes into its own input, captured by torch.export.

coremltools rejects such programs. The outputs include all that the model computes from the written input. The change of
the caller's tensor has no counterpart in Core ML, whose inputs are copies, as for traced modules.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from ..contract import Patch

PATCH = Patch(code="TORCH123",
              title="exported programs that write into their input are rejected", upstream=("none known",))


@PATCH.probe
def probe() -> str | None:
    """Test coremltools' reading of a signature that changes an input.

    Exporting a program for the test would take ten times as long.
    """
    from coremltools.converters.mil.frontend.torch import exir_utils
    from torch.export.graph_signature import OutputKind, OutputSpec, TensorArgument

    spec = OutputSpec(OutputKind.USER_INPUT_MUTATION, TensorArgument("changed"), "x")
    program = SimpleNamespace(graph_signature=SimpleNamespace(output_specs=[spec]))
    try:
        exir_utils._extract_outputs_from_exir_program(program)
    except ValueError as error:
        return f"rejected: {str(error).splitlines()[0]}"
    return None


@PATCH.replace_function("coremltools.converters.mil.frontend.torch.exir_utils", "_extract_outputs_from_exir_program")
def extract_outputs(host: Callable[..., Any], exported_program: Any) -> Any:
    """Extract the outputs with coremltools, without the mutated inputs."""
    from torch.export.graph_signature import OutputKind

    specs = [spec for spec in exported_program.graph_signature.output_specs
             if spec.kind != OutputKind.USER_INPUT_MUTATION]
    return host(SimpleNamespace(graph_signature=SimpleNamespace(output_specs=specs)))
