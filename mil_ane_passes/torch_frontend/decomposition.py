"""Lowering by decomposition: torch decomposes an op into ops that have lowerings, and those are converted.

The op is traced on fake tensors of the node's shapes. A flexible size is traced at three values. Where all give the
same graph, except for integers that are linear in the size, that graph is used for every size, with these integers
computed; else the op raises NotConverted.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from coremltools.converters.mil.frontend.torch.utils import (
    MIL_DTYPE_TO_TORCH_DTYPE,
    TorchFrontend,
    sanitize_op_kind,
    unify_inplace_and_functional,
)
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var, types

from .errors import NotConverted
from .lowering import make_prefix, name_result

__all__ = ["lower_by_decomposition", "resolve_torch_call"]

_SIZE_HINT = 7
"The number that a flexible size has first, plus one for each size before it."
_SIZE_STEPS = (5, 12)
"What is added to it in two further traces: remainders of both are equal for no divisor."
_DTYPE_NAMES = {types.uint8: "uint8", types.int8: "int8"}
"Names in torch of dtypes that coremltools' table lacks."


def lower_by_decomposition(context: Any, node: Any) -> None:
    """Lower an op: trace it, convert the traced graph, and add its results as the node's."""
    packet, arguments, keywords = resolve_torch_call(context, node)
    tensors: list[Var] = []
    template = [_replace_tensors_by_slots(argument, tensors) for argument in (*arguments, *keywords.values())]

    def run_template(*given: Any) -> Any:
        filled = [_fill_slots(entry, given) for entry in template]
        return packet(*filled[:len(arguments)], **dict(zip(keywords, filled[len(arguments):], strict=True)))

    graph, sizes = _trace_for_all_sizes(run_template, tensors, node)
    _add_results(context, node, _convert_graph(context, graph, [*tensors, *sizes]))


def resolve_torch_call(context: Any, node: Any) -> tuple[Any, list[Any], dict[str, Any]]:
    """Return the torch op, its positional and its named arguments.

    The first schema that fits determines the types of TorchScript's arguments.
    """
    import torch

    kind = unify_inplace_and_functional(sanitize_op_kind(node.kind)).partition(".")[0]
    names = [*_collect_aten_names().get(kind, ()), kind, f"__{kind}__"]
    packet = next(getattr(torch.ops.aten, name) for name in names if hasattr(torch.ops.aten, name))
    inputs = [_resolve_input(context, item) for item in node.inputs]
    keywords = {
        name: _resolve_input(context, item[0]) if len(item) == 1 else [_resolve_input(context, one) for one in item]
        for name, item in (node.kwinputs or {}).items()
    }
    chosen = sanitize_op_kind(node.kind).partition(".")[2]  # torch.export names the overload, TorchScript does not
    for overload in sorted(packet.overloads(), key=lambda name: name.lower() != chosen):
        schema = getattr(packet, overload)._schema
        types_of = {argument.name: str(argument.type) for argument in schema.arguments}
        typed = _convert_arguments(inputs, list(types_of.values()))
        typed_keywords = _convert_arguments(
            list(keywords.values()), [types_of.get(name, "nothing") for name in keywords]
        )
        if typed is None or typed_keywords is None or any(argument.is_out for argument in schema.arguments):
            continue
        named_arguments = dict(zip(keywords, typed_keywords, strict=True))
        only_named = {argument.name for argument in schema.arguments if argument.kwarg_only}
        named_arguments |= {name: value for name, value in zip(types_of, typed, strict=False) if name in only_named}
        plain = [value for name, value in zip(types_of, typed, strict=False) if name not in only_named]
        return getattr(packet, overload), plain, named_arguments
    raise NotConverted.at(node, "has arguments that match none of torch's schemas")


@functools.cache
def _collect_aten_names() -> dict[str, list[str]]:
    """Collect the names of torch's own ops by their lower-case form: the kind of a node is `mt` for `mT`.

    `torch.ops.aten` itself lists only the ops that have been used in this process.
    """
    import torch

    names: dict[str, list[str]] = {}
    for qualified in sorted(torch._C._dispatch_get_all_op_names()):
        namespace, _, name = qualified.partition(".")[0].partition("::")
        if namespace == "aten" and name not in names.setdefault(name.lower(), []):
            names[name.lower()].append(name)
    return names


def _resolve_input(context: Any, item: Any) -> Any:
    if isinstance(item, list | tuple):
        return [_resolve_input(context, one) for one in item]
    return context[item] if isinstance(item, str) and item in context else item


def _convert_arguments(given: list[Any], required: list[str]) -> list[Any] | None:
    """Convert the arguments to the types of the schema; return None where one does not fit."""
    if len(given) > len(required):
        return None
    typed = [_convert_argument(value, kind) for value, kind in zip(given, required, strict=False)]
    return None if any(value is NotImplemented for value in typed) else typed


def _convert_argument(value: Any, kind: str) -> Any:
    if value is None:
        return None if kind.startswith("Optional") else NotImplemented
    kind = kind.removeprefix("Optional[").removesuffix("]") if kind.startswith("Optional[") else kind
    if kind.startswith("List["):
        inner = kind.removeprefix("List[").removesuffix("]")
        if isinstance(value, Var) and value.val is not None and value.rank == 1:
            value = value.val.tolist()
        items = (
            [_convert_argument(item, inner) for item in value]
            if isinstance(value, list)
            else [_convert_argument(value, inner)]
        )
        return NotImplemented if any(item is NotImplemented for item in items) else items
    if kind == "Tensor":
        return value if isinstance(value, Var) and not isinstance(value.val, str) else NotImplemented
    if isinstance(value, Var):
        if value.val is None or value.rank > 0:
            return NotImplemented
        value = value.val.item() if isinstance(value.val, np.generic | np.ndarray) else value.val
    number: Any = int | float
    accepted = {"int": int, "float": number, "bool": bool, "str": str, "number": number, "Scalar": number}
    if kind in ("Device", "Layout", "MemoryFormat"):
        return None
    if isinstance(value, bool) and kind == "int":
        return NotImplemented
    return value if kind in accepted and isinstance(value, accepted[kind]) else NotImplemented


class _TensorSlot(int):
    """The index of a tensor among the traced tensors."""


def _replace_tensors_by_slots(value: Any, tensors: list[Var]) -> Any:
    if isinstance(value, list):
        return [_replace_tensors_by_slots(item, tensors) for item in value]
    if isinstance(value, Var):
        tensors.append(value)
        return _TensorSlot(len(tensors) - 1)
    return value


def _fill_slots(entry: Any, given: Any) -> Any:
    if isinstance(entry, list):
        return [_fill_slots(item, given) for item in entry]
    return given[entry] if isinstance(entry, _TensorSlot) else entry


def _has_flexible_size(x: Var) -> bool:
    return any(not isinstance(size, int | np.integer) for size in x.shape)


def _trace_for_all_sizes(run: Any, tensors: list[Var], node: Any) -> tuple[Any, list[Var]]:
    """Trace the graph of simpler ops; return it, and the sizes that its last placeholders stand for.

    Sizes of different symbols are different numbers. Slices of one tensor, such as `x[1:]` and `x[:-1]`, have different
    symbols although their sizes are equal; where the op rejects different sizes, those at the same place from the last
    axis are equal numbers, and where it rejects these as well, all are.
    """
    if not any(map(_has_flexible_size, tensors)):
        return _trace_decomposition(run, tensors, {}, node), []
    flexible = [(str(size), axis - x.rank) for x in tensors for axis, size in enumerate(x.shape)
                if not isinstance(size, int | np.integer)]
    symbols = list(dict.fromkeys(symbol for symbol, _ in flexible))
    places = {symbol: sorted(symbols.index(other) for other, axis in flexible if (symbol, axis) in flexible)[0]
              for symbol in symbols}
    refused: NotConverted | None = None
    for offsets in ({symbol: number for number, symbol in enumerate(symbols)}, places, dict.fromkeys(symbols, 0)):
        first = {symbol: _SIZE_HINT + offset for symbol, offset in offsets.items()}
        groups = [[symbol for symbol in symbols if offsets[symbol] == offset] for offset in set(offsets.values())]
        larger = [{symbol: first[symbol] + step for symbol in group} for group in groups for step in _SIZE_STEPS]
        try:
            graph, *others = [_trace_decomposition(run, tensors, first | each, node) for each in ({}, *larger)]
        except NotConverted as error:
            refused = refused or error
            continue
        # A number that follows sizes which are only traced as equal, but may differ, has no size to be computed from.
        sizes = [(_make_size(tensors, group[0]) if _must_be_equal(run, tensors, first, group, node) else None,
                  first[group[0]]) for group in groups]
        return graph, _SizeInserter(graph, others, sizes, node).insert()
    assert refused is not None
    raise refused


def _must_be_equal(run: Any, tensors: list[Var], first: dict[str, int], group: list[str], node: Any) -> bool:
    """Return whether the op rejects another number, and 1, for each size of `group` alone."""
    others = [{symbol: number} for symbol in group for number in (first[symbol] + _SIZE_STEPS[0], 1)]
    for other in others if len(group) > 1 else ():
        with suppress(NotConverted):
            _trace_decomposition(run, tensors, first | other, node)
            return False
    return True


def _make_size(tensors: list[Var], symbol: str) -> Var:
    """Build the size of this symbol, a scalar."""
    x, axis = next((x, axis) for x in tensors for axis, size in enumerate(x.shape) if str(size) == symbol)
    size: Var = mb.gather(x=mb.shape(x=x), indices=axis, axis=0)
    return size


class _SizeInserter:
    """Replaces integers of `graph` that are linear in a flexible size by placeholders.

    `others` are the graphs in which one size after the other is larger by `_SIZE_STEPS`; `sizes` has each size, or None
    for several sizes that are traced as equal, and its number in `graph`.
    """

    def __init__(self, graph: Any, others: list[Any], sizes: list[tuple[Var | None, int]], node: Any) -> None:
        self._graph, self._others, self._sizes, self._node = graph, others, sizes, node
        self._placeholders: dict[tuple[int, int, int], Any] = {}
        "By number of the size, factor and summand."

    def insert(self) -> list[Var]:
        """Return what the placeholders stand for. Raises NotConverted where the graphs differ in another way."""
        steps = list(self._graph.graph.nodes)
        seen = [list(other.graph.nodes) for other in self._others]
        if any(len(each) != len(steps) for each in seen) or not all(map(self._has_same_constants, self._others)):
            raise _refuse_size(self._node)
        for step, *same in zip(steps, *seen, strict=True):
            if any((each.op, str(each.target)) != (step.op, str(step.target)) for each in same):
                raise _refuse_size(self._node)
            step.args = self._convert(step.args, [each.args for each in same])
            step.kwargs = self._convert(dict(step.kwargs), [dict(each.kwargs) for each in same])
        chosen = [(self._sizes[number][0], factor, more) for number, factor, more in self._placeholders]
        return [_multiply_add(size, factor, more) for size, factor, more in chosen if size is not None]

    def _has_same_constants(self, other: Any) -> bool:
        own, others = dict(self._graph.named_buffers()), dict(other.named_buffers())
        return own.keys() == others.keys() and all(
            value.shape == others[name].shape and bool((value == others[name]).all()) for name, value in own.items())

    def _convert(self, value: Any, others: list[Any]) -> Any:
        """Return an argument of `graph` with placeholders; `others` are those of the other graphs."""
        if any(type(each) is not type(value) for each in others):
            raise _refuse_size(self._node)
        if isinstance(value, dict) and all(each.keys() == value.keys() for each in others):
            return {name: self._convert(each, [other[name] for other in others]) for name, each in value.items()}
        if isinstance(value, list | tuple) and all(len(each) == len(value) for each in others):
            return type(value)(self._convert(*each) for each in zip(value, map(list, zip(*others)), strict=True))
        return value if all(repr(each) == repr(value) for each in others) else self._replace_integer(value, others)

    def _replace_integer(self, value: Any, others: list[Any]) -> Any:
        if type(value) is not int:
            raise _refuse_size(self._node)
        growth = [(small - value, large - value) for small, large in zip(others[::2], others[1::2], strict=True)]
        (number, (small, large)), *more = ((at, each) for at, each in enumerate(growth) if any(each))
        factor = small // _SIZE_STEPS[0]
        if more or self._sizes[number][0] is None or (small, large) != tuple(factor * step for step in _SIZE_STEPS):
            raise _refuse_size(self._node)
        key = number, factor, value - factor * self._sizes[number][1]
        if key not in self._placeholders:
            last = [step for step in self._graph.graph.nodes if step.op == "placeholder"][-1]
            with self._graph.graph.inserting_after(last):
                self._placeholders[key] = self._graph.graph.placeholder(f"size_{len(self._placeholders)}")
        return self._placeholders[key]


def _multiply_add(size: Var, factor: int, summand: int) -> Var:
    product = size if factor == 1 else mb.mul(x=size, y=np.int32(factor))
    result: Var = mb.add(x=product, y=np.int32(summand)) if summand else product
    return result


def _refuse_size(node: Any) -> NotConverted:
    return NotConverted.at(node, "depends on a flexible size in a way that has no lowering", "fix the size")


def _trace_decomposition(run: Any, tensors: list[Var], sizes: dict[str, int], node: Any) -> Any:
    """Trace the graph of simpler ops; flexible sizes have the numbers in `sizes`, by their symbols."""
    import torch
    from torch.fx.experimental.proxy_tensor import make_fx

    def size_of(size: Any) -> int:
        return int(size) if isinstance(size, int | np.integer) else sizes[str(size)]

    # int32 represents torch's int64, the only dtype that torch accepts for indices
    examples = [torch.zeros([size_of(size) for size in x.shape], dtype=torch.int64 if x.dtype == types.int32 else
                            _get_torch_dtype(x)) for x in tensors]
    try:
        with torch.no_grad():
            graph = make_fx(run, decomposition_table=_build_decomposition_table(), tracing_mode="fake")(*examples)
            if any(str(step.target).partition(".")[2].partition(".")[0].endswith("_") for step in graph.graph.nodes):
                # some definitions write in place, which lowerings do not support
                graph = make_fx(
                    torch.func.functionalize(graph, remove="mutations"),
                    decomposition_table=_build_decomposition_table(),
                    tracing_mode="fake",
                )(*examples)
    except Exception as error:
        why = (str(error).strip() or repr(error)).splitlines()[0]
        raise NotConverted.at(node, f"torch has no decomposition of it into simpler ops here ({why})") from error
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def _get_torch_dtype(x: Var) -> Any:
    import torch

    return getattr(torch, _DTYPE_NAMES[x.dtype]) if x.dtype in _DTYPE_NAMES else MIL_DTYPE_TO_TORCH_DTYPE[x.dtype]


@functools.cache
def _build_decomposition_table() -> dict[Any, Any]:
    """Collect torch's definitions of all ops that have no lowering of their own."""
    from torch._decomp import decomposition_table

    return {op: definition for op, definition in decomposition_table.items()
            if callable(getattr(op, "name", None)) and not _has_lowering(op)}


def _has_lowering(op: Any) -> bool:
    from .probes import is_lowered_by_coremltools
    from .registry import collect_patch_statuses

    kind = unify_inplace_and_functional(sanitize_op_kind(op.name()))
    ours = next((finding.patch.ops[kind] for finding in collect_patch_statuses() if kind in finding.patch.ops), None)
    return is_lowered_by_coremltools(kind) if ours is None else ours is not lower_by_decomposition


def _convert_graph(context: Any, graph: Any, tensors: list[Var]) -> Any:
    """Convert the graph's nodes in the context; return the Var (or list of Vars) that it returns."""
    import torch
    from coremltools.converters.mil.frontend.torch.internal_graph import InternalTorchIRNode
    from coremltools.converters.mil.frontend.torch.torch_op_registry import _TORCH_OPS_REGISTRY

    prefix = make_prefix(context, "decomposed")
    places = iter(tensors)
    for fx_node in graph.graph.nodes:
        plain = fx_node.name
        fx_node.name = prefix + plain
        if fx_node.op == "placeholder":
            context.add(next(places), torch_name=fx_node.name)
        elif fx_node.op == "get_attr":
            value = getattr(graph, fx_node.target)
            context.add(mb.const(val=_to_numpy(value if torch.is_tensor(value) else torch.tensor(value))),
                        torch_name=fx_node.name)
        elif fx_node.op == "call_function":
            with _use_export_frontend(context):
                simpler = InternalTorchIRNode.from_exir_node(fx_node)
                _TORCH_OPS_REGISTRY.get_func(simpler.kind)(context, simpler)
        else:
            returned = fx_node.args[0]
            return [context[one.name] for one in returned] if isinstance(returned, list | tuple) else \
                context[returned.name]
    raise AssertionError("a traced graph ends with its output")


def _to_numpy(value: Any) -> Any:
    array = value.detach().numpy()
    return array.astype({"f": np.float32, "i": np.int32, "u": np.int32}.get(array.dtype.kind, array.dtype))


@contextmanager
def _use_export_frontend(context: Any) -> Iterator[None]:
    """Switch the context to the export frontend: the lowerings then read arguments as torch.export writes them."""
    frontend = context.frontend
    context.frontend = TorchFrontend.TORCHEXPORT
    try:
        yield
    finally:
        context.frontend = frontend


def _add_results(context: Any, node: Any, results: Any) -> None:
    if not isinstance(results, list):
        context.add(name_result(results, node), torch_name=node.name)
    elif context.frontend == TorchFrontend.TORCHSCRIPT and len(node.outputs) == len(results):
        for name, result in zip(node.outputs, results, strict=True):
            context.add(result, torch_name=name)
    else:
        context.add(results if context.frontend == TorchFrontend.TORCHSCRIPT else tuple(results), torch_name=node.name)
