"""The report of the latency model's errors, as text."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mil_ane_passes.ane.latency import LatencyReport, estimate_latency

from .fit import compute_spread
from .pairs import make_pairs
from .rows import Case

CONTRADICTIONS = Path(__file__).with_name("contradictions.md")
HEADER = """# The latency model against public measurements

Made by `python -m tests.lab.latency --record`; `mil_ane_passes/ane/latency_terms.py` states the model. Nothing was
measured by us. Errors are absolute, relative to the measured time. *Held out*: predicted with parameters fitted without
the row's group, which is its file of the source, its chip and its kind, so that no sweep is on both sides.

The record is of more rows than `fixtures/latency` has: of sources that state no licence, only fitted parameters and
cited figures are in this repository. `python -m tests.lab.latency` makes the same report of the rows that are here.
"""


MODELS = ("Llama", "ResNet50", "Qwen3-VL", "Qwen 0.5B", "Qwen3-4B")


@dataclass(frozen=True)
class Judged:
    """What the model says of a pair: the time of the first form divided by that of the second."""

    row: Mapping[str, str]
    chip: str
    first: LatencyReport
    second: LatencyReport

    @property
    def measured(self) -> float:
        return float(self.row["speedup_B_over_A"])

    @property
    def predicted(self) -> float:
        return self.first.latency_us / self.second.latency_us

    @property
    def right(self) -> bool:
        return (self.measured > 1) == (self.predicted > 1) and abs(self.predicted - 1) > 1e-3


def judge_pairs(rows: list[dict[str, str]]) -> tuple[list[Judged], dict[str, str]]:
    """Estimate both forms of each pair that can be built; the others have a reason."""
    pairs, reasons = make_pairs(rows)
    by_id = {row["id"]: row for row in rows}
    judged = []
    for pair in pairs:
        reports = [estimate_latency(program, target=pair.chip, api=api)
                   for program, api in zip((pair.first, pair.second), pair.apis)]
        judged.append(Judged(by_id[pair.id], pair.chip, *reports))
    return judged, reasons


def summarize(errors: Iterable[float]) -> str:
    """Format the median and the 90th percentile of absolute relative errors."""
    found = [abs(error) for error in errors]
    return f"{100 * np.median(found):.1f} % | {100 * np.percentile(found, 90):.1f} %"


def collect_errors(cases: Iterable[Case], predicted: Mapping[str, float]) -> dict[tuple[str, str], list[float]]:
    """Collect the relative errors by chip and kind; `all` stands for all chips, `conv and linear` for both kinds."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for case in cases:
        error = predicted[case.id] / case.value_us - 1
        found[case.chip, case.kind].append(error)
        found["all", case.kind].append(error)
        if case.kind in ("conv", "linear"):
            found["all", "conv and linear"].append(error)
            found[case.chip, "conv and linear"].append(error)
    return found


def format_report(cases: list[Case], reasons: Mapping[str, str], sections: Mapping[str, Mapping[str, float]],
                  borrowed: Mapping[str, list[float]]) -> str:
    """Format the errors of rows by chip and kind."""
    tables = {name: collect_errors(cases, predicted) for name, predicted in sections.items()}
    names = list(tables)
    lines = [HEADER, "| chip | kind | rows | " + " | ".join(f"{name}: median | p90" for name in names) + " |",
             "| --- | --- | --- |" + " --- | --- |" * len(names)]
    for key in sorted(tables[names[0]]):
        lines.append(f"| {key[0]} | {key[1]} | {len(tables[names[0]][key])} | "
                     + " | ".join(summarize(table[key]) for table in tables.values()) + " |")
    if borrowed:
        lines += ["", "Conv and linear rows of a chip, predicted with the parameters of its neighbours alone (what an "
                  "estimate for a chip without rows is worth): nine of ten within a factor of "
                  + ", ".join(f"{compute_spread(each):.2f} ({name})" for name, each in borrowed.items()) + "."]
    lines += ["", f"{len(cases)} rows are modelled, {len(reasons)} are not:", ""]
    lines += [f"- {count}: {reason}" for reason, count in Counter(reasons.values()).most_common()]
    worst = sorted(cases, key=lambda case: -abs(math.log(sections[names[0]][case.id] / case.value_us)))[:15]
    lines += ["", f"The fifteen rows that are furthest off ({names[0]}):", "",
              "| row | group | measured us | predicted us |", "| --- | --- | --- | --- |"]
    lines += [f"| {case.id} | {case.group.replace('|', ', ')} | {case.value_us:.1f} | "
              f"{sections[names[0]][case.id]:.1f} |" for case in worst]
    return "\n".join(lines) + "\n\n" + CONTRADICTIONS.read_text(encoding="utf-8")


def _format_models(judged: list[Judged]) -> list[str]:
    """Format the times of whole models: their linears, convs and attention; none of it is in the fit."""
    found = ["", "Whole models in these pairs, none of them in the fit. The programs have their convs, linears and",
             "caches, and leave out norms and position codes; caches are inputs.", "",
             "| pair | chip | model | form | measured ms | predicted ms | range |",
             "| --- | --- | --- | --- | --- | --- | --- |"]
    for pair in judged:
        row = pair.row
        name = next((name for name in MODELS if name in row["shapes"] + row["form_A"]), None)
        if name is None or row["metric"] not in ("ms", "tok/s"):
            continue
        for form, report in (("A", pair.first), ("B", pair.second)):
            value = float(row[f"{form}_value"])
            spent = value if row["metric"] == "ms" else 1e3 / value
            low, middle, high = (each / 1e3 for each in (report.latency_low_us, report.latency_us,
                                                         report.latency_high_us))
            found.append(f"| {row['id']} | {row['chip']} | {name} | {row[f'form_{form}']} | {spent:.2f} | "
                         f"{middle:.2f} | {low:.2f} to {high:.2f} |")
    return found


def format_pairs(judged: list[Judged], reasons: Mapping[str, str]) -> str:
    """Format which form of each pair the model calls faster."""
    right: Counter[str] = Counter(pair.row['category'] for pair in judged if pair.right)
    total: Counter[str] = Counter(pair.row['category'] for pair in judged)
    share = 100 * sum(right.values()) / max(1, len(judged))
    lines = ["", "## Which of two forms is faster", "",
             f"Pairs that differ by more than 10 % and can be built as programs: {len(judged)}; the faster form is "
             f"chosen in {sum(right.values())} ({share:.1f} %). They are judged with the shipped parameters.", "",
             "| category | pairs | right |", "| --- | --- | --- |"]
    lines += [f"| {category} | {count} | {right[category]} |" for category, count in sorted(total.items())]
    wrong = [pair for pair in judged if not pair.right]
    if wrong:
        lines += ["", "Wrong:", "", "| pair | category | chip | speed-up measured | predicted |",
                  "| --- | --- | --- | --- | --- |"]
        lines += [f"| {pair.row['id']} | {pair.row['category']} | {pair.chip} | {pair.measured:.2f} | "
                  f"{pair.predicted:.2f} |" for pair in wrong]
    lines += _format_models(judged)
    by_reason: dict[str, list[str]] = defaultdict(list)
    for name, reason in reasons.items():
        by_reason[reason].append(name)
    lines += ["", f"Not judged ({len(reasons)}):", ""]
    lines += [f"- {reason}: {', '.join(names)}" for reason, names in sorted(by_reason.items())]
    return "\n".join(lines) + "\n"


