"""ANE215: slices of flexible axes as PyTorch writes them, with no place computed."""

from __future__ import annotations

import itertools

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb
from hypothesis import given
from hypothesis import strategies as st

import mil_ane_passes as ane
from mil_ane_passes.ir.query import is_const, iterate_ops
from mil_ane_passes.passes.engine import apply_rewrite, find_matches
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.passes.registry import find_rewrite, fixes_for, get_all_rules
from mil_ane_passes.runtime import Runtime
from mil_ane_passes.utils.errors import InputError
from tests.rewrites.helpers import kinds
from tests.rewrites.spellings import spelt

SPELLINGS = {
    "all but the last": lambda x: x[:, :x.size(1) - 1] * 2,
    "differences": lambda x: x[:, 1:x.size(1)] - x[:, :x.size(1) - 1],
    "narrow": lambda x: torch.narrow(x, 1, 1, x.size(1) - 2) * 2,
    "all of it": lambda x: x[:, :x.shape[1]] + 1,
}


def flexible(function, exported, target, tmp_path, **settings):
    x = torch.randn(2, 8, 4)
    if exported:
        length = torch.export.Dim("length", min=4, max=64)
        source = torch.export.export(spelt(function).eval(), (x,), dynamic_shapes={"x": {1: length}})
        source = source.run_decompositions({})
    else:
        source = torch.jit.trace(spelt(function).eval(), x)
        settings["inputs"] = [ct.TensorType(name="x", shape=(2, ct.RangeDim(4, 64), 4))]
    made = ct.convert(source, minimum_deployment_target=getattr(ct.target, target), skip_model_load=True,
                      convert_to="mlprogram", **settings)
    made.save(str(tmp_path / "flexible.mlpackage"))
    return ane.load(tmp_path / "flexible.mlpackage").program


def computed(built):
    return [op for _, op in iterate_ops(built) if op.op_type.startswith("slice_by")
            and not all(is_const(op.inputs[name]) for name in ("begin", "end", "size") if name in op.inputs)]


@pytest.mark.parametrize("target", ["iOS15", "iOS18"])
@pytest.mark.parametrize(("spelling", "exported"), [
    (spelling, exported) for spelling in SPELLINGS for exported in (False, True)
    if exported or spelling != "narrow"])  # which coremltools does not convert when it is traced
def test_flexible_slices_as_torch_spells_them(spelling, exported, target, tmp_path):
    function = SPELLINGS[spelling]
    built = flexible(function, exported, target, tmp_path)
    apply_rewrite(find_rewrite("known_slice").configured(), built)
    assert not computed(built) and not kinds(built)["shape"]
    (name,) = built.functions["main"].inputs
    for length in (4, 8, 33):
        x = np.random.default_rng(0).standard_normal((2, length, 4)).astype(np.float16).astype(np.float32)
        (found,) = Runtime(built, precision="float64")({name: x}).values()
        np.testing.assert_array_equal(found, function(torch.from_numpy(x).double()).numpy())


def test_it_stands_through_a_conversion(tmp_path):
    built = flexible(SPELLINGS["differences"], True, "iOS17", tmp_path,
                     pass_pipeline=ane.pipeline(passes="known_slice"))
    assert not computed(built)


@pytest.mark.law
@given(st.data())
def test_any_place_counted_from_the_size(data):
    rank = data.draw(st.integers(1, 4))
    axis = data.draw(st.integers(0, rank - 1))
    begin, less = data.draw(st.integers(-4, 3)), data.draw(st.integers(0, 3))
    step = data.draw(st.integers(1, 3))
    shape = [2] * rank

    def body(x):
        size = mb.slice_by_index(x=mb.cast(x=mb.shape(x=x), dtype="int16"), begin=[axis], end=[axis + 1])
        size = mb.cast(x=size, dtype="int32")
        first = mb.add(x=np.array([begin], np.int32), y=size) if begin < 0 else np.array([begin], np.int32)
        last = mb.sub(x=size, y=np.array([less], np.int32))
        zero = np.array([0], np.int32)
        ends = [[each if number == axis else zero for number in range(rank)] for each in (first, last)]
        free = [number != axis for number in range(rank)]
        places = [mb.concat(values=values, axis=0) for values in ends]
        return mb.slice_by_index(x=x, begin=places[0] if begin < 0 else [begin * (not each) for each in free],
                                 end=places[1], stride=[step if number == axis else 1 for number in range(rank)],
                                 begin_mask=free, end_mask=free, name="y")

    built = build_program(body, x=tuple(None if number == axis else 2 for number in range(rank)))
    trace = apply_rewrite(find_rewrite("known_slice").configured(shortest=8), built)
    if not trace.fired:
        assert begin < 0 and "its result would become static" in trace.near_misses[0].reason
        return
    shape[axis] = data.draw(st.integers(8, 11))
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float16)
    right = x[(slice(None),) * axis + (slice(begin, shape[axis] - less, step),)]
    np.testing.assert_array_equal(Runtime(built, precision="float16")({"x": x})["y"], right)
    assert not computed(built)


def placed(kind, first, second, squeezed=False):
    """x (2, s) from `first` on, to `second`: numbers, or texts such as "-3" for the size less 3."""
    def body(x):
        size = mb.gather(x=mb.shape(x=x), indices=np.array([1], np.int32), axis=0)
        one, other = (np.array([each], np.int32) if isinstance(each, int) else
                      mb.add(x=size, y=np.array([int(each)], np.int32)) for each in (first, second))
        rows = mb.gather(x=mb.shape(x=x), indices=np.array([0], np.int32), axis=0)
        given = {"begin": mb.concat(values=[np.array([0], np.int32), one], axis=0)}
        if kind == "slice_by_size":
            return mb.slice_by_size(x=x, size=mb.concat(values=[rows, other], axis=0), **given, name="y")
        end = mb.concat(values=[rows, other], axis=0)
        return mb.slice_by_index(x=x, end=end, squeeze_mask=[False, squeezed], **given, name="y")

    return build_program(body, x=(None, None))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("kind", "shortest"), [
    ("slice_by_index", 1), ("slice_by_size", 3), pytest.param("slice_by_index", 3, marks=pytest.mark.slow),
    pytest.param("slice_by_size", 1, marks=pytest.mark.slow)])
def test_short_axes_give_the_same_as_before(kind, shortest):
    """A number that is computed below 0 means another place, or (a size of -1) all that is left."""
    places = [0, 1, 2, 3, "-1", "-2", "-3", "-5", -1, -2]
    fired = 0
    for first, second in itertools.product(places, [*places, 4]):
        before, built = placed(kind, first, second), placed(kind, first, second)
        if not apply_rewrite(find_rewrite("known_slice").configured(shortest=shortest), built).fired:
            continue
        fired += 1
        for size in range(shortest, 8):
            x = np.arange(3 * size, dtype=np.float16).reshape(3, size)
            try:
                expected = Runtime(before, precision="float16")({"x": x})["y"]
            except InputError:  # a slice that reaches outside x is no program
                continue
            np.testing.assert_array_equal(Runtime(built, precision="float16")({"x": x})["y"], expected,
                                          err_msg=f"{first} {second} at {size}")
    assert fired > 20


def test_what_would_become_known_is_left():
    def body(x):
        size = mb.gather(x=mb.shape(x=x), indices=np.int32(1), axis=0)
        begin = mb.concat(values=[np.int32(0), mb.sub(x=size, y=np.int32(2))], axis=0)
        return mb.slice_by_index(x=x, begin=begin, end=[2, 0], end_mask=[True, True], name="y")

    trace = find_matches(find_rewrite("known_slice").configured(), build_program(body, x=(2, None)))
    assert [miss.reason for miss in trace.near_misses] == [
        "its result would become static, but its users expect a dynamic size"]
    assert [fix.name for fix in fixes_for(get_all_rules()["runtime_slice"])] == ["known_slice"]
