"""The reference runtime: executes a `mil.Program` on the CPU with PyTorch kernels, on any machine.

Core ML predicts on Apple's systems only. The runtime executes any ML Program of the opsets iOS15 to iOS18, states,
several functions, control flow, compressed weights and images included, and follows coremltools' documentation of the
ops. Choices that it leaves open are documented at the kernel: the result of an index out of range, for instance, or how
an image output rounds. Unsupported ops are reported before anything runs.

Two cases that no source specifies: a float cast to an integer type that does not hold it saturates (300 as uint8 is
255, NaN is 0), as arm64's conversions do; and a pool with ceil_mode, no padding and a stride above its window may have
a last window that lies behind the input, which coremltools' shape rule counts and PyTorch drops: its maximum is -inf
here and its average NaN. No rewrite touches such a pool, and `ane.convert` drops the window as PyTorch does.

    predictor = ane.runtime.predictor(mlmodel)             # or the path of an .mlpackage
    state = predictor.make_state()
    outputs = predictor.predict({"image": pil_image}, state=state)

`predictor` has `MLModel.predict`'s and `make_state`'s signatures, coercions and errors, so a test suite that predicts
also runs on other systems than macOS. Feeds are checked before anything runs: names, dtypes, shapes against the
enumerated or ranged set, images against their size and colour layout (a PIL image, uint8 pixels of shape (height,
width, 3), or an array in the layout of the program).

Published faults of the ANE can be imitated by name, off by default: `mil-ane-passes verify A A --quirk NAME` tests
whether a fault would affect the model, `verify A B --quirk NAME` whether a rewrite fixes it. They show what a rewrite
fixes, and verify nothing about a given chip. `mil-ane-passes verify --help` lists them.

Importing this package does not import torch; constructing a `Runtime` (or calling `missing_ops`) does.
"""

from __future__ import annotations

from .engine import PRECISIONS, Runtime, missing_ops
from .pipeline import PipelineRuntime
from .prediction import PredictError, Predictor, predictor
from .quirks import QUIRKS

__all__ = ["PRECISIONS", "QUIRKS", "PipelineRuntime", "PredictError", "Predictor", "Runtime", "missing_ops",
           "predictor"]
