"""The contract of a patch: a fault, a probe that tests the installed coremltools for it, and the fix."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..passes.severity import Severity

__all__ = ["Lowering", "Patch", "Replacement", "describe_fault"]

Lowering = Callable[[Any, Any], None]
"""`lowering(context, node)`: reads the node's inputs from coremltools' TranscriptionContext and adds its outputs."""

_Function = TypeVar("_Function", bound=Callable[..., Any])

_NUMBERED_NAME = re.compile(r"\bis\d+\b|(?<=torch::tensor )\d+\b|(?<=\bInput )\w+(?= has rank )")
"""A symbolic dimension, a torch value or a var, whose number depends on what the process has converted before."""


def describe_fault(error: Exception) -> str:
    """Return the first line of an error's text, or its type; the same text however much was converted before."""
    text = str(error).strip()
    return _NUMBERED_NAME.sub("?", text.splitlines()[0]) if text else type(error).__name__


@dataclass(frozen=True)
class Replacement:
    """A function of coremltools that is replaced while the patch is active.

    `module` and `attribute` ("name" or "Class.name") name where it is looked up; `function` is called with coremltools'
    own function first, then with the arguments of the call.
    """

    module: str
    attribute: str
    function: Callable[..., Any]


@dataclass
class Patch:
    """One fault of coremltools' torch frontend and its fix; each file of `patches/` defines one, called `PATCH`.

    Attributes:
        title: one line: what goes wrong without it.
        upstream: links to the issues and pull requests of coremltools, or "none known".
        ops: lowerings by torch op kind as coremltools names them (lower case, without namespace and trailing `_`).
        replacements: the functions of coremltools to replace.
        wrapper: called in place of every lowering with `(lowering, context, node)`, or None.
        name: the file's name, set by the registry.
        text: the file's docstring, set by the registry.
        code: TORCH1xx, never reused: a new patch gets the next free one.
        severity: WRONG if a model may be silently miscompiled; UNSUPPORTED if the conversion fails.
    """

    title: str
    upstream: tuple[str, ...]
    ops: dict[str, Lowering] = field(default_factory=dict)
    replacements: list[Replacement] = field(default_factory=list)
    name: str = ""
    text: str = ""
    code: str = ""
    severity: Severity = Severity.UNSUPPORTED
    wrapper: Callable[[Lowering, Any, Any], None] | None = None
    _probe: Callable[[], str | None] | None = None

    def op(self, *kinds: str) -> Callable[[_Function], _Function]:
        """Register a lowering for torch op kinds: `"index_put"`, `"where.scalarother"`."""
        def register_lowering(lowering: _Function) -> _Function:
            self.ops.update(dict.fromkeys(kinds, lowering))
            return lowering
        return register_lowering

    def wrap_lowerings(self, function: Callable[[Lowering, Any, Any], None]) -> Callable[[Lowering, Any, Any], None]:
        """Register a function that is called in place of every lowering, except those that the user registered."""
        self.wrapper = function
        return function

    def replace_function(self, module: str, attribute: str) -> Callable[[_Function], _Function]:
        """Replace a function of coremltools: `PATCH.replace_function("coremltools....ops", "_cast")`.

        Several patches may replace the same function: each is called with the function of the previous patch, by name,
        as coremltools' function.
        """
        def register_replacement(function: _Function) -> _Function:
            self.replacements.append(Replacement(module, attribute, function))
            return function
        return register_replacement

    def probe(self, function: Callable[[], str | None]) -> Callable[[], str | None]:
        """Register the probe: it returns what coremltools does wrong, as text, or None when coremltools is correct.

        It runs with coremltools' own functions, even where patches are installed. Where it finds no fault, or a patch
        has no probe, the patch is needed when coremltools has no lowering for one of its ops.
        """
        self._probe = function
        return function

    def needed(self, lowered_by_host: Callable[[str], bool]) -> str | None:
        """Return why the installed coremltools needs this patch, or None."""
        if self._probe is not None:
            try:
                found = self._probe()
            except Exception as error:  # a failing probe (another coremltools version) is no evidence of correctness
                found = f"fails: {type(error).__name__}: {describe_fault(error)}"
            if found is not None:
                return found
        missing = sorted(kind for kind in self.ops if not lowered_by_host(kind))
        return f"not implemented: {', '.join(missing)}" if missing else None
