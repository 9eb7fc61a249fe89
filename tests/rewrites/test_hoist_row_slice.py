"""ANE541: slices of rows in front of what computes row by row, on real blocks against PyTorch."""

from __future__ import annotations

import time
from functools import partial

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types

from mil_ane_passes.ane.latency import estimate_latency
from mil_ane_passes.commands.pipeline import make_forecaster
from mil_ane_passes.ir.clone import clone_program
from mil_ane_passes.passes.contract import Exactness
from mil_ane_passes.passes.engine import RunSettings, apply_rewrite
from mil_ane_passes.passes.examples import build_program, make_weight
from mil_ane_passes.passes.guard import Guard, run_guarded
from mil_ane_passes.runtime import Runtime
from tests.rewrites.helpers import configure_rewrite, kinds
from tests.rewrites.transformer_blocks import BLOCKS, convert_block, convert_real_block, list_shapes, run_at

torch = pytest.importorskip("torch")
rule = partial(configure_rewrite, "hoist_row_slice")
WIDTH, LENGTH = 16, 10


class Block(torch.nn.Module):
    """A decoder block with the projection to a vocabulary, of whose logits the last token's are returned."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(WIDTH) for _ in range(3))
        self.qkv = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out, self.up, self.down = (torch.nn.Linear(*sizes) for sizes in
                                        ((WIDTH, WIDTH), (WIDTH, 24), (24, WIDTH)))
        self.head = torch.nn.Linear(WIDTH, 40)

    def forward(self, x):
        y = self.norms[0](x)
        q, k, v = (each(y).unflatten(-1, (2, -1)).transpose(1, 2) for each in self.qkv)
        mixed = torch.softmax(q @ k.transpose(-1, -2) / 3, -1) @ v
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        x = x + self.down(torch.nn.functional.gelu(self.up(self.norms[1](x))))
        return self.head(self.norms[2](x))[:, -1]


def apply(program, **options):
    """The program after the rewrite, and the trace."""
    after = clone_program(program)
    return after, apply_rewrite(rule(**options), after, target="m4")


def assert_equal_to(program, after, feeds, expected, tolerance=1e-6):
    before, found = run_at(program, feeds, "float64"), run_at(after, feeds, "float64")
    assert np.abs(found - before).max() <= 1e-12 * np.abs(before).max()
    assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max()


def test_last_block_is_computed_for_the_last_token_only(tmp_path):
    module, x = Block(), torch.randn(1, LENGTH, WIDTH)
    program = convert_block(module, (x,), tmp_path / "block.mlpackage")
    after, trace = apply(program)
    assert list_shapes(after, "linear") == [
        (1, 1, WIDTH), (1, LENGTH, WIDTH), (1, LENGTH, WIDTH), (1, 1, WIDTH), (1, 1, 24), (1, 1, WIDTH), (1, 1, 40)]
    assert list_shapes(after, "softmax") == [(1, 2, 1, LENGTH)]
    assert_equal_to(program, after, {"x0": x.numpy()}, module.double()(x.double()).detach().numpy())
    assert len(trace.fired) == 1 and "1 of 10 rows" in trace.fired[0].reason
    assert not apply_rewrite(rule(), after, target="m4").fired


def test_length_may_be_unknown(tmp_path):
    module, x = Block(), torch.randn(1, LENGTH, WIDTH)
    shapes = [ct.Shape((1, ct.RangeDim(1, 64, default=LENGTH), WIDTH))]
    program = convert_block(module, (x,), tmp_path / "block.mlpackage", shapes=shapes)
    after, trace = apply(program)
    assert trace.fired and [shape[1] for shape in list_shapes(after, "linear")][-3:] == [1, 1, 1]
    module.double()
    for length in (1, 2, 33):
        x = torch.randn(1, length, WIDTH)
        assert_equal_to(program, after, {"x0": x.numpy()}, module(x.double()).detach().numpy())


@pytest.mark.parametrize("name", [*BLOCKS[:2], *(pytest.param(each, marks=pytest.mark.slow) for each in BLOCKS[2:])])
def test_real_blocks(name, tmp_path):
    program, feeds, expected = convert_real_block(name, tmp_path / "block.mlpackage")
    after, trace = apply(program)
    assert trace.fired
    assert_equal_to(program, after, feeds, expected, 2e-5)
    rows = [shape[-2] for shape in list_shapes(after, "softmax")]
    assert rows[-1] == 1 and rows[0] > 1  # the queries of the last block
    assert [var.name for var in after.functions["main"].outputs] == [
        var.name for var in program.functions["main"].outputs]


def test_what_holds_of_the_bits():
    """Arithmetic keeps its bits at each precision; of a linear the order of the sums may depend on the rows."""
    def arithmetic(x):
        return mb.slice_by_index(x=mb.real_div(x=mb.sub(x=x, y=make_weight(9, 64, dtype=np.float32)), y=np.float32(3)),
                                 begin=[0, 8, 0], end=[1, 9, 64], name="y")

    def linear(x):
        return mb.slice_by_index(x=mb.linear(x=x, weight=make_weight(64, 64, dtype=np.float32)), begin=[0, 8, 0],
                                 end=[1, 9, 64], name="y")

    x = np.random.default_rng(0).standard_normal((1, 9, 64)).astype(np.float32)
    for body, exactness in ((arithmetic, Exactness.BITWISE), (linear, Exactness.ROUNDING)):
        program = build_program(body, dtype=types.fp32, x=(1, 9, 64))
        after, trace = apply(program)
        assert trace.strength is exactness
        for precision, unit in (("float64", 2.0**-52), ("float32", 2.0**-23), ("float16", 2.0**-23)):
            before, found = (run_at(each, {"x": x}, precision) for each in (program, after))
            if exactness is Exactness.BITWISE:
                np.testing.assert_array_equal(found, before)
            bound = 64 * unit * (np.abs(x[0, 8]) @ np.abs(make_weight(64, 64, dtype=np.float32)).T)
            assert exactness is Exactness.BITWISE or np.all(np.abs(found - before) <= bound)


def test_functions_are_rewritten_each_by_itself():
    program = build_program(lambda x: mb.slice_by_index(
        x=mb.linear(x=x, weight=make_weight(4, 4)), begin=[0, 0, 0], end=[1, 1, 4], name="y"), x=(1, 6, 4))
    other = build_program(lambda x: mb.linear(x=x, weight=make_weight(4, 4), name="y"), x=(1, 6, 4))
    program.add_function("other", other.functions["main"])
    after, trace = apply(program)
    assert {hit.function for hit in trace.fired} == {"main"}
    assert list_shapes(after, "linear") == [(1, 1, 4), (1, 6, 4)]


def test_outputs_that_take_the_same_rows_keep_their_names():
    def body(x):
        y = mb.linear(x=x, weight=make_weight(4, 4))
        return [mb.slice_by_index(x=y, begin=[0, 5, 0], end=[1, 6, 4], name=name) for name in ("y", "z")]

    after, _ = apply(build_program(body, x=(1, 6, 4)))
    assert [var.name for var in after.functions["main"].outputs] == ["y", "z"]
    assert kinds(after)["linear"] == kinds(after)["slice_by_index"] == 1
    found = Runtime(after)({"x": np.ones((1, 6, 4), np.float16)})
    np.testing.assert_array_equal(found["y"], found["z"])


def test_each_entry_is_sliced_once_and_nothing_is_computed_twice():
    def body(x, z):
        y = mb.linear(x=mb.relu(x=x), weight=make_weight(4, 4))
        w = mb.add(x=mb.mul(x=y, y=z), y=mb.sub(x=x, y=z))
        return mb.slice_by_index(x=w, begin=[0, 5, 0], end=[1, 6, 4], name="y")

    before = build_program(body, x=(1, 6, 4), z=(1, 6, 4))
    after, _ = apply(before)
    assert kinds(after) - kinds(before) == {"slice_by_index": 1}
    assert {shape for shape in list_shapes(after, "linear", "relu", "add", "mul", "sub")} == {(1, 1, 4)}


def test_operand_that_is_read_in_full_and_by_rows_stays():
    """x @ x^T: the rows of the first operand are sliced, the second is read in full."""
    def body(x):
        y = mb.linear(x=x, weight=make_weight(4, 4))
        scores = mb.matmul(x=y, y=y, transpose_y=True)
        return mb.slice_by_index(x=scores, begin=[0, 5, 0], end=[1, 6, 6], name="y")

    before = build_program(body, x=(1, 6, 4))
    after, _ = apply(before)
    assert list_shapes(after, "linear") == [(1, 6, 4)] and list_shapes(after, "matmul") == [(1, 1, 6)]
    feeds = {"x": np.random.default_rng(0).standard_normal((1, 6, 4)).astype(np.float16)}
    np.testing.assert_allclose(run_at(after, feeds, "float64"), run_at(before, feeds, "float64"), rtol=1e-12)


def test_rows_sliced_twice_move_up_one_after_the_other():
    def body(x):
        y = mb.linear(x=x, weight=make_weight(4, 4))
        row = mb.slice_by_index(x=y, begin=[0, 5, 0], end=[2, 6, 4])
        return mb.slice_by_index(x=mb.square(x=row), begin=[1, 0, 0], end=[2, 1, 4], name="y")

    before = build_program(body, x=(2, 6, 4))
    after, _ = apply(before)
    assert list_shapes(after, "linear") == [(1, 1, 4)]
    feeds = {"x": np.random.default_rng(0).standard_normal((2, 6, 4)).astype(np.float16)}
    np.testing.assert_allclose(run_at(after, feeds, "float64"), run_at(before, feeds, "float64"), rtol=1e-12)


def test_a_long_chain_is_one_match():
    def body(x):
        for _ in range(60):
            x = mb.relu(x=mb.linear(x=x, weight=make_weight(4, 4)))
        return mb.slice_by_index(x=x, begin=[0, 5, 0], end=[1, 6, 4], name="y")

    after, trace = apply(build_program(body, x=(1, 6, 4)))
    assert len(trace.fired) == 1 and set(list_shapes(after, "linear", "relu")) == {(1, 1, 4)}


@pytest.mark.slow
def test_time_is_linear():
    """Slices alike, each of a value of its own, which moves up or is read in full by another op."""
    def layers(count):
        def body(x):
            for _ in range(count):
                y = mb.linear(x=x, weight=make_weight(4, 4))
                row = mb.slice_by_index(x=mb.tanh(x=mb.relu(x=y)), begin=[0, 0, 0], end=[1, 1, 4])
                x = mb.add(x=y, y=mb.slice_by_index(x=mb.mul(x=y, y=row), begin=[0, 0, 0], end=[1, 1, 4]))
            return x

        return build_program(body, x=(1, 6, 4))

    def measure(count):
        program = layers(count)
        started = time.perf_counter()
        assert apply_rewrite(rule(), program, target="m4").fired
        return time.perf_counter() - started

    assert measure(800) <= 25 * min(measure(100) for _ in range(2))


def test_slice_may_be_read_above_another_slice():
    """A row is taken of what the last rows are computed from, and both come from one value."""
    def body(x):
        y = mb.linear(x=x, weight=make_weight(4, 4))
        row = mb.slice_by_index(x=mb.tanh(x=y), begin=[0, 5, 0], end=[1, 6, 4])
        scaled = mb.mul(x=mb.add(x=y, y=mb.square(x=row)), y=row)
        again = mb.concat(values=[scaled, scaled], axis=2)
        return mb.slice_by_index(x=again, begin=[0, 5, 0], end=[1, 6, 8], name="y")

    before = build_program(body, x=(1, 6, 4))
    after, trace = apply(before)
    assert len(trace.fired) == 1 and set(list_shapes(after, "linear", "tanh", "mul")) == {(1, 1, 4)}
    feeds = {"x": np.random.default_rng(0).standard_normal((1, 6, 4)).astype(np.float16)}
    np.testing.assert_allclose(run_at(after, feeds, "float64"), run_at(before, feeds, "float64"), rtol=1e-12)


def test_share_is_an_option():
    program = build_program(lambda x: mb.slice_by_index(
        x=mb.linear(x=x, weight=make_weight(4, 4)), begin=[0, 1, 0], end=[1, 6, 4], name="y"), x=(1, 6, 4))
    assert not apply(program)[1].fired and apply(program, most_share=0.9)[1].fired


@pytest.mark.parametrize("chip", ["m1", "m4", "m5"])
def test_latency_falls_at_real_size(chip):
    """The output projection of GPT-2 medium on 512 tokens."""
    def body(x):
        logits = mb.linear(x=mb.layer_norm(x=x, axes=[-1], epsilon=np.float16(1e-5)),
                           weight=np.zeros((50257 // 4, 1024), np.float16))
        return mb.slice_by_index(x=logits, begin=[0, 511, 0], end=[1, 512, 50257 // 4], name="y")

    program = build_program(body, x=(1, 512, 1024))
    after, _ = apply(program)
    before, now = (estimate_latency(each, target=chip).latency_us for each in (program, after))
    assert now < 0.8 * before


@pytest.mark.parametrize("chip", ["m1", "m4", "m5"])
def test_guard_keeps_it_at_real_size(chip):
    """Two layers and the output projection of a decoder of GPT-2 medium's width, on 512 tokens."""
    def body(x):
        for _ in range(2):
            inner = mb.gelu(x=mb.linear(x=x, weight=np.zeros((4096, 1024), np.float16)))
            x = mb.add(x=x, y=mb.linear(x=inner, weight=np.zeros((1024, 4096), np.float16)))
        logits = mb.linear(x=x, weight=np.zeros((50257 // 4, 1024), np.float16))
        return mb.slice_by_index(x=logits, begin=[0, 511, 0], end=[1, 512, 50257 // 4], name="y")

    program = build_program(body, x=(1, 512, 1024))
    guard = Guard(make_forecaster(chip))
    traces = run_guarded([rule()], program, RunSettings(target=chip), guard)
    assert [(trace.rule, bool(trace.fired), trace.reverted) for trace in traces] == [("hoist_row_slice", True, "")]
    assert {shape[1] for shape in list_shapes(program, "linear")} == {1}
