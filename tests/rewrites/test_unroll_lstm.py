"""ANE217 against PyTorch's LSTM and the op's own attributes; what is left for the ANE, and what it costs."""

from __future__ import annotations

from collections import Counter

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types
from hypothesis import given
from hypothesis import strategies as st

import mil_ane_passes as ane
from mil_ane_passes.ane.prediction import predict_plan
from mil_ane_passes.ir.clone import clone_program
from mil_ane_passes.passes.engine import apply_rewrite
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.passes.registry import find_rewrite, get_all_rules
from mil_ane_passes.runtime import Runtime
from tests.conversions import save_program
from tests.rewrites.helpers import kinds
from tests.rewrites.recurrent_layers import (
    WAYS,
    converted,
    draw,
    held,
    initial,
    refused,
    torch_states,
    unrolled,
)

torch = pytest.importorskip("torch")


def of_torch(layer, suffix):
    """The weights of one layer and way, with the gates in MIL's order, in fp16."""
    def ordered(parameter):
        i, f, z, o = np.split(parameter.detach().numpy(), 4)
        return np.concatenate([i, f, o, z]).astype(np.float16)

    made = {f"weight_{kind}": ordered(getattr(layer, f"weight_{kind}_l0{suffix}")) for kind in ("ih", "hh")}
    if layer.bias:
        made["bias"] = ordered(getattr(layer, f"bias_ih_l0{suffix}"))
    return {f"{name}{'_back' if suffix else ''}": value for name, value in made.items()}


@pytest.mark.law
@given(seed=st.integers(0, 2**16), steps=st.integers(1, 9), batch=st.integers(1, 3), features=st.integers(1, 6),
       hidden=st.integers(1, 9), bias=st.booleans(), both=st.booleans(), zeros=st.booleans(), sequence=st.booleans())
def test_is_pytorchs_lstm(seed, steps, batch, features, hidden, bias, both, zeros, sequence):
    torch.manual_seed(seed)
    layer = held(torch.nn.LSTM(features, hidden, bias=bias, bidirectional=both))
    ways = 1 + both
    first = [np.zeros((batch, hidden * ways), np.float16) if zeros else draw(seed + n, batch, hidden * ways)
             for n in (1, 2)]
    given_ = of_torch(layer, "") | (of_torch(layer, "_reverse") if both else {})
    options = {"output_sequence": sequence, "direction": "bidirectional" if both else "forward"}

    def body(x, **states):
        h, c = (first if zeros else (states["h"], states["c"]))
        return mb.lstm(x=x, initial_h=h, initial_c=c, **given_, **options)

    shapes = {} if zeros else {"h": first[0].shape, "c": first[1].shape}
    built = build_program(body, x=(steps, batch, features), **shapes)
    feeds = {"x": draw(seed, steps, batch, features)} | ({} if zeros else {"h": first[0], "c": first[1]})
    found = unrolled("unroll_lstm", built, feeds)
    with torch.no_grad():
        out, (h, c) = layer.double()(torch.from_numpy(feeds["x"]).double(),
                                     tuple(torch_states(state, ways) for state in first))
    last = torch.cat([out[-1:, :, :hidden], out[:1, :, hidden:]], -1)  # each way's own last step
    for value, expected in zip(found, (out if sequence else last, torch.cat([*h], -1), torch.cat([*c], -1))):
        np.testing.assert_allclose(value, expected.numpy(), rtol=0, atol=1e-12)


_NAMES = st.sampled_from(["sigmoid", "tanh", "relu", "linear"])
_DEFAULT = ("sigmoid", "tanh", "tanh")


@pytest.mark.law
@given(seed=st.integers(0, 2**16), steps=st.integers(1, 5), batch=st.integers(1, 3),
       direction=st.sampled_from(["forward", "reverse", "bidirectional"]), peephole=st.booleans(),
       clip=st.sampled_from([None, 0.25]), sequence=st.booleans(),
       names=st.just(_DEFAULT) | st.tuples(_NAMES, _NAMES, _NAMES), exact=st.booleans(),
       read=st.sets(st.integers(0, 2), min_size=1))
def test_every_attribute_is_kept(seed, steps, batch, direction, peephole, clip, sequence, names, exact, read):
    """Against the op as the runtime computes it, which tests/runtime holds against the documented formulas."""
    ways, hidden, features = 1 + (direction == "bidirectional"), 5, 4
    given_ = dict(zip(("recurrent_activation", "cell_activation", "activation"), names))
    given_ |= {} if clip is None else {"clip": np.float16(clip)}
    for way, suffix in enumerate(("", "_back")[:ways]):
        given_ |= {f"weight_ih{suffix}": draw(seed + way, 20, features) / 4,
                   f"weight_hh{suffix}": draw(seed + 7 + way, 20, hidden) / 4, f"bias{suffix}": draw(seed + 3, 20) / 4}
        given_ |= {f"peephole{suffix}": draw(seed + 5 + way, 15) / 4} if peephole else {}

    def body(x, h, c):
        made = mb.lstm(x=x, initial_h=h, initial_c=c, direction=direction, output_sequence=sequence, **given_)
        return [made[number] for number in sorted(read)]

    built = build_program(body, x=(steps, batch, features), h=(batch, ways * hidden), c=(batch, ways * hidden))
    feeds = {"x": draw(seed, steps, batch, features), "h": draw(seed + 1, batch, ways * hidden),
             "c": draw(seed + 2, batch, ways * hidden)}
    old = clone_program(built)
    expected = Runtime(old, precision="float64")(feeds).values()
    for value, truth in zip(unrolled("unroll_lstm", built, feeds, names == _DEFAULT, exact_cell=exact), expected):
        np.testing.assert_allclose(value, truth, rtol=0, atol=1e-12 * max(1.0, np.abs(truth).max()))
    assert "concat" not in kinds(built) or ways == 2 or (sequence and 0 in read and steps > 1)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("both", [False, True])
def test_as_pytorch_spells_it(way, both, tmp_path):
    """Two layers, batch first, as an fp16 package: nothing is left that the ANE rejects, and PyTorch's numbers."""
    torch.manual_seed(0)
    layer = held(torch.nn.LSTM(6, 8, 2, batch_first=True, bidirectional=both))
    before = converted(layer, way, (2, 7, 6), tmp_path)
    assert kinds(before)["lstm"] == 2 and "lstm" in refused(before)
    after = converted(layer, way, (2, 7, 6), tmp_path, passes="unroll_lstm")
    assert not kinds(after)["lstm"] and not refused(after) and not refused(after, "m1")
    x = draw(3, 2, 7, 6).astype(np.float32)
    with torch.no_grad():
        out, (h, c) = layer.double()(torch.from_numpy(x).double())
    for precision, allowed in (("float64", 1e-12), ("float16", 2e-3)):
        (name,) = after.functions["main"].inputs
        found = list(Runtime(after, precision=precision)({name: x}).values())
        for value, expected in zip(found, (out, h, c), strict=True):
            np.testing.assert_allclose(value, expected.numpy(), rtol=0, atol=allowed)


def test_a_step_with_its_states_outside_is_a_handful_of_ops():
    weights = {"weight_ih": draw(0, 32, 4), "weight_hh": draw(1, 32, 8), "bias": draw(2, 32)}
    built = build_program(
        lambda x, h, c: mb.lstm(x=x, initial_h=h, initial_c=c, **weights), x=(1, 1, 4), h=(1, 8), c=(1, 8)
    )
    apply_rewrite(find_rewrite("unroll_lstm").configured(), built)
    assert kinds(built) - Counter(const=99) == Counter(
        expand_dims=2, squeeze=2, linear=2, split=2, sigmoid=1, tanh=2, mul=4, add=2, sub=1)


def test_weights_stay_one_const_and_compressed_ones_stay_compressed():
    """16 steps, two layers with the same weights; iOS16's affine form."""
    scale, zero = np.full(32, 0.0625, np.float16), np.full(32, 128, np.uint8)
    data = np.random.default_rng(0).integers(64, 192, (32, 8)).astype(np.uint8)

    def body(x):
        packed = mb.constexpr_affine_dequantize(quantized_data=data, zero_point=zero, scale=scale, axis=0)
        zeros = np.zeros((1, 8), np.float16)
        for _ in range(2):
            x = mb.lstm(x=x, initial_h=zeros, initial_c=zeros, weight_ih=packed, weight_hh=packed,
                        output_sequence=True)[0]
        return mb.identity(x=x, name="y")

    built = build_program(body, x=(16, 1, 8))
    apply_rewrite(find_rewrite("unroll_lstm").configured(), built)
    function = built.functions["main"]
    assert kinds(built)["constexpr_affine_dequantize"] == 1 and kinds(built)["linear"] == 34
    assert {op.weight.op.op_type for op in function.find_ops(op_type="linear")} == {"constexpr_affine_dequantize"}
    assert len({op.bias for op in function.find_ops(op_type="linear")}) == 1


def test_a_first_state_of_zeros_spares_its_product_unless_a_weight_is_infinite():
    def products(weight):
        zeros = np.zeros((1, 8), np.float16)
        built = build_program(lambda x: mb.lstm(x=x, initial_h=zeros, initial_c=zeros, weight_ih=draw(0, 32, 4),
                                                weight_hh=weight)[0], x=(3, 1, 4))
        apply_rewrite(find_rewrite("unroll_lstm").configured(), built)
        return kinds(built)["linear"]

    finite = draw(1, 32, 8)
    infinite = finite.copy()
    infinite[3, 3] = np.inf
    assert (products(finite), products(infinite)) == (3, 4)


@pytest.mark.parametrize("steps, fires", [(256, True), (257, False)])
def test_sequences_up_to_256_steps_by_default(steps, fires):
    zeros = np.zeros((1, 2), np.float16)
    built = build_program(lambda x: mb.lstm(x=x, initial_h=zeros, initial_c=zeros, weight_ih=draw(0, 8, 2),
                                            weight_hh=draw(1, 8, 2))[0], x=(steps, 1, 2))
    trace = apply_rewrite(find_rewrite("unroll_lstm").configured(), built)
    assert bool(trace.fired) == fires
    if not fires:
        assert [miss.reason for miss in trace.near_misses] == ["257 steps, above max_steps=256"]


def test_gates_wider_than_a_dimension_may_be_are_left():
    wide = {"weight_ih": np.zeros((16388, 1), np.float16), "weight_hh": np.zeros((16388, 4097), np.float16)}
    built = build_program(lambda x, h: mb.lstm(x=x, initial_h=h, initial_c=h, **wide)[0], x=(1, 1, 1), h=(1, 4097))
    reasons = [
        miss.reason
        for miss in apply_rewrite(
            find_rewrite("unroll_lstm").configured(), clone_program(built), target="m1"
        ).near_misses
    ]
    assert reasons == ["its gates have a total width of 16388 > 16384 (M1)"]
    assert apply_rewrite(find_rewrite("unroll_lstm").configured(), built, target="m4").fired


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("hidden", "steps"), [(32, 16), (32, 256), (512, 1), (512, 16), *(
    pytest.param(*each, marks=pytest.mark.slow) for each in ((32, 1), (256, 1), (256, 16), (256, 256), (512, 256)))])
def test_the_whole_is_predicted_to_take_less_time(hidden, steps):
    zeros = np.zeros((1, hidden), np.float16)

    def body(x):
        x = mb.linear(x=x, weight=draw(2, hidden, hidden))
        x = mb.lstm(x=x, initial_h=zeros, initial_c=zeros, weight_ih=draw(0, 4 * hidden, hidden),
                    weight_hh=draw(1, 4 * hidden, hidden), bias=draw(3, 4 * hidden), output_sequence=True)[0]
        return mb.linear(x=x, weight=draw(2, hidden, hidden), name="y")

    built = build_program(body, x=(steps, 1, hidden))
    rules = [rule() for rule in get_all_rules().values()]
    before = sum(segment.milliseconds for segment in predict_plan(built, rules, target="m4")[0].segments)
    apply_rewrite(find_rewrite("unroll_lstm").configured(), built, target="m4")
    assert sum(segment.milliseconds for segment in predict_plan(built, rules, target="m4")[0].segments) < before


def test_a_cell_that_is_kept_forgets_little_for_it_is_exact():
    """256 steps of a cell that keeps all but a thousandth and takes up a little of each step, as a counter does."""
    size = 16
    bias = np.repeat([-2.0, 7.0, 0.0, 0.0], size).astype(np.float16)
    zeros = np.zeros((1, size), np.float16)
    built = build_program(lambda x: mb.lstm(x=x, initial_h=zeros, initial_c=zeros, weight_ih=draw(0, 4 * size, 8) / 8,
                                            weight_hh=draw(1, 4 * size, size) / 16, bias=bias)[2], x=(256, 1, 8))
    feeds = {"x": draw(2, 256, 1, 8) + np.float16(0.5)}
    (truth,) = Runtime(clone_program(built), precision="float64")(feeds).values()
    off = {}
    for exact in (True, False):
        twin = clone_program(built)
        apply_rewrite(find_rewrite("unroll_lstm").configured(exact_cell=exact), twin)
        (found,) = Runtime(twin, precision="float16")(feeds).values()
        off[exact] = np.abs(found - truth).max()
    assert off[True] < 0.01 and off[True] < off[False] / 4, (off, np.abs(truth).max())


def test_an_ios15_layer_is_fp32_and_left():
    held_ = {"weight_ih": np.ones((8, 2), np.float32), "weight_hh": np.ones((8, 2), np.float32)}
    built = build_program(lambda x, h: mb.lstm(x=x, initial_h=h, initial_c=h, **held_)[0], opset=ct.target.iOS15,
                          dtype=types.fp32, x=(2, 1, 2), h=(1, 2))
    trace = apply_rewrite(find_rewrite("unroll_lstm").configured(), built)
    assert [miss.reason for miss in trace.near_misses] == ["computed in fp32, which is unsupported on the ANE"]


def test_a_package_is_proved_and_written(tmp_path):
    built = build_program(lambda x, h: mb.lstm(x=x, initial_h=h, initial_c=h, weight_ih=initial(0, 32, 128, 24),
                                               weight_hh=initial(1, 32, 128, 32), output_sequence=True)[0],
                          x=(24, 1, 24), h=(1, 32))
    save_program(built, tmp_path / "in.mlpackage")
    result = ane.rewrite(tmp_path / "in.mlpackage", tmp_path / "out.mlpackage", passes="unroll_lstm")
    assert result.status == "written", result.verify
    assert not refused(ane.load(tmp_path / "out.mlpackage").program)
