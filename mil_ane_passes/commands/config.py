"""List the settings of `lint`: the value of each, and its source (a file or the default).

The file is the one that `lint` would read in this folder. Options on the command line of `lint` take precedence.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .._version import make_json_header
from ..passes.options import read_field_docs
from ..passes.severity import DEFAULT_FAIL_ON
from ..passes.targets import parse_target, split_targets
from ..report.table import format_table
from ..utils.errors import InputError
from ..utils.text_format import format_lines
from .options import add_format_option, add_options
from .output import print_report
from .settings import KEYS, Settings, SettingsFileOptions, read_chosen_settings

__all__ = ["Configuration"]

HELP = "list the settings of lint and their sources"
EXAMPLE = "config"
_DEFAULTS: Mapping[str, Any] = {"target": "all", "fail-on": DEFAULT_FAIL_ON.value}
"Defaults of the settings that have one, used if neither a file nor the command line sets them."


def add(parser: argparse.ArgumentParser) -> None:
    add_options(parser, SettingsFileOptions)
    add_format_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    settings = read_chosen_settings(arguments.config, arguments.no_config)
    _check_target(settings)
    print_report(Configuration(settings), arguments.format)
    return 0


def _check_target(settings: Settings) -> None:
    """Raise the error of `lint` for a wrong target; names of rules need coremltools, and are checked there."""
    try:
        for name in split_targets(settings.target or "all"):
            parse_target(name)
    except InputError as error:
        raise InputError(f"{settings.file}: {error}") from error


@dataclass(frozen=True)
class Configuration:
    """All settings: those of the file, and defaults."""

    settings: Settings

    def list_settings(self) -> list[dict[str, Any]]:
        """List each setting: key, value, source ("file" or "default") and description."""
        docs, from_file = read_field_docs(Settings), self.settings.list_set_keys()
        return [{"key": key, "value": _to_plain(self._find_value(key)),
                 "source": "file" if key in from_file else "default", "help": docs[key.replace("-", "_")]}
                for key in KEYS]

    def _find_value(self, key: str) -> Any:
        found = getattr(self.settings, key.replace("-", "_"))
        if key == "fail-on" and found is None and self.settings.fail_under is not None and not self.settings.baseline:
            return "never"
        return found if found not in (None, {}) else _DEFAULTS.get(key)

    def to_dict(self) -> dict[str, Any]:
        file = self.settings.file
        return {**make_json_header("config"),
                "file": None if file is None else str(file), "settings": self.list_settings()}

    def __str__(self) -> str:
        rows = [(each["key"], _format_value(each["value"]), each["source"], each["help"])
                for each in self.list_settings()]
        head = f"file: {self.settings.file or 'none'}"
        return format_lines([head, "", *format_table(("setting", "value", "from", ""), (str.ljust,) * 4, rows)])


def _to_plain(value: Any) -> Any:
    """Convert a value to JSON types."""
    if isinstance(value, Mapping):
        return {key: _to_plain(each) for key, each in value.items()}
    if isinstance(value, tuple):
        return list(value)
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _format_value(value: Any) -> str:
    """Format a value in one line."""
    if isinstance(value, Mapping):
        return "; ".join(f"{key}: {_format_value(each)}" for key, each in value.items())
    if isinstance(value, list):
        return ", ".join(map(_format_value, value))
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
