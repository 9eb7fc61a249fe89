"""Commands that fix findings, as the reports print them: with the source, the target, and names of values."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ..package.executorch_program import find_address
from ..passes.finding import Finding
from ..transforms.contract import PART_SUFFIXES, build_part_path
from ..utils.text_format import format_command_path, join_words

if TYPE_CHECKING:
    from .lint import LintReport

__all__ = ["format_adapt_command", "format_dedup_command", "format_preset_command", "format_rewrite_command",
           "format_split_command", "format_upgrade_command"]

_OUTPUT_PLACEHOLDER, _PROGRAM_PLACEHOLDER = "OUT.mlpackage", "OUT.pte"
"Placeholders for the output in printed commands, which the user replaces; the second for an ExecuTorch program."
_FOLDER_PLACEHOLDER = "OUT"


def format_rewrite_command(report: LintReport, passes: Iterable[str], *, dry_run: bool = False) -> str:
    """Format the command that runs `passes`; the call, where the model is not a file."""
    return _format_rewrite(report, "passes", ",".join(name.removeprefix("ane::") for name in passes), dry_run)


def format_preset_command(report: LintReport, preset: str) -> str:
    """Format the command that runs a preset; the call, where the model is not a file."""
    return _format_rewrite(report, "preset", preset, False)


def _format_rewrite(report: LintReport, option: str, value: str, dry_run: bool) -> str:
    in_program = find_address(report.model) is not None
    if in_program or os.path.exists(report.model):
        output = _PROGRAM_PLACEHOLDER if in_program else _OUTPUT_PLACEHOLDER
        return join_words(["mil-ane-passes", "rewrite", format_command_path(report.model), "-o", output,
                           f"--{option}", value, *_list_target_arguments(report), *["--dry-run"] * dry_run])
    given = "" if report.target == "all" else f", target={report.target!r}"
    return f"mil_ane_passes.rewrite(..., {option}={value!r}{given}{', dry_run=True' * dry_run})"


def format_upgrade_command(report: LintReport, deployment_target: str) -> str:
    """Format the command that upgrades a NeuralNetwork; the call, where the model is not a file."""
    if os.path.exists(report.model):
        return join_words(["mil-ane-passes", "upgrade", format_command_path(report.model), "-o", _OUTPUT_PLACEHOLDER,
                           "--deployment-target", deployment_target])
    return f"mil_ane_passes.upgrade(..., deployment_target={deployment_target!r})"


def format_adapt_command(report: LintReport) -> str:
    """Format the command that adapts a language model."""
    return join_words(["mil-ane-passes", "adapt", format_command_path(report.model), "-o", _FOLDER_PLACEHOLDER,
                       *_list_target_arguments(report)])


def format_dedup_command(report: LintReport) -> str | None:
    """Format the command that stores equal weights once; None for a model that is not a package on disk."""
    if find_address(report.model) is not None or not os.path.isdir(report.model):
        return None
    return join_words(["mil-ane-passes", "edit", format_command_path(report.model), "-o", _OUTPUT_PLACEHOLDER,
                       "--dedup-weights"])


def _list_target_arguments(report: LintReport) -> list[str]:
    return [] if report.target == "all" else ["--target", report.target]


def format_split_command(report: LintReport, item: Finding) -> str | None:
    """Format the command that makes the cuts of a finding; None for a model that is not on disk.

    A second cut is made in the first part of the first. The command cuts all functions if the cuts are suggested in
    each, else the one of the finding, so that the parts do not have the others.
    """
    if not os.path.exists(report.model):
        return None
    functions = report.plan.program.functions.keys()
    alone = len(functions) > 1 and not functions <= report.functions_by_cut.get(item.split_at, set())
    commands: list[str] = []
    source = format_command_path(report.model)
    if report.upgraded:  # `edit` takes packages only
        upgraded = "UPGRADED.mlpackage"
        commands.append(join_words(["mil-ane-passes", "upgrade", source, "-o", upgraded]))
        source = upgraded
    for at, values in enumerate(item.split_at):
        function = ["--function", item.function] if alone else []
        output = source if at else _OUTPUT_PLACEHOLDER
        commands.append(join_words(
            ["mil-ane-passes", "edit", source, "-o", output, *function, "--split-at", *values]))
        source = os.fspath(build_part_path(Path(_OUTPUT_PLACEHOLDER), PART_SUFFIXES[0]))
    return " && ".join(commands)
