"""The passes around ours in a `ct.PassPipeline`: the first has the settings and keeps the program for the guard, the
last undoes what the guard does not let stand."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from coremltools.converters.mil.mil import Program
from coremltools.converters.mil.mil.passes.graph_pass import AbstractGraphPass, PassOption
from coremltools.converters.mil.mil.passes.pass_registry import PASS_REGISTRY, register_pass

from .clone import clone
from .contract import Rewrite
from .guard import Guard, Run, settled, watched
from .locking import synchronized
from .words import escaped

__all__ = ["BEGIN", "END", "SETTLE", "Session", "guarding", "register_guard", "session_of"]

BEGIN, END = "guard_begin", "guard_end"
SETTLE = "settle"
"The option by which the last pass gets what it calls; coremltools' options are texts or callables."
_SESSION = "_ane_session"

_log = logging.getLogger("mil_ane_passes")


@dataclass
class Session:
    """What passes of ours know of one another between the first and the last: it lives at the program meanwhile.

    `settings` are those in the name of the first pass, `ran` the rules that have run, in order.
    """

    settings: Mapping[str, str]
    original: Program | None
    ran: list[Rewrite] = field(default_factory=list)

    def of(self, rule: str) -> dict[str, str]:
        """The options of one rule."""
        return {key.partition(".")[2]: value for key, value in self.settings.items() if key.startswith(f"{rule}.")}

    @property
    def requested(self) -> Sequence[str]:
        """The rules that the user requested by name."""
        return self.settings.get("requested", "").split("+")


def session_of(program: Program) -> Session | None:
    """The session that the first pass has opened and the last has not closed yet."""
    found: Session | None = vars(program).get(_SESSION)
    return found


def guarding(rules: Sequence[Rewrite], run: Run, guard: Guard | None) -> Callable[[Program, Program], None] | None:
    """What the last pass calls with the program as it was and as it is; None where there is nothing to guard."""
    if guard is None or not any(map(watched, rules)):
        return None

    def settle(original: Program, program: Program) -> None:
        for trace in settled(rules, original, program, run, guard)[0]:
            _log.info("ane::%s reverted: %s", trace.rule, escaped(trace.reverted))

    return settle


def register_guard(restore: Callable[[Session], Callable[[Program, Program], None] | None]) -> None:
    """Register both passes with coremltools; doing so twice is harmless.

    `restore` makes from a session what the last pass calls where only its name has come through.
    """
    for name, apply in ((BEGIN, _begin), (END, _end)):
        if f"ane::{name}" not in PASS_REGISTRY:
            members: dict[str, Any] = {
                "__init__": _init, "set_options": _set_options, "apply": apply, "__doc__": apply.__doc__,
                "__module__": __name__, "carried": {}, "restore": staticmethod(restore)}
            register_pass(namespace="ane", name=name)(type(name, (AbstractGraphPass,), members))


def _init(self: Any) -> None:
    self.settle = None


def _set_options(self: Any, pass_options: list[PassOption] | None = None) -> None:
    self.settle = next((option.option_val for option in pass_options or [] if option.option_name == SETTLE), None)


@synchronized
def _begin(self: Any, prog: Program) -> None:
    """Note the settings of our passes and keep the structure of the program for the guard; the weights are shared."""
    vars(prog).pop(_SESSION, None)
    original = clone(prog) if not self.carried or "max_growth" in self.carried else None
    setattr(prog, _SESSION, Session(self.carried, original))


@synchronized
def _end(self: Any, prog: Program) -> None:
    """Undo what the guard does not let stand."""
    session = vars(prog).pop(_SESSION, None)
    if session is not None and "max_growth" not in session.settings and session.settings and self.settle is None:
        return  # there is nothing to guard: the pass only closes the session
    settle = self.settle or (None if session is None else self.restore(session))
    if session is None or session.original is None or settle is None:
        _log.warning("ane::%s is inactive, nothing is undone: its settings are missing; pass the names of "
                     "mil_ane_passes.pipeline(...).passes on as they are, with ane::%s{...} among them", END, BEGIN)
        return
    settle(session.original, prog)
