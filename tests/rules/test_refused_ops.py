"""Kinds of ops unsupported on the ANE: by form, by target, and in Core ML's words where they were measured."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Function, Program, types

import mil_ane_passes as ane
from mil_ane_passes.ane import predict_plan
from mil_ane_passes.commands.main import main
from mil_ane_passes.passes.contract import Hit, Rewrite
from mil_ane_passes.passes.engine import iterate_hits_and_misses
from mil_ane_passes.passes.examples import build_program, make_weight
from mil_ane_passes.passes.registry import get_all_rules
from tests.lab.versions.needs import coremltools_from
from tests.package.helpers import main_block, make, spec_of, write_spec
from tests.rules.helpers import converted

HALF, INT = np.float16, np.int32
IMAGE = (1, 8, 6, 6)
KINDS = [
    rule for rule in get_all_rules().values() if "ANE201" <= rule.code <= "ANE220" and not issubclass(rule, Rewrite)
]
pytestmark = pytest.mark.filterwarnings("ignore")


def refusals(built, target="m4"):
    """(code, type of each op it stands for, sure, message) of what rules about kinds of ops find."""
    found = [
        (rule, answer)
        for rule in KINDS
        if rule.targets
        for _, answer in iterate_hits_and_misses(rule(), built, target=target)
    ]
    return [(rule.code, tuple(op.op_type for op in answer.covers), answer.sure, answer.message)
            for rule, answer in found if isinstance(answer, Hit)]


def one(body, dtype=types.fp16, opset=ct.target.iOS18, **inputs):
    return build_program(body, dtype=dtype, opset=opset, **(inputs or {"x": IMAGE}))


def of_two(body, **inputs):
    """A program with an input of each type."""
    given = {name: mb.placeholder(shape=shape, dtype=types.int32 if name == "i" else types.fp16)
             for name, shape in inputs.items()}
    with Function(given, opset_version=ct.target.iOS18) as function:
        result = body(**function.inputs)
        function.set_outputs(list(result) if isinstance(result, (list, tuple)) else [result])
    built = Program()
    built.add_function("main", function)
    return built


TYPE32 = "Unsupported tensor data type: int32"
MEASURED = {
    "argmax": (one(lambda x: mb.reduce_argmax(x=x, axis=1)), "ANE212", "Output type int32 is not supported."),
    "argsort": (one(lambda x: mb.argsort(x=x, axis=3)), "ANE212", TYPE32),
    "fp16 to int32": (one(lambda x: mb.cast(x=x, dtype="int32")), "ANE201", TYPE32),
    "int32 to int16": (one(lambda x: mb.cast(x=x, dtype="int16"), types.int32), "ANE201", TYPE32),
    "comparison": (one(lambda x: mb.greater_equal(x=x, y=INT(0)), types.int32), "ANE201",
                   'Unable to resolve operation input "y".'),
    "add a number": (one(lambda x: mb.add(x=x, y=INT(7)), types.int32), "ANE201", TYPE32),
    "add a row": (one(lambda x: mb.add(x=x, y=np.arange(6, dtype=INT)), types.int32), "ANE201",
                  'Failed to extract constant value "add"'),
    "mul": (one(lambda x: mb.mul(x=x, y=x), types.int32), "ANE201", None),
    "gather": (one(lambda i: mb.gather(x=make_weight(9, 4), indices=mb.cast(x=i, dtype="int16"), axis=0), types.int32,
                   i=(1, 4)), "ANE214", "Unsupported gather index type"),
    "non_zero": (one(lambda x: mb.non_zero(x=x)), "ANE210", None),
    "one_hot": (one(lambda x: mb.one_hot(indices=x, one_hot_vector_size=9), types.int32, x=(1, 4)), "ANE208",
                'Unsupported MIL operation "one_hot".'),
    "range": (one(lambda i: mb.range_1d(start=INT(0), end=mb.squeeze(x=i), step=INT(1)), types.int32, i=(1,)),
              "ANE207", "Failed to retrieve parameter start"),
    "rnn": (one(lambda x, h: mb.rnn(x=x, initial_h=h, weight_ih=make_weight(3, 4), weight_hh=make_weight(3, 3))[0],
                x=(5, 1, 4), h=(1, 3)), "ANE217", 'Unsupported MIL operation "rnn".'),
    "slice": (of_two(lambda x, i: mb.slice_by_size(x=x, begin=i, size=[1, 4, 3, 3]), x=IMAGE, i=(4,)), "ANE215",
              TYPE32),
}


@pytest.mark.parametrize("name", MEASURED)
def test_what_was_measured_on_an_m4_is_refused_in_the_same_words(name):
    built, code, message = MEASURED[name]
    assert (code, True, message) in [(code, sure, said) for code, _, sure, said in refusals(built)]
    assert all(said is None for _, _, _, said in refusals(built, "m2"))


ACCEPTED = {
    "comparison and cast": one(lambda x: mb.cast(x=mb.less_equal(x=x, y=HALF(0)), dtype="fp16")),
    "select": one(lambda x: mb.select(cond=mb.greater(x=x, y=HALF(0)), a=x, b=HALF(1))),
    "fp16 to fp32": one(lambda x: mb.cast(x=x, dtype="fp32")),
    "fp32 to fp16": one(lambda x: mb.cast(x=x, dtype="fp16"), types.fp32),
    "gather at constants": one(lambda x: mb.gather(x=x, indices=np.array([2, 0], np.uint16), axis=1)),
    "gather_nd": one(lambda i: mb.gather_nd(x=make_weight(3, 4), indices=i), types.int16, i=(2, 1)),
    "gather_along_axis": one(lambda i: mb.gather_along_axis(x=make_weight(3, 4), indices=i), types.int16, i=(3, 4)),
    "topk": one(lambda x: mb.topk(x=x, k=2, axis=1, output_indices_dtype="uint16")),
    "squeeze of int16": one(lambda i: mb.squeeze(x=i), types.int16, i=(1,)),
    "quantize": one(lambda x: mb.dequantize(input=mb.quantize(input=x, scale=HALF(0.1), output_dtype="int8"),
                                            scale=HALF(0.1))),
    "fill_like": one(lambda x: mb.fill_like(ref_tensor=x, value=1.0)),
    "slices": one(lambda x: mb.slice_by_index(x=mb.slice_by_size(x=x, begin=[0, 0, 1, 1], size=[1, 4, 4, 4]),
                                              begin=[0, 1, 0, 0], end=[1, 3, 4, 4])),
    "slice_update": one(lambda x: mb.slice_update(x=x, update=make_weight(1, 8, 6, 1), begin=[0, 0, 0, 2],
                                                  end=[1, 8, 6, 3])),
    "shapes": one(lambda x: mb.resize(x=mb.pad(x=mb.tile(x=mb.reshape(x=x, shape=[1, 4, 12, 6]), reps=[1, 1, 2, 1]),
                                               pad=[1, 1]), shape=np.array([5, 5], INT), resized_dims=np.uint32(2))),
    "atan": one(lambda x: mb.atan(x=mb.sin(x=mb.cos(x=x)))),
    "nothing": one(lambda x: x),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_was_accepted_on_an_m4_is_not_refused(name):
    assert not refusals(ACCEPTED[name])


GUESSES = {
    "shape": (one(lambda i: mb.reshape(x=make_weight(3, 4), shape=i), types.int32, i=(2,)), "ANE210"),
    "repetitions": (one(lambda i: mb.tile(x=make_weight(3, 4), reps=i), types.int32, i=(2,)), "ANE210"),
    "16-bit argmax": (one(lambda x: mb.reduce_argmax(x=x, axis=1, output_dtype="uint16")), "ANE212"),
    "topk in int32": (one(lambda x: mb.topk(x=x, k=2, axis=1), opset=ct.target.iOS15), "ANE212"),
    "to uint8": (one(lambda x: mb.cast(x=x, dtype="uint8")), "ANE201"),
    "from int8": (one(lambda x: mb.cast(x=x, dtype="fp16"), types.int8), "ANE201"),
    "fill": (one(lambda x: mb.add(x=x, y=mb.fill(shape=[1, 8, 6, 6], value=HALF(1)))), "ANE206"),
    "row of a cache": (
        of_two(
            lambda x, i: mb.slice_update(x=x, update=make_weight(1, 3), begin=i, end=mb.add(x=i, y=i)), x=(4, 3), i=(2,)
        ),
        "ANE215",
    ),
}


@pytest.mark.parametrize("name", GUESSES)
def test_what_nobody_measured_is_a_guess(name):
    built, code = GUESSES[name]
    assert (code, False, None) in [(code, sure, said) for code, _, sure, said in refusals(built)]
    assert ane.lint(built, target="m4").to_dict()["summary"]["ane_unknown"]


BY_TARGET = {
    "tan": (one(lambda x: mb.tan(x=x)), {"a12": False, "m1": True, "m4": True, "m6": False, "all": True}),
    "fill_like": (one(lambda x: mb.fill_like(ref_tensor=x, value=1.0)), {"m3": False, "m4": None, "all": False}),
    "fill": (one(lambda x: mb.fill(shape=[2], value=HALF(1))), {"m3": True, "m4": False, "all": True}),
    "random_uniform": (one(lambda x: mb.add(x=x, y=mb.random_uniform(shape=[1, 8, 6, 6], low=HALF(0), high=HALF(1)))),
                       {"m2": True, "m3": False, "m4": False, "all": True}),
    "crop_resize": (one(lambda x: mb.crop_resize(
        x=x, boxes=np.array([[0, 0, 4, 4]], HALF), box_indices=np.zeros(1, INT), target_height=2, target_width=2,
        box_coordinate_mode="CORNERS_HEIGHT_FIRST")), {"m1": True, "m2": False, "m4": True, "all": True}),
    "gather at constants": (one(lambda x: mb.gather(x=x, indices=np.array([2, 0], INT), axis=1)),
                            {"m1": False, "m3": False, "m4": None, "all": False}),
    "gather_nd": (ACCEPTED["gather_nd"], {"m3": False, "m4": None, "all": False}),
    "gather": (MEASURED["gather"][0], {"a12": True, "m2": True, "m4": True}),
}


@pytest.mark.parametrize("name,target", [(name, target) for name, (_, by) in BY_TARGET.items() for target in by])
def test_a_refusal_is_sure_only_where_it_was_seen(name, target):
    built, by = BY_TARGET[name]
    found = [sure for code, _, sure, _ in refusals(built, target) if code != "ANE201"]
    assert found == ([] if by[target] is None else [by[target]])


@pytest.mark.parametrize("built", [case[0] for case in [*MEASURED.values(), *GUESSES.values()]])
def test_more_generations_never_turn_a_no_into_a_yes(built):
    """What one generation rejects, all of them together refuse; what it leaves open, they do not take."""
    def answer(target):
        return {row.index: row.ane for row in predict_plan(built, [rule() for rule in KINDS], target=target)[0].rows}

    together = answer("all")
    for target in ("a12", "m1", "m3", "m4"):
        for index, one_answer in answer(target).items():
            assert one_answer == "yes" or together[index] != "yes"
            assert one_answer != "no" or together[index] == "no"


@coremltools_from("9.0", "leaves the indices of a gather alone: fewer ops than the M4 was given")
def test_indices_of_an_embedding_are_one_finding():
    built = converted(torch.nn.Embedding(64, 8), torch.zeros(1, 4, dtype=torch.int64), target=ct.target.iOS18)
    report = ane.lint(built, target="m4")
    (chain,) = [item for item in report.findings if item.rule.code == "ANE201"]
    assert chain.reason.startswith("6 ops on int32 (3 cast, 1 greater_equal, 1 add, 1 select): the indices of gather")
    assert chain.covers == (0, 1, 2, 3, 4, 5) and chain.message == TYPE32
    assert {row["ane"] for row in report.to_dict()["ops"]} == {"no"}


def test_chains_are_apart_where_no_integers_pass_between_them():
    def body(i, x):
        doubled = mb.mul(x=mb.add(x=i, y=INT(1)), y=INT(2))
        return [mb.cast(x=mb.reduce_argmax(x=x, axis=1), dtype="fp16"), doubled]

    found = sorted(kinds for code, kinds, *_ in refusals(of_two(body, i=(3,), x=(2, 3))) if code == "ANE201")
    assert found == [("add", "mul"), ("cast",)]


def test_sizes_of_a_flexible_input_are_followed_to_the_reshape():
    built = get_all_rules()["data_dependent_shape"]().examples()
    (flexible,) = [example.build() for example in built if example.name == "size from a shape"]
    (chain,) = [item for item in ane.lint(flexible, target="m4").findings if item.rule.code == "ANE201"]
    assert chain.reason == "4 ops on int32 (1 shape, 1 gather, 1 expand_dims, 1 concat): the shape of reshape 'y'"


def test_loops_are_found_with_what_stands_inside():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.gru = (kind(4, 4, batch_first=True) for kind in (torch.nn.LSTM, torch.nn.GRU))

        def forward(self, x):
            return self.gru(self.lstm(x)[0])[0]

    found = ane.lint(converted(Net(), torch.rand(1, 5, 4), target=ct.target.iOS18), target="m4").findings
    words = {item.rule.code: item.reason for item in found}
    assert words["ANE217"] == "lstm is unsupported on the ANE (5 steps)"
    assert words["ANE218"].startswith("while_loop is unsupported on the ANE with ")
    assert words["ANE213"].startswith("scatter is unsupported")
    assert any("the while_loop's" in item.reason for item in found if item.rule.code == "ANE201")


def test_each_function_is_looked_at():
    built = one(lambda x: mb.tan(x=x))
    built.add_function("other", one(lambda x: mb.sinh(x=x)).functions["main"])
    assert [(item.function, item.op) for item in ane.lint(built, target="m4").findings
            if item.rule.code == "ANE202"] == [("main", "tan"), ("other", "sinh")]


def test_a_scalar_and_an_input_that_is_returned():
    scalar = one(lambda x: mb.tan(x=mb.reduce_sum(x=x, keep_dims=False)))
    assert [code for code, *_ in refusals(scalar)] == ["ANE202"]
    assert not refusals(one(lambda i: i, types.int32, i=(3,)))
    assert refusals(one(lambda i: mb.identity(x=i), types.int32, i=(3,))) == [("ANE201", ("identity",), True, None)]


@pytest.mark.parametrize("kind,sure", [("custom_layer", True), ("relu_of_tomorrow", False)])
def test_ops_that_coremltools_has_not(kind, sure, tmp_path):
    source = make(tmp_path / "m.mlpackage", one(lambda x: mb.relu(x=x, name="y"), opset=ct.target.iOS16),
                  ct.target.iOS16)
    spec = spec_of(source)
    next(op for op in main_block(spec).operations if op.type == "relu").type = kind
    write_spec(source, spec)
    report = ane.lint(source, target="m4")
    (found,) = [item for item in report.findings if item.rule.code == "ANE219"]
    assert found.op == kind and found.sure is sure
    assert next(row for row in report.to_dict()["ops"] if row["op"] == kind)["ane"] == ("no" if sure else "unknown")


def test_the_label_of_a_classifier(tmp_path):
    net = torch.jit.trace(torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Softmax(-1)), torch.zeros(1, 4))
    ct.convert(net, inputs=[ct.TensorType("x", (1, 4))], classifier_config=ct.ClassifierConfig(["cat", "dog"]),
               skip_model_load=True).save(str(tmp_path / "m.mlpackage"))
    report = ane.lint(tmp_path / "m.mlpackage", target="m4")
    codes = {item.rule.code: item for item in report.findings}
    assert codes["ANE244"].op == "classify" and codes["ANE244"].sure
    assert main(["lint", str(tmp_path / "m.mlpackage"), "--target", "m4"]) == 0, "every classifier has the op"
