"""Pass names with settings, for clients that pass on a pipeline as a list of names, such as ExecuTorch.

`ane::full{target=m4}` is an entire preset with its guard, `ane::triangle_cumsum{target=m4}` one pass, and
`ane::guard_begin{target=m4 max_growth=0.01 NAME.OPTION=VALUE}` has the settings of all our passes up to
`ane::guard_end`. Such names become passes of coremltools when they are looked up.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote, unquote

from coremltools.converters.mil.mil.passes.graph_pass import AbstractGraphPass
from coremltools.converters.mil.mil.passes.pass_registry import PASS_REGISTRY

from ..utils.errors import InputError, suggest_nearest
from .corrected_passes import CorrectedName, get_corrected_pass

__all__ = ["format_pass_name", "install_lookup", "parse_pass_name"]

_log = logging.getLogger("mil_ane_passes")
_PASS_NAME = re.compile(r"ane::(?P<name>\w+)(?:\{(?P<settings>[^{}]*)\})?", re.ASCII)
_UNQUOTED_CHARACTERS = "-._~:/+"
"Characters of values that are not quoted, besides letters and digits; others are percent-encoded as in URLs."
MakePass = Callable[[str, Mapping[str, str]], "type[AbstractGraphPass] | None"]


def format_pass_name(name: str, settings: Mapping[str, Any]) -> str:
    """Format `ane::name{key=value ...}`, or `ane::name` without settings."""
    if not settings:
        return f"ane::{name}"
    pairs = " ".join(f"{key}={quote(str(value), safe=_UNQUOTED_CHARACTERS)}" for key, value in settings.items())
    return f"ane::{name}{{{pairs}}}"


def parse_pass_name(pass_id: str) -> tuple[str, dict[str, str]] | None:
    """Parse the name and settings of one of our passes; None for other names.

    Raises InputError for settings that cannot be read.
    """
    found = _PASS_NAME.fullmatch(pass_id)
    if found is None:
        return None
    settings: dict[str, str] = {}
    for pair in re.split(r"[\s,;]+", (found["settings"] or "").strip()):
        key, equals, value = pair.partition("=")
        if pair and not (key and equals and value):
            raise InputError(f"{pass_id}: cannot read the setting {pair!r}; expected key=value, such as target=m4")
        if pair:
            settings[key] = unquote(value)
    return found["name"], settings


class _PassesWithSettings(dict[str, Any]):
    """The registered passes by id, extended by our passes whose ids contain settings and by corrected ones."""

    make: MakePass

    def __contains__(self, pass_id: object) -> bool:
        return super().__contains__(pass_id) or self._find_or_make(pass_id) is not None

    def __getitem__(self, pass_id: str) -> Any:
        found = super().__getitem__(pass_id)
        return get_corrected_pass(pass_id, found) if isinstance(pass_id, CorrectedName) else found

    def __missing__(self, pass_id: str) -> Any:
        built = self._find_or_make(pass_id)
        if built is None:
            raise KeyError(pass_id)
        return built

    def _find_or_make(self, pass_id: object) -> type[AbstractGraphPass] | None:
        found = parse_pass_name(pass_id) if isinstance(pass_id, str) else None
        if found is None:
            return None
        made = self.make(*found)
        if made is None and found[1]:  # coremltools' KeyError, which follows, says only that it is not found
            near = suggest_nearest(f"ane::{found[0]}", ["ane::safe", "ane::full", *filter(_PASS_NAME.fullmatch, self)])
            _log.warning("no pass '%s'%s", pass_id, near)
        return made


def install_lookup(make: MakePass) -> None:
    """Let coremltools find passes by names with settings: `make(name, settings)` is the class, or None if unknown."""
    if not isinstance(PASS_REGISTRY.passes, _PassesWithSettings):
        PASS_REGISTRY.passes = _PassesWithSettings(PASS_REGISTRY.passes)
    PASS_REGISTRY.passes.make = make
