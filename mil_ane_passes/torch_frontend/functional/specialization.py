"""Specialization: fits a scripted module's graph to the module and its inputs.

A script reads `self.stride` as an attribute, and contains both branches of `if x.dim() == 2`. For a conversion the
attributes, the defaults of inputs, the ranks and most sizes are constants, so the branch is known. The user's module is
not changed: only the graph, a copy, is; parameters and buffers remain reads of attributes.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from coremltools.converters.mil.frontend.torch.utils import NUM_TO_TORCH_DTYPE
from coremltools.converters.mil.mil import types

from ..errors import NotConverted
from .attributes import get_attribute_path, hoist_attributes
from .emitter import Emitter, read_constant
from .list_folding import CHANGING_OPS, fold_lists, fold_tuples

__all__ = ["specialize_graph", "use_input_types"]

_DEPTH, _MAX_DEPTH = -1, 200
"The key of the depth among what is known of values, and the most ops through which a rank or dtype is followed."
_MAX_ROUNDS = 1000
"The most rounds of simplification: folding one branch may make the condition of another one constant."
_MAX_STEPS = 10_000
"The most steps of a `while` that are counted."
_log = logging.getLogger("mil_ane_passes")
_PLAIN_TYPES = (bool, int, float, str, type(None))
_user_inputs: ContextVar[Sequence[Any] | None] = ContextVar("mil_ane_passes_inputs", default=None)


@contextmanager
def use_input_types(inputs: Sequence[Any] | None) -> Iterator[None]:
    """Set the user's input types for `specialize_graph`, in the order of the module's inputs, inside the `with`."""
    token = _user_inputs.set(inputs)
    try:
        yield
    finally:
        _user_inputs.reset(token)


def specialize_graph(graph: Any, module: Any, parameters: dict[str, Any]) -> None:
    """Rewrite `graph` (inlined, a copy) of a TorchScript module in place.

    A trace without scripted parts loses only ops that no result needs. `parameters`, the module's tensors by the names
    of their reads in the graph, is kept up to date.
    """
    import torch

    hoist_attributes(graph)  # coremltools lets one branch read what only another branch fetched
    _apply_input_defaults(graph, module)
    _fold_attributes(graph, module)
    _expand_tensor_lists(graph, module, parameters)
    _rewrite_convolution_modes(graph)
    for node in graph.findAllNodes("aten::warn", True):
        node.destroy()
    fold_tuples(graph)
    torch._C._jit_pass_dce(graph)  # coremltools has no value for the second result of a pool that no op reads
    if any(graph.findAllNodes(kind, True) for kind in ("prim::If", "prim::Loop", "prim::DictConstruct")) or any(
            next(node.inputs()).type().kind() == "ListType" for kind in (*CHANGING_OPS, *_LIST_MAKING)
            for node in graph.findAllNodes(kind, True)):
        for node in graph.findAllNodes("prim::GetAttr", True):
            tensor = parameters.get(node.output().debugName())
            if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
                node.output().setType(torch._C.TensorType.create_from_tensor(tensor.detach()))
        _fold_known_branches(graph)
        _rewrite_list_arithmetic(graph)
        read = {node.output().debugName() for node in graph.findAllNodes("prim::GetAttr", True)}
        for name in parameters.keys() - read:
            del parameters[name]


def _rewrite_list_arithmetic(graph: Any) -> None:
    """Give comparisons of lists of integers an op of their own: coremltools compares each element as of tensors.

    Raises NotConverted for sums and products of lists that are not known, which coremltools computes as of tensors.
    """
    for kind in ("aten::eq", "aten::ne"):
        for node in graph.findAllNodes(kind, True):
            inputs = list(node.inputs())
            if all(map(_is_integer_list, inputs)):
                made = graph.create(f"aten::_{kind.removeprefix('aten::')}_lists", inputs, 1)
                made.insertBefore(node)
                made.copyMetadata(node)
                made.output().setType(node.output().type())
                node.output().replaceAllUsesWith(made.output())
                node.destroy()
    for kind in ("aten::add", "aten::add_", "aten::mul"):
        for node in graph.findAllNodes(kind, True):
            if _is_integer_list(node.output()):
                raise NotConverted.at(node, "joins or repeats a list of numbers that are not known",
                                      "write the list with all of its elements")


def _is_integer_list(value: Any) -> bool:
    return bool(value.type().kind() == "ListType" and value.type().getElementType().kind() == "IntType")


def _fold_known_branches(graph: Any) -> None:
    traced = _erase_traced_sizes(graph)
    _set_input_sizes(graph)
    _repeat_until_unchanged(graph, _propagate_and_simplify)
    for value in _iterate_values(graph):
        if value.unique() in traced:
            value.setType(traced[value.unique()])


def _repeat_until_unchanged(graph: Any, simplify: Callable[[Any], None]) -> None:
    before = ""
    for _ in range(_MAX_ROUNDS):
        if (now := str(graph)) == before:
            break
        before = now
        simplify(graph)


def _propagate_and_simplify(graph: Any) -> None:
    """Propagate what is known of types, and fold what it decides; torch's propagation takes most of the time."""
    import torch

    try:
        torch._C._jit_pass_propagate_shapes_on_graph(graph)
    except RuntimeError as error:  # torch's own analysis asserts that lists of some kinds do not occur
        _log.debug("ranks and sizes are not propagated: %s", error)
    for kind in _LIKE_FIRST:
        for node in graph.findAllNodes(kind, True):
            next(node.outputs()).setType(next(node.inputs()).type())
    for kind in _RESHAPING_IN_PLACE:
        for node in graph.findAllNodes(kind, True):
            next(node.inputs()).setType(torch._C.TensorType.get())
    _repeat_until_unchanged(graph, _simplify_once)


def _simplify_once(graph: Any) -> None:
    import torch

    fold_lists(graph)
    torch._C._jit_pass_peephole(graph, False)
    torch._C._jit_pass_dce(graph)
    _inline_known_branches(graph)
    _fold_dtypes(graph)
    _fold_ranks(graph)
    _fold_scalars(graph)
    _count_loop_steps(graph)
    torch._C._jit_pass_constant_loop_unrolling(graph)
    torch._C._jit_pass_dce(graph)


def _fold_ranks(graph: Any) -> None:
    """Replace `x.dim()` of known rank: torch does not propagate the rank of a view whose sizes are computed.

    `x.shape` from which another list is made, as `x.shape[1:]`, becomes a list of its sizes.
    """
    known: dict[int, Any] = {}
    for node in graph.findAllNodes("aten::dim", True):
        rank = _infer_once(_infer_rank, next(node.inputs()), known)
        if rank is not None:
            with graph.insert_point_guard(node):
                node.output().replaceAllUsesWith(graph.insertConstant(rank))
    for node in graph.findAllNodes("aten::size", True):
        readers = [use.user.kind() for use in node.output().uses()]
        if _is_integer_list(node.output()) and not CHANGING_OPS.union(_LIST_MAKING).isdisjoint(readers):
            rank = _infer_once(_infer_rank, next(node.inputs()), known)
            if rank is not None:
                _list_sizes(graph, node, rank)


def _list_sizes(graph: Any, node: Any, rank: int) -> None:
    """Replace `x.shape` by a list of `x.size(0)`, `x.size(1)`, ..."""
    emit = Emitter(graph)
    emit.at(node, node)
    held = next(node.inputs())
    built = emit.op("prim::ListConstruct", *(emit.size(held, axis) for axis in range(rank)), like=node.output())
    node.output().replaceAllUsesWith(built)


def _infer_once(infer: Callable[[Any, dict[int, Any]], Any], value: Any, known: dict[int, Any]) -> Any:
    """Return what `infer` finds out about a value, from `known` if it was asked before.

    None while it is asked, and behind `_MAX_DEPTH` ops, whose number is in `known`, too.
    """
    depth = known.setdefault(_DEPTH, 0)
    if value.unique() not in known and depth < _MAX_DEPTH:
        known.update({value.unique(): None, _DEPTH: depth + 1})
        known[value.unique()] = infer(value, known)
        known[_DEPTH] = depth
    return known.get(value.unique())


def _infer_rank(value: Any, known: dict[int, Any]) -> int | None:
    """Return the rank of a tensor of a script; None if it is unknown."""
    import torch

    node, kind = value.node(), value.node().kind().removeprefix("aten::").rstrip("_")
    if any(use.user.kind() in _RESHAPING_IN_PLACE for use in value.uses()):
        return None
    found = value.type().dim() if isinstance(value.type(), torch._C.TensorType) else None
    if found is not None:
        return int(found)
    given = list(node.inputs())
    if kind in ("view", "reshape"):
        listed = given[1].node()
        is_fixed = listed.kind() == "prim::ListConstruct" and all(
            use.user.kind() in ("aten::view", "aten::reshape") for use in given[1].uses())
        return len(list(listed.inputs())) if is_fixed else None
    is_attention = node.kind() in _LIKE_FIRST and value.unique() == next(node.outputs()).unique()
    if is_attention or kind in _KEEPING_RANK and (kind != "linear" or given[1].type().dim() == 2):
        rank: int | None = _infer_once(_infer_rank, given[0], known)
        return rank
    if kind in ("add", "sub", "mul", "div"):
        ranks = [_infer_once(_infer_rank, each, known) if isinstance(each.type(), torch._C.TensorType) else 0
                 for each in given[:2]]
        return None if None in ranks else max(rank for rank in ranks if rank is not None)
    return None


def _fold_dtypes(graph: Any) -> None:
    """Replace queries of dtypes that are known: torch's own propagation knows few, and none of masks."""
    known: dict[int, Any] = {}
    for kind in ("prim::dtype", "aten::is_floating_point"):
        for node in graph.findAllNodes(kind, True):
            dtype = _infer_once(_infer_dtype, next(node.inputs()), known)
            if dtype is not None:
                with graph.insert_point_guard(node):
                    node.output().replaceAllUsesWith(graph.insertConstant(
                        dtype if kind == "prim::dtype" else dtype.is_floating_point))


def _infer_dtype(value: Any, known: dict[int, Any]) -> Any:
    """Return the torch dtype of a tensor of a script; None if it is unknown."""
    import torch

    node, kind = value.node(), value.node().kind().removeprefix("aten::").rstrip("_")
    found = value.type().dtype() if isinstance(value.type(), torch._C.TensorType) else None
    if found is not None:
        return found
    if node.kind().startswith("aten::") and node.kind().endswith("_") and not node.kind().endswith("__"):
        return _infer_once(_infer_dtype, next(node.inputs()), known)  # in place
    if kind in _COMPARISONS:
        return torch.bool
    if kind == "prim::If":
        place = [each.unique() for each in node.outputs()].index(value.unique())
        first, second = (_infer_once(_infer_dtype, list(block.outputs())[place], known) for block in node.blocks())
        return first if first == second else None
    if kind in ("where", "cat", "stack"):
        joined = list(node.inputs())[1:] if kind == "where" else list(next(node.inputs()).node().inputs())
        dtypes = {_infer_once(_infer_dtype, each, known) for each in joined}
        return dtypes.pop() if len(dtypes) == 1 else None
    if kind in ("add", "sub", "mul", "div"):
        operands = list(node.inputs())[:2]
        first, second = (_infer_once(_infer_dtype, each, known) if isinstance(each.type(), torch._C.TensorType)
                         else None for each in operands)
        is_number = not isinstance(operands[1].type(), torch._C.TensorType)
        if kind == "div" and (first is None or not first.is_floating_point):
            return None  # integers are divided to floats
        return first if first == second or (is_number and first is not None and first.is_floating_point) else None
    is_attention = node.kind() in _LIKE_FIRST and value.unique() == next(node.outputs()).unique()
    if not is_attention and kind not in (*_CREATING, *_KEEPING_DTYPE, *_KEEPING_FLOATS):
        return None
    names = [argument.name for argument in torch._C.parse_schema(node.schema()).arguments]
    given = list(node.inputs())
    if "dtype" in names:
        asked = given[names.index("dtype")]
        if asked.node().kind() != "prim::Constant":
            return None
        if asked.toIValue() is not None:
            return NUM_TO_TORCH_DTYPE.get(asked.toIValue())
    if kind in _KEEPING_FLOATS or is_attention:
        given_dtype = _infer_once(_infer_dtype, given[0], known)
        return given_dtype if given_dtype is not None and given_dtype.is_floating_point else None
    if kind == "to" and "other" in names:
        return _infer_once(_infer_dtype, given[names.index("other")], known)
    if kind in _KEEPING_DTYPE:
        return _infer_once(_infer_dtype, given[0], known)
    filled = read_constant(given[names.index("fill_value")]) if "fill_value" in names else 0.0
    kinds = {bool: torch.bool, int: torch.int64, float: torch.get_default_dtype()}
    return kinds.get(type(filled))


def _fold_scalars(graph: Any) -> None:
    """Replace arithmetic and comparisons of constant numbers, texts and None by their results.

    torch's own constant propagation fails an assertion where a branch that is never executed has a loop.
    """
    for kind, answer in _TORCH_STATE_VALUES.items():
        for node in graph.findAllNodes(kind, True):
            with graph.insert_point_guard(node):
                node.output().replaceAllUsesWith(graph.insertConstant(answer))
            node.destroy()
    for node in graph.findAllNodes("prim::Uninitialized", True):  # no executed op reads it
        unread = _UNREAD_VALUES.get(node.output().type().kind())
        if unread is not None:
            with graph.insert_point_guard(node):
                node.output().replaceAllUsesWith(graph.insertConstant(unread))
            node.destroy()
    for kind, function in _FOLDABLE_OPS.items():
        for node in graph.findAllNodes(kind, True):
            inputs = list(node.inputs())
            if not all(value.node().kind() == "prim::Constant" for value in inputs):
                continue
            values = [value.toIValue() for value in inputs]
            plain = all(isinstance(value, _PLAIN_TYPES) or kind in _FOLDABLE_LISTS and _is_plain_value(value)
                        for value in values)
            if plain and not (kind in _DIVISIONS and values[1] == 0):
                with graph.insert_point_guard(node):
                    node.output().replaceAllUsesWith(graph.insertConstant(function(*values)))


_TORCH_STATE_VALUES = {
    "prim::is_nested": False,
    "aten::is_autocast_enabled": False,
    "aten::is_autocast_cpu_enabled": False,
    "aten::is_grad_enabled": False,
    "aten::is_scripting": True,
    "prim::type": "cpu",
    "prim::layout": 0,  # strided
}
"Queries of a script about torch, a device or a layout, and their values in a conversion."
_UNREAD_VALUES = {"IntType": 0, "FloatType": 0.0, "BoolType": False}
"Values for numbers that `break` and early returns leave uninitialized, as branches of an `if` give values of one type."
_LIST_MAKING = ("aten::add", "aten::mul", "aten::slice", "aten::list", "aten::copy")
"Ops that make another list, if their first operand is a list."
_LIKE_FIRST = ("aten::_transformer_encoder_layer_fwd", "aten::_native_multi_head_attention")
"Ops for which torch propagates no sizes: their outputs have the type of their first input."
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge", "logical_not", "logical_and", "logical_or", "isnan", "isinf")
_CREATING = ("ones", "zeros", "full", "eye")
_KEEPING_DTYPE = ("triu", "tril", "masked_fill", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones",
                  "new_full", "clone", "contiguous", "view", "reshape", "flatten", "unflatten", "transpose", "permute",
                  "t", "unsqueeze", "squeeze", "expand", "repeat", "select", "slice", "flip", "roll", "detach", "to",
                  "index_select", "gather", "index", "narrow", "expand_as", "view_as", "movedim", "pad")
"Ops whose result has the dtype of the first operand, unless they have an argument `dtype`; `to` one of `other`."
_KEEPING_FLOATS = ("layer_norm", "dropout", "linear", "relu", "gelu", "batch_norm", "silu", "sigmoid", "tanh", "matmul",
                   "bmm", "scaled_dot_product_attention", "exp", "sqrt", "neg", "abs", "softmax", "log_softmax", "sum",
                   "mean", "cumsum", "log", "rsqrt", "sin", "cos", "square", "leaky_relu", "conv1d", "conv2d", "conv3d",
                   "group_norm", "instance_norm", "max_pool1d", "max_pool2d", "avg_pool1d", "avg_pool2d",
                   "adaptive_avg_pool1d", "adaptive_avg_pool2d")
"Ops of floats whose result has the dtype of the first operand, unless they have an argument `dtype`."
_KEEPING_RANK = ("layer_norm", "dropout", "linear", "relu", "gelu", "softmax", "transpose", "permute", "contiguous",
                 "clone", "to", "batch_norm", "silu", "sigmoid", "tanh")
"Ops whose result has the rank of the first operand."
_RESHAPING_IN_PLACE = frozenset(f"aten::{name}" for name in (
    "unsqueeze_", "squeeze_", "t_", "transpose_", "swapaxes_", "swapdims_", "resize_", "resize_as_", "as_strided_",
    "set_"))
"Ops that give a tensor another shape in place."
_FOLDABLE_LISTS = ("aten::eq", "aten::ne", "aten::len")
"Ops that are folded for lists of constants, too: `x.size() == y.size()`."
_DIVISIONS = ("aten::floordiv", "aten::__round_to_zero_floordiv", "aten::remainder")
_FOLDABLE_OPS: dict[str, Callable[..., Any]] = {
    "aten::eq": operator.eq, "aten::ne": operator.ne, "aten::lt": operator.lt, "aten::le": operator.le,
    "aten::gt": operator.gt, "aten::ge": operator.ge, "aten::__not__": operator.not_, "aten::Bool": bool,
    "aten::__and__": operator.and_, "aten::__or__": operator.or_, "aten::__is__": operator.is_,
    "aten::__isnot__": operator.is_not, "aten::add": operator.add, "aten::sub": operator.sub, "aten::mul": operator.mul,
    "aten::floordiv": operator.floordiv, "aten::remainder": operator.mod, "aten::neg": operator.neg,
    "prim::min": min, "prim::max": max, "aten::len": len,
    "aten::__round_to_zero_floordiv": lambda a, b: abs(a) // abs(b) * (-1 if (a < 0) != (b < 0) else 1),
    "aten::__derive_index": lambda i, start, step: start + i * step,
    "aten::__range_length": lambda start, stop, step: len(range(start, stop, step)),
}


def _count_loop_steps(graph: Any) -> None:
    """Replace the condition of each `while` that depends only on constant numbers by the number of its steps."""
    for node in graph.findAllNodes("prim::Loop", True):
        limit, started = (read_constant(value) for value in list(node.inputs())[:2])
        body = next(node.blocks())
        condition = next(body.outputs())
        if not isinstance(limit, int) or not isinstance(started, bool) or read_constant(condition) is True:
            continue
        steps = _simulate_loop(node, body, min(limit, _MAX_STEPS)) if started else 0
        if steps is None:
            continue
        with graph.insert_point_guard(node):
            count, always = graph.insertConstant(steps), graph.insertConstant(True)
        node.replaceInput(0, count)
        node.replaceInput(1, always)
        body.returnNode().replaceInput(0, always)


def _simulate_loop(node: Any, body: Any, limit: int) -> int | None:
    """Count the steps of a loop whose condition depends only on constants; None if it does not, or is longer."""
    carried = list(body.inputs())
    values = {value.unique(): read_constant(begun) for value, begun in zip(carried[1:], list(node.inputs())[2:])}
    computed = list(body.outputs())

    def compute(value: Any, known: dict[int, Any]) -> Any:
        if value.unique() in known:
            return known[value.unique()]
        found = read_constant(value)
        function = _FOLDABLE_OPS.get(value.node().kind())
        if found is None and function is not None and value.node().owningBlock() == body:
            inputs = [compute(each, known) for each in value.node().inputs()]
            fails = value.node().kind() in _DIVISIONS and inputs[-1] == 0
            if not fails and all(isinstance(each, int | float) for each in inputs):
                found = function(*inputs)
        known[value.unique()] = found
        return found

    for step in range(limit):
        known = {**values, carried[0].unique(): step}
        goes_on = compute(computed[0], known)
        if not isinstance(goes_on, bool):
            return None
        if not goes_on:
            return step + 1
        values = {value.unique(): compute(made, known) for value, made in zip(carried[1:], computed[1:])}
    return None


def _inline_known_branches(graph: Any) -> None:
    """Replace each `if` with a constant condition by the branch that is executed."""
    for node in reversed(graph.findAllNodes("prim::If", True)):  # nested ones first
        known = read_constant(next(node.inputs()))
        if not isinstance(known, bool):
            continue
        taken = list(node.blocks())[0 if known else 1]
        for inner in list(taken.nodes()):
            inner.moveBefore(node)
        for output, value in zip(list(node.outputs()), list(taken.outputs()), strict=True):
            output.replaceAllUsesWith(value)
        node.destroy()


def _apply_input_defaults(graph: Any, module: Any) -> None:
    """Replace the last inputs, for which the user gave no type, by their defaults in `forward`."""
    inputs = _user_inputs.get()
    arguments = list(module.forward.schema.arguments)[1:] if hasattr(module.forward, "schema") else []
    values = list(graph.inputs())[1:]
    if inputs is None or len(arguments) != len(values) or len(inputs) >= len(values):
        return
    unset = range(len(inputs), len(values))
    if not all(arguments[place].has_default_value() for place in unset):
        return
    for place in reversed(unset):
        default = arguments[place].default_value
        if not isinstance(default, _PLAIN_TYPES):
            return
        first = next(graph.nodes())
        with graph.insert_point_guard(first):
            values[place].replaceAllUsesWith(graph.insertConstant(default))
        graph.eraseInput(place + 1)


def _fold_attributes(graph: Any, module: Any) -> None:
    """Replace attributes that are never assigned by constants: numbers, texts, None, and lists and tuples of those."""
    assigned = {(*get_attribute_path(next(node.inputs())), node.s("name"))
                for node in graph.findAllNodes("prim::SetAttr", True)}
    for node in graph.findAllNodes("prim::GetAttr", True):
        path = get_attribute_path(node.output())
        value: Any = module
        for name in path:
            value = getattr(value, name, value)
        if path not in assigned and _is_plain_value(value):
            node.output().replaceAllUsesWith(_insert_literal(graph, node, value, node.output().type()))


def _expand_tensor_lists(graph: Any, module: Any, parameters: dict[str, Any]) -> None:
    """Replace each attribute that is a list of the module's tensors, such as an LSTM's weights, by a list of reads."""
    import torch

    names = {id(tensor): name for name, tensor in (*module.named_parameters(remove_duplicate=False),
                                                   *module.named_buffers(remove_duplicate=False))}
    known = {node.output().debugName(): node.output() for node in graph.findAllNodes("prim::GetAttr", True)}
    for node in graph.findAllNodes("prim::GetAttr", True):
        value: Any = module
        for name in get_attribute_path(node.output()):
            value = getattr(value, name, value)
        if not isinstance(value, list) or not value or not all(id(item) in names for item in value):
            continue
        for item in value:
            if names[id(item)] not in known:
                read = graph.create("prim::GetAttr", [next(graph.inputs())], 1).s_("name", names[id(item)])
                read.insertBefore(next(graph.nodes()))
                read.output().setType(torch._C.TensorType.get())
                read.output().setDebugName(names[id(item)])
                known[names[id(item)]] = read.output()
                parameters[names[id(item)]] = item
        built = graph.create("prim::ListConstruct", [known[names[id(item)]] for item in value], 1)
        built.insertBefore(node)
        built.output().setType(node.output().type())
        node.output().replaceAllUsesWith(built.output())


def _rewrite_convolution_modes(graph: Any) -> None:
    """Replace `conv2d(padding="same")` of a script by the op that a trace contains for it."""
    for kind in ("aten::conv1d", "aten::conv2d", "aten::conv3d"):
        for node in graph.findAllNodes(kind, True):
            if list(node.inputs())[4].type().kind() == "StringType":
                built = graph.create("aten::_convolution_mode", list(node.inputs()), 1)
                built.insertBefore(node)
                built.copyMetadata(node)
                built.output().setType(node.output().type())
                node.output().replaceAllUsesWith(built.output())
                node.destroy()


def _is_plain_value(value: Any) -> bool:
    return isinstance(value, _PLAIN_TYPES) or (isinstance(value, list | tuple) and all(map(_is_plain_value, value)))


def _insert_literal(graph: Any, before: Any, value: Any, kind: Any) -> Any:
    if isinstance(value, _PLAIN_TYPES):
        with graph.insert_point_guard(before):
            return graph.insertConstant(value)
    inner = kind.getElementType() if kind.kind() == "OptionalType" else kind
    kinds = [inner.getElementType()] * len(value) if inner.kind() == "ListType" else list(inner.elements())
    items = [_insert_literal(graph, before, item, each) for item, each in zip(value, kinds, strict=True)]
    built = graph.create("prim::ListConstruct" if inner.kind() == "ListType" else "prim::TupleConstruct", items, 1)
    built.insertBefore(before)
    built.output().setType(inner)
    return built.output()


def _set_input_sizes(graph: Any) -> None:
    """Set the rank of the graph's inputs, and the sizes that are the same in every call."""
    import torch

    inputs = _user_inputs.get() or ()
    values = list(graph.inputs())[1:]
    if len(inputs) != len(values):
        return
    for value, spec in zip(values, inputs, strict=True):
        shape, kind = getattr(getattr(spec, "shape", None), "shape", None), value.type()
        if kind.kind() == "OptionalType":  # a value that the user declared is not None
            kind = kind.getElementType()
        if kind.kind() == "TensorType" and isinstance(shape, list | tuple):
            known = kind.with_sizes([size if isinstance(size, int) else None for size in shape])
            dtype = spec.dtype  # without a dtype coremltools assumes float where no trace recorded one
            is_float = kind.dtype() is None if dtype is None else (
                isinstance(dtype, type) and dtype in (types.fp16, types.fp32))
            value.setType(known.with_dtype(torch.float32) if is_float else known)


def _erase_traced_sizes(graph: Any) -> dict[int, Any]:
    """Erase the sizes that a trace recorded, which are those of the example, and keep the ranks.

    Returns the types before that, by value.
    """
    traced = {}
    for value in _iterate_values(graph):
        kind = value.type()
        if kind.kind() == "TensorType" and kind.dim() is not None and value.node().kind() != "prim::GetAttr":
            traced[value.unique()] = kind
            value.setType(kind.with_sizes([None] * kind.dim()))
    return traced


def _iterate_values(block: Any) -> Iterator[Any]:
    yield from block.inputs()
    for node in block.nodes():
        yield from node.outputs()
        for inner in node.blocks():
            yield from _iterate_values(inner)
