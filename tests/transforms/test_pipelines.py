"""Names in pipelines: what parts hand each other is renamed in all of them."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest

import mil_ane_passes as ane
from tests.package.helpers import make, spec_of, tree, write_spec
from tests.package.test_pipelines import X, out_program, up_program, with_network, wrapped

from .helpers import ONLY_MODEL, changed_files

UP = "up_has_output_shape"
"A value inside the first part."


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    models = [ct.models.MLModel(str(make(folder / f"{name}.mlpackage", program, ct.target.iOS16)), skip_model_load=True)
              for name, program in (("up", up_program()), ("out", out_program()))]
    ct.utils.make_pipeline(*models).save(str(folder / "pipeline.mlpackage"))
    return folder / "pipeline.mlpackage"


def ends(spec):
    return [each.name for each in spec.description.input], [each.name for each in spec.description.output]


def test_what_parts_hand_each_other_is_renamed_in_all(pipeline, tmp_path):
    target = tmp_path / "out.mlpackage"
    report = ane.edit(pipeline, target, rename={"x": "mel", "mid": "hidden", "out": "audio", UP: "inner"})
    assert changed_files(pipeline, target) == ONLY_MODEL
    assert len({each.function for each in report.done}) == 2 and len(report.done) == 5
    spec = ct.models.MLModel(str(target), skip_model_load=True).get_spec()
    assert ends(spec) == (["mel"], ["audio"])
    assert [ends(part) for part in spec.pipeline.models] == [(["mel"], ["hidden"]), (["hidden"], ["audio"])]
    before, after = ane.run(pipeline, {"x": X}), ane.run(target, {"mel": X})
    assert np.array_equal(before["out"], after["audio"])
    ane.edit(target, tmp_path / "back.mlpackage", rename={"mel": "x", "hidden": "mid", "audio": "out", "inner": UP})
    assert tree(tmp_path / "back.mlpackage") == tree(pipeline)


def test_an_inner_value_of_one_part(pipeline, tmp_path):
    function = next(name for name in ane.load(pipeline).functions)
    report = ane.edit(pipeline, tmp_path / "out.mlpackage", rename={UP: "inner"}, function=function)
    assert [each.function for each in report.done] == [function]
    assert ends(spec_of(tmp_path / "out.mlpackage")) == (["x"], ["out"])


@pytest.mark.parametrize(("names", "message"), [
    ({"mad": "hidden"}, "did you mean 'mid'?"),
    ({"x": "out"}, "the pipeline has a feature 'out' already"),
    ({UP: "mid"}, "the pipeline has a feature 'mid' already"),
])
def test_names_that_cannot_be(pipeline, tmp_path, names, message):
    with pytest.raises(ane.InputError) as refused:
        ane.edit(pipeline, tmp_path / "out.mlpackage", rename=names)
    assert message in str(refused.value)


def test_what_is_handed_over_is_not_renamed_in_one_part_alone(pipeline, tmp_path):
    function = next(name for name in ane.load(pipeline).functions)
    with pytest.raises(ane.InputError, match="'mid' is passed between parts of the pipeline"):
        ane.edit(pipeline, tmp_path / "out.mlpackage", rename={"mid": "hidden"}, function=function)
    with pytest.raises(ane.InputError, match="no function 'main'; the parts have "):
        ane.edit(pipeline, tmp_path / "out.mlpackage", rename={UP: "inner"}, function="main")


def test_parts_that_are_no_programs_keep_their_names(pipeline, tmp_path):
    source = tmp_path / "in.mlpackage"
    ane.edit(pipeline, source, rename={"x": "x"})
    spec = spec_of(source)
    write_spec(source, with_network(spec) or spec)
    with pytest.raises(ane.InputError, match="has the input or output 'out', but is not an ML Program"):
        ane.edit(source, tmp_path / "out.mlpackage", rename={"out": "audio"})
    ane.edit(source, tmp_path / "out.mlpackage", rename={"mid": "hidden"})
    assert ends(spec_of(tmp_path / "out.mlpackage").pipeline.models[1])[0] == ["hidden"]


def test_pipelines_in_pipelines(pipeline, tmp_path):
    source = tmp_path / "in.mlpackage"
    ane.edit(pipeline, source, rename={"x": "x"})
    write_spec(source, wrapped(spec_of(source)))
    ane.edit(source, tmp_path / "out.mlpackage", rename={"mid": "hidden", UP: "inner"})
    inner = spec_of(tmp_path / "out.mlpackage").pipelineClassifier.pipeline.models[0].pipeline
    assert [ends(part) for part in inner.models] == [(["x"], ["hidden"]), (["hidden"], ["out"])]
    with pytest.raises(ane.InputError, match="part 'inner' of the pipeline has the input or output 'x'"):
        ane.edit(source, tmp_path / "two.mlpackage", rename={"x": "mel"})


@pytest.mark.parametrize("edit", [{"expose": UP}, {"io": "fp16"}, {"drop_output": "out"}, {"fix_shape": {"x": [1]}},
                                  {"dedup_weights": True}, {"split_at": "mid"}])
def test_other_edits_are_refused(pipeline, tmp_path, edit):
    with pytest.raises(ane.InputError, match=r"the model is a pipeline.* only names can be changed there"):
        ane.edit(pipeline, tmp_path / "out.mlpackage", rename={UP: "inner"}, **edit)
    assert not list(tmp_path.iterdir())
