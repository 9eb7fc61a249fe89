"""ANE542: attention with grouped keys and values, in the forms in which coremltools converts it, against PyTorch."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb

from mil_ane_passes.ane.latency import estimate_latency
from mil_ane_passes.ir.clone import clone_program
from mil_ane_passes.passes.engine import apply_rewrite, find_matches
from mil_ane_passes.passes.examples import build_program
from tests.rewrites.helpers import configure_rewrite, kinds
from tests.rewrites.transformer_blocks import convert_block, convert_real_block, list_shapes, run_at

torch = pytest.importorskip("torch")
rule = partial(configure_rewrite, "drop_gqa_repeat")
HEADS, GROUPS, WIDTH = 6, 2, 16
TIMES = HEADS // GROUPS


def expand(x):
    return x[:, :, None].expand(*x.shape[:2], TIMES, *x.shape[2:]).reshape(x.shape[0], -1, *x.shape[2:])


FORMS = {
    "expand": expand,
    "repeat": lambda x: x.unsqueeze(2).repeat(1, 1, TIMES, 1, 1).view(x.shape[0], -1, *x.shape[2:]),
    "repeat_interleave": lambda x: x.repeat_interleave(TIMES, dim=1),
    "index": lambda x: x[:, torch.arange(GROUPS).repeat_interleave(TIMES)],
    "stack": lambda x: torch.stack([x] * TIMES, 2).flatten(1, 2),
    "cat": lambda x: torch.cat([x[:, at:at + 1] for at in range(GROUPS) for _ in range(TIMES)], 1),
}


class Attention(torch.nn.Module):
    def __init__(self, repeat, mask=None, fused=False, grouped=False):
        super().__init__()
        self.repeat, self.mask, self.fused, self.grouped = repeat, mask, fused, grouped

    def forward(self, q, k, v):
        if self.grouped:
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        k, v = self.repeat(k), self.repeat(v)
        if self.fused:
            return torch.nn.functional.scaled_dot_product_attention(q, k, v)
        scores = q @ k.transpose(-1, -2) / 3
        return torch.softmax(scores if self.mask is None else scores + self.mask, -1) @ v


def convert(module, path, rows=3, keys=9, target="iOS17", shapes=None):
    torch.manual_seed(0)
    inputs = (torch.randn(1, HEADS, rows, WIDTH), *(torch.randn(1, GROUPS, keys, WIDTH) for _ in range(2)))
    program = convert_block(module, inputs, path / "attention.mlpackage", target=target, shapes=shapes)
    expected = module(*(x.double() for x in inputs)).numpy()
    return program, {f"x{at}": x.numpy() for at, x in enumerate(inputs)}, expected


def assert_equal_after(program, feeds, expected, tolerance=1e-6):
    """The rewritten program, after it was compared with the one before and with PyTorch."""
    after = clone_program(program)
    trace = apply_rewrite(rule(), after, target="m4")
    assert trace.fired
    before, found = run_at(program, feeds, "float64"), run_at(after, feeds, "float64")
    assert np.abs(found - before).max() <= 1e-12 * np.abs(before).max()
    assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max()
    assert not apply_rewrite(rule(), after, target="m4").fired
    return after


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_repetition(form, tmp_path):
    program, feeds, expected = convert(Attention(FORMS[form]), tmp_path)
    after = assert_equal_after(program, feeds, expected)
    left = kinds(after)
    assert not left["tile"] and not left["gather"] and not left["concat"] and not left["transpose"]
    assert list_shapes(after, "matmul") == [(1, GROUPS, TIMES * 3, 9), (1, GROUPS, TIMES * 3, WIDTH)]
    assert left["reshape"] == 2  # of the queries and of the result, none of the scores


@pytest.mark.parametrize("target", ["iOS17", "iOS18"])
def test_enable_gqa(target, tmp_path):
    program, feeds, expected = convert(Attention(None, grouped=True), tmp_path, target=target)
    after = assert_equal_after(program, feeds, expected)
    assert not kinds(after)["tile"]
    assert kinds(after)["scaled_dot_product_attention"] == (target == "iOS18")


def test_decode_with_a_mask_needs_no_reshape_of_scores(tmp_path):
    mask = torch.tensor([0.0] * 6 + [-1e4] * 3)
    program, feeds, expected = convert(Attention(expand, mask), tmp_path, rows=1)
    after = assert_equal_after(program, feeds, expected)
    assert list_shapes(after, "softmax") == [(1, GROUPS, TIMES, 9)] and kinds(after)["reshape"] == 2


def test_mask_for_each_query_of_a_chunk(tmp_path):
    mask = torch.full((3, 9), -1e4).triu(7)
    program, feeds, expected = convert(Attention(expand, mask), tmp_path)
    after = assert_equal_after(program, feeds, expected)
    assert list_shapes(after, "softmax") == [(1, HEADS, 3, 9)] and not kinds(after)["tile"]


def test_long_prefill_with_a_mask_stays(tmp_path):
    """The scores hold more numbers than the repeated keys and values."""
    mask = torch.full((48, 48), -1e4).triu(1)
    program, _, _ = convert(Attention(expand, mask), tmp_path, rows=48, keys=48)
    trace = find_matches(rule(), program, target="m4")
    assert not trace.fired
    assert {miss.reason for miss in trace.near_misses} == {"18432 elements would be reshaped to avoid writing 9216"}


@pytest.mark.parametrize("name", [
    "Llama", *(pytest.param(each, marks=pytest.mark.slow) for each in ("Qwen2", "Mistral"))])
def test_real_blocks(name, tmp_path):
    """32 tokens of heads of 48: reshaping the scores is cheaper than repeating."""
    program, feeds, expected = convert_real_block(name, tmp_path / "block.mlpackage")
    after = assert_equal_after(program, feeds, expected, 2e-5)
    assert kinds(program)["tile"] == 4 and not kinds(after)["tile"]


def test_last_block_of_a_prefill_is_grouped_once_its_queries_are_sliced(tmp_path):
    """Of the last block only the last token's query is left, so no score needs a reshape."""
    program, feeds, expected = convert_real_block("Llama", tmp_path / "block.mlpackage")
    after = clone_program(program)
    for name in ("hoist_row_slice", "drop_gqa_repeat"):
        assert apply_rewrite(configure_rewrite(name), after, target="m4").fired
    assert list_shapes(after, "softmax") == [(1, 4, 32, 32), (1, 2, 2, 32)]
    assert not kinds(after)["tile"]
    found = run_at(after, feeds, "float64")
    assert np.abs(found - run_at(program, feeds, "float64")).max() <= 1e-12 * np.abs(found).max()
    assert np.abs(found - expected).max() <= 2e-5 * np.abs(expected).max()


def test_rest_of_the_layer_is_left_as_it_is():
    """Keys come from a projection with a stored weight, through a reshape and a transpose."""
    def body(q, x):
        keys = mb.linear(x=x, weight=np.linspace(-1, 1, 128, dtype=np.float16).reshape(16, 8))
        keys = mb.transpose(x=mb.reshape(x=keys, shape=[1, 5, 2, 8]), perm=[0, 2, 1, 3])
        tiled = mb.tile(x=mb.expand_dims(x=keys, axes=[2]), reps=[1, 1, 2, 1, 1])
        return mb.matmul(x=q, y=mb.reshape(x=tiled, shape=[1, 4, 5, 8]), transpose_y=True, name="y")

    program = build_program(body, q=(1, 4, 1, 8), x=(1, 5, 8))
    before = kinds(program)
    assert apply_rewrite(rule(), program, target="m4").fired
    after = kinds(program)
    assert not after["tile"] and not after["expand_dims"] and after["transpose"] == before["transpose"]
    assert after["linear"] == 1 and after["reshape"] == 3


@pytest.mark.parametrize("chip", ["m1", "m4", "m5"])
def test_latency_of_a_decode_step_falls(chip):
    """A head of 128, 8 groups of 4, 1024 keys: Llama-3.2-3B's attention."""
    def body(q, k, v):
        repeated = [mb.reshape(x=mb.tile(x=mb.expand_dims(x=x, axes=[2]), reps=[1, 1, 4, 1, 1]),
                               shape=[1, 32, 1024, 128]) for x in (k, v)]
        scores = mb.softmax(x=mb.matmul(x=q, y=repeated[0], transpose_y=True), axis=-1)
        return mb.matmul(x=scores, y=repeated[1], name="y")

    program = build_program(body, q=(1, 32, 1, 128), k=(1, 8, 1024, 128), v=(1, 8, 1024, 128))
    after = clone_program(program)
    assert apply_rewrite(rule(), after, target=chip).fired
    before, now = (estimate_latency(each, target=chip).latency_us for each in (program, after))
    assert now < 0.9 * before


def test_length_of_a_cache_may_be_unknown():
    """Keys of an unknown number: one query and no reshape of the scores."""
    def body(q, k, v):
        repeated = [mb.reshape(x=mb.tile(x=mb.expand_dims(x=x, axes=[2]), reps=[1, 1, TIMES, 1, 1]),
                               shape=[1, HEADS, -1, WIDTH]) for x in (k, v)]
        scores = mb.softmax(x=mb.matmul(x=q, y=repeated[0], transpose_y=True), axis=-1)
        return mb.matmul(x=scores, y=repeated[1], name="y")

    program = build_program(body, q=(1, HEADS, 1, WIDTH), k=(1, GROUPS, None, WIDTH), v=(1, GROUPS, None, WIDTH))
    random = np.random.default_rng(0)
    length = random.standard_normal((2, 1, GROUPS, 7, WIDTH)).astype(np.float16)
    feeds = {"q": random.standard_normal((1, HEADS, 1, WIDTH)).astype(np.float16), "k": length[0], "v": length[1]}
    after = clone_program(program)
    assert apply_rewrite(rule(), after, target="m4").fired
    np.testing.assert_allclose(run_at(after, feeds, "float64"), run_at(program, feeds, "float64"), rtol=1e-12)
