"""Settings of `lint` in a project's setup.cfg or pyproject.toml.

    [mil_ane_passes]                       in setup.cfg; in pyproject.toml: [tool.mil_ane_passes]
    select = ANE2, ANE3                    as the command's option of that name; lists may be lists in TOML
    ignore = int-inputs
    target = m4
    fail-on = unsupported
    fail-under = 90
    baseline = lint.json                   relative to the folder of the file

    [mil_ane_passes.options.RULE]          options of one rule
    name = value

    [mil_ane_passes.per-op-ignores]        rules that are ignored at values with such names
    encoder_* = ANE205, ANE301
"""

from __future__ import annotations

import configparser
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ..passes.severity import parse_fail_on
from ..utils.errors import InputError, suggest_nearest
from ..utils.option_spelling import format_option
from .options import flag

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["KEYS", "Settings", "SettingsFileOptions", "parse_percent", "read_chosen_settings", "read_settings"]

SECTION = "mil_ane_passes"
FILES = ("pyproject.toml", "setup.cfg")
_PER_OP_IGNORES = "per-op-ignores"


@dataclass(frozen=True)
class Settings:
    """Settings found in `file`; a field is None (or empty) if the file does not set it."""

    file: Path | None = None
    select: tuple[str, ...] | None = None
    "rules to report, and no others (default: all)"
    ignore: tuple[str, ...] | None = None
    "rules not to report (default: none)"
    per_op_ignores: Mapping[str, tuple[str, ...]] | None = None
    "patterns of names of values, and the rules that are ignored there (default: none)"
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    "options of rules (default: those of each rule)"
    target: str | None = None
    "chips or devices to predict for (default: all)"
    fail_on: str | None = None
    "least severity of findings that fail (default: slow)"
    fail_under: float | None = None
    "minimum percentage of ops predicted on the ANE (default: none)"
    baseline: Path | None = None
    "JSON of an earlier report; its findings do not fail (default: none)"

    def list_set_keys(self) -> frozenset[str]:
        """List the keys that the file sets."""
        return frozenset(key for key in KEYS if getattr(self, key.replace("-", "_")) not in (None, {}))


KEYS = tuple(each.name.replace("_", "-") for each in fields(Settings) if each.name != "file")
"The keys of the section, in the order in which they are listed."


@dataclass(frozen=True)
class SettingsFileOptions:
    """The options that choose the settings file."""

    config: str | None = field(default=None, metadata=flag(metavar="FILE"))
    """the setup.cfg or pyproject.toml to read (default: the nearest one with a section for this tool, searching parent
    folders)"""
    no_config: bool = field(default=False, metadata=flag())
    "ignore settings files"


def read_chosen_settings(config: str | None, no_config: bool) -> Settings:
    """Read the settings file that these options choose. Raises InputError where they contradict each other."""
    if no_config and config is not None:
        raise InputError(f"{format_option('config')} and {format_option('no_config')} exclude each other; use one of "
                         f"them")
    return Settings() if no_config else read_settings(config)


def read_settings(file: str | os.PathLike[str] | None = None, start: str | os.PathLike[str] = ".") -> Settings:
    """Read the settings in `file`, or in the nearest pyproject.toml or setup.cfg from `start` upwards that has any.

    Of two files in one folder, pyproject.toml wins. Raises InputError for a file that cannot be read, one that was
    named but has no section of ours, unknown keys (with the nearest) and values of the wrong kind.
    """
    if file is not None:
        inputs = Path(file)
        if not inputs.is_file():
            raise InputError(f"{inputs}: no such file; expected a setup.cfg or a pyproject.toml")
        found = _read_section(inputs)
        if found is None:
            raise InputError(f"{inputs}: has no section {_format_heading(inputs)}; add the section, or choose another "
                             f"file")
        return _make_settings(inputs, found)
    folder = Path(os.path.abspath(start))
    for path in (parent / name for parent in (folder, *folder.parents) for name in FILES):
        if os.path.isfile(path) and os.access(path, os.R_OK):
            found = _read_section(path)
            if found is not None:
                return _make_settings(path, found)
    return Settings()


def _is_toml(path: Path) -> bool:
    return path.suffix == ".toml"


def _format_heading(path: Path) -> str:
    return f"[tool.{SECTION}]" if _is_toml(path) else f"[{SECTION}]"


def _read_section(path: Path) -> dict[str, Any] | None:
    """Read our section of the file, or return None. A file that does not mention our name is not parsed."""
    text = path.read_text(encoding="utf-8-sig", errors="replace")
    if not re.search(r"mil[_-]ane[_-]passes", text):
        return None
    return _read_toml_section(path, text) if _is_toml(path) else _read_ini_section(path, text)


def _read_toml_section(path: Path, text: str) -> dict[str, Any] | None:
    try:
        tools = tomllib.loads(text).get("tool", {})
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InputError(
            f"{path}: cannot be read as TOML ({error}); fix it, or use {format_option('no_config')}"
        ) from error
    tools = tools if isinstance(tools, dict) else {}
    _reject_misspelt_section(path, tools)
    found = tools.get(SECTION)
    if found is not None and not isinstance(found, dict):
        raise InputError(f"{path}: found {found!r} as tool.{SECTION}; expected a table")
    return found


class _Parser(configparser.ConfigParser):
    """A parser that leaves the case of keys: patterns are names of values."""

    def optionxform(self, optionstr: str) -> str:
        return optionstr


def _read_ini_section(path: Path, text: str) -> dict[str, Any] | None:
    parser = _Parser(interpolation=None, default_section="", delimiters=("=",))
    try:
        parser.read_string(_blank_other_sections(text), source=str(path))
    except configparser.Error as error:
        words = " ".join(str(error).split())
        raise InputError(f"{path}: cannot be read ({words}); fix it, or use {format_option('no_config')}") from error
    _reject_misspelt_section(path, parser.sections())
    ours = [name for name in parser.sections() if name == SECTION or name.startswith(f"{SECTION}.")]
    if not ours:
        return None
    found: dict[str, Any] = _read_options(parser, SECTION) if parser.has_section(SECTION) else {}
    if parser.has_section(f"{SECTION}.{_PER_OP_IGNORES}"):
        found[_PER_OP_IGNORES] = dict(parser.items(f"{SECTION}.{_PER_OP_IGNORES}"))
    for name in (each for each in ours if each != f"{SECTION}.{_PER_OP_IGNORES}"):
        rule = name.removeprefix(f"{SECTION}.options.")
        if rule == name and name != SECTION:
            raise InputError(f"{path}: unknown section [{name}]; expected [{SECTION}], "
                             f"[{SECTION}.{_PER_OP_IGNORES}] or [{SECTION}.options.RULE]")
        if rule != name:
            found.setdefault("options", {})
            if not isinstance(found["options"], dict):
                raise InputError(f"{path}: found {found['options']!r} as options; expected sections "
                                 f"[{SECTION}.options.RULE]")
            found["options"][rule] = _read_options(parser, name)
    return found


def _blank_other_sections(text: str) -> str:
    """Replace the lines of sections of other tools, which may have other forms, by empty ones."""
    kept, ours = [], True
    for line in text.splitlines():
        if line.startswith("["):
            ours = re.search(r"mil[_-]ane[_-]passes", line) is not None
        kept.append(line if ours else "")
    return "\n".join(kept)


def _read_options(parser: configparser.ConfigParser, section: str) -> dict[str, Any]:
    """Read the keys of a section, in small letters, and their values."""
    return {key.lower(): value for key, value in parser.items(section)}


def _reject_misspelt_section(path: Path, names: Any) -> None:
    wrong = next((name for name in names if name != SECTION
                  and name.replace("-", "_").removeprefix("tool:") == SECTION), None)
    if wrong is not None:
        raise InputError(f"{path}: found a section '{wrong}'; expected {_format_heading(path)}")


def _make_settings(path: Path, found: dict[str, Any]) -> Settings:
    said = {key.replace("_", "-"): value for key, value in found.items()}
    if len(said) < len(found):
        twice = next(key for key in found if "_" in key and key.replace("_", "-") in found)
        raise InputError(f"{path}: found both '{twice.replace('_', '-')}' and '{twice}'; expected one of them")
    for key in said:
        if key not in KEYS:
            raise InputError(f"{path}: no key '{key}' in {_format_heading(path)}; expected {', '.join(KEYS)}"
                             f"{suggest_nearest(key, KEYS)}")
    options = said.get("options", {})
    if not isinstance(options, dict) or not all(isinstance(each, dict) for each in options.values()):
        raise InputError(f"{path}: found {options!r} as options; expected a table for each rule")
    baseline, target = _read_text(path, "baseline", said), _read_text(path, "target", said)
    return Settings(
        path, _read_list(path, "select", said), _read_list(path, "ignore", said), _read_ignores(path, said), options,
        target,
        _read_severity(path, said),
        parse_percent(said["fail-under"], f"{path}: fail-under") if "fail-under" in said else None,
        path.parent / baseline if baseline is not None else None)


def _read_text(path: Path, key: str, said: Mapping[str, Any]) -> str | None:
    value = said.get(key)
    if value is not None and (not isinstance(value, str) or not value.strip()):
        raise InputError(f"{path}: found {key} {value!r}; expected a string")
    return value


def _read_ignores(path: Path, said: Mapping[str, Any]) -> dict[str, tuple[str, ...]] | None:
    table = said.get(_PER_OP_IGNORES)
    if table is not None and not isinstance(table, dict):
        raise InputError(f"{path}: found {_PER_OP_IGNORES} {table!r}; expected a table from patterns to rules")
    return None if table is None else {pattern: _read_list(path, pattern, table) or () for pattern in table}


def _read_severity(path: Path, said: Mapping[str, Any]) -> str | None:
    text = _read_text(path, "fail-on", said)
    if text is not None:
        parse_fail_on(text, f"{path}: fail-on")
    return text


def _read_list(path: Path, key: str, said: Mapping[str, Any]) -> tuple[str, ...] | None:
    if key not in said:
        return None
    value = said[key]
    parts = [part for part in re.split(r"[\s,]+", value) if part] if isinstance(value, str) else value
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        raise InputError(f"{path}: found {key} {value!r}; expected rules, e.g. ANE3, int-inputs")
    return tuple(parts) or None


def parse_percent(value: Any, who: str) -> float:
    """Parse a percentage: 0, or 1 to 100. Raises InputError for anything else, and for a share such as 0.9."""
    try:
        number = float("nan") if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = float("nan")
    if not 0 <= number <= 100:
        raise InputError(f"{who}: found {value!r}; expected a percentage, 0 to 100")
    if 0 < number < 1:  # a share: as a percentage, the gate would hardly ever fail
        raise InputError(f"{who}: found {value!r}, less than 1 %; expected a percentage, such as "
                         f"{number * 100:g}, or 0")
    return number
