"""How far predictions agree with what Core ML answered on an M4: `python -m tests.ane.agreement [--all]`."""

from __future__ import annotations

import logging
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from mil_ane_passes.ane import predict_plan
from mil_ane_passes.ane.segments import find_cheapest_partition
from mil_ane_passes.passes.plan import Cost, Plan
from mil_ane_passes.passes.registry import get_all_rules

from .m4_cases import CASES, alone, context, estimates, networks

__all__ = ["disagreements", "errors", "judged", "main", "plan_alone", "plan_context", "shares", "table"]

BACKENDS = {"ane": "ANE", "bnns": "CPU (bnns)", "classic": "CPU (classic_cpu)"}
INCOMPLETE = ("slice_dyn",)
"""Half of this network's ops were published without a device, and the op under test accepted: alone it was
unsupported."""


@cache
def _rules():
    return [rule() for rule in get_all_rules().values()]


@cache
def plan_alone(name: str) -> Plan:
    return predict_plan(alone(name), _rules(), target="m4")[0]


@cache
def plan_context(name: str) -> Plan:
    return predict_plan(context(name), _rules(), target="m4")[0]


def disagreements() -> Iterator[tuple[str, str, str, str, str]]:
    """Model, op, what the ANE was seen to answer, what is predicted, and why: where both differ."""
    for name, rows in estimates().items():
        for row, told in zip(rows, plan_alone(name).rows, strict=True):
            seen = "yes" if "ane" in row["supported"].split(",") else "no"
            if told.ane != seen:
                yield name, row["op_type"], seen, told.ane, told.reason
    for name, row in networks().items():
        if name in INCOMPLETE:
            continue
        for place, (text, told) in enumerate(zip(row["ops"].split(";"), plan_context(name).rows, strict=True)):
            kind, _, devices = text.split(":")
            seen = "yes" if "A" in devices else "no"
            if told.ane != seen:
                yield f"{name} in a network", f"{kind} ({place})", seen, told.ane, told.reason


def errors() -> dict[str, list[float]]:
    """The relative error of each published estimate, by backend, ascending."""
    found: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
    for name, rows in estimates().items():
        for row, told in zip(rows, plan_alone(name).rows, strict=True):
            for backend, mine in zip(BACKENDS, (told.cost.ane, told.cost.bnns, told.cost.classic)):
                seen = row[f"est_{backend}_ms"]
                if seen != "-" and mine is not None:
                    found[backend].append(abs(mine / float(seen) - 1))
    return {backend: sorted(values) for backend, values in found.items()}


def shares() -> list[float]:
    """How far each op's share of its network's cost is from the published one (of four digits), ascending."""
    found = []
    for name, row in networks().items():
        if "-" not in row["weights"].split(","):
            spent = [told.cost.of(told.engine) for told in plan_context(name).rows]
            seen = map(float, row["weights"].split(","))
            found += [abs(one / sum(spent) - share) for one, share in zip(spent, seen, strict=True)]
    return sorted(found)


def judged(name: str) -> str:
    """'equal' where the partition is the measured one, else whether that is of equal cost, more expensive or
    cheaper."""
    rows = plan_context(name).rows
    seen = [text.split(":")[1] for text in networks()[name]["ops"].split(";")]
    if all(device in (row.backend[0].upper(), "-") for device, row in zip(seen, rows, strict=True)):
        return "equal"
    ends = set(context(name).functions["main"].outputs)
    made = [sum(var in ends for var in row.op.outputs) for row in rows]
    _, mine = find_cheapest_partition([row.cost for row in rows], made)
    _, theirs = find_cheapest_partition([_only(row.cost, device) for row, device in zip(rows, seen)], made)
    return "of equal cost" if abs(mine - theirs) < 1e-9 else "costlier" if theirs > mine else "cheaper"


def _only(cost: Cost, device: str) -> Cost:
    if device == "A":
        return replace(cost, bnns=float("inf"), classic=float("inf"))
    return replace(cost, ane=None) if device == "C" else cost


def table() -> str:
    """Markdown: support, estimates and partitions against the published ones."""
    ops = sum(map(len, estimates().values()))
    ops += sum(int(row["n_ops"]) for name, row in networks().items() if name not in INCOMPLETE)
    wrong = len(list(disagreements()))
    lines = ["| what | compared | agreement |", "|---|---|---|",
             f"| op supported on the ANE | {ops} ops | {ops - wrong} equal ({(ops - wrong) / ops:.1%}) |"]
    for backend, values in errors().items():
        middle, most = values[len(values) // 2], values[int(len(values) * 0.9)]
        lines.append(f"| estimate on the {BACKENDS[backend]} | {len(values)} estimates | relative error: median "
                     f"{middle:.1g}, 90th percentile {most:.1g}, largest {values[-1]:.1g} |")
    apart = shares()
    lines.append(f"| an op's share of a network's cost | {len(apart)} shares, published to four digits | largest "
                 f"difference {apart[-1]:.5f} |")
    count = Counter(judged(name) for name in networks())
    off = sum(count.values()) - count["equal"] - count["of equal cost"]
    lines.append(f"| partition of a small network | {len(networks())} networks | {count['equal']} equal, "
                 f"{count['of equal cost']} of equal cost, {off} wrong |")
    return "\n".join(lines)


def _predictions() -> Iterator[str]:
    for name in CASES:
        known = "" if name in estimates() else " *"
        for row in plan_alone(name).rows:
            yield (f"{name}{known}\t{row.op.op_type}\t{row.ane}\t{row.engine}\t{row.cost.ane}\t{row.cost.bnns}"
                   f"\t{'guess' if row.cost.guess else ''}\t{','.join(row.codes)}\t{row.reason}")
        drawn = "".join("A" if row.backend == "ane" else "c" for row in plan_context(name).rows)
        yield f"{name}{known}\tin a network\t{drawn}\t{networks().get(name, {}).get('n_ops', '')}"


def main(arguments: list[str]) -> int:
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    print(table())
    for line in disagreements():
        print("\t".join(line))
    for name in networks():
        if judged(name) in ("costlier", "cheaper"):
            print(f"partition of {name}: the measured one is {judged(name)}")
    if "--all" in arguments:
        print("\n* kept back: nothing published here")
        for line in _predictions():
            print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
