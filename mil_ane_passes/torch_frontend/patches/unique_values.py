"""`unique` and `unique_consecutive` with inverse and counts, of floats that are not whole numbers, and of one value.

coremltools casts the unique values to int32 before it compares the elements with them, so that inverse and counts of
other floats are wrong, and computes integers in fp32. It makes as many products as there are pairs of a value and an
element, drops the axis of a single value, and requires all arguments, of which torch.export omits those that are
default. Here a value starts where a sorted element differs from the one before: the inverse counts the starts up to an
element, and the counts are the distances of the starts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var, types

from ...passes.severity import Severity
from ..contract import Patch
from ..errors import NotConverted
from ..lowering import add_results, bind_arguments, cast_to, get_dims, name_result, to_python, to_size_vector, to_tensor
from ..probes import find_fault

PATCH = Patch(code="TORCH158", severity=Severity.WRONG,
              title="`unique` of floats has a wrong inverse and counts; `unique_consecutive` is not implemented",
              upstream=("none known",))


@PATCH.probe
def probe() -> str | None:
    import torch

    return find_fault(lambda x: torch.unique(x, return_inverse=True)[1], torch.tensor([0.5, 0.75, 0.5, 2.0]))


@PATCH.op("_unique2")
def unique(context: Any, node: Any) -> None:
    """Lower _unique2(self, sorted=True, return_inverse=False, return_counts=False)."""
    inputs = bind_arguments(context, node, "self sorted=True")
    if not to_python(inputs.sorted, node, "sorted"):
        raise NotConverted.at(node, "returns values in an order that torch does not define", "use sorted=True")
    x = _flatten(inputs.self)
    order = mb.argsort(x=x, ascending=True)
    ordered = mb.gather(x=x, indices=order, axis=0)
    values, ranks, counts = _find_runs(ordered)
    inverse = mb.scatter(data=mb.sub(x=ranks, y=ranks), indices=order, updates=ranks, axis=0, mode="update")
    _add_results(context, node, inputs.self, values, inverse, counts)


@PATCH.op("unique_consecutive")
def unique_consecutive(context: Any, node: Any) -> None:
    """Lower unique_consecutive(self, return_inverse=False, return_counts=False, dim=None)."""
    inputs = bind_arguments(context, node, "self return_inverse=False return_counts=False dim=None")
    if to_python(inputs.dim, node, "dim") is not None and inputs.self.rank != 1:
        raise NotConverted.at(node, "compares slices along an axis", "leave out 'dim', or compare the slices")
    _add_results(context, node, inputs.self, *_find_runs(_flatten(inputs.self)))


def _flatten(x: Var) -> Var:
    x = cast_to(to_tensor(x), types.int32) if x.dtype == types.bool else x
    return x if x.rank == 1 else mb.reshape(x=x, shape=[-1])


def _find_runs(x: Var) -> tuple[Var, Var, Var]:
    """Return the first elements of the runs of equal elements, for each element the number of its run, and the lengths.

    `x` has rank 1, and at least one element.
    """
    if get_dims(x)[0] == 1:
        return x, mb.const(val=np.zeros(1, np.int32)), mb.const(val=np.ones(1, np.int32))
    before = mb.slice_by_index(x=x, begin=[0], end=[-1])
    behind = mb.slice_by_index(x=x, begin=[1], end=[0], end_mask=[True])
    differs = cast_to(mb.not_equal(x=behind, y=before), types.int32)
    starts = mb.concat(values=[np.array([1], np.int32), differs], axis=0)
    places = mb.squeeze(x=mb.non_zero(x=starts), axes=[-1])
    ranks = mb.sub(x=mb.cumsum(x=starts, axis=0), y=np.int32(1))
    size = to_size_vector(get_dims(x))
    ends = mb.concat(values=[mb.slice_by_index(x=places, begin=[1], end=[0], end_mask=[True]), size], axis=0)
    return mb.gather(x=x, indices=places, axis=0), ranks, mb.sub(x=ends, y=places)


def _add_results(context: Any, node: Any, x: Var, values: Var, inverse: Var, counts: Var) -> None:
    shaped = inverse if x.rank == 1 else mb.reshape(x=inverse, shape=to_size_vector(get_dims(x)))
    results = (cast_to(values, x.dtype), shaped, counts)
    add_results(context, node, [name_result(result, node, x) if place == 0 else result
                                for place, result in enumerate(results)])
