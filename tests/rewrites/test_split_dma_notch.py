"""ANE521: weights of a size that an M4 streams slowly, in parts of another size."""

from __future__ import annotations

from functools import partial

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb

import mil_ane_passes as ane
from mil_ane_passes.ane.latency import estimate_latency
from mil_ane_passes.ane.latency_terms import describe_work, is_on_notch
from mil_ane_passes.ane.sizes import Sizes
from mil_ane_passes.ir.query import iterate_ops
from mil_ane_passes.passes.engine import apply_rewrite, find_matches
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.runtime import Runtime
from tests.lab.latency.programs import make_weight as store
from tests.rewrites.helpers import configure_rewrite, kinds

NAME = "split_dma_notch"
rule = partial(configure_rewrite, NAME)


def linear(rows, inner, outer, form="fp16"):
    return build_program(lambda x: mb.linear(x=x, weight=store((outer, inner), form), name="y"), x=(rows, inner),
                         opset=ct.target.iOS18)


def notes(program, target="m4", **options):
    found = find_matches(rule(**options), program, target=target)
    assert not found.fired
    return [miss.reason for miss in found.near_misses]


def time_of_ops(program):
    return sum(op.latency_us for op in estimate_latency(program, target="m4").ops)


LAYERS = [
    ("as timed, 2048 x 4096", 1, 4096, 2048, 2),
    ("Llama-3.2-1B, gate and up", 1, 2048, 8192, 3),
    ("Llama-3.2-1B, down", 1, 8192, 2048, 3),
    ("Llama-3.2-1B, query", 1, 2048, 2048, 0),
    ("Llama-3.2-3B, down", 1, 8192, 3072, 2),
    ("Llama-3.1-8B, gate", 1, 4096, 14336, 2),
    ("ViT-B/16, MLP", 197, 3072, 768, 0),
    ("BERT large, MLP", 512, 4096, 1024, 0),
    ("UNet, MLP of 1280 channels", 64, 5120, 1280, 0),
]


@pytest.mark.parametrize("name, rows, inner, outer, parts", LAYERS, ids=[layer[0] for layer in LAYERS])
def test_real_layers(name, rows, inner, outer, parts):
    """No part is of such a size, and the parts stream faster by the latency of an M4."""
    held = linear(rows, inner, outer)
    before = time_of_ops(held)
    assert bool(apply_rewrite(rule(), held, target="m4").fired) == bool(parts)
    assert kinds(held)["linear"] == max(1, parts)
    products = [describe_work(op, Sizes()) for _, op in iterate_ops(held) if op.op_type == "linear"]
    assert not any(map(is_on_notch, products))
    if parts:
        assert time_of_ops(held) < 0.7 * before


@pytest.mark.parametrize("layout", [pytest.param("linear", marks=pytest.mark.slow), "conv"])
def test_a_step_of_llama_is_torchs(layout):
    """The MLP of Llama-3.2-1B for one token: silu(gate) * up, down, all three on the notch."""
    random, width, hidden = np.random.default_rng(0), 2048, 8192
    gate, up = ((random.standard_normal((hidden, width)) / np.sqrt(width)).astype(np.float16) for _ in range(2))
    down = (random.standard_normal((width, hidden)) / np.sqrt(hidden)).astype(np.float16)

    def multiply(x, weight):
        return mb.linear(x=x, weight=weight) if layout == "linear" else mb.conv(x=x, weight=weight[:, :, None, None])

    def body(x):
        return mb.add(x=multiply(mb.mul(x=mb.silu(x=multiply(x, gate)), y=multiply(x, up)), down), y=x, name="y")

    shape = (1, 1, width) if layout == "linear" else (1, width, 1, 1)
    held = build_program(body, x=shape)
    before = estimate_latency(held, target="m4").latency_us
    assert len(apply_rewrite(rule(), held, target="m4").fired) == 3 and kinds(held)[layout] == 9
    assert estimate_latency(held, target="m4").latency_us < 0.6 * before
    x = random.standard_normal(shape).astype(np.float16).astype(np.float32)
    row, *weights = (torch.from_numpy(each.astype(np.float64)) for each in (x.reshape(1, width), gate, up, down))
    true = (torch.nn.functional.silu(row @ weights[0].T) * (row @ weights[1].T)) @ weights[2].T + row
    for precision, bound in (("float64", 1e-9), ("float16", 2e-2)):
        found = Runtime(held, precision=precision)({"x": x})["y"]
        np.testing.assert_allclose(found.reshape(1, width), true.numpy(), atol=bound)


@pytest.mark.parametrize("target", ["m1", "m2", "m3", "m5", "a18"])
def test_not_for_chips_on_which_such_sizes_were_not_seen_to_be_slow(target):
    """On an M2 they were seen to stream as fast as others."""
    assert not find_matches(rule(), linear(1, 2048, 8192), target=target).fired
    assert ane.rewrite(linear(1, 2048, 8192), preset="full", target=target, verify=False).status == "unchanged"


def test_a_target_with_other_chips_has_to_be_named():
    assert notes(linear(1, 2048, 8192), target="all") == [
        "parts were measured to be faster on M4 only, and are not needed on M2; choose that target, or always=true"]


def test_many_rows_and_rows_that_are_not_known():
    assert notes(linear(2048, 2048, 8192)) == [
        "weights are streamed once: 3 parts are estimated to add 29% of its time on M4, less than the required 10%"]
    assert notes(linear(None, 2048, 8192)) == [
        "the number of rows is dynamic, and for some numbers parts may be slower"]


@pytest.mark.parametrize("form", ["int8", "4-bit palette"])
def test_compressed_weights_are_of_another_size(form):
    held = linear(1, 2048, 8192, form)
    assert not apply_rewrite(rule(), held, target="m4").fired


def test_the_guard_keeps_it_for_one_token_and_reverts_it_for_many():
    kept = ane.rewrite(linear(8, 2048, 8192), preset="full", target="m4", verify=False)
    assert kept.changed and not kept.reverted
    before, after = kept.to_dict()["predicted"].values()
    assert after["est_ms"] > 1.01 * before["est_ms"] and after["latency_us"] < 0.6 * before["latency_us"]
    undone = ane.rewrite(linear(2048, 2048, 8192), preset="full", target="m4", verify=False,
                         options={NAME: {"always": True}})
    assert [trace.rule for trace in undone.reverted] == [NAME] and not undone.changed


def test_the_outputs_of_other_layers_stay():
    """A layer of another size keeps its weight, next to one that is cut."""
    def body(x):
        return mb.linear(x=x, weight=store((8192, 2048), "fp16")), mb.linear(x=x, weight=store((2048, 2048), "fp16"))

    held = build_program(body, x=(1, 2048))
    assert len(apply_rewrite(rule(), held, target="m4").fired) == 1 and kinds(held)["linear"] == 4
