"""Run the grid with coremltools alone and with the patches: `python -m tests.torch_frontend.grid [--one-in N]
[--record]`.

Prints what is not right; `--record` writes results.json, from which the README's table is generated. Exit code 1 when
a case with the patches is silently wrong, or fewer than 97 % are right.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.lab.records import format_table, read_record

RESULTS = Path(__file__).parent / "results.json"
LEAST = 0.97
_VERDICTS = ("right", "refused", "wrong")


def judged(place: int) -> tuple[str, str, list[tuple[str, str]]]:
    """The frontend and name of the case at this place, and (verdict, reason) of coremltools alone and of the
    patches."""
    from .cases import cases, outcome

    case = list(cases())[place]
    outcomes = [outcome(case, patched) for patched in (False, True)]
    return case.frontend, str(case), [(one.verdict, one.reason) for one in outcomes]


def judged_module(name: str) -> tuple[str, list[tuple[str, str]]]:
    """As `judged`, of a whole scripted module."""
    from .modules import module_outcome

    outcomes = [module_outcome(name, patched) for patched in (False, True)]
    return name, [(one.verdict, one.reason) for one in outcomes]


def _prepare() -> None:
    """Each conversion ends in a full garbage collection; what is imported once and for all need not be gone through."""
    import torch.export._trace  # noqa: F401 - the larger part of what torch.export imports when first used

    gc.collect()
    gc.freeze()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torch_frontend.grid", description=__doc__.splitlines()[0])
    parser.add_argument("--one-in", type=int, default=1, help="a sample: one case in so many")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--record", action="store_true", help="write results.json")
    options = parser.parse_args(arguments)
    from .cases import cases
    from .modules import MODULES

    places = range(0, len(list(cases())), options.one_in)
    counts: dict[str, list[Counter[str]]] = {}
    with multiprocessing.get_context("spawn").Pool(options.jobs, _prepare, maxtasksperchild=20) as pool:
        for frontend, name, verdicts in pool.imap_unordered(judged, places, chunksize=20):
            if verdicts[0][0] == "torch":
                continue  # PyTorch itself cannot run or capture it
            both = counts.setdefault(frontend, [Counter(), Counter()])
            for counter, (verdict, _) in zip(both, verdicts, strict=True):
                counter[verdict] += 1
            if verdicts[1][0] != "right":
                print(f"{verdicts[1][0]}: {name}: {verdicts[1][1]}", flush=True)
        for name, verdicts in pool.imap_unordered(judged_module, MODULES):
            both = counts.setdefault("modules", [Counter(), Counter()])
            for counter, (verdict, _) in zip(both, verdicts, strict=True):
                counter[verdict] += 1
            if verdicts[1][0] != "right":
                print(f"{verdicts[1][0]}: scripted module, {name}: {verdicts[1][1]}", flush=True)
    if options.record:
        RESULTS.write_text(json.dumps(
            {frontend: [{verdict: counter[verdict] for verdict in _VERDICTS} for counter in both]
             for frontend, both in sorted(counts.items())}, indent=2) + "\n")
    return _verdict(counts)


def _verdict(counts: dict[str, list[Counter[str]]]) -> int:
    total = sum((both[1] for both in counts.values()), Counter[str]())
    right, all_of_them = total["right"], sum(total.values())
    print(f"{all_of_them} cases: {right} right ({right / all_of_them:.1%}), {total['refused']} refused, "
          f"{total['wrong']} silently wrong")
    return 0 if total["wrong"] == 0 and right >= LEAST * all_of_them else 1


def table() -> str:
    """The README's table, from results.json."""
    results: dict[str, list[dict[str, int]]] = read_record(RESULTS)
    head = ("captured by", "cases", "coremltools alone: right", "refused", "silently wrong", "with the patches: right",
            "refused", "silently wrong")
    lines: list[list[str]] = []
    names = {"trace": "`torch.jit.trace`", "script": "`torch.jit.script`, one op", "export": "`torch.export`",
             "modules": "`torch.jit.script`, whole modules"}
    rows: dict[str, list[dict[str, Any]]] = {names[frontend]: both for frontend, both in results.items()}
    rows["all"] = [{verdict: sum(both[side][verdict] for both in results.values()) for verdict in _VERDICTS}
                   for side in (0, 1)]
    for name, (alone, patched) in rows.items():
        cells = [f"{side[verdict]:,} ({side[verdict] / sum(side.values()):.1%})" if verdict == "right"
                 else f"{side[verdict]:,}" for side in (alone, patched) for verdict in _VERDICTS]
        lines.append([name, f"{sum(patched.values()):,}", *cells])
    return format_table(head, lines)
