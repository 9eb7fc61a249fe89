"""The work of an op in numbers, from declared types alone, and the time that a chip needs for it.

The model is a roofline with the effects that public measurements show (`latency_parameters.json` names them):

- MACs run at the rate of the chip. Output channels come in blocks of 256 (16 cores x 16), positions in windows of 32.
  Width-3 dense kernels of stride 1 run faster (Winograd) where that was measured. Zeros stored as sparse weights are
  skipped, W8A8 runs faster.
- Weights are streamed as compressed. A kernel of up to 1 MiB stays in the kernel buffers, so that a weight used again
  is not read again. Larger ones are read again for each tile of input activations: positions x channels x 2 / T times.
  A kernel 9 to 15 wide is stored as 2 (k + 1) taps. On some chips a weight share of a core near a multiple of 1 MiB is
  slow (the DMA notch).
- An op takes the longer of both. Elementwise ops, reductions, softmax and movement are charged by elements or bytes.

No weight is read: a program whose weights are placeholders of any size is estimated like any other.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from coremltools.converters.mil.mil import Operation, Var, types

from ..ir.query import get_const_value, get_itemsize, get_type_info, is_compressed, is_const, is_opaque
from ..passes.layout import compute_padded_bytes
from .sizes import Sizes, iterate_inputs

__all__ = ["Chip", "Interface", "Terms", "Work", "compute_terms", "describe_work", "time_call"]

MIB = 1 << 20
KERNEL_BUFFER_BYTES = MIB
"Kernel buffers of all 16 cores (64 KiB each): a weight of up to this size that is used again is not streamed again."
CORES = 16
CHANNEL_BLOCK = 256
"Output channels that all cores compute at a time."
ROW_WINDOW = 32
"Positions that a core computes at a time."
WIDE_KERNEL = 9
"Kernel width from which the compiler stores 2 (k + 1) taps."
NOTCH_BYTES = 16 << 10
"Distance from a multiple of 1 MiB within which the weight share of a core is on the notch."
RESTREAM_OVERLAP = 3.0
"""Exponent of the norm that adds MACs and streaming when weights are read again for each tile: 1 would be no overlap,
infinite a perfect one, as where weights are read once. 2.5 to 4 fit the linears of the M2 Pro equally well."""
ZERO_SKIP_BASE, ZERO_SKIP_SLOPE = 0.1, 1.4
"Share of the MACs' time at a share `kept` of nonzero weights: base + slope x kept, at most 1 (751K sparse.txt)."
UNPACK_FORMATS = ("palette", "int8", "sparse palette")


@dataclass(frozen=True)
class Interface:
    """Costs of one call through one programming interface.

    `floor_us` is the time of the smallest program, of which `hidden_us` overlap with the ANE. The wake-up of the
    calling thread takes `wake_share` of the time on the ANE, up to `wake_cap_us` of it, in addition. Inputs and outputs
    are copied at `io_gbs`.
    """

    floor_us: float
    io_gbs: float
    hidden_us: float = 0.0
    wake_share: float = 0.0
    wake_cap_us: float = 0.0
    measured: bool = True


@dataclass(frozen=True)
class Chip:
    """Parameters of one chip.

    Rates: TFLOP/s of MACs, GB/s of weights (`weight_gbs`) and of movement, 10^9 elements/s of elementwise ops with one
    and two computed operands, softmax. `tile_bytes` is T. `block_waste` is the share of the time of idle lanes that the
    last block of 256 output channels takes; `narrow_waste` if it is the only block, `narrow_row_waste` if the map is
    one row, too. Gains and shares are factors on rates: `winograd`, `int8_gain` (W8A8), `matmul_share` (two
    activations), `unpack_share` (weights that are not fp16), `small_kernel_gain` (streaming of weights up to 1 MiB),
    `notch` a divisor. Outputs of at least `engine_elements` use all `engines`.

    `spread` is the factor up to which a kind of op was off on rows held out of the fit.
    """

    name: str
    mac_tflops: float
    weight_gbs: float
    tile_bytes: float
    single_gelems: float
    pair_gelems: float
    softmax_gelems: float
    move_gbs: float
    matmul_share: float = 0.5
    block_waste: float = 0.3
    narrow_waste: float = 0.3
    narrow_row_waste: float = 0.3
    winograd: float = 1.0
    wide_kernels: bool = True
    int8_gain: float = 1.0
    unpack_share: float = 1.0
    notch: float = 1.0
    engines: int = 1
    engine_elements: int = 0
    small_kernel_gain: float = 1.0
    interfaces: Mapping[str, Interface] = field(default_factory=dict)
    spread: Mapping[str, float] = field(default_factory=dict)
    measured: frozenset[str] = frozenset()
    "Names of the parameters that rows of this chip determine; the others are taken over from other chips."


@dataclass(frozen=True)
class Work:
    """The work of one op: its arithmetic, reads and writes. `kind` selects the law; see `describe_work`."""

    kind: str
    macs: float = 0.0
    positions: int = 0
    channels: int = 0
    inner: int = 0
    outer: int = 0
    width: int = 1
    map_width: int = 1
    "Last extent of the output of a conv."
    winograd: bool = False
    groups: int = 1
    activation_bytes: int = 2
    weight_bytes: int = 0
    dense_bytes: int = 0
    kept: float = 1.0
    format: str = "dense"
    weight: Hashable = field(default=None, compare=False)
    "Identifies the stored weight; works that differ in it alone are equal, and take as long."
    int8: bool = False
    elements: int = 0
    moved_bytes: int = 0


@dataclass(frozen=True)
class Terms:
    """Microseconds of one op, the cause that decides, and the cause in words."""

    total_us: float
    compute_us: float
    weights_us: float
    cause: str
    term: str
    passes: float = 1.0
    notch: bool = False


def describe_work(op: Operation, sizes: Sizes) -> Work:
    """Describe the work of `op`; `sizes` gives the extents of symbolic dimensions."""
    if is_opaque(op):
        return _describe_other(op, sizes)
    return _DESCRIBERS.get(op.op_type, _describe_by_family)(op, sizes)


def compute_terms(work: Work, chip: Chip, held: set[Hashable] | None = None) -> Terms:
    """Compute the time of `work` on `chip`.

    `held` are the weights that the kernel buffers have seen in this partition; the op's own is added to it.
    """
    if work.kind in ("conv", "depthwise"):
        return _time_conv(work, chip, held if held is not None else set())
    if work.kind == "matmul":
        us = 2 * work.macs / (chip.mac_tflops * chip.matmul_share * 1e6)
        return Terms(us, us, 0.0, "matmul", "MACs of two activations")
    if work.kind == "attention":  # a fused softmax took as long as a separate one
        products, weights = (2 * work.macs / (chip.mac_tflops * chip.matmul_share * 1e6),
                             work.elements / (chip.softmax_gelems * 1e3))
        names = ("matmul", "MACs of two activations") if products > weights else ("softmax", "softmax")
        return Terms(products + weights, products, 0.0, *names)
    if work.kind == "free":
        return Terms(0.0, 0.0, 0.0, "free", "no time of its own")
    if work.kind == "movement":
        us = work.moved_bytes / (chip.move_gbs * 1e3)
        return Terms(us, us, 0.0, "movement", f"data movement: {_format_bytes(work.moved_bytes)}")
    rate, word = {
        "single": (chip.single_gelems, "elementwise, one operand"),
        "pair": (chip.pair_gelems, "elementwise, two operands"),
        "softmax": (chip.softmax_gelems, "softmax"),
        "reduction": (chip.softmax_gelems, "reduction"),
        "other": (chip.softmax_gelems, "op type without measurements"),
    }[work.kind]
    us = work.elements / (rate * 1e3)
    cause = "elementwise" if work.kind in ("single", "pair") else work.kind
    return Terms(us, us, 0.0, cause, word)


def time_call(interface: Interface, ane_us: float, io_bytes: float) -> float:
    """Compute the time of one call from the time on the ANE and the bytes of inputs and outputs."""
    wake = interface.wake_share * min(ane_us, interface.wake_cap_us)
    return interface.floor_us + max(0.0, ane_us - interface.hidden_us) + wake + io_bytes / (interface.io_gbs * 1e3)


def _time_conv(work: Work, chip: Chip, held: set[Hashable]) -> Terms:
    again = work.weight is not None and work.weight in held
    if work.weight is not None:
        held.add(work.weight)
    one = _time_on_engines(work, chip, again, 1)
    wide = WIDE_KERNEL <= work.width
    positions = work.positions
    if wide:  # rows of such convs are padded to a window
        positions = positions // work.map_width * -(-work.map_width // ROW_WINDOW) * ROW_WINDOW
    if chip.engines < 2 or positions * work.outer < chip.engine_elements:
        return one
    both = _time_on_engines(work, chip, again, chip.engines)
    return both if wide or both.total_us <= one.total_us else one


def _time_on_engines(work: Work, chip: Chip, again: bool, engines: int) -> Terms:
    compute = _time_macs(work, chip) / (1 if engines == 1 else 0.96 * engines)
    stored, passes, notch = work.weight_bytes, 1.0, False
    wide = chip.wide_kernels and WIDE_KERNEL <= work.width
    if wide:
        stored = stored * 2 * (work.width + 1) // work.width
    if again and stored <= KERNEL_BUFFER_BYTES:
        return Terms(compute, compute, 0.0, "MACs", _name_compute(work))
    if stored > KERNEL_BUFFER_BYTES:
        tile = work.positions * work.channels * work.activation_bytes
        passes = max(1.0, tile / chip.tile_bytes)
    rate = chip.weight_gbs * (chip.unpack_share if work.format in UNPACK_FORMATS else 1.0)
    if stored <= KERNEL_BUFFER_BYTES:
        rate *= chip.small_kernel_gain
    if chip.notch > 1 and is_on_notch(work):
        rate, notch = rate / chip.notch, True
    weights = passes * stored / (rate * 1e3)
    if engines > 1 and stored > KERNEL_BUFFER_BYTES:
        weights *= engines  # each engine reads the kernel for itself
    longer, shorter = max(compute, weights), min(compute, weights)
    total = longer
    if passes > 1 and longer:
        total *= (1 + (shorter / longer) ** RESTREAM_OVERLAP) ** (1 / RESTREAM_OVERLAP)
    if weights <= compute:
        return Terms(total, compute, weights, "MACs", _name_compute(work), passes, notch)
    term = _name_weights(work, stored, passes, notch, wide)
    return Terms(total, compute, weights, "weights", term, passes, notch)


def is_on_notch(work: Work) -> bool:
    """Return whether the dense weight share of a core is within 16 KiB of a multiple of 1 MiB."""
    if work.format != "dense" or not work.outer:
        return False
    share = -(-work.outer // CORES) * (work.dense_bytes // work.outer)
    nearest = round(share / MIB)
    return nearest >= 1 and abs(share - nearest * MIB) <= NOTCH_BYTES


def _time_macs(work: Work, chip: Chip) -> float:
    positions = -(-work.positions // ROW_WINDOW) * ROW_WINDOW
    if work.kind == "depthwise":
        # No row covers grouped kernels: as if one of 16 lanes of each core worked.
        macs = work.macs * positions / max(1, work.positions) * CORES
        return 2 * macs / (chip.mac_tflops * 1e6)
    outer = -(-work.outer // CORES) * CORES
    blocks = -(-outer // CHANNEL_BLOCK) * CHANNEL_BLOCK
    inner = -(-work.inner // CORES) * CORES
    waste = chip.block_waste
    if blocks == CHANNEL_BLOCK:
        waste = chip.narrow_row_waste if work.positions == work.map_width else chip.narrow_waste
    charged = outer + waste * (blocks - outer)
    rate = chip.mac_tflops * (chip.int8_gain if work.int8 else 1.0)
    kept = min(1.0, ZERO_SKIP_BASE + ZERO_SKIP_SLOPE * work.kept)
    if work.winograd and work.kept == 1.0 and not work.int8:
        rate *= chip.winograd
    return 2.0 * positions * inner * charged * kept / (rate * 1e6)


def _name_compute(work: Work) -> str:
    if work.outer < CHANNEL_BLOCK // 2:
        return f"MACs: {work.outer} output channels leave most of {CHANNEL_BLOCK} lanes idle"
    if work.positions < ROW_WINDOW:
        return f"MACs: {work.positions} positions do not fill a window of {ROW_WINDOW}"
    return "MACs"


def _name_weights(work: Work, stored: int, passes: float, notch: bool, wide: bool) -> str:
    text = "weights streamed"
    text += " once" if passes <= 1.0 else f" {passes:.1f} times: K*M too large for one tile"
    if notch:
        text += ", on the DMA notch"
    if wide:
        text += f", stored as {2 * (work.width + 1)} taps for a width of {work.width}"
    return f"{text} ({_format_bytes(stored)})"


def _format_bytes(count: float) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"


# Descriptions of ops.

@dataclass(frozen=True)
class _Weight:
    stored: int
    kept: float
    format: str


def _describe_weight(var: Var, sizes: Sizes) -> _Weight:
    """Describe a stored weight by its declared types: bytes as compressed, share of nonzero elements, format."""
    if not is_compressed(var):
        return _Weight(sizes.bytes(var), 1.0, "dense")
    leaves, op_types, kept = _collect_stored(var, sizes)
    stored = -(-sum(sizes.elements(leaf) * _get_bits(leaf) for leaf in leaves) // 8)
    palette, sparse = (any(word in kind for kind in op_types) for word in ("lut", "sparse"))
    name = "sparse palette" if palette and sparse else "palette" if palette else "sparse" if sparse else "int8"
    return _Weight(stored, kept, name)


def _collect_stored(var: Var, sizes: Sizes) -> tuple[list[Var], set[str], float]:
    """Collect the consts that `var` is unpacked from, the op types that unpack it, and its share of nonzeros."""
    leaves: dict[Var, None] = {}
    op_types: set[str] = set()
    kept, pending = 1.0, [var]
    while pending:
        current = pending.pop()
        if not is_compressed(current):
            if get_type_info(current).is_tensor:
                leaves[current] = None
            continue
        op = current.op
        op_types.add(op.op_type)
        data = op.inputs.get("nonzero_data")
        if data is not None and op.op_type == "constexpr_sparse_to_dense":
            kept = min(1.0, sizes.elements(data) / max(1, sizes.elements(op.outputs[0])))
        # The shape of an unpacked weight is a parameter of the iOS16 forms, not stored data.
        pending += [each for name, each in op.inputs.items() if each is not None and name != "shape"]
    return list(leaves), op_types, kept


@functools.cache
def _get_type_bits(dtype: Any) -> int:
    if types.is_bool(dtype):
        return 8
    width = getattr(dtype, "get_bitwidth", None)
    return int(width()) if width is not None else 16


def _get_bits(var: Var) -> int:
    return _get_type_bits(get_type_info(var).dtype)


def _reads_int8(var: Var) -> bool:
    return var.op is not None and var.op.op_type == "dequantize"


def _get_weight_key(var: Var) -> Hashable:
    return var if is_const(var) or is_compressed(var) else None


def _describe_conv(op: Operation, sizes: Sizes) -> Work:
    x, weight, out = op.inputs["x"], op.inputs["weight"], op.outputs[0]
    if not (is_const(weight) or is_compressed(weight)):
        return _describe_dynamic(op, sizes, math.prod(sizes.shape(weight)[1:]))
    shape, out_shape = sizes.shape(weight), sizes.shape(out)
    groups = int(get_const_value(op.inputs.get("groups"), 1))
    spatial = shape[2:]
    transposed = op.op_type == "conv_transpose"
    outer = shape[1] * groups if transposed else shape[0]
    inner = (shape[0] // groups if transposed else shape[1]) * math.prod(spatial)
    where = sizes.shape(x) if transposed else out_shape
    positions = math.prod(where[:1]) * math.prod(where[2:])
    plain = all(step == 1 for name in ("strides", "dilations") for step in get_const_value(op.inputs.get(name), [1]))
    stored = _describe_weight(weight, sizes)
    width = spatial[-1] if spatial else 1
    return Work(
        "conv" if groups == 1 else "depthwise", macs=float(positions * inner * outer), positions=positions,
        channels=sizes.shape(x)[1], inner=inner, outer=outer, width=width,
        map_width=where[-1], winograd=plain and width == 3 and groups == 1 and not transposed,
        groups=groups, activation_bytes=1 if _reads_int8(x) else get_itemsize(x), weight_bytes=stored.stored,
        dense_bytes=sizes.elements(weight) * 2, kept=stored.kept, format=stored.format, weight=_get_weight_key(weight),
        int8=_reads_int8(x) and stored.format in ("int8", "palette"), elements=sizes.elements(out),
        moved_bytes=_count_moved_bytes(op, sizes),
    )


def _describe_linear(op: Operation, sizes: Sizes) -> Work:
    return _describe_product(op, op.inputs["x"], op.inputs["weight"], sizes)


def _describe_matmul(op: Operation, sizes: Sizes) -> Work:
    x, y = op.inputs["x"], op.inputs["y"]
    stored = [is_const(var) or is_compressed(var) for var in (x, y)]
    across = bool(get_const_value(op.inputs.get("transpose_x"), False))
    shape = sizes.shape(x) or (1,)
    inner = shape[-2 if across and len(shape) > 1 else -1]
    if any(stored) and len([extent for extent in sizes.shape(y if stored[1] else x) if extent != 1]) <= 2:
        other, weight = (x, y) if stored[1] else (y, x)
        return _describe_product(op, other, weight, sizes, inner)
    return _describe_dynamic(op, sizes, inner)


def _describe_product(op: Operation, x: Var, weight: Var, sizes: Sizes, inner: int = 0) -> Work:
    """Describe a product with a stored matrix: a conv of width 1 over as many positions as there are rows."""
    if not (is_const(weight) or is_compressed(weight)):
        return _describe_dynamic(op, sizes, inner or (sizes.shape(x) or (1,))[-1])
    inner = max(1, inner or (sizes.shape(weight) or (1,))[-1])
    outer = max(1, sizes.elements(weight) // inner)
    positions = sizes.elements(op.outputs[0]) // outer
    stored = _describe_weight(weight, sizes)
    return Work(
        "conv", macs=float(positions) * inner * outer, positions=positions, channels=inner, inner=inner, outer=outer,
        activation_bytes=1 if _reads_int8(x) else get_itemsize(x), weight_bytes=stored.stored,
        dense_bytes=sizes.elements(weight) * 2, kept=stored.kept, format=stored.format, weight=_get_weight_key(weight),
        int8=_reads_int8(x) and stored.format in ("int8", "palette"), elements=sizes.elements(op.outputs[0]),
        moved_bytes=_count_moved_bytes(op, sizes),
    )


def _describe_dynamic(op: Operation, sizes: Sizes, inner: int) -> Work:
    out = sizes.elements(op.outputs[0])
    return Work("matmul", macs=float(out) * inner, inner=inner, elements=out, moved_bytes=_count_moved_bytes(op, sizes))


def _describe_einsum(op: Operation, sizes: Sizes) -> Work:
    """Describe an `einsum` of two values: its inner extent is what both operands have and the output lacks."""
    values = op.inputs["values"]
    sides = math.prod(sizes.elements(var) for var in values)
    out = sizes.elements(op.outputs[0])
    equation = str(get_const_value(op.inputs.get("equation"), ""))
    left, _, right = equation.partition("->")
    extents: dict[str, int] = {}
    for labels, var in zip(left.split(","), values):
        extents.update(zip(labels.strip(), sizes.shape(var)))
    inner = math.prod(extent for label, extent in extents.items() if label not in right) if extents else max(
        1, round(math.sqrt(sides / max(1, out))))
    return _describe_dynamic(op, sizes, inner)


def _describe_attention(op: Operation, sizes: Sizes) -> Work:
    query, key, out = op.inputs["query"], op.inputs["key"], op.outputs[0]
    rows = (sizes.shape(key) or (1, 1))[-2]
    macs = float(sizes.elements(query) + sizes.elements(out)) * rows
    scores = sizes.elements(query) // max(1, (sizes.shape(query) or (1,))[-1]) * rows
    return Work("attention", macs=macs, inner=rows, elements=scores, moved_bytes=_count_moved_bytes(op, sizes))


def _describe_softmax(op: Operation, sizes: Sizes) -> Work:
    return Work("softmax", elements=sizes.elements(op.outputs[0]), moved_bytes=_count_moved_bytes(op, sizes))


def _describe_reduction(op: Operation, sizes: Sizes) -> Work:
    read = max((sizes.elements(var) for var in iterate_inputs(op)), default=0)
    return Work("reduction", elements=read, moved_bytes=_count_moved_bytes(op, sizes))


def _describe_movement(op: Operation, sizes: Sizes) -> Work:
    moved = sum(compute_padded_bytes(sizes.shape(out), get_itemsize(out)) for out in op.outputs
                if get_type_info(out).is_tensor)
    return Work("movement", elements=sizes.elements(op.outputs[0]), moved_bytes=moved)


def _describe_free(op: Operation, sizes: Sizes) -> Work:
    return Work("free")


def _describe_pool(op: Operation, sizes: Sizes) -> Work:
    kernel = math.prod(get_const_value(op.inputs.get("kernel_sizes"), [1]))
    return Work("single", elements=sizes.elements(op.outputs[0]) * kernel, moved_bytes=_count_moved_bytes(op, sizes))


def _describe_other(op: Operation, sizes: Sizes) -> Work:
    made = sum(sizes.elements(out) for out in op.outputs)
    read = sum(sizes.elements(var) for var in iterate_inputs(op))
    return Work("other", elements=max(made, read), moved_bytes=_count_moved_bytes(op, sizes))


def _describe_by_family(op: Operation, sizes: Sizes) -> Work:
    """Describe an elementwise op by its number of computed operands of more than one element; others by elements."""
    if op.op_type.startswith("constexpr_"):
        return Work("free")
    if op.op_type.startswith("reduce_"):
        return _describe_reduction(op, sizes)
    out = op.outputs[0] if op.outputs else None
    if out is None or op.op_type not in _ELEMENTWISE:
        return _describe_other(op, sizes)
    operands = [var for var in iterate_inputs(op)
                if not is_const(var) and not is_compressed(var) and sizes.elements(var) > 1]
    if len(operands) == 1 and _is_fused(op, operands[0]):
        return Work("free")
    return Work("pair" if len(operands) > 1 else "single", elements=sizes.elements(out),
                moved_bytes=_count_moved_bytes(op, sizes))


def _is_fused(op: Operation, operand: Var) -> bool:
    """Return whether `op`, of one operand, is applied by the conv before it as it writes its result."""
    maker = operand.op
    return maker is not None and maker.op_type in ("conv", "linear", "conv_transpose") and len(operand.child_ops) == 1


def _count_moved_bytes(op: Operation, sizes: Sizes) -> int:
    """Count the bytes of the activations read and written, with the last axis padded to 64 bytes."""
    found = 0
    for var in (*iterate_inputs(op), *op.outputs):
        if var is not None and get_type_info(var).is_tensor and not is_const(var) and not is_compressed(var):
            found += compute_padded_bytes(sizes.shape(var), get_itemsize(var))
    return found


_ELEMENTWISE = frozenset("""
abs acos add asin atan atanh cast ceil clamped_relu clip cos cosh elu equal erf exp exp2 floor floor_div
gelu greater greater_equal hard_sigmoid hardswish identity inverse leaky_relu less less_equal linear_activation log
logical_and logical_not logical_or logical_xor maximum minimum mod mul not_equal pow prelu real_div relu relu6
round rsqrt scaled_tanh select sigmoid sigmoid_hard sign silu sin sinh softplus softplus_parametric softsign sqrt square
sub tan tanh threshold thresholded_relu batch_norm
""".split())
_FREE = ("expand_dims", "squeeze", "identity", "const", "slice_by_index", "slice_by_size", "split", "quantize",
         "dequantize")
"""Ops that the next one does as it reads, or the last as it writes: views; slices and splits (K-tiled linears of the M2
Pro cost no more than their products and sums); int8 activations (W8A8 chains of the M4, M5 and M6)."""
_MOVEMENT = frozenset("""
transpose reshape reshape_like concat slice_update pad tile stack reverse depth_to_space space_to_depth pixel_shuffle
pixel_unshuffle space_to_batch batch_to_space crop flatten2d fill fill_like gather gather_along_axis gather_nd
upsample_nearest_neighbor upsample_bilinear resize_bilinear resize_nearest_neighbor read_state coreml_update_state
""".split())
_Describer = Callable[[Operation, Sizes], Work]
_DESCRIBERS: dict[str, _Describer] = {
    "conv": _describe_conv,
    "conv_transpose": _describe_conv,
    "linear": _describe_linear,
    "matmul": _describe_matmul,
    "einsum": _describe_einsum,
    "scaled_dot_product_attention": _describe_attention,
    "softmax": _describe_softmax,
    "avg_pool": _describe_pool,
    "max_pool": _describe_pool,
    "l2_pool": _describe_pool,
    **dict.fromkeys(("layer_norm", "instance_norm", "l2_norm", "local_response_norm"), _describe_reduction),
    **dict.fromkeys(_FREE, _describe_free),
    **dict.fromkeys(_MOVEMENT, _describe_movement),
}
