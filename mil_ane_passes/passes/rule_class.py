"""Checks and names of rule classes, ours and those of plugins: required fields, default names, and error attribution.

Codes are capital letters and digits. `ANE` with digits (rules) and `TORCH` with digits (patches of the torch frontend)
are reserved for this project; plugins use letters of their own, such as ACME101.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from coremltools.converters.mil.mil import Operation

from ..utils.errors import AnePassesError, RuleError
from ..utils.text_format import format_count
from .contract import (
    STAGES,
    BlockRewrite,
    BlockRule,
    Evidence,
    Exactness,
    Hit,
    Miss,
    PlanRule,
    ProgramRewrite,
    Rewrite,
    Rule,
    Severity,
)
from .targets import GENERATIONS, Gate

__all__ = [
    "RULE_BASE_CLASSES",
    "Position",
    "RuleFailure",
    "assign_default_name",
    "check_answer",
    "convert_rule_errors",
    "find_flaw",
    "format_class_location",
    "format_rule_location",
    "is_own_rule",
    "is_rule_fault",
    "make_rule_error",
    "shares_code",
]

RULE_BASE_CLASSES: tuple[type[Rule], ...] = (Rule, Rewrite, BlockRule, BlockRewrite, PlanRule, ProgramRewrite)
"""The classes that rules derive from; none is a rule itself."""

_CODE = re.compile(r"[A-Z]+\d+")
_RESERVED_CODE = re.compile(r"(ANE|TORCH)\d*")
_SLUG = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_WORD_START = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[a-z])(?<!Fp)(?<!Int)(?=\d)")
"Where a word begins in a class name; the digits of a dtype (Fp16, Int8) belong to the word before them."
_RESERVED_NAMES = frozenset({"safe", "full", "guard_begin", "guard_end"})
"Names of presets, and of the passes around ours."
_RESERVED_OPTIONS = frozenset({"target", "measure", "strict"})
"Options that every pass has."
_PRESETS = ("safe", "full", "named")
_REQUIRED_METHODS = (
    (ProgramRewrite, ("match_program", "rewrite_program")), (BlockRewrite, ("match_block", "rewrite_block")),
    (BlockRule, ("match_block",)), (PlanRule, ("match_plan",)), (Rewrite, ("match", "rewrite")), (Rule, ("match",)),
)
"The methods that a rule of each kind defines; the first matching kind counts."


def assign_default_name(rule: type[Rule]) -> type[Rule]:
    """Assign defaults and return `rule`: the class name in snake case if it has no name, and the code and slug (and
    evidence) of the first rule that it fixes if it has none."""
    if not vars(rule).get("name"):
        rule.name = _WORD_START.sub("_", rule.__name__).lower()
    if not rule.code and issubclass(rule, Rewrite) and isinstance(rule.fixes, tuple) and rule.fixes:
        rule.code, rule.slug = rule.fixes[0].code, rule.fixes[0].slug
        if not rule.evidence:
            rule.evidence = tuple(dict.fromkeys(each for problem in rule.fixes for each in problem.evidence))
    return rule


def shares_code(rule: type[Rule]) -> bool:
    """Return whether `rule` is a rewrite under the code of a problem that another rule finds."""
    return issubclass(rule, Rewrite) and any(rule.code == problem.code for problem in rule.fixes)


def format_class_location(rule: type[Rule]) -> str:
    """Format the class and its file, for messages."""
    try:
        return f"{rule.__name__} in {inspect.getsourcefile(rule)}"
    except (OSError, TypeError):  # made in an interpreter
        return f"{rule.__name__} of {rule.__module__}"


def is_own_rule(rule: type[Rule]) -> bool:
    """Return whether the rule is part of this package."""
    return rule.__module__.startswith(f"{__name__.partition('.')[0]}.")


@dataclass(frozen=True)
class RuleFailure:
    """Failure of a rule on a program: the reason, the first op at which it failed, and the number of such ops.

    `op_type` and `value` are empty if the rule was matching an entire block, program or plan.
    """

    rule: str
    code: str
    slug: str
    function: str
    op_type: str
    value: str
    reason: str
    places: int = 1

    @classmethod
    def of(cls, rule: type[Rule], error: Exception, function: str, op: Operation | None) -> RuleFailure:
        own = isinstance(error, RuleError)
        reason = (
            str(error).removeprefix(f"{format_rule_location(rule)} ") if own else f"{type(error).__name__}: {error}"
        )
        value = "" if op is None else op.outputs[0].name if op.outputs else op.name
        return cls(rule.name or rule.__name__, rule.code, rule.slug, function, "" if op is None else str(op.op_type),
                   str(value), reason)

    def to_dict(self) -> dict[str, Any]:
        return {"pass": self.rule, "code": self.code, "slug": self.slug, "function": self.function or None,
                "op_type": self.op_type or None, "value": self.value or None, "reason": self.reason,
                "places": self.places}

    @property
    def at(self) -> str:
        """The location of the failure, as text."""
        more = f" and {format_count(self.places - 1, 'other place')}" if self.places > 1 else ""
        function = "" if self.function in ("", "main") else f"{self.function}:"
        if self.op_type:
            return f"at {function}%{self.value} ({self.op_type}){more}"
        return f"in function '{self.function}'{more}" if self.function else "on the entire program"

    def __str__(self) -> str:
        return f"{self.at}: {self.reason}"


def format_rule_location(rule: type[Rule]) -> str:
    """Format the rule, with the file and the line of its class."""
    try:
        line = inspect.getsourcelines(rule)[1]
        found = f"{inspect.getsourcefile(rule)}:{line}"
    except (OSError, TypeError):  # made in an interpreter
        found = rule.__module__
    return f"rule {rule.name or rule.__name__} ({found})"


def is_rule_fault(error: Exception) -> bool:
    """Return whether an error raised in a rule is the fault of the rule, and not of the user's input or of the disk."""
    return isinstance(error, RuleError) or not isinstance(error, (AnePassesError, OSError))


@contextmanager
def convert_rule_errors(rule: type[Rule], position: Position | None = None) -> Iterator[None]:
    """Convert exceptions raised in a rule to RuleError, with the rule, its file, the current op, and what to do.

    Errors that are not a fault of the rule, such as a full disk, are not converted.
    """
    at = position or Position()
    try:
        yield
    except Exception as error:
        if not is_rule_fault(error):
            raise
        raise make_rule_error(rule, error, at) from error


def make_rule_error(rule: type[Rule], error: Exception, at: Position) -> RuleError:
    """Convert `error`, raised by `rule`, to a RuleError that has the failure as data."""
    if isinstance(error, RuleError) and error.failure is not None:
        return error
    failure = RuleFailure.of(rule, error, at.function, at.op)
    if isinstance(error, RuleError):
        built = error
    else:
        todo = "report it with the model" if is_own_rule(rule) else (
            "report it to its authors, and uninstall it until it is fixed")
        built = RuleError(
            f"rule {rule.name} ({format_class_location(rule)}) failed with {failure.reason}, {failure.at}; {todo}"
        )
    built.failure = failure
    return built


@dataclass
class Position:
    """The current position of a rule: the name of a function, and an op if it matches single ops."""

    function: str = ""
    op: Operation | None = None


def check_answer(rule: Rule, answer: object) -> None:
    """Raise RuleError if `answer`, a result of one of the rule's match methods, is neither a Hit nor a Miss."""
    if not isinstance(answer, (Hit, Miss)):
        raise RuleError(f"{format_rule_location(type(rule))} returned {answer!r}; expected a Hit or a Miss")


def find_flaw(rule: type[Rule], *, ours: bool, quick: bool = False) -> str:
    """Find the first flaw of a rule class and return it as what was found and what was expected.

    The result is empty if the class has no flaw.

    `quick` checks only the declared fields: reading its source takes time at every start.
    """
    return next(_iterate_statement_flaws(rule, ours), "") or ("" if quick else next(_iterate_code_flaws(rule), ""))


def _iterate_statement_flaws(rule: type[Rule], ours: bool) -> Iterator[str]:
    for field in ("code", "slug", "evidence"):
        if not getattr(rule, field):
            yield f"has no {field}; every rule states code, slug and evidence, or the rules that it `fixes`"
    yield from _iterate_naming_flaws(rule, ours)
    yield from _iterate_field_flaws(rule)


def _iterate_code_flaws(rule: type[Rule]) -> Iterator[str]:
    methods = next(methods for kind, methods in _REQUIRED_METHODS if issubclass(rule, kind))
    for method in methods:
        if any(getattr(rule, method) is getattr(base, method, None) for base in RULE_BASE_CLASSES):
            yield f"does not define {method}(); expected {' and '.join(methods)}"
    try:
        rule()
        options = rule.options()
    except Exception as error:  # a plugin's class may raise anything
        yield (f"cannot be instantiated ({type(error).__name__}: {error}); expected a constructor without arguments, "
               "and options with defaults")
        return
    for name in sorted(_RESERVED_OPTIONS & set(options)):
        yield f"has an option '{name}', which is an option of every pass; expected another name"


def _iterate_naming_flaws(rule: type[Rule], ours: bool) -> Iterator[str]:
    if not _CODE.fullmatch(str(rule.code)):
        yield f"has code {rule.code!r}; expected capital letters and digits, such as ACME101"
    elif not ours and _RESERVED_CODE.fullmatch(rule.code) and not shares_code(rule):
        yield (f"has code '{rule.code}', which is reserved for mil_ane_passes; expected other letters, such as ACME101")
    if not _SLUG.fullmatch(str(rule.slug)):
        yield f"has slug {rule.slug!r}; expected lower-case letters, digits and hyphens, such as double-relu"
    if not _NAME.fullmatch(str(rule.name)) or rule.name in _RESERVED_NAMES:
        yield (f"has name '{rule.name}', which is not a valid pass name; expected letters, digits and _, but none of "
               f"{', '.join(sorted(_RESERVED_NAMES))}")


def _iterate_target_flaws(rule: type[Rule]) -> Iterator[str]:
    if not isinstance(rule.targets, Gate):
        yield f"has targets={rule.targets!r}; expected a Gate, such as Gate('m1', 'm4')"
        return
    try:
        rule.targets.includes(GENERATIONS[0])
    except AnePassesError as error:
        yield f"has targets={rule.targets!r}, which is not valid: {error}"


def _iterate_field_flaws(rule: type[Rule]) -> Iterator[str]:
    for field in ("roots", "after"):
        value: Any = getattr(rule, field)
        if not isinstance(value, tuple) or not all(isinstance(each, str) for each in value):
            yield f"has {field}={value!r}; expected a tuple of strings, such as ('relu',)"
    if not isinstance(rule.evidence, tuple) or not all(isinstance(each, Evidence) for each in rule.evidence):
        yield f"has evidence={rule.evidence!r}; expected a tuple of Measured, Vendor or Community"
    yield from _iterate_target_flaws(rule)
    if rule.severity is not None and not isinstance(rule.severity, Severity):
        yield f"has severity={rule.severity!r}; expected a Severity, such as Severity.SLOW"
    if rule.stage not in STAGES:
        yield f"has stage '{rule.stage}'; expected one of {', '.join(STAGES)}"
    if issubclass(rule, Rewrite):
        if not isinstance(rule.fixes, tuple) or not all(isinstance(each, type) and issubclass(each, Rule)
                                                        for each in rule.fixes):
            yield f"has fixes={rule.fixes!r}; expected a tuple of classes of rules, such as (Cumsum,)"
        if rule.preset not in _PRESETS:
            yield f"has preset '{rule.preset}'; expected one of {', '.join(_PRESETS)}"
        if not isinstance(rule.exactness, Exactness):
            yield f"has exactness={rule.exactness!r}; expected an Exactness"
        if rule.preset != "named" and (rule.exactness is Exactness.APPROXIMATE or rule.interface):
            why = "changes dtypes of inputs and outputs" if rule.interface else "is approximate"
            yield f"has preset '{rule.preset}' and {why}; expected preset 'named'"
