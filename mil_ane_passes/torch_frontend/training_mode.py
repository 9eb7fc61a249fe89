"""Models captured in training mode: dropout is random, and batch norm uses and updates other statistics.

torch records the mode of each op when it exports or traces a module; a later `eval()` changes neither.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from ..equivalence.callables import MODE_ARGUMENTS, iterate_training_ops
from ..utils.errors import InputError
from ..utils.text_format import escape_text
from .errors import describe_node_location

__all__ = ["reject_training_export", "warn_about_training_trace"]

_log = logging.getLogger("mil_ane_passes")
_UPDATING_NORMS = ("aten::_batch_norm_with_update", "aten::_batch_norm_with_update_functional")
"Batch norms that have no argument for the mode, and are always in training mode."
_DROPOUT_MODULES = "torch.nn.modules.dropout."
_LEFT_OUT = ("aten::dropout", "aten::dropout_")
"Ops that coremltools leaves out in every mode."
_TRACED_NORMS = ("aten::batch_norm", "aten::instance_norm")


def reject_training_export(model: Any, check: bool = False) -> None:
    """Raise InputError for a program of torch.export that was exported in training mode; ignore other models.

    A dropout that coremltools leaves out counts only with `check`, as the torch model is random. A norm by the
    statistics of its input is in this mode if it has running statistics of a module, which it would update. Without
    them (`track_running_stats=False`), or with computed ones, it computes the same in eval mode.
    """
    if not (hasattr(model, "graph_module") and hasattr(model, "graph_signature")):
        return
    bound: dict[Any, Any] = {}
    for node in _iterate_calls(model.graph_module, bound):
        if getattr(getattr(node.target, "_schema", None), "name", "") in _LEFT_OUT and not check:
            continue
        if _is_in_training_mode(node, model.graph_signature, bound):
            location = describe_node_location(SimpleNamespace(kind=str(node.target), meta=node.meta))
            advice = "" if _find_module_class(node).startswith("torch.nn.") else \
                "; where its code passes training=True, pass self.training"
            raise InputError(f"convert: the program was exported in training mode, in which {location} computes "
                             f"something else; call model.eval(), and export it again{advice}")


def warn_about_training_trace(model: Any) -> None:
    """Log a norm of a model that was traced in training mode: coremltools converts it as one by its input's statistics.

    Dropout is no reason to warn, as coremltools leaves it out.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(model, torch.jit.ScriptModule):
        return
    graph = model.inlined_graph  # its nodes are valid while it is referenced
    for node in iterate_training_ops(torch, graph):
        if node.kind() in _TRACED_NORMS:
            _log.warning("the model was traced in training mode, in which %s normalizes by the statistics of its "
                         "input in place of the running statistics; trace the module again after its eval()",
                         escape_text(describe_node_location(node)))
            return


def _iterate_calls(graph_module: Any, bound: dict[Any, Any]) -> Iterator[Any]:
    """Yield the calls of a graph and of the regions of its ops, such as those of `torch.no_grad()` and `torch.cond`.

    `bound` gets the node that is passed for each input of a region.
    """
    import torch

    for node in graph_module.graph.nodes:
        if node.op != "call_function":
            continue
        yield node
        for each in node.all_input_nodes:
            region = getattr(graph_module, str(each.target), None) if each.op == "get_attr" else None
            if isinstance(region, torch.fx.GraphModule):
                inputs = [inner for inner in region.graph.nodes if inner.op == "placeholder"]
                passed = torch.utils._pytree.tree_leaves((node.args, node.kwargs))
                bound.update(zip(inputs, passed[-len(inputs):]))  # flags and regions precede what is passed
                yield from _iterate_calls(region, bound)


def _is_in_training_mode(node: Any, signature: Any, bound: Mapping[Any, Any]) -> bool:
    """Return whether an op computes something else than in eval mode."""
    import torch

    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return False
    given = {argument.name: argument.default_value for argument in schema.arguments if argument.has_default_value()}
    given |= dict(zip((argument.name for argument in schema.arguments), node.args)) | node.kwargs
    is_training = any(given.get(name) for name in MODE_ARGUMENTS)
    if "running_mean" in given:
        return (is_training or schema.name in _UPDATING_NORMS) and _is_module_statistic(
            given["running_mean"], signature, bound)
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    if "dropout_p" in given:  # attention, which has no other argument for the mode
        return bool(given["dropout_p"])
    if any(name in given for name in MODE_ARGUMENTS):  # `dropout` of recurrent layers, `p` of dropout, neither of RReLU
        return is_training and bool(given.get("dropout", given.get("p", True)))
    # A decomposed dropout, such as a product with `bernoulli`
    return _find_module_class(node).startswith(_DROPOUT_MODULES)


def _is_module_statistic(value: Any, signature: Any, bound: Mapping[Any, Any]) -> bool:
    """Return whether a running statistic is a buffer, or is computed from one that the program updates.

    A decomposed InstanceNorm repeats its buffer for each image, and updates it. Code that normalizes each image by a
    batch norm repeats one that it leaves as it is.
    """
    node, is_direct = value, True
    while node is not None:
        if node in bound:
            node = bound[node]
        elif node.op == "placeholder":
            buffer = signature.inputs_to_buffers.get(node.name)
            return buffer is not None and (is_direct or buffer in signature.buffers_to_mutate.values())
        else:
            node, is_direct = node.all_input_nodes[0] if len(node.all_input_nodes) == 1 else None, False
    return False


def _find_module_class(node: Any) -> str:
    """Return the qualified name of the innermost module's class, "" where it is not recorded."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    if not stack:
        return ""
    kind = stack[-1][1]
    return kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
