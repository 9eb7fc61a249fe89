"""What every rule is held to, whoever wrote it."""

from __future__ import annotations

import inspect
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder, Program, types
from coremltools.converters.mil.mil.passes.pass_pipeline import PassPipelineManager
from coremltools.converters.mil.mil.types.symbolic import is_symbolic

from ..core.clone import clone
from ..core.contract import BlockRewrite, Exactness, Example, PlanRule, ProgramRewrite, Rewrite, Rule
from ..core.engine import PassTrace, answers, run
from ..core.errors import InputError
from ..core.printer import body_text, program_text
from ..core.query import all_ops
from ..core.ranges import Measure, Range, Seen
from ..core.rule_class import flaw, is_ours, named, place
from ..package import load, save
from ..proof.border import Border, borders
from ..proof.compare import Strictness, differences, limited
from ..proof.execute import Plan
from ..proof.feeds import make_state
from ..proof.measure import measurer
from ..runtime import Runtime
from . import variants
from .finding import found_by, reasons_of
from .neighbours import INPUT, failures_of, representative_op_types

__all__ = ["CHECKS", "Check"]

Array = np.ndarray[Any, Any]
Check = Callable[[type[Rule], Path], None]
_PRECISIONS = ("float64", "float16")
_EXTENT = 8
_HIGHEST = 5
"The rank above which the host refuses to convert a program."
ORDINARY = "normal draws"
_UNLIKE = (INPUT, "select", "concat", "cond", "fill_like")
"Producers that share no input name: none has `x`."
_IN_TURN = 3
"How many of the other op types are tried at each input; all of them in a slow test."


def _examples(rule: type[Rule], fires: bool | None = None) -> Iterator[tuple[Rule, Example]]:
    for example in named(rule)().examples():
        if fires is None or fires == (example.reason is None):
            yield rule.configured(**example.options), example


def _firing(rule: type[Rule]) -> Iterator[tuple[Rewrite, Example]]:
    for configured, example in _examples(rule, fires=True):
        if isinstance(configured, Rewrite):
            yield configured, example


def _ran(rule: Rewrite, example: Example, program: Program) -> PassTrace:
    """Run `rule`, with what the example's ordinary draws are measured to be where it asks for that."""
    return run(rule, program, measure=_measure(example))


def _measure(example: Example) -> Measure | None:
    def make(program: Program) -> list[Plan]:
        state = make_state(program.functions["main"], 0)
        drawn = next(feeds for label, feeds in _draws(program, example) if label == ORDINARY)
        mirrored = {name: -value if value.dtype.kind == "f" else value for name, value in drawn.items()}
        return [Plan("main", ORDINARY, drawn, state), Plan("main", "their opposites", mirrored, state)]

    return measurer(make) if example.measured else None


def states_what_every_rule_states(rule: type[Rule], tmp_path: Path) -> None:
    """Code, slug, evidence and the rest are there, and of the right form; the code is one that its author may give."""
    wrong = flaw(named(rule), ours=is_ours(rule))
    assert not wrong, f"{place(rule)} {wrong}"


def page_shows_the_first_example(rule: type[Rule], tmp_path: Path) -> None:
    """The docstring's before and after are what the first example prints."""
    for configured, example in list(_firing(rule))[:1]:
        Builder.name_count.clear()  # as coremltools does before each conversion: names do not tell what ran before
        program = example.build()
        before = body_text(program.functions["main"])
        _ran(configured, example, program)
        after = body_text(program.functions["main"])
        block = f"before\n{textwrap.indent(before, '    ')}\nafter\n{textwrap.indent(after, '    ')}"
        assert block in (inspect.getdoc(rule) or ""), f"paste into the docstring of {rule.__name__}:\n{block}"


def examples_fire_or_say_why_not(rule: type[Rule], tmp_path: Path) -> None:
    """A firing example fires; a near miss gives its exact reason; an empty reason means it is no candidate at all."""
    count = Counter(example.reason is None for _, example in _examples(rule))
    assert count[True] and count[False], "give at least one example that fires and one that does not"
    for configured, example in _examples(rule):
        program = example.build()
        if example.reason is None:
            assert found_by(configured, program, _measure(example)).fired, f"example '{example.name}' does not fire"
        else:
            assert not found_by(configured, program, _measure(example)).fired, f"near miss '{example.name}' fires"
            reasons = reasons_of(configured, program, _measure(example))
            assert (example.reason in reasons) if example.reason else not reasons, (example.name, reasons)


def answers_whatever_stands_around(rule: type[Rule], tmp_path: Path) -> None:
    """No op type that feeds an input of an example's op, or reads its result, makes the rule fail.

    Each input is tried with ops that share no names of inputs, and with some of all others in turn.
    """
    if issubclass(rule, PlanRule):  # asked about a prediction, not about ops
        return
    others = representative_op_types()

    def kinds(number: int) -> list[str]:
        turn = [others[(number * _IN_TURN + step) % len(others)] for step in range(_IN_TURN)]
        return [*_UNLIKE, *turn]

    found = list(neighbour_failures(rule, kinds, fires=True))
    assert not found, "\n".join(found)


def neighbour_failures(rule: type[Rule], kinds: Callable[[int], Sequence[str]], fires: bool | None = None
                       ) -> Iterator[str]:
    """Describe how matching fails when ops of `kinds` stand beside those of the rule's examples (that fire)."""
    def answer(configured: Rule, program: Program) -> None:
        for _ in answers(configured, program, measure=_pretended if configured.measures else None):
            pass

    yield from failures_of(((example.name, example.build(), partial(answer, configured))
                            for configured, example in _examples(rule, fires)), kinds)


def _pretended(program: Program) -> Seen:
    """Ordinary ranges for all values, without a run."""
    made = [var for _, op in all_ops(program) for var in op.outputs]
    given = [var for function in program.functions.values() for var in function.inputs.values()]
    return Seen({var: Range(-4.0, 4.0, 0.1, partial=16.0) for var in (*given, *made)}, lambda _: 0.0)


def finding_and_fixing_agree(rule: type[Rule], tmp_path: Path) -> None:
    """What `find` reports is where `run` acts first."""
    for configured, example in _firing(rule):
        program = example.build()
        found = {hit.value for hit in found_by(configured, program, _measure(example)).fired}
        acted = {hit.value for hit in _ran(configured, example, program).fired}
        assert found <= acted, (example.name, found, acted)


def twice_is_once(rule: type[Rule], tmp_path: Path) -> None:
    for configured, example in _firing(rule):
        program = example.build()
        _ran(configured, example, program)
        text = program_text(program)
        assert not _ran(configured, example, program).fired, f"'{example.name}' fires again on its own result"
        assert program_text(program) == text, f"'{example.name}' is not the same after a run that found nothing"


def values_hold(rule: type[Rule], tmp_path: Path) -> None:
    """Equal outputs at the declared exactness, on ordinary and on extreme inputs."""
    for configured, example in _firing(rule):
        _rewritten(configured, example.build(), example)


def values_hold_when_observed(rule: type[Rule], tmp_path: Path) -> None:
    """Every intermediate value has another reader."""
    for configured, example in _firing(rule):
        _rewritten(configured, variants.observed(example.build()), example, fires=False)


def values_hold_when_nested(rule: type[Rule], tmp_path: Path) -> None:
    for configured, example in _firing(rule):
        trace = _rewritten(configured, variants.nested(example.build()), example)
        one = isinstance(configured, ProgramRewrite) or configured.interface
        assert len(trace.fired) >= 2 or one, "expected a hit in each branch"


def values_hold_when_repeated(rule: type[Rule], tmp_path: Path) -> None:
    """Three copies that share their consts: all are rewritten, none duplicates a weight, all share what one adds."""
    for configured, example in _firing(rule):
        once = example.build()
        without = _weight_bytes(once)
        _ran(configured, example, once)
        program = variants.repeated(example.build())
        before = _weight_bytes(program) + max(0, _weight_bytes(once) - without)
        trace = _rewritten(configured, program, example)
        # Copies that share an input may be one region; the input itself is one, and so is the program.
        one = isinstance(configured, (BlockRewrite, ProgramRewrite)) or configured.interface
        expected = 1 if one else 3
        assert len(trace.fired) >= expected, (example.name, len(trace.fired))
        assert _weight_bytes(program) <= before, f"'{example.name}' makes weights twice"


def _weight_bytes(program: Program) -> int:
    """Bytes of the floating-point consts; bytes that several of them show are counted once."""
    values = [op.outputs[0].val for _, op in all_ops(program) if op.op_type == "const"]
    arrays = [value for value in values if isinstance(value, np.ndarray) and value.dtype.kind == "f"]
    return sum({(array.__array_interface__["data"][0], array.nbytes): array.nbytes for array in arrays}.values())


def values_hold_when_symbolic(rule: type[Rule], tmp_path: Path) -> None:
    """Batch, last axis, or both symbolic; a rule may refuse, but not break."""
    for configured, example in _firing(rule):
        for axes in ((0,), (-1,), (0, -1)):
            program = variants.symbolic(example.build(), axes)
            if program is not None and _runs(program, example):
                _rewritten(configured, program, example, f"axes {axes}", fires=False)


def _runs(program: Program, example: Example) -> bool:
    """Whether `program` accepts the sizes that are drawn: a batch and the rows of a state may both be symbolic."""
    try:
        Runtime(program, precision="float64")(next(_draws(program, example))[1])
    except InputError:
        return False
    return True


def weights_stay_compressed(rule: type[Rule], tmp_path: Path) -> None:
    for configured, example in _firing(rule):
        for kind in variants.COMPRESSIONS:
            program = variants.compressed(example.build(), kind)
            if program is None:
                continue
            before = _constexprs(program)
            _rewritten(configured, program, example, kind, fires=False)
            assert _constexprs(program) == before, f"'{example.name}': compressed weights changed in number or kind"


def _constexprs(program: Program) -> Counter[str]:
    return Counter(op.op_type for _, op in all_ops(program) if op.op_type.startswith("constexpr_"))


def lives_with_the_host(rule: type[Rule], tmp_path: Path) -> None:
    """Before and after a run of coremltools' default pipeline the program stays right."""
    for configured, example in _firing(rule):
        program = example.build()
        before = clone(program)
        PassPipelineManager.apply_pipeline(program, ct.PassPipeline.DEFAULT)
        _rewritten(configured, program, example, fires=False)
        PassPipelineManager.apply_pipeline(program, ct.PassPipeline.DEFAULT)
        program.validate()
        _equal(before, program, example, _weaker(configured), "after the host's pipeline")


def survives_save_and_load(rule: type[Rule], tmp_path: Path) -> None:
    """A package rewritten, saved and loaded again holds the program that was saved; also where sizes are symbolic and
    ops stand behind what is rewritten: a file names no symbols."""
    for number, (configured, example, program) in enumerate(_saved(rule)):
        made = [var for _, op in all_ops(program) for var in op.outputs if types.is_tensor(var.sym_type)]
        if any(var.rank > _HIGHEST for var in made):
            continue  # the host converts it only once it is rewritten
        model = ct.convert(program, convert_to="mlprogram", pass_pipeline=ct.PassPipeline.EMPTY, skip_model_load=True,
                           minimum_deployment_target=program.functions["main"].opset_version)
        source = tmp_path / f"{number}.mlpackage"
        model.save(str(source))
        package = load(source)
        before = clone(package.program)
        if not _ran(configured, example, package.program).fired:  # the host may have taken the pattern apart
            continue
        target = tmp_path / f"{number}_rewritten.mlpackage"
        save(package, target)
        again = load(target)
        assert program_text(again.program) == program_text(package.program), example.name
        _equal(before, again.program, example, _promised(configured, configured.exactness))


def _saved(rule: type[Rule]) -> Iterator[tuple[Rewrite, Example, Program]]:
    """Each example that fires, and the first of them that can be written with symbolic sizes, continued."""
    pending = True
    for configured, example in _firing(rule):
        yield configured, example, example.build()
        for axes in ((0, -1), (-1,), (0,)) if pending else ():
            program = variants.symbolic(example.build(), axes)
            if program is not None and _runs(program, example) and _ran(configured, example, clone(program)).fired:
                pending = False
                yield configured, example, variants.continued(program)
                break


def _promised(rule: Rewrite, exactness: Exactness) -> Strictness:
    return Strictness(exactness, rule.fixes_nonfinite, rule.moves, ulps=rule.ulps)


def _weaker(rule: Rewrite) -> Strictness:
    """What is left of a promise when the host has rounded, too."""
    return _promised(rule, Exactness.ROUNDING if rule.exactness is Exactness.BITWISE else rule.exactness)


def _rewritten(rule: Rewrite, program: Program, example: Example, how: str = "", fires: bool = True) -> PassTrace:
    """Run `rule` in place and hold the result against the program before."""
    before = clone(program)
    trace = _ran(rule, example, program)
    program.validate()
    assert trace.fired or not fires, f"'{example.name}' {how} does not fire"
    _equal(before, program, example, _promised(rule, trace.strength or Exactness.BITWISE), how)
    return trace


def _equal(before: Program, after: Program, example: Example, promised: Strictness, how: str = "") -> None:
    across = borders(before, after).get("main", Border())
    runs_before, runs_after, runs_limit = _Runs(before), _Runs(after), _Runs(before, finite_constants=True)
    for label, drawn in _draws(before, example):
        feeds = across.round(drawn)
        old, new = runs_before(feeds), runs_after(feeds)
        if promised.fixes_nonfinite:
            old = limited(old, runs_limit(feeds), new)
        for precision in _PRECISIONS:
            given = None if precision == "float64" else old["float64"]
            found = differences(across.give(old[precision]), new[precision], promised, given)
            wrong = [str(difference) for difference in found if not difference.passed]
            assert not wrong, (f"'{example.name}' {how}, {label} at {precision}: {'; '.join(wrong)}\n"
                               f"{program_text(after)}")


class _Runs:
    """A program at every precision that is compared, worked out once for all feeds."""

    def __init__(self, program: Program, finite_constants: bool = False) -> None:
        self._runtimes = {precision: Runtime(program, precision=precision, finite_constants=finite_constants)
                          for precision in _PRECISIONS}

    def __call__(self, feeds: Mapping[str, Array]) -> dict[str, dict[str, Array]]:
        return {precision: runtime(feeds) for precision, runtime in self._runtimes.items()}


def _draws(program: Program, example: Example) -> Iterator[tuple[str, dict[str, np.ndarray[Any, Any]]]]:
    """Ordinary numbers, zeros of both signs, infinities, NaN, and the ends of fp16."""
    random = np.random.default_rng(0)
    special = {
        "zeros": [0.0], "signed zeros": [0.0, -0.0], "infinities": [np.inf, -np.inf, 1.0], "nan": [np.nan, 1.0],
        "fp16 extremes": [65504.0, -65504.0, 6e-8, -6e-8, 6.1e-5],
    }
    inputs = program.functions["main"].inputs.items()
    yield ORDINARY, {name: _cast(var, _within(example, random.standard_normal(_shape(var)) * example.scale))
                     for name, var in inputs}
    for label, values in special.items():
        yield label, {name: _cast(var, _within(example, random.choice(values, _shape(var)))) for name, var in inputs}


def _within(example: Example, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return values.clip(-example.within, example.within)


def _shape(var: Any) -> tuple[int, ...]:
    return tuple(_EXTENT if is_symbolic(extent) else int(extent) for extent in var.shape)


def _cast(var: Any, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    dtype = types.nptype_from_builtin(var.dtype)
    return values.astype(dtype) if types.is_float(var.dtype) else np.nan_to_num(np.abs(values)).clip(0, 1).astype(dtype)


CHECKS: tuple[Check, ...] = (
    states_what_every_rule_states, page_shows_the_first_example, examples_fire_or_say_why_not,
    answers_whatever_stands_around, finding_and_fixing_agree, twice_is_once, values_hold, values_hold_when_observed,
    values_hold_when_nested, values_hold_when_repeated,
    values_hold_when_symbolic, weights_stay_compressed, lives_with_the_host, survives_save_and_load,
)
