"""Requests: a command and its checked options, with the key by which results of earlier runs are compared."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any

from .._version import __version__
from ..passes.max_growth import DEFAULT_MAX_GROWTH
from ..utils.budget import DEFAULT_MAX_STEPS
from ..utils.errors import InputError, suggest_nearest

__all__ = ["COMMANDS", "REPORT_SUFFIXES", "Request", "describe_tool"]

REPORT_SUFFIXES = {"text": ".txt", "json": ".json", "sarif": ".sarif", "html": ".html"}
"The forms of a lint report, and their file suffixes."
COMMANDS: Mapping[str, Mapping[str, Any]] = {
    "rewrite": {"preset": "safe", "target": "all", "passes": None, "options": None, "feeds": (), "ranges": None,
                "verify": True, "seeds": None, "link": False, "dry_run": False, "max_growth": DEFAULT_MAX_GROWTH,
                "strict": False, "max_steps": DEFAULT_MAX_STEPS, "max_seconds": None},
    "lint": {"target": "all", "select": None, "ignore": None, "options": None, "fail_under": None, "report": "text"},
}
"The options of each command, with their defaults."


@dataclass(frozen=True)
class Request:
    """A command and all its options as plain data, the digests of the files of `feeds`, and the `tool` that runs it."""

    command: str
    options: Mapping[str, Any]
    digests: tuple[str, ...]
    tool: Mapping[str, Any]

    @classmethod
    def of(cls, command: str, given: Mapping[str, Any]) -> Request:
        """Make a request.

        Raises InputError for an unknown command or option, and for options that are not plain data.
        """
        if command not in COMMANDS:
            raise InputError(f"batch: no command '{command}'; expected {' or '.join(COMMANDS)}"
                             f"{suggest_nearest(command, COMMANDS)}")
        known = COMMANDS[command]
        for name in given:
            if name not in known:
                raise InputError(f"batch: {command} has no option '{name}' here; expected {', '.join(known)}"
                                 f"{suggest_nearest(name, known)}")
        options = {**known, **given}
        if "feeds" in options:
            options["feeds"] = _resolve_feed_paths(options["feeds"])
        if options.get("report", "text") not in REPORT_SUFFIXES:
            raise InputError(f"report: found {options['report']!r}; expected {', '.join(REPORT_SUFFIXES)}")
        try:
            plain = json.loads(json.dumps(options, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise InputError(f"batch: the options go to other processes and into records as plain data ({error}); "
                             "expected texts, numbers, lists and mappings") from error
        return cls(command, plain, tuple(map(_hash_file, plain.get("feeds", ()))), describe_tool())

    @property
    def suffix(self) -> str:
        """The suffix of the result names."""
        return ".mlpackage" if self.command == "rewrite" else REPORT_SUFFIXES[self.options["report"]]

    @property
    def writes(self) -> bool:
        return not self.options.get("dry_run")

    @property
    def is_costly(self) -> bool:
        """True if repeating the work costs more than reading the package once."""
        return bool(self.options.get("verify"))

    def make_comparison_key(self) -> dict[str, Any]:
        """Make the key by which requests are compared: equal keys mean equal results. Files count by content."""
        plain = {name: value for name, value in self.options.items() if name != "feeds"}
        return {"command": self.command, "options": plain, "feeds": list(self.digests), "tool": dict(self.tool)}


@functools.cache
def describe_tool() -> Mapping[str, Any]:
    """Describe this tool: its version and code, the installed plugins, and the version of coremltools."""
    digest = hashlib.sha256()
    home = Path(__file__).parent.parent
    for path in sorted(home.rglob("*.py")):
        digest.update(path.relative_to(home).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    plugins = sorted(f"{point.value} of {point.dist.name} {point.dist.version}" if point.dist else point.value
                     for point in entry_points(group="mil_ane_passes.rules"))
    try:
        host = version("coremltools")
    except PackageNotFoundError:
        host = "none"
    return {"version": __version__, "code": digest.hexdigest(), "coremltools": host, "plugins": plugins}


def _resolve_feed_paths(feeds: Any) -> list[str]:
    """Return the absolute paths of the files of feeds."""
    listed = [] if feeds is None else [feeds] if isinstance(feeds, (str, os.PathLike)) else feeds
    if isinstance(listed, Mapping) or not all(isinstance(each, (str, os.PathLike)) for each in listed):
        raise InputError("feeds: found arrays; a batch hands them on as files: expected the paths of .npz files")
    return [os.path.abspath(each) for each in listed]


def _hash_file(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError as error:
        raise InputError(f"feeds: '{path}' cannot be read ({error.strerror}); expected an .npz with one array for "
                         "each input") from error
