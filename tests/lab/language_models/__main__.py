"""Which encoders and decoders become packages without unsupported ops, and are results and tokens the same?

    python -m tests.lab.language_models [NAME ...] [--record]

All go through `adapt`, which compares them with the source on random feeds: encoders at several lengths, decoders of
`builders.py` in each form of their cache over steps, and over 16 tokens generated with both, behind a prompt in chunks.
`--record` writes the table to README.md.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mil_ane_passes as ane

TARGET = "m4"
PAGE = Path(__file__).parent / "README.md"
HEAD = ("| model | form | ops | unsupported on m4 | compared with the source |\n"
        "| --- | --- | --- | --- | --- |")
BEGIN, END = "<!-- table -->\n", "<!-- end of the table -->\n"


def measure(name: str, form: str, folder: Path) -> str:
    """Adapt or edit one model; returns its row of the table."""
    from tests.lab.language_models.builders import convert

    source = convert(name, form)
    try:
        before, after, outcome = (_adapt_encoder if form == "encoder" else _adapt)(name, source, folder)
    except ane.InputError as error:
        return f"| {name} | {form} | | | {' '.join(str(error).split())} |"
    counts = [sum(kinds.values()) for _, kinds in (before, after)]
    left = ", ".join(f"{number} {kind}" for kind, number in sorted(after[1].items()))
    return (f"| {name} | {form} | {before[0]} → {after[0]} | {counts[0]} → {counts[1]}{f' ({left})' if left else ''} | "
            f"{outcome} |")


def _adapt(name: str, source: Path, folder: Path) -> Any:
    report = ane.adapt(source, folder / name, prefill=4, target=TARGET)
    if report.status != "written":
        return _count(source), _count(source), report.reason
    outcome = f"{len(report.tokens)} tokens the same, logits within {report.logit_error:.0e}"
    return _count(source), _count(folder / name / "decoder.mlpackage", "decode"), outcome


def _adapt_encoder(name: str, source: Path, folder: Path) -> Any:
    report = ane.adapt(source, folder / name, target=TARGET)
    if report.status != "written":
        return _count(source), _count(source), report.reason
    where = f"at {len(report.lengths)} lengths" if report.lengths else "on random features"
    outcome = f"the same {where}, within {report.result_error:.0e}"
    return _count(source), _count(folder / name / "encoder.mlpackage"), outcome


def _count(package: Path, function: str | None = None) -> tuple[int, Counter[str]]:
    program = ane.load(package).program
    program.functions = {function: program.functions[function]} if function else program.functions
    found = ane.lint(program, target=TARGET)
    return found.summary()["ops"], Counter(row.op.op_type for row in found.plan.rows if row.ane == "no")


def write_page(rows: Sequence[str]) -> None:
    """Put the table into the page."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(before + BEGIN + "\n".join((HEAD, *rows)) + "\n" + END + rest.partition(END)[2], encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    from tests.lab.language_models.builders import DECODERS, ENCODERS, FORMS
    from tests.lab.models.fired import silence_warnings

    parser = argparse.ArgumentParser(prog="python -m tests.lab.language_models", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--record", action="store_true")
    given = parser.parse_args(arguments)
    print(HEAD)
    rows = []
    for name in given.names or [*ENCODERS, *DECODERS]:
        for form in ("encoder",) if name in ENCODERS else FORMS:
            with tempfile.TemporaryDirectory() as folder, silence_warnings():
                rows.append(measure(name, form, Path(folder)))
            print(rows[-1], flush=True)
    if given.record:
        write_page(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
