"""ANE502: fp32 packages in fp16, against PyTorch in double precision, and what has to stay in fp32."""

from __future__ import annotations

from functools import partial

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types

import mil_ane_passes as ane
from mil_ane_passes.equivalence.execution import build_plans
from mil_ane_passes.equivalence.range_measurement import make_measurer
from mil_ane_passes.ir.query import iterate_ops
from mil_ane_passes.passes.engine import apply_rewrite, find_matches
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.passes.pipeline import sort_passes
from mil_ane_passes.passes.registry import get_all_rewrites
from mil_ane_passes.runtime import Runtime
from tests.conversions import convert_model
from tests.lab.models.zoo import ARCHITECTURES
from tests.package.helpers import WEIGHTS, host_program, make, normal, proto_ops, tree
from tests.package.test_unchanged import BUILDERS
from tests.rewrites.helpers import configure_rewrite, kinds, only_output

OPSETS = [ct.target.iOS15, ct.target.iOS17, ct.target.iOS18]
MIXED = "fp32 beside ops in fp16, as it was converted; mixed=true converts it, too"


rule = partial(configure_rewrite, "fp16_compute")


def draws(count=2, description=lambda name: None, feeds=None):
    return make_measurer(lambda built: build_plans(built, count, description, feeds))


def rewritten(built, measure=None, **options):
    trace = apply_rewrite(rule(**options), built, measure=measure)
    built.validate()
    return trace


def reasons(trace):
    return {miss.value: miss.reason for miss in trace.near_misses}


def in_fp32(built):
    """The ops that compute in fp32: what they make, or read, is; parameters aside, which may stay so from iOS17 on."""
    return [op for _, op in iterate_ops(built) if op.op_type not in ("cast", "const") and any(
        var.is_tensor_or_scalar_of(dtype="fp32") for var in (
            *op.outputs, *(var for var in op.get_flattened_inputs() if not var.op or var.op.op_type != "const")))]


class Small(torch.nn.Module):
    """The layers whose parameters the opsets type differently: scales, epsilons, alphas, recurrent weights."""

    def __init__(self, recurrent=True):
        super().__init__()
        torch.manual_seed(0)
        self.conv = torch.nn.Conv1d(6, 8, 3, padding=1)
        self.norm, self.batch = torch.nn.LayerNorm(8), torch.nn.BatchNorm1d(8)
        self.lstm = (
            torch.nn.LSTM(8, 8, batch_first=True) if recurrent else None
        )  # coremltools does not take it exported
        self.out = torch.nn.Linear(8, 300)

    def forward(self, x):
        y = torch.nn.functional.leaky_relu(self.batch(self.conv(x)), 0.1).transpose(1, 2)
        y = torch.nn.functional.elu(self.norm(y)) * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5)
        if self.lstm is not None:
            y, _ = self.lstm(y)
        return self.out(y).softmax(-1), torch.log(y.abs() + 0.1).sum(-1)


def converted(module, example, target, exported, **options):
    return convert_model(module, example, way="exported" if exported else "traced", names="x",
                         minimum_deployment_target=target, **{"compute_precision": ct.precision.FLOAT32, **options})


@pytest.mark.sampled(3)
@pytest.mark.parametrize("exported", [False, True], ids=["traced", "exported"])
@pytest.mark.parametrize("target", OPSETS, ids=lambda target: target.name)
def test_what_pytorch_computes_within_the_error_it_reports(target, exported, tmp_path):
    module, x = Small(not exported).eval(), torch.randn(2, 6, 10, generator=torch.Generator().manual_seed(1))
    converted(module, x, target, exported).save(str(tmp_path / "source.mlpackage"))
    report = ane.rewrite(tmp_path / "source.mlpackage", tmp_path / "half.mlpackage", passes="fp16_compute",
                         feeds={"x": x.numpy()})
    assert report.status == "written"
    package = ane.load(tmp_path / "half.mlpackage")
    kept = ["kept fp32: no fp16 for lstm in iOS15"] if (target, exported) == (ct.target.iOS15, False) else []
    assert list(reasons(report.traces[0]).values()) == kept and len(in_fp32(package.program)) == len(kept)
    assert report.weight_bytes_after <= (0.7 if kept else 0.55) * report.weight_bytes_before
    found = list(Runtime(package.program, precision="float16")({"x": x.numpy()}).values())
    with torch.no_grad():
        right = [value.numpy() for value in module.double()(x.double())]
    measured = [np.abs(one - other).max() / np.abs(other).max() for one, other in zip(found, right)]
    assert 0 < max(measured) < 1e-2
    said = float(report.traces[0].fired[0].reason.split("in the runs ")[1].split()[0])
    assert max(measured) == pytest.approx(said, rel=0.06)


def test_what_the_hosts_own_conversion_to_fp16_computes():
    module, x = Small().eval(), torch.randn(2, 6, 10, generator=torch.Generator().manual_seed(1))
    ours = converted(module, x, ct.target.iOS17, False)._mil_program
    host = converted(module, x, ct.target.iOS17, False, compute_precision=ct.precision.FLOAT16)._mil_program
    assert rewritten(ours).fired
    assert kinds(ours) - kinds(host) == {} or set(kinds(ours) - kinds(host)) <= {"cast", "const"}
    both = [list(Runtime(each, precision="float16")({"x": x.numpy()}).values()) for each in (ours, host)]
    for one, other in zip(*both):
        np.testing.assert_array_equal(one, other)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", [kind for kind in BUILDERS if kind not in ("float16", "state", "control_flow")])
def test_every_kind_of_package(kind, tmp_path):
    source = BUILDERS[kind](tmp_path / "source.mlpackage")
    before = ane.load(source)
    report = ane.rewrite(source, tmp_path / "half.mlpackage", passes="fp16_compute", seeds=2)
    assert report.status == "written", report
    package = ane.load(tmp_path / "half.mlpackage")
    assert package.spec.description == before.spec.description
    packed = [{name: count for name, count in kinds(each.program).items() if name.startswith("constexpr_")}
              for each in (before, package)]
    assert packed[0] == packed[1]
    assert not [op for op in in_fp32(package.program) if op.op_type != "classify"]
    assert report.weight_bytes_after < report.weight_bytes_before
    if not packed[0]:
        assert report.weight_bytes_after <= 0.55 * report.weight_bytes_before
    assert host_program(tmp_path / "half.mlpackage").functions.keys() == package.program.functions.keys()
    assert not find_matches(rule(), package.program, measure=draws(2, package.description)).fired


@pytest.mark.parametrize("kind", ["float16", "state"])
def test_in_what_computes_in_fp16_there_is_nothing_to_do(kind, tmp_path):
    source = BUILDERS[kind](tmp_path / "source.mlpackage")
    assert ane.rewrite(source, tmp_path / "half.mlpackage", passes="fp16_compute").status == "unchanged"
    assert tree(tmp_path / "half.mlpackage") == tree(source)


def test_control_flow_keeps_its_types(tmp_path):
    package = ane.load(BUILDERS["control_flow"](tmp_path / "source.mlpackage"))
    feeds = [{"x": np.float32([[a, b]])} for a, b in ((2, 1.5), (-1, 0.25))]
    before = [Runtime(package.program)(feed)["out"] for feed in feeds]
    assert len(rewritten(package.program).fired) == 7
    for feed, expected in zip(feeds, before):
        np.testing.assert_allclose(Runtime(package.program, precision="float16")(feed)["out"], expected, rtol=2e-3)
    ane.save(package, tmp_path / "half.mlpackage")
    assert host_program(tmp_path / "half.mlpackage")


def test_fp32_beside_states_of_fp16_goes_to_fp16_and_the_states_stay():
    spec = [mb.TensorSpec((1, 4)), mb.StateTensorSpec((1, 4), dtype=types.fp16)]

    @mb.program(input_specs=spec, opset_version=ct.target.iOS18)
    def built(x, s):
        v = mb.add(x=mb.cast(x=mb.read_state(input=s), dtype="fp32"), y=mb.mul(x=x, y=x), name="sum")
        mb.coreml_update_state(state=s, value=mb.cast(x=v, dtype="fp16"))
        return mb.mul(x=v, y=2.0, name="out")

    feeds, states = {"x": np.float32([[1, -2, 3, 0.5]])}, [{"s": np.float16([[1, 2, 3, 4]])} for _ in range(2)]
    before = Runtime(built, precision="float16")(feeds, states[0])["out"]
    assert len(rewritten(built).fired) == 3 and kinds(built)["cast"] == 2
    np.testing.assert_array_equal(Runtime(built, precision="float16")(feeds, states[1])["out"], before)
    np.testing.assert_array_equal(states[1]["s"], states[0]["s"])


def grown():
    """Squares of up to 3e5, and their roots: only the squares are beyond fp16."""
    def body(x):
        big = mb.square(x=mb.mul(x=x, y=np.float32(256), name="scaled"), name="squared")
        return mb.tanh(x=mb.mul(x=mb.sqrt(x=big, name="root"), y=np.float32(1 / 512), name="small"), name="y")

    return build_program(body, dtype=types.fp32, x=(1, 64))


def test_what_overflows_stays_in_fp32_and_says_how_far_it_gets():
    built, x = grown(), np.random.default_rng(0).uniform(1, 2, (1, 64)).astype(np.float32)
    right = np.tanh(np.sqrt(np.square(x.astype(np.float64) * 256)) / 512)
    all_in_fp16 = grown()
    rewritten(all_in_fp16)
    assert not np.allclose(only_output(all_in_fp16, x, "float16"), right, atol=0.01), "infinite squares: no fault here"
    trace = rewritten(built, draws(feeds={"x": x}))
    largest = f"{(x * 256).max() ** 2:.3g}"
    assert reasons(trace) == {
        "squared": f"kept fp32: its result reaches {largest}, the fp16 maximum is 65504",
        "root": f"kept fp32: x reaches {largest}, the fp16 maximum is 65504"}
    np.testing.assert_allclose(only_output(built, x, "float16"), right, atol=1e-3)
    assert [op.op_type for op in in_fp32(built)] == ["square", "sqrt"]


def test_what_vanishes_stays_in_fp32():
    def body(x):
        tiny = mb.mul(x=mb.square(x=x, name="squared"), y=np.float32(2e-5), name="tiny")
        return mb.mul(x=tiny, y=np.float32(60000), name="y")

    built = build_program(body, dtype=types.fp32, x=(1, 8))
    x = np.full((1, 8), 1e-2, np.float32)
    trace = rewritten(built, draws(feeds={"x": x}))
    assert reasons(trace)["tiny"] == (
        "kept fp32: the largest value of its result is 2e-09, below the fp16 minimum (6.0e-08)")
    assert {hit.value for hit in trace.fired} <= {"squared", "y"}
    np.testing.assert_allclose(only_output(built, x, "float16"), 1.2 * x.astype(np.float64) ** 2, rtol=2e-3)


def cancelled():
    """One difference that fp16 cannot see among plain layers."""
    def body(x):
        shifted = mb.add(x=mb.tanh(x=x, name="before"), y=np.float32(3000), name="up")
        back = mb.sub(x=shifted, y=np.float32(3000), name="down")
        return mb.relu(x=mb.mul(x=back, y=np.float32(0.5), name="after"), name="y")

    return build_program(body, dtype=types.fp32, x=(1, 64))


def test_what_loses_more_than_asked_stays_in_fp32():
    built, x = cancelled(), np.random.default_rng(0).standard_normal((1, 64)).astype(np.float32)
    right = np.maximum(0.5 * np.tanh(x.astype(np.float64)), 0)
    trace = rewritten(built, draws(feeds={"x": x}), max_error=1e-3)
    kept = reasons(trace)
    assert set(kept) == {"up", "down"} and trace.moves == 1e-3
    assert all(reason.startswith("with it in fp16 the outputs are off by") for reason in kept.values())
    assert np.abs(only_output(built, x, "float16") - right).max() <= 1e-3 * right.max()
    assert not apply_rewrite(rule(max_error=1e-3), built, measure=draws(feeds={"x": x})).fired


def squared():
    return build_program(lambda x: mb.square(x=mb.mul(x=x, y=np.float32(300)), name="y"), dtype=types.fp32, x=(2, 8))


@pytest.mark.parametrize("given", [{"ranges": {"x": (-0.1, 0.1)}}, {"feeds": {"x": np.full((2, 8), 0.1, np.float32)}}])
def test_an_overflow_outside_of_what_inputs_hold_is_none(given):
    """Draws of the equivalence check's own are large enough to overflow here; the user says that inputs are not."""
    report = ane.rewrite(squared(), passes="fp16_compute", **given)
    assert report.status == "in memory" and {"mul", "square"} <= {hit.op for hit in report.traces[0].fired}
    assert {case.precision for case in report.verify.cases if case.feeds.startswith("seed")} == {"float64"}
    kept = ane.rewrite(squared(), passes="fp16_compute")
    assert [miss.op for miss in kept.traces[0].near_misses] == ["square"]
    assert {case.precision for case in kept.verify.cases} == {"float64", "float16"}


def test_integers_that_would_change_count_by_their_share():
    def body(x):
        return mb.reduce_argmax(x=mb.add(x=mb.relu(x=x, name="plain"), y=np.float32(1000), name="shifted"), axis=-1,
                                name="best")

    built, x = build_program(body, dtype=types.fp32, x=(1, 8)), np.linspace(0, 0.2, 8, dtype=np.float32)[None]
    trace = rewritten(built, draws(feeds={"x": x}))
    assert set(reasons(trace)) == {"shifted", "best"} and only_output(built, x, "float16") == [[7]]
    assert "off by 1.0e+00 of their largest value (of integers, that share changes)" in reasons(trace)["best"]


def test_a_few_near_ties_of_a_segmentation_may_go_the_other_way():
    weights = np.random.default_rng(0).standard_normal((6, 8, 1, 1)).astype(np.float32)
    built = build_program(
        lambda x: mb.reduce_argmax(x=mb.conv(x=x, weight=weights, name="scores"), axis=1, name="classes"),
        dtype=types.fp32,
        x=(1, 8, 48, 48),
    )
    x = np.random.default_rng(1).standard_normal((1, 8, 48, 48)).astype(np.float32)
    report = ane.rewrite(built, passes="fp16_compute", feeds={"x": x})
    assert report.verified and not report.traces[0].near_misses
    (before,), (after,) = (ane.run(each, {"x": x}, precision="float16").values() for each in (built, report.package))
    assert 0 < np.mean(before != after) < 0.01


@pytest.mark.parametrize("most", [-1.0, 1.0, np.inf, np.nan])
def test_an_error_that_says_nothing_is_refused(most):
    with pytest.raises(ane.InputError, match=r"max_error is .*; expected a share of the outputs"):
        rewritten(cancelled(), max_error=most)


def test_a_mask_of_the_lowest_fp32_does_not_make_nan():
    """(1 - mask) * lowest, as BERT has it: 0 * -inf in fp16. The softmax that reads it is right in fp16."""
    lowest = np.finfo(np.float32).min

    def body(x, mask):
        bias = mb.mul(x=mb.sub(x=np.float32(1), y=mask, name="inverted"), y=lowest, name="bias")
        return mb.softmax(x=mb.add(x=x, y=bias, name="scores"), axis=-1, name="y")

    built = build_program(body, dtype=types.fp32, x=(2, 8), mask=(2, 8))
    feeds = {"x": np.random.default_rng(0).standard_normal((2, 8)).astype(np.float32),
             "mask": np.float32([[1] * 5 + [0] * 3] * 2)}
    trace = rewritten(built, draws(feeds=feeds))
    assert reasons(trace) == {"bias": "kept fp32: its y would be infinite in fp16, and 0 times it NaN"}
    found = Runtime(built, precision="float16")(feeds)["y"]
    x = torch.from_numpy(feeds["x"]).double()
    right = torch.softmax(x.masked_fill(torch.from_numpy(feeds["mask"]) == 0, -torch.inf), -1).numpy()
    np.testing.assert_allclose(found, right, atol=1e-3)


def test_ops_and_values_are_kept_by_name():
    trace = rewritten(built := grown(), keep="tanh+ squared")
    assert reasons(trace) == dict.fromkeys(["squared", "y"], "kept fp32: requested by name")
    assert {op.op_type for op in in_fp32(built)} == {"square", "tanh"}


def test_a_name_to_keep_that_is_none_is_refused():
    with pytest.raises(ane.InputError, match=r"keep: no op of type 'square_' and no value of that name; did you mean"):
        find_matches(rule(keep="tanh+square_"), grown())


def test_the_function_is_named():
    built = grown()
    built.add_function("other", grown().functions["main"])
    assert {hit.function for hit in find_matches(rule(), built).fired} == {"main", "other"}


def test_sums_beyond_32768_are_kept_when_asked():
    built, x = (
        build_program(
            lambda x: mb.linear(x=x, weight=np.full((4, 512), 65, np.float32), name="y"), dtype=types.fp32, x=(1, 512)
        ),
        np.ones((1, 512), np.float32),
    )
    x[:, ::2] = -1
    measure = draws(feeds={"x": x})
    assert find_matches(rule(), built, measure=measure).fired
    (miss,) = find_matches(rule(wide_sums=True), built, measure=measure).near_misses
    assert miss.reason == "kept fp32: its partial sums may reach 3.33e+04, beyond 32768"


def test_what_was_left_in_fp32_stays_unless_asked_for():
    built, x = cancelled(), np.random.default_rng(0).standard_normal((1, 64)).astype(np.float32)
    rewritten(built, keep="sub+add")
    trace = find_matches(rule(), built)
    assert not trace.fired and set(reasons(trace).values()) == {MIXED}
    assert rewritten(built, mixed=True).fired and not in_fp32(built)
    assert only_output(built, x, "float16").dtype == np.float32


def test_ops_with_parameters_in_fp32_alone_are_in_fp16_already():
    """coremltools leaves the alphas of activations in fp32 from iOS17 on."""
    def body(x):
        y = mb.leaky_relu(x=mb.cast(x=mb.exp(x=x), dtype="fp16"), alpha=np.float32(0.1))
        return mb.thresholded_relu(x=y, alpha=np.float32(0.5), name="y")

    built = build_program(body, dtype=types.fp32, x=(1, 4), opset=ct.target.iOS17)
    trace = find_matches(rule(mixed=True), built)
    assert [hit.reason for hit in trace.fired] == ["1 of 1 ops in fp16; without runs only constants were checked"]
    assert not trace.near_misses


def test_without_runs_only_constants_are_judged():
    (first, *_) = find_matches(rule(), grown()).fired
    assert first.reason == "5 of 5 ops in fp16; without runs only constants were checked"
    small = build_program(lambda x: mb.add(x=x, y=np.float32(1e-12), name="y"), dtype=types.fp32, x=(1, 4))
    assert rewritten(small).fired
    added = next(op for _, op in iterate_ops(small) if op.op_type == "add")
    assert added.y.val == np.float16(6e-8), "as coremltools rounds it"


def test_it_comes_before_the_cures_of_what_fp16_does_and_the_border_after_all():
    order = sort_passes(
        [name for name in get_all_rewrites() if get_all_rewrites()[name].stage in ("precision", "numerics", "cleanup")]
    )
    assert order[0] == "fp16_compute" and order.index("fp16_io") > max(
        order.index(name) for name in order if get_all_rewrites()[name].stage == "numerics")


def test_fp16_at_the_border_leaves_no_cast():
    module, x = Small().eval(), torch.randn(2, 6, 10)
    built = converted(module, x, ct.target.iOS17, False, inputs=[ct.TensorType("x", shape=x.shape, dtype=np.float16)],
                      outputs=[ct.TensorType("a", dtype=np.float16), ct.TensorType("b", dtype=np.float16)]
                      )._mil_program
    names = [var.name for var in built.functions["main"].outputs]
    assert kinds(built)["cast"] == 3
    assert rewritten(built).fired and kinds(built)["cast"] == 0
    assert [var.name for var in built.functions["main"].outputs] == names == ["a", "b"]


def test_integer_islands_keep_their_bytes_and_shared_weights_one_place(tmp_path):
    weight = normal(64, 64)

    @mb.program(input_specs=[mb.TensorSpec((1, 64)), mb.TensorSpec((4,), dtype=types.int32)])
    def built(x, ids):
        shared = mb.const(val=weight)
        at = mb.add(x=mb.mul(x=ids, y=2, name="doubled"), y=1, name="moved")
        y = mb.relu(x=mb.linear(x=x, weight=shared, name="first"), name="relu")
        return mb.gather(x=mb.linear(x=y, weight=shared, name="second"), indices=at, axis=1, name="picked"), at

    source = make(tmp_path / "source.mlpackage", built)
    package = ane.load(source)
    rewritten(package.program)
    ane.save(package, tmp_path / "half.mlpackage")
    before, after = proto_ops(source), proto_ops(tmp_path / "half.mlpackage")
    assert {name for name in ("doubled", "moved") if before[name] == after[name]} == {"doubled", "moved"}
    sizes = [(each / WEIGHTS).stat().st_size for each in (source, tmp_path / "half.mlpackage")]
    assert sizes[1] < 0.55 * sizes[0]


@pytest.mark.parametrize("exported", [False, True], ids=["traced", "exported"])
def test_as_a_pass_of_a_conversion_it_survives_the_hosts_last_passes(exported, tmp_path):
    module, x = Small(False).eval(), torch.randn(2, 6, 10, generator=torch.Generator().manual_seed(1))
    converted(module, x, ct.target.iOS17, exported, pass_pipeline=ane.pipeline(passes="fp16_compute")
              ).save(str(tmp_path / "half.mlpackage"))
    package = ane.load(tmp_path / "half.mlpackage")
    assert not in_fp32(package.program) and kinds(package.program)["cast"] == 3
    (name,) = package.program.functions["main"].inputs
    found = list(Runtime(package.program, precision="float16")({name: x.numpy()}).values())
    with torch.no_grad():
        right = [value.numpy() for value in module.double()(x.double())]
    for one, other in zip(found, right):
        np.testing.assert_allclose(one, other, atol=1e-2 * np.abs(other).max())


TEN = ("MobileNetV3", "EfficientNet-B0", "ConvNeXt", "Sequencer2D (LSTM)", "SegFormer", "Wav2Vec2", "Whisper",
       "HiFi-GAN", "RNN-T predictor (LSTM)", "DistilBERT", "GPT-2", "T5")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", TEN)
def test_real_architectures(name, tmp_path):
    architecture = next(each for each in ARCHITECTURES if each.name == name)
    if architecture.missing():
        pytest.skip(architecture.missing())
    module, inputs = architecture.model(), architecture.draw(3)
    dtypes = {torch.int32: np.int32, torch.float32: np.float32}
    kinds_of = [ct.TensorType(f"in{number}", shape=each.shape, dtype=dtypes[each.dtype])
                for number, each in enumerate(inputs)]
    ct.convert(torch.jit.trace(module, inputs, check_trace=False), convert_to="mlprogram", inputs=kinds_of,
               minimum_deployment_target=ct.target.iOS17, compute_precision=ct.precision.FLOAT32, skip_model_load=True,
               ).save(str(tmp_path / "source.mlpackage"))
    package = ane.load(tmp_path / "source.mlpackage")
    feeds = {f"in{number}": each.numpy() for number, each in enumerate(inputs)}
    trace = rewritten(package.program, draws(feeds=feeds))
    ane.save(package, tmp_path / "half.mlpackage")
    sizes = [(tmp_path / each / WEIGHTS).stat().st_size for each in ("source.mlpackage", "half.mlpackage")]
    assert sizes[1] < (0.51 if not trace.near_misses else 0.6) * sizes[0]
    said = float(trace.fired[0].reason.split("in the runs ")[1].split()[0])
    outputs = [list(Runtime(ane.load(tmp_path / each).program, precision="float16")(feeds).values())
               for each in ("half.mlpackage", "source.mlpackage")]
    errors = [np.abs(one - other).max() / np.abs(other).max() for one, other in zip(*outputs)]
    assert max(errors) <= said * 1.06 <= 1.06e-2
    for kept in trace.near_misses:
        assert "fp16" in kept.reason and any(digit.isdigit() for digit in kept.reason), kept
