"""A program nobody touched is written byte for byte, whatever is in it."""

from __future__ import annotations

import coremltools as ct
import coremltools.optimize as cto
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types
from coremltools.proto import Model_pb2

from mil_ane_passes.package import load, package_of_mlmodel, save, wire
from mil_ane_passes.utils.errors import InputError

from .helpers import (
    MODEL,
    conv_program,
    facts,
    host_program,
    linear_program,
    make,
    normal,
    proto_ops,
    tree,
    with_functions,
)

OPSETS = [ct.target.iOS15, ct.target.iOS16, ct.target.iOS17, ct.target.iOS18]


def control_flow():
    @mb.program(input_specs=[mb.TensorSpec((1, 2))])
    def program(x):
        total = mb.reduce_sum(x=x, axes=[0, 1], keep_dims=False)
        many = mb.greater(x=total, y=1.0)
        y = mb.cond(
            pred=many,
            _true_fn=lambda: mb.add(x=x, y=1.0, name="one"),
            _false_fn=lambda: mb.cond(
                pred=many, _true_fn=lambda: mb.mul(x=x, y=2.0), _false_fn=lambda: mb.sub(x=x, y=3.0)
            ),
        )
        count = mb.cast(x=total, dtype="int32")
        result = mb.while_loop(
            _cond=lambda a, b: mb.less(x=b, y=5),
            _body=lambda a, b: (mb.add(x=a, y=np.float32([[1, 2]]), name="grown"), mb.add(x=b, y=1)),
            loop_vars=(y, count),
        )
        return mb.identity(x=result[0], name="out")

    return program


def with_state():
    @mb.program(
        input_specs=[mb.TensorSpec((1, 4)), mb.StateTensorSpec((1, 4), dtype=types.fp16)],
        opset_version=ct.target.iOS18,
    )
    def program(x, s):
        v = mb.add(x=mb.read_state(input=s), y=mb.cast(x=x, dtype="fp16"), name="sum")
        v = mb.coreml_update_state(state=s, value=v, name="stored")
        return mb.mul(x=v, y=np.float16(2), name="out")

    return program


def classifier(path):
    @mb.program(input_specs=[mb.TensorSpec((1, 3, 8, 8))])
    def program(image):
        flat = mb.reshape(x=image, shape=(1, 192))
        return mb.softmax(x=mb.linear(x=flat, weight=normal(3, 192)), axis=-1)

    return make(
        path,
        program,
        classifier_config=ct.ClassifierConfig(["a", "b", "c"]),
        inputs=[ct.ImageType("image", shape=(1, 3, 8, 8), color_layout=ct.colorlayout.RGB)],
    )


COMPRESSIONS = {
    "palettized16": (16, cto.coreml.palettize_weights, cto.coreml.OpPalettizerConfig(mode="uniform", nbits=4)),
    "affine16": (16, cto.coreml.linear_quantize_weights, cto.coreml.OpLinearQuantizerConfig()),
    "sparse16": (16, cto.coreml.prune_weights, cto.coreml.OpMagnitudePrunerConfig(target_sparsity=0.5)),
    "palettized18": (
        18,
        cto.coreml.palettize_weights,
        cto.coreml.OpPalettizerConfig(mode="uniform", nbits=3, granularity="per_grouped_channel", group_size=16),
    ),
    "int4": (
        18,
        cto.coreml.linear_quantize_weights,
        cto.coreml.OpLinearQuantizerConfig("linear_symmetric", dtype="int4", granularity="per_block", block_size=32),
    ),
    "uint4": (
        18,
        cto.coreml.linear_quantize_weights,
        cto.coreml.OpLinearQuantizerConfig("linear", dtype="uint4", granularity="per_block", block_size=32),
    ),
    "sparse18": (18, cto.coreml.prune_weights, cto.coreml.OpMagnitudePrunerConfig(target_sparsity=0.5)),
}


def compressed(path, kind):
    opset, compress, config = COMPRESSIONS[kind]
    target = ct.target.iOS16 if opset == 16 else ct.target.iOS18
    source = make(path.with_name("plain.mlpackage"), linear_program(target), target)
    config.weight_threshold = 100
    model = ct.models.MLModel(str(source), skip_model_load=True)
    if kind == "sparse18":
        # Pruned and then palettized: ops with two outputs, and ops over ops.
        model = compress(model, cto.coreml.OptimizationConfig(config))
        compress, config = (
            cto.coreml.palettize_weights,
            cto.coreml.OpPalettizerConfig("uniform", 4, weight_threshold=100),
        )
        model = compress(model, cto.coreml.OptimizationConfig(config), joint_compression=True)
    else:
        model = compress(model, cto.coreml.OptimizationConfig(config))
    model.save(str(path))
    return path


def multifunction(path):
    source = make(path.with_name("single.mlpackage"), conv_program(ct.target.iOS18), ct.target.iOS18)
    return with_functions(path, {"zeta": source, "alpha": source}, "zeta")


BUILDERS = {
    **{target.name: (lambda path, t=target: make(path, conv_program(t), t)) for target in OPSETS},
    **{kind: (lambda path, k=kind: compressed(path, k)) for kind in COMPRESSIONS},
    "float16": lambda path: make(path, conv_program(), compute_precision=ct.precision.FLOAT16),
    "control_flow": lambda path: make(path, control_flow()),
    "state": lambda path: make(path, with_state(), ct.target.iOS18),
    "classifier": classifier,
    "multifunction": multifunction,
}


@pytest.fixture(scope="module", params=BUILDERS)
def built(request, tmp_path_factory):
    return BUILDERS[request.param](tmp_path_factory.mktemp(request.param) / "source.mlpackage")


def test_unchanged_package_is_copied_byte_for_byte(source, tmp_path):
    (source / "Data" / "notes.txt").write_text("kept")
    package = load(source)
    assert package.is_unchanged()
    save(package, tmp_path / "saved.mlpackage")
    assert tree(tmp_path / "saved.mlpackage") == tree(source)


def test_program_is_the_hosts(source):
    package = load(source)
    package.program.validate()
    host = host_program(source)
    assert sorted(map(repr, facts(package.program))) == sorted(map(repr, facts(host)))
    for function in host.functions:
        for name, var in host.functions[function].inputs.items():
            ours = package.program.functions[function].inputs[name]
            assert (ours.shape, ours.dtype) == (var.shape, var.dtype)


def test_op_bytes_survive_a_change_elsewhere(source, tmp_path):
    package = load(source)
    for function in package.program.functions.values():
        output = function.outputs[0]
        if types.is_dict(output.sym_type) or types.is_str(output.sym_type):
            continue
        name = output.name
        output.name = f"{name}_before"
        with function:
            new = mb.mul(x=output, y=np.asarray(1, types.nptype_from_builtin(output.dtype)), name=name)
        function.set_outputs([new, *function.outputs[1:]])
    save(package, tmp_path / "saved.mlpackage")
    for function in package.functions:
        before, after = proto_ops(source, function), proto_ops(tmp_path / "saved.mlpackage", function)
        changed = {name for name in before if before[name] != after.get(name)}
        assert len(changed) <= 1
    assert facts(host_program(tmp_path / "saved.mlpackage"))


def repeat_fields(data, descriptor):
    """Yields the message `data` with one of its singular scalar fields written twice, which the format allows."""
    for f in wire.iterate_fields(data):
        field = descriptor.fields_by_number[f.number]
        if field.message_type is not None:
            for new in repeat_fields(data[f.body:f.end], field.message_type):
                yield data[:f.start] + wire.encode_field(f.number, new) + data[f.end:]
        elif not field.is_repeated:
            yield data[:f.end] + data[f.start:]


@pytest.mark.parametrize("kind", ["state", pytest.param("control_flow", marks=pytest.mark.slow)])
def test_repeated_fields_are_kept_byte_for_byte(kind, tmp_path):
    source = BUILDERS[kind](tmp_path / "source.mlpackage")
    repeated = list(repeat_fields((source / MODEL).read_bytes(), Model_pb2.Model.DESCRIPTOR))
    loaded = 0
    for data in repeated:
        (source / MODEL).write_bytes(data)
        try:
            package = load(source)
        except InputError:
            continue
        save(package, tmp_path / "saved.mlpackage", overwrite=True)
        assert (tmp_path / "saved.mlpackage" / MODEL).read_bytes() == data
        loaded += 1
    assert loaded > len(repeated) / 2 > 50


def test_mlmodel_is_loaded_from_its_package(tmp_path):
    model = ct.convert(conv_program(), convert_to="mlprogram", skip_model_load=True)
    model.short_description = "described later"
    package = package_of_mlmodel(model)
    assert package.spec.description.metadata.shortDescription == "described later"
    save(package, tmp_path / "saved.mlpackage")
    saved = ct.models.MLModel(str(tmp_path / "saved.mlpackage"), skip_model_load=True)
    assert saved.short_description == "described later"
    assert (tmp_path / "saved.mlpackage" / MODEL).exists()
