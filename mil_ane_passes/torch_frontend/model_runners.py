"""Runners for both sides of a check: a program on the reference runtime and a torch model, called with feeds and
states.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Function, Program, types

from ..equivalence.callable_comparison import FP16_TOLERANCE, FP32_TOLERANCE, compare_within_tolerance
from ..equivalence.callables import Caller, Noise
from ..equivalence.comparison import to_arrays
from ..equivalence.execution import Plan
from ..ir.query import iterate_ops
from ..runtime import Runtime
from ..utils.errors import InputError

__all__ = ["ProgramRunner", "TorchModelRunner", "list_states"]

Array = np.ndarray[Any, Any]

_SEARCHED = {"searchsorted": 0, "bucketize": 1}
"The argument of each op in which it searches."
_HALF_DTYPES = ("torch.float16", "torch.bfloat16")


class ProgramRunner:
    """Runs the main function of a program, by default at float32; feeds are matched to inputs by order, not by name.

    `settings` are those of `Runtime`. `states` are names for the program's states, in order, where theirs are not those
    of the result: only the result has names that Core ML accepts, as of a buffer of a part of the module.
    """

    def __init__(self, program: Program, *, states: Sequence[str] | None = None, **settings: Any) -> None:
        self._program, self._runtime = program, Runtime(program, **settings)
        self.function = program.functions["main"]
        self._own_states = list_states(self.function)
        self.states = self._own_states if states is None else list(states)
        self.inputs = [name for name in self.function.inputs if name not in self._own_states]
        self.outputs = [var.name for var in self.function.outputs]

    def __call__(self, feeds: Mapping[str, Array], state: MutableMapping[str, Array]) -> dict[int | str, Array]:
        """Return the outputs by position, and the final states as `state NAME`."""
        held = self._name_states(state)
        returned = to_arrays(self._runtime(self._cast_feeds(feeds), held))
        state.update((name, held[own]) for name, own in zip(self.states, self._own_states, strict=True))
        return {**dict(enumerate(returned.values())), **{f"state {name}": value for name, value in state.items()}}

    def run_with_values(self, feeds: Mapping[str, Array], state: MutableMapping[str, Array]) -> dict[str, Array]:
        """Return the value of each op of the function itself (not of nested blocks), by name."""
        found: dict[str, Array] = {}

        def record_value(op: Any, var: Any, value: Any) -> None:
            if op.enclosing_block is self.function and hasattr(value, "numpy"):
                found[var.name] = value.numpy().copy()

        Runtime(self._program, observer=record_value)(self._cast_feeds(feeds), self._name_states(state))
        return found

    def _name_states(self, state: Mapping[str, Array]) -> dict[str, Array]:
        """Return the states by the program's own names."""
        return {own: state[name] for name, own in zip(self.states, self._own_states, strict=True)}

    def has_fp16_ops(self) -> bool:
        """Return whether an op has a result of fp16, as a cast does that a torch model asks for."""
        return any(var.dtype == types.fp16 for _, op in iterate_ops(self._program) for var in op.outputs
                   if types.is_tensor(var.sym_type) or types.is_scalar(var.sym_type))

    def _cast_feeds(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        return {name: value.astype(types.nptype_from_builtin(self.function.inputs[name].dtype))
                for name, value in zip(self.inputs, feeds.values(), strict=True)}


def list_states(function: Function) -> list[str]:
    """List the names of the states of a function, in order."""
    return [name for name, var in function.inputs.items() if types.is_state(var.sym_type)]


class TorchModelRunner:
    """Runs a TorchScript module or an ExportedProgram; changes neither the model nor the feeds."""

    def __init__(self, model: Any, compiled: ProgramRunner) -> None:
        self.model = model
        self._caller = _make_caller(model, compiled, None)
        self._compiled = compiled
        self.example_shapes = self._caller.list_example_shapes()
        "The shapes with which an exported model was made, in the order of the inputs; None for other models."
        self._sorted = _find_sorted_inputs(model)
        self.states = self._caller.states(compiled.states)
        "The program's states that the module has as buffers."
        owned = itertools.chain(model.parameters(), model.buffers())
        dtypes = {str(self._caller.floats), *(str(each.dtype) for each in owned)}
        self.tolerance = FP32_TOLERANCE if dtypes.isdisjoint(_HALF_DTYPES) and not compiled.has_fp16_ops() \
            else FP16_TOLERANCE
        "The largest allowed deviation of a program in fp32, as a fraction of the largest value."

    def fit_plan(self, plan: Plan) -> Plan:
        """Return a plan whose sampled feeds and states the module can hold as well, see `Caller`.

        Inputs that torch requires to be sorted are sorted. The feeds are in the order of the program's inputs, but may
        have other names.
        """
        if not plan.asked:
            feeds = {name: np.sort(value, axis=-1) if number in self._sorted else value
                     for number, (name, value) in enumerate(plan.feeds.items())}
            plan = replace(plan, feeds=feeds)
        fitted = self._caller.fit_plan(replace(plan, feeds=dict(zip(self._compiled.inputs, plan.feeds.values()))))
        return replace(fitted, feeds=dict(zip(plan.feeds, fitted.feeds.values())))

    def __call__(
        self, feeds: Mapping[str, Array], state: Mapping[str, Array], move: Callable[[Array], Array] | None = None,
        noise: Noise | None = None,
    ) -> dict[str, Array]:
        """Return the outputs by name, and the final states as `state NAME`.

        `move` gives other numbers for the floats of the inputs, parameters and buffers, for this call, and `noise` is
        added to what each op reads.
        """
        return self._called(self._caller, feeds, state, move, noise)

    def find_random_results(
        self, results: Mapping[str, Array], feeds: Mapping[str, Array], state: Mapping[str, Array]
    ) -> list[str]:
        """Return the outputs and states that differ in another run from the `results` of one on the same feeds."""
        again = self(feeds, state)
        return [name for name, value in results.items()
                if not compare_within_tolerance(name, value, again[name], self.tolerance).passed]

    def find_choice_by_nan(self, feeds: Mapping[str, Array], state: Mapping[str, Array]) -> str | None:
        """Return the first op of this call that makes integers or bools of NaN, as of 0 / 0; None if there is none.

        Core ML does not define them: torch's `bucketize` puts NaN after all numbers, comparisons are false.
        """
        import torch
        from torch.utils._python_dispatch import TorchDispatchMode

        found: list[str] = []

        def observe(self: Any, function: Any, kinds: Any, given: Any = (), named: Any = None) -> Any:
            result = function(*given, **(named or {}))
            if not found and any(not _is_float_tensor(each) for each in _list_tensors(result)) and any(
                    _is_float_tensor(each) and bool(torch.isnan(each).any()) for each in _list_tensors(given)):
                found.append(str(function))
            return result

        with type("Observer", (TorchDispatchMode,), {"__torch_dispatch__": observe})(), suppress(InputError):
            self(feeds, state)  # torch's interpreter of scripts fails on some operators of sizes while it is observed
        return found[0] if found else None

    def run_instead(
        self, run: Callable[..., Any], feeds: Mapping[str, Array], state: Mapping[str, Array],
        noise: Noise | None = None,
    ) -> None:
        """Call `run` in place of the model, with the model's tensors and the buffers set.

        The result of `run` is used as the model's.
        """
        self._called(_make_caller(self.model, self._compiled, run), feeds, state, noise=noise)

    def _called(
        self, caller: Caller, feeds: Mapping[str, Array], state: Mapping[str, Array],
        move: Callable[[Array], Array] | None = None, noise: Noise | None = None,
    ) -> dict[str, Array]:
        left = {name: state[name].copy() for name in self.states}
        returned = caller(dict(zip(self._compiled.inputs, feeds.values(), strict=True)), left, move, noise)
        return to_arrays(returned) | {f"state {name}": value for name, value in left.items()}


def _list_tensors(value: Any) -> list[Any]:
    import torch

    return [each for each in torch.utils._pytree.tree_leaves(value) if isinstance(each, torch.Tensor)]


def _is_float_tensor(tensor: Any) -> bool:
    return bool(tensor.is_floating_point() or tensor.is_complex())


def _find_sorted_inputs(model: Any) -> set[int]:
    """Return the positions of tensor inputs in which the model searches, so that torch requires them to be sorted."""
    if hasattr(model, "graph_signature"):
        names = list(model.graph_signature.user_inputs)
        read = [node.args[_SEARCHED[kind]] for node in model.graph.nodes
                if (kind := str(node.target).split(".")[-2:][0]) in _SEARCHED]
        return {names.index(each.name) for each in read if getattr(each, "name", None) in names}
    graph = model.inlined_graph
    names = [value.debugName() for value in list(graph.inputs())[1:]]
    found = [list(node.inputs())[place].debugName() for kind, place in _SEARCHED.items()
             for node in graph.findAllNodes(f"aten::{kind}")]
    return {names.index(name) for name in found if name in names}


def _make_caller(model: Any, compiled: ProgramRunner, run: Callable[..., Any] | None) -> Caller:
    import torch

    script = isinstance(model, torch.jit.ScriptModule)

    class ByPlace(Caller):
        """Passes TorchScript's inputs by position: the program may use the parameter names in another order."""

        def _named_inputs(self) -> set[str]:
            return set() if script else super()._named_inputs()

        def _called(self, arguments: Mapping[str, Any]) -> Any:
            placed = _pack_tuples(model, arguments.values()) if script else list(arguments.values())
            if run is not None:
                return run(self._given, placed)
            return self._given(*placed) if script else super()._called(arguments)

    return ByPlace(model, compiled.inputs, compiled.outputs)


def _pack_tuples(model: Any, tensors: Iterable[Any]) -> list[Any]:
    """Pack tensors into the tuples that a TorchScript module expects; coremltools makes an input of each tensor.

    The last inputs, for which there is no tensor, have their defaults.
    """
    rest = list(tensors)

    def pack_kind(kind: Any) -> Any:
        return tuple(map(pack_kind, kind.elements())) if kind.kind() == "TupleType" else rest.pop(0)

    placed = [pack_kind(value.type()) for value in list(model.forward.graph.inputs())[1:] if rest]
    left = list(model.forward.schema.arguments)[1 + len(placed):] if hasattr(model.forward, "schema") else []
    return [*placed, *rest, *(argument.default_value for argument in left)]
