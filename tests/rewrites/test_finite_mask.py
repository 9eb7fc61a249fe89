"""ANE310: masks in the spellings of PyTorch, right against PyTorch where the published fault makes them wrong."""

from __future__ import annotations

from functools import partial

import coremltools as ct
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from coremltools.converters.mil.mil import Builder as mb
from hypothesis import given
from hypothesis import strategies as st

import mil_ane_passes as ane
from mil_ane_passes.equivalence.comparison import Strictness
from mil_ane_passes.equivalence.equivalence import compare_programs
from mil_ane_passes.ir.clone import clone_program
from mil_ane_passes.ir.query import iterate_ops
from mil_ane_passes.passes.contract import Exactness
from mil_ane_passes.passes.engine import apply_rewrite, find_matches
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.passes.registry import find_rewrite
from mil_ane_passes.runtime import Runtime
from mil_ane_passes.utils.errors import InputError
from tests.conversions import convert_model
from tests.equivalence.test_masks import attention as padded
from tests.equivalence.test_masks import feeds
from tests.lab.versions.needs import older_than
from tests.rewrites.helpers import configure_rewrite

INF, LOWEST = float("-inf"), torch.finfo(torch.float32).min
KEYS, WIDTH = 8, 4


rule = partial(configure_rewrite, "finite_mask")


def scores(x):
    return x @ x.transpose(1, 2)


def causal(low):
    return torch.full((KEYS, KEYS), low).triu(1)


def shut(m, low):
    return (1.0 - m.to(torch.float32))[:, None, :] * low


SPELLINGS = {
    "(1 - m) * lowest": lambda x, m: F.softmax(scores(x) + shut(m, LOWEST), -1),
    "(1 - m) * -1e9": lambda x, m: F.softmax(scores(x) + shut(m, -1e9), -1),
    "(m - 1) * 1e9": lambda x, m: F.softmax(scores(x) + (m.float() - 1)[:, None, :] * 1e9, -1),
    "masked_fill inf": lambda x, m: F.softmax(scores(x).masked_fill(m[:, None, :] == 0, INF), -1),
    "masked_fill lowest": lambda x, m: F.softmax(scores(x).masked_fill(m[:, None, :] == 0, LOWEST), -1),
    "masked_fill -1e9": lambda x, m: F.softmax(scores(x).masked_fill(m[:, None, :] == 0, -1e9), -1),
    "where scores": lambda x, m: F.softmax(torch.where(m[:, None, :] > 0, scores(x), torch.tensor(INF)), -1),
    "where mask": lambda x, m: F.softmax(scores(x) + torch.where(m > 0, 0.0, INF)[:, None, :], -1),
    "mask of a mask": lambda x, m: F.softmax(
        scores(x) + shut(m, 1.0).masked_fill(shut(m, 1.0).bool(), LOWEST), -1),
    "causal constant": lambda x, m: F.softmax(scores(x) + torch.from_numpy(
        np.triu(np.full((KEYS, KEYS), -np.inf, np.float32), 1)), -1),
    "causal lowest and padding": lambda x, m: F.softmax(scores(x) + causal(LOWEST) + shut(m, LOWEST), -1),
    "causal buffer": lambda x, m: F.softmax(torch.where(
        torch.ones(KEYS, KEYS).tril().bool()[None], scores(x), torch.full([], LOWEST)), -1),
    "float mask": lambda x, m: F.scaled_dot_product_attention(
        x[:, None], x[:, None], x[:, None], attn_mask=shut(m, LOWEST)[:, None].to(x.dtype))[:, 0],
}
WAYS = {
    "traced, iOS15": (False, ct.target.iOS15), "traced, iOS17": (False, ct.target.iOS17),
    "exported, iOS18": (True, ct.target.iOS18),
}


class Spelt(torch.nn.Module):
    def __init__(self, spelling):
        super().__init__()
        self.spelling = SPELLINGS[spelling]

    def forward(self, x, m):
        y = self.spelling(x, m)
        return y @ x if y.shape[-1] == KEYS else y


def inputs(masked_throughout=False):
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((2, KEYS, WIDTH)).astype(np.float16)).float()
    m = torch.ones(2, KEYS, dtype=torch.int32)
    m[1, 5:] = 0
    if masked_throughout:
        m[0] = 0
    return x, m


def converted(spelling, way, precision=ct.precision.FLOAT16, convert_to="milinternal", **settings):
    exported, target = WAYS[way]
    return convert_model(Spelt(spelling), *inputs(), way="exported" if exported else "traced", names="xm",
                         check_trace=False, convert_to=convert_to, compute_precision=precision,
                         minimum_deployment_target=target, **settings)


def outputs(made, given, **how):
    function = made.functions["main"]
    arrays = {name: value.numpy().astype(np.float32 if value.is_floating_point() else np.int32)
              for name, value in zip(("x", "m"), given) if name in function.inputs}
    kinds = {name: np.float16 if "fp16" in str(var.dtype) else arrays[name].dtype
             for name, var in function.inputs.items()}
    (found,) = Runtime(made, **how)({name: value.astype(kinds[name]) for name, value in arrays.items()}).values()
    return found.astype(np.float64)


def torchs(spelling, given):
    x, m = given
    return Spelt(spelling)(x.double(), m).detach().numpy()


def infinite(made):
    return [
        op.op_type
        for _, op in iterate_ops(made)
        if op.op_type == "const"
        and np.asarray(op.outputs[0].val).dtype.kind == "f"
        # coremltools 9.1 makes 65504 of what overflows.
        and np.any(np.abs(np.asarray(op.outputs[0].val, dtype=np.float64)) >= 65504)
    ]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_is_pytorchs_attention_at_half_and_full_precision(spelling, way):
    made = converted(spelling, way)
    assert infinite(made)
    assert apply_rewrite(rule(), made).fired and not infinite(made)
    truth = torchs(spelling, inputs())
    np.testing.assert_allclose(outputs(made, inputs(), precision="float64"), truth, rtol=0, atol=1e-6)
    for quirks in ([], ["infinite_mask"]):
        found = outputs(made, inputs(), precision="float16", quirks=quirks)
        np.testing.assert_allclose(found, truth, rtol=0, atol=0.02)


@pytest.mark.parametrize("spelling", ["(1 - m) * lowest", "(1 - m) * -1e9", "causal lowest and padding",
                                      "float mask"])
def test_the_published_fault_no_longer_reaches_it(spelling):
    """Of the sequences one is masked throughout, the other in part: NaN and uniform weights before, scores after."""
    given = inputs(masked_throughout=True)
    made = converted(spelling, "exported, iOS18" if spelling == "float mask" else "traced, iOS17")
    faulty = outputs(made, given, precision="float16", quirks=["infinite_mask"])
    x, m = given
    causes = causal(-1e4).double() if "causal" in spelling else 0
    ranked = scores(x.double()) * (0.5 if spelling == "float mask" else 1) + causes + shut(m, -1e4).double()
    truth = (F.softmax(ranked, -1) @ x.double()).numpy()
    assert not older_than("9.1") or not np.allclose(faulty, truth, rtol=0, atol=0.3)
    apply_rewrite(rule(), made)
    np.testing.assert_allclose(outputs(made, given, precision="float64"), truth, rtol=0, atol=1e-6)
    cured = outputs(made, given, precision="float16", quirks=["infinite_mask"])
    assert np.isfinite(cured).all()
    np.testing.assert_allclose(cured[1], truth[1], rtol=0, atol=0.02)


@pytest.mark.parametrize("spelling", ["masked_fill inf", "masked_fill lowest", "masked_fill -1e9"])
def test_a_row_whose_scores_are_all_replaced_has_even_weights(spelling):
    """As in PyTorch with a finite mask; with -inf PyTorch itself has NaN there."""
    given = inputs(masked_throughout=True)
    made = converted(spelling, "traced, iOS17")
    assert not older_than("9.1") or np.isnan(outputs(made, given, precision="float16")[0]).all()
    apply_rewrite(rule(), made)
    found = outputs(made, given, precision="float16", quirks=["infinite_mask"])
    np.testing.assert_allclose(found[0], given[0][0].mean(0).expand(KEYS, WIDTH), rtol=0, atol=0.02)
    np.testing.assert_allclose(found[1], torchs(spelling, given)[1], rtol=0, atol=0.02)


@pytest.mark.parametrize("spelling", ["(1 - m) * lowest", "masked_fill inf", "causal buffer"])
def test_a_model_kept_in_fp32_is_left_alone(spelling):
    made = converted(spelling, "traced, iOS17", ct.precision.FLOAT32)
    found = find_matches(rule(), made)
    assert not found.fired
    assert {miss.reason for miss in found.near_misses} <= {
        "the mask and its softmax are fp32, which represents such values"}
    assert found.near_misses


@pytest.mark.parametrize("spelling", ["(1 - m) * lowest", "masked_fill inf", "float mask"])
def test_in_the_hosts_pipeline_and_in_what_it_saves(spelling, tmp_path):
    way = "exported, iOS18"
    ours = converted(spelling, way, convert_to="mlprogram",
                     pass_pipeline=ane.pipeline(passes="finite_mask"))
    ours.save(str(tmp_path / "ours.mlpackage"))
    assert not infinite(ane.load(tmp_path / "ours.mlpackage").program)
    theirs = converted(spelling, way, convert_to="mlprogram")
    theirs.save(str(tmp_path / "theirs.mlpackage"))
    report = ane.rewrite(tmp_path / "theirs.mlpackage", tmp_path / "again.mlpackage", passes="finite_mask")
    assert report.traces[0].fired and (tmp_path / "again.mlpackage").exists(), str(report)
    assert not infinite(ane.load(tmp_path / "again.mlpackage").program)


def test_masks_that_are_added_up_stay_in_range():
    x = np.zeros((1, 8), np.float16)

    def body(x):
        for _ in range(6):
            x = mb.add(x=x, y=np.array([0, *[-np.inf] * 7], np.float16))
        return mb.softmax(x=x, axis=-1)

    made = build_program(body, x=x.shape)
    assert len(apply_rewrite(rule(), made).fired) == 6
    assert len(find_matches(rule(value=-2e4), build_program(body, x=x.shape)).fired) == 0


@pytest.mark.parametrize("value", [0.0, -999.0, -7e4, 1e4, float("nan")])
def test_a_value_that_does_not_silence_or_fit_is_refused(value):
    with pytest.raises(InputError, match="expected -60000 to -1000"):
        apply_rewrite(rule(value=value), padded(-np.inf))


def test_no_const_is_left_behind():
    made = padded(-np.inf)
    before = sum(op.op_type == "const" for _, op in iterate_ops(made))
    apply_rewrite(rule(), made)
    consts = [op for _, op in iterate_ops(made) if op.op_type == "const"]
    assert len(consts) == before and all(op.outputs[0].child_ops and not op.inputs for op in consts)


def test_a_large_table_is_made_once():
    table = np.where(np.tri(128, dtype=bool), 0, -np.inf).astype(np.float16)

    def body(x):
        shared = mb.const(val=table)
        return [mb.softmax(x=mb.add(x=x, y=shared), axis=-1, name=f"y{number}") for number in range(3)]

    made = build_program(body, x=(128, 128))
    assert len(apply_rewrite(rule(), made).fired) == 3
    large = [op for _, op in iterate_ops(made) if op.op_type == "const" and np.size(op.outputs[0].val) == table.size]
    assert len(large) == 1 and np.isfinite(large[0].outputs[0].val).all()


@pytest.mark.law
@given(seen=st.lists(st.booleans(), min_size=8, max_size=8), spread=st.floats(0, 300), seed=st.integers(0, 99))
def test_what_is_left_of_a_row_is_the_softmax_of_what_is_seen(seen, spread, seed):
    """The law: weights are the softmax over the keys that are seen, or over all where none is."""
    given = feeds(masked_throughout=False)
    given["m"][:] = np.array(seen, np.float16)
    given["x"] = (np.random.default_rng(seed).standard_normal((2, 3, 8)) * spread).astype(np.float16)
    made = padded(-np.inf)
    apply_rewrite(rule(), made)
    found = Runtime(made, precision="float64")(given)["y"]
    kept = torch.from_numpy(given["x"]).double()
    if any(seen):
        kept = kept.masked_fill(~torch.tensor(seen), INF)
    np.testing.assert_allclose(found, F.softmax(kept, -1).numpy(), rtol=0, atol=1e-11)


def test_only_the_lower_half_of_a_table_of_bounds_is_a_mask():
    bounds = np.where(np.tri(4, dtype=bool), np.inf, -np.inf).astype(np.float16)
    built = build_program(lambda x: mb.softmax(x=mb.minimum(x=x, y=bounds), name="y"), x=(4, 4))
    x = (20000 + 16 * np.arange(16).reshape(4, 4)).astype(np.float16)
    before = Runtime(built, precision="float64")({"x": x})["y"]
    assert apply_rewrite(find_rewrite("finite_mask").configured(), built).fired
    np.testing.assert_allclose(Runtime(built, precision="float64")({"x": x})["y"], before)


def attention_of(length):
    """One head of queries and keys of that length, projected so that they stay as large as the inputs are."""
    random = np.random.default_rng(0)
    query, key = ((random.standard_normal((length, length)) / length**0.5).astype(np.float16) for _ in range(2))

    def body(x, m):
        scores = mb.matmul(x=mb.linear(x=x, weight=query), y=mb.linear(x=x, weight=key), transpose_y=True)
        hidden = mb.less_equal(x=m, y=np.float16(0))
        masked = mb.select(cond=hidden, a=np.float16(-np.inf), b=mb.mul(x=scores, y=np.float16(length**-0.5)))
        return mb.matmul(x=mb.softmax(x=masked, axis=-1), y=x, name="y")

    return build_program(body, x=(1, KEYS, length), m=(1, 1, KEYS))


@pytest.mark.parametrize("length", [8, 64, 256])
@pytest.mark.parametrize("value", [-1e3, -1e4, -4e4])
def test_it_is_proved_on_inputs_of_wide_range(length, value):
    report = ane.rewrite(attention_of(length), passes=f"finite_mask{{value={value}}}")
    assert report.changed and report.verify.equal, str(report)
    assert any(kind.startswith("wide range") for kind in report.verify.sampled)


def test_inputs_are_proved_up_to_what_the_mask_silences():
    before = next(each for each in rule().examples() if each.name == "attention op").build()
    after, small = clone_program(before), clone_program(before)
    trace, less = apply_rewrite(rule(), after), apply_rewrite(rule(value=-1e3), small)
    assert trace.within == (0, 30) and 5 < less.within[1] < 5.1

    def held(rewritten, within):
        promised = Strictness(Exactness.ROUNDING, fixes_nonfinite=True, within=within)
        return compare_programs(before, rewritten, precisions=("float64", "float16"), exactness=promised).equal

    assert held(after, trace.within) and held(small, less.within)
    assert not held(small, trace.within)
