"""Compare our prediction with a compute plan that Core ML gave on a Mac: support, partition and cost of each op.

PLAN is the result.json that measure.py writes (see mac-script), or a dumped compute plan: {"program": {"functions":
{NAME: [{"operator", "outputs", "supported", "preferred", "cost"}, ...]}}}. Exit code 0: all agree; 1: they differ.
"""

from __future__ import annotations

import argparse
import json

from ..core.errors import InputError
from .output import add_format, check_file, show, write_file

HELP = "how our prediction stands to a compute plan from a Mac"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", metavar="PLAN", help="result.json, or a dumped compute plan")
    parser.add_argument("--model", metavar="IN.mlpackage",
                        help="what was measured (default: the packages beside PLAN)")
    parser.add_argument("--target", help="chip to predict for (default: the chip of the measurement)")
    parser.add_argument("-o", "--output", metavar="FILE",
                        help="where factors per op kind go (JSON; nothing reads them); replaced if it exists")
    add_format(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from ..api.measuring import calibrate_plan

    target = None if arguments.output is None else check_file(arguments.output, arguments.model or arguments.plan)
    if target is not None and target.exists() and target.samefile(arguments.plan):
        raise InputError(f"'{target}' is the plan itself; expected another file to write")
    report = calibrate_plan(arguments.plan, model=arguments.model, target=arguments.target)
    if target is not None:
        write_file(target, json.dumps(report.calibration(), indent=2, allow_nan=False) + "\n")
    show(report, arguments.format)
    return 0 if report.agrees else 1
