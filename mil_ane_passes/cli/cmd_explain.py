"""The page of one rule (why, when, how exact, before and after, options, evidence), of a patch of the torch frontend,
or of a part of the tool.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ..utils.errors import InputError
from .output import add_format_option, print_report

if TYPE_CHECKING:
    from ..report.catalogue import Page
    from ..report.patches import PatchPage

HELP = "the page of one rule, patch or topic"
EXAMPLE = "explain ANE301"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("code", metavar="CODE", nargs="?",
                        help="a code (ANE301), a slug, the name of a pass or patch, or a topic; without it, the "
                             "topics are listed")
    add_format_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from ..report.topics import TOPICS, Contents, Topic

    if arguments.code is None:
        print_report(Contents(), arguments.format)
    elif arguments.code.lower() in TOPICS:
        print_report(Topic(arguments.code.lower()), arguments.format)
    else:
        print_report(_find_page(arguments.code), arguments.format)
    return 0


def _find_page(key: str) -> Page | PatchPage:
    """Find the page of a rule or of a patch; InputError if neither exists."""
    from ..ane.measured_otherwise import MeasuredOtherwise
    from ..passes.registry import find_rule
    from ..report.catalogue import Page
    from ..report.patches import PatchPage
    from ..torch_frontend.registry import find_patch_status

    try:
        return Page(find_rule(key, MeasuredOtherwise))
    except InputError:
        found = find_patch_status(key)
        if found is None:
            raise
    return PatchPage(found)
