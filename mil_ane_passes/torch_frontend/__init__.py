"""The patched torch frontend: models that coremltools refuses, or converts to something else, convert right.

    with ane.torch_frontend.patched():
        model = ct.convert(traced, ...)

Importing this patches nothing and imports no torch. `patched()` holds for the thread (context) that enters it,
`install()` for the whole process until `uninstall()`; both may be nested and repeated. Each patch is one file of
`patches/`; one that the installed coremltools does not need turns itself off (`mil-ane-passes patches` says why).
"""

from __future__ import annotations

from .errors import NotConverted, NotEqual
from .switch import active, install, patched, uninstall

__all__ = ["NotConverted", "NotEqual", "active", "install", "patched", "uninstall"]
