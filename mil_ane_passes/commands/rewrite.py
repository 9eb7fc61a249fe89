"""Rewrite an .mlpackage, verify that the result is equivalent, and write it atomically."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from .._version import make_json_header
from ..package.copy_ahead import CopyAhead
from ..package.manifest import check_model_path
from ..passes.max_growth import DEFAULT_MAX_GROWTH, parse_max_growth
from ..report.document import Document, build_document, build_fragment
from ..utils.budget import DEFAULT_MAX_STEPS, share_budget
from ..utils.errors import InputError
from ..utils.option_spelling import choose_spelling, format_no_verify_option, format_option
from ..utils.text_format import (
    add_article,
    format_command_path,
    format_count,
    format_duration,
    format_latency_range,
    format_lines,
    format_short_repr,
    join_names,
    join_words,
)
from ..utils.upgraded_source import UpgradedSource, upgrades_to_dict
from .options import (
    DEFAULT_SEEDS,
    FEEDS,
    LINK,
    MAX_MEMORY,
    MAX_SECONDS,
    MAX_STEPS,
    NOT_IN_BATCH,
    RANGES,
    SEEDS,
    Progress,
    add_format_option,
    add_options,
    argument,
    command,
    flag,
    ignore_progress,
    read_options,
)
from .output import print_report, show_progress, start_copying

if TYPE_CHECKING:
    from ..equivalence.equivalence import VerifyReport
    from ..equivalence.user_inputs import Feeds, Ranges
    from ..passes.engine import PassTrace
    from ..passes.finding import Finding
    from ..passes.forecast import Forecast
    from ..passes.pipeline import Options, Passes
    from ..passes.rule_class import RuleFailure
    from .rewrite_steps import FaultyPass

__all__ = ["RewriteOptions", "RewriteReport", "rewrite"]

HELP = "rewrite a package and verify the result before writing it"
EXAMPLE = "rewrite in.mlpackage -o out.mlpackage"

_MAX_MATCHES_LISTED = 3
"The most matches that the text lists per pass; the JSON has all."


@dataclass(frozen=True)
class RewriteOptions:
    """The options of `rewrite`."""

    src: Any = field(metadata=argument("IN", check=check_model_path))
    "the .mlpackage, .mlmodel or .pte to read; never modified"
    dst: Any = field(default=None, metadata=flag("-o", "--output", metavar="OUT", batch=False))
    """the .mlpackage to write; for a NeuralNetwork also an .mlmodel, which keeps the format; for a .pte a .pte, whose
    Core ML delegates are rewritten"""
    _: KW_ONLY
    preset: str = field(default="safe", metadata=flag())
    "safe (default) or full"
    passes: Passes | None = field(default=None, metadata=flag(metavar="LIST"))
    "run exactly these passes, e.g. 'safe,split_conv_transpose_bias' or 'lift_conv_transpose_1d{axis=2}'"
    options: Options | None = None
    target: str = field(default="all", metadata=flag())
    "chip or device to rewrite for (default: all)"
    verify: bool = field(default=True, metadata=flag())
    "verify before writing (default), or skip the equivalence check"
    max_growth: float | None = field(default=DEFAULT_MAX_GROWTH, metadata=flag(metavar="PCT", parse=parse_max_growth))
    """revert rewrites of a preset for placement and speed that increase the predicted cost or latency by more than this
    (default: 1%); none: revert nothing"""
    strict: bool = field(default=False, metadata=flag())
    "stop if a pass fails, instead of rolling it back and continuing without it"
    link: bool = field(default=False, metadata=LINK)
    feeds: Feeds | None = field(default=None, metadata=FEEDS)
    ranges: Ranges | None = field(default=None, metadata=RANGES)
    seeds: int = field(default=DEFAULT_SEEDS, metadata=SEEDS)
    max_seconds: float | None = field(default=None, metadata=MAX_SECONDS)
    max_steps: int | None = field(default=DEFAULT_MAX_STEPS, metadata=MAX_STEPS)
    max_memory: str | float | None = field(default=None, metadata=MAX_MEMORY)
    dry_run: bool = field(default=False, metadata=flag())
    "report what would be done; verify and write nothing"
    diff: bool = field(default=False, metadata=flag(batch=False))
    "show the MIL before and after"
    overwrite: bool = field(default=False, metadata=flag(batch=False))
    "replace OUT if it exists"
    progress: Progress = field(default=ignore_progress, metadata=NOT_IN_BATCH)
    ahead: CopyAhead | None = field(default=None, metadata=NOT_IN_BATCH)
    named: bool = field(default=True, metadata=NOT_IN_BATCH)
    "Whether the user named the `passes`; otherwise they are treated as those of a preset."


def add(parser: argparse.ArgumentParser) -> None:
    add_options(parser, RewriteOptions)
    parser.add_argument("out", metavar="OUT", nargs="?", help="the same as -o OUT")
    add_format_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.out is not None:
        if arguments.dst is not None:
            raise InputError(f"found two outputs, '{arguments.out}' and -o '{arguments.dst}'; expected one of them")
        arguments.dst = arguments.out
    if _is_network_destination(arguments.dst) or _is_program_rewrite(arguments.src, arguments.dst):
        if arguments.dst is None and not arguments.dry_run:
            raise InputError(f"no output given; expected -o OUT.pte, or {format_option('dry_run')}")
        with show_progress() as progress:
            report = rewrite(**read_options(arguments, RewriteOptions), progress=progress)
        print_report(report, arguments.format)
        return 1 if report.status == "not verified" else 0
    begun = start_copying(arguments.src, arguments.dst, bool(arguments.overwrite), bool(arguments.dry_run),
                          packed=bool(arguments.link))
    with begun as ahead, show_progress() as progress:
        report = rewrite(**read_options(arguments, RewriteOptions), progress=progress, ahead=ahead)
    print_report(report, arguments.format)
    return 1 if report.status == "not verified" else 0


def _is_network_destination(dst: Any) -> bool:
    """Return whether the result is to be a NeuralNetwork."""
    return isinstance(dst, (str, PathLike)) and Path(dst).suffix == ".mlmodel"


def _is_program_rewrite(src: Any, dst: Any) -> bool:
    """Return whether the delegates of an ExecuTorch program are to be rewritten, in a program of their own."""
    from ..package.executorch_program import find_address, is_program_path

    return is_program_path(dst) or (dst is None and find_address(src) is not None)


@command(RewriteOptions)
def rewrite(options: RewriteOptions) -> RewriteReport:
    """Rewrite a model and verify that the result is equivalent before anything is written.

    `src` is a path to an .mlpackage, an MLModel, a `Package` or a `mil.Program`; none of them is changed, except
    `rewrite(program, dst=program)`, which rewrites in place once verified. `dst` is the path of the new package, or
    None: then the result is only in the report's `package`. `passes`, `options` and `max_growth` as in `pipeline()`,
    `link` as in `save`, `max_steps` and `max_seconds` as in `run`. `feeds` (from input name to array, or several such)
    and `ranges` (input name to (low, high)) describe the inputs: passes that need value ranges use them, and the
    equivalence check runs on them besides its own random feeds (approximate rewrites are judged on them alone).
    `ahead`: copies that were already started. Without `named`, `passes` are treated as those of a preset.

    A NeuralNetwork is upgraded first, and the result is an ML Program, unless `dst` ends in .mlmodel: then its layers
    are rewritten within the format, `passes` names rewrites of layers, and the report is a `NetworkRewriteReport`.

    Of an ExecuTorch program (`src` a .pte, or `model.pte/METHOD/N` for one delegate, and `dst` None or a .pte) the
    Core ML delegates are rewritten, and all else is kept; the report is an `ExecutorchRewriteReport`.

    Raises InputError for input that cannot be used (nothing is written then). A preset's passes that break the
    equivalence check are left out (the report's `left_out_passes`), and those that fail are rolled back (`failed`).
    This does not apply to passes requested by name: such a pass is reported as `faulty_pass`, or raises RuleError;
    with `strict` every pass that fails raises RuleError. A result that is not verified is not written: the report's
    `status` is "not verified".
    """
    if _is_network_destination(options.dst):
        from .rewrite_network import rewrite_in_format

        return rewrite_in_format(options)
    if _is_program_rewrite(options.src, options.dst):
        from .rewrite_executorch import rewrite_delegates

        return rewrite_delegates(options)
    return rewrite_model(options)


def rewrite_model(options: RewriteOptions) -> RewriteReport:
    """Rewrite one model, as `rewrite` does."""
    from . import rewrite_steps as steps
    from .sources import open_source

    started = time.perf_counter()
    plan = steps.plan_rewrite(options)
    path = steps.resolve_destination(options.src, options.dst)
    report = RewriteReport("", None if path is None or options.dry_run else str(path), options.preset, options.target,
                           passes=[rule.name for rule in plan.rules])
    with (
        steps.start_copying_ahead(options, None if options.dry_run else path) as ahead,
        share_budget(options.max_steps, options.max_seconds, options.progress, options.max_memory),
    ):
        before = open_source(options.src)
        steps.check_source(plan, before)
        options.progress("rewriting")
        outcome = steps.apply_and_verify(plan, before)
        steps.fill_report(report, plan, before, outcome)
        before.check_unchanged()
        if options.dry_run:
            report.status = "dry run" if report.changed else "unchanged"
        elif report.status != "not verified":
            steps.write_result(report, plan, before, outcome, path, ahead)
    report.seconds = time.perf_counter() - started
    return report


@dataclass
class RewriteReport(Document):
    """The outcome of one rewrite.

    `status`: "written" (verified, or verification was not requested), "unchanged" (no rule fired; the package was
    copied as it is), "not verified" (different or not executable; nothing was written), "dry run" or "in memory"
    (nothing to write to). `weight_bytes_*` are sizes of the package's weight files in bytes, `seconds` wall time.
    """

    _kind: ClassVar[str] = "package"
    "What was copied if nothing changed."
    source: str
    output: str | None
    preset: str
    target: str
    passes: list[str]
    status: str = "in memory"
    traces: list[PassTrace] = field(default_factory=list)
    verify: VerifyReport | None = None
    ops_before: int = 0
    ops_after: int = 0
    weight_bytes_before: int | None = None
    weight_bytes_after: int | None = None
    seconds: float = 0.0
    diff: str | None = None
    predicted: tuple[Forecast, Forecast] | None = None
    "The predictions before and after, for the target; None if no rule fired."
    wrong_numbers: list[Finding] = field(default_factory=list)
    "The findings of wrong numbers in the result, which no pass that ran has fixed."
    verify_command: str | None = None
    """The command with which `verify` accepts the written result, where it would find it different without: it does
    not know what the passes declare."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    "The parts of a pipeline that are not ML Programs, with their kinds; they stay as they are."
    left_out_passes: list[FaultyPass] = field(default_factory=list)
    "The passes of a preset that failed the equivalence check, in the order in which they were left out."
    faulty_pass: FaultyPass | None = None
    "A pass requested by name that breaks the equivalence check; nothing is written then."
    outside: list[str] = field(default_factory=list)
    "The passes requested by name that are for none of the target's chips; they did not run."
    upgraded: tuple[UpgradedSource, ...] = ()
    "The source, where it is a NeuralNetwork: it was upgraded first."
    package: Any = None
    "The rewritten `Package` or program; not part of the JSON."

    @property
    def changed(self) -> bool:
        return any(trace.fired for trace in self.traces)

    @property
    def is_all_on_ane(self) -> bool:
        """True if all ops of the result are predicted to run on the ANE."""
        return self.predicted is not None and self.predicted[1].on_ane == self.predicted[1].ops

    @property
    def reverted(self) -> list[PassTrace]:
        """The passes that the guard reverted."""
        return [trace for trace in self.traces if trace.reverted]

    @property
    def failed(self) -> list[RuleFailure]:
        """The passes of a preset that failed with an error and were rolled back."""
        return [trace.failed for trace in self.traces if trace.failed]

    @property
    def verified(self) -> bool:
        return not self.changed or (self.verify is not None and self.verify.equal)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON that `--format json` prints."""
        return {
            **make_json_header("rewrite"),
            "source": self.source, "output": self.output, "status": self.status, "preset": self.preset,
            "target": self.target, "passes": self.passes, "changed": self.changed, "verified": self.verified,
            "traces": [trace.to_dict() for trace in self.traces],
            "verify": self.verify.to_dict() if self.verify else None, "verify_command": self.verify_command,
            "ops": {"before": self.ops_before, "after": self.ops_after},
            "weight_bytes": {"before": self.weight_bytes_before, "after": self.weight_bytes_after},
            "predicted": None if self.predicted is None else {
                "before": self.predicted[0].to_dict(), "after": self.predicted[1].to_dict()},
            "wrong_numbers": [each.to_dict() for each in self.wrong_numbers],
            "left_out_passes": [each.to_dict() for each in self.left_out_passes],
            "blamed": self.faulty_pass.to_dict() if self.faulty_pass else None,
            "failed_passes": [each.to_dict() for each in self.failed],
            "seconds": round(self.seconds, 6), "diff": self.diff,
            **({"left_out": dict(self.left_out)} if self.left_out else {}),
            **({"outside": self.outside} if self.outside else {}), **upgrades_to_dict(self.upgraded),
        }

    def to_html(self) -> str:
        """Return a page with the outcome of each pass and the text; it loads nothing else."""
        return build_document(f"{self.source}: {self.status}", self._repr_html_())

    def _repr_html_(self) -> str:
        """Return what notebooks show: the outcome, a row for each pass that did something, and the text, folded."""
        heads = ("pass", "code", "matches", "exactness", "outcome")
        return build_fragment(f"{self.source}: {self._format_outcome()[0]}", heads, self._list_outcomes(), str(self))

    def _list_outcomes(self) -> list[tuple[object, ...]]:
        """List each pass that did something: its name, code, number of matches, exactness, and what became of it."""
        left_out = {each.rule: f"left out because it {each.verdict} {each}" for each in self.left_out_passes}
        rows: list[tuple[object, ...]] = []
        for trace in self.traces:
            outcome = (f"failed and was rolled back, {trace.failed}" if trace.failed else
                       f"reverted: {trace.reverted}" if trace.reverted else "rewritten" if trace.fired else "")
            if outcome:
                code = trace.fired[0].code if trace.fired else ""
                rows.append((trace.rule, code, len(trace.fired) or trace.places,
                             trace.strength.value if trace.strength else "", outcome))
        return [*rows, *((name, "", "", "", words) for name, words in left_out.items())]

    def __repr__(self) -> str:
        return format_short_repr(
            self,
            source=self.source,
            status=self.status,
            output=self.output,
            verified=self.verified,
            passes_fired=sum(bool(trace.fired) for trace in self.traces),
            ops_before=self.ops_before,
            ops_after=self.ops_after,
        )

    def __str__(self) -> str:
        return format_lines([*self._format_changes(), *self._format_outcome()])

    def _format_changes(self) -> list[str]:
        """Format what was changed, left and verified."""
        from ..passes.registry import get_all_rewrites
        from ..passes.targets import format_generations

        lines = []
        wrong = self._count_wrong_numbers()
        if self.predicted is not None:
            lines += [_describe_change(*self.predicted, wrong), *_describe_latency(*self.predicted)]
        elif wrong:
            lines.append(f"not fixed: {wrong}")
        lines += [line for trace in self.traces for line in _format_trace(trace)]
        lines += [f"ane::{trace.rule}  reverted at {format_count(trace.places, 'match', 'matches')}: {trace.reverted}"
                  for trace in self.reverted]
        lines += [f"ane::{each.rule}  failed and was rolled back, {each}" for each in self.failed]
        lines += [f"ane::{each.rule}  left out because it {each.verdict} {each}" for each in self.left_out_passes]
        lines += [f"ane::{name}  did not run: it applies to "
                  f"{format_generations(get_all_rewrites()[name].targets.generations)}, and the target is {self.target}"
                  for name in self.outside]
        near = [f"  %{miss.value}  {miss.code}  {miss.reason}" for trace in self.traces for miss in trace.near_misses]
        if near:
            lines += ["not rewritten (near misses):", *near[:_MAX_MATCHES_LISTED], *_format_remainder_lines(near)]
        if self.changed:
            lines.append(f"ops: {self.ops_before} -> {self.ops_after}" + self._format_weights())
        lines += self.explain_replaced_preset()
        lines += [f"{name}: {add_article(kind)}, unchanged" for name, kind in self.left_out.items()]
        if self.verify is not None:
            lines += [*str(self.verify).split("\n"), *self._explain_verify_command()]
        if self.diff:
            lines += self.diff.split("\n")
        return lines

    def _explain_verify_command(self) -> list[str]:
        """Return a line if `verify` accepts the result with a limit only, with the passes whose changes are the reason.
        """
        from ..passes.contract import Exactness

        if self.verify_command is None:
            return []
        fired = [trace for trace in self.traces if trace.fired and trace.strength is not Exactness.BITWISE]
        moving = [trace for trace in fired if trace.moves or any(change.raises for change in trace.changes)]
        names = [f"ane::{trace.rule}" for trace in moving or fired]
        return [f"  without a limit, `verify` finds the two different: it does not know the changes that "
                f"{join_names(names)} declare{'s' * (len(names) == 1)}, such as constants rounded again; with one: "
                f"{self.verify_command}"]

    def _count_wrong_numbers(self) -> str:
        """Format the number of findings of wrong numbers in the result, with their codes."""
        from ..ane.wrong_numbers import format_wrong_numbers

        return format_wrong_numbers([each.code for each in self.wrong_numbers])

    def explain_replaced_preset(self) -> list[str]:
        """Return a line if the passes requested by name ran in place of a preset that was requested as well."""
        from ..passes.registry import get_all_rewrites

        if self.preset != "full" or {name for name, each in get_all_rewrites().items()
                                     if each.preset == "full"} <= set(self.passes):
            return []
        both = choose_spelling("--passes full,...", "passes='full,...'")
        return [f"{format_option('passes')} replaces {choose_spelling('--preset full', 'preset=')}; {both} runs both"]

    def _format_weights(self) -> str:
        if self.weight_bytes_before is None or self.weight_bytes_after is None:
            return ""
        return f", weights: {self.weight_bytes_before} -> {self.weight_bytes_after} bytes"

    def _format_outcome(self) -> list[str]:
        where = f" to {self.output}" if self.output else ""
        if self.status == "unchanged":
            left = " and ".join(["reverted"] * bool(self.reverted) + ["left out"] * bool(self.left_out_passes)
                                + ["rolled back"] * bool(self.failed))
            idle = "nothing to do: no pass matched"
            said = f"nothing left to write: all rewrites that matched were {left}" if left else idle
            return [said + (f"; the {self._kind} was copied as it is{where}" if where else ""), *self._suggest_next()]
        if self.status == "dry run":
            return ["dry run: nothing verified, nothing written"]
        if self.status == "not verified":
            return [self._explain_refusal()]
        unverified = "" if self.verified else f", not verified ({format_no_verify_option()})"
        names = [*(each.rule for each in self.left_out_passes), *(each.rule for each in self.failed)]
        without = ", ".join(f"ane::{name}" for name in names)
        done = f"{self.status}{where}{unverified} in {self.seconds:.1f} s" + (f", without {without}" if without else "")
        if not self.output:
            return [done]
        return [done, f"next: {self._format_lint_command(self.output)}", f"  {self._describe_remainder()}."]

    def _describe_remainder(self) -> str:
        """Describe what the command that is suggested next lists, as far as it is known."""
        parts = ["the ops that are still off the ANE"] * (not self.is_all_on_ane)
        parts += ["the findings of wrong numbers"] * bool(self.wrong_numbers)
        if parts:
            return f"This lists {' and '.join(parts)}, with reasons"
        return "All ops are predicted on the ANE; this lists other findings, if there are any"

    def _suggest_next(self) -> list[str]:
        """Suggest what to try if nothing was done."""
        from ..passes.registry import get_all_rewrites

        safe = all(name in get_all_rewrites() and get_all_rewrites()[name].preset == "safe" for name in self.passes)
        overridden = self.preset == "full"  # passes are "exactly these": they stand instead of the preset
        name = "passes" if overridden else "preset"
        more = choose_spelling(f"--{name} full", f"{name}='full'")
        tries = [f"{more} runs more passes"] * safe
        tries += [f"{choose_spelling('--max-growth none', 'max_growth=None')} keeps reverted rewrites"] * bool(
            self.reverted)
        if not self.output or not os.path.exists(self.source):  # a model in memory has no command
            return [f"next: {'; '.join(tries)}"] if tries else []
        wrong = "the findings of wrong numbers, and " * bool(self.wrong_numbers)
        words = "; ".join([f"  This lists {wrong}the ops that are off the ANE, if any, with reasons", *tries])
        return [f"next: {self._format_lint_command(self.source)}", f"{words}."]

    def _format_lint_command(self, path: str) -> str:
        """Format the command that lints `path` for the same target."""
        chosen = [] if self.target == "all" else ["--target", self.target]
        return join_words(["mil-ane-passes", "lint", format_command_path(path), *chosen])

    def _explain_refusal(self) -> str:
        """Explain what broke the equivalence check, and what to try."""
        if self.left_out_passes and self.faulty_pass is None:
            return (
                f"nothing written: {len(self.left_out_passes)} passes were left out, and the rest is still not "
                f"verified equivalent; choose passes with {format_option('passes')} ({format_no_verify_option()} "
                "writes it unverified)"
            )
        if self.faulty_pass is None:
            return ("nothing written: the rewritten program is not verified equivalent "
                    f"({format_no_verify_option()} writes it anyway)")
        return (
            f"nothing written: ane::{self.faulty_pass.rule} {self.faulty_pass.verdict} {self.faulty_pass}. It "
            f"was requested by name, so it was not left out; remove it from {format_option('passes')}, or write anyway "
            f"with {format_no_verify_option()}"
        )


def _describe_change(before: Forecast, after: Forecast, wrong: str) -> str:
    """Summarize the prediction before and after: what is on the ANE, transitions, the segmenter's estimate.

    `wrong` states the findings of wrong numbers that are left.
    """
    left = "; ".join(filter(None, (str(after.support), wrong)))
    return (f"on the ANE: {before.on_ane} of {before.ops} -> {after.on_ane} of {format_count(after.ops, 'op')}, "
            f"{before.time_share:.0f} -> {after.time_share:.0f} % of the segmenter's estimate; "
            f"transitions {before.transitions} -> {after.transitions}; estimate of Core ML's segmenter (decides "
            f"placement): {format_duration(before.cost)} -> {format_duration(after.cost)}"
            + (f"; not fixed: {left}" if left else ""))


def _describe_latency(before: Forecast, after: Forecast) -> Iterator[str]:
    """Yield a line about the estimated latency before and after, with both ranges, for each chip of the target.

    The estimates share most of their error, so overlapping ranges do not mean that the difference is insignificant.
    """
    chips = {each.chip: each for each in after.latencies}
    pairs = [(each, chips[each.chip]) for each in sorted(before.latencies, key=lambda one: one.chip)]
    changes = ", ".join(f"{one.chip} {format_duration(one.latency_us / 1e3)} -> "
                        f"{format_duration(other.latency_us / 1e3)}" for one, other in pairs)
    if changes:
        first, last = (format_latency_range(min(each.latency_low_us for each in one.latencies),
                                            max(each.latency_high_us for each in one.latencies))
                       for one in (before, after))
        yield (f"latency: {changes} (range {first} -> {last}); before: {before.latency_term}; "
               f"after: {after.latency_term}")


def _format_trace(trace: PassTrace) -> list[str]:
    if not trace.fired:
        return []
    first = trace.fired[0]
    strength = trace.strength.value if trace.strength else ""
    lines = [
        f"ane::{trace.rule}  {first.code} {first.slug}  {format_count(len(trace.fired), 'match', 'matches')}, "
        f"{strength}"
    ]
    alike: dict[str, list[str]] = {}
    for hit in trace.fired:
        alike.setdefault(hit.reason, []).append(f"{_format_function_prefix(hit.function)}%{hit.value}")
    found = [
        f"  {', '.join(names[:_MAX_MATCHES_LISTED])}{_format_remainder(names)}  {note}" for note, names in alike.items()
    ]
    return lines + found[:_MAX_MATCHES_LISTED] + _format_remainder_lines(found)


def _format_function_prefix(function: str) -> str:
    return "" if function == "main" else f"{function}:"


def _format_remainder(names: list[str]) -> str:
    return f" and {len(names) - _MAX_MATCHES_LISTED} more" if len(names) > _MAX_MATCHES_LISTED else ""


def _format_remainder_lines(lines: list[str]) -> list[str]:
    return (
        [f"  ... and {len(lines) - _MAX_MATCHES_LISTED} more (--format json has all)"]
        if len(lines) > _MAX_MATCHES_LISTED
        else []
    )
