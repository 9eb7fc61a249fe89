"""ANE322: oscillators of converted vocoders, held against PyTorch at fp32 over thousands of samples."""

from __future__ import annotations

import math

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb

import mil_ane_passes as ane
from mil_ane_passes.equivalence.comparison import Strictness
from mil_ane_passes.equivalence.equivalence import compare_programs
from mil_ane_passes.passes.contract import Exactness
from mil_ane_passes.passes.engine import apply_rewrite, find_matches
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.passes.pass_trace import Change
from mil_ane_passes.passes.registry import find_rewrite
from mil_ane_passes.runtime import Runtime

RULE = find_rewrite("wrap_phase")


class SineSource(torch.nn.Module):
    """The source of HiFi-GAN with a neural source filter: harmonics of a fundamental, by their summed-up phase."""

    def __init__(self, rate: float = 24000.0, harmonics: int = 3):
        super().__init__()
        self.rate = rate
        self.register_buffer("order", torch.arange(1.0, harmonics + 1))

    def forward(self, turns: torch.Tensor) -> torch.Tensor:
        phase = torch.cumsum((turns * self.order) % 1, dim=1)
        return 0.1 * torch.sin(2 * torch.pi * phase)


def frequencies(length: int) -> torch.Tensor:
    """Turns a sample of a voice that glides, which fp16 holds exactly: rounding of inputs is nobody's fault here."""
    glide = np.linspace(80, 400, length) * (1 + 0.05 * np.sin(np.arange(length) / 300))
    return torch.from_numpy((glide / 24000).astype(np.float16).astype(np.float32)).reshape(1, length, 1)


def converted(module: torch.nn.Module, x: torch.Tensor, **how):
    traced = torch.jit.trace(module.eval(), x)
    return ane.convert(traced, inputs=[ct.TensorType(name="x", shape=x.shape)], skip_model_load=True,
                       minimum_deployment_target=ct.target.iOS16, **how)


@pytest.mark.parametrize("length", [100, 4800])
def test_a_source_is_right_in_fp16_however_long(length):
    x = frequencies(length)
    expected = SineSource()(x).numpy()
    mlmodel = converted(SineSource(), x)
    assert "cumsum" not in {op.op_type for op in mlmodel._mil_program.functions["main"].operations}
    (found,) = ane.run(mlmodel, {"x": x.numpy()}, precision="float16").values()
    harmonics = np.abs(found - expected).max(axis=(0, 1)) / 0.1
    assert harmonics[0] < 6e-3  # x times 2 or 3 is rounded to fp16, which is a frequency off by 2^-12
    before = converted(SineSource(), x, pass_pipeline=ane.pipeline(passes="fold_constants"))
    (noise,) = ane.run(before, {"x": x.numpy()}, precision="float16").values()
    assert length < 1000 or np.abs(noise - expected).max() > 0.05


@pytest.mark.parametrize("length", [13, 14, 170, 2198, 16384, 16385, 30011])
@pytest.mark.parametrize(("exclusive", "reverse"), [(False, False), (True, False), (True, True)])
def test_the_error_does_not_grow_with_the_length(length, exclusive, reverse):
    if reverse and length >= 16384:
        pytest.skip("a long axis is summed forwards only")

    def wave(x):
        total = mb.cumsum(x=x, axis=1, exclusive=exclusive, reverse=reverse)
        return mb.sin(x=mb.mul(x=total, y=np.float16(2 * math.pi)), name="y")

    made = build_program(wave, x=(1, length))
    assert apply_rewrite(RULE(), made).fired
    x = np.random.default_rng(length).uniform(0, 0.06, (1, length)).astype(np.float16)
    turns = x.astype(np.float64)[:, ::-1] if reverse else x.astype(np.float64)
    total = np.cumsum(turns, 1) - (turns if exclusive else 0)
    expected = np.sin(2 * math.pi * (total[:, ::-1] if reverse else total))
    found = Runtime(made, precision="float16")({"x": x})["y"].astype(np.float64)
    assert np.abs(found - expected).max() < 4.5e-3


@pytest.mark.parametrize("shape", [(40,), (2, 3, 20), (2, 20, 3), (2, 2, 1, 20, 2), (20, 2)])
def test_every_axis_of_every_rank(shape):
    axis = shape.index(max(shape))
    turns = np.float16(4 * math.pi)
    made = build_program(lambda x: mb.cos(x=mb.mul(x=mb.cumsum(x=x, axis=axis), y=turns), name="y"), x=shape)
    assert apply_rewrite(RULE(), made).fired
    x = np.random.default_rng(0).uniform(-3, 3, shape).astype(np.float16)
    found = Runtime(made, precision="float16")({"x": x})["y"].astype(np.float64)
    assert np.abs(found - np.cos(4 * math.pi * np.cumsum(x.astype(np.float64), axis))).max() < 8e-3


def test_a_rewritten_package_is_verified_and_kept():
    x = frequencies(600)
    before = converted(SineSource(), x, pass_pipeline=ane.pipeline(passes="fold_constants"))
    report = ane.rewrite(before, passes="wrap_phase", ranges={"x": (0.003, 0.02)})
    assert report.changed and [trace.rule for trace in report.traces if trace.fired] == ["wrap_phase"]


def test_an_interpolated_phase_is_left_alone_with_a_reason():
    class Interpolated(torch.nn.Module):
        def forward(self, turns):
            phase = torch.cumsum(turns, dim=1) * 2 * torch.pi
            phase = torch.nn.functional.interpolate(phase.transpose(1, 2) * 10, scale_factor=10.0, mode="linear")
            return torch.sin(phase)

    mlmodel = converted(Interpolated(), torch.rand(1, 30, 1))
    (miss,) = find_matches(RULE(), mlmodel._mil_program).near_misses
    assert "upsample_bilinear" in miss.reason and "interpolates it" in miss.reason


@pytest.mark.parametrize("length", [10, 41, 100])
def test_a_flexible_length_up_to_the_longest(length):
    def build(x):
        return mb.sin(x=mb.mul(x=mb.cumsum(x=x, axis=1), y=np.float16(2 * math.pi)), name="y")

    before, after = (build_program(build, x=(1, None)) for _ in range(2))
    assert apply_rewrite(RULE.configured(longest=100), after).fired
    x = (np.random.default_rng(0).integers(-128, 128, (1, length)) / 512).astype(np.float16)
    (found,) = Runtime(after, precision="float16")({"x": x}).values()
    truth = np.sin(2 * np.pi * np.cumsum(x.astype(np.float64), axis=1))
    assert np.abs(found - truth).max() < 6e-3
    assert not find_matches(RULE.configured(), before).fired


class LowRate(torch.nn.Module):
    """The source of iSTFTNet and Kokoro: the phase is summed up at a lower rate and lengthened."""

    def __init__(self, mode: str, factor: int = 10):
        super().__init__()
        self.mode, self.factor = mode, factor

    def forward(self, turns: torch.Tensor) -> torch.Tensor:
        phase = torch.cumsum(turns, dim=2) * (2 * torch.pi * self.factor)
        return torch.sin(torch.nn.functional.interpolate(phase, scale_factor=float(self.factor), mode=self.mode))


def low_rate(length: int = 300) -> torch.Tensor:
    return frequencies(length).reshape(1, 1, length)


def test_a_phase_that_is_interpolated_is_left_with_the_reason():
    """Sound on either side of a turn only: the middle of 0.9 and 1.1 turns is 1.0, that of 0.9 and 0.1 is 0.5."""
    mlmodel = converted(LowRate("linear"), low_rate(), pass_pipeline=ane.pipeline(passes="fold_constants"))
    trace = find_matches(RULE(), mlmodel._mil_program)
    (miss,) = trace.near_misses
    assert not trace.fired and "interpolates it, which is wrong between sums without their integer turns" in miss.reason
    assert "upsample before the cumsum" in miss.reason
    wrapped = np.array([0.9, 1.1]) % 1
    assert np.isclose(wrapped.mean(), 0.5) and np.isclose(np.mean([0.9, 1.1]) % 1, 0.0)


def test_a_phase_that_is_held_is_wrapped():
    """An upsampling that repeats elements moves them only."""
    x = low_rate()
    expected = LowRate("nearest")(x).numpy()
    mlmodel = converted(LowRate("nearest"), x)
    assert "cumsum" not in {op.op_type for op in mlmodel._mil_program.functions["main"].operations}
    (found,) = ane.run(mlmodel, {"x": x.numpy()}, precision="float16").values()
    before = converted(LowRate("nearest"), x, pass_pipeline=ane.pipeline(passes="fold_constants"))
    (noise,) = ane.run(before, {"x": x.numpy()}, precision="float16").values()
    errors = [np.abs(each - expected).max() for each in (found, noise)]
    assert errors[0] < 0.05 < errors[1], errors


FIRING = [example for example in RULE().examples() if example.reason is None]


@pytest.mark.parametrize("example", FIRING, ids=lambda example: example.name)
def test_the_equivalence_check_keeps_it_without_ranges(example):
    """Extreme inputs make angles whose sine no arithmetic of fp16 says; that leaves no oscillator out."""
    built = example.build()
    report = ane.rewrite(
        built, passes="wrap_phase", options={"wrap_phase": example.options} if example.options else None
    )
    assert report.changed and report.verified, str(report)


@pytest.mark.parametrize("turn", [0.25, 0.03125])
def test_the_equivalence_check_finds_a_phase_that_is_shifted(turn):
    """By a quarter, or a thirty-second, of a turn, beside what the rewrite declares of fp16's 2 pi."""
    def wave(shift):
        def body(x):
            total = mb.add(x=mb.cumsum(x=x, axis=1), y=np.float16(shift))
            return mb.cos(x=mb.mul(x=total, y=np.float16(2 * np.pi)), name="y")

        return build_program(body, x=(1, 12))

    before, after = wave(0.0), wave(turn)
    (op,) = [op for op in before.functions["main"].operations if op.op_type == "cumsum"]
    promised = Strictness(Exactness.ROUNDING, moves=2.0**-5,
                          changes=(Change("main", "cumsum", op.outputs[0].name, 2.0**-11),))
    assert compare_programs(before, after, exactness=promised, locate=False).status == "different"
