"""Rewrites random programs with the equivalence check on, and counts false alarms, wrong results and crashes.

    python -m tests.lab.fuzz_programs [--seeds 0:2300] [--record] [--only N] [--kinds NAME,...] [--beside-whole-runs]

Each program is drawn from its seed: one to three kinds of op chains on values of rank 0 to 5, for iOS15 to iOS18, fp16
or fp32, with a flexible batch in a quarter of them. It is linted, rewritten with preset full for M4 and M1 (older chips
where the kind is for them), and rewritten again. A pass that the check leaves out is judged again at float64 on other
draws: a result that is equal there is a false alarm. `--only` prints the program of one seed, and what became of it.
With `--beside-whole-runs`, each program is compared with its rewritten forms, and with ones that have an error in them,
twice: as `rewrite` does, and on runs of each alone. A record of some seeds is gone on with where it ends.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from mil_ane_passes.ir.printer import format_program
from tests.lab.records import write_record

from .beside import BESIDE, run_seeds
from .draft import generate_program
from .kinds import KINDS
from .trial import Failure, Outcome, run_trial

RESULT = Path(__file__).parent / "result.json"
_FAILURE_KINDS = ("different", "false alarm", "out of range", "not verified", "not idempotent", "crash", "hang")
_SEEDS_PER_SAVE = 50


@dataclass
class Record:
    """What became of all programs."""

    programs: int = 0
    rejected: int = 0
    rewritten: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    fired: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)

    def add(self, kinds: tuple[str, ...], outcome: Outcome) -> None:
        self.programs += 1
        self.rewritten += bool(outcome.fired)
        self.kinds.update(kinds)
        self.statuses += outcome.statuses
        self.fired += outcome.fired
        self.failures += outcome.failures

    def to_dict(self, command: str, seconds: float) -> dict[str, Any]:
        found = Counter(failure.kind for failure in self.failures)
        return {
            "command": command, "date": datetime.now(timezone.utc).date().isoformat(), "seconds": round(seconds),
            "programs": self.programs, "rejected_by_pymil": self.rejected, "rewritten": self.rewritten,
            "runs": self.statuses.total(), "statuses": dict(sorted(self.statuses.items())),
            "failures": {kind: found[kind] for kind in _FAILURE_KINDS},
            "failed": [failure.to_dict() for failure in self.failures],
            "rules": dict(sorted(self.fired.items())), "kinds": dict(sorted(self.kinds.items())),
        }


def main(argv: list[str] | None = None) -> int:
    """Runs the programs; 0 when none failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.lab.fuzz_programs", description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", default="0:2300", help="from:to, the second not included")
    parser.add_argument("--record", action="store_true", help=f"write the figures to {RESULT.name}")
    parser.add_argument("--only", type=int, help="run this seed alone, and print its program")
    parser.add_argument("--kinds", default="", help="draw these kinds only (not for --record)")
    parser.add_argument("--beside-whole-runs", action="store_true",
                        help=f"compare the check with one of whole runs; --record writes to {BESIDE.name}")
    given = parser.parse_args(argv)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    kinds = {name: KINDS[name] for name in given.kinds.split(",")} if given.kinds else KINDS
    if given.only is not None:
        return _run_one(given.only, kinds)
    first, last = map(int, given.seeds.split(":"))
    if given.beside_whole_runs:
        return 1 if run_seeds(first, last, kinds, given.record).differing else 0
    record, started = Record(), time.monotonic()
    for seed in range(first, last):
        _run_seed(seed, kinds, record)
        if (seed + 1 - first) % _SEEDS_PER_SAVE == 0 or seed == last - 1:
            command = f"python -m tests.lab.fuzz_programs --seeds {first}:{seed + 1} --record"
            made = record.to_dict(command, time.monotonic() - started)
            print(seed + 1, made["failures"], f"{made['seconds']} s", file=sys.stderr, flush=True)
            if given.record:
                write_record(RESULT, made)
    return 1 if record.failures else 0


def _run_seed(seed: int, kinds: dict[str, Any], record: Record) -> None:
    drawn = generate_program(seed, kinds)
    if drawn is None:
        record.rejected += 1
        return
    outcome = run_trial(drawn)
    record.add(drawn.kinds, outcome)
    for failure in outcome.failures:
        print(f"{failure} ({', '.join(drawn.kinds)})", flush=True)


def _run_one(seed: int, kinds: dict[str, Any]) -> int:
    drawn = generate_program(seed, kinds)
    if drawn is None:
        print(f"seed {seed}: pymil rejects what was drawn")
        return 0
    print(f"kinds: {', '.join(drawn.kinds)}\n{format_program(drawn.program)}")
    outcome = run_trial(drawn)
    print(f"{dict(outcome.statuses)}\nfired: {dict(outcome.fired)}")
    for failure in outcome.failures:
        print(failure)
    return 1 if outcome.failures else 0


if __name__ == "__main__":
    sys.exit(main())
