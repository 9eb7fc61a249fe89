"""`verify` of packages whose programs are the same, and which declare other inputs and outputs."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest
from coremltools import proto
from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.mil import get_new_symbol

import mil_ane_passes as ane
from tests.package.helpers import make, normal, spec_of, with_functions, write_spec

IMAGE, ARRAY = (1, 3, 8, 8), (1, 8)


def make_images(path, source, result):
    @mb.program(input_specs=[mb.TensorSpec(IMAGE)], opset_version=ct.target.iOS16)
    def program(x):
        return mb.conv(x=x, weight=normal(3, 3, 1, 1), name="y")

    spec = spec_of(make(path, program, ct.target.iOS16))
    declare_image(spec.description.input[0], source)
    declare_image(spec.description.output[0], result)
    write_spec(path, spec)
    return path


def declare_image(feature, layout):
    """Declares an input or output as an image with its channels in this order, if there is one."""
    if layout is not None:
        image = feature.type.imageType
        image.height, image.width = IMAGE[2:]
        image.colorSpace = proto.FeatureTypes_pb2.ImageFeatureType.ColorSpace.Value(layout)


def make_sum(path, default=None):
    @mb.program(input_specs=[mb.TensorSpec(ARRAY), mb.TensorSpec(ARRAY)], opset_version=ct.target.iOS16)
    def program(x, bias):
        return mb.add(x=x, y=bias, name="y")

    value = None if default is None else np.full(ARRAY, default, np.float32)
    return make(path, program, ct.target.iOS16,
                inputs=[ct.TensorType("x", ARRAY), ct.TensorType("bias", ARRAY, default_value=value)])


@pytest.mark.parametrize(("other", "message"), [
    (("BGR", "RGB"), "input 'x' of function 'main' is an image in the order RGB in the first and BGR in the second"),
    (("RGB", "BGR"), "output 'y' of function 'main' is an image in the order RGB in the first and BGR in the second"),
])
def test_images_in_another_order_of_channels_are_other_ends(tmp_path, other, message):
    """The same image gives other numbers: the two were called equal, bit for bit."""
    before = make_images(tmp_path / "a.mlpackage", "RGB", "RGB")
    after = make_images(tmp_path / "b.mlpackage", *other)
    for feeds in (None, {"x": normal(*IMAGE)}):
        with pytest.raises(ane.InputError, match=message):
            ane.verify(before, after, feeds=feeds)
    assert ane.verify(before, before).equal and not ane.verify(before, before).notes


def test_an_image_is_compared_with_an_array_and_said_to_be_so(tmp_path):
    before, after = (make_images(tmp_path / f"{name}.mlpackage", *ends)
                     for name, ends in {"a": ("BGR", None), "b": (None, None)}.items())
    for pair in ((before, after), (after, before)):
        report = ane.verify(*pair)
        assert report.equal and any("input 'x' of function 'main' is an image in the" in note for note in report.notes)


def test_an_input_that_may_be_left_out_has_one_default(tmp_path):
    """A prediction without the input gives other results: the two were called equal, bit for bit."""
    one, two, none = (make_sum(tmp_path / f"{name}.mlpackage", default)
                      for name, default in {"one": 1.0, "two": 2.0, "none": None}.items())
    with pytest.raises(ane.InputError, match=r"'bias' of function 'main' is 1 in the first and 2 in the second"):
        ane.verify(one, two)
    with pytest.raises(ane.InputError, match="'bias' .* is 1 in the first and has to be fed in the second"):
        ane.verify(one, none)
    assert ane.verify(none, one).equal, "the second accepts all feeds of the first"
    feeds = {"x": normal(*ARRAY), "bias": normal(*ARRAY)}
    assert ane.verify(one, two, feeds=feeds).equal
    with pytest.raises(ane.InputError, match="is 1 in the first and 2 in the second"):
        ane.verify(one, two, feeds={"x": feeds["x"]})
    assert ane.verify(one, one).equal


def test_shapes_that_the_second_does_not_accept(tmp_path):
    """The programs accept any size; the description of the second declares a smaller range."""
    @mb.program(input_specs=[mb.TensorSpec((1, get_new_symbol()))], opset_version=ct.target.iOS16)
    def program(x):
        return mb.relu(x=x, name="y")

    paths = {}
    for largest in (64, 32):
        paths[largest] = make(tmp_path / f"{largest}.mlpackage", program, ct.target.iOS16)
        spec = spec_of(paths[largest])
        array = spec.description.input[0].type.multiArrayType
        array.ClearField("shape")
        array.shape.extend(ARRAY)
        array.ClearField("shapeRange")
        for lower, upper in ((1, 1), (1, largest)):
            array.shapeRange.sizeRanges.add(lowerBound=lower, upperBound=upper)
        write_spec(paths[largest], spec)
    with pytest.raises(ane.InputError, match=r"'x' of function 'main' accepts .* the second: .*found 64 .*1 to 32"):
        ane.verify(paths[64], paths[32])
    assert ane.verify(paths[32], paths[64]).equal
    assert ane.verify(paths[64], paths[32], feeds={"x": normal(1, 16)}).equal


def test_another_default_function_is_said_to_be_so(tmp_path):
    """Functions are compared by name, and a prediction without a name runs another one."""
    @mb.program(input_specs=[mb.TensorSpec(ARRAY)], opset_version=ct.target.iOS18)
    def program(x):
        return mb.relu(x=x, name="y")

    part = make(tmp_path / "part.mlpackage", program, ct.target.iOS18)
    one, two = (with_functions(tmp_path / f"{default}.mlpackage", {"first": part, "second": part}, default)
                for default in ("first", "second"))
    report = ane.verify(one, two)
    assert report.equal and any("the default function is 'first' in the first and 'second' in the second" in note
                                for note in report.notes)
    assert not ane.verify(one, one).notes and not ane.verify(one, two, function="first").notes
