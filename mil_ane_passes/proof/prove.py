"""Run two programs on the same feeds and judge what comes out; the one place where runtime and rewrites meet."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Program, Var, types

from ..core.contract import Exactness
from ..core.errors import InputError
from .compare import OutputDifference, as_arrays, differences
from .feeds import ShapeChoice, make_feeds, make_state, shape_choices

__all__ = ["Case", "Outputs", "VerifyReport", "compare_programs", "judged", "outputs_of"]

Array = np.ndarray[Any, Any]
Progress = Callable[[str], None]


@dataclass
class Case:
    """One run that was compared: function, feeds, precision, and the difference per output."""

    function: str
    feeds: str
    precision: str
    outputs: list[OutputDifference]

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

    @property
    def equal(self) -> bool:
        return self.status == "equal"

    @property
    def equal_bits(self) -> bool:
        return self.equal and all(output.equal_bits for case in self.cases for output in case.outputs)

    def to_dict(self) -> dict[str, Any]:
        return {"schema": 1, "status": self.status, "exactness": self.exactness.value, "equal_bits": self.equal_bits,
                "reason": self.reason, "cases": [case.to_dict() for case in self.cases]}

    def __str__(self) -> str:
        if self.status == "not proved":
            return f"not proved: {self.reason}"
        runs = f"{len(self.cases)} runs at {', '.join(dict.fromkeys(case.precision for case in self.cases))}"
        if self.equal:
            how = "bit for bit" if self.equal_bits else f"judged as {self.exactness.value}"
            return f"equal in {runs}, {how}"
        lines = [f"different, judged as {self.exactness.value} ({runs})"]
        for case in self.cases:
            lines += [f"  {case.function}, {case.feeds}, {case.precision}: {output}"
                      for output in case.outputs if not output.passed]
        return "\n".join(lines)


@dataclass(frozen=True)
class Plan:
    """One run to make: which function, with which feeds."""

    function: str
    label: str
    feeds: dict[str, Array]
    state: dict[str, Array] = field(default_factory=dict)


Outputs = list[tuple[Plan, dict[str, dict[str, Array]]]]
"""For each plan the outputs by precision."""


def plans(
    program: Program, seeds: int, describe: Callable[[str], Any], feeds: Mapping[str, Array] | None = None
) -> list[Plan]:
    """The runs that cover a program: every function, every shape to try, `seeds` draws spread over the shapes.

    Given `feeds` there is one run, of the default function.
    """
    if feeds is not None:
        name = program.default_function_name
        return [Plan(name, "given feeds", dict(feeds), make_state(program.functions[name], 0))]
    made: list[Plan] = []
    for name, function in program.functions.items():
        description = describe(name)
        choices: Sequence[ShapeChoice] = shape_choices(function, description)
        for number in range(max(seeds, len(choices))):
            choice = choices[number % len(choices)]
            label = f"seed {number}" + (f", {choice.label} shapes" if len(choices) > 1 else "")
            drawn = make_feeds(function, choice, number, description)
            made.append(Plan(name, label, drawn, make_state(function, number)))
    return made


def outputs_of(program: Program, runs: Sequence[Plan], precisions: Sequence[str], progress: Progress) -> Outputs:
    """Execute every plan at every precision; what is left in a state counts as an output.

    Raises NotSupported before running anything if an op is lacking.
    """
    from ..runtime import Runtime

    found: Outputs = [(plan, {}) for plan in runs]
    done = 0
    for function in dict.fromkeys(plan.function for plan in runs):
        for precision in precisions:
            runtime = Runtime(program, function=function, precision=precision)
            for plan, results in found:
                if plan.function == function:
                    done += 1
                    progress(f"run {done} of {len(runs) * len(precisions)}: {function}, {plan.label}, {precision}")
                    state = {name: value.copy() for name, value in plan.state.items()}
                    outputs = as_arrays(runtime(plan.feeds, state))
                    results[precision] = outputs | {f"state {name}": value for name, value in state.items()}
    return found


def judged(before: Outputs, after: Outputs, exactness: Exactness) -> VerifyReport:
    """Compare results of the same plans. The typed run is held against the float64 run of the program before."""
    cases = []
    for (plan, old), (_, new) in zip(before, after):
        for precision in old:
            truth = old.get("float64") if precision != "float64" else None
            found = differences(old[precision], new[precision], exactness, truth)
            cases.append(Case(plan.function, plan.label, precision, found))
    passed = all(output.passed for case in cases for output in case.outputs)
    return VerifyReport("equal" if passed else "different", exactness, cases)


def compare_programs(
    before: Program, after: Program, *, seeds: int = 3, precisions: Sequence[str] = ("float64",),
    exactness: Exactness = Exactness.ROUNDING, feeds: Mapping[str, Array] | None = None,
    describe: Callable[[str], Any] = lambda name: None, progress: Progress = lambda text: None,
) -> VerifyReport:
    """Are two programs equal on the same feeds? Raises InputError when their interfaces differ."""
    _same_interface(before, after)
    runs = plans(before, seeds, describe, feeds)
    old = outputs_of(before, runs, precisions, progress)
    return judged(old, outputs_of(after, runs, precisions, progress), exactness)


def _same_interface(before: Program, after: Program) -> None:
    found = [
        ", ".join(f"{name}({_ends(function.inputs.values())}) -> ({_ends(function.outputs)})"
                  for name, function in program.functions.items())
        for program in (before, after)
    ]
    if found[0] != found[1]:
        raise InputError(f"the two programs have different inputs or outputs: the first {found[0]}, the second "
                         f"{found[1]}; expected the same names and dtypes in the same order")


def _ends(ends: Collection[Var]) -> str:
    """Inputs or outputs by name and dtype; sizes are found out by running."""
    plain = [types.is_list(var.sym_type) or types.is_dict(var.sym_type) for var in ends]
    return ", ".join(f"'{var.name}'" if bare else f"'{var.name}': {types.builtin_to_string(var.dtype)}"
                     for var, bare in zip(ends, plain))
