"""The result of `torch.export.export` converts without `run_decompositions({})` by hand.

Newer torch exports in the dialect TRAINING, which coremltools rejects with the advice to call that function. Here the
converter calls it, on a new program, so that the user's object is not changed. Checks that export inserts are removed:
those of dtypes (`_assert_tensor_metadata`), which coremltools supports from 9.0 on, and those of the storage offset of
a slice by a computed number (`sym_storage_offset`), which coremltools does not support.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from torch.export import ExportedProgram

from ..contract import Patch
from ..errors import NotConverted

_ENTRY_MODULE = "coremltools.converters._converters_entry"
_TRAINING_DIALECT = "TRAINING"
_COMPARISONS = frozenset(("eq", "ge", "gt", "le", "lt", "ne"))

PATCH = Patch(code="TORCH146",
              title="exported programs of dialect TRAINING, torch's default, are "
                    "rejected", upstream=("https://github.com/apple/coremltools/pull/2743",))


@PATCH.probe
def probe() -> str | None:
    from coremltools.converters._converters_entry import _validate_conversion_arguments

    try:
        _validate_conversion_arguments(
            _make_stand_in(_TRAINING_DIALECT), "pytorch", "mlprogram", None, None, None, None, "mlprogram", None
        )
    except NotImplementedError:
        return "fails: rejects the result of torch.export.export"
    return None


@PATCH.replace_function(_ENTRY_MODULE, "_validate_conversion_arguments")
def validate_arguments(host: Callable[..., None], model: Any, *arguments: Any, **named: Any) -> None:
    """Run coremltools' checks of the arguments of `ct.convert`.

    They look only at the dialect of an exported program, so a stand-in replaces one of the dialect TRAINING.
    """
    host(_make_stand_in("ATEN") if _is_training_program(model) else model, *arguments, **named)


@PATCH.replace_function("coremltools.converters.mil.frontend.torch.converter", "TorchConverter.__init__")
def initialize_converter(
    host: Callable[..., None], self: Any, loaded_model: Any, *arguments: Any, **named: Any
) -> None:
    """Initialize coremltools' converter of a loaded model with the decomposed program."""
    host(
        self,
        loaded_model.run_decompositions({}) if _is_training_program(loaded_model) else loaded_model,
        *arguments,
        **named,
    )


@PATCH.op("_assert_tensor_metadata")
def lower_metadata_assertion(context: Any, node: Any) -> None:
    """Lower _assert_tensor_metadata(a, ...): held when the model was exported; nothing reads its result."""
    context.add(context[node.inputs[0]], node.name)


@PATCH.op("sym_storage_offset")
def lower_storage_offset(context: Any, node: Any) -> None:
    """Lower sym_storage_offset(self) to 0, for the checks of export, which only compare it with numbers.

    Raises NotConverted if any other op reads it.
    """
    readers = [each for each in context.torch_graph.nodes if node.name in each.inputs]
    if any(each.kind not in _COMPARISONS for each in readers):
        raise NotConverted.at(node, "reads the storage offset of a tensor, which Core ML does not have",
                              "compute the offset from sizes")
    context.add(mb.const(val=np.int32(0), name=node.name))


def _is_training_program(model: Any) -> bool:
    return isinstance(model, ExportedProgram) and model.dialect == _TRAINING_DIALECT


def _make_stand_in(dialect: str) -> ExportedProgram:
    """Make an exported program with no content except its dialect."""
    kind = type("StandIn", (ExportedProgram,), {"dialect": dialect})
    program: ExportedProgram = object.__new__(kind)
    return program
