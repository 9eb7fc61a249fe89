"""A pytest plugin under which coremltools' own op tests run on the reference runtime, on any machine.

`python -m pytest -p tests.runtime.upstream_plugin --pyargs coremltools.converters.mil.mil.ops.tests.iOS16`
"""

from __future__ import annotations

import os
from typing import Any

# Every opset, not only the newest the machine could run.
os.environ["RUN_BACKWARD_COMPATIBILITY"] = "1"

import coremltools as ct
import numpy as np
from coremltools.converters.mil import mil
from coremltools.converters.mil import testing_utils as host
from coremltools.converters.mil.mil import Function, types

from mil_ane_passes.runtime import Runtime

# The tests ask for the macOS version before they choose what to run.
host.macos_compatible_with_deployment_target = lambda target: True
ct.utils._macos_version = lambda: (99, 0)

from coremltools.converters.mil.mil.ops.tests import testing_utils


def run_compare_builder(
    build: Any,
    input_placeholders: Any,
    input_values: Any = None,
    expected_output_types: Any = None,
    expected_outputs: Any = None,
    frontend_only: bool = False,
    backend: Any = None,
    atol: float = 1e-4,
    rtol: float = 1e-5,
    pred_iters: int | None = None,
    **_: Any,
) -> None:
    """In place of the host's function of this name: the program is not converted but executed by the runtime."""
    opset = ct.target.iOS14 if backend is None else backend.opset_version
    program = mil.Program()
    with Function(input_placeholders, opset_version=opset) as function:
        outputs = build(**function.inputs)
        function.set_outputs(list(outputs) if isinstance(outputs, (list, tuple)) else [outputs])
        program.add_function("main", function)
    if expected_outputs is None or frontend_only or input_values is None:
        return
    if backend is not None and backend.precision == "fp16":
        # What the tests expect was computed from values that Core ML would have rounded.
        atol, rtol = max(3 * atol, 3e-3), max(rtol, 1e-2)
    runtime, state = Runtime(program), dict[str, Any]()
    for iteration in range(pred_iters or 1):
        found = runtime(_feeds(function, input_values), state).values()
        expected = expected_outputs if pred_iters is None else expected_outputs[iteration]
        expected = expected if isinstance(expected, list) else [expected]
        assert len(found) == len(expected)
        for each, truth in zip(found, expected):
            np.testing.assert_allclose(each, np.reshape(truth, each.shape), atol=atol, rtol=rtol)


def _feeds(function: Any, values: Any) -> dict[str, Any]:
    feeds = {}
    for name, var in function.inputs.items():
        if not types.is_state(var.sym_type):
            value = np.asarray(values[name]).astype(types.nptype_from_builtin(var.dtype))
            feeds[name] = value.reshape(1) if value.ndim == 0 and len(var.shape) == 1 else value
    return feeds


testing_utils.run_compare_builder = run_compare_builder
