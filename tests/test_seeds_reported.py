"""What users complained of and no rewrite fixes, one test each: the report says what is left, why, and what helps."""

from __future__ import annotations

import coremltools as ct
import pytest
import torch
from coremltools.converters.mil.mil import Builder, mil_list, types

import mil_ane_passes as ane
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.rules.control_flow import CustomLayer
from tests.rewrites.helpers import kinds
from tests.seeds import FLEXIBLE, X, converted, found, held, numbers, refused, rewritten, rows

pytestmark = pytest.mark.filterwarnings("ignore")


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


def test_smooth_upsampling_by_more_than_2_is_reported():
    """Nearest neighbour by 4 is twice by 2; a bilinear one is not, and old chips keep it off the ANE."""
    model = converted(lambda x: torch.nn.functional.interpolate(x, scale_factor=4, mode="bilinear"),
                      numbers(1, 3, 5, 5))
    assert "upsample_bilinear" in refused(rewritten(model, "a13"), "a13")
    (item,) = found(model, "old_upsampling", target="a13")
    assert "bilinear" in item.fix["advice"] and not refused(model._mil_program, "m4")


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


def test_a_custom_layer_and_the_label_of_a_classifier_are_reported():
    unknown = next(each for each in CustomLayer().examples() if each.name == "unknown op")
    (custom,) = found(unknown.build(), "custom_layer")
    assert "--split-at" in custom.fix["advice"]
    built = build_program(lambda x: Builder.classify(
        probabilities=Builder.softmax(x=x), classes=Builder.const(val=mil_list(["a", "b"]))),
        dtype=types.fp32, x=(1, 2), opset=ct.target.iOS15)
    (label,) = found(built, "classifier_label")
    assert label.refuses and "probabilities" in label.fix["advice"]


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
