"""Execute a package with the reference runtime, on any machine; arrays in, arrays out."""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import numpy as np

from ..core.errors import InputError
from .output import read_feeds

HELP = "execute a package on any machine"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", metavar="IN", help="the .mlpackage to run")
    parser.add_argument("--feeds", metavar="F.npz", required=True, help="inputs by name")
    parser.add_argument("-o", "--output", metavar="OUT.npz", required=True, help="where the outputs go")
    parser.add_argument("--precision", choices=("float64", "float32", "float16"), default="float32",
                        help="float16 rounds each value to its declared dtype; default float32")
    parser.add_argument("--function", help="the function to run (default: the package's default function)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from ..api import run as execute
    from ..verify.compare import as_arrays

    target = Path(arguments.output)
    if not target.absolute().parent.is_dir():
        raise InputError(f"no folder '{target.parent}' to write '{target.name}' to; create it first")
    feeds = read_feeds(arguments.feeds) or {}
    outputs = as_arrays(execute(arguments.input, feeds, function=arguments.function, precision=arguments.precision))
    handle, temporary = tempfile.mkstemp(dir=target.absolute().parent, suffix=".npz")
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez(file, **outputs)  # type: ignore[arg-type]
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
    for name, value in outputs.items():
        print(f"{name}: {value.dtype}{list(value.shape)}")
    return 0
