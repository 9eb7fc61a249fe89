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

__all__ = ["widen_bfloat16"]

PATCH = Patch(code="TORCH194", title="models in bfloat16, or with casts to it, are rejected", upstream=("none known",))
_BFLOAT16, _FLOAT32 = 15, 6
"The numbers of dtypes in TorchScript (c10/core/ScalarType.h)."
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
    if isinstance(model, ExportedProgram) and _has_program_bfloat16(model):
        widened = _widen_program(model)
    elif isinstance(model, torch.jit.ScriptModule) and hasattr(model, "forward") and _has_script_bfloat16(model):
        widened = _widen_script(model)
    else:
        return model
    _log.warning("the model computes in bfloat16, which Core ML does not have; it is converted as one that computes in "
                 "float32, whose results are not rounded to bfloat16")
    return widened


def _has_program_bfloat16(program: Any) -> bool:
    leaves = itertools.chain(program.state_dict.values(), program.constants.values(),
                             (each for node in _iterate_nodes(program.graph_module) for each in pytree.tree_leaves(
                                 (node.meta.get("val"), node.args, node.kwargs))))
    return any(_widen(each) is not each for each in leaves)


def _widen_program(program: Any) -> Any:
    program = program.run_decompositions({})  # of which some are refused for float32, as of grouped products
    module = copy.deepcopy(program.graph_module)
    for node in _iterate_nodes(module):
        node.args = map_aggregate(node.args, _widen)
        node.kwargs = map_aggregate(node.kwargs, _widen)
        if "val" in node.meta:
            node.meta["val"] = pytree.tree_map(_widen, node.meta["val"])
    return ExportedProgram(
        module, module.graph, program.graph_signature,
        state_dict=pytree.tree_map(_widen, program.state_dict),
        range_constraints=program.range_constraints,
        module_call_graph=program.module_call_graph,
        example_inputs=pytree.tree_map(_widen, program.example_inputs),
        constants=pytree.tree_map(_widen, program.constants),
        verifiers=program.verifiers)


def _iterate_nodes(module: Any) -> Iterator[Any]:
    """Yield the nodes of a graph module and of the graphs that its nodes call."""
    for each in module.modules():
        if isinstance(each, torch.fx.GraphModule):
            yield from each.graph.nodes


def _widen(value: Any) -> Any:
    """Return a dtype, or a tensor (real or fake), of float32 for one of bfloat16, and other values as they are."""
    if value is torch.bfloat16:
        return torch.float32
    if not isinstance(value, torch.Tensor) or value.dtype != torch.bfloat16:
        return value
    widened = value.detach().to(torch.float32)
    return torch.nn.Parameter(widened, value.requires_grad) if isinstance(value, torch.nn.Parameter) else widened


def _has_script_bfloat16(script: Any) -> bool:
    graph = script.inlined_graph
    return (any(_widen(each) is not each for each in itertools.chain(script.parameters(), script.buffers()))
            or any(True for _ in itertools.chain(_iterate_constants(graph), _iterate_dtypes(graph))))


def _widen_script(script: Any) -> Any:
    """Return a copy of a script with float32 in place of bfloat16.

    It is read from a saved copy: copies in memory share their graphs.
    """
    saved = io.BytesIO()
    torch.jit.save(script, saved)
    saved.seek(0)
    widened = torch.jit.load(saved)
    widened._apply(_widen)
    graph = widened.forward.graph
    torch._C._jit_pass_inline(graph)
    for node, value in list(_iterate_constants(graph)):
        node.t_("value", _widen(value))
    for node, place in list(_iterate_dtypes(graph)):
        with graph.insert_point_guard(node):
            node.replaceInput(place, graph.insertConstant(_FLOAT32))
    return widened


def _iterate_constants(graph: Any) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield the nodes of constant tensors of bfloat16 and their values."""
    for node in graph.findAllNodes("prim::Constant"):
        value = node.output().toIValue()
        if _widen(value) is not value:
            yield node, value


def _iterate_dtypes(block: Any) -> Iterator[tuple[Any, int]]:
    """Yield the nodes of a graph, or of a block of it, that ask for bfloat16, and the place of the argument."""
    for node in block.nodes():
        schema = get_schema(node)
        for place, argument in enumerate(schema.arguments if schema is not None else ()):
            if argument.name.endswith("dtype") and read_constant(node.inputsAt(place)) == _BFLOAT16:
                yield node, place
        for inner in node.blocks():
            yield from _iterate_dtypes(inner)
