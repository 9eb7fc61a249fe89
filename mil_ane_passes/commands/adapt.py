"""Adapt a language model so that the ANE supports all of its ops.

Lookups of token ids and positions run in a package of their own, and flexible lengths are padded. In a decoder with a
cache in states, the position becomes an input and the cache is written by a mask. The folder contains the packages, a
manifest, and a README that describes the calls; for decoders also generate.py.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._version import make_json_header
from ..package.destination import find_enclosing_package, has_overlap
from ..package.manifest import check_model_path
from ..utils.errors import InputError
from ..utils.option_spelling import choose_spelling, describe_as_steps, format_option, format_option_values
from ..utils.text_format import escape_text, format_command_path, format_lines, quote_word
from .adapt_decoder import LOGIT_BOUND, check_sizes, write_decoder
from .adapt_encoder import RESULT_BOUND, write_encoder
from .adapt_parts import format_figures, measure_package
from .adapted_folder import KINDS, MANIFEST
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

__all__ = ["AdaptOptions", "AdaptReport", "adapt"]

HELP = "make a language model run on the ANE: encoders, and decoders with a script that generates tokens"
EXAMPLE = "adapt decoder.mlpackage -o adapted --prefill 64"

_UNNAMED_FILES = frozenset({MANIFEST, "README.md", "generate.py", "__pycache__", ".DS_Store"})
"Files of an adapted folder that its manifest does not list."


@dataclass(frozen=True)
class AdaptOptions:
    """The options of `adapt`."""

    src: Any = field(metadata=argument("IN", check=check_model_path))
    "the .mlpackage of the encoder or decoder; never changed"
    dst: str | os.PathLike[str] | None = field(default=None, metadata=flag("-o", "--output", metavar="OUT_DIR"))
    "the folder to write"
    _: KW_ONLY
    context: int | None = field(default=None, metadata=flag(type=positive_int, metavar="N"))
    "maximum number of tokens (default: the largest that IN supports: the rows of its cache, or the end of its range)"
    prefill: int | None = field(default=None, metadata=flag(type=positive_int, metavar="N"))
    "decoders: also write packages that process N tokens per call, for the prompt"
    target: str = field(default="m4", metadata=flag())
    "the chip to rewrite for and to predict (default: m4)"
    cache: str = field(default="io", metadata=flag(choices=("io", "state")))
    """decoders: io (default): the cache is an input, its new rows are an output, and the caller keeps it; state: the
    cache is one state"""
    embedding: str = field(default="package", metadata=flag(choices=("package", "npy", "one-hot")))
    """decoders: where embeddings of tokens are looked up: package (default): in the lookup package; npy: by the caller,
    in a file of the table; one-hot: in the main package, by a product with the table, for small vocabularies"""
    parts: int | None = field(default=None, metadata=flag(type=positive_int, metavar="N"))
    "decoders: split the main package into N packages, between its layers"
    max_part_size: str | float | None = field(default=None, metadata=flag(metavar="SIZE"))
    "decoders: split it into as few packages as possible with at most SIZE of weights each, such as 1.4GB"
    head_tiles: int | None = field(default=None, metadata=flag(type=positive_int, metavar="N"))
    "decoders: compute the logits by N products, as N outputs; measure the effect: it was slower on one chip"
    verify: bool = field(default=True, metadata=flag())
    "compare results, and generated tokens, with those of the source (default); if they differ, nothing is written"
    overwrite: bool = field(default=False, metadata=flag())
    "replace OUT_DIR if all files in it were written by an earlier run"
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

    `kind` is "encoder" or "decoder". `status` is "written", or "rejected" (results differ from those of the source;
    nothing was written). `before` and `after` are figures of the source and of the main package (for one token): number
    of ops, unsupported ops by type with a reason for each type, findings of wrong numbers, fractions on the ANE,
    estimated time, transitions, bytes of weights (in `after`, of the whole folder), and bytes of inputs and outputs per
    call, including lookups. `done` are the changes. For a decoder, `fixed` are inputs that are the same for all tokens,
    `tokens` are the tokens that both generated, and `logit_error` is the largest difference of logits, relative to the
    largest logit of the step. For an encoder, `lengths` are the compared lengths, and `result_error` is the largest
    difference of results, relative to the largest value of the output; `notes` are remarks on the adapted model.
    """

    source: str
    output: str
    kind: str
    status: str = "written"
    before: dict[str, Any] = field(default_factory=dict)
    after: dict[str, Any] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)
    fixed: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logit_error: float | None = None
    lengths: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    result_error: float | None = None
    reason: str = ""
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON that `--format json` prints."""
        return {**make_json_header("adapt"),
                "source": self.source, "output": self.output, "kind": self.kind, "status": self.status,
                "before": self.before, "after": self.after, "done": self.done, "fixed": self.fixed,
                "tokens": self.tokens, "logit_error": self.logit_error, "lengths": self.lengths, "notes": self.notes,
                "result_error": self.result_error, "reason": self.reason, "seconds": round(self.seconds, 6)}

    def __str__(self) -> str:
        lines = [*self.done, f"before: {format_figures(self.before)}", f"after: {format_figures(self.after)}"]
        reasons: dict[str, list[str]] = {}
        for kind in self.after.get("unsupported", ()):
            reasons.setdefault(self.after["reasons"][kind], []).append(kind)
        lines += [f"still unsupported: {', '.join(kinds)}: {escape_text(why)}" for why, kinds in reasons.items()]
        lines += [f"still wrong numbers: {each['code']} {each['slug']}: %{each['value']}: {escape_text(each['reason'])}"
                  for each in self.after.get("wrong_numbers", ())]
        if self.logit_error is not None:
            lines.append(f"generated {len(self.tokens)} tokens as the source does; logits within "
                         f"{self.logit_error:.1e} of the largest ({LOGIT_BOUND:g} allowed)")
        if self.result_error is not None:
            where = f"at lengths {', '.join(map(str, self.lengths))}" if self.lengths else "on random inputs"
            lines.append(f"results are those of the source {where}, within {self.result_error:.1e} of the largest "
                         f"({RESULT_BOUND:g} allowed)")
        if self.status == "rejected":
            return format_lines([*lines, *f"nothing written: {self.reason}".split("\n")])
        folder = escape_text(self.output)
        done = f"written to {folder} in {self.seconds:.1f} s"
        lines += map(escape_text, self.notes)
        if self.kind == "encoder" or self.fixed:
            return format_lines([*lines, f"{done}; {folder}/README.md describes the calls"])
        script = format_command_path(os.path.join(self.output, "generate.py"))
        return format_lines([*lines, done, f"next: python {quote_word(script)} --ids 1,2,3 --runtime reference"])


@command(AdaptOptions)
def adapt(options: AdaptOptions) -> AdaptReport:
    """Adapt the encoder or decoder `src` to the ANE and write the folder `dst`: packages, manifest.json, README.md.

    `src` is a path, an MLModel or a `Package` of an ML Program. The kind of model is recognized from the graph:

    - A decoder reads token ids, a mask (1, 1, T, E) whose length E states the position, and a cache. The cache is in
      states, or in inputs that outputs return with new rows appended. A decoder may also read floats that are the same
      for all tokens, as for cross attention; values that depend only on these are computed once. generate.py is written
      for decoders.
    - A recurrent model has only token ids and states.
    - A model without a cache is an encoder: it reads token ids or floats, and masks.

    `context` is the number of tokens. `prefill` is the number of tokens per call of a decoder's second function. The
    main package of a decoder is cut into `parts`, or into the fewest parts of at most `max_part_size` of weights each;
    its logits are returned in `head_tiles` parts. The main packages are rewritten with the preset full for `target`.
    Unless `verify` is false, all are compared with the source on random feeds, and decoders generate tokens.

    Raises InputError, with the op or input and the expected form, for a model that is not recognized. Nothing is
    written then.
    """
    from ..ir.clone import clone_program
    from ..package.package_writer import publish_output
    from ..package.staging import REPLACED, Staging
    from ..package.write_errors import convert_write_errors
    from ..transforms.sources import get_source_path, open_draft

    started = time.perf_counter()
    source = get_source_path(options.src)
    target = _check_target(options, source)
    draft = open_draft(options.src)
    with describe_as_steps("adapt", _list_steps()):
        kind, write = _plan(options, draft, str(source))
    report = AdaptReport(str(source), str(target), kind, before=measure_package(source, options.target))
    before = clone_program(draft.program)
    with describe_as_steps("adapt", _list_steps()), convert_write_errors(target, "the folder"), (
            Staging(target)) as staging:
        folder = staging.folder / "adapted"
        folder.mkdir()
        write(before, folder, report)
        if report.status == "written":
            publish_output(folder, target, staging.folder / REPLACED, options.overwrite, "folder",
                           lambda: _check_replaceable(target))
    report.seconds = time.perf_counter() - started
    return report


def _list_steps() -> set[str]:
    """List the options of `edit` that `adapt` does not have: it applies their transforms as steps of its own."""
    from .edit import EditOptions

    return {each.name for each in fields(EditOptions) if "edit" in each.metadata} - {
        each.name for each in fields(AdaptOptions)}


def _plan(options: AdaptOptions, draft: Draft, where: str) -> tuple[str, Callable[[Program, Path, AdaptReport], None]]:
    """Recognize the model and check the options; return its kind, and the function that writes its folder."""
    from ..transforms.decoder import check_constant_buffers, has_cache, recognize_decoder
    from ..transforms.encoder import choose_context, recognize_encoder

    if len(draft.program.functions) != 1:
        names = ", ".join(sorted(draft.program.functions))
        raise InputError(f"{where}: {len(draft.program.functions)} functions ({names}); expected one")
    if has_cache(draft.program):
        decoder = recognize_decoder(draft.program, where)
        check_sizes(options, decoder)
        return "decoder", lambda before, folder, report: write_decoder(options, before, draft, decoder, folder, report)
    check_constant_buffers(draft.program, where)
    for name, given in (("prefill", options.prefill), ("cache", None if options.cache == "io" else options.cache),
                        ("embedding", None if options.embedding == "package" else options.embedding),
                        ("parts", options.parts), ("max_part_size", options.max_part_size),
                        ("head_tiles", options.head_tiles)):
        if given is not None:
            raise InputError(f"{format_option_values(name, given)}: {where} has no cache; expected this for a decoder "
                             "with a cache alone")
    encoder = recognize_encoder(draft.program, where)
    context = choose_context(encoder, options.context, where)
    return "encoder", lambda before, folder, report: write_encoder(options, before, draft, encoder, context, folder,
                                                                   report)


def _check_target(options: AdaptOptions, source: Path) -> Path:
    """Return the folder to write. Raises InputError if it cannot be written."""
    if options.dst is None:
        raise InputError(f"no output given; expected {choose_spelling('-o FOLDER', 'a folder to write')}")
    target = Path(os.path.abspath(options.dst))
    if has_overlap(os.path.realpath(source), os.path.realpath(target)):
        raise InputError(f"output '{target}': leads to the source package '{source}', into it or around it; expected "
                         "another folder: the source is never changed")
    if target.suffix == ".mlpackage":
        raise InputError(f"output '{target}': is the name of a package; expected the name of a folder, to which "
                         "several packages are written")
    if (around := find_enclosing_package(target)) is not None:
        raise InputError(f"output '{target}': is in the package {around}; expected a path outside of packages")
    if os.path.lexists(target):
        if not options.overwrite:
            raise InputError(f"output '{target}' exists already; expected a free name, or {format_option('overwrite')}")
        _check_replaceable(target)
    if not target.parent.is_dir():
        raise InputError(f"no folder '{target.parent}'; expected one to write to")
    return target


def _check_replaceable(target: Path) -> None:
    """Raise InputError if `target` contains files that no earlier run wrote: they would be lost."""
    text, found = "", None
    try:
        text = (target / MANIFEST).read_text(encoding="utf-8")
        found = json.loads(text)
    except (ValueError, RecursionError, OSError):
        pass
    if not isinstance(found, dict) or found.get("kind") not in KINDS or not {"schema", "predicted"} <= found.keys():
        raise InputError(f"output '{target}' exists without a {MANIFEST} of an earlier run; expected a free name")
    foreign = sorted(name for name in os.listdir(target)
                     if name not in _UNNAMED_FILES and json.dumps(name) not in text)  # the manifest lists packages
    if foreign:
        raise InputError(f"output '{target}' holds '{foreign[0]}', which no earlier run wrote and which would be lost; "
                         "move it away, or give a free name")
