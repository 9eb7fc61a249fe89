"""Run two programs on the same feeds and judge what comes out; the one place where runtime and rewrites meet."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Program, Var, types

from ..core.contract import Exactness
from ..core.errors import InputError
from ..core.words import counted
from .bisect import first_difference
from .border import borders, crossed, fed
from .compare import EVERY, OutputDifference, Strictness, differences, limited
from .coverage import blocks_not_entered
from .difference import FirstDifference
from .execute import Execution, Plan, check_runnable, execute, plans

__all__ = ["Case", "VerifyReport", "compare_programs", "judged"]

Array = np.ndarray[Any, Any]
Progress = Callable[[str], None]

ACROSS = ("inputs or outputs hold floats of other widths: both got what the narrower holds, and were compared as it "
          "gives")
DEFINED = ("what was NaN or infinite is held against the same program with those of its constants that fp16 cannot "
           "hold read as large finite numbers")


@dataclass
class Case:
    """One run that was compared: function, feeds, precision, and the difference per output."""

    function: str
    feeds: str
    precision: str
    outputs: list[OutputDifference]

    @property
    def failed(self) -> list[OutputDifference]:
        return [output for output in self.outputs if not output.passed]

    @property
    def passed(self) -> bool:
        return not self.failed

    def to_dict(self) -> dict[str, Any]:
        return {"function": self.function, "feeds": self.feeds, "precision": self.precision,
                "outputs": [output.to_dict() for output in self.outputs]}


@dataclass
class VerifyReport:
    """Whether two programs are equal. `status` is "equal", "different" or "not proved" (then `reason` says why)."""

    status: str
    exactness: Exactness = Exactness.BITWISE
    cases: list[Case] = field(default_factory=list)
    reason: str = ""
    notes: list[str] = field(default_factory=list)
    "What was not compared, and why."
    first: FirstDifference | None = None
    "Where two programs part, in the first run whose outputs differ; None when that cannot be told."
    quirks: tuple[str, ...] = ()
    "The published faults that were imitated in the second."
    tolerance: float | None = None
    "How far a callable's outputs may be off, as a share of each output's largest value; None between programs."

    @property
    def equal(self) -> bool:
        return self.status == "equal"

    @property
    def equal_bits(self) -> bool:
        return self.equal and all(output.equal_bits for case in self.cases for output in case.outputs)

    def to_dict(self) -> dict[str, Any]:
        return {"schema": 1, "status": self.status, "exactness": self.exactness.value, "equal_bits": self.equal_bits,
                "tolerance": self.tolerance, "quirks": list(self.quirks), "reason": self.reason, "notes": self.notes,
                "first_difference": self.first.to_dict() if self.first else None,
                "cases": [case.to_dict() for case in self.cases]}

    def __str__(self) -> str:
        if self.status == "not proved":
            return f"not proved: {self.reason}"
        precisions = ", ".join(dict.fromkeys(case.precision for case in self.cases))
        runs = f"{counted(len(self.cases), 'run')} at {precisions}"
        faults = f", with {', '.join(self.quirks)} in the second" if self.quirks else ""
        notes = [f"  {note}" for note in self.notes]
        if self.equal:
            same = self.equal_bits and self.tolerance is None
            return "\n".join([f"equal in {runs}, {'bit for bit' if same else self._judged_as()}{faults}", *notes])
        lines = [f"different, {self._judged_as()} ({runs}){faults}"]
        for case in self.cases:
            lines += [f"  {case.function}, {case.feeds}, {case.precision}: {output}" for output in case.failed]
        return "\n".join([*lines, *notes, *([str(self.first)] if self.first else [])])

    def _judged_as(self) -> str:
        if self.tolerance is None:
            return f"judged as {self.exactness.value}"
        return f"judged within {self.tolerance:g} of the output's scale"


def judged(before: Execution, after: Execution, promised: Exactness | Strictness) -> VerifyReport:
    """Compare runs of the same plans. The typed run is held against the float64 run of the program before.

    A plan that the program before cannot run is left out (its shapes are outside the model's domain); one that only
    the program after cannot run makes the two different.
    """
    report = VerifyReport("equal", promised.exactness if isinstance(promised, Strictness) else promised)
    for old, new in zip(before.runs, after.runs):
        if old.error:
            report.notes.append(f"{old.plan.function}, {old.plan.label}: cannot be run before either, so not compared "
                                f"({old.error})")
            continue
        for precision, results in old.results.items():
            if precision not in new.results:
                reason = f"the program after cannot run: {new.error}"
                lost = OutputDifference(EVERY, False, False, reason=reason)
                report.cases.append(Case(old.plan.function, old.plan.label, precision, [lost]))
                continue
            truth = old.results.get("float64") if precision != "float64" else None
            found = differences(results, new.results[precision], promised, truth)
            report.cases.append(Case(old.plan.function, old.plan.label, precision, found))
    if not all(case.passed for case in report.cases):
        report.status = "different"
    elif not report.cases:
        report.status, report.reason = "not proved", f"no feeds that were drawn can be run: {report.notes[0]}"
    return report


def compare_programs(
    before: Program, after: Program, *, seeds: int = 3, precisions: Sequence[str] = ("float64",),
    exactness: Exactness | Strictness = Exactness.ROUNDING, feeds: Mapping[str, Array] | None = None,
    describe: Callable[[str], Any] = lambda name: None, progress: Progress = lambda text: None,
    quirks: Sequence[str] = (), mapping: Mapping[str, str] | None = None, further: Sequence[Plan] = (),
    widths: bool = False, only: tuple[str, str] | None = None, locate: bool = True,
) -> VerifyReport:
    """Are two programs equal on the same feeds? Raises InputError when their interfaces differ.

    `quirks` names published faults to imitate in `after`; `before` runs faithfully. `mapping` (name before -> name
    after) helps to find the first difference where a rewrite put one value in the place of another; `further` are
    runs to make besides: what approximates is held to those in the functions that they run, where draws show at
    float64 alone that the algebra is the same. "not proved" when nothing could be run, or when the runs never entered
    a nested block in which the two differ. With `widths` floats of `after`'s interface may have another width: both get
    what the narrower holds, and outputs of `before` are rounded to what `after` gives. `only` names the function and
    feeds of the one run to make; without `locate` the first difference is not looked for.
    """
    _same_interface(before, after, widths)
    across = borders(before, after)
    check_runnable(after, quirks)
    given = {plan.function for plan in further} if _approximates(exactness) else set()
    drawn = [replace(plan, typed=plan.function not in given) for plan in plans(before, seeds, describe, feeds)]
    made = [fed(plan, across) for plan in (*further, *drawn) if only in (None, (plan.function, plan.label))]
    old = execute(before, made, precisions, lambda text: progress(f"before, {text}"))
    lost = crossed(old, across)
    made = [replace(plan, error=run.error) for plan, run in zip(made, old.runs)]
    new = execute(after, made, precisions, lambda text: progress(f"after, {text}"), quirks)
    defined = isinstance(exactness, Strictness) and exactness.mends and _define(before, old, new, precisions)
    report = judged(old, new, exactness)
    report.quirks = tuple(quirks)
    report.notes += [ACROSS] * bool(across) + [DEFINED] * defined
    unseen = blocks_not_entered(before, after, old.entered, new.entered)
    lost = lost or (f"what was run never entered {unseen[0]}, in which the programs differ" if unseen else "")
    if report.equal and lost:
        report.status, report.reason = "not proved", lost
    if report.status == "different" and locate:
        progress("looking for the first difference")
        _find_first(report, made, lambda plan, case: first_difference(
            before, after, plan, case.precision, exactness, case.failed, quirks=quirks, mapping=mapping))
    return report


def _approximates(promised: Exactness | Strictness) -> bool:
    return (promised.exactness if isinstance(promised, Strictness) else promised) is Exactness.APPROXIMATE


def _find_first(
    report: VerifyReport, made: Sequence[Plan], look: Callable[[Plan, Case], FirstDifference | None]
) -> None:
    """Look for the first difference in the first run that differs."""
    case = next(case for case in report.cases if not case.passed)
    plan = next(plan for plan in made if (plan.function, plan.label) == (case.function, case.feeds))
    try:
        report.first = look(plan, case)
    except OSError as error:  # no room for temporary files; the verdict stands
        report.notes.append(f"the first difference could not be found: {error}")


def _define(program: Program, found: Execution, after: Execution, precisions: Sequence[str]) -> bool:
    """Fill in what `found` leaves undefined and `after` does not, from runs with huge constants read as merely large.

    A mask of minus infinity stands for the limit of ever larger masks, and 0 * inf in it for 0; a mask that only fp16
    makes infinite is read alike. Whether anything was undefined.
    """
    undefined = [(run, new) for run, new in zip(found.runs, after.runs) if not run.error and any(
        value.dtype.kind == "f" and not np.all(np.isfinite(value))
        for outputs in run.results.values() for value in outputs.values())]
    if not undefined:
        return False
    limits = execute(program, [run.plan for run, _ in undefined], precisions, lambda text: None, finite_constants=True)
    for (run, new), limit in zip(undefined, limits.runs):
        if not limit.error:
            run.results = limited(run.results, limit.results, new.results)
    return True


def _same_interface(before: Program, after: Program, widths: bool = False) -> None:
    """Raises InputError when names, their order or dtypes differ; with `widths` any float is as good as another."""
    found = [
        ", ".join(f"{name}({_ends(function.inputs.values(), widths)}) -> ({_ends(function.outputs, widths)})"
                  for name, function in program.functions.items())
        for program in (before, after)
    ]
    if found[0] != found[1]:
        raise InputError(f"the two programs have different inputs or outputs: the first {found[0]}, the second "
                         f"{found[1]}; expected the same names and dtypes in the same order")


def _ends(ends: Collection[Var], widths: bool) -> str:
    """Inputs or outputs by name and dtype; sizes are found out by running."""
    return ", ".join(f"'{var.name}'{_dtype(var, widths)}" for var in ends)


def _dtype(var: Var, widths: bool) -> str:
    if types.is_list(var.sym_type) or types.is_dict(var.sym_type):
        return ""
    loose = widths and types.is_tensor(var.sym_type) and types.is_float(var.dtype)
    return ": a float" if loose else f": {types.builtin_to_string(var.dtype)}"
