"""The public functions: each loads, does one job, and returns a report. The command line adds only words to them."""

from __future__ import annotations

import copy
import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from coremltools.converters.mil.mil import Program

from .core.clone import clone
from .core.contract import Exactness, Rewrite
from .core.engine import PassTrace
from .core.errors import InputError, NotSupported, nearest
from .core.pipeline import run_all, selected
from .core.printer import program_diff, program_text
from .core.query import op_count
from .core.targets import parse_target
from .package import CopyAhead, Package, check_destination, load, package_of_mlmodel, save
from .proof.callables import is_callable_side
from .proof.outside import compare_with_callable
from .proof.prove import VerifyReport, compare_programs
from .proof.trace import traced
from .report.rewrite import RewriteReport
from .report.trace import TraceReport

if TYPE_CHECKING:
    from .runtime.quirks import Described

__all__ = ["fault_models", "rewrite", "run", "trace", "verify"]

Array = np.ndarray[Any, Any]
Progress = Callable[[str], None]

PROOF_PRECISIONS = ("float64", "float16")
"""At which precisions `rewrite` proves: is the algebra the same, and what does rounding to the stored dtypes do."""


def _quiet(text: str) -> None:
    """No progress."""


@dataclass
class _Opened:
    """A source as a program, with what is known beside it."""

    program: Program
    package: Package | None
    name: str

    def describe(self, function: str) -> Any:
        return None if self.package is None else self.package.description(function)


def _open(source: Any) -> _Opened:
    if isinstance(source, Program):
        return _Opened(source, None, "a program in memory")
    if isinstance(source, Package):
        return _Opened(source.program, source, str(source.path))
    if isinstance(source, (str, PathLike)):
        package = load(source)
        return _Opened(package.program, package, fspath(source))
    if hasattr(source, "get_spec"):
        package = package_of_mlmodel(source)
        return _Opened(package.program, package, str(package.path))
    raise InputError(f"cannot read a {type(source).__name__}; expected a path to an .mlpackage, an MLModel, a Package "
                     "or a mil.Program")


def rewrite(
    src: Any, dst: Any = None, *, preset: str = "safe", target: str = "all", passes: Any = None,
    options: Mapping[str, Mapping[str, Any]] | None = None, verify: bool = True, overwrite: bool = False,
    dry_run: bool = False, diff: bool = False, seeds: int = 3, progress: Progress = _quiet,
    ahead: CopyAhead | None = None,
) -> RewriteReport:
    """Rewrite a model and prove the result equal before anything is written.

    `src` is a path to an .mlpackage, an MLModel, a `Package` or a `mil.Program`; none of them is changed, except
    `rewrite(program, dst=program)`, which rewrites in place once proved. `dst` is the path of the new package, or
    None: then the result is in the report's `package` only. `passes` and `options` as in `pipeline()`. `ahead` holds
    copies of the source's large files that the caller has begun; without it they are begun here.

    Raises InputError for anything that cannot be used (nothing is written then). A result that is not proved is not
    written: the report's `status` says "not proved".
    """
    started = time.perf_counter()
    if isinstance(src, str) and not src.strip():
        raise InputError("no path given; expected the path of an .mlpackage")
    parse_target(target)
    rules = selected(preset, passes, options)
    in_place = isinstance(src, Program) and dst is src
    if isinstance(dst, Program) and not in_place:
        raise InputError("dst is a program that is not src; expected a path, or src itself to rewrite it in place")
    path = None if dst is None or in_place else Path(fspath(dst))
    if path is not None and isinstance(src, Program):
        raise InputError("a mil.Program cannot be written as a package; convert it with ct.convert(program, "
                         "pass_pipeline=mil_ane_passes.pipeline()), or rewrite it in place with dst=program")
    report = RewriteReport(
        source="", output=None if path is None or dry_run else str(path), preset=preset, target=target,
        passes=[rule.name for rule in rules])
    begun = _copying_ahead(src, None if dry_run else path, overwrite) if ahead is None else nullcontext(ahead)
    with begun as ahead:
        _rewrite(report, rules, src, verify and not dry_run, seeds, diff, progress)
        if dry_run:
            report.status = "dry run" if report.changed else "unchanged"
        elif report.status != "not proved":
            _deliver(report, rules, src if in_place else None, path, overwrite, ahead)
    report.seconds = time.perf_counter() - started
    return report


def _copying_ahead(src: Any, path: Path | None, overwrite: bool) -> AbstractContextManager[CopyAhead | None]:
    """Start copying what will be copied anyway. Raises InputError when `path` could not be written in the end."""
    source: Any = src
    if not isinstance(src, (str, PathLike)):
        source = src.path if isinstance(src, Package) else getattr(src, "package_path", None)
    if path is None or source is None:
        return nullcontext()
    check_destination(fspath(source), path, overwrite)
    return CopyAhead(Path(source), path)


def _rewrite(
    report: RewriteReport, rules: Sequence[Rewrite], src: Any, prove: bool, seeds: int, diff: bool, progress: Progress
) -> None:
    """Run the rules on a private copy of the source and prove the result; fills in the report."""
    opened = _open(src)
    report.source = opened.name
    before, after = opened, _copy(opened)
    report.ops_before = op_count(after.program)
    text = program_text(after.program, names=True) if diff else ""
    if after.package is not None:
        report.weight_bytes_before = report.weight_bytes_after = after.package.weight_bytes
    progress("rewriting")
    report.traces = run_all(rules, after.program, target=report.target)
    report.ops_after = op_count(after.program)
    report.package = after.package if after.package is not None else after.program
    if diff and report.changed:
        report.diff = program_diff(text, program_text(after.program, names=True))
    if report.changed and prove:
        report.verify = _prove(before, after, report.traces, seeds, progress)
        if not report.verify.equal:
            report.status = "not proved"


def _copy(opened: _Opened) -> _Opened:
    """A second program of the same source, to be rewritten; it shares the weights, which stay mapped."""
    twin = clone(opened.program)
    if opened.package is None:
        return _Opened(twin, None, opened.name)
    package = copy.copy(opened.package)
    package.program = twin
    return _Opened(twin, package, opened.name)


def _prove(
    before: _Opened, after: _Opened, traces: Sequence[PassTrace], seeds: int, progress: Progress
) -> VerifyReport:
    exactness = _weakest(traces)
    if importlib.util.find_spec("torch") is None:
        raise InputError("the proof runs on PyTorch, which is not installed: pip install 'mil-ane-passes[verify]', or "
                         "--no-verify (verify=False) to write without a proof")
    try:
        return compare_programs(
            before.program, after.program, seeds=seeds, precisions=PROOF_PRECISIONS, exactness=exactness,
            describe=before.describe, progress=progress, mapping=_stand_ins(traces))
    except NotSupported as lacking:
        return VerifyReport("not proved", exactness, reason=f"{lacking}; --no-verify writes without a proof")


def _stand_ins(traces: Sequence[PassTrace]) -> dict[str, str]:
    """Which value stands for one that is gone, after all passes."""
    found: dict[str, str] = {}
    for trace in reversed(traces):  # what came later first: a stand-in may have got one of its own
        for gone, other in reversed(trace.replaced.items()):
            found[gone] = found.get(other, other)
    return found


def _weakest(traces: Sequence[PassTrace]) -> Exactness:
    fired = [trace.strength for trace in traces if trace.strength is not None]
    return max(fired, key=list(Exactness).index, default=Exactness.BITWISE)


def _deliver(
    report: RewriteReport, rules: Sequence[Rewrite], in_place: Program | None, path: Path | None, overwrite: bool,
    ahead: CopyAhead | None,
) -> None:
    if in_place is not None:
        run_all(rules, in_place, target=report.target)
        report.package = in_place
    if path is not None:
        save(report.package, path, overwrite=overwrite, ahead=ahead)
        report.weight_bytes_after = sum(file.stat().st_size for file in path.rglob("*.bin"))
    report.status = "unchanged" if not report.changed else ("written" if path is not None else "in memory")


def verify(
    before: Any, after: Any, *, feeds: Mapping[str, Array] | None = None, precision: str = "float64", seeds: int = 3,
    exactness: str = "rounding", quirks: Sequence[str] = (), tolerance: float | None = None,
    progress: Progress = _quiet,
) -> VerifyReport:
    """Are two models equal on the same feeds? If not, the report's `first` says which op is the first that differs.

    `precision` is float64 (is the algebra the same), float32 or float16 (typed execution). `exactness` is "bitwise"
    or "rounding"; rounding at float32 or float16 is judged against the float64 run of `before`. Without `feeds`
    every function runs on `seeds` seeded draws. `quirks` names published faults that are imitated in `after` only: a
    model against itself shows whether the fault hits it, against its rewrite whether that cures it.

    One side may be a torch module (in eval mode) or any callable. It gets the model's inputs in their order, or by
    name when all the names are its parameters: a module as tensors (integers as int64), anything else as arrays. Its
    outputs are taken by name from a dictionary with the model's output names, else by position. They pass within
    `tolerance` times the output's largest value (default 1e-4 for a model all in fp32, 2e-2 where it has fp16 or
    compressed values); integers have to be equal.

    Raises InputError for feeds or interfaces that do not fit, for a callable that raises, and for an unknown quirk;
    NotSupported (nothing run) for an op the reference runtime lacks.
    """
    if exactness not in ("bitwise", "rounding"):
        raise InputError(f"exactness '{exactness}' is not known; expected bitwise or rounding"
                         f"{nearest(exactness, ('bitwise', 'rounding'))}")
    if is_callable_side(before) or is_callable_side(after):
        return _verify_callable(before, after, exactness, tolerance, feeds=feeds, precision=precision, seeds=seeds,
                                quirks=quirks, progress=progress)
    if tolerance is not None:
        raise InputError("tolerance is for a torch module or a callable; two models are judged by exactness")
    old, new = _open(before), _open(after)
    precisions = (precision,) if precision == "float64" else ("float64", precision)
    return compare_programs(
        old.program, new.program, seeds=seeds, precisions=precisions, exactness=Exactness(exactness), feeds=feeds,
        describe=old.describe, progress=progress, quirks=quirks)


def _verify_callable(
    before: Any, after: Any, exactness: str, tolerance: float | None, *, quirks: Sequence[str], **how: Any
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
    opened = _open(before if program_first else after)
    return compare_with_callable(
        opened.program, after if program_first else before, program_first=program_first, tolerance=tolerance,
        describe=opened.describe, quirks=quirks, **how)


def run(
    src: Any, feeds: Mapping[str, Array], *, function: str | None = None, precision: str = "float32",
    state: dict[str, Array] | None = None, quirks: Sequence[str] = (),
) -> dict[str, Array]:
    """Execute a model on the reference runtime, on any machine; returns the outputs by name.

    `state` holds the states by name and is updated in place; given an empty dict, all are left in it. `quirks` names
    published faults to imitate. Raises InputError for feeds with wrong names, shapes or dtypes and for an unknown
    quirk, NotSupported for an op the runtime lacks.
    """
    from .runtime import Runtime

    opened = _open(src)
    runtime = Runtime(opened.program, function=function, precision=precision, quirks=quirks,
                      description=opened.describe(function or opened.program.default_function_name))
    return dict(runtime(feeds, state))


def fault_models() -> list[Described]:
    """Name, one-sentence summary and sources of every published fault that `quirks` may name."""
    from .runtime.quirks import described

    return described()


def trace(
    src: Any, feeds: Mapping[str, Array], *, function: str | None = None, precision: str = "float32",
    state: dict[str, Array] | None = None, quirks: Sequence[str] = (),
) -> TraceReport:
    """Execute as `run` does and say of each op what its results look like: range, NaN, infinities, what fp16 loses.

    At float32 and float64 this shows where fp16 would overflow, at float16 where it does: see `TraceReport`.
    """
    opened = _open(src)
    found = traced(opened.program, feeds, function=function, precision=precision, state=state, quirks=quirks,
                   description=opened.describe(function or opened.program.default_function_name))
    return TraceReport(opened.name, found.function, precision, tuple(quirks), found.outputs, dict(state or {}),
                       found.rows, found.first)
