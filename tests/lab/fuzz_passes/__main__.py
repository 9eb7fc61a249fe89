"""Runs each pass of coremltools' default pipeline on random programs and compares the results before and after.

    python -m tests.lab.fuzz_passes [--seeds 0:10000] [--plain] [--record] [--only N]

Each program is a chain of ops that coremltools fuses, moves or removes (`chains.py`), in float32. The passes run one
after the other; after each that changes the program, its outputs are compared with those before on the reference
runtime. Passes run as in `ane.pipeline()`, that is, corrected where they have to be; with `--plain`, coremltools' own.
Exit code 0 when no pass changed a result, failed or changed a constant, else 1.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Program
from coremltools.converters.mil.mil.passes.pass_registry import PASS_REGISTRY

import mil_ane_passes as ane
from mil_ane_passes.ir.query import iterate_ops
from mil_ane_passes.runtime import Runtime
from tests.lab.records import write_record

from .chains import Chain, draw_chain

RESULT = Path(__file__).parent / "result.json"
_WITHOUT_VALUES = {"common::add_fp16_cast", "common::add_int16_cast", "common::image_input_preprocess"}
"Passes that change precisions or inputs, and so are not expected to keep values."
_TOLERANCE = 2e-3
"As a share of the largest value: what a fusion of constants at float32 may change."


@dataclass(frozen=True)
class Fault:
    """What a pass did to a program: its result is wrong, it fails, or it changes a constant of the caller."""

    seed: int
    name: str
    kind: str
    detail: str


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.lab.fuzz_passes", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="0:10000", help="FIRST:END (default 0:10000)")
    parser.add_argument("--plain", action="store_true", help="coremltools' own passes")
    parser.add_argument("--record", action="store_true", help="keep the counts for the README")
    parser.add_argument("--only", type=int, metavar="N", help="print the program of one seed, and what became of it")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    first, end = map(int, arguments.seeds.split(":"))
    if arguments.only is not None:
        first, end = arguments.only, arguments.only + 1
    started, drawn, faults = time.perf_counter(), 0, []
    for seed in range(first, end):
        chain = draw_chain(seed)
        if chain is None:
            continue
        drawn += 1
        if arguments.only is not None:
            print(chain.program)
        for fault in iterate_faults(seed, chain, arguments.plain):
            faults.append(fault)
            print(fault, flush=True)
    seconds = round(time.perf_counter() - started)
    counts = Counter((fault.name, fault.kind) for fault in faults)
    print(f"{drawn:,} programs in {seconds} s: {len(faults)} faults", *(
        f"{name}: {kind} {count}" for (name, kind), count in sorted(counts.items())), sep="\n")
    if arguments.record:
        write_record(RESULT, {
            "command": f"python -m tests.lab.fuzz_passes --seeds {arguments.seeds} --record",
            "date": datetime.now(timezone.utc).date().isoformat(), "seconds": seconds, "programs": drawn,
            "coremltools": ct.__version__, "faults": sorted([*key, count] for key, count in counts.items())})
    return 1 if faults else 0


def iterate_faults(seed: int, chain: Chain, plain: bool = False) -> Iterator[Fault]:
    """Run the passes on a program and yield the fault of one, after which the program is given up."""
    program = chain.program
    feeds = {"x": 2 * np.random.default_rng(seed + 1).normal(size=chain.shape).astype(np.float32)}
    expected = _run(program, feeds)
    passes = (ct.PassPipeline.DEFAULT if plain else ane.pipeline()).passes
    for name in (name for name in passes if name.startswith("common::") and name not in _WITHOUT_VALUES):
        before, printed = _list_ops(program), str(program)
        try:
            PASS_REGISTRY[name](program)
            program.validate()
            found = _run(program, feeds) if printed != str(program) else expected
        except Exception as error:
            yield Fault(seed, str(name), "fails", f"{type(error).__name__}: {str(error)[:200]}")
            return
        if chain.list_changed_constants():
            yield Fault(seed, str(name), "changes a constant", ", ".join(before))
            return
        if not all(map(_is_close, found, expected)):
            yield Fault(seed, str(name), "wrong", f"{', '.join(before)} -> {', '.join(_list_ops(program))}")
            return


def _run(program: Program, feeds: dict[str, Any]) -> list[Any]:
    found = Runtime(program)(feeds)
    return [np.asarray(found[var.name], np.float64) for var in program.functions["main"].outputs]


def _list_ops(program: Program) -> list[str]:
    return [op.op_type for _, op in iterate_ops(program) if op.op_type != "const"]


def _is_close(one: Any, other: Any) -> bool:
    if one.shape != other.shape:
        return False
    largest = np.max(np.abs(other[np.isfinite(other)]), initial=1)
    return bool(np.allclose(one, other, rtol=_TOLERANCE, atol=_TOLERANCE * largest, equal_nan=True))


if __name__ == "__main__":
    sys.exit(main())
