"""Fit the latency model and report its errors on held-out groups: python -m tests.lab.latency [--fit] [--record]

    python -m tests.lab.latency                       # the report, with the parameters fitted anew per held-out group
    python -m tests.lab.latency --fit                 # also fit all rows and write mil_ane_passes/ane's parameters
    python -m tests.lab.latency --record              # also write the report to tests/lab/latency/README.md
    python -m tests.lab.latency --score               # the parameters as they are, on rows never seen by the fit

`--measurements` and `--pairs` name other tables of the same form. Those in `fixtures/latency` hold the rows whose
licence permits it; the shipped parameters were fitted to more (README.md says which).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from mil_ane_passes.ane.latency_parameters import MEASURED_CHIPS, find_chips

from . import pairs as pair_table
from . import rows as row_table
from .fit import FIXED, PRIORS, borrow, build_parameters, fit_all, hold_out, make_chip, predict
from .report import format_pairs, format_report, judge_pairs

PARAMETERS = Path(__file__).parents[3] / "mil_ane_passes" / "ane" / "latency_parameters.json"
README = Path(__file__).with_name("README.md")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--fit", action="store_true", help="fit all rows and write the parameters")
    parser.add_argument("--record", action="store_true", help="write the report to README.md")
    parser.add_argument("--score", action="store_true", help="use the parameters as they are; nothing is fitted")
    parser.add_argument("--measurements", type=Path, default=row_table.FIXTURE, help="the table of measurements")
    parser.add_argument("--pairs", type=Path, default=pair_table.FIXTURE, help="the table of pairs")
    options = parser.parse_args()
    table = row_table.read_rows(options.measurements)
    cases, reasons = row_table.make_cases(table)
    shipped = {name: find_chips(name)[0] for name in MEASURED_CHIPS} if PARAMETERS.exists() else {}
    sections = {}
    if options.score:
        found = {case.id: predict(case, shipped[case.chip]) for case in cases}
        sections["with the parameters as they are"] = found
    else:
        fitted = fit_all(cases)
        found = hold_out(cases)
        sections["held out"] = found
        chips = {name: make_chip(name, values) for name, values in fitted.items()}
        sections["in the fit"] = {case.id: predict(case, chips[case.chip]) for case in cases}
        cited = {name: make_chip(name, {key: prior.value for key, prior in {**priors, **FIXED.get(name, {})}.items()})
                 for name, priors in PRIORS.items()}
        sections["cited figures alone, nothing fitted"] = {case.id: predict(case, cited[case.chip]) for case in cases}
    if options.fit and not options.score:
        PARAMETERS.write_text(json.dumps(build_parameters(cases, fitted, found), indent=1) + "\n", encoding="utf-8")
        find_chips.__globals__["load_parameters"].cache_clear()
        find_chips.__globals__["_make_chip"].cache_clear()
    text = format_report(cases, reasons, sections, borrow(cases, fitted) if not options.score else {})
    judged, left_out = judge_pairs(row_table.read_rows(options.pairs))
    text += format_pairs(judged, left_out)
    print(text)
    if options.record:
        README.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
