"""Compare two packages, or a package and a torch module, on the same feeds; name the first op that differs.

For models that are meant to differ, such as one and its compressed form, give limits on the error: --atol and --rtol
for each element, --snr and --cosine for each output. All that are given have to hold.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from ..utils.errors import InputError
from .arrays import read_arrays
from .input_options import add_limit_options, read_limits
from .output import add_format_option, positive_int, print_report, show_progress
from .quirk_option import add_quirk_option

HELP = "are two packages equal"
EXAMPLE = "verify in.mlpackage out.mlpackage"
_ERROR_LIMITS = (
    ("atol", "X", "largest absolute error of an element, beside --rtol"),
    ("rtol", "X", "largest error of an element as a share of A's, beside --atol"),
    ("snr", "DB", "lowest signal-to-noise ratio of an output, in dB"),
    ("cosine", "X", "lowest cosine similarity of an output"),
)


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", metavar="A", help="an .mlpackage")
    parser.add_argument("after", metavar="B", nargs="?", help="the .mlpackage to compare with it")
    parser.add_argument("--torch", metavar="MODULE:FACTORY",
                        help="compare A with a torch module in place of B: what FACTORY of the Python module (a name, "
                             "or a .py file) is or returns; it is put in eval mode")
    for name, unit, words in _ERROR_LIMITS:
        parser.add_argument(f"--{name}", type=float, metavar=unit, help=words)
    parser.add_argument("--feeds", metavar="F.npz", help="inputs by name; default: seeded draws")
    parser.add_argument("--function", metavar="F",
                        help="compare this function alone (default: all; with --feeds the default function)")
    parser.add_argument("--precision", choices=("float64", "float32", "float16"), default="float64",
                        help="float64 asks whether the algebra is the same; float16 rounds each value to its dtype")
    parser.add_argument("--exactness", choices=("bitwise", "rounding"), default="rounding", help="how to judge")
    parser.add_argument("--seeds", type=positive_int, default=3, help="seeded draws per function (default 3)")
    parser.add_argument("--fixes-nonfinite", action="store_true",
                        help="what is NaN or infinite in A may be finite in B; judged with A's infinite constants read "
                             "as large finite numbers")
    parser.add_argument("--widths", action="store_true",
                        help="inputs and outputs may be fp32 in one and fp16 in the other, as after ane::fp16_io")
    add_limit_options(parser)
    add_quirk_option(parser, "in B only: A with itself shows whether the fault hits it, A with a rewrite whether "
                      "that fixes it")
    add_format_option(parser)
    parser.set_defaults(run=run, proves=True, misused=parser.error)


def _choose_sides(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """Return the two models to compare, the reference first."""
    if arguments.after is None and arguments.torch is None:
        arguments.misused("without --torch the following arguments are required: B")
    if arguments.after is not None and arguments.torch is not None:
        arguments.misused("B and --torch exclude each other: give the one to compare A with")
    if arguments.torch is None:
        return arguments.before, arguments.after
    return _load_torch_module(arguments.torch), arguments.before


def _load_torch_module(text: str) -> Any:
    """Load the object named by `MODULE:FACTORY`, called if it is a class or a function.

    Raises InputError if it is not usable.
    """
    name, colon, factory = text.rpartition(":")
    if not (colon and name and factory):
        raise InputError(f"--torch {text}: expected MODULE:FACTORY, such as my_models.vocoder:make_model or "
                         "model.py:Net")
    try:
        module = _import_module(name)
        found = module
        for part in factory.split("."):
            found = getattr(found, part)
        if isinstance(found, type) or not hasattr(found, "eval"):
            found = found()
    except InputError:
        raise
    except Exception as error:  # the user's own code may raise anything
        raise InputError(f"--torch {text}: {type(error).__name__}: {error}; expected a torch module, or a class or "
                         "function without arguments that makes one") from error
    if not (callable(found) and hasattr(found, "eval")):
        raise InputError(f"--torch {text}: found a {type(found).__name__}; expected a torch module, or a class or "
                         "function without arguments that makes one")
    return found.eval()


def _import_module(name: str) -> Any:
    """Import the Python module of this name, or of this file.

    It can import modules in the folder of the file, or in the working directory.
    """
    path = Path(name)
    sys.path.insert(0, os.fspath(path.parent.absolute()) if path.suffix == ".py" else os.getcwd())
    try:
        if path.suffix != ".py":
            return importlib.import_module(name)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None or not path.is_file():
            raise InputError(f"--torch: no file '{name}'")
        module = importlib.util.module_from_spec(spec)
        sys.modules.setdefault(path.stem, module)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.pop(0)


def run(arguments: argparse.Namespace) -> int:
    from ..api import verify

    before, after = _choose_sides(arguments)
    errors = {name: getattr(arguments, name) for name, _, _ in _ERROR_LIMITS}
    with show_progress() as progress:
        report = verify(
            before,
            after,
            **errors,
            feeds=read_arrays(arguments.feeds),
            precision=arguments.precision,
            function=arguments.function,
            exactness=arguments.exactness,
            seeds=arguments.seeds,
            quirks=arguments.quirks,
            fixes_nonfinite=arguments.fixes_nonfinite,
            widths=arguments.widths,
            progress=progress,
            **read_limits(arguments),
        )
    print_report(report, arguments.format)
    return 0 if report.equal else 1
