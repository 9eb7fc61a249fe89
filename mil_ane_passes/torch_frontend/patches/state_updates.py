"""States of exported programs: their updates, and names that are those of ops.

A buffer that becomes a state has its own name in coremltools' graph, which an op of the program can have, too: for
`self.mean.add_(x.mean(0))` the state is found in place of the op "mean". Such an op gets another name here.

`canonicalize_inplace_pattern` moves updates of states behind the op of their value. It looks up the insertion point in
the list of ops as it was before the pass, so it fails if an earlier step of the pass removed that op ("KeyError": a
module that keeps two running statistics). It also names the new op after all passes that made the value, but a scope
allows only one (a state that is divided by a number, at float16).

A value that is expanded as it is written (`self.kept.copy_(x.mean())`) has its own shape in the program.

A state of rank 0 cannot be assigned a MIL scalar, which is how MIL represents a rank-0 value that is computed from an
input alone, such as the number of tokens in the static cache of transformers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Operation, types
from coremltools.converters.mil.mil.scope import ScopeInfo, ScopeSource

from ...ir.type_inference import infer_types, is_scalar_update
from ..contract import Patch

PATCH = Patch(code="TORCH185",
              title="some exported state updates fail: of two states that no op reads afterwards, by a quotient at "
                    "float16, by a value of smaller shape, of rank 0 by a value computed from an input alone, and of a "
                    "buffer that has the name of an op (`mean`)",
              upstream=("none known",))
_PASS = "canonicalize_inplace_pattern"
_MODULE = "coremltools.converters.mil.mil.passes.defs.optimize_state"
_SINGLE_SOURCES = frozenset((ScopeSource.COREMLTOOLS_GRAPH_PASS, ScopeSource.EXIR_DEBUG_HANDLE))
"Sources of which a scope has one name at most."


@PATCH.probe
def probe() -> str | None:
    """Move the updates of two states whose values were made one after the other; name an op that two passes made."""
    import coremltools as ct
    from coremltools.converters.mil.mil.passes.defs.optimize_state import canonicalize_inplace_pattern
    from coremltools.converters.mil.mil.passes.pass_registry import PASS_REGISTRY

    def build(x: Any, first: Any, second: Any) -> Any:
        one, two = mb.mul(x=x, y=np.float16(2)), mb.mul(x=x, y=np.float16(3))
        mb.coreml_update_state(state=first, value=one)
        mb.coreml_update_state(state=second, value=two)
        return mb.add(x=x, y=np.float16(1))

    states = [mb.StateTensorSpec((2,), dtype=types.fp16) for _ in range(2)]
    program = mb.program(input_specs=[mb.TensorSpec((2,), dtype=types.fp16), *states],
                         opset_version=ct.target.iOS18)(build)
    try:
        PASS_REGISTRY[f"common::{_PASS}"](program)
        canonicalize_inplace_pattern._construct_scope_info_list_from_op_scopes(
            SimpleNamespace(scopes={ScopeSource.COREMLTOOLS_GRAPH_PASS: ["divide_to_multiply", "add_fp16_cast"]}))
    except (KeyError, ValueError) as error:
        return f"fails: {type(error).__name__} in {_PASS}"  # its text has names that depend on earlier conversions
    return None


@PATCH.replace_function(_MODULE, f"{_PASS}._try_match_and_transform_pattern")
def move_updates(host: Callable[..., Any], self: Any, op: Operation, block: Any, ops: list[Operation]) -> None:
    """Move the updates of states by results of `op` behind `op`, unless an op between them uses the state."""
    if op.op_type in ("read_state", "coreml_update_state"):
        return
    later = [each for each in ops[ops.index(op) + 1:] if each.enclosing_block is block]
    for update in self._try_find_child_coreml_update_state_ops(op):
        if update.enclosing_block is not block or update not in later or _is_used_before(later, update):
            continue
        following = next(each for each in later if each.enclosing_block is block)
        with mb.scope(*self._construct_scope_info_list_from_op_scopes(op)):
            moved = mb.coreml_update_state(state=update.state, value=update.value, before_op=following)
        if block.try_replace_uses_of_var_after_op(anchor_op=update, old_var=update.outputs[0], new_var=moved):
            block.remove_ops([update])


def _is_used_before(ops: list[Operation], update: Operation) -> bool:
    """Return whether an op of `ops` before `update` reads or writes its state."""
    return any(each.enclosing_block is not None and update.state in each.inputs.values()
               for each in ops[:ops.index(update)])


@PATCH.replace_function(_MODULE, f"{_PASS}._construct_scope_info_list_from_op_scopes")
def list_scopes(host: Callable[..., Any], op: Operation) -> list[ScopeInfo]:
    """List the scopes of an op, with the last name alone of sources that allow one."""
    return [ScopeInfo(source=source, data=data[-1:] if source in _SINGLE_SOURCES and isinstance(data, list) else data)
            for source, data in op.scopes.items()]


@PATCH.replace_function("coremltools.converters.mil.mil.ops.defs.coreml_dialect.ops",
                        "coreml_update_state.type_inference")
def infer_update_type(host: Callable[..., Any], self: Any) -> Any:
    """Infer the type of an updated state; a scalar of its dtype is a value of a state of rank 0."""
    return infer_types(self) if is_scalar_update(self) else host(self)


@PATCH.replace_function("coremltools.converters.mil.frontend.torch.internal_graph", "InternalTorchIRGraph.from_exir")
def from_exir(host: Callable[..., Any], cls: Any, exir: Any, *more: Any, **named: Any) -> Any:
    """Read an exported program, with other names for ops that are named as a mutable buffer, and values of its shape.

    torch leaves out the expansion of what `buffer.copy_(value)` writes.
    """
    buffers = set(exir.graph_signature.buffers_to_mutate.values())
    clashes = any(node.op == "call_function" and node.name in buffers for node in exir.graph.nodes)
    changes = clashes or _list_smaller_values(exir) or buffers and getattr(exir, "range_constraints", None)
    return host(cls, _prepare_states(exir, buffers) if changes else exir, *more, **named)


def _list_smaller_values(exir: Any) -> dict[str, tuple[int, ...]]:
    """Return the names of values that are written to larger buffers, each with the shape of the buffer."""
    signature, shapes = exir.graph_signature, {
        node.name: tuple(node.meta["val"].shape) for node in exir.graph.nodes if hasattr(node.meta.get("val"), "shape")}
    buffers = {target: shapes.get(name) for name, target in signature.inputs_to_buffers.items()}
    return {name: shape for name, target in signature.buffers_to_mutate.items()
            if (shape := buffers.get(target)) is not None and shapes.get(name, shape) != shape}


def _prepare_states(exir: Any, taken: set[str]) -> Any:
    """Copy an exported program: no op has a name in `taken`, and what is written to a buffer has its shape."""
    import torch

    graph = torch.fx.Graph()
    result = graph.graph_copy(exir.graph, {}, return_output_node=True)
    assert isinstance(result, tuple), "an exported program has an output"
    signature, values = copy.deepcopy(exir.graph_signature), list(result[0])
    smaller = _list_smaller_values(exir)
    for spec, place in zip(signature.output_specs, range(len(values)), strict=True):
        value = values[place]
        if spec.kind == torch.export.graph_signature.OutputKind.BUFFER_MUTATION and value.name in smaller:
            expanded = graph.call_function(torch.ops.aten.expand.default, (value, list(smaller[value.name])))
            expanded.meta = {**value.meta, "val": value.meta["val"].expand(smaller[value.name])}
            values[place] = expanded
            spec.arg = torch.export.graph_signature.TensorArgument(name=expanded.name)
        elif spec.kind == torch.export.graph_signature.OutputKind.BUFFER_MUTATION and exir.range_constraints:
            shape = list(value.meta["val"].shape)  # coremltools does not know the shape of a part of a flexible size
            sized = graph.call_function(torch.ops.aten.view.default, (value, shape))
            sized.meta = dict(value.meta)
            values[place] = sized
            spec.arg = torch.export.graph_signature.TensorArgument(name=sized.name)
    graph.output(type(result[0])(values)).meta.update(result[1].meta)
    for node in graph.nodes:
        if node.op == "call_function" and (old := node.name) in taken:
            node._rename(f"{old}_op")
            signature.replace_all_uses(old, node.name)
    return exir._update(torch.fx.GraphModule(exir.graph_module, graph), signature)
