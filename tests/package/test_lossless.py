"""What a package holds besides its ops, one by one: an edit elsewhere leaves each as it was."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types

import mil_ane_passes as ane
from mil_ane_passes.package import load, save

from .helpers import (
    MODEL,
    WEIGHTS,
    linear_program,
    main_block,
    make,
    normal,
    op_named,
    replace,
    spec_of,
    tree,
    with_functions,
    write_spec,
)
from .proto_diff import blob, consts, ops_of
from .test_real import touched, weights_are_kept

UNKNOWN = b"\xaa\xd1\x0c\x07unknown"  # field 25109, seven bytes
EXTRA, DEEP = "@model_path/weights/extra.bin", "@model_path/deep/er/more.bin"


def edited(source: Path, target: Path) -> Path:
    """`relu` reads another value, and the rest nothing new."""
    package = load(source)
    assert package.is_unchanged()
    relu = op_named(package.program, "relu")
    with package.program.functions["main"], mb.set_before_op(relu):
        doubled = mb.add(x=relu.x, y=relu.x, name="doubled")
    relu.set_inputs(x=doubled, no_check_var_types=True)
    save(package, target)
    ops = touched(source, target).functions["main"]
    assert (ops.changed, ops.added, ops.removed) == ({"relu"}, {"doubled"}, set())
    assert weights_are_kept(source, target)
    return target


def _image(d: Any) -> None:
    d.input[0].type.imageType.width = d.input[0].type.imageType.height = 16
    d.input[0].type.imageType.colorSpace = 20


def _default(d: Any) -> None:
    d.input[0].type.isOptional = True
    d.input[0].type.multiArrayType.floatDefaultValue = 0.5


def _enumerated(d: Any) -> None:
    for size in (16, 32):
        d.input[0].type.multiArrayType.enumeratedShapes.shapes.add(shape=[1, 8, size, size])


def _ranged(d: Any) -> None:
    for low, high in ((1, 1), (8, 8), (16, 64), (16, -1)):
        d.input[0].type.multiArrayType.shapeRange.sizeRanges.add(lowerBound=low, upperBound=high)


def _state(d: Any) -> None:
    kept = d.state.add(name="memory", shortDescription="kept")
    kept.type.stateType.arrayType.shape.extend([1, 4])
    kept.type.stateType.arrayType.dataType = ct.proto.FeatureTypes_pb2.ArrayFeatureType.FLOAT16


def _metadata(d: Any) -> None:
    d.metadata.author, d.metadata.license, d.metadata.versionString = "an author", "a license", "1.2"
    d.metadata.userDefined.update({"zeta": "1", "alpha": "2", "com.example.key": "\N{SNOWMAN}"})


def _classes(d: Any) -> None:
    d.predictedFeatureName, d.predictedProbabilitiesName = "label", "probabilities"
    d.output[0].type.dictionaryType.stringKeyType.SetInParent()


def _words(d: Any) -> None:
    d.input[0].shortDescription, d.output[0].shortDescription = "what goes in", "what comes out"
    d.trainingInput.add(name="once")


DESCRIPTIONS = {function.__name__[1:]: function for function in (
    _image, _default, _enumerated, _ranged, _state, _metadata, _classes, _words)}


@pytest.mark.parametrize("what", DESCRIPTIONS)
def test_the_description_stays(source, tmp_path, what):
    spec = spec_of(source)
    DESCRIPTIONS[what](spec.description)
    assert spec != spec_of(source)
    write_spec(source, spec)
    assert spec_of(edited(source, tmp_path / "saved.mlpackage")).description == spec.description


def test_build_info_versions_and_doc_strings_stay(source, tmp_path):
    spec = spec_of(source)
    assert "buildInfo" in spec.mlProgram.attributes
    spec.mlProgram.attributes["buildInfo"].docString = "of a build"
    spec.mlProgram.version, spec.mlProgram.docString, spec.isUpdatable = 7, "of a program", True
    op_named_in(spec, "relu").attributes["name"].docString = "of a name"
    op_named_in(spec, "relu").attributes["IntendedBackend"].CopyFrom(op_named_in(spec, "relu").attributes["name"])
    write_spec(source, spec)
    saved = spec_of(edited(source, tmp_path / "saved.mlpackage"))
    assert saved.mlProgram.attributes == spec.mlProgram.attributes
    assert op_named_in(saved, "relu").attributes == op_named_in(spec, "relu").attributes


def op_named_in(spec: Any, name: str) -> Any:
    return next(op for op in main_block(spec).operations if op.outputs[0].name == name)


def _messages(message: Any) -> Iterator[Any]:
    """All messages in a message."""
    yield message
    for described, value in message.ListFields():
        if described.message_type is None:
            continue
        if described.message_type.GetOptions().map_entry:
            inner = value.values() if described.message_type.fields_by_name["value"].message_type else ()
        else:
            inner = [value] if hasattr(value, "ListFields") else list(value)
        for each in inner:
            yield from _messages(each)


def test_unknown_fields_stay_at_every_level(source, tmp_path):
    spec = spec_of(source)
    messages = list(_messages(spec))
    for message in messages:
        message.MergeFromString(UNKNOWN)
    write_spec(source, spec)
    before = (source / MODEL).read_bytes().count(UNKNOWN)
    assert before == len(messages) > 100
    target = edited(source, tmp_path / "saved.mlpackage")
    old, new = (ops_of(path)["main"]["relu"] for path in (source, target))
    # The new input takes the place of an argument and its binding; nothing else of the op is made anew.
    assert new.count(UNKNOWN) == old.count(UNKNOWN) - 2
    assert (target / MODEL).read_bytes().count(UNKNOWN) == before - 2


def test_files_folders_and_items_beside_the_model_stay(source, tmp_path):
    manifest = json.loads((source / "Manifest.json").read_text())
    manifest["itemInfoEntries"]["ours"] = {"author": "us", "description": "d", "name": "ours", "path": "us/ours.txt"}
    manifest["later"] = {"unknown": [1, 2]}
    (source / "Manifest.json").write_text(json.dumps(manifest, indent=3))
    for name in ("us/ours.txt", "us/\N{SNOWMAN} and a space.txt", "com.apple.CoreML/weights/notes", ".hidden"):
        (source / "Data" / name).parent.mkdir(exist_ok=True)
        (source / "Data" / name).write_text(name)
    (source / "Data" / "empty").mkdir()
    (source / "Data" / "us" / "link").symlink_to("ours.txt")
    target = edited(source, tmp_path / "saved.mlpackage")
    assert (target / "Data" / "empty").is_dir() and (target / "Data" / "us" / "link").is_symlink()
    assert {name: data for name, data in tree(target).items() if name != MODEL} == {
        name: data for name, data in tree(source).items() if name != MODEL}


@pytest.fixture
def several(tmp_path):
    """Consts in three weight files: the usual one has all, the others are copies of it."""
    source = make(tmp_path / "several.mlpackage", linear_program(ct.target.iOS18), ct.target.iOS18)
    spec = spec_of(source)
    for op, name in (("second", EXTRA), ("first", DEEP)):
        weight = op_named_in(spec, op).inputs["weight"].arguments[0].name
        op_named_in(spec, weight).attributes["val"].blobFileValue.fileName = name
        other = (source / MODEL).parent / name.removeprefix("@model_path/")
        other.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source / WEIGHTS, other)
    write_spec(source, spec)
    return source


def test_several_weight_files_stay_where_they_are(several, tmp_path):
    package = load(several)
    assert {name for name, _ in consts(several).values()} >= {EXTRA, DEEP}
    save(package, tmp_path / "same.mlpackage")
    assert tree(tmp_path / "same.mlpackage") == tree(several)
    before = {key: blob(several, place) for key, place in consts(several).items()}
    relu, extra = op_named(package.program, "relu"), normal(1, 128)
    replace(relu, lambda: mb.add(x=relu.x, y=extra, name="more"), name="relu")
    package_at = tmp_path / "saved.mlpackage"
    save(package, package_at)
    after = consts(package_at)
    assert {key: blob(package_at, after[key]) for key in before} == before
    assert {key: after[key][0] for key in before} == {key: place[0] for key, place in consts(several).items()}
    assert np.array_equal(op_named(load(package_at).program, "relu").y.val, extra)
    old, new = (sum(each.stat().st_size for each in path.rglob("*.bin")) for path in (several, package_at))
    assert new < 0.6 * old, "what the copies hold too often is dropped"


def lift_program(target: Any = ct.target.iOS18) -> Any:
    weight, bias = normal(8, 8, 4).astype(np.float16), np.arange(8, dtype=np.float16)

    @mb.program(input_specs=[mb.TensorSpec((1, 8, 16), dtype=types.fp16)], opset_version=target)
    def program(x):
        y = mb.conv_transpose(x=x, weight=weight, bias=bias, strides=[2], pad_type="custom", pad=[1, 1], name="lift")
        return mb.relu(x=y, name="out")

    return program


@pytest.fixture
def two_functions(tmp_path):
    """Two functions over the same weights."""
    single = make(tmp_path / "single.mlpackage", lift_program(), ct.target.iOS18)
    return with_functions(tmp_path / "two.mlpackage", {"zeta": single, "alpha": single}, "zeta")


def weight_places(path: Path) -> dict[str, Any]:
    """Where the weight of the conv_transpose of each function lies."""
    found = {}
    for function, body in load(path).program.functions.items():
        op = next(op for op in body.operations if op.op_type == "conv_transpose")
        found[function] = consts(path)[function, op.weight.name]
    return found


def test_functions_that_share_weights_share_them_rewritten(two_functions, tmp_path):
    target = tmp_path / "lifted.mlpackage"
    places = weight_places(two_functions)
    assert len(set(places.values())) == 1
    report = ane.rewrite(two_functions, target, passes="lift_conv_transpose_1d")
    assert len(report.traces[0].fired) == 2
    assert set(weight_places(target).values()) == set(places.values()), "a view keeps its place"
    assert (target / WEIGHTS).read_bytes() == (two_functions / WEIGHTS).read_bytes()
    assert spec_of(target).description == spec_of(two_functions).description
    assert list(load(target).functions) == list(load(two_functions).functions)
    assert load(target).program.default_function_name == "zeta"


def doubled_weights(source: Path, target: Path, *functions: str) -> None:
    package = load(source)
    for name in functions:
        function = package.program.functions[name]
        op = next(op for op in function.operations if op.op_type == "conv_transpose")
        weight = op.weight
        with function, mb.set_before_op(op):
            new = mb.const(val=np.asarray(weight.val) * np.float16(2), name="doubled")
        op.set_inputs(weight=new, no_check_var_types=True)
        function.remove_ops([weight.op])
    save(package, target)


def blobs_in(path: Path) -> int:
    return int.from_bytes((path / WEIGHTS).read_bytes()[:4], "little")


def test_new_weights_of_functions_are_stored_once(two_functions, tmp_path):
    both, one, then = (tmp_path / f"{name}.mlpackage" for name in ("both", "one", "then"))
    doubled_weights(two_functions, both, "zeta", "alpha")
    assert len(set(weight_places(both).values())) == 1
    assert blobs_in(both) == blobs_in(two_functions)
    doubled_weights(two_functions, one, "zeta")
    assert weight_places(one)["alpha"] == weight_places(two_functions)["alpha"]
    assert blobs_in(one) == blobs_in(two_functions) + 1
    assert not touched(two_functions, one).functions.get("alpha")
    # The bytes that the second function gets are in the file by now.
    doubled_weights(one, then, "alpha")
    assert len(set(weight_places(then).values())) == 1
    assert blobs_in(then) == blobs_in(both)
