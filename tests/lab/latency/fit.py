"""The fit of the model's parameters: few per chip, near figures that the sources state themselves.

Each parameter starts at a cited figure and is pulled towards it, so that what the rows of a chip do not determine stays
there. A parameter without a row of its chip is taken over from other chips and marked as such.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from mil_ane_passes.ane.latency_parameters import API_NAMES
from mil_ane_passes.ane.latency_terms import Chip, Interface, compute_terms, time_call

from .rows import Case

MIB = 1 << 20


class Prior(NamedTuple):
    """The cited figure of a parameter, its source, and how far (in logs) the fit may take it at a cost of one row."""

    value: float
    source: str
    sigma: float = 0.3
    free: bool = True


GUIDE, KB, TRI, MAD = "sbryngelson/ane-guide", "751K study of the M6", "trisanths/ane-llm-prefill", "maderix/ANE"
CAD, SLAVKO = "cadamcat/llms-on-apple-neural-engine", "slavko-at-klincov-it/ANE-Training"
MIDAS = "MidasMulli/ane-compiler"
EILN = "kasper0406/stablehlo-coreml#110 (eiln)"

PRIORS: dict[str, dict[str, Prior]] = {
    "m1": {
        "mac_tflops": Prior(11.0, f"{GUIDE}: 12 matmul slope, 9.6 conv stack"),
        "weight_gbs": Prior(51, GUIDE),
        "private.floor_us": Prior(190, f"{GUIDE}: 190-230"),
        "private.io_gbs": Prior(6, f"{GUIDE}: 10 with a copy by the caller, 24 without"),
    },
    "m2": {
        "mac_tflops": Prior(11.6, f"{TRI}: 11-12 when K is tiled"),
        "weight_gbs": Prior(60, f"{TRI}: 58; {GUIDE}: 56-62"),
        "tile_bytes": Prior(0.8 * MIB, f"{TRI}, derived"),
        "int8_gain": Prior(1.17, f"{TRI}: 1.17-1.20 over W8A16"),
        "softmax_gelems": Prior(5.5, f"{TRI}: 22 GB/s"),
        "matmul_share": Prior(0.4, f"{TRI}, {GUIDE}"),
        "pair_gelems": Prior(30, f"{TRI}, derived: sums of K-tiled linears", 0.5),
        "move_gbs": Prior(20, f"{TRI}, derived: N-tiled linears", 0.5),
        "private.floor_us": Prior(125, f"{TRI}: 104-335"),
        "private.io_gbs": Prior(12, f"{TRI}, derived", 0.5),
        "coreml.floor_us": Prior(200, f"{TRI}, derived", 0.5),
        "coreml.io_gbs": Prior(4, f"{TRI}, derived", 0.5),
    },
    "m3": {
        "mac_tflops": Prior(16, f"{MAD}: 15.0-16.8"),
        "weight_gbs": Prior(50, f"{SLAVKO}, derived"),
        "private.floor_us": Prior(190, f"{SLAVKO}: 177-200"),
        "private.io_gbs": Prior(100, f"{MAD}, {SLAVKO}, derived: surfaces, no copy", 0.7),
    },
    "m4": {
        "mac_tflops": Prior(18.7, f"{MAD}: 18.6-18.8"),
        "weight_gbs": Prior(62, f"{MAD}: 58-61; {KB}: 67"),
        "narrow_waste": Prior(1.1, f"{MAD}: 3.92 TF on a large map of 64 channels", 0.1),
        "narrow_row_waste": Prior(3.0, f"{KB}: 1.6 TF on 1 x 1024 with 64 channels", 0.5),
        "int8_gain": Prior(1.9, f"{MAD}: 1.85-1.9"),
        "notch": Prior(2.4, f"{EILN}: 60 -> 17-19 GB/s; {MAD}#3: 58 -> 37", 0.2),
        "small_kernel_gain": Prior(2.0, f"{KB} sparse.txt", 0.5),
        "private.floor_us": Prior(90, f"{MAD}: 90-100"),
        "private.io_gbs": Prior(100, f"{MAD}, derived: surfaces, no copy", 0.7),
        "coreml.floor_us": Prior(115, KB),
    },
    "m5": {
        "mac_tflops": Prior(18.8, f"{CAD} chain, {GUIDE}"),
        "weight_gbs": Prior(132, f"{CAD}: 121 (Pro); {GUIDE}: 145", 0.1),
        "tile_bytes": Prior(0.5 * MIB, f"{CAD}, derived from one row", 0.1),
        "int8_gain": Prior(1.87, CAD),
        "private.floor_us": Prior(80, f"{MAD} m5result: 70-80; {MIDAS}: 93 (Pro)"),
        "private.io_gbs": Prior(100, f"{MAD}, derived: surfaces, no copy", 0.7),
        "coreml.floor_us": Prior(200, f"{CAD}, derived", 0.5),
        "coreai.floor_us": Prior(120, f"{CAD}, derived", 0.5),
        "coreai.io_gbs": Prior(60, f"{CAD}, derived", 0.7),
    },
    "m6": {
        "mac_tflops": Prior(20.6, f"{KB}: 20.6 an engine"),
        "weight_gbs": Prior(150, KB),
        "block_waste": Prior(0.27, f"{KB}: 256 -> 272 channels +32 %", 0.5),
        "winograd": Prior(1.4, f"{KB}: 1.35-1.5"),
        "int8_gain": Prior(1.5, f"{KB}: 1.34 (1x1), 2.0 (3x3)"),
        "unpack_share": Prior(0.82, f"{KB} wfmt.txt"),
        "single_gelems": Prior(207, f"{KB}: 121 an engine"),
        "pair_gelems": Prior(55, f"{KB}: 27-29 an engine"),
        "coreml.floor_us": Prior(158, f"{KB}: 150-160"),
        "coreml.hidden_us": Prior(30, f"{KB}, derived", 0.5),
        "coreml.wake_share": Prior(0.3, f"{KB}: 130 -> 325 us", 0.5),
        "coreml.wake_cap_us": Prior(800, f"{KB}, derived", 0.5),
        "coreml.io_gbs": Prior(80, f"{KB}: 35-40 an engine", 0.5),
    },
}
DEFAULT_TILE, ENGINE_TILE = 1.0 * MIB, 2.0 * MIB
"Where no row says: about as on the M2 Pro; on an M6 the L2 of an engine, which its study states as 2 MiB."
FIXED = {"m6": {"engines": Prior(2, f"{KB}: two engines, for outputs of 131072 elements on"),
                "engine_elements": Prior(131072, f"{KB}: interrupts of both engines in the rows"),
                "softmax_gelems": Prior(13, f"{KB}: 16 on 512 x 1 x 128 take 78 us"),
                "move_gbs": Prior(32, f"{KB}: a transpose of 32 MB takes 1.0 ms"),
                "wide_kernels": Prior(1, f"{KB}: widths of 9 to 15")}}
"Parameters that are not fitted."
TAKEN_OVER = "no row of this chip: about as on the chips that have rows (M2 Pro, M6)"
RELATIVES = {"a14": "m1", "a15": "m2", "a16": "m3", "a17": "m3", "a18": "m4", "a19": "m5"}
"Chips of the same generation or, for A17 and A18, the nearest (Apple states 35 TOPS for A17 Pro, A18 and 38 for M4)."
NEIGHBOURS = {"m1": ("m2",), "m2": ("m1", "m3"), "m3": ("m2", "m4"), "m4": ("m3", "m5"), "m5": ("m4",), "m6": ("m5",)}
"Whose parameters each chip with rows is predicted with, to see what it costs to have none of its own."
LEAST_ROWS = 5
"Rows from which the errors of a chip and kind are its own range."
JUDGED_SPREADS = {"reduction": 3.0, "movement": 3.0, "other": 5.0, "free": 1.0}
"Ranges of kinds without a row of any chip: judgements."
KIND_OF_SPREAD = {"conv": "conv", "linear": "conv", "elementwise": "elementwise", "attention": "attention",
                  "floor": "floor"}


def make_chip(name: str, values: Mapping[str, float]) -> Chip:
    """Make a chip from fitted values; what has none is taken over from other chips, as they are."""
    return _build_chip(name, {**_take_over(values), **values})


def _take_over(values: Mapping[str, float]) -> dict[str, float]:
    """Return the values of parameters that no row of a chip determines.

    The rates of elementwise ops, softmax and movement are those of one engine: alike on M2 Pro and M6.
    """
    engines = values.get("engines", 1)
    found = {
        "tile_bytes": ENGINE_TILE if engines > 1 else DEFAULT_TILE, "single_gelems": 100.0 * engines,
        "pair_gelems": 28.0 * engines, "softmax_gelems": 6.0 * engines, "move_gbs": 17.0 * engines,
        "matmul_share": 0.45, "block_waste": 0.2,
        "winograd": 1.0, "int8_gain": 1.0, "unpack_share": 1.0, "notch": 1.0, "small_kernel_gain": 1.0,
        "engines": 1, "engine_elements": 0, "wide_kernels": 1,
    }
    found["narrow_waste"] = values.get("block_waste", found["block_waste"])
    found["narrow_row_waste"] = values.get("narrow_waste", found["narrow_waste"])
    floors, io = {"coreml": 160.0, "private": 110.0, "coreai": 130.0}, 30.0
    for api, floor in floors.items():
        found.update({f"{api}.floor_us": floor, f"{api}.io_gbs": io, f"{api}.hidden_us": 0.0,
                      f"{api}.wake_share": 0.0, f"{api}.wake_cap_us": 0.0})
    return found


def _build_chip(name: str, values: Mapping[str, float]) -> Chip:
    own = dict(values)
    interfaces = {api: Interface(**{key.split(".")[1]: own.pop(key) for key in list(own) if key.startswith(f"{api}.")})
                  for api in API_NAMES}
    return Chip(name, **own, interfaces=interfaces)


def predict(case: Case, chip: Chip) -> float:
    """Compute the microseconds that the model gives for a case."""
    ane = 0.0
    if case.slope:
        held = set() if case.own else {work.weight for work in case.works}
        return sum(compute_terms(work, chip, held).total_us for work in case.works)
    held: set = set()
    first = sum(compute_terms(work, chip, held).total_us for work in case.works)
    more = first if case.own else sum(compute_terms(work, chip, held).total_us for work in case.works)
    ane = first + (case.layers - 1) * more
    if case.kind in ("elementwise", "attention") and not case.io_bytes:
        return ane
    return time_call(chip.interfaces[case.api], ane, case.io_bytes)


def _complete(name: str, values: Mapping[str, float]) -> dict[str, float]:
    return {**{key: prior.value for key, prior in FIXED.get(name, {}).items()}, **values}


def fit_chip(name: str, cases: Iterable[Case]) -> dict[str, float]:
    """Fit the parameters of one chip to its cases; deterministic."""
    priors, mine = PRIORS[name], [case for case in cases if case.chip == name]
    names = list(priors)
    start = np.log([priors[each].value for each in names])
    sigma = np.array([priors[each].sigma for each in names])
    count = defaultdict(int)
    for case in mine:
        count[case.group] += 1
    # A sweep of many rows of one shape says no more than a few: each group counts as at most its square root times 3.
    weight = np.array([min(1.0, 3 / math.sqrt(count[case.group])) for case in mine])

    def residuals(point):
        chip = make_chip(name, _complete(name, dict(zip(names, np.exp(point)))))
        errors = np.array([math.log(predict(case, chip) / case.value_us) for case in mine])
        robust = np.sign(errors) * np.sqrt(np.log1p((errors / 0.1) ** 2))
        return np.concatenate([robust * weight, (point - start) / sigma])

    from scipy.optimize import least_squares  # half a second, which reading the priors need not wait for

    found = least_squares(residuals, start, max_nfev=60)
    return _complete(name, dict(zip(names, map(float, np.exp(found.x)))))


def fit_all(cases: list[Case]) -> dict[str, dict[str, float]]:
    """Fit each chip to its cases."""
    return {name: fit_chip(name, cases) for name in PRIORS}


def hold_out(cases: list[Case]) -> dict[str, float]:
    """Predict each case with parameters fitted to the cases of the other groups; by id, in microseconds."""
    found = {}
    for name in PRIORS:
        mine = [case for case in cases if case.chip == name]
        for group in sorted({case.group for case in mine}):
            chip = make_chip(name, fit_chip(name, [case for case in mine if case.group != group]))
            found.update((case.id, predict(case, chip)) for case in mine if case.group == group)
    return found


def borrow(cases: list[Case], fitted: Mapping[str, Mapping[str, float]]) -> dict[str, list[float]]:
    """Predict the conv and linear cases of each chip with the parameters of its neighbours; log errors by chip."""
    found: dict[str, list[float]] = {}
    for name, others in NEIGHBOURS.items():
        mine = [case for case in cases if case.chip == name and case.kind in ("conv", "linear")]
        chips = [make_chip(other, fitted[other]) for other in others]
        found[name] = [math.log(predict(case, chip) / case.value_us) for chip in chips for case in mine]
    return found


def compute_spread(errors: Iterable[float]) -> float:
    """Compute the factor that nine of ten errors (in logs) stay within, at least 1.1."""
    return max(1.1, float(np.exp(np.percentile(np.abs(list(errors)), 90))))


def build_parameters(cases: list[Case], fitted: Mapping[str, Mapping[str, float]],
                     held_out: Mapping[str, float]) -> dict[str, Any]:
    """Build the contents of `latency_parameters.json`."""
    errors: dict[tuple[str, str], list[float]] = defaultdict(list)
    for case in cases:
        errors[case.chip, KIND_OF_SPREAD[case.kind]].append(math.log(held_out[case.id] / case.value_us))
    # Chips weigh the same in what borrowing costs, however many rows they have.
    borrowed = float(np.median([compute_spread(each) for each in borrow(cases, fitted).values()]))
    pooled = {kind: compute_spread(error for (_, other), each in errors.items() if other == kind for error in each)
              for kind in ("conv", "elementwise", "attention", "floor")}
    chips: dict[str, Any] = {}
    for name, values in fitted.items():
        known = {kind: each for (chip, kind), each in errors.items() if chip == name and len(each) >= LEAST_ROWS}
        spread = {kind: compute_spread(known[kind]) if kind in known else max(pooled[kind], borrowed)
                  for kind in ("conv", "elementwise", "attention")}
        spread["floor"] = pooled["floor"]
        all_errors = [abs(math.expm1(error)) for (chip, _), each in errors.items() if chip == name for error in each]
        chips[name] = {
            "rows": len(all_errors), "median_error": float(np.median(all_errors)),
            "p90_error": float(np.percentile(all_errors, 90)), "measured_kinds": sorted(set(known) - {"floor"}),
            "spread": {**spread, **JUDGED_SPREADS}, "parameters": _list_parameters(name, values)}
    for name, relative in RELATIVES.items():
        chips[name] = _relate(name, relative, chips, borrowed)
    return _round({"borrowed_spread": borrowed, "chips": chips})


def _list_parameters(name: str, values: Mapping[str, float]) -> dict[str, Any]:
    cited = {**PRIORS[name], **FIXED.get(name, {})}
    found = {key: {"value": value, "measured": False, "source": TAKEN_OVER}
             for key, value in _take_over(values).items()}
    found.update((key, {"value": value, "measured": True, "source": cited[key].source, "cited": cited[key].value})
                 for key, value in values.items())
    return found


def _relate(name: str, relative: str, chips: Mapping[str, Any], borrowed: float) -> dict[str, Any]:
    source = f"no row of this chip: as on the {relative}"
    parameters = {key: {"value": each["value"], "measured": False, "source": source}
                  for key, each in chips[relative]["parameters"].items()}
    if name == "a17":
        gain = chips["m4"]["parameters"]["int8_gain"]["value"]
        parameters["int8_gain"] = {"value": gain, "measured": False,
                                   "source": "as on the m4: Apple states twice the int8 rate from A17 Pro and M4 on"}
    # Effects seen on one chip alone are not assumed on another, and callers' copies on a Mac say nothing about a phone.
    alone = {"notch": 1.0, "small_kernel_gain": 1.0, "narrow_waste": 0.2, "narrow_row_waste": 0.2,
             "coreml.io_gbs": 30.0}
    parameters.update((key, {"value": value, "measured": False, "source": TAKEN_OVER}) for key, value in alone.items())
    spread = {kind: max(each, borrowed) if kind != "free" else 1.0 for kind, each in chips[relative]["spread"].items()}
    return {"rows": 0, "relative": relative, "measured_kinds": [], "spread": spread, "parameters": parameters}


def _round(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _round(each) for key, each in value.items()}
    return value
