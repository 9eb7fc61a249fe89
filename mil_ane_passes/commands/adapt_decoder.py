"""Decoders with a cache, adapted: packages for one token and for the prompt, a manifest, and generate.py."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .._version import __version__
from ..report.decoder.generate import read_rows, select_last_row
from ..utils.errors import InputError
from ..utils.option_spelling import format_option, format_option_values
from ..utils.text_format import escape_text, format_count, format_markdown_code, format_swift_string
from .adapt_parts import (
    choose_identifier,
    compare_drafts,
    count_call_bytes,
    count_weight_bytes,
    describe_var,
    emit_drafts,
    fill_page,
    format_figures,
    join_figures,
    measure_package,
    read_report_file,
    rewrite_package,
    share_weights,
)

if TYPE_CHECKING:
    from coremltools.converters.mil.mil import Function, Program

    from ..transforms.contract import Draft
    from ..transforms.decoder import DecoderStructure
    from .adapt import AdaptOptions, AdaptReport

__all__ = ["LOGIT_BOUND", "write_decoder"]

_CACHE, _EMBEDDING = "cache", "embedding"
_LOOKUP, _MAIN, _ONCE = "lookup.mlpackage", "decoder.mlpackage", "once.mlpackage"
_MAX_ONE_HOT = 16384
"Most rows of a table for a product with one-hot rows: the largest inner dimension supported on all generations."
_MIN_VERSION_FUNCTIONS = 9
"The specification version (iOS 18) from which a model may have several functions."
_PROMPT, _STEPS = 9, 16
"Lengths of the prompt and of the generated text that are compared with the source: several calls of each kind."
_CALLS, _STEP_BOUND = 3, 1e-9
"Number of compared calls (of several tokens) of a recurrent model, and their largest allowed difference at float64."
_SLOWER_CHIP = "a19"
"The chip on which tiles of the head were measured to be slower."
LOGIT_BOUND = 1e-2
"""Largest allowed difference of logits, relative to the largest logit of the step.

The cache is fp16 between calls, and rewrites of the preset full change the rounding.
"""


def write_decoder(
    options: AdaptOptions, before: Program, draft: Draft, structure: DecoderStructure, folder: Path, report: AdaptReport
) -> None:
    """Write the packages of a decoder and their other files into `folder`; the report states a rejection."""
    counts = check_sizes(options, structure)
    report.before["call_bytes"] = _count_source_bytes(before.functions[structure.function], structure, options)
    report.fixed = list(structure.fixed)
    forms = []
    for count in counts:
        options.progress(f"adapting to {count} tokens a call")
        forms.append(_transform(options, draft if count == counts[-1] else draft.copy(), structure, count))
        report.done += [each.note for part in forms[-1].drafts for each in part.done if each.changed and count == 1]
        if options.verify:
            options.progress(f"comparing {forms[-1].name}")
            reason = _compare_form(before, structure, forms[-1])
            if reason:
                report.status, report.reason = "rejected", f"{forms[-1].name}: {reason}"
                return
    _tile_head(options, forms, structure, report)
    report.done = list(dict.fromkeys(report.done))
    embedding = _write_embedding(options, before, structure, forms[0], folder, report)
    once = _write_once(options, structure, forms, folder, report)
    parts = _write_packages(options, forms, structure, folder, report)
    report.after = join_figures([measure_package(folder / each["package"], options.target, parts[0]["function"])
                                 for each in parts[0]["main"]]) | {"weight_bytes": count_weight_bytes(folder)}
    lookup = forms[0].lookup.program.functions  # of all numbers of tokens, one token first
    report.after["call_bytes"] += count_call_bytes(next(iter(lookup.values())))
    _write_files(folder, _make_manifest(before, structure, options, forms, parts, embedding, once, report))
    if options.verify:
        options.progress("generating tokens")
        _compare_generations(before, structure, folder, report)


def _count_source_bytes(function: Function, structure: DecoderStructure, options: AdaptOptions) -> int | None:
    """Count the bytes of inputs and outputs of a call of the source for one token, with all rows of the context."""
    from ..ir.shape_inference import get_sizes

    rows = options.context or structure.rows or 1
    longest = {**dict.fromkeys(structure.caches, rows - 1), **dict.fromkeys(structure.caches.values(), rows)}
    shapes = {}
    for name, var in (*function.inputs.items(), *((var.name, var) for var in function.outputs)):
        sizes = get_sizes(var.sym_type) or ()
        if name == structure.mask:
            shapes[name] = [*(size or 1 for size in sizes[:-1]), rows]
        else:
            size = longest.get(name, structure.longest if name in structure.lengths else 1)
            shapes[name] = [each or size for each in sizes]
    return count_call_bytes(function, shapes)


def _compare_form(before: Program, structure: DecoderStructure, form: _Form) -> str:
    """Compare packages with the source on random feeds; return a description of the difference, or ""."""
    if structure.mask is None and form.count > 1:
        return _compare_steps(before, structure, form)
    found = compare_drafts(before, form.drafts)
    return "" if found.equal else str(found)


def _compare_steps(before: Program, structure: DecoderStructure, form: _Form) -> str:
    """Compare several calls of `count` tokens with calls of the source for the same tokens one by one, at float64."""
    from ..runtime import Runtime

    function = before.functions[structure.function]
    rng = np.random.default_rng(2)
    fixed = _make_fixed(function, structure)
    source = Runtime(before, function=structure.function, precision="float64")
    lookup, main = (Runtime(draft.program, function=structure.function, precision="float64") for draft in form.drafts)
    states = {name: rng.standard_normal(tuple(map(int, function.inputs[name].shape))) for name in structure.states}
    carried = dict(states)
    for call in range(_CALLS):
        ids = rng.integers(0, structure.vocabulary, (1, form.count)).astype(np.int32)
        expected = [source({structure.ids: ids[:, token:token + 1], **fixed}, states)[structure.logits]
                    for token in range(form.count)]
        feeds = {**lookup({structure.ids: ids}), **fixed, **carried}
        found = main({name: value for name, value in feeds.items() if name in (
            form.main.program.functions[structure.function].inputs)})
        carried |= {name: found[f"{name}_new"] for name in structure.states if f"{name}_new" in found}
        for name, one, other in ((structure.logits, np.concatenate(expected, -2), found[structure.logits]), *(
                (name, states[name], carried[name]) for name in structure.states)):
            error = float(np.abs(one - other).max()) / (float(np.abs(one).max()) or 1.0)
            if not error <= _STEP_BOUND:
                return (f"'{escape_text(name)}' differs by {error:.1e} of its largest value in call {call + 1} of "
                        f"{_CALLS}")
    return ""


def check_sizes(options: AdaptOptions, structure: DecoderStructure) -> list[int]:
    """Return the numbers of tokens per call, 1 first. Raises InputError for inconsistent sizes."""
    _check_parts(options)
    _check_tiles(options)
    if structure.rows is None:
        return _check_recurrent(options, structure)
    context = options.context or structure.rows
    if structure.caches and options.cache == "state":
        raise InputError(f"{format_option_values('cache', 'state')}: the cache of the source is an input and an "
                         "output; expected "
                         f"{format_option_values('cache', 'io')}, or a source with states")
    if context > structure.rows or context < 2 + structure.least:
        held = "can have" if structure.caches else "has"
        raise InputError(f"{format_option_values('context', context)}: the cache {held} {structure.rows} rows; "
                         f"expected {2 + structure.least} to {structure.rows}; convert the source model again for more")
    if structure.steps not in (None, 1):
        raise InputError(f"the token ids '{structure.ids}' are (1, {structure.steps}); expected a flexible "
                         "number of tokens, or one: convert the source model again")
    if options.embedding == "one-hot" and structure.vocabulary > _MAX_ONE_HOT:
        raise InputError(f"{format_option_values('embedding', 'one-hot')}: the table has {structure.vocabulary:,} "
                         f"rows; expected {_MAX_ONE_HOT:,} at most, the inner dimension of a product, or "
                         f"{format_option_values('embedding', 'npy')}")
    if options.prefill is None or options.prefill == 1:
        return [1]
    if options.prefill >= context:
        raise InputError(f"{format_option_values('prefill', options.prefill)}: expected fewer tokens than the context, "
                         f"{context}")
    if structure.steps == 1:
        raise InputError(f"{format_option_values('prefill', options.prefill)}: the model processes one token per call; "
                         "convert the source model with a flexible number of tokens")
    return [1, options.prefill]


def _check_recurrent(options: AdaptOptions, structure: DecoderStructure) -> list[int]:
    """Check the options for a model whose states are replaced at each step."""
    for name, given, why in (
            ("context", options.context, "its states hold any number of tokens"),
            ("cache", None if options.cache == "io" else options.cache, "several states are reported to fail"),
            ("embedding", None if options.embedding == "package" else options.embedding,
             "token ids alone are looked up")):
        if given is not None:
            raise InputError(f"{format_option_values(name, given)}: the model is recurrent, it has states "
                             f"({', '.join(structure.states)}) and no attention: {why}; remove this option")
    if structure.steps not in (None, 1):
        raise InputError(f"the token ids '{structure.ids}' are (1, {structure.steps}); expected a flexible "
                         "number of tokens, or one: convert the source model again")
    return [1] if options.prefill in (None, 1) else [1, int(options.prefill or 1)]


def _check_tiles(options: AdaptOptions) -> None:
    from ..passes.targets import parse_target

    if options.head_tiles is None or options.head_tiles == 1:
        return
    if list(parse_target(options.target)) == list(parse_target(_SLOWER_CHIP)):
        raise InputError(f"{format_option_values('head_tiles', options.head_tiles)}: 262,144 outputs in 16 tiles were "
                         "measured to make a decoder 4.6 % slower (A19 Pro, CoreML-LLM), and to save time on no chip "
                         f"of the generation of {options.target}; expected another target, or no tiles")


def _check_parts(options: AdaptOptions) -> None:
    given = [(name, value) for name, value in (("parts", options.parts), ("max_part_size", options.max_part_size))
             if value is not None]
    if len(given) > 1:
        raise InputError(f"{' and '.join(format_option_values(*each) for each in given)}: each sets the number of "
                         "parts; expected one of them")
    if given and options.cache == "state":
        raise InputError(f"{format_option_values(*given[0])}: one state has the cache of all layers and must be in one "
                         f"part; expected {format_option_values('cache', 'io')}")


@dataclass(frozen=True)
class _Form:
    """A decoder for `count` tokens per call: the drafts of lookup and main model, and the name of the position.

    A recurrent model has no position. `once` is the draft of the values that are computed once for a prompt, or None;
    it runs before `main`.
    """

    count: int
    lookup: Draft
    main: Draft
    position: str | None
    once: Draft | None = None

    @property
    def name(self) -> str:
        return "decode" if self.count == 1 else "prefill"

    @property
    def drafts(self) -> list[Draft]:
        """The drafts in the order in which they run."""
        return [each for each in (self.lookup, self.once, self.main) if each is not None]


def _write_packages(
    options: AdaptOptions, forms: Sequence[_Form], structure: DecoderStructure, folder: Path, report: AdaptReport
) -> list[dict[str, Any]]:
    """Write and rewrite the packages; return the manifest of each form.

    If the model's version supports several functions, the forms are functions of the same packages, which store each
    weight once.
    """
    from ..package.interface import get_specification_version

    parts = [_describe_form(form, structure) for form in forms]
    function = forms[0].lookup.program.functions[structure.function]
    if len(forms) > 1 and get_specification_version(function) >= _MIN_VERSION_FUNCTIONS:
        joined = [_join_functions(drafts, [form.name for form in forms], structure) for drafts in (
            [form.lookup for form in forms], [form.main for form in forms])]
        mains = _write_pair(options, structure, joined, folder / _LOOKUP, folder / _MAIN, report)
        report.done.append(f"all packages have the functions {', '.join(form.name for form in forms)}, which share "
                           "weights")
        return [{**part, "lookup": _LOOKUP, "main": mains[form.name], "function": form.name}
                for part, form in zip(parts, forms)]
    for part, form in zip(parts, forms):
        part |= {"lookup": f"{form.name}_lookup.mlpackage", "function": None}
        mains = _write_pair(options, structure, [form.lookup, form.main], folder / part["lookup"],
                            folder / f"{form.name}.mlpackage", report)
        part["main"] = mains[structure.function]
    return parts


def _write_pair(
    options: AdaptOptions, structure: DecoderStructure, drafts: Sequence[Draft], lookup: Path, main: Path,
    report: AdaptReport,
) -> dict[str, list[dict[str, Any]]]:
    """Write the lookup package and the main package or its parts; return their manifest for each function."""
    from ..transforms.cache_rows import narrow_channels

    mains = _cut_main(options, drafts[1], report)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in drafts[1].program.functions}
    for draft in mains if len(mains) > 1 else ():
        draft.part = f"main_{draft.part}"
    paths = [main if len(mains) == 1 else main.with_name(f"{main.stem}_{number}.mlpackage")
             for number in range(1, len(mains) + 1)]
    for path, draft in zip(paths, mains, strict=True):
        for name, function in draft.program.functions.items():
            caches = {} if options.cache == "state" or structure.rows is None else {
                cache: narrow_channels(draft, name, cache) for cache in _list_caches(structure)
                if cache in function.inputs}
            found[name].append({"package": path.name, "caches": caches, "inputs": {
                each: describe_var(function.inputs[each])["dtype"] for each in function.inputs if each not in caches
                and not (options.cache == "state" and each == _CACHE)}})
    first, *made = emit_drafts([drafts[0], *mains], main.parent)
    first.rename(lookup)
    for source, path in zip(made, paths, strict=True):
        rewrite_package(options, source, path, report)
        if len(drafts[1].program.functions) > 1:
            share_weights(path)
    return found


def _write_once(
    options: AdaptOptions, structure: DecoderStructure, forms: Sequence[_Form], folder: Path, report: AdaptReport
) -> dict[str, Any] | None:
    """Write the package that runs once for a prompt, which is the same for all numbers of tokens; return its manifest.
    """
    draft = forms[0].once
    if draft is None:
        return None
    function = draft.program.functions[structure.function]
    outputs = {var.name: describe_var(var) for var in function.outputs}
    for form in forms[1:]:
        others = () if form.once is None else form.once.program.functions[structure.function].outputs
        if {var.name: describe_var(var) for var in others} != outputs:
            raise InputError(f"values that depend only on {', '.join(structure.fixed)} differ with the number of "
                             f"tokens per call ({', '.join(outputs)}); expected the same keys and values for each "
                             f"number, or no {format_option('prefill')}")
    made, = emit_drafts([draft], folder)
    rewrite_package(options, made, folder / _ONCE, report)
    nbytes = sum(int(np.prod(each["shape"])) * np.dtype(each["dtype"]).itemsize for each in outputs.values())
    report.done.append(f"{_ONCE} computes the values that depend only on {', '.join(function.inputs)} once per prompt: "
                       f"{format_count(len(outputs), 'value')}, {nbytes:,} bytes, which each call reads")
    return {"package": _ONCE, "inputs": {name: describe_var(var) for name, var in function.inputs.items()},
            "outputs": {name: each["dtype"] for name, each in outputs.items()}}


def _list_caches(structure: DecoderStructure) -> list[str]:
    """List the arrays that the caller keeps between calls."""
    return list(structure.caches or (structure.states if structure.rows is None else [_CACHE]))


def _cut_main(options: AdaptOptions, draft: Draft, report: AdaptReport) -> list[Draft]:
    """Cut the main package between its layers, as the options request."""
    from ..transforms.split_parts import SplitIntoParts
    from ..utils.byte_size import parse_byte_size

    if options.parts in (None, 1) and options.max_part_size is None:
        return [draft]
    most = None if options.max_part_size is None else parse_byte_size(options.max_part_size, "max_part_size")
    before = len(draft.done)
    found = SplitIntoParts(None if most is not None else options.parts, most, named="parts").apply(draft)
    report.done += [each.note for each in found[0].done[before:]]
    return found


def _join_functions(drafts: Sequence[Draft], names: Sequence[str], structure: DecoderStructure) -> Draft:
    """Combine drafts of the same package into one draft with all their functions; the first is the default."""
    first = drafts[0]
    functions = [draft.program.functions[structure.function] for draft in drafts]
    interfaces = [draft.interfaces[structure.function] for draft in drafts]
    first.program.functions = dict(zip(names, functions, strict=True))
    first.interfaces = dict(zip(names, interfaces, strict=True))
    first.program.default_function_name = names[0]
    return first


def _describe_form(form: _Form, structure: DecoderStructure) -> dict[str, Any]:
    lookup, main = (draft.program.functions[structure.function] for draft in (form.lookup, form.main))
    crossing = {var.name for var in lookup.outputs}
    inputs = {name: describe_var(main.inputs[name]) for name in main.inputs}
    return {"tokens": form.count, "lookups": {name: each["dtype"] for name, each in inputs.items() if name in crossing},
            "mask": None if structure.mask is None else {
                **inputs[structure.mask], "visible": 0.0, "hidden": _get_hidden()},
            "outputs": {var.name: describe_var(var) for var in main.outputs}}


def _get_hidden() -> float:
    from ..transforms.padding import MASKED

    return MASKED


def _transform(
    options: AdaptOptions, draft: Draft, structure: DecoderStructure, count: int
) -> _Form:
    """Apply the transforms for `count` tokens per call."""
    from coremltools.converters.mil.mil import types

    from ..ir.shape_inference import get_sizes
    from ..transforms.cache_rows import CacheRows
    from ..transforms.contract import Transform, apply_transforms
    from ..transforms.fix_shape import FixShape
    from ..transforms.io import Io
    from ..transforms.merge_states import MergeStates
    from ..transforms.pad_shape import PadShape
    from ..transforms.split_inputs import SplitConstantInputs, SplitInputs
    from ..transforms.state_to_io import StateToIo
    from ..transforms.token_input import TokenInput
    from ..transforms.unroll_steps import UnrollSteps

    function = draft.program.functions[structure.function]
    shapes = structure.get_fixed_shapes(function)
    if structure.steps is None:
        shapes[structure.ids] = (1, 1 if structure.mask is None else count)
    first: list[Transform] = [FixShape(shapes)] if shapes else []
    halved = [name for name in (structure.mask, *structure.caches, *structure.fixed)
              if name is not None and function.inputs[name].dtype != types.fp16]
    types_of_inputs: list[Transform] = [Io("fp16", halved)] if halved else []
    if structure.mask is None:
        draft, = apply_transforms(draft, [*first, *types_of_inputs, StateToIo()])
        outputs = {var.name for var in draft.program.functions[structure.function].outputs}
        states = {name: f"{name}_new" for name in structure.states if f"{name}_new" in outputs}
        several: list[Transform] = [] if count == 1 else [UnrollSteps(structure.ids, states, count)]
        lookup, main = apply_transforms(draft, [*several, SplitInputs([structure.ids])])
        return _Form(count, lookup, main, None)
    assert structure.rows is not None
    context = options.context or structure.rows
    sizes: dict[str, tuple[Any, ...]] = {structure.mask: (1, 1, (count, count), (count + structure.least, context))}
    for name in structure.caches:
        *outer, _, width = get_sizes(function.inputs[name].sym_type) or ()
        sizes[name] = (*outer, (structure.least, context - count), width)
    caches: list[Transform] = [CacheRows(structure.caches)] if structure.caches else [MergeStates(_CACHE)]
    draft, = apply_transforms(draft, [*first, PadShape(sizes), *caches, *types_of_inputs])
    positions = [change.new for change in draft.interfaces[structure.function].changes
                 if change.kind == "input" and change.old is None and change.new is not None]
    if positions[:1] != ["position"]:
        raise InputError("no rows are written to the cache at a position that follows from the length of "
                         f"'{structure.mask}'; expected a slice_update from E - T to E")
    rest: list[Transform] = [StateToIo()] if options.cache == "io" and not structure.caches else []
    integers = [structure.ids, positions[0]]
    if options.embedding != "package":
        rest.insert(0, TokenInput(structure.ids, _EMBEDDING, lambda table: partial(read_rows, table),
                                  options.embedding == "one-hot"))
        integers = [positions[0]]
    lookup, main = apply_transforms(draft, [*rest, SplitInputs(integers)])
    outputs = {var.name for var in main.program.functions[structure.function].outputs}
    if options.cache == "io" and not {f"{name}_rows" for name in _list_caches(structure)} <= outputs:
        raise InputError("not all layers write the cache as rows at the position; expected this form in all layers, or "
                         "convert the source model at float16, which casts no cache, or "
                         f"{format_option_values('cache', 'state')}")
    once: Draft | None = None
    if structure.fixed:
        *before, main = SplitConstantInputs(structure.fixed, optional=True).apply(main)
        main.part = "2"
        for once in before:
            once.part = "once"
    return _Form(count, lookup, main, positions[0], once)


def _read_table(function: Function, structure: DecoderStructure) -> dict[str, Any]:
    from ..transforms.decoder import find_lookup
    from ..transforms.stored_table import read_table

    lookup = find_lookup(function.inputs[structure.ids])
    assert lookup is not None
    return read_table(lookup.x)


def _tile_head(
    options: AdaptOptions, forms: Sequence[_Form], structure: DecoderStructure, report: AdaptReport
) -> None:
    """Cut the product of the logits into tiles, and report the published measurements of tiling.

    This runs after the comparison of all values; the logits of the tiles are compared when tokens are generated.
    """
    from ..ane.limits import find_limit
    from ..passes.targets import parse_target
    from ..transforms.tile_head import TileHead

    if options.head_tiles is None or options.head_tiles == 1:
        return
    outputs = forms[0].main.program.functions[structure.function].outputs
    width = int(next(var for var in outputs if var.name == structure.logits).shape[-1])
    for form in forms:
        draft = form.main
        before = len(draft.done)
        TileHead(structure.logits, options.head_tiles).apply(draft)
        report.done += [each.note for each in draft.done[before:]]
    limit = find_limit("spatial", parse_target(options.target))
    fits = limit is None or width <= limit.most
    report.done.append(
        f"{width:,} outputs {'fit' if fits else 'do not fit'} {options.target}"
        f"{f' ({limit.most:,} along an axis)' if limit is not None else ''}. Measured: 50,257 in 4 tiles take 3.4 ms a "
        "token, 10.8 without (M2 Pro, which they do not fit); where they fit, 8,192 take 38.8 ms, 39.8 in 2 tiles (M2 "
        "Pro, 1,024 rows); 262,144 in 16 tiles make a decoder 4.6 % slower (A19 Pro): measure it on the device")


def _list_logits(options: AdaptOptions, structure: DecoderStructure) -> list[str]:
    from ..transforms.tile_head import list_tiles

    tiled = options.head_tiles not in (None, 1)
    return list_tiles(structure.logits, options.head_tiles or 1) if tiled else [structure.logits]


def _write_embedding(
    options: AdaptOptions, before: Program, structure: DecoderStructure, form: _Form, folder: Path, report: AdaptReport
) -> dict[str, Any]:
    """Write the table of embeddings if it is a file; return its manifest, and report the trade-off."""
    from ..transforms.stored_table import describe_table, list_table_arrays

    if options.embedding == "package":
        return {"form": "package"}
    table = _read_table(before.functions[structure.function], structure)
    held = describe_var(form.main.program.functions[structure.function].inputs[_EMBEDDING])
    found = {"form": options.embedding, "input": _EMBEDDING, "dtype": held["dtype"]}
    arrays = list_table_arrays(table)
    nbytes = sum(each.nbytes for each in arrays.values())
    crossing = int(np.prod(held["shape"])) * np.dtype(held["dtype"]).itemsize
    if options.embedding == "npy":
        found |= describe_table(table, _EMBEDDING)
        for name, file in found["files"].items():
            np.save(folder / file, arrays[name])
        cost = f"the caller reads rows from files of {nbytes:,} bytes, {crossing:,} bytes cross a token"
    else:
        cost = (f"each call reads all {nbytes:,} bytes of the table and multiplies {structure.vocabulary:,} rows, "
                f"where a lookup reads one; {crossing:,} bytes cross a token")
    report.done.append(f"embedding as {options.embedding}: {cost}. One measurement found an embedding outside of the "
                       "model 2-3 % slower a call (gliclass): measure it on the device")
    return found


def _make_manifest(
    before: Program, structure: DecoderStructure, options: AdaptOptions, forms: Sequence[_Form],
    parts: Sequence[Mapping[str, Any]], embedding: Mapping[str, Any], once: Mapping[str, Any] | None,
    report: AdaptReport,
) -> dict[str, Any]:
    main = next(iter(forms[0].main.program.functions.values()))
    held = {name: describe_var(main.inputs[name]) for name in _list_caches(structure)}
    cache: dict[str, Any] = {"form": options.cache}
    if options.cache == "state":
        cache |= {"state": _CACHE, **held[_CACHE]}
    elif structure.rows is None:
        cache["arrays"] = [{"input": name, "output": f"{name}_new", "axis": None, **each}
                           for name, each in held.items()]
    else:
        cache["arrays"] = [{"input": name, "output": f"{name}_rows", "axis": 2, **each} for name, each in held.items()]
    return {
        "schema": 1, "kind": "decoder", "version": __version__, "context": options.context or structure.rows,
        "vocabulary": structure.vocabulary,
        "inputs": {"ids": structure.ids, "position": forms[0].position, "mask": structure.mask},
        "fixed": _describe_fixed(before, structure, forms[0]), "once": None if once is None else dict(once),
        "outputs": {"logits": _list_logits(options, structure)}, "cache": cache, "embedding": dict(embedding),
        "parts": [dict(part) for part in parts],
        "predicted": {"before": report.before, "after": report.after},
    }


def _describe_fixed(before: Program, structure: DecoderStructure, form: _Form) -> dict[str, Any]:
    """Describe inputs that are the same for all tokens; shorter ones are padded along `length_axes`."""
    from ..transforms.pad_shape import reaches_softmax

    found = {}
    for name in structure.fixed:
        functions = [next(iter(draft.program.functions.values())) for draft in form.drafts[::-1]]
        var = next(function.inputs[name] for function in functions if name in function.inputs)
        found[name] = describe_var(var) | {"length_axes": list(structure.lengths.get(name, ())), "padding": (
            _get_hidden() if reaches_softmax(before.functions[structure.function].inputs[name]) else 0.0)}
    return found


def _write_files(folder: Path, manifest: Mapping[str, Any]) -> None:
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    (folder / "generate.py").write_text(read_report_file("decoder", "generate.py"), encoding="utf-8")
    (folder / "README.md").write_text(_format_readme(manifest), encoding="utf-8")


def _compare_generations(before: Program, structure: DecoderStructure, folder: Path, report: AdaptReport) -> None:
    """Generate tokens with the source and with the packages, and compare tokens and logits of each step."""
    from ..report.decoder.generate import Decoder
    from ..runtime import Runtime, predictor
    from ..transforms.decoder import describe_lost_rows

    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    fixed = _make_fixed(before.functions[structure.function], structure)
    decoder = Decoder(folder, lambda path, function: predictor(path, function=function, precision="float32"), fixed)
    original = Runtime(before, function=structure.function, precision="float32")
    rng = np.random.default_rng(0)
    most = max(part["tokens"] for part in manifest["parts"])
    room = manifest["context"] or _PROMPT + _STEPS + 2
    length = min(max(_PROMPT, most + 3 if most > 1 else 1), room - 2)  # a chunk, and single tokens
    prompt = rng.integers(0, structure.vocabulary, max(1 + structure.least, length)).tolist()
    ids, end, worst = prompt, 0, 0.0
    state: dict[str, Any] = {}
    if structure.caches:
        state = _start_caches(before, structure, decoder, ids[:structure.least])
        ids, end = ids[structure.least:], structure.least
    for _ in range(min(_STEPS, room - len(prompt))):
        expected = np.zeros(0)
        for chunk in [ids] if structure.steps is None else [[each] for each in ids]:
            end += len(chunk)
            expected = _run_source(original, before, structure, chunk, end, state, fixed)
        found = decoder.feed(ids)
        scale = float(np.abs(expected).max()) or 1.0
        error = float(np.abs(expected - found).max()) / scale
        worst = max(worst, error)
        token = int(np.argmax(found))
        if not error <= LOGIT_BOUND or expected[int(np.argmax(expected))] - expected[token] > 2 * error * scale:
            report.status = "rejected"
            lost = describe_lost_rows(before.functions[structure.function])
            report.reason = (f"after {end} tokens the logits differ by {error:.1e} of the largest; {LOGIT_BOUND:g} is "
                             f"allowed{f'; likely cause: {lost}' if lost else ''}")
            return
        report.tokens.append(token)
        ids = [token]
    report.logit_error = worst


def _make_fixed(function: Function, structure: DecoderStructure) -> dict[str, Any]:
    """Make values of fixed inputs: masks that hide the last quarter of keys, and random numbers rounded to fp16.

    Inputs of flexible length are shorter than the longest, so that the padding is tested.
    """
    from coremltools.converters.mil.mil import types

    from ..ir.shape_inference import get_sizes
    from ..transforms.pad_shape import reaches_softmax

    rng = np.random.default_rng(1)
    found: dict[str, Any] = {}
    for name in structure.fixed:
        var = function.inputs[name]
        length = max(structure.shortest, 3 * structure.longest // 4)
        shape = tuple(size or length for size in get_sizes(var.sym_type) or ())
        hidden = np.arange(shape[-1]) >= shape[-1] - shape[-1] // 4
        value = np.broadcast_to(np.where(hidden, _get_hidden(), 0.0), shape) if reaches_softmax(
            var) else rng.standard_normal(shape)
        found[name] = value.astype(np.float16).astype(types.nptype_from_builtin(var.dtype))
    return found


def _start_caches(
    before: Program, structure: DecoderStructure, decoder: Any, ids: Sequence[int]
) -> dict[str, Any]:
    """Return the initial caches for the source, which may need some rows, taken from those of the packages."""
    from ..ir.shape_inference import get_sizes

    if ids:
        decoder.feed(ids)
    found = {}
    for name in structure.caches:
        var = before.functions[structure.function].inputs[name]
        *outer, _, width = get_sizes(var.sym_type) or ()
        rows = decoder.caches[name][:, :, :len(ids)]
        found[name] = np.reshape(rows, (*(size or 1 for size in outer), len(ids), width or 1))
    return found


def _run_source(
    original: Any, before: Program, structure: DecoderStructure, ids: Sequence[int], end: int, state: dict[str, Any],
    fixed: Mapping[str, Any],
) -> Any:
    """Run the source on new tokens, the last of which is at `end`; return the logits for the token after the last one.

    `state` has the states or, if the cache is input and output, its arrays; both are updated.
    """
    from coremltools.converters.mil.mil import types

    function = before.functions[structure.function]
    rows = np.where(np.arange(end)[None] <= np.arange(end - len(ids), end)[:, None], 0.0, _get_hidden())
    feeds = {structure.ids: np.array([ids], np.int32), **fixed}
    if structure.mask is not None:
        feeds[structure.mask] = rows[None, None].astype(
            types.nptype_from_builtin(function.inputs[structure.mask].dtype))
    if structure.caches:
        held = {name: state[name].astype(types.nptype_from_builtin(function.inputs[name].dtype)) for name in state}
        found = original({**feeds, **held})
        state |= {name: found[output] for name, output in structure.caches.items()}
    else:
        found = original(feeds, state)
    return select_last_row(found[structure.logits], len(ids)).astype(np.float64)


def _describe_calls(part: Mapping[str, Any]) -> str:
    """Describe the packages that a call runs."""
    names = [each["package"] for each in part["main"]]
    if len(names) == 1:
        return "two of them"
    return (f"the lookup, and the main model in {len(names)} parts, {', '.join(f'`{name}`' for name in names)}, in "
            "this order: each reads what the ones before it returned, and its channels of the cache (`caches` in "
            "`manifest.json`; the sketch below shows one part)")


def _describe_packages(parts: Sequence[Mapping[str, Any]], cache: str) -> str:
    if parts[0]["function"] is None:
        return "Packages, by the number of tokens of a call: see `parts` in `manifest.json`."
    listed = ", ".join(f"`{part['function']}` takes {part['tokens']} at a time" for part in parts)
    shared = ", and a state that one function made serves the other" if cache == "state" else ""
    return f"Packages with functions that share weights, by the number of tokens of a call: {listed}{shared}."


def _describe_memory(manifest: Mapping[str, Any], form: str) -> dict[str, str]:
    """Describe the memory between steps: a cache with a position and a mask, or states that each call replaces."""
    position, mask = manifest["inputs"]["position"], manifest["parts"][0]["mask"]
    read = {name for each in manifest["parts"][0]["main"] for name in each["inputs"]}
    fixed = "".join(f", {format_markdown_code(name)}" for name in (*manifest["fixed"], *(
        () if manifest["once"] is None else manifest["once"]["outputs"])) if name in read)
    if position is None:
        return {"READS": "token ids (integers)", "PLACE": "", "MASKED": "", "RISES": "", "POSITION_PARAMETER": "",
                "KEPT": f"{fixed} and the states", "WRITE": 'caches[name] = result.featureValue(for: name + "_new")!'
                ".multiArrayValue!", "MEMORY": "The model is recurrent: each call returns the states that the next one "
                "reads, and there is no limit to the number of tokens."}
    shape, hidden, name = _format_shape(mask), f"{mask['hidden']:g}", manifest["inputs"]["mask"]
    made = f"causalMask(shape: [{shape}], position: position, hidden: {hidden})"
    return {"READS": "token ids and the position (integers)" if form == "package" else "the position (an integer)",
            "PLACE": f'{", " if form == "package" else ""}{format_swift_string(position)}: int32Array([position])',
            "MASKED": f"    inputs[{format_swift_string(name)}] = {made}\n",
            "RISES": "; the position rises by the number of tokens of the call",
            "POSITION_PARAMETER": ", position: Int32", "KEPT": f", the mask{fixed} and the cache",
            "WRITE": 'write(result.featureValue(for: name + "_rows")!.multiArrayValue!, into: cache, axis: 2, at: '
                     "position)",
            "MEMORY": f"The context holds {manifest['context']} tokens. {format_markdown_code(name)} ({shape}) is 0 "
                      f"where a query sees a key, and {hidden} where it does not: query i of a call at position p sees "
                      "keys 0 ... p + i."}


def _describe_fixed_inputs(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Describe inputs that are the same for all tokens, and the package that reads them once."""
    fixed, once = manifest["fixed"], manifest["once"]
    named = {name: choose_identifier(name, number) for number, name in enumerate(fixed)}
    read = {name for part in manifest["parts"][:1] for each in part["main"] for name in each["inputs"]}
    given = "".join(f"    inputs[{format_swift_string(name)}] = {named[name]}  // the same for all tokens, "
                    f"{_format_shape(each)}\n" for name, each in fixed.items() if name in read)
    padded = [name for name, each in fixed.items() if each["length_axes"]]
    text = "".join(f" {format_markdown_code(name)} ({_format_shape(fixed[name])}) may be shorter: it is padded after "
                   f"its elements with {fixed[name]['padding']:g}." for name in padded)
    if once is None:
        return {"FIXED": given, "ONCE": "", "FIXED_TEXT": text}
    feeds = ", ".join(f"{format_swift_string(name)}: {named[name]}" for name in once["inputs"])
    shapes = "; ".join(f"{named[name]}: {_format_shape(each)}" for name, each in once["inputs"].items())
    made = (f"let once = try MLModel(contentsOf: onceURL, configuration: cpuAndNeuralEngine)\n"
            f"let kept = try once.prediction(from: features([{feeds}]))  // for each prompt; {shapes}\n")
    return {"FIXED": f"{given}    inputs.merge(copy(of: kept)) {{ $1 }}  // the same for all tokens\n", "ONCE": made,
            "FIXED_TEXT": f"{text} `{once['package']}` runs once for each prompt: it computes the values that "
                          f"depend only on {', '.join(map(format_markdown_code, once['inputs']))}, and each call reads "
                          "them."}


def _describe_logits(names: Sequence[str]) -> str:
    """Return Swift that reads the logits from `result`."""
    if len(names) == 1:
        return f"result.featureValue(for: {format_swift_string(names[0])})!.multiArrayValue!"
    listed = ", ".join(map(format_swift_string, names))
    return f"joinLast([{listed}].map {{ result.featureValue(for: $0)!.multiArrayValue! }})  // along the last axis"


def _format_shape(described: Mapping[str, Any]) -> str:
    return ", ".join(map(str, described["shape"]))


def _format_readme(manifest: Mapping[str, Any]) -> str:
    text = read_report_file("decoder", "README.txt")
    cache = manifest["cache"]
    part, form = manifest["parts"][0], manifest["embedding"]["form"]
    values = {
        "PACKAGES": _describe_packages(manifest["parts"], cache["form"]), "CALLS": _describe_calls(part),
        "FUNCTION": "" if part["function"] is None else (
            f'cpuOnly.functionName = "{part["function"]}"; cpuAndNeuralEngine.functionName = "{part["function"]}"\n'),
        "TOKEN": (f'{format_swift_string(manifest["inputs"]["ids"])}: int32Array([[token]])' if form == "package"
                  else ""),
        "EMBEDDING": {"npy": f'    inputs["{_EMBEDDING}"] = row(of: token)  // of embedding.npy, with its parameters\n',
                      "one-hot": f'    inputs["{_EMBEDDING}"] = oneHot(token)\n'}.get(form, ""),
        **_describe_memory(manifest, form), "CACHES": ", ".join(
            f'{format_swift_string(each["input"])}: {each["shape"]}' for each in cache.get("arrays", ())),
        "CACHE_SHAPE": ", ".join(map(str, cache.get("shape", ()))),
        "INPUTS": " --inputs inputs.npz" if manifest["fixed"] else "", **_describe_fixed_inputs(manifest),
        "LOGITS": _describe_logits(manifest["outputs"]["logits"]),
        "LOOKUPS": ", ".join(map(format_markdown_code, part["lookups"])),
        "LOOKUP_NAMES": escape_text(", ".join(part["lookups"])),
        "BEFORE": format_figures(manifest["predicted"]["before"]),
        "AFTER": format_figures(manifest["predicted"]["after"]),
    }
    shared, _, rest = text.partition("<!-- io -->\n")
    carried, _, rest = rest.partition("<!-- state -->\n")
    stateful, _, rest = rest.partition("<!-- end -->\n")
    text = shared + (carried if cache["form"] == "io" else stateful) + rest
    return fill_page(text, values)
