"""Support of op types on the ANE: one table, a row for each op type, with its sources.

A row names the generations on which ops of the type were seen to be supported and those on which they are unsupported;
on all others they were not measured, and a type without a row or a rule was not measured at all. Rows are for the
ordinary forms of an op (fp16, static shapes). Where dtypes, shapes or attributes decide, the row has a predicate, or a
rule finds the unsupported forms (integers, computed indices and sizes, kernels, custom layers). Types on which two
sources contradict each other (cumsum, argmax, argsort and others that the ANE's compiler accepts and Core ML rejects)
count as supported only where Core ML was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from coremltools.converters.mil.mil import Operation, Var, types
from coremltools.converters.mil.mil.types.symbolic import is_symbolic

from ..ir.query import get_const_value, is_compressed, is_const
from ..passes.evidence import (
    WITHOUT_CORE_ML,
    Community,
    Evidence,
    Measured,
    Vendor,
    cite_2020_layer_list,
    cite_ane_compiler,
    cite_m1_gpt_notes,
    cite_m4_study,
    cite_surgery_tip,
    cite_xcode_notes,
)
from ..passes.targets import ALL_TARGETS, GENERATIONS, Gate, Generation, parse_target
from ..utils.text_format import format_count

__all__ = [
    "BEFORE_M4",
    "M1_TO_M5",
    "M4",
    "OP_SUPPORT",
    "Observation",
    "OpSupport",
    "Problem",
    "find_dynamic_inputs",
    "find_evidence",
    "find_observations",
    "find_problem_rows",
    "find_row",
    "is_dtype_form_supported",
]

M4 = Gate(first="m4", last="m4")
BEFORE_M4 = Gate(last="m3")
M1_TO_M5 = Gate(first="m1", last="m5")
"Generations whose ANE compiler was queried without Core ML; on M4 it and Core ML agree on ops with this gate."


@dataclass(frozen=True)
class Observation:
    """An observation that ops of a type are supported: the chip and its source."""

    chip: str
    evidence: Evidence

    @property
    def generation(self) -> Generation:
        return parse_target(self.chip)[0]

    @property
    def without_core_ml(self) -> bool:
        return WITHOUT_CORE_ML in self.evidence.says


@dataclass(frozen=True)
class Problem:
    """The shared part of the unsupported rows of one code: advice and sources."""

    code: str
    advice: str
    evidence: tuple[Evidence, ...]


@dataclass(frozen=True)
class OpSupport:
    """A row of the table: the support of ops of one type.

    `supported` are observations, of two for one generation the first counts. `unsupported` are the generations on which
    sources say that ops of the type are unsupported, `disputed` those on which sources disagree or only hint at it.
    `note` and `disputed_note` are the reasons in findings, with `{op}`, `{detail}` (by `detail`, of the op) and
    `{where}` (the generations). `excludes` returns why an op of the type is not meant, or "". `message` is Core ML's
    own, as it was measured on an M4. `sources` are further sources on types that no problem covers, both sides.
    """

    op: str
    supported: tuple[Observation, ...] = ()
    problem: Problem | None = None
    unsupported: tuple[Gate, ...] = ()
    note: str = "{op} is unsupported on the ANE"
    disputed: tuple[Gate, ...] = ()
    disputed_note: str = ""
    detail: Callable[[Operation], str] | None = None
    excludes: Callable[[Operation], str] | None = None
    message: str | Callable[[Operation], str | None] | None = None
    sources: tuple[Evidence, ...] = ()

    def find_message(self, op: Operation) -> str | None:
        """Return Core ML's message for `op`, None where none was measured."""
        return self.message(op) if callable(self.message) else self.message


def find_dynamic_inputs(op: Operation, *names: str) -> list[str]:
    """Return those of the inputs `names` that are dynamic."""
    return [name for name in names if _is_dynamic(op.inputs.get(name))]


def _is_dynamic(var: Var | Sequence[Var] | None) -> bool:
    if isinstance(var, (list, tuple)):
        return any(_is_dynamic(each) for each in var)
    return var is not None and not is_const(var) and not is_compressed(var)


def _exclude_integers(op: Operation) -> str:
    return "" if types.is_float(op.outputs[0].dtype) else "computes on integers"


def _exclude_integer_fills(op: Operation) -> str:
    return "" if types.is_float(op.outputs[0].dtype) else "makes integers"


def _exclude_other_pads(op: Operation) -> str:
    mode = get_const_value(op.mode, "constant")
    return "" if mode == "reflect" else f"pads with mode {mode}"


def _describe_summed_axis(op: Operation) -> str:
    axis = get_const_value(op.axis, 0)
    extent = op.x.shape[axis] if op.x.rank else 1
    length = "a dynamic length" if is_symbolic(extent) else f"{int(extent)} elements"
    return f"axis {axis}, {length}"


def _describe_fill_shape(op: Operation) -> str:
    return "with a computed shape" if find_dynamic_inputs(op, "shape") else "with a constant shape"


def _describe_range_bounds(op: Operation) -> str:
    computed = find_dynamic_inputs(op, "start", "end", "step")
    return f"its {' and '.join(computed)} computed" if computed else "with constant bounds"


def _find_range_message(op: Operation) -> str | None:
    dynamic = find_dynamic_inputs(op, "start", "end", "step")
    return "Failed to retrieve parameter start" if dynamic == ["end"] else None


def _describe_windows(op: Operation) -> str:
    size, step = get_const_value(op.size), get_const_value(op.stride, 1)
    return f"of {size} elements, {step} apart" if size is not None else "of a computed size"


def _describe_indices(op: Operation) -> str:
    return "computed" if find_dynamic_inputs(op, "indices") else "constant"


def _describe_steps(op: Operation) -> str:
    steps = op.x.shape[0]
    return "a dynamic number of steps" if is_symbolic(steps) else format_count(int(steps), "step")


_STUDY = "751K/Apple-Neural-Engine-Microarchitecture-Study-M6"
_FORGE = "sbryngelson/ANEForge docs"
_COREMLTOOLS_TORCH_OPS = (
    "https://github.com/apple/coremltools/blob/9.0/coremltools/converters/mil/frontend/torch/ops.py"
)

_M4_TABLES = Observation("M4", cite_m4_study("accepted by Core ML", rows=True))
_M4_NOTES = Observation("M4", cite_m4_study("accepted, according to the notes on the measured op types"))
_M4_CASES = Observation(
    "M4", cite_m4_study("among the 276 cases that were tried, and not listed with the rejected ones")
)
_M4_STATES = Observation("M4", Measured(
    "a model with a state 256 wide runs on the ANE", chip="M4", os="macOS 15.2", date="2025-12-19",
    source="https://github.com/apple/coremltools/issues/2631"))
_M5_SWEEP = Observation("M5", Community(
    f"compiles and runs {WITHOUT_CORE_ML}", chip="M5", date="2026", source=f"{_FORGE}/capabilities.json"))
_M5_PLAN = Observation("M5", Community(
    "supported by the ANE in a published compute plan", chip="M5 Max",
    source="https://github.com/0seba/VoxCPMANE/issues/15"))
_M1_PROBE = Observation("M1", cite_ane_compiler("native, by a probe", chip="M1"))
_LARGEST_SIZES = Community(
    f"compiles and runs up to its largest size {WITHOUT_CORE_ML}", chip="M1 and M2 Pro", date="2026",
    source="sbryngelson/ANEForge aneforge/_targets.py")
_M1_SIZES, _M2_SIZES = Observation("M1", _LARGEST_SIZES), Observation("M2", _LARGEST_SIZES)
_A15_TRANSFORMER = Observation("A15", Vendor(
    "the code uses it in a transformer of which 602 of 606 ops run on the ANE, all but the embedding",
    chip="A15 (iPhone 13 Pro Max)", os="iOS 16.0", date="2022", source="apple/ml-ane-transformers README.md"))
_M6_SIZES = Observation("M6", Community(
    f"in the models for size limits, which compile for the M6 family as for M4 {WITHOUT_CORE_ML}", chip="M6",
    date="2026", source=f"{_STUDY} notes/coreml_dispatch.md"))

_STATE_WIDTHS = Measured(
    "a state 270 wide fails on the ANE, 256 works", chip="M4", os="macOS 15.2", date="2025-12-19",
    source="https://github.com/apple/coremltools/issues/2631")
_SMALLER_CACHE = Community(
    "a key and value cache worked on the ANE after its shapes were made smaller",
    source="https://github.com/Anemll/Anemll/issues/27", date="2025-07-11")
_WINDOW_ASSIGNMENT = Vendor("an assignment to a window may reside on the ANE", source=_COREMLTOOLS_TORCH_OPS)
_CACHE_UPDATE_REJECTED = Community(
    "contradicts it: a decoder that updates its cache in the model is rejected by the ANE's compiler", chip="M5 Pro",
    source="https://github.com/FluidInference/mobius/pull/77", date="2026-07-16")

_ELEMENTARY_FUNCTIONS = Problem(
    "ANE202",
    "Use the formula of the finding, whose ops are supported: same algebra, different rounding.",
    (
        cite_m4_study(
            "asin, acos, tan, sinh, cosh and atanh are unsupported; atan, sin, cos, exp and log are accepted"
        ),
        cite_ane_compiler("asin, acos, tan, sinh, cosh and atanh have no equivalent on any generation"),
    ),
)
_MODULO = Problem(
    "ANE203",
    "Use x - y * floor(x / y): same algebra; off by y if x / y rounds up to an integer.",
    (
        cite_m4_study("mod is unsupported; floor_div, floor, mul and sub are accepted"),
        cite_ane_compiler("mod has no equivalent on any generation"),
    ),
)
_PRODUCT = Problem(
    "ANE204",
    "Multiply slices for few elements (different rounding); for many positive x use exp(reduce_sum(log(x))).",
    (
        cite_m4_study("reduce_prod is unsupported; the other reductions to floats are accepted"),
        cite_ane_compiler("reduce_prod has no equivalent on any generation"),
    ),
)
_CUMSUM = Problem(
    "ANE205",
    "Use convs with ones, or a matmul with a constant triangle of ones: the same sums in a different order.",
    (
        cite_m4_study("cumsum is unsupported"),
        cite_xcode_notes(
            "cumsum falls back to the CPU for static and flexible shapes, together with simple ops after it"
        ),
        cite_ane_compiler("MIL's cumsum is not implemented; the ANE computes one by a different route"),
    ),
)
_FILLS = Problem(
    "ANE206",
    "Replace it by a constant, of one element if its users broadcast: the same bits.",
    (
        cite_xcode_notes("fill and fill_like run on the CPU only, with static shapes, too"),
        cite_m4_study("contradicts it: fill_like is accepted", rows=True),
        cite_ane_compiler("contradicts it: fill and fill_like become constants on every generation"),
    ),
)
_RANGE_1D = Problem(
    "ANE207",
    "Replace it by a constant: for constant bounds the same bits, otherwise the longest range, sliced to its length.",
    (
        cite_m4_study("range_1d is unsupported, on the GPU, too"),
        cite_xcode_notes("range_1d runs on the CPU only"),
        cite_ane_compiler("range_1d is rejected on M1", chip="M1"),
    ),
)
_MASKS_AT_RUN_TIME = Problem(
    "ANE208",
    "Use a constant mask for band_part; for one_hot compare the index, as fp16, with a constant range.",
    (
        cite_m4_study("one_hot and band_part are unsupported; comparisons, select and mul are accepted"),
        cite_ane_compiler("one_hot and band_part have no equivalent on any generation"),
        cite_m1_gpt_notes(
            "in parts of a Pythia model band_part, which computes the causal mask, cannot run on the ANE"
        ),
    ),
)
_RANDOM_NUMBERS = Problem(
    "ANE209",
    "Generate the numbers in the caller and pass them as an input.",
    (
        cite_m4_study("random_normal is unsupported"),
        cite_ane_compiler("random_normal, random_bernoulli and random_categorical have no equivalent on any "
                           "generation; random_uniform has one on M3, M4 and M5"),
    ),
)
_SLIDING_WINDOWS = Problem(
    "ANE211",
    "Use a reshape if windows do not overlap, otherwise concat slices (the same bits).",
    (
        cite_m4_study("sliding_windows is unsupported, on the GPU, too"),
        cite_ane_compiler("sliding_windows has no equivalent on any generation"),
    ),
)
_SCATTER = Problem(
    "ANE213",
    "Use slice_update or slices and concat for a fixed window (same bits), and a mask for selected positions.",
    (
        Vendor(
            "scatter and scatter_nd fall off the ANE; an assignment to a window may reside there",
            source=_COREMLTOOLS_TORCH_OPS,
        ),
        cite_m4_study("scatter and scatter_along_axis are unsupported"),
        cite_ane_compiler("scatter, scatter_nd and scatter_along_axis have no equivalent on any generation"),
        cite_m1_gpt_notes(
            "a scatter into a key and value cache is not supported; where with a mask as input runs on the ANE"
        ),
        Community(
            "a scatter into a cache is rejected by the ANE's compiler at any precision, of rank 5 and of rank 4",
            source="https://github.com/FluidInference/mobius/pull/67",
            date="2026-06-07",
        ),
    ),
)
_CONTROL_FLOW = Problem(
    "ANE218",
    "Unroll loops with a fixed trip count; select between both sides of a branch (same bits), choose in the caller, "
    "or split it off (edit --split-at).",
    (
        cite_m1_gpt_notes("cond is not supported on the neural engine: the branch is supported on the CPU"),
        cite_ane_compiler("cond, while_loop and the list ops have no equivalent on any generation"),
    ),
)
_CROP_RESIZE = Problem(
    "ANE216",
    "Slice and resize each constant box; for computed boxes, crop in the caller or resample by coordinates.",
    (
        cite_m4_study(
            "crop_resize is unsupported, on the GPU, too; resize, resample and affine are accepted"
        ),
        cite_ane_compiler("crop_resize is unsupported on M1; the hardware has it from M2 on"),
    ),
)
_RECURRENT = Problem(
    "ANE217",
    "Fix the sequence length, so that it can be unrolled, or split the model there.",
    (
        Vendor("RNN and LSTM ops are not supported on the neural engine",
               source="https://github.com/apple/coremltools/issues/1780", date="2023-02-26"),
        cite_m4_study("rnn, lstm and gru are unsupported"),
        Community("an LSTM runs on BNNS, while the layers after it run on the ANE",
                  source="https://github.com/apple/coremltools/issues/337", chip="A12", date="2019-03"),
        cite_2020_layer_list("RNN layers, LSTM and GRU among them, do not run on the ANE"),
        cite_ane_compiler("lstm, gru and rnn have no equivalent on any generation"),
    ),
)
_TEXTURE_OPS = Problem(
    "ANE231",
    "Build a reflecting pad from slices, reverse and concat (the same bits); sample in the caller.",
    (
        cite_ane_compiler("affine and resample need the texture engine, from M2 on; M1 rejects them", "M1"),
        cite_ane_compiler("symmetric and reflecting pads are done in software on M1, natively later", "M1"),
        cite_m4_study("affine, resample, reflecting and replicating pads are accepted"),
    ),
)
_LOGICAL_OPS = Problem(
    "ANE237",
    "Use fp16 masks of 0 and 1 with mul (and), maximum (or), abs of sub (xor): the same bits.",
    (
        cite_m4_study("logical_and is accepted, contradicts what the ANE's compiler answers without Core ML"),
        cite_ane_compiler("logical_and, logical_or and logical_xor are unsupported on all generations"),
    ),
)
_SIN_COS = Problem(
    "ANE238",
    "Store the values if the angles are constant (the same bits); otherwise use a polynomial within one turn.",
    (
        cite_ane_compiler("sin and cos are native from M3 on; M1 and M2 reject them, measured", "M1 and M2"),
        cite_surgery_tip(
            "a model with a single sin or cos layer does not run on the ANE; an encoder with sinusoids does"
        ),
        cite_m4_study("contradicts it: sin and cos are accepted"),
    ),
)


def _make_elementary_row(op: str, expansion: str) -> OpSupport:
    """Make the row of an elementary function; `expansion` is equal in exact arithmetic, rounded differently in fp16."""
    return OpSupport(op, problem=_ELEMENTARY_FUNCTIONS, unsupported=(M1_TO_M5,), excludes=_exclude_integers,
                     note=f"{{op}} is unsupported on the ANE; equal to {expansion}")


def _make_random_row(op: str) -> OpSupport:
    """Make the row of an op that draws random numbers."""
    return OpSupport(op, problem=_RANDOM_NUMBERS, unsupported=(M1_TO_M5,),
                     note="{op} generates random numbers; on the ANE they can only be an input")


def _make_scatter_row(op: str) -> OpSupport:
    """Make the row of a scatter."""
    return OpSupport(op, problem=_SCATTER, unsupported=(ALL_TARGETS,), detail=_describe_indices,
                     note="{op} is unsupported on the ANE (indices {detail})")


def _make_control_flow_row(op: str) -> OpSupport:
    """Make the row of an op of control flow, or of a list."""
    return OpSupport(op, problem=_CONTROL_FLOW, unsupported=(M1_TO_M5,), note="{op} is unsupported on the ANE{detail}")


def _make_recurrent_row(op: str, message: str | None = None) -> OpSupport:
    """Make the row of a recurrent layer."""
    return OpSupport(op, problem=_RECURRENT, unsupported=(ALL_TARGETS,), detail=_describe_steps, message=message,
                     note="{op} is unsupported on the ANE ({detail})")


def _make_texture_row(op: str, *supported: Observation) -> OpSupport:
    """Make the row of an op that needs the texture engine."""
    return OpSupport(op, supported, _TEXTURE_OPS, unsupported=(Gate(first="m1", last="m1"),),
                     note="{op} needs a hardware unit that {where} do not have (not "
                          "measured through Core ML)", disputed=(Gate(last="a13"),),
                     disputed_note="{op} needs a hardware unit that M1 does not have; older chips were not measured")


def _make_angle_row(op: str, *supported: Observation) -> OpSupport:
    """Make the row of sin or cos."""
    return OpSupport(op, supported, _SIN_COS, unsupported=(Gate(first="m1", last="m2"),), excludes=_exclude_integers,
                     note="{op} is unsupported on {where} (not measured through Core ML); M4 accepts it",
                     disputed=(Gate(last="a13"),),
                     disputed_note="{op} is unsupported on M1 and M2, not measured on {where}")


def _make_logical_row(op: str) -> OpSupport:
    """Make the row of a logical op that was not measured through Core ML."""
    return OpSupport(op, problem=_LOGICAL_OPS, disputed=(ALL_TARGETS,),
                     disputed_note="{op} was not measured through Core ML; without Core ML, the ANE's compiler "
                                   "rejects it")


_ROWS = (
    _make_elementary_row("asin", "2 * atan(x / (1 + sqrt((1 - x) * (1 + x))))"),
    _make_elementary_row("acos", "4 * atan(sqrt((1 - x) / 2) / (1 + sqrt((1 + x) / 2)))"),
    _make_elementary_row("tan", "sin(x) / cos(x)"),
    _make_elementary_row("sinh", "tanh(x) * cosh(x)"),
    _make_elementary_row("cosh", "u + 1 / (4 * u) with u = exp(|x|) / 2"),
    _make_elementary_row("atanh", "log((1 + x) / (1 - x)) / 2, inexact near 0"),
    OpSupport("mod", problem=_MODULO, unsupported=(M1_TO_M5,), excludes=_exclude_integers,
              note="{op} is unsupported on the ANE; equal to x - y * floor(x / y)"),
    OpSupport("reduce_prod", problem=_PRODUCT, unsupported=(M1_TO_M5,), excludes=_exclude_integers),
    OpSupport("cumsum", problem=_CUMSUM, unsupported=(ALL_TARGETS,), excludes=_exclude_integers,
              detail=_describe_summed_axis, note="{op} is unsupported on the ANE ({detail})"),
    OpSupport("fill", problem=_FILLS, unsupported=(BEFORE_M4,), excludes=_exclude_integer_fills,
              detail=_describe_fill_shape, note="fill {detail} was reported on the CPU", disputed=(Gate(first="m4"),),
              disputed_note="fill {detail} was reported on the CPU; not measured on {where}"),
    OpSupport("fill_like", (_M4_NOTES,), _FILLS, excludes=_exclude_integer_fills, disputed=(BEFORE_M4,),
              disputed_note="fill_like was reported on the CPU, and is accepted on M4"),
    OpSupport("range_1d", problem=_RANGE_1D, unsupported=(ALL_TARGETS,), detail=_describe_range_bounds,
              message=_find_range_message, note="{op} is unsupported on the ANE ({detail})"),
    OpSupport("one_hot", problem=_MASKS_AT_RUN_TIME, unsupported=(M1_TO_M5,),
              message='Unsupported MIL operation "one_hot".',
              note="{op} is unsupported on the ANE; replace it by equal of the index, as fp16, and a constant range"),
    OpSupport("band_part", problem=_MASKS_AT_RUN_TIME, unsupported=(M1_TO_M5,),
              note="{op} is unsupported on the ANE; replace it by a constant mask"),
    _make_random_row("random_normal"),
    OpSupport("random_uniform", problem=_RANDOM_NUMBERS, unsupported=(Gate(first="m1", last="m2"),),
              note="{op} generates random numbers; on the ANE they can only be an input",
              disputed=(Gate(first="m3"),),
              disputed_note="{op} generates random numbers; the hardware supports it on M3 and later, but there is no "
                            "report of Core ML using it"),
    _make_random_row("random_bernoulli"),
    _make_random_row("random_categorical"),
    OpSupport("sliding_windows", problem=_SLIDING_WINDOWS, unsupported=(M1_TO_M5,), detail=_describe_windows,
              note="{op} is unsupported on the ANE ({detail})"),
    _make_scatter_row("scatter"),
    _make_scatter_row("scatter_nd"),
    _make_scatter_row("scatter_along_axis"),
    OpSupport("crop_resize", problem=_CROP_RESIZE, unsupported=(Gate(last="m1"), M4)),
    _make_recurrent_row("lstm"),
    _make_recurrent_row("gru"),
    _make_recurrent_row("rnn", 'Unsupported MIL operation "rnn".'),
    _make_control_flow_row("cond"),
    _make_control_flow_row("while_loop"),
    _make_control_flow_row("make_list"),
    _make_control_flow_row("list_gather"),
    _make_control_flow_row("list_length"),
    _make_control_flow_row("list_read"),
    _make_control_flow_row("list_scatter"),
    _make_control_flow_row("list_write"),
    _make_texture_row("affine", _M4_CASES, _M5_SWEEP),
    _make_texture_row("resample", _M4_CASES),
    OpSupport("pad", (_M4_TABLES, _M5_SWEEP), _TEXTURE_OPS, excludes=_exclude_other_pads, disputed=(Gate(last="m1"),),
              disputed_note="a reflecting pad: native from M2 on only, not measured through Core ML"),
    OpSupport("logical_and", (_M4_NOTES,), _LOGICAL_OPS, disputed=(BEFORE_M4, Gate(first="a18")),
              disputed_note="{op} is accepted on M4, and not measured on {where}; without Core ML, the ANE's compiler "
                            "rejects it"),
    _make_logical_row("logical_or"),
    _make_logical_row("logical_xor"),
    _make_angle_row("sin", _M4_NOTES, _M5_SWEEP),
    _make_angle_row("cos", _M4_TABLES, _M5_SWEEP),
    OpSupport("read_state", (_M4_STATES,), sources=(_STATE_WIDTHS, _SMALLER_CACHE, _CACHE_UPDATE_REJECTED)),
    OpSupport("coreml_update_state", (_M4_STATES,), sources=(_STATE_WIDTHS, _SMALLER_CACHE, _CACHE_UPDATE_REJECTED)),
    OpSupport("slice_update", sources=(_WINDOW_ASSIGNMENT, _CACHE_UPDATE_REJECTED)),
    OpSupport("abs", (_M4_CASES, _M5_SWEEP)),
    OpSupport("add", (_M4_TABLES, _M5_PLAN, _M5_SWEEP, _A15_TRANSFORMER)),
    OpSupport("atan", (_M4_CASES, _M5_SWEEP, _M1_PROBE)),
    OpSupport("avg_pool", (_M4_TABLES, _M5_SWEEP, _M6_SIZES)),
    OpSupport("batch_norm", (_M4_CASES, _M5_SWEEP)),
    OpSupport("batch_to_space", (_M4_TABLES, _M5_SWEEP)),
    OpSupport("cast", (_M4_TABLES,)),
    OpSupport("ceil", (_M4_TABLES, _M5_SWEEP, _M1_PROBE)),
    OpSupport("clamped_relu", (_M5_SWEEP,)),
    OpSupport("clip", (_M4_CASES, _M5_SWEEP, _A15_TRANSFORMER)),
    OpSupport("concat", (_M4_TABLES, _M5_SWEEP, _A15_TRANSFORMER)),
    OpSupport("conv", (_M4_TABLES, _M5_PLAN, _M5_SWEEP, _M1_SIZES, _M2_SIZES, _A15_TRANSFORMER, _M6_SIZES)),
    OpSupport("conv_transpose", (_M4_TABLES, _M5_SWEEP)),
    OpSupport("depth_to_space", (_M4_CASES, _M5_SWEEP)),
    OpSupport("dequantize", (_M4_TABLES, _M5_SWEEP)),
    OpSupport("einsum", (_M5_SWEEP,)),
    OpSupport("elu", (_M4_CASES, _M5_SWEEP)),
    OpSupport("equal", (_M4_NOTES, _M5_SWEEP, _M1_PROBE)),
    OpSupport("erf", (_M4_TABLES, _M5_SWEEP)),
    OpSupport("exp", (_M4_CASES, _M5_SWEEP)),
    OpSupport("exp2", (_M4_CASES, _M5_SWEEP)),
    OpSupport("expand_dims", (_M4_TABLES, _M5_SWEEP)),
    OpSupport("floor", (_M4_TABLES, _M5_SWEEP, _M1_PROBE)),
    OpSupport("floor_div", (_M4_NOTES, _M5_SWEEP)),
    OpSupport("gather", (_M4_TABLES,)),
    OpSupport("gather_along_axis", (_M4_NOTES,)),
    OpSupport("gather_nd", (_M4_TABLES,)),
    OpSupport("gelu", (_M4_NOTES, _M5_SWEEP, _M1_PROBE)),
    OpSupport("greater", (_M4_TABLES, _M5_SWEEP)),
    OpSupport("greater_equal", (_M4_TABLES, _M5_SWEEP, _M1_PROBE)),
    OpSupport("identity", (_M4_TABLES,)),
    OpSupport("instance_norm", (_M4_CASES, _M5_SWEEP)),
    OpSupport("inverse", (_M4_TABLES, _M5_SWEEP)),
    OpSupport("l2_norm", (_M4_CASES, _M5_SWEEP)),
    OpSupport("l2_pool", (_M4_TABLES, _M5_SWEEP)),
    OpSupport("layer_norm", (_M4_TABLES, _M5_SWEEP)),
    OpSupport("leaky_relu", (_M4_TABLES, _M5_SWEEP)),
    OpSupport("less", (_M4_NOTES, _M5_SWEEP, _M1_PROBE)),
    OpSupport("less_equal", (_M4_TABLES, _M5_SWEEP, _M1_PROBE)),
    OpSupport("linear", (_M4_TABLES, _M5_SWEEP)),
    OpSupport("linear_activation", (_M4_CASES, _M5_SWEEP)),
    OpSupport("local_response_norm", (_M4_CASES, _M5_SWEEP, _M1_PROBE)),
    OpSupport("log", (_M4_CASES, _M5_SWEEP)),
    OpSupport("logical_not", (_M5_SWEEP, _M1_PROBE)),
    OpSupport("matmul", (_M4_TABLES, _M5_SWEEP, _M1_SIZES, _M2_SIZES, _A15_TRANSFORMER, _M6_SIZES)),
    OpSupport("max_pool", (_M4_TABLES, _M5_SWEEP, _M6_SIZES)),
    OpSupport("maximum", (_M4_NOTES, _M5_SWEEP)),
    OpSupport("minimum", (_M4_NOTES, _M5_SWEEP)),
    OpSupport("mul", (_M4_NOTES, _M5_PLAN, _M5_SWEEP, _A15_TRANSFORMER)),
    OpSupport("not_equal", (_M4_TABLES, _M5_SWEEP, _M1_PROBE)),
    OpSupport("pixel_shuffle", (_M4_TABLES, _M5_SWEEP)),
    OpSupport("pixel_unshuffle", (_M4_TABLES, _M5_SWEEP)),
    OpSupport("pow", (_M4_TABLES, _M5_SWEEP, _M1_PROBE)),
    OpSupport("prelu", (_M5_SWEEP, _M1_PROBE)),
    OpSupport("quantize", (_M4_TABLES, _M5_SWEEP)),
    OpSupport("real_div", (_M4_TABLES, _M5_SWEEP)),
    OpSupport("reduce_l1_norm", (_M4_TABLES, _M5_SWEEP)),
    OpSupport("reduce_l2_norm", (_M4_CASES, _M5_SWEEP)),
    OpSupport("reduce_log_sum", (_M4_CASES, _M5_SWEEP)),
    OpSupport("reduce_log_sum_exp", (_M4_CASES, _M5_SWEEP, _M1_PROBE)),
    OpSupport("reduce_max", (_M4_TABLES, _M5_SWEEP)),
    OpSupport("reduce_mean", (_M4_CASES, _M5_PLAN, _M5_SWEEP, _A15_TRANSFORMER)),
    OpSupport("reduce_min", (_M4_CASES, _M5_SWEEP)),
    OpSupport("reduce_sum", (_M4_TABLES, _M5_SWEEP)),
    OpSupport("reduce_sum_square", (_M4_CASES, _M5_SWEEP)),
    OpSupport("relu", (_M4_TABLES, _M5_SWEEP, _M1_SIZES, _M2_SIZES, _M6_SIZES)),
    OpSupport("relu6", (_M4_TABLES, _M5_SWEEP)),
    OpSupport("reshape", (_M4_TABLES, _M5_SWEEP)),
    OpSupport("resize", (_M4_TABLES, _M5_SWEEP)),
    OpSupport("resize_bilinear", (_M4_NOTES, _M5_SWEEP)),
    OpSupport("resize_nearest_neighbor", (_M4_TABLES, _M5_SWEEP)),
    OpSupport("reverse", (_M4_CASES, _M5_SWEEP, _M1_PROBE)),
    OpSupport("round", (_M4_TABLES, _M5_SWEEP, _M1_PROBE)),
    OpSupport("rsqrt", (_M4_TABLES, _M5_PLAN, _M5_SWEEP, _A15_TRANSFORMER)),
    OpSupport("scaled_dot_product_attention", (_M4_NOTES, _M5_SWEEP, _M1_PROBE)),
    OpSupport("scaled_tanh", (_M4_CASES, _M5_SWEEP)),
    OpSupport("select", (_M4_TABLES, _M5_SWEEP)),
    OpSupport("sigmoid", (_M4_CASES, _M5_SWEEP)),
    OpSupport("sigmoid_hard", (_M4_CASES, _M5_SWEEP)),
    OpSupport("sign", (_M4_CASES, _M1_PROBE)),
    OpSupport("silu", (_M4_TABLES, _M5_SWEEP)),
    OpSupport("slice_by_index", (_M4_TABLES, _M5_SWEEP)),
    OpSupport("slice_by_size", (_M4_TABLES, _M5_SWEEP, _M1_SIZES, _M2_SIZES)),
    OpSupport("softmax", (_M4_TABLES, _M5_SWEEP, _A15_TRANSFORMER)),
    OpSupport("softplus", (_M4_CASES, _M5_SWEEP)),
    OpSupport("softsign", (_M4_TABLES, _M5_SWEEP)),
    OpSupport("space_to_batch", (_M4_CASES, _M5_SWEEP)),
    OpSupport("space_to_depth", (_M4_CASES, _M5_SWEEP)),
    OpSupport("split", (_M4_CASES, _M5_SWEEP, _A15_TRANSFORMER)),
    OpSupport("sqrt", (_M4_CASES, _M5_SWEEP)),
    OpSupport("square", (_M4_TABLES, _M5_SWEEP)),
    OpSupport("squeeze", (_M4_TABLES, _M5_SWEEP)),
    OpSupport("stack", (_M4_TABLES, _M5_SWEEP)),
    OpSupport("sub", (_M4_TABLES, _M5_SWEEP, _A15_TRANSFORMER)),
    OpSupport("tanh", (_M4_TABLES, _M5_SWEEP)),
    OpSupport("thresholded_relu", (_M4_TABLES, _M5_SWEEP)),
    OpSupport("tile", (_M4_NOTES, _M5_SWEEP)),
    OpSupport("topk", (_M4_TABLES, _M5_SWEEP)),
    OpSupport("transpose", (_M4_TABLES, _M5_SWEEP, _M1_SIZES, _M2_SIZES)),
    OpSupport("upsample_bilinear", (_M4_NOTES, _M5_SWEEP)),
    OpSupport("upsample_nearest_neighbor", (_M4_TABLES,)),
)

OP_SUPPORT: dict[str, OpSupport] = {row.op: row for row in _ROWS}
"""The rows by op type; the order of rows of one code is that in which their ops are reported."""

_SUPPORTED_DTYPE_FORMS = frozenset(form.strip() for form in """
    bool cast fp16; fp32 cast fp16; fp16 cast fp32; fp16 quantize int8; int8 dequantize fp16; int16 squeeze int16
    fp16 equal bool; fp16 not_equal bool; fp16 less bool; fp16 less_equal bool; fp16 greater bool
    fp16 greater_equal bool; bool logical_and bool; bool logical_not bool; bool fp16 select fp16
    fp16 uint16 gather fp16; fp16 int16 gather_nd fp16; fp16 int16 gather_along_axis fp16; fp16 topk fp16 uint16
""".replace(";", "\n").splitlines())
"Supported forms on other types than fp16: the types read, the op, the types made."


def find_row(op_type: str) -> OpSupport:
    """Return the row of an op type; an empty one for a type on which there is no source."""
    return OP_SUPPORT.get(op_type) or OpSupport(op_type)


def find_problem_rows(code: str) -> tuple[OpSupport, ...]:
    """Return the rows of ops that are unsupported under `code`, in the order of the table."""
    return tuple(row for row in _ROWS if row.problem is not None and row.problem.code == code)


@cache
def find_observations(op_type: str) -> dict[Generation, Observation]:
    """Return every generation whose ANE was observed to run an op of this type, with the first source."""
    seen = {each.generation: each for each in reversed(find_row(op_type).supported)}
    return {generation: seen[generation] for generation in GENERATIONS if generation in seen}


def find_evidence(op_type: str, generation: Generation) -> Evidence | None:
    """Return the evidence that the ANE of `generation` supports an op of this type, or None."""
    found = find_observations(op_type).get(generation)
    return found.evidence if found else None


def is_dtype_form_supported(op_type: str, read: Iterable[str], made: Iterable[str]) -> bool:
    """Return whether an op of a supported type was observed to read and make values of these types."""
    read, made = set(read), set(made)
    return read | made <= {"fp16"} or " ".join([*sorted(read), op_type, *sorted(made)]) in _SUPPORTED_DTYPE_FORMS
