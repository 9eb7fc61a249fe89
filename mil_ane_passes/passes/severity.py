"""Severity of a problem: one scale for rules, rules about layers, and patches of the torch frontend."""

from __future__ import annotations

from enum import Enum

from ..utils.errors import InputError, suggest_nearest

__all__ = ["DEFAULT_FAIL_ON", "NEVER", "Severity", "parse_fail_on"]

NEVER = "never"
"The value of `fail_on` with which no finding fails."


class Severity(Enum):
    """The harm that a problem does, the worst first; the value is its name in options, JSON and tables."""

    WRONG = "wrong"
    "Wrong numbers: the values on the ANE differ from the definition of the program."
    UNSUPPORTED = "unsupported"
    "Ops, or the entire program, leave the ANE, or do not compile for it."
    SLOW = "slow"
    "The program costs more time or memory than it has to."
    SUGGESTION = "suggestion"
    "Optional: nothing has to be fixed, and by default it does not count as a failure."

    @property
    def rank(self) -> int:
        """The position on the scale, 0 for the worst."""
        return list(Severity).index(self)

    @property
    def label(self) -> str:
        """The name in texts for people."""
        return "wrong numbers" if self is Severity.WRONG else self.value

    @property
    def sarif_level(self) -> str:
        """The level of SARIF: what code hosts sort and filter by."""
        return _LEVELS[self][0]

    @property
    def github_level(self) -> str:
        """The kind of annotation of a GitHub workflow."""
        return _LEVELS[self][1]

    @property
    def color(self) -> str:
        """The parameters of the terminal's escape sequence (SGR) for the label."""
        return _LEVELS[self][2]

    def reaches(self, least: Severity | None) -> bool:
        """Return whether it is as bad as `least` or worse; nothing reaches None."""
        return least is not None and self.rank <= least.rank

    @property
    def fails(self) -> bool:
        """True if findings of this severity fail unless `fail_on` says otherwise."""
        return self.reaches(DEFAULT_FAIL_ON)


_LEVELS = {
    Severity.WRONG: ("error", "error", "1;31"), Severity.UNSUPPORTED: ("warning", "warning", "1;33"),
    Severity.SLOW: ("warning", "warning", "1;36"), Severity.SUGGESTION: ("note", "notice", "2"),
}
"The level in SARIF, in annotations of GitHub, and the color on a terminal."
DEFAULT_FAIL_ON = Severity.SLOW
"Findings of this severity and worse fail, unless an option says otherwise."


def parse_fail_on(text: str, who: str) -> Severity | None:
    """Parse the least severity that fails, or `never`, which is None. Raises InputError, in the name of `who`."""
    names = [*(each.value for each in Severity), NEVER]
    if text not in names:
        raise InputError(f"{who}: found {text!r}; expected {', '.join(names[:-1])} or {NEVER}"
                         f"{suggest_nearest(str(text), names)}")
    return None if text == NEVER else Severity(text)
