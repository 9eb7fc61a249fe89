"""The class of a rule, ours and anybody's: what it has to state (seen before it is used), its name, whose fault it is.

Codes are capital letters and digits. `ANE` and digits are the project's own (ANE901 and on are patches of the torch
frontend); everybody else takes letters of their own, such as ACME101.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .contract import STAGES, BlockRewrite, BlockRule, Evidence, Exactness, PlanRule, ProgramRewrite, Rewrite, Rule
from .errors import AnePassesError, RuleError

__all__ = ["BASES", "blamed", "flaw", "is_ours", "named", "place"]

BASES: tuple[type[Rule], ...] = (Rule, Rewrite, BlockRule, BlockRewrite, PlanRule, ProgramRewrite)
"""The classes that rules derive from; none is a rule itself."""

_CODE = re.compile(r"[A-Z]+\d+")
_RESERVED_CODE = re.compile(r"ANE\d*")
_SLUG = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TAKEN_NAMES = frozenset({"safe", "full", "guard_begin", "guard_end"})
"Presets, and the passes around ours."
_TAKEN_OPTIONS = frozenset({"target", "measure"})
"Every pass has them."
_PRESETS = ("safe", "full", "named")
_TO_DEFINE = (
    (ProgramRewrite, ("match_program", "rewrite_program")), (BlockRewrite, ("match_block", "rewrite_block")),
    (BlockRule, ("match_block",)), (PlanRule, ("match_plan",)), (Rewrite, ("match", "rewrite")), (Rule, ("match",)),
)
"The methods that a rule of each kind defines; the first kind that fits counts."


def named(rule: type[Rule]) -> type[Rule]:
    """`rule`, which without a name of its own has that of its module."""
    if not vars(rule).get("name"):
        rule.name = rule.__module__.rpartition(".")[2]
    return rule


def place(rule: type[Rule]) -> str:
    """The class and its file, for messages."""
    try:
        return f"{rule.__name__} in {inspect.getsourcefile(rule)}"
    except (OSError, TypeError):  # made in an interpreter
        return f"{rule.__name__} of {rule.__module__}"


def is_ours(rule: type[Rule]) -> bool:
    """Whether the rule is one of this package."""
    return rule.__module__.startswith(f"{__name__.partition('.')[0]}.")


@contextmanager
def blamed(rule: type[Rule]) -> Iterator[None]:
    """An error in a rule of others is told as that: RuleError with the class, its file and what to do.

    Errors of ours are left as they are, and so is what is no fault of the rule, such as a full disk.
    """
    try:
        yield
    except (AnePassesError, MemoryError, OSError, RecursionError):
        raise
    except Exception as error:
        if is_ours(rule):
            raise
        raise RuleError(f"rule {rule.name} ({place(rule)}) failed with {type(error).__name__}: {error}; tell its "
                        "authors, and uninstall it until it is repaired") from error


def flaw(rule: type[Rule], *, ours: bool, quick: bool = False) -> str:
    """What `rule` lacks to be one, as what was found and what was expected; empty when it is whole.

    `quick` looks at what it states only: to read its source takes time at every start.
    """
    return next(_flaws(rule, ours), "") or ("" if quick else next(_of_code(rule), ""))


def _flaws(rule: type[Rule], ours: bool) -> Iterator[str]:
    for field in ("code", "slug", "evidence"):
        if not getattr(rule, field):
            yield f"has no {field}; every rule states code, slug and evidence"
    yield from _of_words(rule, ours)
    yield from _of_fields(rule)


def _of_code(rule: type[Rule]) -> Iterator[str]:
    methods = next(methods for kind, methods in _TO_DEFINE if issubclass(rule, kind))
    for method in methods:
        if any(getattr(rule, method) is getattr(base, method, None) for base in BASES):
            yield f"does not define {method}(); expected {' and '.join(methods)}"
    try:
        rule()
        options = rule.options()
    except Exception as error:  # whatever the class of somebody else does
        yield f"cannot be made ({type(error).__name__}: {error}); expected no arguments, and options with defaults"
        return
    for name in sorted(_TAKEN_OPTIONS & set(options)):
        yield f"has an option '{name}', which every pass has already; expected another name"


def _of_words(rule: type[Rule], ours: bool) -> Iterator[str]:
    if not _CODE.fullmatch(str(rule.code)):
        yield f"has code {rule.code!r}; expected capital letters and digits, such as ACME101"
    elif not ours and _RESERVED_CODE.fullmatch(rule.code):
        yield (f"has code '{rule.code}', from the range of mil_ane_passes itself; expected letters of its own, such "
               "as ACME101")
    if not _SLUG.fullmatch(str(rule.slug)):
        yield f"has slug {rule.slug!r}; expected small letters, digits and hyphens, such as double-relu"
    if not _NAME.fullmatch(str(rule.name)) or rule.name in _TAKEN_NAMES:
        yield (f"has name '{rule.name}', which is no name for a pass; expected letters, digits and _, and none of "
               f"{', '.join(sorted(_TAKEN_NAMES))}")


def _of_fields(rule: type[Rule]) -> Iterator[str]:
    for field in ("roots", "after", "mended_by"):
        value: Any = getattr(rule, field)
        if not isinstance(value, tuple) or not all(isinstance(each, str) for each in value):
            yield f"has {field}={value!r}; expected a tuple of texts, such as ('relu',)"
    if not isinstance(rule.evidence, tuple) or not all(isinstance(each, Evidence) for each in rule.evidence):
        yield f"has evidence={rule.evidence!r}; expected a tuple of Measured, Vendor or Community"
    if rule.stage not in STAGES:
        yield f"has stage '{rule.stage}'; expected one of {', '.join(STAGES)}"
    if issubclass(rule, Rewrite):
        if rule.preset not in _PRESETS:
            yield f"has preset '{rule.preset}'; expected one of {', '.join(_PRESETS)}"
        if not isinstance(rule.exactness, Exactness):
            yield f"has exactness={rule.exactness!r}; expected an Exactness"
        if rule.preset != "named" and (rule.exactness is Exactness.APPROXIMATE or rule.interface):
            why = "changes dtypes of inputs and outputs" if rule.interface else "is approximate"
            yield f"has preset '{rule.preset}' and {why}; expected preset 'named'"
