"""ANE544: norms of real modules from the length of each row, held against PyTorch in double precision."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from mil_ane_passes.equivalence.execution import Plan
from mil_ane_passes.equivalence.range_measurement import make_measurer
from mil_ane_passes.ir.clone import clone_program
from mil_ane_passes.passes.engine import apply_rewrite, find_matches
from mil_ane_passes.passes.pipeline import apply_rewrites, select_rewrites
from tests.rewrites.helpers import configure_rewrite, kinds, only_output, torch_outputs

torch = pytest.importorskip("torch")
from tests.rewrites.test_scaled_rms_norm import FIRES, WIDTH, converted, error, large  # noqa: E402

ONE = 2.0**-10
"A unit in the last place of fp16, relative."


def small():
    """Rows of ordinary and tiny magnitudes, and zeros."""
    x = np.random.default_rng(0).standard_normal((5, WIDTH)) * np.array([[3.0], [1.0], [0.1], [0.001], [0.0]])
    return x.astype(np.float16)


def measure(x):
    return make_measurer(lambda program: [Plan("main", "feeds", {"x": x.astype(np.float32)}, {})])


rule = partial(configure_rewrite, "rms_norm_l2")


@pytest.mark.sampled(12)
@pytest.mark.parametrize("draw, fixes", [(small, False), (large, True)], ids=["small", "large"])
@pytest.mark.parametrize("name", FIRES)
def test_norms_of_real_modules(name, draw, fixes):
    module = FIRES[name]()
    before = converted(module)
    after = clone_program(before)
    trace = apply_rewrite(rule(), after, target="m5", measure=measure(draw()))
    assert trace.fired and kinds(after)["reduce_l2_norm"] == 1
    assert not kinds(after)["reduce_mean"] - (name == "var")
    x, precise = draw().astype(np.float32), torch_outputs(module, torch.from_numpy(draw().astype(np.float64)))
    found = only_output(after, x, "float16")
    allowed = 3e-3 if fixes else max(3 * ONE, 4 * error(only_output(before, x, "float16"), precise))
    assert error(found, precise) <= allowed
    assert error(only_output(after, x, "float64"), only_output(before, x, "float64")) <= 2.0**-19
    assert not apply_rewrite(rule(), after, target="m5", measure=measure(draw())).fired


def test_one_pass_for_the_length_and_one_for_the_product():
    built = converted(FIRES["Llama"]())
    apply_rewrite(rule(), built, target="m5", measure=measure(large()))
    full = [op.op_type for op in built.functions["main"].operations
            if op.op_type not in ("const", "cast") and tuple(op.outputs[0].shape) == (5, WIDTH)]
    assert full == ["mul"]
    assert kinds(built)["reduce_l2_norm"] == 1


@pytest.mark.parametrize("target, feeds, fired", [
    ("m5", small, "rms_norm_l2"), ("m5", large, "rms_norm_l2"), ("m5", None, "scaled_rms_norm"),
    ("m4", large, "scaled_rms_norm"), ("all", large, "scaled_rms_norm"), ("m4", small, None)])
def test_the_cheaper_norm_that_is_safe_is_chosen(target, feeds, fired):
    """The length where something bounds it, on the chip where that was measured; else the largest magnitude."""
    built = converted(FIRES["Llama"]())
    known = None if feeds is None else measure(feeds())
    traces = apply_rewrites(select_rewrites("full"), built, target=target, measure=known)
    found = {trace.rule for trace in traces if trace.fired} & {"rms_norm_l2", "scaled_rms_norm"}
    assert found == ({fired} if fired else set())


def test_preset_safe_divides_by_the_largest_magnitude():
    built = converted(FIRES["Llama"]())
    traces = apply_rewrites(select_rewrites("safe"), built, target="m5", measure=measure(large()))
    assert [trace.rule for trace in traces if trace.fired] == ["scaled_rms_norm"]


@pytest.mark.parametrize("chip", ["m1", "m2", "m3", "m4", "m6", "all"])
def test_chips_on_which_nobody_measured_it_do_not_get_it(chip):
    built = converted(FIRES["Llama"]())
    assert not find_matches(rule(), built, target=chip, measure=measure(small())).fired
    assert not apply_rewrite(rule(), built, target=chip, measure=measure(small())).fired


def test_margin_is_an_option():
    built = converted(FIRES["Llama"]())
    assert find_matches(rule(), built, target="m5", measure=measure(large())).fired
    (miss,) = find_matches(rule(margin=20.0), built, target="m5", measure=measure(large())).near_misses
    assert miss.reason.startswith("rows may have length ") and "above 65504" in miss.reason


def test_rows_up_to_the_limit_stay_finite_and_right():
    """Just below 65504 in length, and in single elements of rows of 64."""
    module = FIRES["Llama"]()
    built = converted(module)
    x = np.zeros((5, WIDTH), np.float16)
    x[0] = 8000  # a length of 64000
    x[1, 3] = 60000
    x[2] = np.random.default_rng(1).standard_normal(WIDTH) * 4000
    assert apply_rewrite(rule(margin=1.0), built, target="m5", measure=measure(x)).fired
    precise = torch_outputs(module, torch.from_numpy(x.astype(np.float64)))
    assert error(only_output(built, x.astype(np.float32), "float16"), precise) < 3e-3
    faulty = only_output(built, x.astype(np.float32), "float64", quirks=["square_overflow"])
    assert error(faulty, precise) < 1e-4
