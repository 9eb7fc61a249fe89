"""Functions, inputs, outputs and states that were added, removed or changed: they are written, the rest is kept."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types

import mil_ane_passes as ane
from mil_ane_passes.ir.clone import clone_function
from mil_ane_passes.package import load, save
from mil_ane_passes.utils.errors import InputError

from .helpers import WEIGHTS, conv_program, host_program, main_block, make, normal, proto_ops, spec_of, write_spec
from .test_unchanged import BUILDERS, multifunction

X = normal(1, 8, 16, 16)


@pytest.fixture
def single(tmp_path):
    return make(tmp_path / "single.mlpackage", conv_program(ct.target.iOS18), ct.target.iOS18)


def sections(path):
    return {each.name: ([one.name for one in each.input], [one.name for one in each.output])
            for each in ct.models.MLModel(str(path), skip_model_load=True).get_spec().description.functions}


def test_a_copy_of_a_function_is_a_second_one_over_the_same_weights(single, tmp_path):
    package, target = load(single), tmp_path / "out.mlpackage"
    package.program.functions["second"] = clone_function(package.program.functions["main"])
    with pytest.raises(InputError, match="functions cannot be added or removed"):
        save(package, target)
    save(package, target, interface=True)
    host_program(target)
    assert list(load(target).functions) == ["main", "second"]
    assert proto_ops(target, "main") == proto_ops(target, "second") == proto_ops(single)
    assert (target / WEIGHTS).read_bytes() == (single / WEIGHTS).read_bytes()
    described = sections(target)
    assert described["main"] == described["second"] and len(described) == 2
    spec = spec_of(target)
    assert spec.description.defaultFunctionName == "main" and not spec.description.input
    feeds = {"x": X[:, : spec_of(single).description.input[0].type.multiArrayType.shape[1]]}
    before = ane.run(single, feeds)["out"]
    assert all(np.array_equal(before, ane.run(target, feeds, function=name)["out"]) for name in ("main", "second"))


def test_a_new_function_is_written_and_described(single, tmp_path):
    package, target = load(single), tmp_path / "out.mlpackage"
    weight = normal(64, 64)

    @mb.program(input_specs=[mb.TensorSpec((2, 64)), mb.StateTensorSpec((2, 64), dtype=types.fp16)],
                opset_version=ct.target.iOS18)
    def program(a, memory):
        kept = mb.coreml_update_state(state=memory, value=mb.cast(x=a, dtype="fp16"), name="kept")
        wide = mb.cast(x=kept, dtype="fp32")
        return mb.linear(x=wide, weight=weight, name="b"), mb.greater(x=a, y=0.0, name="late")

    function = program.functions["main"]
    function.set_outputs(function.outputs[:1])
    package.program.functions["added"] = function
    save(package, target, interface=True)
    host_program(target)
    assert sections(target)["added"] == (["a"], ["b"])
    assert proto_ops(target, "main") == proto_ops(single)
    spec = spec_of(target).description.functions
    added = next(each for each in spec if each.name == "added")
    assert list(added.state[0].type.stateType.arrayType.shape) == [2, 64]
    feeds, state = {"a": normal(2, 64)}, {}
    expected = feeds["a"].astype(np.float16).astype(np.float32) @ weight.T
    found = ane.run(target, feeds, function="added", state=state, precision="float16")["b"]
    assert np.allclose(found, expected, atol=1e-3)
    assert np.array_equal(state["memory"], feeds["a"].astype(np.float16))


def test_a_function_that_is_removed_goes_with_its_description(tmp_path):
    source, target = multifunction(tmp_path / "two.mlpackage"), tmp_path / "out.mlpackage"
    package = load(source)
    del package.program.functions["zeta"]
    package.program.default_function_name = "alpha"
    save(package, target, interface=True)
    assert list(sections(target)) == ["alpha"] and spec_of(target).description.defaultFunctionName == "alpha"
    assert proto_ops(target, "alpha") == proto_ops(source, "alpha")
    host_program(target)


def test_a_state_and_an_input_can_go_and_come(tmp_path):
    source, target = BUILDERS["state"](tmp_path / "source.mlpackage"), tmp_path / "out.mlpackage"
    package = load(source)
    function = package.program.functions["main"]
    save(package, target, interface=True)
    assert spec_of(target) == spec_of(source)
    update = next(op for op in function.operations if op.op_type == "coreml_update_state")
    read = next(op for op in function.operations if op.op_type == "read_state")
    with function:
        for op in list(update.outputs[0].child_ops):
            op.set_inputs(x=update.value)
        placeholder = ct.converters.mil.mil.Placeholder((1, 4), types.fp16, name="before")
        fresh = placeholder.outputs[0]
        fresh.name = "before"
        for op in list(read.outputs[0].child_ops):
            op.set_inputs(x=fresh)
        function.remove_ops([update, read])
    for held, value in ((function._input_dict, fresh), (function.placeholder_inputs, placeholder)):
        del held["s"]
        held["before"] = value
    save(package, tmp_path / "stateless.mlpackage", interface=True)
    description = spec_of(tmp_path / "stateless.mlpackage").description
    assert ([each.name for each in description.input], len(description.state)) == (["x", "before"], 0)
    assert list(description.input[1].type.multiArrayType.shape) == [1, 4]
    feeds = {"x": normal(1, 4)}
    before = normal(1, 4, seed=1).astype(np.float16)
    whole = ane.run(source, feeds, state={"s": before})
    assert np.array_equal(ane.run(tmp_path / "stateless.mlpackage", feeds | {"before": before})["out"], whole["out"])
    host_program(tmp_path / "stateless.mlpackage")


@pytest.mark.parametrize("name", BUILDERS)
def test_nothing_changes_when_nothing_was_changed(name, tmp_path):
    package = load(BUILDERS[name](tmp_path / "source.mlpackage"))
    assert package.emit(interface=True)[0] == package.raw


def test_a_literal_beside_a_renamed_argument_keeps_its_bytes(tmp_path):
    @mb.program(input_specs=[mb.TensorSpec((1, 2))])
    def program(x):
        return mb.concat(values=(mb.relu(x=x, name="y"), np.float32([[1, 2]])), axis=1, name="out")

    source = make(tmp_path / "source.mlpackage", program, pass_pipeline=ct.PassPipeline.EMPTY)
    spec = spec_of(source)
    concat = next(op for op in main_block(spec).operations if op.type == "concat")
    const = next(op for op in main_block(spec).operations
                 if op.outputs[0].name == concat.inputs["values"].arguments[1].name)
    concat.inputs["values"].arguments[1].value.CopyFrom(const.attributes["val"])
    main_block(spec).operations.remove(const)
    write_spec(source, spec)
    feeds = {"x": normal(1, 2)}
    ane.edit(source, tmp_path / "out.mlpackage", rename={"y": "z"})
    old, new = ({name: ct.proto.MIL_pb2.Operation.FromString(data) for name, data in proto_ops(path).items()}
                for path in (source, tmp_path / "out.mlpackage"))
    assert new.keys() == {"z" if name == "y" else name for name in old}
    assert new["out"].inputs["values"].arguments[1] == old["out"].inputs["values"].arguments[1]
    assert np.array_equal(ane.run(tmp_path / "out.mlpackage", feeds)["out"], ane.run(source, feeds)["out"])
