"""A custom `torch.autograd.Function` in a traced module: its forward is converted like any other code.

A trace records such a function as one `prim::PythonOp`, also under no_grad, which coremltools does not support. The op
contains a record of its forward, which replaces the op before coremltools reads the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..contract import Patch
from ..errors import NotConverted
from ..probes import find_fault

PATCH = Patch(
    code="TORCH105",
    title="a custom `torch.autograd.Function` in a traced module (`PythonOp`) is not implemented",
    upstream=("https://github.com/apple/coremltools/issues/1135",
              "https://github.com/apple/coremltools/issues/2051"),
)


@PATCH.probe
def probe() -> str | None:
    import torch

    doubled: Any = type("Doubled", (torch.autograd.Function,), {"forward": staticmethod(lambda context, x: x * 2)})
    return find_fault(lambda x: doubled.apply(x), torch.arange(3.))


@PATCH.replace_function("coremltools.converters.mil.frontend.torch.torchscript_utils", "_jit_pass_lower_graph")
def lower_graph(host: Callable[..., Any], graph: Any, module: Any) -> Any:
    """Inline the recorded bodies of autograd functions before coremltools lowers the graph."""
    if _find_recorded_functions(graph):
        _inline_functions(graph)
    return host(graph, module)


@PATCH.op("pythonop")
def refuse_python_op(context: Any, node: Any) -> None:
    """Raise NotConverted for Python code that the trace did not record."""
    raise NotConverted.at(node, "is Python code that the graph does not record", "write it with torch's ops")


def _find_recorded_functions(graph: Any) -> list[Any]:
    return [node for node in graph.findAllNodes("prim::PythonOp", True) if "Subgraph" in node.attributeNames()]


def _inline_functions(graph: Any) -> None:
    import torch

    while _find_recorded_functions(graph):  # a function may call another
        torch._C._jit_pass_onnx_autograd_function_process(graph)  # the Subgraph attribute becomes a block
        for node in graph.findAllNodes("prim::PythonOp", True):
            for block in list(node.blocks())[:1]:
                _replace_by_block(graph, node, block)
                node.destroy()
    torch._C._jit_pass_lint(graph)


def _replace_by_block(graph: Any, node: Any, block: Any) -> None:
    """Move the nodes of the block before `node`, and replace the outputs of `node` by those of the block."""
    for inner, outer in zip(list(block.inputs()), list(node.inputs()), strict=True):
        inner.replaceAllUsesWith(outer)
    for each in list(block.nodes()):
        each.moveBefore(node)
    results, outputs = list(block.outputs()), list(node.outputs())
    if len(results) > len(outputs):
        packed = graph.create("prim::TupleConstruct", results, 1)
        packed.insertBefore(node)
        results = list(packed.outputs())
    for outer, inner in zip(outputs, results, strict=True):
        outer.replaceAllUsesWith(inner)
