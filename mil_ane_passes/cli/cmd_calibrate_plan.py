"""Compare our prediction with a compute plan that Core ML gave on a Mac: support, partition and cost of each op.

PLAN is the result.json that measure.py writes (see mac-script), or a dumped compute plan: {"program": {"functions":
{NAME: [{"operator", "outputs", "supported", "preferred", "cost"}, ...]}}}. Exit code 0: all agree; 1: they differ.
"""

from __future__ import annotations

import argparse

from .output import add_format_option, print_report

HELP = "how our prediction stands to a compute plan from a Mac"
EXAMPLE = "calibrate-plan folder/result.json"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", metavar="PLAN", help="result.json, or a dumped compute plan")
    parser.add_argument("--model", metavar="IN.mlpackage",
                        help="what was measured (default: the packages beside PLAN)")
    parser.add_argument("--target", help="chip to predict for (default: the chip of the measurement)")
    add_format_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from ..api.plan_calibration import calibrate_plan

    report = calibrate_plan(arguments.plan, model=arguments.model, target=arguments.target)
    print_report(report, arguments.format)
    return 0 if report.agrees else 1
