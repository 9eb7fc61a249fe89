"""The equivalence check beside one that runs each program alone and in full: the same verdicts on pairs of programs.

`compare_programs` computes once what both programs share, and at float32 where they do not differ yet. Here the same
pair is judged a second time from runs of one program after the other, all of it at every precision.
"""

from __future__ import annotations

import fcntl
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from coremltools.converters.mil.mil import Program

import mil_ane_passes as ane
from mil_ane_passes.commands.rewrite_steps import CHECK_PRECISIONS, combine_promises, map_replaced_values
from mil_ane_passes.equivalence import equivalence
from mil_ane_passes.equivalence.comparison import Strictness
from mil_ane_passes.equivalence.equivalence import VerifyReport, compare_programs
from mil_ane_passes.equivalence.execution import Execution, Plan, digest_runs, execute_plans
from mil_ane_passes.equivalence.user_inputs import UserInputs
from mil_ane_passes.ir.printer import format_program
from mil_ane_passes.passes.contract import Exactness
from tests.lab.cases import limit_time
from tests.lab.records import read_record, write_record

from .draft import RandomProgram, generate_program
from .planted import plant_error
from .trial import TARGETS

__all__ = ["BESIDE", "Pair", "Tally", "compare_both_ways", "generate_pairs", "run_seeds"]

BESIDE = Path(__file__).parent / "beside.json"
_MAX_SECONDS = 900
"Wall time of one pair above which it counts as hung: the machine may do other things, too."
_SEEDS_PER_SAVE = 20


@dataclass(frozen=True)
class Pair:
    """Two programs to compare: `kind` is "rewritten", or "planted" for one with an error in it."""

    kind: str
    label: str
    before: Program
    after: Program
    promised: Strictness
    mapping: Mapping[str, str] = field(default_factory=dict)
    feeds: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Finding:
    """What one way of checking finds: the verdict, which cases fail, and the bits of all outputs.

    `bits` are by run and precision; those of runs that computed anything at float32 in place of float64 are in
    `lowered` instead.
    """

    status: str
    failed: frozenset[tuple[str, str, str]] = frozenset()
    bits: Mapping[tuple[str, str, str], tuple[str, str]] = field(default_factory=dict)
    lowered: int = 0
    detail: str = ""


@dataclass
class Tally:
    """The pairs compared so far."""

    programs: int = 0
    pairs: Counter[str] = field(default_factory=Counter)
    "By kind and verdict."
    runs: int = 0
    "Runs of which both ways have the bits of all outputs."
    lowered: int = 0
    "Runs of which part was computed at float32, or batched with others: only verdicts are compared."
    differing: list[dict[str, Any]] = field(default_factory=list)

    def add(self, pair: Pair, seed: int, shared: Finding, alone: Finding) -> None:
        self.pairs[f"{pair.kind}, {alone.status}"] += 1
        self.lowered += shared.lowered
        common = shared.bits.keys() & alone.bits.keys()
        self.runs += len(common)
        what = []
        if shared.status != alone.status:
            what.append(f"verdict '{shared.status}' in lockstep, '{alone.status}' alone")
        else:
            # A run at another precision may hide a difference that others show, such as by a sum that cancels out.
            failed, others = shared.failed & shared.bits.keys(), alone.failed & shared.bits.keys()
            if failed != others:
                what.append(f"failing runs {_format_runs(failed - others)} in lockstep only, "
                            f"{_format_runs(others - failed)} alone only")
        if wrong := [each for each in sorted(common) if shared.bits[each] != alone.bits[each]]:
            what.append(f"bits of {_format_runs(wrong)}")
        if what:
            self.differing.append({"seed": seed, "kind": pair.kind, "pair": pair.label, "what": "; ".join(what),
                                   "lockstep": shared.detail, "alone": alone.detail})

    def to_dict(self) -> dict[str, Any]:
        return {"programs": self.programs, "pairs": dict(sorted(self.pairs.items())), "runs": self.runs,
                "lowered": self.lowered, "differing": self.differing}

    @classmethod
    def from_dict(cls, held: Mapping[str, Any]) -> Tally:
        return cls(held["programs"], Counter(held["pairs"]), held["runs"], held["lowered"], list(held["differing"]))


def _format_runs(runs: Any) -> str:
    return ", ".join(" ".join(each) for each in sorted(runs)) or "none"


def generate_pairs(drawn: RandomProgram) -> Iterator[Pair]:
    """Yield the program with each of its rewritten forms, and each of these, and itself, with an error."""
    random = np.random.default_rng((drawn.seed, 3))
    seen: set[str] = set()
    for target in dict.fromkeys((*TARGETS, *drawn.targets)):
        settings: dict[str, Any] = {"feeds": drawn.feeds} if drawn.feeds else {}
        report = ane.rewrite(drawn.program, preset="full", target=target, max_growth=None, verify=False, **settings)
        text = format_program(report.package) if report.changed else ""
        if not report.changed or text in seen:
            continue
        seen.add(text)
        pair = Pair("rewritten", target, drawn.program, report.package, combine_promises(report.traces),
                    map_replaced_values(report.traces), drawn.feeds)
        yield pair
        if planted := plant_error(report.package, random):
            yield replace(pair, kind="planted", label=f"{target}, {planted[1]}", after=planted[0])
    if planted := plant_error(drawn.program, random):
        exactness = Exactness.BITWISE if drawn.seed % 2 else Exactness.ROUNDING
        yield Pair("planted", planted[1], drawn.program, planted[0], Strictness(exactness), feeds=drawn.feeds)


def compare_both_ways(pair: Pair) -> tuple[Finding, Finding]:
    """Check a pair as `rewrite` does, and again on runs of each program alone."""
    return _check(pair, equivalence._execute_both), _check(pair, _execute_alone)


def _execute_alone(
    before: Program, after: Program, plans: Sequence[Plan], precisions: Sequence[str],
    progress: Callable[[str], None], *more: Any,
) -> tuple[Execution, Execution]:
    """Execute all plans on one program, then on the other: in full, at every precision."""
    old = execute_plans(before, plans, precisions, progress)
    return old, execute_plans(after, [replace(run.plan, error=run.error) for run in old.runs], precisions, progress)


def _check(pair: Pair, execute: Callable[..., tuple[Execution, Execution]]) -> Finding:
    """Check `pair`, with `execute` for the runs of both programs."""
    bits: dict[tuple[str, str, str], tuple[str, str]] = {}
    lowered = 0

    def watch(*arguments: Any) -> tuple[Execution, Execution]:
        nonlocal lowered
        old, new = execute(*arguments)
        runs = {(run.plan.function, run.plan.label): run for run in new.runs}
        for each in digest_runs(old, new):
            run = runs[each.function, each.feeds]
            count = run.ops.get(each.precision)
            if run.is_batched or (count is not None and (count.at_float32 or count.rounded)):
                lowered += 1
            else:
                bits[each.function, each.feeds, each.precision] = each.before, each.after
        return old, new

    try:
        with limit_time(_MAX_SECONDS), mock.patch.object(equivalence, "_execute_both", watch):
            report = compare_programs(
                pair.before, pair.after, precisions=CHECK_PRECISIONS, exactness=pair.promised, mapping=pair.mapping,
                further=UserInputs.of(pair.feeds, None).plans(pair.before, lambda name: None), locate=False)
    except Exception as error:  # both ways are held to the same one
        where = traceback.extract_tb(error.__traceback__)[-1]
        return Finding(f"{type(error).__name__}", bits=bits, lowered=lowered,
                       detail=f"{where.filename.rsplit('/', 1)[-1]}:{where.lineno}: {error}"[:300])
    failed = frozenset((case.function, case.feeds, case.precision) for case in report.cases if case.failed)
    return Finding(report.status, failed, bits, lowered, _describe(report))


def _describe(report: VerifyReport) -> str:
    case = next((case for case in report.cases if case.failed), None)
    reason = report.reason if case is None else f"{case.feeds}, {case.precision}: {case.failed[0]}"
    return reason[:300]


def run_seeds(first: int, last: int, kinds: Mapping[str, Any], record: bool) -> Tally:
    """Compare the pairs of all seeds; with `record`, go on where the record of these seeds ends, and keep it."""
    shard, tally, seconds, done = f"{first}:{last}", Tally(), 0.0, first
    held = read_record(BESIDE, {"shards": {}})["shards"].get(shard) if record else None
    if held is not None:
        tally, seconds, done = Tally.from_dict(held), held["seconds"], held["next"]
    torch.set_num_threads(1)  # the programs are small, and shards run beside one another
    started = time.monotonic()
    for seed in range(done, last):
        drawn = generate_program(seed, dict(kinds))
        if drawn is not None:
            tally.programs += 1
            for pair in generate_pairs(drawn):
                known = len(tally.differing)
                tally.add(pair, seed, *compare_both_ways(pair))
                for each in tally.differing[known:]:
                    print(each, flush=True)
        if (seed + 1 - first) % _SEEDS_PER_SAVE == 0 or seed == last - 1:
            made = tally.to_dict() | {"next": seed + 1, "seconds": round(seconds + time.monotonic() - started)}
            print(seed + 1, sum(tally.pairs.values()), "pairs", made["seconds"], "s", file=sys.stderr, flush=True)
            if record:
                _save_shard(shard, made)
    return tally


def _save_shard(shard: str, made: Mapping[str, Any]) -> None:
    """Put the figures of a shard into the record, into which other processes may put theirs."""
    with open(BESIDE, "a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        found = read_record(BESIDE) if BESIDE.stat().st_size else {"shards": {}}
        found["shards"][shard] = dict(made)
        found["date"] = datetime.now(timezone.utc).date().isoformat()
        write_record(BESIDE, found)
