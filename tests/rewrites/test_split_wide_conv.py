"""ANE221: large kernels as windows, upright, folded or in parts, against PyTorch's own convolutions."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types
from hypothesis import given
from hypothesis import strategies as st

import mil_ane_passes as ane
from mil_ane_passes.ir.printer import format_program
from mil_ane_passes.ir.query import iterate_ops
from mil_ane_passes.passes.engine import apply_rewrite, find_matches
from mil_ane_passes.passes.examples import build_program, make_weight
from mil_ane_passes.runtime import Runtime
from tests.conversions import save_program
from tests.rewrites.convolutions import WAYS, converted, distance, draw
from tests.rewrites.helpers import kinds
from tests.rewrites.windows import configured, holds, refused

NAME = "split_wide_conv"


def conv(kernel, shape, groups=1, outputs=4, opset=ct.target.iOS17, dtype=np.float16, **parameters):
    random = np.random.default_rng(1)
    weight = (random.standard_normal((outputs, shape[1] // groups, *kernel)) / 8).astype(dtype)
    return build_program(
        lambda x: mb.conv(x=x, weight=weight, groups=groups, name="y", **parameters),
        x=shape,
        opset=opset,
        dtype=types.fp16 if dtype is np.float16 else types.fp32,
    )


def notes(program_, target="all", **options):
    found = find_matches(configured(NAME, **options), program_, target=target)
    return [hit.reason for hit in found.fired] + [f"- {miss.reason}" for miss in found.near_misses]


@st.composite
def convs(draw_):
    """Kernels of one to three dimensions, one side of which is too large; all settings a conv has."""
    rank = draw_(st.sampled_from([1, 1, 2, 2, 2, 3]))
    kernel = [draw_(st.integers(1, 34 if rank == 2 else 3)) for _ in range(rank - 1)]
    kernel.append(draw_(st.integers(32, 70) if rank == 1 else st.integers(14, 40)))
    strides = [draw_(st.sampled_from([1, 1, 2, 3, 7, size, size + 1])) for size in kernel]
    dilations = [draw_(st.sampled_from([1, 1, 1, 2])) for _ in kernel]
    kind = draw_(st.sampled_from(["same", "same_lower", "valid", "custom"]))
    pads = [draw_(st.integers(0, size + 2)) for size in kernel for _ in range(2)] if kind == "custom" else []
    reach = [(size - 1) * step + 1 for size, step in zip(kernel, dilations)]
    least = [1 if kind.startswith("same") else max(1, size - sum(pads[2 * axis:2 * axis + 2]))
             for axis, size in enumerate(reach)]
    shape = (draw_(st.integers(1, 2)), 4, *(low + draw_(st.integers(0, 20)) for low in least))
    given_pads = {"pad": pads} if pads else {}
    bias = {"bias": np.float16([1, -2, 0.5, 3])} if draw_(st.booleans()) else {}
    return kernel, shape, {"strides": strides, "dilations": dilations, "pad_type": kind,
                           "groups": draw_(st.sampled_from([1, 2, 4])), **given_pads, **bias}


@pytest.mark.law
@given(convs(), st.sampled_from(["all", "m4", "m1", "m5"]))
def test_every_sum_is_the_same(drawn, target):
    kernel, shape, parameters = drawn
    made = conv(kernel, shape, **parameters)
    before = refused(made, target)
    trace = holds(made, NAME, target=target)
    if trace.fired:
        assert before and not refused(made, target)
        assert not find_matches(configured(NAME), made, target=target).fired
    else:
        assert not before or all("parts, max_parts is 16" in miss.reason for miss in trace.near_misses)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("target", ["iOS15", "iOS18"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("layer", "shape", "most"), [
    (torch.nn.Conv2d(3, 8, 16, 16), (1, 3, 32, 48), 0), (torch.nn.Conv2d(3, 64, 16, 16), (1, 3, 37, 48), 0),
    (torch.nn.Conv2d(2, 32, (16, 20), (8, 12), (3, 7), groups=2), (1, 2, 37, 48), 0),
    (torch.nn.Conv2d(3, 8, 32, 32, bias=False), (2, 3, 64, 64), 0),
    (torch.nn.Conv2d(1, 8, 16, 10), (1, 1, 46, 66), 0), (torch.nn.Conv1d(1, 18, 400, 160, bias=False), (1, 1, 1040), 0),
    (torch.nn.Conv1d(1, 10, 256, 128), (1, 1, 640), 0),
    (torch.nn.Conv1d(32, 32, 128, padding=64, groups=4), (1, 32, 50), 0),
    (torch.nn.Conv2d(4, 4, 31, padding=15, groups=4), (1, 4, 20, 20), 5),
    (torch.nn.Conv2d(4, 4, (1, 21)), (1, 4, 5, 30), 0),
], ids=["patches of 16", "patches of 16 in stages", "overlapping in stages", "patches of 32",
        "overlapping patches", "spectra", "spectra of halves", "positions", "large kernels", "rows"])
def test_as_torch_converts(layer, shape, most, way, target, tmp_path):
    after = converted(layer, shape, way, tmp_path, passes=NAME, target=target)
    assert not refused(after, "m4") and not refused(after, "m1")
    assert distance(after, layer, shape) < 1e-12
    assert distance(after, layer, shape, "float16") < 3e-3
    assert kinds(after)["add"] == most


def test_a_squares_compilation_is_a_choice_where_it_is_taken():
    made = conv([16, 16], (1, 2, 40, 40), pad_type="same")
    assert notes(made, "m4") == ["kernel 16x16 as 2 parts that are added"]
    assert notes(made, "m4", slow=False) == []
    assert notes(made, "m1", slow=False) == ["kernel 16x16 as 2 parts that are added"]
    assert notes(conv([15, 13], (1, 2, 40, 40)), "m4") == []
    assert notes(conv([1, 14], (1, 2, 40, 40)), "m4") == []
    assert notes(conv([1, 14], (1, 2, 40, 40)), "m1") == ["kernel 1x14 as kernel 14x1"]


def test_which_form_is_taken():
    assert notes(conv([32, 32], (1, 2, 64, 64), strides=[32, 32])) == ["kernel 32x32 as windows of 32x32 as channels"]
    assert notes(conv([3, 32], (1, 2, 9, 64), strides=[1, 16])) == ["kernel 3x32 as windows of 32 as channels"]
    assert notes(conv([32], (1, 2, 64))) == ["kernel 32 as kernel 8x4 over rows of 4"]
    assert notes(conv([37], (1, 2, 64))) == ["kernel 37 as 3 parts that are added"]
    assert notes(conv([400], (1, 1, 900), strides=[20])) == ["- kernel 400 would need 31 parts, max_parts is 16"]
    assert notes(conv([400], (1, 1, 900), strides=[20]), max_copies=20) == ["kernel 400 as windows of 400 as channels"]
    assert notes(conv([40, 1], (1, 2, 50, 3))) == ["kernel 40x1 as 2 parts that are added"]
    assert notes(conv([31], (1, 2, 64))) == []


def test_patches_of_few_channels_take_two_stages():
    """A conv that copies p x p elements to channels, and one whose kernel and stride are p times shorter."""
    patches = conv([16, 16], (1, 3, 32, 48), strides=[16, 16], outputs=48)
    assert notes(patches) == ["kernel 16x16 as stages of kernels 4x4 and 4x4"]
    assert holds(patches, NAME).fired and kinds(patches)["conv"] == 2 and not kinds(patches)["reshape"]
    assert notes(conv([16, 16], (1, 3, 32, 48), strides=[16, 16], outputs=47)) == [
        "kernel 16x16 as windows of 16x16 as channels"], "more channels between than come out"
    assert notes(conv([32, 24], (1, 1, 64, 48), strides=[16, 24], outputs=48)) == [
        "kernel 32x24 as stages of kernels 4x4 and 8x6"]
    assert notes(conv([3, 24], (1, 1, 9, 48), strides=[1, 6], outputs=48)) == [
        "kernel 3x24 as stages of kernels 1x6 and 3x4"]
    assert notes(conv([16, 16], (1, 1, 48, 48), strides=[10, 10], outputs=48)) == [
        "kernel 16x16 as windows of 16x16 as channels"], "a stride of 5 would be left"
    assert notes(conv([16, 16], (1, 3, 48, 48), strides=[16, 16], dilations=[2, 2], outputs=48)) == [
        "kernel 16x16 as 2 parts that are added"]


STAGED = st.sampled_from([(16, 16), (16, 8), (16, 4), (18, 6), (20, 4), (24, 24), (27, 9), (32, 8)])
"Kernels and strides of one axis."


@pytest.mark.law
@given(STAGED, STAGED, st.tuples(st.integers(0, 30), st.integers(0, 30)), st.sampled_from([1, 2]),
       st.sampled_from(["same", "same_lower", "valid", "custom"]), st.integers(0, 9))
def test_stages_are_the_conv(high, wide, more, groups, kind, pad):
    """Whatever the remainder of sizes and strides, with pads of either side."""
    given_pads = {"pad": [pad, 1, 0, pad + 2]} if kind == "custom" else {}
    made = conv([high[0], wide[0]], (2, 2, high[0] + more[0], wide[0] + more[1]), groups, outputs=128,
                strides=[high[1], wide[1]], pad_type=kind, bias=np.linspace(-2, 2, 128).astype(np.float16),
                **given_pads)
    assert "stages" in notes(made)[0]
    assert holds(made, NAME).fired and not refused(made, "m1")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("target", [
    "m1", "m4", *(pytest.param(each, marks=pytest.mark.slow) for each in ("m2", "m5", "a17"))])
@pytest.mark.parametrize(("channels", "kernel", "stride", "size"), [
    (3, 16, 16, 96), (3, 16, 16, 224), (3, 14, 14, 98), (1, 16, 10, 128)])
def test_patches_of_a_vision_transformer_are_not_slower(channels, kernel, stride, size, target, tmp_path):
    """Small maps are padded most: what the CPU is guessed to save must not be spent on moving padded rows."""
    random = np.random.default_rng(0)
    weights = [random.standard_normal(shape).astype(np.float16) / 16
               for shape in ((192, channels, kernel, kernel), (192, 192))]

    def body(x):
        y = mb.conv(x=x, weight=weights[0], strides=[stride, stride], bias=make_weight(192))
        y = mb.transpose(x=mb.reshape(x=y, shape=[1, 192, -1]), perm=[0, 2, 1])
        for number in range(48):
            y = mb.gelu(x=mb.linear(x=y, weight=weights[1], name=f"l{number}"))
        return mb.identity(x=y, name="y")

    package = save_program(build_program(body, x=(1, channels, size, size)), tmp_path / "m.mlpackage")
    report = ane.rewrite(package, preset="full", target=target, verify=False)
    before, after = report.predicted
    assert after.latency_us <= 1.02 * before.latency_us
    assert after.unsupported == 0 and after.on_ane == after.ops


def test_stages_of_symbolic_sizes():
    made = conv([16, 16], (None, 1, None, 48), strides=[16, 16], outputs=16, pad_type="custom", pad=[3, 2, 0, 0])
    assert holds(made, NAME, extent=40).fired and kinds(made)["conv"] == 2


def test_stages_spread_what_is_not_finite():
    made = conv([16, 16], (1, 1, 32, 32), strides=[8, 16], outputs=16)
    x = draw((1, 1, 32, 32))
    x[0, 0, 5, 5] = np.inf
    assert np.isinf(Runtime(made, precision="float64")({"x": x})["y"][..., 0, 0]).all()
    trace = apply_rewrite(configured(NAME), made)
    assert trace.fired and not trace.keeps_nonfinite
    after = Runtime(made, precision="float64")({"x": x})["y"]
    assert not np.isfinite(after[..., 0, 0]).any() and np.isfinite(after[..., 1:]).all()


def test_windows_and_folds_show_the_very_weight():
    """No byte of it is copied, so others may read it in other ways."""
    weight = np.ones((2, 1, 64), np.float16)

    def body(x):
        held = mb.const(val=weight, name="w")
        return [mb.conv(x=x, weight=held, strides=[step], name=f"y{step}") for step in (1, 32)]

    made = build_program(body, x=(1, 1, 200))
    assert len(holds(made, NAME).fired) == 2
    bases = {op.val.val.__array_interface__["data"][0] for _, op in iterate_ops(made)
             if op.op_type == "const" and np.size(op.val.val) == weight.size}
    assert len(bases) == 1


def test_a_weight_read_otherwise_has_no_stages():
    """Frames show the very weight, and are taken."""
    weight = np.ones((16, 1, 16, 16), np.float16)

    def body(x, step):
        held = mb.const(val=weight, name="w")
        return [mb.conv(x=x, weight=held, strides=[16, 16], name="y"),
                mb.conv(x=x, weight=held, strides=[step, 16], name="z")]

    alike = build_program(lambda x: body(x, 16), x=(1, 1, 32, 32))
    assert notes(alike) == ["kernel 16x16 as stages of kernels 4x4 and 4x4"] * 2
    assert len(holds(alike, NAME).fired) == 2
    assert sum(op.op_type == "const" and np.shape(op.val.val) == (16, 16, 4, 4) for _, op in iterate_ops(alike)) == 1
    assert notes(build_program(lambda x: body(x, 8), x=(1, 1, 32, 32))) == [
        "kernel 16x16 as windows of 16x16 as channels"] * 2


def test_a_weight_in_parts_is_not_stored_twice():
    weight = np.ones((2, 2, 1, 40), np.float16)

    def body(x, second):
        held = mb.const(val=weight, name="w")
        return [mb.conv(x=x, weight=held, name="y"),
                mb.conv(x=x, weight=held, dilations=[1, second], name="z")]

    alike = build_program(lambda x: body(x, 1), x=(1, 2, 3, 90))
    assert len(holds(alike, NAME).fired) == 2
    assert sum(np.size(op.val.val) for _, op in iterate_ops(alike) if op.op_type == "const"
               and op.val.val is not None and np.ndim(op.val.val) == 4) == weight.size
    other = build_program(lambda x: body(x, 2), x=(1, 2, 3, 90))
    text = format_program(other)
    assert {miss.reason for miss in apply_rewrite(configured(NAME), other).near_misses} == {
        "weight has other users, so it would be stored twice"}
    assert format_program(other) == text


def test_weights_that_are_no_constants_are_left():
    made = build_program(lambda x, w: mb.conv(x=x, weight=w, name="y"), x=(1, 2, 3, 40), w=(4, 2, 1, 20))
    assert notes(made) == ["- weight is computed, not a const"]
    assert notes(conv([1, 20], (1, 2, 3, 40), dtype=np.float32)) == [
        "- computed in fp32, which is unsupported on the ANE"
    ]


def test_an_infinite_input_reaches_no_output_it_did_not():
    for kernel, parameters in (([40], {"strides": [16]}), ([64], {}), ([37], {}), ([35], {"strides": [40]})):
        made = conv(kernel, (1, 1, 200), **parameters)
        x = draw((1, 1, 200))
        x[0, 0, 90] = np.inf
        before = Runtime(made, precision="float64")({"x": x})["y"]
        assert apply_rewrite(configured(NAME), made).fired
        after = Runtime(made, precision="float64")({"x": x})["y"]
        np.testing.assert_array_equal(np.isfinite(before), np.isfinite(after))


def test_a_symbolic_size_stays_symbolic():
    assert holds(conv([1, 40], (None, 2, None, None), pad_type="custom", pad=[0, 0, 20, 19]), NAME, extent=30).fired
    assert holds(conv([3, 17], (1, 2, None, None), pad_type="same"), NAME, extent=5, target="m4").fired
    assert holds(conv([16, 16], (None, 2, 32, 32), strides=[16, 16]), NAME).fired
    assert holds(conv([3, 32], (1, 2, None, 64), strides=[1, 16]), NAME).fired
    assert holds(conv([64], (None, 2, 90)), NAME).fired
    assert holds(conv([64], (1, 2, None)), NAME, extent=80).fired
    two = conv([3, 32], (None, 2, None, 64), strides=[1, 16])
    assert notes(two) == ["kernel 3x32 as 3 parts that are added"]


def test_the_hosts_pipeline_leaves_it(tmp_path):
    """Saved, loaded and converted again: no kernel grows together."""
    made = ct.convert(conv([17, 17], (1, 4, 20, 20), groups=4, pad_type="same"), convert_to="mlprogram",
                      skip_model_load=True, pass_pipeline=ane.pipeline(passes=NAME),
                      minimum_deployment_target=ct.target.iOS17)
    made.save(str(tmp_path / "m.mlpackage"))
    again = ane.load(tmp_path / "m.mlpackage").program
    assert kinds(again)["conv"] == 4 and not refused(again, "m1")


@pytest.mark.parametrize("kernel", [[32, 32], [1, 20]], ids=["windows", "upright"])
@pytest.mark.parametrize("kind", ["palette", "linear", "sparse", "palette per channel", "iOS16 palette"])
def test_a_compressed_weight_stays_compressed(kernel, kind, tmp_path):
    """As coremltools compresses it."""
    import coremltools.optimize.coreml as cto

    layer = torch.nn.Conv2d(3, 16, kernel, kernel if kernel[0] > 1 else 1)
    path = tmp_path / "m.mlpackage"
    target = ct.target.iOS16 if kind == "iOS16 palette" else ct.target.iOS18
    traced = torch.jit.trace(layer.eval(), torch.zeros(1, 3, 64, 64))
    model = ct.convert(traced, inputs=[ct.TensorType(name="x", shape=(1, 3, 64, 64))], skip_model_load=True,
                       minimum_deployment_target=target)
    grouped = {"granularity": "per_grouped_channel", "group_size": 4, "channel_axis": 0}
    settings, compress = {
        "palette": (cto.OpPalettizerConfig(nbits=4, mode="uniform"), cto.palettize_weights),
        "iOS16 palette": (cto.OpPalettizerConfig(nbits=6, mode="uniform"), cto.palettize_weights),
        "palette per channel": (cto.OpPalettizerConfig(nbits=4, mode="uniform", **grouped), cto.palettize_weights),
        "linear": (cto.OpLinearQuantizerConfig(weight_threshold=0), cto.linear_quantize_weights),
        "sparse": (cto.OpMagnitudePrunerConfig(target_sparsity=0.5, weight_threshold=0), cto.prune_weights),
    }[kind]
    settings.weight_threshold = 0
    compress(model, cto.OptimizationConfig(global_config=settings)).save(str(path))
    made = ane.load(path).program
    before = [name for name in kinds(made) if name.startswith("constexpr")]
    trace = holds(made, NAME)
    assert before and trace.fired and [name for name in kinds(made) if name.startswith("constexpr")] == before
    assert not refused(made, "m1")


def test_a_compressed_weight_has_no_parts():
    def body(x):
        table = np.linspace(-1, 1, 16).astype(np.float16)
        held = mb.constexpr_lut_to_dense(indices=np.arange(40, dtype=np.uint8), lut=table,
                                         shape=np.uint32([1, 2, 1, 40]))
        return mb.conv(x=x, weight=held, name="y")

    assert notes(build_program(body, x=(1, 2, 3, 90))) == [
        "- weight is compressed, and parts would need recompression"
    ]


def test_parts_of_values_of_other_lengths_have_ends_of_their_own():
    """coremltools writes an end counted from the back as one from the front, into the const that it reads."""
    def body(x):
        kernel = make_weight(2, 2, 2, 20)
        return [mb.conv(x=each, weight=kernel, pad_type="valid", name=f"y{number}")
                for number, each in enumerate([x, mb.slice_by_index(x=x, begin=[0] * 4, end=[1, 2, 3, 33])])]

    made = build_program(body, x=(1, 2, 3, 50))
    assert len(holds(made, NAME, target="m1").fired) == 2 and kinds(made)["conv"] == 4
