"""Edit an .mlpackage; everything else stays unchanged. All options refer to the names in IN."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._version import __version__
from ..package.copy_ahead import CopyAhead
from ..package.destination import check_destination
from ..package.manifest import check_package_path
from ..transforms.contract import MAX_PARTS, PART_SUFFIXES, build_part_path
from ..utils.errors import InputError
from ..utils.garbage_collection import pause_garbage_collection
from ..utils.option_spelling import format_option, format_option_values
from ..utils.text_format import format_lines, format_short_repr
from .options import LINK, add_format_option, add_options, argument, command, flag, read_options
from .output import print_report, start_copying

if TYPE_CHECKING:
    from coremltools.converters.mil.mil import Program

    from ..equivalence.equivalence import VerifyReport
    from ..transforms.contract import Draft, EditRecord, Transform

__all__ = ["EditOptions", "EditReport", "edit"]

HELP = "rename, expose or drop values of a package, change its interface, split it"
EXAMPLE = "edit in.mlpackage -o out.mlpackage --rename var_123=logits --io fp16"

Names = str | Sequence[str]
"A name, or several."
IoTypes = str | Mapping[str, Names] | None
"A type for all float inputs and outputs, or the names that get one."
Shapes = Mapping[str, Sequence[int]]
"New shapes of inputs, by input name."
FixShapes = str | Sequence[str] | Shapes | Sequence[Shapes] | Mapping[str, Shapes]
"Texts in the command's syntax, one set of shapes, one set for each function to make, or sets by function name."
PadShapes = str | Sequence[str] | Mapping[str, Sequence[int | tuple[int, int]]]
"Sizes to pad inputs to, by input name, or texts in the command's syntax."
_EDITS = ("fix_shape", "pad_shape", "merge_states", "state_to_io", "one_hot", "tile_output", "expose", "drop_output",
          "io", "rename", "split_at", "split_inputs", "split_parts", "max_part_size", "dedup_weights")
"The options that edit, in the order in which the edits are made."
_PAIR_EXAMPLES = {"rename": ("var_12", "logits"), "one_hot": ("ids", "rows"), "tile_output": ("logits", "4")}
"For error messages: an example of the pairs of each option that has them."
_SPLITS = ("split_at", "split_inputs", "split_parts", "max_part_size")
_MAX_CHANGES_LISTED = 12
"The most changes that the text lists per option; the JSON has all."


def _parse_io(texts: list[list[str]]) -> dict[str, list[str]]:
    """Group the names by type. InputError when a type is used with names and without."""
    found: dict[str, list[str]] = {}
    for dtype, *names in texts:
        if dtype in found and not (names and found[dtype]):
            raise InputError(
                f"{format_option_values('io', dtype)} is given without names more than once; expected it once"
            )
        found[dtype] = [*found.get(dtype, []), *names]
    return found


def _parse_pairs(option: str, texts: list[str]) -> dict[str, str]:
    """Parse `A=B` texts to a mapping. InputError for a text that is not of that form, or for two with the same A."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            left, right = _PAIR_EXAMPLES[option]
            raise InputError(f"{format_option_values(option, text)}: expected A=B, such as "
                             f"{format_option_values(option, name or left)}={right}")
        if name in found:
            raise InputError(
                f"{format_option_values(option, text)}: '{name}' is given twice (first as {name}={found[name]})"
            )
        found[name] = value
    return found


def _parse_tiles(texts: list[str]) -> dict[str, int]:
    """Parse `NAME=N` texts to a mapping."""
    found = _parse_pairs("tile_output", texts)
    for name, count in found.items():
        if not count.isdecimal():
            raise InputError(f"{format_option_values('tile_output', f'{name}={count}')}: expected a number of tiles, "
                             f"such as {format_option_values('tile_output', name)}=4")
    return {name: int(count) for name, count in found.items()}


@dataclass(frozen=True)
class EditOptions:
    """The options of `edit`."""

    src: Any = field(metadata=argument("IN", check=check_package_path))
    "the .mlpackage to read; never modified"
    dst: str | os.PathLike[str] | None = field(default=None, metadata=flag("-o", "--output", metavar="OUT"))
    "the .mlpackage to write"
    _: KW_ONLY
    fix_shape: FixShapes | None = field(default=None, metadata=flag(metavar="NAME=1,3,8,8", action="append"))
    """fix the shape of the flexible input NAME; repeatable; a second shape for the same input makes another function,
    which may be named: FUNCTION:NAME=1,3,8,8"""
    pad_shape: PadShapes | None = field(default=None, metadata=flag(metavar="NAME=1,1,1,1024", action="append"))
    """pad the flexible input NAME to this shape, compute at full size, and mask the padding; a size such as 2..64 also
    declares the smallest real size; repeatable, for inputs that share the size"""
    merge_states: str | None = field(default=None, metadata=flag(metavar="NAME"))
    "merge all states into one state NAME of rank 4, which is read once and written once"
    state_to_io: Names = field(default=(), metadata=flag(metavar="STATE", nargs="+", action="extend"))
    """replace these states (all: every state) by inputs and outputs; where rows are written at a position, the output
    has the new rows only"""
    one_hot: Mapping[str, str] | None = field(
        default=None, metadata=flag(metavar="IDS=NAME", action="append", parse=partial(_parse_pairs, "one_hot")))
    """replace the input IDS, integers that are looked up in a table, by NAME, one-hot rows that are multiplied with the
    table; repeatable"""
    tile_output: Mapping[str, int] | None = field(
        default=None, metadata=flag(metavar="NAME=N", action="append", parse=_parse_tiles))
    "split the output NAME, a product with a weight, into N outputs; repeatable"
    expose: Names = field(default=(), metadata=flag(metavar="VALUE", action="append"))
    "append this internal value to the outputs; repeatable"
    drop_output: Names = field(default=(), metadata=flag(metavar="NAME", action="append"))
    "remove this output, and all ops that only it needs; repeatable"
    io: IoTypes = field(
        default=None, metadata=flag(metavar=("TYPE", "NAME"), nargs="+", action="append", parse=_parse_io))
    "convert these inputs and outputs (default: all floats) to fp16 or fp32; repeatable"
    rename: Mapping[str, str] | None = field(
        default=None, metadata=flag(metavar="A=B", action="append", parse=partial(_parse_pairs, "rename")))
    "rename the input, output, state or internal value A to B; repeatable"
    split_at: Names = field(default=(), metadata=flag(metavar="VALUE", nargs="+", action="extend"))
    "split into two packages that run in sequence, OUT_1 and OUT_2, after these values"
    split_inputs: Names = field(default=(), metadata=flag(metavar="NAME", nargs="+", action="extend"))
    """split into two packages, after the values that depend on only one of these inputs: lookups of ids, tables and
    masks of positions"""
    split_parts: int | None = field(default=None, metadata=flag(metavar="N", type=int))
    """split into N packages that run in sequence, OUT_1 to OUT_N, with balanced weights, where the fewest bytes cross:
    between layers"""
    max_part_size: str | float | None = field(default=None, metadata=flag(metavar="SIZE"))
    "split into as few packages as possible with at most SIZE of weights each, such as 1.4GB"
    dedup_weights: bool = field(default=False, metadata=flag())
    "store identical weights once"
    function: str | None = field(default=None, metadata=flag(metavar="F"))
    "edit only this function (default: every function that has the named values)"
    dry_run: bool = field(default=False, metadata=flag())
    "report what would be done; write nothing"
    verify: bool = field(default=False, metadata=flag())
    """compare the outputs with those of IN on random feeds; if they differ or cannot be compared, write nothing and
    exit with code 1"""
    overwrite: bool = field(default=False, metadata=flag())
    "replace OUT if it exists"
    link: bool = field(default=False, metadata=LINK)
    ahead: CopyAhead | None = None

    @property
    def parts(self) -> tuple[str, ...]:
        """The suffixes of the packages to write."""
        if self.split_parts is not None:
            return tuple(str(number) for number in range(1, min(self.split_parts, MAX_PARTS) + 1))
        if self.max_part_size is not None:
            return ("",)  # how many there will be is not known yet
        return PART_SUFFIXES if self.split_at or self.split_inputs else ("",)

    @property
    def splits(self) -> list[str]:
        """The names of the given options that make packages of one."""
        return [name for name in _SPLITS if getattr(self, name) not in (None, (), [], "")]

    @property
    def packed(self) -> bool:
        """True if files are packed again or linked, so that copying them ahead is of no use."""
        return bool(self.splits or self.dedup_weights or self.link)


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

    `src` is a path, a `Package` as it was loaded, or an MLModel that is a package on disk. `fix_shape` gives inputs
    with flexible shapes one shape: a mapping from name to shape; a list of such mappings, or a mapping from function
    names to them, makes a function of each, which share the weights (the first is the default). `pad_shape` pads inputs
    to a shape, with what reads them computed in full and masked, and makes an input of the position where a number
    follows from the real length; a size may be a pair of the smallest and the largest real size. `merge_states` names
    the one state of rank 4 that all states become. `state_to_io` names states ("all": each) that become inputs and
    outputs. `one_hot` maps integer inputs to the inputs of one-hot rows that replace them, `tile_output` outputs to the
    number of outputs that they are split into. `expose` names inner values to return as well; a type that is not
    allowed in the interface is cast, and the report says so.
    `drop_output` names outputs to remove, with all ops that only they needed. `io` is "fp16" or "fp32", the type that
    all float inputs and outputs get, or maps one or both to the names that get it. `rename` maps names of inputs,
    outputs, states or inner values to their new names. `split_at` makes two packages that run one after the other, cut
    after the values it names: OUT_1.mlpackage and OUT_2.mlpackage for the `dst` OUT.mlpackage, both or neither; with
    `function` they do not contain the other functions. `split_inputs` does so after what is computed from one of these
    inputs alone. `split_parts` makes that many packages with even weights, OUT_1 to OUT_N, `max_part_size` (bytes, or a
    text such as "1.4GB") as few as have at most that many bytes of weights each; both cut where the fewest bytes cross.
    `dedup_weights` stores weights of equal bytes once. `function` edits that function alone (default: each that has the
    named values). All names are those of `src`, regardless of other edits. `dry_run` writes nothing. `verify` runs the
    source and the result on random feeds, mapped across the change, on the reference runtime; if results differ or
    cannot be compared, nothing is written and the status is "rejected". `link`: unchanged files become hard links where
    they cannot be cloned, so that the packages share them. `ahead`: copies of the source's large files that the caller
    has already started.

    The order is fixed: fix_shape, pad_shape, merge_states, state_to_io, one_hot, tile_output, expose, drop_output, io,
    rename, split_at, split_inputs, split_parts, max_part_size, dedup_weights.

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
    ):
        draft = open_draft(options.src)
        before = clone_program(draft.program) if options.verify else None
        drafts = apply_transforms(draft, transforms)
        report = EditReport(
            str(source), done=_collect_done_edits(drafts), weight_bytes_before=_count_weight_bytes(source)
        )
        report.verification = None if before is None else _verify_drafts(before, drafts)
        if report.verification is not None and not report.verification.equal:
            report.status = "rejected"
        elif target is not None:
            report.outputs = _write_drafts(drafts, target, options, ahead)
            report.status = "written" if report.changed else "unchanged"
            report.weight_bytes_after = sum(_count_weight_bytes(Path(path)) for path in report.outputs)
    report.seconds = time.perf_counter() - started
    return report


def _verify_drafts(before: Program, drafts: list[Draft]) -> VerifyReport:
    """Compare the source's program with what became of it."""
    from ..equivalence.changed_interfaces import compare_across_interfaces
    from ..passes.contract import Exactness

    package = drafts[0].package
    exact = all(each.exact is not False for draft in drafts for each in draft.done)
    return compare_across_interfaces(
        before, drafts, exactness=Exactness.BITWISE if exact else Exactness.ROUNDING,
        describe=(lambda name: None) if package is None else package.description)


def _make_transforms(options: EditOptions) -> list[Transform]:
    """Make the requested transforms. Raises InputError if there are none, or if two contradict each other.

    Names are those of the source. Those that make functions come first, then those that change outputs and types, then
    renames, and last those of the entire package.
    """
    from ..transforms.dedup_weights import DedupWeights
    from ..transforms.drop_output import DropOutput
    from ..transforms.expose import Expose
    from ..transforms.fix_shape import FixShape
    from ..transforms.io import Io
    from ..transforms.merge_states import MergeStates
    from ..transforms.pad_shape import PadShape
    from ..transforms.rename import Rename
    from ..transforms.split_at import SplitAt
    from ..transforms.split_inputs import SplitInputs
    from ..transforms.split_parts import SplitIntoParts
    from ..transforms.state_to_io import StateToIo
    from ..transforms.tile_head import TileHead
    from ..transforms.token_input import TokenInput
    from ..utils.byte_size import parse_byte_size

    function = options.function
    transforms: list[Transform] = []
    if options.fix_shape:
        transforms.append(FixShape(options.fix_shape, function))
    if options.pad_shape:
        transforms.append(PadShape(options.pad_shape, function))
    if options.merge_states is not None:
        names = _list_names(options.merge_states, "merge_states")
        if len(names) != 1:
            raise InputError(f"{format_option_values('merge_states')}: found {names!r}; expected one name, that of the "
                             "state to make")
        transforms.append(MergeStates(names[0], function))
    if options.state_to_io:
        states = _list_names(options.state_to_io, "state_to_io")
        transforms.append(StateToIo([] if states == ["all"] else states, function))
    for ids, name in (options.one_hot or {}).items():
        transforms.append(TokenInput(ids, name, one_hot=True, function=function))
    for name, count in (options.tile_output or {}).items():
        transforms.append(TileHead(name, count, function))
    if options.expose:
        transforms.append(Expose(_list_names(options.expose, "expose"), function))
    if options.drop_output:
        transforms.append(DropOutput(_list_names(options.drop_output, "drop_output"), function))
    transforms += [Io(dtype, names, function) for dtype, names in _group_names_by_type(options.io).items()]
    renamed = _check_renames(options.rename) if options.rename else {}
    if renamed:
        transforms.append(Rename(renamed, function))
    if len(options.splits) > 1:
        given = " and ".join(map(format_option_values, options.splits))
        number = "two packages" if set(options.splits) == {"split_at", "split_inputs"} else "several packages"
        raise InputError(f"{given}: each makes {number}; expected one of them")
    if options.split_at:
        names = [renamed.get(name, name) for name in _list_names(options.split_at, "split_at")]
        transforms.append(SplitAt(names, function))
    if options.split_inputs:
        names = [renamed.get(name, name) for name in _list_names(options.split_inputs, "split_inputs")]
        transforms.append(SplitInputs(names, function))
    if options.split_parts is not None:
        transforms.append(SplitIntoParts(count=options.split_parts, function=function))
    if options.max_part_size is not None:
        most = parse_byte_size(options.max_part_size, "max_part_size")
        transforms.append(SplitIntoParts(max_bytes=most, function=function))
    if options.dedup_weights:
        transforms.append(DedupWeights())
    if not transforms:
        raise InputError(
            "no edit requested; expected at least one of "
            f"{', '.join(map(format_option_values, _EDITS[:-1]))} and {format_option_values(_EDITS[-1])}"
        )
    return transforms


def _list_names(names: Names, option: str) -> list[str]:
    """Return `names` as a list, without the % that reports print before values. InputError for anything but names."""
    from ..transforms.names import strip_percent

    listed = [names] if isinstance(names, str) else list(names) if isinstance(names, Iterable) else [names]
    if any(not isinstance(name, str) for name in listed):
        raise InputError(
            f"{format_option_values(option)}: found {names!r}; expected the name of a value, or a list of names"
        )
    return [strip_percent(name) for name in listed]


def _check_renames(renames: Mapping[str, str]) -> dict[str, str]:
    from ..transforms.names import strip_percent

    if not isinstance(renames, Mapping) or any(not isinstance(name, str) for pair in renames.items() for name in pair):
        raise InputError(
            f"{format_option_values('rename')}: found {renames!r}; expected a mapping from names to new names"
        )
    return {strip_percent(old): new for old, new in renames.items()}


def _group_names_by_type(io: IoTypes) -> dict[str, list[str]]:
    """Group names by their new type. InputError when two types are requested for one of them."""
    if io is not None and not isinstance(io, (str, Mapping)):
        raise InputError(
            f"{format_option_values('io')}: found {io!r}; expected 'fp16', 'fp32' or a mapping from these to names"
        )
    groups = {} if io is None else {io: []} if isinstance(io, str) else {key: _list_names(io[key], "io") for key in io}
    twice = sorted(set.intersection(*map(set, groups.values()))) if len(groups) > 1 else []
    if twice or (len(groups) > 1 and not all(groups.values())):
        raise InputError(
            f"{format_option_values('io')}: both {' and '.join(groups)} are requested for "
            f"{', '.join(twice) or 'all names'}; "
            "expected each name with one type"
        )
    return groups


def _check_target(options: EditOptions, source: Path) -> Path:
    """Return the path to write to. Raises InputError if a part of the result could not be written at the end."""
    if options.dst is None:
        raise InputError("no output; expected a path that ends in .mlpackage, or a dry run")
    for part in options.parts:
        check_destination(source, build_part_path(Path(options.dst), part), options.overwrite)
    return Path(options.dst)


def _start_copying_ahead(
    source: Path, target: Path | None, options: EditOptions
) -> AbstractContextManager[CopyAhead | None]:
    """Start copying large files, unless the caller has started that."""
    if options.ahead is not None or target is None or options.packed:
        return nullcontext(options.ahead)
    return CopyAhead(source, target)


def _write_drafts(
    drafts: list[Draft], target: Path, options: EditOptions, ahead: CopyAhead | None
) -> list[str]:
    """Write all drafts or none; returns the paths."""
    from ..package.debug_handles import format_debug_handles
    from ..package.package_writer import PackageOutput, write_models

    outputs = []
    for draft in drafts:
        assert draft.package is not None
        model, plan = draft.emit()
        path = Path(os.path.abspath(build_part_path(target, draft.part)))
        extra = format_debug_handles(draft.package.path, draft.program)
        outputs.append(PackageOutput(draft.package.layout, draft.package.files, model, path, plan, extra))
    write_models(outputs, overwrite=options.overwrite, link=options.link, ahead=ahead)
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
    that would be), `done` the changes by option. `weight_bytes_*` are the sizes of all weight files of the source and
    of the outputs, in bytes (after: None in a dry run), `verification` the comparison of the results with the source,
    if it was requested, `seconds` wall time.
    """

    source: str
    outputs: list[str] = field(default_factory=list)
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
            "schema": 1, "tool": "mil-ane-passes", "version": __version__, "command": "edit",
            "source": self.source, "outputs": self.outputs, "status": self.status, "changed": self.changed,
            "exact": self.exact, "done": [each.to_dict() for each in self.done],
            "weight_bytes": {"before": self.weight_bytes_before, "after": self.weight_bytes_after},
            "seconds": round(self.seconds, 6),
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
            lines.append(f"compared with the source: {self.verification}")
        return format_lines([*lines, self._format_outcome()])

    def _format_outcome(self) -> str:
        where = f" to {', '.join(self.outputs)}" if self.outputs else ""
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
