"""The reference runtime: executes a `mil.Program` on the CPU with PyTorch kernels, on any machine.

Importing this package does not import torch; constructing a `Runtime` (or calling `missing_ops`) does.
"""

from __future__ import annotations

from .drop_in import PredictError, Predictor, predictor
from .engine import PRECISIONS, Runtime, missing_ops
from .pipeline import PipelineRuntime
from .quirks import QUIRKS

__all__ = ["PRECISIONS", "QUIRKS", "PipelineRuntime", "PredictError", "Predictor", "Runtime", "missing_ops",
           "predictor"]
