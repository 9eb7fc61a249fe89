"""Which of coremltools' op types have a kernel: all of them."""

from __future__ import annotations

from coremltools.converters.mil.mil.ops.registry import SSAOpRegistry

from mil_ane_passes.runtime.registry import load_kernels


def test_every_core_op_has_a_kernel() -> None:
    missing = sorted(set(SSAOpRegistry.core_ops) - set(load_kernels()))
    assert not missing, f"{len(missing)} core op types without a kernel: {', '.join(missing)}"


def test_the_core_ml_dialect_has_kernels() -> None:
    assert {"coreml_update_state", "read_state", "slice_update"} <= set(load_kernels())
