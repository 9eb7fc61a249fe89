"""ANE217 and ANE217 against the numbers of coremltools' own op tests and PyTorch's layers."""

from __future__ import annotations

from collections import Counter

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from hypothesis import given
from hypothesis import strategies as st

from mil_ane_passes.ane.prediction import predict_plan
from mil_ane_passes.ir.clone import clone_program
from mil_ane_passes.passes.engine import apply_rewrite
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.passes.registry import find_rewrite, get_all_rules
from mil_ane_passes.runtime import Runtime
from tests.rewrites.helpers import kinds
from tests.rewrites.recurrent_layers import WAYS, converted, draw, held, initial, refused, torch_states, unrolled

torch = pytest.importorskip("torch")
ACTIVATIONS = {"tanh": np.tanh, "sigmoid": lambda x: 1 / (1 + np.exp(-x)), "relu": lambda x: np.maximum(x, 0),
               "linear": lambda x: x}
_NAMES = st.sampled_from([*ACTIVATIONS])
_SIZES = {"seed": st.integers(0, 2**16), "steps": st.integers(1, 7), "batch": st.integers(1, 3),
          "features": st.integers(1, 5), "hidden": st.integers(1, 6), "bias": st.booleans(), "zeros": st.booleans(),
          "sequence": st.booleans(), "direction": st.sampled_from(["forward", "reverse"])}


def held_against(kind, step, sizes, given_, options, half, opset=ct.target.iOS17):
    """The layer unrolled, against `step(x, h)` in float64 from step to step."""
    steps, batch, features, hidden = (sizes[name] for name in ("steps", "batch", "features", "hidden"))
    options |= {name: sizes[name] for name in ("direction",)} | {"output_sequence": sizes["sequence"]}
    first = np.zeros((batch, hidden), np.float16) if sizes["zeros"] else draw(sizes["seed"] + 9, batch, hidden)
    built = build_program(lambda x, **h: getattr(mb, kind)(x=x, initial_h=h.get("h", first), **given_, **options),
                          opset=opset, x=(steps, batch, features), **({} if sizes["zeros"] else {"h": first.shape}))
    x = draw(sizes["seed"], steps, batch, features)
    found = unrolled(f"unroll_{kind}", built, {"x": x} | ({} if sizes["zeros"] else {"h": first}), half)
    states = [first.astype(np.float64)]
    for now in (x if sizes["direction"] == "forward" else x[::-1]).astype(np.float64):
        states.append(step(now, states[-1]))
    expected = np.stack(states[1:] if sizes["sequence"] else states[-1:])
    for value, truth in zip(found, (expected, states[-1]), strict=True):
        np.testing.assert_allclose(value, truth, rtol=0, atol=1e-12 * max(1.0, np.abs(truth).max()))
    return built


@pytest.mark.law
@given(names=st.just(("sigmoid", "tanh")) | st.tuples(_NAMES, _NAMES), after=st.sampled_from([None, False, True]),
       extra=st.booleans(), **_SIZES)
def test_gru(names, after, extra, **sizes):
    """By the formulas of coremltools' own op tests; `reset_after` and `input_bias` are of iOS18."""
    seed, hidden = sizes["seed"], sizes["hidden"]
    w, r = initial(seed + 1, hidden, 3 * hidden, sizes["features"]), initial(seed + 2, hidden, 3 * hidden, hidden)
    b, b_in = (initial(seed + number, hidden, 3 * hidden) * given
               for number, given in ((3, sizes["bias"]), (4, extra and after is not None)))
    given_ = {"weight_ih": w, "weight_hh": r} | ({"bias": b} if sizes["bias"] else {})
    given_ |= {} if after is None else {"reset_after": after} | ({"input_bias": b_in} if extra else {})
    gate, out = (ACTIVATIONS[name] for name in names)

    def step(x, h):
        (w_r, w_o, w_z), (r_r, r_o, r_z), (b_r, b_o, b_z) = (np.split(each.astype(float), 3) for each in (w, r, b))
        in_r, in_o, in_z = np.split(b_in.astype(float), 3)
        reset, update = gate(x @ w_r.T + in_r + h @ r_r.T + b_r), gate(x @ w_z.T + in_z + h @ r_z.T + b_z)
        more = reset * (h @ r_o.T + b_o) if after else (reset * h) @ r_o.T + b_o
        return (1 - update) * out(x @ w_o.T + in_o + more) + update * h

    kinds_ = dict(zip(("recurrent_activation", "activation"), names))
    held_against("gru", step, sizes, given_, kinds_, names == ("sigmoid", "tanh"),
                 ct.target.iOS17 if after is None else ct.target.iOS18)


@pytest.mark.law
@given(name=_NAMES, **_SIZES)
def test_rnn(name, **sizes):
    seed, hidden = sizes["seed"], sizes["hidden"]
    w, r = initial(seed + 1, hidden, hidden, sizes["features"]), initial(seed + 2, hidden, hidden, hidden)
    b = initial(seed + 3, hidden, hidden)
    given_ = {"weight_ih": w, "weight_hh": r} | ({"bias": b} if sizes["bias"] else {})

    def step(x, h):
        return ACTIVATIONS[name](x @ w.astype(float).T + h @ r.astype(float).T + b.astype(float) * sizes["bias"])

    held_against("rnn", step, sizes, given_, {"activation": name}, name in ("tanh", "sigmoid"))


def test_pytorchs_gru_is_the_one_of_ios18():
    torch.manual_seed(0)
    layer = torch.nn.GRU(5, 8)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(parameter.half().float())

    def ordered(parameter):
        r, z, n = np.split(parameter.detach().numpy().astype(np.float16), 3)
        return np.concatenate([r, n, z])

    given_ = {"weight_ih": ordered(layer.weight_ih_l0), "weight_hh": ordered(layer.weight_hh_l0),
              "input_bias": ordered(layer.bias_ih_l0), "bias": ordered(layer.bias_hh_l0), "reset_after": True}
    built = build_program(lambda x, h: mb.gru(x=x, initial_h=h, output_sequence=True, **given_), opset=ct.target.iOS18,
                          x=(9, 2, 5), h=(2, 8))
    x, h = draw(1, 9, 2, 5), draw(2, 2, 8)
    with torch.no_grad():
        out, last = layer.double()(torch.from_numpy(x).double(), torch_states(h, 1))
    for value, expected in zip(unrolled("unroll_gru", built, {"x": x, "h": h}), (out, last[0]), strict=True):
        np.testing.assert_allclose(value, expected.numpy(), rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("nonlinearity, both", [("tanh", False), ("relu", False), ("tanh", True)])
def test_rnn_as_pytorch_spells_it(way, nonlinearity, both, tmp_path):
    torch.manual_seed(0)
    layer = held(torch.nn.RNN(6, 8, 2, nonlinearity, batch_first=True, bidirectional=both))
    after = converted(layer, way, (2, 7, 6), tmp_path, passes="unroll_rnn")
    assert not kinds(after)["rnn"] and refused(after) <= {"reverse"}
    x = draw(3, 2, 7, 6).astype(np.float32)
    with torch.no_grad():
        expected = layer.double()(torch.from_numpy(x).double())
    for precision, allowed in (("float64", 1e-12), ("float16", 4e-3)):
        (name,) = after.functions["main"].inputs
        for value, truth in zip(Runtime(after, precision=precision)({name: x}).values(), expected, strict=True):
            np.testing.assert_allclose(value, truth.numpy(), rtol=0, atol=allowed)


def test_the_state_s_weights_are_cut_once_for_all_layers_that_share_them():
    held_ = {"weight_ih": draw(0, 24, 8), "weight_hh": draw(1, 24, 8), "bias": draw(2, 24)}

    def body(x, h):
        shared = {name: mb.const(val=value) for name, value in held_.items()}
        for _ in range(2):
            x = mb.gru(x=x, initial_h=h, output_sequence=True, **shared)[0]
        return mb.identity(x=x, name="y")

    built = build_program(body, x=(5, 1, 8), h=(1, 8))
    apply_rewrite(find_rewrite("unroll_gru").configured(), built)
    weights = Counter(op.weight for op in built.functions["main"].find_ops(op_type="linear"))
    assert sorted(weights.values()) == [2, 10, 10]
    assert sum(np.size(weight.val) for weight in weights) == 2 * 24 * 8


def test_a_compressed_weight_stays_whole():
    scale, zero = np.full(24, 0.0625, np.float16), np.full(24, 128, np.uint8)
    data = np.random.default_rng(0).integers(112, 144, (24, 8)).astype(np.uint8)

    def body(x, h):
        packed = mb.constexpr_affine_dequantize(quantized_data=data, zero_point=zero, scale=scale, axis=0)
        return mb.gru(x=x, initial_h=h, weight_ih=packed, weight_hh=packed, output_sequence=True)

    built = build_program(body, x=(4, 1, 8), h=(1, 8))
    old, feeds = clone_program(built), {"x": draw(1, 4, 1, 8), "h": draw(2, 1, 8)}
    for value, truth in zip(unrolled("unroll_gru", built, feeds), Runtime(old, precision="float64")(feeds).values()):
        np.testing.assert_allclose(value, truth, rtol=0, atol=1e-12)
    assert kinds(built)["constexpr_affine_dequantize"] == 1 and kinds(built)["linear"] == 1 + 4 * 2


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind, gates", [("gru", 3), ("rnn", 1)])
@pytest.mark.parametrize("hidden, steps", [(32, 1), (32, 150), (512, 16)])
def test_the_whole_is_predicted_to_take_less_time(kind, gates, hidden, steps):
    def body(x, h):
        x = mb.linear(x=x, weight=draw(2, hidden, hidden))
        x = getattr(mb, kind)(x=x, initial_h=h, weight_ih=draw(0, gates * hidden, hidden),
                              weight_hh=draw(1, gates * hidden, hidden), output_sequence=True)[0]
        return mb.linear(x=x, weight=draw(2, hidden, hidden), name="y")

    built = build_program(body, x=(steps, 1, hidden), h=(1, hidden))
    rules = [rule() for rule in get_all_rules().values()]
    before = sum(segment.milliseconds for segment in predict_plan(built, rules, target="m4")[0].segments)
    apply_rewrite(find_rewrite(f"unroll_{kind}").configured(), built, target="m4")
    assert sum(segment.milliseconds for segment in predict_plan(built, rules, target="m4")[0].segments) < before
    assert refused(built) == set()
