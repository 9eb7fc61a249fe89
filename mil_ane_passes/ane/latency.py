"""Estimates of the run time of a program on a chip: of each op, each partition and each call.

This is not Core ML's own estimate, which decides where ops run (`cost`): it is a model of the hardware, fitted to
public measurements, with a range from its errors on rows held out of the fit (`python -m tests.lab.latency`). What no
measurement of the chip covers is extrapolated from other chips, marked so, and has a wider range. Nobody here has run
it against an ANE.

It works from declared shapes and the stored sizes of weights. No weight is read.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from typing import Any, NamedTuple

from coremltools.converters.mil.mil import Function, Operation, Program, Var

from ..ir.query import get_itemsize, get_type_info, is_compressed, is_const
from ..passes.devices import find_chip
from ..passes.forecast import ChipLatency
from ..passes.layout import compute_padded_bytes
from ..passes.plan import Backend, Plan
from ..passes.targets import CHIPS, parse_target
from ..utils.errors import InputError
from .latency_parameters import API_NAMES, MEASURED_CHIPS, find_chips
from .latency_terms import Chip, Interface, Terms, Work, compute_terms, describe_work, time_call
from .sizes import Sizes, iterate_inputs, make_program_sizes

__all__ = ["FunctionLatency", "LatencyReport", "OpLatency", "PartitionLatency", "estimate_latency",
           "list_interface_bytes"]

TRANSITION_US, TRANSITION_RANGE_US = 60.0, (30.0, 90.0)
"Each further ANE partition of a call: 0.03 to 0.09 ms (trisanths, cadamcat: several programs in place of one)."
CPU_CALL_US, CPU_CALL_RANGE_US = 20.0, (10.0, 60.0)
"A call that stays on the CPU (751K: small chains on an M6, 29 to 68 us in all)."
CPU_SPREAD = 3.0
"Core ML's own estimates of the CPU, made for an M4, are the only evidence; taken as right within this factor."
TILE_RANGE_BYTES = (0.5 * 2 ** 20, 4.72e6)
"Tiles of input activations where no row of the chip determines them: 0.5 MiB (M5 Pro) to 4.72 MB (M5, ane-guide)."
NOTCH_RANGE = (1.7, 3.3)
"How much slower weights stream on the notch: 58 -> 37 GB/s (maderix, 4096 x 4096), 60 -> 17 to 19 (eiln, 2048 x 4096)."
ON_CHIP_BYTES, SPILL_RANGE = 2 * 2 ** 20, 7.0
"""Values up to 2 MiB stay on the chip between ops (751K, M6). Sums of sums of larger inputs took up to 7 times as long
as expected, while chains of convs of any size did not: it is in the range of such ops, and not in their estimate."""
WORDS = {"MACs": "MACs", "weights": "weights streamed", "matmul": "matmuls of activations", "softmax": "softmax",
         "elementwise": "elementwise ops", "reduction": "reductions", "movement": "data movement",
         "other": "op types without measurements", "CPU": "ops on the CPU",
         "transitions": "transitions between ANE partitions", "call": "the fixed cost of a call",
         "interface": "inputs and outputs", "free": "no time (fused or free)"}


@dataclass(frozen=True)
class OpLatency:
    """The estimate of one op; `term` describes the dominant term. Consts and decompressed weights have no estimate."""

    function: str
    index: int
    name: str
    op_type: str
    backend: Backend
    latency_us: float
    latency_low_us: float
    latency_high_us: float
    cause: str
    term: str
    extrapolated: bool


@dataclass(frozen=True)
class PartitionLatency:
    """The estimate of consecutive ops on one backend, without the cost of the call."""

    function: str
    backend: Backend
    first: int
    last: int
    latency_us: float
    latency_low_us: float
    latency_high_us: float
    term: str
    extrapolated: bool


@dataclass(frozen=True)
class FunctionLatency:
    """The estimate of one call of a function, and its parts by cause in microseconds (`causes`)."""

    name: str
    latency_us: float
    latency_low_us: float
    latency_high_us: float
    term: str
    extrapolated: bool
    causes: dict[str, float]


@dataclass(frozen=True)
class LatencyReport:
    """The estimate of a program on `chips` (several for a target that does not name one) through `api`.

    `latency_us` is the time of one call of each function. With several chips it is that of the middle one, and the
    range covers them all.
    """

    target: str
    chips: tuple[str, ...]
    api: str
    latency_us: float
    latency_low_us: float
    latency_high_us: float
    term: str
    extrapolated: bool
    by_chip: tuple[ChipLatency, ...] = ()
    "The estimates of which this one is made, fastest chip first."
    functions: list[FunctionLatency] = field(default_factory=list)
    partitions: list[PartitionLatency] = field(default_factory=list)
    ops: list[OpLatency] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values; microseconds have three digits after the point."""
        found: dict[str, Any] = _round_for_json(asdict(self))
        return {**found, "chips": list(self.chips)}


@dataclass(frozen=True)
class _Placed:
    """An op, its backend, and its work on the ANE or its time on the CPU."""

    index: int
    op: Operation
    backend: Backend
    cpu_us: float = 0.0
    work: Work = Work("free")
    "The same object for all ops of a function whose works are equal; `weight` is the op's own."
    weight: Hashable = None
    spill: bool = False


def estimate_latency(
    program: Program, plan: Plan | None = None, target: str = "all", *, api: str = "coreml",
    change: Callable[[Work], Work] | None = None,
) -> LatencyReport:
    """Estimate the run time of `program` on `target`, with the partitions of `plan`.

    Without a plan every op counts as on the ANE, in one partition. `api` is the programming interface of the caller:
    coreml, coreai, or private (no Core ML: what measurements of the hardware use). `change` is applied to the work of
    each op on the ANE: what if its weight were stored in another way?

    Raises InputError for an unknown target or interface.
    """
    if api not in API_NAMES:
        raise InputError(f"api: found {api!r}; expected one of {', '.join(API_NAMES)}")
    chips = _resolve_chips(target)
    functions = list(_iterate_functions(program, plan, change or _keep_work))
    reports = sorted((_estimate_on_chip(functions, chip, target, api) for chip in chips),
                     key=lambda report: report.latency_us)
    return reports[0] if len(reports) == 1 else _merge_chips(reports, target)


def list_interface_bytes(function: Function, sizes: Sizes) -> list[int]:
    """List the bytes of each input and output of `function`, with the last axis padded to 64 bytes."""
    return [_count_bytes(var, sizes) for var in (*function.inputs.values(), *function.outputs)]


def _resolve_chips(target: str) -> tuple[Chip, ...]:
    generations = parse_target(target)
    if len(generations) > 1:
        return tuple(chip for name in MEASURED_CHIPS for chip in find_chips(name))
    name = find_chip(target, CHIPS)
    return find_chips(name if name is not None else "")


@dataclass(frozen=True)
class _Described:
    """A function for all chips, with the bytes of its inputs and outputs, and of its transitions."""

    name: str
    placed: list[_Placed]
    interface: int
    crossing: int


def _keep_work(work: Work) -> Work:
    return work


def _iterate_functions(program: Program, plan: Plan | None, change: Callable[[Work], Work]) -> Iterator[_Described]:
    all_sizes = plan.sizes if plan is not None else make_program_sizes(program, None)
    for name, function in program.functions.items():
        works: dict[tuple[Work, bool], Work] = {}
        sizes = all_sizes[name]
        if plan is None:
            ops = [op for op in function.operations if op.op_type != "const"]
            placed = [_place_on_ane(index, op, sizes, works, change) for index, op in enumerate(ops)]
        else:
            placed = [_place_on_ane(row.index, row.op, sizes, works, change) if row.backend == "ane" else
                      _Placed(row.index, row.op, "cpu", 1e3 * row.cost.of(row.engine)) for row in plan.of(name)]
        placed = [each for each in placed if not each.op.op_type.startswith("constexpr_")]
        yield _Described(name, placed, sum(list_interface_bytes(function, sizes)), _count_crossing(placed, sizes))


def _place_on_ane(
    index: int, op: Operation, sizes: Sizes, works: dict[tuple[Work, bool], Work], change: Callable[[Work], Work],
) -> _Placed:
    work = change(describe_work(op, sizes))
    same = works.setdefault((work, work.weight is None), work)
    return _Placed(index, op, "ane", work=same, weight=work.weight, spill=_may_leave_chip(op, work, sizes))


def _estimate_on_chip(functions: Iterable[_Described], chip: Chip, target: str, api: str) -> LatencyReport:
    ops: list[OpLatency] = []
    partitions: list[PartitionLatency] = []
    calls: list[FunctionLatency] = []
    for each in functions:
        mine = list(_estimate_ops(each.name, each.placed, chip))
        own = list(_group_partitions(each.name, mine))
        ops, partitions = ops + mine, partitions + own
        calls.append(_estimate_call(each.name, mine, own, each.interface, each.crossing, chip.interfaces[api], chip))
    causes: dict[str, float] = defaultdict(float)
    for call in calls:
        for cause, spent in call.causes.items():
            causes[cause] += spent
    total = ChipLatency(
        chip.name, sum(call.latency_us for call in calls), sum(call.latency_low_us for call in calls),
        sum(call.latency_high_us for call in calls), causes["call"],
        sum(op.latency_us for op in ops if op.extrapolated))
    return LatencyReport(
        target, (chip.name,), api, total.latency_us, total.latency_low_us, total.latency_high_us,
        _name_largest(causes), any(call.extrapolated for call in calls), (total,), calls, partitions, ops)


def _estimate_ops(function: str, placed: Sequence[_Placed], chip: Chip) -> Iterator[OpLatency]:
    tiles = (chip.tile_bytes,) * 2 if "tile_bytes" in chip.measured else TILE_RANGE_BYTES[::-1]
    notches = NOTCH_RANGE if chip.notch > 1 else (1.0, 1.0)
    variants = [replace(chip, tile_bytes=tile, notch=notch) for tile, notch in zip(tiles, notches)]
    held: set[Hashable] = set()
    known: dict[tuple[int, bool, bool], _Estimate] = {}
    for each in placed:
        op, work = each.op, each.work
        if each.backend == "cpu":
            yield OpLatency(function, each.index, op.name, op.op_type, "cpu", each.cpu_us, each.cpu_us / CPU_SPREAD,
                            each.cpu_us * CPU_SPREAD, "CPU", "on the CPU: Core ML's own estimate for an M4", True)
            continue
        again = each.weight is not None and each.weight in held
        held.add(each.weight)
        key = (id(work), again, each.spill)
        if key not in known:  # repeated blocks are estimated once
            known[key] = _estimate_work(work, again, each.spill, chip, variants)
        yield OpLatency(function, each.index, op.name, op.op_type, "ane", *known[key])


class _Estimate(NamedTuple):
    """The last fields of an OpLatency."""

    latency_us: float
    latency_low_us: float
    latency_high_us: float
    cause: str
    term: str
    extrapolated: bool


def _estimate_work(work: Work, again: bool, spill: bool, chip: Chip, variants: Sequence[Chip]) -> _Estimate:
    """Estimate one op; `again`: its weight was used before. `variants` are the ends of what no row determines."""
    held = {work.weight} if again else set()
    terms = compute_terms(work, chip, set(held))
    bounds = [terms.total_us] * 2
    if terms.weights_us:
        bounds = [compute_terms(work, variant, set(held)).total_us for variant in variants]
    spread, known = _find_spread(work, chip)
    high = max(bounds[1], terms.total_us) * spread * (SPILL_RANGE if spill else 1.0)
    return _Estimate(terms.total_us, min(bounds[0], terms.total_us) / spread, high, terms.cause,
                     terms.term + (": its operands may leave the chip" if spill else ""),
                     terms.total_us > 0 and not (known and _is_covered(work, terms, chip)))


def _find_spread(work: Work, chip: Chip) -> tuple[float, bool]:
    """Find the factor up to which the kind of `work` was off, and whether rows of this chip say so."""
    kind = {"single": "elementwise", "pair": "elementwise", "depthwise": "other", "matmul": "attention",
            "softmax": "attention"}.get(work.kind, work.kind)
    return chip.spread[kind], f"kind:{kind}" in chip.measured


def _may_leave_chip(op: Operation, work: Work, sizes: Sizes) -> bool:
    """Return whether `op` combines the result of another such op, and both are too large to stay on the chip."""
    if work.kind != "pair" or _count_bytes(op.outputs[0], sizes) <= ON_CHIP_BYTES:
        return False
    makers = [var.op for var in iterate_inputs(op) if var.op is not None and not is_const(var)]
    return any(maker.op_type in ("add", "sub", "mul", "maximum", "minimum") for maker in makers)


def _is_covered(work: Work, terms: Terms, chip: Chip) -> bool:
    """Return whether the parameters that decide the time of `work` are determined by rows of the chip."""
    if terms.cause == "weights":
        tile = "tile_bytes" in chip.measured or terms.passes <= 1
        wide = work.width < 9 or "wide_kernels" in chip.measured
        return "weight_gbs" in chip.measured and tile and wide
    return "mac_tflops" in chip.measured and (not work.int8 or "int8_gain" in chip.measured)


def _group_partitions(function: str, ops: Sequence[OpLatency]) -> Iterator[PartitionLatency]:
    for backend, run in groupby(ops, key=lambda op: op.backend):
        members = list(run)
        yield PartitionLatency(
            function, backend, members[0].index, members[-1].index, sum(op.latency_us for op in members),
            sum(op.latency_low_us for op in members), sum(op.latency_high_us for op in members),
            _name_largest(_sum_causes(members)), any(op.extrapolated for op in members))


def _estimate_call(name: str, ops: Sequence[OpLatency], partitions: Sequence[PartitionLatency], interface_bytes: int,
                   crossing_bytes: int, interface: Interface, chip: Chip) -> FunctionLatency:
    """Add up one call: the fixed cost, time on the ANE and the CPU, transitions, inputs and outputs."""
    causes = _sum_causes(ops)
    on_ane = [part for part in partitions if part.backend == "ane"]
    on_cpu = [part for part in partitions if part.backend == "cpu"]
    floor = chip.spread["floor"]
    more = max(0, len(on_ane) - 1)
    totals = []
    for key, factor, at in (("latency_us", 1.0, None), ("latency_low_us", 1 / floor, 0), ("latency_high_us", floor, 1)):
        cpu = sum(getattr(part, key) for part in on_cpu)
        if not on_ane:
            totals.append(cpu + (CPU_CALL_US if at is None else CPU_CALL_RANGE_US[at]))
            continue
        ane = sum(getattr(part, key) for part in on_ane)
        scaled = replace(interface, floor_us=interface.floor_us * factor, io_gbs=interface.io_gbs / factor)
        transition = TRANSITION_US if at is None else TRANSITION_RANGE_US[at]
        totals.append(time_call(scaled, ane, interface_bytes + crossing_bytes) + cpu + more * transition)
    if on_ane:
        moved = interface_bytes / (interface.io_gbs * 1e3)
        causes["interface"] += moved
        causes["transitions"] += more * TRANSITION_US + crossing_bytes / (interface.io_gbs * 1e3)
    causes["call"] += max(0.0, totals[0] - sum(causes.values()))
    extrapolated = any(part.extrapolated for part in partitions) or (bool(on_ane) and not interface.measured)
    central, low, high = totals
    return FunctionLatency(name, central, low, high, _name_largest(causes), extrapolated,
                           {cause: spent for cause, spent in causes.items() if spent > 0})


def _count_crossing(placed: Sequence[_Placed], sizes: Sizes) -> int:
    """Count the bytes of values that one backend makes and the other reads."""
    where = {each.op: each.backend for each in placed}
    crossing: dict[Var, int] = {}
    for each in placed:
        for var in iterate_inputs(each.op):
            maker = where.get(var.op) if var.op is not None else None
            if maker is not None and maker != each.backend and not is_const(var) and not is_compressed(var):
                crossing[var] = _count_bytes(var, sizes)
    return sum(crossing.values())


def _count_bytes(var: Var, sizes: Sizes) -> int:
    if not get_type_info(var).is_tensor or not sizes.elements(var):
        return 0
    return compute_padded_bytes(sizes.shape(var), get_itemsize(var))


def _sum_causes(ops: Iterable[OpLatency]) -> dict[str, float]:
    causes: dict[str, float] = defaultdict(float)
    for op in ops:
        causes[op.cause] += op.latency_us
    return causes


def _name_largest(causes: dict[str, float]) -> str:
    """Name the cause of most of the time, with its share."""
    total = sum(causes.values())
    if total <= 0:
        return WORDS["free"]
    cause = max(causes, key=lambda each: causes[each])
    return f"{WORDS[cause]}: {100 * causes[cause] / total:.0f} % of the time"


def _merge_chips(reports: Sequence[LatencyReport], target: str) -> LatencyReport:
    """Merge the reports of several chips, sorted by latency: the middle one, with ranges that cover all."""
    middle = reports[len(reports) // 2]

    def list_per_chip(part: str) -> list[Any]:
        return [
            replace(each, latency_low_us=min(getattr(report, part)[place].latency_low_us for report in reports),
                    latency_high_us=max(getattr(report, part)[place].latency_high_us for report in reports),
                    extrapolated=True)
            for place, each in enumerate(getattr(middle, part))
        ]
    return replace(
        middle, target=target, chips=tuple(report.chips[0] for report in reports),
        latency_low_us=min(report.latency_low_us for report in reports),
        latency_high_us=max(report.latency_high_us for report in reports), extrapolated=True,
        by_chip=tuple(each for report in reports for each in report.by_chip),
        functions=list_per_chip("functions"), partitions=list_per_chip("partitions"), ops=list_per_chip("ops"))


def _round_for_json(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 3) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _round_for_json(each) for key, each in value.items()}
    return [_round_for_json(each) for each in value] if isinstance(value, (list, tuple)) else value
