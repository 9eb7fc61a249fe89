"""Adaptation of encoders: a package of lookups and masks, a main package that reads only floats, a manifest, a README.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .._version import __version__
from ..utils.errors import AnePassesError
from ..utils.text_format import escape_text, format_markdown_code, format_python_string, format_swift_string
from .adapt_parts import (
    choose_identifier,
    compare_drafts,
    count_weight_bytes,
    describe_var,
    emit_drafts,
    fill_page,
    format_figures,
    measure_package,
    read_report_file,
    rewrite_package,
)

if TYPE_CHECKING:
    from coremltools.converters.mil.mil import Function, Program, Var

    from ..equivalence.equivalence import VerifyReport
    from ..equivalence.feeds import ShapeChoice
    from ..transforms.contract import Draft
    from ..transforms.encoder import EncoderStructure
    from .adapt import AdaptOptions, AdaptReport

__all__ = ["RESULT_BOUND", "write_encoder"]

RESULT_BOUND = 1e-2
"Largest allowed difference relative to an output's largest value: values between packages are fp16, rewrites round."
_GENERATION_NOTE = ("to generate text, convert the model with its cache in states; without a cache there is no "
                    "generate.py, and each token costs a call for the entire context")
_FORMS = ((1, True), (0, True), (1, False))
"Forms of integers that are not looked up (`shown` and `counts` of `_make_feeds`), of which a model accepts one."
_LOOKUP, _MAIN = "lookup.mlpackage", "encoder.mlpackage"


def write_encoder(
    options: AdaptOptions, before: Program, draft: Draft, structure: EncoderStructure, context: int | None,
    folder: Path, report: AdaptReport,
) -> None:
    """Write the packages of an encoder and their other files into `folder`; the report states a rejection."""
    options.progress("adapting")
    unstable: list[str] = []
    drafts, structure, reason = _transform(options, before, draft, structure, context, unstable)
    report.done = list(dict.fromkeys(each.note for part in drafts for each in part.done if each.changed))
    if reason:
        report.status, report.reason = "rejected", reason
        return
    made = emit_drafts(drafts, folder)
    if len(made) > 1:
        made[0].rename(folder / _LOOKUP)
    rewrite_package(options, made[-1], folder / _MAIN, report)
    report.after = measure_package(folder / _MAIN, options.target) | {"weight_bytes": count_weight_bytes(folder)}
    manifest = _make_manifest(before.functions[structure.function], drafts, structure, context, report)
    report.notes = _list_notes(manifest, structure)
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(_format_readme(manifest, report.notes), encoding="utf-8")
    if options.verify:
        options.progress("running")
        _compare_results(before, structure, manifest, folder, report, bool(unstable))


def _transform(
    options: AdaptOptions, before: Program, draft: Draft, structure: EncoderStructure, context: int | None,
    unstable: list[str],
) -> tuple[list[Draft], EncoderStructure, str]:
    """Apply the transforms; return the drafts, the structure (with the least possible length), and a description of the
    difference from the source, or "".

    Tables of positions that are stored rounded, such as those of rotary embeddings, differ from the values that the
    source computes. In this case the model before folding is compared with the source, and the drafts with the folded
    model. `_compare_results` then compares the drafts with the source, with a bound on the difference. The same holds
    for integers and booleans that jump where floats round, whose names are added to `unstable`.
    """
    from ..equivalence.changed_interfaces import compare_across_interfaces
    from ..ir.clone import clone_program
    from ..transforms.encoder import divide_encoder, fold_encoder, pad_encoder

    rounded: list[str] = []

    def evaluate(
        function: Function, values: Sequence[Var], precision: str, constants: Mapping[str, Any]
    ) -> list[Any]:
        arrays = evaluate_values(function, values, precision, constants, unstable)
        rounded.extend(var.name for var, array in zip(values, arrays) if _is_rounded(var, array))
        rounded.extend(unstable)
        return arrays

    function = before.functions[structure.function]
    padded, structure = pad_encoder(draft, structure, context)
    kept = padded.copy() if options.verify else padded
    folded = fold_encoder(padded, evaluate if options.verify or find_spec("torch") is not None else None)
    if not rounded or not options.verify:
        drafts = divide_encoder(folded, structure)
        if not options.verify:
            return drafts, structure, ""
        options.progress("comparing")
        found = _compare_inputs(partial(compare_drafts, before, drafts), function, structure)
        return drafts, structure, "" if found.equal else str(found)
    reference = clone_program(folded.program)
    drafts = divide_encoder(replace(folded, interfaces={}, rounded={}), structure)
    options.progress("comparing")
    for compare in (partial(compare_drafts, before, [kept]), partial(compare_across_interfaces, reference, drafts)):
        found = _compare_inputs(compare, function, structure)
        if not found.equal:
            return drafts, structure, str(found)
    return drafts, structure, ""


def _compare_inputs(
    compare: Callable[..., VerifyReport], function: Function, structure: EncoderStructure
) -> VerifyReport:
    """Compare programs on random inputs, or on inputs of the source as in `_draw_run` if those may not be valid.

    Random masks may hide the first token, which is the only one that it sees in a causal model, and its result is then
    undefined. Random integers may select no row of a table where the model subtracts them.
    """
    def draw(form: tuple[int, bool], feeds: dict[str, Any], choice: ShapeChoice, number: int) -> dict[str, Any]:
        length = next((choice.shapes[name][axis] for name, axes in structure.lengths.items() for axis in axes), None)
        lengths = {name: np.full_like(value, length) for name, value in feeds.items() if name not in function.inputs}
        return {**lengths, **_make_feeds(function, structure, length, number, *form)}

    first = compare()
    if first.equal or not structure.integers:
        return first
    return next((found for form in _FORMS if (found := compare(adjust=partial(draw, form))).equal), first)


def _is_rounded(var: Var, array: Any) -> bool:
    """Return whether floats change when they are stored in their dtype."""
    from coremltools.converters.mil.mil import types

    return bool(types.is_float(var.dtype)) and not np.array_equal(
        np.asarray(array).astype(types.nptype_from_builtin(var.dtype)), array, equal_nan=True)


def evaluate_values(
    function: Function, values: Sequence[Var], precision: str = "float64", constants: Mapping[str, Any] | None = None,
    unstable: list[str] | None = None,
) -> list[Any]:
    """Compute values that depend only on constants and on shapes that are fixed, at a precision of the runtime.

    `constants` has values of constants before they were rounded, by name, to compute from.

    Integers and booleans that are made of floats jump where these round otherwise: the bucket of a position by a
    logarithm has its borders at powers, where exact arithmetic gives an integer, and either float64 with constants
    that are stored rounded or the declared dtypes may give less. With a list `unstable`, the result at the border is
    chosen where the two differ, and the names of values whose result is then not that of float64 are added to it.
    Inputs whose shapes are read are zeros.
    """
    from coremltools.converters.mil.mil import Program, types

    from ..ir.block_editor import BlockEditor
    from ..ir.clone import clone_function
    from ..ir.constants import make_const
    from ..ir.shape_inference import get_sizes
    from ..runtime import Runtime

    clone = clone_function(function)
    names = {var.name for var in values}
    _reduce_to_values(clone, names)
    feeds = {name: np.zeros([size or 1 for size in get_sizes(var.sym_type) or ()], types.nptype_from_builtin(var.dtype))
             for name, var in clone.inputs.items() if types.is_tensor(var.sym_type)}

    def run(precision: str) -> dict[str, Any]:
        program = Program()
        program.add_function("main", clone)
        runtime = Runtime(program, function="main", precision=precision, constants=constants)
        return dict(runtime(feeds)) if clone.outputs else {}

    wanted, jumps = list(clone.outputs), [] if unstable is None else _find_jumps(clone)
    clone.set_outputs([*wanted, *(var for var in jumps if var.name not in names)])
    found = run(precision)
    declared = run("float16") if jumps else {}
    chosen = {var.name: _choose_at_border(var.op.op_type, found[var.name], declared[var.name]) for var in jumps}
    changed = [name for name, value in chosen.items() if not np.array_equal(value, found[name])]
    if unstable is not None and changed:
        unstable.extend(changed)
        with clone, BlockEditor() as editor:
            for var in jumps:
                value = np.asarray(chosen[var.name])
                editor.replace(var, make_const(value if value.ndim else value[()], var.dtype, _label_chosen(var.name),
                                               var.op))
        clone.set_outputs([var for var in clone.outputs if var.name in names])
        found = run(precision) | chosen
    return [found[var.name] for var in values]


def _reduce_to_values(function: Function, names: Collection[str]) -> None:
    """Make the values of these names the outputs of `function`, and remove what does not compute them."""
    from ..ir.block_editor import BlockEditor
    from ..ir.coremltools_internals import remove_function_input
    from ..transforms.dead_ops import get_read_vars

    function.set_outputs([var for op in function.operations for var in op.outputs if var.name in names])
    needed, unneeded = set(function.outputs), []
    for op in reversed(list(function.operations)):  # writes of states, too
        if needed.isdisjoint(op.outputs):
            unneeded.append(op)
        else:
            needed |= get_read_vars(op)
    with BlockEditor() as editor:
        editor.remove(unneeded)
    for name in [name for name, var in function.inputs.items() if not (var.child_ops or var.consuming_blocks)]:
        remove_function_input(function, name)


class _SourceAtBorders:
    """Runs a function at float32 with its jumps chosen at the borders, as `evaluate_values` folds them.

    At float16, results of all layers would be rounded as well, which is more than a bucket at a border changes.
    """

    def __init__(self, function: Function) -> None:
        from coremltools.converters.mil.mil import Placeholder, Program, get_new_symbol

        from ..ir.block_editor import BlockEditor
        from ..ir.clone import clone_function
        from ..ir.coremltools_internals import add_function_input
        from ..runtime import Runtime

        chosen, jumps = clone_function(function), clone_function(function)
        replaced = [var for var in _find_jumps(chosen) if var not in chosen.outputs]
        self._op_types = {var.name: var.op.op_type for var in replaced}
        _reduce_to_values(jumps, self._op_types.keys())
        with chosen, BlockEditor() as editor:
            for var in replaced:
                sizes = [size if isinstance(size, int | np.integer) else get_new_symbol() for size in var.shape]
                placeholder = Placeholder(tuple(sizes), var.dtype, name=_label_chosen(var.name), allow_rank0_input=True)
                placeholder.outputs[0].name = _label_chosen(var.name)
                add_function_input(chosen, _label_chosen(var.name), placeholder)
                editor.replace(var, placeholder.outputs[0])
        self._runtimes = []
        self._inputs = list(jumps.inputs)
        for part, precision in ((jumps, "float64"), (jumps, "float16"), (chosen, "float32")):
            program = Program()
            program.add_function("main", part)
            self._runtimes.append(Runtime(program, function="main", precision=precision))

    def __call__(self, feeds: dict[str, Any]) -> dict[str, Any]:
        """Return the outputs by name."""
        exact, declared = (runtime({name: feeds[name] for name in self._inputs}) for runtime in self._runtimes[:2])
        jumps = {_label_chosen(name): _choose_at_border(kind, exact[name], declared[name])
                 for name, kind in self._op_types.items()}
        return dict(self._runtimes[2]({**feeds, **jumps}))


def _label_chosen(name: str) -> str:
    return f"{name}_at_borders"


def _choose_at_border(op_type: str, exact: Any, declared: Any) -> Any:
    """Return, for each element, the result that is that of a number at the border between the two.

    A cast rounds towards zero, so that it gives more at the border than below it, and a comparison is as of equal
    numbers.
    """
    if op_type == "cast":
        return np.where(np.abs(declared) > np.abs(exact), declared, exact)
    if op_type in ("greater_equal", "less_equal", "equal"):
        return np.maximum(exact, declared)
    return np.minimum(exact, declared) if op_type in ("greater", "less", "not_equal") else declared


def _find_jumps(function: Function) -> list[Var]:
    """Return the integers and booleans that ops outside of blocks make of floats."""
    from coremltools.converters.mil.mil import types

    from ..ir.query import get_flat_inputs

    def is_array(var: Var) -> bool:
        return bool(types.is_tensor(var.sym_type) or types.is_scalar(var.sym_type))

    return [var for op in function.operations
            if any(is_array(each) and types.is_float(each.dtype) for each in get_flat_inputs(op))
            for var in op.outputs if is_array(var) and not types.is_float(var.dtype)]


def _make_manifest(
    before: Function, drafts: Sequence[Draft], structure: EncoderStructure, context: int | None, report: AdaptReport
) -> dict[str, Any]:
    functions = [draft.program.functions[structure.function] for draft in drafts]
    main = functions[-1]
    crossing = {var.name for var in functions[0].outputs} & set(main.inputs) if len(functions) > 1 else set()
    inputs: dict[str, Any] = {}
    length = None
    for function, package in zip(functions, (_LOOKUP, _MAIN) if len(functions) > 1 else (_MAIN,)):
        for name, var in function.inputs.items():
            if name in crossing:
                continue
            if name not in before.inputs:
                length = name
            else:
                inputs[name] = {**describe_var(var), "package": package, "length_axes": list(
                    structure.lengths.get(name, ())), "padding": _get_padding(before.inputs[name])}
    sources = {var.name for var in before.outputs}
    outputs = {}
    for function, package in zip(functions, (_LOOKUP, _MAIN) if len(functions) > 1 else (_MAIN,)):
        for var in function.outputs:
            if var.name in sources:
                axes = structure.results.get(var.name, {})
                outputs[var.name] = {**describe_var(var), "package": package, "length_axes": list(axes),
                                     "length_extra": list(axes.values())}
    return {
        "schema": 1, "kind": "encoder", "version": __version__, "context": context, "shortest": structure.least or None,
        "vocabulary": structure.vocabulary, "lookup": _LOOKUP if len(functions) > 1 else None, "main": _MAIN,
        "inputs": inputs, "length": length, "length_extra": structure.position,
        "lookups": {name: describe_var(main.inputs[name]) for name in main.inputs if name in crossing},
        "outputs": outputs, "predicted": {"before": report.before, "after": report.after},
    }


def _get_padding(var: Var) -> float:
    """Return the padding value of an input."""
    from ..transforms.pad_shape import find_mask_values

    mask = find_mask_values(var)
    return 0.0 if mask is None else mask.padding


def _compare_results(
    before: Program, structure: EncoderStructure, manifest: Mapping[str, Any], folder: Path, report: AdaptReport,
    unstable: bool,
) -> None:
    """Run the source and the packages at several real lengths, with and without masked tokens.

    With `unstable`, integers that jump where floats round are chosen in the source as in the packages.
    Results of masked tokens are not compared: if a token's whole attention window is masked, it has no valid result.
    """
    from ..runtime import Runtime, predictor

    function = before.functions[structure.function]
    original = _SourceAtBorders(function) if unstable else Runtime(before, function=structure.function,
                                                                   precision="float32")
    packages = {name: predictor(folder / name, precision="float32") for name in (manifest["lookup"], manifest["main"])
                if name is not None}
    lengths = _choose_lengths(manifest)
    worst = 0.0
    for number, length in enumerate(lengths):
        feeds, expected = _draw_run(original, function, structure, length, number)
        found = _run_packages(packages, manifest, feeds, length)
        for name, value in expected.items():
            seen = _slice_results(manifest["outputs"][name], length and _count_seen(length, number))
            scale = float(np.abs(value).max(initial=0.0)) or 1.0
            same = (value == found[name]) | np.isnan(value) & np.isnan(found[name])
            with np.errstate(invalid="ignore"):
                apart = np.where(same, 0.0, np.abs(value.astype(np.float64) - found[name]))
            error = float(apart[seen].max(initial=0.0)) / scale
            if not error <= RESULT_BOUND:
                report.status = "rejected"
                where = "" if length is None else f" at length {length}"
                report.reason = (f"output '{escape_text(name)}'{where} differs by {error:.1e} of the largest; "
                                 f"{RESULT_BOUND:g} is allowed")
                return
            worst = max(worst, error)
    report.lengths = sorted({length for length in lengths if length is not None})
    report.result_error = worst


def _choose_lengths(manifest: Mapping[str, Any]) -> list[int | None]:
    """Return the lengths to compare: both ends, and lengths between them; runs of odd index have masked tokens."""
    if manifest["context"] is None:
        return [None, None]
    low, high = min(manifest["shortest"], manifest["context"]), manifest["context"]
    between = {low, high, (low + high) // 2, low + (high - low) // 4, high - (high - low) // 8}
    return [length for length in sorted(between) for _ in range(2)]


def _count_seen(length: int, number: int) -> int:
    """Return the number of unmasked tokens of a run: all, or the first two thirds in runs of odd index."""
    return length if number % 2 == 0 else max(1, length - length // 3)


def _draw_run(
    original: Callable[[dict[str, Any]], dict[str, Any]], function: Function, structure: EncoderStructure,
    length: int | None, number: int,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Make the feeds of a run, and run the source; the results are finite if those of one of three forms are.

    Integers that are not looked up show keys by 1 and state the number of keys, hide keys by 1, or show keys by 1 and
    are otherwise 1 (`_FORMS`).
    """
    first: tuple[dict[str, Any], dict[str, Any]] | None = None
    for form in _FORMS:
        feeds = _make_feeds(function, structure, length, number, *form)
        try:
            expected = original(feeds)
        except AnePassesError:  # a number of keys that is no row of a table
            if form == _FORMS[-1] and first is None:
                raise
            continue
        if all(np.isfinite(value).all() for value in expected.values()):
            return feeds, expected
        first = first or (feeds, expected)
    assert first is not None
    return first


def _make_feeds(
    function: Function, structure: EncoderStructure, length: int | None, number: int, shown: int = 1,
    counts: bool = True,
) -> dict[str, Any]:
    """Make random tokens or features, and masks; in runs of odd index, the masks hide the last third.

    In integer masks, `shown` (0 or 1) is the value of keys that are shown; with `counts`, integers without an axis of
    the length are the number of these keys, else 1.
    """
    from coremltools.converters.mil.mil import types

    from ..equivalence.feeds import find_compared_values
    from ..ir.shape_inference import get_sizes
    from ..transforms.decoder import find_lookup
    from ..transforms.pad_shape import find_mask_values

    rng, compared = np.random.default_rng(number), find_compared_values(function)
    feeds: dict[str, Any] = {}
    for name, var in function.inputs.items():
        axes = structure.lengths.get(name, ())
        sizes = enumerate(get_sizes(var.sym_type) or ())
        shape = tuple((length if axis in axes else size) or 1 for axis, size in sizes)
        dtype = types.nptype_from_builtin(var.dtype)
        hidden = np.arange(shape[-1]) >= _count_seen(shape[-1], number)
        lookup = find_lookup(var) if name in structure.ids else None
        value: Any
        if lookup is not None:
            value = rng.integers(0, int(lookup.x.shape[0]), shape)
            if 0 <= compared.get(name, -1) < int(lookup.x.shape[0]):
                value = np.where(hidden, compared[name], value)
        elif name in structure.integers and axes:
            value = np.broadcast_to(np.where(hidden, 1 - shown, shown), shape)
        elif name in structure.integers:
            value = np.full(shape, _count_seen(length, number) if counts and length else 1)
        elif (mask := find_mask_values(var)) is not None:
            value = np.broadcast_to(np.where(hidden, mask.hidden, mask.shown), shape)
        else:
            value = rng.standard_normal(shape)
        feeds[name] = np.ascontiguousarray(value).astype(dtype)
    return feeds


def _run_packages(
    packages: Mapping[str, Any], manifest: Mapping[str, Any], feeds: Mapping[str, Any], length: int | None
) -> dict[str, Any]:
    """Run the packages as the manifest describes, and cut results to the real length."""
    padded: dict[str, dict[str, Any]] = {name: {} for name in packages}
    for name, each in manifest["inputs"].items():
        widths = [(0, size - held) for size, held in zip(each["shape"], feeds[name].shape, strict=True)]
        padded[each["package"]][name] = np.pad(feeds[name], widths, constant_values=each["padding"]).astype(
            each["dtype"])
    if manifest["length"] is not None:
        padded[manifest["lookup"] or manifest["main"]][manifest["length"]] = np.array(
            [int(length or 0) + manifest["length_extra"]], np.int32)
    results: dict[str, Any] = {}
    if manifest["lookup"] is not None:
        results = dict(packages[manifest["lookup"]].predict(padded[manifest["lookup"]]))
        padded[manifest["main"]] |= {name: np.asarray(results[name]).astype(each["dtype"])
                                     for name, each in manifest["lookups"].items()}
    results |= packages[manifest["main"]].predict(padded[manifest["main"]])
    return {name: np.asarray(results[name])[_slice_results(each, length)] for name, each in manifest["outputs"].items()}


def _slice_results(output: Mapping[str, Any], length: int | None) -> tuple[slice, ...]:
    """Return the part of an output that has the results of `length` tokens."""
    extra = dict(zip(output["length_axes"], output["length_extra"], strict=True))
    return tuple(slice(0, max(0, length + extra[axis]) if length is not None and axis in extra else None)
                 for axis in range(len(output["shape"])))


def _list_notes(manifest: Mapping[str, Any], structure: EncoderStructure) -> list[str]:
    """Return a note for each output that has a value for each token of the vocabulary: logits of a language model.

    Decoders that were converted without their cache are adapted as encoders, for which there is no generate.py. Where
    the length is fixed, logits have as many rows as there are token ids.
    """
    vocabulary = manifest["vocabulary"]
    counts = {manifest["inputs"][name]["shape"][-1] for name in structure.ids}

    def has_rows(shape: Sequence[int], lengths: Sequence[int]) -> bool:
        return bool(lengths) if structure.lengths else len(shape) > 1 and shape[-2] in counts

    return [f"output '{name}' has a value for each of the {vocabulary} tokens of the vocabulary: {_GENERATION_NOTE}"
            for name, each in manifest["outputs"].items()
            if vocabulary is not None and each["shape"][-1:] == [vocabulary] and has_rows(each["shape"],
                                                                                          each["length_axes"])]


def _format_readme(manifest: Mapping[str, Any], notes: Sequence[str]) -> str:
    """Fill in the README, which describes the calls of the packages."""
    text = read_report_file("encoder", "README.txt")
    shared, _, rest = text.partition("<!-- two -->\n")
    two, _, rest = rest.partition("<!-- one -->\n")
    one, _, rest = rest.partition("<!-- end -->\n")
    text = shared + (one if manifest["lookup"] is None else two) + rest
    lines = [f"| {format_markdown_code(name, in_table=True)} | {each['package']} | {each['dtype']} | "
             f"({', '.join(map(str, each['shape']))}) | {each['padding']:g} |"
             for name, each in manifest["inputs"].items()]
    if manifest["length"] is not None:
        more = f" plus {manifest['length_extra']}" if manifest["length_extra"] else ""
        lines.append(f"| {format_markdown_code(manifest['length'], in_table=True)} | "
                     f"{manifest['lookup'] or manifest['main']} | int32 | (1) | the number of real tokens{more} |")
    context = "Inputs have the sizes of the source." if manifest["context"] is None else (
        f"Inputs are padded to {manifest['context']} tokens: real values first, then the padding value of the table. "
        f"Ignore results after the real length{_format_extra(manifest)}.")
    if notes:
        context += f" There are results for each token of the vocabulary: {_GENERATION_NOTE}."
    values = {
        "INPUTS": "\n".join(lines), "CONTEXT": context,
        "OUTPUTS": ", ".join(f"{format_markdown_code(name)} ({', '.join(map(str, each['shape']))})"
                             for name, each in manifest["outputs"].items()),
        "LOOKUPS": ", ".join(map(format_markdown_code, manifest["lookups"])),
        "LOOKUP_FEEDS": _format_feeds(manifest, manifest["lookup"], format_python_string),
        "MAIN_FEEDS": (feeds := _format_feeds(manifest, manifest["main"], format_python_string)),
        "MORE": f", {feeds}" if feeds else "",
        "SWIFT_LOOKUP_FEEDS": _format_feeds(manifest, manifest["lookup"], format_swift_string),
        "SWIFT_MAIN_FEEDS": _format_feeds(manifest, manifest["main"], format_swift_string),
        "FIRST_OUTPUT": format_python_string(next(iter(manifest["outputs"]))),
        "BEFORE": format_figures(manifest["predicted"]["before"]),
        "AFTER": format_figures(manifest["predicted"]["after"]),
    }
    return fill_page(text, values)


def _format_extra(manifest: Mapping[str, Any]) -> str:
    """Format which outputs have more or fewer results than real tokens."""
    extra = [(name, count) for name, each in manifest["outputs"].items()
             for count in dict.fromkeys(each["length_extra"]) if count]
    return "".join(
        f"{', and' if place else ':'} {format_markdown_code(name)} has {abs(count)} {'more' if count > 0 else 'fewer'} "
        "than tokens" for place, (name, count) in enumerate(extra))


def _format_feeds(manifest: Mapping[str, Any], package: str | None, format_string: Callable[[str], str]) -> str:
    names = [name for name, each in manifest["inputs"].items() if each["package"] == package]
    if manifest["length"] is not None and package == (manifest["lookup"] or manifest["main"]):
        names.append(manifest["length"])
    return ", ".join(f"{format_string(name)}: {choose_identifier(name, number)}" for number, name in enumerate(names))
