"""The expressions of expressions.tsv: calls of PyTorch's functions with arguments that models use rarely.

Each line of the table has the names of the inputs, an expression of them (or statements that end in a return), a set-up
of the module and its known faults: "refused" where the conversion says why, else the data of which values differ (see
DATA), each after "frontend:" or "precision:" if it is limited to one. Expressions of the same inputs are converted
together, as one module with an output each, and alone when that module is refused.
"""

from __future__ import annotations

import copy
import linecache
import warnings
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import coremltools as ct
import numpy as np
import torch
import torch.nn.functional
from torch import nn

import mil_ane_passes as ane
from mil_ane_passes.utils.errors import AnePassesError

from .checks import captured, input_types, silence

__all__ = ["WAYS", "Expression", "Way", "judge", "read_expressions"]

TABLE = Path(__file__).parent / "expressions.tsv"
SHAPES = {"m": (4, 6), "n": (4, 6), "q": (4, 6), "s": (2, 4, 12), "f": (2, 4, 8, 8), "g": (2, 4, 8, 8),
          "t": (2, 4, 6, 6, 6)}
"The shapes of the inputs of floats; those of ints (i, j), indices below 4 (x) and bools as 0 and 1 (b) are (4, 6)."
DATA = {"float32": ("ordinary", "ties", "zeros", "large", "infinite", "NaN"),
        "float16": ("ordinary", "ties", "zeros", "small")}
Faults = dict[str, str]
GROUP = 14
"Expressions that are converted together."


class Way(NamedTuple):
    frontend: str
    precision: str

    def __str__(self) -> str:
        return f"{self.frontend} {self.precision}"


WAYS = [Way("trace", "float32"), Way("export", "float32"), Way("script", "float32"), Way("trace", "float16"),
        Way("script", "float16")]


class Expression(NamedTuple):
    inputs: str
    text: str
    setup: str = ""
    known: str = ""

    def is_alone(self) -> bool:
        """Whether it is converted alone: it may change its inputs, which others would see, or is refused."""
        return "return " in self.text or "_(" in self.text or "refused" in self.known

    def is_known(self, way: Way, fault: str) -> bool:
        """Whether the fault is known of this way."""
        return any(entry in self.known.split() for entry in (fault, *(f"{limit}:{fault}" for limit in way)))

    def is_expected_faulty(self, way: Way) -> bool:
        """Whether any fault is known of this way."""
        return any(self.is_known(way, name) for name in ("refused", *DATA[way.precision]))

    def __str__(self) -> str:
        return f"{self.text} | {self.setup}" if self.setup else self.text


def read_expressions() -> list[Expression]:
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    return [Expression(*line.split("\t")) for line in lines if not line.startswith("#")]


def group_expressions(expressions: Sequence[Expression]) -> Iterator[list[Expression]]:
    groups: dict[str, list[Expression]] = {}
    for one in expressions:
        groups.setdefault(str(one) if one.is_alone() else one.inputs, []).append(one)
    for group in groups.values():
        yield from (group[start:start + GROUP] for start in range(0, len(group), GROUP))


def build_module(expressions: tuple[Expression, ...]) -> nn.Module:
    """Return a module with an output for each expression, whose source can be read, as TorchScript needs."""
    inputs = ", ".join(expressions[0].inputs)
    lines: list[str] = []
    for place, one in enumerate(expressions):
        text = one.text if "return " in one.text else f"return {one.text}"
        lines += [f"class E{place}(nn.Module):", "    def __init__(self):", "        super().__init__()",
                  "        torch.manual_seed(0)",  # weights that do not depend on the others of the group
                  *(f"        {line}" for line in one.setup.split("; ") if line), f"    def forward(self, {inputs}):",
                  *(f"        {line}" for line in text.split("; "))]
    places = range(len(expressions))
    lines += ["class Expressions(nn.Module):", "    def __init__(self):", "        super().__init__()",
              *(f"        self.e{place} = E{place}()" for place in places), f"    def forward(self, {inputs}):",
              f"        return {', '.join(f'self.e{place}({inputs})' for place in places)},", ""]
    source = "\n".join(lines)
    name = f"<expressions {hash(expressions)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    space: dict[str, Any] = {"torch": torch, "nn": nn, "F": torch.nn.functional, "__name__": __name__}
    exec(compile(source, name, "exec"), space)  # the text is that of expressions.tsv
    return space["Expressions"]().eval()


def draw_inputs(names: str, kind: str, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [_draw_integers(name, kind, generator) if name in "ijxb" else _draw_floats(name, kind, generator)
            for name in names]


def _draw_integers(name: str, kind: str, generator: torch.Generator) -> torch.Tensor:
    low, high = {"x": (0, 4), "b": (0, 2)}.get(name, (-40000, 40001) if kind == "large" else (-7, 8))
    drawn = torch.randint(low, high, (4, 6), generator=generator, dtype=torch.int32)
    return drawn * 0 if kind == "zeros" and name in "ij" else drawn


def _draw_floats(name: str, kind: str, generator: torch.Generator) -> torch.Tensor:
    drawn = torch.randn(SHAPES[name], generator=generator)
    if name == "q":
        drawn = drawn.abs() + 0.1
    flat = drawn.view(-1)
    if kind == "ties":
        return torch.round(drawn * 4) / 2 + 0.0
    if kind == "zeros":
        flat[:] = 0
        flat[::2] = -0.0
    elif kind == "infinite":
        flat[1], flat[4] = torch.inf, torch.inf if name == "q" else -torch.inf
    elif kind == "NaN":
        flat[2] = torch.nan
    return drawn * {"large": 3000, "small": 1e-3}.get(kind, 1)


def judge(expressions: Sequence[Expression], way: Way) -> Iterator[tuple[Expression, Faults]]:
    """Convert the expressions and compare their values; yields each with its faults, as texts by their names.

    What PyTorch itself cannot run or capture is left out.
    """
    for group in group_expressions(expressions):
        with warnings.catch_warnings(), redirect_stderr(StringIO()), silence(), torch.no_grad():
            warnings.simplefilter("ignore")
            yield from _judge_group(group, way)


def _judge_group(group: list[Expression], way: Way) -> list[tuple[Expression, Faults]]:
    inputs = group[0].inputs
    examples = draw_inputs(inputs, "ordinary", 0)
    try:
        module = build_module(tuple(group))
        module(*(each.clone() for each in examples))
        program = captured(module, examples, way.frontend)
    except Exception:
        return [] if len(group) == 1 else _judge_halves(group, way)
    options = dict(inputs=input_types(examples), minimum_deployment_target=ct.target.iOS17,
                   compute_precision=getattr(ct.precision, way.precision.upper()))
    try:
        mlmodel = ane.convert(program, **options)
    except Exception as error:
        if len(group) > 1:
            return _judge_halves(group, way)
        return [(group[0], {"refused": f"{type(error).__name__}: {' '.join(str(error).split())}"})]
    faults: list[Faults] = [{} for _ in group]
    for kind in DATA[way.precision]:
        feeds = draw_inputs(inputs, kind, 1)
        if way.precision == "float16":
            feeds = [each.half().float() if each.is_floating_point() else each for each in feeds]
        try:
            expected = [_flatten(part(*(each.clone() for each in feeds))) for part in module.children()]
        except Exception:
            continue  # PyTorch raises an error for these values
        try:
            found = list(ane.run(mlmodel, {f"x{place}": each.numpy() for place, each in enumerate(feeds)},
                                 precision=way.precision, max_seconds=60).values())
        except AnePassesError as error:
            if len(group) > 1:
                return _judge_halves(group, way)
            return [(group[0], {kind: f"not run: {error}"})]
        if sum(map(len, expected)) != len(found):
            if len(group) > 1:
                return _judge_halves(group, way)
            return [(group[0], {kind: f"{len(found)} outputs instead of {len(expected[0])}"})]
        places = iter(found)
        for own, part, wanted in zip(faults, module.children(), expected, strict=True):
            fault = _compare([next(places) for _ in wanted], wanted, way, part, feeds)
            if fault:
                own[kind] = fault
    return list(zip(group, faults, strict=True))


def _judge_halves(group: list[Expression], way: Way) -> list[tuple[Expression, Faults]]:
    middle = len(group) // 2
    return _judge_group(group[:middle], way) + _judge_group(group[middle:], way)


def _flatten(value: Any) -> list[torch.Tensor]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, tuple | list):
        return [tensor for each in value for tensor in _flatten(each)]
    tensor = torch.as_tensor(value).detach().resolve_conj().resolve_neg()
    return [torch.view_as_real(tensor) if tensor.is_complex() else tensor]


def _compare(found: list[Any], expected: list[torch.Tensor], way: Way, part: nn.Module,
             feeds: list[torch.Tensor]) -> str:
    """Return the first fault of an expression's outputs, or ""."""
    own: list[np.ndarray[Any, Any]] | None = None
    for place, (ours, tensor) in enumerate(zip(found, expected, strict=True)):
        theirs = tensor.to(torch.float64).numpy()
        ours = np.asarray(ours).astype(np.float64)
        if ours.shape not in (theirs.shape, theirs.shape or (1,)):
            return f"shape {ours.shape} instead of {theirs.shape}"
        ours = ours.reshape(theirs.shape)
        half = way.precision == "float16" or tensor.dtype == torch.float16
        apart = _measure_distance(ours, theirs, 6e4 if half else 1e38)
        allowed = _choose_tolerance(theirs, tensor.dtype, half)
        if apart > allowed and way.precision == "float16":
            own = _run_at_half(part, feeds) if own is None else own
            if own and own[place].shape == theirs.shape:
                allowed = max(allowed, 4 * _measure_distance(own[place], theirs, 6e4))
        if apart > allowed:
            at = np.unravel_index(int(np.argmax(_compute_distances(ours, theirs, 6e4 if half else 1e38))), theirs.shape)
            return f"output {place} differs by {apart:.3g}, {ours[at]:.7g} instead of {theirs[at]:.7g}"
    return ""


def _choose_tolerance(theirs: np.ndarray[Any, Any], dtype: torch.dtype, half: bool) -> float:
    finite = np.abs(theirs[np.isfinite(theirs)])
    scale = float(finite.max()) if finite.size else 0.0
    if dtype.is_floating_point:
        return 1e-2 * max(scale, 1e-2) if half else 3e-5 * max(scale, 1e-6)
    return scale * 1e-3 if half and scale >= 2048 else 0.0


def _measure_distance(ours: np.ndarray[Any, Any], theirs: np.ndarray[Any, Any], largest: float) -> float:
    return float(_compute_distances(ours, theirs, largest).max(initial=0))


def _compute_distances(
    ours: np.ndarray[Any, Any], theirs: np.ndarray[Any, Any], largest: float
) -> np.ndarray[Any, Any]:
    """Return the distances; infinite where one is NaN alone, or where one of two is beyond `largest`."""
    ours, theirs = (np.where(np.abs(each) >= largest, np.copysign(largest, each), each) for each in (ours, theirs))
    same = (np.isnan(ours) & np.isnan(theirs)) | (ours == theirs)
    apart = np.where(same, 0, np.abs(ours - theirs))
    return np.where(np.isnan(apart), np.inf, apart)


def _run_at_half(part: nn.Module, feeds: list[torch.Tensor]) -> list[np.ndarray[Any, Any]]:
    """Return what PyTorch itself computes at float16, or nothing if it cannot."""
    try:
        half = copy.deepcopy(part).half()
        results = _flatten(half(*(each.half() if each.is_floating_point() else each.clone() for each in feeds)))
    except Exception:
        return []
    return [each.to(torch.float64).numpy() for each in results]
