"""What users complained of, one test each: their code goes onto the ANE whole, or the report says what is left and why.

Sources: "CoreML" (notes in Chinese on ops that fall back and on replacements), "Which Core ML layers are not supported
by the ANE" (hollance/neural-engine, and its translations), "CoreML: careful with Conv1D" (a report in Chinese),
"coreml102: Model Surgery Tips" (an author of eiln/ane). Where a test of a complaint stands elsewhere, `ELSEWHERE` says.
"""

from __future__ import annotations

import copy
import importlib

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder, mil_list, types

import mil_ane_passes as ane
from mil_ane_passes.core.examples import program
from mil_ane_passes.core.registry import all_rules
from mil_ane_passes.residency.predict import predict
from mil_ane_passes.runtime import Runtime
from tests.rewrites.helpers import half, kinds, torch_outputs
from tests.rules.helpers import Spelt

pytestmark = pytest.mark.filterwarnings("ignore")

ELSEWHERE = {
    "the bias of ConvTranspose1d(768, 384, 7, stride=3, padding=2) is wrong on the ANE":
        ("tests.rewrites.test_reproducer", "test_rewritten_through_ct_convert"),
    "Conv1d: take Conv2d": ("tests.rewrites.test_lift_conv_1d", None),
    "x[..., -1] += 1, in every form": ("tests.torch_frontend.patches.test_view_writes", None),
    "broadcasts of C x H x W and C x 1 x 1": ("tests.rewrites.test_broadcasts", "test_there_and_back"),
    "cumsum at flexible shapes": ("tests.rewrites.test_triangle_cumsum", "test_the_seeds_complaint_at_flexible_shapes"),
    "the last axis to a multiple of 64": ("tests.rewrites.test_pad_last_axis", None),
    "epsilons that fp16 does not have": ("tests.rewrites.test_representable_epsilon", None),
}
FLEXIBLE = ct.RangeDim(1, 64, 8)


@pytest.mark.parametrize("complaint", ELSEWHERE)
def test_what_is_tested_elsewhere_stands_there(complaint):
    module, name = ELSEWHERE[complaint]
    found = importlib.import_module(module)
    assert name is None or callable(getattr(found, name))
    assert any(each.startswith("test_") for each in vars(found))


def converted(function, *inputs, way="traced", shapes=None, convert=ct.convert):
    """A model, as torch and coremltools make it, not yet rewritten."""
    module = (function if isinstance(function, torch.nn.Module) else Spelt(function)).eval()
    declared = [ct.TensorType(name=name, shape=shape, dtype=np.float32 if each.is_floating_point() else np.int32)
                for name, each, shape in zip("abc", inputs, shapes or [each.shape for each in inputs])]
    if way == "exported":
        source, declared = torch.export.export(module, inputs).run_decompositions({}), None
    else:
        source = torch.jit.script(module) if way == "scripted" else torch.jit.trace(module, inputs)
    return convert(source, inputs=declared, convert_to="mlprogram", skip_model_load=True,
                   minimum_deployment_target=ct.target.iOS17)


def refused(built, target):
    """The types of the ops that the ANE is predicted not to take."""
    return {row.op.op_type for row in rows(built, target) if not row.takes}


def rows(built, target):
    plan, _ = predict(built, [rule.configured() for rule in all_rules().values()], target=target)
    return plan.rows


def held(built, function, *inputs, tolerance=1e-12):
    """The program's output against PyTorch's, both in double precision."""
    module = function if isinstance(function, torch.nn.Module) else Spelt(function)
    feeds = dict(zip(built.functions["main"].inputs, (each.numpy() for each in inputs)))
    (found,) = Runtime(built, precision="float64")(feeds).values()
    module = copy.deepcopy(module)  # it is doubled in place
    np.testing.assert_allclose(found, torch_outputs(module, *(each.clone() for each in inputs)), rtol=0, atol=tolerance)


def rewritten(model, target, **asked):
    """The program that the preset leaves, proved; single ops are no reason to enter the ANE, so cost is no bar here."""
    report = ane.rewrite(model, target=target, **{"preset": "full", "max_growth": None, **asked})
    assert report.status != "not proved"
    return report.package.program


def numbers(*shape):
    return torch.from_numpy(np.random.default_rng(0).standard_normal(shape).astype(np.float16)).float()


class Pyramid(torch.nn.Module):
    """Max pools as wide as none may be on an M4, and as SPP layers of detectors have them."""

    def forward(self, x):
        return torch.cat([x, *(torch.nn.functional.max_pool2d(x, k, 1, k // 2) for k in (5, 9, 13))], 1)


class Sequence(torch.nn.Module):
    """A recurrent layer between two simple ops."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.layer = half(kind(8, 16, batch_first=True))

    def forward(self, x):
        return self.layer(x * 0.5)[0] + 1


X = (2, 3, 8)
CURED = {
    "LSTM": (Sequence(torch.nn.LSTM), (1, 6, 8), "m4", "lstm"),
    "GRU": (Sequence(torch.nn.GRU), (1, 6, 8), "m4", "while_loop"),
    "RNN": (Sequence(torch.nn.RNN), (1, 6, 8), "m4", "rnn"),
    "cumsum of the last axis plus one": (lambda x: torch.cumsum(x, dim=-1) + 1, X, "m4", "cumsum"),
    "gather": (lambda x: x[:, [2, 0, 1]], X, "m1", "gather"),
    "pools wider than 13": (lambda x: torch.nn.functional.max_pool2d(x, 15, 1, 7), (1, 3, 20, 20), "a13", "max_pool"),
    "pools with a stride above 2": (lambda x: torch.nn.functional.max_pool2d(x, 5, 4), (1, 3, 20, 20), "a13",
                                    "max_pool"),
    "pools of a pyramid": (Pyramid(), (1, 3, 20, 20), "m4", "max_pool"),
}


@pytest.mark.parametrize("way", ["traced", "exported"])
@pytest.mark.parametrize("complaint", CURED)
def test_nothing_refused_is_left(complaint, way):
    function, shape, target, kind = CURED[complaint]
    x = numbers(*shape)
    model = converted(function, x, way=way, convert=ane.convert if way == "exported" else ct.convert)
    assert kind in refused(model._mil_program, target)
    built = rewritten(model, target)
    assert not refused(built, target)
    held(built, function, x, tolerance=1e-12 if not list(getattr(function, "parameters", list)()) else 1e-3)


def test_what_stands_behind_a_running_sum_is_no_longer_drawn_to_the_cpu():
    """However simple the ops behind a cumsum, they went to the CPU with it."""
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.after = (torch.nn.Conv2d(64, 64, 3, padding=1) for _ in range(2))

        def forward(self, x):
            return self.after(torch.cumsum(torch.relu(self.before(x)) * 2 ** -8, dim=-1) + 1)

    torch.manual_seed(0)
    model = converted(half(Model()), numbers(1, 64, 32, 32))
    assert {row.backend for row in rows(model._mil_program, "m4")} == {"cpu"}
    built = ane.rewrite(model, preset="full", target="m4").package.program
    assert {row.backend for row in rows(built, "m4")} == {"ane"} and not refused(built, "m4")


@pytest.mark.parametrize("shape", [X, (2, 8)])
@pytest.mark.parametrize("fill", [
    lambda x: torch.full_like(x, 3.0) * x, lambda x: torch.zeros_like(x) + x, lambda x: torch.ones(x.shape) - x,
    lambda x: torch.arange(x.shape[-1]) * x,
])
def test_fills_and_ranges_of_fixed_shapes_are_constants(fill, shape):
    """fill_like, fill and range_1d (torch.arange) were seen on the CPU only."""
    x = numbers(*shape)
    built = rewritten(converted(fill, x, convert=ane.convert), "m4")
    assert not refused(built, "m4") and not {"fill", "fill_like", "range_1d"} & set(kinds(built))
    held(built, fill, x)


COMPUTED = {
    "fill": lambda x: torch.zeros(x.shape[0], x.shape[2]) + x.sum(1),
    "arange": lambda x: torch.arange(x.shape[-1]) * x,
    "shape unpacking": lambda x: x.reshape(x.shape[0] * x.shape[2], -1),
}


@pytest.mark.parametrize("complaint", COMPUTED)
def test_shapes_computed_at_run_time_are_gone_once_the_shape_is_fixed(complaint, tmp_path):
    """Sizes that are read from a flexible input are ints on the CPU; `edit --fix-shape` makes constants of them."""
    x = numbers(*X)
    model = converted(COMPUTED[complaint], x, shapes=[(2, 3, FLEXIBLE)], convert=ane.convert)
    assert "shape" in refused(model._mil_program, "m4")
    model.save(str(tmp_path / "flexible.mlpackage"))
    ane.edit(tmp_path / "flexible.mlpackage", tmp_path / "fixed.mlpackage", fix_shape={"a": X})
    built = rewritten(str(tmp_path / "fixed.mlpackage"), "m4")
    assert not refused(built, "m4")
    held(built, COMPUTED[complaint], x)


@torch.jit.script_if_tracing
def _zeros(x):
    a, b = x.size(0), x.size(1)
    return torch.zeros([a, b])


@pytest.mark.parametrize("length", [1, 8, 40])
def test_a_shape_unpacked_in_a_trace_stays_the_shape_of_the_input(length):
    """`a, b, _ = x.shape` was said to become constants once traced; the scripted way round it needed a patch."""
    def function(x):
        a, b, _ = x.shape
        return _zeros(x) + x.sum(2) + x.reshape(a * b, -1).sum(1).reshape(a, b)

    model = converted(function, numbers(*X), shapes=[(FLEXIBLE, 3, 8)], convert=ane.convert)
    held(model._mil_program, function, numbers(length, 3, 8))


@pytest.mark.parametrize("way", ["traced", "exported"])
@pytest.mark.parametrize("clones", [True, False])
def test_slice_assignment(clones, way):
    def function(x):
        x = x.clone() if clones else x
        x[..., -1] += 1
        return x

    x = numbers(*X)
    built = rewritten(converted(function, x, way=way, convert=ane.convert), "m4")
    assert not refused(built, "m4")
    held(built, function, x)


def found(model, name, target="all"):
    return [item for item in ane.lint(model, target=target).findings if item.rule.name == name]


def test_int_inputs_are_reported():
    """"Passing other dtypes, notably int, even if it's completely unused, is an automatic CPU signal"."""
    ids = torch.randint(0, 9, (1, 8))
    model = converted(torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.ReLU()), ids)
    (item,) = found(model, "int_inputs")
    assert "fp16" in item.fix["advice"]


def test_float32_inputs_become_float16():
    """"An unsolicited downcast": with the interface in fp16 there is no cast at the edge."""
    model = converted(torch.relu, numbers(*X))
    assert kinds(model._mil_program)["cast"]
    built = rewritten(model, "m4", passes="fp16_io")
    assert not kinds(built)["cast"]
    assert built.functions["main"].inputs["a"].dtype == types.fp16


def test_tensors_too_small_are_reported():
    """"If input/output sizes are too small ... the workload will be delegated to the CPU"."""
    assert found(converted(lambda x: torch.relu(x) * 2, numbers(1, 8)), "tiny_tensors")


def test_lopsided_50000_is_reported():
    """"If tensors are lopsided to some inexcusable shape like (50000,), chunk and/or parallelize it"."""
    model = converted(lambda x: torch.tanh(x) * 2, numbers(50000))
    assert found(model, "lopsided", target="m4") and not refused(model._mil_program, "m4")
    assert found(model, "dimension_limit", target="m1") and refused(model._mil_program, "m1") >= {"tanh", "mul"}


def test_a_table_of_sinusoids_is_a_constant_and_a_sine_of_data_is_reported():
    """"A model with a single sin/cos layer won't run on the ANE, but the whisper encoder does"."""
    def table(x):
        angles = torch.arange(8)[:, None] * torch.exp(torch.arange(4) * -0.5)
        return x + torch.cat([torch.sin(angles), torch.cos(angles)], 1)

    x = numbers(1, 8, 8)
    built = rewritten(converted(table, x), "m1")
    assert not refused(built, "m1") and set(kinds(built)) <= {"const", "cast", "add"}
    held(built, table, x, tolerance=1e-3)
    assert found(converted(torch.sin, x), "sin_cos", target="m1")
    assert not found(converted(torch.sin, x), "sin_cos", target="m4")


def test_a_flexible_shape_is_reported():
    """"Use static and known shapes"."""
    assert found(converted(torch.relu, numbers(*X), shapes=[(2, 3, FLEXIBLE)]), "flexible_shapes")


def test_argsort_is_reported():
    """"Dynamic shapes (e.g. argsort)"."""
    model = converted(lambda x: torch.argsort(x, -1).float() * 2, numbers(*X))
    assert refused(model._mil_program, "m4") & {"argsort", "cast", "topk"}


def test_broadcasts_are_written_out_for_old_chips_by_name():
    """"Certain broadcast operations (C x H x W and C x 1 x 1)"; newer sources take the form that broadcasts."""
    def function(x):
        return x * x.mean((2, 3), keepdim=True)

    x = numbers(1, 4, 8, 8)
    model = converted(function, x)
    assert found(model, "old_broadcast", target="a13")
    built = rewritten(model, "a13", passes="tile_broadcast")
    assert kinds(built)["tile"] and not found(built, "old_broadcast", target="a13")
    held(built, function, x)


def test_looking_up_rows_by_an_input_is_reported():
    model = converted(torch.nn.Embedding(9, 4), torch.randint(0, 9, (1, 8)))
    assert found(model, "runtime_gather") or found(model, "int_inputs")
    assert "gather" in refused(model._mil_program, "m1")


def test_custom_layer_is_reported_and_a_classifier_with_it():
    built = program(lambda x: Builder.classify(
        probabilities=Builder.softmax(x=x), classes=Builder.const(val=mil_list(["a", "b"]))),
        dtype=types.fp32, x=(1, 2), opset=ct.target.iOS15)
    (item,) = found(built, "custom_layer")
    assert item.refuses and "split the model there" in item.fix["advice"]


def test_every_op_that_leaves_the_ane_has_its_reason():
    """"WWDC promised that the report would say why"."""
    model = converted(lambda x: torch.argsort(torch.cumsum(x, -1), -1).float(), numbers(*X))
    left = [row for row in rows(model._mil_program, "m4") if not row.takes]
    assert left and all(row.reason and row.codes for row in left)


def test_a_part_that_stays_on_the_cpu_is_split_off(tmp_path):
    """"Joined with a part that is CPU-only, the whole model is CPU-only": two packages, one of them whole."""
    model = converted(lambda x: torch.argsort(torch.relu(x) * 2 + 1, -1).float(), numbers(*X))
    model.save(str(tmp_path / "whole.mlpackage"))
    (op,) = [op for op in model._mil_program.functions["main"].operations if op.op_type == "argsort"]
    ane.edit(tmp_path / "whole.mlpackage", tmp_path / "part.mlpackage", split_at=[op.x.name])
    parts = [refused(ane.load(path).program, "m4") for path in sorted(tmp_path.glob("part*.mlpackage"))]
    assert len(parts) == 2 and not parts[0] and "argsort" in parts[1]
