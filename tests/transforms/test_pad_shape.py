"""Flexible inputs padded to a maximum: results of real lengths are those of the source, or the op is named."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import get_new_symbol, types

import mil_ane_passes as ane
from mil_ane_passes.commands.main import main
from mil_ane_passes.equivalence.changed_interfaces import compare_across_interfaces
from mil_ane_passes.ir.clone import clone_program
from mil_ane_passes.transforms.contract import Draft, apply_transforms
from mil_ane_passes.transforms.pad_shape import PadShape
from mil_ane_passes.transforms.padding import Padding
from tests.package.helpers import host_program, make, normal, spec_of

LENGTH, WIDTH = 12, 4


def program_of(body, *, shape=(1, None, WIDTH), dtype=types.fp32, opset=ct.target.iOS18, more=()):
    """A program of `body` on an input x of flexible length, with further inputs and states."""
    size = get_new_symbol()
    given = [mb.TensorSpec(tuple(size if each is None else each for each in shape), dtype=dtype), *more]
    names = ["x", "y", "z"][:len(given)]
    scope: dict = {}
    exec(f"def call({', '.join(names)}): return body({', '.join(names)})", {"body": body}, scope)
    return mb.program(input_specs=given, opset_version=opset)(scope["call"])


def pad(program, sizes=None):
    """The padded draft, and the comparison with the source."""
    draft, = apply_transforms(Draft(clone_program(program), "a program"), [
        PadShape(sizes or {"x": (1, LENGTH, WIDTH)})])
    return draft, compare_across_interfaces(program, [draft])


def types_of(draft):
    return [op.op_type for op in draft.program.functions["main"].operations if op.op_type != "const"]


def attend(x, mask=None):
    scores = mb.matmul(x=x, y=x, transpose_y=True)
    if mask is not None:
        scores = mb.add(x=scores, y=mask)
    return mb.matmul(x=mb.softmax(x=scores, axis=-1), y=x, name="out")


def normalized(x):
    """Rows divided by their largest: of padding that is zeros, NaN."""
    return mb.real_div(x=x, y=mb.reduce_max(x=mb.abs(x=x), axes=[-1], keep_dims=True))


def last_row(x):
    return mb.slice_by_index(x=mb.exp(x=x), begin=[0, -1, 0], end=[1, 0, WIDTH], end_mask=[True, True, True],
                             squeeze_mask=[False, True, False], name="out")


def shifted_angles(x):
    """cos and sin of the place of each row, as rotary embeddings make them."""
    size = mb.gather(x=mb.shape(x=x), indices=1, axis=0)
    places = mb.cast(x=mb.range_1d(start=0, end=size, step=1), dtype="fp32")
    return mb.add(x=x, y=mb.expand_dims(x=mb.cos(x=places), axes=[1]), name="out")


def causal(x):
    """A causal mask made in the program."""
    size = mb.gather(x=mb.shape(x=x), indices=1, axis=0)
    places = mb.range_1d(start=0, end=size, step=1)
    later = mb.greater(x=mb.expand_dims(x=places, axes=[0]), y=mb.expand_dims(x=places, axes=[1]))
    return attend(x, mb.select(cond=later, a=np.float32(-1e4), b=np.float32(0)))


def nearness(x):
    """Rows of a table of five, by the distance of each row to the last one; behind the end it is below 0."""
    size = mb.gather(x=mb.shape(x=x), indices=1, axis=0)
    distance = mb.sub(x=mb.sub(x=size, y=1), y=mb.range_1d(start=0, end=size, step=1))
    near = mb.cast(x=mb.minimum(x=mb.mul(x=distance, y=3), y=np.int32(4)), dtype="uint16")
    return mb.add(x=x, y=mb.gather(x=normal(5, WIDTH), indices=near, axis=0, validate_indices=False), name="out")


def cut_off(x):
    """All rows but the last."""
    return mb.slice_by_index(x=x, begin=[0, 0, 0], end=[1, -1, WIDTH], begin_mask=[True] * 3,
                             end_mask=[True, False, True])


def last_element(x):
    return mb.slice_by_index(x=x, begin=[0, -1, 0], end=[1, 0, WIDTH], end_mask=[True] * 3)


def count_from_the_end(places, x):
    """Places along the first axes of x as coremltools 9.1 makes them, which may be below 0."""
    sizes = mb.slice_by_size(x=mb.shape(x=x), begin=[0], size=[int(places.shape[-1])])
    return mb.select(cond=mb.greater_equal(x=places, y=0), a=places, b=mb.add(x=places, y=sizes))


def place_of_largest(x):
    """The row with the largest sum, (1,)."""
    return mb.reduce_argmax(x=mb.reduce_sum(x=x, axes=[2]), axis=1, keep_dims=False)


SUPPORTED = {
    "elementwise": lambda x: mb.gelu(x=mb.add(x=x, y=1.0), name="out"),
    "linear": lambda x: mb.relu(x=mb.linear(x=x, weight=normal(3, WIDTH), bias=normal(3)), name="out"),
    "heads": lambda x: mb.reshape(x=mb.transpose(x=mb.reshape(x=x, shape=[1, -1, 2, 2]), perm=[0, 2, 1, 3]),
                                  shape=[1, 2, -1, 2], name="out"),
    "attention without a mask": attend,
    "attention of NaN in the padding": lambda x: attend(normalized(x)),
    "causal mask of its own": causal,
    "sum over rows": lambda x: mb.reduce_sum(x=mb.exp(x=x), axes=[1], name="out"),
    "mean over rows": lambda x: mb.reduce_mean(x=normalized(x), axes=[1, 2], name="out"),
    "largest of rows": lambda x: mb.reduce_max(x=mb.sub(x=mb.sigmoid(x=x), y=2.0), axes=[1], name="out"),
    "smallest of rows": lambda x: mb.reduce_min(x=mb.exp(x=x), axes=[1], keep_dims=True, name="out"),
    "norm over rows": lambda x: mb.reduce_l2_norm(x=mb.add(x=x, y=3.0), axes=[1], keep_dims=True, name="out"),
    "weighted sum": lambda x: mb.matmul(x=mb.sigmoid(x=x), y=mb.exp(x=x), transpose_x=True, name="out"),
    "last row": last_row,
    "first row": lambda x: mb.gather(x=x, indices=0, axis=1, name="out"),
    "angles": shifted_angles,
    "cumulative sum": lambda x: mb.cumsum(x=x, axis=1, name="out"),
    "reverse cumulative sum": lambda x: mb.cumsum(x=mb.exp(x=x), axis=1, reverse=True, name="out"),
    "conv": lambda x: mb.conv(x=mb.transpose(x=mb.exp(x=x), perm=[0, 2, 1]), weight=normal(5, WIDTH, 3),
                              pad_type="same", name="out"),
    "conv of single rows that is padded": lambda x: mb.conv(
        x=mb.transpose(x=mb.exp(x=x), perm=[0, 2, 1]), weight=normal(5, WIDTH, 1), pad_type="custom", pad=[1, 2],
        name="out"),
    "appended row": lambda x: mb.concat(values=[x, normal(1, 1, WIDTH)], axis=1, name="out"),
    "row appended behind NaN": lambda x: mb.reduce_sum(x=mb.concat(values=[normalized(x), normal(1, 1, WIDTH)], axis=1),
                                                       axes=[1], name="out"),
    "row in front": lambda x: mb.concat(values=[normal(1, 1, WIDTH), x], axis=1, name="out"),
    "stack": lambda x: mb.stack(values=[x, mb.exp(x=x)], axis=0, name="out"),
    "length as a result": lambda x: mb.mul(x=mb.cast(x=mb.gather(x=mb.shape(x=x), indices=1, axis=0), dtype="fp32"),
                                           y=mb.reduce_sum(x=x, axes=[0, 1, 2]), name="out"),
    "one length alone is treated otherwise": lambda x: mb.mul(x=x, y=mb.select(
        cond=mb.equal(x=mb.gather(x=mb.shape(x=x), indices=1, axis=0), y=5), a=np.float32(2), b=np.float32(1)),
        name="out"),
    "sum of all rows but the last": lambda x: mb.reduce_sum(x=cut_off(mb.exp(x=x)), axes=[1], name="out"),
    "mean of rows moved by one": lambda x: mb.reduce_mean(x=mb.concat(values=[normal(1, 1, WIDTH), cut_off(x)], axis=1),
                                                          axes=[1], name="out"),
    "sum without a last row that is infinite": lambda x: mb.reduce_sum(x=cut_off(mb.real_div(
        x=np.float32(1), y=mb.sub(x=x, y=last_element(x)))), axes=[1], name="out"),
    "place of the largest": lambda x: mb.cast(x=mb.reduce_argmax(x=mb.reduce_sum(x=mb.sub(
        x=mb.sigmoid(x=x), y=2.0), axes=[2]), axis=1, keep_dims=False), dtype="fp32", name="out"),
    "place of the smallest": lambda x: mb.cast(x=mb.reduce_argmin(x=mb.exp(x=x), axis=1, keep_dims=True),
                                               dtype="fp32", name="out"),
    "row of the largest": lambda x: mb.gather(x=x, indices=place_of_largest(x), axis=1, name="out"),
    "row of the largest by its indices": lambda x: mb.gather_nd(x=x, indices=mb.stack(values=[
        np.int32([0]), place_of_largest(x)], axis=1), name="out"),
    "row of the largest, places below 0 from the end": lambda x: mb.gather_nd(x=x, indices=count_from_the_end(
        mb.stack(values=[np.int32([0]), place_of_largest(x)], axis=1), x), name="out"),
    "a choice between scalars": lambda x: mb.reduce_sum(x=mb.mul(x=x, y=mb.select(
        cond=mb.greater(x=x, y=0.5), a=np.float32(2), b=np.float32(-3))), axes=[1], name="out"),
    "an additive mask of scalars": lambda x: attend(x, mb.select(
        cond=mb.greater(x=mb.matmul(x=x, y=x, transpose_y=True), y=0.0), a=np.float32(0), b=np.float32(-3e4))),
    "roots of sums of squares": lambda x: attend(mb.mul(x=x, y=mb.rsqrt(x=mb.add(x=mb.reduce_mean(
        x=mb.square(x=x), axes=[2], keep_dims=True), y=1e-6)))),
    "quotients of the largest magnitude": lambda x: attend(mb.real_div(x=x, y=mb.clip(x=mb.reduce_max(
        x=mb.abs(x=x), axes=[2], keep_dims=True), alpha=1e-3, beta=1e4))),
    "rows of a table by the distance to the end": nearness,
    "every second channel": lambda x: mb.reduce_sum(x=mb.slice_by_index(
        x=mb.exp(x=x), begin=[0, 0, 1], end=[1, 0, WIDTH], stride=[1, 1, 2], end_mask=[True] * 3), axes=[1],
        name="out"),
    "channels turned": lambda x: mb.reduce_sum(x=mb.slice_by_index(
        x=mb.exp(x=x), begin=[0, 0, 0], end=[1, 0, 0], stride=[1, 1, -1], begin_mask=[True] * 3, end_mask=[True] * 3),
        axes=[1], name="out"),
    "a constant in front and behind": lambda x: mb.reduce_sum(x=mb.pad(
        x=mb.exp(x=x), pad=[2, 1, 1, 0], mode="constant", constant_val=np.float32(2.5)), axes=[1], name="out"),
    "causal conv": lambda x: mb.conv(x=mb.pad(x=mb.transpose(x=mb.exp(x=x), perm=[0, 2, 1]), pad=[2, 0]),
                                     weight=normal(5, WIDTH, 3), pad_type="valid", name="out"),
    "reflected channels": lambda x: attend(mb.pad(x=x, pad=[1, 1], mode="reflect")),
    "rows from the second on": lambda x: mb.slice_by_index(
        x=mb.concat(values=[normal(1, 1, WIDTH), x], axis=1), begin=[0, 1, 0], end=[1, 0, WIDTH], end_mask=[True] * 3,
        name="out"),
}


@pytest.mark.parametrize(("square", "masked"), [
    (lambda x: mb.mul(x=x, y=x), False), (lambda x: mb.mul(x=x, y=mb.abs(x=x)), True)], ids=["squares", "signed"])
def test_norms_behind_many_residual_sums(square, masked):
    """Whether sums behind each other are positive is computed once for each: twice for each term would never end."""
    def body(x):
        for _ in range(40):
            x = mb.add(x=x, y=mb.tanh(x=x))
        mean = mb.add(x=mb.reduce_mean(x=square(x), axes=[-1], keep_dims=True), y=np.float32(1e-3))
        return attend(mb.mul(x=x, y=mb.rsqrt(x=mean)))

    draft, report = pad(program_of(body))
    assert report.equal, str(report)
    assert ("select" in types_of(draft)) == masked, "roots of what may be negative are not finite in the padding"


def test_zeros_behind_rows_moved_by_one_are_those_of_the_source():
    _, report = pad(program_of(lambda x: mb.reduce_sum(x=mb.mul(x=x, y=mb.pad(
        x=cut_off(normalized(x)), pad=[0, 1, 0, 0])), axes=[1], name="out")), {"x": (1, (2, LENGTH), WIDTH)})
    assert report.equal, str(report)


def test_a_length_at_which_the_source_cannot_run_is_named():
    body = lambda x: mb.concat(values=[x, mb.pad(x=cut_off(x), pad=[0, 1, 0, 0])], axis=2, name="out")  # noqa: E731
    with pytest.raises(ane.InputError, match=r"with x = 1,1,4 the op 'out' \(concat\) is impossible.*; expected real "
                                             r"sizes that go together: give the smallest as well"):
        pad(program_of(body))
    assert pad(program_of(body), {"x": (1, (2, LENGTH), WIDTH)})[1].equal


def test_inputs_of_independent_lengths_are_refused():
    """One length would be taken for both; inputs that are joined have one length."""
    def tower(x):
        return mb.reduce_mean(x=attend(x), axes=[1])

    other = mb.TensorSpec((1, get_new_symbol(), WIDTH), dtype=types.fp32)
    sizes = {name: (1, LENGTH, WIDTH) for name in ("x", "y")}
    with pytest.raises(ane.InputError, match="'y' can have another length than 'x'; expected inputs of one length"):
        pad(program_of(lambda x, y: mb.mul(x=tower(x), y=tower(y), name="out"), more=[other]), sizes)
    joined = program_of(lambda x, y: mb.identity(x=tower(mb.add(x=x, y=y)), name="out"), more=[other])
    assert pad(joined, sizes)[1].equal


def rows_of(y):
    return mb.gather(x=mb.shape(x=y), indices=1, axis=0)


FORMS_OF_READING = {
    "the first elements": (True, lambda mask, y: mb.slice_by_index(x=mask, begin=[0, 0], end=mb.concat(
        values=[[1], mb.expand_dims(x=rows_of(y), axes=[0])], axis=0))),
    "at positions": (True, lambda mask, y: mb.gather(x=mask, indices=mb.range_1d(
        start=0, end=rows_of(y), step=1), axis=1)),
    "the first elements of a view": (True, lambda mask, y: mb.squeeze(x=mb.slice_by_index(
        x=mb.expand_dims(x=mb.sub(x=1.0, y=mask), axes=[0]), begin=[0, 0, 0], end=mb.concat(
            values=[[1, 1], mb.expand_dims(x=rows_of(y), axes=[0])], axis=0)), axes=[0])),
    "the last elements": (False, lambda mask, y: mb.slice_by_index(
        x=mask, begin=mb.concat(values=[[0], mb.expand_dims(x=mb.mul(x=rows_of(y), y=-1), axes=[0])], axis=0),
        end=[1, 0], end_mask=[False, True])),
    "behind the first": (False, lambda mask, y: mb.slice_by_index(x=mask, begin=mb.concat(
        values=[[0], mb.expand_dims(x=mb.sub(x=rows_of(mask), y=rows_of(y)), axes=[0])], axis=0),
        end=[1, 0], end_mask=[True, True])),
    "their sum": (False, lambda mask, y: mb.reduce_sum(x=mask, axes=[1], keep_dims=True)),
    "their number": (False, lambda mask, y: mb.mul(x=mb.cast(x=rows_of(mask), dtype="fp32"), y=mb.gather(
        x=mask, indices=mb.range_1d(start=0, end=rows_of(y), step=1), axis=1))),
}


@pytest.mark.parametrize("form", FORMS_OF_READING)
def test_an_input_of_which_elements_are_cut_off_has_the_length_of_the_others(form):
    """A mask may be longer than the tokens if nothing depends on its further elements."""
    fits, read = FORMS_OF_READING[form]
    program = program_of(lambda x, y: mb.mul(
        x=mb.tanh(x=y), y=mb.expand_dims(x=read(x, y), axes=[2]), name="out"),
        shape=(1, None), more=[mb.TensorSpec((1, get_new_symbol(), WIDTH), dtype=types.fp32)])
    sizes = {"x": (1, LENGTH), "y": (1, LENGTH, WIDTH)}
    if fits:
        _, report = pad(program, sizes)
        assert report.equal, str(report)
    else:
        with pytest.raises(ane.InputError, match="'y' can have another length than 'x'; expected inputs of one length"):
            pad(program, sizes)


@pytest.mark.parametrize("filled", [0.0, -4.0])
@pytest.mark.parametrize("kind", ["max", "argmax"])
def test_a_wrong_padding_of_extremes_is_found(monkeypatch, kind, filled):
    """Normal draws hardly contain a channel whose elements are all smaller than the padding."""
    def body(x):
        if kind == "max":
            return mb.reduce_max(x=x, axes=[1], name="out")
        return mb.cast(x=mb.reduce_argmax(x=x, axis=1, keep_dims=False), dtype="int32", name="out")

    host = Padding._fill_padding
    assert pad(program_of(body), {"x": (1, (2, LENGTH), WIDTH)})[1].equal
    monkeypatch.setattr(Padding, "_fill_padding",
                        lambda self, op, x, axis, value: host(self, op, x, axis, type(value)(filled)))
    assert not pad(program_of(body), {"x": (1, (2, LENGTH), WIDTH)})[1].equal


def test_a_mask_that_is_gathered_shows_a_key():
    """An integer mask is recognized behind a gather: feeds that hide all keys have no result to compare."""
    def body(x, y):
        places = mb.range_1d(start=0, end=rows_of(y), step=1)
        shown = mb.cast(x=mb.gather(x=x, indices=places, axis=1), dtype="fp32")
        return attend(y, mb.expand_dims(x=mb.mul(x=mb.sub(x=1.0, y=shown), y=-1e4), axes=[1]))

    program = program_of(body, shape=(1, None), dtype=types.int32,
                         more=[mb.TensorSpec((1, get_new_symbol(), WIDTH), dtype=types.fp32)])
    _, report = pad(program, {"x": (1, LENGTH), "y": (1, LENGTH, WIDTH)})
    assert report.equal, str(report)


FORMS_OF_PLACES = {
    "each": lambda count, places: places,
    "from the end": lambda count, places: mb.sub(x=mb.sub(x=count, y=1), y=places),
    "the next, around": lambda count, places: mb.mod(x=mb.add(x=places, y=1), y=count),
    "the next": lambda count, places: mb.minimum(x=mb.add(x=places, y=1), y=mb.sub(x=count, y=1)),
    "each twice": lambda count, places: mb.floor_div(x=places, y=2),
}


@pytest.mark.parametrize("form", FORMS_OF_PLACES)
def test_rows_are_read_at_known_places(form):
    """Places of real rows at each length: rows behind the real ones do not matter."""
    _, report = pad(program_of(lambda x: mb.gather(x=mb.exp(x=x), indices=FORMS_OF_PLACES[form](
        rows_of(x), mb.range_1d(start=0, end=rows_of(x), step=1)), axis=1, name="out")), {"x": (1, (3, LENGTH), WIDTH)})
    assert report.equal, str(report)


@pytest.mark.parametrize("places, fits", [([0, 2, 1], True), ([0, 3, 1], False), ([0, -1], False)])
def test_rows_that_each_length_has_can_be_read(places, fits):
    program = program_of(lambda x: mb.gather(x=mb.exp(x=x), indices=np.int32(places), axis=1, name="out"))
    if fits:
        assert pad(program, {"x": (1, (3, LENGTH), WIDTH)})[1].equal
    else:
        with pytest.raises(ane.InputError, match="'out' .gather. cannot be padded: it reads a padded axis at po"):
            pad(program, {"x": (1, (3, LENGTH), WIDTH)})


def test_features_before_a_softmax_are_no_mask():
    """Attention pooling: the padding of features is 0, as they are also multiplied with weights."""
    def body(x):
        first = mb.slice_by_index(x=x, begin=[0, 0, 0], end=[1, 0, 1], end_mask=[False, True, False])
        weights = mb.softmax(x=first, axis=1)
        rows = mb.linear(x=x, weight=normal(WIDTH, WIDTH))
        return mb.reduce_sum(x=mb.mul(x=weights, y=rows), axes=[1], name="out")

    draft, report = pad(program_of(body))
    assert report.equal, str(report)
    assert any("padded to (1, 12, 4) with 0 after" in each.note for each in draft.done), draft.done


def test_differences_of_neighbours_are_those_of_the_source():
    def body(x):
        later = mb.slice_by_index(x=x, begin=[0, 1, 0], end=[1, 0, WIDTH], end_mask=[True] * 3)
        return mb.reduce_mean(x=mb.sub(x=later, y=cut_off(x)), axes=[1], name="out")

    _, report = pad(program_of(body), {"x": (1, (3, LENGTH), WIDTH)})
    assert report.equal, str(report)


@pytest.mark.parametrize("name", SUPPORTED)
def test_real_parts_are_those_of_the_source_at_all_lengths(name):
    draft, report = pad(program_of(SUPPORTED[name]))
    assert report.equal, str(report)
    assert len(report.cases) >= 6
    function = draft.program.functions["main"]
    assert tuple(function.inputs["x"].shape) == (1, LENGTH, WIDTH)
    assert "shape" not in types_of(draft)


def looked_up(ids, table=None):
    """Rows of the kinds of tokens, where a kind is read from a row of kinds at a place: RoBERTa's."""
    kinds = mb.gather_along_axis(x=np.arange(9, dtype=np.int32)[None] % 3 if table is None else table, indices=ids,
                                 axis=1)
    return mb.gather(x=normal(3, WIDTH), indices=kinds, axis=0, name="out")


@pytest.mark.parametrize(("table", "op"), [
    (normal(9, WIDTH), "mul"), (normal(9, WIDTH) * np.float16(np.inf), "select")], ids=["finite", "infinite"])
def test_rows_of_a_table_that_a_slice_cuts_off_are_finite_if_it_is(table, op):
    def body(x):
        rows = mb.gather(x=table, indices=x, axis=0)
        return mb.reduce_sum(x=cut_off(rows), axes=[1], name="out")

    draft, report = pad(program_of(body, shape=(1, None), dtype=types.int32), {"x": (1, LENGTH)})
    assert op in types_of(draft) and {"mul": "select", "select": "mul"}[op] not in types_of(draft)
    assert report.equal or op == "select", str(report)


def test_places_along_an_axis_of_a_table_are_looked_up():
    draft, report = pad(program_of(looked_up, shape=(1, None), dtype=types.int32), {"x": (1, LENGTH)})
    assert report.equal, str(report)
    assert tuple(draft.program.functions["main"].outputs[0].shape) == (1, LENGTH, WIDTH)


def test_places_along_a_padded_axis_are_not_known_to_be_real():
    with pytest.raises(ane.InputError, match="it reads a padded axis at positions that may be in the padding"):
        pad(program_of(lambda x: looked_up(x, mb.minimum(x=x, y=2)), shape=(1, None), dtype=types.int32),
            {"x": (1, LENGTH)})


def masked(x, mask, *, shift=0):
    """Attention whose mask of ones and zeros is spread over queries by indices, as transformers does it."""
    size = mb.gather(x=mb.shape(x=mask), indices=1, axis=0)
    places = mb.add(x=mb.range_1d(start=0, end=mb.sub(x=size, y=shift), step=1), y=shift)
    indices = mb.stack(values=[mb.mul(x=places, y=0), places], axis=1)
    seen = mb.cast(x=mb.gather_nd(x=mask, indices=indices), dtype="bool")
    return attend(x, mb.select(cond=seen, a=np.float32(0), b=np.float32(-3e4)))


def test_a_mask_that_is_read_at_each_place_hides_the_padding_without_a_length():
    size = get_new_symbol()
    program = program_of(masked, shape=(1, size, WIDTH), more=[mb.TensorSpec((1, size), dtype=types.int32)])
    draft, report = pad(program, {"x": (1, LENGTH, WIDTH), "y": (1, LENGTH)})
    assert report.equal, str(report)
    assert list(draft.program.functions["main"].inputs) == ["x", "y"]


def test_an_extreme_of_ones_and_zeros_needs_no_mask():
    draft, report = pad(program_of(lambda x: mb.reduce_max(x=mb.cast(x=mb.cast(x=x, dtype="bool"), dtype="fp32"),
                                                           axes=[1], name="out")))
    assert report.equal, str(report)
    assert list(draft.program.functions["main"].inputs) == ["x"]


REFUSED = {
    "infinities behind rows": (lambda x: mb.pad(x=x, pad=[0, 1, 0, 0], constant_val=np.float32(-np.inf), name="out"),
                               "(mode 'constant'); expected a finite constant"),
    "reflected rows": (lambda x: mb.pad(x=x, pad=[1, 0, 0, 0], mode="reflect", name="out"),
                       "(pad) cannot be padded: it pads the padded axis 1 with values that it reads (mode 'reflect')"),
    "product over rows": (lambda x: mb.reduce_prod(x=x, axes=[1], name="out"),
                          "'out' (reduce_prod) cannot be padded: it reduces the padded axis 1"),
    "layer norm over rows": (lambda x: mb.layer_norm(x=x, axes=[1, 2], name="out"),
                             "'out' (layer_norm) cannot be padded: it normalizes over the padded axes [1]"),
    "merged axes": (lambda x: mb.reshape(x=mb.transpose(x=x, perm=[0, 2, 1]), shape=[-1], name="out"),
                    "at successive lengths"),
    "strided rows": (lambda x: mb.slice_by_index(x=x, begin=[0, 0, 0], end=[1, 0, WIDTH], stride=[1, 2, 1],
                                                 end_mask=[True, True, True], name="out"),
                     "at successive lengths"),
    "last row with a stride along channels": (lambda x: mb.slice_by_index(
        x=x, begin=[0, -1, 0], end=[1, 0, WIDTH], stride=[1, 1, 2], end_mask=[True, True, True], name="out"),
        "cannot be padded: it reads at a position that moves with the length, with a stride along another axis"),
    "first row with a stride": (lambda x: mb.slice_by_index(
        x=x, begin=[0, 0, 0], end=[1, 1, WIDTH], stride=[1, 3, 1], name="out"), "with a stride along axis 1, which is"),
    "rows turned": (lambda x: mb.reverse(x=x, axes=[1], name="out"), "(reverse) cannot be padded: it has no rule"),
    "a row behind repeated rows": (lambda x: mb.concat(values=[mb.tile(x=x, reps=[1, 2, 1]), normal(1, 1, WIDTH)],
                                                       axis=1, name="out"), "elements at successive lengths"),
    "the number of every second row": (lambda x: mb.cast(x=mb.gather(x=mb.shape(x=mb.slice_by_index(
        x=x, begin=[0, 1, 0], end=[1, 0, WIDTH], stride=[1, 2, 1], end_mask=[True] * 3, name="half")), indices=1,
        axis=0), dtype="fp32", name="out"), "(shape) cannot be padded: a size of 'half' is not the length of the"),
    "repeated rows": (lambda x: mb.tile(x=x, reps=[1, 2, 1], name="out"), "elements at successive lengths"),
    "sorted rows": (lambda x: mb.topk(x=x, k=1, axis=1)[0], "(topk) cannot be padded"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_op_that_cannot_be_padded_is_named(name):
    body, reason = REFUSED[name]
    with pytest.raises(ane.InputError, match="pad") as refusal:
        pad(program_of(body))
    assert reason in str(refusal.value), str(refusal.value)


@pytest.mark.parametrize(("broken", "name"), [
    ("_clear", "sum over rows"), ("_hide", "attention without a mask"), ("_clear_product", "weighted sum"),
    ("_scale_mean", "mean over rows"), ("_fill_padding", "largest of rows")])
def test_a_mask_that_is_left_out_is_found_by_the_comparison(monkeypatch, broken, name):
    """Without the mask, what is in the padding gets into the results: the check must see that."""
    without = {"_clear": lambda self, op, var, axis: var, "_hide": lambda self, op, x, axis: x,
               "_clear_product": lambda self, op, x, y, inner: (x, y), "_scale_mean": lambda self, op, x, axis: x,
               "_fill_padding": lambda self, op, x, axis, value: x}
    monkeypatch.setattr(Padding, broken, without[broken])
    assert pad(program_of(SUPPORTED[name]))[1].status == "different"


def cached(x, cache, *, width=3):
    """Rows of x are written to the state at the place that the length of the mask y states, and all are read."""
    def body(x, y, cache):
        end = mb.gather(x=mb.shape(x=y), indices=1, axis=0)
        place = mb.concat(values=[np.int32([0]), mb.expand_dims(x=mb.sub(x=end, y=2), axes=[0]), np.int32([0])], axis=0)
        behind = mb.concat(values=[np.int32([1]), mb.expand_dims(x=end, axes=[0]), np.int32([width])], axis=0)
        held = mb.slice_update(x=mb.read_state(input=cache), update=x, begin=place, end=behind)
        stored = mb.coreml_update_state(state=cache, value=held)
        keys = mb.slice_by_index(x=stored, begin=[0, 0, 0], end=behind)
        scores = mb.add(x=mb.matmul(x=x, y=keys, transpose_y=True), y=mb.expand_dims(x=y, axes=[1]))
        return mb.matmul(x=mb.softmax(x=scores, axis=-1), y=keys, name="out")
    return body


def cache_program(end=None, **options):
    size = get_new_symbol() if end is None else end

    @mb.program(input_specs=[mb.TensorSpec((1, 2, 3), dtype=types.fp16), mb.TensorSpec((1, size), dtype=types.fp16),
                             mb.StateTensorSpec((1, LENGTH, 3), dtype=types.fp16)], opset_version=ct.target.iOS18)
    def program(x, y, cache):
        return cached(x, cache, **options)(x, y, cache)

    return program


SIZES = {"y": (1, (2, LENGTH))}


def test_the_length_of_a_mask_becomes_a_position_and_rows_are_blended_into_the_state():
    program = cache_program()
    draft, report = pad(program, SIZES)
    assert report.equal, str(report)
    labels = [case.feeds for case in report.cases]
    assert {f"seed {seed}, step {step}" for seed in range(2) for step in range(3)} == set(labels)
    function = draft.program.functions["main"]
    assert list(function.inputs) == ["x", "y", "cache", "position"]
    assert {"slice_update", "slice_by_index", "gather", "shape"}.isdisjoint(types_of(draft))
    mapping = draft.interfaces["main"]
    feeds = {"x": np.zeros((1, 2, 3), np.float16), "y": np.zeros((1, 7), np.float16)}
    made = mapping.map_feeds(feeds)
    assert made["position"].tolist() == [5] and made["y"].shape == (1, LENGTH)
    assert made["y"][0, 6] == 0 and made["y"][0, 7] == -40000
    assert mapping.round_feeds(feeds)["y"].shape == (1, 7)


def test_a_state_keeps_its_bits_where_nothing_is_written():
    program = cache_program()
    draft, _ = pad(program, SIZES)
    rng = np.random.default_rng(0)
    state = {"cache": rng.standard_normal((1, LENGTH, 3)).astype(np.float16)}
    feeds = {"x": rng.standard_normal((1, 2, 3)).astype(np.float16), "y": np.zeros((1, 6), np.float16)}
    other = {"cache": state["cache"].copy()}
    ane.run(program, feeds, state=state, precision="float16")
    ane.run(draft.program, draft.interfaces["main"].map_feeds(feeds), state=other, precision="float16")
    assert state["cache"].tobytes() == other["cache"].tobytes()


def test_functions_that_share_a_state_are_padded_both(tmp_path):
    program = cache_program()
    program.functions["other"] = clone_program(program).functions["main"]
    draft, report = pad(program, SIZES)
    assert report.equal and {case.function for case in report.cases} == {"main", "other"}
    draft, = apply_transforms(Draft(clone_program(program), "a program"), [PadShape(SIZES, "other")])
    assert "position" in draft.program.functions["other"].inputs
    assert "position" not in draft.program.functions["main"].inputs


def test_a_flexible_batch_has_to_be_named_as_well():
    batch, length = get_new_symbol(), get_new_symbol()

    @mb.program(input_specs=[mb.TensorSpec((batch, length)), mb.TensorSpec((batch, 3))])
    def program(x, y):
        return mb.matmul(x=mb.softmax(x=x, axis=-1), y=mb.exp(x=x), transpose_y=True), mb.relu(x=y)

    with pytest.raises(ane.InputError, match="'y' is flexible as well"):
        pad(program, {"x": (2, 9)})
    draft, report = pad(program, {"x": ((2, 2), 9), "y": ((2, 2), 3)})
    assert report.equal, str(report)


def test_nested_blocks_that_read_padded_values_are_named():
    def body(x):
        first = mb.reduce_sum(x=mb.slice_by_index(x=x, begin=[0, 0, 0], end=[1, 1, 1]))
        return mb.cond(pred=mb.greater(x=first, y=0.0), _true_fn=lambda: mb.exp(x=x),
                       _false_fn=lambda: mb.relu(x=x), name="out")

    def summing(x, y):
        return mb.cond(pred=mb.greater(x=mb.reduce_sum(x=y), y=0.0), _true_fn=lambda: mb.reduce_sum(x=x, axes=[1]),
                       _false_fn=lambda: mb.reduce_max(x=x, axes=[1]), name="out")

    for program in (program_of(body), program_of(summing, more=[mb.TensorSpec((1,))])):
        with pytest.raises(ane.InputError, match="'out' .cond. cannot be padded: a block"):
            pad(program)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("pad") / "source.mlpackage"
    length = ct.RangeDim(2, 40, default=3)
    return make(path, program_of(SUPPORTED["sum over rows"]), ct.target.iOS18, pass_pipeline=ct.PassPipeline.EMPTY,
                inputs=[ct.TensorType("x", shape=(1, length, WIDTH))])


def test_the_command_writes_a_package_of_fixed_shape(source, tmp_path, capsys):
    target = tmp_path / "out.mlpackage"
    assert main(["edit", str(source), "-o", str(target), "--pad-shape", "x=1,12,4", "--verify"]) == 0
    said = capsys.readouterr().out
    assert "'x' is padded to (1, 12, 4) with 0 after the real values" in said
    assert "input 'length' is new: the number of elements that are real (int32)" in said
    host_program(target)
    features = {each.name: each.type.multiArrayType for each in spec_of(target).description.input}
    assert list(features["x"].shape) == [1, 12, 4] and not features["x"].HasField("shapeRange")
    assert list(features["length"].shape) == [1]
    real = normal(1, 5, WIDTH)
    expected = ane.run(source, {"x": real})["out"]
    padded = np.pad(real, ((0, 0), (0, 7), (0, 0)), constant_values=3)
    found = ane.run(target, {"x": padded, "length": np.int32([5])})["out"]
    assert np.allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize(("given", "reason"), [
    ("x=1,50,4", "'x' cannot have 2..50 elements along axis 1; expected 2 to 40"),
    ("x=1,1..9,4", "'x' cannot have 1..9 elements along axis 1; expected 2 to 40"),
    ("x=1,12,5", "'x' cannot have 5 elements along axis 2; expected 4"),
    ("x=1,12", "2 sizes for 'x', which has 3 dimensions"),
    ("y=1,12,4", "no input 'y'; the model has x"),
    ("x", "found 'x'; expected NAME=1,1,1,1024 or"),
    ("x=1,a,4", "'x' has the size 'a'; expected a whole number of 1 or more, or a range such as 2..64"),
    ("x=1,9..3,4", "'x' has the size '9..3'"),
])
def test_sizes_that_do_not_fit_are_explained(source, tmp_path, capsys, given, reason):
    assert main(["edit", str(source), "-o", str(tmp_path / "out.mlpackage"), "--pad-shape", given]) == 2
    assert reason in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_size_that_is_fixed_leaves_nothing_to_pad(source, tmp_path):
    fixed = tmp_path / "fixed.mlpackage"
    ane.edit(source, fixed, fix_shape={"x": (1, 9, 4)})
    report = ane.edit(fixed, dry_run=True, pad_shape={"x": (1, 9, 4)})
    assert not report.changed and "nothing to pad" in str(report)


def test_enumerated_shapes_are_refused_with_the_alternative(tmp_path):
    shapes = ct.EnumeratedShapes([(1, 4, WIDTH), (1, 8, WIDTH)])
    path = make(tmp_path / "listed.mlpackage", program_of(SUPPORTED["elementwise"]), ct.target.iOS18,
                inputs=[ct.TensorType("x", shape=shapes)], pass_pipeline=ct.PassPipeline.EMPTY)
    with pytest.raises(ane.InputError, match="list of shapes; expected a range.*fix.shape"):
        ane.edit(path, dry_run=True, pad_shape={"x": (1, 8, WIDTH)})


def layered_cache(form):
    """A cache of two layers; in each, two rows, or one without its axis, are written at a position and read again."""
    size = get_new_symbol()
    shape, rows = {"rank 5": ((2, 1, 2, LENGTH, 3), 2), "rank 4": ((2, 2, LENGTH, 3), 2), "channels": (
        (1, 4, LENGTH, 3), 2), "one row": ((2, 2, LENGTH, 3), 1), "one layer": ((1, 1, 2, LENGTH, 3), 2),
                   "one row of all": ((1, 2, LENGTH, 3), 1)}[form]
    layer_axis, dropped = (1, []) if form == "channels" else (0, [0] if form != "rank 4" else [])
    place = len(shape) - 2
    dropped = {"one row": [0, place], "one row of all": [place]}.get(form, dropped)
    flags = [axis in dropped for axis in range(len(shape))]

    @mb.program(input_specs=[mb.TensorSpec((1, 2, rows, 3), dtype=types.fp16), mb.TensorSpec((1, size),
                                                                                             dtype=types.fp16),
                             mb.StateTensorSpec(shape, dtype=types.fp16)], opset_version=ct.target.iOS18)
    def program(x, y, cache):
        end = mb.gather(x=mb.shape(x=y), indices=np.int32([1]), axis=0)
        held = mb.read_state(input=cache)
        for layer in range(shape[layer_axis] // (2 if form == "channels" else 1)):
            begin, until = [0] * len(shape), list(shape)
            begin[layer_axis], until[layer_axis] = (2 * layer, 2 * layer + 2) if form == "channels" else (
                layer, layer + 1)
            window = [mb.concat(values=[np.int32(part[:place]), at, np.int32(part[place + 1:])], axis=0)
                      for part, at in ((begin, mb.sub(x=end, y=np.int32([rows]))), (until, end))]
            new = mb.mul(x=x, y=np.float16(layer + 1))
            new = mb.squeeze(x=new, axes=dropped) if place in dropped else new
            held = mb.slice_update(x=held, update=new, begin=window[0], end=window[1], squeeze_mask=flags)
            held = mb.coreml_update_state(state=cache, value=held)
            read = mb.slice_by_index(x=held, begin=begin, end=window[1])
            total = mb.reduce_sum(x=read, axes=[place], keep_dims=True)
            x = mb.add(x=x, y=mb.reshape(x=total, shape=(1, -1, 1, 3)))
        return mb.identity(x=x, name="out")

    return program


@pytest.mark.parametrize("form", ["rank 5", "rank 4", "channels", "one row", "one layer", "one row of all"])
def test_rows_of_one_layer_of_a_cache_are_written_at_a_position(form):
    draft, report = pad(layered_cache(form), {"y": (1, (2, LENGTH))})
    assert report.equal, str(report)
    assert "position" in draft.program.functions["main"].inputs
