"""Limits of the ANE by generation: one table, read by rules. A missing entry means that no source states the limit.

A bound that is not `sure` is disputed, or was carried over from a neighbouring generation by its source or by us.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from ..passes.evidence import (
    WITHOUT_CORE_ML,
    Community,
    Evidence,
    cite_ane_compiler_quirk,
    cite_apple_authoring_rules,
    cite_m4_study,
)
from ..passes.targets import Generation, format_generations, get_generations_between

__all__ = ["LIMITS", "MAX_POOL_SIDE", "Bound", "ExceededLimit", "collect_evidence", "find_exceeded_limit", "find_limit"]

MAX_POOL_SIDE = 31
"The longest side of any pool's window, when the compiler of the ANE is called without Core ML; M1 29."

_STUDY = "751K/Apple-Neural-Engine-Microarchitecture-Study-M6"
_TARGETS = "sbryngelson/ANEForge aneforge/_targets.py"


def _cite_m6_study(says: str) -> Evidence:
    return Community(says, chip="M6", date="2026", source=f"{_STUDY} notes/defects.md")


def _cite_ane_compiler_targets(says: str, chip: str) -> Evidence:
    return Community(f"{says} {WITHOUT_CORE_ML}", chip=chip, date="2026", source=_TARGETS)


def _cite_coreml_log(says: str, number: int = 2) -> Evidence:
    return Community(f"{says} (a log of Core ML's; NeuralNetwork format)", date="2020-07",
                     source=f"https://github.com/hollance/neural-engine/issues/{number}")


@dataclass(frozen=True)
class Bound:
    """The largest value supported by the generations from `first` to `last`; `says` are the sources."""

    first: str
    last: str
    most: int
    says: tuple[Evidence, ...]
    sure: bool = True

    @property
    def generations(self) -> tuple[Generation, ...]:
        return get_generations_between(self.first, self.last)


@dataclass(frozen=True)
class ExceededLimit:
    """An exceeded limit of some generations: `sure` if a source states one of them, `False` if all are assumed."""

    most: int
    sure: bool
    words: str


_WIDTH_13 = _cite_ane_compiler_targets(
    "conv kernels up to 13 wide compile, 14 does not; M2 and M3 are assumed to be equal", "M1"
)
_WIDTH_15 = cite_m4_study("conv kernels of 1x15 and 15x15 are accepted; 1x16 and wider, and 17x17, are unsupported")
_HEIGHT_31 = cite_m4_study("kernels of 28x1 and 31x1 are accepted, 32x1 and 64x1 are rejected")
_DIM_16384 = _cite_ane_compiler_targets(
    "width, height and the inner dimension of matmuls are limited to 16384, channels to 65536", "M1 and M2"
)
_DEVICE_NOT_STATED = "the device is not stated; the newest chip at that time was A13"
_INNER_32768 = cite_m4_study(
    "a matmul over 32768 is accepted; over 49152, 65535 and 65536 it is unsupported: 2 bytes each do not fit 65536"
)
_DIM_65536 = cite_m4_study("65536 is accepted, 65537 is rejected, for each of N, D, C, H and W")
_SAME_M6 = Community("the size limits measured on M4 hold when the same models are compiled for the M6 family",
                     chip="M6", date="2026", source=f"{_STUDY} notes/coreml_dispatch.md")
_M3_WIDTH = Community("an input 16384 wide compiles, 17920 does not", chip="M3 Ultra", os="macOS 26.3.1",
                      date="2026-03-20", source="https://github.com/ncdrone/rustane/issues/13")
_RANGE_MACOS_26 = Community(
    "Core ML names the range N[1-65536]D[1-16384]C[1-65536]H[1-16384]W[1-16384] and rejects a width of "
    "240000; the chip is not stated",
    os="macOS 26.1 beta",
    date="2025-09-25",
    source="https://github.com/FluidInference/FluidAudio/issues/121",
)
_M2_WIDTH = Community("Tensor width goes beyond limit supported (16414/16390 > 16384); its author regards the message "
                      "as a symptom of tiling", chip="M2", date="2026-05-09",
                      source="https://github.com/FluidInference/mobius/pull/61")

_AXIS_65536 = (
    Bound("m4", "m4", 65536, (_DIM_65536,)),
    Bound("a18", "a18", 65536, (_DIM_65536,), sure=False),
    Bound("m5", "m5", 65536, (_cite_ane_compiler_targets("an axis is limited to 65536", "M5"),)),
    Bound("m6", "m6", 65536, (_SAME_M6,)),
)

LIMITS: dict[str, tuple[Bound, ...]] = {
    "conv-kernel-width": (
        Bound("a12", "a13", 13, (_WIDTH_13,), sure=False),
        Bound("a14", "a14", 13, (_WIDTH_13,)),
        Bound("a15", "m3", 13, (_WIDTH_13,), sure=False),
        Bound("m4", "m4", 15, (_WIDTH_15,)),
        Bound("a18", "a18", 15, (_WIDTH_15,), sure=False),
        Bound("m5", "m5", 15, (_cite_ane_compiler_targets("a kernel 16 wide fails to compile, 15 does not", "M5"),)),
        Bound(
            "m6",
            "m6",
            15,
            (
                _cite_m6_study(
                    "a model with such a conv fails to compile and runs entirely on the CPU, 4 to 7 times slower"
                ),
            ),
        ),
    ),
    "conv-kernel-height": (
        Bound("m4", "m4", 31, (_HEIGHT_31,)),
        Bound("a18", "a18", 31, (_HEIGHT_31,), sure=False),
        Bound("m6", "m6", 31, (_SAME_M6,)),
    ),
    "max-pool-width": (
        Bound(
            "m4",
            "m4",
            8,
            (
                cite_m4_study(
                    "max_pool of 8x8 and 9x1 is accepted, 9x9 and 1x9 are unsupported: the kernel's width "
                    "must be [1-8] or 32"
                ),
            ),
        ),
        Bound("a18", "a18", 8, (_SAME_M6,), sure=False),
        Bound("m6", "m6", 8, (_SAME_M6,)),
    ),
    "pool-kernel": (
        Bound(
            "a12",
            "a13",
            13,
            (
                _cite_coreml_log(
                    f"a pool 28 wide is unsupported: (dilated)kernel width = 28 > 13; {_DEVICE_NOT_STATED}"
                ),
            ),
        ),
    ),
    "pool-stride": (
        Bound("a12", "a13", 2, (_cite_coreml_log(f"a pool is unsupported: stride_x = 4 > 2; {_DEVICE_NOT_STATED}"),)),
    ),
    "upsampling": (
        Bound("a12", "a13", 2, (_cite_coreml_log(f"only scaling factor of 2 is supported; {_DEVICE_NOT_STATED}"),)),
    ),
    "spatial": (
        Bound("a12", "a13", 16384, (_DIM_16384,), sure=False),
        Bound("a14", "a15", 16384, (_DIM_16384, _M2_WIDTH, _RANGE_MACOS_26)),
        Bound("a16", "m3", 16384, (_M3_WIDTH,)),
        *_AXIS_65536,
    ),
    "channels": (
        Bound("a12", "a13", 65536, (_DIM_16384,), sure=False),
        Bound("a14", "a15", 65536, (_DIM_16384, _RANGE_MACOS_26)),
        Bound("a16", "m3", 65536, (_DIM_16384,), sure=False),
        *_AXIS_65536,
    ),
    "matmul-inner": (
        Bound("a12", "a13", 16384, (_DIM_16384,), sure=False),
        Bound("a14", "a15", 16384, (_DIM_16384,)),
        Bound("a16", "m3", 16384, (_DIM_16384,), sure=False),
        Bound("m4", "m4", 32768, (_INNER_32768,)),
        Bound("a18", "a18", 32768, (_INNER_32768,), sure=False),
        Bound(
            "m5",
            "m5",
            32768,
            (_cite_ane_compiler_targets("contradicts it: on M5 the inner dimension is limited to 65536", "M5"),),
            sure=False,
        ),
        Bound("m6", "m6", 32768, (_SAME_M6,)),
    ),
    "rank": (
        Bound(
            "",
            "",
            5,
            (
                cite_apple_authoring_rules("the ANE supports up to 5 dimensions"),
                cite_ane_compiler_quirk("rank 5 is the maximum"),
            ),
        ),
    ),
}


def find_limit(name: str, generations: Sequence[Generation]) -> Bound | None:
    """Find the strictest bound called `name` among `generations`, or None if no source states one for any of them."""
    return _find_cached_limit(name, tuple(generations))


@lru_cache(maxsize=4096)
def _find_cached_limit(name: str, generations: tuple[Generation, ...]) -> Bound | None:
    wanted = set(generations)
    found = [bound for bound in LIMITS[name] if wanted.intersection(bound.generations)]
    return min(found, key=lambda bound: (bound.most, not bound.sure), default=None)


def find_exceeded_limit(name: str, value: int, generations: Sequence[Generation]) -> ExceededLimit | None:
    """Find which of `generations` support less than `value`, with words such as "> 15 (M4; 13 on M1)".

    Returns None if all support it.
    """
    return _find_cached_exceeded_limit(name, value, tuple(generations))


@lru_cache(maxsize=4096)
def _find_cached_exceeded_limit(name: str, value: int, generations: tuple[Generation, ...]) -> ExceededLimit | None:
    wanted = set(generations)
    broken = [bound for bound in LIMITS[name] if bound.most < value and wanted.intersection(bound.generations)]
    if not broken:
        return None
    parts = []
    for most in sorted({bound.most for bound in broken}, reverse=True):
        for sure in (True, False):
            chips = [chip for bound in broken if bound.most == most and bound.sure is sure
                     for chip in bound.generations if chip in wanted]
            if chips:
                parts.append((most, f"{'' if sure else 'assumed on '}{format_generations(chips)}"))
    words = "; ".join(chips if most == parts[0][0] else f"{most} on {chips}".replace("on assumed", "assumed")
                      for most, chips in parts)
    return ExceededLimit(parts[0][0], any(bound.sure for bound in broken), f"> {parts[0][0]} ({words})")


def collect_evidence(*names: str) -> tuple[Evidence, ...]:
    """Collect the sources of the bounds called `names`, each once."""
    return tuple(dict.fromkeys(source for name in names for bound in LIMITS[name] for source in bound.says))
