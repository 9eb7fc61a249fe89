"""The reference runtime: executes a `mil.Program` on the CPU with PyTorch kernels, on any machine.

Core ML predicts on Apple's systems only. The runtime executes any ML Program of the opsets iOS15 to iOS18, including
states, several functions, control flow, compressed weights and images. It follows coremltools' documentation of the
ops. If the documentation leaves a choice open, such as the result of an index out of range or the rounding of an image
output, the kernel's docstring states our choice. Unsupported ops are reported before anything runs.

Two cases are not specified by any source. A float that is cast to an integer type without this value saturates (300 as
uint8 is 255, NaN is 0), as arm64's conversions do. A pool with ceil_mode, no padding and a stride larger than its
window may have a last window that lies entirely after the end of the input. coremltools' shape rule counts this window,
and PyTorch drops it. The runtime keeps it: its maximum is -inf and its average NaN. No rewrite changes such a pool, and
`ane.convert` drops the window as PyTorch does.

    predictor = ane.runtime.predictor(mlmodel)             # or the path of an .mlpackage
    state = predictor.make_state()
    outputs = predictor.predict({"image": pil_image}, state=state)

`predictor` has the signatures, coercions and errors of `MLModel.predict` and `make_state`, so a test suite that
predicts also runs on systems other than macOS. Feeds are checked before anything runs: names, dtypes, shapes against
the enumerated or ranged set, images against their size and colour layout. An image is a PIL image, uint8 pixels of
shape (height, width, 3) in RGB order, or an array (1, channels, height, width) in the channel order of the model, uint8
or float, with values from 0 to 255: values from 0 to 1 are accepted, and are nearly black.

Published faults of the ANE (quirks) can be imitated by name; they are off by default. `mil-ane-passes verify A A
--quirk NAME` tests whether a fault would affect the model, and `verify A B --quirk NAME` whether a rewrite avoids it. A
quirk shows the effect of a rewrite; it is no evidence about a given chip. `mil-ane-passes verify --help` lists the
quirks.

Importing this package does not import torch; constructing a `Runtime` (or calling `missing_ops`) does.
"""

from __future__ import annotations

from .engine import PRECISIONS, Runtime, missing_ops
from .pipeline import PipelineRuntime
from .prediction import PredictError, Predictor, predictor
from .quirks import QUIRKS

__all__ = ["PRECISIONS", "QUIRKS", "PipelineRuntime", "PredictError", "Predictor", "Runtime", "missing_ops",
           "predictor"]
