"""Which passes run, in which order, with which options; and that they work inside ct.convert."""

from __future__ import annotations

import copy
import pickle
from collections import Counter

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb

import mil_ane_passes as ane
from mil_ane_passes.ir.query import iterate_ops
from mil_ane_passes.passes.contract import STAGES
from mil_ane_passes.passes.examples import build_program, make_weight
from mil_ane_passes.passes.pipeline import select_rewrites, sort_passes
from mil_ane_passes.passes.registry import get_all_rewrites
from mil_ane_passes.runtime import Runtime
from mil_ane_passes.utils.errors import InputError, RuleError
from tests.lab.models.tools import convert_traced

LIFT, SPLIT, CONV = "ane::lift_conv_transpose_1d", "ane::split_conv_transpose_bias", "ane::lift_conv_1d"


def ours(pipeline: ct.PassPipeline) -> list[str]:
    return [name for name in pipeline.passes if name.startswith("ane::") and not name.startswith("ane::guard")]


def options(pipeline: ct.PassPipeline) -> dict[str, dict[str, object]]:
    return {
        name: {option.option_name: option.option_val for option in given}
        for name, given in pipeline.get_all_options().items()
        if name != "ane::guard_end"
    }


def test_passes_with_settings_can_be_removed():
    made = ane.pipeline(preset="full", target="m4")
    made.remove_passes({LIFT, "ane::hyperbolic"})
    made.remove_pass(made.passes.index(CONV))
    again = pickle.loads(pickle.dumps(ane.pipeline(target="m4")))
    again.passes = [name for name in again.passes if name != "ane::finite_mask"]
    for each in (made, copy.deepcopy(made), again):
        program = build_program(lambda x: mb.relu(x=mb.conv(x=x, weight=make_weight(4, 4, 3)), name="y"), x=(1, 4, 16))
        assert ct.convert(program, pass_pipeline=each, skip_model_load=True, minimum_deployment_target=ct.target.iOS18)
    made.set_options("common::no_such_pass", {"a": "b"})
    with pytest.raises(ValueError, match="common::no_such_pass has associated options"):
        made.validate()


def kinds(prog) -> Counter:
    return Counter(op.op_type for _, op in iterate_ops(prog))


def upsampler():
    bias = np.array([0.5, -1.0], dtype=np.float16)
    return build_program(
        lambda x: mb.conv_transpose(x=x, weight=make_weight(4, 2, 5), bias=bias, strides=[3], name="y"), x=(1, 4, 8)
    )


def converted(pipeline: ct.PassPipeline):
    return ct.convert(
        upsampler(),
        convert_to="mlprogram",
        pass_pipeline=pipeline,
        skip_model_load=True,
        minimum_deployment_target=ct.target.iOS17,
    )._mil_program


def test_ours_follow_all_of_the_hosts_passes():
    host = ct.PassPipeline.DEFAULT.passes
    passes = ane.pipeline(preset="full").passes
    assert passes[: len(host)] == host
    assert "common::fuse_conv_bias" in host
    assert len(passes) > len(host) and all(name.startswith("ane::") for name in passes[len(host) :])


def test_a_base_that_ends_in_our_passes_keeps_its_own():
    base = ct.PassPipeline(["common::const_elimination", LIFT, "common::fuse_conv_bias"], "mine")
    result = ane.pipeline(base, passes="lift_conv_transpose_1d")
    assert result.passes == ["common::const_elimination", "common::fuse_conv_bias", LIFT]


def test_order_is_by_stage_and_then_after():
    order = sort_passes(get_all_rewrites())
    stages = [STAGES.index(get_all_rewrites()[name].stage) for name in order]
    assert stages == sorted(stages)
    for place, name in enumerate(order):
        assert not set(get_all_rewrites()[name].after) & set(order[place:]), name


def test_order_does_not_depend_on_the_order_asked_for():
    names = list(get_all_rewrites())
    assert sort_passes(names) == sort_passes(reversed(names))


def test_a_circle_of_after_is_refused(monkeypatch):
    monkeypatch.setattr(get_all_rewrites()["lift_conv_1d"], "after", ("carry_lift",))
    with pytest.raises(RuleError, match=r"the 'after' fields of .*carry_lift.*lift_conv_1d.* form a cycle"):
        sort_passes(get_all_rewrites())


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"preset": "full"},
        {"target": "m1"},
        {"passes": "safe,split_conv_transpose_bias{any_rank=true}"},
        {"options": {"lift_conv_transpose_1d": {"axis": 2}}, "target": "a13"},
    ],
)
def test_twice_is_once(asked):
    once = ane.pipeline(**asked)
    twice = ane.pipeline(once, **asked)
    assert twice.passes == once.passes
    assert options(twice) == options(once)
    twice.validate()


def test_what_is_given_stays_as_it_was():
    base = ct.PassPipeline(["common::const_elimination", LIFT], "mine")
    base.set_options("common::const_elimination", {"skip_const_by_size": "1000"})
    base.set_options(LIFT, {"axis": "2"})
    passes, given = list(base.passes), options(base)
    result = ane.pipeline(base, target="m2")
    assert (base.passes, options(base)) == (passes, given)
    assert options(result)["common::const_elimination"] == {"skip_const_by_size": "1000"}
    assert options(result)[LIFT] == {"target": "m2"}
    assert result is not base


def test_the_hosts_default_stays_as_it_was():
    before = list(ct.PassPipeline.DEFAULT.passes)
    ane.pipeline(options={"lift_conv_transpose_1d": {"axis": 2}})
    assert ct.PassPipeline.DEFAULT.passes == before
    assert ct.PassPipeline.DEFAULT.get_all_options() == {}


def test_safe_is_within_full_and_named_is_in_neither():
    safe, full = (set(ours(ane.pipeline(preset=preset))) for preset in ("safe", "full"))
    named = {f"ane::{name}" for name, rule in get_all_rewrites().items() if rule.preset == "named"}
    assert safe < full
    assert "ane::decompose_attention" in named and not named & full
    assert safe | full | named == {f"ane::{name}" for name in get_all_rewrites()}
    assert ours(ane.pipeline()) == ours(ane.pipeline(preset="safe"))


@pytest.mark.parametrize(
    "passes",
    [
        "safe,split_conv_transpose_bias",
        ["safe", "ane::split_conv_transpose_bias"],
        {"safe": None, "split_conv_transpose_bias": {}},
    ],
)
def test_a_presets_name_stands_for_its_members(passes):
    assert set(ours(ane.pipeline(passes=passes))) == {*ours(ane.pipeline()), SPLIT}


@pytest.mark.parametrize(
    "asked",
    [
        {"passes": "lift_conv_transpose_1d{axis=2}"},
        {"passes": ["ane::lift_conv_transpose_1d{ axis=2 }"]},
        {"passes": {"lift_conv_transpose_1d": {"axis": "2"}}},
        {"passes": {LIFT: {"axis": 2}}},
        {"passes": "lift_conv_transpose_1d", "options": {"lift_conv_transpose_1d": {"axis": 2}}},
        {"passes": "lift_conv_transpose_1d{axis=-1}", "options": {LIFT: {"axis": "2"}}},
    ],
)
def test_options_in_every_form(asked):
    pipeline = ane.pipeline(**asked)
    assert ours(pipeline) == [LIFT]
    assert options(pipeline) == {LIFT: {"axis": "2"}}
    (rule,) = select_rewrites(**asked)
    assert rule.axis == 2


def test_defaults_are_not_written_down():
    assert options(ane.pipeline(passes="lift_conv_transpose_1d{axis=-1}")) == {}


def test_target_is_handed_to_every_pass():
    pipeline = ane.pipeline(preset="full", target="m1")
    assert options(pipeline) == {name: {"target": "m1"} for name in ours(pipeline)}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"preset": "saef"}, "no preset 'saef'; expected safe or full; did you mean 'safe'?"),
        (
            {"passes": "lift_conv_transpose1d"},
            "no pass 'lift_conv_transpose1d'; `mil-ane-passes passes` lists them; "
            "did you mean 'lift_conv_transpose_1d'?",
        ),
        (
            {"passes": "lift_conv_1d{axes=2}"},
            "ane::lift_conv_1d: no option 'axes'; it has axis, always; did you mean 'axis'?",
        ),
        ({"passes": "cancel_lift_pairs{axis=2}"}, "ane::cancel_lift_pairs: no option 'axis'; it has none"),
        ({"passes": "lift_conv_1d{axis=1}"}, "ane::lift_conv_1d: option 'axis' is '1'; expected auto or -1 or 2"),
        ({"passes": "lift_conv_1d{axis=wide}"}, "ane::lift_conv_1d: option 'axis' is 'wide'; expected auto or -1 or 2"),
        (
            {"passes": "split_conv_transpose_bias{any_rank=2}"},
            "ane::split_conv_transpose_bias: option 'any_rank' is '2'; expected a value of type bool",
        ),
        ({"passes": "lift_conv_1d axis=2"}, "passes: cannot read 'lift_conv_1d axis=2'; expected names like"),
        (
            {"passes": "lift_conv_1d{axis}"},
            "passes: cannot read option 'axis' of 'lift_conv_1d'; expected option=value",
        ),
        ({"options": {"lift_conv_1d": {"axis": 2}}},
         "options for 'ane::lift_conv_1d', which is not one of the passes "),
        ({"options": {"lift": {"axis": 2}}}, "no pass 'lift'; "),
        ({"passes": {"lift_conv_1d": {"axis": True}}},
         "ane::lift_conv_1d: option 'axis' is True; expected auto or -1 or 2"),
        ({"passes": {"lift_conv_1d": {"axis": 2.5}}},
         "ane::lift_conv_1d: option 'axis' is 2.5; expected auto or -1 or 2"),
        (
            {"passes": {"lift_conv_1d": {"axis": float("inf")}}},
            "ane::lift_conv_1d: option 'axis' is inf; expected auto or -1 or 2",
        ),
        ({"target": "m44"}, "target 'm44' is unknown; expected all, a12, "),
    ],
)
def test_what_is_wrong_is_said_at_once(asked, message):
    with pytest.raises(InputError) as error:
        ane.pipeline(**asked)
    assert str(error.value).startswith(message)


def test_options_of_a_preset_are_refused():
    with pytest.raises(InputError, match="safe"):
        ane.pipeline(passes="safe{axis=2}")


def test_an_unknown_target_has_a_suggestion():
    with pytest.raises(InputError, match=r"; did you mean 'm4'\?$"):
        ane.pipeline(target="m44")


def test_the_pass_itself_checks_its_options():
    pipeline = ct.PassPipeline([LIFT], "mine")
    pipeline.set_options(LIFT, {"axis": "7"})
    with pytest.raises(InputError, match="ane::lift_conv_transpose_1d: option 'axis' is '7'; expected -1 or 2"):
        converted(pipeline)


@pytest.mark.parametrize(
    ("asked", "shape"),
    [
        ({}, (1, 4, 8, 1)),
        ({"options": {"lift_conv_transpose_1d": {"axis": 2}}}, (1, 4, 1, 8)),
    ],
)
def test_options_reach_the_pass_in_ct_convert(asked, shape):
    found = [op for _, op in iterate_ops(converted(ane.pipeline(**asked))) if op.op_type == "conv_transpose"]
    assert [op.x.shape for op in found] == [shape]


def test_target_reaches_the_pass(monkeypatch):
    from mil_ane_passes.passes.targets import Gate

    monkeypatch.setattr(get_all_rewrites()["lift_conv_transpose_1d"], "targets", Gate(first="m4"))
    assert kinds(converted(ane.pipeline(target="m1")))["squeeze"] == 0
    assert kinds(converted(ane.pipeline(target="m4")))["squeeze"] == 1


def test_a_split_bias_stays_split_in_ct_convert():
    """Placed before `fuse_conv_bias` it would be folded back, which coremltools alone does."""
    split = converted(ane.pipeline(passes="split_conv_transpose_bias"))
    first = ct.PassPipeline([SPLIT, *ct.PassPipeline.DEFAULT.passes], "split first")
    assert kinds(split)["add"] == 1
    assert kinds(converted(first))["add"] == 0


def test_a_torch_model_converts_to_the_same_numbers():
    import torch

    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Conv1d(6, 8, 3), torch.nn.ConvTranspose1d(8, 4, 7, stride=3, padding=2))
    example = torch.randn(1, 6, 20)
    plain = convert_traced(module, example)._mil_program
    before = Runtime(plain, precision="float16")({"input": example.numpy()})
    for preset, squeezed in (("safe", 1), ("full", 0)):
        result = convert_traced(module, example, pass_pipeline=ane.pipeline(preset=preset))._mil_program
        after = Runtime(result, precision="float16")({"input": example.numpy()})
        assert kinds(result)["squeeze"] == squeezed
        assert list(after) == list(before)
        for name, value in before.items():  # full adds the bias in an op of its own, which rounds once more
            allowed = 0 if preset == "safe" else 2**-10 * np.abs(value).max()
            np.testing.assert_allclose(after[name], value, rtol=0, atol=allowed)
