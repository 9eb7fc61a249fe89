"""Checks that every rule must pass, ours and those of plugins."""

from __future__ import annotations

import inspect
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.frontend.milproto.load import load as load_with_coremltools
from coremltools.converters.mil.mil import Builder, Program, types
from coremltools.converters.mil.mil.passes.pass_pipeline import PassPipelineManager
from coremltools.converters.mil.mil.types.symbolic import is_symbolic

from ..ane import predict_plan
from ..equivalence.comparison import Strictness, compare_outputs, fill_undefined
from ..equivalence.execution import Plan
from ..equivalence.feeds import make_state
from ..equivalence.interface_widths import InterfaceWidths, find_interface_widths
from ..equivalence.range_measurement import make_measurer
from ..ir.clone import clone_program
from ..ir.printer import format_function_body, format_program
from ..ir.query import iterate_ops
from ..ir.value_ranges import Measure, MeasuredRanges, Range
from ..package import load, save
from ..passes.contract import BlockRewrite, Exactness, Example, Miss, PlanRule, ProgramRewrite, Rewrite, Rule
from ..passes.engine import PassTrace, apply_rewrite, find_matches, iterate_hits_and_misses
from ..passes.pass_trace import record_result
from ..passes.rule_class import assign_default_name, find_flaw, format_class_location, is_own_rule
from ..runtime import Runtime
from ..utils.errors import InputError
from . import program_variants
from .neighbours import FUNCTION_INPUT, iterate_failures, list_representative_op_types

__all__ = ["CHECKS", "Check", "collect_miss_reasons", "find_rule_matches", "select_checks"]


Array = np.ndarray[Any, Any]
Check = Callable[[type[Rule], Path], None]
_PRECISIONS = ("float64", "float16")
# Stands for a symbolic extent where a static shape is needed.
_SYMBOLIC_EXTENT = 8
_MAX_RANK = 5
"The rank above which coremltools does not convert a program."
NORMAL_DRAWS = "normal draws"
_DISSIMILAR_PRODUCERS = (FUNCTION_INPUT, "select", "concat", "cond", "fill_like")
"Producers that share no input name: none has `x`."
_TYPES_PER_INPUT = 3
"How many of the other op types are tried at each input; all of them in a slow test."


def _iterate_examples(rule: type[Rule], fires: bool | None = None) -> Iterator[tuple[Rule, Example]]:
    for example in assign_default_name(rule)().examples():
        if fires is None or fires == (example.reason is None):
            yield rule.configured(**example.options), example


def _iterate_firing_examples(rule: type[Rule]) -> Iterator[tuple[Rewrite, Example]]:
    for configured, example in _iterate_examples(rule, fires=True):
        if isinstance(configured, Rewrite):
            yield configured, example


def _apply_to_example(rule: Rewrite, example: Example, program: Program) -> PassTrace:
    """Run `rule`, with the ranges measured on the example's default feeds if the example asks for them."""
    return apply_rewrite(rule, program, measure=_make_measure(example))


def _make_measure(example: Example) -> Measure | None:
    def make_plans(program: Program) -> list[Plan]:
        state = make_state(program.functions["main"], 0)
        drawn = next(feeds for label, feeds in _iterate_feeds(program, example) if label == NORMAL_DRAWS)
        mirrored = {name: -value if value.dtype.kind == "f" else value for name, value in drawn.items()}
        return [Plan("main", NORMAL_DRAWS, drawn, state), Plan("main", "their opposites", mirrored, state)]

    return make_measurer(make_plans) if example.measured else None


def check_required_fields(rule: type[Rule], tmp_path: Path) -> None:
    """Check that code, slug, evidence and other fields exist and are well-formed, and that the code is not reserved."""
    wrong = find_flaw(assign_default_name(rule), ours=is_own_rule(rule))
    assert not wrong, f"{format_class_location(rule)} {wrong}"


def check_docstring_example(rule: type[Rule], tmp_path: Path) -> None:
    """Check that the docstring's before and after are the printed programs of the first example."""
    for configured, example in list(_iterate_firing_examples(rule))[:1]:
        Builder.name_count.clear()  # as coremltools does before each conversion: resets the numbering of names
        program = example.build()
        before = format_function_body(program.functions["main"])
        _apply_to_example(configured, example, program)
        after = format_function_body(program.functions["main"])
        block = f"before\n{textwrap.indent(before, '    ')}\nafter\n{textwrap.indent(after, '    ')}"
        assert block in (inspect.getdoc(rule) or ""), f"paste this into the docstring of {rule.__name__}:\n{block}"


def check_examples(rule: type[Rule], tmp_path: Path) -> None:
    """Check that a firing example fires and a near miss gives its exact reason.

    An empty reason means no near miss at all.
    """
    count = Counter(example.reason is None for _, example in _iterate_examples(rule))
    assert count[True] and count[False], "give at least one example that fires and one that does not"
    for configured, example in _iterate_examples(rule):
        program = example.build()
        if example.reason is None:
            assert find_rule_matches(configured, program, _make_measure(example)).fired, (
                f"example '{example.name}' does not fire"
            )
        else:
            assert not find_rule_matches(configured, program, _make_measure(example)).fired, (
                f"near miss '{example.name}' fires"
            )
            reasons = collect_miss_reasons(configured, program, _make_measure(example))
            assert (example.reason in reasons) if example.reason else not reasons, (example.name, reasons)


def check_neighbouring_ops(rule: type[Rule], tmp_path: Path) -> None:
    """Check that no op type that feeds an input of an example's op, or reads its result, makes the rule fail.

    Each input is tried with ops that share no input names, and with some of all others in turn.
    """
    if issubclass(rule, PlanRule):  # matches predictions, not ops
        return
    others = list_representative_op_types()

    def list_kinds(number: int) -> list[str]:
        turn = [others[(number * _TYPES_PER_INPUT + step) % len(others)] for step in range(_TYPES_PER_INPUT)]
        return [*_DISSIMILAR_PRODUCERS, *turn]

    found = list(iterate_neighbour_failures(rule, list_kinds, fires=True))
    assert not found, "\n".join(found)


def iterate_neighbour_failures(rule: type[Rule], kinds: Callable[[int], Sequence[str]], fires: bool | None = None
                               ) -> Iterator[str]:
    """Describe how matching fails when ops of `kinds` are next to those of the rule's examples (that fire)."""
    def run_match(configured: Rule, program: Program) -> None:
        for _ in iterate_hits_and_misses(
            configured, program, measure=_make_assumed_ranges if configured.measures else None
        ):
            pass

    yield from iterate_failures(((example.name, example.build(), partial(run_match, configured))
                                 for configured, example in _iterate_examples(rule, fires)), kinds)


def _make_assumed_ranges(program: Program) -> MeasuredRanges:
    """Make ordinary ranges for all values, without a run."""
    made = [var for _, op in iterate_ops(program) for var in op.outputs]
    given = [var for function in program.functions.values() for var in function.inputs.values()]
    return MeasuredRanges({var: Range(-4.0, 4.0, 0.1, partial=16.0) for var in (*given, *made)}, lambda _: 0.0)


def check_find_agrees_with_rewrite(rule: type[Rule], tmp_path: Path) -> None:
    """Check that `apply_rewrite` acts on every match that `find_matches` reports."""
    for configured, example in _iterate_firing_examples(rule):
        program = example.build()
        found = {hit.value for hit in find_rule_matches(configured, program, _make_measure(example)).fired}
        acted = {hit.value for hit in _apply_to_example(configured, example, program).fired}
        assert found <= acted, (example.name, found, acted)


def check_idempotence(rule: type[Rule], tmp_path: Path) -> None:
    for configured, example in _iterate_firing_examples(rule):
        program = example.build()
        _apply_to_example(configured, example, program)
        text = format_program(program)
        assert not _apply_to_example(configured, example, program).fired, (
            f"'{example.name}' fires again on its own result"
        )
        assert format_program(program) == text, f"'{example.name}' changed although the run matched nothing"


def check_equivalence(rule: type[Rule], tmp_path: Path) -> None:
    """Check for equal outputs at the declared exactness, on ordinary and on extreme inputs."""
    for configured, example in _iterate_firing_examples(rule):
        _rewrite_and_compare(configured, example.build(), example)


def check_equivalence_observed(rule: type[Rule], tmp_path: Path) -> None:
    """Check equivalence if every intermediate value has another user."""
    for configured, example in _iterate_firing_examples(rule):
        _rewrite_and_compare(configured, program_variants.make_observed(example.build()), example, fires=False)


def check_equivalence_nested(rule: type[Rule], tmp_path: Path) -> None:
    for configured, example in _iterate_firing_examples(rule):
        trace = _rewrite_and_compare(configured, program_variants.make_nested(example.build()), example)
        one = isinstance(configured, ProgramRewrite) or configured.interface
        assert len(trace.fired) >= 2 or one, "expected a hit in each branch"


def check_equivalence_repeated(rule: type[Rule], tmp_path: Path) -> None:
    """Check three copies that share consts: all are rewritten, no weight is duplicated, and added consts are shared."""
    for configured, example in _iterate_firing_examples(rule):
        once = example.build()
        without = _count_weight_bytes(once)
        _apply_to_example(configured, example, once)
        program = program_variants.make_repeated(example.build())
        before = _count_weight_bytes(program) + max(0, _count_weight_bytes(once) - without)
        trace = _rewrite_and_compare(configured, program, example)
        # Copies that share an input may be one region; the input itself is one, and so is the program.
        one = isinstance(configured, (BlockRewrite, ProgramRewrite)) or configured.interface
        expected = 1 if one else 3
        assert len(trace.fired) >= expected, (example.name, len(trace.fired))
        assert _count_weight_bytes(program) <= before, f"'{example.name}' duplicates weights"


def _count_weight_bytes(program: Program) -> int:
    """Count the bytes of the floating-point consts; bytes that several of them share are counted once."""
    values = [op.outputs[0].val for _, op in iterate_ops(program) if op.op_type == "const"]
    arrays = [value for value in values if isinstance(value, np.ndarray) and value.dtype.kind == "f"]
    return sum({(array.__array_interface__["data"][0], array.nbytes): array.nbytes for array in arrays}.values())


def check_equivalence_symbolic(rule: type[Rule], tmp_path: Path) -> None:
    """Check equivalence with a symbolic batch, last axis, or both; a rule may skip these, but not fail."""
    for configured, example in _iterate_firing_examples(rule):
        for axes in ((0,), (-1,), (0, -1)):
            program = program_variants.make_symbolic(example.build(), axes)
            if program is not None and _is_runnable(program, example):
                _rewrite_and_compare(configured, program, example, f"axes {axes}", fires=False)


def _is_runnable(program: Program, example: Example) -> bool:
    """Return whether `program` accepts the drawn sizes: a batch and the rows of a state may both be symbolic."""
    try:
        Runtime(program, precision="float64")(next(_iterate_feeds(program, example))[1])
    except InputError:
        return False
    return True


def check_weights_stay_compressed(rule: type[Rule], tmp_path: Path) -> None:
    for configured, example in _iterate_firing_examples(rule):
        for kind in program_variants.COMPRESSIONS:
            program = program_variants.make_compressed(example.build(), kind)
            if program is None:
                continue
            before = _count_unpacked_elements(program)
            _rewrite_and_compare(configured, program, example, kind, fires=False)
            assert _count_unpacked_elements(program) == before, (
                f"'{example.name}': compressed weights changed in kind, or in the number of their elements"
            )


def _count_unpacked_elements(program: Program) -> Counter[str]:
    """Count the elements of compressed weights by the op that unpacks them; a weight that is cut has as many."""
    counted: Counter[str] = Counter()
    for _, op in iterate_ops(program):
        if op.op_type.startswith("constexpr_"):
            counted[op.op_type] += sum(int(np.prod(out.shape)) for out in op.outputs)
    return counted


def check_coremltools_pipeline(rule: type[Rule], tmp_path: Path) -> None:
    """Check that the program stays correct before and after a run of coremltools' default pipeline."""
    for configured, example in _iterate_firing_examples(rule):
        program = example.build()
        before = clone_program(program)
        PassPipelineManager.apply_pipeline(program, ct.PassPipeline.DEFAULT)
        _rewrite_and_compare(configured, program, example, fires=False)
        PassPipelineManager.apply_pipeline(program, ct.PassPipeline.DEFAULT)
        program.validate()
        _assert_equivalent(before, program, example, _weaken_strictness(configured), "after coremltools' pipeline")


def check_save_and_load(rule: type[Rule], tmp_path: Path) -> None:
    """Check that a rewritten package, saved and loaded again, contains the same program.

    This includes programs with symbolic sizes in which later ops use the rewritten values: a file does not name
    symbols. coremltools must be able to read it, too, for example to compress its weights.
    """
    for number, (configured, example, program) in enumerate(_iterate_saved_examples(rule)):
        made = [var for _, op in iterate_ops(program) for var in op.outputs if types.is_tensor(var.sym_type)]
        if any(var.rank > _MAX_RANK for var in made):
            continue  # coremltools converts it only once it is rewritten
        model = ct.convert(program, convert_to="mlprogram", pass_pipeline=ct.PassPipeline.EMPTY, skip_model_load=True,
                           minimum_deployment_target=program.functions["main"].opset_version)
        source = tmp_path / f"{number}.mlpackage"
        model.save(str(source))
        package = load(source)
        before = clone_program(package.program)
        if not _apply_to_example(
            configured, example, package.program
        ).fired:  # coremltools may have taken the pattern apart
            continue
        target = tmp_path / f"{number}_rewritten.mlpackage"
        save(package, target)
        fault = _find_reading_fault(target)
        assert not fault or fault == _find_reading_fault(source), f"{example.name}: coremltools fails with {fault}"
        again = load(target)
        assert format_program(again.program) == format_program(package.program), example.name
        _assert_equivalent(before, again.program, example, _make_strictness(configured, configured.exactness))


def _find_reading_fault(path: Path) -> str:
    """Return the error with which coremltools fails to read a package, empty if it reads it."""
    model = ct.models.MLModel(str(path), skip_model_load=True)
    spec = model.get_spec()
    try:
        load_with_coremltools(spec, spec.specificationVersion, model.weights_dir)
    except Exception as error:  # of any type: its inference of each op may fail
        return f"{type(error).__name__}: {error}"
    return ""


def _iterate_saved_examples(rule: type[Rule]) -> Iterator[tuple[Rewrite, Example, Program]]:
    """Yield each example that fires, and the first of them that can be built with symbolic sizes, continued."""
    pending = True
    for configured, example in _iterate_firing_examples(rule):
        yield configured, example, example.build()
        for axes in ((0, -1), (-1,), (0,)) if pending else ():
            program = program_variants.make_symbolic(example.build(), axes)
            if (
                program is not None
                and _is_runnable(program, example)
                and _apply_to_example(configured, example, clone_program(program)).fired
            ):
                pending = False
                yield configured, example, program_variants.continued(program)
                break


def _make_strictness(rule: Rewrite, exactness: Exactness) -> Strictness:
    return Strictness(exactness, rule.fixes_nonfinite, rule.moves, ulps=rule.ulps)


def _weaken_strictness(rule: Rewrite) -> Strictness:
    """Weaken a guarantee for programs in which coremltools has rounded, too."""
    return _make_strictness(rule, Exactness.ROUNDING if rule.exactness is Exactness.BITWISE else rule.exactness)


def _rewrite_and_compare(
    rule: Rewrite, program: Program, example: Example, how: str = "", fires: bool = True
) -> PassTrace:
    """Run `rule` in place and compare the result with the original program."""
    before = clone_program(program)
    trace = _apply_to_example(rule, example, program)
    program.validate()
    assert trace.fired or not fires, f"'{example.name}' {how} does not fire"
    promised = _make_strictness(rule, trace.strength or Exactness.BITWISE)
    promised = replace(promised, fixes_nonfinite=promised.fixes_nonfinite or trace.fixes_nonfinite)
    _assert_equivalent(before, program, example, promised, how)
    return trace


def _assert_equivalent(before: Program, after: Program, example: Example, promised: Strictness, how: str = "") -> None:
    across = find_interface_widths(before, after).get("main", InterfaceWidths())
    runs_before, runs_after, runs_limit = (
        _PrecisionRuntimes(before),
        _PrecisionRuntimes(after),
        _PrecisionRuntimes(before, finite_constants=True),
    )
    for label, drawn in _iterate_feeds(before, example):
        feeds = across.round_to_narrower(drawn)
        old, new = runs_before(feeds), runs_after(feeds)
        if promised.fixes_nonfinite:
            old = fill_undefined(old, runs_limit(feeds), new)
        for precision in _PRECISIONS:
            given = None if precision == "float64" else old["float64"]
            found = compare_outputs(across.convert_outputs(old[precision]), new[precision], promised, given)
            wrong = [str(difference) for difference in found if not difference.passed]
            assert not wrong, (f"'{example.name}' {how}, {label} at {precision}: {'; '.join(wrong)} (a rewrite that "
                               f"rounds constants anew declares it by `moves`)\n{format_program(after)}")


class _PrecisionRuntimes:
    """Runtimes of a program at every compared precision, built once for all feeds."""

    def __init__(self, program: Program, finite_constants: bool = False) -> None:
        self._runtimes = {precision: Runtime(program, precision=precision, finite_constants=finite_constants)
                          for precision in _PRECISIONS}

    def __call__(self, feeds: Mapping[str, Array]) -> dict[str, dict[str, Array]]:
        return {precision: runtime(feeds) for precision, runtime in self._runtimes.items()}


def _iterate_feeds(program: Program, example: Example) -> Iterator[tuple[str, dict[str, np.ndarray[Any, Any]]]]:
    """Yield feeds of ordinary numbers, zeros of both signs, infinities, NaN, and the ends of fp16."""
    random = np.random.default_rng(0)
    special = {
        "zeros": [0.0], "signed zeros": [0.0, -0.0], "infinities": [np.inf, -np.inf, 1.0], "nan": [np.nan, 1.0],
        "fp16 extremes": [65504.0, -65504.0, 6e-8, -6e-8, 6.1e-5],
    }
    inputs = program.functions["main"].inputs.items()
    yield (
        NORMAL_DRAWS,
        {
            name: _cast_to_input(
                var, _clip_to_example(example, random.standard_normal(_get_concrete_shape(var)) * example.scale)
            )
            for name, var in inputs
        },
    )
    for label, values in special.items():
        yield (
            label,
            {
                name: _cast_to_input(var, _clip_to_example(example, random.choice(values, _get_concrete_shape(var))))
                for name, var in inputs
            },
        )


def _clip_to_example(example: Example, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return values.clip(-example.within, example.within)


def _get_concrete_shape(var: Any) -> tuple[int, ...]:
    return tuple(_SYMBOLIC_EXTENT if is_symbolic(extent) else int(extent) for extent in var.shape)


def _cast_to_input(var: Any, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    dtype = types.nptype_from_builtin(var.dtype)
    return values.astype(dtype) if types.is_float(var.dtype) else np.nan_to_num(np.abs(values)).clip(0, 1).astype(dtype)


CHECKS: tuple[Check, ...] = (
    check_required_fields,
    check_docstring_example,
    check_examples,
    check_neighbouring_ops,
    check_find_agrees_with_rewrite,
    check_idempotence,
    check_equivalence,
    check_equivalence_observed,
    check_equivalence_nested,
    check_equivalence_repeated,
    check_equivalence_symbolic,
    check_weights_stay_compressed,
    check_coremltools_pipeline,
    check_save_and_load,
)

_CHECKS_OF_MATCHING = (check_required_fields, check_examples, check_neighbouring_ops)
"Checks that need no rewrite."


def select_checks(rule: type[Rule]) -> tuple[Check, ...]:
    """Select the checks of `CHECKS` that have something to check: most compare the programs before and after a rewrite.

    A plan rule matches predictions, not ops, so it is not tried next to other ops.
    """
    checks = CHECKS if issubclass(rule, Rewrite) else _CHECKS_OF_MATCHING
    return tuple(check for check in checks if check is not check_neighbouring_ops or not issubclass(rule, PlanRule))


def find_rule_matches(rule: Rule, program: Program, measure: Measure | None = None) -> PassTrace:
    """Find matches as `find_matches` does; a plan rule is matched on a plan predicted without any other rule."""
    if not isinstance(rule, PlanRule):
        return find_matches(rule, program, measure=measure)
    trace = PassTrace(rule.name)
    for item in predict_plan(program, [rule])[1]:
        record_result(trace, rule, item.function, item.answer)
    return trace


def collect_miss_reasons(rule: Rule, program: Program, measure: Measure | None = None) -> list[str]:
    """Collect the reasons why the rule does not match, of near misses and others."""
    if isinstance(rule, PlanRule):
        given = [item.answer for item in predict_plan(program, [rule])[1]]
    else:
        given = [answer for _, answer in iterate_hits_and_misses(rule, program, measure=measure)]
    return [answer.reason for answer in given if isinstance(answer, Miss)]
