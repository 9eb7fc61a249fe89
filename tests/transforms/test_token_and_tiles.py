"""`--one-hot` and `--tile-output`: token ids as rows that are multiplied, and logits in several outputs."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types

import mil_ane_passes as ane
from mil_ane_passes.commands.main import main
from tests.package.helpers import make, normal, with_functions

WIDTH, COUNT = 4, 9


def make_model(path, *, looked_up=True, last=None, state=True, named="logits"):
    """A model that adds a state to what it looks up, and multiplies it with the weight of its output."""
    def body(ids, held=None):
        x = mb.gather(x=normal(COUNT, WIDTH).astype(np.float16), indices=ids, axis=0) if looked_up else mb.expand_dims(
            x=mb.cast(x=ids, dtype="fp16"), axes=[2])
        if held is not None:
            x = mb.coreml_update_state(state=held, value=mb.add(x=x, y=mb.read_state(input=held)))
        x = mb.linear(x=x, weight=normal(7, WIDTH if looked_up else x.shape[-1]).astype(np.float16),
                      bias=normal(7).astype(np.float16), name="product" if last else named)
        if last == "add":
            return mb.add(x=x, y=x, name=named)
        return getattr(mb, last)(x=x, name=named) if last else x

    specs = [mb.TensorSpec((1, 2), dtype=types.int32), *[mb.StateTensorSpec((1, 2, WIDTH), dtype=types.fp16)] * state]
    program = mb.program(input_specs=specs, opset_version=ct.target.iOS18)(
        (lambda ids, held: body(ids, held)) if state else lambda ids: body(ids))
    return make(path, program, ct.target.iOS18, pass_pipeline=ct.PassPipeline.EMPTY)


@pytest.mark.parametrize("options", [
    {"one_hot": {"ids": "rows"}}, {"tile_output": {"logits": 3}},
    {"one_hot": {"ids": "rows"}, "tile_output": {"logits": 2}, "state_to_io": "all"},
])
def test_results_are_those_of_the_source_over_steps_of_a_state(tmp_path, options):
    source = make_model(tmp_path / "source.mlpackage")
    report = ane.edit(source, tmp_path / "out.mlpackage", verify=True, **options)
    assert report.status == "written" and report.verification.equal, str(report)
    assert len(report.verification.cases) == 6 and not report.verification.notes
    compared = {each.output for case in report.verification.cases for each in case.outputs}
    assert {"logits", "state held"} <= compared  # tiles are joined
    function = ane.load(tmp_path / "out.mlpackage").program.functions["main"]
    tiles = [var for var in function.outputs if var.name.startswith("logits")]
    assert sum(int(var.shape[-1]) for var in tiles) == 7
    assert len(tiles) == options.get("tile_output", {}).get("logits", 1)
    assert ("ids" in function.inputs) != ("one_hot" in options)
    if "one_hot" in options:
        assert tuple(function.inputs["rows"].shape) == (1, 2, COUNT)


def test_each_of_two_functions_is_changed(tmp_path):
    one = make_model(tmp_path / "one.mlpackage", state=False)
    both = with_functions(tmp_path / "both.mlpackage", {"first": one, "second": one}, "first")
    arguments = ["edit", str(both), "-o", str(tmp_path / "out.mlpackage"), "--one-hot", "ids=rows", "--verify",
                 "--tile-output", "logits=2"]
    assert main(arguments) == 0
    functions = ane.load(tmp_path / "out.mlpackage").program.functions
    assert {name: (list(each.inputs)[0], len(each.outputs)) for name, each in functions.items()} == {
        "first": ("rows", 2), "second": ("rows", 2)}


@pytest.mark.parametrize("rows", range(1, 5))
def test_tiles_are_compared_up_to_rounding(tmp_path, rows):
    """A product of fewer outputs may add its terms in another order, as BLAS does."""
    @mb.program(input_specs=[mb.TensorSpec((rows, 3, 48), dtype=types.fp16)], opset_version=ct.target.iOS18)
    def program(x):
        return mb.linear(x=x, weight=normal(64, 48).astype(np.float16), name="logits")

    source = make(tmp_path / "source.mlpackage", program, ct.target.iOS18, pass_pipeline=ct.PassPipeline.EMPTY)
    report = ane.edit(source, tmp_path / "out.mlpackage", verify=True, tile_output={"logits": 2})
    assert report.status == "written" and not report.exact, str(report)
    assert report.verification.to_dict()["exactness"] == "rounding"


def test_a_tile_that_is_not_the_part_is_found(tmp_path, monkeypatch):
    from mil_ane_passes.transforms import tile_head

    cut = tile_head.cut_weight
    monkeypatch.setattr(tile_head, "cut_weight", lambda mb, weight, axis, start, stop: cut(
        mb, weight, axis, 0, stop - start))
    source = make_model(tmp_path / "source.mlpackage")
    report = ane.edit(source, tmp_path / "out.mlpackage", verify=True, tile_output={"logits": 2})
    assert report.status == "rejected" and not (tmp_path / "out.mlpackage").exists(), str(report)


@pytest.mark.parametrize(("options", "arguments", "reason"), [
    ({}, ["--one-hot", "id=rows"], "one-hot id=rows"),
    ({}, ["--one-hot", "ids"], "--one-hot ids: expected A=B, such as --one-hot ids=rows"),
    ({}, ["--one-hot", "ids=held"], "'held' is already an input or output; expected a free name"),
    ({"looked_up": False}, ["--one-hot", "ids=rows"], "the input 'ids' is not looked up in a table by a gather op"),
    ({}, ["--tile-output", "logit=2"], "--tile-output logit=2"),
    ({}, ["--tile-output", "logits=x"], "--tile-output logits=x: expected a number of tiles, such as"),
    ({}, ["--tile-output", "logits=8"], "8 tiles of the output 'logits', which is 7 wide; expected 2 to 7"),
    ({"last": "tanh"}, ["--tile-output", "logits=2"], "'logits' is made by a tanh op; expected a linear"),
    ({"last": "add"}, ["--tile-output", "logits=2"], "'logits' is made by an add op; expected a linear"),
    ({"last": "relu"}, ["--tile-output", "logits=2"], "'logits' is made by a relu op; expected a linear"),
    ({"named": "x"}, ["--tile-output", "x=2", "--rename", "x=y"], "'x'"),
])
def test_what_cannot_be_changed_is_named(tmp_path, capsys, options, arguments, reason):
    source = make_model(tmp_path / "source.mlpackage", **options)
    assert main(["edit", str(source), "-o", str(tmp_path / "out.mlpackage"), *arguments]) == 2
    said = capsys.readouterr().err
    assert reason in said, said
    assert [each.name for each in tmp_path.iterdir()] == ["source.mlpackage"]


@pytest.mark.parametrize(("arguments", "message"), [
    (["--tile-output", "logits=2", "--rename", "logits=y"],
     "--rename logits=y: 'logits' is replaced by --tile-output already; expected only one of the two"),
    (["--tile-output", "logits=2", "--drop-output", "logits"],
     "--drop-output logits: 'logits' is replaced by --tile-output already; expected only one of the two"),
    (["--tile-output", "logits=2", "--expose", "logits"],
     "--expose logits: 'logits' is replaced by --tile-output already; expected only one of the two"),
    (["--one-hot", "ids=rows", "--rename", "ids=tokens"],
     "--rename ids=tokens: 'ids' is replaced by --one-hot already; expected only one of the two"),
    (["--embedding-file", "ids=table.npy", "--rename", "ids=tokens"],
     "--rename ids=tokens: 'ids' is replaced by --embedding-file already; expected only one of the two"),
    (["--merge-states", "all_states", "--state-to-io", "held"],
     "--state-to-io held: 'held' is replaced by --merge-states already; expected only one of the two"),
])
def test_a_name_that_another_option_replaces_is_refused_by_both_options(tmp_path, capsys, arguments, message):
    source = make_model(tmp_path / "source.mlpackage")
    arguments = [each.replace("table.npy", str(tmp_path / "table.npy")) for each in arguments]
    assert main(["edit", str(source), "-o", str(tmp_path / "out.mlpackage"), *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said, said
    assert [each.name for each in tmp_path.iterdir()] == ["source.mlpackage"]
