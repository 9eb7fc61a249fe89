"""ANE288: the rows that PyTorch looks up, negative indices too, with fewer ops on integers."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types
from hypothesis import given
from hypothesis import strategies as st

import mil_ane_passes as ane
from mil_ane_passes.passes.engine import apply_rewrite
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.passes.registry import find_rewrite
from mil_ane_passes.runtime import Runtime
from tests.conversions import load_converted
from tests.rewrites.helpers import kinds


class Lookup(torch.nn.Module):
    """An embedding and, with the same table, a lookup by index."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(50, 8)

    def forward(self, ids):
        return self.table(ids).relu()


def rewritten(built):
    return apply_rewrite(find_rewrite("index_by_mod").configured(), built)


@pytest.mark.parametrize("target", [ct.target.iOS16, ct.target.iOS17, ct.target.iOS18])
@pytest.mark.parametrize("exported", [False, True], ids=["traced", "exported"])
def test_an_embedding_as_torch_spells_it(tmp_path, exported, target):
    module, ids = Lookup(), torch.tensor([[3, 49, 0, 7]], dtype=torch.int32)
    before = load_converted(module, ids, path=tmp_path / "in.mlpackage", way="exported" if exported else "traced",
                            minimum_deployment_target=target)
    report = ane.rewrite(tmp_path / "in.mlpackage", tmp_path / "out.mlpackage", preset="full")
    after = ane.load(tmp_path / "out.mlpackage").program
    fired = {trace.rule for trace in report.traces if trace.fired}
    assert ("index_by_mod" in fired) == ("select" in kinds(before))
    if "index_by_mod" in fired:
        assert report.verified and not {"select", "greater_equal"} & set(kinds(after))
        assert report.predicted[1].unsupported < report.predicted[0].unsupported
    (name,) = after.functions["main"].inputs
    found = next(iter(ane.run(tmp_path / "out.mlpackage", {name: ids.numpy()}).values()))
    np.testing.assert_allclose(found, module(ids).detach().numpy(), atol=2e-3)


def test_a_module_that_rejects_other_ids_verifies_the_result(tmp_path):
    module, ids = Lookup(), torch.tensor([[3, 49, 0, 7]], dtype=torch.int32)
    load_converted(module, ids, path=tmp_path / "in.mlpackage", minimum_deployment_target=ct.target.iOS17)
    ane.rewrite(tmp_path / "in.mlpackage", tmp_path / "out.mlpackage", preset="full")
    assert ane.verify(module, tmp_path / "out.mlpackage").status == "equal"


@st.composite
def lookups(draw):
    kind = draw(st.sampled_from(["gather", "gather_along_axis", "gather_nd"]))
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    axis = draw(st.integers(0, len(shape) - 1))
    narrow = draw(st.sampled_from(["", "int16", "both"]))
    return kind, tuple(shape), axis, draw(st.integers(1, 3)), narrow, draw(st.integers(0, 2**31))


def built_of(kind, shape, axis, times, narrow):
    extents = np.array(shape[:axis + 1], np.int32) if kind == "gather_nd" else np.int32(shape[axis])
    index_shape = {"gather": (3, 2), "gather_nd": (3, axis + 1)}.get(kind, shape)

    def body(x, i):
        i = mb.cast(x=i, dtype="int32")
        for _ in range(times):
            if narrow == "both":
                i = mb.cast(x=mb.cast(x=i, dtype="int16"), dtype="int32")
            i = mb.select(cond=mb.greater_equal(x=i, y=np.int32(0)), a=i, b=mb.add(x=i, y=extents))
        if narrow == "int16":
            i = mb.cast(x=i, dtype="int16")
        given = {"x": x, "indices": i, "name": "y"}
        return getattr(mb, kind)(**given, **({} if kind == "gather_nd" else {"axis": axis}))

    return build_program(body, x=shape, i=index_shape), extents, index_shape


@pytest.mark.law
@given(lookups())
def test_any_lookup_finds_the_same(drawn):
    kind, shape, axis, times, narrow, seed = drawn
    built, extents, index_shape = built_of(kind, shape, axis, times, narrow)
    random = np.random.default_rng(seed)
    index = random.integers(-np.broadcast_to(extents, index_shape), np.broadcast_to(extents, index_shape))
    feeds = {"x": random.standard_normal(shape).astype(np.float16), "i": index.astype(np.float16)}
    x, wrapped = torch.from_numpy(feeds["x"]), torch.from_numpy(np.mod(index, extents)).long()
    expected = {
        "gather": lambda: x.index_select(axis, wrapped.reshape(-1)).reshape(*shape[:axis], 3, 2, *shape[axis + 1:]),
        "gather_along_axis": lambda: torch.gather(x, axis, wrapped),
        "gather_nd": lambda: x[tuple(wrapped.T)],
    }[kind]().numpy()
    assert rewritten(built).fired
    counted = kinds(built)
    assert counted["mod"] == counted["add"] == 1 and not counted["select"] and not counted["greater_equal"]
    built.validate()
    for precision in ("float64", "float16"):
        np.testing.assert_array_equal(Runtime(built, precision=precision)(feeds)["y"], expected)


def test_lookups_that_share_indices_share_their_preparation():
    def body(i):
        i = mb.select(cond=mb.greater_equal(x=i, y=np.int32(0)), a=i, b=mb.add(x=i, y=np.int32(4)))
        tables = [np.ones((4, 2), np.float16), np.zeros((4, 3), np.float16)]
        return [mb.gather(x=table, indices=i, axis=0, name=f"y{number}") for number, table in enumerate(tables)]

    built = build_program(body, dtype=types.int32, i=(3,))
    assert len(rewritten(built).fired) == 2 and kinds(built)["mod"] == 1 and kinds(built)["add"] == 1


def test_indices_of_two_extents_stay_as_they_are():
    def body(i):
        i = mb.select(cond=mb.greater_equal(x=i, y=np.int32(0)), a=i, b=mb.add(x=i, y=np.int32(4)))
        return [mb.gather(x=np.ones((rows, 2), np.float16), indices=i, axis=0, name=f"y{rows}") for rows in (4, 5)]

    trace = rewritten(build_program(body, dtype=types.int32, i=(3,)))
    assert not trace.fired
    assert [miss.reason for miss in trace.near_misses] == [
        "the wrapped indices have users other than lookups in the same extent"]


def test_sixteen_bits_that_do_not_hold_every_index_are_left_alone():
    def body(i):
        i = mb.cast(x=i, dtype="int16")
        wide = mb.cast(x=i, dtype="int32")
        wide = mb.select(cond=mb.greater_equal(x=wide, y=np.int32(0)), a=wide, b=mb.add(x=wide, y=np.int32(40000)))
        return mb.gather(x=np.zeros((40000, 1), np.float16), indices=wide, axis=0, name="y")

    built = build_program(body, dtype=types.int32, i=(3,))
    assert rewritten(built).fired and kinds(built)["cast"] == 2  # the casts in front wrap: they stay


def test_a_flexible_number_of_indices():
    def body(i):
        i = mb.select(cond=mb.greater_equal(x=i, y=np.int32(0)), a=i, b=mb.add(x=i, y=np.int32(5)))
        return mb.gather(x=np.arange(10, dtype=np.float16).reshape(5, 2), indices=i, axis=0, name="y")

    built = build_program(body, dtype=types.int32, i=(None,))
    assert rewritten(built).fired
    found = Runtime(built, precision="float16")({"i": np.array([-1, -5, 4, 0], np.int32)})["y"]
    np.testing.assert_array_equal(found[:, 0], [8, 0, 8, 0])
