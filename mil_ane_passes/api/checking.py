"""Are two models equal?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..core.contract import Exactness
from ..core.errors import InputError, nearest
from ..core.spelling import option
from ..proof.callables import is_callable_side
from ..proof.compare import Strictness
from ..proof.outside import compare_with_callable
from ..proof.prove import VerifyReport, compare_programs
from .source import Array, Progress, alone, opened, quiet

__all__ = ["verify"]


def verify(
    before: Any, after: Any, *, feeds: Mapping[str, Array] | None = None, precision: str = "float64", seeds: int = 3,
    exactness: str = "rounding", quirks: Sequence[str] = (), tolerance: float | None = None,
    mends: bool = False, widths: bool = False, function: str | None = None, progress: Progress = quiet,
) -> VerifyReport:
    """Are two models equal on the same feeds? If not, the report's `first` says which op is the first that differs.

    `precision` is float64 (is the algebra the same), float32 or float16 (typed execution). `exactness` is "bitwise"
    or "rounding"; rounding at float32 or float16 is judged against the float64 run of `before`. Without `feeds`
    every function runs on `seeds` seeded draws, with them the default function (of a pipeline all parts) on those;
    `function` names the only one to compare (`PART/FUNCTION` of a pipeline). `quirks` names published faults that are
    imitated in `after` only: a model against itself shows whether the fault hits it, against its rewrite whether that
    cures it. With `mends`, what is NaN or infinite in `before` may be finite in `after`: it is held against `before`
    with its infinite constants read as large finite numbers (an infinite mask as a large one). With `widths`, inputs
    and outputs of two models may hold floats of different widths, as after `ane::fp16_io`: both get what the narrower
    holds, and the report says so.

    One side may be a torch module (in eval mode) or any callable. It gets the model's inputs in their order, or by
    name when all the names are its parameters: a module as tensors (integers as int64), anything else as arrays. Its
    outputs are taken by name from a dictionary with the model's output names, else by position. They pass within
    `tolerance` times the output's largest value (default 1e-4 for a model all in fp32, 2e-2 where it has fp16 or
    compressed values); integers have to be equal.

    Raises InputError for feeds or interfaces that do not fit, for a function that is not there, for a callable that
    raises, and for an unknown quirk; NotSupported (nothing run) for an op the reference runtime lacks.
    """
    if exactness not in ("bitwise", "rounding"):
        raise InputError(f"exactness '{exactness}' is not known; expected bitwise or rounding"
                         f"{nearest(exactness, ('bitwise', 'rounding'))}")
    if is_callable_side(before) or is_callable_side(after):
        return _verify_callable(before, after, exactness, tolerance, feeds=feeds, precision=precision, seeds=seeds,
                                quirks=quirks, mends=mends, widths=widths, function=function, progress=progress)
    if tolerance is not None:
        raise InputError("tolerance is for a torch module or a callable; two models are judged by exactness")
    old, new = alone(opened(before), function), alone(opened(after), function)
    precisions = (precision,) if precision == "float64" else ("float64", precision)
    return compare_programs(
        old.program, new.program, seeds=seeds, precisions=precisions, exactness=Strictness(Exactness(exactness), mends),
        feeds=feeds, widths=widths,
        describe=old.describe, progress=progress, quirks=quirks)


def _verify_callable(
    before: Any, after: Any, exactness: str, tolerance: float | None, *, quirks: Sequence[str],
    function: str | None, **how: Any
) -> VerifyReport:
    program_first = is_callable_side(after)
    if program_first and is_callable_side(before):
        raise InputError("both sides are callables; expected a model on one side: its inputs say what to feed")
    if exactness == "bitwise":
        raise InputError("exactness 'bitwise' is for two models; a torch module or a callable is judged by tolerance")
    if tolerance is not None and not 0 <= tolerance < float("inf"):
        raise InputError(f"tolerance {tolerance}: expected 0 or more, a share of the output's largest value")
    if quirks and program_first:
        raise InputError("quirks are imitated in the second model, which here is a callable; give the callable first")
    if how.pop("mends") | how.pop("widths"):
        raise InputError("mends and widths are for two models; a callable says itself what is right")
    model = opened(before if program_first else after)
    if model.is_pipeline and function is None:
        raise InputError(f"{model.name} is a pipeline, and a torch module or a callable stands for one ML Program; "
                         f"name the part's function: {option('function')}{next(iter(model.program.functions))}")
    return compare_with_callable(
        alone(model, function).program, after if program_first else before, program_first=program_first,
        tolerance=tolerance, describe=model.describe, quirks=quirks, **how)
