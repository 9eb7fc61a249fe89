"""Packages of an adapted model: writing, rewriting, figures and descriptions."""

from __future__ import annotations

import math
import re
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import resources
from keyword import iskeyword
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..passes.layout import format_bytes

if TYPE_CHECKING:
    from coremltools.converters.mil.mil import Function

    from ..equivalence.changed_interfaces import Adjust
    from ..equivalence.equivalence import VerifyReport
    from ..transforms.contract import Draft
    from .adapt import AdaptOptions, AdaptReport

__all__ = [
    "choose_identifier",
    "compare_drafts",
    "count_call_bytes",
    "count_weight_bytes",
    "describe_var",
    "emit_drafts",
    "fill_page",
    "format_figures",
    "join_figures",
    "measure_package",
    "read_report_file",
    "rewrite_package",
    "share_weights",
]


def emit_drafts(drafts: Sequence[Draft], folder: Path) -> list[Path]:
    """Write the packages of drafts into `folder`; return their paths."""
    from ..package.debug_handles import format_debug_handles
    from ..package.package_writer import PackageOutput, write_models

    outputs, paths = [], []
    for draft in drafts:
        assert draft.package is not None
        model, plan = draft.emit()
        path = folder / f"transformed_{draft.part}.mlpackage"
        paths.append(path)
        extra = format_debug_handles(draft.package.path, draft.program)
        outputs.append(PackageOutput(draft.package.layout, draft.package.files, model, path, plan, extra,
                                     draft.program))
    write_models(outputs, overwrite=True, link=False, ahead=None)
    return paths


def rewrite_package(options: AdaptOptions, source: Path, target: Path, report: AdaptReport) -> None:
    """Rewrite the main package with the preset full; if the result is not verified, keep the package unrewritten."""
    from .rewrite import rewrite

    options.progress(f"rewriting {target.name}")
    found = rewrite(source, target, preset="full", target=options.target, verify=options.verify)
    if not target.exists():
        report.done.append(f"{target.name} is not rewritten: {found.status}")
        source.rename(target)
    else:
        shutil.rmtree(source)


def share_weights(package: Path) -> None:
    """Store weights that several functions of a package have only once."""
    from ..transforms.dedup_weights import DedupWeights
    from ..transforms.sources import open_draft

    draft, = DedupWeights().apply(open_draft(package))
    if draft.redirected:
        made, = emit_drafts([draft], package.parent)
        shutil.rmtree(package)
        made.rename(package)


def measure_package(package: Path, target: str, function: str | None = None) -> dict[str, Any]:
    """Return the figures of a package, or of one function, on the target."""
    from ..ane.wrong_numbers import find_wrong_numbers
    from ..package import load
    from .lint import lint

    source: Any = package
    if function is not None:
        source = load(package).program
        source.functions = {function: source.functions[function]}
    found = lint(source, target=target, select=[])  # placement only: trying the fixes of findings would double the time
    figures = found.summary()
    left = [row for row in found.plan.rows if row.ane == "no"]
    program = found.plan.program
    default = program.functions.get(function or program.default_function_name)
    unsupported = Counter(row.op.op_type for row in left)
    wrong = find_wrong_numbers(program, target)
    return {"ops": figures["ops"], "unsupported": dict(sorted(unsupported.items())),
            "reasons": {row.op.op_type: row.reason for row in reversed(left)},
            "wrong_numbers": [{"code": each.code, "slug": each.slug, "op": each.op, "value": each.value,
                               "reason": each.reason} for each in wrong],
            "unknown": figures.get("ane_unknown", 0), "share": figures["predicted_share"],
            "time_share": figures["predicted_time_share"], "transitions": figures["transitions"],
            "estimated_ms": figures.get("est_ms"), "weight_bytes": count_weight_bytes(package),
            "call_bytes": None if default is None else count_call_bytes(default), "target": target}


def count_call_bytes(function: Function, flexible: Mapping[str, Sequence[int]] | None = None) -> int | None:
    """Count the bytes of inputs and outputs of a call, without states; None if one of them has a flexible shape.

    `flexible` has the shapes of inputs and outputs of flexible shape.
    """
    from coremltools.converters.mil.mil import types

    from ..ir.shape_inference import get_sizes

    total = 0
    for name, var in (*function.inputs.items(), *((var.name, var) for var in function.outputs)):
        if types.is_state(var.sym_type) or not types.is_tensor(var.sym_type):
            continue
        sizes = (flexible or {}).get(name) or get_sizes(var.sym_type)
        if sizes is None or None in sizes:
            return None
        total += math.prod(int(size or 1) for size in sizes) * np.dtype(types.nptype_from_builtin(var.dtype)).itemsize
    return total


def count_weight_bytes(folder: Path) -> int:
    """Count the bytes of weight files, and of tables stored as files, in a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.suffix in (".bin", ".npy"))


def join_figures(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the figures of packages that run one after the other."""
    if len(parts) == 1:
        return dict(parts[0])
    ops = sum(each["ops"] for each in parts)
    times = [each["estimated_ms"] or 0.0 for each in parts]
    unsupported: Counter[str] = sum((Counter(each["unsupported"]) for each in parts), Counter())
    return {"ops": ops, "unsupported": dict(sorted(unsupported.items())),
            "reasons": {kind: why for each in reversed(parts) for kind, why in each["reasons"].items()},
            "wrong_numbers": [found for each in parts for found in each["wrong_numbers"]],
            "unknown": sum(each["unknown"] for each in parts),
            "share": sum(each["share"] * each["ops"] for each in parts) / ops if ops else 0.0,
            "time_share": (sum(each["time_share"] * time for each, time in zip(parts, times, strict=True)) / sum(times)
                           if sum(times) else parts[0]["time_share"]),
            "transitions": sum(each["transitions"] for each in parts),
            "estimated_ms": None if any(each["estimated_ms"] is None for each in parts) else sum(times),
            "weight_bytes": sum(each["weight_bytes"] for each in parts),
            "call_bytes": None if any(each["call_bytes"] is None for each in parts) else sum(
                each["call_bytes"] for each in parts), "target": parts[0]["target"]}


def format_figures(figures: Mapping[str, Any]) -> str:
    if not figures:
        return "not measured"
    from ..ane.partitions import TOO_SMALL
    from ..ane.wrong_numbers import format_wrong_numbers

    count = sum(figures["unsupported"].values())
    wrong = format_wrong_numbers([each["code"] for each in figures["wrong_numbers"]])
    listed = ", ".join(f"{number} {kind}" for kind, number in figures["unsupported"].items())
    small = bool(figures["ops"]) and not (count or figures["unknown"] or figures["share"])
    milliseconds = "" if figures["estimated_ms"] is None else f", {figures['estimated_ms']:.3f} ms estimated"
    return (f"{figures['ops']} ops, {count} unsupported on {figures['target']}{f' ({listed})' if listed else ''}, "
            f"{f'{wrong}, ' * bool(wrong)}{figures['share']:.1f} % of ops and {figures['time_share']:.1f} % of "
            f"estimated time predicted on the ANE{f' ({TOO_SMALL})' * small}, {figures['transitions']} "
            f"transitions{milliseconds}, {format_bytes(figures['weight_bytes'])} of weights"
            + ("" if figures["call_bytes"] is None else f", {format_bytes(figures['call_bytes'])} in and out a call"))


def describe_var(var: Any) -> dict[str, Any]:
    from coremltools.converters.mil.mil import types

    from ..ir.query import get_type_info

    info = get_type_info(var)
    return {"shape": list(info.shape or ()), "dtype": np.dtype(types.nptype_from_builtin(info.dtype)).name}


def compare_drafts(before: Any, drafts: Sequence[Draft], adjust: Adjust | None = None) -> VerifyReport:
    """Compare the results of transforms with the original program on random feeds, which `adjust` may replace."""
    from ..equivalence.changed_interfaces import compare_across_interfaces

    package = drafts[0].package
    return compare_across_interfaces(before, drafts, describe=(lambda name: None) if package is None
                                     else package.description, adjust=adjust)


def read_report_file(folder: str, name: str) -> str:
    """Return the text of a template or file of the `report` room."""
    home = resources.files(f"{__package__.rpartition('.')[0]}.report.{folder}")
    return home.joinpath(name).read_text(encoding="utf-8")


def fill_page(text: str, values: Mapping[str, object]) -> str:
    """Replace each `@NAME@` of a page in one pass: a value that contains such a word is not replaced again."""
    return re.sub(f"@({'|'.join(values)})@", lambda found: str(values[found[1]]), text)


def choose_identifier(name: str, number: int) -> str:
    """Return a variable name for an input: its own name if Python and Swift accept it."""
    return name if name.isascii() and name.isidentifier() and not iskeyword(name) else f"value{number}"
