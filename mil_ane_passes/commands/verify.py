"""Compare two packages, or a package and a torch module, on the same feeds; report the first op that differs.

For models that are expected to differ, such as compressed ones, set error limits: --atol and --rtol per element, --snr
and --cosine per output. All given limits must hold.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..package.executorch_program import find_address
from ..package.manifest import check_model_path
from ..package.output_file import check_output_file
from ..utils.budget import DEFAULT_MAX_STEPS, share_budget
from ..utils.errors import InputError, LimitReached, NotSupported, suggest_nearest
from ..utils.json_file import expect_json_file
from ..utils.npz import Array, read_arrays
from ..utils.option_spelling import choose_spelling, format_option, format_option_values
from ..utils.text_format import add_article, format_command_path, join_words
from .options import (
    DEFAULT_SEEDS,
    MAX_MEMORY,
    MAX_SECONDS,
    MAX_STEPS,
    SEEDS,
    Progress,
    add_format_option,
    add_options,
    argument,
    command,
    flag,
    ignore_progress,
    positive_int,
    read_options,
)
from .output import print_report, show_progress
from .run import add_quirk_list

if TYPE_CHECKING:
    from coremltools.converters.mil.mil import Function, Program, Var

    from ..equivalence.comparison import OutputDifference, Strictness
    from ..equivalence.equivalence import VerifyReport
    from .sources import OpenedSource

__all__ = ["VerifyOptions", "choose_snr_limit", "format_limited_command", "verify"]

HELP = "check whether two models are equivalent"
EXAMPLE = "verify in.mlpackage out.mlpackage"

_PRECISIONS = ("float64", "float32", "float16")
_EXACTNESS = ("bitwise", "rounding")
_ROUNDED_CONSTANTS = 2.0**-9
"Largest change of a result, as a fraction of its largest value, that rewrites declare that round fp16 constants again."
_SNR_MARGIN = 3
"""How many dB a suggested limit is below the measured ratio: twice the power of the noise. The feeds are seeded, so
that only sums in another order (other threads, another version of torch) change the ratio."""
_LEAST_SNR_LIMIT = 40
"""The lowest limit in dB that is suggested: errors of 1 % of the signal. Constants rounded again are at 54 dB or more
where they are read; a limit below this one would also accept a formula that is wrong in places."""
_RECORDED: Mapping[str, tuple[type, ...]] = {
    "precision": (str,), "exactness": (str,), "seeds": (int,), "function": (str, type(None)),
    "fixes_nonfinite": (bool,), "widths": (bool,), "quirks": (list, tuple),
    **dict.fromkeys(("atol", "rtol", "snr", "cosine"), (int, float, type(None)))}
"The options that evidence has, and their types in JSON."


def _check_evidence(path: Path) -> None:
    """Raise InputError for a missing file, before coremltools is imported."""
    from .evidence import describe_evidence

    expect_json_file(format_option_values("replay", path), describe_evidence())(path)


@dataclass(frozen=True)
class VerifyOptions:
    """The options of `verify`."""

    before: Any = field(default=None, metadata=argument("A", check=check_model_path, nargs="?"))
    "an .mlpackage or .mlmodel, or a Core ML delegate of a .pte"
    after: Any = field(default=None, metadata=argument("B", check=check_model_path, nargs="?"))
    "the .mlpackage, .mlmodel or .pte to compare with it"
    _: KW_ONLY
    atol: float | None = field(default=None, metadata=flag(type=float, metavar="X"))
    "maximum absolute error of an element, in addition to --rtol"
    rtol: float | None = field(default=None, metadata=flag(type=float, metavar="X"))
    "maximum error of an element relative to A's, in addition to --atol"
    snr: float | None = field(default=None, metadata=flag(type=float, metavar="DB"))
    "minimum signal-to-noise ratio of an output, in dB"
    cosine: float | None = field(default=None, metadata=flag(type=float, metavar="X"))
    "minimum cosine similarity of an output"
    feeds: Mapping[str, Array] | None = field(default=None, metadata=flag(metavar="F.npz", parse=read_arrays))
    "inputs by name; default: seeded random feeds"
    function: str | None = field(default=None, metadata=flag(metavar="F"))
    "compare only this function (default: all; with --feeds the default function)"
    precision: str = field(default="float64", metadata=flag(choices=_PRECISIONS))
    "float64 checks the algebra; float16 rounds each value to its declared dtype"
    exactness: str = field(default="rounding", metadata=flag(choices=_EXACTNESS))
    "criterion for equal outputs"
    seeds: int = field(default=DEFAULT_SEEDS, metadata={**flag(type=positive_int), **SEEDS})
    "number of seeded random feeds per function (default: 3)"
    tolerance: float | None = None
    fixes_nonfinite: bool = field(default=False, metadata=flag())
    """accept finite values in B where A has NaN or infinities; infinite constants of A are compared as large finite
    numbers"""
    widths: bool = field(default=False, metadata=flag())
    "accept inputs and outputs that are fp32 in one model and fp16 in the other, as after ane::fp16_io"
    max_seconds: float | None = field(default=None, metadata=MAX_SECONDS)
    max_steps: int | None = field(default=DEFAULT_MAX_STEPS, metadata=MAX_STEPS)
    max_memory: str | float | None = field(default=None, metadata=MAX_MEMORY)
    quirks: Sequence[str] = field(default=(), metadata=flag("--quirk", metavar="NAME", action="append"))
    """a published hardware fault to imitate in B only (listed below): compare A with itself to see if A is affected,
    and with a rewrite to see if it is fixed; repeatable"""
    report: str | os.PathLike[str] | None = field(default=None, metadata=flag(metavar="FILE", batch=False))
    """write a JSON file with which others can repeat the check: digests of both models, of feeds and outputs of each
    run, options, versions and verdict"""
    replay: str | os.PathLike[str] | None = field(
        default=None, metadata=flag(metavar="FILE", batch=False, check=_check_evidence))
    """repeat the check recorded in this file, with its options, and report whether models, feeds, verdict and output
    bits match; A and B are needed only if their paths changed"""
    progress: Progress = ignore_progress


def add(parser: argparse.ArgumentParser) -> None:
    add_options(parser, VerifyOptions)
    parser.add_argument("--torch", metavar="MODULE:FACTORY",
                        help="compare A with a torch module instead of B: FACTORY is a module, or a class or function "
                             "that returns one, in a Python module (a name, or a .py file); eval mode is set")
    add_quirk_list(parser)
    add_format_option(parser)
    parser.set_defaults(run=run, proves=True, misused=parser.error,
                        uses_frontend=lambda arguments: arguments.torch is not None)


def run(arguments: argparse.Namespace) -> int:
    before, after = _choose_sides(arguments)
    if arguments.report is not None:
        check_output_file(arguments.report, [arguments.feeds])  # `verify` itself gets arrays, and checks the rest
    with show_progress() as progress:
        keywords = {**read_options(arguments, VerifyOptions), "before": before, "after": after}
        report = verify(**keywords, progress=progress)
    print_report(report, arguments.format)
    return 0 if report.equal and not report.departed else 1


def _choose_sides(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """Return the two models to compare, the reference first."""
    if arguments.replay is not None and arguments.torch is None and arguments.before is None:
        return None, None
    if arguments.before is None:
        arguments.misused("the following arguments are required: A")
    if arguments.after is None and arguments.torch is None:
        arguments.misused("without --torch the following arguments are required: B")
    if arguments.after is not None and arguments.torch is not None:
        arguments.misused("B and --torch exclude each other; use one of them")
    if arguments.torch is None:
        return arguments.before, arguments.after
    check_model_path(arguments.before)  # importing the module may take long
    return _load_torch_module(arguments.torch), arguments.before


def _load_torch_module(text: str) -> Any:
    """Load the object named by `MODULE:FACTORY`, called if it is a class or a function.

    Raises InputError if it is not usable.
    """
    name, colon, factory = text.rpartition(":")
    if not (colon and name and factory):
        raise InputError(f"{format_option_values('torch', text)}: expected MODULE:FACTORY, such as "
                         "my_models.vocoder:make_model or model.py:Net")
    expected = "expected a torch module, or a class or function without arguments that returns one"
    try:
        module = _import_module(name)
        found = module
        for part in factory.split("."):
            found = getattr(found, part)
        if isinstance(found, type) or not hasattr(found, "eval"):
            found = found()
    except InputError:
        raise
    except (Exception, SystemExit) as error:  # the user's own code may raise anything
        raise InputError(f"{format_option_values('torch', text)}: {type(error).__name__}: {error}; {expected}"
                         ) from error
    if isinstance(found, type) or not (callable(found) and hasattr(found, "eval")):
        kind = f"the class {found.__name__}" if isinstance(found, type) else add_article(type(found).__name__)
        raise InputError(f"{format_option_values('torch', text)}: found {kind}; {expected}")
    return found.eval()


def _import_module(name: str) -> Any:
    """Import the Python module of this name, or of this file.

    It can import modules in the folder of the file, or in the working directory.
    """
    path = Path(name)
    sys.path.insert(0, os.fspath(path.parent.absolute()) if path.suffix == ".py" else os.getcwd())
    try:
        if path.suffix != ".py":
            return importlib.import_module(name)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None or not path.is_file():
            raise InputError(f"{format_option_values('torch')}: no file '{name}'; expected MODULE:FACTORY, or the path "
                             "of a Python file, as in model.py:Net")
        module = importlib.util.module_from_spec(spec)
        sys.modules.setdefault(path.stem, module)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.pop(0)


@command(VerifyOptions)
def verify(options: VerifyOptions) -> VerifyReport:
    """Compare two models on the same feeds; the report's `first` names the first op that differs.

    `precision` is float64 (checks the algebra), float32 or float16 (typed execution, judged against the float64 run of
    `before`). `exactness` is "bitwise" or "rounding". Without `feeds`, each function runs on `seeds` seeded random
    feeds and on adversarial feeds (`sampled` of the report; under "rounding" a NaN may spread). With `feeds`, the
    default function (of a pipeline all parts) runs on those. `function` names the only one to compare (`PART/FUNCTION`
    of a pipeline). `quirks` names published faults to imitate in `after`. With `fixes_nonfinite`, values that are NaN
    or infinite in `before` may be finite in `after`, judged with infinite constants read as large finite ones. With
    `widths`, float inputs and outputs may have different widths, as after `ane::fp16_io`. `max_steps`,
    `max_seconds` and `max_memory` as in `run`: beyond them the result is "not verified".

    A NeuralNetwork is compared as the ML Program that `upgrade` makes of it, with the precision of an ML Program beside
    it; the report's `upgraded` describes it.
    Declarations of two packages have to agree as well: the order of an image's channels, defaults of optional inputs,
    the shapes that are run, and the connections between parts of a pipeline.

    `atol`, `rtol`, `snr`, `cosine` limit the error of models that are expected to differ; see `Accuracy`. Two pipelines
    are compared part by part, and entirely if there are limits, which are those of the pipelines' outputs. An entire
    pipeline may be compared with a single model. One side may be a torch module (in eval mode) or any callable, which
    gets the model's inputs by position, or by name if it has parameters of those names. Its outputs pass within
    `tolerance` times the largest value (default 1e-4 for a model entirely in fp32, else 2e-2); integers have to be
    equal. Elements that move farther when the callable's inputs and weights move by their rounding, such as the class
    of a pixel with two scores that fp16 cannot distinguish, are left out, and a note states this.

    `report` is the path of a JSON file to write, with which others can repeat the check of two files by `replay`; the
    report's `repeated` and `departed` then describe what was the same, and what was not. With `replay`, models that are
    not given are those at the recorded paths, and the options are the recorded ones (feeds have to be given again).

    Raises InputError for feeds or interfaces that do not fit and for a callable that raises, NotSupported (nothing
    run) for an op the reference runtime lacks.
    """
    from .evidence import (
        check_digested_models,
        check_evidence_file,
        check_models,
        compare_with_evidence,
        digest_models,
        read_evidence,
        write_evidence,
    )

    recorded = None if options.replay is None else read_evidence(options.replay)
    options = options if recorded is None else _take_recorded(options, recorded)
    if options.before is None or options.after is None:
        raise InputError(f"found one model; expected two, or {format_option('replay')} with a recorded check")
    models = {"before": options.before, "after": options.after}
    if recorded is not None:
        check_models(format_option_values("replay", options.replay), models)
    target = None if options.report is None else check_evidence_file(options.report, models, options.replay)
    digested = digest_models(models) if target is not None or recorded is not None else {}
    found = _verify_sides(options)
    check_digested_models(digested)
    if target is not None:
        write_evidence(target, digested, {name: getattr(options, name) for name in _RECORDED}, found)
    if recorded is not None:
        compare_with_evidence(recorded, digested, found)
    return found


def _take_recorded(options: VerifyOptions, recorded: Mapping[str, Any]) -> VerifyOptions:
    """Return the options of a recorded check, with its models where none are given."""
    from ..equivalence.execution import USER_FEEDS_LABEL
    from .evidence import describe_evidence

    who = format_option_values("replay", options.replay)
    given = [name for name in _RECORDED if name != "quirks" and getattr(options, name) != getattr(VerifyOptions, name)]
    given += ["quirks"] * bool(options.quirks)
    if given:
        raise InputError(f"{who}: the recorded check defines the options, but found {format_option(given[0])} as well")
    found = {name: recorded["options"].get(name, getattr(VerifyOptions, name)) for name in _RECORDED}
    for name, value in found.items():
        several = value if isinstance(value, (list, tuple)) else ()
        if not isinstance(value, _RECORDED[name]) or isinstance(value, bool) != (bool in _RECORDED[name]) or not all(
                isinstance(each, str) for each in several):
            raise InputError(f"{who}: option '{name}' is {value!r}; {describe_evidence()}")
    paths = {name: each.get("path") if isinstance(each, dict) else None for name, each in recorded["models"].items()}
    for name in ("before", "after"):
        found[name] = paths.get(name) if getattr(options, name) is None else getattr(options, name)
        if found[name] is None:
            raise InputError(f"{who}: no path recorded for '{name}'; give both models")
    if options.feeds is None and any(run["feeds"].startswith(USER_FEEDS_LABEL) for run in recorded["runs"]):
        raise InputError(f"{who}: the recorded check was of given feeds, of which the file has digests only; pass them "
                         f"again with {format_option('feeds')}")
    return replace(options, **found)


def _verify_sides(options: VerifyOptions) -> VerifyReport:
    from ..equivalence.callables import is_callable_side
    from ..equivalence.comparison import Accuracy, Strictness
    from ..equivalence.equivalence import VerifyReport
    from ..passes.contract import Exactness

    if options.exactness not in _EXACTNESS:
        raise InputError(f"exactness '{options.exactness}' is not known; expected bitwise or rounding"
                         f"{suggest_nearest(options.exactness, _EXACTNESS)}")
    judged_as = Exactness(options.exactness)
    accuracy = Accuracy(options.atol, options.rtol, options.snr, options.cosine) or None
    bitwise = options.exactness == "bitwise"
    if accuracy is not None and (bitwise or options.tolerance is not None or options.fixes_nonfinite):
        raise InputError(
            f"{accuracy}: error limits replace exactness, tolerance and fixes_nonfinite; use one of them"
        )
    with share_budget(options.max_steps, options.max_seconds, options.progress, options.max_memory):
        try:
            if is_callable_side(options.before) or is_callable_side(options.after):
                return _verify_callable(options, accuracy)
            return _verify_models(
                options, Strictness(judged_as, options.fixes_nonfinite, keeps_nonfinite=bitwise, accuracy=accuracy))
        except LimitReached as reached:
            return VerifyReport("not verified", judged_as, reason=str(reached), quirks=tuple(options.quirks),
                                tolerance=options.tolerance)


def _collect_run_settings(options: VerifyOptions) -> dict[str, Any]:
    return {"feeds": options.feeds, "seeds": options.seeds, "quirks": options.quirks, "progress": options.progress}


def _verify_models(options: VerifyOptions, strictness: Strictness) -> VerifyReport:
    from .sources import open_pair, select_function

    if options.tolerance is not None:
        raise InputError("tolerance applies to a torch module or a callable; two models are compared by exactness")
    old, new = open_pair(options.before, options.after)
    function = options.function or _choose_common_function(old, new)
    old, new = (select_function(each, function) for each in (old, new))
    report = _compare_sources(options, strictness, old, new)
    report.upgraded = (*old.upgraded, *new.upgraded)
    if strictness.accuracy is None and options.exactness == "rounding" and not options.quirks:
        report.advice = _explain_rounded_constants(options, report)
    for each in (old, new):
        each.check_unchanged()
    return report


def _choose_common_function(old: OpenedSource, new: OpenedSource) -> str | None:
    """Return the function for which the MLModels were made; None if it is the default one, and all are compared.

    Raises InputError for two MLModels that were made for different functions.
    """
    if old.function is not None and new.function is not None and old.function != new.function:
        raise InputError(f"the first MLModel was made for the function '{old.function}', the second for "
                         f"'{new.function}'; expected the same one, as functions of the same name are compared")
    return old.chosen_function or new.chosen_function


def _explain_rounded_constants(options: VerifyOptions, report: VerifyReport) -> list[str]:
    """Return advice if the differences are as small as those of constants that a rewrite rounds once more.

    These are all of the outputs, or that of the first op that differs, if its constants do: ops after it may enlarge
    it. `rewrite` knows the rewrites between the two models, and allows what they declare. Without this advice, its
    results seem wrong to `verify`.
    """
    failed = [(case.precision, output) for case in report.cases for output in case.failed]
    which, shares = "differences are", [_compute_rounded_share(*each) for each in failed]
    if None in shares and report.first is not None and report.first.parameters:
        which, shares = "first difference is", [_compute_rounded_share(report.first.precision, report.first.worst)]
    known = [share for share in shares if share is not None]
    if not known or len(known) < len(shares):
        return []
    words = (f"the {which} at most {max(known):.1e} of the largest value, as small as those of a rewrite that rounds "
             "constants again; `rewrite` allows what its rewrites declare, which `verify` does not know")
    limit = choose_snr_limit(report.noise)
    if limit is None or options.fixes_nonfinite:  # limits exclude this option
        return [words]
    command = format_limited_command(options, limit)
    return [words, "if the second model is such a rewrite of the first, compare with a limit (the lowest "
                   f"signal-to-noise ratio, {min(report.noise.values()):.1f} dB, less {_SNR_MARGIN} dB): {command}"]


def choose_snr_limit(noise: Mapping[str, float]) -> int | None:
    """Choose the limit, in whole dB, that outputs with this noise (by precision, in dB) keep; None if it would be too
    low to find a wrong formula, or if there is no noise."""
    lowest = min(noise.values(), default=math.inf)
    limit = math.floor(lowest - _SNR_MARGIN) if math.isfinite(lowest) else None
    return limit if limit is not None and limit >= _LEAST_SNR_LIMIT else None


def format_limited_command(options: VerifyOptions, limit: int) -> str:
    """Format the command that repeats a check with a limit; only the option, where models or feeds are not files."""
    sides = (options.before, options.after)
    if options.feeds is not None or not all(map(_is_on_disk, sides)):
        return choose_spelling(f"--snr {limit}", f"snr={limit}")
    words = ["mil-ane-passes", "verify", *(format_command_path(os.fspath(each)) for each in sides), "--snr", str(limit)]
    for name in ("function", "precision", "seeds", "max_seconds", "max_steps", "max_memory"):
        value = getattr(options, name)
        if value is not None and value != getattr(VerifyOptions, name):
            words += [f"--{name.replace('_', '-')}", str(value)]
    return join_words([*words, *["--widths"] * options.widths])


def _is_on_disk(model: Any) -> bool:
    """Return whether a command can name the model: it is a file, a package or a delegate of a program."""
    return isinstance(model, (str, os.PathLike)) and (
        os.path.exists(model) or find_address(os.fspath(model)) is not None)


def _compute_rounded_share(precision: str, found: OutputDifference) -> float | None:
    """Compute the difference as a fraction of the largest value; None if it is not that of a constant rounded again."""
    if found.reason or precision != "float64" or not found.scale:
        return None
    share = found.absolute / found.scale
    return share if 0 < share <= _ROUNDED_CONSTANTS else None


def _compare_sources(
    options: VerifyOptions, strictness: Strictness, old: OpenedSource, new: OpenedSource
) -> VerifyReport:
    from ..equivalence.declarations import check_declarations
    from ..equivalence.equivalence import compare_programs, compare_with_pipeline, measure_pipeline_noise

    precisions = (options.precision,) if options.precision == "float64" else ("float64", options.precision)
    how = {"precisions": precisions, "exactness": strictness, **_collect_run_settings(options)}
    if old.is_pipeline != new.is_pipeline and options.function is None:
        if options.report is not None or options.replay is not None:
            raise _refuse_report("one of the models is an entire pipeline")
        single, pipeline = (new, old) if old.is_pipeline else (old, new)
        if single.package is not None:
            described = [each.package.spec.description if each is pipeline and each.package is not None
                         else each.describe(each.program.default_function_name) for each in (old, new)]
            check_declarations("the model", None, described[0], described[1],
                               None if options.feeds is None else set(options.feeds))
        return compare_with_pipeline(single.program, pipeline.package, program_first=single is old,
                                     describe=single.describe, **how)
    if options.feeds is None:
        _check_shapes_accepted(old.program, new.program)
    notes, unseen = _compare_declarations(options, old, new)
    entire = old.is_pipeline and new.is_pipeline and options.function is None
    if entire and strictness.accuracy is not None:
        report = _compare_by_limits(options, old, new, how)
    else:
        report = compare_programs(old.program, new.program, widths=options.widths, describe=old.describe,
                                  digests=options.report is not None or options.replay is not None, **how)
        if entire and report.noise:
            report.noise = measure_pipeline_noise(old.package, new.package, precisions=precisions,
                                                  widths=options.widths, **_collect_run_settings(options))
    report.notes += notes
    report.leave_open(unseen, ())
    return report


def _compare_by_limits(
    options: VerifyOptions, old: OpenedSource, new: OpenedSource, how: Mapping[str, Any]
) -> VerifyReport:
    """Compare two pipelines by limits on the error of their outputs.

    Pipelines that cannot run entirely are compared part by part, which verifies nothing of their outputs.
    """
    from ..equivalence.equivalence import compare_pipelines, compare_programs

    if options.report is not None or options.replay is not None:
        raise _refuse_report("limits on the error are those of an entire pipeline")
    try:
        return compare_pipelines(old.package, new.package, widths=options.widths, **how)
    except LimitReached:
        raise
    except NotSupported as error:
        report = compare_programs(old.program, new.program, widths=options.widths, describe=old.describe, **how)
        report.leave_open("each part alone is within the limits, but the outputs of the pipelines were not compared: "
                          f"{error}", ())
        return report


def _refuse_report(reason: str) -> InputError:
    return InputError(f"{reason}, for which no report can be written; choose the part: "
                      f"{format_option('function')}PART/FUNCTION")


def _compare_declarations(
    options: VerifyOptions, old: OpenedSource, new: OpenedSource
) -> tuple[list[str], str]:
    """Compare what packages declare besides their programs; return notes, and why the two are not verified, if so.

    Raises InputError for what makes them incomparable. A program in memory declares nothing.
    """
    from ..equivalence.declarations import check_declarations, list_image_notes
    from ..package.connections import check_connections, find_differing_parts

    notes: list[str] = []
    fed = None if options.feeds is None else set(options.feeds)
    if old.package is None or new.package is None or old.program.functions.keys() != new.program.functions.keys():
        return notes, ""  # other functions are reported with the interfaces
    for name, function in old.program.functions.items():
        before, after = old.describe(name), new.describe(name)
        check_declarations(f"function '{name}'", function, before, after, fed)
        notes += list_image_notes(f"function '{name}'", before, after)
    if options.function is not None:
        return notes, ""
    defaults = [each.program.default_function_name for each in (old, new)]
    if defaults[0] != defaults[1]:
        notes.append(f"the default function is '{defaults[0]}' in the first and '{defaults[1]}' in the second; "
                     "functions of the same name were compared")
    if not (old.is_pipeline and new.is_pipeline):
        return notes, ""
    unseen = find_differing_parts(old.package.members, new.package.members)
    specs = old.package.spec, new.package.spec
    check_connections(*specs)
    check_declarations("the pipeline", None, specs[0].description, specs[1].description, fed)
    return notes, unseen


def _check_shapes_accepted(before: Program, after: Program) -> None:
    """Raise InputError when an input of `after` has a fixed size and that of `before` another, or a flexible one.

    Without user-supplied feeds, the shapes of `before` are run; those of one form of it are less than that.
    """
    from coremltools.converters.mil.mil import types
    from coremltools.converters.mil.mil.types.symbolic import is_symbolic

    for name, function in before.functions.items():
        other = after.functions.get(name)
        if other is None or _list_names(function) != _list_names(other):
            continue  # `compare_programs` raises for that, with both interfaces
        accepted = other.inputs
        for old, new in ((var, accepted[key]) for key, var in function.inputs.items() if key in accepted):
            if not (types.is_tensor(old.sym_type) and types.is_tensor(new.sym_type)):
                continue
            if len(old.shape) != len(new.shape) or any(
                    not is_symbolic(size) and (is_symbolic(known) or known != size)
                    for known, size in zip(old.shape, new.shape)):
                raise InputError(
                    f"the two programs have different inputs: '{old.name}' of function '{name}' has shape "
                    f"{_format_shape(old)} in the first and {_format_shape(new)} in the second; expected the same "
                    f"shapes, or {format_option('feeds')} of a shape that both have")


def _list_names(function: Function) -> list[str]:
    """Return the names of inputs and outputs."""
    return [*function.inputs, *(var.name for var in function.outputs)]


def _format_shape(var: Var) -> str:
    from coremltools.converters.mil.mil.types.symbolic import is_symbolic

    return f"({', '.join('any' if is_symbolic(size) else str(size) for size in var.shape)})"


def _verify_callable(options: VerifyOptions, accuracy: Any) -> VerifyReport:
    from ..equivalence.callable_comparison import compare_with_callable
    from ..equivalence.callables import is_callable_side
    from .sources import open_source, select_function

    before, after, tolerance = options.before, options.after, options.tolerance
    program_first = is_callable_side(after)
    if program_first and is_callable_side(before):
        raise InputError("both sides are callables; expected a model on one side, whose inputs define the feeds")
    if options.exactness == "bitwise":
        raise InputError("exactness 'bitwise' applies to two models; a torch module or a callable is compared by "
                         "tolerance")
    if tolerance is not None and not 0 <= tolerance < float("inf"):
        raise InputError(f"tolerance {tolerance}: expected 0 or more, a share of the output's largest value")
    if options.quirks and program_first:
        raise InputError("quirks are imitated in the second model, which is a callable here; pass the callable first")
    if options.fixes_nonfinite or options.widths:
        raise InputError("fixes_nonfinite and widths apply to two models only, not to a callable")
    model = open_source(before if program_first else after)
    if model.is_pipeline and options.function is None:
        raise InputError(f"{model.name} is a pipeline, but a torch module or a callable is compared with one ML "
                         f"Program; choose the function of a part: "
                         f"{format_option('function')}{next(iter(model.program.functions))}")
    report = compare_with_callable(
        select_function(model, options.function or model.chosen_function).program, after if program_first else before,
        program_first=program_first, tolerance=tolerance, accuracy=accuracy, precision=options.precision,
        describe=model.describe, **_collect_run_settings(options))
    report.upgraded = model.upgraded
    model.check_unchanged()
    return report
