"""Execute a package with the reference runtime, on any machine; arrays in, arrays out."""

from __future__ import annotations

import argparse
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from ..core.errors import InputError
from .output import read_feeds

HELP = "execute a package on any machine"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", metavar="IN", help="the .mlpackage to run")
    parser.add_argument("--feeds", metavar="F.npz", required=True, help="inputs by name")
    parser.add_argument("-o", "--output", metavar="OUT.npz", required=True,
                        help="where the outputs go; replaced if it exists")
    parser.add_argument("--precision", choices=("float64", "float32", "float16"), default="float32",
                        help="float16 rounds each value to its declared dtype; default float32")
    parser.add_argument("--function", help="the function to run (default: the package's default function)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from ..api import run as execute
    from ..proof.compare import as_arrays

    target = Path(arguments.output)
    if not target.absolute().parent.is_dir():
        raise InputError(f"no folder '{target.parent}' to write '{target.name}' to; create it first")
    if target.is_dir():
        raise InputError(f"'{target}' is a folder; expected the name of an .npz file to write")
    feeds = read_feeds(arguments.feeds) or {}
    outputs = as_arrays(execute(arguments.input, feeds, function=arguments.function, precision=arguments.precision))
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "xb") as file:
            _write_npz(file, outputs)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    for name, value in outputs.items():
        print(f"{name}: {value.dtype}{list(value.shape)}")
    return 0


def _write_npz(file: IO[bytes], arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """What `np.savez` writes, for any names: an output may be called `file`, which is a parameter there."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asarray(array), allow_pickle=False)
