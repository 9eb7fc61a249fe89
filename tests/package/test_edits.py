"""An edited program: only what changed is new in the file, weights keep their places, names stay."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest
from coremltools import proto
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import get_new_symbol, types

from mil_ane_passes.ir.clone import clone_program
from mil_ane_passes.ir.constants import LazyValue, make_reshaped_const
from mil_ane_passes.package import load, save

from .helpers import (
    MODEL,
    WEIGHTS,
    conv_program,
    facts,
    host_program,
    linear_program,
    main_block,
    make,
    normal,
    op_named,
    proto_ops,
    replace,
    spec_of,
    write_spec,
)
from .test_unchanged import classifier, compressed, control_flow, multifunction, with_state


@pytest.fixture
def target(tmp_path):
    return tmp_path / "saved.mlpackage"


def saved(package, target):
    assert not package.is_unchanged()
    save(package, target)
    again = load(target)
    again.program.validate()
    assert sorted(map(repr, facts(again.program))) == sorted(map(repr, facts(host_program(target))))
    return again


def changed_ops(source, target, function="main"):
    before, after = proto_ops(source, function), proto_ops(target, function)
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


def test_a_replaced_op_is_the_only_change(source, target):
    package = load(source)
    relu = op_named(package.program, "relu")
    replace(relu, lambda: mb.sigmoid(x=relu.x), name="relu")
    again = saved(package, target)
    assert changed_ops(source, target) == {"relu"}
    assert (target / WEIGHTS).read_bytes() == (source / WEIGHTS).read_bytes()
    assert op_named(again.program, "relu").op_type == "sigmoid"


def test_a_rebound_input_keeps_the_ops_other_fields(source, target):
    spec = spec_of(source)
    for op in main_block(spec).operations:
        if op.type == "relu":
            op.attributes["IntendedBackend"].CopyFrom(op.attributes["name"])
    write_spec(source, spec)
    package = load(source)
    relu = op_named(package.program, "relu")
    with package.program.functions["main"], mb.set_before_op(relu):
        doubled = mb.add(x=relu.x, y=relu.x, name="doubled")
    relu.set_inputs(x=doubled)
    save(package, target)
    assert changed_ops(source, target) == {"relu", "doubled"}
    relu_proto = next(op for op in main_block(spec_of(target)).operations if op.type == "relu")
    assert "IntendedBackend" in relu_proto.attributes
    assert relu_proto.inputs["x"].arguments[0].name == "doubled"


def test_taken_names_are_suffixed_on_the_new_op(source, target):
    package = load(source)
    relu = op_named(package.program, "relu")
    with package.program.functions["main"], mb.set_before_op(relu):
        clash = mb.add(x=relu.x, y=relu.x, name="flat")
    relu.set_inputs(x=clash)
    again = saved(package, target)
    assert changed_ops(source, target) == {"relu", "flat_1"}
    assert op_named(again.program, "flat_1").op_type == "add"
    assert clash.name == "flat", "saving leaves the program as it is"


def test_an_output_keeps_its_name_when_the_old_op_stays(source, target):
    package = load(source)
    function = package.program.functions["main"]
    old = function.outputs[0]
    with function:
        new = mb.mul(x=old, y=2.0, name="out")
    function.set_outputs([new])
    again = saved(package, target)
    assert [var.name for var in again.program.functions["main"].outputs] == [
        var.name for var in load(source).program.functions["main"].outputs
    ]
    assert again.program.functions["main"].outputs[0].op.op_type == "mul"


def test_dead_new_consts_and_synthetic_defaults_are_not_written(source, target):
    package = load(source)
    relu = op_named(package.program, "relu")
    with package.program.functions["main"], mb.set_before_op(relu):
        mb.const(val=normal(100), name="dead")
    assert package.is_unchanged()
    replace(relu, lambda: mb.sigmoid(x=relu.x), name="relu")
    saved(package, target)
    assert b"dead" not in (target / MODEL).read_bytes()


def test_reshaped_view_keeps_its_blob(source, target):
    package = load(source)
    conv = op_named(package.program, "conv")
    with package.program.functions["main"], mb.set_before_op(conv):
        view = make_reshaped_const(conv.weight, (16, 8, 9), "view", before_op=conv)
        flat = mb.const(val=np.asarray(conv.weight.val).reshape(-1), name="plain_view")
        extra = mb.slice_by_size(x=view, begin=[0, 0, 0], size=[1, 1, 1], name="extra")
        other = mb.slice_by_size(x=flat, begin=[0], size=[1], name="other")
    with package.program.functions["main"]:
        old = package.program.functions["main"].outputs[0]
        out = mb.add(x=mb.add(x=old, y=extra), y=other, name=old.name)
    old.name = "before"
    package.program.functions["main"].set_outputs([out])
    saved(package, target)
    assert (target / WEIGHTS).read_bytes() == (source / WEIGHTS).read_bytes()
    offsets = {
        op.outputs[0].name: op.attributes["val"].blobFileValue.offset
        for op in main_block(spec_of(target)).operations
        if op.type == "const"
    }
    assert offsets["view"] == offsets["plain_view"] == offsets[conv.weight.name]


def test_new_bytes_are_appended_once(source, target):
    package = load(source)
    relu, extra = op_named(package.program, "relu"), normal(1, 16, 16, 16)
    replace(relu, lambda: mb.add(x=mb.add(x=relu.x, y=extra), y=extra.copy()), name="relu")
    again = saved(package, target)
    old, new = (source / WEIGHTS).read_bytes(), (target / WEIGHTS).read_bytes()
    assert new[64 : len(old)] == old[64:]
    assert len(new) - len(old) <= 128 + extra.nbytes
    assert int.from_bytes(new[:4], "little") == int.from_bytes(old[:4], "little") + 1
    assert np.array_equal(op_named(again.program, "relu").y.val, extra)


def test_the_first_weight_of_a_package_without_any_makes_its_file(tmp_path, target):
    @mb.program(input_specs=[mb.TensorSpec((2, 64))])
    def program(x):
        return mb.relu(x=x, name="relu")

    source = make(tmp_path / "source.mlpackage", program)
    assert not (source / WEIGHTS).exists()
    package = load(source)
    relu, extra = op_named(package.program, "relu"), normal(64, 64)
    replace(relu, lambda: mb.matmul(x=relu.x, y=extra), name="relu")
    again = saved(package, target)
    assert np.array_equal(op_named(again.program, "relu").y.val, extra)


def test_dead_blobs_are_dropped(tmp_path, target):
    source = make(tmp_path / "big.mlpackage", linear_program(ct.target.iOS18), ct.target.iOS18)
    package = load(source)
    second = op_named(package.program, "second")
    kept = np.array(op_named(package.program, "first").weight.val)
    weight = second.weight.op
    replace(second, lambda: mb.matmul(x=second.x, y=normal(128, 64, seed=1)), name="second")
    weight.enclosing_block.remove_ops([weight])
    again = saved(package, target)
    # One weight died and one of the same size is new; the biases live.
    assert (target / WEIGHTS).stat().st_size <= (source / WEIGHTS).stat().st_size
    assert np.array_equal(op_named(again.program, "first").weight.val, kept)
    first = op_named(again.program, "first")
    weight = first.weight.op
    replace(first, lambda: mb.tile(x=first.x, reps=[1, 2]), "first")
    weight.enclosing_block.remove_ops([weight])
    save(again, tmp_path / "third.mlpackage")
    assert (tmp_path / "third.mlpackage" / WEIGHTS).stat().st_size < 0.6 * (target / WEIGHTS).stat().st_size
    facts(host_program(tmp_path / "third.mlpackage"))


def test_blobs_shared_by_functions_live_while_one_uses_them(tmp_path, target):
    source = multifunction(tmp_path / "multi.mlpackage")
    package = load(source)
    assert package.functions == ("zeta", "alpha") or package.functions == ("alpha", "zeta")
    assert package.program.default_function_name == "zeta"
    conv = op_named(package.program, "conv", "alpha")
    weight = conv.weight.op
    replace(conv, lambda: mb.concat(values=[conv.x, conv.x], axis=1), name="conv")
    weight.enclosing_block.remove_ops([weight])
    saved(package, target)
    assert changed_ops(source, target, "zeta") == set()
    assert (target / WEIGHTS).read_bytes() == (source / WEIGHTS).read_bytes()


def test_edit_inside_nested_blocks_keeps_the_rest(tmp_path, target):
    source = make(tmp_path / "nested.mlpackage", control_flow())
    package = load(source)
    one = op_named(package.program, "one")
    replace(one, lambda: mb.sub(x=one.x, y=one.y, name="one"), name="one")
    saved(package, target)
    (outer,) = changed_ops(source, target)
    before, after = proto_ops(source)[outer], proto_ops(target)[outer]
    before, after = proto.MIL_pb2.Operation.FromString(before), proto.MIL_pb2.Operation.FromString(after)
    new = next(op for op in after.blocks[0].operations if op.outputs[0].name == "one")
    assert new.type == "sub"
    new.type = "add"
    assert before == after


def test_state_ops_go_out_as_two(tmp_path, target):
    source = make(tmp_path / "state.mlpackage", with_state(), ct.target.iOS18)
    package = load(source)
    update = next(op for op in package.program.functions["main"].operations if op.op_type == "coreml_update_state")
    with package.program.functions["main"], mb.set_before_op(update):
        halved = mb.mul(x=update.value, y=np.float16(0.5), name="halved")
    update.set_inputs(value=halved)
    saved(package, target)
    types_now = [op.type for op in main_block(spec_of(target)).operations]
    assert types_now.count("write_state") == 1 and types_now.count("read_state") == 2
    before, after = proto_ops(source), proto_ops(target)
    reads = [name for name, op in before.items() if b"read_state" in op]
    assert all(before[name] == after[name] for name in reads)


def test_classifier_with_an_edit_keeps_its_labels(tmp_path, target):
    source = classifier(tmp_path / "classifier.mlpackage")
    package = load(source)
    softmax = next(op for op in package.program.functions["main"].operations if op.op_type == "softmax")
    replace(softmax, lambda: mb.sigmoid(x=softmax.x), name=softmax.outputs[0].name)
    saved(package, target)
    assert spec_of(target).description == spec_of(source).description
    assert len(changed_ops(source, target)) == 1


@pytest.mark.parametrize("kind", ["palettized16", "affine16", "sparse16", "palettized18", "int4", "sparse18"])
def test_new_op_over_compressed_weights_refers_to_their_blobs(tmp_path, target, kind):
    source = compressed(tmp_path / "source.mlpackage", kind)
    package = load(source)
    second = op_named(package.program, "second")
    constexpr = second.weight.op
    with package.program.functions["main"], mb.set_before_op(constexpr):
        again = getattr(mb, constexpr.op_type)(**dict(constexpr.inputs), name="again")
    weight = again if not isinstance(again, (tuple, list)) else again[-1]
    weight._sym_type = second.weight.sym_type
    replace(second, lambda: mb.linear(x=second.x, weight=weight, bias=second.bias), name="second")
    lazy = [var for var in constexpr.inputs.values() if isinstance(var._sym_val, LazyValue)]
    saved(package, target)
    assert all(var._sym_val._value is None for var in lazy) or constexpr.op_type == "constexpr_sparse_to_dense"
    assert (target / WEIGHTS).read_bytes() == (source / WEIGHTS).read_bytes()
    assert changed_ops(source, target) <= {"second", "again"}


def test_a_clone_of_the_program_saves_the_same_bytes(tmp_path, target):
    for name, build in {"nested": control_flow, "plain": conv_program}.items():
        package = load(make(tmp_path / f"{name}.mlpackage", build()))
        package.program = clone_program(package.program)
        assert package.is_unchanged()


def test_new_nested_blocks_are_written(source, target):
    package = load(source)
    function = package.program.functions["main"]
    old = function.outputs[0]
    with function:
        yes = mb.greater(x=mb.reduce_sum(x=old, axes=[0, 1, 2], keep_dims=False), y=0.0)
        new = mb.cond(pred=yes, _true_fn=lambda: mb.relu(x=old), _false_fn=lambda: mb.add(x=old, y=normal(1, 16, 256)))
    function.set_outputs([new])
    new.name = "out"
    again = saved(package, target)
    assert again.program.functions["main"].outputs[0].op.op_type == "cond"


def test_unknown_ops_arguments_and_attributes_are_kept(source, target):
    spec = spec_of(source)
    for op in main_block(spec).operations:
        if op.type == "relu":
            op.type = "relu_of_tomorrow"
        if op.type == "reshape":
            op.inputs["order_of_tomorrow"].CopyFrom(op.inputs["shape"])
            op.outputs[0].type.tensorType.attributes["layout"].CopyFrom(op.attributes["name"])
        for value in op.attributes.values():
            value.docString = "kept"
    main_block(spec).attributes["block"].CopyFrom(op.attributes["name"])
    spec.mlProgram.functions["main"].attributes["function"].CopyFrom(op.attributes["name"])
    spec.mlProgram.attributes["program"].CopyFrom(op.attributes["name"])
    spec.mlProgram.docString = "kept"
    write_spec(source, spec)
    package = load(source)
    assert package.is_unchanged()
    future = op_named(package.program, "relu")
    assert (future.op_type, future.opaque) == ("relu_of_tomorrow", True)
    assert future.outputs[0].shape == (1, 16, 16, 16)
    assert op_named(package.program, "flat").opaque
    softmax = package.program.functions["main"].outputs[0].op
    out = softmax.outputs[0].name if softmax.op_type == "softmax" else "out"
    softmax = op_named(package.program, out) if softmax.op_type == "softmax" else softmax.x.op
    replace(softmax, lambda: mb.sigmoid(x=softmax.x), name=softmax.outputs[0].name)
    assert not package.is_unchanged()
    save(package, target)
    assert len(changed_ops(source, target)) == 1
    new = spec_of(target).mlProgram
    assert new.docString == "kept" and set(new.attributes) >= {"program"}
    assert "function" in new.functions["main"].attributes and "block" in main_block(spec_of(target)).attributes


def test_contradicting_declared_types_win_over_inference(source):
    spec = spec_of(source)
    softmax = next(op for op in main_block(spec).operations if op.type == "softmax")
    softmax.outputs[0].type.tensorType.dimensions[2].constant.size = 99
    write_spec(source, spec)
    package = load(source)
    assert op_named(package.program, softmax.outputs[0].name).outputs[0].shape == (1, 16, 99)


def test_two_loads_edit_and_save_are_the_same_bytes(source, tmp_path):
    for name in ("a", "b"):
        package = load(source)
        relu = op_named(package.program, "relu")
        replace(relu, lambda relu=relu: mb.sigmoid(x=relu.x, name="fresh"), name="relu")
        save(package, tmp_path / f"{name}.mlpackage")
    assert (tmp_path / "a.mlpackage" / MODEL).read_bytes() == (tmp_path / "b.mlpackage" / MODEL).read_bytes()


def test_symbolic_shapes_stay_flexible(tmp_path, target):
    @mb.program(input_specs=[mb.TensorSpec((1, get_new_symbol()))])
    def program(x):
        return mb.add(x=mb.relu(x=x, name="relu"), y=1.0, name="out")

    source = make(tmp_path / "s.mlpackage", program, inputs=[ct.TensorType("x", shape=(1, ct.RangeDim(1, 9)))])
    package = load(source)
    relu = op_named(package.program, "relu")
    replace(relu, lambda: mb.sigmoid(x=relu.x), name="relu")
    saved(package, target)
    assert changed_ops(source, target) == {"relu"}
    assert types.is_tensor(package.program.functions["main"].inputs["x"].sym_type)


def test_opaque_ops_can_have_any_input_name(source, target):
    spec = spec_of(source)
    for op in main_block(spec).operations:
        if op.type == "relu":
            op.type = "relu_of_tomorrow"
            for name in ("name", "outputs", "op_type"):
                op.inputs[name].CopyFrom(op.inputs["x"])
    write_spec(source, spec)
    package = load(source)
    future = op_named(package.program, "relu")
    assert future.op_type == "relu_of_tomorrow" and future.name == "relu"
    with package.program.functions["main"], mb.set_before_op(future):
        doubled = mb.add(x=future.x, y=future.x, name="doubled")
    future.set_inputs(x=doubled, no_check_var_types=True)
    save(package, target)
    op = next(op for op in main_block(spec_of(target)).operations if op.type == "relu_of_tomorrow")
    bound = {key: argument.arguments[0].name for key, argument in op.inputs.items()}
    assert bound == {"x": "doubled", "name": "conv", "outputs": "conv", "op_type": "conv"}


def test_inline_sub_byte_and_scalar_values_load_and_stay(tmp_path, target):
    @mb.program(input_specs=[mb.TensorSpec((1, 4))], opset_version=ct.target.iOS18)
    def program(x):
        data = np.array([[1, -2, 3, -4]]).astype(types.nptype_from_builtin(types.int4))
        weight = mb.constexpr_blockwise_shift_scale(data=data, scale=np.float32([[0.5]]), name="weight")
        return mb.mul(x=mb.relu(x=x, name="relu"), y=weight, name="out")

    source = make(tmp_path / "s.mlpackage", program, ct.target.iOS18, pass_pipeline=ct.PassPipeline.EMPTY)
    package = load(source)
    assert op_named(package.program, "weight").data.val.tolist() == [[1, -2, 3, -4]]
    relu = op_named(package.program, "relu")
    replace(relu, lambda: mb.sigmoid(x=relu.x), name="relu")
    saved(package, target)
    assert changed_ops(source, target) == {"relu"}
