"""List the patches of coremltools' torch frontend: what each fixes, whether it is needed here, and why."""

from __future__ import annotations

import argparse

from .output import add_format_option, print_report

HELP = "list the patches of the torch frontend"
EXAMPLE = "patches"


def add(parser: argparse.ArgumentParser) -> None:
    add_format_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from ..report.patches import Patches
    from ..torch_frontend.registry import collect_patch_statuses

    print_report(Patches(collect_patch_statuses()), arguments.format)
    return 0
