"""A model that computes in bfloat16 is converted as one that computes in float32.

Core ML has no bfloat16. coremltools fails with `KeyError: 15` for a cast, and with "Got unsupported ScalarType
BFloat16" for a weight. Here a copy of the model is converted in which all weights, constants, casts and inputs of
bfloat16 are of float32, which holds each number of bfloat16 (8 bits of precision, the exponents of float32). Results
are not rounded to bfloat16, and so are closer to those of a model in float32 than those of the model itself.
"""

from __future__ import annotations

import copy
import io
import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

from ..contract import Patch
from ..functional.emitter import get_schema, read_constant
from ..probes import find_fault

__all__ = ["widen_bfloat16", "widen_float16"]

PATCH = Patch(code="TORCH194", title="models in bfloat16, or with casts to it, are rejected", upstream=("none known",))
_SCRIPT_NUMBERS = {torch.float16: 5, torch.float32: 6, torch.bfloat16: 15}
"The numbers of dtypes in TorchScript (c10/core/ScalarType.h)."
_Widen = Callable[[Any], Any]
"Returns a dtype, or a tensor (real or fake), of float32 for a narrow one, and other values as they are."
_log = logging.getLogger("mil_ane_passes")


@PATCH.probe
def probe() -> str | None:
    return find_fault(lambda x: x.to(torch.bfloat16).to(torch.float32), torch.ones(2, 3))


@PATCH.replace_function("coremltools.converters.mil.frontend.torch.converter", "TorchConverter.__init__")
def initialize_converter(
    host: Callable[..., None], self: Any, loaded_model: Any, *arguments: Any, **named: Any
) -> None:
    """Initialize coremltools' converter with a model in which float32 takes the place of bfloat16."""
    host(self, widen_bfloat16(loaded_model), *arguments, **named)


def widen_bfloat16(model: Any) -> Any:
    """Return a copy of a script or an exported program with float32 in place of bfloat16; `model` if it has none.

    Logs a warning for a copy. Needs memory for the weights of the copy, and for those of a script twice.
    """
    widened = _widen_model(model, torch.bfloat16)
    if widened is not model:
        _log.warning("the model computes in bfloat16, which Core ML does not have; it is converted as one in float32, "
                     "whose results are not rounded to bfloat16")
    return widened


def widen_float16(model: Any) -> Any:
    """Return a copy of a script or an exported program with float32 in place of float16; `model` if it has none."""
    return _widen_model(model, torch.float16)


def _widen_model(model: Any, dtype: torch.dtype) -> Any:
    def widen(value: Any) -> Any:
        if value is dtype:
            return torch.float32
        if not isinstance(value, torch.Tensor) or value.dtype != dtype:
            return value
        widened = value.detach().to(torch.float32)
        return torch.nn.Parameter(widened, value.requires_grad) if isinstance(value, torch.nn.Parameter) else widened

    if isinstance(model, ExportedProgram) and _is_program_narrow(model, widen):
        return _widen_program(model, widen)
    if isinstance(model, torch.jit.ScriptModule) and hasattr(model, "forward") and (
            _is_script_narrow(model, widen, _SCRIPT_NUMBERS[dtype])):
        return _widen_script(model, widen, _SCRIPT_NUMBERS[dtype])
    return model


def _is_program_narrow(program: Any, widen: _Widen) -> bool:
    leaves = itertools.chain(program.state_dict.values(), program.constants.values(),
                             (each for node in _iterate_nodes(program.graph_module) for each in pytree.tree_leaves(
                                 (node.meta.get("val"), node.args, node.kwargs))))
    return any(widen(each) is not each for each in leaves)


def _widen_program(program: Any, widen: _Widen) -> Any:
    if program.dialect == "TRAINING":  # before, as torch refuses some decompositions for float32, of grouped products
        program = program.run_decompositions({})
    module = copy.deepcopy(program.graph_module)
    for node, before in zip(module.graph.nodes, program.graph_module.graph.nodes, strict=True):
        node.name = before.name  # which a copy changes where it is a word of Python, as `input`
    for node in _iterate_nodes(module):
        node.args = map_aggregate(node.args, widen)
        node.kwargs = map_aggregate(node.kwargs, widen)
        if "val" in node.meta:
            node.meta["val"] = pytree.tree_map(widen, node.meta["val"])
    return ExportedProgram(
        module, module.graph, program.graph_signature,
        state_dict=pytree.tree_map(widen, program.state_dict),
        range_constraints=program.range_constraints,
        module_call_graph=program.module_call_graph,
        example_inputs=pytree.tree_map(widen, program.example_inputs),
        constants=pytree.tree_map(widen, program.constants),
        verifiers=program.verifiers)


def _iterate_nodes(module: Any) -> Iterator[Any]:
    """Yield the nodes of a graph module and of the graphs that its nodes call."""
    for each in module.modules():
        if isinstance(each, torch.fx.GraphModule):
            yield from each.graph.nodes


def _is_script_narrow(script: Any, widen: _Widen, number: int) -> bool:
    graph = script.inlined_graph
    return (any(widen(each) is not each for each in itertools.chain(script.parameters(), script.buffers()))
            or any(True for _ in itertools.chain(_iterate_constants(graph, widen), _iterate_dtypes(graph, number))))


def _widen_script(script: Any, widen: _Widen, number: int) -> Any:
    """Return a copy of a script with float32 in place of the dtype of this number.

    It is read from a saved copy: copies in memory share their graphs.
    """
    saved = io.BytesIO()
    torch.jit.save(script, saved)
    saved.seek(0)
    widened = torch.jit.load(saved)
    widened._apply(widen)
    graph = widened.forward.graph
    torch._C._jit_pass_inline(graph)
    for node, value in list(_iterate_constants(graph, widen)):
        node.t_("value", widen(value))
    for node, place in list(_iterate_dtypes(graph, number)):
        with graph.insert_point_guard(node):
            node.replaceInput(place, graph.insertConstant(_SCRIPT_NUMBERS[torch.float32]))
    return widened


def _iterate_constants(graph: Any, widen: _Widen) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield the nodes of narrow constant tensors and their values."""
    for node in graph.findAllNodes("prim::Constant"):
        value = node.output().toIValue()
        if widen(value) is not value:
            yield node, value


def _iterate_dtypes(block: Any, number: int) -> Iterator[tuple[Any, int]]:
    """Yield the nodes of a graph, or of a block of it, that ask for the dtype of a number, and the argument's place."""
    for node in block.nodes():
        schema = get_schema(node)
        for place, argument in enumerate(schema.arguments if schema is not None else ()):
            if argument.name.endswith("dtype") and read_constant(node.inputsAt(place)) == number:
                yield node, place
        for inner in node.blocks():
            yield from _iterate_dtypes(inner, number)
