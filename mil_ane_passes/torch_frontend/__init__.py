"""The patched torch frontend: correct conversion of models that coremltools rejects or silently miscompiles.

    model = ane.convert(traced, inputs=inputs)               # ct.convert's arguments; the patches and our passes
    model = ane.convert(traced, inputs=inputs, check=True)   # and compare the result with the torch model
    model = ane.convert(traced, inputs=inputs, check=True, ranges={"f0": (0, 800)})   # ... with such inputs, too
    with ane.torch_frontend.patched():                       # the patches alone
        model = ct.convert(traced, inputs=inputs)

TorchScript (traced or scripted) and `torch.export` are supported. An op that cannot be expressed raises `NotConverted`
with the op, the module and the source line. In-place writes have PyTorch's meaning: through any chain of views, in
every in-place op and index form, in branches and loops of scripts, into buffers that are states. A write that cannot be
followed (to a tensor that may or may not be a copy, where the other one is read) is an error, never dropped; a written
buffer that is not a state causes a warning.

With `check=True` the program runs on the reference runtime and is compared with the torch model, at the default size,
every enumerated one and both ends of a range. Where they differ, `NotEqual` names the module, the op and the source
line, such as `encoder.layer.1 (Block): op 'aten::relu' (model.py:11) differs: ...`; its `mlmodel` is the model despite
the error. The tolerance for the frontend's program is 1e-4 of an output's largest value, that for the result is the one
of `verify`. Sampled inputs are normal numbers: pass `feeds` and `ranges` with values as in production.
Values that fp16 loses, such as the sine of an angle of thousands (ANE317), are logged, and so are elements that are
left out because rounding decides them, such as the class of a pixel with two scores that fp16 cannot distinguish.

Importing this package patches nothing and does not import torch. `patched()` applies to the thread (context) that
enters it, `install()` to the entire process until `uninstall()`, which restores the same functions; both may be nested
and repeated. Each patch is one file of `patches/`. A probe turns off a patch that the installed coremltools does not
need (`mil-ane-passes patches` prints why). Your own `register_torch_op(override=True)` has priority over our patches.
"""

from __future__ import annotations

from .errors import NotConverted, NotEqual
from .patching import active, install, patched, uninstall

__all__ = ["NotConverted", "NotEqual", "active", "install", "patched", "uninstall"]
