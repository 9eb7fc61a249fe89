"""The argument parser of the command line, with suggestions for misspelt options and choices."""

from __future__ import annotations

import argparse
import re
import sys
from typing import Any, NoReturn

from ..utils.errors import suggest_nearest
from ..utils.text_format import escape_text

__all__ = ["Parser"]

_INVALID_CHOICE = re.compile(r"argument .*: invalid choice: '([^']*)' \(choose from (.*)\)", re.DOTALL)


class Parser(argparse.ArgumentParser):
    """Argument parser that names the nearest option or choice.

    An option that a command lacks is reported with the command's usage.
    """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        found, rest = super().parse_known_args(args, namespace)
        unknown = next((each for each in rest if each.startswith("-")), None)
        if unknown is not None:
            options = [option for action in self._actions for option in action.option_strings]
            name = unknown.partition("=")[0]
            super().error(
                escape_text(f"no option {name}; {self.prog} --help tells more{suggest_nearest(name, options)}")
            )
        return found, rest

    def error(self, message: str) -> NoReturn:
        if message.endswith(" required: COMMAND"):
            self.print_help(sys.stderr)
            self.exit(2)
        chosen = _INVALID_CHOICE.fullmatch(message)
        near = suggest_nearest(chosen[1], re.findall(r"[\w-]+", chosen[2])) if chosen else ""
        super().error(escape_text(f"{message}; {self.prog} --help tells more{near}"))
