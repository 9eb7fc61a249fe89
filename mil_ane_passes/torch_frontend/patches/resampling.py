"""Interpolation without a Core ML op: bicubic (also antialiased), trilinear, and nearest-exact.

Each is linear in the image and equal along every row, so with constant sizes it is one constant matrix for each axis:
two matrix products for an image. torch computes the matrix from the unit vectors, so the coefficients (a = -0.75), the
treatment of the border, `align_corners` and the scales are torch's own. An antialiased bilinear resize, which
coremltools treats as a plain one, is such a product where it makes the image smaller. Nearest-exact selects elements:
one constant gather for each axis. Nearest and linear resizes by a scale that rounds a size (9 to 15 by 1.7) are treated
alike: torch goes by the scale, where Core ML's ops go by the ratio of the sizes. Where that may matter and the size is
flexible, the neighbors of each element are gathered at indices computed in integer arithmetic; a resize for which that
is impossible (a scale of 0.29) is rejected. Resizes of flexible sizes to a fixed size, or of any size to the size of
another value, are gathers by computed indices; linear ones also use the op `resize`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.frontend.torch import ops
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Operation, Var, types
from coremltools.converters.mil.mil.block import is_current_opset_version_compatible_with

from ...ir.query import get_function, is_symbolic
from ...passes.severity import Severity
from ..contract import Patch
from ..errors import NotConverted
from ..lowering import (
    add_result,
    bind_arguments,
    find_written_literal,
    has_static_shape,
    is_constant,
    name_result,
    to_python,
)
from ..probes import find_fault

PATCH = Patch(code="TORCH136", severity=Severity.WRONG,
              title="bicubic, trilinear and nearest-exact resizes are not implemented; others by scales that round a "
                    "size are miscompiled or rejected",
              upstream=(
        "https://github.com/apple/coremltools/issues/1747",
        "https://github.com/apple/coremltools/pull/2818",
    ))

_DIALECT_MODULE = "coremltools.converters.mil.frontend.torch.dialect_ops"
_LINEAR_KINDS = ("upsample_bicubic2d", "_upsample_bicubic2d_aa", "_upsample_bilinear2d_aa", "upsample_trilinear3d")
_SCALED_KINDS = ("upsample_nearest1d", "upsample_nearest2d", "upsample_linear1d", "upsample_bilinear2d")
"Kinds that coremltools has ops for, if no size is rounded."
_CORNER_KINDS = ("upsample_linear1d", "upsample_bilinear2d")
_FIRST_INPUTS = {2: "input output_size ", 3: "input output_size align_corners "}
"The inputs before the scales, by their number."
_MAX_DENOMINATOR = 64
"The largest denominator of a scale by which indices are computed with integers."
_MAX_EXTENT = 1 << 14
"The largest size at which a scale is compared with its fraction; products of indices stay below 2**31."
_BLOCK = 1024
"Elements of a block, for indices that int32 products would overflow."
_CUBIC_WEIGHTS = np.array([[0, -0.75, 1.5, -0.75], [1, 0, -2.25, 1.25], [0, 0.75, 1.5, -1.25], [0, 0, -0.75, 0.75]],
                          np.float32)
"""torch's cubic convolution (a = -0.75): a row for each of the four elements around a source position, with the
coefficients of 1, t, t**2 and t**3 of its weight, where t is the fraction from the second element to the third."""
_NEAREST_KINDS = (
    "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d",
    "upsample_nearest3d",
)


@PATCH.probe
def probe() -> str | None:
    import torch

    image, resize = torch.arange(81.0).reshape(1, 1, 9, 9), torch.nn.functional.interpolate
    return find_fault(lambda x: resize(x, scale_factor=1.7), image) or find_fault(
        lambda x: resize(x, size=(4, 4), mode="bilinear", antialias=True), image)


@PATCH.op(*_LINEAR_KINDS, *(f"{kind}.vec" for kind in _LINEAR_KINDS))
def lower_linear_resize(context: Any, node: Any) -> None:
    """Lower bicubic2d(input, output_size, align_corners, scales...), .vec(..., scale_factors)."""
    kind = node.kind.removesuffix(".vec")
    inputs, axes = bind_arguments(context, node, "input output_size align_corners"), _get_spatial_axes(kind)
    x, corners = inputs.input, bool(to_python(inputs.align_corners, node, "align_corners"))
    if kind == "_upsample_bilinear2d_aa" and not corners and _is_enlargement(context, node, x, axes):
        from coremltools.converters.mil.frontend.torch.torch_op_registry import _TORCH_OPS_REGISTRY

        _TORCH_OPS_REGISTRY.name_to_func_mapping[node.kind](context, node)
        return
    if kind == "upsample_bicubic2d" and not corners and (
            made := _resize_by_fractions(context, node, x, axes)) is not None:
        add_result(context, node, name_result(made, node))
        return
    if kind == "upsample_bicubic2d" and (any(map(is_symbolic, x.shape[2:])) or _is_size_computed(context, node)):
        if (computed := _read_computed_sizes(context, node, axes, 3)) is not None:
            add_result(context, node, name_result(_resize_cubic(x, computed, corners), node))
            return
    for axis, (size, scale) in zip(axes, _read_target_sizes(context, node, x, axes, 3), strict=True):
        x = _multiply_along_axis(x, _make_resize_matrix(kind, x.shape[axis], size, scale, corners), axis)
    add_result(context, node, name_result(x, node))


@PATCH.op(*_NEAREST_KINDS, *(f"{kind}.vec" for kind in _NEAREST_KINDS))
def lower_nearest_resize(context: Any, node: Any) -> None:
    """Lower nearest_exact2d(input, output_size, scales...), .vec(input, output_size, scale_factors)."""
    kind = node.kind.removesuffix(".vec")
    x, axes = bind_arguments(context, node, "input").input, _get_spatial_axes(kind)
    for axis, (size, scale) in zip(axes, _read_target_sizes(context, node, x, axes, 2), strict=True):
        picked = _make_resize_matrix(kind, x.shape[axis], size, scale, None).argmax(axis=1)
        x = mb.gather(x=x, indices=picked.astype(np.int32), axis=axis)
    add_result(context, node, name_result(x, node))


@PATCH.op(*_SCALED_KINDS, *(f"{kind}.vec" for kind in _SCALED_KINDS))
def lower_scaled_resize(context: Any, node: Any) -> None:
    """Lower nearest and bilinear by non-integer scales, as `interpolate(scale_factor=1.7)` passes them.

    coremltools selects by the ratio of the sizes instead, which differs where a size is rounded, and rejects bilinear.
    """
    kind = node.kind.removesuffix(".vec")
    x, axes = bind_arguments(context, node, "input").input, _get_spatial_axes(kind)
    corners = kind in _CORNER_KINDS and bool(to_python(
        bind_arguments(context, node, "input output_size align_corners").align_corners, node, "align_corners"))
    if corners or any(map(is_symbolic, x.shape[axes.start:])) or _is_size_computed(context, node):
        if (made := None if corners else _resize_by_fractions(context, node, x, axes)) is not None:
            add_result(context, node, name_result(made, node))
            return
        if kind not in _CORNER_KINDS:
            _check_flexible_scales(context, node, x, axes)
        try:
            getattr(ops, kind)(context, node)  # sizes alone decide, or are not known
        except (AssertionError, TypeError, ValueError):  # a scale of a flexible size, that is no number
            if (made := _resize_to_size(context, node, x, axes, corners)) is None:
                raise
            add_result(context, node, name_result(made, node))
        return
    targets = _read_target_sizes(context, node, x, axes, 3 if kind in _CORNER_KINDS else 2)
    if all(scale is None or size == x.shape[axis] * scale for axis, (size, scale) in zip(axes, targets, strict=True)):
        getattr(ops, kind)(context, node)
    elif kind in _CORNER_KINDS:
        lower_linear_resize(context, node)
    else:
        lower_nearest_resize(context, node)


@PATCH.replace_function(_DIALECT_MODULE, "torch_upsample_bilinear.type_inference")
@PATCH.replace_function(_DIALECT_MODULE, "torch_upsample_nearest_neighbor.type_inference")
def infer_upsample_type(host: Callable[..., Any], op: Operation) -> Any:
    """Infer the type of a resize with the sizes that are known: a sequence is an image of width 1, then squeezed."""
    made = host(op)
    shape = list(made.get_shape())
    for axis, size in ((2, op.output_height), (3, op.output_width)):
        shape[axis] = shape[axis] if size.val is None else int(size.val)
    return types.tensor(made.get_primitive(), shape)


@PATCH.replace_function("coremltools.converters.mil.frontend.torch.ssa_passes.torch_upsample_to_core_upsample",
                        "_try_replace_with_core_upsample")
def replace_upsample(host: Callable[..., bool], op: Operation) -> bool:
    """Replace a resize to computed sizes.

    coremltools replaces those by a scale. Others (`interpolate(x, size=y.shape[2:])`) become a `resize`, which needs
    iOS17, or lookups of the nearest elements.
    """
    sizes = ((op.output_height, 2), (op.output_width, 3))
    try:  # coremltools takes the constant of every product to be a scale of the image
        if not any(_is_product_of_other_size(size, op.x.shape[axis]) for size, axis in sizes) and host(op):
            return True
    except (AssertionError, AttributeError):  # a size that no op of a scale computes
        pass
    linear = op.op_type == "torch_upsample_bilinear"
    if linear and get_function(op).opset_version < ct.target.iOS17:
        return False
    with mb.set_before_op(op):
        made = _resize_linear(op.x, [size for size, _ in sizes], bool(op.align_corners.val)) if linear else (
            _resize_nearest(op.x, [size for size, _ in sizes]))
        made = mb.identity(x=made, name=op.name)
    op.enclosing_block.replace_uses_of_var_after_op(anchor_op=op, old_var=op.outputs[0], new_var=made)
    op.enclosing_block.remove_ops([op])
    return True


def _is_product_of_other_size(size: Var, extent: Any) -> bool:
    """Return whether `size` is the product of a constant and a value that is not known to be `extent`."""
    while size.op is not None and size.op.op_type in ("cast", "floor"):
        size = size.op.x
    if size.val is not None or size.op is None or size.op.op_type != "mul":
        return False
    factor = size.op.x
    while factor.op is not None and factor.op.op_type == "cast":
        factor = factor.op.x
    return bool(factor.sym_val is None or np.ndim(factor.sym_val) or factor.sym_val != extent)


def _resize_by_fractions(context: Any, node: Any, x: Var, axes: range) -> Var | None:
    """Build a resize along flexible axes by a scale that Core ML has no op for; None for others.

    torch makes floor(extent * p / q) elements of a scale of p / q, and takes the source of element i from the scale:
    floor(i * q / p), or ((2i + 1) * q - p) / 2p for a linear or bicubic resize, whose remainder selects the weights.
    The result is None also for a scale of which torch's floats give other sizes or sources.
    """
    kind = node.kind.removesuffix(".vec")
    nearest, cubic = kind.startswith("upsample_nearest"), kind == "upsample_bicubic2d"
    scales = _read_scales(context, node, axes, 2 if nearest else 3)
    if scales is None or None in scales or not any(
            is_symbolic(x.shape[axis]) and (cubic or not scale.is_integer() and not (nearest and scale == 0.5))
            for axis, scale in zip(axes, scales, strict=True)):
        return None
    fractions = [fraction for fraction in map(_find_exact_fraction, scales) if fraction is not None]
    if len(fractions) < len(scales):
        return None
    if not nearest and not cubic and all(fraction == Fraction(1, 2) for fraction in fractions):
        pooled: Var = mb.avg_pool(x=x, kernel_sizes=[2] * len(axes), strides=[2] * len(axes), pad_type="valid")
        return pooled
    for axis, fraction in zip(axes, fractions, strict=True):
        p, q = fraction.as_integer_ratio()
        if fraction == 1:
            continue
        extent = mb.gather(x=mb.shape(x=x), indices=axis, axis=0)
        size = mb.floor_div(x=mb.mul(x=extent, y=np.int32(p)), y=np.int32(q))
        places = mb.range_1d(start=np.int32(0), end=size, step=np.int32(1))
        if nearest:
            x = mb.gather(x=x, indices=mb.floor_div(x=mb.mul(x=places, y=np.int32(q)), y=np.int32(p)), axis=axis)
        else:
            x = _interpolate_along_axis(x, axis, places, extent, fraction, cubic)
    return x


def _interpolate_along_axis(x: Var, axis: int, places: Var, extent: Var, fraction: Fraction, cubic: bool) -> Var:
    """Build the sum of the two or four neighbors of each source, with weights that its remainder selects."""
    p, q = fraction.as_integer_ratio()
    t = np.arange(2 * p) / (2 * p)
    weights = list(_CUBIC_WEIGHTS @ np.stack([t ** 0, t, t ** 2, t ** 3])) if cubic else [1 - t, t]
    source = mb.add(x=mb.mul(x=places, y=np.int32(2 * q)), y=np.int32(q + p))  # one element further, so not negative
    if not cubic:
        source = mb.maximum(x=source, y=np.int32(2 * p))
    after, rest = mb.floor_div(x=source, y=np.int32(2 * p)), mb.mod(x=source, y=np.int32(2 * p))
    return _sum_neighbors(x, axis, after, extent, [
        mb.gather(x=table.astype(np.float32), indices=rest, axis=0) for table in weights])


def _resize_cubic(x: Var, sizes: list[Var], corners: bool) -> Var:
    """Build a bicubic resize of the rows and columns of `x` to computed sizes.

    The source of element i is (2i + 1) * extent / (2 * size) - 1 / 2, or i * (extent - 1) / (size - 1) for aligned
    corners, in integers. Products stay below 2^31 for sizes up to 2^15.
    """
    for axis, size in enumerate(sizes, start=2):
        extent = mb.gather(x=mb.shape(x=x), indices=axis, axis=0)
        places = mb.range_1d(start=np.int32(0), end=size, step=np.int32(1))
        if corners:
            numerator = mb.mul(x=places, y=mb.sub(x=extent, y=np.int32(1)))
            denominator = mb.maximum(x=mb.sub(x=size, y=np.int32(1)), y=np.int32(1))
        else:
            doubled = mb.add(x=mb.mul(x=places, y=np.int32(2)), y=np.int32(1))
            numerator = mb.sub(x=mb.mul(x=doubled, y=extent), y=size)
            denominator = mb.mul(x=size, y=np.int32(2))
        source = mb.add(x=numerator, y=denominator)  # one element further, so not negative
        after, rest = mb.floor_div(x=source, y=denominator), mb.mod(x=source, y=denominator)
        t = mb.real_div(x=mb.cast(x=rest, dtype="fp32"), y=mb.cast(x=denominator, dtype="fp32"))
        square = mb.mul(x=t, y=t)
        powers = mb.stack(values=[t, square, mb.mul(x=square, y=t)], axis=0)
        weights = mb.add(x=mb.matmul(x=_CUBIC_WEIGHTS[:, 1:], y=powers), y=_CUBIC_WEIGHTS[:, :1])
        x = _sum_neighbors(x, axis, after, extent, [
            mb.squeeze(x=weight, axes=[0]) for weight in mb.split(x=weights, num_splits=4, axis=0)])
    return x


def _sum_neighbors(x: Var, axis: int, after: Var, extent: Var, weights: Sequence[Var]) -> Var:
    """Build the weighted sum of the two or four neighbors of each source position along an axis.

    `after` has the index of the first neighbor after each position. Indices outside are clamped to the border.
    """
    last, total = mb.sub(x=extent, y=np.int32(1)), None
    for number, weight in enumerate(weights, start=-(len(weights) // 2)):
        place = mb.minimum(x=mb.maximum(x=mb.add(x=after, y=np.int32(number)), y=np.int32(0)), y=last)
        if axis < x.rank - 1:
            weight = mb.expand_dims(x=weight, axes=list(range(1, x.rank - axis)))
        part = mb.mul(x=mb.gather(x=x, indices=place, axis=axis), y=weight)
        total = part if total is None else mb.add(x=total, y=part)
    return total


def _find_exact_fraction(scale: float) -> Fraction | None:
    """Return the fraction with which integers give the sizes and indices that torch's floats give, or None."""
    fraction = Fraction(scale).limit_denominator(_MAX_DENOMINATOR)
    if not fraction or not 1 / _MAX_DENOMINATOR <= scale <= _MAX_DENOMINATOR:
        return None
    p, q = fraction.as_integer_ratio()
    places = np.arange(_MAX_EXTENT)
    is_exact = np.array_equal(np.floor(places * scale), places * p // q) and np.array_equal(
        np.floor(places.astype(np.float32) * np.float32(1 / scale)), places * q // p)
    return fraction if is_exact else None


def _resize_to_size(context: Any, node: Any, x: Var, axes: range, corners: bool) -> Var | None:
    """Build a resize of a flexible image or sequence to the sizes of the node; None if it has scales."""
    linear = node.kind.startswith(_CORNER_KINDS)
    sizes = _read_computed_sizes(context, node, axes, 3 if linear else 2)
    if sizes is None:
        return None
    image = x if len(axes) == 2 else mb.expand_dims(x=x, axes=[3])
    if linear and not is_current_opset_version_compatible_with(ct.target.iOS17) and any(
            size.val is None for size in sizes):
        return None
    sizes += [mb.const(val=np.int32(1))] * (2 - len(axes))
    made = _resize_linear(image, sizes, corners) if linear else _resize_nearest(image, sizes)
    return made if len(axes) == 2 else mb.squeeze(x=made, axes=[3])


def _read_computed_sizes(context: Any, node: Any, axes: range, place: int) -> list[Var] | None:
    """Read the size of each axis as an int32 Var; None if the node has scales, which begin at its input `place`."""
    given = bind_arguments(context, node, _FIRST_INPUTS[place]).output_size
    scales = _read_scales(context, node, axes, place)
    if given is None or scales is not None and any(scale is not None for scale in scales):
        return None
    if isinstance(given, Var):
        given = [mb.gather(x=given, indices=number, axis=0) for number in range(len(axes))]
    return [mb.cast(x=size, dtype="int32") if isinstance(size, Var) else mb.const(val=np.int32(size))
            for size in given]


def _resize_linear(x: Var, sizes: list[Var], corners: bool) -> Var:
    """Build a linear resize of the rows and columns of `x`; one to computed sizes needs iOS17.

    An image of one column, as which coremltools treats a sequence, is resized along its rows alone: the type of the
    result then has the known width, which a later squeeze needs.
    """
    mode = "STRICT_ALIGN_CORNERS" if corners else "UNALIGN_CORNERS"
    if all(size.val is not None for size in sizes):
        result: Var = mb.resize_bilinear(x=x, target_size_height=int(sizes[0].val), sampling_mode=mode,
                                         target_size_width=int(sizes[1].val))
        return result
    known = sizes[1].val is not None and sizes[1].val == x.shape[3]
    if known:
        x, sizes = mb.transpose(x=x, perm=[0, 1, 3, 2]), sizes[:1]
    shape = mb.concat(values=[mb.expand_dims(x=size, axes=[0]) for size in sizes], axis=0)
    made: Var = mb.resize(x=x, shape=shape, resized_dims=np.uint32(len(sizes)), interpolation_mode="LINEAR",
                          sampling_mode=mode)
    return mb.transpose(x=made, perm=[0, 1, 3, 2]) if known else made


def _resize_nearest(x: Var, sizes: list[Var]) -> Var:
    """Select floor(i * extent / size) for each i below `size`, as torch does, along each axis from 2 on.

    With i = 1024 * a + b and extent = size * q + r, all products of integers are below 2^31 for sizes up to 2^20.
    """
    for axis, size in enumerate(sizes, start=2):
        if size.val is not None and size.val == x.shape[axis]:
            continue
        extent = mb.gather(x=mb.shape(x=x), indices=axis, axis=0)
        places = mb.range_1d(start=np.int32(0), end=size, step=np.int32(1))
        blocks, rest = mb.floor_div(x=places, y=_BLOCK), mb.mod(x=places, y=_BLOCK)
        scaled = mb.mul(x=mb.mod(x=extent, y=size), y=_BLOCK)
        inside = mb.add(x=mb.mul(x=blocks, y=mb.mod(x=scaled, y=size)),
                        y=mb.mul(x=rest, y=mb.mod(x=extent, y=size)))
        found = mb.add(x=mb.mul(x=places, y=mb.floor_div(x=extent, y=size)),
                       y=mb.mul(x=blocks, y=mb.floor_div(x=scaled, y=size)))
        x = mb.gather(x=x, indices=mb.add(x=found, y=mb.floor_div(x=inside, y=size)), axis=axis)
    return x


def _is_enlargement(context: Any, node: Any, x: Var, axes: range) -> bool:
    """Return whether no axis becomes smaller, or is scaled by a fraction, which coremltools rejects.

    Without aligned corners the antialiased resize is then equal to the plain one, for which coremltools has an op.
    """
    if has_static_shape(x):
        return all(size >= x.shape[axis] and (scale is None or float(scale).is_integer())
                   for axis, (size, scale) in zip(axes, _read_target_sizes(context, node, x, axes, 3), strict=True))
    if len(node.inputs) != 4:
        return False
    scales = bind_arguments(context, node, "input output_size align_corners scale_factors").scale_factors
    return scales is not None and is_constant(scales) and min(to_python(scales, node, "scale_factors")) >= 1


def _is_size_computed(context: Any, node: Any) -> bool:
    size = bind_arguments(context, node, "input output_size").output_size
    return any(isinstance(each, Var) and not is_constant(each) for each in (
        size if isinstance(size, list | tuple) else [size]))


def _get_spatial_axes(kind: str) -> range:
    return range(2, 2 + int(kind.removesuffix("_aa").removesuffix("d")[-1]))


def _check_flexible_scales(context: Any, node: Any, x: Var, axes: range) -> None:
    """Refuse a nearest resize whose scale and ratio of sizes select other elements at some size.

    floor(i / scale) and floor(i * size / floor(size * scale)) are equal at every size for whole scales and for 0.5
    only: 11 elements by 0.25 are elements 0 and 4 in torch, 0 and 5 by the ratio.
    """
    for axis, scale in zip(axes, _read_scales(context, node, axes, 2) or [], strict=False):
        exact = scale is None or float(scale).is_integer() or scale == 0.5
        if not exact and (is_symbolic(x.shape[axis]) or not float(x.shape[axis] * scale).is_integer()):
            raise NotConverted.at(
                node, f"resizes axis {axis} of an image of flexible size to the nearest elements by {scale:g}, where "
                      f"Core ML's op uses the ratio of the sizes and selects other elements than torch",
                "fix the size, scale by an integer or a fraction such as 0.25, or trace it with "
                "recompute_scale_factor=True")


def _read_target_sizes(context: Any, node: Any, x: Var, axes: range, place: int) -> list[tuple[int, float | None]]:
    """Read the size and the scale of each axis; a scale of None is the ratio of the sizes."""
    scales = _read_scales(context, node, axes, place)
    if any(map(is_symbolic, x.shape[axes.start:])):
        raise NotConverted.at(node, "resizes an image of flexible size",
                              "fix the size, or use a scale_factor without align_corners, or mode='bilinear'")
    sizes = bind_arguments(context, node, _FIRST_INPUTS[place]).output_size
    if sizes is None:
        if scales is None:
            raise NotConverted.at(node, "has neither sizes nor scales")
        sizes = [int(float(x.shape[axis]) * scale) for axis, scale in zip(axes, scales, strict=True)]
    sizes = [int(np.ravel(size)[0]) for size in to_python(sizes, node, "output_size")]
    return list(zip(sizes, scales or [None] * len(axes), strict=True))


def _read_scales(context: Any, node: Any, axes: range, place: int) -> list[Any] | None:
    """Read the scale of each axis as it is written, from input `place` on; None where there is none."""
    names = {1: ["scales"], 2: ["scales_h", "scales_w"], 3: ["scales_d", "scales_h", "scales_w"]}[len(axes)]
    before = _FIRST_INPUTS[place]
    if node.kind.endswith(".vec") or len(node.inputs) + len(node.kwinputs or {}) <= place + (len(axes) > 1):
        scales = bind_arguments(context, node, before + "scale_factors=None").scale_factors
        scales = to_python(scales, node, "scale_factors") if scales is not None else None
    else:
        inputs = bind_arguments(context, node, before + " ".join(f"{name}=None" for name in names))
        scales = [to_python(getattr(inputs, name), node, name) for name in names]
        scales = scales[0] if isinstance(scales[0], list) else scales  # a traced `.vec` of one dimension
    if scales is None:
        return None
    return [scale if scale is None else find_written_literal(float(scale), node) for scale in scales]


def _make_resize_matrix(kind: str, size: int, required: int, scale: float | None, corners: bool | None) -> Any:
    """Make the matrix of a resize along one axis, by resizing unit vectors with torch.

    The unit vectors are along the first axis of the image; the other axes are two pixels wide, not one: an image of one
    pixel is in both memory formats at once, for which the antialiased resize gives wrong results.
    """
    import torch

    others = [2] * (len(_get_spatial_axes(kind)) - 1)
    unit = torch.eye(int(size), dtype=torch.float64).reshape(1, int(size), int(size), *[1] * len(others))
    unit = unit.expand(1, int(size), int(size), *others).contiguous()
    options = [] if corners is None else [corners]
    resized = getattr(torch.ops.aten, kind)(unit, [required, *others], *options, scale, *[None] * len(others))
    return resized.reshape(int(size), required, -1)[..., 0].T.contiguous().numpy().astype(np.float32)


def _multiply_along_axis(x: Var, matrix: Any, axis: int) -> Var:
    """Multiply the matrix by `x` along the axis."""
    if axis == x.rank - 1:
        return mb.matmul(x=x, y=matrix.T.copy().reshape([1] * (x.rank - 2) + list(matrix.T.shape)))
    swapped = list(range(x.rank))
    swapped[axis], swapped[-2] = swapped[-2], swapped[axis]
    moved = x if axis == x.rank - 2 else mb.transpose(x=x, perm=swapped)
    product = mb.matmul(x=matrix.reshape([1] * (x.rank - 2) + list(matrix.shape)), y=moved)
    return product if axis == x.rank - 2 else mb.transpose(x=product, perm=swapped)
