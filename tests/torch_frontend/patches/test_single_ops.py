"""Operators whose programs, refusals or flexible sizes are looked at, beyond the table in test_values.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, List

import coremltools as ct
import coremltools.optimize.coreml as cto
import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb
from torch import nn
from torch.nn import functional as F

import mil_ane_passes as ane
from mil_ane_passes import torch_frontend
from mil_ane_passes.ir.query import is_opaque
from mil_ane_passes.torch_frontend import NotConverted, patched

from ..checks import (
    FRONTENDS,
    captured,
    check,
    check_read_by_coremltools,
    convert,
    convert_captured,
    input_types,
    outputs,
    silence,
)

torch.manual_seed(0)


# `trunc`, `hypot`, `cdist`, `bucketize`.
ARITHMETIC_X = torch.randn(3, 4) * 3
ARITHMETIC_Y = torch.randn(3, 4)


@pytest.mark.parametrize("power", [0.0, 3.0, float("inf")])
def test_arithmetic_distances(power: float) -> None:
    check(lambda x, y: torch.cdist(x, y, power), ARITHMETIC_X[None], ARITHMETIC_Y[None, :2])


# `where` of numbers; bitwise ops of bools and ints; shifts.
CHOOSING_NUMBERS = torch.tensor([[3, -1, 2], [0, 5, -7]], dtype=torch.int32)


@pytest.mark.parametrize(("function", "why"), [(lambda x: x | 4, "'or' of ints has no lowering"),
                                               (lambda x: x & 4, "supported for constant masks")])
def test_choosing_other_patterns_are_refused(function, why: str) -> None:
    with pytest.raises(Exception, match=why):
        check(function, CHOOSING_NUMBERS)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_choosing_bits_of_a_constant(dtype: torch.dtype) -> None:
    """Packed weights of 4 bits, which are unpacked in the model."""
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("packed", torch.tensor([[1, 127, 18, 100]], dtype=dtype))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * (self.packed & 0xF).float()

    check(Packed().eval(), torch.randn(3, 4))


# `view_as` and `reshape_as` of a flexible tensor.
@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize("name", ["view_as", "reshape_as"])
def test_views_in_the_shape_of_another(frontend: str, name: str) -> None:
    check(lambda x, y: getattr(x, name)(y) + y, torch.randn(2, 6), torch.randn(3, 4), frontend=frontend)
    check(lambda x: getattr(x[:1], name)(x.sum()) * x, torch.randn(3), frontend=frontend)


@pytest.mark.parametrize("name", ["view_as", "reshape_as"])
def test_views_in_the_shape_of_a_flexible_one(name: str) -> None:
    check(lambda x: getattr(x, name)(x.transpose(0, 1)) * 2, torch.randn(4, 6), flexible=[0],
          at=[(torch.randn(7, 6),)])


# Scatters of constants keep what is there, as their mode says.
CONSTANT_SCATTER_DATA, CONSTANT_SCATTER_INDICES = (
    torch.arange(12.0).reshape(3, 4) + 4,
    torch.tensor([[0, 0, 2, 1], [2, 0, 2, 1]]),
)
CONSTANT_SCATTER_UPDATES = torch.full((2, 4), 10.)


@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize("axis", [0, -1])
def test_constant_scatter_added_constants_are_added(frontend: str, axis: int) -> None:
    check(
        lambda x: (
            x
            + CONSTANT_SCATTER_DATA.scatter_add(
                axis,
                CONSTANT_SCATTER_INDICES if axis == 0 else CONSTANT_SCATTER_INDICES[:, :3],
                CONSTANT_SCATTER_UPDATES,
            )
        ),
        torch.randn(3, 4),
        frontend=frontend,
    )


@pytest.mark.parametrize("reduce", ["sum", "prod", "amax", "amin"])
def test_constant_scatter_reduced_constants(reduce: str) -> None:
    check(
        lambda x: (
            x + CONSTANT_SCATTER_DATA.scatter_reduce(0, CONSTANT_SCATTER_INDICES, CONSTANT_SCATTER_UPDATES, reduce)
        ),
        torch.randn(3, 4),
    )


@pytest.mark.parametrize("mode", ["add", "sub", "mul", "div", "max", "min", "update"])
@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_constant_scatter_a_fold_gives_what_the_op_gives(mode: str, dtype: type) -> None:
    """As the runtime computes the op on values that it is fed."""
    def build(data: object, indices: object, updates: object) -> object:
        return mb.scatter_along_axis(data=data, indices=indices, updates=updates, axis=0, mode=mode, name="y")

    data, indices = np.array([4, 5, 6], dtype), np.array([2, 0, 2] if mode != "update" else [2, 0, 1], np.int32)
    updates = np.array([10, 3, 2], dtype)
    types = ct.converters.mil.mil.types
    fed = mb.program(input_specs=[mb.TensorSpec((3,), dtype=types.numpy_type_to_builtin_type(each))
                                  for each in (dtype, np.int32, dtype)])(
        lambda data, indices, updates: build(data, indices, updates))
    wanted = ane.run(fed, {"data": data, "indices": indices, "updates": updates})["y"]
    with patched():
        folded = mb.program(input_specs=[mb.TensorSpec((1,))])(
            lambda x: mb.cast(x=build(data, indices, updates), dtype="fp32"))
    (value,) = [op.outputs[0].val for op in folded.functions["main"].operations if op.op_type == "scatter_along_axis"]
    if value is None:
        assert mode == "div" and dtype == np.int32, "left to the runtime"
    else:
        np.testing.assert_array_equal(value, wanted)


# Rounded divisions and remainders.
DIVISION_I = torch.tensor([[-7, 7, 2 ** 30 + 1], [5, -5, 0]])
DIVISION_J = torch.tensor([2, -2, 3])


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_division_ints_stay_ints(frontend: str) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.cat([x % y, x // y, torch.div(x, y, rounding_mode="floor"),
                          torch.div(x, y, rounding_mode="trunc"), x // 1, x % 1])

    mlmodel = check(function, DIVISION_I, DIVISION_J, frontend=frontend)
    assert not mlmodel._mil_program.find_ops(op_type="floor")


def test_division_ints_keep_the_host_cleanup() -> None:
    mlmodel = convert(lambda x: (x // 1) * 2, (DIVISION_I,))
    assert not mlmodel._mil_program.find_ops(op_type="floor_div")


# `zeros`, `ones`, `full`, `new_*`, `*_like`, `fill_`, `zero_`.
FILLED_NUMBERS = torch.tensor([[3, -1, 2], [0, 5, 7]], dtype=torch.int32)


def filled_new(x: torch.Tensor) -> torch.Tensor:
    return x / x.new_ones((2, 3)) + x.new_full((2, 3), 3) / 2 + x.new_zeros([3]) + x.new_ones((1,), dtype=torch.float32)


def filled_like(x: torch.Tensor) -> torch.Tensor:
    ones = torch.ones_like(x) + torch.full_like(x, 3) // 2 + torch.zeros_like(x, dtype=torch.float32)
    return ones + torch.full_like(x, 0.5, dtype=torch.float32) + x


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("function", [filled_new, filled_like])
def test_filled_dtype_is_kept(function, frontend: str) -> None:
    check(function, FILLED_NUMBERS, frontend=frontend)


def test_filled_known_sizes_become_consts() -> None:
    mlmodel = check(lambda x: torch.full_like(x, 2.0) * x + x.new_ones(x.shape), torch.randn(2, 3))
    kinds = {op.op_type for op in mlmodel._mil_program.functions["main"].operations}
    assert not kinds & {"fill", "fill_like", "shape"}


# `chunk` and `split` along a flexible axis.
FLEXIBLE_SPLITS_X = torch.arange(24.0).reshape(2, 4, 3)
FLEXIBLE_SPLITS_Y = torch.arange(63.0).reshape(3, 7, 3)


@pytest.mark.parametrize("at", [FLEXIBLE_SPLITS_Y, FLEXIBLE_SPLITS_Y[:, :5], FLEXIBLE_SPLITS_Y[:, :6]])
def test_flexible_splits_chunk(at: torch.Tensor) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, 1)
        return torch.cat([second, first], -2)

    check(function, FLEXIBLE_SPLITS_X, flexible=(0, 1), at=[[at]])


def flexible_splits_indexed(x: torch.Tensor) -> torch.Tensor:
    return x.chunk(2, -1)[0].sum() + x.chunk(3, 0)[1] * x.split(2, 1)[0].sum()


def test_flexible_splits_pieces_that_a_script_indexes() -> None:
    check(flexible_splits_indexed, torch.randn(4, 5), frontend="script")


# `torch.fmod`.
@pytest.mark.parametrize("frontend", FRONTENDS)
def test_fmod_sign_of_the_dividend(frontend: str) -> None:
    def fmod(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.fmod(x, y) + torch.fmod(x, -1.5)

    x = torch.tensor([[-7.5, 7.5, -0.5], [5.0, -5.0, 0.0]])
    check(fmod, x, torch.tensor([2.0, -2.0, 3.0]), frontend=frontend)


# fold of blocks that overlap.
@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize(("size", "kernel", "options"), [
    ((4, 5), (2, 2), {}), ((6, 6), (3, 3), {"stride": 2, "padding": 1}), ((6, 8), (2, 3), {"stride": (1, 2)}),
    ((7, 7), (3, 2), {"dilation": 2, "padding": 1, "stride": 2}), ((4, 4), (2, 2), {"stride": 2}),
], ids=str)
def test_folding_blocks(size: tuple[int, int], kernel: tuple[int, int], options: dict[str, int], frontend: str) -> None:
    x = F.unfold(torch.randn(2, 3, *size), kernel, **options)
    check(lambda x: F.fold(x, size, kernel, **options), torch.randn_like(x), frontend=frontend)


def test_folding_one_image_and_a_flexible_batch() -> None:
    x = torch.randn(3, 12, 9)
    check(lambda x: F.fold(x, (4, 4), 2), x, flexible=[0], at=[(torch.randn(7, 12, 9),)])
    check(lambda x: F.fold(x, (4, 4), 2), x[0])


class BlocksAndBack(nn.Module):
    def __init__(self, kernel: int, dilation: int, padding: int, stride: int) -> None:
        super().__init__()
        self.kernel, self.dilation, self.padding, self.stride = kernel, dilation, padding, stride

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        blocks = F.unfold(x, self.kernel, self.dilation, self.padding, self.stride)
        return F.fold(blocks * 2, [x.shape[2], x.shape[3]], self.kernel, self.dilation, self.padding, self.stride)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("frontend", ["trace", "script"])
@pytest.mark.parametrize("flexible", [[2], [3], [2, 3]])
@pytest.mark.parametrize("options", [(2, 1, 0, 2), (3, 1, 0, 3), (3, 1, 1, 2), (2, 2, 1, 1)])
def test_folding_to_a_flexible_size(options: tuple[int, int, int, int], flexible: list[int], frontend: str) -> None:
    """Also sizes at whose end are elements that no block reaches."""
    sizes = [tuple(size if axis in flexible else 6 for axis in (2, 3)) for size in (7, 8, 12)]
    check(BlocksAndBack(*options).eval(), torch.randn(2, 3, 6, 6), frontend=frontend, flexible=flexible, lowest=6,
          at=[(torch.randn(2, 3, *size),) for size in sizes])


@pytest.mark.parametrize("axis", [2, 3])
def test_folding_to_a_flexible_size_of_an_exported_program(axis: int) -> None:
    """torch asks for a multiple of the kernel."""
    model, x = BlocksAndBack(2, 1, 0, 2).eval(), torch.randn(2, 3, 6, 6)
    dynamic = ({axis: 2 * torch.export.Dim("half", min=3, max=32)},)
    program = torch.export.export(model, (x,), dynamic_shapes=dynamic).run_decompositions({})
    mlmodel = ane.convert(program, inputs=input_types([x], [axis], lowest=6)[:1], skip_model_load=True,
                          compute_precision=ct.precision.FLOAT32)
    for size in (6, 10):
        image = torch.randn(2, 3, size, 6) if axis == 2 else torch.randn(2, 3, 6, size)
        np.testing.assert_allclose(outputs(mlmodel, [image])[0], model(image).numpy(), rtol=1e-5)


# unfold of images.
@pytest.mark.parametrize(("kernel", "options"), [
    (2, {}), ((3, 2), {"padding": (1, 0), "stride": 2}), (2, {"dilation": 2, "padding": 1}),
    ((1, 3), {"stride": (1, 2)}),
], ids=str)
def test_unfolding_a_flexible_batch_of_images(kernel: int | tuple[int, int], options: dict[str, int]) -> None:
    x = torch.randn(2, 3, 6, 7)
    mlmodel = check(lambda x: F.unfold(x, kernel, **options), x, flexible=[0], at=[(torch.randn(5, 3, 6, 7),)])
    (conv,) = mlmodel._mil_program.functions["main"].find_ops(op_type="conv")
    assert conv.weight.shape[1] == 1


def test_unfolding_flexible_images_and_one_image() -> None:
    check(lambda x: F.unfold(x, 3, stride=2), torch.randn(3, 3, 6, 7), flexible=[0, 2, 3], lowest=3,
          at=[(torch.randn(3, 3, 9, 4),)])
    check(lambda x: F.unfold(x, 2), torch.randn(3, 6, 7))


# rms_norm, cosine_similarity, mse_loss and cross.
FORMULAS_X = torch.rand(2, 4, 6) - 0.5


@pytest.mark.parametrize("frontend", ["trace", "export"])
def test_formulas_rms_norm(frontend: str) -> None:
    weight = torch.rand(4, 6)

    def model(x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (6,)) + F.rms_norm(x, (4, 6), weight, 0.01) + F.rms_norm(x * 0, (6,))

    check(model, FORMULAS_X * 1e-2, frontend=frontend, at=[(FORMULAS_X * 1e3,)])


def test_formulas_rms_norm_does_not_overflow_in_half_precision() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (6,), eps=1e-5)

    mlmodel = convert(model, [FORMULAS_X], precision=ct.precision.FLOAT16)
    found = outputs(mlmodel, [FORMULAS_X * 4e3], precision="float16")[0]
    assert torch.allclose(torch.tensor(found).float(), model(FORMULAS_X * 4e3), atol=2e-2)


# torch.fft with and without its arguments, and the conjugate.
FOURIER_X = torch.randn(2, 4, 6)


@pytest.mark.parametrize("frontend", ["trace", "script", "export"])
@pytest.mark.parametrize("name", ["fft", "fft2", "fftn", "rfft", "rfft2", "rfftn"])
def test_fourier_forward_with_default_arguments(frontend, name):
    transform = getattr(torch.fft, name)

    def model(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = transform(x)
        return y.real, y.imag

    check(model, FOURIER_X, frontend="trace" if frontend == "script" else frontend, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["irfft", "ifft2"])
def test_fourier_the_inverse_of_real_numbers(name):
    transform = getattr(torch.fft, name)
    check(lambda x: transform(x) if name == "irfft" else transform(x).real, FOURIER_X, rtol=1e-3, atol=1e-4)


# Exported programs that write into their input.
def test_input_mutation_outputs_are_right_and_the_mutation_is_no_output() -> None:
    def write(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x * 2

    mlmodel = check(write, torch.arange(6.).reshape(2, 3), frontend="export")
    assert len(mlmodel._mil_program.functions["main"].outputs) == 1


# InstanceNorm in eval mode: running statistics are used where they are tracked, the input's own elsewhere.
INSTANCE_STATISTICS_X = torch.randn(2, 4, 7, generator=torch.Generator().manual_seed(0)) * 3 + 1


def instance_statistics_norm(**settings: bool) -> nn.Module:
    made = nn.InstanceNorm1d(4, **settings)
    for _ in range(3):
        made(INSTANCE_STATISTICS_X)  # running statistics that are not those of INSTANCE_STATISTICS_X
    return made.eval()


@pytest.mark.parametrize("frontend", ["trace", "script", "export"])
@pytest.mark.parametrize("tracked", [True, False])
@pytest.mark.parametrize("affine", [True, False])
def test_instance_statistics_statistics(frontend: str, tracked: bool, affine: bool) -> None:
    check(
        instance_statistics_norm(track_running_stats=tracked, affine=affine), INSTANCE_STATISTICS_X, frontend=frontend
    )


def test_instance_statistics_behind_a_convolution() -> None:
    """The batch norm is fused into the convolution, by a pass that reads gamma and beta."""
    norm = instance_statistics_norm(track_running_stats=True, affine=False)
    check(nn.Sequential(nn.Conv1d(4, 4, 3), norm).eval(), INSTANCE_STATISTICS_X)


# `len` in scripts.
LENGTH_X = torch.rand(3, 4)


def length_of_tensor(x: torch.Tensor) -> torch.Tensor:
    return x * len(x)


def length_of_shape(x: torch.Tensor) -> torch.Tensor:
    return x * len(x.shape)


def length_of_parts(x: torch.Tensor) -> torch.Tensor:
    return x * len(torch.unbind(x, 1))


@pytest.mark.parametrize("function", [length_of_tensor, length_of_shape, length_of_parts])
def test_length_a_fixed_size(function) -> None:
    check(function, LENGTH_X, frontend="script")


@pytest.mark.parametrize("function", [length_of_tensor, length_of_shape])
def test_length_a_flexible_size(function) -> None:
    check(function, LENGTH_X, frontend="script", flexible=[0], at=[(torch.rand(7, 4),)])


# Loops over ranges in scripts.
def loop_ranges_ranges(x: torch.Tensor) -> torch.Tensor:
    total = x[0] * 0
    for i in range(1, x.shape[0]):
        total += x[i] * i
    for i in range(4, 0, -2):
        total += i
    for _ in range(2, 2):
        total += 100
    return total


def test_loop_ranges_every_range_has_its_turns() -> None:
    check(loop_ranges_ranges, torch.arange(12.).reshape(4, 3), frontend="script")


def test_loop_ranges_a_range_up_to_a_flexible_size() -> None:
    check(loop_ranges_ranges, torch.arange(12.).reshape(4, 3), frontend="script", flexible=(0,),
          at=[[torch.arange(18.).reshape(6, 3)], [torch.arange(6.).reshape(2, 3)]])


# A transformer encoder with a padding mask: refused on the path of nested tensors, right on the slow one.
NESTED_X, NESTED_PADDED = torch.randn(2, 5, 8), torch.tensor([[0.0] * 5, [0, 0, 0, 1, 1]])


class Padded(torch.nn.Module):
    def __init__(self, **options: bool) -> None:
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, 1, **options)

    def forward(self, x: torch.Tensor, padded: torch.Tensor) -> torch.Tensor:
        return self.encoder(x, src_key_padding_mask=padded > 0.5)


def test_nested_the_fast_path_is_refused_with_the_way_out():
    with torch.no_grad(), pytest.raises(torch_frontend.NotConverted, match=r"nested tensor.*set_fastpath_enabled"):
        convert(Padded().eval(), (NESTED_X, NESTED_PADDED))


def test_nested_the_slow_path_converts():
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            check(Padded().eval(), NESTED_X, NESTED_PADDED)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_nested_without_nested_tensors_it_converts():
    with torch.no_grad():
        check(Padded(enable_nested_tensor=False).eval(), NESTED_X, NESTED_PADDED, rtol=1e-3, atol=1e-4)


# Max pools with dilation, average pools with a divisor.
POOLING_X = torch.randn(2, 3, 9, 8)
POOLING_SIZES = [
    (torch.randn(2, 3, rows, columns),) for rows, columns in ((1, 2), (2, 1), (3, 5), (4, 4), (5, 7), (12, 13))
]


@pytest.mark.parametrize("pool", [F.max_pool2d, F.avg_pool2d])
@pytest.mark.parametrize("kernel, stride", [(1, 2), (1, 3), (2, 3), ((1, 2), (4, 2)), ((2, 1), (5, 7))])
def test_pooling_a_window_behind_a_flexible_size_is_dropped(pool, kernel, stride) -> None:
    reach = kernel if isinstance(kernel, tuple) else (kernel, kernel)
    sizes = [size for size in POOLING_SIZES if all(have >= need for have, need in zip(size[0].shape[-2:], reach))]
    check(lambda x: pool(x, kernel, stride, ceil_mode=True), POOLING_X, flexible=[2, 3], at=sizes)


# `arange` and `linspace` of torch's dtype.
RANGES_X = torch.rand(3, 4)
RANGES_FLOAT = torch.float32


@pytest.mark.parametrize("frontend", ["trace", "export"])
def test_ranges_the_dtype_counts(frontend: str) -> None:
    def model(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mean = x + torch.arange(4, dtype=RANGES_FLOAT).mean() + torch.linspace(0, 5, 4, dtype=torch.int64) / 2
        return (
            mean,
            x * torch.softmax(torch.arange(1, 5, dtype=RANGES_FLOAT), 0),
            x[:, torch.arange(0.0, 3, dtype=torch.long)],
        )

    mlmodel = check(model, RANGES_X, frontend=frontend)
    assert "range_1d" not in {op.op_type for op in mlmodel._mil_program.functions["main"].operations}


# Reductions of ints, bools and with a dtype.
REDUCED_DTYPES_N = torch.tensor([[1, -2, 4], [4, 0, 3]])


def test_reduced_dtypes_flexible_sizes() -> None:
    more = torch.ones(4, 7) * 3
    check(lambda x: x.mean(1) + x.sum(1) + (x > 2).sum(1), torch.ones(2, 3), flexible=(0, 1), at=[[more]])


def test_reduced_dtypes_refusal() -> None:
    with pytest.raises(NotConverted, match="dtype"):
        convert(lambda x: x.sum(1, dtype=torch.uint8), (REDUCED_DTYPES_N,))


def test_reduced_dtypes_truth_over_no_axis_is_that_of_each_element() -> None:
    x = torch.tensor([[1., -1.], [0., 2.]])
    check(lambda x: torch.any(x > 0, dim=[]).float() + torch.all(x, dim=[]).float(), x)


# Variance with corrections, `prod`, `median`, `kthvalue`, `argmax` over everything.
def test_reductions_the_mean_of_a_layer_norm_by_hand_is_computed_once() -> None:
    def norm(x: torch.Tensor) -> torch.Tensor:
        variance = x.var(-1, keepdim=True, unbiased=False)
        return (x - x.mean(-1, keepdim=True)) / torch.sqrt(variance + 1e-5)

    mlmodel = check(norm, torch.randn(2, 3, 4))
    assert len(mlmodel._mil_program.find_ops(op_type="reduce_mean")) == 2


# LSTMCell, GRUCell and RNNCell, traced and scripted, with and without a first state.
RECURRENT_CELLS_X = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))


class Cells(nn.Module):
    def __init__(self, kind: type[nn.Module], **settings: object) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell = kind(6, 4, **settings)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cell(x * 2, self.cell(x))


class LstmCells(Cells):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cell(x * 2, self.cell(x))


@pytest.mark.parametrize("frontend", ["trace", "script", "export"])
@pytest.mark.parametrize("bias", [True, False])
def test_recurrent_cells_cells_step(frontend: str, bias: bool) -> None:
    check(LstmCells(nn.LSTMCell, bias=bias).eval(), RECURRENT_CELLS_X, frontend=frontend)
    check(Cells(nn.GRUCell, bias=bias).eval(), RECURRENT_CELLS_X, frontend=frontend)
    check(Cells(nn.RNNCell, bias=bias, nonlinearity="relu").eval(), RECURRENT_CELLS_X, frontend=frontend)


# repeat_interleave by constants, embedding_bag.
@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_repeated_bags(mode: str, frontend: str) -> None:
    weight = torch.randn(5, 4)

    def model(i: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        same = F.embedding_bag(i.reshape(3, 2), weight, mode=mode)
        return same, F.embedding_bag(i, weight, torch.tensor([0, 2, 2, 5]), mode=mode)

    check(model, torch.tensor([0, 1, 2, 0, 4, 4]), frontend=frontend)


# `where` of numbers by a flexible condition has the shape of the condition.
@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("chosen", [(1, 0), (1.5, 1e30), (torch.tensor(3), torch.tensor(4)),
                                    (torch.arange(4), 7), (0.0, -1e9),
                                    (torch.randn(4), torch.randn(1, 4)), (True, False)], ids=str)
def test_choosing_by_a_flexible_condition(chosen: tuple[Any, Any], frontend: str) -> None:
    def choose(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.where(x > 0, *chosen)
        return y, y.sum(), y.unsqueeze(0), torch.cat([y, y], 0), y.amax(1) if y.dtype != torch.bool else y[:, 0]

    if frontend == "script":
        pytest.skip("a script has no closures")
    if frontend == "trace" and isinstance(chosen[0], bool):
        pytest.skip("torch.jit.trace fails on torch.where of two booleans")
    check(choose, torch.randn(3, 4), frontend=frontend, flexible=[0], at=[(torch.randn(7, 4),)])


@pytest.mark.parametrize("precision", [ct.precision.FLOAT16, ct.precision.FLOAT32])
def test_choosing_a_mask_is_read_from_the_package_with_its_shape(precision: Any, tmp_path: Any) -> None:
    """The package is one that coremltools, whose inference leaves out the condition, reads and compresses."""
    def mask(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.where(x > 0, 0.0, -1e4)
        return y[:, None], y.softmax(-1)

    traced = captured(mask, (torch.randn(3, 4),), "trace")
    mlmodel = ane.convert(traced, inputs=[ct.TensorType(name="x", shape=(ct.RangeDim(1, 9, 3), 4))],
                          minimum_deployment_target=ct.target.iOS17, compute_precision=precision)
    mlmodel.save(str(tmp_path / "mask.mlpackage"))
    check_read_by_coremltools(mlmodel)
    program = ane.load(tmp_path / "mask.mlpackage").program
    (select,) = program.functions["main"].find_ops(op_type="select")
    assert not is_opaque(select) and select.outputs[0].rank == 2
    x = torch.randn(5, 4)
    found = ane.run(tmp_path / "mask.mlpackage", {"x": x.numpy()})
    for one, expected in zip(found.values(), mask(x), strict=True):
        np.testing.assert_allclose(one, expected.numpy(), atol=1e-2)


# A tensor returned twice.
def repeated_outputs_twice(x: torch.Tensor) -> list[torch.Tensor]:
    y = x + 1
    return [y, y * 2, y, y.detach()]


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_repeated_outputs_every_output_has_its_name(frontend: str) -> None:
    mlmodel = check(repeated_outputs_twice, torch.randn(2, 3), frontend=frontend)
    names = [output.name for output in mlmodel.get_spec().description.output]
    assert len(set(names)) == 4


def return_lists(x: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    return x.split([1, 2], 1), x + 1


def return_a_list(x: torch.Tensor) -> list[torch.Tensor]:
    return x.unbind(0)


@pytest.mark.parametrize("precision", [ct.precision.FLOAT32, ct.precision.FLOAT16])
@pytest.mark.parametrize("target", [ct.target.iOS15, ct.target.iOS17])
@pytest.mark.parametrize("function, count", [(return_a_list, 2), (return_lists, 3)])
def test_a_list_that_a_script_returns_is_an_output_for_each_tensor(function, count, target, precision):
    x = torch.arange(6.).reshape(2, 3)
    mlmodel = convert(function, [x], "script", target=target, precision=precision)
    expected = function(x)
    expected = [*expected[0], expected[1]] if count == 3 else expected
    for found, wanted in zip(outputs(mlmodel, [x]), expected, strict=True):
        np.testing.assert_array_equal(found, wanted.numpy())


@pytest.mark.parametrize("dtype", [None, np.float16, np.float32])
@pytest.mark.parametrize("target", [ct.target.iOS15, ct.target.iOS17])
def test_repeated_outputs_have_the_requested_names(target, dtype):
    if dtype == np.float16 and target == ct.target.iOS15:
        return  # float16 outputs are of iOS16
    names = ["first", "input", "second", "third"]
    traced = captured(_return_twice, (torch.randn(2, 3),), "trace")
    mlmodel = ane.convert(traced, inputs=[ct.TensorType(name="x", shape=(2, 3))], minimum_deployment_target=target,
                          outputs=[ct.TensorType(name=name, dtype=dtype) for name in names])
    assert [output.name for output in mlmodel.get_spec().description.output] == names
    found = ane.run(mlmodel, {"x": np.ones((2, 3), np.float32)})
    assert [float(found[name][0, 0]) for name in names] == [2, 1, 2, 2]


def test_repeated_outputs_of_an_op_that_several_passes_made():
    """Two spellings of one gather, which the passes make equal, so that they merge the casts of both outputs."""
    example = torch.randn(2, 6), torch.tensor([5, 0, 2])
    traced = captured(lambda x, i: (x.index_select(1, i), x[:, i]), example, "trace")
    inputs = [ct.TensorType(name="x", shape=(2, 6)), ct.TensorType(name="i", shape=(3,), dtype=np.int32)]
    mlmodel = ane.convert(traced, inputs=inputs, minimum_deployment_target=ct.target.iOS17, check=True)
    assert len({output.name for output in mlmodel.get_spec().description.output}) == 2


def _return_twice(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x + 1
    return y, x, y, y.detach()


# cumsum along any axis.
RUNNING_SUMS_X = torch.arange(-12.0, 12.0).reshape(2, 3, 4)


@pytest.mark.parametrize("axis", [0, 2, -1, -3])
def test_running_sums_any_axis_of_bools_and_integers(axis):
    check(
        lambda x: (torch.cumsum(x > 0, axis) // 2, torch.cumsum(x.int(), axis, dtype=torch.float32) / 2),
        RUNNING_SUMS_X,
        flexible=(0,),
        at=[(torch.randn(5, 3, 4),)],
    )


# Sums with a factor, mixed dtypes.
SCALED_SUMS_N = torch.tensor([[1, -2, 3], [4, 0, 2]])


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_scaled_sums_ints_stay_ints(frontend: str) -> None:
    check(lambda n: torch.add(n, n, alpha=3) // 2, SCALED_SUMS_N, frontend="trace")
    big = torch.tensor([2 ** 30 + 1])
    check(lambda n: n + 2, big, frontend="trace" if frontend == "script" else frontend)


# `gather`, `scatter`, `scatter_add`, `scatter_reduce`, `index_select`, and const indices.
SCATTER_GATHER_X = torch.arange(24.0).reshape(2, 4, 3)
SCATTER_GATHER_INDEX = torch.tensor([[[0, 3, 2], [1, 1, 0]]])


@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize("target", [ct.target.iOS15, ct.target.iOS18])
def test_scatter_gather_const_indices(frontend: str, target: object) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        gathered = torch.gather(x, 1, SCATTER_GATHER_INDEX) + x[:1, [0, 2]] + x[:1, [-1, 1]] + x[[0], :2]
        chosen = torch.index_select(x, 1, torch.tensor([0, 2])) + torch.index_select(x, 1, torch.tensor(3))
        return torch.cat([gathered, chosen, x[[0, -1], [2, 3]].unsqueeze(0).repeat(1, 1, 1)])

    check(function, SCATTER_GATHER_X, frontend=frontend, target=target)


def test_scatter_gather_fixed_index_of_flexible_data() -> None:
    more = torch.arange(60.0).reshape(5, 4, 3)
    check(lambda x: torch.gather(x, 1, SCATTER_GATHER_INDEX), SCATTER_GATHER_X, flexible=(0,), at=[[more]])
    with pytest.raises(NotConverted, match="smaller than the data"):
        convert(lambda x: torch.scatter(x, 1, SCATTER_GATHER_INDEX, 3), (SCATTER_GATHER_X,), flexible=(0,))


@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("reduce", ["sum", "prod", "mean", "amax", "amin"])
def test_scatter_reduce_with_and_without_the_data(reduce: str, include_self: bool, frontend: str) -> None:
    """As in pools over the edges of a graph: some rows get several updates, others none."""
    index = torch.tensor([[[0, 3, 2], [3, 1, 2]]])
    x = SCATTER_GATHER_X - 11.5

    def function(x: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = torch.scatter_reduce(x, 1, i, x.flip(1) / 2, reduce, include_self=include_self)
        return chosen, torch.scatter_reduce(torch.zeros(5, 3), 0, i[0], x[0], reduce, include_self=include_self)

    check(function, x, index, frontend=frontend)
    if frontend == "trace":
        numbers = torch.tensor([[5, -3, 7], [2, 2, -9], [1, -1, 4]])
        check(lambda n: torch.scatter_reduce(n, 1, torch.tensor([[0, 0, 2], [1, 1, 1], [2, 0, 2]]), n.flip(1), reduce,
                                             include_self=include_self), numbers)
        check(lambda x, i: torch.scatter_reduce(x[:1] * 0 + 3, 1, i, x[:1], reduce, include_self=include_self), x,
              torch.tensor([[[0, 3, 2], [1, 1, 0], [1, 3, 0], [2, 2, 2]]]))


def test_scatter_gather_a_source_larger_than_the_index() -> None:
    index = torch.tensor([[0, 1]])
    check(lambda x, i: torch.zeros(2, 4).scatter_add(1, i, x), SCATTER_GATHER_X[0, :, :], index)
    check(lambda x, i: torch.zeros(2, 4).scatter_add(1, i, x), SCATTER_GATHER_X[0, :, :], index, flexible=[0, 1],
          at=[(torch.rand(2, 2), index)])
    check(lambda x: torch.zeros(4, 3).scatter_add(1, (x[:, :2] > 9).long(), x), SCATTER_GATHER_X[0], flexible=[1],
          at=[(torch.rand(4, 7) * 20,)])


# Windows of signals.
SIGNAL_WINDOWS_X = torch.rand(2, 6)


def signal_windows_windows(x: torch.Tensor) -> torch.Tensor:
    one = torch.hann_window(6) + torch.hann_window(6, periodic=False) + torch.blackman_window(6)
    two = torch.bartlett_window(6, periodic=False) + torch.hamming_window(6, True, 0.5, 0.4)
    return x * (one + two + torch.kaiser_window(6, True, 8.0))


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_signal_windows_windows(frontend: str) -> None:
    mlmodel = check(signal_windows_windows, SIGNAL_WINDOWS_X, frontend=frontend)
    assert [op.op_type for op in mlmodel._mil_program.functions["main"].operations] == ["const", "mul"]


# Scripted sizes.
SIZE_ITEMS_X = torch.arange(24.0).reshape(2, 4, 3)
SIZE_ITEMS_Y = torch.arange(45.0).reshape(3, 5, 3)


@pytest.mark.parametrize("flexible", [(), (0, 1)])
def test_size_items_items_of_a_shape(flexible: tuple[int, ...]) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        sizes = x.shape
        return x.reshape(sizes[0] * sizes[1], sizes[-1]) * x.size(1) + sizes[0] * x.shape[1] + x.dim()

    check(function, SIZE_ITEMS_X, frontend="script", flexible=flexible, at=[[SIZE_ITEMS_Y]] if flexible else [])


@pytest.mark.parametrize("flexible", [(), (0, 1)])
def test_size_items_count_of_elements(flexible: tuple[int, ...]) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x / x.numel()

    check(function, SIZE_ITEMS_X, frontend="script", flexible=flexible, at=[[SIZE_ITEMS_Y]] if flexible else [])


class SlicesShapes(torch.nn.Module):
    """Slices of shapes as sizes of views, fills, resizes and norms, and of a list of sizes that changes."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> List[torch.Tensor]:
        rows, columns = x.shape[-2:]
        sizes = list(x.shape)
        sizes[1] = 1
        sizes.append(2)
        turned = x.flatten(1).view(x.size()[:2] + x.shape[2:][::-1])
        return [
            x.reshape([-1, rows * columns]), torch.ones(x.shape[1:]) * x, torch.ones(sizes) * x.sum(), turned,
            torch.nn.functional.interpolate(y, size=x.shape[2:]), x * len(x.shape[::2]), y.new_zeros(x.size()[2:3])]


@pytest.mark.parametrize("flexible", [(), (0, 2, 3), (0, 1, 2, 3)])
def test_size_items_slices(flexible: tuple[int, ...]) -> None:
    y = torch.randn(1, 3, 4, 2)
    check(SlicesShapes(), torch.randn(2, 3, 8, 6), y, frontend="script", flexible=flexible,
          at=[[torch.randn(3, 3, 4, 8), y]] if flexible else [])


class SlicesFixedShapes(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> List[torch.Tensor]:
        return [torch.nn.functional.layer_norm(x, x.shape[1:]),
                torch.nn.functional.adaptive_avg_pool2d(x, y.shape[-2:]),
                torch.nn.functional.interpolate(y, size=x.shape[-2:], mode="bilinear", align_corners=False)]


def test_size_items_slices_of_fixed_shapes() -> None:
    check(SlicesFixedShapes(), torch.randn(2, 3, 8, 6), torch.randn(1, 3, 4, 2), frontend="script")


@pytest.mark.parametrize("flexible", [(), (1,)])
def test_size_items_slices_of_a_rank_that_the_script_does_not_tell(flexible: tuple[int, ...]) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        windows = torch.unfold_copy(x, 1, 2, 1)
        count, width = windows.shape[1:]
        return (windows.reshape(-1, count * width) + torch.ones(windows.shape[::-1]).sum(),
                windows.permute(1, 2, 0) * windows.shape[1:][-1] + torch.ones(windows.shape[::2]).sum())

    check(function, torch.randn(2, 6), frontend="script", flexible=flexible,
          at=[[torch.randn(2, 9)]] if flexible else [])


# torch.tensor and torch.as_tensor in scripts.
def tensors_numbers(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return x + torch.tensor(5), x * torch.tensor(2.5) + torch.tensor([1, 2]), x * torch.tensor([[True], [False]])


def tensors_of_sizes(x: torch.Tensor) -> torch.Tensor:
    sizes = torch.tensor([x.shape[0], x.shape[1]]) + torch.tensor(x.shape[0] / 4)
    return x + sizes + torch.as_tensor(x, dtype=torch.int32)


def test_tensors_dtypes_and_lists() -> None:
    check(tensors_numbers, torch.tensor([[1., 2.], [3., 4.]]), frontend="script")


def test_tensors_numbers_the_model_computes() -> None:
    check(tensors_of_sizes, torch.ones(3, 2), frontend="script", flexible=(0,), at=[[torch.ones(5, 2)]])


# `triu`, `tril`, `roll`.
def test_triangles_a_roll_beyond_a_flexible_size_needs_no_gather() -> None:
    mlmodel = check(lambda x: torch.roll(x, 5, 0) - torch.roll(x, -3, 0), torch.randn(4, 3), flexible=[0],
                    at=[[torch.randn(size, 3)] for size in (2, 5, 7)])
    assert "gather" not in {op.op_type for op in mlmodel._mil_program.functions["main"].operations}


# `Tensor.unfold`.
UNFOLDING_X = torch.arange(24.0).reshape(2, 12)


@pytest.mark.parametrize(("dim", "size", "step"), [(0, 2, 1), (1, 5, 3), (1, 12, 1), (-1, 1, 5), (1, 3, 4)])
def test_unfolding_every_dimension(dim: int, size: int, step: int) -> None:
    check(lambda x: x.unfold(dim, size, step), UNFOLDING_X)


@pytest.mark.parametrize("precision", [ct.precision.FLOAT32, ct.precision.FLOAT16])
@pytest.mark.parametrize("size", [2, 7])
def test_unfolding_rank_5_whose_windows_are_of_rank_6(precision: ct.precision, size: int) -> None:
    def windows(x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("abcdlk,abk->abcdl", x.unfold(4, size, 2), torch.ones(1, 2, size))

    x = torch.rand(1, 2, 3, 4, 10)
    model = ane.convert(captured(windows, [x], "trace"), inputs=input_types([x]), skip_model_load=True,
                        compute_precision=precision)
    np.testing.assert_allclose(outputs(model, [x])[0], windows(x), rtol=2e-3)


# `prelu` of every rank.
PRELU_SHAPES = [(2, 3), (2, 3, 4), (2, 3, 4, 2), (2, 3, 2, 2, 2)]


def prelu_layer(channels: int) -> nn.PReLU:
    prelu = nn.PReLU(channels).eval()
    with torch.no_grad():
        prelu.weight.copy_(torch.tensor([0.1, -0.5, 2.0])[:channels])
    return prelu


def prelu_points(*shape: int) -> torch.Tensor:
    return torch.linspace(-3, 3, torch.Size(shape).numel()).reshape(shape)


@pytest.mark.parametrize("shape", PRELU_SHAPES)
@pytest.mark.parametrize("frontend", FRONTENDS)
def test_prelu_one_slope_a_channel(shape: tuple[int, ...], frontend: str) -> None:
    check(prelu_layer(3), prelu_points(*shape), frontend=frontend)


@pytest.mark.parametrize("shape", [(5,), *PRELU_SHAPES])
def test_prelu_one_slope(shape: tuple[int, ...]) -> None:
    check(prelu_layer(1), prelu_points(*shape))


@pytest.mark.parametrize("shape", PRELU_SHAPES)
def test_prelu_flexible_batch(shape: tuple[int, ...]) -> None:
    check(prelu_layer(3), prelu_points(*shape), flexible=(0,), at=[[prelu_points(5, *shape[1:])]])


def test_prelu_flexible_channels_with_one_slope() -> None:
    check(prelu_layer(1), prelu_points(2, 3), flexible=(1,), at=[[prelu_points(2, 7)]])


def test_prelu_after_a_linear_layer() -> None:
    torch.manual_seed(0)
    check(nn.Sequential(nn.Linear(4, 3), prelu_layer(3)).eval(), prelu_points(2, 4))


def test_prelu_computed_slopes() -> None:
    check(lambda x, slopes: nn.functional.prelu(x, slopes * 2), prelu_points(2, 3, 4), torch.tensor([0.1, -0.5, 2.0]))


def test_prelu_rank_4_stays_the_op_of_its_own() -> None:
    mlmodel = check(prelu_layer(3), prelu_points(2, 3, 4, 2))
    assert mlmodel._mil_program.find_ops(op_type="prelu")


# diagonal, narrow, unbind.
VIEW_READS_X = torch.arange(60.).reshape(3, 4, 5)


@pytest.mark.parametrize("target", [ct.target.iOS15, ct.target.iOS18])
@pytest.mark.parametrize("offset, first, second", [(0, 0, 1), (1, -2, -1), (-2, 1, 2), (2, 2, 0), (4, 1, 2)])
def test_view_reads_diagonal(offset: int, first: int, second: int, target: Any) -> None:
    check(lambda x: x.diagonal(offset, first, second) + 1, VIEW_READS_X, target=target)


def test_view_reads_diagonal_of_flexible_sizes() -> None:
    def square(x: torch.Tensor) -> torch.Tensor:
        return (x.unsqueeze(0) * x.unsqueeze(1)).diagonal() + 0

    check(square, torch.arange(5.), flexible=(0,), at=[[torch.arange(3.)]])
    with pytest.raises(NotConverted, match="different flexible sizes"):
        convert(lambda x: x.diagonal(1) + 0, [torch.ones(4, 5)], flexible=(0, 1))


def view_reads_parts(x: torch.Tensor) -> list[torch.Tensor]:
    return [x.narrow(1, 1, 2) * 2, x.narrow(-1, -2, 2) + 1, x.unbind(1)[2] * 3]


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_view_reads_narrow_and_unbind(frontend: str) -> None:
    check(view_reads_parts, VIEW_READS_X, frontend=frontend)
    if frontend != "script":
        check(
            view_reads_parts,
            VIEW_READS_X,
            frontend=frontend,
            flexible=(0, 2),
            at=[[torch.arange(48.0).reshape(4, 4, 3)]],
            lowest=3,
        )


def test_view_reads_unbind_of_a_flexible_axis_is_refused() -> None:
    with pytest.raises(NotConverted, match="unbinds an axis of flexible size"):
        convert(lambda x: x.unbind(0)[0] * 1, [torch.ones(4, 5)], flexible=(0,))


class Computed(torch.nn.Module):
    def forward(self, x: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        return x.narrow(1, int(start), 2) * 1


def test_view_reads_narrow_from_a_computed_start() -> None:
    check(Computed(), VIEW_READS_X, torch.tensor([1]), frontend="script", at=[[VIEW_READS_X, torch.tensor([2])]])


def scatter_gates(x: torch.Tensor) -> torch.Tensor:
    """The gates of a mixture of experts."""
    weights, chosen = x.softmax(-1).topk(2, -1)
    return torch.zeros_like(x).scatter(-1, chosen, weights)


def scatter_kept(x: torch.Tensor) -> torch.Tensor:
    """The mask of sampling by a share of the probability."""
    found, order = x.softmax(-1).sort(-1, descending=True)
    kept = ((found.cumsum(-1) - found) < 0.7).float()
    return torch.zeros_like(kept).scatter(-1, order, kept)


def scatter_ones(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(x.shape[0], 12).scatter(1, x.argmax(-1, keepdim=True), 1.0)


def scatter_sums(x: torch.Tensor) -> torch.Tensor:
    return torch.full_like(x, 0.5).to(torch.float32).scatter_add(-1, x.argsort(-1), x)


@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize("model", [scatter_gates, scatter_kept, scatter_ones, scatter_sums])
def test_scatters_into_new_tensors_of_a_flexible_size(model, frontend: str) -> None:
    """The sizes of a new tensor are those of the tensor that it was made for."""
    at = [[torch.randn(size, 12)] for size in (2, 3, 8)]
    check(model, torch.randn(4, 12), frontend=frontend, flexible=(0,), at=at)


def test_scatters_into_a_larger_tensor_of_a_flexible_size_are_refused() -> None:
    with pytest.raises(NotConverted, match="the index may be smaller than the data, by a dynamic size"):
        convert(lambda x, y: torch.zeros_like(x).scatter(-1, y.argsort(-1), y), [torch.randn(4, 6), torch.randn(3, 6)],
                flexible=(0,))


def test_a_select_of_a_type_that_coremltools_inferred_is_no_opaque_op(tmp_path: Any) -> None:
    """Models of ct.convert declare a choice between two numbers as a number."""
    traced = captured(lambda x: torch.where(x > 0, 0.0, -1e4) + x, (torch.randn(3, 4),), "trace")
    ct.convert(traced, inputs=[ct.TensorType(name="x", shape=(ct.RangeDim(1, 9, 3), 4))],
               minimum_deployment_target=ct.target.iOS17).save(str(tmp_path / "host.mlpackage"))
    (select,) = ane.load(tmp_path / "host.mlpackage").program.functions["main"].find_ops(op_type="select")
    assert not is_opaque(select)
    report = ane.rewrite(tmp_path / "host.mlpackage", tmp_path / "out.mlpackage", preset="full", target="m1")
    assert report.status in ("written", "unchanged") and not report.left_out_passes
    x = torch.randn(5, 4)
    for name in ("host", "out"):
        (found,) = ane.run(tmp_path / f"{name}.mlpackage", {"x": x.numpy()}).values()
        np.testing.assert_allclose(found, (torch.where(x > 0, 0.0, -1e4) + x).numpy(), atol=8)


@pytest.mark.parametrize("add", [lambda y: y + 2.0, lambda y: y - torch.ones(1, 1, 1)], ids=["number", "higher rank"])
def test_what_is_added_to_a_linear_stands_the_passes_of_coremltools(add: Any) -> None:
    """Its compression of weights runs the passes again, without the patches."""
    head = nn.Linear(8, 1).requires_grad_(False)
    x = torch.randn(2, 8)
    mlmodel = convert(lambda x: add(head(x)).exp(), [x], target=ct.target.iOS18, precision=ct.precision.FLOAT16)
    with silence():
        compressed = cto.linear_quantize_weights(
            mlmodel, cto.OptimizationConfig(cto.OpLinearQuantizerConfig(weight_threshold=1)))
    expected = add(head(x)).exp().numpy()
    for each in (mlmodel, compressed):
        (found,) = outputs(each, [x], "float16")
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, rtol=0.1)


# `chunk` and `split` of exported programs by a computed size.
@pytest.mark.parametrize("split", [lambda x: x.chunk(2, 1), lambda x: x.split(x.shape[1] // 2, 1)])
def test_halves_of_a_flexible_axis_of_an_exported_program(split: Callable[[torch.Tensor], Any]) -> None:
    class Halves(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, second = split(x)
            return first - second * 2

    size = 2 * torch.export.Dim("half", min=2, max=20)
    program = torch.export.export(Halves(), (torch.zeros(2, 10),), dynamic_shapes=({1: size},))
    model = ane.convert(program.run_decompositions({}), skip_model_load=True)
    for length in (4, 10, 40):
        x = torch.arange(2. * length).reshape(2, length)
        (found,) = ane.run(model, {"x": x.numpy()}).values()
        assert found.tolist() == Halves()(x).tolist()


# `zeros_like` of a flexible value whose symbols change as it is cast to float16.
@pytest.mark.parametrize("precision", ["FLOAT16", "FLOAT32"])
def test_two_layers_of_experts_that_topk_chooses(precision: str) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.weights = nn.Linear(8, 4), nn.Parameter(torch.randn(4, 8, 8) / 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                gates = self.gate(x)
                chosen, places = gates.topk(2, -1)
                shares = torch.zeros_like(gates).scatter(-1, places, chosen.softmax(-1))
                x = x + torch.stack([(x @ weight) * shares[..., place:place + 1]
                                     for place, weight in enumerate(self.weights)]).sum(0)
            return x

    torch.manual_seed(0)
    module = Experts().eval()
    model = ane.convert(torch.jit.trace(module, torch.zeros(1, 3, 8)), skip_model_load=True,
                        inputs=[ct.TensorType("x", (1, ct.RangeDim(1, 9, default=3), 8))],
                        minimum_deployment_target=ct.target.iOS18, compute_precision=getattr(ct.precision, precision))
    for length in (1, 3, 9):
        x = torch.randn(1, length, 8)
        (found,) = ane.run(model, {"x": x.numpy()}).values()
        np.testing.assert_allclose(found, module(x).detach().numpy(), atol=1e-2)


# Every second element of an axis beside a flexible one, without `slice_update` (iOS17).
@pytest.mark.parametrize("target", [ct.target.iOS16, ct.target.iOS17, ct.target.iOS18])
def test_every_second_channel_of_a_flexible_sequence_is_written(target: ct.target) -> None:
    class Interleaved(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.zeros_like(x)
            y[..., 0::2] = torch.sin(x[..., 0::2])
            y[:, 1:, 1::2] = torch.cos(x[:, 1:, 1::2])
            return y

    inputs = [ct.TensorType("x", (ct.RangeDim(1, 4, default=2), ct.RangeDim(2, 20, default=5), 6))]
    model = ane.convert(torch.jit.trace(Interleaved(), torch.zeros(2, 5, 6)), inputs=inputs, skip_model_load=True,
                        minimum_deployment_target=target, compute_precision=ct.precision.FLOAT32)
    for sizes in ((2, 5, 6), (1, 2, 6), (4, 7, 6)):
        x = torch.randn(sizes)
        (found,) = ane.run(model, {"x": x.numpy()}).values()
        np.testing.assert_allclose(found, Interleaved()(x).numpy(), atol=1e-6)


@pytest.mark.parametrize("precision", ["float16", "float32"])
@pytest.mark.parametrize("function", [torch.asinh, torch.expm1])
def test_functions_keep_the_digits_of_small_numbers(function, precision):
    x = torch.tensor([1e-3, -1e-2, 0.1, -0.2, 0.2495, -0.25, 0.2505, 0, 1, -3, -20, *[3e-6] * (precision == "float32")])
    x = x.half().float()
    mlmodel = convert(function, [x], precision=None if precision == "float16" else ct.precision.FLOAT32)
    (found,) = ane.run(mlmodel, {"x0": x.numpy()}, precision=precision).values()
    np.testing.assert_allclose(found, function(x.double()), rtol=3e-3 if precision == "float16" else 1e-6)


def test_inverse_hyperbolic_functions_beyond_the_squares_of_fp16():
    x = torch.tensor([-6e4, -300, -255, -0.5, 0, 0.25, 1, 3, 300, 6e4])
    mlmodel = convert(lambda x: (torch.asinh(x), torch.acosh(x.abs() + 1)), [x], precision=None)
    found = ane.run(mlmodel, {"x0": x.numpy()}, precision="float16").values()
    for one, expected in zip(found, (torch.asinh(x), torch.acosh(x.abs() + 1)), strict=True):
        np.testing.assert_allclose(one, expected, rtol=3e-3, atol=1e-3)


@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize("x", [torch.tensor([[-7, 0, 5]], dtype=torch.int32), torch.tensor([[-1.5, 0, 2]])],
                         ids=["ints", "floats"])
def test_python_bools_as_operands(x: torch.Tensor, frontend: str) -> None:
    def model(x: torch.Tensor) -> list[torch.Tensor]:
        return [x + True, True + x, x * True, x * False, torch.add(x, True, alpha=2), x / True, x + 1]

    check(model, x, frontend=frontend)


def test_a_bool_that_is_added_to_a_mask_is_rejected() -> None:
    with pytest.raises(NotConverted, match=r"op 'aten::add' \(.*\.py:\d+\): .*Python bool.*; write 1 for True"):
        convert(lambda x: ((x > 0) + True).float(), [torch.ones(2)])


def test_the_bool_of_a_trace_stays_in_the_model_of_the_user() -> None:
    program = captured(lambda x: x + True, [torch.ones(2)], "trace")
    before = str(program.graph)
    convert_captured(program, [torch.ones(2)], "trace")
    assert str(program.graph) == before


def test_one_hot_without_the_number_of_classes_is_rejected() -> None:
    with pytest.raises(NotConverted, match=r"op 'one_hot' \(.*\.py:\d+\): .*number of classes.*; give num_classes"):
        convert(lambda x: F.one_hot(x.long()), [torch.tensor([0, 2, 1], dtype=torch.int32)])
    check(lambda x: F.one_hot(x.long(), 4), torch.tensor([0, 2, 1], dtype=torch.int32))
