"""ANE285: fused attention written out, against PyTorch's own."""

from __future__ import annotations

from functools import partial

import coremltools as ct
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types
from hypothesis import given
from hypothesis import strategies as st

import mil_ane_passes as ane
from mil_ane_passes.ane.prediction import predict_plan
from mil_ane_passes.passes.engine import apply_rewrite, find_matches
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.passes.registry import get_all_rules
from mil_ane_passes.rewrites.attention.decompose_attention import find_scale_factors
from mil_ane_passes.runtime import Runtime
from tests.rewrites.helpers import configure_rewrite, kinds

NAME, KIND = "decompose_attention", "scaled_dot_product_attention"


rule = partial(configure_rewrite, NAME)


def attention(q, k, v, mask=None, dtype=types.fp16):
    def body(**given):
        parts = {"query": given["q"], "key": given["k"], "value": given["v"]}
        if mask is not None:
            parts["attn_mask"] = mb.greater(x=given["m"], y=np.float16(0)) if mask == "bool" else given["m"]
        return mb.scaled_dot_product_attention(**parts, name="y")

    shapes = {"q": q, "k": k, "v": v} | ({"m": (q[-2], k[-2])} if mask else {})
    return build_program(body, opset=ct.target.iOS18, dtype=dtype, **shapes)


@pytest.mark.parametrize("width", [1, 16, 24, 32, 48, 64, 80, 96, 128, 1129])
def test_factors_make_the_scale(width):
    product = np.prod([float(factor) for factor in find_scale_factors(width)])
    assert abs(product * np.sqrt(width) - 1) <= 5e-6
    assert len(find_scale_factors(width)) == (1 if np.log2(width) % 2 == 0 else 2)


@pytest.mark.law
@given(st.integers(0, 2), st.integers(1, 6), st.integers(1, 6), st.integers(1, 24), st.integers(1, 5),
       st.sampled_from([None, "float", "bool"]), st.integers(0, 2**31))
def test_is_pytorchs_attention(axes, rows, places, width, out, mask, seed):
    batch = (2, 3)[:axes] or (1,)
    random = np.random.default_rng(seed)
    held = attention((*batch, rows, width), (*batch, places, width), (*batch, places, out), mask)
    feeds = {name: random.standard_normal(var.shape).astype(np.float16).astype(np.float32)
             for name, var in held.functions["main"].inputs.items()}
    if mask == "bool":
        feeds["m"][:, 0] = 1  # a row masked throughout is another test's
    assert apply_rewrite(rule(), held).fired and KIND not in kinds(held)
    q, k, v, m = (torch.from_numpy(feeds[name].astype(np.float64)) if name in feeds else None for name in "qkvm")
    true = F.scaled_dot_product_attention(q, k, v, attn_mask=m > 0 if mask == "bool" else m).numpy()
    np.testing.assert_allclose(Runtime(held, precision="float64")(feeds)["y"], true, rtol=0, atol=1e-4)
    np.testing.assert_allclose(Runtime(held, precision="float16")(feeds)["y"], true, rtol=0, atol=1e-2)


def test_a_row_masked_throughout_gives_the_mean():
    held = attention((1, 2, 4), (1, 3, 4), (1, 3, 2), "bool")
    apply_rewrite(rule(), held)
    value = np.arange(6, dtype=np.float32).reshape(1, 3, 2)
    feeds = {"q": np.ones((1, 2, 4), np.float32), "k": np.ones((1, 3, 4), np.float32), "v": value,
             "m": np.float32([[0, 0, 0], [0, 1, 0]])}
    np.testing.assert_allclose(Runtime(held, precision="float64")(feeds)["y"], [[[2, 3], [2, 3]]])


class Layers(torch.nn.Module):
    def __init__(self, causal):
        super().__init__()
        self.qkv = torch.nn.Linear(32, 96)
        self.causal = causal

    def forward(self, x):
        for _ in range(2):
            q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
            x = x + F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2)
        return x


@pytest.mark.parametrize("way", ["traced", "exported"])
@pytest.mark.parametrize("causal", [False, True])
def test_as_torch_spells_it(way, causal, tmp_path):
    torch.manual_seed(0)
    layers, x = Layers(causal).eval(), torch.randn(1, 6, 32)
    if way == "traced":
        model, inputs = torch.jit.trace(layers, x), {"inputs": [ct.TensorType(name="x", shape=x.shape)]}
    else:
        model, inputs = torch.export.export(layers, (x,)).run_decompositions({}), {}

    def convert(pipeline):
        made = ct.convert(model, minimum_deployment_target=ct.target.iOS18, skip_model_load=True,
                          pass_pipeline=pipeline, **inputs)
        made.save(str(tmp_path / "m.mlpackage"))
        return ane.load(tmp_path / "m.mlpackage").program

    before, after = convert(ct.PassPipeline.DEFAULT), convert(ane.pipeline(passes=NAME))
    assert kinds(before)[KIND] == 2 and KIND not in kinds(after)
    rules = [each() for each in get_all_rules().values()]
    found = {item.rule.name for item in predict_plan(before, rules, target="m4")[1] if hasattr(item.answer, "covers")}
    left = {item.rule.name for item in predict_plan(after, rules, target="m4")[1] if hasattr(item.answer, "covers")}
    assert "several_attentions" in found and "several_attentions" not in left
    assert not [row.op.op_type for row in predict_plan(after, rules, target="m4")[0].rows if row.ane == "no"]
    (name,) = after.functions["main"].inputs
    (found,) = Runtime(after, precision="float64")({name: x.numpy()}).values()
    with torch.no_grad():
        np.testing.assert_allclose(found, layers.double()(x.double()).numpy(), atol=2e-3)  # weights are fp16


@pytest.mark.parametrize(("held", "reason"), [
    (lambda: attention((1, 2, 4), (1, 3, 4), (1, 3, 2), dtype=types.fp32),
     "computed in fp32, which is unsupported on the ANE"),
    (lambda: attention((1, 2, None), (1, 3, None), (1, 3, 2)),
     "the width of a head is dynamic"),
    (lambda: build_program(lambda q, m: mb.scaled_dot_product_attention(query=q, key=q, value=q, attn_mask=m),
                           opset=ct.target.iOS18, q=(1, 3, 4), m=(2, 3, 3)),
     "the mask has more rows or heads than the queries"),
])
def test_left_alone(held, reason):
    found = find_matches(rule(), held())
    assert not found.fired and [miss.reason for miss in found.near_misses] == [reason]
