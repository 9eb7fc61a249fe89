"""Convert branches and loops; `copy` layers in them assign values that exist outside."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var, types
from coremltools.converters.mil.mil.block import curr_block

from ...utils.errors import InputError
from ..layer_converter import LayerContext, cast, format_cause, get_layer_kind, register_layer
from .elementwise import to_bool

BREAK, CONTINUE, _COUNTER = "\0break", "\0continue", "\0counter"
"""Names of the values that say that a loop is left, that the rest of its body is skipped, and how many steps were made.
No layer can name them."""
# The counter of a loop is an int32.
_MAX_STEPS = 2**31 - 1

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
            inner = [*layer.loop.conditionNetwork.layers, *layer.loop.bodyNetwork.layers]
            found.update(dict.fromkeys(name for name in list_assigned(inner) if name not in (BREAK, CONTINUE)))
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
    """Convert layers in sequence; what follows a jump is a branch that is taken where none happened."""
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

    def run_branch(layers: Sequence[Any]) -> list[Var]:
        context.values = dict(before)
        convert_statements(layers, context)
        return _make_results(context.values[name] for name in names)

    layer = context.layer
    try:
        found = mb.cond(pred=condition, _true_fn=lambda: run_branch(taken), _false_fn=lambda: run_branch(other))
    except InputError:
        raise
    except ValueError as error:
        context.layer = layer
        raise context.refuse(f"its branches return values of different types or shapes ({format_cause(error)})",
                             "expected the same in both, as MIL's cond requires") from error
    finally:
        context.layer = layer
        context.values = before
    results = list(found) if isinstance(found, (list, tuple)) else [found]
    context.values.update(zip(names, results, strict=True))


@contextmanager
def _check_nesting(context: LayerContext, kind: str) -> Iterator[None]:
    """Count the branches and loops around what is converted. Raises InputError where they are too many."""
    context.nested.append(kind)
    try:
        if len(context.nested) > _MAX_NESTED or context.nested.count("loop") > _MAX_LOOPS:
            raise context.refuse(f"it is nested too deeply, at depth {len(context.nested)}",
                                 f"expected at most {_MAX_LOOPS} loops and {_MAX_NESTED} networks in each other")
        yield
    finally:
        context.nested.pop()


def _to_condition(x: Var, *, as_it_is: bool = False) -> Var:
    """Return the bool of a value of one element, of which every number besides 0 is true.

    It is a scalar, or with `as_it_is` may have shape [1], which a while_loop accepts as well.
    """
    found = x if types.is_bool(x.dtype) else to_bool(x)
    if found.rank == 0 or (as_it_is and tuple(found.shape) == (1,)):
        return found
    flat = found if tuple(found.shape) == (1,) else mb.reshape(x=found, shape=[1])
    result: Var = mb.squeeze(x=flat, axes=[0])
    return result


@register_layer("branch")
def convert_branch(params: Any, context: LayerContext) -> list[Var]:
    """Convert a branch to a cond."""
    with _check_nesting(context, "branch"):
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
    """Convert a loop to a while_loop over the values that it assigns, plus a counter if its steps are limited.

    A loop with a break gets a flag as well.
    """
    layer = context.layer
    if len(params.conditionNetwork.layers) and not params.conditionVar:
        raise context.refuse("a condition network without a condition variable", "expected its name")
    loop = _Loop(params, context)
    try:
        with _check_nesting(context, "loop"):
            found = mb.while_loop(_cond=loop.check, _body=loop.run, loop_vars=loop.start)
    except InputError:
        raise
    except ValueError as error:
        context.layer = layer
        raise context.refuse(f"the types or shapes of the results of its body differ from those of its inputs "
                             f"({format_cause(error)})",
                             "expected the same in each step, as MIL's while_loop requires") from error
    finally:
        context.layer = layer
        context.values = loop.outer
    results = list(found) if isinstance(found, (list, tuple)) else [found]
    context.values.update({name: var for name, var in zip(loop.names, results, strict=True) if name in loop.assigned})
    return [context.get(name) for name in layer.output]


class _Loop:
    """The functions that build the blocks of a while_loop; `names` are those of its values, in their order."""

    def __init__(self, params: Any, context: LayerContext) -> None:
        self.context, self.outer = context, dict(context.values)
        self.condition, self.body = list(params.conditionNetwork.layers), list(params.bodyNetwork.layers)
        self.condition_name = params.conditionVar
        found = dict.fromkeys([*list_assigned(self.condition), *list_assigned(self.body)])
        self.assigned = [name for name in found if name in self.outer and name not in (BREAK, CONTINUE)]
        self.most = _get_most_steps(params, context)
        if self.most is None and not (self.condition and self.assigned):
            self.most = np.int32(_MAX_STEPS)
        counters = [] if self.most is None else [_COUNTER]
        self.names = [*counters, *([BREAK] if BREAK in found else []), *self.assigned]
        first = {_COUNTER: lambda: mb.const(val=np.int32(0)), BREAK: lambda: mb.const(val=False)}
        self.start = [first[name]() if name in first else mb.identity(x=self.outer[name]) for name in self.names]

    def _begin_loop(self, values: Sequence[Var]) -> None:
        flags = {name: mb.const(val=False) for name in (BREAK, CONTINUE)}
        self.context.values = {**self.outer, **flags, **dict(zip(self.names, values, strict=True))}

    def check(self, *values: Var) -> Var:
        """Build the condition: of the network, of the counter and of the flag."""
        self._begin_loop(values)
        held = self.context.values
        parts = [mb.logical_not(x=held[BREAK])] if BREAK in self.names else []
        if self.most is not None:
            parts.append(mb.less(x=held[_COUNTER], y=self.most))
        if self.condition:
            self.context.convert_layers(self.condition)
            parts.append(_to_condition(self.context.values[self.condition_name], as_it_is=not parts))
        return functools.reduce(lambda one, other: mb.logical_and(x=one, y=other), parts)

    def run(self, *values: Var) -> list[Var]:
        """Build a step, which returns the values of the next one."""
        self._begin_loop(values)
        convert_statements(self.body, self.context)
        now = self.context.values
        if self.most is not None:
            now[_COUNTER] = mb.add(x=now[_COUNTER], y=np.int32(1))
        return _make_results(_hide_constant(now[name], value) for name, value in zip(self.names, values, strict=True))


def _make_results(values: Iterable[Var]) -> list[Var]:
    """Return `values` as results of the block that is built, which may return none from outside and none twice."""
    made: list[Var] = []
    for var in values:
        own = var.op is not None and var.op.op_type != "const" and var.op.enclosing_block is curr_block()
        made.append(var if own and var not in made else mb.identity(x=var))
    return made


def _hide_constant(result: Var, value: Var) -> Var:
    """Return the next value of a loop so that coremltools does not infer it where it does not know the present one."""
    if result.val is None or value.val is not None:
        return result
    if types.is_bool(result.dtype):
        return mb.select(cond=value, a=result, b=result)
    both = mb.stack(values=[value, result], axis=0)
    hidden: Var = mb.squeeze(x=mb.slice_by_size(x=both, begin=[1, *[0] * result.rank], size=[1, *[-1] * result.rank]),
                             axes=[0])
    return hidden


def _get_most_steps(params: Any, context: LayerContext) -> Any:
    """Return the largest number of steps: an input or a number of the layer; None where there is no limit."""
    if context.layer.input:
        whole = context.to_int(cast(mb.reshape(x=context.x, shape=[1]), "fp32"))
        return mb.squeeze(x=whole, axes=[0])
    return np.int32(min(int(params.maxLoopIterations), _MAX_STEPS)) if params.maxLoopIterations else None
