"""The patched torch frontend: models that coremltools refuses, or converts to something else, convert right.

    model = ane.convert(traced, inputs=inputs)               # ct.convert's arguments; the patches and our passes
    model = ane.convert(traced, inputs=inputs, check=True)   # and compare the result with the torch model
    model = ane.convert(traced, inputs=inputs, check=True, ranges={"f0": (0, 800)})   # ... with such inputs, too
    with ane.torch_frontend.patched():                       # the patches alone
        model = ct.convert(traced, inputs=inputs)

TorchScript (traced or scripted) and `torch.export` alike. What cannot be expressed is refused with the op, the module
and the source line (`NotConverted`). In-place writes are followed as PyTorch means them: through any chain of views,
in every in-place op and index form, in branches and loops of scripts, into buffers that are states. What cannot be
followed (a write to what may or may not be a copy, and a read of the other) is refused, never dropped; a buffer that
is written and is no state gets a warning.

With `check=True` the program runs on the reference runtime beside the torch model, at the default size, every
enumerated one and both ends of a range. Where they part, `NotEqual` names the module, the op and the source line,
such as `encoder.layer.1 (Block): op 'aten::relu' (model.py:11) differs: ...`; its `mlmodel` is the model all the
same. What the frontend made is judged to 1e-4 of an output's largest value, the result as `verify` does. Sampled
inputs are normal numbers: give `feeds` and `ranges` that hold what the model gets. Values that fp16 loses, such as
the sine of an angle of thousands (ANE317), are logged.

Importing this patches nothing and imports no torch. `patched()` holds for the thread (context) that enters it,
`install()` for the whole process until `uninstall()`, which puts the very same functions back; both may be nested and
repeated. Each patch is one file of `patches/`; one that the installed coremltools does not need turns itself off,
which is found out by trying (`mil-ane-passes patches` says why). Your own `register_torch_op(override=True)` wins
over ours.
"""

from __future__ import annotations

from .errors import NotConverted, NotEqual
from .patching import active, install, patched, uninstall

__all__ = ["NotConverted", "NotEqual", "active", "install", "patched", "uninstall"]
