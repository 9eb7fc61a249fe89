"""Adapt a decoder with a cache in states so that the ANE supports all of its ops, with a script that generates tokens.

The position becomes a value, the cache is written by a mask, lookups of token ids and positions run in a package of
their own. The folder has the packages, a manifest, generate.py, and a README with the loop in Swift.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .._version import __version__
from ..utils.errors import InputError
from ..utils.option_spelling import format_option, format_option_values
from ..utils.text_format import escape_text, format_lines
from .options import (
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

if TYPE_CHECKING:
    from coremltools.converters.mil.mil import Program

    from ..transforms.contract import Draft
    from ..transforms.decoder import DecoderStructure

__all__ = ["AdaptOptions", "AdaptReport", "adapt"]

HELP = "make a decoder with a cache run on the ANE, with a script that generates tokens"
EXAMPLE = "adapt decoder.mlpackage -o adapted --prefill 64"
_CACHE = "cache"
_PROMPT, _STEPS = 9, 16
"The lengths of the prompt and of what is generated, to compare with the source."
_LOGIT_BOUND = 1e-2
"""The most that logits may differ, relative to the largest of their step: the cache passes in fp16 between calls, and
rewrites of the preset full round otherwise."""


@dataclass(frozen=True)
class AdaptOptions:
    """The options of `adapt`."""

    src: Any = field(metadata=argument("IN"))
    "the .mlpackage of the decoder; never changed"
    dst: str | os.PathLike[str] | None = field(default=None, metadata=flag("-o", "--output", metavar="OUT_DIR"))
    "the folder to write"
    _: KW_ONLY
    context: int | None = field(default=None, metadata=flag(type=positive_int, metavar="N"))
    "how many tokens there can be (default: the rows of the cache, the most that is possible)"
    prefill: int | None = field(default=None, metadata=flag(type=positive_int, metavar="N"))
    "write packages that take N tokens at a time as well, for the prompt"
    target: str = field(default="m4", metadata=flag())
    "the chip to rewrite for and to predict (default: m4)"
    cache: str = field(default="io", metadata=flag(choices=("io", "state")))
    "io (default): the cache goes in, its new rows come out, and the caller keeps it; state: one state"
    verify: bool = field(default=True, metadata=flag())
    "compare results, and generated tokens, with those of the source (default); if they differ, nothing is written"
    overwrite: bool = field(default=False, metadata=flag())
    "replace OUT_DIR if it exists"
    progress: Progress = ignore_progress


def add(parser: argparse.ArgumentParser) -> None:
    add_options(parser, AdaptOptions)
    add_format_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    keywords = read_options(arguments, AdaptOptions)
    arguments.proves = keywords.get("verify", True)
    with show_progress() as progress:
        report = adapt(**keywords, progress=progress)
    print_report(report, arguments.format)
    return 1 if report.status == "rejected" else 0


@dataclass
class AdaptReport:
    """The outcome of `adapt`.

    `status`: "written", or "rejected" (results differ from those of the source; nothing was written). `before` and
    `after` are figures of the source and of the package for one token: ops, those unsupported by type, shares on the
    ANE, estimated time, transitions. `done` are the changes, `tokens` what both generated, `logit_error` the largest
    difference of logits, relative to the largest of their step.
    """

    source: str
    output: str
    status: str = "written"
    before: dict[str, Any] = field(default_factory=dict)
    after: dict[str, Any] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logit_error: float | None = None
    reason: str = ""
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON that `--format json` prints."""
        return {"schema": 1, "tool": "mil-ane-passes", "version": __version__, "command": "adapt",
                "source": self.source, "output": self.output, "status": self.status, "before": self.before,
                "after": self.after, "done": self.done, "tokens": self.tokens, "logit_error": self.logit_error,
                "reason": self.reason, "seconds": round(self.seconds, 6)}

    def __str__(self) -> str:
        lines = [*self.done, f"before: {_format_figures(self.before)}", f"after: {_format_figures(self.after)}"]
        if self.logit_error is not None:
            lines.append(f"generated {len(self.tokens)} tokens as the source does; logits within "
                         f"{self.logit_error:.1e} of the largest ({_LOGIT_BOUND:g} allowed)")
        if self.status == "rejected":
            return format_lines([*lines, f"nothing written: {self.reason}"])
        script = f"{escape_text(self.output)}/generate.py --ids 1,2,3 --runtime reference"
        return format_lines([*lines, f"written to {escape_text(self.output)} in {self.seconds:.1f} s; next: python "
                                     f"{script}"])


@command(AdaptOptions)
def adapt(options: AdaptOptions) -> AdaptReport:
    """Adapt the decoder `src` to the ANE and write the folder `dst`: packages, manifest.json, generate.py, README.md.

    `src` is a path, an MLModel or a `Package` of an ML Program that reads token ids, a mask (1, 1, T, E) whose length E
    states the position, and a cache in states, which it writes there. These are found in the graph. `context` is the
    number of tokens, `prefill` how many tokens a second pair of packages takes at a time. The packages are rewritten
    with the preset full for `target`. Unless `verify` is false, all are compared with the source on random feeds over
    steps, and tokens are generated with both.

    Raises InputError for a model that is not such a decoder, with the op or input that it stopped at and what was
    expected instead; nothing is written then.
    """
    from ..ir.clone import clone_program
    from ..package.staging import Staging
    from ..transforms.decoder import recognize_decoder
    from ..transforms.sources import get_source_path, open_draft

    started = time.perf_counter()
    source = get_source_path(options.src)
    target = _check_target(options, source)
    draft = open_draft(options.src)
    structure = recognize_decoder(draft.program, str(source))
    counts = _check_sizes(options, structure)
    report = AdaptReport(str(source), str(target), before=_measure(source, options.target))
    before = clone_program(draft.program)
    with Staging(target) as staging:
        folder = staging.folder / "adapted"
        folder.mkdir()
        parts = []
        for count in counts:
            options.progress(f"adapting to {count} tokens a call")
            part = draft if count == counts[-1] else draft.copy()
            parts.append(_write_part(options, before, part, structure, count, folder, report))
            if report.status == "rejected":
                report.seconds = time.perf_counter() - started
                return report
        report.after = _measure(folder / parts[0]["main"], options.target)
        _write_files(folder, _make_manifest(structure, options, parts, report))
        if options.verify:
            options.progress("generating tokens")
            _compare_generations(before, structure, folder, report)
        if report.status == "written":
            _put_folder(folder, target)
    report.seconds = time.perf_counter() - started
    return report


def _check_target(options: AdaptOptions, source: Path) -> Path:
    """Return the folder to write. Raises InputError where it cannot be written."""
    if options.dst is None:
        raise InputError("no output; expected a folder to write")
    target = Path(os.path.abspath(options.dst))
    if target.suffix == ".mlpackage" or source.resolve() in (target.resolve(), *target.resolve().parents):
        raise InputError(f"output '{target}': expected a folder outside of the source package, which gets several "
                         "packages")
    if target.exists() and not (options.overwrite and (target / "manifest.json").is_file()):
        held = "without a manifest.json of an earlier run" if options.overwrite else "already"
        raise InputError(f"output '{target}' exists {held}; expected a free name"
                         + ("" if options.overwrite else f", or {format_option('overwrite')}"))
    if not target.parent.is_dir():
        raise InputError(f"no folder '{target.parent}'; expected one to write to")
    return target


def _check_sizes(options: AdaptOptions, structure: DecoderStructure) -> list[int]:
    """Return the numbers of tokens of a call, 1 first. Raises InputError for sizes that do not fit together."""
    context = options.context or structure.rows
    if context > structure.rows or context < 2:
        raise InputError(f"{format_option_values('context', context)}: the cache has {structure.rows} rows; expected 2 "
                         f"to {structure.rows}; convert the source model again for more")
    if structure.steps not in (None, 1):
        raise InputError(f"the token ids '{structure.ids}' are (1, {structure.steps}); expected a flexible number, or "
                         "one")
    if options.prefill is None or options.prefill == 1:
        return [1]
    if options.prefill >= context:
        raise InputError(f"{format_option_values('prefill', options.prefill)}: expected fewer tokens than the context, "
                         f"{context}")
    if structure.steps == 1:
        raise InputError(f"{format_option_values('prefill', options.prefill)}: the model takes one token a call; "
                         "convert it with a flexible number")
    if options.cache == "state":
        raise InputError(f"{format_option_values('prefill', options.prefill)}: two packages cannot share a state; "
                         f"expected {format_option_values('cache', 'io')}")
    return [1, options.prefill]


def _write_part(
    options: AdaptOptions, before: Program, draft: Draft, structure: DecoderStructure, count: int, folder: Path,
    report: AdaptReport,
) -> dict[str, Any]:
    """Transform, verify, rewrite and write the packages for `count` tokens a call; returns their manifest."""
    from ..equivalence.changed_interfaces import compare_across_interfaces

    drafts, position = _transform(options, draft, structure, count)
    prefix = "decode" if count == 1 else "prefill"
    if not report.done:
        report.done = list(dict.fromkeys(each.note for part in drafts for each in part.done if each.changed))
    if options.verify:
        options.progress(f"comparing {prefix}")
        package = draft.package
        found = compare_across_interfaces(before, drafts, describe=(lambda name: None) if package is None
                                          else package.description)
        if not found.equal:
            report.status, report.reason = "rejected", f"{prefix}: {found}"
            return {}
    made = _emit(drafts, folder)
    lookup, main = folder / f"{prefix}_lookup.mlpackage", folder / f"{prefix}.mlpackage"
    made[0].rename(lookup)
    _rewrite(options, made[1], main, report)
    function = drafts[1].program.functions[structure.function]
    crossing = [name for name in function.inputs if name in {var.name for var in drafts[0].program.functions[
        structure.function].outputs}]
    inputs = {name: _describe_var(function.inputs[name]) for name in function.inputs}
    return {"tokens": count, "lookup": lookup.name, "main": main.name, "position": position,
            "lookups": {name: inputs[name]["dtype"] for name in crossing},
            "mask": {**inputs[structure.mask], "visible": 0.0, "hidden": _get_hidden()},
            "cache": inputs[_CACHE], "outputs": {var.name: _describe_var(var) for var in function.outputs}}


def _get_hidden() -> float:
    from ..transforms.padding import MASKED

    return MASKED


def _describe_var(var: Any) -> dict[str, Any]:
    from coremltools.converters.mil.mil import types

    from ..ir.query import get_type_info

    info = get_type_info(var)
    return {"shape": list(info.shape or ()), "dtype": np.dtype(types.nptype_from_builtin(info.dtype)).name}


def _transform(
    options: AdaptOptions, draft: Draft, structure: DecoderStructure, count: int
) -> tuple[list[Draft], str]:
    """Apply the transforms for `count` tokens a call; returns the lookup and the rest, and the name of the position."""
    from coremltools.converters.mil.mil import types

    from ..transforms.contract import Transform, apply_transforms
    from ..transforms.fix_shape import FixShape
    from ..transforms.io import Io
    from ..transforms.merge_states import MergeStates
    from ..transforms.pad_shape import PadShape
    from ..transforms.split_inputs import SplitInputs
    from ..transforms.state_to_io import StateToIo

    context = options.context or structure.rows
    mask: tuple[Any, ...] = (1, 1, (count, count), (count, context))
    first: list[Transform] = [] if structure.steps is not None else [FixShape({structure.ids: (1, count)})]
    is_half = draft.program.functions[structure.function].inputs[structure.mask].dtype == types.fp16
    halved: list[Transform] = [] if is_half else [Io("fp16", [structure.mask])]
    draft, = apply_transforms(draft, [*first, PadShape({structure.mask: mask}), MergeStates(_CACHE), *halved])
    positions = [change.new for change in draft.interfaces[structure.function].changes
                 if change.kind == "input" and change.old is None and change.new is not None]
    if positions[:1] != ["position"]:
        raise InputError("no rows are written to the cache at a position that follows from the length of "
                         f"'{structure.mask}'; expected a slice_update from E - T to E")
    rest: list[Transform] = [StateToIo()] if options.cache == "io" else []
    drafts = apply_transforms(draft, [*rest, SplitInputs([structure.ids, positions[0]])])
    outputs = {var.name for var in drafts[1].program.functions[structure.function].outputs}
    if options.cache == "io" and f"{_CACHE}_rows" not in outputs:
        raise InputError("the cache is not written by rows at the position alone; expected that of all layers, or "
                         f"{format_option_values('cache', 'state')}")
    return drafts, positions[0]


def _emit(drafts: Sequence[Draft], folder: Path) -> list[Path]:
    """Write the packages of drafts below `folder`; returns their paths."""
    from ..package.package_writer import PackageOutput, write_models

    outputs, paths = [], []
    for draft in drafts:
        assert draft.package is not None
        model, plan = draft.emit()
        path = folder / f"transformed_{draft.part}.mlpackage"
        paths.append(path)
        outputs.append(PackageOutput(draft.package.layout, draft.package.files, model, path, plan))
    write_models(outputs, overwrite=True, link=False, ahead=None)
    return paths


def _rewrite(options: AdaptOptions, source: Path, target: Path, report: AdaptReport) -> None:
    """Rewrite the main package with the preset full; without a verified result it stays as the transforms made it."""
    from .rewrite import rewrite

    options.progress(f"rewriting {target.name}")
    found = rewrite(source, target, preset="full", target=options.target, verify=options.verify)
    if not target.exists():
        report.done.append(f"{target.name} is not rewritten: {found.status}")
        source.rename(target)
    else:
        shutil.rmtree(source)


def _measure(package: Path, target: str) -> dict[str, Any]:
    """Return the figures of a package on the target."""
    from .lint import lint

    found = lint(package, target=target)
    figures = found.summary()
    unsupported = Counter(row.op.op_type for row in found.plan.rows if row.ane == "no")
    return {"ops": figures["ops"], "unsupported": dict(sorted(unsupported.items())),
            "unknown": figures.get("ane_unknown", 0), "share": figures["predicted_share"],
            "time_share": figures["predicted_time_share"], "transitions": figures["transitions"],
            "estimated_ms": figures.get("est_ms"), "target": target}


def _format_figures(figures: Mapping[str, Any]) -> str:
    if not figures:
        return "not measured"
    count = sum(figures["unsupported"].values())
    listed = ", ".join(f"{number} {kind}" for kind, number in figures["unsupported"].items())
    milliseconds = "" if figures["estimated_ms"] is None else f", {figures['estimated_ms']:.3f} ms estimated"
    return (f"{figures['ops']} ops, {count} unsupported on {figures['target']}{f' ({listed})' if listed else ''}, "
            f"{figures['share']:.1f} % of ops and {figures['time_share']:.1f} % of estimated time "
            f"predicted on the ANE, {figures['transitions']} transitions{milliseconds}")


def _make_manifest(
    structure: DecoderStructure, options: AdaptOptions, parts: Sequence[Mapping[str, Any]], report: AdaptReport
) -> dict[str, Any]:
    cache: dict[str, Any] = {"form": options.cache, **parts[0]["cache"]}
    cache |= {"state": _CACHE} if options.cache == "state" else {"input": _CACHE, "output": f"{_CACHE}_rows", "axis": 2}
    return {
        "schema": 1, "kind": "decoder", "version": __version__, "context": options.context or structure.rows,
        "vocabulary": structure.vocabulary,
        "inputs": {"ids": structure.ids, "position": parts[0]["position"], "mask": structure.mask},
        "outputs": {"logits": structure.logits}, "cache": cache,
        "parts": [{key: value for key, value in part.items() if key not in ("position", "cache")} for part in parts],
        "predicted": {"before": report.before, "after": report.after},
    }


def _write_files(folder: Path, manifest: Mapping[str, Any]) -> None:
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    home = resources.files(f"{__package__.rpartition('.')[0]}.report.decoder")
    (folder / "generate.py").write_text(home.joinpath("generate.py").read_text(encoding="utf-8"), encoding="utf-8")
    (folder / "README.md").write_text(_format_readme(manifest), encoding="utf-8")


def _compare_generations(before: Program, structure: DecoderStructure, folder: Path, report: AdaptReport) -> None:
    """Generate tokens with the source and with the packages, and compare tokens and logits of each step."""
    from ..report.decoder.generate import Decoder
    from ..runtime import Runtime, predictor

    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    decoder = Decoder(folder, lambda path: predictor(path, precision="float32"))
    original = Runtime(before, function=structure.function, precision="float32")
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, structure.vocabulary, max(1, min(_PROMPT, manifest["context"] // 2))).tolist()
    ids, end, worst = prompt, 0, 0.0
    state: dict[str, Any] = {}
    for _ in range(min(_STEPS, manifest["context"] - len(prompt))):
        expected = np.zeros(0)
        for chunk in [ids] if structure.steps is None else [[each] for each in ids]:
            end += len(chunk)
            expected = _run_source(original, before, structure, chunk, end, state)
        found = decoder.feed(ids)
        scale = float(np.abs(expected).max()) or 1.0
        error = float(np.abs(expected - found).max()) / scale
        worst = max(worst, error)
        token = int(np.argmax(found))
        if not error <= _LOGIT_BOUND or expected[int(np.argmax(expected))] - expected[token] > 2 * error * scale:
            report.status = "rejected"
            report.reason = (f"after {end} tokens the logits differ by {error:.1e} of the largest; {_LOGIT_BOUND:g} is "
                             "allowed")
            return
        report.tokens.append(token)
        ids = [token]
    report.logit_error = worst


def _run_source(
    original: Any, before: Program, structure: DecoderStructure, ids: Sequence[int], end: int, state: dict[str, Any]
) -> Any:
    """Run the source on new tokens, the last of which is at `end`; returns the logits behind the last one."""
    from coremltools.converters.mil.mil import types

    function = before.functions[structure.function]
    rows = np.where(np.arange(end)[None] <= np.arange(end - len(ids), end)[:, None], 0.0, _get_hidden())
    mask = rows[None, None].astype(types.nptype_from_builtin(function.inputs[structure.mask].dtype))
    found = original({structure.ids: np.array([ids], np.int32), structure.mask: mask}, state)
    return np.asarray(found[structure.logits], np.float64).reshape(len(ids), -1)[-1]


def _put_folder(folder: Path, target: Path) -> None:
    """Put the complete folder in its place; what it replaces is removed once it is there."""
    from ..package.staging import REPLACED

    if target.exists():
        os.replace(target, folder.parent / REPLACED)
    os.replace(folder, target)


def _format_readme(manifest: Mapping[str, Any]) -> str:
    home = resources.files(f"{__package__.rpartition('.')[0]}.report.decoder")
    text = home.joinpath("README.txt").read_text(encoding="utf-8")
    cache = manifest["cache"]
    part = manifest["parts"][0]
    values = {
        "CONTEXT": manifest["context"], "CACHE_SHAPE": ", ".join(map(str, cache["shape"])),
        "IDS": manifest["inputs"]["ids"], "POSITION": manifest["inputs"]["position"],
        "MASK": manifest["inputs"]["mask"], "MASK_SHAPE": ", ".join(map(str, part["mask"]["shape"])),
        "HIDDEN": f"{part['mask']['hidden']:g}", "LOGITS": manifest["outputs"]["logits"],
        "LOOKUPS": ", ".join(part["lookups"]), "BEFORE": _format_figures(manifest["predicted"]["before"]),
        "AFTER": _format_figures(manifest["predicted"]["after"]),
    }
    shared, _, rest = text.partition("<!-- io -->\n")
    carried, _, rest = rest.partition("<!-- state -->\n")
    stateful, _, rest = rest.partition("<!-- end -->\n")
    text = shared + (carried if cache["form"] == "io" else stateful) + rest
    for name, value in values.items():
        text = text.replace(f"@{name}@", str(value))
    return text
