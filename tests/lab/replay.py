"""Record what rewriting and linting produce, to compare two states of this code.

    python -m tests.lab.replay FOLDER [--models PACKAGES] [--only TEXT]
    python -m tests.lab.replay FOLDER --against EARLIER [--renames FILE]

The first form writes one text file for each subject into FOLDER: the MIL text and a digest of all constants before and
after, the steps of the rewrite, and the JSON of `lint`. Subjects are the packages in fixtures/, the examples of every
rule and rewrite (each run alone, with the example's options), and the packages in PACKAGES, which `python -m
tests.package.real PACKAGES` makes. The second form compares two such folders and exits with 1 if they differ. FILE has
a rename on each line, `old -> new`, applied to the earlier texts as whole words before they are compared.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from coremltools.converters.mil.mil import Builder, Program

import mil_ane_passes as ane
from mil_ane_passes.ir.printer import format_program
from mil_ane_passes.ir.query import iterate_ops
from mil_ane_passes.passes.contract import Rewrite
from mil_ane_passes.passes.engine import apply_rewrite
from mil_ane_passes.passes.registry import get_all_rules

FIXTURES = Path(__file__).parents[2] / "fixtures"
_PRESETS, _TARGETS = ("safe", "full"), ("m1", "m4")
_MAX_PRINTED_LINES = 40
"Lines of a difference that are printed for each subject."


def describe_program(program: Program) -> str:
    """MIL text of `program`, then a digest of the values of all its constants in order."""
    digest = hashlib.sha256()
    for _, op in iterate_ops(program):
        if op.op_type == "const":
            value = op.outputs[0].val
            digest.update(value.tobytes() if hasattr(value, "tobytes") else repr(value).encode())
    return f"{format_program(program)}\nconstants: {digest.hexdigest()[:16]}"


def describe_lint(source: Any, target: str) -> str:
    found = ane.lint(source, target=target).to_dict()
    text = json.dumps(found, indent=1, sort_keys=True, default=str)
    return f"lint {target}: {text.replace(f'{FIXTURES.parent}/', '<root>/')}"


def describe_rewrite(source: Any, preset: str, target: str) -> str:
    """The result of the whole preset, unverified, and which passes fired how often."""
    report = ane.rewrite(source, preset=preset, target=target, verify=False)
    fired = {each.rule: len(each.fired) for each in report.traces if each.fired}
    program = report.package.program if report.package is not None else None
    text = "not changed" if program is None or not report.changed else describe_program(program)
    return f"rewrite {preset} {target}: {json.dumps(fired, sort_keys=True)}\n{text}"


def describe_package(path: Path) -> str:
    parts = [describe_program(ane.load(path).program)]
    for target in _TARGETS:
        parts.append(describe_lint(path, target))
        parts += [describe_rewrite(path, preset, target) for preset in _PRESETS]
    return "\n\n".join(parts)


def describe_example(rule: type[Any], number: int) -> str:
    """One example of `rule` before and after that rule alone, and its lint."""
    example = list(rule().examples())[number]
    program = example.build()
    parts = [f"example: {example.name}; expected: {example.reason!r}; options: {example.options!r}",
             describe_program(program), describe_lint(program, "m4")]
    if issubclass(rule, Rewrite):
        apply_rewrite(rule.configured(**example.options), program)
        parts.append(describe_program(program))
    return "\n\n".join(parts)


def iterate_subjects(models: Path | None) -> Iterator[tuple[str, Callable[[], str]]]:
    """Every subject's name, which is the name of its file, and the function that describes it."""
    for folder, kind in ((FIXTURES, "fixture"), (models, "model")):
        for path in sorted(folder.glob("*.mlpackage")) if folder is not None else ():
            yield f"{kind}-{path.stem}", lambda path=path: describe_package(path)
    for name, rule in sorted(get_all_rules().items()):
        for number in range(len(list(rule().examples()))):
            yield f"rule-{name}-{number:02}", lambda rule=rule, number=number: describe_example(rule, number)


def record_subjects(folder: Path, models: Path | None, only: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    spoken = time.monotonic()
    for name, describe in iterate_subjects(models):
        if only not in name:
            continue
        Builder.name_count.clear()  # values are named by a counter of the process
        try:
            text = describe()
        except Exception as error:  # recorded like a result: it has to stay the same, too
            text = f"{type(error).__name__}: {error}"
        (folder / f"{name}.txt").write_text(text + "\n", encoding="utf-8")
        if time.monotonic() - spoken > 10:
            spoken = time.monotonic()
            print(name, file=sys.stderr, flush=True)


def compare_folders(earlier: Path, later: Path, renames: dict[str, str]) -> int:
    """Print how the texts of two folders differ; returns the number of subjects that do."""
    pattern = re.compile(r"\b(" + "|".join(map(re.escape, sorted(renames, key=len, reverse=True))) + r")\b")
    names = sorted({each.name for folder in (earlier, later) for each in folder.glob("*.txt")})
    different = 0
    for name in names:
        old, new = (each / name for each in (earlier, later))
        if not (old.exists() and new.exists()):
            print(f"{name}: only in {old.parent if old.exists() else new.parent}")
            different += 1
            continue
        before, after = (each.read_text(encoding="utf-8") for each in (old, new))
        if renames:
            before = pattern.sub(lambda found: renames[found[0]], before)
        if before != after:
            different += 1
            texts = before.splitlines(), after.splitlines()
            lines = list(difflib.unified_diff(*texts, str(old), str(new), n=1, lineterm=""))
            print(*lines[:_MAX_PRINTED_LINES], f"({len(lines)} lines)", sep="\n")
    print(f"{len(names)} subjects, {different} differ")
    return different


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.lab.replay", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--against", type=Path)
    parser.add_argument("--renames", type=Path)
    options = parser.parse_args(arguments)
    if options.against is None:
        record_subjects(options.folder, options.models, options.only)
        return 0
    lines = options.renames.read_text(encoding="utf-8").splitlines() if options.renames is not None else []
    return bool(
        compare_folders(options.against, options.folder, dict(line.split(" -> ") for line in lines if " -> " in line))
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
