"""Torch modules and Python callables in place of one of two programs: calls, and names for their results."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import numpy as np
from coremltools.converters.mil.mil.passes.defs.preprocess import NameSanitizer

from ..utils.errors import InputError
from ..utils.option_spelling import format_option
from ..utils.text_format import add_article
from .execution import Plan

__all__ = ["Caller", "MODE_ARGUMENTS", "Noise", "RejectedSizes", "is_callable_side", "iterate_training_ops", "to_array"]

Array = np.ndarray[Any, Any]
Noise = tuple[float, int]
"The error of the floats that each op reads, as a fraction of each number, and a seed."

_UNDEFINED_RESULTS = ("topk", "sort", "bucketize", "Byte(", "Char(", "Short(", "torch.uint8", "torch.int8",
                      "torch.int16")
"Ops and dtypes in the text of a graph whose results torch may not define."
_TRAINING_LAYERS = ("Attention", "BatchNorm", "Bn", "Dropout", "GRU", "InstanceNorm", "LSTM", "RNN", "RReLU",
                    "Transformer")
"Parts of the names of PyTorch's layers that compute something else in training mode, such as ConvBn2d."
MODE_ARGUMENTS = ("train", "training", "use_input_stats")
"Arguments of ops that are true in training mode."
_PROBABILITIES = ("p", "dropout")
"Arguments of random ops with the share of elements that training mode drops."
_NORMS = ("aten::batch_norm", "aten::instance_norm", "aten::native_batch_norm", "aten::_native_batch_norm_legit")
"Ops whose fourth argument is the running mean, or, in an overload without running statistics, the mode."


class RejectedSizes(InputError):
    """An exported module does not accept inputs of these sizes: a guard of torch.export excludes them."""


def is_callable_side(given: Any) -> bool:
    """Return whether `given` is a callable to compare with, and not a model to load."""
    return callable(given) and not hasattr(given, "get_spec")


def _may_depend_on_training(torch: Any, part: Any) -> bool:
    """Return whether a module may compute something else in training mode: not a container or a layer such as Linear.

    coremltools' quantizers leave their layers in training mode. A traced module has only the name of its class.
    """
    name = getattr(part, "original_name", type(part).__name__)
    known = getattr(torch.nn, name, None) or getattr(torch.ao.nn.intrinsic, name, None)
    is_plain = known is not None and (hasattr(part, "original_name") or isinstance(part, known))
    return not is_plain or any(each in name for each in _TRAINING_LAYERS)


def iterate_training_ops(torch: Any, graph: Any) -> Iterator[Any]:
    """Yield the nodes of a TorchScript graph with an argument for training mode that is true.

    A norm of computed or passed statistics is always in this mode, as in `F.batch_norm(..., training=True)` of images
    one by one; that of a module has buffers. A dropout of probability 0 computes the same in both modes.
    """
    for node in graph.nodes():
        if node.kind() in _NORMS and node.inputsAt(3).node().kind() != "prim::GetAttr":
            continue
        schema = node.schema()
        arguments = [] if schema == "(no schema)" else torch._C.parse_schema(schema).arguments
        given = {argument.name: value.toIValue() for argument, value in zip(arguments, node.inputs())
                 if argument.name in (*MODE_ARGUMENTS, *_PROBABILITIES)}
        if any(given.get(name) for name in MODE_ARGUMENTS) and 0 not in (given.get(name) for name in _PROBABILITIES):
            yield node
        for block in node.blocks():
            yield from iterate_training_ops(torch, block)


class Caller:
    """Calls the user's callable with a program's feeds and gives its results the names of the program's outputs.

    A torch module is called with tensors on its device: floats in the dtype of its floating-point parameters (if it has
    none or several, in that of its trace, else float32), integers as int64, the dtype of torch's indices. Any other
    callable is called with the fed numpy arrays. Inputs are passed by name if all of their names are parameters of the
    callable, else in the program's order. Raises InputError for a class, and for a module in training mode.
    """

    def __init__(self, given: Any, inputs: Sequence[str], outputs: Sequence[str], *, labels: bool = False) -> None:
        """`labels` states that the program is a classifier, for the error about the number of results."""
        if isinstance(given, type):
            raise InputError(f"found the class {given.__name__}; expected an instance of it, or a function")
        exported = given if hasattr(given, "graph_signature") and hasattr(given, "module") else None
        if exported is not None:
            given = exported.module()  # an ExportedProgram cannot be called itself
        self._given, self._inputs, self._outputs, self._labels = given, list(inputs), list(outputs), labels
        self.name = getattr(given, "__name__", None) or type(given).__name__
        torch = sys.modules.get("torch")  # if torch is not imported, `given` cannot be a torch module
        self._torch = torch if torch is not None and isinstance(given, torch.nn.Module) else None
        if self._torch is not None and not self._is_exported():
            self._refuse_training_mode()
        empty = [] if self._torch is None else [
            name for name, value in [*given.named_parameters(), *given.named_buffers()] if value.is_meta]
        if empty:
            raise InputError(f"the module {self.name} has no values for '{empty[0]}', which is on the meta device; "
                             "expected a module with its weights loaded")
        self._exported = exported
        self._leaves = [] if exported is None else _list_exported_leaves(exported)
        self._constant_results = () if exported is None else _find_constant_results(exported)
        self._by_name = self._named_inputs()
        self.floats = self._find_float_dtype()
        "The dtype in which floats are passed to a torch module; None for other callables."
        self._input_dtypes = self._find_input_dtypes(exported)

    def __call__(
        self, feeds: Mapping[str, Array], state: dict[str, Array], move: Callable[[Array], Array] | None = None,
        noise: Noise | None = None, *, at_float64: bool = False,
    ) -> dict[str, Array]:
        """Return the outputs by name.

        Buffers of a module that have the names of states start with the values in `state`, which is updated with their
        final values; the module itself is not changed. `move` gives other numbers for the floats of the inputs and of
        a module's parameters and buffers. `noise` is added to what each op of a torch module reads, and `at_float64`
        computes its float32 ops at float64; other callables ignore both. Raises InputError if the callable raises an
        exception, and if its results do not fit the program's outputs.
        """
        arguments = {name: np.array(feeds[name]) for name in self._inputs}
        if move:
            arguments = {name: move(value) for name, value in arguments.items()}
        try:
            if self._torch is not None:
                return self._call_module(arguments, state, move, noise, at_float64)
            returned = self._called(arguments)
        except InputError:
            raise
        except Exception as error:
            function = ", ".join(f"{name}: {value.dtype}{list(value.shape)}" for name, value in arguments.items())
            guarded = isinstance(error, AssertionError) and str(error).startswith("Guard failed")
            raise (RejectedSizes if guarded else InputError)(
                f"the callable {self.name} raised {type(error).__name__} for ({function}): {_describe_error(error)}; "
                f"if it rejects the values of these inputs, pass others by {format_option('feeds')}"
            ) from error
        return self._name_results(returned)

    def _refuse_training_mode(self) -> None:
        """Raise InputError for a module in training mode, and for a trace that was made in it.

        The ops of a trace keep the mode in which it was made. Its own mode is not read; a frozen one has none.
        """
        torch, given = self._torch, self._given
        assert torch is not None
        if isinstance(given, torch.jit.ScriptModule) and 'name="training"' not in str(given.inlined_graph):
            graph = given.inlined_graph  # its nodes are valid while it is referenced
            if found := next(iterate_training_ops(torch, graph), None):
                raise InputError(f"the trace {self.name} was made in training mode, in which '{found.kind()}' computes "
                                 "something else; trace the module again after its eval(); where its code passes "
                                 "training=True, pass self.training")
            return
        for name, part in given.named_modules():
            if part.training and _may_depend_on_training(torch, part):
                place = f"'{name}' in {self.name}" if name else self.name
                raise InputError(f"the module {place} is in training mode, in which dropout and batch norm compute "
                                 "something else; call its eval() first")

    def states(self, names: Sequence[str]) -> list[str]:
        """Return the states in `names` that are buffers of the module, under its names or valid ones of Core ML."""
        return [name for name in names if name in self._get_buffers()]

    def list_example_shapes(self) -> list[tuple[int, ...]] | None:
        """List the shapes of the inputs, in order, with which a module was exported: its guards accept them.

        None for other callables, and where the example is not stored. A scalar is an array of one element.
        """
        example = getattr(self._exported, "example_inputs", None)
        if example is None or self._torch is None:
            return None
        leaves = self._torch.utils._pytree.tree_leaves(example)
        shapes = {name: tuple(leaf.shape) or (1,) for (name, _), leaf in zip(self._leaves, leaves)
                  if name is not None and isinstance(leaf, self._torch.Tensor)}
        rest = iter([shape for name, shape in shapes.items() if name not in self._inputs])
        return [shapes[name] if name in shapes else next(rest) for name in self._inputs] \
            if len(shapes) == len(self._inputs) else None

    def fit_plan(self, plan: Plan) -> Plan:
        """Return a plan whose sampled feeds and states the module can hold as well.

        Models store bools and integers of a module as floats: inputs of bools as 0 and 1, integer buffers as integers.
        An exported module has inputs of one dtype each, which may hold less than those of the model. User-supplied
        feeds stay as they are.
        """
        buffers = {name: self._get_buffers()[name] for name in self.states(list(plan.state))}
        state = {name: _fit_to_buffer(value, buffers[name]) if name in buffers else value
                 for name, value in plan.state.items()}
        feeds = {name: self._fit_to_input(name, value) if name in self._input_dtypes and not plan.asked else value
                 for name, value in plan.feeds.items()}
        return replace(plan, feeds=feeds, state=state)

    def _fit_to_input(self, name: str, value: Array) -> Array:
        """Return the values that the dtype of an input can hold: rounded, and integers limited to its range."""
        torch, dtype = self._torch, self._input_dtypes[name]
        assert torch is not None
        if dtype == torch.bool:
            return _draw_bools(value)
        if dtype.is_floating_point:
            return np.asarray(torch.from_numpy(value).to(dtype).to(torch.float64).numpy(), value.dtype)
        limits = torch.iinfo(dtype)
        return np.asarray(np.clip(value, limits.min, limits.max), value.dtype)

    def _find_input_dtypes(self, exported: Any) -> dict[str, Any]:
        """Find the dtypes of the inputs of an exported module, which checks them, and which inputs a traced module
        takes as bools; models have them as numbers of other dtypes."""
        if self._torch is None:
            return {}
        if exported is not None:
            dtypes = _list_exported_dtypes(exported)
        elif isinstance(self._given, self._torch.jit.ScriptModule):
            dtypes = [(name, dtype if dtype == self._torch.bool else None)
                      for name, dtype in _list_script_dtypes(self._given)]
        else:
            return {}
        placed = [dtype for name, dtype in dtypes if name not in self._by_name]
        rest = [name for name in self._inputs if name not in self._by_name]
        found = {name: dtype for name, dtype in dtypes if name in self._by_name} | dict(zip(rest, placed))
        return {name: dtype for name, dtype in found.items() if dtype is not None and not dtype.is_complex}

    def _find_float_dtype(self) -> Any:
        """Find the dtype of floats: that of the parameters, or of the example of a trace, or of constants, or float32.

        A module may have been moved to another dtype since it was traced, so the example decides only where parameters
        have several dtypes, or where there are none since all weights are constants of the trace. A frozen trace, of
        which this is so, does not keep the dtypes of the example.
        """
        if self._torch is None:
            return None
        owned = [each.dtype for each in self._given.parameters() if each.is_floating_point()]
        traced: list[Any] = []
        if isinstance(self._given, self._torch.jit.ScriptModule) and len(set(owned)) != 1:
            traced = [dtype for _, dtype in _list_script_dtypes(self._given) if dtype and dtype.is_floating_point]
            graph = self._given.inlined_graph  # its nodes are valid while it is referenced
            constants = [node.t("value") for node in graph.findAllNodes("prim::Constant")
                         if not owned and node.hasAttribute("value") and node.kindOf("value") == "t"]
            traced += [each.dtype for each in sorted(constants, key=self._torch.numel, reverse=True)
                       if each.is_floating_point()]
        return next(iter([*traced, *owned]), self._torch.float32)

    def _named_inputs(self) -> set[str]:
        """Return the inputs to pass by name: all or none; for a torch.export module, those exported as keywords."""
        if self._torch is not None and self._is_exported():
            spec = getattr(self._given, "_in_spec", None)
            if spec is None:
                return set()
            keywords = spec.child(1) if hasattr(spec, "child") else spec.children_specs[1]  # new and old torch
            return set(keywords.context) if set(keywords.context) <= set(self._inputs) else set()
        known = _list_parameters(self._given if self._torch is None else self._given.forward)
        return set(self._inputs) if set(self._inputs) <= known else set()

    def _called(self, arguments: Mapping[str, Any]) -> Any:
        if self._leaves and (_is_nested(self._given._in_spec) or any(name is None for name, _ in self._leaves)):
            return self._call_with_containers(arguments)
        named = {name: value for name, value in arguments.items() if name in self._by_name}
        return self._given(*(value for name, value in arguments.items() if name not in named), **named)

    def _call_with_containers(self, arguments: Mapping[str, Any]) -> Any:
        """Call an exported module with the dictionaries, tuples and constants that it was exported with.

        A value is found by the name of its leaf, and others are taken in order.
        """
        assert self._torch is not None
        values = dict(arguments)
        found = [constant if name is None else values.pop(name, None) for name, constant in self._leaves]
        rest = iter(values.values())
        leaves = [next(rest) if each is None and name is not None else each
                  for each, (name, _) in zip(found, self._leaves, strict=True)]
        given, named = self._torch.utils._pytree.tree_unflatten(leaves, self._given._in_spec)
        return self._given(*given, **named)

    def _call_module(
        self, arguments: Mapping[str, Array], state: dict[str, Array], move: Callable[[Array], Array] | None,
        noise: Noise | None, at_float64: bool,
    ) -> dict[str, Array]:
        torch, buffers = self._torch, self._get_buffers()
        assert torch is not None
        owned = [*self._given.parameters(), *self._given.buffers()]
        device = owned[0].device if owned else torch.device("cpu")
        tensors = {name: torch.from_numpy(value != 0 if self._input_dtypes.get(name) == torch.bool else value)
                   for name, value in arguments.items()}
        chosen = {name: self._input_dtypes.get(name) or _choose_torch_dtype(torch, tensor, self.floats)
                  for name, tensor in tensors.items()}
        tensors = {name: tensor.to(device, chosen[name]) for name, tensor in tensors.items()}
        saved = [(buffer, buffer.clone()) for buffer in self._given.buffers()]
        moved = [] if move is None else [
            (each, move(to_array(each))) for each in owned if each.is_floating_point() and not each.is_inference()
            and type(each.data) is torch.Tensor]  # a quantized one can be read alone
        saved += [(each, each.clone()) for each, _ in moved]

        def call(context: AbstractContextManager[Any], state: dict[str, Array]) -> dict[str, Array]:
            with torch.no_grad():
                try:
                    with context:
                        for each, value in moved:
                            each.copy_(torch.from_numpy(value))
                        for name in state:
                            buffers[name].copy_(torch.from_numpy(state[name]).reshape(buffers[name].shape))
                        with (_add_noise(torch, *noise) if noise else nullcontext()), (
                                _compute_at_float64(torch) if at_float64 else nullcontext()):
                            returned = self._called(tensors)
                    state.update({name: to_array(buffers[name]).reshape(state[name].shape) for name in state})
                    return self._name_results(returned)  # copies: an exported module may return a buffer itself
                finally:
                    for tensor, value in saved:
                        tensor.copy_(value)

        if self._may_be_undefined():
            for _ in range(2):
                with suppress(RuntimeError):  # torch's dispatch modes reject some traces, as those with `int(tensor)`
                    return call(_define_results(torch), state)
                call(nullcontext(), dict(state))  # and others until a run has optimized them
        return call(nullcontext(), state)

    def _may_be_undefined(self) -> bool:
        """Return whether a module may call `torch.topk` or `torch.sort`, or has integers of 8 or 16 bits.

        It is not known of a module that is neither traced nor exported.
        """
        assert self._torch is not None
        graph = self._given.inlined_graph if isinstance(self._given, self._torch.jit.ScriptModule) else (
            getattr(self._given, "graph", None))
        return graph is None or any(name in str(graph) for name in _UNDEFINED_RESULTS)

    def _get_buffers(self) -> dict[str, Any]:
        if self._torch is None:
            return {}
        buffers = dict(self._given.named_buffers())
        accepted = {NameSanitizer().sanitize_name(name, allow_prefix_underscore=False): buffer
                    for name, buffer in buffers.items()}
        return {name.replace(".", "_"): buffer for name, buffer in buffers.items()} | accepted | buffers

    def _is_exported(self) -> bool:
        """Return whether the module was made by torch.export: it has no training mode, and its eval() raises an error.
        """
        return "eval" in vars(self._given)

    def _name_results(self, returned: Any) -> dict[str, Array]:
        if isinstance(returned, Mapping) and set(returned) == set(self._outputs):
            found = [returned[name] for name in self._outputs]
        else:
            found = list(_iterate_leaves(returned))
            if len(found) == len(self._constant_results):
                found = [value for value, constant in zip(found, self._constant_results) if not constant]
        if len(found) != len(self._outputs):
            keys = f" ({', '.join(map(repr, returned))})" if isinstance(returned, Mapping) else ""
            hint = ("; a classifier is compared without its label: convert it without classifier_config to verify it, "
                    "or with mil_ane_passes.convert(..., check=True)") if self._labels else ""
            raise InputError(f"the callable {self.name} returned {len(found)} outputs{keys}, the program has "
                             f"{len(self._outputs)} ({', '.join(map(repr, self._outputs))}); expected one for each"
                             f"{hint}")
        return {name: self._to_plain_array(value) for name, value in zip(self._outputs, found)}

    def _to_plain_array(self, value: Any) -> Array:
        array = to_array(value)
        if array.dtype.kind not in "biufUS":
            raise InputError(f"the callable {self.name} returned {add_article(type(value).__name__)}; expected "
                             "tensors, arrays or numbers; several in a tuple, list or dictionary")
        return array


def _define_results(torch: Any) -> Any:
    """Return a context in which results that torch does not define are those of the reference runtime.

    `torch.topk` chooses the first of equal elements, `torch.sort` keeps their order, `torch.searchsorted` counts the
    smaller elements of a sequence that is not sorted, and a cast of a float to an integer of 8 or 16 bits gives the
    nearest one that fits, as on arm64.
    """
    def dispatch(mode: Any, function: Any, kinds: Any, given: Any = (), named: Any = None) -> Any:
        if function is torch.ops.aten._to_copy.default:
            dtype = (named or {}).get("dtype")
            if dtype in (torch.uint8, torch.int8, torch.int16) and given[0].is_floating_point():
                limits = torch.iinfo(dtype)
                given = (given[0].clamp(limits.min, limits.max), *given[1:])
            return function(*given, **(named or {}))
        if function is torch.ops.aten.sort.default:
            options = dict(zip(("self", "dim", "descending"), given)) | (named or {})
            return torch.sort(options.pop("self"), stable=True, **options)
        if function in (torch.ops.aten.searchsorted.Tensor, torch.ops.aten.searchsorted.Scalar):
            return function(*given, **(named or {})) if _is_sorted(given[0]) else (
                _count_smaller(torch, *given, **(named or {})))
        if function is torch.ops.aten.bucketize.Tensor:
            return function(*given, **(named or {})) if _is_sorted(given[1]) else (
                _count_smaller(torch, given[1], given[0], **(named or {})))
        if function is not torch.ops.aten.topk.default:
            return function(*given, **(named or {}))
        options = dict(zip(("self", "k", "dim", "largest", "sorted"), given)) | (named or {})
        dim = options.get("dim", -1)
        found = torch.sort(options["self"], stable=True, dim=dim, descending=options.get("largest", True))
        return tuple(each.narrow(dim, 0, options["k"]).contiguous() if each.dim() else each for each in found)

    return type("DefinedResults", (torch.utils._python_dispatch.TorchDispatchMode,), {"__torch_dispatch__": dispatch})()


def _add_noise(torch: Any, unit: float, seed: int) -> Any:
    """Return a context in which each op reads floats that are off by one to two times `unit`, as a fraction of each.

    Each element is moved by itself, also where several of what an op reads are copies of one number. Numbers of rank 0
    that are integers, as sizes are, are not moved.
    """
    random = torch.Generator().manual_seed(seed)

    def move(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()) or (
                value.dim() == 0 and not value.is_complex() and bool(value == value.round())):
            return value
        drawn = 2 * torch.rand(value.shape, generator=random) - 1
        step = max(unit, torch.finfo(value.dtype).eps / 2) * (drawn + drawn.sign())
        moved = value + value * step.to(value.device, step.dtype if value.is_complex() else value.dtype)
        return torch.where(torch.isfinite(moved), moved, value).to(value.dtype)

    return _change_arguments(torch, move)


@contextmanager
def _compute_at_float64(torch: Any) -> Iterator[None]:
    """Compute ops of float32 at float64, and those of complex64 at complex128, with the constants that ops make.

    What an op writes into, and what it returns a view of, keeps its dtype, as parameters and buffers do. torch's
    default dtype, which all threads share, is not changed.
    """
    wider = {torch.float32: torch.float64, torch.complex64: torch.complex128}

    def widen(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(wider.get(value.dtype, value.dtype))
        return wider.get(value, value) if isinstance(value, torch.dtype) else value

    with _change_arguments(torch, widen, widen), torch.backends.mkldnn.flags(enabled=False):  # its LSTM rejects float64
        yield


def _change_arguments(
    torch: Any, change: Callable[[Any], Any], change_result: Callable[[Any], Any] = lambda value: value
) -> Any:
    """Return a context in which each op reads what `change` returns for its arguments and for those in its lists.

    Not changed are what an op writes into and what it returns a view of. `change_result` is applied to the results of
    the other ops.
    """
    def dispatch(mode: Any, function: Any, kinds: Any, given: Any = (), named: Any = None) -> Any:
        named, arguments = named or {}, getattr(getattr(function, "_schema", None), "arguments", [])
        aliased = {each.name: each.alias_info.is_write for each in arguments if each.alias_info is not None}
        if len(given) <= len(arguments) and all(aliased.values()):
            given = [value if each.name in aliased else torch.utils._pytree.tree_map(change, value)
                     for each, value in zip(arguments, given)]
            named = {name: value if name in aliased else torch.utils._pytree.tree_map(change, value)
                     for name, value in named.items()}
        made = function(*given, **named)
        return made if aliased else torch.utils._pytree.tree_map(change_result, made)

    return type("ChangedArguments", (torch.utils._python_dispatch.TorchDispatchMode,),
                {"__torch_dispatch__": dispatch})()


def _is_sorted(sequence: Any) -> bool:
    return bool((sequence[..., 1:] >= sequence[..., :-1]).all())


def _count_smaller(
    torch: Any, sequence: Any, values: Any, *, out_int32: bool = False, right: bool = False, side: str | None = None,
    sorter: Any = None,
) -> Any:
    """Count the elements of a sequence below each value, which is where `torch.searchsorted` finds it in a sorted one.
    """
    sequence = sequence if sorter is None else sequence.gather(-1, sorter)
    values = torch.as_tensor(values)
    row = sequence if sequence.dim() == 1 else sequence.unsqueeze(-2)
    before = torch.le if right or side == "right" else torch.lt
    return before(row, values.unsqueeze(-1)).sum(-1, dtype=torch.int32 if out_int32 else torch.int64)


def _list_parameters(call: Callable[..., Any]) -> set[str]:
    """List the names of the parameters of `call`; empty if it has no signature."""
    try:
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):
        return set()
    return {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}


def _choose_torch_dtype(torch: Any, tensor: Any, floats: Any) -> Any:
    return floats if tensor.is_floating_point() else torch.bool if tensor.dtype == torch.bool else torch.int64


def _list_exported_leaves(exported: Any) -> list[tuple[str | None, Any]]:
    """List the leaves of the inputs of a torch ExportedProgram: the name of a tensor, or None and a constant.

    Numbers, bools, text and None are constants: torch.export accepts the values alone that it was called with.
    """
    leaves = [spec.arg for spec in exported.graph_signature.input_specs if spec.kind.name == "USER_INPUT"]
    return [(None, leaf.value) if _is_constant_argument(leaf) else (leaf.name, None) for leaf in leaves]


def _find_constant_results(exported: Any) -> tuple[bool, ...]:
    """Return for each result of a torch ExportedProgram but None whether it is a constant, which models do not have."""
    results = [spec.arg for spec in exported.graph_signature.output_specs if spec.kind.name == "USER_OUTPUT"]
    return tuple(_is_constant_argument(result) for result in results
                 if not (_is_constant_argument(result) and result.value is None))


def _is_constant_argument(argument: Any) -> bool:
    """Return whether `argument` is a `torch.export.graph_signature.ConstantArgument`."""
    return type(argument).__name__ == "ConstantArgument"


def _is_nested(spec: Any) -> bool:
    """Return whether an argument of an exported module is a container."""
    children = spec.children() if hasattr(spec, "child") else spec.children_specs  # new and old torch
    return any(not each.is_leaf() for part in children
               for each in (part.children() if hasattr(part, "child") else part.children_specs))


def _list_exported_dtypes(exported: Any) -> list[tuple[str, Any]]:
    """List the inputs of a torch ExportedProgram with their dtypes; None for those that are not tensors."""
    made = {node.name: node.meta.get("val") for node in exported.graph.nodes if node.op == "placeholder"}
    return [(name, getattr(made.get(name), "dtype", None)) for name, _ in _list_exported_leaves(exported)
            if name is not None]


def _list_script_dtypes(module: Any) -> list[tuple[str, Any]]:
    """List the tensors that a TorchScript module expects with their dtypes, which are known for traces alone."""
    def list_kind(name: str, kind: Any) -> Iterator[tuple[str, Any]]:
        if kind.kind() == "TupleType":
            for each in kind.elements():
                yield from list_kind(name, each)
        else:
            yield name, kind.dtype() if kind.kind() == "TensorType" else None

    inputs = list(module.forward.graph.inputs())[1:]
    return [each for value in inputs for each in list_kind(value.debugName(), value.type())]


def _fit_to_buffer(value: Array, buffer: Any) -> Array:
    """Return the values of a state that a buffer can hold: natural numbers for integers, 0 and 1 for bools."""
    if buffer.is_floating_point() or buffer.is_complex():
        return value
    return np.asarray(value > 0 if str(buffer.dtype) == "torch.bool" else np.abs(np.rint(value)), value.dtype)


def _draw_bools(value: Array) -> Array:
    """Turn sampled numbers into bools of which each row has both: a mask that hides a whole row makes NaN of it."""
    rows = value.ndim and value.shape[-1] > 1
    chosen = value > 0 if not rows else value.argsort(-1, kind="stable").argsort(-1) % 2 == 1
    return np.asarray(chosen, value.dtype)


def _iterate_leaves(returned: Any) -> Iterator[Any]:
    """Yield the returned values in order, with nested containers flattened and None dropped."""
    if isinstance(returned, Mapping):
        returned = list(returned.values())
    if isinstance(returned, (tuple, list)):
        for each in returned:
            yield from _iterate_leaves(each)
    elif returned is not None:
        yield returned


def to_array(value: Any) -> Array:
    """Convert a tensor (of any device, dtype and gradient), or anything numpy accepts, to an array that owns its
    memory."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().resolve_conj().resolve_neg()
        value = (value.float() if str(value.dtype) == "torch.bfloat16" else value).numpy()
    return np.array(value)


def _describe_error(error: Exception) -> str:
    """Return the text of an error; of one in TorchScript its last line, which follows the stack of the script."""
    text = str(error).strip()
    return text.splitlines()[-1] if text.startswith("The following operation failed in the TorchScript") else text
