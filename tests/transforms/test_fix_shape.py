"""`--fix-shape`: one shape for a flexible input, and everything that follows from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import get_new_symbol, types

import mil_ane_passes as ane
from mil_ane_passes.transforms.contract import Draft, apply_transforms
from mil_ane_passes.transforms.fix_shape import FoldSizes
from tests.package.helpers import MODEL, WEIGHTS, host_program, make, normal, proto_ops, spec_of, tree, with_functions

EMPTY = ct.PassPipeline.EMPTY
RANGED = ct.Shape((1, 4, ct.RangeDim(2, 64, default=8)))


def flexible(path: Path, body: Any, shapes: dict[str, Any], target: Any = ct.target.iOS18, **options: Any) -> Path:
    """A package of `body`, as it was written, with inputs of these flexible shapes."""
    specs = []
    for shape in shapes.values():
        sizes = shape.shapes[0].shape if isinstance(shape, ct.EnumeratedShapes) else shape.shape
        listed = shape.shapes if isinstance(shape, ct.EnumeratedShapes) else ()
        open_at = {axis for axis in range(len(sizes)) if len({str(each.shape[axis]) for each in listed}) > 1}
        specs.append(mb.TensorSpec(tuple(
            get_new_symbol() if axis in open_at or isinstance(size, ct.RangeDim) else size
            for axis, size in enumerate(sizes))))
    names = ", ".join(shapes)
    given = eval(f"lambda {names}: body({names})", {"body": body})  # pymil reads the parameters' names
    program = mb.program(input_specs=specs, opset_version=target)(given)
    inputs = options.pop("inputs", [ct.TensorType(name, shape=shape) for name, shape in shapes.items()])
    return make(path, program, target, inputs=inputs, pass_pipeline=EMPTY, **options)


def flattening(x: Any) -> Any:
    """A convolution with its length read back from the shape: a reshape's target, a scale, a mask."""
    y = mb.conv(x=x, weight=normal(8, 4, 3), pad_type="same", name="conv")
    length = mb.gather(x=mb.shape(x=y, name="sizes"), indices=2, axis=0, name="length")
    twice = mb.mul(x=length, y=8, name="twice")
    target = mb.concat(values=(np.int32([1]), mb.expand_dims(x=twice, axes=[0], name="last")), axis=0, name="target")
    flat = mb.reshape(x=y, shape=target, name="flat")
    steps = mb.range_1d(start=0, end=twice, step=1, name="steps")
    mask = mb.cast(x=mb.greater(x=steps, y=3, name="late"), dtype="fp32", name="mask")
    return mb.mul(x=flat, y=mask, name="out")


def fixed(source: Path, *shapes: str, out: str = "fixed", **options: Any) -> Path:
    target = source.with_name(f"{out}.mlpackage")
    ane.edit(source, target, fix_shape=list(shapes), **options)
    return target


def same_bits(
    source: Path, made: Path, feeds: dict[str, Any], source_function: Any = None, function: Any = None
) -> None:
    for precision in ("float32", "float16"):
        before = ane.run(source, feeds, function=source_function, precision=precision)
        after = ane.run(made, feeds, function=function, precision=precision)
        assert before.keys() == after.keys() and before
        for name, value in before.items():
            assert after[name].shape == value.shape and after[name].tobytes() == value.tobytes(), name


def host_takes(path: Path) -> None:
    """Loads the package as coremltools does, its program too."""
    host_program(path)
    ct.models.MLModel(str(path), skip_model_load=True)


def is_flexible(path: Path) -> bool:
    """Whether anything in the model file has a size that is not fixed."""
    text = str(spec_of(path))
    return "unknown" in text or "shapeRange" in text or "enumerated" in text or "imageSizeRange" in text


@pytest.fixture(scope="module")
def ranged(tmp_path_factory: Any) -> Path:
    return flexible(tmp_path_factory.mktemp("ranged") / "source.mlpackage", flattening, {"x": RANGED})


def test_what_computes_shapes_is_gone_and_the_rest_is_byte_for_byte(ranged, tmp_path):
    source_files = tree(ranged)
    made = tmp_path / "fixed.mlpackage"
    report = ane.edit(ranged, made, fix_shape={"x": (1, 4, 13)})
    assert report.status == "written" and tree(ranged) == source_files
    same_bits(ranged, made, {"x": normal(1, 4, 13)})
    before, after = proto_ops(ranged), proto_ops(made)
    assert not {"sizes", "length", "twice", "last", "steps", "late"} & after.keys()
    kinds = {name: op.outputs[0].op.op_type for op in host_program(made).functions["main"].operations
             for name in [op.outputs[0].name]}
    assert kinds["target"] == kinds["mask"] == "const" and kinds["flat"] == "reshape"
    assert {name for name in before.keys() & after.keys() if before[name] != after[name]} == {
        "conv", "flat", "target", "mask", "out"}
    assert not is_flexible(made)
    host_takes(made)
    assert "folded to constants: 2 ops" in str(report)


def test_the_description_has_the_shape_of_inputs_and_outputs(ranged, tmp_path):
    made = tmp_path / "fixed.mlpackage"
    ane.edit(ranged, made, fix_shape=["x=1,4,16"])
    old, new = spec_of(ranged).description, spec_of(made).description
    assert list(new.input[0].type.multiArrayType.shape) == [1, 4, 16]
    assert list(new.output[0].type.multiArrayType.shape) == [1, 128]
    assert new.metadata == old.metadata and spec_of(made).specificationVersion == spec_of(ranged).specificationVersion


def test_weights_stay_where_they_are(ranged, tmp_path):
    made = tmp_path / "fixed.mlpackage"
    ane.edit(ranged, made, fix_shape=["x=1,4,3"])
    old, new = ((path / WEIGHTS).read_bytes() for path in (ranged, made))
    assert new[64 : len(old)] == old[64:] and len(new) > len(old), "the mask is behind the weights"


def test_functions_for_several_shapes_share_the_weights(ranged, tmp_path):
    made = tmp_path / "fixed.mlpackage"
    report = ane.edit(ranged, made, fix_shape=["x=1,4,5", "x=1,4,9", "x=1,4,64"])
    spec = spec_of(made)
    assert list(ane.load(made).functions) == ["main_1x4x5", "main_1x4x9", "main_1x4x64"]
    assert spec.description.defaultFunctionName == "main_1x4x5" and not spec.description.input
    for length in (5, 9, 64):
        same_bits(ranged, made, {"x": normal(1, 4, length)}, function=f"main_1x4x{length}")
        described = next(f for f in spec.description.functions if f.name == f"main_1x4x{length}")
        assert list(described.input[0].type.multiArrayType.shape) == [1, 4, length]
    weights = {proto_ops(made, name)["conv_weight_0"] for name in ane.load(made).functions}
    assert len(weights) == 1 and not is_flexible(made)
    assert report.to_dict()["changed"] is True
    host_takes(made)


def test_the_report_names_the_functions_that_are_made(ranged):
    report = ane.edit(ranged, dry_run=True, fix_shape=[{"x": (1, 4, 5)}, {"x": (1, 4, 9)}])
    assert [(each.function, each.value) for each in report.done] == [
        ("main_1x4x5", "x"), ("main_1x4x5", ""), ("main_1x4x9", "x"), ("main_1x4x9", "")]
    assert "main_1x4x9: 'x' fixed to (1, 4, 9)" in str(report)


def test_functions_have_the_names_that_are_given(ranged, tmp_path):
    made = tmp_path / "fixed.mlpackage"
    ane.edit(ranged, made, fix_shape={"long": {"x": (1, 4, 64)}, "short": {"x": (1, 4, 2)}})
    assert ane.load(made).functions == ("long", "short")
    ane.edit(ranged, tmp_path / "one.mlpackage", fix_shape=["only:x=1,4,3"])
    assert spec_of(tmp_path / "one.mlpackage").description.defaultFunctionName == "only"
    same_bits(ranged, tmp_path / "one.mlpackage", {"x": normal(1, 4, 3)}, function="only")


def test_enumerated_shapes(tmp_path):
    shapes = ct.EnumeratedShapes([(1, 4, 4), (1, 4, 12)])
    source = flexible(tmp_path / "source.mlpackage", flattening, {"x": shapes})
    made = fixed(source, "x=1,4,12")
    same_bits(source, made, {"x": normal(1, 4, 12)})
    assert not is_flexible(made)
    with pytest.raises(ane.InputError, match=r"\(1, 4, 5\) is not among .* expected one of \(1, 4, 4\), \(1, 4, 12\)"):
        ane.edit(source, tmp_path / "no.mlpackage", fix_shape=["x=1,4,5"])


@pytest.mark.parametrize("sizes", ["ranged", "listed"])
def test_images(tmp_path, sizes):
    shape = (ct.Shape((1, 3, ct.RangeDim(8, 32, default=8), ct.RangeDim(8, 32, default=16))) if sizes == "ranged"
             else ct.EnumeratedShapes([(1, 3, 8, 16), (1, 3, 24, 12)]))
    source = flexible(tmp_path / "source.mlpackage", lambda x: mb.relu(x=mb.avg_pool(
        x=x, kernel_sizes=[2, 2], strides=[2, 2], pad_type="valid"), name="y"), {"x": shape},
        inputs=[ct.ImageType("x", shape=shape)])
    made = fixed(source, "x=1,3,24,12")
    image = spec_of(made).description.input[0].type.imageType
    assert (image.height, image.width, image.WhichOneof("SizeFlexibility")) == (24, 12, None)
    assert list(spec_of(made).description.output[0].type.multiArrayType.shape) == [1, 3, 12, 6]
    with pytest.raises(ane.InputError, match="not among the shapes of 'x'"):
        ane.edit(source, tmp_path / "no.mlpackage", fix_shape=["x=1,3,24,40"])


def test_an_input_that_is_not_named_stays_flexible(tmp_path):
    source = flexible(tmp_path / "source.mlpackage", lambda a, b: (mb.relu(x=a, name="y"), mb.tanh(x=b, name="z")),
                      {"a": RANGED, "b": RANGED})
    made = tmp_path / "fixed.mlpackage"
    report = ane.edit(source, made, fix_shape=["a=1,4,6"])
    assert "still flexible: b" in str(report) and "1 values keep a flexible shape" in str(report)
    described = spec_of(made).description
    assert described.input[0].type.multiArrayType.WhichOneof("ShapeFlexibility") is None
    assert described.input[1] == spec_of(source).description.input[1]
    same_bits(source, made, {"a": normal(1, 4, 6), "b": normal(1, 4, 9)})


def test_what_depends_on_data_stays_and_is_named(tmp_path):
    def body(x):
        rows = mb.non_zero(x=x, name="rows")
        return mb.cast(x=rows, dtype="fp32", name="y"), mb.relu(x=x, name="z")

    source = flexible(tmp_path / "source.mlpackage", body, {"x": RANGED})
    report = ane.edit(source, tmp_path / "fixed.mlpackage", fix_shape=["x=1,4,6"])
    assert "2 values keep a flexible shape" in str(report) and "rows, y" in str(report)
    same_bits(source, tmp_path / "fixed.mlpackage", {"x": normal(1, 4, 6)})


def test_shapes_that_do_not_go_together_are_refused(tmp_path):
    source = flexible(tmp_path / "source.mlpackage", lambda a, b: mb.add(x=a, y=b, name="sum"),
                      {"a": RANGED, "b": RANGED})
    with pytest.raises(ane.InputError, match=r"a = \(1, 4, 6\), b = \(1, 4, 7\) the op 'sum' \(add\) is impossible"):
        ane.edit(source, tmp_path / "fixed.mlpackage", fix_shape=["a=1,4,6", "b=1,4,7"])
    assert not (tmp_path / "fixed.mlpackage").exists()
    fixed(source, "a=1,4,7", "b=1,4,7", out="well")


@pytest.mark.parametrize("option", ["fix_shape", "pad_shape"])
def test_a_reshape_to_the_sizes_of_a_trace_says_so(tmp_path, option):
    source = flexible(tmp_path / "source.mlpackage", lambda a: mb.reshape(x=a, shape=[1, 4, 2, 3], name="y"),
                      {"a": RANGED})
    with pytest.raises(ane.InputError, match=r"'y' \(reshape\) is impossible: .*[^.]; the sizes \(1, 4, 2, 3\) are "
                       "constants: a trace fixes the number of tokens"):
        ane.edit(source, tmp_path / "fixed.mlpackage", **{option: ["a=1,4,7"]})


def test_a_reshape_to_computed_sizes_is_not_said_to_have_constant_ones(tmp_path):
    def body(a):
        half = mb.floor_div(x=mb.gather(x=mb.shape(x=a), indices=[2], axis=0), y=2)
        return mb.reshape(x=a, shape=mb.concat(values=[[1, 4, 2], half], axis=0), name="y")

    source = flexible(tmp_path / "source.mlpackage", body, {"a": RANGED})
    with pytest.raises(ane.InputError, match=r"'y' \(reshape\) is impossible: .*; expected consistent shapes"):
        ane.edit(source, tmp_path / "fixed.mlpackage", fix_shape=["a=1,4,7"])


def test_ends_counted_from_the_back_are_those_of_each_slice(tmp_path):
    def body(a, b):
        rows = mb.slice_by_index(x=mb.shape(x=a), begin=[0], end=[1])
        ends = mb.concat(values=(rows, np.int32([-1, -2])), axis=0, name="ends")
        cut = [mb.slice_by_index(x=x, begin=[0, 0, 0], end=[1, -1, -2], name=f"{x.name}_cut") for x in (a, b)]
        late = [mb.slice_by_index(x=x, begin=np.int32([0, -3, -4]), end=ends, name=f"{x.name}_late") for x in (a, b)]
        return *cut, *late

    source = flexible(tmp_path / "source.mlpackage", body, {"a": RANGED, "b": RANGED})
    made = fixed(source, "a=1,4,20", "b=1,4,9")
    same_bits(source, made, {"a": normal(1, 4, 20), "b": normal(1, 4, 9)})
    assert not is_flexible(made) and "(opaque)" not in str(ane.load(made).program)


def test_a_number_chosen_of_two_becomes_a_constant(tmp_path):
    def body(x):
        length = mb.gather(x=mb.shape(x=x), indices=2, axis=0)
        chosen = mb.select(cond=mb.greater(x=length, y=9), a=length, b=3)
        return mb.mul(x=x, y=mb.cast(x=mb.add(x=chosen, y=0), dtype="fp32"), name="y"), mb.gather(
            x=x, indices=mb.select(cond=mb.greater(x=length, y=9), a=1, b=0, name="row"), axis=1, name="z")

    source = flexible(tmp_path / "source.mlpackage", body, {"x": RANGED})
    made = fixed(source, "x=1,4,13")
    same_bits(source, made, {"x": normal(1, 4, 13)})
    kinds = {op.outputs[0].name: op.type for op in spec_of(made).mlProgram.functions["main"].block_specializations[
        "CoreML8"].operations}
    assert kinds["row"] == "const" and "select" not in kinds.values()
    host_takes(made)


def test_an_output_that_is_a_shape_stays_an_output(tmp_path):
    source = flexible(tmp_path / "source.mlpackage", lambda x: (mb.shape(x=x, name="sizes"), mb.relu(x=x, name="y")),
                      {"x": RANGED})
    made = fixed(source, "x=1,4,6")
    assert proto_ops(source)["sizes"] == proto_ops(made)["sizes"]
    same_bits(source, made, {"x": normal(1, 4, 6)})


def test_ops_that_were_there_for_nothing_stay(tmp_path):
    def body(x):
        mb.gather(x=mb.shape(x=x, name="sizes"), indices=2, axis=0, name="unused")
        return mb.relu(x=x, name="y")

    source = flexible(tmp_path / "source.mlpackage", body, {"x": RANGED})
    made = fixed(source, "x=1,4,6")
    assert {"sizes", "unused"} <= proto_ops(made).keys()


def test_states_and_a_linter_without_findings_on_shapes(tmp_path):
    @mb.program(input_specs=[mb.TensorSpec((1, get_new_symbol(), 8)), mb.StateTensorSpec((1, 8), types.fp16)],
                opset_version=ct.target.iOS18)
    def program(x, cache):
        mean = mb.reduce_mean(x=x, axes=[1], keep_dims=False)
        new = mb.add(x=mb.read_state(input=cache), y=mb.cast(x=mean, dtype="fp16"), name="new")
        return mb.cast(x=mb.coreml_update_state(state=cache, value=new), dtype="fp32", name="y")

    shape = ct.Shape((1, ct.RangeDim(1, 9, default=4), 8))
    source = make(tmp_path / "source.mlpackage", program, ct.target.iOS18, pass_pipeline=EMPTY,
                  inputs=[ct.TensorType("x", shape=shape)])
    made = fixed(source, "x=1,7,8")
    same_bits(source, made, {"x": normal(1, 7, 8)})
    assert spec_of(made).description.state == spec_of(source).description.state
    codes = [{finding["code"] for finding in ane.lint(path).to_dict()["findings"]} for path in (source, made)]
    assert "ANE504" in codes[0] and "ANE504" not in codes[1]


@pytest.mark.parametrize(("given", "said"), [
    (["x=1,4"], r"\(1, 4\) has 2 dimensions; 'x' has 3: \(1, 4, 2..64\)"),
    (["x=1,4,65"], r"not among the shapes of 'x'; expected one of \(1, 4, 2..64\)"),
    (["x=1,5,8"], "not among the shapes"),
    (["y=1,4,8"], "no input or state 'y'; the model has x"),
    (["x=1,4,eight"], "expected whole numbers of 1 or more"),
    (["x=1,4,0"], "expected whole numbers of 1 or more"),
    (["x=1,4,-8"], "expected whole numbers of 1 or more"),
    (["x"], "or texts NAME=1,3,224,224 or FUNCTION:NAME=1,3,224,224"),
    (["=1,4,8"], "names no input"),
    (["9:x=1,4,8"], "not a name that Core ML accepts"),
    (["f:x=1,4,8", "x=1,4,9"], "some shapes are given with a function's name and some without"),
    (["f:x=1,4,8", "f:x=1,4,9"], "input 'x' of function 'f' is given twice"),
    (["x=1,4,8", "x=1,4,8"], "two functions of the same shapes would be called 'main'"),
    ({"x": 4}, "expected a name and a shape"),
    ({"x": (1, 4, 2.5)}, "expected whole numbers"),
])
def test_refusals_say_why(ranged, tmp_path, given, said):
    with pytest.raises(ane.InputError, match=said):
        ane.edit(ranged, tmp_path / "no.mlpackage", fix_shape=given)
    assert not list(tmp_path.iterdir())


def test_several_functions_need_a_model_that_may_have_them(tmp_path):
    source = flexible(tmp_path / "source.mlpackage", flattening, {"x": RANGED}, ct.target.iOS17)
    with pytest.raises(ane.InputError, match=r"need a model for iOS 18 or later .*this one has 8"):
        ane.edit(source, tmp_path / "no.mlpackage", fix_shape=["x=1,4,8", "x=1,4,9"])
    made = fixed(source, "x=1,4,9")
    same_bits(source, made, {"x": normal(1, 4, 9)})
    assert spec_of(made).specificationVersion == 8


def test_a_shape_that_is_fixed(ranged, tmp_path):
    made = tmp_path / "fixed.mlpackage"
    ane.edit(ranged, made, fix_shape=["x=1,4,8"])
    again = tmp_path / "again.mlpackage"
    assert ane.edit(made, again, fix_shape=["x=1,4,8"]).status == "unchanged"
    assert tree(again) == tree(made)
    with pytest.raises(ane.InputError, match=r"the shape of 'x' is fixed to \(1, 4, 8\)"):
        ane.edit(made, tmp_path / "no.mlpackage", fix_shape=["x=1,4,9"])


def test_one_of_several_functions(ranged, tmp_path):
    other = flexible(tmp_path / "other.mlpackage", lambda x: mb.relu(x=x, name="y"), {"x": RANGED})
    both = with_functions(tmp_path / "both.mlpackage", {"first": ranged, "second": other}, "second")
    made = tmp_path / "fixed.mlpackage"
    ane.edit(both, made, fix_shape=["x=1,4,8", "x=1,4,9"], function="first")
    assert sorted(ane.load(made).functions) == ["first_1x4x8", "first_1x4x9", "second"]
    assert spec_of(made).description.defaultFunctionName == "second"
    assert proto_ops(made, "second") == proto_ops(both, "second")
    same_bits(both, made, {"x": normal(1, 4, 9)}, "first", "first_1x4x9")
    with pytest.raises(ane.InputError, match=r"several functions have these inputs .*expected function= with the one"):
        ane.edit(both, tmp_path / "no.mlpackage", fix_shape=["x=1,4,8", "x=1,4,9"])
    ane.edit(both, tmp_path / "all.mlpackage", fix_shape=["x=1,4,8"])
    assert not is_flexible(tmp_path / "all.mlpackage")


def test_the_command(ranged, tmp_path, capsys):
    from mil_ane_passes.commands.main import main

    made = tmp_path / "fixed.mlpackage"
    assert main(["edit", str(ranged), "-o", str(made), "--fix-shape", "x=1,4,8", "--rename", "x=image"]) == 0
    assert "'x' fixed to (1, 4, 8)" in capsys.readouterr().out
    assert spec_of(made).description.input[0].name == "image" and (made / MODEL).is_file()
    assert main(["edit", str(ranged), "-o", str(tmp_path / "no.mlpackage"), "--fix-shape", "x=1,4,99"]) == 2
    assert "convert the source model again" in capsys.readouterr().err


@pytest.mark.parametrize("wave", [True, False])
def test_floats_that_may_be_rounded_otherwise_are_said(tmp_path, wave):
    def body(x):
        steps = mb.range_1d(start=0, end=mb.gather(x=mb.shape(x=x), indices=2, axis=0), step=1)
        angles = mb.mul(x=mb.cast(x=steps, dtype="fp32"), y=np.float32(0.3), name="angles")
        return mb.add(x=x, y=mb.cos(x=angles, name="wave") if wave else angles, name="y")

    source = flexible(tmp_path / "source.mlpackage", body, {"x": RANGED})
    report = ane.edit(source, tmp_path / "fixed.mlpackage", fix_shape=["x=1,4,40"])
    assert report.exact is not wave and ("1 constants hold floats" in str(report)) is wave
    assert "wave" not in proto_ops(tmp_path / "fixed.mlpackage") or b"cos" not in proto_ops(
        tmp_path / "fixed.mlpackage")["wave"]
    feeds = {"x": normal(1, 4, 40)}
    before, after = (ane.run(path, feeds)["y"] for path in (source, tmp_path / "fixed.mlpackage"))
    assert np.abs(before - after).max() <= (1e-6 if wave else 0)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("edits", [
    {"fix_shape": ["x=1,4,40"]}, {"fix_shape": ["x=1,4,40", "x=1,4,50"]},
    {"fix_shape": ["x=1,4,40"], "fold_sizes": True}, {"pad_shape": ["x=1,4,40"], "fold_sizes": True},
    {"fix_shape": ["x=1,4,40"], "rename": {"wave": "waves"}}, {"fix_shape": ["x=1,4,40"], "split_at": ["y"]}], ids=str)
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("wave", [True, False])
def test_tables_of_positions_are_compared_before_rounding(tmp_path, edits, dtype, wave):
    source = flexible(tmp_path / "source.mlpackage", positions(dtype, wave), {"x": RANGED})
    report = ane.edit(source, tmp_path / "made.mlpackage", verify=True, **edits)
    assert report.status == "written", str(report)
    rounds = wave or "fix_shape" in edits or dtype == "fp32"  # fp32 has room for products of fp16
    assert ("computed from sizes: compared with exact values before rounding" in str(report)) is rounds


def test_a_table_of_positions_of_other_values_is_found(tmp_path, monkeypatch):
    from mil_ane_passes.transforms import fix_shape

    def shift(var, before):
        value = np.asarray(var.val) + np.float16(0.1) if var.name == "wave" else np.asarray(var.val)
        return fix_shape.make_const(value if value.ndim else value[()], var.dtype, var.name, before)

    source = flexible(tmp_path / "source.mlpackage", positions("fp16", True), {"x": RANGED})
    monkeypatch.setattr(fix_shape, "_make_const_of", shift)
    report = ane.edit(source, tmp_path / "made.mlpackage", verify=True, fix_shape=["x=1,4,40"])
    assert report.status == "rejected" and "main, constants, float64: wave" in str(report), str(report)
    assert not (tmp_path / "made.mlpackage").exists()


def test_a_constant_that_is_computed_from_a_rounded_one_is_exact(tmp_path):
    """`--fix-shape` folds the table, and `--fold-sizes` the large product of the table and a weight."""
    weight = normal(32, 32).astype(np.float16)

    def body(x):
        steps = mb.range_1d(start=0, end=mb.gather(x=mb.shape(x=x), indices=2, axis=0), step=1)
        angles = mb.mul(x=mb.cast(x=steps, dtype="fp16"), y=np.float16(0.3))
        table = mb.sin(x=mb.mul(x=mb.expand_dims(x=angles, axes=[1]), y=normal(1, 32).astype(np.float16)))
        product = mb.cast(x=mb.linear(x=table, weight=weight), dtype="fp32")
        return mb.add(x=x, y=mb.reduce_sum(x=product, axes=[1], keep_dims=False), name="out")

    source = flexible(tmp_path / "source.mlpackage", body, {"x": RANGED})
    report = ane.edit(source, tmp_path / "made.mlpackage", verify=True, fix_shape=["x=1,4,40"], fold_sizes=True)
    assert report.status == "written", str(report)


def test_a_value_of_another_size_than_declared_is_not_folded(tmp_path):
    """coremltools declares 5 elements for a slice by size of the last two of three."""
    def evaluate(function, values, precision, constants):
        return [np.zeros((2,) if tuple(var.shape) == (3,) else tuple(var.shape)) for var in values]

    program = mb.program(input_specs=[mb.TensorSpec((3,))], opset_version=ct.target.iOS18)(
        lambda x: mb.add(x=x, y=mb.cos(x=mb.const(val=np.float32([1, 2, 3]), name="angles")), name="out"))
    draft, = apply_transforms(Draft(program, "a program"), [FoldSizes(evaluate)])
    assert [op.op_type for op in draft.program.functions["main"].operations if op.op_type != "const"] == ["cos", "add"]


def test_an_update_that_ends_before_the_last_element(tmp_path):
    """coremltools replaces negative ends by sizes in the arrays of the file, which are read-only."""
    def body(x):
        moved = mb.slice_by_index(x=x, begin=[0, 0, 1], end=[1, 4, 0], end_mask=[True, True, True])
        return mb.slice_update(x=x, update=moved, begin=[0, 0, 0], end=[1, 4, -1], name="out")

    source = flexible(tmp_path / "source.mlpackage", body, {"x": RANGED})
    made = tmp_path / "made.mlpackage"
    assert ane.edit(source, made, verify=True, fix_shape=["x=1,4,5"]).status == "written"
    assert ane.verify(made, made).equal


@pytest.mark.parametrize("fold", [False, True])
def test_a_mask_of_two_numbers_has_the_shape_of_its_condition(tmp_path, fold):
    """coremltools declares the select of two numbers as a number."""
    def body(x):
        steps = mb.range_1d(start=0, end=mb.gather(x=mb.shape(x=x), indices=2, axis=0), step=1)
        later = mb.greater(x=mb.expand_dims(x=steps, axes=[0]), y=mb.expand_dims(x=steps, axes=[1]))
        mask = mb.select(cond=later, a=np.float32(-1e4), b=np.float32(0))
        scores = mb.add(x=mb.matmul(x=x, y=x, transpose_x=True), y=mask)
        return mb.matmul(x=x, y=mb.softmax(x=scores, axis=-1), name="out")

    source = flexible(tmp_path / "source.mlpackage", body, {"x": RANGED})
    made = tmp_path / "made.mlpackage"
    report = ane.edit(source, made, verify=True, fix_shape=["x=1,4,12"], fold_sizes=fold)
    assert report.status == "written", str(report)
    assert not any(each.startswith(b"\n\x06select") for each in proto_ops(made).values())
    host_takes(made)


FOLDED_WRONGLY = {
    "concat": lambda p: mb.concat(values=[p, mb.add(x=p, y=10)], axis=0, interleave=True),
    "scatter_along_axis": lambda p: mb.scatter_along_axis(data=p, indices=np.int32([1]), updates=np.int32([10]), axis=0,
                                                          mode="add"),
    "cumsum": lambda p: mb.cumsum(x=p, axis=0, exclusive=True),
    "flatten2d": lambda p: mb.flatten2d(x=p, axis=0),
    "topk": lambda p: mb.topk(x=mb.cast(x=p, dtype="uint16"), k=3, axis=0)[0],
    "argsort": lambda p: mb.argsort(x=mb.sub(x=p, y=np.int32(2**31 - 1)), axis=0),
    "gather": lambda p: mb.gather(x=mb.reshape(x=mb.range_1d(start=0, end=20, step=1), shape=[5, 2, 2]),
                                  indices=mb.mod(x=p, y=np.int32(2)), axis=-1, batch_dims=1),
    "thresholded_relu": lambda p: mb.add(x=mb.thresholded_relu(x=mb.cast(x=p, dtype="fp32"), alpha=np.float32(2)),
                                         y=mb.cast(x=p, dtype="fp32"))}
"Ops whose values coremltools infers wrongly, of positions."


@pytest.mark.parametrize("name", FOLDED_WRONGLY)
def test_values_that_coremltools_infers_wrongly_are_not_folded(tmp_path, name):
    def body(x):
        steps = mb.range_1d(start=0, end=mb.gather(x=mb.shape(x=x), indices=2, axis=0), step=1)
        made = mb.cast(x=FOLDED_WRONGLY[name](steps), dtype="fp32")
        return mb.add(x=made, y=mb.mul(x=mb.reduce_sum(x=x, keep_dims=False), y=np.float32(0)), name="out")

    source = flexible(tmp_path / "source.mlpackage", body, {"x": RANGED})
    ane.edit(source, tmp_path / "made.mlpackage", fix_shape=["x=1,4,5"], fold_sizes=True)
    feeds = {"x": normal(1, 4, 5)}
    np.testing.assert_array_equal(*(ane.run(path, feeds)["out"] for path in (source, tmp_path / "made.mlpackage")))


def positions(dtype, wave):
    """A table of sines of positions, or of the angles, that is added and multiplied."""
    def body(x):
        steps = mb.range_1d(start=0, end=mb.gather(x=mb.shape(x=x), indices=2, axis=0), step=1)
        kind = {"fp16": np.float16, "fp32": np.float32}[dtype]
        angles = mb.mul(x=mb.cast(x=steps, dtype=dtype), y=kind(0.3))
        table = mb.cast(x=mb.sin(x=angles), dtype="fp32", name="wave") if wave else mb.cast(
            x=angles, dtype="fp32", name="wave")
        y = mb.add(x=x, y=table, name="y")
        return mb.mul(x=mb.relu(x=y), y=table, name="out")

    return body


def test_new_weights_meet_the_edits_after(tmp_path):
    """Weights that are there twice are found beside those that are added, and names change after shapes."""
    twin = normal(8, 4, 3)

    def body(x):
        y = mb.add(x=mb.conv(x=x, weight=twin, pad_type="same"), y=mb.conv(x=x, weight=twin.copy(), pad_type="same"))
        steps = mb.range_1d(start=0, end=mb.gather(x=mb.shape(x=x), indices=2, axis=0), step=1)
        return mb.mul(x=y, y=mb.cast(x=steps, dtype="fp32", name="steps"), name="out")

    source = flexible(tmp_path / "source.mlpackage", body, {"x": RANGED})
    made = tmp_path / "fixed.mlpackage"
    report = ane.edit(source, made, fix_shape=["x=1,4,40", "x=1,4,50"], rename={"x": "sound"}, dedup_weights=True)
    assert {each.option for each in report.done if each.changed} == {"--fix-shape", "--rename", "--dedup-weights"}
    feeds = {"x": normal(1, 4, 50)}
    got = ane.run(made, {"sound": feeds["x"]}, function="main_1x4x50")
    assert got["out"].tobytes() == ane.run(source, feeds)["out"].tobytes()
    host_takes(made)


def test_a_classifier(tmp_path):
    source = flexible(tmp_path / "source.mlpackage", lambda x: mb.reduce_mean(x=x, axes=[2], name="scores"),
                      {"x": RANGED}, classifier_config=ct.ClassifierConfig(["a", "b", "c", "d"]))
    made = fixed(source, "x=1,4,20")
    feeds = {"x": normal(1, 4, 20)}
    assert ane.run(source, feeds)["classLabel"] == ane.run(made, feeds)["classLabel"]
    assert spec_of(made).description.output == spec_of(source).description.output
    with pytest.raises(ane.InputError, match="'main' is a classifier"):
        ane.edit(source, tmp_path / "no.mlpackage", fix_shape=["x=1,4,20", "x=1,4,30"])
