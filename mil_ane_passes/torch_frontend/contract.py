"""What a patch is: the fault it fixes, how to tell whether the installed coremltools has that fault, and the fix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

__all__ = ["Lowering", "Patch", "Replacement"]

Lowering = Callable[[Any, Any], None]
"""`lowering(context, node)`: reads the node's inputs from coremltools' TranscriptionContext and adds its outputs."""

_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Replacement:
    """A function of coremltools that is exchanged while the patch is on.

    `module` and `attribute` ("name" or "Class.name") say where it is looked up; `function` gets coremltools' own
    function first, then what it was called with.
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
        replacements: host functions exchanged.
        wrapper: called in place of every lowering with `(lowering, context, node)`, or None.
        name: the file's name, set when it is found.
        text: what the file says of it, set when it is found.
        code: TORCH1xx, its own for good: a new patch takes the next free one.
    """

    title: str
    upstream: tuple[str, ...]
    ops: dict[str, Lowering] = field(default_factory=dict)
    replacements: list[Replacement] = field(default_factory=list)
    name: str = ""
    text: str = ""
    code: str = ""
    wrapper: Callable[[Lowering, Any, Any], None] | None = None
    _probe: Callable[[], str | None] | None = None

    def op(self, *kinds: str) -> Callable[[_Function], _Function]:
        """Register a lowering for torch op kinds: `"index_put"`, `"where.scalarother"`."""
        def register(lowering: _Function) -> _Function:
            self.ops.update(dict.fromkeys(kinds, lowering))
            return lowering
        return register

    def wrap_lowerings(self, function: Callable[[Lowering, Any, Any], None]) -> Callable[[Lowering, Any, Any], None]:
        """Register a function that is called in place of every lowering but those that the user registered."""
        self.wrapper = function
        return function

    def replace_function(self, module: str, attribute: str) -> Callable[[_Function], _Function]:
        """Exchange a function of coremltools: `PATCH.replaces("coremltools....ops", "_cast")`.

        Several patches may exchange one: each gets the function of the patch before it, by name, as coremltools'.
        """
        def register(function: _Function) -> _Function:
            self.replacements.append(Replacement(module, attribute, function))
            return function
        return register

    def probe(self, function: Callable[[], str | None]) -> Callable[[], str | None]:
        """Register the probe: what coremltools does wrong, in words, or None when it is right.

        It runs with coremltools' own functions, whatever is installed. Where it finds nothing wrong, or there is none,
        a patch is needed when coremltools has no lowering for one of its ops.
        """
        self._probe = function
        return function

    def needed(self, lowered_by_host: Callable[[str], bool]) -> str | None:
        """Why the installed host needs this patch, or None."""
        if self._probe is not None:
            try:
                found = self._probe()
            except Exception as error:  # a host of another make: what cannot be asked is not taken to be right
                found = f"fails: {type(error).__name__}: {error}".splitlines()[0]
            if found is not None:
                return found
        missing = sorted(kind for kind in self.ops if not lowered_by_host(kind))
        return f"not implemented: {', '.join(missing)}" if missing else None
