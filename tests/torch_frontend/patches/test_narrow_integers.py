"""Integers of float16 conversions stay int32 where they may not fit 16 bits, and are narrowed where they fit."""

from __future__ import annotations

from typing import Any

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import types
from coremltools.converters.mil.mil.passes.defs.quantization import add_int16_cast
from torch import nn

import mil_ane_passes as ane

IDS = torch.tensor([[[3, 40_000, 50_256, 19_743]]])
PLACES = torch.tensor([1, 2, 0])


class Looked(nn.Module):
    """Ids without an axis of one element, looked up in a table."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, 4)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.table(ids.squeeze(1)), ids.squeeze(1) + 1


def convert(model: Any, *example: torch.Tensor, sizes: Any = None, target: Any = ct.target.iOS17) -> Any:
    traced = torch.jit.trace(model, example, check_trace=False)
    inputs = [ct.TensorType(name=f"x{number}", shape=sizes or each.shape,
                            dtype=np.float32 if each.is_floating_point() else np.int32)
              for number, each in enumerate(example)]
    return ane.convert(traced, inputs=inputs, minimum_deployment_target=target)


def run(mlmodel: Any, *feeds: torch.Tensor) -> list[Any]:
    arrays = [each.numpy().astype(np.float32 if each.is_floating_point() else np.int32) for each in feeds]
    return list(ane.run(mlmodel, {f"x{number}": array for number, array in enumerate(arrays)}).values())


def narrowed(mlmodel: Any) -> set[str]:
    ops = mlmodel._mil_program.functions["main"].operations
    return {op.op_type for op in ops if op.op_type in ("gather", "gather_along_axis", "gather_nd", "squeeze", "topk")
            and op.x.dtype in (types.int16, types.uint16)}


def picked(ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return ids[0, 0][places] + 1


def gathered(ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return torch.gather(ids, 2, places[None, None]) + 1


def indexed(ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return ids[0][torch.zeros_like(places), places] + 1


def largest(ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return torch.topk(ids, 2)[0] + 1 + 0 * places[:2]


@pytest.mark.parametrize("function", [picked, gathered, indexed, largest])
def test_numbers_of_any_size_stay_int32(function: Any) -> None:
    class Model(nn.Module):
        def forward(self, ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = function(ids, places)
            return result

    mlmodel = convert(Model(), IDS, PLACES)
    np.testing.assert_array_equal(run(mlmodel, IDS, PLACES)[0], function(IDS, PLACES))
    assert not narrowed(mlmodel)


def test_ids_of_a_large_table_stay_int32() -> None:
    model = Looked(50_257).eval()
    mlmodel = convert(model, IDS)
    rows, ids = run(mlmodel, IDS)
    np.testing.assert_allclose(rows, model(IDS)[0].detach().half(), rtol=1e-3)
    np.testing.assert_array_equal(ids, IDS[:, 0] + 1)
    assert not narrowed(mlmodel)


def test_ids_of_a_small_table_are_narrowed_as_before() -> None:
    assert narrowed(convert(Looked(30_522).eval(), IDS % 30_522)) == {"squeeze"}


class Halves(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        size = x.shape[1]
        return torch.arange(size) + 1, x[:, size // 2:]


@pytest.mark.parametrize("target", [ct.target.iOS17, ct.target.iOS18])
@pytest.mark.parametrize("upper", [480_000, 2_000])
def test_sizes_are_narrowed_if_the_declared_range_fits(upper: int, target: Any) -> None:
    mlmodel = convert(Halves(), torch.randn(1, 16), sizes=(1, ct.RangeDim(8, upper, 16)), target=target)
    assert narrowed(mlmodel) == ({"gather"} if upper == 2_000 else set())
    x = torch.randn(1, min(upper, 40_000))
    for found, expected in zip(run(mlmodel, x), Halves()(x), strict=True):
        np.testing.assert_allclose(found, expected.numpy(), rtol=1e-3)


def test_sizes_are_narrowed_if_all_enumerated_ones_fit() -> None:
    for sizes, kinds in (([16, 64], {"gather"}), ([16, 40_000], set())):
        shapes = ct.EnumeratedShapes([(1, size) for size in sizes], default=(1, 16))
        assert narrowed(convert(Halves(), torch.randn(1, 16), sizes=shapes)) == kinds


def test_positions_along_a_long_axis_stay_int32() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.topk(1, -1)[1] + 1

    x = torch.zeros(1, 100_000)
    x[0, 99_998] = 1
    assert run(convert(Model(), x), x)[0].reshape(-1).tolist() == [99_999]


class Signed(nn.Module):
    """A lookup of constant positions before signed numbers, and a position that counts from the end."""

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        looked_up = x.gather(1, torch.tensor([[[2, 1, 0, 2]]]))
        signed = (ids - 5).clamp(-10, 10).squeeze(0)
        return looked_up, signed + 1, x[torch.arange(x.shape[0]), signed[:1]]


@pytest.mark.parametrize("target", [ct.target.iOS17, ct.target.iOS18])
def test_negative_numbers_stay_negative_behind_constants(target: Any) -> None:
    x, ids = torch.randn(1, 6, 4), torch.tensor([[4, 0, 9, 5]], dtype=torch.int32)
    mlmodel = convert(Signed(), x, ids, target=target)
    for found, expected in zip(run(mlmodel, x, ids), Signed()(x, ids), strict=True):
        np.testing.assert_allclose(found, expected.numpy(), rtol=2e-3, atol=1e-3)
    assert "squeeze" in narrowed(mlmodel)


def test_a_pass_that_chooses_the_dtype_of_each_operand_needs_no_setter(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of coremltools 9.1."""
    monkeypatch.setattr(add_int16_cast, "target_dtype", property(lambda self: getattr(self, "_target_dtype", "int16")))
    x, ids = torch.randn(1, 6, 4), torch.tensor([[4, 0, 9, 5]], dtype=torch.int32)
    assert "squeeze" in narrowed(convert(Signed(), x, ids))


class Placed(nn.Module):
    """Constant positions, and a table of positions that are counted from 0."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x[:, torch.tensor([2, 0])], x + self.table(torch.arange(x.shape[1]))


def test_positions_counted_from_0_need_no_ops_for_negative_ones() -> None:
    model, x = Placed().eval(), torch.randn(1, 6, 4)
    mlmodel = convert(model, x, sizes=(1, ct.RangeDim(4, 48, 6), 4))
    for found, expected in zip(run(mlmodel, x), model(x), strict=True):
        np.testing.assert_allclose(found, expected.detach().numpy(), rtol=2e-3, atol=2e-3)
    kinds = [op.op_type for op in mlmodel._mil_program.functions["main"].operations]
    assert "range_1d" in kinds and not {"greater_equal", "select"} & set(kinds)
