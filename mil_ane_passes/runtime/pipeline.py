"""`PipelineRuntime`: executes the ML Programs of a pipeline one after the other."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from coremltools.converters.mil.mil import types

from ..ir.query import get_pipeline_functions
from ..utils.errors import InputError, NotSupported, suggest_nearest
from ..utils.locking import synchronized
from .engine import Runtime
from .feeds import split_inputs, to_feed_dict

if TYPE_CHECKING:
    from ..package import Package

__all__ = ["PipelineRuntime", "select_feeds"]


class PipelineRuntime:
    """Executes a loaded pipeline.

    It is called like `Runtime`, with the pipeline's inputs, and returns the pipeline's outputs. Each part reads feeds
    of the pipeline and outputs of earlier parts, by name. Floats between parts are rounded to the width that the part
    declares only at precision float16, which also rounds inside the parts. Raises NotSupported for a part that is not
    an ML Program, has an unsupported op, or has states, which a pipeline does not keep.
    """

    @synchronized
    def __init__(self, package: Package, *, precision: str = "float32", quirks: Sequence[str] = ()) -> None:
        if package.members.others:
            name, kind = next(iter(package.members.others.items()))
            raise NotSupported(f"the pipeline's part '{name}' is a {kind}, and the reference runtime "
                               "executes ML Programs only; name one of the functions to run it alone: "
                               f"{', '.join(package.functions)}")
        self._description = package.spec.description
        self._parts: list[tuple[Any, Runtime]] = []
        for name in get_pipeline_functions(package.program):
            function = package.program.functions[name]
            if split_inputs(function)[1]:
                raise NotSupported(f"the part '{name}' of the pipeline has states, which a pipeline does not keep; run "
                                   "it alone as a function")
            runtime = Runtime(package.program, function=name, precision=precision, quirks=quirks,
                              description=package.description(name))
            self._parts.append((function, runtime))

    @synchronized
    def __call__(
        self, feeds: Mapping[str, Any], state: MutableMapping[str, Any] | None = None
    ) -> dict[str, np.ndarray[Any, Any]]:
        """Run once. Raises InputError for feeds of the wrong name, dtype or shape, and for states."""
        self.check(feeds, state)
        known: dict[str, Any] = dict(feeds)
        for function, runtime in self._parts:
            known.update(runtime({name: known[name] for name in function.inputs if name in known}))
        missing = [feature.name for feature in self._description.output if feature.name not in known]
        if missing:
            raise InputError(f"output '{missing[0]}': no part of the pipeline computes it; the package is damaged")
        return {feature.name: known[feature.name] for feature in self._description.output}

    @synchronized
    def check(self, feeds: Mapping[str, Any], state: Mapping[str, Any] | None = None) -> None:
        """Check feeds without running. Raises InputError for a wrong or missing name and for states."""
        if state:
            raise InputError(f"state '{next(iter(state))}': a pipeline has no states; expected none")
        values, inputs = to_feed_dict(feeds), {feature.name: feature for feature in self._description.input}
        for name in values:
            if name not in inputs:
                raise InputError(
                    f"feed '{name}': no such input{suggest_nearest(name, inputs)} (inputs: {', '.join(inputs)})"
                )
        for name, feature in inputs.items():
            if name not in values and not feature.type.isOptional:
                raise InputError(f"input '{name}': not fed; expected a feed for each input of the pipeline")


def select_feeds(function: Any, known: Mapping[str, Any]) -> dict[str, Any]:
    """Select the values that a part reads from `known` by name; floats are cast to the width that the part declares."""
    return {name: _cast_to_declared(var, known[name]) for name, var in function.inputs.items() if name in known}


def _cast_to_declared(var: Any, value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype.kind == "f" and types.is_float(var.dtype):
        return value.astype(types.nptype_from_builtin(var.dtype))
    return value
