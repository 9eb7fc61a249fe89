"""The estimate of run time: what it charges, what it marks as extrapolated, and that it reads no weight."""

from __future__ import annotations

import json

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import get_new_symbol, types

from mil_ane_passes.ane import predict_plan
from mil_ane_passes.ane.latency import estimate_latency
from mil_ane_passes.ane.latency_parameters import MEASURED_CHIPS, find_chips, load_parameters
from mil_ane_passes.ane.latency_terms import compute_terms, describe_work
from mil_ane_passes.ane.sizes import Sizes
from mil_ane_passes.commands.sources import open_source
from mil_ane_passes.ir.constants import LazyValue, make_const
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.utils.errors import InputError
from tests.lab.latency import programs


def describe(program, op_type="conv"):
    ops = [op for op in program.functions["main"].operations if op.op_type == op_type]
    return [describe_work(op, Sizes()) for op in ops]


def time_on(chip, program, **options):
    return estimate_latency(program, target=chip, **options).latency_us


def test_no_weight_is_read():
    def refuse():
        raise AssertionError("a weight was read")

    def body(x):
        first = make_const(LazyValue(refuse, (1 << 16, 1 << 16), refuse), types.fp16, "first")
        second = make_const(LazyValue(refuse, (64, 1 << 16, 1, 1), refuse), types.fp16, "second")
        made = mb.expand_dims(x=mb.linear(x=x, weight=programs.fill_weight((1 << 16, 1 << 16))), axes=[2, 3])
        del first
        return mb.conv(x=made, weight=second)
    report = estimate_latency(programs.build((1, 1 << 16), body), target="m4")
    assert report.latency_us > 8.6e9 / 70e3  # 8.6 GB at no more than 70 GB/s
    assert "weights streamed" in report.term


@pytest.mark.parametrize("form, megabytes", [
    ("fp16", 8.389), ("sparse 50%", 4.718), ("sparse 75%", 2.620), ("sparse 90%", 1.363), ("3-bit palette", 1.574),
    ("sparse 50% + 4-bit palette", 1.574), ("int8", 4.194)])
def test_stored_bytes_are_those_that_the_source_prints(form, megabytes):
    work, = describe(programs.conv_chain((1, 2048, 1, 32), (2048, 2048, 1, 1), form=form))
    assert work.weight_bytes / 1e6 == pytest.approx(megabytes, rel=0.01)
    assert work.dense_bytes == 2048 * 2048 * 2


def _weight(*shape):
    return np.ones(shape, np.float16)


CHANGES_OF_LENGTH = {
    "conv": torch.nn.Conv1d(256, 256, 3, padding=1),
    "strided conv": torch.nn.Conv1d(256, 256, 4, 2, 1),
    "transposed conv": torch.nn.ConvTranspose1d(256, 256, 8, 4, 2),
    "max pool": torch.nn.MaxPool1d(2),
    "resize": torch.nn.Upsample(scale_factor=4),
    "slice": lambda x: x[..., 8:],
    "concat": lambda x: torch.cat([x, x], -1),
}


class Chain(torch.nn.Module):
    """A conv, a change of the length, and four convs."""

    def __init__(self, change):
        super().__init__()
        self.first, self.change = torch.nn.Conv1d(80, 256, 7, padding=3), change
        self.others = torch.nn.Sequential(*[torch.nn.Conv1d(256, 256, 7, padding=3) for _ in range(4)])

    def forward(self, x):
        return self.others(self.change(self.first(x)))


def convert_chain(change, length):
    """Convert a chain for an input of a fixed or flexible length."""
    return ct.convert(torch.jit.trace(Chain(change).eval(), torch.ones(1, 80, 512)), skip_model_load=True,
                      minimum_deployment_target=ct.target.iOS17, inputs=[ct.TensorType("x", (1, 80, length))])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("change", CHANGES_OF_LENGTH)
def test_a_flexible_input_takes_the_time_of_its_default_shape(change):
    """Also behind ops that change the length, whose sizes a package declares as unknown."""
    found = []
    for length in (512, ct.RangeDim(16, 1024, default=512)):
        source = open_source(convert_chain(CHANGES_OF_LENGTH[change], length))
        plan, _ = predict_plan(source.program, [], target="m4", package=source.package)
        found.append((estimate_latency(source.program, plan, target="m4").latency_us, plan.total))
    assert found[1] == pytest.approx(found[0], rel=1e-6)


def test_a_program_that_is_converted_has_the_default_shapes_of_its_input_types():
    """So that the guard of a pipeline compares latencies at these shapes; a program alone has none."""
    def build(length):
        return mb.program(input_specs=[mb.TensorSpec((1, 256, length), dtype=types.fp16)])(
            lambda x: mb.conv(x=mb.concat(values=[x, x], axis=2), weight=_weight(256, 256, 7), pad_type="same"))

    program = build(get_new_symbol())
    fixed, alone = (estimate_latency(each, target="m4").latency_us for each in (build(512), program))
    flexible = ct.Shape((1, 256, ct.RangeDim(16, 1024, default=512)))
    program.functions["main"].set_input_types((ct.TensorType("x", flexible),))
    assert estimate_latency(program, target="m4").latency_us == pytest.approx(fixed) and alone < 0.6 * fixed


def test_a_flexible_image_takes_the_time_of_its_default_size():
    def measure(height):
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 64, 3, 2), torch.nn.Conv2d(64, 64, 3), torch.nn.MaxPool2d(2))
        image = ct.ImageType("x", shape=(1, 3, height, 256))
        source = open_source(ct.convert(torch.jit.trace(model, torch.ones(1, 3, 256, 256)), inputs=[image],
                                        minimum_deployment_target=ct.target.iOS17, skip_model_load=True))
        return predict_plan(source.program, [], target="m4", package=source.package)[0].total

    assert measure(ct.RangeDim(64, 512, default=256)) == pytest.approx(measure(256))


def test_weights_too_large_for_a_tile_are_streamed_again_and_a_split_of_k_is_faster():
    whole, split = (programs.linear_chain(1024, 4096, 4096, inner_tile=tile) for tile in (0, 2048))
    report = estimate_latency(whole, target="m2")
    assert "times: K*M too large for one tile" in report.ops[0].term and report.ops[0].cause == "weights"
    assert time_on("m2", split, api="private") < 0.8 * time_on("m2", whole, api="private")
    few = estimate_latency(programs.linear_chain(8, 4096, 4096), target="m2")
    assert few.ops[0].term.startswith("weights streamed once")


def test_a_split_below_one_tile_does_not_pay():
    whole, split = (programs.linear_chain(64, 512, 2048, inner_tile=tile) for tile in (0, 32))
    assert time_on("m5", split) > time_on("m5", whole)


def test_the_dma_notch_is_that_of_the_m4_alone():
    on, off = programs.linear_chain(1, 2048, 4096), programs.linear_chain(1, 2048, 4352)
    ratios = {chip: (time_on(chip, on, api="private") - find_chips(chip)[0].interfaces["private"].floor_us)
              / (time_on(chip, off, api="private") - find_chips(chip)[0].interfaces["private"].floor_us)
              for chip in ("m2", "m4")}
    assert ratios["m2"] == pytest.approx(4096 / 4352, rel=0.02) and ratios["m4"] > 1.5
    assert "DMA notch" in estimate_latency(on, target="m4").ops[0].term
    assert "DMA notch" not in estimate_latency(on, target="a18").ops[0].term


def test_a_small_weight_used_again_is_streamed_once():
    shape, weight = (1, 512, 1, 16), (512, 512, 1, 1)
    shared = programs.conv_chain(shape, weight, layers=64, shared=True)
    own = programs.conv_chain(shape, weight, layers=64)
    assert time_on("m6", own) > 1.5 * time_on("m6", shared)
    large = [programs.conv_chain((1, 2048, 1, 16), (2048, 2048, 1, 1), layers=8, shared=each) for each in (True, False)]
    assert time_on("m6", large[0]) == pytest.approx(time_on("m6", large[1]))  # 8 MB leave the kernel buffers


def test_width_3_and_wide_kernels_of_an_m6():
    def per_layer(height, width, shape=(1, 256, 4, 32)):
        work, = describe(programs.conv_chain(shape, (256, 256, height, width)))
        return compute_terms(work, find_chips("m6")[0], {work.weight}).total_us
    assert per_layer(1, 3) == pytest.approx(1.75, rel=0.15) and per_layer(3, 1) == pytest.approx(2.53, rel=0.15)
    assert per_layer(1, 9) == pytest.approx(17.0, rel=0.15) and per_layer(1, 8) == pytest.approx(6.77, rel=0.15)


def test_int8_needs_both_operands():
    shape, weight = (1, 512, 64, 64), (512, 512, 1, 1)
    by_form = {form: describe(programs.conv_chain(shape, weight, form=form))[0] for form in ("fp16", "int8", "w8a8")}
    assert [by_form[form].int8 for form in ("fp16", "int8", "w8a8")] == [False, False, True]
    chip, = find_chips("m4")
    times = {form: compute_terms(work, chip).total_us for form, work in by_form.items()}
    assert times["int8"] == pytest.approx(times["fp16"]) and times["fp16"] > 1.7 * times["w8a8"]


def test_zero_weights_are_skipped_if_stored_as_sparse():
    dense, sparse = (describe(programs.conv_chain((1, 512, 64, 64), (512, 512, 1, 1), form=form))[0]
                     for form in ("fp16", "sparse 75%"))
    chip, = find_chips("m4")
    assert compute_terms(sparse, chip).total_us == pytest.approx(0.45 * compute_terms(dense, chip).total_us, rel=0.02)


def test_a_padded_last_axis_is_paid_at_the_interface():
    wide, tall = (programs.build(shape, lambda x: mb.relu(x=x)) for shape in ((1, 768, 1, 6000), (1, 768, 6000, 1)))
    causes = [estimate_latency(each, target="m2").functions[0].causes["interface"] for each in (wide, tall)]
    assert causes[1] > 30 * causes[0]


def test_every_range_holds_the_estimate_and_the_dict_is_json():
    for target in ("m1", "m4", "A17 Pro", "a12", "iPhone 16", "all"):
        report = estimate_latency(programs.resnet50(), target=target)
        for each in (report, *report.functions, *report.partitions, *report.ops):
            assert 0 <= each.latency_low_us <= each.latency_us <= each.latency_high_us, each
        assert json.loads(json.dumps(report.to_dict(), allow_nan=False)) == report.to_dict()
    assert sum(report.functions[0].causes.values()) == pytest.approx(report.functions[0].latency_us, rel=0.01)


def test_what_no_row_covers_is_marked_and_wider():
    program = programs.conv_chain((1, 512, 32, 32), (512, 512, 1, 1), layers=16, shared=True)
    reports = {target: estimate_latency(program, target=target) for target in (*MEASURED_CHIPS, "a17", "a12", "all")}

    def width(target):
        return reports[target].latency_high_us / reports[target].latency_low_us
    assert not reports["m4"].extrapolated and not reports["m6"].extrapolated
    assert reports["a17"].extrapolated and reports["a12"].extrapolated and reports["all"].extrapolated
    assert width("m4") < width("a17") < width("a12")
    assert reports["a12"].latency_low_us == min(reports[chip].latency_low_us for chip in MEASURED_CHIPS)
    assert reports["a12"].latency_high_us == max(reports[chip].latency_high_us for chip in MEASURED_CHIPS)
    moved = programs.build((1, 64, 32, 32), lambda x: mb.transpose(x=x, perm=[0, 2, 3, 1]))
    assert estimate_latency(moved, target="m4").ops[0].extrapolated


def test_sums_of_sums_too_large_for_the_chip_have_a_wider_range():
    def width(side):
        report = estimate_latency(programs.sum_of_inputs(3, (1, 256, side, side)), target="m6")
        return [op.latency_high_us / op.latency_us for op in report.ops]
    assert width(64)[0] == pytest.approx(width(64)[1]) == pytest.approx(width(128)[0])
    assert width(128)[1] > 5 * width(128)[0]


def test_partitions_of_a_plan_cost_transitions():
    def body(x):
        for _ in range(2):
            for _ in range(12):
                x = mb.conv(x=x, weight=programs.fill_weight((512, 512, 3, 3)), pad_type="same")
            x = mb.cumsum(x=x, axis=1)
        return mb.conv(x=x, weight=programs.fill_weight((512, 512, 3, 3)), pad_type="same")
    program = programs.build((1, 512, 64, 64), body)
    plan, _ = predict_plan(program, (), target="m4")
    for row in plan.rows:
        row.backend, row.engine = ("cpu", "bnns") if row.op.op_type == "cumsum" else ("ane", "ane")
    report, whole = estimate_latency(program, plan, "m4"), estimate_latency(program, target="m4")
    assert [part.backend for part in report.partitions] == ["ane", "cpu", "ane", "cpu", "ane"]
    assert report.functions[0].causes["transitions"] > 2 * 60 and "transitions" not in whole.functions[0].causes
    assert {op.cause for op in report.ops if op.backend == "cpu"} == {"CPU"}
    assert report.partitions[1].extrapolated


def test_a_plan_on_the_cpu_has_no_call_of_the_ane():
    program = programs.build((1, 8, 1, 8), lambda x: mb.relu(x=x))
    plan, _ = predict_plan(program, (), target="m4")
    assert {row.backend for row in plan.rows} == {"cpu"}
    report = estimate_latency(program, plan, "m4")
    assert report.latency_us < 60 and set(report.functions[0].causes) <= {"CPU", "call"}


def test_each_op_is_estimated_once_and_unpacked_weights_are_not_listed():
    program = programs.conv_chain((1, 512, 1, 32), (512, 512, 1, 1), layers=2, form="4-bit palette")
    report = estimate_latency(program, target="m4")
    assert [op.op_type for op in report.ops] == ["conv", "conv"]
    assert report.partitions[0].latency_us == pytest.approx(sum(op.latency_us for op in report.ops))


def test_an_unknown_interface_says_what_is_expected():
    with pytest.raises(InputError, match="api: found 'metal'; expected one of coreml, private, coreai"):
        estimate_latency(programs.resnet50(), target="m4", api="metal")


def test_each_parameter_has_a_source_and_each_chip_its_errors():
    chips = load_parameters()["chips"]
    assert {"m1", "m2", "m3", "m4", "m5", "m6", "a16", "a17", "a18", "a19"} <= set(chips)
    for name, entry in chips.items():
        assert all(each["source"] and np.isfinite(each["value"]) for each in entry["parameters"].values()), name
        assert all(factor >= 1 for factor in entry["spread"].values())
        assert ("p90_error" in entry and entry["rows"] > 0) == (name in MEASURED_CHIPS)
        if name not in MEASURED_CHIPS:
            assert not any(each["measured"] for each in entry["parameters"].values())


def test_a_fused_attention_takes_about_as_long_as_one_that_is_written_out():
    """It computes the same products and the same softmax; as many scores are scaled in one of them alone."""
    def fused(q, k, v):
        return mb.scaled_dot_product_attention(query=q, key=k, value=v)

    def written(q, k, v):
        return mb.matmul(x=mb.softmax(x=mb.matmul(x=q, y=k, transpose_y=True)), y=v)

    spent = [estimate_latency(build_program(body, opset=ct.target.iOS18, **dict.fromkeys("qkv", (1, 8, 1024, 64))),
                              target="m2").latency_us for body in (fused, written)]
    assert spent[0] == pytest.approx(spent[1], rel=0.01)
