"""Shapes of `inputs=` beside those of the example with which a torch model was captured, for errors of lowerings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from numbers import Integral
from typing import Any

from coremltools import EnumeratedShapes, RangeDim

__all__ = ["describe_unexpected_shape", "describe_unrecorded_shapes"]

_Sizes = Sequence[Any]
"Integers, and RangeDims or symbols where a size is flexible."


def describe_unexpected_shape(model: Any, inputs: Any) -> str:
    """Name the first input whose shapes in `inputs=` exclude that of the example; "" if there is none.

    A trace in memory records the shapes of its example. A trace from a file, a frozen one and a script have none.
    """
    shapes, example = _list_given_shapes(inputs), _list_example_shapes(model)
    if len(shapes) != len(example):
        return ""
    for (name, allowed), (own, expected) in zip(shapes, example):
        if allowed and expected is not None and not any(_includes(sizes, expected) for sizes in allowed):
            captured = "exported" if hasattr(model, "graph_signature") else "traced"
            return (f"the input '{name or own}' has the shape {_format_shapes(allowed)} in inputs=, but the model was "
                    f"{captured} with {_format_sizes(expected)}: pass a shape that includes it, or capture the model "
                    "with an example of the other shape")
    return ""


def describe_unrecorded_shapes(model: Any, inputs: Any) -> str:
    """Name the shapes in `inputs=` for a model that does not record what its example was; "" for one that does."""
    shapes, example = _list_given_shapes(inputs), _list_example_shapes(model)
    if not any(allowed for _, allowed in shapes) or all(expected is not None for _, expected in example):
        return ""
    names = [own for own, _ in example] if len(example) == len(shapes) else [None] * len(shapes)
    listed = ", ".join(f"'{name or own or number}' {_format_shapes(allowed)}" for number, ((name, allowed), own)
                       in enumerate(zip(shapes, names), 1) if allowed)
    return f"check that the model accepts the shapes in inputs= ({listed})"


def _list_given_shapes(inputs: Any) -> list[tuple[str | None, list[_Sizes]]]:
    """List the user's inputs with their names and shapes, of which EnumeratedShapes have several and a default none."""
    if isinstance(inputs, list | tuple):
        return [each for part in inputs for each in _list_given_shapes(part)]
    shape = getattr(inputs, "shape", None)
    if isinstance(shape, EnumeratedShapes):
        shapes = [each.shape for each in shape.shapes]
    else:
        shapes = [] if shape is None else [getattr(shape, "shape", shape)]  # a torch tensor has its sizes themselves
    return [(getattr(inputs, "name", None), shapes)]


def _list_example_shapes(model: Any) -> list[tuple[str, _Sizes | None]]:
    """List the tensors that a captured model expects with the sizes of its example; None where they are not known."""
    if hasattr(model, "graph_signature"):
        names = model.graph_signature.user_inputs
        values = {node.name: node.meta.get("val") for node in model.graph.nodes if node.op == "placeholder"}
        return [(name, getattr(values[name], "shape", None)) for name in names if name in values]

    def list_kind(name: str, kind: Any) -> Iterator[tuple[str, _Sizes | None]]:
        if kind.kind() == "TupleType":
            for each in kind.elements():
                yield from list_kind(name, each)
        else:
            yield name, kind.sizes() if kind.kind() == "TensorType" else None

    graph = model.inlined_graph  # its values are valid while it is referenced
    return [each for value in list(graph.inputs())[1:] for each in list_kind(value.debugName(), value.type())]


def _includes(sizes: _Sizes, expected: _Sizes) -> bool:
    """Return whether a shape includes that of the example; Core ML has a tensor of one element for a scalar."""
    return len(sizes) == len(expected or (1,)) and all(map(_includes_size, sizes, expected or (1,)))


def _includes_size(size: Any, expected: Any) -> bool:
    if isinstance(size, RangeDim):
        high = size.upper_bound if size.upper_bound > 0 else float("inf")
        return not isinstance(expected, int) or bool(size.lower_bound <= expected <= high)
    return not (isinstance(size, Integral) and isinstance(expected, int)) or size == expected


def _format_shapes(shapes: Sequence[_Sizes]) -> str:
    return " or ".join(map(_format_sizes, shapes))


def _format_sizes(sizes: _Sizes) -> str:
    return f"[{', '.join(map(_format_size, sizes))}]"


def _format_size(size: Any) -> str:
    if not isinstance(size, RangeDim):
        return str(size)
    return f"{size.lower_bound} to {size.upper_bound if size.upper_bound > 0 else 'any'}"
