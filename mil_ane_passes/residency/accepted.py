"""Op types that somebody saw the ANE take, by generation. What is not here nobody measured, and the answer is unknown."""

from __future__ import annotations

from ..core.contract import Evidence, Measured
from ..core.targets import Generation

__all__ = ["accepted"]

_M4 = Measured("accepted, by Core ML's own answer", chip="M4", os="macOS 27.0.1", date="2026",
               source="751K/Apple-Neural-Engine-Microarchitecture-Study-M6 data/03_compile/opdispatch")
_ON_M4 = frozenset("""
abs add avg_pool batch_to_space cast ceil concat conv conv_transpose cos erf exp floor linear matmul max_pool mul relu
reshape softmax sub tanh transpose
""".split())


def accepted(op_type: str, generation: Generation) -> Evidence | None:
    """Who saw the ANE of `generation` take an op of this type, or None."""
    return _M4 if generation.name == "a18" and op_type in _ON_M4 else None
