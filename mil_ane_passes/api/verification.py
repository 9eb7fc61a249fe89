"""Verification that two models are equivalent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coremltools.converters.mil.mil import Program, Var, types
from coremltools.converters.mil.mil.types.symbolic import is_symbolic

from ..core.budget import DEFAULT_MAX_STEPS, share_budget
from ..core.contract import Exactness
from ..core.errors import InputError, LimitReached, suggest_nearest
from ..core.locking import synchronized
from ..core.option_spelling import format_option
from ..proof.callable_comparison import compare_with_callable
from ..proof.callables import is_callable_side
from ..proof.comparison import Accuracy, Strictness
from ..proof.equivalence import VerifyReport, compare_programs, compare_with_pipeline
from .source import Array, Progress, ignore_progress, open_source, select_function

__all__ = ["verify"]


@synchronized
def verify(
    before: Any, after: Any, *, feeds: Mapping[str, Array] | None = None, precision: str = "float64", seeds: int = 3,
    exactness: str = "rounding", quirks: Sequence[str] = (), tolerance: float | None = None,
    atol: float | None = None, rtol: float | None = None, snr: float | None = None, cosine: float | None = None,
    fixes_nonfinite: bool = False, widths: bool = False, function: str | None = None,
    max_steps: int | None = DEFAULT_MAX_STEPS, max_seconds: float | None = None, progress: Progress = ignore_progress,
) -> VerifyReport:
    """Compare two models on the same feeds; the report's `first` names the first op that differs.

    `precision` is float64 (checks the algebra), float32 or float16 (typed execution, judged against the float64 run of
    `before`). `exactness` is "bitwise" or "rounding". Without `feeds`, each function runs on `seeds` seeded random
    feeds and on adversarial feeds (`sampled` of the report; under "rounding" a NaN may spread). With `feeds`, the
    default function (of a pipeline all parts) runs on those. `function` names the only one to compare (`PART/FUNCTION`
    of a pipeline). `quirks` names published faults to imitate in `after`. With `fixes_nonfinite`, values that are NaN
    or infinite in `before` may be finite in `after`, judged with infinite constants read as large finite ones. With
    `widths`, float inputs and outputs may have different widths, as after `ane::fp16_io`. `max_steps` and
    `max_seconds` as in `run`: beyond them the result is "not verified".

    `atol`, `rtol`, `snr`, `cosine` limit the error of models that are expected to differ; see `Accuracy`. An entire
    pipeline may be compared with a single model. One side may be a torch module (in eval mode) or any callable, which
    gets the model's inputs by position, or by name if it has parameters of those names. Its outputs pass within
    `tolerance` times the largest value (default 1e-4 for a model entirely in fp32, else 2e-2); integers have to be
    equal.

    Raises InputError for feeds or interfaces that do not fit and for a callable that raises, NotSupported (nothing
    run) for an op the reference runtime lacks.
    """
    judged_as, accuracy = _parse_exactness(exactness), Accuracy(atol, rtol, snr, cosine) or None
    if accuracy is not None and (exactness == "bitwise" or tolerance is not None or fixes_nonfinite):
        raise InputError(
            f"{accuracy}: limits on the error take the place of exactness, tolerance and fixes_nonfinite; give one"
        )
    how: dict[str, Any] = {"feeds": feeds, "seeds": seeds, "quirks": quirks, "widths": widths, "progress": progress}
    with share_budget(max_steps, max_seconds, progress):
        try:
            if is_callable_side(before) or is_callable_side(after):
                return _verify_callable(before, after, exactness, tolerance, accuracy=accuracy, precision=precision,
                                        fixes_nonfinite=fixes_nonfinite, function=function, **how)
            promised = Strictness(judged_as, fixes_nonfinite, keeps_nonfinite=exactness == "bitwise", accuracy=accuracy)
            return _verify_models(before, after, function, precision, promised, tolerance, **how)
        except LimitReached as reached:
            return VerifyReport(
                "not verified", judged_as, reason=str(reached), quirks=tuple(quirks), tolerance=tolerance
            )


def _parse_exactness(name: str) -> Exactness:
    if name not in ("bitwise", "rounding"):
        raise InputError(f"exactness '{name}' is not known; expected bitwise or rounding"
                         f"{suggest_nearest(name, ('bitwise', 'rounding'))}")
    return Exactness(name)


def _verify_models(
    before: Any, after: Any, function: str | None, precision: str, strictness: Strictness, tolerance: float | None,
    *, widths: bool, **how: Any
) -> VerifyReport:
    if tolerance is not None:
        raise InputError("tolerance is for a torch module or a callable; two models are judged by exactness")
    old, new = select_function(open_source(before), function), select_function(open_source(after), function)
    precisions = (precision,) if precision == "float64" else ("float64", precision)
    if old.is_pipeline != new.is_pipeline and function is None:
        single, pipeline = (new, old) if old.is_pipeline else (old, new)
        return compare_with_pipeline(single.program, pipeline.package, program_first=single is old,
                                     precisions=precisions, exactness=strictness, describe=single.describe, **how)
    if how.get("feeds") is None:
        _check_shapes_accepted(old.program, new.program)
    return compare_programs(old.program, new.program, precisions=precisions, exactness=strictness, widths=widths,
                            describe=old.describe, **how)


def _check_shapes_accepted(before: Program, after: Program) -> None:
    """Raise InputError when an input of `after` has a fixed size and that of `before` another, or a flexible one.

    Without user-supplied feeds, the shapes of `before` are run; those of one form of it are less than that.
    """
    for name, function in before.functions.items():
        taken = after.functions[name].inputs if name in after.functions else {}
        for old, new in ((var, taken[key]) for key, var in function.inputs.items() if key in taken):
            if not (types.is_tensor(old.sym_type) and types.is_tensor(new.sym_type)):
                continue
            if len(old.shape) != len(new.shape) or any(
                    not is_symbolic(size) and (is_symbolic(known) or known != size)
                    for known, size in zip(old.shape, new.shape)):
                raise InputError(
                    f"the two programs have different inputs: '{old.name}' of function '{name}' has shape "
                    f"{_format_shape(old)} in the first and {_format_shape(new)} in the second; expected the same "
                    f"shapes, or {format_option('feeds')} of a shape that both have")


def _format_shape(var: Var) -> str:
    return f"({', '.join('any' if is_symbolic(size) else str(size) for size in var.shape)})"


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
    if how.pop("fixes_nonfinite") | how.pop("widths"):
        raise InputError("fixes_nonfinite and widths are for two models; a callable says itself what is right")
    model = open_source(before if program_first else after)
    if model.is_pipeline and function is None:
        raise InputError(f"{model.name} is a pipeline, and a torch module or a callable stands for one ML Program; "
                         f"name the part's function: {format_option('function')}{next(iter(model.program.functions))}")
    return compare_with_callable(
        select_function(model, function).program, after if program_first else before, program_first=program_first,
        tolerance=tolerance, describe=model.describe, quirks=quirks, **how)
