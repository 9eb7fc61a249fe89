"""First differences: the op at which a converted model first differs from its torch model, its module and source line.

Both models run with every value kept. The frontend names the values of its program after those of torch's graph. The
first value that both have and that differs is the location, unless all that is computed from it agrees again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..equivalence.callable_comparison import FP32_TOLERANCE, compare_within_tolerance
from ..equivalence.callables import Noise, to_array
from ..equivalence.comparison import OutputDifference
from ..equivalence.undetermined_elements import FP32_ROUNDING, find_cancelled, replace_elements
from ..utils.errors import InputError
from .errors import UNNAMED_SCOPES, find_source_line
from .model_runners import ProgramRunner, TorchModelRunner

__all__ = ["GraphValue", "find_first_difference", "find_first_random_value", "select_first_difference"]

Array = np.ndarray[Any, Any]


@dataclass
class GraphValue:
    """One value of torch's graph: the op that makes it, the path and class of the op's module, and the op's line."""

    name: str
    op: str
    module: str
    kind: str
    line: str
    users: Sequence[str] = ()
    value: Array = field(default_factory=lambda: np.zeros(0))
    difference: OutputDifference | None = None

    def __str__(self) -> str:
        return f"{self.location} differs: {self.difference}"

    @property
    def location(self) -> str:
        """Format `encoder.layer.1 (Block): op 'aten::relu' (model.py:11)`, as far as it is known."""
        place = f"{self.module} ({self.kind})" if self.module and self.kind else self.module
        line = f" ({self.line})" if self.line else ""
        return f"{place + ': ' if place else ''}op '{self.op}'{line}"


def find_first_difference(
    module: TorchModelRunner, compiled: ProgramRunner, feeds: Mapping[str, Array], state: Mapping[str, Array]
) -> GraphValue | None:
    """Find the first op whose value differs between the program and torch; None when it cannot be determined.

    A difference that the rounding of cancelling numbers explains, as of a variance of equal numbers, is not taken
    unless all differences are such.
    """
    found = _list_values(module, feeds, state)
    try:
        mine = compiled.run_with_values(feeds, {name: value.copy() for name, value in state.items()})
    except InputError:
        return None
    first = select_first_difference(found, mine, module.tolerance)
    if first is None:
        return None

    def run_with_noise(error: float, seed: int) -> dict[str, Array]:
        return {part.name: part.value for part in _list_values(module, feeds, state, (error, seed))}

    cancelled = find_cancelled({part.name: part.value for part in found}, mine, run_with_noise,
                               {part.name for part in found} & mine.keys(), FP32_ROUNDING, module.tolerance)
    parts = [replace(part, value=replace_elements(part.value, mine[part.name], cancelled[part.name]))
             if part.name in cancelled else part for part in found]
    return (select_first_difference(parts, mine, module.tolerance) or first) if cancelled else first


def find_first_random_value(
    module: TorchModelRunner, feeds: Mapping[str, Array], state: Mapping[str, Array]
) -> GraphValue | None:
    """Find the first op of the torch model whose value differs between two runs on the same feeds and states."""
    first, second = (_list_values(module, feeds, state) for _ in range(2))
    return select_first_difference(first, {part.name: part.value for part in second}, module.tolerance)


def _list_values(
    module: TorchModelRunner, feeds: Mapping[str, Array], state: Mapping[str, Array], noise: Noise | None = None
) -> list[GraphValue]:
    """Run the torch model, and list the values of its graph."""
    import torch

    values = _run_script if isinstance(module.model, torch.jit.ScriptModule) else _run_exported
    found: list[GraphValue] = []

    def run_model(given: Any, arguments: Sequence[Any]) -> Any:
        returned, parts = values(module.model, given, arguments)
        found.extend(parts)
        return returned

    module.run_instead(run_model, feeds, state, noise)
    return found


def select_first_difference(
    parts: Sequence[GraphValue], mine: Mapping[str, Array], tolerance: float = FP32_TOLERANCE
) -> GraphValue | None:
    """Find the first of torch's values that differs in `mine`, by name.

    A difference of more than the shape has priority.
    """
    return _find_lasting_difference(parts, mine, tolerance, alike=True) or _find_lasting_difference(
        parts, mine, tolerance, alike=False
    )


def _find_lasting_difference(
    parts: Sequence[GraphValue], mine: Mapping[str, Array], tolerance: float, alike: bool
) -> GraphValue | None:
    """Find the first part that differs, unless all parts that read it agree.

    With `alike`, the frontend may broadcast a value early.
    """
    known: dict[str, bool] = {}
    for part in parts:
        if part.name in mine:
            other = mine[part.name]
            value = _broadcast_if_possible(part.value, other.shape) if alike else part.value
            part.difference = compare_within_tolerance(part.name, value, other, tolerance)
            known[part.name] = part.difference.passed
    return next((part for part in parts if not known.get(part.name, True) and not (
        part.users and all(known.get(reader, False) for reader in part.users))), None)


def _broadcast_if_possible(value: Array, shape: tuple[int, ...]) -> Array:
    try:
        return np.broadcast_to(value, shape)
    except ValueError:
        return value


def _run_script(model: Any, given: Any, arguments: Sequence[Any]) -> tuple[Any, Iterator[GraphValue]]:
    """Run a TorchScript module with the graph that coremltools reads.

    Each value is copied where it is computed, since later ops may write into it.
    """
    import torch
    from coremltools.converters.mil.frontend.torch.torchscript_utils import _expand_and_optimize_ir

    from .functional.bool_operands import replace_bool_operands

    graph, _, _ = _expand_and_optimize_ir(replace_bool_operands(model))
    names = _map_in_place_names(graph, model)
    kinds = {path: getattr(part, "original_name", type(part).__name__) for path, part in model.named_modules()}
    own = len(list(graph.outputs()))
    parts = []
    for node in list(graph.nodes()):
        if node.kind() in ("prim::GetAttr", "prim::Constant"):
            continue
        for value in node.outputs():
            if value.type().kind() == "TensorType":
                parts.append(_make_script_value(node, value, kinds, names))
                graph.registerOutput(_insert_clone(graph, node, value))
    if own + len(parts) > 1:
        graph.makeMultiOutputIntoTuple()
    returned = torch._C._create_function_from_graph("forward", graph)(model._c, *arguments)
    returned = returned if own + len(parts) > 1 else (returned,)
    for part, tensor in zip(parts, returned[own:], strict=True):
        part.value = to_array(tensor)
    return returned[:own], iter(parts)


def _insert_clone(graph: Any, node: Any, value: Any) -> Any:
    import torch

    nothing = graph.create("prim::Constant", 1)
    nothing.insertAfter(node)
    nothing.output().setType(torch._C.NoneType.get())
    copied = graph.create("aten::clone", [value, nothing.output()], 1)
    copied.insertAfter(nothing)
    return copied.output()


def _map_in_place_names(graph: Any, model: Any) -> dict[str, str]:
    """Map the results of in-place ops in torch's graph to their names in the patched frontend.

    The graph of the patched frontend has no in-place ops.
    """
    from coremltools.converters.mil.frontend.torch import internal_graph

    def list_results(of: Any, in_place: bool) -> dict[tuple[str, str], list[str]]:
        found: dict[tuple[str, str], list[str]] = {}
        for node in of.nodes():
            if node.outputsSize() == 1 and node.kind().endswith("_") == in_place:
                found.setdefault((node.kind().rstrip("_"), node.sourceRange()), []).append(node.output().debugName())
        return found

    written = list_results(graph, in_place=True)
    known = {value.debugName() for node in graph.nodes() for value in node.outputs()}
    built = list_results(internal_graph._expand_and_optimize_ir(model)[0], in_place=False)
    pairs = ((names, [name for name in built.get(key, []) if name not in known]) for key, names in written.items())
    return {name: other for names, others in pairs if len(names) == len(others)
            for name, other in zip(names, others, strict=True)}


def _make_script_value(node: Any, value: Any, kinds: Mapping[str, str], names: Mapping[str, str]) -> GraphValue:
    path = _find_module_path(node, kinds)
    readers = [names.get(output.debugName(), output.debugName()) for use in value.uses()
               for output in use.user.outputs() if use.user.kind() != "prim::Return"]
    return GraphValue(names.get(value.debugName(), value.debugName()), node.kind(), path, kinds.get(path, ""),
                      find_source_line(node.sourceRange()), readers)


def _find_module_path(node: Any, kinds: Mapping[str, str]) -> str:
    """Return the module path of a node, such as `layer.0.linear`.

    A trace keeps the complete path; a script keeps only the attribute names, without containers.
    """
    scope = node.scopeName().rpartition("/")[2].removeprefix("__module").removeprefix(".")
    if scope in kinds and scope:
        return str(scope)
    steps = [name for step in node.getModuleHierarchy().split(".")
             if (name := step.partition("(")[0]) not in UNNAMED_SCOPES]
    paths = [path for path in kinds if path and _is_subpath(steps, path.split("."))]
    return min(paths, key=len) if steps and paths else ".".join(steps)


def _is_subpath(steps: Sequence[str], path: Sequence[str]) -> bool:
    """Return whether `steps` occur in `path` in order and both end with the same step."""
    rest = iter(path)
    return bool(steps) and steps[-1] == path[-1] and all(step in rest for step in steps)


def _run_exported(model: Any, given: Any, arguments: Sequence[Any]) -> tuple[Any, Iterator[GraphValue]]:
    """Run an ExportedProgram node by node, with the current buffers of its module `given`."""
    import torch

    parts: list[GraphValue] = []

    def run_node(interpreter: Any, node: Any) -> Any:
        result = torch.fx.Interpreter.run_node(interpreter, node)
        if node.op == "call_function" and isinstance(result, torch.Tensor):
            parts.append(_make_exported_value(node, to_array(result)))
        return result

    watching = type("Watching", (torch.fx.Interpreter,), {"run_node": run_node})
    held = {**dict(model.constants), **dict(model.state_dict), **dict(given.named_buffers())}
    fed = iter(arguments)
    kinds = torch.export.graph_signature.InputKind
    placed = [held[spec.target] if spec.kind != kinds.USER_INPUT
              else spec.arg.value if isinstance(spec.arg, torch.export.graph_signature.ConstantArgument) else next(fed)
              for spec in model.graph_signature.input_specs]
    with torch.no_grad():
        returned = watching(model.graph_module).run(
            *(each.clone() if isinstance(each, torch.Tensor) else each for each in placed))
    count = sum(spec.kind == torch.export.graph_signature.OutputKind.USER_OUTPUT
                for spec in model.graph_signature.output_specs)
    return tuple(returned)[len(returned) - count:], iter(parts)


def _make_exported_value(node: Any, value: Array) -> GraphValue:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path, kind = stack[-1] if stack else ("", "")
    path = path.removeprefix("L['self']").removeprefix(".")
    kind = kind if isinstance(kind, str) else kind.__name__
    readers = [user.name for user in node.users if user.op != "output"]
    return GraphValue(node.name, str(node.target), path, kind.rpartition(".")[2] if path else "",
                      find_source_line(node.meta.get("stack_trace") or ""), readers, value)
