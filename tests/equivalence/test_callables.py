"""A torch module or a callable on one side: how it is called, what it may return, and how it is judged."""

from __future__ import annotations

import functools
from collections import OrderedDict
from typing import NamedTuple

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Function, Program, mil_list, types

import mil_ane_passes as ane
from mil_ane_passes.equivalence.callable_comparison import FP16_TOLERANCE, FP32_TOLERANCE
from mil_ane_passes.equivalence.callables import Caller
from mil_ane_passes.equivalence.execution import Plan
from mil_ane_passes.ir.clone import clone_program
from mil_ane_passes.passes.examples import build_program
from tests.equivalence.test_bisect import again, spoilt
from tests.ir.test_edits import stateful


class Net(torch.nn.Module):
    """Ids and a picture-like float input, a layer with weights, two outputs."""

    def __init__(self, bias=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(11, 4)
        self.layer = torch.nn.Linear(4, 3)
        self.drop = torch.nn.Dropout(0.5)
        self.bias = bias

    def forward(self, ids, x):
        mixed = self.drop(self.layer(self.table(ids) + x)) + self.bias
        return mixed, mixed.argmax(-1)


INPUTS = (torch.randint(0, 11, (2, 5)), torch.randn(2, 5, 4))


def converted(net, precision):
    traced = torch.jit.trace(net, INPUTS)
    return ct.convert(
        traced, convert_to="milinternal", compute_precision=precision, minimum_deployment_target=ct.target.iOS17,
        inputs=[ct.TensorType("ids", (2, 5), dtype=np.int32), ct.TensorType("x", (2, 5, 4), dtype=np.float32)],
        outputs=[ct.TensorType("mixed"), ct.TensorType("best")])


@pytest.fixture(scope="module")
def full():
    return converted(Net().eval(), ct.precision.FLOAT32)


@pytest.fixture(scope="module")
def half():
    return converted(Net().eval(), ct.precision.FLOAT16)


def sides(net):
    ids, x = INPUTS
    by_name = torch.export.export(net, (ids,), {"x": x})
    return {
        "module": net, "traced": torch.jit.trace(net, INPUTS),
        "exported": torch.export.export(net, INPUTS), "exported module": torch.export.export(net, INPUTS).module(),
        "exported by name": by_name,
    }


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", ["module", "traced", "exported", "exported module", "exported by name"])
@pytest.mark.parametrize("program_first", [True, False])
def test_torch_in_all_its_forms(full, kind, program_first):
    """A module's own results: the program that was converted from it agrees, one that was changed does not."""
    net = sides(Net().eval())[kind]
    report = ane.verify(*((full, net) if program_first else (net, full)))
    assert report.status == "equal" and report.tolerance == FP32_TOLERANCE
    assert str(report) == "equal in 3 runs at float64, judged within 0.0001 of the output's scale"
    wrong = spoilt(full, "mixed", lambda mb, op: mb.mul(x=again(mb, op), y=np.float32(1.001)))
    report = ane.verify(*((wrong, net) if program_first else (net, wrong)))
    assert report.status == "different" and report.first is None
    assert "judged within 0.0001 of the output's scale" in str(report) and "mixed: " in str(report)


def test_the_difference_that_passes_is_a_share_of_the_largest_value(full):
    net = Net().eval()
    report = ane.verify(full, net, seeds=1)
    (mixed, best) = report.cases[0].outputs
    assert (mixed.output, best.output) == ("mixed", "best")
    wide = ane.verify(full, Net(bias=0.01).eval(), seeds=1, tolerance=0.02).cases[0].outputs[0]
    largest = wide.allowed / 0.02
    assert wide.absolute == pytest.approx(0.01, abs=1e-5) and wide.passed and 0.1 < largest < 100
    for tolerance, equal in ((0.0099 / largest, False), (0.0101 / largest, True)):
        assert ane.verify(full, Net(bias=0.01).eval(), seeds=1, tolerance=tolerance).equal is equal


@pytest.mark.parametrize("precision", ["float64", "float16"])
def test_fp16_weights_get_more_room(half, precision):
    report = ane.verify(Net().eval(), half, precision=precision)
    assert report.equal and report.tolerance == FP16_TOLERANCE and report.to_dict()["tolerance"] == FP16_TOLERANCE
    assert [case.precision for case in report.cases] == [precision] * 3
    assert ane.verify(Net(bias=0.5).eval(), half).status == "different"
    assert ane.verify(Net().eval(), half, tolerance=1e-7).status == "different"


def test_compressed_weights_get_more_room():
    table = np.linspace(-1, 1, 16).astype(np.float32).reshape(1, 1, 16, 1)
    indices = (np.arange(12) % 16).astype(np.uint8).reshape(4, 3)

    def body(x):
        packed = indices.astype(types.nptype_from_builtin(types.string_to_builtin("uint4")))
        held = mb.constexpr_lut_to_dense(indices=packed, lut=table)
        return mb.matmul(x=x, y=held, name="y")

    prog = build_program(body, opset=ct.target.iOS18, x=(2, 4), dtype=types.fp32)
    exact = table.reshape(-1)[indices].astype(np.float64)
    report = ane.verify(prog, lambda x: x.astype(np.float64) @ exact)
    assert report.equal and report.tolerance == FP16_TOLERANCE


def test_integers_have_to_be_equal(full):
    def shifted(ids, x):
        mixed, best = Net().eval()(torch.from_numpy(ids), torch.from_numpy(x))
        return mixed.detach().numpy(), best.numpy() + 1

    report = ane.verify(full, shifted, tolerance=100.0)
    assert report.status == "different" and [output.passed for output in report.cases[0].outputs] == [True, False]


def two(x=(2, 3), z=(2, 3)):
    def body(x, z):
        return mb.add(x=x, y=z, name="sum"), mb.sub(x=x, y=z, name="gap")

    return build_program(body, x=x, z=z, dtype=types.fp32)


class Pair(NamedTuple):
    sum: np.ndarray
    gap: np.ndarray


RETURNS = {
    "a tuple": lambda x, z: (x + z, x - z),
    "a list": lambda x, z: [x + z, x - z],
    "names in another order": lambda x, z: {"gap": x - z, "sum": x + z},
    "other names, in order": lambda x, z: OrderedDict(one=x + z, other=x - z),
    "a named tuple": lambda x, z: Pair(x + z, x - z),
    "nested": lambda x, z: ((x + z,), [x - z, None]),
    "tensors": lambda x, z: (torch.from_numpy(x + z).requires_grad_(), torch.from_numpy(x - z)),
}


@pytest.mark.parametrize("given", RETURNS.values(), ids=RETURNS)
def test_what_a_callable_may_return(given):
    assert ane.verify(two(), given).equal and ane.verify(given, two()).equal


def test_a_model_output_of_transformers_is_a_dictionary():
    outputs = pytest.importorskip("transformers.modeling_outputs")

    def given(x, z):
        return outputs.BaseModelOutputWithPooling(last_hidden_state=torch.from_numpy(x + z),
                                                  pooler_output=torch.from_numpy(x - z))

    assert ane.verify(two(), given).equal


def swapped(z, x):
    return x + z, x - z


CALLS = {
    "by name": swapped,
    "a part of a function": functools.partial(lambda scale, z, x: (x * scale + z, x * scale - z), 1.0),
    "by place": lambda *given: (given[0] + given[1], given[0] - given[1]),
    "by other names": lambda one, other: (one + other, one - other),
    "with more parameters": lambda x, z, out=None: (np.add(x, z, out), np.subtract(x, z)),
}


@pytest.mark.parametrize("given", CALLS.values(), ids=CALLS)
def test_how_a_callable_is_called(given):
    assert ane.verify(two(), given).equal


def test_a_callable_gets_arrays_of_its_own():
    seen = []

    def given(x, z):
        seen.append((type(x), x.dtype))
        total, gap = x + z, x - z
        x[:] = 0
        return total, gap

    assert ane.verify(two(), given).equal
    assert seen == [(np.ndarray, np.dtype("float32"))] * 3


class Kinds(torch.nn.Module):
    """Notes what it gets."""

    def __init__(self, dtype=None):
        super().__init__()
        self.seen = []
        if dtype is not None:
            self.scale = torch.nn.Parameter(torch.ones((), dtype=dtype))

    def forward(self, f, i, b):
        assert not torch.is_grad_enabled()
        self.seen.append((f.dtype, i.dtype, b.dtype))
        return f * 1.0


def kinds_program():
    inputs = {"f": mb.placeholder(shape=(3,), dtype=types.fp16), "i": mb.placeholder(shape=(3,), dtype=types.int32),
              "b": mb.placeholder(shape=(3,), dtype=types.bool)}
    with Function(inputs, opset_version=ct.target.iOS17) as function:
        function.set_outputs([mb.identity(x=function.inputs["f"], name="y")])
    made = Program()
    made.add_function("main", function)
    return made


@pytest.mark.parametrize("dtype", [None, torch.float64, torch.bfloat16, torch.float16])
def test_a_module_gets_tensors_of_the_dtype_it_computes_in(dtype):
    net = Kinds(dtype).eval()
    assert ane.verify(kinds_program(), net).equal
    assert net.seen == [(dtype or torch.float32, torch.int64, torch.bool)] * 3


class Converting(torch.nn.Module):
    def forward(self, x):
        return torch.cos(x.to(torch.float32) * 0.1)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int8, torch.int64, torch.float16, torch.bfloat16,
                                   torch.float32])
@pytest.mark.parametrize("program_first", [True, False])
def test_an_exported_module_gets_the_dtypes_that_it_was_exported_with(dtype, program_first):
    """It checks them where it converts; what such a dtype cannot hold is not drawn."""
    exported = torch.export.export(Converting().eval(), (torch.zeros(64).to(dtype),))
    kind = types.fp32 if dtype.is_floating_point else types.int32
    with Function({"x": mb.placeholder(shape=(64,), dtype=kind)}, opset_version=ct.target.iOS17) as function:
        x = function.inputs["x"]
        function.set_outputs([mb.cos(x=mb.mul(x=mb.cast(x=x, dtype="fp32"), y=np.float32(0.1)), name="y")])
    program = Program()
    program.add_function("main", function)
    report = ane.verify(program, exported) if program_first else ane.verify(exported, program)
    assert report.equal, report


def test_values_that_an_exported_dtype_cannot_hold_are_not_fed():
    kinds = {"i": torch.int8, "u": torch.int16, "h": torch.float16, "b": torch.bool}
    exported = torch.export.export(Many().eval(), tuple(torch.zeros(3).to(dtype) for dtype in kinds.values()))
    caller = Caller(exported, list(kinds), ["y"])
    feeds = {name: np.array([-40000, 0.1 if name == "h" else 1, 300], np.float32 if name in "hb" else np.int32)
             for name in kinds}
    fitted = caller.fit_plan(Plan("main", "drawn", feeds)).feeds
    assert fitted["i"].tolist() == [-128, 1, 127] and fitted["u"].tolist() == [-32768, 1, 300]
    assert fitted["h"].tolist() == [-40000, np.float32(np.float16(0.1)), 300] and set(fitted["b"]) == {0, 1}
    assert {name: value.dtype for name, value in fitted.items()} == {name: feeds[name].dtype for name in kinds}
    asked = Plan("main", "asked", feeds, asked=True)
    assert caller.fit_plan(asked).feeds["i"].tolist() == [-40000, 1, 300]


class Many(torch.nn.Module):
    def forward(self, i, u, h, b):
        return i.float() + u.float() + h.float() + b.float()


class Nested(torch.nn.Module):
    def forward(self, pair, more, scale=1.0, shift=None):
        first, (second, *_) = pair
        return first * scale - second + more["b"] * (more["a"] + (0.0 if shift is None else shift))


@pytest.mark.parametrize("named", [{}, {"shift": torch.tensor([1.0, 2.0, 3.0])}])
def test_an_exported_module_gets_the_containers_that_it_was_exported_with(named):
    """Each leaf of tuples and dictionaries is an input of the model."""
    x = torch.randn(4, 3)
    exported = torch.export.export(Nested().eval(), ((x, (x + 1, x)), {"b": x[:1], "a": x[0, :1]}), named)
    model = ane.convert(exported, check=True, minimum_deployment_target=ct.target.iOS17,
                        compute_precision=ct.precision.FLOAT32)
    assert ane.verify(exported, model).equal and ane.verify(model, exported).equal


@pytest.mark.parametrize("scale", [1 / 127.5, 1.0])
def test_a_scale_that_a_model_applies_to_pixels_is_named_where_it_differs(scale):
    layer = torch.nn.Conv2d(3, 4, 3).eval()
    model = ct.convert(torch.jit.trace(layer, torch.randn(1, 3, 8, 8)), skip_model_load=True,
                       inputs=[ct.ImageType(name="image", shape=(1, 3, 8, 8), scale=scale)])
    report = ane.verify(layer, model)
    assert report.equal == (scale == 1)
    assert any("input 'image' is an image: Conv2d was called with pixels" in note
               for note in report.notes) == (scale != 1)


def test_a_module_in_training_mode_is_refused_and_not_switched(full):
    net = Net()
    with pytest.raises(ane.InputError) as error:
        ane.verify(full, net)
    assert str(error.value) == ("the module Net is in training mode, in which dropout and batch norm compute something "
                                "else; call its eval() first")
    assert net.training


def test_a_part_in_training_mode_is_refused_too(full):
    net = Net().eval()
    net.add_module("drop", torch.nn.Dropout())
    with pytest.raises(ane.InputError, match="the module 'drop' in Net is in training mode"):
        ane.verify(full, net)


@pytest.mark.parametrize("traced", [False, True])
def test_layers_that_compute_the_same_in_training_mode_are_accepted(traced):
    """As coremltools' quantizers leave them, in a module that is not in training mode."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.LayerNorm(4)).eval()
    module[0].train()
    trace = torch.jit.trace(module, torch.ones(2, 3))
    program = ct.convert(trace, convert_to="milinternal", inputs=[ct.TensorType("x", (2, 3))],
                         minimum_deployment_target=ct.target.iOS17, compute_precision=ct.precision.FLOAT32)
    assert ane.verify(program, trace if traced else module).equal


REFUSED = {
    "too few": (lambda x, z: x + z, "returned 1 outputs, the program has 2 ('sum', 'gap'); expected one for each"),
    "too many": (lambda x, z: (x, z, x), "returned 3 outputs, the program has 2 ('sum', 'gap')"),
    "other names": (lambda x, z: {"a": x}, "returned 1 outputs ('a'), the program has 2 ('sum', 'gap')"),
    "no array": (lambda x, z: (x, object()), "returned an object; expected tensors, arrays or numbers"),
    "raises": (lambda x, z: x @ z, "raised ValueError for (x: float32[2, 3], z: float32[2, 3]): matmul: "),
    "parameters": (lambda: None, "raised TypeError"),
}


@pytest.mark.parametrize(("given", "message"), REFUSED.values(), ids=REFUSED)
def test_a_callable_that_does_not_fit_is_named(given, message):
    with pytest.raises(ane.InputError) as error:
        ane.verify(two(), given)
    assert str(error.value).startswith("the callable <lambda> ") and message in str(error.value)


def test_a_module_without_a_label_is_compared_with_a_model_without_one():
    def body(x):
        return mb.classify(probabilities=x, classes=mb.const(val=mil_list(["a", "b", "c"])), name="label")

    classifier = build_program(body, dtype=types.fp32, x=(1, 3))
    with pytest.raises(ane.InputError, match="expected one for each; a classifier is compared without its label: "
                                             "convert it without classifier_config"):
        ane.verify(classifier, lambda x: x)


WORDS = {
    "both callables": (RETURNS["a tuple"], RETURNS["a list"], {}, "both sides are callables; expected a model on one"),
    "a class": (two(), Net, {}, "found the class Net; expected an instance of it"),
    "bitwise": (two(), RETURNS["a tuple"], {"exactness": "bitwise"}, "exactness 'bitwise' applies to two models"),
    "tolerance of models": (two(), two(), {"tolerance": 0.1}, "tolerance applies to a torch module or a callable"),
    "negative": (two(), RETURNS["a tuple"], {"tolerance": -1.0}, "tolerance -1.0: expected 0 or more"),
    "no number": (two(), RETURNS["a tuple"], {"tolerance": float("nan")}, "tolerance nan: expected 0 or more"),
    "a quirk of a callable": (two(), RETURNS["a tuple"], {"quirks": ("conv_transpose_1d_bias",)},
                              "quirks are imitated in the second model, which is a callable here; pass the callable"),
    "an unknown quirk": (RETURNS["a tuple"], two(), {"quirks": ("bias",)}, "quirk 'bias': unknown"),
    "neither": (two(), 7, {}, "cannot read an object of type int; expected a path"),
}


def test_a_spec_is_refused_with_what_to_do():
    """Its weights lie elsewhere, so it is no model by itself."""
    advice = r"cannot read an object of type Model; .* save a spec first: ct\.models\.MLModel"
    with pytest.raises(ane.InputError, match=advice):
        ane.verify(ct.proto.Model_pb2.Model(), two())


@pytest.mark.parametrize(("before", "after", "how", "message"), WORDS.values(), ids=WORDS)
def test_what_makes_no_sense_is_refused(before, after, how, message):
    with pytest.raises(ane.InputError) as error:
        ane.verify(before, after, **how)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_has_to_be_the_same(value):
    def put(x, z):
        total = x + z
        total[0, 0] = value
        return total, x - z

    report = ane.verify(two(), put, tolerance=1000.0)
    assert report.status == "different"
    quotient = build_program(lambda x, z: mb.real_div(x=x, y=z, name="y"), x=(4,), z=(4,), dtype=types.fp32)
    feeds = {"x": np.array([0, 1, -1, 2], np.float32), "z": np.array([0, 0, 0, 3], np.float32)}
    assert ane.verify(quotient, lambda x, z: torch.from_numpy(x) / torch.from_numpy(z), feeds=feeds).equal


def test_another_shape_is_a_difference_and_a_lone_number_is_an_array_of_one():
    report = ane.verify(two(), lambda x, z: ((x + z).T, x - z))
    assert report.status == "different" and "has shape [2, 3] in the first and [3, 2] in the second" in str(report)
    total = build_program(lambda x: mb.reduce_sum(x=x, axes=[0], keep_dims=True, name="y"), x=(4,), dtype=types.fp32)
    assert ane.verify(total, lambda x: x.sum()).equal


def test_a_fault_model_beside_the_module_it_was_made_from():
    net = torch.nn.ConvTranspose1d(4, 2, 5).eval()

    def body(x):
        held = {"weight": net.weight.detach().numpy(), "bias": net.bias.detach().numpy()}
        return mb.conv_transpose(x=x, **held, name="y")

    prog = build_program(body, x=(1, 4, 20), dtype=types.fp32)
    assert ane.verify(net, prog).equal
    report = ane.verify(net, prog, quirks=("conv_transpose_1d_bias",))
    assert report.status == "different" and report.quirks == ("conv_transpose_1d_bias",)


def test_a_shape_the_program_does_not_take_is_left_out():
    with_free = build_program(lambda x: mb.reshape(x=x, shape=(4, 4), name="y"), x=(None,), dtype=types.fp32)
    report = ane.verify(with_free, lambda x: x.reshape(4, 4))
    assert report.equal and len(report.cases) == 2
    (note,) = report.notes
    assert "longer shapes: not compared, as the program cannot be run" in note and note in str(report)


class Remembers(torch.nn.Module):
    def __init__(self, name):
        super().__init__()
        self.register_buffer(name, torch.full((2, 3), 7.0))
        self.name = name

    def forward(self, x):
        held = getattr(self, self.name)
        held.copy_(torch.relu(held + x))
        return torch.relu(x)


def test_buffers_are_the_states_and_are_left_as_they_were():
    net = Remembers("memory").eval()
    report = ane.verify(net, stateful())
    assert report.equal and [output.output for output in report.cases[0].outputs] == ["y", "state memory"]
    assert bool((net.memory == 7).all()) and report.notes == []
    wrong = clone_program(stateful())
    name = next(op.outputs[0].name for op in wrong.functions["main"].operations if op.op_type == "add")
    wrong = spoilt(wrong, name, lambda mb, op: mb.sub(x=op.x, y=op.y))
    assert [output.passed for output in ane.verify(net, wrong).cases[0].outputs] == [True, False]


def test_a_state_without_a_buffer_is_not_compared_and_that_is_said():
    report = ane.verify(Remembers("other").eval(), stateful())
    assert report.equal and [output.output for output in report.cases[0].outputs] == ["y"]
    assert report.notes == ["state 'memory' started as zeros, and its final value was not compared: the callable "
                            "has no buffer of that name"]


def test_only_one_function_is_what_a_callable_stands_for():
    prog = two()
    prog.add_function("second", two().functions["main"])
    report = ane.verify(prog, RETURNS["a tuple"])
    assert report.equal and report.notes == ["function 'second' was not compared: a callable stands for one, 'main'"]


def test_a_package_is_a_side_too(fixtures):
    golden = np.load(fixtures / "conv_transpose_1d.npz")

    def remembered(mel):
        assert mel.dtype == np.float32
        return golden["waveform"]

    source = fixtures / "conv_transpose_1d.mlpackage"
    report = ane.verify(source, remembered, feeds={"mel": golden["mel"]})
    assert report.equal and report.tolerance == FP16_TOLERANCE and len(report.cases) == 1
    assert ane.verify(remembered, source).status == "different"  # on inputs of its own


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("limits", [{}, {"tolerance": 0.0}, {"atol": 1e-3}, {"snr": 30.0}, {"cosine": 0.9}])
def test_outputs_without_a_finite_number_prove_nothing(value, limits):
    made = build_program(lambda x: mb.mul(x=mb.exp(x=x), y=np.float16(value), name="y"), x=(1, 4))
    for sides in ((made, lambda x: np.full((1, 4), value)), (lambda x: np.full((1, 4), value), made)):
        report = ane.verify(*sides, **limits)
        assert report.status == "not verified"
        assert "it was not compared; give feeds=" in report.reason


@pytest.mark.parametrize("limits", [{}, {"atol": 1e-3}])
def test_outputs_that_are_empty_by_their_type_are_equal(limits):
    made = build_program(lambda x: mb.slice_by_index(x=x, begin=[0, 0], end=[1, 0], name="y"), x=(1, 4))
    assert ane.verify(made, lambda x: np.zeros((1, 0), np.float32), **limits).equal


def test_outputs_that_are_empty_in_all_runs_prove_nothing():
    def places(factor):
        def body(x):
            x = mb.clip(x=x, alpha=np.float16(-9), beta=np.float16(9))
            found = mb.non_zero(x=mb.greater(x=x, y=np.float16(99)))
            return mb.mul(x=mb.cast(x=found, dtype="fp32"), y=np.float32(factor), name="y")

        return build_program(body, x=(1, 4))

    for other in (places(2), lambda x: np.zeros((0, 2))):
        report = ane.verify(places(1), other)
        assert report.status == "not verified", str(report)
        assert "the output 'y' of function 'main' was empty in all runs" in report.reason
