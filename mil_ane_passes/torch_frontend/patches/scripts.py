"""Scripted modules: attributes that are numbers, branches on a constant rank or size, early returns, `raise`.

coremltools reads `self.stride` as the text "stride", converts both branches of `if x.dim() == 2` and requires equal
shapes of them, and has no lowering for an exception or for a value that an early return leaves uninitialized. Here the
graph is first specialized for the module and its inputs. Where shape inference makes a condition constant, only its
branch is converted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var, types
from coremltools.converters.mil.mil.types.symbolic import is_symbolic

from ...ir.coremltools_internals import set_typed_value
from ...passes.severity import Severity
from ..contract import Patch
from ..errors import NotConverted
from ..functional.specialization import use_input_types
from ..lowering import cast_to, to_size_vector
from ..probes import find_fault

PATCH = Patch(code="TORCH165", severity=Severity.WRONG,
              title="scripted modules: attributes become their names, branches on constant ranks and `raise` fail",
              upstream=("none known",))


@PATCH.probe
def probe() -> str | None:
    """Test an attribute that is False, whose name is a text, and so true."""
    import torch

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return x.sum(1, keepdim=self.keepdim)

    module = type("Summed", (torch.nn.Module,), {"forward": forward})()
    module.keepdim = False
    return find_fault(module, torch.ones(2, 3), captured=torch.jit.script(module))


@PATCH.replace_function(
    "coremltools.converters.mil.frontend.torch.internal_graph", "InternalTorchIRGraph.from_torchscript"
)
def from_torchscript(host: Callable[..., Any], cls: Any, torchscript: Any, inputs: Any = None, **named: Any) -> Any:
    """Make the graph of a module, specialized for the inputs that the user declared."""
    with use_input_types(inputs):
        return host(cls, torchscript, inputs=inputs, **named)


@PATCH.op("if")
def lower_if(context: Any, node: Any) -> None:
    """Lower if(condition): only one branch where the condition is constant.

    An `if` without results is omitted.
    """
    from coremltools.converters.mil.frontend.torch.ops import convert_nodes
    from coremltools.converters.mil.frontend.torch.torch_op_registry import _TORCH_OPS_REGISTRY

    condition = context[node.inputs[0]]
    known = condition.val if isinstance(condition, Var) else condition
    if known is not None:
        taken = node.blocks[0 if bool(np.all(known)) else 1]
        context.push()
        convert_nodes(context, taken, early_exit=False)
        results = [context[name] for name in taken.outputs]
        context.pop()
        for name, result in zip(node.outputs, results, strict=True):
            context.add(result, torch_name=name)
        return
    for inner in (inner for block in node.blocks for inner in block.nodes):
        if inner.kind == "raiseexception":
            raise NotConverted.at(inner, "raises an exception on a condition that the model computes",
                                  "remove the check; Core ML has no exceptions")
    for block in node.blocks:
        unset = {inner.name for inner in block.nodes if inner.kind == "uninitialized"}
        unset |= {name for name in block.outputs if name in context and context[name] is None}
        if not unset.isdisjoint(block.outputs):
            raise NotConverted.at(node, "leaves a tensor, or None, in one branch and a tensor in the other on a "
                                        "condition that the model computes, as `break` or an early return inside of "
                                        "two conditions does", "set the value in both branches")
    if node.outputs:
        _TORCH_OPS_REGISTRY.name_to_func_mapping["if"](context, node)


@PATCH.op("loop")
def lower_loop(context: Any, node: Any) -> None:
    """Lower a loop whose condition or variables start as constants, or get values from outside, as with a `break`.

    coremltools infers the body twice: variables that change lose their values in the first round, and what is computed
    from them in the second, in which it rejects a change. A variable that the body sets to a value from outside is
    taken to be the same in all steps.
    """
    from coremltools.converters.mil.frontend.torch.internal_graph import InternalTorchIRNode
    from coremltools.converters.mil.frontend.torch.torch_op_registry import _TORCH_OPS_REGISTRY

    body = node.blocks[0]
    constants = {inner.name for inner in body.nodes if inner.kind == "constant"}
    begun, results, hidden = list(node.inputs), list(body.outputs), []
    computed = body.outputs[0] if body.outputs[0] not in constants and body.outputs[0] not in context else (
        body.inputs[0])  # coremltools counts the steps of a loop over a range only
    for place, (first, after) in enumerate(zip(begun[1:], body.outputs, strict=True), start=1):
        value = context[first] if first in context else None
        is_outside = after in constants or after in context
        if after in (first, body.inputs[place - 1]) and place > 1 or place == 1 and is_outside:
            continue
        begins_constant = value is not None and isinstance(value, Var) and value.val is not None
        if begins_constant:
            begun[place] = f"{node.name}_begun{place}"
            context.add(_hide_value(value), torch_name=begun[place])
        if is_outside or begins_constant and context[first].rank:
            results[place - 1] = f"{node.name}_set{place}"
            hidden.append(InternalTorchIRNode(kind="_value_of_step", inputs=[after, computed],
                                              outputs=[results[place - 1]], name=results[place - 1], parent=body))
    before = node.inputs, body.outputs, body.nodes
    node.inputs, body.outputs, body.nodes = begun, results, [*body.nodes, *hidden]
    try:
        _TORCH_OPS_REGISTRY.name_to_func_mapping["loop"](context, node)
    finally:
        node.inputs, body.outputs, body.nodes = before


def _hide_value(var: Var) -> Var:
    """Return a value that is equal to a constant, but is not known to be constant."""
    hidden: Var = mb.identity(x=var)
    set_typed_value(hidden, None)
    return hidden


@PATCH.op("_value_of_step")
def lower_value_of_step(context: Any, node: Any) -> None:
    """Lower a value from outside of a loop as one that the step computes, which no pass takes to be the same before.

    The second operand is a number of the step: its index, or whether the loop goes on.
    """
    value, computed = (context[name] for name in node.inputs)
    if isinstance(value, Var) and (types.is_tensor(value.sym_type) or types.is_scalar(value.sym_type)):
        zero = mb.mul(x=cast_to(computed, types.int32), y=np.int32(0))
        if value.dtype == types.bool:
            value = mb.logical_or(x=value, y=mb.cast(x=zero, dtype="bool"), name=node.name)
        else:
            value = mb.add(x=value, y=cast_to(zero, value.dtype), name=node.name)
    context.add(value, torch_name=node.name)


@PATCH.op("raiseexception")
def refuse_raise(context: Any, node: Any) -> None:
    """Raise NotConverted for a `raise` that is reached with the inputs of the conversion."""
    raise NotConverted.at(node, "raises an exception for inputs of these shapes",
                          "pass inputs of shapes that the module accepts")


@PATCH.op("uninitialized")
def lower_uninitialized(context: Any, node: Any) -> None:
    """Lower a value that an early return leaves uninitialized; no executed op reads it."""
    context.add(None, torch_name=node.name)


@PATCH.op("unchecked_cast")
def lower_unchecked_cast(context: Any, node: Any) -> None:
    """Lower a cast from an optional value that is not None."""
    context.add(context[node.inputs[0]], torch_name=node.name)


@PATCH.op("is", "isnot")
def lower_is(context: Any, node: Any) -> None:
    """Lower `a is b` and `a is not b` where one of them is None; raise NotConverted for others."""
    first, second = (context[name] for name in node.inputs)
    if first is not None and second is not None:
        raise NotConverted.at(node, "tests whether two values are the same object, which depends on casts and layouts "
                                    "that have no effect", "pass the answer to the module as a bool")
    same = first is second
    context.add(mb.const(val=same == (node.kind in ("is", "__is__")), name=node.name), torch_name=node.name)


@PATCH.op("_eq_lists", "_ne_lists")
def compare_lists(context: Any, node: Any) -> None:
    """Lower `a == b` and `a != b` of lists of sizes: one bool, known if the sizes are, or are the same symbols."""
    first, second = (context[name] for name in node.inputs)
    first, second = (to_size_vector(each) if isinstance(each, list | tuple) else each for each in (first, second))
    negated = node.kind == "_ne_lists"
    known, others = (_get_sizes(each) for each in (first, second))
    if first.shape != second.shape:
        context.add(mb.const(val=negated, name=node.name), torch_name=node.name)
    elif known is not None and others is not None and (
            known == others or not any(map(is_symbolic, [*known, *others]))):
        context.add(mb.const(val=(known == others) != negated, name=node.name), torch_name=node.name)
    else:
        equal = mb.cast(x=mb.equal(x=first, y=second), dtype="int32")
        same = mb.cast(x=mb.reduce_min(x=equal, axes=[0], keep_dims=False), dtype="bool")
        context.add(mb.logical_not(x=same, name=node.name) if negated else mb.identity(x=same, name=node.name),
                    torch_name=node.name)


def _get_sizes(vector: Any) -> list[Any] | None:
    """Return the numbers and symbols of a vector of sizes; None if the builder does not know them."""
    value = vector.sym_val if isinstance(vector, Var) else vector
    return None if value is None else list(np.ravel(value))


@PATCH.op("not")
def lower_not(context: Any, node: Any) -> None:
    """Lower `not a`."""
    value = context[node.inputs[0]]
    known = _get_known_value(value)
    context.add(mb.logical_not(x=value) if known is None else mb.const(val=not known, name=node.name),
                torch_name=node.name)


@PATCH.op("contains")
def lower_contains(context: Any, node: Any) -> None:
    """Lower `item in list` of constant numbers."""
    items, item = (context[name] for name in node.inputs)
    items = list(items.val) if isinstance(items, Var) and items.val is not None else items
    if not isinstance(items, list | tuple) or any(_get_known_value(each) is None for each in (*items, item)):
        raise NotConverted.at(node, "searches a list for a computed value", "compare with each element")
    found = any(_get_known_value(each) == _get_known_value(item) for each in items)
    context.add(mb.const(val=found, name=node.name), torch_name=node.name)


def _get_known_value(value: Any) -> Any:
    return value.val if isinstance(value, Var) else value
