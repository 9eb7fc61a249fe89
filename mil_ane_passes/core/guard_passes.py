"""The guard inside a `ct.PassPipeline`: one pass before ours keeps the program, one after ours settles what stands."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from coremltools.converters.mil.mil import Program
from coremltools.converters.mil.mil.passes.graph_pass import AbstractGraphPass, PassOption
from coremltools.converters.mil.mil.passes.pass_registry import PASS_REGISTRY, register_pass

from .clone import clone
from .contract import Rewrite
from .guard import Guard, Run, settled, watched

__all__ = ["BEGIN", "END", "SETTLE", "guarding", "register_guard"]

BEGIN, END = "guard_begin", "guard_end"
SETTLE = "settle"
"The option by which the last pass gets what it calls; coremltools' options are texts or callables."
_KEPT = "_ane_original"

_log = logging.getLogger("mil_ane_passes")


def guarding(rules: Sequence[Rewrite], run: Run, guard: Guard | None) -> Callable[[Program, Program], None] | None:
    """What the last pass calls with the program as it was and as it is; None where there is nothing to guard."""
    if guard is None or not any(map(watched, rules)):
        return None

    def settle(original: Program, program: Program) -> None:
        for trace in settled(rules, original, program, run, guard)[0]:
            _log.info("ane::%s undone: %s", trace.rule, trace.undone)

    return settle


def register_guard() -> None:
    """Register both passes with coremltools; doing so twice is harmless."""
    for name, apply in ((BEGIN, _begin), (END, _end)):
        if f"ane::{name}" not in PASS_REGISTRY:
            members = {"__init__": _init, "set_options": _set_options, "apply": apply, "__doc__": apply.__doc__,
                       "__module__": __name__}
            register_pass(namespace="ane", name=name)(type(name, (AbstractGraphPass,), members))


def _init(self: Any) -> None:
    self.settle = None


def _set_options(self: Any, pass_options: list[PassOption] | None = None) -> None:
    self.settle = next((option.option_val for option in pass_options or [] if option.option_name == SETTLE), None)


def _begin(self: Any, prog: Program) -> None:
    """Keep the structure of the program; the weights are shared."""
    setattr(prog, _KEPT, clone(prog))


def _end(self: Any, prog: Program) -> None:
    """Undo what the guard does not let stand."""
    original = prog.__dict__.pop(_KEPT, None)
    if original is not None and self.settle is not None:
        self.settle(original, prog)
