"""ANE309: norms of real modules stay right where their squares overflow, held against PyTorch in double precision."""

from __future__ import annotations

from functools import partial

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

import mil_ane_passes as ane
from mil_ane_passes.package import load
from mil_ane_passes.passes.engine import apply_rewrite, find_matches
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.runtime import Runtime
from tests.conversions import convert_model
from tests.lab.models.zoo import _complete_torchvision
from tests.lab.versions.needs import older_than
from tests.rewrites.helpers import configure_rewrite, kinds, only_output, torch_outputs
from tests.rewrites.spellings import spelt

WIDTH, EPSILON = 64, 1e-6


def transformers_norm(module, name, **options):
    def make():
        _complete_torchvision()
        pytest.importorskip("transformers")
        from importlib import import_module

        return getattr(import_module(f"transformers.models.{module}.modeling_{module}"), name)(WIDTH, **options)

    return make


def timm_norm(name):
    def make():
        _complete_torchvision()
        return getattr(pytest.importorskip("timm.layers"), name)(WIDTH)

    return make


def mean_square(x, eps=EPSILON):
    return x.pow(2).mean(-1, keepdim=True) + eps


FIRES = {
    "Llama": transformers_norm("llama", "LlamaRMSNorm", eps=EPSILON),
    "T5": transformers_norm("t5", "T5LayerNorm"),
    "Qwen2": transformers_norm("qwen2", "Qwen2RMSNorm"),
    "Qwen3": transformers_norm("qwen3", "Qwen3RMSNorm"),
    "Gemma": transformers_norm("gemma", "GemmaRMSNorm"),
    "Mistral": transformers_norm("mistral", "MistralRMSNorm"),
    "timm SimpleNorm": timm_norm("SimpleNorm"),
    "divided by sqrt": lambda: spelt(lambda x: x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPSILON)),
    "divided by sqrt of square": lambda: spelt(lambda x: x / torch.square(x).mean(-1, keepdim=True).add(1e-5).sqrt()),
    "pow": lambda: spelt(lambda x: mean_square(x).pow(-0.5) * x),
    "pow of a half": lambda: spelt(lambda x: x / mean_square(x) ** 0.5),
    "sum over n": lambda: spelt(lambda x: x * torch.rsqrt((x * x).sum(-1, keepdim=True) / WIDTH + EPSILON)),
    "sum": lambda: spelt(lambda x: x / torch.sqrt((x * x).sum(-1, keepdim=True) + EPSILON)),
    "eps outside": lambda: spelt(lambda x: x / ((x * x).mean(-1, keepdim=True).sqrt() + 1e-3)),
    # coremltools 9.1 makes 65504 of the upper bound of a clamp that has none.
    **({"eps as a bound": lambda: spelt(
        lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True).clamp(min=1e-5)))} if older_than("9.1") else {}),
    "var": lambda: spelt(lambda x: (x - x.mean(-1, keepdim=True))
                         / torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-5)),
}
HOST_SCALED = {
    "RMSNorm": lambda: torch.nn.RMSNorm(WIDTH, eps=EPSILON),
    "F.rms_norm": lambda: spelt(lambda x: functional.rms_norm(x, (WIDTH,), eps=EPSILON)),
    "timm RmsNorm": timm_norm("RmsNorm"),
}


rule = partial(configure_rewrite, "scaled_rms_norm")


def rule_for(name):
    """The rule that fires on FIRES[name] without measurements: a variance is left alone unless it `always` fires."""
    return rule(always=name == "var")


def large():
    """Rows of quite different magnitudes: up to 2000, ordinary, tiny, and zeros."""
    x = np.random.default_rng(0).standard_normal((5, WIDTH)) * np.array([[500.0], [30.0], [1.0], [0.01], [0.0]])
    return x.clip(-2000, 2000).astype(np.float16)


def converted(module, *, export=False, precision=ct.precision.FLOAT16, target=ct.target.iOS17, to="milinternal",
              **options):
    with torch.no_grad():
        return convert_model(module, torch.from_numpy(large()).float(), way="exported" if export else "traced",
                             names="x", convert_to=to, compute_precision=precision, minimum_deployment_target=target,
                             **options)


def error(found, expected):
    return np.abs(found.astype(np.float64) - expected).max() / np.abs(expected).max()


@pytest.mark.sampled(12)
@pytest.mark.parametrize("export", [False, True], ids=["traced", "exported"])
@pytest.mark.parametrize("name", FIRES)
def test_norms_of_real_modules_are_right_where_they_overflowed(name, export):
    module = FIRES[name]()
    built = converted(module, export=export)
    x, precise = large().astype(np.float32), torch_outputs(module, torch.from_numpy(large().astype(np.float64)))
    before = only_output(built, x, "float16")
    assert not error(before, precise) < 0.5, "the squares of this input overflow"
    assert apply_rewrite(rule_for(name), built).fired
    assert error(only_output(built, x, "float16"), precise) < 3e-3
    assert not apply_rewrite(rule_for(name), built).fired


@pytest.mark.parametrize("target", [ct.target.iOS15, ct.target.iOS16, ct.target.iOS18], ids=str)
def test_opsets_other_than_ios17(target):
    module = FIRES["Llama"]()
    built = converted(module, target=target)
    assert apply_rewrite(rule(), built).fired
    precise = torch_outputs(module, torch.from_numpy(large().astype(np.float64)))
    assert error(only_output(built, large().astype(np.float32), "float16"), precise) < 3e-3


def test_the_published_fault_no_longer_reaches_it():
    module = FIRES["Llama"]()
    built = converted(module)
    x, precise = large().astype(np.float32), torch_outputs(module, torch.from_numpy(large().astype(np.float64)))
    faulty = only_output(built, x, "float64", quirks=["square_overflow"])
    assert np.all(faulty[0] == 0) and error(faulty, precise) > 0.5
    apply_rewrite(rule(), built)
    assert error(only_output(built, x, "float64", quirks=["square_overflow"]), precise) < 1e-4  # eps is one of fp16


@pytest.mark.parametrize("name", FIRES)
def test_fp32_is_left_alone(name):
    built = converted(FIRES[name](), precision=ct.precision.FLOAT32)
    trace = find_matches(rule(), built)
    assert not trace.fired
    assert {miss.reason for miss in trace.near_misses} == {"squared in fp32, which overflows above 1.8e19 only"}


def test_squares_kept_in_fp32_amid_fp16_are_left_alone():
    kept = ("pow", "reduce_mean", "add", "rsqrt")
    built = converted(FIRES["Llama"](), precision=ct.transform.FP16ComputePrecision(lambda op: op.op_type not in kept))
    assert kinds(built)["cast"] >= 2
    (miss,) = find_matches(rule(), built).near_misses
    assert miss.reason == "squared in fp32, which overflows above 1.8e19 only"


@pytest.mark.parametrize("name", HOST_SCALED)
def test_what_the_frontend_divides_by_its_maximum_is_left_alone(name):
    for built in (converted(HOST_SCALED[name]()), ane.convert(
            torch.jit.trace(HOST_SCALED[name]().eval(), torch.zeros(2, WIDTH)), convert_to="milinternal",
            inputs=[ct.TensorType(shape=(2, WIDTH))], minimum_deployment_target=ct.target.iOS17)):
        trace = find_matches(rule(), built)
        assert not trace.fired
        assert {miss.reason for miss in trace.near_misses} <= {"x is divided by its largest magnitude already"}


def test_normalize_keeps_its_stable_norm():
    built = converted(spelt(lambda x: x / x.norm(dim=-1, keepdim=True)))
    (miss,) = find_matches(rule(), built).near_misses
    assert miss.reason == "reduce_l2_norm squares inside, which is reported to stay stable"


def test_the_layer_norm_of_x_beside_its_negative_is_no_candidate():
    built = converted(spelt(lambda x: functional.layer_norm(torch.cat([x, -x], -1), (2 * WIDTH,))[..., :WIDTH]))
    trace = find_matches(rule(), built)
    assert not trace.fired and not trace.near_misses


@pytest.mark.parametrize("name", ["Llama", "timm SimpleNorm", "sum over n", "var"])
def test_the_form_survives_the_backend_and_a_saved_package(name, tmp_path):
    module = FIRES[name]()
    model = converted(module, to="mlprogram",
                      pass_pipeline=ane.pipeline(passes="scaled_rms_norm",
                                                 options={"scaled_rms_norm": {"always": name == "var"}}))
    model.save(str(tmp_path / "norm.mlpackage"))
    built = load(tmp_path / "norm.mlpackage").program
    assert kinds(built)["reduce_max"] == 1 and not apply_rewrite(rule(), built).fired
    precise = torch_outputs(module, torch.from_numpy(large().astype(np.float64)))
    assert error(only_output(built, large().astype(np.float32), "float16"), precise) < 3e-3


def test_a_package_converted_without_us_is_mended_too(tmp_path):
    module = FIRES["Qwen3"]()
    converted(module, to="mlprogram").save(str(tmp_path / "norm.mlpackage"))
    report = ane.rewrite(str(tmp_path / "norm.mlpackage"), str(tmp_path / "new.mlpackage"), passes="scaled_rms_norm")
    assert report.changed and report.verified
    precise = torch_outputs(module, torch.from_numpy(large().astype(np.float64)))
    found = only_output(load(tmp_path / "new.mlpackage").program, large().astype(np.float32), "float16")
    assert error(found, precise) < 3e-3


def test_batch_and_length_may_be_symbolic_but_not_what_is_summed():
    def body(x):
        mean = mb.reduce_mean(x=mb.square(x=x), axes=[-1], keep_dims=True)
        return mb.mul(x=x, y=mb.rsqrt(x=mean, epsilon=np.float16(1e-4)), name="y")

    built = build_program(body, x=(None, None, WIDTH))
    assert apply_rewrite(rule(), built).fired
    (miss,) = find_matches(rule(), build_program(body, x=(1, 3, None))).near_misses
    assert miss.reason == "the sum is over a symbolic dimension"


def test_rows_without_the_fault_move_by_a_few_units_at_most():
    module = FIRES["Llama"]()
    built = converted(module)
    x = np.random.default_rng(1).standard_normal((5, WIDTH)).astype(np.float16)
    x[0, 3], x[1, 5] = 200.0, -90.0
    precise = torch_outputs(module, torch.from_numpy(x.astype(np.float64)))
    before = error(only_output(built, x.astype(np.float32), "float16"), precise)
    apply_rewrite(rule(), built)
    assert error(only_output(built, x.astype(np.float32), "float16"), precise) <= 2 * before + 2.0**-11


SPELLINGS = st.sampled_from(["rsqrt", "pow", "sqrt", "inverse"])


@pytest.mark.law
@given(spelling=SPELLINGS, kind=st.sampled_from(["mean", "sum"]),
       eps=st.sampled_from([0.0, 6e-8, 1e-6, 1e-5, 0.3, 7.0]), power=st.integers(-12, 15), seed=st.integers(0, 9))
def test_the_algebra_is_the_same_at_any_magnitude(spelling, kind, eps, power, seed):
    half = np.float16

    def body(x):
        total = getattr(mb, f"reduce_{kind}")(x=mb.square(x=x), axes=[-1], keep_dims=True)
        total = mb.add(x=total, y=half(eps)) if eps else total
        if spelling == "sqrt":
            return mb.real_div(x=x, y=mb.sqrt(x=total), name="y")
        factor = (mb.rsqrt(x=total, epsilon=half(0)) if spelling == "rsqrt"
                  else mb.pow(x=total, y=half(-0.5)) if spelling == "pow"
                  else mb.inverse(x=mb.sqrt(x=total), epsilon=half(1e-4)))
        return mb.mul(x=factor, y=x, name="y")

    built = build_program(body, x=(3, 7))
    x = np.random.default_rng(seed).uniform(-1, 1, (3, 7)) * 2.0**power
    x = np.where(x == 0, 1.0, x)
    expected = Runtime(built, precision="float64")({"x": x})["y"]
    assert apply_rewrite(rule(), built).fired
    np.testing.assert_allclose(Runtime(built, precision="float64")({"x": x})["y"], expected, rtol=2.0**-20)


@pytest.mark.parametrize("over", [False, True])
def test_another_value_over_a_small_norm_overflows_no_earlier_than_its_result(over):
    def body(x, k):
        total = mb.reduce_sum(x=mb.square(x=x), axes=[-1], keep_dims=True)
        if over:
            return mb.real_div(x=k, y=mb.sqrt(x=total), name="y")
        return mb.mul(x=k, y=mb.rsqrt(x=total), name="y")

    built = build_program(body, x=(2, 1024), k=(2, 1))
    assert apply_rewrite(rule(), built).fired
    small, large = np.full((1, 1024), 0.05), np.full((1, 1024), 300.0)
    feeds = {"x": np.concatenate([small, large]).astype(np.float16), "k": np.array([[30000], [3000]], np.float16)}
    x, k = (feeds[name].astype(np.float64) for name in ("x", "k"))
    found = Runtime(built, precision="float16")(feeds)["y"]
    np.testing.assert_allclose(found, k / np.linalg.norm(x, axis=-1, keepdims=True), rtol=2.0**-8)


def test_a_power_that_adds_an_axis_is_another_spelling():
    def body(x):
        squares = mb.pow(x=x, y=np.full((1, 1, 1), 2, np.float16))
        return mb.mul(x=x, y=mb.rsqrt(x=mb.reduce_mean(x=squares, axes=[1], keep_dims=True)), name="y")

    assert not apply_rewrite(rule(), build_program(body, x=(3, 3))).fired


@pytest.mark.parametrize("shape", ["unsqueeze", "none", "view"])
def test_a_mean_that_drops_its_axis_and_gets_it_back(shape):
    class Norm(torch.nn.Module):
        def forward(self, x):
            root = torch.rsqrt(x.pow(2).mean(-1) + 1e-5)
            root = {"unsqueeze": lambda: root.unsqueeze(-1), "none": lambda: root[..., None],
                    "view": lambda: root.view(2, 3, 1)}[shape]()
            return x * root

    x = torch.randn(2, 3, 16) * 1500
    model = ct.convert(torch.jit.trace(Norm(), x), inputs=[ct.TensorType("x", x.shape)], skip_model_load=True,
                       minimum_deployment_target=ct.target.iOS17, pass_pipeline=ane.pipeline())
    (found,) = ane.run(model, {"x": x.half().float().numpy()}, precision="float16", quirks=["square_overflow"]).values()
    expected = Norm()(x.half().double()).numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=4e-3 * np.abs(expected).max())


class TestWhatIsKnownOfX:
    """A norm is rewritten where its squares can overflow, as far as the program or measurements tell."""

    UNKNOWN = "the variance of x minus its mean, and the range of x is unknown: "

    @staticmethod
    def norm(of, centred=False):
        def body(x):
            x = of(x)
            if centred:
                x = mb.sub(x=x, y=mb.reduce_mean(x=x, axes=[-1], keep_dims=True))
            mean = mb.reduce_mean(x=mb.square(x=x), axes=[-1], keep_dims=True, name="mean")
            return mb.mul(x=x, y=mb.rsqrt(x=mb.add(x=mean, y=np.float16(1e-5))), name="y")

        return build_program(body, x=(4, 64))

    @pytest.mark.parametrize("of", [
        lambda x: mb.sigmoid(x=x), lambda x: mb.clip(x=x, alpha=np.float16(-15), beta=np.float16(15)),
        lambda x: mb.layer_norm(x=x, axes=[-1]), lambda x: mb.concat(values=[mb.tanh(x=x), mb.relu6(x=x)], axis=-1),
        lambda x: mb.mul(x=mb.softmax(x=x), y=np.full(64, 20, np.float16)),
        lambda x: mb.reshape(x=mb.cos(x=x), shape=[4, 4, 16]),
    ], ids=["sigmoid", "clip", "layer norm", "concat", "product", "reshape"])
    @pytest.mark.parametrize("centred", [False, True])
    def test_what_the_program_keeps_small_is_left_alone(self, of, centred):
        (miss,) = find_matches(rule(), self.norm(of, centred)).near_misses
        assert miss.reason.startswith("the program keeps x within ")
        assert find_matches(rule(always=True), self.norm(of, centred)).fired

    @pytest.mark.parametrize("centred", [False, True])
    def test_a_bound_beyond_the_limit_does_not_help(self, centred):
        assert find_matches(rule(), self.norm(lambda x: mb.clip(x=x, alpha=np.float16(-300), beta=np.float16(300)),
                                              centred)).fired

    def test_a_sum_overflows_where_no_square_does(self):
        """64 squares of 40: each is 1600, all of them 102400."""
        assert find_matches(rule(), self.norm(lambda x: mb.clip(x=x, alpha=np.float16(-40), beta=np.float16(40)))).fired

    def test_of_unknown_size_only_a_norm_of_x_itself_is_rewritten(self):
        assert find_matches(rule(), self.norm(lambda x: mb.relu(x=x))).fired
        trace = find_matches(rule(), self.norm(lambda x: mb.relu(x=x), centred=True))
        assert not trace.fired and [miss.reason.startswith(self.UNKNOWN) for miss in trace.near_misses] == [True]

    @pytest.mark.parametrize("centred", [False, True])
    @pytest.mark.parametrize(("scale", "fires"), [(1.0, False), (30.0, True), (300.0, True)])
    def test_measured_values_decide(self, centred, scale, fires):
        built = self.norm(lambda x: mb.mul(x=x, y=np.float16(scale)), centred)
        report = ane.rewrite(built, feeds={"x": np.linspace(-3, 3, 256).reshape(64, 4).T.astype(np.float16)})
        assert (report.status != "unchanged") is fires

    def test_a_margin_is_left_for_other_inputs(self):
        built = self.norm(lambda x: mb.relu(x=x))
        feeds = {"x": np.full((4, 64), 20, np.float16)}
        options = {"scaled_rms_norm": {"margin": 1.5}}
        assert ane.rewrite(built, feeds=feeds).status != "unchanged"
        assert ane.rewrite(built, feeds=feeds, options=options).status == "unchanged"

    def test_of_group_norms_written_out_the_advice_is_to_measure(self):
        class Norm(torch.nn.Module):
            def forward(self, x):
                return functional.group_norm(x, 2)

        built = ct.convert(torch.jit.trace(Norm(), torch.zeros(1, 4, 8, 8)), convert_to="milinternal",
                           inputs=[ct.TensorType("x", (1, 4, 8, 8))], minimum_deployment_target=ct.target.iOS17)
        trace = find_matches(rule(), built)
        assert not trace.fired and all(miss.reason.startswith(self.UNKNOWN) for miss in trace.near_misses)
        assert find_matches(rule(always=True), built).fired


class TestMeansOfOtherThings:
    """A mean under a root is no mean of squares where it is of a select, a concat or whatever else an op can give."""

    BODIES = {
        "select": lambda x: mb.select(cond=mb.greater(x=x, y=np.float16(0)), a=x, b=np.zeros((4, 8), np.float16)),
        "concat": lambda x: mb.concat(values=[mb.abs(x=x), mb.abs(x=x)], axis=1),
        "cond": lambda x: mb.cond(pred=mb.greater(x=mb.reduce_sum(x=x, keep_dims=False), y=np.float16(0)),
                                  _true_fn=lambda: mb.relu(x=x), _false_fn=lambda: mb.exp(x=x)),
        "masked squares": lambda x: mb.select(cond=mb.greater(x=x, y=np.float16(0)), a=mb.mul(x=x, y=x),
                                              b=np.zeros((4, 8), np.float16)),
    }

    @pytest.mark.parametrize("kind", BODIES)
    def test_they_are_left_alone(self, kind):
        def body(x):
            mean = mb.reduce_mean(x=self.BODIES[kind](x), axes=[-1], keep_dims=True)
            return mb.mul(x=x, y=mb.rsqrt(x=mb.add(x=mean, y=np.float16(1e-3))), name="y")

        built = build_program(body, x=(4, 8))
        assert ane.rewrite(built).status == "unchanged"
        ane.lint(built)
