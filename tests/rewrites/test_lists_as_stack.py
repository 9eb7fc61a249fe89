"""ANE261: rows that are written and read at constant indices, and the torch GRU that is made of them."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb
from hypothesis import given
from hypothesis import strategies as st

from mil_ane_passes.passes.engine import apply_rewrite
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.passes.registry import find_rewrite
from mil_ane_passes.runtime import Runtime
from tests.conversions import load_converted
from tests.rewrites.helpers import kinds, unsupported_ops

PASSES = "unroll_while_loop,lists_as_stack,fp32_island"
STEPS, BATCH, WIDE, HIDDEN = 4, 2, 5, 3
FORMS = {
    "one layer": {}, "no bias": {"bias": False}, "two layers": {"num_layers": 2},
    "both ways": {"bidirectional": True},
    "all of it": {"num_layers": 2, "bidirectional": True, "batch_first": True},
}


class Gated(torch.nn.Module):
    def __init__(self, **settings):
        super().__init__()
        self.gru = torch.nn.GRU(WIDE, HIDDEN, **settings)

    def forward(self, x, h):
        return self.gru(x, h)


def sizes(settings, steps):
    layers = settings.get("num_layers", 1) * (1 + settings.get("bidirectional", False))
    batch_first = settings.get("batch_first", False)
    return ((BATCH, steps, WIDE) if batch_first else (steps, BATCH, WIDE)), (layers, BATCH, HIDDEN)


def converted(settings, tmp_path, target, passes=None, steps=STEPS):
    torch.manual_seed(0)
    module = Gated(**settings).eval()
    zeros = [torch.zeros(shape) for shape in sizes(settings, steps)]
    return module, load_converted(module, *zeros, path=tmp_path / f"{passes is None}.mlpackage", names="xh",
                                  passes=passes, minimum_deployment_target=target)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("target", [pytest.param(ct.target.iOS15, marks=pytest.mark.slow), ct.target.iOS18])
def test_a_torch_gru_is_left_with_nothing_that_is_refused(tmp_path, form, target):
    module, built = converted(FORMS[form], tmp_path, target, PASSES)
    assert not {"while_loop", "scatter", "gather", "reverse", "cond"} & set(kinds(built))
    assert not unsupported_ops(built, "m4") + unsupported_ops(built, "m1")
    random = np.random.default_rng(0)
    feeds = {name: random.standard_normal(shape).astype(np.float16).astype(np.float32)
             for name, shape in zip("xh", sizes(FORMS[form], STEPS))}
    _, before = converted(FORMS[form], tmp_path, target)
    assert "while_loop" in kinds(before)
    for precision in ("float64", "float16"):
        old, new = (Runtime(each, precision=precision)(feeds) for each in (before, built))
        assert old.keys() == new.keys()
        for name in old:
            np.testing.assert_array_equal(old[name], new[name])
    with torch.no_grad():
        truth = module.double()(*(torch.from_numpy(feeds[name]).double() for name in "xh"))
    found = Runtime(built, precision="float64")(feeds).values()
    for one, other in zip(found, truth):
        np.testing.assert_allclose(one, other.numpy(), rtol=0, atol=2e-3)  # the weights are rounded to fp16


def test_a_gru_of_one_step(tmp_path):
    _, built = converted({}, tmp_path, ct.target.iOS17, PASSES, steps=1)
    assert not unsupported_ops(built, "m4") and "scatter" not in kinds(built)


@st.composite
def writings(draw):
    """Rows, and what is done with them: (write, place), (read, place) or (read all)."""
    count = draw(st.integers(1, 4))
    places = st.integers(0, count - 1)
    step = st.one_of(st.tuples(st.just("write"), places), st.tuples(st.just("read"), places),
                     st.tuples(st.just("scalar"), places), st.tuples(st.just("all"), st.lists(places, min_size=1,
                                                                                             max_size=4)))
    steps = [*draw(st.lists(step, min_size=1, max_size=9)), ("all", list(range(count)))]
    return count, steps, draw(st.booleans()), draw(st.integers(0, 1))


@pytest.mark.law
@given(writings())
def test_any_chain_of_writes_and_reads_gives_what_was_written(drawn):
    count, steps, as_list, axis = drawn
    x = np.random.default_rng(0).standard_normal((count, count)).astype(np.float32)
    held = np.copy(x)
    truth, now = [], x[0:1] if axis == 0 else x[:, 0:1]

    def body(x):
        rows, outputs = x, []
        if as_list:
            rows = mb.make_list(init_length=count, dynamic_length=False, elem_shape=(count,), dtype="fp32")
            rows = mb.list_scatter(ls=rows, indices=np.arange(count, dtype=np.int32), value=x)
        part = mb.slice_by_index(x=x, begin=[0, 0], end=[1, count] if axis == 0 else [count, 1])
        for kind, place in steps:
            at = np.int32(place) if kind == "scalar" or as_list else np.array([place], np.int32)
            if kind == "write":
                part = mb.tanh(x=part)
                if as_list:
                    rows = mb.list_write(ls=rows, index=at, value=mb.squeeze(x=part, axes=[axis]))
                else:
                    rows = mb.scatter(data=rows, indices=at, updates=part, axis=axis, mode="update")
            elif kind == "all":
                indices = np.array(place, np.int32)
                outputs.append(mb.list_gather(ls=rows, indices=indices) if as_list else
                               mb.gather(x=rows, indices=indices, axis=axis))
            else:
                row = mb.list_read(ls=rows, index=np.int32(place)) if as_list else mb.gather(
                    x=rows, indices=at, axis=axis)
                part = mb.expand_dims(x=row, axes=[axis]) if as_list or kind == "scalar" else row
                outputs.append(part)
        return [mb.identity(x=part), *outputs]

    if as_list:
        axis, now = 0, x[0:1]
    for kind, place in steps:
        if kind == "write":
            now = np.tanh(now.astype(np.float64))
            held = held.astype(np.float64)
            np.moveaxis(held, axis, 0)[place] = np.squeeze(now, axis)
        elif kind == "all":
            truth.append(held.take(place, axis))
        else:
            now = held.take([place], axis)
            truth.append(now)
    built = build_program(body, dtype=ct.converters.mil.mil.types.fp32, x=(count, count))
    trace = apply_rewrite(find_rewrite("lists_as_stack").configured(), built)
    assert bool(trace.fired) == (as_list or any(kind == "write" for kind, _ in steps))
    if trace.fired:
        assert not any(kind.startswith(("list", "make", "scatter")) for kind in kinds(built))
    found = Runtime(built, precision="float64")({"x": x}).values()
    for one, other in zip(found, [now, *truth]):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)


def test_a_list_whose_length_is_asked_for_is_left():
    def body(x):
        rows = mb.make_list(init_length=2, dynamic_length=True, elem_shape=(3,), dtype="fp16")
        rows = mb.list_scatter(ls=rows, indices=np.array([0, 1], np.int32), value=x)
        return [mb.list_gather(ls=rows, indices=np.array([1, 0], np.int32)), mb.list_length(ls=rows)]

    (miss,) = apply_rewrite(find_rewrite("lists_as_stack").configured(), build_program(body, x=(2, 3))).near_misses
    assert miss.reason == "it is read at dynamic indices, or at indices that were not written"


def test_the_number_of_rows_has_a_bound():
    def body(x):
        for place in (0, 1):
            x = mb.scatter(data=x, indices=np.array([place], np.int32), updates=np.ones((1, 3), np.float16), axis=0,
                           mode="update")
        return mb.gather(x=x, indices=np.array([1], np.int32), axis=0)

    trace = apply_rewrite(find_rewrite("lists_as_stack").configured(max_parts=3), build_program(body, x=(4, 3)))
    assert not trace.fired and trace.near_misses[0].reason.endswith("or more than 3 (max_parts)")
    assert apply_rewrite(find_rewrite("lists_as_stack").configured(max_parts=4), build_program(body, x=(4, 3))).fired


def test_single_elements_of_a_flat_tensor_are_left_to_a_mask():
    """As coremltools spells an assignment to a slice up to iOS17."""
    built = build_program(lambda x, u: mb.scatter(data=x, indices=np.array([1, 3, 5], np.int32), updates=u, axis=0,
                                                  mode="update", name="y"), x=(8,), u=(3,))
    trace = apply_rewrite(find_rewrite("lists_as_stack").configured(), built)
    assert not trace.fired and all("single elements of a flat tensor" in miss.reason for miss in trace.near_misses)
    assert apply_rewrite(find_rewrite("scatter_as_slices").configured(), built).fired
