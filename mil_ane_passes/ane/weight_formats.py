"""Compressed weights: gains of each format by the latency model, and formats with measured failures.

Advice only: compression changes the weights, which is the decision of the model's author. Weights stored as fp16 are
estimated at their size in each format; compressed weights stay unchanged. Each format has published measurements for
and against it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from coremltools.converters.mil.mil import Operation, Program, Var

from ..ir.query import is_compressed, iterate_ops
from ..passes.contract import Community, Vendor
from ..passes.evidence import Evidence
from ..passes.plan import Plan
from .latency import LatencyReport, estimate_latency
from .latency_terms import Work

__all__ = ["FORMATS", "FormatAdvice", "FormatFault", "SizeAdvice", "WeightFormat", "advise_on_weights"]

_MIN_ELEMENTS = 2048
"Weights of no more elements stay as they are: the default of coremltools.optimize (`weight_threshold`)."
_STORED_WEIGHT_KINDS = ("conv", "depthwise")
"Kinds of work with a stored weight: convs, and linears and matmuls, which are described as convs of width 1."
_QWEN = "https://github.com/john-rocky/CoreML-LLM"
_M6_STUDY = "751K/Apple-Neural-Engine-Microarchitecture-Study-M6 data/05_compute/wfmt"
_GUIDE = "https://apple.github.io/coremltools/docs-guides/source/opt-palettization-perf.html"
_QUANTIZATION_GUIDE = "https://apple.github.io/coremltools/docs-guides/source/opt-quantization-perf.html"
_PREFILL = "https://github.com/trisanths/ane-llm-prefill"
_CADAMCAT = "https://github.com/cadamcat/llms-on-apple-neural-engine"


@dataclass(frozen=True)
class WeightFormat:
    """A format: `bits` for each element, and a table or scales beside; `activations`: int8, too.

    `kind` is the latency model's name of the format. `evidence` are measurements for and against it.
    """

    name: str
    words: str
    bits: int
    kind: str
    activations: bool = False
    evidence: tuple[Evidence, ...] = ()

    def compute_bytes(self, work: Work) -> int:
        """Compute the bytes of a weight in this format: its elements, and 2 bytes for each table entry or scale."""
        beside = 1 << self.bits if self.kind == "palette" else work.outer
        return -(-work.dense_bytes // 2 * self.bits // 8) + 2 * beside

    def apply(self, work: Work) -> Work:
        """Describe `work` with its weight in this format; unchanged without a large weight in fp16."""
        if work.kind not in _STORED_WEIGHT_KINDS or work.format != "dense" or work.dense_bytes // 2 <= _MIN_ELEMENTS:
            return work
        stored = self.compute_bytes(work)
        if stored >= work.weight_bytes:
            return work
        more: dict[str, Any] = {"int8": True, "activation_bytes": 1} if self.activations else {}
        return replace(work, weight_bytes=stored, format=self.kind, **more)


FORMATS = (
    WeightFormat("palette6", "6-bit palette per tensor", 6, "palette", evidence=(
        Community("an output projection of 1050 MB: 16.4 -> 6.4 ms", source="anemll-bench#5", chip="M4"),)),
    WeightFormat("palette4", "4-bit palette per tensor", 4, "palette", evidence=(
        Community("1x1 convs of 2048 channels on one row take 0.32 of the time of fp16", source=_M6_STUDY, chip="M6",
                  os="macOS 27.0.1", date="2026"),
        Community("contradicts it: 6 % slower than int8 weights on a linear of 4096 x 4096 with 4096 rows, which is "
                  "compute-bound", source=_PREFILL, chip="M2 Pro", os="macOS 27.0"))),
    WeightFormat("int8", "int8 with one scale per output channel", 8, "int8", evidence=(
        Community("8 linears of 4096 x 4096: 4.58 -> 2.39 ms on 1 row, 43.7 -> 27.0 ms on 1024 rows", source=_PREFILL,
                  chip="M2 Pro", os="macOS 27.0"),
        Vendor("contradicts it: ResNet50 1.38 -> 1.50 ms, MobileViTv2 1.36 -> 1.37 ms", source=_QUANTIZATION_GUIDE,
               chip="A17 Pro"))),
    WeightFormat("int4", "int4 with one scale per output channel", 4, "int8", evidence=(
        Community("contradicts it: a language model of 2B weights generates 11.7 -> 19.1 tokens/s, and 31.4 with 4-bit "
                  "palettes in groups of 32", source=_QWEN, chip="M4"),)),
    WeightFormat("w8a8", "int8 weights and activations", 8, "int8", activations=True, evidence=(
        Community("128 1x1 convs of 512 channels on 64 x 64: 14.77 -> 7.93 ms", source=_CADAMCAT, chip="M5 Pro"),
        Vendor("ResNet50 1.38 -> 0.77 ms, MobileViTv2 1.36 -> 1.03 ms", source=_QUANTIZATION_GUIDE, chip="A17 Pro"),
        Community("contradicts it: 8 linears of 4096 x 4096 on 1 row take 2.39 ms with int8 weights only, 2.51 with "
                  "both",
                  source=_PREFILL, chip="M2 Pro", os="macOS 27.0"))),
)


@dataclass(frozen=True)
class FormatFault:
    """A format that was measured to go wrong, and the weights of the program that are stored so (`found`)."""

    name: str
    words: str
    evidence: tuple[Evidence, ...]
    found: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {"format": self.name, "words": self.words, "found": list(self.found),
                "evidence": [each.to_dict() for each in self.evidence]}


_FAULTS = (
    FormatFault("grouped-palette", "palettes for groups of channels", (
        Vendor("ResNet50 with one palette per 4 channels: 1.71 ms, 1.63 in fp16; per 8 and 16 channels 1.34 to 1.38, "
               "with one palette 1.12", source=_GUIDE, chip="A17 Pro"),
        Community("contradicts it: groups of 8 to 32 give 31 tokens/s in a language model, 11.7 in fp16",
                  source=_QWEN, chip="M4"))),
    FormatFault("scaled-palette", "a palette with one scale per channel", (
        Community("a linear of 2560 to 10240 with 4-bit palettes: 10 times slower than fp16, 5 times with int8 "
                  "activations", source=_CADAMCAT, chip="M5 Pro"),
        Community("a 1x1 conv of 64 channels with 4-bit palettes and two scales for each output: 1921 of 4096 outputs "
                  "wrong (Core AI)", source="https://github.com/apple/coreai-torch/issues/93", chip="M5 Pro",
                  os="macOS 27.0", date="2026-09"))),
    FormatFault("vector-palette", "palettes of vectors", (
        Community("1x1 convs of 2048 channels with vectors of 2 and 4 run on the CPU", source=_M6_STUDY, chip="M6",
                  os="macOS 27.0.1", date="2026"),)),
    FormatFault("block-integers", "integers with scales for blocks of input channels", (
        Community("8 bits: output cosine 0.367 on the Neural Engine, 0.999 on the GPU (Core AI)",
                  source="https://github.com/apple/coreai-models/issues/279", chip="iPhone 16 Pro Max", os="iOS 27.0",
                  date="2026-09"),
        Community("1x1 convs of 2048 channels with int4 in blocks run on the CPU", source=_M6_STUDY, chip="M6",
                  os="macOS 27.0.1", date="2026"))),
)


@dataclass(frozen=True)
class FormatAdvice:
    """The predicted effect of one weight format: bytes of all weights, and the latency of the program."""

    format: WeightFormat
    weight_bytes: int
    latency: LatencyReport
    before: LatencyReport

    @property
    def change(self) -> float:
        """The share by which the latency changes; negative is faster."""
        return self.latency.latency_us / self.before.latency_us - 1 if self.before.latency_us else 0.0

    def to_dict(self) -> dict[str, Any]:
        return {"format": self.format.name, "words": self.format.words, "weight_bytes": self.weight_bytes,
                "latency_us": round(self.latency.latency_us, 3),
                "latency_low_us": round(self.latency.latency_low_us, 3),
                "latency_high_us": round(self.latency.latency_high_us, 3), "latency_term": self.latency.term,
                "latency_extrapolated": self.latency.extrapolated, "change": round(self.change, 4),
                "evidence": [each.to_dict() for each in self.format.evidence]}


@dataclass(frozen=True)
class SizeAdvice:
    """Advice on the weights that a program's ops read: `weight_bytes` as stored, `dense_bytes` of them in fp16."""

    weight_bytes: int
    dense_bytes: int
    formats: list[FormatAdvice] = field(default_factory=list)
    faults: list[FormatFault] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON of `lint --sizes`; `schema` is its version."""
        return {"schema": 1, "weight_bytes": self.weight_bytes, "dense_bytes": self.dense_bytes,
                "formats": [each.to_dict() for each in self.formats],
                "went_wrong": [each.to_dict() for each in self.faults]}


def advise_on_weights(
    program: Program, plan: Plan | None, target: str, before: LatencyReport | None = None,
) -> SizeAdvice:
    """Estimate `program` with its fp16 weights in each format, and find the formats in it that went wrong.

    `before` is the estimate of the program as it is; it is made where it is missing. The ops stay where `plan` has them
    (without a plan, on the ANE): that a format takes them off the ANE is said in its evidence, or found by rules of its
    own. Weights that ops on the CPU read do not count. No weight is read.
    """
    before = before or estimate_latency(program, plan, target)
    dense, packed = _measure_weights(program, plan, target, None)
    advice = []
    for each in FORMATS if dense else ():
        latency = estimate_latency(program, plan, target, change=each.apply)
        advice.append(FormatAdvice(each, sum(_measure_weights(program, plan, target, each)), latency, before))
    return SizeAdvice(dense + packed, dense, advice, list(_find_faults(program)))


def _measure_weights(
    program: Program, plan: Plan | None, target: str, form: WeightFormat | None,
) -> tuple[int, int]:
    """Measure the stored bytes of the weights of ops on the ANE, each once: in fp16, and compressed, by `form`."""
    seen: dict[Any, Work] = {}

    def collect_weights(work: Work) -> Work:
        if work.weight is not None and work.kind in _STORED_WEIGHT_KINDS:
            seen.setdefault(work.weight, work if form is None else form.apply(work))
        return work

    estimate_latency(program, plan, target, change=collect_weights)
    dense = sum(work.weight_bytes for work in seen.values() if work.format == "dense")
    return dense, sum(work.weight_bytes for work in seen.values()) - dense


def _find_faults(program: Program) -> Iterator[FormatFault]:
    """Find each format that went wrong, with the weights that are stored so."""
    found: dict[str, list[str]] = {each.name: [] for each in _FAULTS}
    for op in (op for _, op in iterate_ops(program)):
        for name in _list_fault_names(op):
            found[name].append(op.outputs[0].name)
    return (replace(each, found=tuple(found[each.name])) for each in _FAULTS)


def _list_fault_names(op: Operation) -> Iterable[str]:
    """List the formats that went wrong of which `op`, which unpacks a weight, is the last step."""
    if op.op_type == "constexpr_lut_to_dense" and op.lut.rank > 1:  # of iOS 18: groups, entries, vectors
        *groups, _, vector = op.lut.shape
        if vector > 1:
            yield "vector-palette"
        if any(extent > 1 for extent in groups):
            yield "grouped-palette"
    if op.op_type == "constexpr_blockwise_shift_scale":
        if _is_palette(op.data):
            yield "scaled-palette"
        elif op.scale.rank > 1 and op.scale.shape[1] > 1:
            yield "block-integers"


def _is_palette(var: Var) -> bool:
    return is_compressed(var) and var.op.op_type == "constexpr_lut_to_dense"
