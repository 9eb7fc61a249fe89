"""Convert branches and loops; `copy` layers in them assign values that exist outside."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var, types

from ...utils.errors import InputError
from ..layer_converter import LayerContext, cast, format_cause, get_layer_kind, register_layer

BREAK, CONTINUE = "\0break", "\0continue"
"Names of the values that say that a loop is left, or that the rest of its body is skipped; no layer can name them."

_MAX_LOOPS, _MAX_NESTED = 5, 20
"How deep loops, and networks of any kind, may be nested: coremltools builds the body of a loop several times."

_JUMPS = ("loopBreak", "loopContinue")


def list_assigned(layers: Iterable[Any]) -> list[str]:
    """List the names that layers assign, those in branches and loops included."""
    found: dict[str, None] = {}
    for layer in layers:
        kind = get_layer_kind(layer)
        if kind == "branch":
            found.update(dict.fromkeys(list_assigned(layer.branch.ifBranch.layers)))
            found.update(dict.fromkeys(list_assigned(layer.branch.elseBranch.layers)))
        elif kind == "loop":
            found.update(dict.fromkeys(list_assigned(layer.loop.conditionNetwork.layers)))
            found.update(dict.fromkeys(list_assigned(layer.loop.bodyNetwork.layers)))
        elif kind in _JUMPS:
            found[BREAK if kind == "loopBreak" else CONTINUE] = None
        found.update(dict.fromkeys(layer.output))
    return list(found)


def has_jump(layer: Any) -> bool:
    """Return whether a layer leaves the loop around it, or skips the rest of its body."""
    kind = get_layer_kind(layer)
    if kind == "branch":
        return any(has_jump(each) for part in (layer.branch.ifBranch, layer.branch.elseBranch) for each in part.layers)
    return kind in _JUMPS


def convert_statements(layers: Sequence[Any], context: LayerContext) -> None:
    """Convert layers one after the other; what follows a jump is a branch that is taken where none happened."""
    for at, layer in enumerate(layers):
        context.convert_layers([layer])
        rest = layers[at + 1:]
        if rest and has_jump(layer):
            flags = [context.values[name] for name in (BREAK, CONTINUE) if name in context.values]
            jumped = flags[0] if len(flags) == 1 else mb.logical_or(x=flags[0], y=flags[1])
            _make_branch(mb.logical_not(x=jumped), rest, [], context)
            return


def _make_branch(condition: Var, taken: Sequence[Any], other: Sequence[Any], context: LayerContext) -> None:
    """Make a cond whose results are the values that both sides have and at least one assigns."""
    before = dict(context.values)
    assigned = [*dict.fromkeys([*list_assigned(taken), *list_assigned(other)])]
    both = set(list_assigned(taken)) & set(list_assigned(other))
    names = [name for name in assigned if name in before or name in both]
    if not names:
        return

    def run(layers: Sequence[Any]) -> list[Var]:
        context.values = dict(before)
        convert_statements(layers, context)
        # A block may not return a value from outside as it is, nor one value twice.
        return [mb.identity(x=context.values[name]) for name in names]

    layer = context.layer
    try:
        found = mb.cond(pred=condition, _true_fn=lambda: run(taken), _false_fn=lambda: run(other))
    except InputError:
        raise
    except ValueError as error:
        context.layer = layer
        raise context.refuse(f"its branches give values of different types or shapes ({format_cause(error)})",
                             "expected the same in both, as MIL's cond requires") from error
    finally:
        context.layer = layer
        context.values = before
    results = list(found) if isinstance(found, (list, tuple)) else [found]
    context.values.update(zip(names, results, strict=True))


@contextmanager
def _enter(context: LayerContext, kind: str) -> Iterator[None]:
    """Count the branches and loops around what is converted. Raises InputError where they are too many."""
    context.nested.append(kind)
    try:
        if len(context.nested) > _MAX_NESTED or context.nested.count("loop") > _MAX_LOOPS:
            raise context.refuse(f"it is nested too deep, as number {len(context.nested)}",
                                 f"expected at most {_MAX_LOOPS} loops and {_MAX_NESTED} networks in each other")
        yield
    finally:
        context.nested.pop()


def _to_condition(x: Var) -> Var:
    """Return the bool of a value of one element, of which every number besides 0 is true."""
    flat = mb.squeeze(x=mb.reshape(x=x, shape=[1]), axes=[0])
    if types.is_bool(flat.dtype):
        return flat
    result: Var = mb.not_equal(x=flat, y=np.float32(0))
    return result


@register_layer("branch")
def convert_branch(params: Any, context: LayerContext) -> list[Var]:
    """Convert a branch to a cond."""
    with _enter(context, "branch"):
        _make_branch(_to_condition(context.x), list(params.ifBranch.layers), list(params.elseBranch.layers), context)
    return [context.get(name) for name in context.layer.output]


@register_layer("loopBreak", "loopContinue")
def convert_jump(params: Any, context: LayerContext) -> list[Var]:
    """Set the flag of a jump; `convert_statements` skips what follows."""
    name = BREAK if get_layer_kind(context.layer) == "loopBreak" else CONTINUE
    if name not in context.values:
        raise context.refuse("it is outside of a loop", "expected it in the body of a loop")
    context.values[name] = mb.const(val=True)
    return []


@register_layer("loop")
def convert_loop(params: Any, context: LayerContext) -> list[Var]:
    """Convert a loop to a while_loop over a counter, the flag of a break, and the values that the loop assigns."""
    layer = context.layer
    condition, body = list(params.conditionNetwork.layers), list(params.bodyNetwork.layers)
    outer = dict(context.values)
    flags = {name: mb.const(val=False) for name in (BREAK, CONTINUE)}
    assigned = [*dict.fromkeys([*list_assigned(condition), *list_assigned(body)])]
    names = [name for name in assigned if name in outer and name not in flags]
    most = _get_most_steps(params, context)
    start = [mb.const(val=np.int32(0)), mb.const(val=False), *(mb.identity(x=outer[name]) for name in names)]

    def enter(values: Sequence[Var]) -> None:
        context.values = {**outer, **flags, BREAK: values[1], **dict(zip(names, values[2:], strict=True))}

    def check(*values: Var) -> Var:
        enter(values)
        going: Var = mb.logical_and(x=mb.logical_not(x=values[1]), y=mb.less(x=values[0], y=most))
        if condition:
            context.convert_layers(condition)
            going = mb.logical_and(x=going, y=_to_condition(context.values[params.conditionVar]))
        return going

    def run(*values: Var) -> list[Var]:
        enter(values)
        convert_statements(body, context)
        return [mb.add(x=values[0], y=np.int32(1)), mb.identity(x=context.values[BREAK]),
                *(mb.identity(x=context.values[name]) for name in names)]

    if condition and not params.conditionVar:
        raise context.refuse("a condition network without a condition variable", "expected its name")
    try:
        with _enter(context, "loop"):
            found = mb.while_loop(_cond=check, _body=run, loop_vars=start)
    except InputError:
        raise
    except ValueError as error:
        context.layer = layer
        raise context.refuse(f"its body gives values of other types or shapes than it takes ({format_cause(error)})",
                             "expected the same in each step, as MIL's while_loop requires") from error
    finally:
        context.layer = layer
        context.values = outer
    context.values.update(zip(names, list(found)[2:], strict=True))
    return [context.get(name) for name in layer.output]


def _get_most_steps(params: Any, context: LayerContext) -> Any:
    """Return the largest number of steps: an input, a number of the layer, or the largest of int32."""
    if context.layer.input:
        whole = context.to_int(cast(mb.reshape(x=context.x, shape=[1]), "fp32"))
        return mb.squeeze(x=whole, axes=[0])
    return np.int32(min(int(params.maxLoopIterations) or 2**31 - 1, 2**31 - 1))
