"""`edit --split-at`: two packages that give, one after the other, what the whole gives."""

from __future__ import annotations

import json
import os
from pathlib import Path

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import get_new_symbol, types

import mil_ane_passes as ane
from mil_ane_passes.commands.main import main
from tests.package.helpers import MODEL, WEIGHTS, make, normal, proto_ops, spec_of, tree, write_spec
from tests.package.test_unchanged import BUILDERS, classifier, compressed, multifunction, with_state

from .helpers import host_takes
from .splitting import chained, check_parts, cut, draws, folder, gives, same, takes, values

NO_PARTS = {"state", "multifunction"}
CUT_EVERYWHERE = [name for name in BUILDERS if name not in (*NO_PARTS, "iOS16", "iOS17", "affine16", "uint4")]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", CUT_EVERYWHERE)
def test_both_parts_together_are_the_whole_wherever_it_is_cut(name, tmp_path):
    source = BUILDERS[name](tmp_path / "source.mlpackage")
    before, feeds = tree(source), draws(source)
    whole = ane.run(source, feeds)
    refused = []
    for value in values(source):
        with folder() as where:
            try:
                _, parts = cut(source, [value], where)
            except ane.InputError as error:
                refused.append(value)
                assert "the second part would be empty" in str(error) or f"nothing uses '{value}'" in str(error)
                continue
            check_parts(source, parts)
            same(whole, chained(parts, feeds))
            assert value in str(gives(parts[0])) and value in str(takes(parts[1]))
    assert set(refused) <= {*gives(source), "while_loop_0_1"} and tree(source) == before


def skipping(path: Path) -> Path:
    """A skip connection, a value with three users, a const that both sides use, two outputs, an input used late."""
    weight = normal(1, 64)

    @mb.program(input_specs=[mb.TensorSpec((1, 64)), mb.TensorSpec((1, 64)), mb.TensorSpec((2,))],
                opset_version=ct.target.iOS17)
    def program(x, late, idle):
        shared = mb.const(val=weight, name="shared")
        a = mb.add(x=x, y=shared, name="a")
        b = mb.relu(x=a, name="b")
        c = mb.sin(x=b, name="c")
        d = mb.add(x=c, y=a, name="d")
        early = mb.mul(x=b, y=2.0, name="early")
        out = mb.add(x=mb.mul(x=d, y=shared), y=late, name="out")
        return early, out

    return make(path, program, ct.target.iOS17)


def test_what_crosses_is_what_the_second_part_uses(tmp_path):
    source = skipping(tmp_path / "source.mlpackage")
    report, parts = cut(source, ["c"], tmp_path)
    assert (takes(parts[0]), gives(parts[0])) == (["x", "idle"], ["c", "a", "b"])
    assert (takes(parts[1]), gives(parts[1])) == (["late", "c", "a", "b"], ["early", "out"])
    notes = [each.note for each in report.done]
    assert "crosses: 'a': fp32 1 x 64, 256 bytes per prediction" in notes
    assert any(note.startswith("besides what was named, 512 bytes cross") for note in notes)
    shared = set(proto_ops(parts[0])) & set(proto_ops(parts[1]))
    assert shared == {"shared"}, "both sides use the const"
    spec = spec_of(parts[0])
    assert [each.type.multiArrayType.shape for each in spec.description.output] == [[1, 64]] * 3


def test_outputs_made_before_the_cut_stay_with_the_first_part(tmp_path):
    source = skipping(tmp_path / "source.mlpackage")
    report, parts = cut(source, ["d", "early"], tmp_path)
    assert gives(parts[0]) == ["early", "d"] and takes(parts[1]) == ["late", "d"] and gives(parts[1]) == ["out"]
    assert not any("besides" in each.note for each in report.done)
    feeds = draws(source)
    same(ane.run(source, feeds), chained(parts, feeds))


def test_a_value_that_only_the_first_part_uses_stays_inside(tmp_path):
    source = skipping(tmp_path / "source.mlpackage")
    report, parts = cut(source, ["c", "d", "early"], tmp_path)
    assert "c" not in gives(parts[0]) and "'c' is used in the first part only and stays inside it" in str(report)


def test_each_part_has_the_weights_it_uses(tmp_path):
    one, two, shared = normal(256, 64), normal(8, 256), normal(256, 256)

    @mb.program(input_specs=[mb.TensorSpec((1, 64))], opset_version=ct.target.iOS17)
    def program(x):
        y = mb.relu(x=mb.linear(x=x, weight=one), name="y")
        y = mb.linear(x=y, weight=shared, name="z")
        y = mb.linear(x=y, weight=shared, name="w")
        return mb.linear(x=y, weight=two, name="out")

    source = make(tmp_path / "source.mlpackage", program, ct.target.iOS17)
    expected = [one.nbytes + shared.nbytes, shared.nbytes + two.nbytes]
    _, parts = cut(source, ["z"], tmp_path)
    sizes = [(part / WEIGHTS).stat().st_size for part in parts]
    assert all(bytes_ <= size <= bytes_ + 4096 for bytes_, size in zip(expected, sizes, strict=True))
    feeds = draws(source)
    same(ane.run(source, feeds), chained(parts, feeds))


def test_a_shared_blob_seen_in_two_shapes_is_written_once(tmp_path):
    weight = normal(64, 64)

    @mb.program(input_specs=[mb.TensorSpec((1, 64))], opset_version=ct.target.iOS17)
    def program(x):
        y = mb.add(x=mb.linear(x=x, weight=weight), y=mb.reshape(x=weight.reshape(4096)[:64].copy(), shape=(1, 64)))
        y = mb.conv(x=mb.reshape(x=y, shape=(1, 64, 1)), weight=weight.reshape(64, 64, 1).copy(), name="conv")
        return mb.relu(x=mb.sin(x=y, name="end"), name="out")

    plain = make(tmp_path / "plain.mlpackage", program, ct.target.iOS17)
    ane.edit(plain, tmp_path / "source.mlpackage", dedup_weights=True)
    source = tmp_path / "source.mlpackage"
    _, parts = cut(source, ["end"], tmp_path)
    assert (parts[0] / WEIGHTS).stat().st_size <= (source / WEIGHTS).stat().st_size
    check_parts(source, parts)


TYPES = {
    "bool": (ct.target.iOS15, lambda x: mb.greater(x=x, y=0.0, name="v"), "v_int32", "bool as int32"),
    "int16": (ct.target.iOS17, lambda x: mb.cast(x=x, dtype="int16", name="v"), "v_int32", "int16 as int32"),
    "uint8": (ct.target.iOS17, lambda x: mb.cast(x=mb.abs(x=x), dtype="uint8", name="v"), "v_int32", "uint8 as int32"),
    "int32": (ct.target.iOS15, lambda x: mb.cast(x=x, dtype="int32", name="v"), "v", None),
    "fp16 before iOS16": (ct.target.iOS15, lambda x: mb.cast(x=x, dtype="fp16", name="v"), "v_fp32", "fp16 as fp32"),
    "fp16": (ct.target.iOS16, lambda x: mb.cast(x=x, dtype="fp16", name="v"), "v", None),
    "scalar": (ct.target.iOS15, lambda x: mb.reduce_max(x=x, keep_dims=False, name="v"), "v_array", "a scalar as an"),
    "scalar bool": (ct.target.iOS15, lambda x: mb.greater(x=mb.reduce_max(x=x, keep_dims=False), y=0.0, name="v"),
                    "v_array", "bool as int32, which holds it exactly; a scalar as an array of one"),
}


@pytest.mark.parametrize("name", TYPES)
def test_types_that_no_input_can_hold_cross_as_others_that_hold_them(name, tmp_path):
    target, build, feature, how = TYPES[name]

    @mb.program(input_specs=[mb.TensorSpec((2, 3))], opset_version=target)
    def program(x):
        v = build(x)
        return mb.mul(x=mb.cast(x=v, dtype="fp32"), y=np.float32([[1.5]]), name="out")

    source = make(tmp_path / "source.mlpackage", program, target, pass_pipeline=ct.PassPipeline.EMPTY)
    report, parts = cut(source, ["v"], tmp_path)
    assert gives(parts[0]) == takes(parts[1]) == [feature]
    check_parts(source, parts)
    assert how is None or how in str(report)
    for seed in range(3):
        feeds = draws(source, seed=seed)
        same(ane.run(source, feeds), chained(parts, feeds))


def test_an_image_that_crosses_is_carried_by_its_values(tmp_path):
    @mb.program(input_specs=[mb.TensorSpec((1, 3, 8, 8))])
    def program(x):
        picture = mb.mul(x=x, y=1.7, name="picture")
        return picture, mb.relu(x=picture, name="out")

    source = make(tmp_path / "source.mlpackage", program)
    spec = spec_of(source)
    image = spec.description.output[0].type.imageType
    image.width, image.height, image.colorSpace = 8, 8, image.ColorSpace.Value("RGB")
    write_spec(source, spec)
    _, parts = cut(source, ["picture"], tmp_path)
    assert gives(parts[0]) == ["picture", "picture_values"] and takes(parts[1]) == ["picture_values"]
    assert spec_of(parts[0]).description.output[0].type.HasField("imageType")
    check_parts(source, parts)


def test_a_list_cannot_cross_and_the_error_says_where_to_cut(tmp_path):
    @mb.program(input_specs=[mb.TensorSpec((2, 3))])
    def program(x):
        y = mb.relu(x=x, name="y")
        made = mb.make_list(init_length=2, elem_shape=(2, 3), dynamic_length=False, name="made")
        made = mb.list_write(ls=made, index=0, value=y, name="filled")
        z = mb.list_read(ls=made, index=0, name="z")
        return mb.sin(x=z, name="out")

    source = make(tmp_path / "source.mlpackage", program, pass_pipeline=ct.PassPipeline.EMPTY)
    with pytest.raises(ane.InputError, match="'filled' would cross, but it is a list, which no input or output can "
                                             "hold; nearby it can be cut at 'y' or 'z'"):
        cut(source, ["filled"], tmp_path)
    assert os.listdir(tmp_path) == ["source.mlpackage"]


def test_a_state_lives_in_one_part(tmp_path):
    source = make(tmp_path / "source.mlpackage", with_state(), ct.target.iOS18)
    stored = next(name for name in values(source) if name.startswith("coreml_update_state"))
    with pytest.raises(ane.InputError, match=f"'s' is used before and after the cut .*nearby .*'{stored}'"):
        cut(source, ["sum"], tmp_path)
    _, parts = cut(source, [stored], tmp_path)
    assert [len(spec_of(part).description.state) for part in parts] == [1, 0]
    whole_state, part_state = {}, {}
    for seed in range(3):
        feeds = draws(source, seed=seed)
        whole = ane.run(source, feeds, state=whole_state)
        crossing = ane.run(parts[0], feeds, state=part_state)
        same(whole, ane.run(parts[1], {name: crossing[name] for name in takes(parts[1])}))
    assert np.array_equal(whole_state["s"], part_state["s"])


def test_what_uses_the_state_later_comes_along_if_it_can(tmp_path):
    @mb.program(input_specs=[mb.TensorSpec((1, 4)), mb.StateTensorSpec((1, 4), dtype=types.fp16)],
                opset_version=ct.target.iOS18)
    def program(x, s):
        half = mb.cast(x=x, dtype="fp16", name="half")
        cut_here = mb.sin(x=mb.add(x=mb.read_state(input=s), y=half), name="here")
        stored = mb.coreml_update_state(state=s, value=mb.mul(x=half, y=half), name="stored")
        return mb.add(x=mb.cos(x=cut_here, name="later"), y=stored, name="out")

    source = make(tmp_path / "source.mlpackage", program, ct.target.iOS18)
    _, parts = cut(source, ["here"], tmp_path)
    assert [len(spec_of(part).description.state) for part in parts] == [1, 0]
    assert any(b"write_state" in data for data in proto_ops(parts[0]).values())
    feeds = draws(source)
    same(ane.run(source, feeds, state={}), chained(parts, feeds))


def test_a_classifier_gives_its_answer_in_the_second_part(tmp_path):
    source = classifier(tmp_path / "source.mlpackage")
    spec = spec_of(source)
    spec.description.metadata.author = "kept"
    spec.description.input[0].shortDescription = "kept too"
    write_spec(source, spec)
    _, parts = cut(source, [values(source)[1]], tmp_path)
    first, second = (spec_of(part).description for part in parts)
    assert (first.predictedFeatureName, first.predictedProbabilitiesName) == ("", "")
    assert second.predictedFeatureName == spec.description.predictedFeatureName != ""
    assert second.predictedProbabilitiesName == spec.description.predictedProbabilitiesName
    assert list(second.output) == list(spec.description.output)
    assert list(first.input) == list(spec.description.input) and len(second.input) == 1
    assert first.metadata == second.metadata == spec.description.metadata


def test_several_functions(tmp_path):
    source = multifunction(tmp_path / "source.mlpackage")
    (tmp_path / "all").mkdir()
    _, parts = cut(source, ["relu"], tmp_path / "all")
    for part in parts:
        assert sorted(ane.load(part).functions) == ["alpha", "zeta"]
        check_parts(source, parts, "alpha")
    for function in ("alpha", "zeta"):
        feeds = draws(source, function)
        same(ane.run(source, feeds, function=function), chained(parts, feeds, function))
    _, parts = cut(source, ["relu"], tmp_path, function="alpha")
    assert [ane.load(part).functions for part in parts] == [("alpha",)] * 2
    assert spec_of(parts[0]).description.defaultFunctionName == "alpha"
    check_parts(source, parts, "alpha")
    same(ane.run(source, feeds, function="alpha"), chained(parts, feeds))


def test_a_value_that_not_all_functions_have(tmp_path):
    source = multifunction(tmp_path / "source.mlpackage")
    ane.edit(source, tmp_path / "other.mlpackage", rename={"relu": "activated"}, function="alpha")
    with pytest.raises(ane.InputError, match=r"function 'alpha': no value 'relu'.*function= cuts one and leaves"):
        cut(tmp_path / "other.mlpackage", ["relu"], tmp_path)
    cut(tmp_path / "other.mlpackage", ["relu"], tmp_path, function="zeta")


@pytest.mark.parametrize(("named", "reason"), [
    (["x"], "'x' is an input: the first part would be empty"),
    (["conf"], "no value 'conf'; did you mean 'conv'?"),
    (["out"], r"all outputs of the model \(out\) are computed up to 'out': the second part would be empty"),
    (["conv_weight_0"], "'conv_weight_0' depends on consts only"),
])
def test_where_it_cannot_be_cut(named, reason, tmp_path):
    source = BUILDERS["iOS15"](tmp_path / "source.mlpackage")
    with pytest.raises(ane.InputError, match=reason):
        cut(source, named, tmp_path)
    assert os.listdir(tmp_path) == ["source.mlpackage"]


def test_a_first_part_without_outputs_is_refused(tmp_path):
    """Core ML loads no model without outputs; the second list of the split leads to no output."""
    @mb.program(input_specs=[mb.TensorSpec((2, 4))], opset_version=ct.target.iOS16)
    def program(x):
        wave = mb.sin(x=x, name="wave")
        mb.concat(values=mb.split(x=wave, num_splits=2, axis=1), axis=1, name="unused")
        return mb.identity(x=x, name="out")

    source = make(tmp_path / "source.mlpackage", program, ct.target.iOS16, pass_pipeline=ct.PassPipeline.EMPTY)
    with pytest.raises(ane.InputError, match="neither an output of the model nor an op after 'wave' needs what is "
                                             "computed up to there: the first part would be empty"):
        cut(source, ["wave"], tmp_path)
    assert os.listdir(tmp_path) == ["source.mlpackage"]


def test_values_inside_blocks_are_refused_with_what_the_block_makes(tmp_path):
    source = BUILDERS["control_flow"](tmp_path / "source.mlpackage")
    with pytest.raises(ane.InputError, match="'one' is inside a block of a cond op, which cannot be cut; the op "
                                             "itself computes 'cond_0'"):
        cut(source, ["one"], tmp_path)


def test_what_nothing_uses_cannot_be_the_cut(tmp_path):
    source = skipping(tmp_path / "source.mlpackage")
    spec = spec_of(source)
    function = spec.mlProgram.functions["main"]
    block = function.block_specializations[function.opset]
    dead = block.operations.add()
    dead.CopyFrom(next(op for op in block.operations if op.type == "sin"))
    dead.outputs[0].name = "dead"
    write_spec(source, spec)
    with pytest.raises(ane.InputError, match="nothing uses 'dead'"):
        cut(source, ["dead"], tmp_path)
    report, _ = cut(source, ["c"], tmp_path)
    assert "ops that no output needs, left out of both parts: 2" in str(report), "it, and what passes the idle input on"


def test_ops_nobody_knows_run_once(tmp_path):
    """Nothing says that an unknown op makes the same twice, nor that it can go."""
    source = skipping(tmp_path / "source.mlpackage")
    spec = spec_of(source)
    function = spec.mlProgram.functions["main"]
    block = function.block_specializations[function.opset]
    noise = block.operations.add(type="noise_of_tomorrow")
    noise.outputs.add(name="noise").type.CopyFrom(block.operations[-2].outputs[0].type)
    sin = next(op for op in block.operations if op.type == "sin")
    sin.type = "add_noise_of_tomorrow"
    sin.inputs["noise"].arguments.add(name="noise")
    out = next(op for op in block.operations if op.outputs[0].name == "out")
    out.inputs["noise"].arguments.add(name="noise")
    ordered = sorted(block.operations, key=lambda op: op.type != "noise_of_tomorrow")
    del block.operations[:]
    block.operations.extend(ordered)
    write_spec(source, spec)
    _, parts = cut(source, ["c"], tmp_path)
    assert "noise" in proto_ops(parts[0]) and "noise" not in proto_ops(parts[1])
    assert "noise" in gives(parts[0]) and "noise" in takes(parts[1])


def test_new_weights_of_an_edit_before_are_where_they_are_used(tmp_path):
    """Fixing the shape makes tables of positions consts: one is used before the cut, one behind it."""
    length = get_new_symbol()

    @mb.program(input_specs=[mb.TensorSpec((1, length))], opset_version=ct.target.iOS17)
    def program(x):
        count = mb.gather(x=mb.shape(x=x), indices=1, axis=0)
        places = mb.cast(x=mb.range_1d(start=0, end=count, step=1), dtype="fp32")
        y = mb.add(x=x, y=mb.expand_dims(x=mb.mul(x=places, y=0.5), axes=[0]), name="y")
        y = mb.mul(x=y, y=mb.expand_dims(x=mb.mul(x=places, y=0.25), axes=[0]), name="z")
        return mb.relu(x=y, name="out")

    source = make(tmp_path / "source.mlpackage", program, ct.target.iOS17,
                  inputs=[ct.TensorType("x", shape=(1, ct.RangeDim(2, 4096)))])
    _, parts = cut(source, ["y"], tmp_path, fix_shape=["x=1,1000"])
    assert [4000 <= (part / WEIGHTS).stat().st_size <= 4400 for part in parts] == [True, True]
    for part in parts:
        host_takes(part)
    feeds = draws(source, sizes={"x": (1, 1000)})
    same(ane.run(source, feeds), chained(parts, feeds))


def second_fails(monkeypatch):
    """Of two packages that are to appear, the second does not; the names of those that were to."""
    from mil_ane_passes.package import package_writer

    appear, seen = package_writer.publish_output, []

    def failing(*arguments):
        seen.append(arguments[1].name)
        if len(seen) == 2:
            raise OSError(28, "No space left on device")
        appear(*arguments)

    monkeypatch.setattr(package_writer, "publish_output", failing)
    return seen


def test_both_appear_or_neither(tmp_path, monkeypatch):
    source = skipping(tmp_path / "source.mlpackage")
    seen = second_fails(monkeypatch)
    with pytest.raises(ane.InputError, match=r"out_2\.mlpackage: the package cannot be written"):
        cut(source, ["c"], tmp_path)
    assert seen == ["out_1.mlpackage", "out_2.mlpackage"] and os.listdir(tmp_path) == ["source.mlpackage"]


@pytest.mark.parametrize("swap", [True, False])
def test_what_was_there_comes_back_when_the_second_fails(tmp_path, monkeypatch, swap):
    from mil_ane_passes.package import swap as swaps

    source = skipping(tmp_path / "source.mlpackage")
    cut(source, ["c"], tmp_path)
    before = tree(tmp_path)
    if not swap:
        monkeypatch.setattr(swaps, "_rename_with_flag", lambda *_: False)
    second_fails(monkeypatch)
    with pytest.raises(ane.InputError):
        cut(source, ["d"], tmp_path, overwrite=True)
    assert tree(tmp_path) == before
    monkeypatch.undo()
    cut(source, ["d"], tmp_path, overwrite=True)
    assert tree(tmp_path) != before


def test_a_place_that_is_taken_is_refused_before_anything_is_read(tmp_path):
    source = skipping(tmp_path / "source.mlpackage")
    (tmp_path / "out_2.mlpackage").mkdir()
    with pytest.raises(ane.InputError, match=r"out_2\.mlpackage: exists already"):
        ane.edit(source, tmp_path / "out.mlpackage", split_at=["c"])
    assert not (tmp_path / "out_1.mlpackage").exists()


def test_names_are_those_of_the_source_though_it_is_renamed_too(tmp_path):
    source = skipping(tmp_path / "source.mlpackage")
    _, parts = cut(source, ["c"], tmp_path, rename={"c": "features"})
    assert "features" in gives(parts[0]) and "features" in takes(parts[1])


def test_the_command(tmp_path, capsys):
    source = compressed(tmp_path / "source.mlpackage", "palettized18")
    target = str(tmp_path / "out.mlpackage")
    capsys.readouterr()
    assert main(["edit", str(source), "-o", target, "--split-at", "relu", "--dedup-weights", "--format", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [Path(each).name for each in report["outputs"]] == ["out_1.mlpackage", "out_2.mlpackage"]
    assert all((Path(each) / MODEL).is_file() for each in report["outputs"])
    assert main(["edit", str(source), "--dry-run", "--split-at", "relu"]) == 0
    assert "the first part has" in capsys.readouterr().out
    assert main(["edit", str(source), "-o", target, "--split-at", "relu"]) == 2
    assert "out_1.mlpackage: exists already" in capsys.readouterr().err
