"""`PipelineRuntime`: executes the ML Programs of a pipeline one after the other."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from coremltools.converters.mil.mil import types

from ..ir.query import get_pipeline_functions
from ..utils.errors import InputError, NotSupported, suggest_nearest
from ..utils.locking import synchronized
from ..utils.text_format import add_article
from .engine import Runtime
from .feeds import split_inputs, to_feed_dict
from .images import array_from_image, pixels_from_array

if TYPE_CHECKING:
    from ..package import Package

__all__ = ["PipelineRuntime", "PipelineValues", "select_feeds"]


class PipelineRuntime:
    """Executes a loaded pipeline.

    It is called like `Runtime`, with the pipeline's inputs, and returns the pipeline's outputs. Each part reads feeds
    of the pipeline and outputs of earlier parts, by name, from `PipelineValues`. Floats between parts are rounded to
    the width that the part declares only at precision float16, which also rounds inside the parts. Raises NotSupported
    for a part that is not an ML Program, has an unsupported op, or has states, which a pipeline does not keep.
    """

    @synchronized
    def __init__(self, package: Package, *, precision: str = "float32", quirks: Sequence[str] = ()) -> None:
        if package.members.others:
            name, kind = next(iter(package.members.others.items()))
            raise NotSupported(f"the pipeline's part '{name}' is {add_article(kind)}, and the reference runtime "
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
        values = PipelineValues(feeds)
        for function, runtime in self._parts:
            known = values.enter(function)
            values.add(function, runtime({name: known[name] for name in function.inputs if name in known}))
        known = values.leave()
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


@dataclass
class _Scope:
    """The values that the parts of one pipeline can read, by name.

    `path` has the indices of the pipeline in the enclosing pipelines, `images` the colour layouts of images that parts
    returned.
    """

    path: tuple[int, ...]
    description: Any
    values: dict[str, Any]
    images: dict[str, int] = field(default_factory=dict)


class PipelineValues:
    """The values by name while the parts of a pipeline run.

    A nested pipeline has its own names: its parts read its inputs and the outputs of earlier parts, and only its own
    outputs can be read outside of it. Images that are passed between parts are pixels, and are converted to the channel
    order of the part that reads them.
    """

    def __init__(self, feeds: Mapping[str, Any]) -> None:
        self._scopes = [_Scope((), None, dict(feeds))]

    def enter(self, function: Any) -> dict[str, Any]:
        """Return the values that the part of `function` can read."""
        member = function.origin.member
        around = member.path[:-1]
        while self._scopes[-1].path != around[:len(self._scopes[-1].path)]:
            self._close()
        while len(self._scopes[-1].path) < len(around):
            outer, depth = self._scopes[-1], len(self._scopes)
            description = member.around[depth]
            names = [each.name for each in description.input if each.name in outer.values]
            self._scopes.append(_Scope(around[:depth], description, {name: outer.values[name] for name in names},
                                       {name: outer.images[name] for name in names if name in outer.images}))
        scope = self._scopes[-1]
        return {name: _convert_image(name, value, scope.images.get(name), _get_image_layouts(function).get(name))
                for name, value in scope.values.items()}

    def add(self, function: Any, results: Mapping[str, Any]) -> None:
        """Add the results of the part of `function`."""
        layouts, scope = _get_image_layouts(function), self._scopes[-1]
        for name, value in results.items():
            scope.values[name] = value
            scope.images.pop(name, None)
            if name in layouts:
                scope.images[name] = layouts[name]

    def leave(self) -> dict[str, Any]:
        """Return the values of the outermost pipeline after all parts have run."""
        while len(self._scopes) > 1:
            self._close()
        return self._scopes[0].values

    def _close(self) -> None:
        """Leave the innermost pipeline: its outputs become values of the one around it."""
        inner, outer = self._scopes.pop(), self._scopes[-1]
        for name in (each.name for each in inner.description.output if each.name in inner.values):
            outer.values[name] = inner.values[name]
            outer.images.pop(name, None)
            if name in inner.images:
                outer.images[name] = inner.images[name]


def _get_image_layouts(function: Any) -> dict[str, int]:
    """Return the colour layouts of the inputs and outputs of a part that are images."""
    features = function.origin.features
    return {name: int(features[name].type.imageType.colorSpace) for name in function.images if name in features}


def _convert_image(name: str, value: Any, given: int | None, read: int | None) -> Any:
    """Convert an image from the layout `given` of one part to the layout `read` of another; return others unchanged."""
    if given is None or read is None or not isinstance(value, np.ndarray):
        return value
    return array_from_image(f"image '{name}' between parts of the pipeline", pixels_from_array(value, given), read)


def select_feeds(function: Any, known: Mapping[str, Any]) -> dict[str, Any]:
    """Select the values that a part reads from `known` by name; floats are cast to the width that the part declares."""
    return {name: _cast_to_declared(var, known[name]) for name, var in function.inputs.items() if name in known}


def _cast_to_declared(var: Any, value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype.kind == "f" and types.is_float(var.dtype):
        return value.astype(types.nptype_from_builtin(var.dtype))
    return value
