"""Guard passes around ours in a `ct.PassPipeline`.

The first stores the settings and a copy of the program for the guard, the last reverts the rewrites that the guard
does not allow.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from coremltools.converters.mil.mil import Program
from coremltools.converters.mil.mil.passes.graph_pass import AbstractGraphPass, PassOption
from coremltools.converters.mil.mil.passes.pass_registry import PASS_REGISTRY, register_pass

from ..ir.clone import clone_program
from ..utils.locking import synchronized
from ..utils.text_format import escape_text
from .contract import Rewrite
from .engine import RunSettings
from .guard import Guard, is_guarded, undo_costly_rewrites

__all__ = [
    "BEGIN_PASS",
    "END_PASS",
    "UNDO_OPTION",
    "Session",
    "get_session",
    "make_undo_callback",
    "register_guard_passes",
]

BEGIN_PASS, END_PASS = "guard_begin", "guard_end"
UNDO_OPTION = "settle"
"Name of the option that passes the callback of the last pass; coremltools' options are texts or callables."
_SESSION_ATTRIBUTE = "_ane_session"

_log = logging.getLogger("mil_ane_passes")


@dataclass
class Session:
    """State shared by our passes between the first and the last; it is attached to the program meanwhile.

    `settings` are those in the name of the first pass, `applied_rules` the rules that have run, in order.
    """

    settings: Mapping[str, str]
    original: Program | None
    applied_rules: list[Rewrite] = field(default_factory=list)

    def of(self, rule: str) -> dict[str, str]:
        """Return the options of one rule."""
        return {key.partition(".")[2]: value for key, value in self.settings.items() if key.startswith(f"{rule}.")}

    @property
    def requested(self) -> Sequence[str]:
        """The rules that the user requested by name."""
        return self.settings.get("requested", "").split("+")


def get_session(program: Program) -> Session | None:
    """Return the session that the first pass opened, or None once the last pass has closed it."""
    found: Session | None = vars(program).get(_SESSION_ATTRIBUTE)
    return found


def make_undo_callback(
    rules: Sequence[Rewrite], settings: RunSettings, guard: Guard | None
) -> Callable[[Program, Program], None] | None:
    """Make the callback of the last pass, called with the original and the current program.

    Returns None if there is nothing to guard.
    """
    if guard is None or not any(map(is_guarded, rules)):
        return None

    def undo_rewrites(original: Program, program: Program) -> None:
        for trace in undo_costly_rewrites(rules, original, program, settings, guard)[0]:
            _log.info("ane::%s reverted: %s", trace.rule, escape_text(trace.reverted))

    return undo_rewrites


def register_guard_passes(restore: Callable[[Session], Callable[[Program, Program], None] | None]) -> None:
    """Register both passes with coremltools; calling this twice is harmless.

    `restore` recreates the callback of the last pass from a session, for clients that pass on only its name.
    """
    for name, apply in ((BEGIN_PASS, _apply_begin_pass), (END_PASS, _apply_end_pass)):
        if f"ane::{name}" not in PASS_REGISTRY:
            members: dict[str, Any] = {
                "__init__": _init_pass, "set_options": _set_options, "apply": apply, "__doc__": apply.__doc__,
                "__module__": __name__, "carried": {}, "restore": staticmethod(restore)}
            register_pass(namespace="ane", name=name)(type(name, (AbstractGraphPass,), members))


def _init_pass(self: Any) -> None:
    self.settle = None


def _set_options(self: Any, pass_options: list[PassOption] | None = None) -> None:
    self.settle = next((option.option_val for option in pass_options or [] if option.option_name == UNDO_OPTION), None)


@synchronized
def _apply_begin_pass(self: Any, prog: Program) -> None:
    """Store the settings of our passes, and copy the program's structure for the guard; the weights are shared."""
    vars(prog).pop(_SESSION_ATTRIBUTE, None)
    original = clone_program(prog) if not self.carried or "max_growth" in self.carried else None
    setattr(prog, _SESSION_ATTRIBUTE, Session(self.carried, original))


@synchronized
def _apply_end_pass(self: Any, prog: Program) -> None:
    """Revert the rewrites that the guard does not allow."""
    session = vars(prog).pop(_SESSION_ATTRIBUTE, None)
    if session is not None and "max_growth" not in session.settings and session.settings and self.settle is None:
        return  # no guard: the pass only closes the session
    settle = self.settle or (None if session is None else self.restore(session))
    if session is None or session.original is None or settle is None:
        _log.warning(
            "ane::%s is inactive because its settings are missing, so nothing is reverted; pass on the names of "
            "mil_ane_passes.pipeline(...).passes unchanged, including ane::%s{...}",
            END_PASS,
            BEGIN_PASS,
        )
        return
    settle(session.original, prog)
