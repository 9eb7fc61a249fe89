"""Conversion checks: compare a converted model with its torch model, both after the frontend and after all passes.

The frontend's program is entirely in fp32 and has to agree closely, so that its errors are not mistaken for rounding.
The result, after all passes, may deviate as far as fp16 and compression explain. It runs with fp32 arithmetic; lint's
measuring rules find the values that fp16 arithmetic would lose.
"""

from __future__ import annotations

import copy
import inspect
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Program, types

from ..equivalence.adversarial_feeds import LARGE, TIES, oppose_feeds, tie_feeds
from ..equivalence.callable_comparison import (
    FP16_TOLERANCE,
    build_example_plans,
    compare_within_tolerance,
    get_default_tolerance,
)
from ..equivalence.callables import Caller
from ..equivalence.comparison import OutputDifference
from ..equivalence.execution import Plan, build_plans, copy_state
from ..equivalence.feeds import list_shape_choices
from ..equivalence.range_measurement import measure_ranges
from ..equivalence.trace import MIN_FP16_OVERFLOW
from ..equivalence.undetermined_elements import (
    FP16_ROUNDING,
    FP32_ROUNDING,
    Rounding,
    describe_cancelled,
    describe_undetermined,
    find_cancelled,
    find_undetermined,
    move_numbers,
    replace_elements,
)
from ..equivalence.user_inputs import UserInputs
from ..ir.query import get_flat_inputs, is_const, iterate_ops
from ..ir.value_ranges import MeasuredRanges
from ..passes.contract import Hit, Miss, Rewrite
from ..passes.engine import iterate_hits_and_misses
from ..passes.registry import get_all_rules
from ..runtime.feeds import check_feed_names, split_inputs
from ..utils.errors import InputError
from .errors import NotEqual
from .failures import locate_failures
from .first_difference import GraphValue, find_first_difference, find_first_random_value
from .image_preprocessing import ImagePreprocessing
from .model_runners import ProgramRunner, TorchModelRunner, list_states

__all__ = ["convert_and_check", "validate_check_arguments"]

Array = np.ndarray[Any, Any]
_RunMoved = Callable[[int, int, float], Mapping[str, Array]]
"A run with numbers moved: seed, most units, and the unit."

#: the number of seeded samples, spread over the shapes of the inputs
_SEED_COUNT = 2
_LIMITED_MASK = 1e6
"The magnitude of constants in place of larger ones: scores added to it keep their digits at float64."
_ROUNDING_FACTOR, _MAX_ROUNDING = 8, FP16_TOLERANCE
"""How much larger than the rounding of both a difference between torch and a program may be, which round in another
order, and how large as a fraction of the largest value: a comparison within more says little."""
_FP16_MOVES = 4
"Runs in which numbers move by one unit of fp16, to find out whether rounding explains a difference."
_MAX_OVERFLOWS_NAMED = 3
"Most values beyond fp16 that a warning names."
_log = logging.getLogger("mil_ane_passes")


def validate_check_arguments(given: Mapping[str, Any], from_torch: bool, neural_network: bool) -> None:
    """Raise InputError for arguments that cannot be checked, before the conversion."""
    if not from_torch:
        raise InputError("check=True needs a torch model; for other sources use verify(callable, model) instead")
    if neural_network or given.get("convert_to") == "milinternal":
        raise InputError("check=True needs an ML Program; expected convert_to='mlprogram'")
    if hasattr(given["model"], "training"):
        Caller(given["model"], (), ())  # rejects a module in training mode


def convert_and_check(given: inspect.BoundArguments, samples: UserInputs) -> Any:
    """Run `ct.convert`, compare the result with the torch model on seeded inputs and on `samples`, and return it.

    Raises NotEqual, and InputError for samples that do not fit.
    """
    import torch

    from .patches.bfloat16 import widen_bfloat16  # which imports torch

    requested = {name: copy.deepcopy(given.arguments.get(name)) for name in ("inputs", "outputs", "states")}
    model = given.arguments["model"]
    if isinstance(model, str):
        model = torch.jit.load(model)
    model = given.arguments["model"] = widen_bfloat16(model)
    mlmodel = ct.convert(*given.args, **given.kwargs)
    classifier = given.arguments.get("classifier_config") is not None
    program = _convert_with_frontend(model, requested, given.arguments.get("minimum_deployment_target"))
    _ConversionCheck(model, mlmodel, program, ImagePreprocessing(requested["inputs"]), classifier).run(samples)
    return mlmodel


def _convert_with_frontend(model: Any, asked: Mapping[str, Any], target: Any) -> Program:
    """Convert the model with the frontend and the frontend's own passes only."""
    from coremltools.converters.mil.frontend.torch.load import load
    from coremltools.converters.mil.mil.passes.pass_pipeline import PassPipelineManager

    inputs = asked["inputs"]
    if isinstance(inputs, list | tuple):
        inputs = [_replace_fp16_image(each) for each in inputs]
    # With a record of its own: results of the first conversion are not yet there in this one.
    with locate_failures(target):
        program = load(model, inputs=inputs if inputs is None or isinstance(inputs, list | tuple) else [inputs],
                       outputs=asked["outputs"], states=asked["states"],
                       specification_version=(ct.target.iOS15 if target is None else target).value)
    PassPipelineManager.apply_pipeline(program, ct.PassPipeline.get_pipeline("frontend_pytorch"))
    return program


def _replace_fp16_image(given: Any) -> Any:
    """Return a tensor of fp32 in place of an image of fp16: the scale and the bias are applied before the frontend's
    program, which would round what they make of it."""
    if isinstance(given, ct.ImageType) and given.color_layout == ct.colorlayout.GRAYSCALE_FLOAT16:
        return ct.TensorType(name=given.name, shape=given.shape, dtype=np.float32)
    return given


class _ConversionCheck:
    """Compares a torch model with the frontend's program and with the result.

    A classifier returns a label, so only the first two are compared for it.
    """

    def __init__(
        self, model: Any, mlmodel: Any, frontend: Program, images: ImagePreprocessing, classifier: bool
    ) -> None:
        self._mlmodel, self._images = mlmodel, images
        self._frontend, self._states = frontend, list_states(mlmodel._mil_program.functions["main"])
        self._before = self._make_frontend_runner()
        self._limited: ProgramRunner | None = None
        self._exact: ProgramRunner | None = None
        self._after = None if classifier else ProgramRunner(mlmodel._mil_program)
        self._program: Program = mlmodel._mil_program
        self._findings: list[str] = []
        self._finite: dict[str, bool] = {}
        "Whether any element of an output was finite in a run."
        self._module = TorchModelRunner(model, self._before)
        self._tolerance = max(self._module.tolerance, get_default_tolerance(self._program))

    def _make_frontend_runner(self, **settings: Any) -> ProgramRunner:
        return ProgramRunner(self._frontend, states=self._states, **settings)

    def run(self, samples: UserInputs) -> None:
        """Compare on the samples and at the default size, each enumerated one and both ends of each range.

        The frontend's program is also compared on adversarial feeds, on which fp16 need not be close. Raises NotEqual.
        Logs the findings of lint's measuring rules.
        """
        description = self._mlmodel.get_spec().description
        built = [*map(self._prepare_feeds, samples.plans(self._program, lambda name: description)),
                 *build_plans(self._program, _SEED_COUNT, lambda name: description),
                 *build_example_plans(self._program, "main", self._module.example_shapes, lambda name: description)]
        try:
            self._findings = _collect_numeric_findings(self._program, built, bool(samples))
        except InputError as error:
            if samples:
                raise
            raise _make_feeds_error(error) from error
        for finding in self._findings:
            _log.warning("check: %s", finding)
        built += self._build_adversarial_plans(description)
        rejected: list[InputError] = []
        for plan in built:
            state = {name: value if name in self._module.states else np.zeros_like(value)
                     for name, value in plan.state.items()}
            if rejection := self._check_one_size(self._module.fit_plan(replace(plan, state=state))):
                rejected.append(rejection)
        if len(rejected) == len(built):
            raise _make_feeds_error(rejected[0]) from rejected[0]
        for name in (name for name, finite in self._finite.items() if not finite):
            _log.warning("check: nothing of %s was compared: the torch model returns NaN or infinity for every "
                         "element in every run; pass feeds= with finite results", name)

    def _build_adversarial_plans(self, description: Any) -> list[Plan]:
        """Make a run of large and negative numbers, and one of ties."""
        function = self._program.functions["main"]
        choice = list_shape_choices(function, description)[0]
        plain = build_plans(self._program, 1, lambda name: description)[0]
        # no negative zeros, as Core ML does not define the sign of zeros, on which atan2 depends
        return [replace(plain, label=label, feeds=change(function, choice, plain.feeds, 1, description),
                        adversarial=label) for label, change in ((LARGE, oppose_feeds), (TIES, tie_feeds))]

    def _prepare_feeds(self, plan: Plan) -> Plan:
        """Return the plan with its feeds in the order of the program's inputs, and floats in their dtypes.

        Raises InputError for a feed of another name.
        """
        inputs = self._program.functions[plan.function].inputs
        check_feed_names(split_inputs(self._program.functions[plan.function])[0], plan.feeds)
        return replace(plan, feeds={
            name: plan.feeds[name].astype(types.nptype_from_builtin(var.dtype))
            if plan.feeds[name].dtype.kind == "f" and types.is_float(var.dtype) else plan.feeds[name]
            for name, var in inputs.items() if name in plan.feeds})

    def _check_one_size(self, plan: Plan, is_narrowed: bool = False) -> InputError | None:
        """Compare at the size of `plan`; return the error with which the torch model rejects it.

        An exported model rejects sizes that its guards exclude. Raises InputError if the user asked for this size.
        `is_narrowed` states that the floats of the plan were scaled to 0..1, because the results exceeded fp16.
        """
        feeds = self._images(plan.feeds)
        try:
            expected = self._module(feeds, plan.state)
        except InputError as error:
            if plan.asked:
                raise
            if not plan.adversarial:  # rare numbers, which the model need not accept
                _log.warning("not checked at %s, which the torch model rejects: %s", _describe_plan(plan), error)
            return error
        for name, value in expected.items():
            finite = not value.size or value.dtype.kind != "f" or bool(np.any(np.isfinite(value)))
            self._finite[name] = finite or self._finite.get(name, False)
        left_out: dict[str, Array] = {}
        found = _find_differing_outputs(expected, self._before, feeds, plan, self._module.tolerance)
        if found and (random := self._module.find_random_results(expected, feeds, plan.state)):
            raise self._make_random_model_error(random, feeds, plan)
        if found and not plan.asked and (op := self._module.find_choice_by_nan(feeds, plan.state)):
            _log.warning("check: not checked at %s, where the torch model chooses by a number that is NaN (%s)",
                         _describe_plan(plan), op)
            return InputError(f"the torch model chooses by NaN ({op})")
        near = expected
        if found:
            near = self._replace_cancelled(expected, feeds, plan, found, self._before)
            found = _find_differing_outputs(near, self._before, feeds, plan, self._module.tolerance)
        if found and not self._is_within_rounding(near, feeds, plan, found, self._before):
            left_out = self._find_undetermined(near, feeds, plan, found, self._before, FP32_ROUNDING)
            if any(each.output not in left_out for each in found):
                first = find_first_difference(self._module, self._before, feeds, plan.state)
                raise self._make_error(first, found[0], plan, self._describe_own_rounding(near, feeds, plan, found))
        if self._after is not None and not plan.adversarial and (found := _find_differing_outputs(
                expected, self._after, plan.feeds, plan, self._tolerance, left_out)):
            expected = self._replace_cancelled(expected, feeds, plan, found, self._after)
            if not (found := _find_differing_outputs(
                    expected, self._after, plan.feeds, plan, self._tolerance, left_out)):
                return None
            if self._is_within_rounding(expected, feeds, plan, found, self._after):
                return None
            if self._is_equal_with_smaller_masks(expected, feeds, plan):
                _log.warning("check: at %s, where the model may hide all keys of a query, the result was compared with "
                             "masks that fp16 can hold in place of larger ones", _describe_plan(plan))
                return None
            undetermined = self._find_undetermined(expected, feeds, plan, found, self._after, FP16_ROUNDING)
            if all(each.output in undetermined for each in found):
                return None
            moved = self._measure_fp16_rounding(expected, feeds, plan, found)
            if moved and not is_narrowed and (narrow := self._narrow_floats(expected, plan, found)) is not None:
                return self._check_one_size(narrow, is_narrowed=True)
            note = ("; rounding to fp16 may explain it: inputs and weights that move by one unit of fp16 move this "
                    f"output by up to {moved:.3g}" if moved else self._describe_replaced_masks(expected, found))
            raise NotEqual(
                f"the result of the torch frontend is correct, but a later pass is not: {found[0]}; at "
                f"{_describe_plan(plan)}{note}; try compute_precision=coremltools.precision.FLOAT32, or fewer passes"
                + "".join(f"; {finding}" for finding in self._findings),
                self._mlmodel,
            )
        return None

    def _replace_cancelled(
        self, expected: Mapping[str, Array], feeds: Mapping[str, Array], plan: Plan,
        differing: Sequence[OutputDifference], runner: ProgramRunner,
    ) -> dict[str, Array]:
        """Return the expected results, with those of `runner` in elements that are zero up to rounding in both.

        Numbers round as in the frontend's program at float32, and as in fp16 beside a result that has it, whose
        weights are rounded. Logs the number of such elements.
        """
        if any(each.reason for each in differing):
            return dict(expected)
        is_before = runner is self._before
        tolerance = self._module.tolerance if is_before else self._tolerance
        rounding = FP16_ROUNDING if tolerance >= FP16_TOLERANCE and not is_before else FP32_ROUNDING
        found = self._name_results(expected, runner(feeds if is_before else plan.feeds, copy_state(plan)))
        cancelled = find_cancelled(
            expected, found, lambda error, seed: self._module(feeds, plan.state, noise=(error, seed)),
            {each.output for each in differing}, rounding, tolerance)
        for text in describe_cancelled(cancelled, _describe_plan(plan)):
            _log.warning("check: %s", text)
        return {name: replace_elements(value, found[name], cancelled.get(name)) for name, value in expected.items()}

    def _narrow_floats(
        self, expected: Mapping[str, Array], plan: Plan, differing: Sequence[OutputDifference]
    ) -> Plan | None:
        """Return the plan with the magnitudes of its floats, scaled to 0..1, if its results exceed fp16; else None.

        For example, an iteration may be bounded for pixels from 0 to 1, and grow without limit for other numbers.
        Returns None for user-supplied feeds, for programs that are not fp16, and if scaling changes no feed.
        """
        largest = max(float(np.max(np.abs(expected[each.output]), initial=0.0)) for each in differing)
        feeds = {name: np.abs(value) / max(1.0, float(np.max(np.abs(value), initial=0.0)))
                 if value.dtype.kind == "f" else value for name, value in plan.feeds.items()}
        is_fp16 = get_default_tolerance(self._program) == FP16_TOLERANCE
        if plan.asked or not is_fp16 or not largest >= MIN_FP16_OVERFLOW or all(
                value is plan.feeds[name] or np.array_equal(value, plan.feeds[name]) for name, value in feeds.items()):
            return None
        _log.warning("check: at %s, results reach %.3g, which fp16 cannot hold; compared on floats from 0 to 1 "
                     "instead; pass feeds= or ranges= like those in production to choose the inputs",
                     _describe_plan(plan), largest)
        return replace(plan, feeds={name: value.astype(plan.feeds[name].dtype) for name, value in feeds.items()},
                       label=f"{plan.label}, floats from 0 to 1")

    def _make_random_model_error(self, random: Sequence[str], feeds: Mapping[str, Array], plan: Plan) -> InputError:
        """Make the error for a torch model whose results `random` differ between runs."""
        first = find_first_random_value(self._module, feeds, plan.state)
        verb, place = "differs" if len(random) == 1 else "differ", f", first at {first.location}" if first else ""
        return InputError(
            f"check: the torch model is random: with the same inputs and states, {', '.join(map(repr, random))} {verb} "
            f"from run to run{place}, so that it cannot be compared; call eval() before the model is captured, or make "
            "the noise an input of the model")

    def _is_within_rounding(
        self, expected: Mapping[str, Array], feeds: Mapping[str, Array], plan: Plan,
        differing: Sequence[OutputDifference], runner: ProgramRunner,
    ) -> bool:
        """Return whether a program differs from the torch model by what rounding to float32 changes.

        Both differ from the frontend's program at float64 by as much, as in a model whose scores of hundreds select
        what is attended to. A lowering that is wrong is so at float64, too, and beside one that rounds more than torch
        has to, the torch model is the closer one. Logs the share that rounding changes.
        """
        if plan.asked or any(each.reason for each in differing):
            return False
        if self._exact is None:
            self._exact = self._make_frontend_runner(precision="float64")
        given = feeds if runner is self._before else plan.feeds
        rounded, exact = (self._name_results(expected, each(inputs, copy_state(plan)))
                          for each, inputs in ((runner, given), (self._exact, feeds)))
        tolerance = self._module.tolerance if runner is self._before else self._tolerance
        shares = []
        for each in differing:
            truth, scale = exact[each.output], each.allowed / tolerance
            if truth.dtype.kind != "f" or truth.shape != expected[each.output].shape or not scale:
                return False
            noise = min(_find_largest_difference(values[each.output], truth) for values in (expected, rounded))
            if each.absolute > min(_ROUNDING_FACTOR * noise, _MAX_ROUNDING * scale):
                return False
            shares.append(noise / scale)
        _log.warning("check: at %s, rounding to float32 changes results by up to %.1e of the largest value; the torch "
                     "model was compared within %d times that", _describe_plan(plan), max(shares), _ROUNDING_FACTOR)
        return True

    def _name_results(self, names: Iterable[str], found: Mapping[int | str, Array]) -> dict[str, Array]:
        """Return the results of the frontend's program by the names that the torch model's results have."""
        return {name: found[number if number < len(self._before.outputs) else name]
                for number, name in enumerate(names)}

    def _find_undetermined(
        self, expected: Mapping[str, Array], feeds: Mapping[str, Array], plan: Plan,
        differing: Sequence[OutputDifference], runner: ProgramRunner, rounding: Rounding,
    ) -> dict[str, Array]:
        """Find the elements of outputs that rounding decides, in which `runner` may differ from the torch model.

        `differing` are the outputs in which it does. The numbers that are moved are those of the inputs and constants
        of the frontend's program, and, beside this program, those of the torch model: the distance of a point from
        itself is noise in torch, where it is the root of a difference of products, and 0 in the program. Integers,
        such as the indices of the largest elements, are compared in all elements on ties, as the order of equal
        elements has to be that of torch. The result has the outputs whose other elements are as expected. Logs the
        number of elements of each of `differing`.
        """
        if any(each.reason for each in differing):
            return {}

        given = feeds if runner is self._before else plan.feeds
        tolerance = self._module.tolerance if runner is self._before else self._tolerance
        before = self._name_results(expected, self._before(feeds, copy_state(plan)))
        found = before if runner is self._before else self._name_results(
            expected, runner(plan.feeds, copy_state(plan)))
        names = {each.output for each in differing}
        undetermined: dict[str, Array] = {}
        moves: list[tuple[Mapping[str, Array], _RunMoved]] = [
            (before, lambda *move: self._name_results(expected, self._run_moved(feeds, plan, *move)))]
        if runner is self._before:
            moves.append((expected, lambda *move: self._run_moved_module(feeds, plan, *move)))
        for start, run_moved in moves:
            changed = find_undetermined(expected, found, start, run_moved, names, rounding, tolerance,
                                        kinds="f" if plan.adversarial == TIES else "fiub")
            wrong = {each.output for each in _find_differing_outputs(expected, runner, given, plan, tolerance, changed)}
            undetermined = {name: elements for name, elements in changed.items() if name not in wrong}
            if names <= undetermined.keys():
                for text in describe_undetermined(undetermined, names, _describe_plan(plan), rounding):
                    _log.warning("check: %s", text)
                break
        return undetermined

    def _run_moved_module(
        self, feeds: Mapping[str, Array], plan: Plan, seed: int, units: int, unit: float
    ) -> dict[str, Array]:
        """Run the torch model with inputs, parameters and buffers moved by at most so many units."""
        random = np.random.default_rng(seed)
        return self._module(feeds, plan.state, lambda value: move_numbers(value, units, unit, random))

    def _run_moved(
        self, feeds: Mapping[str, Array], plan: Plan, seed: int, units: int, unit: float
    ) -> dict[int | str, Array]:
        """Run the frontend's program with inputs and constants moved by at most so many units."""
        random = np.random.default_rng(seed)
        constants, inputs = ({name: move_numbers(value, units, unit, random) for name, value in values}
                             for values in (_iterate_float_constants(self._frontend), feeds.items()))
        return self._make_frontend_runner(constants=constants)(inputs, copy_state(plan))

    def _is_equal_with_smaller_masks(self, names: Iterable[str], feeds: Mapping[str, Array], plan: Plan) -> bool:
        """Return whether the result equals the frontend's program with smaller numbers for constants beyond fp16.

        A query whose keys are all hidden by -3.4e38 has equal weights in torch, as the scores are lost beside it, and
        those of its scores where the mask is a number of fp16.
        """
        if self._limited is None:
            constants = _limit_constants(self._frontend)
            if not constants:
                return False
            self._limited = self._make_frontend_runner(precision="float64", constants=constants)
        limited = self._name_results(names, self._limited(feeds, copy_state(plan)))
        assert self._after is not None
        return not _find_differing_outputs(limited, self._after, plan.feeds, plan, self._tolerance)

    def _describe_replaced_masks(self, expected: Mapping[str, Array], differing: Sequence[OutputDifference]) -> str:
        """Describe that results beyond fp16 come of constants beyond it, if the result has smaller numbers for them."""
        if any(each.reason for each in differing):
            return ""
        largest = max(float(np.max(np.abs(value), initial=0.0, where=np.isfinite(value)))
                      for value in (expected[each.output].astype(np.float64) for each in differing))
        is_fp16 = get_default_tolerance(self._program) == FP16_TOLERANCE
        if not is_fp16 or largest < MIN_FP16_OVERFLOW or not _limit_constants(self._frontend):
            return ""
        return (f"; the torch model returns numbers up to {largest:.3g}, beyond fp16 (65504): its constants beyond it, "
                "such as masks, became numbers that fp16 can hold")

    def _describe_own_rounding(
        self, expected: Mapping[str, Array], feeds: Mapping[str, Array], plan: Plan,
        differing: Sequence[OutputDifference],
    ) -> str:
        """Describe how far the torch model moves where its numbers move in their last bits, if about as far."""
        try:
            runs = [self._run_moved_module(feeds, plan, seed, units, FP32_ROUNDING.unit)
                    for seed, units in enumerate(sorted(set(FP32_ROUNDING.most)))]
        except InputError:  # as of an index that is computed from a number that moves
            return ""
        for each in differing:
            if each.reason or any(moved[each.output].shape != expected[each.output].shape for moved in runs):
                continue
            largest = max(_find_largest_difference(moved[each.output], expected[each.output]) for moved in runs)
            if _ROUNDING_FACTOR * largest >= each.absolute:
                return (f"; where inputs and weights move in their last bits, the torch model's own {each.output} "
                        f"moves by up to {largest:.3g}: rounding decides it, so that it cannot be compared; pass "
                        "feeds= for which it does not")
        return ""

    def _measure_fp16_rounding(
        self, expected: Mapping[str, Array], feeds: Mapping[str, Array], plan: Plan,
        differing: Sequence[OutputDifference],
    ) -> float:
        """Return how far the first output moves with inputs and constants that move by one unit of fp16.

        0 if one of the outputs moves less far than it differs, so that rounding does not explain the difference.
        """
        start = self._name_results(expected, self._before(feeds, copy_state(plan)))
        runs = [self._name_results(expected, self._run_moved(feeds, plan, seed, 1, FP16_ROUNDING.unit))
                for seed in range(_FP16_MOVES)]
        largest = [max(_find_largest_difference(moved[each.output], start[each.output])
                       if moved[each.output].shape == start[each.output].shape else 0.0 for moved in runs)
                   for each in differing]
        explained = all(move >= each.absolute and not each.reason
                        for move, each in zip(largest, differing, strict=True))
        return largest[0] if explained else 0.0

    def _make_error(self, part: GraphValue | None, found: OutputDifference, plan: Plan, note: str) -> NotEqual:
        if part is None:
            return NotEqual(f"{found}; at {_describe_plan(plan)}{note}", self._mlmodel)
        return NotEqual(f"{part}; at {_describe_plan(plan)}{note}", self._mlmodel, part.module)


def _make_feeds_error(error: InputError) -> InputError:
    """Make the error for a model that rejects all sampled inputs, one of them with `error`."""
    return InputError(f"{error}; none of the sampled inputs can be run: pass valid ones with feeds=, or the interval "
                      "of an input with ranges=")


def _iterate_float_constants(program: Program) -> Iterator[tuple[str, Array]]:
    """Yield the name and the value of each float constant outside of nested blocks."""
    for op in program.functions["main"].operations:
        if op.op_type == "const" and (value := np.asarray(op.outputs[0].val)).dtype.kind == "f":
            yield op.outputs[0].name, value


def _limit_constants(program: Program) -> dict[str, Array]:
    """Return the constants with finite numbers beyond fp16, by name, with smaller numbers in their place.

    Infinities stay, so that a comparison with one finds what it found before.
    """
    limited = {}
    for name, value in _iterate_float_constants(program):
        huge = np.isfinite(value) & (np.abs(value) >= MIN_FP16_OVERFLOW)
        if np.any(huge):
            limited[name] = np.where(huge, np.copysign(value.dtype.type(_LIMITED_MASK), value), value)
    return limited


def _collect_numeric_findings(program: Program, built: Sequence[Plan], user_supplied: bool) -> list[str]:
    """Format what lint's measuring rules find in these runs, and what they cannot decide with sampled inputs alone."""
    measured_ranges, op_index = measure_ranges(program, built), {op.op_type for _, op in iterate_ops(program)}
    found = list(_describe_overflows(program, measured_ranges))
    for rule in (rule() for rule in get_all_rules().values() if rule.measures and not issubclass(rule, Rewrite)):
        if op_index.isdisjoint(rule.roots):
            continue
        measured = list(iterate_hits_and_misses(rule, program, measure=lambda program: measured_ranges))
        found += [f"{rule.code} at op '{answer.op.name}' ({answer.op.op_type}): {answer.note}; {rule.advice}"
                  for _, answer in measured if isinstance(answer, Hit)]
        # findings that only the sampled inputs contradict
        possible = [answer.op for _, answer in iterate_hits_and_misses(rule, program) if isinstance(answer, Hit)]
        open_ops = {answer.op for _, answer in measured if isinstance(answer, Miss)} & set(possible)
        if open_ops and not user_supplied:
            names = ", ".join(sorted(f"'{op.name}' ({op.op_type})" for op in open_ops))
            found.append(f"{rule.code} not decided at {names}: sampled inputs are normal numbers; pass feeds= or "
                         f"ranges= as in production")
    return found


def _describe_overflows(program: Program, ranges: MeasuredRanges) -> Iterator[str]:
    """Describe the first values beyond fp16 if fp16 arithmetic gives other results on these runs because of them."""
    beyond = {var for var, each in ranges.items() if each.largest >= MIN_FP16_OVERFLOW and
              var.dtype == types.fp16 and not is_const(var)}
    first = [var for _, op in iterate_ops(program) if beyond.isdisjoint(get_flat_inputs(op))
             for var in op.outputs if var in beyond]
    error = ranges.error(program) if first else 0.0
    if error <= FP16_TOLERANCE:
        return
    names = ", ".join(f"'{var.op.name}' ({var.op.op_type}) reaches {ranges[var].largest:.3g}"
                      for var in first[:_MAX_OVERFLOWS_NAMED])
    effect = "is infinite or NaN" if math.isinf(error) else f"differs by {error:.0%} of its largest value"
    yield (f"in fp16 a result {effect}: {names}, above 65504; `mil-ane-passes calibrate` names rewrites that help; "
           f"otherwise keep these ops in fp32 with compute_precision")


def _find_differing_outputs(
    expected: Mapping[str, Array], compiled: ProgramRunner, feeds: Mapping[str, Array], plan: Plan, tolerance: float,
    left_out: Mapping[str, Array] | None = None,
) -> Sequence[OutputDifference]:
    """Return the outputs and states of a program that differ from the expected ones, which are in the same order.

    Elements that are true in `left_out`, by output, are not compared.
    """
    try:
        found = compiled(feeds, copy_state(plan))
    except InputError as error:
        return [OutputDifference("the program", False, False, reason=f"cannot be run: {error}")]
    judged = []
    for number, (name, value) in enumerate(expected.items()):
        result = found[number] if number < len(compiled.outputs) else found[name]
        wanted = value if plan.asked else _take_undefined(value, result, bool(plan.adversarial))
        if left_out and name in left_out and left_out[name].shape == wanted.shape == np.shape(result):
            wanted = replace_elements(wanted, result, left_out[name])
        judged.append(compare_within_tolerance(name, wanted, result, tolerance))
    return [each for each in judged if not each.passed]


def _find_largest_difference(one: Array, other: Array) -> float:
    """Return the largest difference of finite elements; 0 if there are none."""
    one, other = one.astype(np.float64), other.astype(np.float64)  # bools have no difference, that of uint8 wraps
    with np.errstate(invalid="ignore"):  # infinities in both
        return float(np.max(np.abs(one - other), initial=0.0, where=np.isfinite(one) & np.isfinite(other)))


def _take_undefined(expected: Array, found: Array, rare: bool) -> Array:
    """Return the expected values, with those found in place of NaN, such as of a query whose keys are all hidden.

    On `rare` numbers also in place of what Core ML has no number for: integers of 64 bits, float64 beyond float32, and
    infinities, as log(0) is finite in Core ML.
    """
    if not rare:
        return np.where(np.isnan(expected), found, expected) if expected.dtype.kind == "f" and (
            expected.shape == np.shape(found)) else expected
    if expected.shape != np.shape(found) or expected.dtype.kind not in "if":
        return expected
    limit = np.iinfo(np.int32).max if expected.dtype.kind == "i" else np.finfo(np.float32).max
    return np.where(np.abs(expected) <= limit, expected, found)


def _describe_plan(plan: Plan) -> str:
    sizes = ", ".join(f"{name} {list(value.shape)}" for name, value in plan.feeds.items())
    return f"{plan.label} ({sizes})" if sizes else plan.label
