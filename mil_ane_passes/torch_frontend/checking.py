"""Does a converted model compute what its torch model does? Asked of what the frontend made and of the result.

The frontend's program is all in fp32 and has to agree closely, so that what it got wrong is not taken for rounding;
the result, after all passes, may be off by what fp16 and compression explain.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Program

from ..core.errors import InputError
from ..proof.compare import OutputDifference
from ..proof.execute import Plan, fresh_state, plans
from ..proof.outside import default_tolerance, within
from .errors import NotEqual
from .images import Preprocessing
from .parts import Part, first_part_apart
from .sides import Compiled, Module

__all__ = ["converted_and_checked", "refuse_unfit"]

Array = np.ndarray[Any, Any]

_SEEDS = 2
_log = logging.getLogger("mil_ane_passes")


def refuse_unfit(given: Mapping[str, Any], from_torch: bool, neural_network: bool) -> None:
    """Raises InputError for what cannot be checked, before it is converted."""
    if not from_torch:
        raise InputError("check=True compares with a torch model, and this is none; leave it out, and use "
                         "verify(callable, model) for a model of another source")
    if neural_network or given.get("convert_to") == "milinternal":
        raise InputError("check=True runs the ML Program that the conversion makes; expected convert_to='mlprogram'")


def converted_and_checked(given: inspect.BoundArguments) -> Any:
    """The result of `ct.convert`, which has been compared with the torch model. Raises NotEqual."""
    asked = {name: copy.deepcopy(given.arguments.get(name)) for name in ("inputs", "outputs", "states")}
    mlmodel = ct.convert(*given.args, **given.kwargs)
    model = given.arguments["model"]
    if isinstance(model, str):
        import torch

        model = torch.jit.load(model)
    classifier = given.arguments.get("classifier_config") is not None
    program = _frontend(model, asked, given.arguments.get("minimum_deployment_target"))
    _Check(model, mlmodel, program, Preprocessing(asked["inputs"]), classifier).all_sizes()
    return mlmodel


def _frontend(model: Any, asked: Mapping[str, Any], target: Any) -> Program:
    """What the frontend makes of the model, before any pass but its own."""
    from coremltools.converters.mil.frontend.torch.load import load
    from coremltools.converters.mil.mil.passes.pass_pipeline import PassPipelineManager

    inputs = asked["inputs"]
    program = load(model, inputs=inputs if inputs is None or isinstance(inputs, list | tuple) else [inputs],
                   outputs=asked["outputs"], states=asked["states"],
                   specification_version=(ct.target.iOS15 if target is None else target).value)
    PassPipelineManager.apply_pipeline(program, ct.PassPipeline.get_pipeline("frontend_pytorch"))
    return program


class _Check:
    """A torch model, what the frontend made of it, and the result; of a classifier, which returns a label, only the
    first two are compared."""

    def __init__(self, model: Any, mlmodel: Any, frontend: Program, images: Preprocessing, classifier: bool) -> None:
        self._mlmodel, self._images = mlmodel, images
        self._before = Compiled(frontend)
        self._after = None if classifier else Compiled(mlmodel._mil_program)
        self._program: Program = mlmodel._mil_program
        self._module = Module(model, self._before)
        self._tolerance = max(self._module.tolerance, default_tolerance(self._program))

    def all_sizes(self) -> None:
        """Compare at the default size, each enumerated one and both ends of each range; raises NotEqual."""
        description = self._mlmodel.get_spec().description
        for number, plan in enumerate(plans(self._program, _SEEDS, lambda name: description)):
            state = {name: value if name in self._module.states else np.zeros_like(value)
                     for name, value in plan.state.items()}
            self._at_one_size(replace(plan, state=state), first=number == 0)

    def _at_one_size(self, plan: Plan, first: bool) -> None:
        feeds = self._images(plan.feeds)
        try:
            expected = self._module(feeds, plan.state)
        except InputError as error:
            if first:
                raise
            _log.warning("not checked at %s, which the torch model does not take: %s", _at(plan), error)
            return
        if found := _apart(expected, self._before, feeds, plan, self._module.tolerance):
            raise self._located(first_part_apart(self._module, self._before, feeds, plan.state), found[0], plan)
        if self._after is None:
            return
        if found := _apart(expected, self._after, plan.feeds, plan, self._tolerance):
            raise NotEqual(f"the torch frontend is right, and a pass after it is not: {found[0]}; at {_at(plan)}; "
                           "try compute_precision=coremltools.precision.FLOAT32, or fewer passes", self._mlmodel)

    def _located(self, part: Part | None, found: OutputDifference, plan: Plan) -> NotEqual:
        if part is None:
            return NotEqual(f"{found}; at {_at(plan)}", self._mlmodel)
        return NotEqual(f"{part}; at {_at(plan)}", self._mlmodel, part.module)


def _apart(expected: Mapping[str, Array], compiled: Compiled, feeds: Mapping[str, Array], plan: Plan, tolerance: float
           ) -> Sequence[OutputDifference]:
    """The outputs and states of a program that are not the expected ones, which are in the same order."""
    try:
        found = compiled(feeds, fresh_state(plan))
    except InputError as error:
        return [OutputDifference("the program", False, False, reason=f"cannot be run: {error}")]
    judged = [within(name, value, found[number] if number < len(compiled.outputs) else found[name], tolerance)
              for number, (name, value) in enumerate(expected.items())]
    return [each for each in judged if not each.passed]


def _at(plan: Plan) -> str:
    sizes = ", ".join(f"{name} {list(value.shape)}" for name, value in plan.feeds.items())
    return f"{plan.label} ({sizes})" if sizes else plan.label
