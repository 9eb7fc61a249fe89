"""Which cases pass in one run of coremltools' own tests and not in another; both are files that `--results` wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .explained import find_explanation

__all__ = ["compare_results"]


def compare_results(first: Path, second: Path) -> int:
    """Print what passes in one file only; returns how many pass in the first and, unexplained, not in the second."""
    one, other = _read_results(first), _read_results(second)
    lost = [case for case, line in one.items() if _has_passed(line) and not _has_passed(other.get(case))]
    won = [case for case, line in other.items() if _has_passed(line) and not _has_passed(one.get(case))]
    for path, lines in ((first, one), (second, other)):
        print(f"{path}: {len(lines)} cases, {sum(map(_has_passed, lines.values()))} passed")
    _print_cases(f"passed in {first} only: {len(lost)}", lost, other)
    _print_cases(f"passed in {second} only: {len(won)}", won, one)
    return sum(find_explanation(case, patched=True) is None for case in lost)


def _read_results(path: Path) -> dict[str, dict[str, Any]]:
    """The last line of each case: a file may have been written to by several runs."""
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return {line["case"]: line for line in lines}


def _has_passed(line: dict[str, Any] | None) -> bool:
    return line is not None and line["outcome"] == "passed"


def _print_cases(title: str, cases: list[str], there: dict[str, dict[str, Any]]) -> None:
    print(title)
    for case in sorted(cases):
        line = there.get(case)
        print(f"  {case}: {'did not run' if line is None else line['outcome'] + ': ' + repr(line['message'][:200])}"
              f" in the other{_format_explanation(case)}")


def _format_explanation(case: str) -> str:
    reason = find_explanation(case, patched=True)
    return "" if reason is None else f" (explained: {reason})"
