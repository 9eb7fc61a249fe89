"""Op types observed to run on the ANE, by generation. For types that are not listed, the answer is unknown.

A type is listed for its ordinary forms (fp16, static shapes), and forms on other types separately; unsupported forms
have rules of their own. Types on which two sources contradict each other (cumsum, argmax, argsort and others that a
private route accepts and Core ML rejects) are not listed for chips on which Core ML was not measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..passes.evidence import PRIVATE_ROUTE, Community, Evidence, Measured, Vendor, cite_m4_study, cite_private_route
from ..passes.targets import GENERATIONS, Generation, parse_target

__all__ = ["Observation", "find_evidence", "find_observations", "is_dtype_form_supported"]

_STUDY = "751K/Apple-Neural-Engine-Microarchitecture-Study-M6"
_FORGE = "sbryngelson/ANEForge docs"

_BY_CORE_ML = cite_m4_study("accepted, by Core ML's own answer", rows=True)
_STATED_IN_NOTES = cite_m4_study("accepted, as the notes on the measured kinds state")
_NOT_LISTED_UNSUPPORTED = cite_m4_study("among the 276 cases that were tried, and not listed with those refused")
_STATEFUL_MODEL = Measured(
    "a model with a state 256 wide runs on the ANE",
    chip="M4",
    os="macOS 15.2",
    date="2025-12-19",
    source="https://github.com/apple/coremltools/issues/2631",
)
_M5_SWEEP = Community(
    f"compiles and runs {PRIVATE_ROUTE}", chip="M5", date="2026", source=f"{_FORGE}/capabilities.json"
)
_M5_COMPUTE_PLAN = Community("supported by the ANE in a published compute plan", chip="M5 Max",
                             source="https://github.com/0seba/VoxCPMANE/issues/15")
_M1_PROBE = cite_private_route("native, by a probe", chip="M1")
_AT_MAX_SIZE = Community(f"compiles and runs up to its largest size {PRIVATE_ROUTE}", chip="M1 and M2 Pro", date="2026",
                         source="sbryngelson/ANEForge aneforge/_targets.py")
_DISTILBERT = Vendor("the code has it in a transformer of which all but 4 of 606 ops, its embedding, run on the ANE",
                     chip="A15 (iPhone 13 Pro Max)", os="iOS 16.0", date="2022",
                     source="apple/ml-ane-transformers README.md")
_M6_SIZE_MODELS = Community(f"in the models for size limits, which compile for the M6 family as for M4 {PRIVATE_ROUTE}",
                            chip="M6", date="2026", source=f"{_STUDY} notes/coreml_dispatch.md")

_TABLE: tuple[tuple[str, Evidence, str], ...] = (
    ("m4", _BY_CORE_ML, """
        add avg_pool batch_to_space cast ceil concat conv conv_transpose cos dequantize erf expand_dims floor gather
        gather_nd greater greater_equal identity inverse l2_pool layer_norm leaky_relu less_equal linear matmul
        max_pool not_equal pad pixel_shuffle pixel_unshuffle pow quantize real_div reduce_l1_norm reduce_max reduce_sum
        relu relu6 reshape resize resize_nearest_neighbor round rsqrt select silu slice_by_index slice_by_size softmax
        softsign square squeeze stack sub tanh thresholded_relu topk transpose upsample_nearest_neighbor"""),
    ("m4", _STATED_IN_NOTES, """
        equal fill_like floor_div gather_along_axis gelu less logical_and maximum minimum mul resize_bilinear
        scaled_dot_product_attention sin tile upsample_bilinear"""),
    ("m4", _NOT_LISTED_UNSUPPORTED, """
        abs affine atan batch_norm clip depth_to_space elu exp exp2 instance_norm l2_norm linear_activation
        local_response_norm log reduce_l2_norm reduce_log_sum reduce_log_sum_exp reduce_mean reduce_min
        reduce_sum_square resample reverse scaled_tanh sigmoid sigmoid_hard sign softplus space_to_batch space_to_depth
        split sqrt"""),
    ("m4", _STATEFUL_MODEL, "read_state coreml_update_state"),
    ("m5", _M5_COMPUTE_PLAN, "add conv mul reduce_mean rsqrt"),
    ("m5", _M5_SWEEP, """
        abs add affine atan avg_pool batch_norm batch_to_space ceil clamped_relu clip concat conv conv_transpose cos
        depth_to_space dequantize einsum elu equal erf exp exp2 expand_dims floor floor_div gelu greater greater_equal
        instance_norm inverse l2_norm l2_pool layer_norm leaky_relu less less_equal linear linear_activation
        local_response_norm log logical_not matmul max_pool maximum minimum mul not_equal pad pixel_shuffle
        pixel_unshuffle pow prelu quantize real_div reduce_l1_norm reduce_l2_norm reduce_log_sum reduce_log_sum_exp
        reduce_max reduce_mean reduce_min reduce_sum reduce_sum_square relu relu6 reshape resize resize_bilinear
        resize_nearest_neighbor reverse round rsqrt scaled_dot_product_attention scaled_tanh select sigmoid
        sigmoid_hard silu sin slice_by_index slice_by_size softmax softplus softsign space_to_batch space_to_depth
        split sqrt square squeeze stack sub tanh thresholded_relu tile topk transpose upsample_bilinear"""),
    ("m1", _M1_PROBE, """
        atan ceil equal floor gelu greater_equal less less_equal local_response_norm logical_not not_equal pow prelu
        reduce_log_sum_exp reverse round scaled_dot_product_attention sign"""),
    ("m1", _AT_MAX_SIZE, "conv matmul relu slice_by_size transpose"),
    ("m2", _AT_MAX_SIZE, "conv matmul relu slice_by_size transpose"),
    ("a15", _DISTILBERT, "add clip concat conv matmul mul reduce_mean rsqrt softmax split sub"),
    ("m6", _M6_SIZE_MODELS, "avg_pool conv matmul max_pool relu"),
)

_SUPPORTED_DTYPE_FORMS = frozenset(form.strip() for form in """
    bool cast fp16; fp32 cast fp16; fp16 cast fp32; fp16 quantize int8; int8 dequantize fp16; int16 squeeze int16
    fp16 equal bool; fp16 not_equal bool; fp16 less bool; fp16 less_equal bool; fp16 greater bool
    fp16 greater_equal bool; bool logical_and bool; bool logical_not bool; bool fp16 select fp16
    fp16 uint16 gather fp16; fp16 int16 gather_nd fp16; fp16 int16 gather_along_axis fp16; fp16 topk fp16 uint16
""".replace(";", "\n").splitlines())
"Supported forms on other types than fp16: the types read, the op, the types made."


@dataclass(frozen=True)
class Observation:
    """An observation: its source, and the chip of the generation."""

    chip: str
    evidence: Evidence

    @property
    def private(self) -> bool:
        return PRIVATE_ROUTE in self.evidence.says


def _iterate_observations() -> Iterator[tuple[tuple[str, str], Observation]]:
    for chip, evidence, kinds in reversed(_TABLE):  # of two sources for one type, the first in the table wins
        for kind in kinds.split():
            yield (kind, parse_target(chip)[0].name), Observation(chip.upper(), evidence)


_OBSERVATIONS: dict[tuple[str, str], Observation] = dict(_iterate_observations())


def find_evidence(op_type: str, generation: Generation) -> Evidence | None:
    """Return the evidence that the ANE of `generation` supports an op of this type, or None."""
    found = _OBSERVATIONS.get((op_type, generation.name))
    return found.evidence if found else None


def find_observations(op_type: str) -> dict[Generation, Observation]:
    """Return every generation whose ANE was observed to run an op of this type."""
    return {generation: found for generation in GENERATIONS
            if (found := _OBSERVATIONS.get((op_type, generation.name))) is not None}


def is_dtype_form_supported(op_type: str, read: Iterable[str], made: Iterable[str]) -> bool:
    """Return whether an op of a supported type was observed to read and make values of these types."""
    read, made = set(read), set(made)
    return read | made <= {"fp16"} or " ".join([*sorted(read), op_type, *sorted(made)]) in _SUPPORTED_DTYPE_FORMS
