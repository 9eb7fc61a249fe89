"""Plants errors in rewrites, one after the other, and counts how many the equivalence check catches.

    python -m tests.lab.mutation [--record] [NAME...]

Each error is planted in a fork, and the rewrite runs with its check on its firing examples and on directed programs
where the rewrite without the error is found equal. What the check passes is judged on many more draws: an error that
changes no result there is equivalent, any other is missed.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings
from collections import Counter
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tests.lab.records import read_record, write_record

from .mutants import MUTANTS
from .trial import Verdict, run_trial

RESULT = Path(__file__).parent / "result.json"


def make_record(verdicts: list[Verdict], seconds: float) -> dict[str, Any]:
    """The record: counts, the score, and each verdict."""
    outcomes = Counter(verdict.outcome for verdict in verdicts)
    effective = outcomes["caught"] + outcomes["missed"]
    return {
        "command": "python -m tests.lab.mutation --record", "date": datetime.now(timezone.utc).date().isoformat(),
        "seconds": round(seconds), "mutants": len(verdicts), "caught": outcomes["caught"], "missed": outcomes["missed"],
        "equivalent": outcomes["equivalent"], "not_tried": outcomes["not tried"],
        "score": round(outcomes["caught"] / effective, 4) if effective else 0.0,
        "verdicts": [verdict.to_dict() for verdict in verdicts],
    }


def merge_verdicts(verdicts: list[Verdict]) -> list[Verdict]:
    """The recorded verdicts with `verdicts` in the place of those of the same names."""
    held = {each["name"]: Verdict(**each) for each in read_record(RESULT)["verdicts"]}
    held |= {verdict.name: verdict for verdict in verdicts}
    return [held[mutant.name] for mutant in MUTANTS if mutant.name in held]


def main(argv: list[str] | None = None) -> int:
    """Tries the mutants; 0 when none is missed."""
    parser = argparse.ArgumentParser(prog="python -m tests.lab.mutation", description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="these mutants only")
    parser.add_argument("--record", action="store_true", help=f"write the verdicts to {RESULT.name}; those of NAMEs "
                                                              "take the place of the recorded ones")
    given = parser.parse_args(argv)
    known = {mutant.name: mutant for mutant in MUTANTS}
    unknown = [name for name in given.names if name not in known]
    if unknown:
        parser.error(f"unknown mutants: {', '.join(unknown)}; expected names of tests/lab/mutation/mutants.py")
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    started, verdicts = time.monotonic(), []
    for mutant in [known[name] for name in given.names] or MUTANTS:
        verdict = run_trial(mutant)
        verdicts.append(verdict)
        where = verdict.program + " [directed]" * verdict.directed
        print(f"{verdict.outcome:<11} {mutant.name} ({mutant.rule}): {where}: {verdict.reason}", flush=True)
    seconds = time.monotonic() - started
    if given.names and given.record:
        verdicts, seconds = merge_verdicts(verdicts), read_record(RESULT)["seconds"]
    made = make_record(verdicts, seconds)
    print({name: made[name] for name in ("mutants", "caught", "missed", "equivalent", "not_tried", "score", "seconds")},
          file=sys.stderr)
    if given.record:
        write_record(RESULT, made)
    return 1 if made["missed"] or made["not_tried"] else 0


if __name__ == "__main__":
    sys.exit(main())
