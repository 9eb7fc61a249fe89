"""A lint report as text for people: grouped by cause, worst first, near misses last."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..ane.latency import LatencyReport
from ..ane.latency_parameters import load_parameters
from ..ane.weight_formats import SizeAdvice
from ..package.storage import FormatTotal, Storage
from ..passes.contract import Evidence, Rewrite, Rule
from ..passes.finding import Finding
from ..passes.layout import format_bytes
from ..passes.severity import Severity
from ..passes.targets import Generation
from ..utils.pass_description import describe_pass
from ..utils.text_format import add_article, format_count, format_duration, format_latency_range, format_lines
from .agreement import iterate_agreement_lines as agreement_lines
from .fix_commands import format_dedup_command, format_rewrite_command, format_split_command
from .ignored import format_ignored_lines
from .lint_groups import FindingGroup, group_findings
from .network import iterate_network_lines
from .next_step import iterate_step_lines
from .table import format_table, join_sides

if TYPE_CHECKING:
    from .lint import LintReport

__all__ = ["describe_duplicates", "format_headline", "format_latency", "format_lint_text", "format_location"]

_MAX_MATCHES_LISTED = 8
"The most matches with different reasons listed per cause, unless all are requested."
_MAX_LISTED_PER_REASON = 3
"The most matches listed for one reason."
_MAX_NEAR_MISSES_LISTED = 2
"The most matches listed per reason of near misses."
_MIN_SHARE_SAVED = 0.01
"The share of the stored weights that duplicates exceed where a command that removes them is printed."


def format_lint_text(report: LintReport, *, everything: bool = False, evidence: bool = True) -> str:
    """Format the report as text; `everything`: all matches, and with a baseline also its known findings; `evidence`:
    the confidence and a source of each finding."""
    if report.not_judged:
        return format_lines([format_headline(report)])
    shown = None if everything else _MAX_MATCHES_LISTED
    lines = [
        format_headline(report),
        *_iterate_function_lines(report),
        *_iterate_latency_lines(report),
        *_iterate_after_lines(report),
        *_iterate_baseline_lines(report, shown),
    ]
    if report.network is not None:
        lines += ["", *iterate_network_lines(report.network, report.model, report.target, everything=everything), "",
                  "as an ML Program, upgraded:"]
    lines += [] if report.measured is None else agreement_lines(report.measured)
    known = report.baseline is not None and not everything
    listed = report.baseline.new if report.baseline is not None and known else report.findings
    found = group_findings(listed, report.plan)
    blocks = [_format_group(report, group, shown, evidence) for group in found if not group.is_optional_rewrite]
    offers = [_format_suggestion(group) for group in found if group.is_optional_rewrite]
    if offers:
        blocks.append(["suggestions (by default they do not affect the exit code):", *offers])
    if report.near_misses:
        blocks.append(["near misses:", *_format_near_misses(report, shown)])
    failed = [f"  {each.code} {each.slug}  rule {each.rule} failed {each}" for each in report.plan.failed]
    if failed:
        blocks.append(["rules that failed (their findings are missing; all others are complete):", *failed])
    if report.storage is not None:
        blocks.append(_format_storage(report, report.storage, shown))
    if report.sizes is not None:
        blocks.append(_format_sizes(report.sizes, shown))
    lines += format_ignored_lines(report)
    if not report.findings:
        lines.append("no findings")
    lines += [line for block in blocks for line in ("", *block)]
    hint = [] if evidence or not blocks else ["--verbose shows the evidence for each finding"]
    last = [*iterate_step_lines(report.next_step), *hint, _describe_basis(report)]
    return format_lines([*lines, *([""] if blocks else []), *last])


def format_headline(report: LintReport) -> str:
    """Format the first line: predicted shares, partitions, transitions, the segmenter's estimate, unsupported ops."""
    if report.not_judged:
        return f"{report.model}: {report.not_judged}: not judged"
    summary = report.summary()
    if not summary["ops"]:
        return f"{report.model}: 0 ops"
    partitions, transitions = len(report.plan.segments), summary["transitions"]
    support = str(report.plan.support)
    return (
        f"{report.model} on {_describe_target(report)}: {summary['predicted_on_ane']} of "
        f"{format_count(summary['ops'], 'op')} "
        f"({_format_percent(report.share)}) and {_format_percent(report.time_share)} of the segmenter's "
        f"estimate predicted on the ANE; "
        f"{format_count(partitions, 'partition')}, {format_count(transitions, 'transition')}; "
        f"estimate of Core ML's segmenter (decides placement): {format_duration(report.plan.total)}"
        + (f"; {support}" if support else "")
    )


def format_latency(latency: LatencyReport) -> str:
    """Format the estimated run time in one line: its range, the largest part, and what no measurement covers."""
    central = format_duration(latency.latency_us / 1e3)
    span = format_latency_range(latency.latency_low_us, latency.latency_high_us)
    if len(latency.chips) > 1:
        first, last = min(latency.chips), max(latency.chips)
        middle = latency.by_chip[len(latency.by_chip) // 2].chip
        lacking = ("" if latency.target == "all" else
                   f"; {latency.target}: no measurement of this chip or a related one")
        return (f"latency: {span} over the measured chips {first} to {last}, {central} on {middle}, the median; "
                f"{latency.term}{lacking}")
    chip, = latency.chips
    relative = load_parameters()["chips"][chip].get("relative")
    extrapolated = latency.by_chip[0].extrapolated_us / latency.latency_us if latency.latency_us else 0
    basis = (f"; extrapolated: no measurement of {chip}, so {relative} is used, with a wider range" if relative else
             f"; {100 * extrapolated:.0f} % of it extrapolated, not covered by measurements of {chip}"
             if extrapolated >= 0.005 else "")
    return f"latency on {chip}: {central} ({span}); {latency.term}{basis}"


def _iterate_latency_lines(report: LintReport) -> Iterator[str]:
    if report.latency is not None and report.plan.rows:
        is_flexible = any(sizes.inferred for sizes in report.plan.sizes.values())
        yield format_latency(report.latency) + ("; at the default shapes of the inputs" if is_flexible else "")


def _format_percent(share: float) -> str:
    """Format a percentage, rounded down so that 100 % means all."""
    return f"{math.floor(share * 10 + 1e-9) / 10:.1f} %"


def _describe_target(report: LintReport) -> str:
    generations = report.plan.generations
    if report.target != "all" or len(generations) == 1:
        return report.target
    return f"every generation, {generations[0].chips[0].upper()} to {generations[-1].chips[-1].upper()}"


def _iterate_function_lines(report: LintReport) -> Iterator[str]:
    """Yield a line for each function, if there are several."""
    names = list(report.plan.program.functions)
    for name in names if len(names) > 1 else ():
        rows = report.plan.of(name)
        on_ane = sum(row.backend == "ane" for row in rows)
        share = f" ({_format_percent(100 * on_ane / len(rows))})" if rows else ""
        yield f"  {name}: {format_count(len(rows), 'op')}, {on_ane} on the ANE{share}"
    for name, kind in report.left_out.items():
        yield f"  {name}: {add_article(kind)}, not linted"


def _iterate_after_lines(report: LintReport) -> Iterator[str]:
    if report.after is not None:
        yield f"after: {format_headline(report.after)}"
        yield from (f"after: {line}" for line in _iterate_latency_lines(report.after))
        before, after = (sum(item.severity.fails for item in each.findings) for each in (report, report.after))
        yield f"findings that fail a gate: {before} before, {after} after"


def _iterate_baseline_lines(report: LintReport, shown: int | None) -> Iterator[str]:
    if report.baseline is None:
        return
    same = len(report.findings) - len(report.baseline.new)
    yield (f"compared with {report.baseline.file}: {len(report.baseline.new)} new, {same} known, "
           f"{len(report.baseline.gone)} gone")
    if report.baseline.missing:
        yield "  the baseline has no report of this package, so all findings are new"
    elif report.baseline.target != report.target:
        yield f"  the baseline is for target {report.baseline.target}, this report for {report.target}"
    gone = [f"  gone: {code}  {function}:%{value} ({op})" for code, function, op, value in report.baseline.gone]
    yield from _limit_lines(gone, shown)


def _format_group(report: LintReport, group: FindingGroup, shown: int | None, evidence: bool) -> list[str]:
    rule = group.rule
    brief = not group.severity.fails and shown is not None  # findings that fail nothing are printed in short form
    lines = [f"{rule.code} {rule.slug}  {_describe_group_size(group)}", *([] if brief else [f"  {rule.summary()}"])]
    lines += _format_matches(report, group.findings, shown)
    messages = list(dict.fromkeys(item.message for item in group.findings if item.message))
    lines += [f"  Core ML says: {message}" for message in messages[:2]]
    lines += [f"  {line}" for line in _iterate_fix_lines(report, group.findings)]
    reasons = dict.fromkeys(item.not_fixed_because for item in group.findings if item.not_fixed_because)
    lines += _limit_lines([f"  not fixed by {reason}" for reason in reasons], shown)
    return (
        lines
        if brief or not evidence
        else [*lines, f"  confidence {rule.confidence}; {_select_evidence(rule, report.plan.generations)}"]
    )


def _select_evidence(rule: type[Rule], generations: Sequence[Generation]) -> Evidence:
    """Return the first source that names one of the target's chips; if none does, the first."""
    chips = {chip for generation in generations for chip in generation.chips}
    return next((source for source in rule.evidence if chips & set(re.findall(r"\w+", (source.chip or "").lower()))),
                rule.evidence[0])


def _describe_group_size(group: FindingGroup) -> str:
    places = format_count(len(group.findings), "match", "matches")
    label = group.severity.label
    if group.rule.unmeasured:
        return f"{label}: {format_count(group.ops, 'unmeasured op')}"
    if not group.rule.refuses:
        return f"{label}: {places}"
    unsure = sum(not item.sure for item in group.findings)
    ops = format_count(group.ops, "op") if unsure in (0, len(group.findings)) else f"{unsure} of {places}"
    if group.severity is Severity.UNSUPPORTED:
        words = [f"possibly {label}: {ops}" if unsure else f"{label}: {ops}"]
    else:
        words = [f"{label}: {ops} {'possibly ' * bool(unsure)}unsupported"]
    if group.stranded:
        words.append(
            f"{format_count(group.stranded, 'supported op')} stranded with {'it' if group.ops == 1 else 'them'}"
        )
    words.append(f"{format_duration(group.cpu_ms)} on the CPU")
    return ", ".join(words)


def _format_matches(report: LintReport, findings: Sequence[Finding], shown: int | None) -> list[str]:
    """Format one line for each match; matches for the same reason share one."""
    reasons: dict[str, list[Finding]] = defaultdict(list)
    for item in findings:
        reasons[item.reason].append(item)
    lines = []
    for reason, members in reasons.items():
        if len(members) > 1:
            names = [format_location(report, item) for item in members]
            most = None if shown is None else _MAX_LISTED_PER_REASON
            lines.append(f"  {reason}: {', '.join(names[:most])}" + _format_remainder(len(names), most))
        else:
            lines += [f"  {format_location(report, item)}: {reason}" for item in members]
    return _limit_lines(lines, shown)


def format_location(report: LintReport, item: Finding) -> str:
    """Format the location of a finding: the value, its op, and the module it came from if that is known."""
    function = f"{item.function}:" if len(report.plan.program.functions) > 1 and item.function else ""
    origin = f", from {item.origin}" if item.origin else ""
    more = f", {len(item.covers)} ops" if len(item.covers) > 1 else ""
    return f"{function}%{item.value} ({item.op}{more}{origin})"


def _limit_lines(lines: list[str], shown: int | None) -> list[str]:
    return lines if shown is None or len(lines) <= shown else \
        [*lines[:shown], f"  ... and {len(lines) - shown} more (--all shows them)"]


def _format_remainder(count: int, shown: int | None) -> str:
    return "" if shown is None or count <= shown else f" and {count - shown} more"


def _iterate_fix_lines(report: LintReport, findings: Sequence[Finding]) -> Iterator[str]:
    """Yield the fixes for these findings of one rule: the passes, then advice to the user."""
    fixes = [item.fix for item in {(item.fixed_by, bool(item.not_fixed_because)): item for item in findings}.values()]
    words: dict[str, None] = {}
    for fix in fixes:
        if fix is not None and fix["pass"]:
            how = describe_pass(fix["exactness"], fix["preset"])
            words[f"{format_rewrite_command(report, [fix['pass']])} ({how})"] = None
    cuts = (format_split_command(report, item) for item in findings if item.split_at)
    words |= dict.fromkeys(cut for cut in cuts if cut is not None)
    words |= dict.fromkeys(fix["advice"] for fix in fixes if fix is not None and fix["advice"])
    yield from (f"{'or' if number else 'fix'}: {each}" for number, each in enumerate(words))


def _format_suggestion(group: FindingGroup) -> str:
    rule = group.rule
    how = f" ({describe_pass(rule.exactness.value, rule.preset)})" if issubclass(rule, Rewrite) else ""
    matches = format_count(len(group.findings), "match", "matches")
    return (f"  {rule.code} {rule.slug}  {matches}: --passes {rule.name}{how}; "
            f"{rule.summary()}")


def _format_near_misses(report: LintReport, shown: int | None) -> list[str]:
    kinds: dict[tuple[str, str], list[str]] = defaultdict(list)
    for item in report.near_misses:
        kinds[f"{item.rule.code} {item.rule.slug}", item.reason].append(format_location(report, item))
    some = None if shown is None else _MAX_NEAR_MISSES_LISTED
    return _limit_lines([f"  {rule}  {reason}: {', '.join(names[:some])}{_format_remainder(len(names), some)}"
                         for (rule, reason), names in kinds.items()], shown)


def _format_storage(report: LintReport, storage: Storage, shown: int | None) -> list[str]:
    """Format the weights by format, the largest, duplicates and the memory of values, of both models if there are two.
    """
    after = None if report.after is None else report.after.storage
    sides = [storage] if after is None else [storage, after]

    lines = ["weights: " + join_sides(f"{format_bytes(each.stored)} stored, {format_bytes(each.dense)} unpacked"
                                      for each in sides)]
    totals = [{total.format: total for total in each.formats} for each in sides]
    rows = []
    for name in dict.fromkeys(name for side in totals for name in side):
        found = [side.get(name, FormatTotal(name, 0, 0, 0)) for side in totals]
        rows.append((f"  {name}", join_sides(each.count for each in found),
                     join_sides(format_bytes(each.stored) for each in found),
                     join_sides(format_bytes(each.dense) for each in found)))
    if rows:
        lines += format_table(("  format", "weights", "stored", "unpacked"), (str.ljust,) + (str.rjust,) * 3, rows)
    for each, what in zip(sides, ("largest weights:", "largest weights after:")):
        if each is storage or _list_largest_formats(each, shown) != _list_largest_formats(storage, shown):
            lines += [what, *_list_largest(each, shown)] if each.weights else []
    if storage.duplicates is not None:
        lines.append("duplicate weights: " + join_sides(map(describe_duplicates, sides)))
    is_large = sides[-1].saved_by_dedup > _MIN_SHARE_SAVED * sides[-1].stored
    fix = format_dedup_command(report.after or report) if is_large else None
    lines += [] if fix is None else [f"  fix: {fix}"]
    return [*lines, "memory of values, by the layout on the ANE, live at once in program order: at most "
            + join_sides(format_bytes(each.peak_bytes) for each in (report, report.after) if each is not None)]


def _list_largest_formats(storage: Storage, shown: int | None) -> list[tuple[str, int]]:
    """List format and size of the largest weights."""
    return [(each.format, each.stored) for each in storage.weights[:shown]]


def _list_largest(storage: Storage, shown: int | None) -> list[str]:
    listed = storage.weights[:shown]
    rows = [(f"  %{each.value}", f"[{', '.join(map(str, each.shape))}]", each.format, format_bytes(each.stored),
             each.reader) for each in listed]
    lines = format_table(("  weight", "shape", "format", "stored", "read by"),
                         (str.ljust, str.ljust, str.ljust, str.rjust, str.ljust), rows) if rows else []
    return lines + [f"  and {len(storage.weights) - len(listed)} smaller ones"] * (len(listed) < len(storage.weights))


def describe_duplicates(storage: Storage) -> str:
    """Describe the values that are stored several times, and the bytes that this takes."""
    if not storage.duplicates:
        return "none"
    copies = sum(each.copies for each in storage.duplicates)
    return (f"{format_count(len(storage.duplicates), 'value')} stored {copies} times, "
            f"{format_bytes(storage.saved_by_dedup)} too many")


def _format_sizes(sizes: SizeAdvice, shown: int | None) -> list[str]:
    """Format what compressed weights would bring, and which formats were measured to go wrong."""
    packed = sizes.weight_bytes - sizes.dense_bytes
    if not sizes.weight_bytes:
        lines = ["weights of ops on the ANE: none"]
    elif not sizes.formats:
        lines = [f"weights of ops on the ANE: {format_bytes(packed)}, all compressed"]
    else:
        lines = [f"weights of ops on the ANE: {format_bytes(sizes.weight_bytes)}, {format_bytes(packed)} of it "
                 "compressed; latency model, for ops that stay on the ANE, if the others are compressed:"]
    head = ("  format", "weights", "latency", "change")
    rows = [(f"  {each.format.name}", format_bytes(each.weight_bytes), format_duration(each.latency.latency_us / 1e3)
             + f" ({format_latency_range(each.latency.latency_low_us, each.latency.latency_high_us)})",
             f"{each.change:+.1%}") for each in sizes.formats]
    lines += format_table(head, (str.ljust, str.rjust, str.ljust, str.rjust), rows) if rows else []
    for advice in sizes.formats:
        lines.append(f"  {advice.format.name}: {advice.format.words}")
        lines += [f"    {evidence}" for evidence in advice.format.evidence]
    lines.append("formats with measured failures:")
    for fault in sizes.faults:
        names = ", ".join(f"%{name}" for name in fault.found[:_MAX_LISTED_PER_REASON if shown else None])
        more = _format_remainder(len(fault.found), _MAX_LISTED_PER_REASON if shown else None)
        lines.append(f"  {fault.words}: " + (f"{format_count(len(fault.found), 'weight')} here ({names}{more})"
                                             if fault.found else "none here"))
        lines += [f"    {evidence}" for evidence in fault.evidence]
    return lines


def _describe_basis(report: LintReport) -> str:
    guesses = sum(row.cost.guess for row in report.plan.rows)
    said = (
        f"; {guesses} of {format_count(len(report.plan.rows), 'estimate')} are extrapolated (no measured row)"
        if guesses
        else ""
    )
    return ("predicted, nothing was run: support by published measurements and reports; the estimate of Core ML's "
            f"segmenter (on an M4) decides placement and is not a latency{said}; latency by a model of the ANE")
