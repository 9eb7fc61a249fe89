"""Report the ops that leave the ANE, with the reason, the evidence and the fix. Everything is predicted; nothing is
run.

Exit code 0: clean; 1: findings that --fail-on counts, or another gate (--fail-under, --baseline) failed for a package;
2: a package could not be read (the others are still linted). Gates apply to IN only. Defaults of the options can be set
in setup.cfg or pyproject.toml.
"""

from __future__ import annotations

import argparse
import gc
import io
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..package.manifest import check_model_path
from ..package.output_file import check_output_file, write_text_file
from ..passes.targets import parse_target, split_targets
from ..report.terminal import COLOR_CHOICES, TerminalStyle, choose_style
from ..utils.errors import InputError
from ..utils.garbage_collection import pause_garbage_collection
from ..utils.json_file import BASELINE_FORM, MEASUREMENT_FORM, expect_json_file
from ..utils.locking import synchronized
from ..utils.text_format import escape_text, format_lines
from .adapted_folder import is_cpu_lookup
from .batch_sources import Source, find_sources
from .lint_fix import FixOptions, check_fix_options, fix_sources
from .lint_gates import GateOptions, Gates
from .lint_targets import check_target_options, lint_targets
from .options import add_options, argument, command, flag, read_options
from .output import format_error, print_upgrades
from .settings import SettingsFileOptions, parse_percent, read_chosen_settings

if TYPE_CHECKING:
    from ..ane.compute_plan import Measurement, MeasurementSource
    from ..passes.contract import Rule
    from ..passes.finding import Finding
    from ..report.baseline import BaselineFile
    from ..report.ignored import PerOpIgnore
    from ..report.lint import LintReport
    from ..report.lint_collection import Collection, CollectionTotals
    from .sources import OpenedSource

__all__ = ["FORMATS", "LintOptions", "LintSettings", "lint", "prepare_lint", "read_lint_settings"]

HELP = "find the ops that leave the ANE, with reasons and fixes"
EXAMPLE = "lint in.mlpackage --target m4"
FORMATS = ("text", "json", "sarif", "html")
LINE_FORMATS = ("concise", "github")
"Forms with a line for each finding; a summary and what failed are on stderr."

Names = Iterable[str] | str
Cuts = tuple[tuple[str, ...], ...]
_MAX_TRIED_CUTS = 16
"""Cuts tried for one report: each writes the program again, so the limit bounds the time for many findings."""


@dataclass(frozen=True)
class LintOptions:
    """The options of `lint`."""

    src: Any = field(metadata=argument("IN", check=check_model_path, nargs="+"))
    "the .mlpackage, .mlmodel or .pte to lint; or several of them, folders that contain packages, or glob patterns"
    _: KW_ONLY
    target: str = field(default="all", metadata=flag())
    "chip or device to predict for (default: all); for several, such as m1,a17,m4, a table is printed"
    select: Names | None = field(default=None, metadata=flag(metavar="RULES"))
    "report only these rules: codes, code prefixes, slugs or names, e.g. 'ANE3,int-inputs'"
    ignore: Names | None = field(default=None, metadata=flag(metavar="RULES"))
    "do not report these rules; they still count in the prediction"
    options: Mapping[str, Mapping[str, Any]] | None = None
    per_op_ignores: Mapping[str, Names] | None = None
    baseline: str | PathLike[str] | None = field(
        default=None, metadata=flag(metavar="FILE", batch=False, check=expect_json_file("baseline", BASELINE_FORM)))
    "gate: fail on findings that are not in this JSON report; a report of several packages is matched by path"
    measured: MeasurementSource | None = field(default=None, metadata=flag(
        metavar="RESULT.json", batch=False, check=expect_json_file("measured", MEASUREMENT_FORM)))
    """Core ML's result from a Mac: the result.json of measure.py (see mac-script), or a dumped compute plan"""
    after: Any = field(default=None, metadata=flag(metavar="B.mlpackage", batch=False, check=check_model_path))
    "a second package to compare with IN"
    sizes: bool = field(default=False, metadata=flag(batch=False))
    """list the weights by format, the largest weights, duplicates, and the memory that values need; estimate the
    latency gain of compressed weights on the chip, and list formats with published failures"""


@dataclass(frozen=True)
class LintSettings:
    """The options of one run of the command: those on the command line, and otherwise those in the settings file.

    `keywords` are those of `lint`, `from_file` the names of those that the file has set.
    """

    keywords: Mapping[str, Any]
    from_file: frozenset[str]
    file: Path | None
    gates: Gates

    @contextmanager
    def name_file(self) -> Iterator[None]:
        """Prefix errors about values of the settings file with the name of that file."""
        try:
            yield
        except InputError as error:
            if error.option not in self.from_file:
                raise
            raise InputError(f"{self.file}: {error}") from error


@dataclass(frozen=True)
class TextOptions:
    """The options of the command about its text."""

    color: str = field(default="auto", metadata=flag(choices=COLOR_CHOICES))
    "color the text: auto (default: on a terminal, unless NO_COLOR is set), always or never"
    verbose: bool = field(default=False, metadata=flag())
    "show the evidence of each finding on a terminal, too; elsewhere it is always shown"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", choices=FORMATS + LINE_FORMATS,
                        help="output format: text (default, unless FILE ends in .html, .json or .sarif); concise: one "
                             "line per finding; github: annotations of GitHub workflows")
    parser.add_argument("-o", "--output", metavar="FILE", help="output file for the report; an existing file is "
                                                               "replaced")
    parser.add_argument("--all", action="store_true", help="list all occurrences of each finding in the text")
    parser.add_argument("--statistics", action="store_true",
                        help="count the findings per rule, most frequent first, and the ops of each type per "
                             "backend, as text or json")
    add_options(parser, LintOptions)
    add_options(parser, TextOptions)
    add_options(parser, GateOptions)
    add_options(parser, SettingsFileOptions)
    add_options(parser, FixOptions)
    parser.set_defaults(run=run, keeps_all=True)


def run(arguments: argparse.Namespace) -> int:
    if not all(each.strip() for each in arguments.src):
        raise InputError("no path given; expected the path of an .mlpackage")
    if arguments.format is None:
        suffix = Path(arguments.output or "").suffix.removeprefix(".").lower()
        arguments.format = suffix if suffix in FORMATS else "text"
    sources = find_sources(arguments.src, None, named=False)
    single = [source.path for source in sources] == arguments.src and len(sources) == 1
    if not single:
        _reject_options_of_one_package(arguments)
    elif sources[0].error:
        raise InputError(sources[0].error)
    if arguments.fix or arguments.in_place:
        check_fix_options(arguments, sources)
    if arguments.statistics and arguments.format not in ("text", "json"):
        raise InputError(f"--statistics: found --format {arguments.format}; expected text or json")
    _reject_options_without_place(arguments)
    settings = read_lint_settings(arguments)
    if len(split_targets(settings.keywords.get("target", "all"))) > 1:
        check_target_options(arguments, settings.keywords)
    if arguments.fix:
        return fix_sources(arguments, sources, settings)
    target = None if arguments.output is None else check_output_file(
        arguments.output, [*(source.path for source in sources), settings.keywords.get("after"),
                           settings.keywords.get("baseline"), arguments.measured, settings.file])
    keywords = {name: value for name, value in settings.keywords.items() if name != "src"}
    targets = split_targets(keywords.get("target", "all"))
    with settings.name_file():
        for name in targets:
            parse_target(name)
        if single and len(targets) == 1 and arguments.format not in LINE_FORMATS:
            check_model_path(sources[0].path)  # before prepare_lint imports coremltools
        linters = {name: prepare_lint(None, **{**keywords, "target": name}) for name in targets}
    if len(linters) > 1:
        return lint_targets(arguments, sources, {name: each.lint for name, each in linters.items()}, settings.gates,
                            target)
    linter, = linters.values()
    if arguments.format == "html" and target is None and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")  # the encoding that the page declares
    lines = arguments.format in LINE_FORMATS
    style = choose_style(arguments.color or "auto") if arguments.format in ("text", "concise") else TerminalStyle()
    return _Run(linter, _open_collection(arguments, single, linter), target, single, lines, settings.gates,
                style).go(sources)


def _reject_options_without_place(arguments: argparse.Namespace) -> None:
    """Raise InputError for options whose results the chosen output cannot show."""
    if arguments.statistics and arguments.sizes:
        raise InputError("--statistics does not support --sizes; remove one of them")
    for name, value in (("sizes", arguments.sizes), ("after", arguments.after)):
        if value and arguments.format in ("sarif", *LINE_FORMATS):
            raise InputError(
                f"--format {arguments.format} does not support --{name}; remove one of them")


def _reject_options_of_one_package(arguments: argparse.Namespace) -> None:
    """Raise InputError for options that several packages, or a folder, cannot have."""
    if arguments.format == "html":
        raise InputError("--format html writes a page about one package; expected the path of one package, or use "
                         "`mil-ane-passes "
                         "batch lint IN -o DIR --report html`")
    for name, value in (("after", arguments.after), ("measured", arguments.measured)):
        if value is not None:
            raise InputError(f"--{name} applies to one package; expected its path, not a folder or pattern")


def _open_collection(arguments: argparse.Namespace, single: bool, linter: _Linter) -> Collection:
    """Choose the form of the output."""
    from ..report import lint_collection as forms

    settings = {"target": linter.options.target}
    evidence = bool(arguments.verbose) or arguments.output is not None or not sys.stdout.isatty()
    if arguments.statistics:
        from ..report.lint_statistics import StatisticsCollection

        return StatisticsCollection(arguments.format, settings)
    if arguments.format in LINE_FORMATS:
        return forms.LineCollection(arguments.format)
    if single:
        return forms.SingleReport(arguments.format, arguments.all, evidence)
    if arguments.format == "json":
        return forms.JsonCollection(settings)
    if arguments.format == "sarif":
        return forms.SarifCollection(settings)
    return forms.TextCollection(arguments.all, evidence)


@dataclass
class _Run:
    """One run of the command: lints each package and prints or writes the output.

    `single`: the path of one package was given; `lines`: the output has a line for each finding and nothing else.
    """

    linter: _Linter
    collection: Collection
    target: Path | None
    single: bool
    lines: bool
    gates: Gates
    style: TerminalStyle
    kept: list[str] = field(default_factory=list)
    "What will be written to the file."
    headlines: list[str] = field(default_factory=list)
    "What is printed then: a line for each package."

    def go(self, sources: Sequence[Source]) -> int:
        """Lint the sources in order; returns the largest exit code."""
        from ..report.lint_collection import CollectionTotals

        totals = CollectionTotals()
        codes = [self._lint_source(source, totals) for source in sources]
        self._print_or_keep(self.collection.finish(totals))
        self._write_file(totals)
        for message in (*totals.gates, *totals.failed.values()):
            print(f"mil-ane-passes: {escape_text(message)}", file=sys.stderr)
        if self.lines and self.target is None:
            print(f"mil-ane-passes: {escape_text(totals)}", file=sys.stderr)
        return max(codes)

    def _lint_source(self, source: Source, totals: CollectionTotals) -> int:
        """Lint one source and print its part of the output. With several sources, errors are recorded, not raised."""
        if not self.single:
            gc.collect()  # the program of the package before; the collector does not run by itself in this command
        try:
            if source.error and not self.single:  # of a single path, why it is not a package says more
                raise InputError(source.error)
            report = self.linter.lint(source.path, several=not self.single)
        except Exception as error:
            if self.single and not self.lines:
                raise
            message = format_error(error)
            totals.failed[source.path] = message if source.path in message else f"{source.path}: {message}"
            return 2
        print_upgrades(report)
        totals.add(report)
        self._print_or_keep(self.collection.add(report))
        if self.target is not None:
            from ..report.lint_text import format_headline

            self.headlines.append(format_headline(report))
        failed = list(self.gates.explain_failures(report))
        totals.gates += failed if self.single else [f"{source.path}: {message}" for message in failed]
        return int(self.gates.fails(report))

    def _print_or_keep(self, text: str | None) -> None:
        if text is not None and self.target is None:
            print(self.style.apply(text))
        elif text is not None:
            self.kept.append(text)

    def _write_file(self, totals: CollectionTotals) -> None:
        if self.target is None:
            return
        write_text_file(self.target, "".join(f"{text}\n" for text in self.kept))
        summary = [] if self.single and not self.lines else [str(totals)]
        print(format_lines([*self.headlines, *summary, f"written to {self.target}"]))


def read_lint_settings(arguments: argparse.Namespace) -> LintSettings:
    """Read the settings file, and the options on the command line, which win."""
    settings = read_chosen_settings(arguments.config, arguments.no_config)
    share = settings.fail_under if arguments.fail_under is None else parse_percent(arguments.fail_under, "--fail-under")
    typed = read_options(arguments, LintOptions)
    found = {name: value for name in ("target", "select", "ignore", "per_op_ignores", "options", "baseline")
             if name not in typed and (value := getattr(settings, name)) is not None}
    gates = Gates(share, settings.fail_on if arguments.fail_on is None else arguments.fail_on)
    return LintSettings({**found, **typed}, frozenset(found), settings.file, gates)


@command(LintOptions)
def lint(options: LintOptions) -> LintReport:
    """Find the ops of `src` that leave the ANE of `target`, with the rule, its evidence, and the fix of each.

    `select` and `ignore` choose the reported rules (codes, code prefixes such as ANE3, slugs or names; `ignore` has
    priority). A rule that finds unsupported ops always counts in the prediction: hiding a finding does not move an op
    to the ANE. `per_op_ignores` maps patterns of names of values (`encoder_*`, `main/x`) to rules that are ignored
    there: such findings are counted in the report's `ignored`. `options` sets options of rules, by name. `after` is a
    second source that is checked in the same way, `baseline` the JSON of an earlier report. `measured` is Core ML's
    result on a Mac (the result.json of `measure.py`, a dumped compute plan, or its data). If its chip
    is the target, it overrides the prediction where the two differ. It is reported beside the predicted backends and
    costs. With `sizes` the report has advice on compressed weights.

    Raises InputError for input that cannot be read and for unknown names.
    """
    return _prepare_linter(options).lint(options.src)


@command(LintOptions)
def prepare_lint(options: LintOptions) -> _Linter:
    """Check the options and read the files that they name, once for all packages; `src` is ignored.

    Raises InputError as `lint` does.
    """
    return _prepare_linter(options)


def _prepare_linter(options: LintOptions) -> _Linter:
    from ..ane.compute_plan import read_measurements
    from ..ane.fixes import names_of_fixes
    from ..passes.rule_selection import configure_rules, select_rule_names
    from ..report.baseline import read_baseline
    from .lint_network import resolve_per_op_ignores, split_layer_rules

    with pause_garbage_collection():
        parse_target(options.target)
        codes, select, ignore = split_layer_rules(options.select, options.ignore)
        names = frozenset() if select == [] else select_rule_names(select, ignore)
        rules = configure_rules(options.options)
        known = None if options.baseline is None else read_baseline(options.baseline)
        helping = names_of_fixes(rule for name, rule in rules.items() if name in names)
        requested = [rule for name, rule in rules.items() if name in names or name in helping or rule.refuses]
        plans = [] if options.measured is None else read_measurements(options.measured)
        ignores = resolve_per_op_ignores(options.per_op_ignores)
    return _Linter(options, codes, names, requested, known, plans, ignores)


@dataclass(frozen=True)
class _Linter:
    """Options of `lint` in resolved form: codes of rules of layers, names of rules that are reported, rules to
    match, the baseline, measurements and what is ignored at single ops."""

    options: LintOptions
    codes: frozenset[str]
    names: frozenset[str]
    rules: list[Rule]
    baseline: BaselineFile | None
    measurements: list[Measurement]
    ignores: Sequence[PerOpIgnore] = ()

    @synchronized
    def lint(self, src: Any, *, several: bool = False) -> LintReport:
        """Lint one source, or one of `several`."""
        with pause_garbage_collection():
            report = self._lint_source(src, self.measurements)
            if self.options.after is not None:
                taken = None if report.measured is None else report.measured.match.measurement
                unused = [each for each in self.measurements if taken is not None and each is not taken]
                report.after = self._lint_source(self.options.after, unused)
            if self.baseline is not None and not report.not_judged:
                known = self.baseline.select(report.model, self.options.target, several=several)
                report.baseline = known.compare(report.findings)
            if self.options.sizes:
                from ..ane.weight_formats import advise_on_weights
                from ..package.storage import survey_storage

                for each in (report,) if report.after is None else (report, report.after):
                    each.storage = survey_storage(each.plan.program, each.plan.package)
                report.sizes = advise_on_weights(report.plan.program, report.plan, report.target, report.latency)
            return report

    def _lint_source(self, src: Any, plans: Sequence[Measurement]) -> LintReport:
        from ..report.ignored import ignore_findings

        report = _lint_source(src, self.options.target, self.rules, self.names, plans, self.codes)
        ignore_findings(report, self.ignores)
        return report


def _lint_source(
    src: Any, target: str, rules: Iterable[Rule], names: frozenset[str], plans: Sequence[Measurement],
    codes: frozenset[str],
) -> LintReport:
    """Predict one source with `rules`, and report the findings of those in `names`, and of layer rules in `codes`."""
    from ..ane import predict_plan
    from ..ane.agreement import apply_measurement, compare_with_measurement
    from ..ane.compute_plan import find_best_match
    from ..ane.fixes import attach_fixes
    from ..ane.measured_otherwise import MeasuredOtherwise, iterate_contradictions
    from ..ane.prediction import update_unmeasured
    from ..report.lint import FOR_CPU, LintReport
    from .lint_network import lint_network
    from .lint_outlook import SourceOutlook
    from .sources import open_source

    source = open_source(src)
    # What changes the interface is not for the parts of a pipeline, which have neighbours, or for delegates.
    fitting = [rule for rule in rules if not (source.keeps_interface and getattr(rule, "interface", False))]
    plan, found = predict_plan(source.program, fitting, target=target, package=source.package)
    agreement = compare_with_measurement(plan, find_best_match(plan, plans, source.name)) if plans else None
    if agreement is not None:
        apply_measurement(plan, agreement)
        found = [*update_unmeasured(plan, found), *iterate_contradictions(agreement)]
    report = LintReport.of(source.name, target, plan, attach_fixes(found, names), {*names, MeasuredOtherwise.name})
    report.measured = agreement
    if source.package is not None and is_cpu_lookup(source.package.path):
        report.not_judged, report.findings, report.near_misses = FOR_CPU, [], []
    report.findings = _keep_possible_cuts(report.findings, source)
    report.upgraded = source.upgraded
    report.network = lint_network(src, source, plan, target, codes)
    report.left_out = {} if source.package is None else source.package.members.others
    report.outlook = SourceOutlook(source, target)
    source.check_unchanged()
    return report


def _keep_possible_cuts(findings: list[Finding], source: OpenedSource) -> list[Finding]:
    """Remove from `findings` the cuts that `edit --split-at` cannot make in the source; each cut is tried.

    If one rule found several ops of a function, such as lookups, each of which one cut separates, a single cut for all
    of them is tried first.
    """
    groups: dict[tuple[type, str], list[Finding]] = defaultdict(list)
    for item in findings:
        if item.split_at:
            groups[item.rule, item.function].append(item)
    possible: dict[int, Cuts] = {}
    tries = iter(range(_MAX_TRIED_CUTS))
    for (_, function), items in groups.items():
        joined: Cuts = (tuple(dict.fromkeys(name for item in items for cut in item.split_at for name in cut)),)
        together = all(len(item.split_at) == 1 for item in items) and len(items) > 1
        if together and next(tries, None) is not None and _can_cut(source, function, joined):
            possible |= dict.fromkeys(map(id, items), joined)
            continue
        possible |= {id(item): item.split_at for item in items
                     if next(tries, None) is not None and _can_cut(source, function, item.split_at)}
    return [replace(item, split_at=possible.get(id(item), ())) if item.split_at else item for item in findings]


def _can_cut(source: OpenedSource, function: str, cuts: Cuts) -> bool:
    """Return whether `edit` can make these cuts, each in the first part of the one before."""
    if source.package is None or source.keeps_interface:
        return False
    from ..transforms.contract import Draft, apply_transforms
    from ..transforms.split_at import SplitAt

    several = len(source.program.functions) > 1
    try:
        draft = Draft(source.program, source.name, source.package)
        edits = [SplitAt(values, function if several else None) for values in cuts]
        for edit in edits[:-1]:
            draft = apply_transforms(draft, [edit])[0]
        edits[-1].check(draft)
    except InputError:
        return False
    return True
