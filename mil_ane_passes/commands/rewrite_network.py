"""Rewrite of a NeuralNetwork within its format, `rewrite IN.mlmodel -o OUT.mlmodel`: plan, apply, verify, write."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .._version import make_json_header
from ..equivalence.comparison import Strictness
from ..equivalence.equivalence import VerifyReport, compare_programs
from ..equivalence.user_inputs import UserInputs
from ..neuralnetwork.layer_rewriting import (
    LayerRewrite,
    RewrittenLayer,
    RewrittenNetwork,
    explain_missing_rewrite,
    rewrite_network,
    select_layer_rewrites,
)
from ..neuralnetwork.layer_rules import find_layer_hits
from ..neuralnetwork.network_view import list_views
from ..neuralnetwork.program import choose_newest_opset, convert_network, list_stages
from ..neuralnetwork.upgrade import read_network
from ..package.destination import check_file_destination
from ..package.output_file import write_atomically
from ..passes.contract import Exactness
from ..passes.coremltools_setup import silence_coremltools
from ..utils.budget import share_budget
from ..utils.errors import InputError, LimitReached, NotSupported
from ..utils.option_spelling import format_no_verify_option, format_option
from ..utils.text_format import format_count, format_lines, format_short_repr
from .rewrite import RewriteOptions, RewriteReport

__all__ = ["NetworkRewriteReport", "rewrite_in_format"]

_MAX_MATCHES_LISTED = 3
"The most layers that the text lists per pass; the JSON has all."
_CHECK_PRECISIONS = ("float64", "float32")
"float64 checks the algebra, float32 the rounding: the programs that are compared are upgraded at fp32."


@dataclass(frozen=True)
class LeftOutRewrite:
    """A rewrite of layers that breaks the equivalence check, and how."""

    rule: str
    reason: str

    def to_dict(self) -> dict[str, str]:
        return {"pass": self.rule, "reason": self.reason}


@dataclass(repr=False)
class NetworkRewriteReport(RewriteReport):
    """The outcome of one rewrite within the older format.

    `status`: "written", "unchanged" (no rewrite fired; the file was copied as it is), "not verified" (nothing was
    written) or "dry run". `traces` and `left_out_passes` are about rewrites of layers, `package` is the rewritten Model
    proto; what a `RewriteReport` has about ops is empty. `off_ane_*` count the layers that are reported to run
    elsewhere than on the ANE, `bytes_*` the size of the model file.
    """

    traces: list[Any] = field(default_factory=list)
    left_out_passes: list[Any] = field(default_factory=list)
    layers_before: int = 0
    layers_after: int = 0
    off_ane_before: int = 0
    off_ane_after: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    remaining: list[RewrittenLayer] = field(default_factory=list)
    "The layers that are still reported off the ANE and are not near misses of a rewrite, with the reasons."

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON that `--format json` prints."""
        return {
            **make_json_header("rewrite"),
            "format": "neuralNetwork", "source": self.source, "output": self.output, "status": self.status,
            "preset": self.preset, "target": self.target, "passes": self.passes, "changed": self.changed,
            "verified": self.verified, "traces": [trace.to_dict() for trace in self.traces],
            "verify": self.verify.to_dict() if self.verify else None,
            "layers": {"before": self.layers_before, "after": self.layers_after},
            "off_ane": {"before": self.off_ane_before, "after": self.off_ane_after},
            "bytes": {"before": self.bytes_before, "after": self.bytes_after},
            "remaining": [each.to_dict() for each in self.remaining],
            "left_out_passes": [each.to_dict() for each in self.left_out_passes],
            "seconds": round(self.seconds, 6),
        }

    def _list_outcomes(self) -> list[tuple[object, ...]]:
        fired = [(trace.rule, trace.fired[0].code, len(trace.fired), trace.exactness.value if trace.exactness else "",
                  "rewritten") for trace in self.traces if trace.fired]
        return [*fired, *((each.rule, "", "", "", f"left out because it breaks the equivalence check: {each.reason}")
                          for each in self.left_out_passes)]

    def __repr__(self) -> str:
        return format_short_repr(self, source=self.source, status=self.status, output=self.output,
                                 verified=self.verified, layers_before=self.layers_before,
                                 layers_after=self.layers_after)

    def __str__(self) -> str:
        lines = [f"layers reported off the ANE: {self.off_ane_before} -> {self.off_ane_after}"]
        for trace in self.traces:
            if trace.fired:
                exactness = trace.exactness.value if trace.exactness else ""
                lines.append(f"{trace.rule}  {format_count(len(trace.fired), 'layer')}, {exactness}")
                lines += _limit_lines([f"  {each.code}  '{each.layer}' ({each.kind}): {each.note}"
                                       for each in trace.fired])
        lines += [f"{each.rule}  left out because it breaks the equivalence check: {each.reason}"
                  for each in self.left_out_passes]
        near = [f"  {each.code}  '{each.layer}' ({each.kind}): {each.note}"
                for each in (*(miss for trace in self.traces for miss in trace.near_misses), *self.remaining)]
        if near:
            lines += ["not rewritten (near misses):", *near]
        if self.changed:
            lines.append(f"layers: {self.layers_before} -> {self.layers_after}, "
                         f"bytes: {self.bytes_before} -> {self.bytes_after}")
        if self.verify is not None:
            lines += str(self.verify).split("\n")
        return format_lines([*lines, *self._format_outcome()])

    def _format_outcome(self) -> list[str]:
        where = f" to {self.output}" if self.output else ""
        if self.status == "dry run":
            return ["dry run: nothing verified, nothing written"]
        if self.status == "not verified":
            return [f"nothing written; {format_no_verify_option()} writes without an equivalence check"]
        if self.status == "unchanged":
            return [f"nothing to do: no rewrite matched; the file was copied unchanged{where}"]
        unverified = "" if self.verified else f", not verified ({format_no_verify_option()})"
        return [f"{self.status}{where}{unverified} in {self.seconds:.1f} s"]


def rewrite_in_format(options: RewriteOptions) -> NetworkRewriteReport:
    """Rewrite the layers of the NeuralNetwork `src` and write the result to `dst`, an .mlmodel.

    Weights, interface, metadata, specification version and layers that no rewrite touches stay as they are. The result
    is verified by upgrading both models and comparing their programs. Raises InputError for a source that is not a
    network, for options that are for packages, and for a destination that cannot be written.
    """
    started = time.perf_counter()
    _check_options(options)
    chosen = select_layer_rewrites(options.preset, options.passes)
    path = Path(os.fspath(options.dst))
    if not options.dry_run:
        check_file_destination(options.src, path, options.overwrite, "an .mlmodel file")
    try:
        spec, where = read_network(options.src)
    except InputError as error:
        raise InputError(f"{error}; '{path}' is for NeuralNetworks only; for other models, expected an output that "
                         f"ends in .mlpackage") from error
    report = NetworkRewriteReport(where, None if options.dry_run else str(path), options.preset, options.target,
                                  [each.name for each in chosen])
    with share_budget(options.max_steps, options.max_seconds, options.progress, options.max_memory):
        options.progress("rewriting")
        found = rewrite_network(spec, chosen, where)
        if found.changed and options.verify and not options.dry_run:
            found = _verify_and_leave_out(options, spec, found, chosen, report)
    _fill_report(report, spec, found, where)
    if options.dry_run:
        report.status = "dry run"
    elif found.changed and options.verify and not report.verified:
        report.status = "not verified"
    else:
        _write_result(options.src, found, path, options.overwrite)
        report.status = "written" if found.changed else "unchanged"
    report.seconds = time.perf_counter() - started
    return report


def _check_options(options: RewriteOptions) -> None:
    """Raise InputError for options that are for packages."""
    for name, value in (("diff", options.diff), ("link", options.link), ("options", options.options)):
        if value:
            raise InputError(f"{format_option(name)}: applies to packages only; expected an output that ends in "
                             f".mlpackage (the model is then upgraded)")


def _fill_report(report: NetworkRewriteReport, spec: Any, found: RewrittenNetwork, where: str) -> None:
    report.traces, report.package = found.traces, found.spec
    report.layers_before, report.layers_after = (
        sum(len(stage.network.layers) for stage in list_stages(each, where)) for each in (spec, found.spec))
    before = find_layer_hits(found.views)
    after = find_layer_hits(list_views(found.spec, where)) if found.changed else before
    report.off_ane_before, report.off_ane_after = (len({hit.layer for hit in hits}) for hits in (before, after))
    left_out = [each.rule for each in report.left_out_passes]
    near = {miss.layer for trace in found.traces for miss in trace.near_misses}
    report.remaining = [
        RewrittenLayer(hit.layer, hit.kind, explain_missing_rewrite(hit.rule.code, hit.kind, report.passes, left_out),
                       hit.rule.code)
        for hit in after if hit.layer not in near]
    report.bytes_before, report.bytes_after = spec.ByteSize(), found.spec.ByteSize()


def _verify_and_leave_out(
    options: RewriteOptions, spec: Any, found: RewrittenNetwork, chosen: Sequence[LayerRewrite],
    report: NetworkRewriteReport,
) -> RewrittenNetwork:
    """Verify the rewritten network; where that fails, leave out the passes of a preset with which it does."""
    report.verify = _verify_network(options, spec, found)
    if report.verify.status != "different" or options.passes is not None:
        return found
    kept: list[LayerRewrite] = []
    fired = {trace.rule for trace in found.traces if trace.fired}
    for each in chosen:
        trial = rewrite_network(spec, [*kept, each], report.source)
        checked = _verify_network(options, spec, trial) if each.name in fired else None
        if checked is None or checked.equal:
            kept.append(each)
        else:
            report.left_out_passes.append(LeftOutRewrite(each.name, _describe_failure(checked)))
    found = rewrite_network(spec, kept, report.source)
    report.verify = _verify_network(options, spec, found) if found.changed else None
    return found


def _describe_failure(checked: VerifyReport) -> str:
    case = next((case for case in checked.cases if case.failed), None)
    if case is None:
        return checked.reason or str(checked).partition("\n")[0]
    return f"{case.feeds}, {case.precision}: {case.failed[0]}"


def _verify_network(options: RewriteOptions, spec: Any, found: RewrittenNetwork) -> VerifyReport:
    """Convert both networks at fp32 and compare the programs, within what the rewrites that fired promise.

    The programs are those of the upgrade before any pass of coremltools, which may turn both into the same ops.
    """
    traces = [trace for trace in found.traces if trace.exactness is not None]
    exact = all(trace.exactness is Exactness.BITWISE for trace in traces)
    promised = Strictness(Exactness.BITWISE if exact else Exactness.ROUNDING, moves=sum(each.moves for each in traces))
    with silence_coremltools():
        opset = choose_newest_opset(spec)
        before = convert_network(spec, opset, "the network").program
        try:
            after = convert_network(found.spec, opset, "the rewritten network").program
        except InputError as error:
            return VerifyReport("different", promised.exactness, reason=str(error))

    def get_description(function: str) -> Any:
        return spec.description

    inputs = UserInputs.of(options.feeds, options.ranges)
    try:
        return compare_programs(
            before, after, seeds=options.seeds, precisions=_CHECK_PRECISIONS, exactness=promised,
            describe=get_description, progress=options.progress, further=inputs.plans(before, get_description),
            ranges=inputs.ranges)
    except (NotSupported, LimitReached) as lacking:
        return VerifyReport("not verified", promised.exactness, reason=str(lacking))


def _write_result(source: Any, found: RewrittenNetwork, path: Path, overwrite: bool) -> None:
    """Write the model atomically; an unchanged file is copied byte for byte."""
    raw = found.spec.SerializeToString()
    if not found.changed and isinstance(source, (str, os.PathLike)) and Path(source).is_file():
        raw = Path(source).read_bytes()
    write_atomically(path, lambda file: file.write(raw), overwrite)


def _limit_lines(lines: list[str]) -> list[str]:
    if len(lines) <= _MAX_MATCHES_LISTED:
        return lines
    return [*lines[:_MAX_MATCHES_LISTED], f"  and {len(lines) - _MAX_MATCHES_LISTED} more"]
