"""Rules that advise or that sources disagree on: where they speak, and what of the prediction they change."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder

import mil_ane_passes as ane
from mil_ane_passes.ane import predict_plan
from mil_ane_passes.passes.contract import Miss, Severity
from mil_ane_passes.passes.examples import build_program, make_weight
from mil_ane_passes.passes.registry import get_all_rules
from mil_ane_passes.passes.targets import is_applicable

from .helpers import converted, notes

pytestmark = pytest.mark.filterwarnings("ignore")


def hits(name, built, target="m4", **options):
    rule = get_all_rules()[name].configured(**options)
    return [item.answer for item in predict_plan(built, [rule], target=target)[1] if not isinstance(item.answer, Miss)]


def answer(built, kind, target):
    return next(row for row in ane.lint(built, target=target).plan.rows if row.op.op_type == kind)


def quantized(dtype, **how):
    def body(x):
        stored = Builder.constexpr_blockwise_shift_scale(data=np.ones((4, 8), dtype), **how)
        return Builder.matmul(x=x, y=stored, transpose_y=True, name="y")

    return build_program(body, opset=ct.target.iOS18, x=(3, 8))


@pytest.mark.parametrize(("scale", "found"), [((4, 1), 1), ((1, 1), 1), ((4, 2), 0)])
def test_integer_weights_of_one_scale_are_not_known_on_an_m4(scale, found):
    built = quantized(np.int8, scale=make_weight(*scale) + np.float16(1))
    assert len(hits("integer_weights", built)) == found
    told = answer(built, "matmul", "m4")
    assert (told.ane, told.takes) == (("unknown", True) if found else ("no", False))
    assert not is_applicable(get_all_rules()["integer_weights"].targets, "m5")


def test_palettized_weights_are_no_integer_weights():
    def body(x):
        stored = Builder.constexpr_lut_to_dense(indices=np.zeros((4, 8), np.uint8), lut=make_weight(1, 1, 256, 1))
        return Builder.linear(x=x, weight=stored, name="y")

    built = build_program(body, opset=ct.target.iOS18, x=(3, 8))
    assert not hits("integer_weights", built) and answer(built, "linear", "m4").ane == "yes"


@pytest.mark.parametrize(("target", "found"), [("m4", 0), ("m3", 1), ("a13", 1), ("all", 1)])
def test_broadcasts_are_a_note_before_the_m4_and_change_no_prediction(target, found):
    built = build_program(lambda x, z: Builder.mul(x=Builder.relu(x=x), y=Builder.relu(x=z), name="y"),
                          x=(1, 64, 32, 32), z=(1, 64, 1, 1))
    notes = [finding for finding in ane.lint(built, target=target).findings if finding.rule.code == "ANE234"]
    assert len(notes) == found and all(note.severity is Severity.SUGGESTION for note in notes)
    assert answer(built, "mul", target).takes


@pytest.mark.parametrize(("outputs", "inputs", "found"), [
    (2048, 4096, True), (2033, 4096, True), (2032, 4096, True), (2000, 4096, False), (2048, 4160, True),
    (2048, 4161, False), (2048, 4032, True), (2048, 4031, False), (4096, 4096, True), (16, 64, False)])
def test_a_weight_within_16_kib_of_a_mib_for_each_core(outputs, inputs, found):
    built = build_program(lambda x: Builder.linear(x=x, weight=np.zeros((outputs, inputs), np.float16), name="y"),
                          x=(1, inputs))
    assert bool(hits("dma_notch", built)) is found


def test_a_conv_counts_its_taps_and_a_matmul_its_columns():
    conv = build_program(lambda x: Builder.conv(x=x, weight=np.zeros((512, 1024, 4, 4), np.float16), name="y"),
                         x=(1, 1024, 4, 4))
    product = build_program(lambda x: Builder.matmul(x=x, y=np.zeros((4096, 2048), np.float16), name="y"), x=(1, 4096))
    assert [hit.note for built in (conv, product) for hit in hits("dma_notch", built)] == [
        "512x1024x4x4: 1048576 bytes for each of 16 cores, exactly 1 MiB",
        "4096x2048: 1048576 bytes for each of 16 cores, exactly 1 MiB"]


@pytest.mark.parametrize(("shape", "bias", "found"), [((2, 8), True, 1), ((2, 8), False, 1), ((1, 2, 8), True, 0)])
def test_torchs_hard_swish_behind_a_linear_layer_of_rank_2(shape, bias, found):
    layers = torch.nn.Sequential(torch.nn.Linear(8, 4, bias=bias), torch.nn.Hardswish())
    assert notes("hardswish_rank_2", converted(layers, torch.zeros(shape))) == \
        ["the hard swish of a linear of rank 2 (2x4)"] * found


def test_a_reshape_that_keeps_the_last_axis_moves_nothing():
    def body(x):
        return Builder.reshape(x=Builder.reshape(x=x, shape=[64, 512, 512]), shape=[64 * 512 * 8, 64], name="y")

    (hit,) = hits("moved_rows", build_program(body, x=(1, 64, 512, 512)))
    assert len(hit.covers) == 1 and hit.note == \
        "1 op (1 reshape) change the last axis and move 33.6 MB, the largest 33.6 MB"


@pytest.mark.parametrize("chip", ["a18", "m1", "m5", "m6"])
def test_what_core_ml_was_not_asked_on_is_not_known(chip):
    built = build_program(lambda x: Builder.softmax(x=Builder.relu(x=x), axis=1, name="y"), x=(1, 64, 32, 32))
    assert answer(built, "softmax", "m4").ane == "yes"
    told = answer(built, "softmax", chip)
    assert (told.ane, told.takes) == ("unknown", True) and "predicted: supported" in told.reason
