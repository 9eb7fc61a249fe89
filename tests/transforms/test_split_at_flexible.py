"""Cuts through values of flexible shape: the second part takes every size that the first part can give."""

from __future__ import annotations

import coremltools as ct
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import get_new_symbol

import mil_ane_passes as ane
from tests.package.helpers import make, normal, spec_of, write_spec

from .splitting import chained, check_parts, cut, draws, same

WEIGHT = normal(4, 3, 3, 3)


def pictures(path, shape, **options):
    """A convolution of stride 2 over a picture of flexible size, then a mean over what is left."""
    height, width = get_new_symbol(), get_new_symbol()

    @mb.program(input_specs=[mb.TensorSpec((1, 3, height, width))], opset_version=ct.target.iOS17)
    def program(x):
        y = mb.conv(x=x, weight=WEIGHT, strides=[2, 2], pad_type="valid", name="y")
        y = mb.relu(x=y, name="v")
        return mb.reduce_mean(x=y, axes=[2, 3], name="out")

    return make(path, program, ct.target.iOS17, inputs=[ct.TensorType("x", shape=shape)], **options)


def test_ranges_are_those_of_what_the_inputs_allow(tmp_path):
    source = pictures(tmp_path / "source.mlpackage", (1, 3, ct.RangeDim(8, 64, 16), ct.RangeDim(10, 33)))
    _, parts = cut(source, ["v"], tmp_path)
    array = spec_of(parts[1]).description.input[0].type.multiArrayType
    assert [(each.lowerBound, each.upperBound) for each in array.shapeRange.sizeRanges] == [
        (1, 1), (4, 4), (3, 31), (4, 16)]
    assert list(array.shape) == [1, 4, 7, 4]
    assert list(spec_of(parts[0]).description.output[0].type.multiArrayType.shape) == []
    check_parts(source, parts)
    for size in ((8, 10), (64, 33), (17, 12), (63, 32)):
        feeds = draws(source, sizes={"x": (1, 3, *size)})
        whole = ane.run(source, feeds)
        made = chained(parts, feeds)
        same(whole, made)
        assert all(each.lowerBound <= found <= each.upperBound
                   for each, found in zip(array.shapeRange.sizeRanges, made["v"].shape, strict=True))


def test_listed_shapes_stay_listed(tmp_path):
    shapes = ct.EnumeratedShapes([(1, 3, 8, 8), (1, 3, 16, 24), (1, 3, 33, 9)], default=(1, 3, 16, 24))
    source = pictures(tmp_path / "source.mlpackage", shapes)
    _, parts = cut(source, ["v"], tmp_path)
    array = spec_of(parts[1]).description.input[0].type.multiArrayType
    assert [list(each.shape) for each in array.enumeratedShapes.shapes] == [
        [1, 4, 7, 11], [1, 4, 3, 3], [1, 4, 16, 4]]
    assert list(array.shape) == [1, 4, 7, 11]
    check_parts(source, parts)
    for shape in ((1, 3, 8, 8), (1, 3, 16, 24), (1, 3, 33, 9)):
        feeds = draws(source, sizes={"x": shape})
        same(ane.run(source, feeds), chained(parts, feeds))


def test_a_size_without_end_stays_without(tmp_path):
    source = pictures(tmp_path / "source.mlpackage", (1, 3, ct.RangeDim(8, 64), ct.RangeDim(8, 64)))
    spec = spec_of(source)
    spec.description.input[0].type.multiArrayType.shapeRange.sizeRanges[3].upperBound = -1
    write_spec(source, spec)
    _, parts = cut(source, ["v"], tmp_path)
    ranges = spec_of(parts[1]).description.input[0].type.multiArrayType.shapeRange.sizeRanges
    assert [(each.lowerBound, each.upperBound) for each in ranges[2:]] == [(3, 31), (3, -1)]


def test_flexible_images(tmp_path):
    source = pictures(tmp_path / "source.mlpackage", (1, 3, ct.RangeDim(8, 64), ct.RangeDim(8, 64)))
    spec = spec_of(source)
    image = spec.description.input[0].type.imageType
    image.width, image.height, image.colorSpace = 16, 16, image.ColorSpace.Value("RGB")
    for side, most in ((image.imageSizeRange.widthRange, 64), (image.imageSizeRange.heightRange, 32)):
        side.lowerBound, side.upperBound = 8, most
    write_spec(source, spec)
    _, parts = cut(source, ["v"], tmp_path)
    array = spec_of(parts[1]).description.input[0].type.multiArrayType
    assert list(array.shape) == [1, 4, 7, 7]
    assert [(each.lowerBound, each.upperBound) for each in array.shapeRange.sizeRanges[2:]] == [(3, 15), (3, 31)]


def test_lengths_that_go_together_and_a_second_flexible_input(tmp_path):
    """Tokens and their mask have one length: only shapes that fit together are tried."""
    length = get_new_symbol()

    @mb.program(input_specs=[mb.TensorSpec((1, length, 8)), mb.TensorSpec((1, length, 1))],
                opset_version=ct.target.iOS17)
    def program(x, mask):
        v = mb.mul(x=mb.sin(x=x), y=mask, name="v")
        return mb.softmax(x=mb.add(x=v, y=mask), axis=1, name="out")

    shape = ct.RangeDim(2, 40, 10)
    source = make(tmp_path / "source.mlpackage", program, ct.target.iOS17, inputs=[
        ct.TensorType("x", shape=(1, shape, 8)), ct.TensorType("mask", shape=(1, shape, 1))])
    _, parts = cut(source, ["v"], tmp_path)
    array = spec_of(parts[1]).description.input[1].type.multiArrayType
    assert [(each.lowerBound, each.upperBound) for each in array.shapeRange.sizeRanges] == [(1, 1), (2, 40), (8, 8)]
    assert list(array.shape) == [1, 10, 8]
    for size in (2, 40, 13):
        feeds = draws(source, sizes={"x": (1, size, 8), "mask": (1, size, 1)})
        same(ane.run(source, feeds), chained(parts, feeds))


@pytest.mark.parametrize("default", [-5, 2**62])
def test_sizes_that_no_description_can_have_are_refused(tmp_path, default):
    @mb.program(input_specs=[mb.TensorSpec((4, get_new_symbol()))])
    def program(x):
        return mb.relu(x=mb.concat(values=[x, x], axis=1, name="doubled"), name="out")

    shapes = [ct.TensorType("x", (4, ct.RangeDim(1, 64)))]
    source = make(tmp_path / "source.mlpackage", program, inputs=shapes)
    spec = spec_of(source)
    spec.description.input[0].type.multiArrayType.shape[1] = default
    write_spec(source, spec)
    with pytest.raises(ane.InputError, match="sizes of 'doubled' do not follow from the shapes of the inputs"):
        cut(source, ["doubled"], tmp_path)


def test_sizes_that_follow_from_values_are_refused(tmp_path):
    @mb.program(input_specs=[mb.TensorSpec((8,))])
    def program(x):
        found = mb.non_zero(x=mb.relu(x=x, name="y"), name="found")
        return mb.reduce_sum(x=mb.cast(x=found, dtype="fp32"), axes=[0], name="out")

    source = make(tmp_path / "source.mlpackage", program)
    with pytest.raises(ane.InputError, match=r"sizes of 'found' do not follow from .*nearby it can be cut at 'y'"):
        cut(source, ["found"], tmp_path)


def test_a_size_that_is_a_product_of_flexible_sizes(tmp_path):
    height, width = get_new_symbol(), get_new_symbol()

    @mb.program(input_specs=[mb.TensorSpec((1, 3, height, width))], opset_version=ct.target.iOS17)
    def program(x):
        y = mb.conv(x=x, weight=WEIGHT, pad_type="same", name="y")
        y = mb.flatten2d(x=mb.squeeze(x=y, axes=[0]), axis=1)
        return mb.softmax(x=mb.transpose(x=y, perm=[1, 0], name="v"), axis=0, name="out")

    source = make(tmp_path / "source.mlpackage", program, ct.target.iOS17,
                  inputs=[ct.TensorType("x", shape=(1, 3, ct.RangeDim(4, 16, 8), ct.RangeDim(2, 8)))])
    _, parts = cut(source, ["v"], tmp_path)
    array = spec_of(parts[1]).description.input[0].type.multiArrayType
    assert [(each.lowerBound, each.upperBound) for each in array.shapeRange.sizeRanges] == [(8, 128), (4, 4)]
    check_parts(source, parts)
    for size in ((4, 2), (16, 8), (7, 5)):
        feeds = draws(source, sizes={"x": (1, 3, *size)})
        same(ane.run(source, feeds), chained(parts, feeds))
