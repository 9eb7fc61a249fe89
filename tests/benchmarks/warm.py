"""What a command takes beyond its start-up: it does something tiny first, and what is asked for in the same process.

    python -m tests.benchmarks.warm TINY ARGUMENTS -- ARGUMENTS

Prints the seconds of the second run. All that is imported, compiled and looked up once is done in the first.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time

from mil_ane_passes.cli.main import main as command


def once(arguments: list[str]) -> float:
    """Run the command as its own process does; seconds."""
    sys.argv = ["mil-ane-passes", *arguments]
    started = time.perf_counter()
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        code = command()
    if code > 1:
        raise SystemExit(code)
    return time.perf_counter() - started


def main() -> None:
    border = sys.argv.index("--")
    tiny, asked = sys.argv[1:border], sys.argv[border + 1 :]
    once(tiny)
    print(once(asked))


if __name__ == "__main__":
    main()
