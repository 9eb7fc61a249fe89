"""Core ML's compute plan of a model on a user's machine, dumped by `measure.py` or by the user.

The format that is read, a dumped `MLComputePlan`:

    {"program": {"functions": {NAME: [{"operator", "outputs", "supported", "preferred", "cost"}, ...]}},
     "machine": {"chip", "macos", ...}, "units": "CPU_AND_NE"}

Ops are in program order, those of nested blocks after the op that contains them. `supported` lists devices ("cpu",
"gpu", "ane"), `preferred` is one of them, `cost` is the op's share of the model; each of the three may be null,
constants may be listed. `machine` and `units` are optional. Alternatively, the entire `result.json`, which contains
such plans by package.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..passes.plan import Plan, Row
from ..passes.targets import Generation, parse_target
from ..utils.errors import InputError
from ..utils.json_file import MEASUREMENT_FORM, read_json
from ..utils.text_format import add_article

__all__ = [
    "MeasuredOp",
    "Measurement",
    "MeasurementSource",
    "PlanMatch",
    "find_best_match",
    "match_ops",
    "read_measurements",
]

MeasurementSource = str | os.PathLike[str] | Mapping[str, Any]
"A file, or the data read from one."
_PREFERRED_UNITS = ("CPU_AND_NE", "ALL")
"Of several plans of one package, the first of these is read: with the GPU enabled, fewer ops run on the ANE."
_DEVICES = {"cpu": "cpu", "gpu": "gpu", "ane": "ane", "mlcpucomputedevice": "cpu", "mlgpucomputedevice": "gpu",
            "mlneuralenginecomputedevice": "ane", "neuralengine": "ane", "neural_engine": "ane", "ne": "ane"}
_UNFINISHED = "the script did not finish"


@dataclass(frozen=True)
class MeasuredOp:
    """Core ML's answer for one op; `supported` and `preferred` are None if it gave none."""

    function: str
    kind: str
    outputs: tuple[str, ...]
    supported: tuple[str, ...] | None
    preferred: str | None
    cost: float | None

    @property
    def ane(self) -> bool | None:
        """True if the op is supported on the ANE, None if that was not reported."""
        return None if self.supported is None else "ane" in self.supported

    def to_dict(self) -> dict[str, Any]:
        return {"preferred": self.preferred, "supported": None if self.supported is None else list(self.supported),
                "cost": self.cost}


@dataclass(frozen=True)
class Measurement:
    """One package's compute plan from one machine, without constants."""

    file: str
    package: str
    path: str | None
    units: str | None
    machine: Mapping[str, Any]
    functions: Mapping[str, Sequence[MeasuredOp]]
    runs: Sequence[Mapping[str, Any]] = ()
    "Per function and compute units: whether the numbers agree (None: nothing to compare), the text, and the time."
    problems: Sequence[str] = ()
    "Messages of the script about its failed steps."

    @property
    def chip(self) -> str | None:
        found = self.machine.get("chip") or self.machine.get("model")
        return None if found is None else str(found).removeprefix("Apple ")

    @property
    def where(self) -> str:
        """Chip and OS, as text."""
        macos = self.machine.get("macos")
        return f"{self.chip or 'chip not stated'}, {f'macOS {macos}' if macos else 'OS not stated'}"

    @property
    def generation(self) -> Generation | None:
        """The ANE generation of the machine, None if it is not known."""
        try:
            return parse_target(self.chip)[0] if self.chip and self.chip.strip().lower() != "all" else None
        except InputError:
            return None

    @property
    def uses_ane(self) -> bool:
        """True if any op is supported on the ANE; otherwise the units excluded it or the machine has none."""
        return any(op.ane for ops in self.functions.values() for op in ops)

    def to_dict(self) -> dict[str, Any]:
        return {"file": self.file, "package": self.package, "units": self.units, "chip": self.chip,
                "macos": self.machine.get("macos"), "coremltools": self.machine.get("coremltools"),
                "ops": sum(map(len, self.functions.values())), "runs": [dict(each) for each in self.runs],
                "problems": list(self.problems)}


@dataclass
class PlanMatch:
    """Pairs of plan ops and measured ops, and the ops of both without a partner."""

    measurement: Measurement
    pairs: list[tuple[Row, MeasuredOp]] = field(default_factory=list)
    ours: list[Row] = field(default_factory=list)
    theirs: list[MeasuredOp] = field(default_factory=list)

    @property
    def is_of_another_model(self) -> bool:
        """True if no op was matched, or by type alone fewer than half of the ops."""
        named = any(op.outputs and row.op.outputs and op.outputs[0] == row.op.outputs[0].name for row, op in self.pairs)
        return not named and 2 * len(self.pairs) < len(self.pairs) + len(self.ours)

    def counts(self) -> dict[str, int]:
        return {"matched": len(self.pairs), "only_here": len(self.ours), "only_measured": len(self.theirs)}


def match_ops(plan: Plan, measurement: Measurement) -> PlanMatch:
    """Match ops by function and name of the first output.

    The remaining ops are matched in order within their op type, if both sides have the same number of them. Unmatched
    unpacked weights, which Core ML may have folded, are ignored.
    """
    found = PlanMatch(measurement)
    functions = dict(measurement.functions)
    names = list(plan.program.functions)
    if len(functions) == len(names) == 1:
        functions = {names[0]: next(iter(functions.values()))}
    for name in names:
        _match_function_ops(plan.of(name), functions.pop(name, ()), found)
    found.theirs += [op for ops in functions.values() for op in ops]
    found.ours = [row for row in found.ours if not row.op.op_type.startswith("constexpr_")]
    found.theirs = [op for op in found.theirs if not op.kind.startswith("constexpr_")]
    return found


def _match_function_ops(rows: Sequence[Row], ops: Sequence[MeasuredOp], found: PlanMatch) -> None:
    named = {(op.kind, op.outputs[0]): op for op in reversed(ops) if op.outputs}
    taken: dict[int, MeasuredOp] = {}
    for row in rows:
        op = named.pop((row.op.op_type, row.op.outputs[0].name), None) if row.op.outputs else None
        if op is not None:
            taken[row.index] = op
    used = {id(op) for op in taken.values()}
    left: dict[str, list[Row]] = defaultdict(list)
    over: dict[str, list[MeasuredOp]] = defaultdict(list)
    for row in rows:
        if row.index not in taken:
            left[row.op.op_type].append(row)
    for op in ops:
        if id(op) not in used:
            over[op.kind].append(op)
    for kind in left:
        if len(left[kind]) == len(over[kind]):
            taken.update({row.index: op for row, op in zip(left[kind], over.pop(kind))})
    found.pairs += [(row, taken[row.index]) for row in rows if row.index in taken]
    found.ours += [row for row in rows if row.index not in taken]
    found.theirs += [op for group in over.values() for op in group]


def find_best_match(plan: Plan, measurements: Sequence[Measurement], name: str) -> PlanMatch:
    """Find the measurement that leaves the fewest ops without a partner.

    Raises InputError when none is of the model `name`: no op is the same, or too few by their type alone.
    """
    tried = [match_ops(plan, each) for each in measurements]
    best = min(tried, key=lambda each: len(each.ours) + len(each.theirs))
    if plan.rows and best.is_of_another_model:
        few = f"only {len(best.pairs)} of {len(best.pairs) + len(best.ours)} ops" if best.pairs else "no op"
        raise InputError(f"measured: {few} of {name} {'match' if best.pairs else 'is in'} '{best.measurement.file}'"
                         f"{', by type alone' if best.pairs else ''}; expected a measurement of this model")
    return best


def read_measurements(given: MeasurementSource) -> list[Measurement]:
    """Read the plans in a file, or in the data read from one. Raises InputError for anything else."""
    if isinstance(given, Mapping):
        return list(_iterate_measurements(given, "the measurement"))
    if not isinstance(given, (str, os.PathLike)):
        raise InputError(f"measured: found {add_article(type(given).__name__)}; {MEASUREMENT_FORM}", option="measured")
    return list(_iterate_measurements(read_json(given, "measured", MEASUREMENT_FORM), str(Path(given))))


def _iterate_measurements(data: Any, file: str) -> Iterator[Measurement]:
    if not isinstance(data, Mapping) or ("packages" not in data and "program" not in data):
        raise InputError(f"measured: '{file}' has no compute plan; {MEASUREMENT_FORM}")
    machine = _check_type(data.get("machine") or {}, Mapping, file, "machine")
    if "packages" not in data:
        yield Measurement(file, "", None, data.get("units"), machine, _parse_functions(data, file))
        return
    if data.get("schema") != 1:
        raise InputError(f"measured: '{file}' has schema {data.get('schema')!r}; expected 1")
    plans, problems = 0, list(_iterate_problems(data))
    for name, package in _check_type(data["packages"], Mapping, file, "packages").items():
        listed = _check_type(
            _check_type(package, Mapping, file, name).get("plans") or {}, Mapping, file, f"{name}, plans"
        )
        for units in [units for units in _PREFERRED_UNITS if units in listed][:1]:
            plans += 1
            plan = _check_type(listed[units], Mapping, file, f"{name}, {units}")
            yield Measurement(file, str(name), package.get("path"), units, machine, _parse_functions(plan, file),
                              list(_iterate_runs(data.get("verdict"), str(name), package)), problems)
    if not plans:
        said = next((text for text in problems if text.startswith(("compute plan", _UNFINISHED))), "no plan was read")
        raise InputError(f"measured: '{file}' has no compute plan ({said})")


def _iterate_problems(data: Mapping[str, Any]) -> Iterator[str]:
    if data.get("complete") is False:
        yield f"{_UNFINISHED}: {data.get('doing') or 'between two steps'}"
    listed = data.get("problems")
    for each in listed if isinstance(listed, list) else ():
        if isinstance(each, Mapping):
            yield f"{each.get('where')}: {each.get('problem')}"


def _iterate_runs(verdict: Any, name: str, package: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the script's results for one package; entries in another format are skipped."""
    for line in verdict if isinstance(verdict, list) else ():
        if not isinstance(line, Mapping) or line.get("package") != name:
            continue
        timing: Any = package
        for key in ("functions", line.get("function"), "units", line.get("units"), "timing"):
            timing = timing.get(key) if isinstance(timing, Mapping) else None
        spent = timing.get("median_ms") if isinstance(timing, Mapping) else None
        yield {"function": str(line.get("function")), "units": str(line.get("units")), "passed": line.get("passed"),
               "says": str(line.get("says")), "median_ms": spent if isinstance(spent, (int, float)) else None}


def _parse_functions(plan: Mapping[str, Any], file: str) -> dict[str, list[MeasuredOp]]:
    program = _check_type(plan.get("program"), Mapping, file, "program")
    functions = _check_type(program.get("functions"), Mapping, file, "program, functions")
    return {str(name): [told for place, op in enumerate(_check_type(ops, list, file, f"function {name}"))
                        if (told := _parse_op(str(name), op, file, f"function {name}, op {place}")).kind != "const"]
            for name, ops in functions.items()}


def _parse_op(function: str, op: Any, file: str, where: str) -> MeasuredOp:
    op = _check_type(op, Mapping, file, where)
    kind = _check_type(op.get("operator"), str, file, f"{where}, operator").rpartition(".")[2]
    outputs = _check_type(op.get("outputs", []), list, file, f"{where}, outputs")
    supported, preferred, cost = op.get("supported"), op.get("preferred"), op.get("cost")
    if supported is not None:
        supported = tuple(
            _parse_device(each, file, where) for each in _check_type(supported, list, file, f"{where}, supported")
        )
    if cost is not None and (isinstance(cost, bool) or not isinstance(cost, (int, float)) or not 0 <= cost <= 1 + 1e-6):
        raise InputError(f"measured: '{file}', {where}: cost is {cost!r}; expected a number from 0 to 1, or null")
    return MeasuredOp(function, kind, tuple(map(str, outputs)), supported,
                      None if preferred is None else _parse_device(preferred, file, where), cost)


def _parse_device(name: Any, file: str, where: str) -> str:
    found = _DEVICES.get(str(name).lower())
    if found is None:
        raise InputError(f"measured: '{file}', {where}: device {name!r}; expected cpu, gpu or ane")
    return found


def _check_type(value: Any, kind: type[Any], file: str, where: str) -> Any:
    if not isinstance(value, kind):
        wanted = "a list" if kind is list else "a text" if kind is str else "an object"
        raise InputError(f"measured: '{file}', {where}: found {type(value).__name__}, expected {wanted}; "
                         f"{MEASUREMENT_FORM}")
    return value
