"""Rules about a model as a whole: shapes, sizes, bytes, ends, and convs that are slow to compile."""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder, Function, Program, types

import mil_ane_passes as ane
from mil_ane_passes.ane import predict_plan
from mil_ane_passes.passes.contract import Miss, PlanRule
from mil_ane_passes.passes.engine import find_matches, iterate_hits_and_misses
from mil_ane_passes.passes.examples import build_program, make_weight
from mil_ane_passes.passes.layout import compute_padded_bytes
from mil_ane_passes.passes.registry import get_all_rules
from mil_ane_passes.rules.shapes import describe_flexible_shape
from tests.package.helpers import main_block, make, spec_of, write_spec

pytestmark = pytest.mark.filterwarnings("ignore")


def hits(name, built, target="all", package=None, **options):
    rule = get_all_rules()[name].configured(**options)
    return [item.answer for item in predict_plan(built, [rule], target=target, package=package)[1]
            if not isinstance(item.answer, Miss)]


def notes(name, built, target="all", **options):
    return [hit.note for hit in hits(name, built, target, **options)]


def tanh(*shape, dtype=types.fp16):
    return build_program(lambda x: Builder.tanh(x=x, name="y"), dtype=dtype, x=shape)


FLEXIBLE = {
    "fixed": (ct.TensorType(name="x", shape=(1, 3, 8, 8)), None),
    "ranged": (ct.TensorType(name="x", shape=ct.Shape((1, 3, ct.RangeDim(8, 64, default=16), 8))),
               "is ranged: (1, 3, 8..64, 8), by default (1, 3, 16, 8)"),
    "enumerated": (ct.TensorType(name="x", shape=ct.EnumeratedShapes([(1, 3, 8, 8), (1, 3, 16, 16)])),
                   "has 2 shapes: (1, 3, 8, 8), (1, 3, 16, 16), by default (1, 3, 8, 8)"),
    "image": (ct.ImageType(name="x", shape=ct.Shape((1, 3, ct.RangeDim(8, 32, default=8), 8))),
              "is ranged: (8..32, 8), by default (8, 8)"),
    "images": (ct.ImageType(name="x", shape=ct.EnumeratedShapes([(1, 3, 8, 8), (1, 3, 16, 8)])),
               "has 2 shapes: (8, 8), (16, 8), by default (8, 8)"),
}


@pytest.mark.parametrize("given,said", FLEXIBLE.values(), ids=FLEXIBLE)
def test_what_a_package_says_of_its_shapes(given, said, tmp_path):
    module = torch.jit.trace(torch.nn.Conv2d(3, 4, 1).eval(), torch.rand(1, 3, 8, 8))
    ct.convert(module, inputs=[given], minimum_deployment_target=ct.target.iOS16, skip_model_load=True).save(
        str(tmp_path / "m.mlpackage"))
    package = ane.load(tmp_path / "m.mlpackage")
    found = hits("flexible_shapes", package.program, package=package)
    assert len(found) == (said is not None)
    assert not found or f"input 'x' {said}; " in found[0].note, found[0].note


def test_a_range_without_end_and_shapes_that_are_one():
    """What coremltools does not write, and other tools may."""
    feature = ct.proto.Model_pb2.FeatureDescription(name="x")
    array = feature.type.multiArrayType
    array.shape.extend([2, 3])
    for low, high in ((1, -1), (3, 3)):
        array.shapeRange.sizeRanges.add(lowerBound=low, upperBound=high)
    var = tanh(2, 3).functions["main"].inputs["x"]
    assert describe_flexible_shape(feature, var) == "is ranged: (1.., 3), by default (2, 3)"
    array.shapeRange.sizeRanges[0].upperBound = 1
    assert describe_flexible_shape(feature, var) is None
    array.enumeratedShapes.shapes.add(shape=[2, 3])
    assert describe_flexible_shape(feature, var) is None
    for extent in range(4, 10):
        array.enumeratedShapes.shapes.add(shape=[2, extent])
    assert (
        describe_flexible_shape(feature, var)
        == "has 7 shapes: (2, 3), (2, 4), (2, 5), (2, 6) and 3 more, by default (2, 3)"
    )


def test_flexible_inputs_are_reported_one_by_one_at_their_first_reader():
    built = build_program(
        lambda x, z: (Builder.relu(x=x, name="y"), Builder.tanh(x=Builder.exp(x=z, name="e"), name="w")),
        x=(None, 2),
        z=(3, None),
    )
    first, second = hits("flexible_shapes", built)
    assert (first.op.op_type, second.op.op_type) == ("relu", "exp")
    assert "input 'z' has a flexible shape: (3, ?)" in second.note
    assert first.note.endswith("3 ops of 3 produce values with such a dimension")


def test_a_flexible_input_that_nobody_reads():
    (hit,) = hits("flexible_shapes", build_program(lambda x, z: Builder.relu(x=x, name="y"), x=(2,), z=(None,)))
    assert hit.op.op_type == "relu" and hit.note.endswith("0 ops of 1 produce values with such a dimension")


@pytest.mark.parametrize("shape,tiny", [((63,), True), ((64,), False), ((3, 3, 7), True), ((1, 8, 8), False)])
def test_tiny(shape, tiny):
    assert bool(hits("tiny_tensors", tanh(*shape))) is tiny
    assert hits("tiny_tensors", tanh(*shape), least=1000)


def test_a_small_input_beside_a_large_one_is_ordinary():
    built = build_program(lambda x, scale: Builder.mul(x=x, y=scale, name="y"), x=(8, 64), scale=(1,))
    assert not hits("tiny_tensors", built)


@pytest.mark.parametrize("shape,target,lopsided", [
    ((8192,), "all", False), ((8193,), "all", True), ((16384,), "all", True), ((16385,), "all", False),
    ((16385,), "m4", True), ((50000,), "m4", True), ((50000,), "m3", False), ((65536,), "m4", True),
    ((65537,), "m4", False), ((1, 1, 10000, 1), "all", True), ((2, 10000), "all", False), ((4, 8192), "all", False),
])
def test_lopsided(shape, target, lopsided):
    assert bool(hits("lopsided", tanh(*shape), target)) is lopsided


def test_lopsided_knows_what_never_lies_on_the_ane():
    assert not hits("lopsided", build_program(lambda x: Builder.add(x=x, y=np.int32(1), name="y"), dtype=types.int32,
                                              x=(10000,)))
    assert hits("lopsided", tanh(2, 10000), others=2)


def linear(dtype=np.float16, count=1):
    def body(x):
        for number in range(count):
            x = Builder.linear(x=x, weight=make_weight(64, 64, dtype=dtype) + dtype(number), name=f"y{number}")
        return x

    return build_program(body, dtype=types.fp16 if dtype is np.float16 else types.fp32, x=(1, 64))


def test_size_is_that_of_the_weights_as_stored():
    size = 64 * 64 * 2 / 1e9
    assert hits("model_size", linear(), phone=size * 0.9) and not hits("model_size", linear(), phone=size * 1.1)
    assert hits("model_size", linear(np.float32), phone=size * 1.9)
    assert hits("model_size", linear(count=3), phone=size * 2.9)
    (note,) = notes("model_size", linear(), phone=size / 4, mac=size / 2)
    assert "(iPhone) and than" in note and note.endswith("(M1)")


def test_compressed_weights_count_as_packed():
    def body(x):
        packed = Builder.constexpr_lut_to_dense(
            indices=np.zeros((64, 64), types.np_uint4_dtype), lut=np.zeros((1, 1, 16, 1), np.float16))
        return Builder.linear(x=x, weight=packed, name="y")

    built = build_program(body, opset=ct.target.iOS18, x=(1, 64))
    assert hits("model_size", built, phone=2000 / 1e9) and not hits("model_size", built, phone=2400 / 1e9)


def test_functions_are_weighed_alone(tmp_path):
    built = Program()
    for name in ("a", "b"):
        with Function({"x": Builder.placeholder((1, 64), types.fp16)}, opset_version=ct.target.iOS18) as function:
            function.set_outputs([Builder.linear(x=function.inputs["x"], weight=make_weight(64, 64), name="y")])
        built.add_function(name, function)
    size = 64 * 64 * 2 / 1e9
    assert len(hits("model_size", built, phone=size / 2)) == 2 and not hits("model_size", built, phone=size * 1.5)


def test_files_that_are_too_large_for_functions_that_are_not():
    package = SimpleNamespace(weight_bytes=1_400_000_000, description=lambda function: None)
    rule = get_all_rules()["model_size"]()
    (found,) = predict_plan(linear(), [rule], package=package)[1]
    assert isinstance(found.answer, Miss)
    assert found.answer.reason.startswith("the weight files have 1.4 GB, the largest function reads 8.")


@pytest.mark.parametrize("count,most,fires,near", [(4, 3, True, False), (3, 3, False, True), (2, 3, False, False)])
def test_convs_are_counted(count, most, fires, near):
    def body(x):
        for number in range(count):
            make = Builder.conv if number % 2 else Builder.conv_transpose
            x = make(x=x, weight=make_weight(4, 4, 1, 1), name=f"y{number}")
        return x

    rule = get_all_rules()["conv_count"].configured(most=most)
    found = [item.answer for item in predict_plan(build_program(body, x=(1, 4, 8, 8)), [rule])[1]]
    assert [isinstance(answer, Miss) for answer in found] == [not fires] * (fires or near)


def conv(shape, kernel, dtype=np.float16, **parameters):
    return build_program(
        lambda x: Builder.conv(x=x, weight=make_weight(2, 2, *kernel, dtype=dtype), name="y", **parameters),
        dtype=types.fp16 if dtype is np.float16 else types.fp32,
        x=shape,
    )


@pytest.mark.parametrize("shape,kernel,parameters,words", [
    ((1, 2, 20, 20), (16, 16), {}, "kernel 16x16"), ((1, 2, 20, 20), (14, 15), {}, "kernel 14x15"),
    ((1, 2, 20, 20), (13, 16), {}, None), ((1, 2, 20, 20), (17, 17), {}, None), ((1, 2, 20), (16,), {}, None),
    ((1, 2, 18001), (12,), {"strides": [6]}, "length 18001"), ((1, 2, 18000), (12,), {"strides": [6]}, None),
    ((1, 2, 18001), (12,), {"strides": [4]}, None),
    ((1, 2, None), (5,), {"strides": [5]}, "stride 5"), ((1, 2, 30), (3,), {"strides": [5], "dilations": [2]}, "dilat"),
    ((1, 2, 30), (3,), {"strides": [5]}, None), ((1, 2, 12, 12, 12), (3, 3, 3), {"strides": [1, 7, 2]}, "stride 7"),
], ids=str)
def test_compile_traps(shape, kernel, parameters, words):
    found = [
        finding.reason
        for finding in find_matches(get_all_rules()["compile_traps"](), conv(shape, kernel, **parameters)).fired
    ]
    assert len(found) == (words is not None) and all(words in note for note in found)


def test_no_trap_is_reported_twice_or_missed_between_both_rules():
    """A stride of which `factor_conv_stride` makes something is its own; the others are found here."""
    for parameters in ({"strides": [5]}, {"strides": [5], "dilations": [2]}):
        built = conv((1, 2, 30), (3,), **parameters)
        assert len(find_matches(get_all_rules()["compile_traps"](), built).fired) + \
            len(find_matches(get_all_rules()["factor_conv_stride"](), built).fired) == 1


def test_a_report_lists_near_misses_and_no_ordinary_ops():
    near = ane.lint(conv((1, 2, 1800), (12,), strides=[6])).near_misses
    assert [item.reason for item in near if item.rule.name == "compile_traps"] == \
        ["kernel 12, stride 6, length 1800; a length of 18001 hangs"]
    assert not [item for item in ane.lint(conv((1, 2, 20, 20), (13, 13))).near_misses
                if item.rule.name in ("compile_traps", "factor_conv_stride")]


def test_the_fix_of_an_op_is_that_of_its_worst_finding():
    """Notes about the whole model cover every op; they do not hide what fixes one."""
    small = build_program(lambda x: Builder.tanh(
        x=Builder.conv(x=x, weight=make_weight(2, 2, 3), strides=[5], name="c"), name="y"), x=(1, 2, 300))
    conv_row, last = ane.lint(small).to_dict()["ops"]
    assert conv_row["fix"]["pass"] == "ane::factor_conv_stride" and "ANE516" in conv_row["codes"]
    assert last["fix"]["pass"] is None and "too small" in last["fix"]["advice"]
    refused = build_program(lambda x: Builder.cumsum(x=Builder.tanh(x=x, name="t"), axis=1, name="y"), x=(1, 4))
    assert "triangle" in ane.lint(refused).to_dict()["ops"][1]["fix"]["advice"]


def test_what_is_not_computed_in_fp16_is_not_compiled_for_the_ane():
    assert not find_matches(get_all_rules()["compile_traps"](), conv((1, 2, 20, 20), (16, 16), np.float32)).fired


def test_waste_names_the_worst_first_and_the_sums():
    def body(x, small):
        wide = Builder.tanh(x=x, name="wide")
        return Builder.transpose(x=wide, perm=[0, 1, 3, 2], name="turned"), Builder.tanh(x=small, name="little")

    built = build_program(body, x=(1, 64, 600, 1), small=(1, 64, 8, 8))
    (hit,) = hits("last_axis_waste", built)
    assert "2 tensors with short rows" in hit.note and "(1, 64, 600, 1) 76.8 kB in 2.46 MB, 32x" in hit.note
    shapes = [((1, 64, 600, 1), 2), ((1, 64, 1, 600), 1), ((1, 64, 8, 8), 2)]
    dense = sum(np.prod(shape) * 2 * count for shape, count in shapes)
    laid = sum(compute_padded_bytes(shape, 2) * count for shape, count in shapes)
    assert hit.note.endswith(f"have {dense / 1e3:.1f} kB of data and take {laid / 1e6:.2f} MB padded")
    assert [op.op_type for op in hit.covers] == ["tanh"]


@pytest.mark.parametrize("shape,options,wasted", [
    ((1, 768, 1, 1), {}, False), ((1, 768, 1, 1), {"lost": 40000}, True), ((1, 768, 64, 8), {}, True),
    ((1, 768, 64, 9), {}, False), ((1, 768, 64, 9), {"times": 3}, True), ((1, 768, 1, 600), {}, False),
    ((9,), {}, False), ((None, 768, 600, 1), {}, False),
], ids=str)
def test_waste_begins_where_the_options_say(shape, options, wasted):
    assert bool(hits("last_axis_waste", tanh(*shape), **options)) is wasted


def test_an_input_is_reported_at_what_reads_it():
    built = build_program(
        lambda x, z: (Builder.relu(x=x, name="y"), Builder.tanh(x=z, name="w")), x=(4, 4), z=(64, 600, 1)
    )
    (hit,) = hits("last_axis_waste", built)
    assert [op.op_type for op in hit.covers] == ["tanh"]
    long = build_program(lambda x, z: (Builder.relu(x=x, name="y"), Builder.tanh(x=z, name="w")), x=(4, 4), z=(9000,))
    assert [op.op_type for op in hits("lopsided", long)[0].covers] == ["tanh"]


def test_integers_and_what_stays_on_the_cpu_waste_nothing_on_the_ane():
    assert not hits(
        "last_axis_waste",
        build_program(lambda x: Builder.add(x=x, y=np.int32(1), name="y"), dtype=types.int32, x=(1, 768, 600, 1)),
    )
    inside = build_program(lambda x: Builder.cumsum(x=Builder.reshape(x=Builder.cumsum(
        x=x, axis=1, name="a"), shape=[768, 600, 1], name="b"), axis=0, name="y"), x=(768, 600))
    (hit,) = hits("last_axis_waste", inside)
    assert "%b" in hit.note and "%y" not in hit.note


def test_an_output_that_is_an_input():
    built = build_program(lambda x, z: (Builder.relu(x=x, name="y"), z), x=(2, 3), z=(4,))
    ((_, hit),) = iterate_hits_and_misses(get_all_rules()["passthrough_output"](), built)
    assert hit.note == "output 'z' is the input 'z'" and hit.op.op_type == "relu"


def test_an_op_of_tomorrow_is_a_cause_like_others(tmp_path):
    """An op that the loader keeps without knowing it, in a package of an old target."""
    def body(x):
        for number in range(4):
            x = Builder.tanh(x=x, name=f"t{number}")
        return Builder.relu(x=Builder.softsign(x=x, name="odd"), name="y")

    path = make(
        tmp_path / "m.mlpackage", build_program(body, opset=ct.target.iOS16, x=(1, 64, 512, 512)), ct.target.iOS16
    )
    spec = spec_of(path)
    for op in main_block(spec).operations:
        op.type = "softsign_of_tomorrow" if op.type == "softsign" else op.type
    write_spec(path, spec)
    package = ane.load(path)
    (hit,) = hits("late_departure", package.program, "m4", package)
    assert hit.op.op_type == "softsign_of_tomorrow" and "4 ops before" in hit.note
    assert len(ane.lint(package).to_dict()["ops"]) == 6


def test_linear_in_ops():
    """All these rules on 1500 ops: a fraction of a second, where a square would take minutes."""
    def body(x):
        for number in range(1500):
            x = Builder.tanh(x=x, name=f"t{number}") if number % 3 else Builder.cumsum(x=x, axis=1, name=f"c{number}")
        return x

    built = build_program(body, x=(1, 64, 512, 512))
    rules = [rule() for rule in get_all_rules().values() if "ANE504" <= rule.code < "ANE520"]
    plan, _ = predict_plan(built, [])
    started = time.perf_counter()
    found = [answer for rule in rules if isinstance(rule, PlanRule) for answer in rule.match_plan(plan)]
    spent = time.perf_counter() - started
    assert len(rules) >= 13 and found and spent < 1.0, spent


def in_conds(count):
    def body(x):
        known = Builder.greater(x=Builder.reduce_sum(x=x, axes=[0, 1], keep_dims=False), y=np.float32(0))
        for _ in range(count):
            x = Builder.cond(pred=known, _true_fn=lambda x=x: Builder.add(x=x, y=np.float32(1)),
                             _false_fn=lambda x=x: Builder.softmax(x=x))
        return x

    return build_program(body, dtype=types.fp32, x=(2, 4))


def in_loops(count):
    def body(x):
        for _ in range(count):
            _, x = Builder.while_loop(
                _cond=lambda i, x: Builder.less(x=i, y=np.int32(3)),
                _body=lambda i, x: (Builder.add(x=i, y=np.int32(1)), Builder.linear(x=x, weight=make_weight(4, 4))),
                loop_vars=(np.int32(0), x))
        return x

    return build_program(body, x=(2, 4))


@pytest.mark.parametrize("build", [in_conds, in_loops])
def test_calls_grow_with_the_blocks_and_not_with_their_square(build):
    """Of every rule, counted and not timed."""
    rules = [rule for rule in get_all_rules().values() if not issubclass(rule, PlanRule)]

    def count_calls(count):
        program, calls = build(count), dict.fromkeys(rules, 0)

        def count_call(frame, event, argument):
            calls[rule] += event == "call"

        for rule in rules:
            sys.setprofile(count_call)
            try:
                find_matches(rule(), program)
            finally:
                sys.setprofile(None)
        return calls

    few, more, many = map(count_calls, (10, 20, 40))
    assert sum(few.values()) > 10_000
    for rule in rules:
        assert many[rule] - more[rule] <= 2.1 * (more[rule] - few[rule]) + 100, rule.name
