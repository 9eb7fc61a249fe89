"""What users complained of, one test each: their code goes onto the ANE whole.

What cannot is in `test_seeds_reported.py`: there the report says what is left and why.

Sources: "CoreML" (notes in Chinese on ops that fall back and on replacements), "Which Core ML layers are not supported
by the ANE" (hollance/neural-engine, and its translations), "CoreML: careful with Conv1D" (a report in Chinese),
"coreml102: Model Surgery Tips" (an author of eiln/ane). Where a test of a complaint stands elsewhere, `ELSEWHERE` says.
"""

from __future__ import annotations

import importlib

import coremltools as ct
import pytest
import torch

import mil_ane_passes as ane
from tests.rewrites.helpers import half, kinds
from tests.seeds import FLEXIBLE, X, converted, held, numbers, refused, rewritten, rows

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


@pytest.mark.parametrize("complaint", ELSEWHERE)
def test_what_is_tested_elsewhere_stands_there(complaint):
    module, name = ELSEWHERE[complaint]
    found = importlib.import_module(module)
    assert name is None or callable(getattr(found, name))
    assert any(each.startswith("test_") for each in vars(found))


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


CURED = {
    "LSTM": (Sequence(torch.nn.LSTM), (1, 6, 8), "m4", "lstm"),
    "GRU": (Sequence(torch.nn.GRU), (1, 6, 8), "m4", "while_loop"),
    "RNN": (Sequence(torch.nn.RNN), (1, 6, 8), "m4", "rnn"),
    "cumsum of the last axis plus one": (lambda x: torch.cumsum(x, dim=-1) + 1, X, "m4", "cumsum"),
    "dilated convolutions": (half(torch.nn.Conv2d(4, 4, 3, dilation=6, padding=6)), (1, 4, 20, 20), "a13", "conv",
                             "undilate_conv"),
    "gather": (lambda x: x[:, [2, 0, 1]], X, "m1", "gather"),
    "pools wider than 13": (lambda x: torch.nn.functional.max_pool2d(x, 15, 1, 7), (1, 3, 20, 20), "a13", "max_pool"),
    "pools with a stride above 2": (lambda x: torch.nn.functional.max_pool2d(x, 5, 4), (1, 3, 20, 20), "a13",
                                    "max_pool"),
    "pools that average over more than 13": (lambda x: torch.nn.functional.avg_pool2d(x, 14), (1, 3, 28, 28), "a13",
                                             "avg_pool"),
    "upsampling by more than 2": (lambda x: torch.nn.functional.interpolate(x, scale_factor=4), (1, 3, 5, 5), "a13",
                                  "upsample_nearest_neighbor"),
    "pools of a pyramid": (Pyramid(), (1, 3, 20, 20), "m4", "max_pool"),
}


@pytest.mark.parametrize("way", ["traced", "exported"])
@pytest.mark.parametrize("complaint", CURED)
def test_nothing_refused_is_left(complaint, way):
    function, shape, target, kind, *passes = CURED[complaint]
    x = numbers(*shape)
    model = converted(function, x, way=way, convert=ane.convert if way == "exported" else ct.convert)
    assert kind in refused(model._mil_program, target)
    built = rewritten(model, target, **({"passes": passes} if passes else {}))
    assert not refused(built, target)
    held(built, function, x, tolerance=1e-12 if not list(getattr(function, "parameters", list)()) else 1e-3)


def test_what_stands_behind_a_running_sum_is_no_longer_drawn_to_the_cpu():
    """However simple the ops behind a cumsum, they went to the CPU with it."""
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.after = (torch.nn.Conv2d(96, 96, 3, padding=1) for _ in range(2))

        def forward(self, x):
            return self.after(torch.cumsum(torch.relu(self.before(x)) * 2 ** -8, dim=-1) + 1)

    torch.manual_seed(0)
    model = converted(half(Model()), numbers(1, 96, 32, 32))
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


SIZED = {
    "fill_like": (lambda x: torch.full_like(x, 3.0) * x.abs(), {}),
    "fill": (lambda x: torch.full((x.shape[0], x.shape[2]), 0.5) + x.sum(1), {}),
    "range_1d": (lambda x: torch.arange(x.shape[-1]) * x, {"passes": "constant_range{longest=64}"}),
}


@pytest.mark.parametrize("complaint", SIZED)
def test_fills_and_ranges_of_flexible_shapes_are_taken_from_the_data(complaint):
    """"Whether or not the shape is fixed, CPU only". A range needs to be told how long it may get."""
    function, asked = SIZED[complaint]
    model = converted(function, numbers(*X), shapes=[(2, 3, FLEXIBLE)], convert=ane.convert)
    assert "shape" in refused(model._mil_program, "m4")
    built = rewritten(model, "m4", **asked)
    assert not refused(built, "m4")
    for length in (1, 8, 64):
        held(built, function, numbers(2, 3, length))


def test_fill_like_is_a_constant_where_the_chip_does_not_take_it():
    """An M4 does."""
    def function(x):
        return torch.full_like(x, 3.0) * x

    x = numbers(*X)
    model = converted(function, x)
    assert not refused(model._mil_program, "m4") and "fill_like" in refused(model._mil_program, "m1")
    built = rewritten(model, "m1")
    assert not refused(built, "m1")
    held(built, function, x)


COMPUTED = {
    "fill": lambda x: torch.full((x.shape[0], x.shape[2]), 0.5) + x.sum(1),
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
