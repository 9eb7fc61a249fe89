"""Complex tensors: their arithmetic, shapes and slices, `view_as_complex`, `polar`, `angle`, `1j` and similar ops.

coremltools supports a few complex ops and passes complex values to lowerings that are written for real ones. Here a
complex value is a pair of real tensors. Ops that move elements or are linear with real coefficients are lowered twice,
once for each part; products are lowered as real products; `abs`, `angle`, `exp`, ... by their formulas. |z| is m times
the root of 1 + (n / m)² with m the larger and n the smaller of the parts, so that it overflows fp16 only where |z|
does. A quotient by a complex number divides by |z|², which fp16 represents for 2^-7 < |z| < 255 only. All other ops
raise NotConverted with op, module and line.

ML Programs have no complex inputs and outputs: use `torch.view_as_real` of them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from coremltools.converters.mil.frontend.torch.torch_op_registry import _TORCH_OPS_REGISTRY
from coremltools.converters.mil.frontend.torch.utils import (
    TorchFrontend,
    sanitize_op_kind,
    unify_inplace_and_functional,
)
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var, types

from ..complex_values import ComplexLiteral, is_complex, is_zero, join_complex, map_nested, split_complex, zeros_like
from ..contract import Lowering, Patch
from ..errors import NotConverted
from ..functional import COMPLEX_CONSTANT
from ..lowering import (
    add_result,
    bind_arguments,
    cast_to,
    has_static_shape,
    name_result,
    promote_operands,
    to_python,
    to_tensor,
)
from .aliases import SYNONYMS

PATCH = Patch(
    code="TORCH156",
    title="most complex ops, such as `view_as_complex`, `polar`, `angle`, `1j`, are not implemented or fail",
    upstream=("https://github.com/apple/coremltools/issues/2130",),
)
_GRAPH_MODULE = "coremltools.converters.mil.frontend.torch.internal_graph"

_CONTAINER_KINDS = frozenset(("tupleconstruct", "listconstruct", "listunpack", "tupleunpack", "__getitem__", "getitem"))
_SHAPE_READING_KINDS = frozenset((
    "size", "dim", "ndimension", "numel", "shape", "sym_size", "sym_numel", "len", "device", "is_floating_point"))
_COMPLEX_DTYPES = (8, 9, 10)  # torch's numbers of complex32, complex64, complex128
#: the largest exponent of a complex number: a power is lowered to repeated products
_MAX_POWER = 8

_PARTWISE_KINDS: dict[str, tuple[int, ...]] = dict.fromkeys((
    "view", "reshape", "_unsafe_view", "view_copy", "_reshape_copy", "reshape_as", "view_as", "flatten", "unflatten",
    "ravel", "squeeze", "unsqueeze", "transpose", "t", "permute", "movedim", "moveaxis", "swapaxes", "swapdims",
    "numpy_t",
    "mt", "expand", "expand_as", "expand_copy", "broadcast_to", "repeat", "tile", "repeat_interleave", "split",
    "split_with_sizes", "split_copy", "split_with_sizes_copy", "chunk", "constantchunk", "tensor_split", "unbind",
    "select", "select_copy", "slice", "slice_copy", "narrow", "index_select", "index", "gather", "take_along_dim",
    "flip",
    "fliplr", "flipud", "rot90", "roll", "diagonal", "diagonal_copy", "diag", "diag_embed", "tril", "triu", "unfold",
    "neg",
    "clone", "contiguous", "detach", "alias", "positive", "lift_fresh", "lift_fresh_copy", "identity",
    "dropout", "feature_dropout",
    "sum", "mean", "cumsum", "diff", "trace", "zeros_like", "empty_like", "new_zeros", "new_empty", "noopimplicit",
), (0,)) | {
    "cat": (0,), "concat": (0,), "stack": (0,), "hstack": (0,), "vstack": (0,), "dstack": (0,),
    "where": (1, 2), "masked_fill": (0, 2), "slice_scatter": (0, 1), "select_scatter": (0, 1),
    "diagonal_scatter": (0, 1), "index_put": (0, 2), "index_copy": (0, 3), "pad": (0, 3),
    "constant_pad_nd": (0, 2), "copy": (0, 1), "lerp": (0, 1),
    "fill": (0, 1), "full_like": (0, 1),
}
"""Ops that act on the real and the imaginary part separately, and their arguments that may be complex."""

_FILLING_KINDS = {"zeros": 1, "ones": 1, "empty": 1, "new_zeros": 2, "new_ones": 2, "new_empty": 2, "zeros_like": 1,
                  "ones_like": 1, "empty_like": 1, "full": 2, "new_full": 3}
"""Ops that fill a tensor with one real number, and the place of their dtype."""

_PRODUCT_KINDS: dict[str, tuple[int, int]] = dict.fromkeys(
    ("mul", "matmul", "mm", "bmm", "mv", "dot", "inner", "outer", "ger", "kron", "linear", "__matmul__"), (0, 1))


@PATCH.wrap_lowerings
def lower_complex(lowering: Lowering, context: Any, node: Any) -> None:
    """Lower a node with complex arguments by its meaning for complex numbers; every other node is lowered as before."""
    kind = _get_base_kind(node)
    inputs = [_resolve_input(context, item) for item in node.inputs]
    named_given = {name: _resolve_input(context, item) for name, item in (node.kwinputs or {}).items()}
    call = SimpleNamespace(lowering=lowering, context=context, node=node, kind=kind, given=inputs, named=named_given)
    if kind in PATCH.ops or kind in _FOURIER_KINDS or kind == "_assert_tensor_metadata":  # before `to` in exports
        lowering(context, node)
    elif kind in _CONVERSION_KINDS and _is_complex_target(inputs, named_given):
        context.add(join_complex(*split_complex(inputs[0])), node.name)
    elif kind in _FILLING_KINDS and _is_complex_dtype([*inputs[_FILLING_KINDS[kind]:][:1], named_given.get("dtype")]):
        _lower_filled(call)
    elif not any(_has_complex(value) for value in [*inputs, *named_given.values()]):
        lowering(context, node)
    else:
        _lower_by_kind(call)
    _refuse_complex_result(context, node)


def _lower_by_kind(call: Any) -> None:
    if call.kind in _CONTAINER_KINDS:
        _lower_container(call)
    elif call.kind in _SHAPE_READING_KINDS:
        _add_result(call, _run_lowering(call, "shape", [map_nested(_get_real_part, value) for value in call.given]))
    elif call.kind in _FORMULAS:
        _add_result(call, _FORMULAS[call.kind](call))
    elif call.kind in _PRODUCT_KINDS or call.kind == "einsum":
        _add_result(call, _lower_product(call))
    elif call.kind in _PARTWISE_KINDS:
        _add_result(call, _lower_by_parts(call))
    else:
        raise _make_unsupported_error(call.node)


def _make_unsupported_error(node: Any) -> NotConverted:
    return NotConverted.at(node, "has no lowering for complex numbers",
                           "compute with torch.view_as_real(...) there, or with .real and .imag")


def _get_base_kind(node: Any) -> str:
    """Return the op kind without overload, in-place underscore and second names."""
    kind = str(unify_inplace_and_functional(sanitize_op_kind(node.kind))).partition(".")[0]
    return SYNONYMS.get(kind, kind)


def _resolve_input(context: Any, item: Any) -> Any:
    """Return the value of an argument: the context's value of its name, or the literal."""
    if isinstance(item, list | tuple):
        return type(item)(_resolve_input(context, one) for one in item)
    return context[item] if isinstance(item, str) and item in context else item


def _has_complex(value: Any) -> bool:
    return any(map(_has_complex, value)) if isinstance(value, list | tuple) else is_complex(value)


def _refuse_complex_result(context: Any, node: Any) -> None:
    """Raise NotConverted where a complex value leaves the program, a branch or a loop."""
    returned = set(getattr(node.parent, "outputs", None) or getattr(getattr(context, "_torch_graph", None), "outputs",
                                                                   None) or ())
    for name in {*node.outputs, node.name} & returned:
        if name in context and _has_complex(context[name]):
            raise NotConverted.at(node, "returns complex numbers, which Core ML does not have",
                                  "return torch.view_as_real(...) of it, or .real and .imag")


def _add_result(call: Any, result: Any) -> None:
    if isinstance(result, list | tuple):
        if call.context.frontend == TorchFrontend.TORCHSCRIPT and len(call.node.outputs) == len(result) > 1:
            for name, item in zip(call.node.outputs, result, strict=True):
                call.context.add(item, name)
            return
    elif not is_complex(result) and isinstance(result, Var) and result.val is None:
        result = mb.identity(x=result, name=call.node.name)
    call.context.add(result, call.node.name)


def _lower_container(call: Any) -> None:
    """Keep lists and tuples of complex values as Python lists during conversion."""
    if call.kind.endswith("construct"):
        call.context.add(list(call.given), call.node.name)
    elif call.kind.endswith("unpack"):
        for name, item in zip(call.node.outputs, call.given[0], strict=True):
            call.context.add(item, name)
    else:
        call.context.add(call.given[0][int(to_python(call.given[1], call.node, "index"))], call.node.name)


# Lowering a node with other arguments

def _run_lowering(call: Any, label: str, given: Sequence[Any], named_given: Any = None, kind: str = "") -> Any:
    """Lower a copy of the node with these arguments, as an op of `kind` if one is passed, and return the result."""
    clone = copy.copy(call.node)
    clone.name = f"{call.node.name}_{label}"
    clone.outputs = [f"{name}_{label}" for name in call.node.outputs]
    clone.inputs = [_add_input(call.context, value, f"{clone.name}_input{place}") for place, value in enumerate(given)]
    entered = {name: _add_input(call.context, value, f"{clone.name}_{name}")
               for name, value in (call.named if named_given is None else named_given).items()}
    clone.kwinputs = entered or None
    lowering = call.lowering
    if kind:
        clone.kind, lowering = kind, _TORCH_OPS_REGISTRY.get_func(kind)
    lowering(call.context, clone)
    if call.context.frontend == TorchFrontend.TORCHSCRIPT and len(clone.outputs) > 1:
        return [call.context[name] for name in clone.outputs]
    return call.context[clone.name]


def _add_input(context: Any, value: Any, name: str) -> Any:
    """Add the value to the context and return its name there; return a literal unchanged."""
    if isinstance(value, tuple) and context.frontend != TorchFrontend.TORCHSCRIPT:
        return tuple(_add_input(context, item, f"{name}_{place}") for place, item in enumerate(value))
    if isinstance(value, Var | list | tuple) or (value is None and context.frontend == TorchFrontend.TORCHSCRIPT):
        context.add(value, name)
        return name
    return value


def _get_real_part(value: Any) -> Any:
    return split_complex(value)[0] if is_complex(value) else value


def _get_imag_part(value: Any) -> Any:
    """Return the imaginary part: zeros for a real number or tensor; other values are unchanged."""
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, Var) and (value.val is None or value.rank or types.is_complex(value.dtype)):
        return split_complex(value)[1]
    return split_complex(value)[1] if is_complex(value) else to_tensor(0.0) if isinstance(value, Var) else 0.0


def _lower_by_parts(call: Any) -> Any:
    places = _PARTWISE_KINDS[call.kind]

    def run_part(label: str, part: Callable[[Any], Any]) -> Any:
        inputs = [map_nested(part, value) if place in places else value for place, value in enumerate(call.given)]
        if any(map(_has_complex, inputs)):
            raise _make_unsupported_error(call.node)
        return _run_lowering(
            call,
            label,
            inputs,
            {
                name: map_nested(part, value) if name in ("value", "other", "src") else value
                for name, value in call.named.items()
            },
        )

    real, imag = run_part("real", _get_real_part), run_part("imag", _get_imag_part)
    if isinstance(real, list | tuple):
        return type(real)(map(join_complex, real, imag))
    return join_complex(real, imag)


def _lower_product(call: Any) -> Any:
    """Lower a product of complex numbers to a sum of real products: (a + bi)(c + di) = ac - bd + (ad + bc)i.

    Products by a constant 0 are omitted.
    """
    nested = call.kind == "einsum"
    first, second = (call.given[1] if nested else call.given)[:2]
    if nested and len(call.given[1]) > 2:
        call = _multiply_all_but_two(call)
        first, second = call.given[1]
    elif not nested and len(call.given) > 2 and call.given[2] is not None:
        raise NotConverted.at(call.node, "has more than two complex operands", "multiply two at a time")
    (a, b), (c, d) = split_complex(first), split_complex(second)

    def build_product(x: Var, y: Var, label: str) -> Var:
        operands = [call.given[0], type(call.given[1])((x, y)), *call.given[2:]] if nested else [x, y, *call.given[2:]]
        return cast_to(_run_lowering(call, label, operands), types.fp32)

    def mul_parts(x: Var, y: Var, label: str) -> Var | None:
        return None if is_zero(x) or is_zero(y) else build_product(x, y, label)

    ac, bd, ad, bc = mul_parts(a, c, "ac"), mul_parts(b, d, "bd"), mul_parts(a, d, "ad"), mul_parts(b, c, "bc")
    real, imag = _subtract_optional(ac, bd), _add_optional(ad, bc)
    if real is None and imag is None:  # a product by 0
        real = build_product(a, c, "zero")
    if real is None or imag is None:
        nothing = zeros_like(real if imag is None else imag)
        real, imag = nothing if real is None else real, nothing if imag is None else imag
    return join_complex(real, imag)


def _multiply_all_but_two(call: Any) -> Any:
    """Multiply the operands of an einsum two at a time until two are left; return the einsum of these."""
    equation = str(to_python(call.given[0], call.node, "equation")).replace(" ", "")
    operands, sources, result = list(call.given[1]), *equation.partition("->")[::2]
    terms = sources.split(",")
    if "->" not in equation or "." in equation:
        raise NotConverted.at(call.node, "has more than two complex operands and an equation with an ellipsis or "
                                         "without '->'", "multiply two at a time")
    step, write = SimpleNamespace(**vars(call)), to_tensor if isinstance(call.given[0], Var) else str
    for number in range(len(operands) - 2):
        needed = {*"".join(terms[2:]), *result}
        product = "".join(letter for letter in dict.fromkeys(terms[0] + terms[1]) if letter in needed)
        step.given = [write(f"{terms[0]},{terms[1]}->{product}"), type(call.given[1])(operands[:2]), *call.given[2:3]]
        step.node = copy.copy(call.node)
        step.node.name = f"{call.node.name}_step{number}"
        terms[:2], operands[:2] = [product], [_lower_product(step)]
    step.given = [write(f"{','.join(terms)}->{result}"), type(call.given[1])(operands), *call.given[2:3]]
    step.node = call.node
    return step


def _add_optional(x: Var | None, y: Var | None) -> Var | None:
    return y if x is None else x if y is None else mb.add(x=x, y=y)


def _subtract_optional(x: Var | None, y: Var | None) -> Var | None:
    return x if y is None else mb.mul(x=y, y=np.float32(-1)) if x is None else mb.sub(x=x, y=y)


# Formulas

def _lower_sum(call: Any) -> Var:
    """Lower add(self, other, alpha=1), sub and rsub: the sums of the parts, both of the shape of the result."""
    real = _run_lowering(call, "real", [_get_real_part(value) for value in call.given])
    imag = _run_lowering(
        call, "imag", [_get_imag_part(value) if place < 2 else value for place, value in enumerate(call.given)]
    )
    return join_complex(real, imag)


def _lower_quotient(call: Any) -> Var:
    """Lower div(self, other, rounding_mode=None) and true_divide."""
    inputs = bind_arguments(call.context, call.node, "self other rounding_mode=None")
    if inputs.rounding_mode is not None:
        raise _make_unsupported_error(call.node)
    (a, b), x = split_complex(inputs.self), inputs.other
    if not is_complex(x):
        divisor = to_tensor(x, types.fp32)
        return join_complex(
            mb.real_div(x=cast_to(a, types.fp32), y=divisor), mb.real_div(x=cast_to(b, types.fp32), y=divisor)
        )
    return _multiply_complex((a, b), _invert_complex(*split_complex(x)))


def _invert_complex(real: Var, imag: Var) -> tuple[Var, Var]:
    """Compute 1 / z = conj(z) / |z|²."""
    size = mb.add(x=mb.square(x=real), y=mb.square(x=imag))
    return mb.real_div(x=real, y=size), mb.real_div(x=mb.mul(x=imag, y=np.float32(-1)), y=size)


def _multiply_complex(one: tuple[Var, Var], other: tuple[Var, Var]) -> Var:
    """Multiply two complex tensors elementwise."""
    a, b, c, d = (cast_to(part, types.fp32) for part in (*one, *other))
    if is_zero(b):
        return join_complex(mb.mul(x=a, y=c), mb.mul(x=a, y=d))
    return join_complex(mb.sub(x=mb.mul(x=a, y=c), y=mb.mul(x=b, y=d)), mb.add(x=mb.mul(x=a, y=d), y=mb.mul(x=b, y=c)))


def _lower_power(call: Any) -> Var:
    """Lower pow(self, exponent) with a small whole exponent, square(self) and reciprocal(self)."""
    inputs = bind_arguments(call.context, call.node, "self exponent=2")
    exponent = -1 if call.kind == "reciprocal" else to_python(inputs.exponent, call.node, "exponent")
    if is_complex(exponent) or not is_complex(inputs.self) or exponent != int(exponent) \
            or not 1 <= abs(exponent) <= _MAX_POWER:
        raise NotConverted.at(call.node, "raises complex numbers to a power other than an integer from -8 to 8",
                              "use torch.polar(z.abs() ** p, z.angle() * p)")
    base = split_complex(inputs.self) if exponent > 0 else _invert_complex(*split_complex(inputs.self))
    result = join_complex(*base)
    for _ in range(abs(int(exponent)) - 1):
        result = _multiply_complex(split_complex(result), base)
    return result


def _lower_exp(call: Any) -> Var:
    """Lower exp(self): e^a (cos b + i sin b)."""
    real, imag = split_complex(call.given[0])
    cosine, sine = mb.cos(x=imag), mb.sin(x=imag)
    if is_zero(real):
        return join_complex(cosine, sine)
    size = mb.exp(x=real)
    return join_complex(mb.mul(x=size, y=cosine), mb.mul(x=size, y=sine))


def _lower_log(call: Any) -> Var:
    """Lower log(self): log |z| + i angle."""
    return join_complex(
        mb.log(x=compute_magnitude(*split_complex(call.given[0])), epsilon=0.0),
        compute_angle(*split_complex(call.given[0])),
    )


def _lower_sgn(call: Any) -> Var:
    """Lower sgn(self): z / |z|, 0 for 0."""
    real, imag = split_complex(call.given[0])
    size = compute_magnitude(real, imag)
    size = mb.add(x=size, y=cast_to(mb.equal(x=size, y=np.float32(0)), types.fp32))
    return join_complex(mb.real_div(x=real, y=size), mb.real_div(x=imag, y=size))


def _lower_equality(call: Any) -> Var:
    """Lower eq(self, other) and ne(self, other)."""
    same = [_run_lowering(call, label, [part(value) for value in call.given[:2]], kind="eq")
            for label, part in (("real", _get_real_part), ("imag", _get_imag_part))]
    both = mb.logical_and(x=same[0], y=same[1])
    return both if call.kind == "eq" else mb.logical_not(x=both)


def _lower_conversion(call: Any) -> Var:
    """Lower to(self, dtype): the real part for a real dtype, as in torch; a complex dtype changes nothing."""
    if not _has_real_target(call.given, call.named):
        return call.given[0]
    return _run_lowering(call, "real", [_get_real_part(value) for value in call.given])


def compute_magnitude(real: Var, imag: Var) -> Var:
    """Compute |z| without squares that overflow."""
    x, y = mb.abs(x=real), mb.abs(x=imag)
    larger, smaller = mb.maximum(x=x, y=y), mb.minimum(x=x, y=y)
    nothing = cast_to(mb.equal(x=larger, y=np.float32(0)), types.fp32)
    ratio = mb.real_div(x=smaller, y=mb.add(x=larger, y=nothing))
    return mb.mul(x=larger, y=mb.sqrt(x=mb.add(x=mb.square(x=ratio), y=np.float32(1))))


def compute_angle(real: Var, imag: Var) -> Var:
    """Compute the angle of z from -pi to pi: pi for negative real numbers, 0 for 0.

    Quotients stay from 0 to 1.
    """
    x, y = mb.abs(x=real), mb.abs(x=imag)
    larger, smaller = mb.maximum(x=x, y=y), mb.minimum(x=x, y=y)
    nothing = cast_to(mb.equal(x=larger, y=np.float32(0)), types.fp32)
    angle = mb.atan(x=mb.real_div(x=smaller, y=mb.add(x=larger, y=nothing)))
    angle = mb.select(cond=mb.greater(x=y, y=x), a=mb.sub(x=np.float32(math.pi / 2), y=angle), b=angle)
    angle = mb.select(cond=mb.less(x=real, y=np.float32(0)), a=mb.sub(x=np.float32(math.pi), y=angle), b=angle)
    return mb.select(cond=mb.less(x=imag, y=np.float32(0)), a=mb.mul(x=angle, y=np.float32(-1)), b=angle)


_CONVERSION_KINDS = frozenset(("to", "_to_copy", "type_as"))


def _has_real_target(given: Sequence[Any], named_given: dict[str, Any]) -> bool:
    """Return whether the conversion names a dtype, or a tensor whose dtype to use, that is not complex."""
    if _is_complex_target(given, named_given):
        return False
    if named_given.get("dtype") is not None:
        return True
    second = given[1] if len(given) > 1 else None
    return isinstance(second, Var) and (second.val is None or not isinstance(second.val, str | bool | np.bool_)) \
        or (isinstance(second, int) and not isinstance(second, bool))


def _is_complex_target(given: Sequence[Any], named_given: dict[str, Any]) -> bool:
    targets = [*given[1:2], *map_nested(lambda item: item, list(named_given.get("dtype") or ()))]
    return any(map(is_complex, targets)) or _is_complex_dtype(targets)


def _is_complex_dtype(numbers: Sequence[Any]) -> bool:
    """Return whether one of torch's numbers of dtypes, some of which may be None, is that of a complex one."""
    values = [each.val if isinstance(each, Var) and each.rank == 0 and each.val is not None else each
              for number in numbers for each in (number if isinstance(number, list | tuple) else [number])]
    return any(isinstance(value, int | np.integer) and not isinstance(value, bool) and int(value) in _COMPLEX_DTYPES
               for value in values)


def _lower_filled(call: Any) -> None:
    """Fill the real part, and the imaginary part with 0."""
    place = _FILLING_KINDS[call.kind]
    given = [_get_real_part(value) if number != place else None for number, value in enumerate(call.given)]
    named = {name: value for name, value in call.named.items() if name != "dtype"}
    real = _run_lowering(call, "real", given, named)
    _add_result(call, join_complex(real, zeros_like(cast_to(real, types.fp32))))


_FORMULAS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("add", "sub", "rsub", "__add__"), _lower_sum),
    **dict.fromkeys(("div", "true_divide"), _lower_quotient),
    **dict.fromkeys(("pow", "square", "reciprocal"), _lower_power),
    **dict.fromkeys(("eq", "ne"), _lower_equality),
    **dict.fromkeys(_CONVERSION_KINDS, _lower_conversion),
    "exp": _lower_exp, "log": _lower_log, "sgn": _lower_sgn,
    "abs": lambda call: compute_magnitude(*split_complex(call.given[0])),
    "is_complex": lambda call: mb.const(val=True),
}
_FOURIER_KINDS = frozenset(
    (
        "stft",
        "istft",
        *(f"fft_{inverse}{real}fft{axes}" for inverse in ("", "i") for real in ("", "r") for axes in ("", "2", "n")),
    )
)
"""Kinds that have patches of their own, which accept complex values."""


# Ops that make complex values of real ones, or the reverse

@PATCH.op(COMPLEX_CONSTANT)
def complex_constant(context: Any, node: Any) -> None:
    """Lower a complex constant of the graph, such as 1j."""
    context.add(join_complex(to_tensor(node.attr["real"]), to_tensor(node.attr["imag"])), node.name)


@PATCH.op("complex")
def lower_complex_pair(context: Any, node: Any) -> None:
    """Lower complex(real, imag)."""
    inputs = bind_arguments(context, node, "real imag")
    context.add(join_complex(*_broadcast_pair(inputs.real, inputs.imag)), node.name)


@PATCH.op("view_as_complex", "view_as_complex_copy")
def view_as_complex(context: Any, node: Any) -> None:
    """Lower view_as_complex(self): the last axis holds the real and the imaginary part."""
    x = bind_arguments(context, node, "self").self
    if x.rank == 0 or x.shape[-1] != 2:
        raise NotConverted.at(node, f"views a tensor of shape {list(x.shape)} as complex numbers",
                              "the last axis must have 2 elements")
    real, imag = mb.split(x=cast_to(x, types.fp32), num_splits=2, axis=-1)
    context.add(join_complex(mb.squeeze(x=real, axes=[-1]), mb.squeeze(x=imag, axes=[-1])), node.name)


@PATCH.op("view_as_real", "view_as_real_copy")
def view_as_real(context: Any, node: Any) -> None:
    """Lower view_as_real(self)."""
    x = bind_arguments(context, node, "self").self
    if not is_complex(x):
        raise NotConverted.at(node, "is called on real numbers",
                              "call it on complex ones; a model accepts those as torch.view_as_real(...)")
    add_result(context, node, mb.stack(values=split_complex(x), axis=-1, name=node.name))


@PATCH.op("polar")
def polar(context: Any, node: Any) -> None:
    """Lower polar(abs, angle)."""
    inputs = bind_arguments(context, node, "abs angle")
    size, angle = (cast_to(x, types.fp32) for x in (inputs.abs, inputs.angle))
    context.add(join_complex(mb.mul(x=size, y=mb.cos(x=angle)), mb.mul(x=size, y=mb.sin(x=angle))), node.name)


@PATCH.op("angle")
def angle(context: Any, node: Any) -> None:
    """Lower angle(self): 0 or pi for real numbers."""
    x = bind_arguments(context, node, "self").self
    if is_complex(x):
        add_result(context, node, name_result(compute_angle(*split_complex(x)), node))
        return
    x = cast_to(x, types.fp32)
    negative = cast_to(mb.less(x=x, y=np.float32(0)), types.fp32)
    add_result(context, node, mb.mul(x=negative, y=np.float32(math.pi), name=node.name))


@PATCH.op("real")
def real(context: Any, node: Any) -> None:
    """Lower real(self): a real tensor as it is."""
    x = bind_arguments(context, node, "self").self
    add_result(context, node, mb.identity(x=split_complex(x)[0] if is_complex(x) else x, name=node.name))


@PATCH.op("imag")
def imag(context: Any, node: Any) -> None:
    """Lower imag(self)."""
    x = bind_arguments(context, node, "self").self
    if not is_complex(x):
        raise NotConverted.at(node, "reads the imaginary part of real numbers",
                              "call it on complex ones; a model accepts those as torch.view_as_real(...)")
    add_result(context, node, mb.identity(x=split_complex(x)[1], name=node.name))


@PATCH.op("_conj", "conj", "conj_physical", "_conj_physical", "resolve_conj", "resolve_neg", "_neg_view")
def conjugate(context: Any, node: Any) -> None:
    """Lower conj(self): the imaginary part with the other sign; a real tensor as it is."""
    x = bind_arguments(context, node, "self").self
    kind = _get_base_kind(node)
    if not is_complex(x):
        x = mb.mul(x=x, y=types.nptype_from_builtin(x.dtype)(-1)) if kind == "_neg_view" else x
        add_result(context, node, mb.identity(x=x, name=node.name))
        return
    first, second = split_complex(x)
    if "conj" in kind and "resolve" not in kind:
        second = mb.mul(x=second, y=np.float32(-1))
    context.add(join_complex(first, second), node.name)


def _broadcast_pair(x: Any, y: Any) -> tuple[Var, Var]:
    """Expand both parts to the shape to which they broadcast."""
    first, second = promote_operands(x, y)
    if first.shape == second.shape or not (has_static_shape(first) and has_static_shape(second)):
        return first, second
    nothing = np.zeros(np.broadcast_shapes(first.shape, second.shape), dtype=np.float32)
    return mb.add(x=cast_to(first, types.fp32), y=nothing), mb.add(x=cast_to(second, types.fp32), y=nothing)


@PATCH.replace_function(_GRAPH_MODULE, "InternalTorchIRNode.from_exir_node")
def from_exir_node(host: Callable[..., Any], cls: Any, node: Any) -> Any:
    """Read complex literals and dtypes of exported programs, for which coremltools raises."""
    if not any(map(_is_complex_literal, _collect_literals([node.args, node.kwargs]))):
        return host(cls, node)
    text = SimpleNamespace(target=node.target, name=node.name, meta=node.meta, args=_to_readable(node.args),
                           kwargs={name: _to_readable(value) for name, value in node.kwargs.items()})
    return host(cls, text)


def _collect_literals(value: Any) -> list[Any]:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else None
    return [value] if items is None else [literal for item in items for literal in _collect_literals(item)]


def _is_complex_literal(value: Any) -> bool:
    return isinstance(value, complex) or getattr(value, "is_complex", None) is True


def _to_readable(value: Any) -> Any:
    """Convert the literals to a form that coremltools reads: a complex dtype to torch's number of complex64."""
    def convert_item(item: Any) -> Any:
        return (
            ComplexLiteral(item)
            if isinstance(item, complex)
            else _COMPLEX_DTYPES[1]
            if _is_complex_literal(item)
            else item
        )

    return map_nested(convert_item, value)
