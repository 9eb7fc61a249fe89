"""What a fault model is: a class that changes what an op reads, what it gives, or both."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from coremltools.converters.mil.mil import types

__all__ = ["HALF_OVERFLOW", "Quirk", "select_quirks"]

#: the magnitude from which on a number rounds to an infinity in fp16: its largest number, 65504, and half a step
HALF_OVERFLOW = 65520.0


class Quirk:
    """A fault of some machine, published by `source` (URLs, separated by "; ").

    For each op that a quirk concerns, first every quirk may change the operands, then the op is computed, then every
    quirk may change the results; so two quirks of one op add up. The docstring's first line is the summary that tables
    show; the rest says what was published and what is our choice.
    """

    name: ClassVar[str]
    source: ClassVar[str]
    op_types: ClassVar[tuple[str, ...]]
    #: True when the source ties the fault to no type; otherwise only what is declared fp16 is concerned
    any_float: ClassVar[bool] = False
    #: True when the fault needs the results as all other quirks leave them
    last: ClassVar[bool] = False

    def affects(self, op: Any) -> bool:
        """True when `op` is one that the fault may strike: by its type and by the declared types of its results."""
        if op.op_type not in self.op_types:
            return False
        return all(types.is_float(var.dtype) if self.any_float else var.dtype == types.fp16 for var in op.outputs)

    def operands(self, op: Any, inputs: Any) -> Any:
        """What the faulty machine reads in place of `inputs` (an `Inputs`); `inputs` itself when that is right."""
        return inputs

    def results(self, op: Any, inputs: Any, outputs: Sequence[Any]) -> Sequence[Any]:
        """What the faulty machine gives in place of `outputs`, tensors in the computing dtype before they are stored.

        `inputs` are those that `operands` of all quirks left.
        """
        return outputs

    @classmethod
    def summary(cls) -> str:
        """One sentence: what goes wrong."""
        return (cls.__doc__ or "").strip().splitlines()[0]


def select_quirks(quirks: Iterable[Quirk], op: Any) -> list[Quirk]:
    """Those of `quirks` that concern `op`: each once, and in one order whatever the order they were named in."""
    concerned = {quirk.name: quirk for quirk in quirks if quirk.affects(op)}
    return sorted(concerned.values(), key=lambda quirk: (quirk.last, quirk.name))
