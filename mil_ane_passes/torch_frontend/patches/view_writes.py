"""In-place writes through views reach their base in traced and scripted modules.

coremltools fuses `select`/`slice` chains in front of `copy_` and `fill_` and drops their `dim`, assuming axes 0, 1, 2
in order; `x[..., -1] = 0` then writes another axis. Every other in-place op on a view (`x[:, 1:3].clamp_()`,
`x.view(-1)[0] = 1`, `x[:, idx] += 1`) changes only the view: the write to `x` is dropped, silently, and a KV cache is
never filled. Here the TorchScript graph is functionalized before coremltools reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from coremltools import _logger as logger
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types

from ...passes.severity import Severity
from ...utils.text_format import escape_text
from ..contract import Patch
from ..errors import NotConverted, describe_node_location
from ..functional import functionalize_graph, hoist_attributes, name_attributes_once, write_complex_constants
from ..functional.bool_operands import replace_bool_operands
from ..functional.functionalization import LOSE_ATTRIBUTE, UPDATE_ATTRIBUTE
from ..functional.specialization import specialize_graph
from ..probes import find_fault

PATCH = Patch(
    code="TORCH153", severity=Severity.WRONG,
    title="writes through views go to the wrong axis or are dropped",
    upstream=(
        "https://github.com/apple/coremltools/issues/1422",
        "https://github.com/apple/coremltools/issues/2188",
        "https://github.com/apple/coremltools/issues/2099",
    ),
)
_GRAPH_MODULE = "coremltools.converters.mil.frontend.torch.internal_graph"
_SHAPE_ONLY_INPUTS = {"aten::copy": 0, "aten::fill": 0, "aten::type_as": 1, "aten::size": 0, "aten::dim": 0}
"""Ops that read only shape and dtype of this input."""


@PATCH.probe
def probe() -> str | None:
    import torch

    def write(x: Any) -> Any:
        x[..., -1] = 0
        x[:, 1:3].clamp_(0)
        return x

    return find_fault(write, torch.arange(-6., 6.).reshape(3, 4))


@PATCH.replace_function(_GRAPH_MODULE, "_expand_and_optimize_ir")
def expand_and_optimize_ir(host: Callable[..., Any], torchscript: Any) -> Any:
    """Make coremltools' inlined graph, specialized for the module and its inputs, without in-place writes."""
    graph, parameters, buffers = host(replace_bool_operands(torchscript))
    specialize_graph(graph, torchscript, parameters)
    write_complex_constants(graph)
    hoist_attributes(graph)
    name_attributes_once(graph, parameters)
    functionalize_graph(graph)
    for node in graph.findAllNodes(UPDATE_ATTRIBUTE, False):
        node.i_("reads", int(_is_read(next(node.inputs()))))
    return graph, parameters, buffers


@PATCH.replace_function(_GRAPH_MODULE, "InternalTorchIRNode.from_torchscript_node")
def from_torchscript_node(host: Callable[..., Any], cls: Any, node: Any, parent: Any) -> Any:
    """Record the source line of each node for error messages; a literal has the line of its contents."""
    built = host(cls, node, parent)
    sources = (each.sourceRange() for each in (node, *(value.node() for value in node.inputs())))
    built.meta = {**(built.meta or {}), "source": next(filter(None, sources), "")}
    return built


@PATCH.op(UPDATE_ATTRIBUTE)
def update_attribute(context: Any, node: Any) -> None:
    """Lower (buffer, value): the module's buffer holds `value` from now on; also in the next call, if it is a state.

    An undeclared buffer is a constant to coremltools, whose tests require this; so this is a warning, not an error.
    """
    buffer, value = node.inputs
    state = context.name_to_source_state.get(buffer)
    new = context[value]
    if state is None:
        if node.attr["reads"]:
            logger.warning(
                "%s writes to the buffer '%s', which in torch keeps its value for the next call; it is not declared as "
                "a state, so every call starts from its current value. To keep it, pass states=[ct.StateType("
                "wrapped_type=..., name='%s')] (iOS18)",
                escape_text(describe_node_location(node)),
                escape_text(buffer),
                escape_text(buffer),
            )
        context.add(mb.identity(x=new, name=node.name))
        return
    shape = tuple(state.sym_type.wrapped_type().get_shape())
    if tuple(new.shape) != shape:  # sizes that inference does not know, such as that of `x[..., -2:]` of flexible x
        new = mb.reshape(x=new, shape=list(shape))
    kept = mb.coreml_update_state(state=state, value=mb.cast(x=new, dtype=types.builtin_to_string(state.dtype)))
    context.add(mb.cast(x=kept, dtype=types.builtin_to_string(new.dtype), name=node.name))
    context.name_to_source_state[node.name] = state


@PATCH.op(LOSE_ATTRIBUTE)
def lose_attribute(context: Any, node: Any) -> None:
    """Lower (buffer): it is unknown whether the buffer was written. Raises NotConverted if it is a state."""
    (buffer,) = node.inputs
    if buffer in context.name_to_source_state:
        raise NotConverted.at(node, f"writes to the state '{buffer}', or possibly to a copy of it",
                              "write to the buffer itself, or to a .clone()")
    context.add(mb.identity(x=context[buffer], name=node.name))


def _is_read(buffer: Any) -> bool:
    """Return whether anything depends on the buffer's value before the call."""
    return any(use.user.kind() != UPDATE_ATTRIBUTE and _SHAPE_ONLY_INPUTS.get(use.user.kind()) != use.offset
               for use in buffer.uses())
