"""Comparison of two sets of outputs, at the strictness that the rewrites between them declare.

Rewrites are judged without a user-set tolerance: `bitwise` means the same bits, and `rounding` is judged against the
program before at full precision. Models that are expected to differ, such as a model and its compressed form, are
judged by the limits of `Accuracy`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..passes.contract import Exactness
from ..passes.pass_trace import Change
from ..utils.errors import InputError
from ..utils.option_spelling import format_option_values

__all__ = [
    "EVERY_OUTPUT",
    "FLOAT64_TOLERANCE",
    "Accuracy",
    "OutputDifference",
    "Strictness",
    "compare_outputs",
    "describe_worst_element",
    "fill_undefined",
    "to_arrays",
]

Array = np.ndarray[Any, Any]
OutputsByPrecision = Mapping[str, Mapping[str, Array]]
"Outputs by precision and name."

FLOAT64_TOLERANCE = 1e-9
"""At float64, the largest difference due to rounding alone, as a fraction of the output's largest value.

float64 rounds by 2**-53 (1e-16), so 1e-9 allows for millions of roundings, but not for the error of a wrong formula.
"""
_FLOAT64_NOISE = 2.0**-44
"""The rounding error of a sum of 256 numbers near 1 at float64.

In log(1 + exp(x)), and in a sum whose terms cancel, as those of normalized values do, it may be larger than the output.
"""
EVERY_OUTPUT = "every output"
"Placeholder for an output's name when the program cannot be run."
_MAX_ERROR_RATIO = 4.0
"""Largest allowed ratio of the error of a typed run to the error of the program before, both against full precision.

A rewrite that sums in another order can double an error by chance; four leaves room for that, and a lost digit fails.
"""
_PROPAGATED = 2.0
"Allowed movement of a result relative to the movement in trials of declared changes: untested signs may be worse."
_MAX_ULPS_SHOWN = 1e6
"Larger counts of units in the last place are not printed: they add nothing to the printed difference."


@dataclass(frozen=True)
class OutputDifference:
    """The difference of one output: the worst element, its index, both values, and whether it is allowed.

    All of these describe the worst element: `absolute` is the difference, `relative` the difference as a fraction of
    the value before, `ulps` the difference in units in the last place of the output's dtype, and `allowed` the largest
    absolute difference that passes. `fixed` counts elements that were NaN or infinite and are finite now, if the
    rewrites between the programs declare this.
    """

    output: str
    equal_bits: bool
    passed: bool
    absolute: float = 0.0
    relative: float = 0.0
    ulps: float = 0.0
    index: tuple[int, ...] = ()
    before: float = 0.0
    after: float = 0.0
    allowed: float = 0.0
    reason: str = ""
    fixed: int = 0
    scale: float = 0.0
    "The largest finite magnitude of the output before."
    snr: float | None = None
    "Signal-to-noise ratio of the whole output in dB, if the outputs were judged by `Accuracy`."
    cosine: float | None = None
    "Cosine similarity of the whole output, if the outputs were judged by `Accuracy`."

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON; numbers that JSON cannot represent are strings ("inf", "-inf", "nan")."""
        numbers = {key: _to_json_number(getattr(self, key)) for key in (
            "absolute", "relative", "ulps", "before", "after", "allowed")}
        return {"output": self.output, "equal_bits": self.equal_bits, "passed": self.passed, **numbers,
                "index": list(self.index), "reason": self.reason, "fixed": self.fixed,
                "snr": None if self.snr is None else _to_json_number(self.snr),
                "cosine": None if self.cosine is None else _to_json_number(self.cosine)}

    def __str__(self) -> str:
        if self.equal_bits:
            return f"{self.output}: the same bits"
        if self.reason:
            return f"{self.output}: {self.reason}"
        if self.snr is not None and self.cosine is not None:
            return (f"{self.output}: SNR {self.snr:.1f} dB, cosine {self.cosine:.6f}, largest difference "
                    f"{self.absolute:.3g} at {list(self.index)} ({self.before!r} became {self.after!r})")
        verdict = "within" if self.passed else "beyond"
        # Integers and NaN have no ulps; a count above a million adds nothing to the printed difference.
        ulps = (
            ""
            if not np.isfinite(self.ulps)
            else f", {self.ulps:.3g} ulp"
            if self.ulps < _MAX_ULPS_SHOWN
            else ", > 1e6 ulp"
        )
        fixed = f"; {self.fixed} that were NaN or infinite are finite" if self.fixed else ""
        return (f"{self.output}: {self.before!r} became {self.after!r} at {list(self.index)} "
                f"(differs by {self.absolute:.3g}{ulps}, {verdict} the {self.allowed:.3g} allowed){fixed}")


@dataclass(frozen=True)
class Accuracy:
    """Limits on the error of floating-point outputs. All set limits must hold; None means no limit.

    Let a be an element of the first model's output and b the same element of the second's. `atol` and `rtol`:
    |a - b| <= atol + rtol * |a|, as in numpy.allclose; if only one is set, the other is 0. `snr`: the least
    signal-to-noise ratio of an output in dB, 10 log10(sum a^2 / sum (a - b)^2). `cosine`: the least cosine similarity
    of an output. NaN and infinite elements must be the same; integers, bools and strings must be equal. Raises
    InputError for a limit that no output can meet.
    """

    atol: float | None = None
    rtol: float | None = None
    snr: float | None = None
    cosine: float | None = None

    def __post_init__(self) -> None:
        for name, limit in self.limits().items():
            if isinstance(limit, np.generic):  # so that the JSON of a report can be written
                object.__setattr__(self, name, limit.item())
        for name in ("atol", "rtol"):
            limit = getattr(self, name)
            if limit is not None and not 0 <= limit < math.inf:
                raise InputError(f"{format_option_values(name)}: found {limit}; expected a number of 0 or more")
        if self.snr is not None and not math.isfinite(self.snr):
            raise InputError(f"{format_option_values('snr')}: found {self.snr}; expected a finite number of dB")
        if self.cosine is not None and not -1 <= self.cosine <= 1:
            raise InputError(f"{format_option_values('cosine')}: found {self.cosine}; expected a number from -1 to 1")

    def __bool__(self) -> bool:
        return any(limit is not None for limit in self.limits().values())

    def __str__(self) -> str:
        signs = {"atol": "<=", "rtol": "<=", "snr": ">=", "cosine": ">="}
        return ", ".join(f"{name} {signs[name]} {limit:g}{' dB' if name == 'snr' else ''}"
                         for name, limit in self.limits().items() if limit is not None)

    def limits(self) -> dict[str, float | None]:
        """Return the limits by name, as in the JSON."""
        return {"atol": self.atol, "rtol": self.rtol, "snr": self.snr, "cosine": self.cosine}

    def judge(self, name: str, old: Array, new: Array) -> OutputDifference:
        """Judge output `name` of the second model against the limits; a scalar counts as an array of one element."""
        old, new = np.atleast_1d(old), np.atleast_1d(new)
        if old.shape != new.shape:
            return OutputDifference(name, False, False, reason=f"has shape {list(old.shape)} in the first and "
                                                               f"{list(new.shape)} in the second")
        if old.dtype.kind != "f" or new.dtype.kind != "f":
            differing = int(np.count_nonzero(old != new))
            return OutputDifference(name, not differing and old.dtype == new.dtype, not differing,
                                    reason=f"{differing} of {old.size} values differ" if differing else "")
        if old.dtype == new.dtype and _has_same_bits(old, new):
            return OutputDifference(name, True, True, snr=math.inf, cosine=1.0)
        return self._judge_floats(name, old, new)

    def _judge_floats(self, name: str, old: Array, new: Array) -> OutputDifference:
        first, second = old.astype(np.float64), new.astype(np.float64)
        finite = np.isfinite(first) & np.isfinite(second)
        good = bool(np.all(finite | _find_equal_elements(first, second)))
        signal, noise = first[finite], (second - first)[finite]
        allowed = np.full(old.shape, math.inf)
        if self.atol is not None or self.rtol is not None:
            allowed = (self.atol or 0.0) + (self.rtol or 0.0) * np.abs(np.where(finite, first, 0.0))
            good &= bool(np.all(np.abs(noise) <= allowed[finite]))
        snr, cosine = _compute_snr(signal, noise), _compute_cosine(signal, second[finite])
        good &= (self.snr is None or snr >= self.snr) and (self.cosine is None or cosine >= self.cosine)
        unit = old.dtype if old.dtype.itemsize < new.dtype.itemsize else new.dtype
        return replace(describe_worst_element(name, old, new, allowed, good, unit_of=unit), snr=snr, cosine=cosine)


def _compute_snr(signal: Array, noise: Array) -> float:
    """Compute the signal-to-noise ratio in dB; infinite without noise."""
    lost = float(np.sum(noise * noise))
    kept = float(np.sum(signal * signal))
    if lost == 0.0:
        return math.inf
    return 10 * math.log10(kept / lost) if kept else -math.inf


def _compute_cosine(one: Array, other: Array) -> float:
    """Compute the cosine similarity; 1 if both outputs are all zero, 0 if only one is."""
    length = float(np.linalg.norm(one)) * float(np.linalg.norm(other))
    if length == 0.0:
        return 1.0 if not np.any(one) and not np.any(other) else 0.0
    return float(np.dot(one.ravel() / np.linalg.norm(one), other.ravel() / np.linalg.norm(other)))


@dataclass(frozen=True)
class Strictness:
    """The combined declarations of the rewrites between two programs.

    - `fixes_nonfinite`: values that were NaN or infinite may be finite. A NaN may become infinite where the value at
      full precision overflows or is not finite either.
    - `moves`: the allowed difference in addition to rounding, as a fraction of the output's largest value.
    - `ulps`: for typed results, an additional allowed difference in units in the last place of that largest value.
    - `within`: the smallest and largest magnitude of float inputs (zero is always allowed) for which all this holds at
      full precision.
    - `keeps_nonfinite`: if False, a NaN or an infinity in the feeds may spread to other results, and a result that
      overflows may become a NaN instead of an infinity, or the reverse.
    - `smallest_size` and `largest_size`: the sizes of symbolic dimensions for which it holds, if the model declares no
      range for them.
    """

    exactness: Exactness
    fixes_nonfinite: bool = False
    moves: float = 0.0
    accuracy: Accuracy | None = None
    "Limits on the error, for models that are expected to differ; they replace all other fields."
    ulps: float = 0.0
    within: tuple[float, float] = (0.0, math.inf)
    keeps_nonfinite: bool = True
    largest_size: float = math.inf
    smallest_size: int = 1
    changes: tuple[Change, ...] = ()
    "Declared changes of single ops; if results differ, they are propagated to downstream ops."


def compare_outputs(
    before: Mapping[str, Array], after: Mapping[str, Array], promised: Exactness | Strictness,
    truth: Mapping[str, Array] | None = None, nonfinite: bool = False, stepped: Mapping[str, Array] | None = None,
    moved: Mapping[str, Array] | None = None, widened: Collection[str] = (),
) -> list[OutputDifference]:
    """Compare two sets of outputs; return one entry per output.

    `truth` are the float64 results of the program before, for judging a typed run. `nonfinite` means that NaN and
    infinities were fed. `stepped` are results of the program before with each step of recurrent layers rounded; the
    larger of the two errors is the baseline. `moved` is the movement of each element in the program before under the
    rewrites' declared changes; twice this is allowed in addition. `widened` names outputs that are fp16 values cast to
    fp32: they are judged in units of fp16.

    BITWISE requires the same bits (any NaN equals any NaN). ROUNDING requires agreement to `FLOAT64_TOLERANCE` of the
    output's scale at float64. In a typed run, the distance from `truth` must not exceed four times the worst error of
    the program before plus one unit in the last place. A finite value must stay finite.
    """
    promised = promised if isinstance(promised, Strictness) else Strictness(promised)
    if promised.accuracy is not None:
        return [promised.accuracy.judge(name, np.asarray(value), np.asarray(after[name])) if name in after
                else OutputDifference(name, False, False, reason="is missing after") for name, value in before.items()]
    judge = _Judge(promised, spreads=nonfinite and not promised.keeps_nonfinite, moved=moved or {}, widened=widened)
    return [judge.one(name, np.asarray(value), np.asarray(after[name]), None if truth is None else truth[name],
                      value if stepped is None else stepped[name])
            if name in after else OutputDifference(name, False, False, reason="is missing after")
            for name, value in before.items()]


def fill_undefined(
    before: OutputsByPrecision, limit: OutputsByPrecision, after: OutputsByPrecision, made_of_nan: Collection[str] = ()
) -> dict[str, dict[str, Array]]:
    """Return the outputs of the program before, by precision, with undefined elements replaced by those of `limit`.

    `limit` is the same program with huge constants read as large finite numbers. An element is undefined if it is NaN
    or infinite at any precision. It is replaced if `after` is finite there. If the element is finite in the float64
    run, in which nothing overflows, the value nearer to `after` is used: a constant of -1e9 is a number at float64, and
    minus infinity if it is stored as fp16. The nearer value is also used for the outputs `made_of_nan`, which are
    computed from NaN but need not be NaN themselves, such as integers.
    """
    used = {name: _find_filled_elements(name, before, limit, after) for name in before["float64"]}

    def read(precision: str, name: str, value: Array) -> Array:
        other, new = limit[precision][name], after.get(precision, {}).get(name)
        if name in made_of_nan and new is not None and other.shape == new.shape == value.shape:
            with np.errstate(invalid="ignore"):
                value = np.where(_distance(other, new) < _distance(value, new), other, value)
        return np.where(used[name], other.astype(value.dtype), value) if np.any(used[name]) else value

    return {precision: {name: read(precision, name, value) for name, value in outputs.items()}
            for precision, outputs in before.items()}


def _find_filled_elements(
    name: str, before: OutputsByPrecision, limit: OutputsByPrecision, after: OutputsByPrecision
) -> Array:
    """Return the mask of the elements of an output that are replaced by those of `limit`."""
    runs = [outputs[name] for outputs in before.values()]
    new = after.get("float64", {}).get(name)
    known = [*runs, *(outputs[name] for outputs in limit.values()), *([] if new is None else [new])]
    if new is None or new.dtype.kind != "f" or len({each.shape for each in known}) > 1:
        return np.zeros((), dtype=bool)
    truth, other = (side["float64"][name].astype(np.float64) for side in (before, limit))
    undefined = np.logical_or.reduce([~np.isfinite(each) for each in runs]) & np.isfinite(new)
    with np.errstate(invalid="ignore"):
        nearer = np.abs(other - new) < np.abs(truth - new)
    return np.asarray(undefined & (~np.isfinite(truth) | nearer))


def to_arrays(outputs: Mapping[str, Any]) -> dict[str, Array]:
    """Convert outputs to arrays.

    A classifier's label becomes an array of one element. Its probabilities become two arrays: the numbers in `NAME`,
    and the labels in `NAME labels`.
    """
    arrays: dict[str, Array] = {}
    for name, value in outputs.items():
        if isinstance(value, Mapping):
            arrays[name] = np.asarray(list(value.values()))
            arrays[f"{name} labels"] = np.asarray(list(value))
        else:
            arrays[name] = np.asarray(value)
    return arrays


@dataclass(frozen=True)
class _Judge:
    """Judges two sets of outputs by the declared strictness."""

    promised: Strictness
    spreads: bool = False
    "True if results that are NaN or infinite in the program after, and integers computed from them, are not judged."
    moved: Mapping[str, Array] = field(default_factory=dict)
    "The movement of the elements of each output in the program before under the rewrites' declared changes."
    widened: Collection[str] = ()
    "The outputs that are judged in units of fp16, whatever their dtype."

    def one(self, name: str, old: Array, new: Array, truth: Array | None, stepped: Array) -> OutputDifference:
        if old.shape != new.shape or (old.dtype != new.dtype and old.dtype.kind not in "US"):
            return OutputDifference(name, False, False, reason=f"was {old.dtype}{list(old.shape)} and is "
                                                               f"{new.dtype}{list(new.shape)}")
        if _has_same_bits(old, new):
            return OutputDifference(name, True, True)
        if old.dtype.kind in "US":
            return OutputDifference(name, False, False, reason=f"was {old.tolist()!r} and is {new.tolist()!r}")
        if old.dtype.kind != "f":
            return self._integers(name, old, new, truth)
        return self._numbers(name, old, new, truth, stepped)

    def _integers(self, name: str, old: Array, new: Array, truth: Array | None) -> OutputDifference:
        """Judge integers: they must equal those before or, in a typed run, those at full precision.

        Rewrites that approximate may change a fraction of them, such as the argmax of near ties.
        """
        if self.spreads:
            return OutputDifference(name, False, True, reason="not compared where NaN or infinity may spread")
        if self.promised.exactness is not Exactness.APPROXIMATE:
            allowed = self._propagated(name, old)
            good = (_distance(old, new) <= allowed) | (False if truth is None else new == truth)
            return describe_worst_element(name, old, new, allowed, bool(np.all(good)), failed=~good)
        changed = int(np.count_nonzero(old != new))
        most = self.promised.moves * old.size
        return OutputDifference(name, False, changed <= most,
                                reason=f"{changed} of {old.size} integers changed ({most:.3g} allowed)")

    def _propagated(self, name: str, old: Array) -> Array:
        """Return the allowed difference of each element due to declared changes of ops before it."""
        moved = self.moved.get(name)
        return np.zeros(old.shape) if moved is None or moved.shape != old.shape else _PROPAGATED * moved

    def _numbers(
        self, name: str, old: Array, new: Array, truth: Array | None, stepped: Array
    ) -> OutputDifference:
        fixed = ~np.isfinite(old) & np.isfinite(new) & self.promised.fixes_nonfinite
        if self.promised.fixes_nonfinite and truth is not None:
            # The right value may be beyond the range of fp16, in which outputs of any dtype may have been computed.
            fixed |= np.isnan(old) & np.isinf(new) & ((new == _round_to_fp16(truth)) | ~np.isfinite(truth))
        if self.promised.exactness is Exactness.BITWISE:
            allowed = self._propagated(name, old)
            good = _find_same_bits(old, new) | ((allowed > 0) & (_distance(old, new) <= allowed))
        else:
            unit = np.dtype(np.float16) if name in self.widened else old.dtype
            allowed = np.maximum(*(self._allowed(each, truth, unit) for each in (old, stepped)))
            allowed = allowed + self._propagated(name, old)
            with np.errstate(invalid="ignore"):
                good = np.abs(new.astype(np.float64) - _select_reference(old, truth)) <= allowed
            good |= ~np.isfinite(old) & _find_equal_elements(
                old, new
            )  # an element that overflowed before may overflow in the same way
            if not self.promised.keeps_nonfinite:
                good |= ~np.isfinite(old) & ~np.isfinite(new)  # or to NaN: overflowed parts of both signs sum to NaN
        if self.spreads:
            lost = ~np.isfinite(new)
            good, new = good | lost, np.where(lost, old, new)  # so that the worst element is one that is judged
        if not np.any(fixed):
            return describe_worst_element(name, old, new, allowed, bool(np.all(good)), failed=~good)
        rest = np.where(fixed, old, new)  # so that the worst element is one that is not fixed
        found = describe_worst_element(name, old, rest, allowed, bool(np.all(good | fixed)), failed=~(good | fixed))
        return replace(found, fixed=int(np.count_nonzero(fixed)))

    def _allowed(self, old: Array, truth: Array | None, unit: np.dtype[Any]) -> Array:
        """Return the largest allowed distance from the reference, per element, for results rounded to dtype `unit`."""
        reference = _select_reference(old, truth)
        finite = np.isfinite(reference)
        scale = float(np.max(np.abs(reference[finite]), initial=0.0))
        moved = self.promised.moves * scale
        if truth is None:
            return np.full(old.shape, max(FLOAT64_TOLERANCE * scale, _FLOAT64_NOISE) + moved)
        known = finite & np.isfinite(old)
        error = float(np.max(np.abs(old.astype(np.float64)[known] - reference[known]), initial=0.0))
        units = 1 + self.promised.ulps
        return np.full(old.shape, _MAX_ERROR_RATIO * error + units * _compute_ulp(unit, scale) + moved)


def _round_to_fp16(values: Array) -> Array:
    with np.errstate(over="ignore"):
        return values.astype(np.float16)


def _distance(old: Array, new: Array) -> Array:
    """Return the absolute difference of each element; NaN if it is undefined."""
    with np.errstate(invalid="ignore"):
        return np.abs(new.astype(np.float64) - old.astype(np.float64))


def _select_reference(old: Array, truth: Array | None) -> Array:
    return (old if truth is None else np.asarray(truth)).astype(np.float64)


def _compute_ulp(dtype: Any, size: float) -> float:
    """Return one unit in the last place of `dtype` at `size`; for the dtype's largest number, the spacing below it."""
    largest = np.finfo(dtype).max
    below = np.nextafter(largest, dtype.type(0))
    return float(np.spacing(dtype.type(min(abs(size), float(below)))))


def _find_equal_elements(old: Array, new: Array) -> Array:
    both_nan = np.isnan(old) & np.isnan(new)
    return np.asarray(both_nan | (old == new))


def _has_same_bits(old: Array, new: Array) -> bool:
    if old.dtype.kind != "f":
        return bool(np.array_equal(old, new))
    return bool(np.all(_find_same_bits(old, new)))


def _find_same_bits(old: Array, new: Array) -> Array:
    """Compare element by element; any NaN equals any NaN, zeros of different sign differ."""
    return np.asarray(
        _find_equal_elements(old, new) & ((np.signbit(old) & (old == 0)) == (np.signbit(new) & (new == 0)))
    )


def describe_worst_element(
    name: str, old: Array, new: Array, allowed: Array, passed: bool, unit_of: Any = None, failed: Array | None = None
) -> OutputDifference:
    """Describe the element with the largest difference, for arrays of equal shape.

    `unit_of` is the dtype in whose units in the last place `ulps` is counted, if it is not the dtype of `old`. Only the
    elements that `failed` are considered, if there are any: a larger difference may be allowed elsewhere.
    """
    if not old.size:
        return OutputDifference(name, old.dtype == new.dtype, passed)
    old64, new64 = old.astype(np.float64), new.astype(np.float64)
    with np.errstate(invalid="ignore"):
        gap = np.abs(new64 - old64)
    gap = np.where(np.isnan(gap), np.where(np.isnan(old64) & np.isnan(new64) | (old64 == new64), 0.0, np.inf), gap)
    if failed is not None and np.any(failed):
        at = int(np.argmax(np.where(failed, gap, -1.0)))
    else:
        at = int(np.argmax(gap) if np.max(gap) > 0 else np.argmax(np.signbit(old64) != np.signbit(new64)))
    index = tuple(int(i) for i in np.unravel_index(at, old.shape))
    value = old64[index]
    distance = float(gap[index])
    known = bool(np.isfinite(value))
    dtype = np.dtype(unit_of or old.dtype)
    scale = float(np.max(np.abs(old64), where=np.isfinite(old64), initial=0.0))
    unit = _compute_ulp(dtype, float(value)) if dtype.kind == "f" and known else float("nan")
    relative = distance / abs(float(value)) if known and value else float("nan")
    return OutputDifference(
        name, False, passed, absolute=distance, relative=relative, ulps=distance / unit, index=index,
        before=float(value), after=float(new64[index]), allowed=float(allowed[index]), scale=scale)


def _to_json_number(number: float) -> float | str:
    return number if np.isfinite(number) else str(number)
