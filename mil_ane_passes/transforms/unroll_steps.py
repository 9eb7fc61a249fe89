"""Several steps of a recurrent model in one call: ops that do not depend on the state run once for all tokens.

This transform runs after `StateToIo`: states are inputs, and their final values are outputs. Ops between a state and
its final value run once for each token; other ops that read weights run once for all tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Function, Operation, Placeholder, Var, types

from ..ir.builder import RewriteBuilder, UniqueNames, rebuild_op
from ..ir.coremltools_internals import add_function_input, remove_function_input
from ..ir.query import get_static_shape, is_compressed, is_const
from ..package.interface import describe_feature, get_feature
from ..passes.interface_change import InterfaceChange
from ..utils.errors import InputError
from .contract import Draft, EditRecord, Transform
from .dead_ops import find_dead_ops, get_read_vars, remove_dead_ops
from .state_flow import get_window

__all__ = ["UnrollSteps"]

_UNARY = frozenset({"abs", "cast", "clip", "cos", "erf", "exp", "gelu", "identity", "leaky_relu", "relu", "rsqrt",
                    "sigmoid", "silu", "sin", "softplus", "softsign", "sqrt", "square", "tanh"})
_BINARY = frozenset({"add", "sub", "mul", "real_div", "maximum", "minimum", "pow"})
_REDUCTIONS = frozenset({"reduce_max", "reduce_mean", "reduce_min", "reduce_sum"})


@dataclass(frozen=True)
class UnrollSteps(Transform):
    """Converts a function for one token into a function for `count` tokens: `ids` (1, 1) become (1, count).

    `states` maps inputs to the outputs that are their values in the next call. Other outputs (1, 1, width) become
    (1, count, width); other inputs are the same for all tokens.
    """

    ids: str
    states: Mapping[str, str]
    count: int

    def apply(self, draft: Draft) -> list[Draft]:
        """Change the draft in place.

        Raises InputError for token ids of another shape, and for an output without an axis of tokens.
        """
        for name, function in draft.program.functions.items():
            _Unrolling(self, draft, name, function).apply()
        return [draft]


@dataclass(frozen=True)
class _Carried:
    """A value that a step passes to the next one: the value read from a state, and the value that replaces it."""

    read: Var
    final: Var


class _Values:
    """The values of a variable for all tokens: a list, or joined along an axis; either form is built when needed."""

    def __init__(self, single: list[Var] | None = None, joined: Var | None = None, axis: int = 0) -> None:
        self.single, self.joined, self.axis = single, joined, axis


class _Unrolling:
    """The change of one function."""

    def __init__(self, requested: UnrollSteps, draft: Draft, name: str, function: Function) -> None:
        self._requested, self._draft, self._name, self._function = requested, draft, name, function
        self._count = requested.count
        self._outputs = {var.name: var for var in function.outputs}
        self._mb: RewriteBuilder
        self._values: dict[Var, _Values] = {}
        self._joined_ops = 0
        shape = get_static_shape(function.inputs[requested.ids])
        if shape != (1, 1):
            raise InputError(f"the token ids '{requested.ids}' are {shape}; expected (1, 1), one token a call")

    def apply(self) -> None:
        function, ids = self._function, self._requested.ids
        old = function.inputs[ids]
        dead = set(find_dead_ops(function))
        carried = [each for names in self._requested.states.items() for each in self._list_carried(*names)]
        order = self._order_ops(carried)
        old.name = f"{ids}_one"
        placeholder = Placeholder((1, self._count), old.dtype, name=ids)
        made = placeholder.outputs[0]
        made.name = ids
        with function:
            mb = self._mb = RewriteBuilder(function, UniqueNames(function))
            remove_function_input(function, ids)
            add_function_input(function, ids, placeholder)
            self._values[old] = _Values(joined=made, axis=1)
            with mb.at_end(ids):
                for group in order:
                    self._run_group(group, carried)
                function.set_outputs([self._finish_output(var, carried) for var in function.outputs])
            remove_dead_ops(function, dead)
        feature = get_feature(function, ids)
        if feature is not None:
            described = type(feature)()
            described.CopyFrom(feature)
            described.type.multiArrayType.shape[:] = (1, self._count)
            described.type.multiArrayType.ClearField("shapeRange")
            describe_feature(function, described)
        self._draft.change_interface(self._name, InterfaceChange("input", ids, ids, "reshaped"))
        ops = sum(len(group) for group in order)
        self._draft.done.append(EditRecord("", self._name, ids, f"'{ids}' is (1, {self._count}): {self._joined_ops} of "
                                           f"{ops} ops are computed for all tokens at once, the others for each"))

    def _list_carried(self, state: str, output: str) -> list[_Carried]:
        """Return the values that a state passes to the next step: its parts, if these are read and written one by one.
        """
        start, final = self._function.inputs[state], self._outputs[output]
        entire = [_Carried(start, final)]
        op = final.op
        if op is None or op.op_type != "concat" or int(op.axis.val) % final.rank != 0 or op.interleave.val:
            return entire
        ends = np.cumsum([int(var.shape[0]) for var in op.values])
        parts = {(int(end) - int(var.shape[0]), int(end)): var for var, end in zip(op.values, ends)}
        found = []
        for user in self._function.operations:
            if start not in get_read_vars(user):
                continue
            window = get_window(user) if user.op_type == "slice_by_index" else None
            if window is None or window.bounds[0] not in parts or any(window.find_partial_axes(start.shape)):
                return entire
            found.append(_Carried(user.outputs[0], parts[window.bounds[0]]))
        return found

    def _order_ops(self, carried: Sequence[_Carried]) -> list[list[Operation]]:
        """Return the ops in groups, in order; ops that depend on each other across tokens are in one group."""
        ops = [op for op in self._function.operations if op.op_type != "const"]
        place = {op: number for number, op in enumerate(ops)}
        needs: list[set[int]] = [{place[var.op] for var in get_read_vars(op) if var.op in place} for op in ops]
        for each in carried:
            if each.final.op in place:  # the next token reads it
                for op in ops:
                    if each.read.op is op or each.read.op is None and each.read in get_read_vars(op):
                        needs[place[op]].add(place[each.final.op])
        return [[ops[number] for number in sorted(group)] for group in _find_components(needs)]

    def _run_group(self, group: Sequence[Operation], carried: Sequence[_Carried]) -> None:
        reads = {each.read: each for each in carried}
        if len(group) == 1 and not any(var in reads for var in (*group[0].outputs, *get_read_vars(group[0]))):
            op = group[0]
            if not any(var in self._values for var in get_read_vars(op)):
                return  # the same for all tokens
            if self._run_joined(op):
                self._joined_ops += 1
                return
        made: list[dict[Var, Var]] = []
        for token in range(self._count):
            found: dict[Var, Var] = {}
            for op in group:
                if token and any(var in reads for var in op.outputs):
                    found |= {var: self._get_carried(reads[var], token, made[-1]) for var in op.outputs}
                    continue
                changes: dict[str, Any] = {}
                for name, value in op.inputs.items():
                    listed = value if isinstance(value, (list, tuple)) else [value]
                    new = [self._get_step(var, token, found, reads, made) for var in listed]
                    if any(one is not other for one, other in zip(new, listed)):
                        changes[name] = new if isinstance(value, (list, tuple)) else new[0]
                found |= dict(zip(op.outputs, self._rebuild(op, changes)))
            made.append(found)
        for op in group:
            for var in op.outputs:
                self._values[var] = _Values([found[var] for found in made])

    def _get_step(
        self, var: Var, token: int, found: Mapping[Var, Var], reads: Mapping[Var, _Carried],
        made: Sequence[Mapping[Var, Var]],
    ) -> Var:
        """Return the value of `var` for a token, while a group runs."""
        if var in found:
            return found[var]
        if token and var in reads and var.op is None:
            return self._get_carried(reads[var], token, made[-1])
        return self._get_single(var)[token] if var in self._values else var

    def _get_carried(self, each: _Carried, token: int, before: Mapping[Var, Var]) -> Var:
        """Return the value that the previous token passed on, in the form in which it is read."""
        made = before.get(each.final)
        if made is None:  # what it is made of does not follow from the state
            made = self._get_single(each.final)[token - 1] if each.final in self._values else each.final
        return made if tuple(made.shape) == tuple(each.read.shape) else self._mb.reshape(
            x=made, shape=list(map(int, each.read.shape)))

    def _rebuild(self, op: Operation, changes: Mapping[str, Any]) -> list[Var]:
        made = rebuild_op(self._mb, op, **changes)
        self._mb.adopt_scopes(op.scopes)
        return list(made) if isinstance(made, (list, tuple)) else [made]

    def _get_single(self, var: Var) -> list[Var]:
        """Return the values of `var` one by one."""
        values = self._values[var]
        if values.single is None:
            assert values.joined is not None
            made = self._mb.split(x=values.joined, num_splits=self._count, axis=values.axis)
            values.single = list(made)
        return values.single

    def _get_joined(self, var: Var, axis: int) -> Var:
        """Return the values of `var` joined along an axis."""
        values = self._values[var]
        if values.joined is None:
            assert values.single is not None
            values.joined, values.axis = self._mb.concat(values=values.single, axis=axis, interleave=False), axis
        return values.joined

    def _run_joined(self, op: Operation) -> bool:
        """Compute an op for all tokens at once; return False if it mixes tokens."""
        stepped = [(name, var) for name, var in op.inputs.items() if isinstance(var, Var) and var in self._values]
        if not stepped or any(isinstance(var, (list, tuple)) for var in op.inputs.values()) or op.blocks:
            return False
        axis = self._choose_axis(op, stepped)
        if axis is None:
            return False
        before, behind = axis
        changes: dict[str, Any] = {name: self._get_joined(var, before) for name, var in stepped}
        if any(self._values[var].axis != before for _, var in stepped):
            return False
        if op.op_type == "slice_by_index":
            bounds = get_window(op)
            assert bounds is not None
            ends = [(0, self._count) if place == before else bound for place, bound in enumerate(bounds.bounds)]
            changes |= {"begin": np.array([begin for begin, _ in ends], np.int32), "begin_mask": None,
                        "end": np.array([end for _, end in ends], np.int32), "end_mask": None}
        for old, new in zip(op.outputs, self._rebuild(op, changes)):
            self._values[old] = _Values(joined=new, axis=behind)
        return True

    def _choose_axis(self, op: Operation, stepped: Sequence[tuple[str, Var]]) -> tuple[int, int] | None:
        """Return the token axis of an op's operands and that of its output if tokens do not mix; None otherwise.

        Products with weights join single values; other ops use the axis of operands that are already joined.
        """
        var, out = stepped[0][1], op.outputs[0]
        known = next((self._values[each].axis for _, each in stepped if self._values[each].joined is not None), None)
        if op.op_type in ("linear", "matmul") and [name for name, _ in stepped] == ["x"]:
            weight = op.inputs["weight" if op.op_type == "linear" else "y"]
            turned = op.inputs.get("transpose_x")
            axis = var.rank - 2 if known is None else known
            if weight.rank != 2 or not (is_const(weight) or is_compressed(weight)) or turned is not None and turned.val:
                return None
            return (axis, axis) if 0 <= axis < var.rank - 1 and int(var.shape[axis]) == 1 else None
        if known is None or any(each.rank <= known or int(each.shape[known]) != 1 for _, each in stepped):
            return None
        if op.op_type == "gather" and [name for name, _ in stepped] == ["indices"] and int(op.axis.val) == 0:
            return known, known
        if op.op_type in _UNARY or op.op_type in _BINARY | {"select", "greater_equal", "less"}:
            read = [each for each in op.inputs.values() if isinstance(each, Var) and (
                types.is_tensor(each.sym_type) or types.is_scalar(each.sym_type))]
            behind = out.rank - var.rank + known
            fits = all(self._values[each].joined is None or self._values[each].axis == known for _, each in stepped)
            same = all(each.rank == var.rank for _, each in stepped)
            others = [each for each in read if each not in self._values and each.rank > out.rank - behind - 1]
            wide = any(int(each.shape[each.rank - out.rank + behind]) != 1 for each in others)
            return (known, behind) if fits and same and not wide and int(out.shape[behind]) == 1 else None
        if op.op_type in _REDUCTIONS and op.axes is not None and bool(op.keep_dims.val):
            axes = {int(axis) % var.rank for axis in np.atleast_1d(op.axes.val)}
            return None if known in axes else (known, known)
        if op.op_type == "transpose":
            return known, [int(axis) % var.rank for axis in op.perm.val].index(known)
        if op.op_type == "split":
            return None if int(op.axis.val) % var.rank == known else (known, known)
        if op.op_type == "slice_by_index":
            window = get_window(op)
            dropped = () if window is None else window.dropped
            return None if window is None or known in dropped or window.bounds[known] != (0, 1) else (
                known, known - sum(axis < known for axis in dropped))
        return None

    def _finish_output(self, var: Var, carried: Sequence[_Carried]) -> Var:
        """Return the output that replaces `var`: the last value of a state, or the joined values of all tokens."""
        name = var.name
        if var not in self._values:
            return var
        if name in self._requested.states.values():
            made = self._get_single(var)[-1]
        else:
            values = self._values[var]
            if values.joined is None and (var.rank < 2 or int(var.shape[-2]) != 1):
                raise InputError(f"the output '{name}' is {tuple(var.shape)}; expected (1, 1, width), with an axis for "
                                 "tokens")
            made = self._get_joined(var, var.rank - 2)
        var.name = self._mb.make_unique_name(f"{name}_one")
        if made in self._function.outputs or made.op is None:
            made = self._mb.identity(x=made)
        made.name = name
        return made


def _find_components(needs: Sequence[set[int]]) -> list[list[int]]:
    """Return the strongly connected components of a graph in order of dependency (Tarjan, without recursion)."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    held: set[int] = set()
    found: list[list[int]] = []
    for root in range(len(needs)):
        if root in index:
            continue
        work = [(root, iter(sorted(needs[root])))]
        index[root] = low[root] = len(index)
        stack.append(root)
        held.add(root)
        while work:
            node, rest = work[-1]
            following = next((each for each in rest if each not in index or each in held), None)
            if following is None:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    group: list[int] = []
                    while not group or group[-1] != node:
                        group.append(stack.pop())
                        held.discard(group[-1])
                    found.append(group)
            elif following in index:
                low[node] = min(low[node], index[following])
            else:
                index[following] = low[following] = len(index)
                stack.append(following)
                held.add(following)
                work.append((following, iter(sorted(needs[following]))))
    return found
