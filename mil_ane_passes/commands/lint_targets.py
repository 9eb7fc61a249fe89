"""`lint` for several targets at once: each package is read once, and its targets are printed side by side."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..package.output_file import write_text_file
from ..utils.errors import InputError
from ..utils.text_format import escape_text
from .batch_sources import Source
from .lint_gates import Gates
from .output import format_error, print_upgrades

if TYPE_CHECKING:
    from ..report.lint import LintReport
    from ..report.lint_matrix import PackageMatrix

__all__ = ["check_target_options", "lint_targets"]

Lint = Callable[[Any], "LintReport"]


def check_target_options(arguments: argparse.Namespace, keywords: Mapping[str, Any]) -> None:
    """Raise InputError for options that apply to one target only."""
    if arguments.format not in ("text", "json"):
        raise InputError(f"--format {arguments.format}: with several targets; expected text or json, or one target")
    for name in ("fix", "statistics", "baseline", "measured", "after", "sizes"):
        if getattr(arguments, name) or keywords.get(name):
            raise InputError(f"--{name} applies to one target, but --target names several; expected one")


def lint_targets(
    arguments: argparse.Namespace, sources: Sequence[Source], linters: Mapping[str, Lint], gates: Gates,
    target: Path | None,
) -> int:
    """Lint each source with each linter, by target; returns the exit code, the worst of all."""
    from ..report.lint_matrix import MatrixCollection

    collection = MatrixCollection(arguments.format, list(linters), arguments.all)
    printed: list[str | None] = []
    failed: list[dict[str, str]] = []
    messages: list[str] = []
    code = 0
    for number, source in enumerate(sources):
        try:
            if source.error:
                raise InputError(source.error)
            matrix, found, fails = _lint_package(source.path, linters, gates)
        except Exception as error:
            message = format_error(error)
            failed.append({"model": source.path, "error": message})
            messages.append(message if source.path in message else f"{source.path}: {message}")
            code = 2
            continue
        printed += ([""] if number and arguments.format == "text" else []) + [collection.add(matrix)]
        messages += found
        code = max(code, int(fails))
    texts = [text for text in (*printed, collection.finish(failed)) if text is not None]
    if target is None:
        print("\n".join(texts))
    else:
        write_text_file(target, "".join(f"{text}\n" for text in texts))
        print(f"written to {target}")
    for message in messages:
        print(f"mil-ane-passes: {escape_text(message)}", file=sys.stderr)
    return code


def _lint_package(path: str, linters: Mapping[str, Lint], gates: Gates) -> tuple[PackageMatrix, list[str], bool]:
    """Lint a package on each target. Returns the matrix, messages about failed gates, and whether one failed."""
    from ..neuralnetwork.loading import load
    from ..report.lint_matrix import PackageMatrix, TargetColumn

    package = load(path)
    columns: list[TargetColumn] = []
    messages: list[str] = []
    fails, not_judged = False, ""
    for name, lint in linters.items():
        report = lint(package)
        if not columns:
            print_upgrades(report)
        columns.append(TargetColumn.of(report))
        not_judged = report.not_judged
        messages += [f"{path} on {name}: {message}" for message in gates.explain_failures(report)]
        fails |= gates.fails(report)
    return PackageMatrix(path, columns, not_judged), messages, fails
