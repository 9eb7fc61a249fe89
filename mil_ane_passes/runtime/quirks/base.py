"""The base class of fault models, which change the operands of an op, its results, or both."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from coremltools.converters.mil.mil import types

__all__ = ["HALF_OVERFLOW", "Cliff", "Quirk", "select_quirks"]

#: the smallest magnitude that rounds to an infinity in fp16: the largest number, 65504, plus half a step
HALF_OVERFLOW = 65520.0


class Quirk:
    """A fault of some machine, published by `source` (URLs, separated by "; ").

    For each op that quirks affect, first every quirk may change the operands, then the op is computed, then every quirk
    may change the results. Two quirks of one op therefore combine. The first line of the docstring is the summary in
    tables; the rest separates published facts from our choices.
    """

    name: ClassVar[str]
    source: ClassVar[str]
    op_types: ClassVar[tuple[str, ...]]
    #: True if the source does not limit the fault to a dtype; otherwise only ops declared fp16 are affected
    any_float: ClassVar[bool] = False
    #: True if the fault applies to the results after all other quirks
    last: ClassVar[bool] = False

    def affects(self, op: Any) -> bool:
        """Return whether the fault may affect `op`, by its type and by the declared types of its results."""
        if op.op_type not in self.op_types:
            return False
        return all(types.is_float(var.dtype) if self.any_float else var.dtype == types.fp16 for var in op.outputs)

    def operands(self, op: Any, inputs: Any) -> Any:
        """Return the inputs that the faulty machine reads in place of `inputs` (an `OpInputs`); by default `inputs`."""
        return inputs

    def results(self, op: Any, inputs: Any, outputs: Sequence[Any]) -> Sequence[Any]:
        """Return the results of the faulty machine in place of `outputs`; by default `outputs`.

        `outputs` are tensors in the computing dtype, before they are stored. `inputs` are the result of the `operands`
        methods of all quirks.
        """
        return outputs

    @classmethod
    def summary(cls) -> str:
        """Return one sentence that describes the fault."""
        return (cls.__doc__ or "").strip().splitlines()[0]


class Cliff(Quirk):
    """A fault that replaces results of `cliff` or more by zero."""

    #: the smallest correct result that becomes 0
    cliff: ClassVar[float]

    def results(self, op: Any, inputs: Any, outputs: Sequence[Any]) -> Sequence[Any]:
        """Replace too large results by zero."""
        (y,) = outputs
        return (y.masked_fill(y >= self.cliff, 0.0),)


def select_quirks(quirks: Iterable[Quirk], op: Any) -> list[Quirk]:
    """Select the quirks that affect `op`, each once, in a fixed order that does not depend on the order of `quirks`."""
    concerned = {quirk.name: quirk for quirk in quirks if quirk.affects(op)}
    return sorted(concerned.values(), key=lambda quirk: (quirk.last, quirk.name))
