"""One rule's page (why, when, how exact, before and after, options, evidence), or the page of a part of the tool."""

from __future__ import annotations

import argparse

from .output import add_format, show

HELP = "one rule's page, or one topic's"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("code", metavar="CODE", nargs="?",
                        help="a code (ANE301), a slug, a pass name or a topic; without it, the topics are listed")
    add_format(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from ..core.registry import explainable
    from ..report.catalogue import Page
    from ..report.topics import TOPICS, Contents, Topic

    if arguments.code is None:
        show(Contents(), arguments.format)
    elif arguments.code.lower() in TOPICS:
        show(Topic(arguments.code.lower()), arguments.format)
    else:
        show(Page(explainable(arguments.code)), arguments.format)
    return 0
