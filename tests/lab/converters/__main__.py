"""Converts models with other converters and ours, and counts: `python -m tests.lab.converters [--record]`.

Every model is converted by the converter's own passes alone and, where it takes a pipeline, with ours in either order;
the package made without ours is rewritten. Needs what `cases.PINS` names. `--record` writes record.json, from which
the table of mil_ane_passes/README.md is made.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import tempfile
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from tests.lab.records import write_record

from .cases import PINS, Case, find_missing, measure_case
from .table import RECORD


def make_cases(converter: str) -> list[Case]:
    """The models of a converter of `PINS`; imports it."""
    if converter == "onnx2coreml":
        from . import onnx_models

        return onnx_models.make_cases()
    from . import jax_models

    return jax_models.make_cases()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.lab.converters", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="write record.json")
    options = parser.parse_args()
    if missing := [text for text in map(find_missing, PINS) if text is not None]:
        parser.error("; ".join(missing))
    results = []
    for case in (case for converter in PINS for case in make_cases(converter)):
        with tempfile.TemporaryDirectory() as folder:
            for result in measure_case(case, Path(folder)):
                print(result, file=sys.stderr)
                results.append(asdict(result))
    if options.record:
        write_record(RECORD, {"date": f"{datetime.date.today()}", "results": results,
                              "versions": {converter: version(converter) for converter in PINS}})
    return 0


if __name__ == "__main__":
    sys.exit(main())
