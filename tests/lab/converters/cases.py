"""What becomes of a converter's models: ops off the ANE, and errors against the framework the model is from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

import mil_ane_passes as ane

from ...package.helpers import spec_of

PINS = {"stablehlo-coreml": ("0.1.6", "jax==0.10.2"), "onnx2coreml": ("1.1.0", "onnxruntime==1.32.0")}
"The converters with the versions that were recorded, and what else they need."
SETTINGS: dict[str, Any] = {"preset": "full", "target": "m4"}
PLAIN, REWRITTEN, UNGUARDED = "plain", "rewrite", "rewrite without guard"
_DRAWS = (1, 2, 3)
"Seeds of feeds: errors of one draw differ by a factor of two from those of another."

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Case:
    """A model of one input: `convert` makes an MLModel in each of `ways`, `call` computes the framework's outputs."""

    converter: str
    name: str
    draw: Callable[[int], Array]
    call: Callable[[Array], list[Array]]
    convert: Callable[..., Any]
    ways: tuple[str, ...]


@dataclass
class Result:
    """What one way of conversion gave. Errors are the largest of any output, relative to its largest magnitude."""

    converter: str
    name: str
    way: str
    ops: int = 0
    unsupported: dict[str, int] = field(default_factory=dict)
    unknown: dict[str, int] = field(default_factory=dict)
    float32: float = 0.0
    float16: float = 0.0


def find_missing(converter: str) -> str | None:
    """Which packages a converter needs that are not installed, None where all are."""
    pin, other = PINS[converter]
    modules = converter.replace("-", "_"), other.partition("==")[0]
    return None if all(map(find_spec, modules)) else f"needs {converter}=={pin} and {other}"


def measure_case(case: Case, folder: Path) -> Iterator[Result]:
    """Convert in each way, and rewrite the plain package with and without the guard; what is measured of each."""
    for way in case.ways:
        package = folder / f"{way}.mlpackage"
        case.convert(way, **SETTINGS).save(str(package))
        yield _measure_package(case, way, package)
    for way, settings in ((REWRITTEN, SETTINGS), (UNGUARDED, {**SETTINGS, "max_growth": None})):
        package = folder / f"{way}.mlpackage"
        report = ane.rewrite(folder / f"{PLAIN}.mlpackage", package, **settings)
        assert report.status in ("written", "unchanged"), report.status
        yield _measure_package(case, way, package)


def _measure_package(case: Case, way: str, package: Path) -> Result:
    rows = ane.lint(package, target=SETTINGS["target"]).plan.rows
    counts = {ane_support: dict(Counter(row.op.op_type for row in rows if row.ane == ane_support).most_common())
              for ane_support in ("no", "unknown")}
    return Result(case.converter, case.name, way, len(rows), counts["no"], counts["unknown"],
                  _measure_error(case, package, "float32"), _measure_error(case, package, "float16"))


def _measure_error(case: Case, package: Path, precision: str) -> float:
    description = spec_of(package).description
    (given,), outputs = description.input, [each.name for each in description.output]
    largest = 0.0
    for seed in _DRAWS:
        feed = case.draw(seed)
        found = ane.run(package, {given.name: feed}, precision=precision)
        largest = max(largest, *(_compute_error(found[name], expected)
                                 for name, expected in zip(outputs, case.call(feed), strict=True)))
    return largest


def _compute_error(found: Array, expected: Array) -> float:
    assert found.shape == expected.shape and np.isfinite(found).all()
    wide = expected.astype(np.float64)
    return float(np.abs(found - wide).max() / np.abs(wide).max())
