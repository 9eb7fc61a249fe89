"""ANE207 to ANE210: ranges, one-hot vectors, bands and places of non-zero elements, from constants."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types
from hypothesis import given
from hypothesis import strategies as st

from mil_ane_passes.passes.engine import apply_rewrite, find_matches
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.runtime import Runtime
from tests.conversions import convert_model
from tests.rewrites.helpers import configure_rewrite, kinds, only_output, unsupported_ops
from tests.rewrites.spellings import WAYS, converted, outputs, spelt, truth


def misses(name, built, **options):
    return [near.reason for near in find_matches(configure_rewrite(name, **options), built).near_misses]


def flexible(function, passes, shape=(4, 4), low=1, high=64, target=ct.target.iOS17):
    """`function` as traced and converted for any size from `low` to `high` of both axes."""
    return convert_model(spelt(function), torch.zeros(shape), names="x", passes=passes,
                         shapes=[tuple(ct.RangeDim(low, high) for _ in shape)],
                         minimum_deployment_target=target)._mil_program


def drawn(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


class TestRange:
    SPELLINGS = {
        "added": lambda x: x + torch.arange(x.shape[-1]),
        "scaled": lambda x: x * (torch.arange(x.shape[1]).float() / 8).unsqueeze(0),
        "rows": lambda x: x - torch.arange(x.shape[0])[:, None],
    }

    @pytest.mark.parametrize("target", [ct.target.iOS15, ct.target.iOS16, ct.target.iOS17, ct.target.iOS18])
    @pytest.mark.parametrize("spelling", SPELLINGS)
    def test_the_seeds_complaint_torch_arange_at_flexible_shapes(self, spelling, target):
        function = self.SPELLINGS[spelling]
        assert "range_1d" in unsupported_ops(flexible(function, "last_axis_slice", target=target))
        built = flexible(function, "constant_range{longest=64}", target=target)
        assert not unsupported_ops(built) and not {"range_1d", "shape", "gather"} & set(kinds(built))
        for shape in ((1, 1), (3, 64), (64, 5)):
            x = drawn(shape)
            np.testing.assert_allclose(outputs(built, x, "float64"), truth(function, x), rtol=0, atol=1e-12)

    def test_the_seeds_complaint_torch_arange_at_fixed_shapes(self):
        built = build_program(lambda x: mb.add(x=x, y=mb.range_1d(start=np.float16(0), end=np.float16(7),
                                                                  step=np.float16(1)), name="y"), x=(2, 7))
        assert unsupported_ops(built) == ["range_1d"]
        assert apply_rewrite(configure_rewrite("constant_range"), built).fired and not unsupported_ops(built)
        x = drawn((2, 7)).astype(np.float16)
        right = (torch.from_numpy(x) + torch.arange(7).half()).numpy()
        np.testing.assert_array_equal(only_output(built, x, "float16"), right)

    @pytest.mark.law
    @given(st.integers(-60, 60), st.integers(-60, 60), st.sampled_from([-3, -1, 1, 2, 7]), st.booleans())
    def test_law_known_ranges_are_those_of_torch(self, start, end, step, whole):
        count = len(range(start, end, step))
        kind = np.int32 if whole else np.float16
        built = build_program(lambda x: [mb.relu(x=x), mb.identity(
            x=mb.range_1d(start=kind(start), end=kind(end), step=kind(step)), name="y")], x=(2,))
        trace = apply_rewrite(configure_rewrite("constant_range"), built)
        assert bool(trace.fired) is (count > 0)
        if count:
            found = Runtime(built, precision="float16")({"x": np.zeros(2, np.float16)})["y"]
            np.testing.assert_array_equal(found, torch.arange(start, end, step).numpy())
            assert found.dtype == kind and "range_1d" not in kinds(built)

    def test_positions_of_integer_tokens_leave_one_cast_at_the_edge(self):
        """What a language model makes of its ids; a fill of that size, too."""
        def body(ids):
            length = mb.gather(x=mb.shape(x=ids), indices=np.array([1], np.int32), axis=0)
            counted = mb.range_1d(start=np.int32(0), end=mb.squeeze(x=length), step=np.int32(1))
            ones = mb.fill(shape=mb.concat(values=[np.array([2], np.int32), length], axis=0), value=np.float16(3))
            return [mb.cast(x=counted, dtype="fp16", name="places"), mb.identity(x=ones, name="ones")]

        built = build_program(body, dtype=types.int32, ids=(1, None))
        assert (
            apply_rewrite(configure_rewrite("constant_range", longest=32), built).fired
            and apply_rewrite(configure_rewrite("constant_fill"), built).fired
        )
        assert set(unsupported_ops(built)) == {"cast"}
        found = Runtime(built, precision="float16")({"ids": np.full((1, 7), -5, np.int32)})
        np.testing.assert_array_equal(found["places"], torch.arange(7).numpy())
        np.testing.assert_array_equal(found["ones"], torch.full((2, 7), 3.0).numpy())

    def test_what_it_does_not_reach(self):
        def after(function):
            def body(x):
                size = mb.gather(x=mb.shape(x=x), indices=np.int32(1), axis=0)
                return [mb.relu(x=x), mb.identity(x=function(size), name="y")]

            return build_program(body, x=(2, None))

        one = {"start": np.int32(0), "step": np.int32(1)}
        assert misses("constant_range", after(lambda n: mb.range_1d(end=n, **one)), longest=9) == [
            "its numbers are read as integers, which are unsupported on the ANE"]
        assert misses("constant_range", after(lambda n: mb.range_1d(end=mb.add(x=n, y=1), **one)), longest=9) == [
            "its end is computed, but not the length of an axis"]
        assert misses("constant_range", after(lambda n: mb.range_1d(
            start=np.int32(2), end=n, step=np.int32(1))), longest=9) == [
            "from 2 in steps of 1 to a dynamic length; only a range from 0 with step 1 can be sliced from a constant"]
        assert misses("constant_range", after(lambda n: mb.range_1d(start=n, end=np.int32(9), step=np.int32(1)))) == [
            "its start or step is dynamic"]


class TestOneHot:
    @pytest.mark.parametrize("way", WAYS)
    def test_it_is_found_as_torch_spells_it(self, way, tmp_path):
        def function(x):
            return torch.nn.functional.one_hot(x.argmax(-1), 8).to(x.dtype) * x

        shape = (2, 3, 8)
        built = converted(function, way, tmp_path, shape=shape, passes="one_hot_compare")
        assert not kinds(built)["one_hot"]
        if way != "decomposed":  # there torch compares the indices as integers
            assert unsupported_ops(built) == ["reduce_argmax", "cast"]  # what makes the indices, and their cast
        x = drawn(shape).astype(np.float16).astype(np.float32)
        np.testing.assert_array_equal(outputs(built, x, "float16"), truth(function, x))

    @pytest.mark.law
    @given(st.lists(st.integers(1, 4), max_size=4), st.integers(1, 40), st.data())
    def test_law_any_indices(self, shape, size, data):
        """Those outside the vector, too: none of its places is hot."""
        axis = data.draw(st.integers(-len(shape) - 1, len(shape)))
        on, off = data.draw(st.tuples(st.integers(-9, 9), st.integers(-9, 9)).filter(lambda pair: pair[0] != pair[1]))
        built = build_program(lambda ids: mb.one_hot(
            indices=ids if shape else mb.squeeze(x=ids), one_hot_vector_size=size, axis=axis, name="y",
            on_value=np.float16(on), off_value=np.float16(off)), dtype=types.int32, ids=tuple(shape) or (1,))
        assert apply_rewrite(configure_rewrite("one_hot_compare"), built).fired and not kinds(built)["one_hot"]
        ids = np.random.default_rng(size).integers(-size, 2 * size, tuple(shape) or (1,)).astype(np.int32)
        places = torch.from_numpy(ids.reshape(shape).astype(np.int64))
        inside = (places >= 0) & (places < size)
        hot = torch.nn.functional.one_hot(places.clamp(0, size - 1), size) * inside[..., None]
        right = torch.where(hot.bool(), on, off).movedim(-1, axis).numpy()
        for precision in ("float16", "float64"):
            np.testing.assert_array_equal(only_output(built, ids, precision), right)

    @pytest.mark.parametrize("index", [-2**31, -1, 0, 2047, 2048, 2049, 70000, 2**31 - 1])
    def test_fp16_confuses_no_index_with_one_of_2048_places(self, index):
        built = build_program(lambda ids: mb.cast(x=mb.one_hot(indices=ids, one_hot_vector_size=2048), dtype="fp16",
                                                  name="y"), dtype=types.int32, ids=(1,))
        apply_rewrite(configure_rewrite("one_hot_compare"), built)
        found = only_output(built, np.array([index], np.int32), "float16")
        np.testing.assert_array_equal(np.flatnonzero(found), [index] if 0 <= index < 2048 else [])


class TestBand:
    SPELLINGS = {"tril": torch.tril, "triu": torch.triu, "third": lambda x: torch.triu(x, -2).tril(1)}

    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("spelling", SPELLINGS)
    def test_it_is_found_as_torch_spells_it(self, spelling, way, tmp_path):
        function = self.SPELLINGS[spelling]
        before = converted(function, way, tmp_path / "before", shape=(2, 6, 5))
        built = converted(function, way, tmp_path, shape=(2, 6, 5), passes="constant_band_part")
        assert not kinds(built)["band_part"]
        if kinds(before)["band_part"]:
            assert kinds(built)["select"] and not unsupported_ops(built)
        x = drawn((2, 6, 5)).astype(np.float16).astype(np.float32)
        np.testing.assert_array_equal(outputs(built, x, "float16"), truth(function, x))

    @pytest.mark.law
    @given(st.lists(st.integers(1, 6), min_size=2, max_size=5), st.integers(-1, 6), st.integers(-1, 6))
    def test_law_any_band_of_anything(self, shape, lower, upper):
        """An infinity or NaN outside the band is 0."""
        built = build_program(lambda x: mb.band_part(x=x, lower=lower, upper=upper, name="y"), x=tuple(shape))
        assert apply_rewrite(configure_rewrite("constant_band_part"), built).fired and not unsupported_ops(built)
        x = np.random.default_rng(0).choice(np.array([1, -0.0, np.inf, np.nan, -7], np.float16), shape)
        right = torch.from_numpy(x)
        right = right.triu(-lower) if lower >= 0 else right
        right = right.tril(upper) if upper >= 0 else right
        found = only_output(built, x, "float16")
        np.testing.assert_array_equal(found, right.numpy())
        np.testing.assert_array_equal(np.signbit(found), np.signbit(right.numpy()))

    @pytest.mark.law
    @given(st.integers(1, 9), st.integers(1, 9), st.sampled_from([(0, 1), (0,), (1,)]), st.integers(-1, 6),
           st.integers(-1, 6))
    def test_law_any_band_of_any_size(self, rows, columns, free, lower, upper):
        shape = [None if axis in free else extent for axis, extent in enumerate((rows, columns))]
        built = build_program(lambda x: mb.band_part(x=x, lower=lower, upper=upper, name="y"), x=(2, *shape))
        assert apply_rewrite(configure_rewrite("constant_band_part", longest=9), built).fired
        assert not unsupported_ops(built)
        x = np.random.default_rng(0).choice(np.array([1, -0.0, np.inf, np.nan], np.float16), (2, rows, columns))
        right = torch.from_numpy(x)
        right = right.triu(-lower) if lower >= 0 else right
        right = right.tril(upper) if upper >= 0 else right
        for precision in ("float16", "float64"):
            np.testing.assert_array_equal(only_output(built, x, precision), right.numpy())

    def test_a_causal_mask_of_any_length_runs_on_the_ane_as_a_whole(self):
        """torch's triu of ones, as models make it: fill, band_part, and sizes computed in integers."""
        def function(x):
            scores = x @ x.T
            return torch.softmax(scores.masked_fill(torch.ones(scores.shape).triu(1).bool(), -1e4), -1)

        passes = "constant_fill,constant_band_part{longest=64}"
        assert {"fill", "band_part"} <= set(kinds(flexible(function, "last_axis_slice")))
        built = flexible(function, passes)
        assert not unsupported_ops(built) and not {"fill", "band_part"} & set(kinds(built))
        for shape in ((1, 3), (33, 2), (64, 64)):
            x = drawn(shape)
            np.testing.assert_allclose(outputs(built, x, "float64"), truth(function, x), rtol=0, atol=1e-12)

    def test_masks_are_shared(self):
        built = build_program(lambda x, z: [mb.band_part(x=x, lower=-1, upper=0), mb.band_part(x=z, lower=-1, upper=0)],
                              x=(2, 64, 64), z=(64, 64))
        apply_rewrite(configure_rewrite("constant_band_part"), built)
        selects = [op for op in built.functions["main"].operations if op.op_type == "select"]
        assert len(selects) == 2 and len({op.cond for op in selects}) == 1


class TestNonZero:
    def test_what_is_known_is_folded(self):
        known = np.array([[0, -1, np.nan], [2, 0, 0]], np.float16)
        built = build_program(lambda x: [mb.relu(x=x), mb.identity(x=mb.non_zero(x=known), name="y")], x=(2,))
        assert apply_rewrite(configure_rewrite("static_non_zero"), built).fired and not kinds(built)["non_zero"]
        found = Runtime(built, precision="float16")({"x": np.zeros(2, np.float16)})["y"]
        np.testing.assert_array_equal(found, torch.nonzero(torch.from_numpy(known)).numpy())

    def test_what_a_run_decides_is_left(self):
        built = flexible(lambda x: torch.nonzero(x).float(), "static_non_zero")
        assert kinds(built)["non_zero"] == 1
        assert misses("static_non_zero", built) == [
            "the number of rows depends on data: use a mask and select instead"]
