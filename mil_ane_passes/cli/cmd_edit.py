"""Edit an .mlpackage without rebuilding it: names, inputs and outputs. Names are those of IN in all options."""

from __future__ import annotations

import argparse
from typing import Any

from ..transforms.contract import PART_SUFFIXES
from ..utils.errors import InputError
from .copy_ahead import add_link_option, start_copying
from .output import add_format_option, print_report

HELP = "rename, expose or drop values of a package, change its interface, split it"
EXAMPLE = "edit in.mlpackage -o out.mlpackage --rename var_123=logits --io fp16"


def add(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s IN -o OUT EDIT ... [options]"  # after --io, IN would be one of its names
    parser.add_argument("input", metavar="IN", help="the .mlpackage to read; never changed")
    parser.add_argument("-o", "--output", metavar="OUT", help="the .mlpackage to write")
    # The edits, in the order in which they are made.
    parser.add_argument("--fix-shape", metavar="NAME=1,3,8,8", action="append", default=[],
                        help="give the flexible input NAME this shape; repeat it for other inputs; an input again "
                             "makes another function, which may be named: FUNCTION:NAME=1,3,8,8")
    parser.add_argument("--expose", metavar="VALUE", action="append", default=[],
                        help="return this inner value as well, behind the other outputs; may be repeated")
    parser.add_argument("--drop-output", metavar="NAME", action="append", default=[],
                        help="return this no more, and remove all that only it needed; may be repeated")
    parser.add_argument("--io", metavar=("TYPE", "NAME"), nargs="+", action="append", default=[],
                        help="make these inputs and outputs (default: all of floats) fp16 or fp32; may be repeated")
    parser.add_argument("--rename", metavar="A=B", action="append", default=[],
                        help="call the input, output, state or inner value A from now on B; may be repeated")
    parser.add_argument("--split-at", metavar="VALUE", nargs="+", action="extend",
                        help="make two packages that run one after the other, OUT_1 and OUT_2, cut behind these values")
    parser.add_argument("--dedup-weights", action="store_true", help="keep weights of equal bytes once")
    parser.add_argument("--function", metavar="F",
                        help="edit this function alone (default: each that has what is named)")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done; write nothing")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it exists")
    add_link_option(parser)
    add_format_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    asked = _collect_edits(arguments)
    parts = PART_SUFFIXES if arguments.split_at else ("",)
    packed = bool(arguments.split_at) or arguments.dedup_weights  # files that are packed again are not copied ahead
    with start_copying(arguments.input, arguments.output, arguments.overwrite, arguments.dry_run, packed,
                       arguments.link, parts) as ahead:
        from ..api import edit  # now, while the large files are copied: this imports coremltools

        report = edit(arguments.input, arguments.output, **asked, function=arguments.function,
                      overwrite=arguments.overwrite, link=arguments.link, dry_run=arguments.dry_run, ahead=ahead)
    print_report(report, arguments.format)
    return 0


def _collect_edits(arguments: argparse.Namespace) -> dict[str, Any]:
    """Map the options to the arguments of `edit`."""
    return {"fix_shape": arguments.fix_shape, "expose": arguments.expose, "drop_output": arguments.drop_output,
            "io": _group_names_by_type(arguments.io), "rename": _parse_pairs("--rename", arguments.rename),
            "split_at": arguments.split_at or (), "dedup_weights": arguments.dedup_weights}


def _group_names_by_type(given: list[list[str]]) -> dict[str, list[str]]:
    """Group the names by type. InputError when a type is used with names and without."""
    found: dict[str, list[str]] = {}
    for dtype, *names in given:
        if dtype in found and not (names and found[dtype]):
            raise InputError(f"--io {dtype} is given for all names, and again; expected it once")
        found[dtype] = [*found.get(dtype, []), *names]
    return found


def _parse_pairs(option: str, given: list[str]) -> dict[str, str]:
    """Parse `A=B` texts to a mapping. InputError for a text that is not of that form, or for two with the same A."""
    found: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise InputError(f"{option} {text}: expected A=B, such as {option} {name or 'var_12'}=logits")
        if name in found:
            raise InputError(f"{option} {text}: '{name}' is given twice ({name}={found[name]} before)")
        found[name] = value
    return found
