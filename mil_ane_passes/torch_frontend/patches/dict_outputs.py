"""A model that returns a dict, or a ModelOutput of transformers, has one output for each tensor, named by its key.

A traced dict (`strict=False`) and a dict literal in a script are `prim::DictConstruct`, for which coremltools has no
lowering; torch.export flattens a dict itself, and its keys are lost. A tensor inside of another container is named by
the path to it: `hidden_states_0`. `outputs=` still overrides the names.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from coremltools.converters.mil.mil import Builder as mb

from ..contract import Patch
from ..errors import NotConverted

PATCH = Patch(code="TORCH162",
              title="a dict as result (`DictConstruct`) is not implemented; exported, its keys are lost",
              upstream=("none known",))
_GRAPH_MODULE = "coremltools.converters.mil.frontend.torch.internal_graph"
_NAMED_OUTPUT_KIND = "mil_ane::named_output"
_LIST_KINDS = ("tupleconstruct", "listconstruct")


@PATCH.replace_function("coremltools.converters.mil.frontend.torch.converter", "flatten_graph_output_values")
def flatten_outputs(host: Callable[..., None], graph: Any) -> None:
    """Replace each dict among the outputs of TorchScript by its values, in place."""
    makers = {name: node for node in graph.nodes for name in node.outputs}
    if not any(_has_dict(makers, output) for output in graph.outputs):
        host(graph)
        return
    leaves = [leaf for output in graph.outputs for leaf in _iterate_leaves(makers, output, ())]
    used = {value for node in graph.nodes if node.kind != "dictconstruct" for value in _iterate_read_values(node)}
    for node in graph.nodes:
        if node.kind == "dictconstruct" and node.name in used:
            refuse_inner_dict(None, node)
    if not leaves:
        raise NotConverted.at(makers[graph.outputs[0]], "the model returns a dict without tensors",
                              "return one tensor or more")
    graph.nodes[:] = [node for node in graph.nodes if node.kind != "dictconstruct" or node.name in used]
    graph.outputs = _rename_outputs(graph, leaves)


@PATCH.replace_function(_GRAPH_MODULE, "InternalTorchIRGraph.from_exir")
def from_exir(host: Callable[..., Any], cls: Any, exir: Any, *more: Any, **named: Any) -> Any:
    """Make the graph of an exported program, with its outputs named by the keys of their dicts."""
    from torch.utils import _pytree as pytree

    graph = host(cls, exir, *more, **named)
    spec = exir.call_spec.out_spec
    if spec is None or spec.num_leaves != len(graph.outputs):
        return graph
    paths = [path for path, _ in pytree.tree_flatten_with_path(pytree.tree_unflatten(list(graph.outputs), spec))[0]]
    keys = [tuple(str(getattr(step, "key", getattr(step, "idx", ""))) for step in itertools.dropwhile(
        lambda step: not isinstance(step, pytree.MappingKey), path)) for path in paths]
    if any(keys) or "" in graph.outputs:  # coremltools' name for None
        graph.outputs = _rename_outputs(graph, [(key, output) for key, output in zip(keys, graph.outputs, strict=True)
                                                if output])
    return graph


@PATCH.op(_NAMED_OUTPUT_KIND)
def named_output(context: Any, node: Any) -> None:
    """Lower (value): the value under the name of an output; None, which is not an output, stays None."""
    value = context[node.inputs[0]]
    context.add(None if value is None else mb.identity(x=value, name=node.name), torch_name=node.name)


@PATCH.op("dictconstruct")
def refuse_inner_dict(context: Any, node: Any) -> None:
    """Raise NotConverted for a dict that is used inside of the model, not only returned."""
    raise NotConverted.at(node, "uses a dict inside of the model", "use a tuple, or a dict literal as the result only")


def _iterate_read_values(node: Any) -> Iterator[str]:
    yield from node.inputs
    for block in node.blocks:
        yield from block.outputs
        for inner in block.nodes:
            yield from _iterate_read_values(inner)


def _has_dict(makers: dict[str, Any], value: str) -> bool:
    node = makers.get(value)
    if node is None or node.kind not in (*_LIST_KINDS, "dictconstruct"):
        return False
    return node.kind == "dictconstruct" or any(_has_dict(makers, inner) for inner in node.inputs)


def _iterate_leaves(makers: dict[str, Any], value: str, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the tensors of an output, each with the keys that lead to it; () outside of any dict."""
    node = makers.get(value)
    if node is None or node.kind not in (*_LIST_KINDS, "dictconstruct"):
        yield path, value
    elif node.kind == "dictconstruct":
        for key, inner in zip(node.inputs[::2], node.inputs[1::2], strict=True):
            yield from _iterate_leaves(makers, inner, (*path, str(makers[key].attr["value"])))
    else:
        for place, inner in enumerate(node.inputs):
            yield from _iterate_leaves(makers, inner, (*path, str(place)) if path else ())


def _rename_outputs(graph: Any, leaves: list[tuple[tuple[str, ...], str]]) -> list[str]:
    """Return the names of the outputs, and add a node for each output that is renamed.

    A new name consists of the output's keys, and differs from all other names.
    """
    from coremltools.converters.mil.frontend.torch.internal_graph import InternalTorchIRNode

    taken = {*graph.inputs, *graph.params, *(spec.name for spec in graph.inputs.values()),
             *(name for node in graph.nodes for name in (node.name, *node.outputs))}
    makers = {name: node for node in graph.nodes for name in node.outputs}
    outputs = []
    for path, value in leaves:
        name = "_".join(path)
        while name in taken:
            name += "_out"
        if path:
            taken.add(name)
            maker = makers.get(value)
            graph.nodes.append(InternalTorchIRNode(
                kind=_NAMED_OUTPUT_KIND, inputs=[value], outputs=[name], name=name, parent=graph,
                model_hierarchy=getattr(maker, "model_hierarchy", None), meta=dict(getattr(maker, "meta", None) or {})))
        outputs.append(name if path else value)
    return outputs
