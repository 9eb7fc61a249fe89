"""Edit an .mlpackage; everything else stays unchanged. All options refer to the names in IN."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import KW_ONLY, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._version import make_json_header
from ..package.copy_ahead import CopyAhead
from ..package.destination import check_destination
from ..package.manifest import check_package_path
from ..transforms.contract import MAX_PARTS, PART_SUFFIXES, build_part_path
from ..utils.errors import InputError
from ..utils.garbage_collection import pause_garbage_collection
from ..utils.locking import synchronized_property
from ..utils.option_spelling import format_option, format_option_values
from ..utils.text_format import escape_text, format_lines, format_short_repr
from .edit_transforms import (
    IoTypes,
    Names,
    edit_flag,
    list_given,
    make_by,
    make_dedup,
    make_fixing,
    make_folding,
    make_for_names,
    make_io,
    make_merge,
    make_one_hot,
    make_parts,
    make_renames,
    make_sized_parts,
    make_tables,
    make_tiles,
    parse_io,
    parse_pairs,
    parse_tiles,
)
from .options import LINK, add_format_option, add_options, argument, command, flag, read_options
from .output import print_report, start_copying

if TYPE_CHECKING:
    from coremltools.converters.mil.mil import Program

    from ..equivalence.equivalence import VerifyReport
    from ..package.package_writer import StagedFile
    from ..transforms.contract import Draft, EditRecord, Transform
    from .table_files import TableFile

__all__ = ["EditOptions", "EditReport", "edit"]

HELP = "rename, expose or drop values of a package, change its interface, split it"
EXAMPLE = "edit in.mlpackage -o out.mlpackage --rename var_123=logits --io fp16"

Shapes = Mapping[str, Sequence[int]]
"New shapes of inputs, by input name."
FixShapes = str | Sequence[str] | Shapes | Sequence[Shapes] | Mapping[str, Shapes]
"Texts in the command's syntax, one set of shapes, one set for each function to make, or sets by function name."
PadShapes = str | Sequence[str] | Mapping[str, Sequence[int | tuple[int, int]]]
"Sizes to pad inputs to, by input name, or texts in the command's syntax."
_MAX_CHANGES_LISTED = 12
"The most changes that the text lists per option; the JSON has all."


@dataclass(frozen=True)
class EditOptions:
    """The options of `edit`."""

    src: Any = field(metadata=argument("IN", check=check_package_path))
    "the .mlpackage to read; never modified"
    dst: str | os.PathLike[str] | None = field(default=None, metadata=flag("-o", "--output", metavar="OUT"))
    "the .mlpackage to write"
    _: KW_ONLY
    fix_shape: FixShapes | None = field(default=None, metadata=edit_flag(
        make_fixing, metavar="NAME=1,3,8,8", action="append"))
    """fix the shape of the flexible input NAME; repeatable; a second shape for the same input makes another function,
    which may be named: FUNCTION:NAME=1,3,8,8"""
    pad_shape: PadShapes | None = field(default=None, metadata=edit_flag(
        make_by("pad_shape", "PadShape"), metavar="NAME=1,1,1,1024", action="append"))
    """pad the flexible input NAME to this shape, compute at full size, and mask the padding; a size such as 2..64 also
    declares the smallest real size; repeatable, for inputs that share the size"""
    fold_sizes: bool = field(default=False, metadata=edit_flag(make_folding))
    "turn values that depend only on fixed sizes into constants, such as masks and tables of positions"
    one_hot_rows: bool = field(default=False, metadata=edit_flag(make_by("encoder", "OneHotRows")))
    "read rows at computed positions, such as the last token's, by a product with a one-hot matrix"
    add_masks: bool = field(default=False, metadata=edit_flag(make_by("encoder", "AddMasks")))
    "add a mask before a softmax instead of a select that writes a large negative number"
    narrow_masks: bool = field(default=False, metadata=edit_flag(make_by("encoder", "NarrowMasks")))
    "remove the repetition of masks for each query if all ops that read them broadcast"
    merge_states: str | None = field(default=None, metadata=edit_flag(make_merge, named=True, metavar="NAME"))
    "merge all states into one state NAME of rank 4, which is read once and written once"
    state_to_io: Names = field(default=(), metadata=edit_flag(
        make_for_names("state_to_io", "state_to_io", "StateToIo", everything="all"),
        metavar="STATE", nargs="+", action="extend"))
    """replace these states (all: every state) by inputs and outputs; where rows are written at a position, the output
    has the new rows only"""
    one_hot: Mapping[str, str] | None = field(default=None, metadata=edit_flag(
        make_one_hot, metavar="IDS=NAME", action="append", parse=partial(parse_pairs, "one_hot")))
    """replace the input IDS, integers that are looked up in a table, by NAME, one-hot rows that are multiplied with the
    table; repeatable"""
    embedding_file: Mapping[str, str | os.PathLike[str]] | None = field(default=None, metadata=edit_flag(
        make_tables, metavar="IDS=FILE.npy", action="append", parse=partial(parse_pairs, "embedding_file")))
    """write the table in which the input IDS is looked up to FILE.npy, compressed as it is stored, and replace IDS by
    IDS_rows, rows of the table that the caller reads; repeatable"""
    tile_output: Mapping[str, int] | None = field(default=None, metadata=edit_flag(
        make_tiles, metavar="NAME=N", action="append", parse=parse_tiles))
    "split the output NAME, a product with a weight, into N outputs; repeatable"
    expose: Names = field(default=(), metadata=edit_flag(
        make_for_names("expose", "expose", "Expose"), metavar="VALUE", action="append"))
    "append this internal value to the outputs; repeatable"
    drop_output: Names = field(default=(), metadata=edit_flag(
        make_for_names("drop_output", "drop_output", "DropOutput"), metavar="NAME", action="append"))
    "remove this output, and all ops that only it needs; repeatable"
    io: IoTypes = field(default=None, metadata=edit_flag(
        make_io, metavar=("TYPE", "NAME"), nargs="+", action="append", parse=parse_io))
    "convert these inputs and outputs (default: all floats) to fp16 or fp32; repeatable"
    rename: Mapping[str, str] | None = field(default=None, metadata=edit_flag(
        make_renames, metavar="A=B", action="append", parse=partial(parse_pairs, "rename")))
    "rename the input, output, state or internal value A to B; repeatable"
    split_at: Names = field(default=(), metadata=edit_flag(
        make_for_names("split_at", "split_at", "SplitAt", renamed=True), splits=True,
        metavar="VALUE", nargs="+", action="extend"))
    "split into two packages that run in sequence, OUT_1 and OUT_2, after these values"
    split_inputs: Names = field(default=(), metadata=edit_flag(
        make_for_names("split_inputs", "split_inputs", "SplitInputs", renamed=True), splits=True,
        metavar="NAME", nargs="+", action="extend"))
    """split into two packages, after the values that depend on only one of these inputs: lookups of ids, tables and
    masks of positions"""
    split_constant_inputs: Names = field(default=(), metadata=edit_flag(
        make_for_names("split_constant_inputs", "split_inputs", "SplitConstantInputs", renamed=True), splits=True,
        metavar="NAME", nargs="+", action="extend"))
    """split into two packages: OUT_1 has the ops that depend only on these inputs, which are the same for many calls,
    and runs once for these calls; OUT_2 reads its results"""
    split_parts: int | None = field(default=None, metadata=edit_flag(make_parts, splits=True, metavar="N", type=int))
    """split into N packages that run in sequence, OUT_1 to OUT_N, with balanced weights, where the fewest bytes cross:
    between layers"""
    max_part_size: str | float | None = field(default=None, metadata=edit_flag(
        make_sized_parts, splits=True, metavar="SIZE"))
    "split into as few packages as possible with at most SIZE of weights each, such as 1.4GB"
    dedup_weights: bool = field(default=False, metadata=edit_flag(make_dedup))
    "store identical weights once"
    function: str | None = field(default=None, metadata=flag(metavar="F"))
    "edit only this function (default: every function that has the named values)"
    dry_run: bool = field(default=False, metadata=flag())
    "report what would be done; write nothing"
    verify: bool = field(default=False, metadata=flag())
    """compare the outputs with those of IN on random feeds; if they differ or cannot be compared, write nothing and
    exit with code 1"""
    overwrite: bool = field(default=False, metadata=flag())
    "replace OUT, and the files of tables, if they exist"
    link: bool = field(default=False, metadata=LINK)
    ahead: CopyAhead | None = None

    @property
    def parts(self) -> tuple[str, ...]:
        """The suffixes of the packages to write."""
        if self.split_parts is not None:
            return tuple(str(number) for number in range(1, min(self.split_parts, MAX_PARTS) + 1))
        if self.max_part_size is not None:
            return ("",)  # how many there will be is not known yet
        return PART_SUFFIXES if self.splits else ("",)

    @property
    def splits(self) -> list[str]:
        """The names of the given options that make packages of one."""
        return [each.name for each in list_given(self) if each.metadata["splits"]]

    @synchronized_property
    def tables(self) -> list[TableFile]:
        """The tables of embeddings to write."""
        from .table_files import make_table_files  # imports numpy, which takes longer than most edits

        return make_table_files(self.embedding_file) if self.embedding_file else []

    @property
    def packed(self) -> bool:
        """True if files are packed again or linked, so that copying them ahead is of no use."""
        return bool(self.splits or self.dedup_weights or self.link or self.embedding_file)


def add(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s IN -o OUT EDIT ... [options]"  # after --io, IN would be one of its names
    add_options(parser, EditOptions)
    add_format_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    keywords = read_options(arguments, EditOptions)
    options = EditOptions(**keywords)
    arguments.proves = options.verify  # what the runtime cannot run is not verified
    with start_copying(arguments.src, arguments.dst, options.overwrite, options.dry_run, options.packed,
                       options.parts) as ahead:
        report = edit(**keywords, ahead=ahead)
    print_report(report, arguments.format)
    return 1 if report.status == "rejected" else 0


@command(EditOptions)
def edit(options: EditOptions) -> EditReport:
    """Edit the ML Program package `src` and write the result to `dst`; the rest of the package is unchanged.

    `src` is a path, a `Package` as it was loaded, or an MLModel that is a package on disk. Edits are made in the order
    of this list, whatever the order of the arguments; all names are those of `src`, regardless of other edits:

    - `fix_shape` gives inputs with flexible shapes one shape: a mapping from name to shape. A list of such mappings, or
      a mapping from function names to them, makes a function for each mapping; these functions share the weights, and
      the first one is the default.
    - `pad_shape` pads inputs to a shape. Ops on padded values compute at full size, and the padding is masked. A number
      that follows from the real length, such as a position, becomes an input. A size may be a pair of the smallest and
      the largest real size.
    - `fold_sizes` turns values that depend only on fixed sizes into constants.
    - `one_hot_rows` reads rows at computed positions by products with one-hot matrices.
    - `add_masks` adds masks to scores instead of selecting by them.
    - `narrow_masks` removes the repetition of masks.
    - `merge_states` names the one state of rank 4 into which all states are merged.
    - `state_to_io` names the states ("all": each) that become inputs and outputs.
    - `one_hot` maps integer inputs to the names of the one-hot inputs that replace them.
    - `embedding_file` maps integer inputs to paths that end in .npy, to which the table is written, compressed as it is
      stored. Parameters of the compression and a .json that names all files are written beside it. The model then reads
      rows of the table from the input INPUT_rows.
    - `tile_output` maps outputs to the number of outputs that they are split into.
    - `expose` names inner values to return as well. A type that is not allowed in the interface is cast, and the report
      states this.
    - `drop_output` names outputs to remove, with all ops that only they need.
    - `io` is "fp16" or "fp32", the new type of all float inputs and outputs, or maps one or both types to the names
      that get it.
    - `rename` maps names of inputs, outputs, states or inner values to their new names.
    - `split_at` names values after which the model is cut into two packages that run one after the other:
      OUT_1.mlpackage and OUT_2.mlpackage for the `dst` OUT.mlpackage, both or neither. With `function` they do not
      contain the other functions.
    - `split_inputs` cuts in the same way after the values that depend on only one of these inputs.
    - `split_constant_inputs` cuts after the values that depend only on these inputs, which are the same for many calls.
    - `split_parts` cuts into that many packages, OUT_1 to OUT_N, with balanced weights, where the fewest bytes cross.
    - `max_part_size` (bytes, or a text such as "1.4GB") cuts into as few packages as possible with at most that many
      bytes of weights each, where the fewest bytes cross.
    - `dedup_weights` stores weights of equal bytes once.

    `function` edits only that function (default: each that has the named values). `dry_run` writes nothing. `verify`
    runs the source and the result on random feeds, mapped across the change, on the reference runtime; if results
    differ or cannot be compared, nothing is written and the status is "rejected". With `link`, unchanged files become
    hard links if they cannot be cloned, so that the packages share them. `ahead` holds copies of the source's large
    files that the caller has already started.

    Raises InputError for anything that cannot be done, with the reason; nothing is written then.
    """
    from ..ir.clone import clone_program
    from ..transforms.contract import apply_transforms
    from ..transforms.sources import get_source_path, open_draft

    started = time.perf_counter()
    transforms = _make_transforms(options)
    source = get_source_path(options.src)
    target = None if options.dry_run else _check_target(options, source)
    with (
        _start_copying_ahead(source, target, options) as ahead,
        pause_garbage_collection(),
        ExitStack() as stack,
    ):
        draft = open_draft(options.src)
        before = clone_program(draft.program) if options.verify else None
        drafts = apply_transforms(draft, transforms)
        report = EditReport(
            str(source), done=_collect_done_edits(drafts), weight_bytes_before=_count_weight_bytes(source)
        )
        files = [] if target is None else _stage_tables(options, stack, drafts, source)
        report.verification = None if before is None else _verify_drafts(before, drafts, options)
        if report.verification is not None and not report.verification.equal:
            report.status = "rejected"
        elif target is not None:
            report.outputs = _write_drafts(drafts, target, options, ahead, files)
            report.files = [os.fspath(each.staging.target) for each in files]
            report.status = "written" if report.changed else "unchanged"
            report.weight_bytes_after = sum(_count_weight_bytes(Path(path)) for path in report.outputs)
    report.seconds = time.perf_counter() - started
    return report


def _verify_drafts(before: Program, drafts: list[Draft], options: EditOptions) -> VerifyReport:
    """Compare the source's program with what became of it.

    Transforms of masks give other results for queries whose keys are all hidden, which are undefined. If results differ
    for random masks, they are compared for masks that hide the last keys.
    """
    from coremltools.converters.mil.mil import types

    from ..equivalence.changed_interfaces import compare_across_interfaces, hide_last_keys
    from ..passes.contract import Exactness
    from ..transforms.decoder import find_lookup
    from ..transforms.pad_shape import reaches_softmax

    package = drafts[0].package
    exact = all(each.exact is not False for draft in drafts for each in draft.done)
    compare = partial(compare_across_interfaces, before, drafts,
                      exactness=Exactness.BITWISE if exact else Exactness.ROUNDING,
                      describe=(lambda name: None) if package is None else package.description)
    report = compare()
    if report.equal or not (options.add_masks or options.pad_shape):
        return report
    masks = {name for function in before.functions.values() for name, var in function.inputs.items()
             if types.is_tensor(var.sym_type) and not types.is_float(var.dtype) and reaches_softmax(var) and (
                 find_lookup(var) is None)}
    for shown in (1, 0) if masks else ():
        found = compare(adjust=partial(hide_last_keys, masks, shown))
        if found.equal:
            found.notes.append(f"{', '.join(map(escape_text, sorted(masks)))}: hide the last keys; with random masks, "
                               "which may hide all keys of a query, results differ")
            return found
    return report


def _make_transforms(options: EditOptions) -> list[Transform]:
    """Make the requested transforms in the order of the options.

    Names are those of the source. Raises InputError if nothing is requested, or if two options contradict each other.
    """
    given = list_given(options)
    if not given:
        names = [format_option_values(each.name) for each in fields(options) if "edit" in each.metadata]
        raise InputError(f"no edit requested; expected at least one of {', '.join(names[:-1])} and {names[-1]}")
    if len(options.splits) > 1:
        listed = " and ".join(map(format_option_values, options.splits))
        several = {"split_parts", "max_part_size"} & set(options.splits)
        number = "several packages" if several else "two packages"
        raise InputError(f"{listed}: each makes {number}; expected one of them")
    return [made for each in given for made in each.metadata["edit"](options, getattr(options, each.name))]


def _check_target(options: EditOptions, source: Path) -> Path:
    """Return the path to write to. Raises InputError if a part of the result could not be written at the end."""
    if options.dst is None:
        raise InputError("no output; expected a path that ends in .mlpackage, or a dry run")
    for part in options.parts:
        check_destination(source, build_part_path(Path(options.dst), part), options.overwrite)
    for table in options.tables:
        table.check(source, options.overwrite)
    return Path(options.dst)


def _stage_tables(
    options: EditOptions, stack: ExitStack, drafts: Sequence[Draft], source: Path
) -> list[StagedFile]:
    """Write all files of tables into staging folders; the comparison reads their rows from these."""
    staged = [each for table in options.tables for each in table.stage(stack, drafts, source, options.overwrite)]
    targets = [each.staging.target for each in staged]
    twice = next((each for each in targets if targets.count(each) > 1), None)
    if twice is not None:
        raise InputError(f"{twice}: two tables have a file of this name; expected other names for them")
    return staged


def _start_copying_ahead(
    source: Path, target: Path | None, options: EditOptions
) -> AbstractContextManager[CopyAhead | None]:
    """Start copying large files, unless the caller has started that."""
    if options.ahead is not None or target is None or options.packed:
        return nullcontext(options.ahead)
    return CopyAhead(source, target)


def _write_drafts(
    drafts: list[Draft], target: Path, options: EditOptions, ahead: CopyAhead | None, files: Sequence[StagedFile]
) -> list[str]:
    """Write all drafts and files or none; returns the paths of the packages."""
    from ..package.debug_handles import format_debug_handles
    from ..package.package_writer import PackageOutput, write_models

    outputs = []
    for draft in drafts:
        assert draft.package is not None
        model, plan = draft.emit()
        path = Path(os.path.abspath(build_part_path(target, draft.part)))
        extra = format_debug_handles(draft.package.path, draft.program)
        outputs.append(PackageOutput(draft.package.layout, draft.package.files, model, path, plan, extra,
                                     draft.program if options.verify else None))
    write_models(outputs, overwrite=options.overwrite, link=options.link, ahead=ahead, files=files)
    return [os.fspath(build_part_path(target, draft.part)) for draft in drafts]


def _collect_done_edits(drafts: list[Draft]) -> list[EditRecord]:
    """Collect the actions, each once: drafts made from one source start with the same actions."""
    return list(dict.fromkeys(each for draft in drafts for each in draft.done))


def _count_weight_bytes(root: Path) -> int:
    return sum(file.stat().st_size for file in root.rglob("*.bin"))


@dataclass
class EditReport:
    """The outcome of one edit of a package.

    `status`: "written", "unchanged" (nothing to do; the package was copied as it is), "dry run", or "rejected" (the
    comparison with the source failed, or was not possible; nothing was written). `outputs` are the paths written (or
    that would be), `files` those of tables of embeddings, `done` the changes by option. `weight_bytes_*` are the sizes
    of all weight files of the source and of the outputs, in bytes (after: None in a dry run), `verification` the
    comparison of the results with the source, if it was requested, `seconds` wall time.
    """

    source: str
    outputs: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    status: str = "dry run"
    done: list[EditRecord] = field(default_factory=list)
    weight_bytes_before: int = 0
    weight_bytes_after: int | None = None
    verification: VerifyReport | None = None
    seconds: float = 0.0

    @property
    def changed(self) -> bool:
        return any(each.changed for each in self.done)

    @property
    def exact(self) -> bool:
        """True unless an edit reports that results may change: all results then have the same bits."""
        return all(each.exact is not False for each in self.done)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON that `--format json` prints."""
        return {
            **make_json_header("edit"),
            "source": self.source, "outputs": self.outputs, "status": self.status, "changed": self.changed,
            "exact": self.exact, "done": [each.to_dict() for each in self.done],
            "weight_bytes": {"before": self.weight_bytes_before, "after": self.weight_bytes_after},
            "seconds": round(self.seconds, 6),
            **({"files": self.files} if self.files else {}),
            **({} if self.verification is None else {"verification": self.verification.to_dict()}),
        }

    def __repr__(self) -> str:
        return format_short_repr(
            self, source=self.source, status=self.status, outputs=self.outputs, changes=len(self.done)
        )

    def __str__(self) -> str:
        lines: list[str] = []
        for option in dict.fromkeys(each.option for each in self.done):
            notes = [
                f"{option}  {_format_function_prefix(each.function)}{each.note}"
                for each in self.done
                if each.option == option
            ]
            lines += notes[:_MAX_CHANGES_LISTED]
            if len(notes) > _MAX_CHANGES_LISTED:
                lines.append(f"{option}  ... and {len(notes) - _MAX_CHANGES_LISTED} more")
        if self.weight_bytes_after not in (None, self.weight_bytes_before):
            lines.append(f"weights: {self.weight_bytes_before} -> {self.weight_bytes_after} bytes")
        if self.verification is not None:
            lines += f"compared with the source: {self.verification}".split("\n")
        return format_lines([*lines, self._format_outcome()])

    def _format_outcome(self) -> str:
        where = f" to {', '.join([*self.outputs, *self.files])}" if self.outputs else ""
        if self.status == "dry run":
            return "dry run: nothing written"
        if self.status == "rejected":
            if self.verification is not None and self.verification.status == "different":
                return "nothing written: the results are not those of the source"
            return f"nothing written: the results cannot be compared; without {format_option('verify')} it is written"
        if self.status == "unchanged":
            return f"nothing to do; the package was copied as it is{where}"
        return f"written{where} in {self.seconds:.1f} s"


def _format_function_prefix(function: str) -> str:
    return "" if function in ("", "main") else f"{function}: "
