"""What can be edited, and what is refused with its reason."""

from __future__ import annotations

import coremltools as ct
import pytest
from coremltools.converters.mil.mil import Builder as mb

import mil_ane_passes as ane
from tests.package.helpers import spec_of, tree, write_spec


def test_a_package_and_an_mlmodel_are_edited_as_the_path_is(package, tmp_path):
    names = {"rename": {"x": "image"}}
    ane.edit(package("halves"), tmp_path / "path.mlpackage", **names)
    ane.edit(ane.load(package("halves")), tmp_path / "package.mlpackage", **names)
    model = ct.models.MLModel(str(package("halves")), skip_model_load=True)
    ane.edit(model, tmp_path / "mlmodel.mlpackage", **names)
    assert tree(tmp_path / "package.mlpackage") == tree(tmp_path / "path.mlpackage") == tree(
        tmp_path / "mlmodel.mlpackage")
    model.short_description = "described later"
    ane.edit(model, tmp_path / "later.mlpackage", **names)
    assert spec_of(tmp_path / "later.mlpackage").description.metadata.shortDescription == "described later"


def test_a_program_that_was_changed_is_not_edited_as_a_file(package, tmp_path):
    changed = ane.load(package("halves"))
    function = changed.program.functions["main"]
    with function:
        function.set_outputs([mb.abs(x=function.outputs[0])])
    with pytest.raises(ane.InputError, match="was changed after it was loaded; save it, and edit what was saved"):
        ane.edit(changed, tmp_path / "out.mlpackage", rename={"x": "image"})


@pytest.mark.parametrize("source", [7, None, ct.PassPipeline()])
def test_what_is_no_package(source, tmp_path):
    with pytest.raises(ane.InputError, match=r"cannot edit an? .* that is not a package on disk"):
        ane.edit(source, tmp_path / "out.mlpackage", rename={"x": "image"})


def test_a_function_with_blocks_for_two_opsets_is_refused(package, tmp_path):
    source = tmp_path / "in.mlpackage"
    ane.edit(package("halves"), source, rename={"x": "x"})
    spec = spec_of(source)
    blocks = spec.mlProgram.functions["main"].block_specializations
    blocks["CoreML9"].CopyFrom(blocks["CoreML6"])
    write_spec(source, spec)
    with pytest.raises(ane.InputError, match="is for opset 'CoreML6' and has blocks for CoreML6, CoreML9"):
        ane.edit(source, tmp_path / "out.mlpackage", rename={"x": "image"})
    assert not (tmp_path / "out.mlpackage").exists()


def test_a_network_is_refused(package, tmp_path):
    source = tmp_path / "in.mlpackage"
    ane.edit(package("halves"), source, rename={"x": "x"})
    spec = spec_of(source)
    spec.neuralNetwork.SetInParent()
    write_spec(source, spec)
    with pytest.raises(ane.InputError, match="the model is a NeuralNetwork"):
        ane.edit(source, tmp_path / "out.mlpackage", rename={"x": "image"})


def test_nothing_asked_for_and_nowhere_to_write(package, tmp_path):
    with pytest.raises(ane.InputError, match="no edit requested"):
        ane.edit(package("halves"), tmp_path / "out.mlpackage")
    with pytest.raises(ane.InputError, match="no output; expected a path"):
        ane.edit(package("halves"), rename={"x": "image"})
    report = ane.edit(package("halves"), rename={"x": "image"}, dry_run=True)
    assert (report.status, report.outputs, report.weight_bytes_after) == ("dry run", [], None)


@pytest.mark.parametrize(("asked", "message"), [
    ({"expose": [3]}, r"expose: found \[3\]; expected the name of a value"),
    ({"drop_output": 3}, "drop_output: found 3; expected the name of a value"),
    ({"split_at": [None]}, r"split_at: found \[None\]; expected the name of a value"),
    ({"rename": {"x": 3}}, r"rename: found \{'x': 3\}; expected a mapping"),
    ({"rename": ["x", "y"]}, r"rename: found \['x', 'y'\]; expected a mapping"),
    ({"io": ["x"]}, r"io: found \['x'\]; expected 'fp16', 'fp32' or a mapping"),
    ({"io": {"fp16": None}}, "io: found None; expected the name of a value"),
])
def test_what_is_no_name_is_refused(asked, message, package, tmp_path):
    with pytest.raises(ane.InputError, match=message):
        ane.edit(package("halves"), tmp_path / "out.mlpackage", **asked)
    assert not list(tmp_path.iterdir())
