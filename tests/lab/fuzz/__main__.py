"""Damages small packages at random and sees that each is refused in words or loaded whole.

    python -m tests.lab.fuzz [--networks] [--tries 50000] [--seed 0] [--jobs 2] [--record FILE.json] [--keep FOLDER]
                             [--only N]

A try changes bytes or fields of a package's files; a child process loads what comes of it. What loads is saved, and
has to be the same byte for byte; every eighth is linted and rewritten too. With --networks the tries are .mlmodel
files of NeuralNetworks, which are upgraded; every eighth result is saved and linted. Counted as failures: any error
that is not in our words, more than four seconds of the processor's time (eight for an upgrade), more than 300 MB, and a
process that dies. Hypothesis and atheris were not taken: the first would shrink but make a tenth of the tries, the
second sees coverage of C++ only where that was compiled for it, and the parser here is coremltools'.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from datetime import datetime, timezone
from io import StringIO
from pathlib import Path
from typing import Any

from .fixtures import build_fixtures
from .networks import MAX_SECONDS, build_networks
from .pool import iterate_outcomes, make_tries
from .tries import MAX_MEGABYTES, MAX_PROCESSOR_SECONDS, Outcome

_GOOD_OUTCOMES = ("loaded", "refused")


@dataclass
class Record:
    """What became of all tries."""

    kinds: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0
    most: float = 0.0
    failures: list[Outcome] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        self.kinds[outcome.kind] += 1
        self.slowest, self.most = max(self.slowest, outcome.seconds), max(self.most, outcome.megabytes)
        if outcome.kind not in _GOOD_OUTCOMES:
            self.failures.append(outcome)

    def to_dict(self, seed: int, seconds: float, command: str, limit: float) -> dict[str, Any]:
        return {
            "tries": self.kinds.total(),
            "loaded": self.kinds["loaded"],
            "refused": self.kinds["refused"],
            "failures": len(self.failures),
            "kinds": dict(sorted(self.kinds.items())),
            "slowest_seconds": round(self.slowest, 2),
            "most_megabytes": round(self.most),
            "limits": {"seconds": limit, "megabytes": MAX_MEGABYTES},
            "seconds": round(seconds),
            "seed": seed,
            "command": command,
            "date": datetime.now(timezone.utc).date().isoformat(),
        }


def main(argv: list[str] | None = None) -> int:
    """Runs the tries; 0 when none failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.lab.fuzz", description=__doc__.split("\n")[0])
    parser.add_argument("--tries", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--record", type=Path, help="where the figures go, as JSON")
    parser.add_argument("--keep", type=Path, help="a folder for the packages that failed")
    parser.add_argument("--only", type=int, help="make this one try again, in this process, and say what becomes of it")
    parser.add_argument("--networks", action="store_true", help="damage .mlmodel files and upgrade them")
    given = parser.parse_args(argv)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    with redirect_stderr(StringIO()):
        fixtures = build_networks() if given.networks else build_fixtures()
    if given.only is not None:
        with tempfile.TemporaryDirectory() as folder:
            print(make_tries(fixtures, given.seed, Path(folder)).run(given.only))
        return 0
    record, started = Record(), time.monotonic()
    for outcome in iterate_outcomes(fixtures, given.seed, list(range(given.tries)), given.jobs):
        record.add(outcome)
        if outcome.kind not in _GOOD_OUTCOMES:
            print(f"try {outcome.number}: {outcome.kind}\n{outcome.words}", flush=True)
            _save_failure(given.keep, fixtures, given.seed, outcome)
        if record.kinds.total() % 1000 == 0:
            print(record.kinds.total(), dict(record.kinds), file=sys.stderr, flush=True)
    form = "--networks " if given.networks else ""
    command = f"python -m tests.lab.fuzz {form}--tries {given.tries} --seed {given.seed}"
    limit = MAX_SECONDS if given.networks else MAX_PROCESSOR_SECONDS
    found = json.dumps(record.to_dict(given.seed, time.monotonic() - started, command, limit), indent=1) + "\n"
    print(found)
    if given.record is not None:
        given.record.write_text(found)
    return 1 if record.failures else 0


def _save_failure(folder: Path | None, fixtures: dict[str, Any], seed: int, outcome: Outcome) -> None:
    if folder is None:
        return
    with tempfile.TemporaryDirectory() as made:
        source = make_tries(fixtures, seed, Path(made)).make(outcome.number)
        target = folder / f"{seed}-{outcome.number}{source.suffix}"
        if source.is_dir():
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(source, target, symlinks=True, copy_function=_copy_regular_file)
        else:
            _copy_regular_file(str(source), str(target))
    (folder / f"{seed}-{outcome.number}.txt").write_text(f"{outcome.kind}\n{outcome.words}\n")


def _copy_regular_file(source: str, target: str) -> None:
    if Path(source).is_file():
        shutil.copyfile(source, target)


if __name__ == "__main__":
    sys.exit(main())
