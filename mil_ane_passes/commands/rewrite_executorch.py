"""Rewrite of the Core ML delegates of an ExecuTorch program, `rewrite IN.pte -o OUT.pte`: each model as `rewrite` does
it; everything else stays unchanged."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .._version import make_json_header
from ..neuralnetwork.loading import load_delegate
from ..package import save
from ..package.destination import check_file_destination
from ..package.executorch_blob import Data, flatten_folder, replace_model
from ..package.executorch_program import Blob, ExecutorchProgram, find_address
from ..package.file_replacement import replace_file
from ..utils.errors import InputError
from ..utils.option_spelling import format_option
from ..utils.text_format import format_lines, format_short_repr
from .rewrite import RewriteOptions, RewriteReport, rewrite_model

__all__ = ["ExecutorchRewriteReport", "rewrite_delegates"]

_OUTCOMES = {"in memory": "rewritten", "unchanged": "unchanged"}
"Text for the statuses of delegates."


@dataclass(repr=False)
class ExecutorchRewriteReport(RewriteReport):
    """The outcome of one rewrite of an ExecuTorch program.

    `delegates` has the report of each rewritten Core ML delegate, by its name; `traces` are those of all, numbers of
    ops and sizes of weights are sums. `others` are the backends of the other delegates, which stay byte for byte.
    `status`: "written", "unchanged" (no rule fired; the file was copied as it is), "not verified" (one of the models is
    not; nothing was written), "dry run" or "in memory".
    """

    _kind = "file"
    delegates: dict[str, RewriteReport] = field(default_factory=dict)
    others: Mapping[str, str] = field(default_factory=dict)

    @property
    def verified(self) -> bool:
        return all(each.verified for each in self.delegates.values())

    @property
    def is_all_on_ane(self) -> bool:
        return all(each.is_all_on_ane for each in self.delegates.values())

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON that `--format json` prints."""
        return {
            **make_json_header("rewrite"), "format": "executorch",
            "source": self.source, "output": self.output, "status": self.status, "preset": self.preset,
            "target": self.target, "passes": self.passes, "changed": self.changed, "verified": self.verified,
            "delegates": {name: each.to_dict() for name, each in self.delegates.items()}, "others": dict(self.others),
            "seconds": round(self.seconds, 6),
        }

    def __repr__(self) -> str:
        return format_short_repr(self, source=self.source, status=self.status, output=self.output,
                                 verified=self.verified, delegates=list(self.delegates))

    def __str__(self) -> str:
        lines = []
        for name, each in self.delegates.items():
            changes = each._format_changes()
            lines += [f"{name}: {_OUTCOMES.get(each.status, each.status)}", *changes]
            lines += [each._explain_refusal()] if each.status == "not verified" else []
        lines += [f"{name}: of {backend}, unchanged" for name, backend in self.others.items()]
        return format_lines([*lines, *self._format_outcome()])

    def _explain_refusal(self) -> str:
        names = ", ".join(name for name, each in self.delegates.items() if each.status == "not verified")
        return f"nothing written: not verified equivalent: {names}"


def rewrite_delegates(options: RewriteOptions) -> ExecutorchRewriteReport:
    """Rewrite the Core ML delegates of `src`, all or the one that it names, and write the program to `dst`.

    Raises InputError for a source that is not a program or has no such delegate, for options that apply to packages
    only, and for a destination that cannot be written.
    """
    started = time.perf_counter()
    address = find_address(options.src)
    if address is None:
        raise InputError(f"{options.src}: is not an ExecuTorch program, but '{options.dst}' is; expected an existing "
                         f"IN.pte, or an OUT.mlpackage")
    if options.link:
        raise InputError(f"{format_option('link')}: applies to packages only; expected an output that ends in "
                         ".mlpackage")
    if options.dst is not None and os.fspath(options.dst).endswith(os.sep):
        raise InputError(f"{options.dst}: names a folder; expected the path of a .pte file")
    path = None if options.dst is None else Path(options.dst)
    if path is not None and not options.dry_run:
        check_file_destination(address[0], path, options.overwrite, "a .pte file")
    program = ExecutorchProgram(address[0])
    blobs = program.select_blobs(address[1])
    if len(blobs) > 1 and (options.feeds or options.ranges):
        raise InputError(f"{program.path}: {format_option('feeds')} and {format_option('ranges')} apply to the inputs "
                         f"of one model, but the program has {len(blobs)}; choose one: {program.path}/{blobs[0].name}")
    report = ExecutorchRewriteReport(str(program.path), None if path is None or options.dry_run else str(path),
                                     options.preset, options.target, [], others=program.others)
    for blob in blobs:
        options.progress(f"rewriting {blob.name}")
        package = load_delegate(program, blob, f"{program.path}/{blob.name}", address[1])
        report.delegates[blob.name] = rewrite_model(replace(options, src=package, dst=None, ahead=None))
    _fill_report(report)
    if path is not None and not options.dry_run and report.status != "not verified":
        _write_program(program, report, path, options.overwrite)
    report.seconds = time.perf_counter() - started
    return report


def _fill_report(report: ExecutorchRewriteReport) -> None:
    """Fill in the totals over all delegates."""
    made = list(report.delegates.values())
    statuses = {each.status for each in made}
    report.status = next((status for status in ("not verified", "dry run", "in memory") if status in statuses),
                         "unchanged")
    report.passes = list(dict.fromkeys(name for each in made for name in each.passes))
    report.traces = [trace for each in made for trace in each.traces]
    report.wrong_numbers = [found for each in made for found in each.wrong_numbers]
    report.left_out_passes = [faulty for each in made for faulty in each.left_out_passes]
    report.ops_before, report.ops_after = sum(each.ops_before for each in made), sum(each.ops_after for each in made)
    report.package = made[0].package if len(made) == 1 else None


def _write_program(
    program: ExecutorchProgram, report: ExecutorchRewriteReport, path: Path, overwrite: bool
) -> None:
    """Write the program with the rewritten models, atomically; if none changed, copy the file."""
    with tempfile.TemporaryDirectory(prefix="mil_ane_passes_") as folder:
        new: dict[str, list[Data]] = {}
        for place, (name, made) in enumerate(report.delegates.items()):
            if made.changed:
                package = Path(folder) / f"{place}.mlpackage"
                save(made.package, package)
                made.weight_bytes_after = sum(file.stat().st_size for file in package.rglob("*.bin"))
                new[name] = _flatten_blob(program.blobs[name], package)
        replace_file(path, lambda file: program.write(new, file), overwrite)
    report.status = "written" if new else "unchanged"


def _flatten_blob(blob: Blob, package: Path) -> list[Data]:
    return list(flatten_folder(blob.root, replace_model(blob.folder, package)))
