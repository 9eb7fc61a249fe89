"""A table of functions whose converted values must be those of PyTorch, and of those that must be refused."""

from __future__ import annotations

import coremltools as ct
import pytest
import torch
from torch.nn import functional
from torch.nn import functional as F
from torch.nn.functional import gelu, interpolate, pad, scaled_dot_product_attention, softplus

from mil_ane_passes.torch_frontend import NotConverted

from ..checks import check
from .table import FRONTENDS, REFUSED, TRACE_AND_EXPORT, VALUES, Case, add_case, add_refused, case

torch.manual_seed(0)

# `softplus`, `reciprocal`, `gelu`, `asinh`, `acosh`.
ACTIVATIONS_X = torch.randn(2, 3, 4) * 3


@case(ACTIVATIONS_X, frontends=FRONTENDS, atol=1e-6, rtol=1e-5)
def activations(x: torch.Tensor) -> torch.Tensor:
    return softplus(x, 2.0, 1.0) + softplus(x) + softplus(x, 0.5) + gelu(x, approximate="tanh") + gelu(x)


@case(ACTIVATIONS_X * 1e-3, frontends=FRONTENDS)
def activations_reciprocal_of_the_small(x: torch.Tensor) -> torch.Tensor:
    return torch.reciprocal(x)


add_case("activations reciprocal of integers", lambda x: torch.reciprocal(x),
    torch.tensor([1, 2, -4], dtype=torch.int32))


@case(ACTIVATIONS_X, frontends=FRONTENDS)
def activations_inverse_hyperbolic(x: torch.Tensor) -> torch.Tensor:
    return torch.asinh(x) + torch.acosh(x.abs() + 1)

# Second names of ops.
ALIASES_X = torch.rand(2, 4, 4) * 0.8 + 0.1
ALIASES_Y = torch.rand(2, 4, 4) * 0.8 + 0.1


@case(ALIASES_X, ALIASES_Y, frontends=FRONTENDS)
def aliases_second_names(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    one = torch.multiply(x, y) + torch.subtract(x, 0.5) + torch.arctan(x) + torch.greater(x, y).int()
    one = one + torch.divide(x, y, rounding_mode="floor") + torch.divide(x, 2.0) + torch.multiply(y, 3)
    return one + torch.divide(x, y) + torch.swapaxes(torch.concatenate([x, y], 1)[:, :4], 1, 2)


add_case("aliases numbers on the left",
    lambda x, y: 1 - x - (2.5 - y) + torch.rsub(x, y, alpha=2) + torch.rsub(x, 3, alpha=2), ALIASES_X, ALIASES_Y,
    frontends=("export",))

add_case("aliases special functions that share a lowering with others", lambda x, y: (
    torch.special.logsumexp(x, 1), torch.special.logsumexp(y, (0, 2), keepdim=True), torch.special.log_softmax(x, 1)),
    ALIASES_X, ALIASES_Y, frontends=TRACE_AND_EXPORT)

# `trunc`, `hypot`, `cdist`, `bucketize`.
ARITHMETIC_X = torch.randn(3, 4) * 3
ARITHMETIC_Y = torch.randn(3, 4)


@case(ARITHMETIC_X, ARITHMETIC_Y, frontends=FRONTENDS)
def arithmetic_formulas(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.trunc(x) + torch.hypot(x, y) + torch.cdist(x, y)[:, :1] + torch.cdist(x, y, 1.0)[:, :1]


add_case("arithmetic hypot of zeros", lambda x, y: torch.hypot(x, y), torch.tensor([0.0, 3.0, 0.0]),
    torch.tensor([0.0, -4.0, 2.0]))


@case(torch.tensor([[-2.0, -1.0], [0.5, 3.0]]), torch.tensor([-1.0, 0.0, 3.0]), frontends=FRONTENDS)
def arithmetic_buckets(x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
    return torch.bucketize(x, edges) + torch.bucketize(x, edges, right=True) * 10

# `searchsorted`: one sequence for all values, a sequence for each row, a sorter, both sides.
SORTED_ROWS = torch.tensor([[1.0, 2.0, 2.0, 4.0], [-3.0, 0.0, 0.5, 2.0]])
SOUGHT = torch.tensor([[2.0, 5.0, 0.0], [0.5, 2.0, -9.0]])


@case(SORTED_ROWS, SOUGHT, frontends=FRONTENDS, flexible=(1,), at=[(SORTED_ROWS[:, :3], SOUGHT)])
def searchsorted_of_rows(x: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.searchsorted(x, values), torch.searchsorted(x, values, right=True)


@case(SORTED_ROWS, SOUGHT, frontends=TRACE_AND_EXPORT)
def searchsorted_of_one_sequence(x: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (torch.searchsorted(x[0], values, side="right"), torch.searchsorted(x[1], values[0], right=True),
            torch.searchsorted(x[1], values.reshape(1, 2, 3, 1)), torch.searchsorted(x[0], values[0, 0]),
            torch.searchsorted(x[0], 2.0))


@case(SORTED_ROWS.flip(1), SOUGHT, frontends=TRACE_AND_EXPORT)
def searchsorted_with_a_sorter(x: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    order = torch.argsort(x, dim=1)
    return (torch.searchsorted(x, values, sorter=order, right=True),
            torch.searchsorted(x[0], values, sorter=torch.tensor([3, 1, 2, 0]), side="left"))

# scaled_dot_product_attention: masks of every kind, grouped heads, causal, scaled.
ATTENTION_Q, ATTENTION_K, ATTENTION_V = torch.randn(2, 4, 3, 8), torch.randn(2, 4, 5, 8), torch.randn(2, 4, 5, 6)


add_case("attention a constant float mask",
    lambda q: scaled_dot_product_attention(q, q, q, torch.tensor([[0.0, 1, 2]])), ATTENTION_Q)


@case(ATTENTION_Q, ATTENTION_K, ATTENTION_V, frontends=FRONTENDS)
def attention_causal_with_a_scale_and_other_lengths(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.2)


add_case(
    "attention rank two without a mask",
    lambda q, k, v: scaled_dot_product_attention(q, k, v),
    ATTENTION_Q[0, 0],
    ATTENTION_K[0, 0],
    ATTENTION_V[0, 0],
    target=ct.target.iOS18,
)

# `hardtanh` and `elu` with defaults and ints.
BOUNDED_X = torch.randn(2, 3, 4) * 3


@case(BOUNDED_X, frontends=FRONTENDS)
def bounded_default_and_int_arguments(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.hardtanh(x) + torch.ops.aten.hardtanh(x, -2, 3) + functional.elu(x) \
        + torch.ops.aten.elu(x, 2, 3, 1) + torch.ops.aten.elu(x, 1, 1, 2)


@case(BOUNDED_X)
def bounded_written_in_place(x: torch.Tensor) -> torch.Tensor:
    functional.hardtanh_(x[0], -1, 1)
    functional.elu_(x[1])
    return x


add_case("bounded integers", lambda x: torch.ops.aten.hardtanh(x, -1, 2), torch.arange(-4, 5, dtype=torch.int32))

# `where` of numbers; bitwise ops of bools and ints; shifts.
CHOOSING_X = torch.randn(2, 3)
CHOOSING_NUMBERS = torch.tensor([[3, -1, 2], [0, 5, -7]], dtype=torch.int32)


@case(CHOOSING_X, frontends=FRONTENDS)
def choosing_where_of_numbers(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 0, x, 0.5) + torch.where(x > 0, 1.0, x) + torch.where(x[:, :1] > 0, x[:1], -2.0)


add_case(
    "choosing where of two numbers of bools and of single values",
    lambda x: torch.where(x > 0, 1.0, 2.0) + x,
    CHOOSING_X,
)
add_case("choosing where of two numbers of bools and of single values",
    lambda x: torch.where(x > 0, x > 1, x < -1).int(), CHOOSING_X)
add_case("choosing where of two numbers of bools and of single values",
    lambda x: torch.where(x.sum() > 0, x.max(), x.min()) + x, CHOOSING_X)
add_case(
    "choosing where of two numbers of bools and of single values",
    lambda x: torch.where(x > 0, x, 1.5),
    CHOOSING_NUMBERS,
)


@case(CHOOSING_X, frontends=FRONTENDS)
def choosing_bools(x: torch.Tensor) -> torch.Tensor:
    return (((x > 0) | (x < -1)) ^ ((x > 1) & (x < 2))).int()


@case(CHOOSING_NUMBERS, frontends=FRONTENDS)
def choosing_ints(x: torch.Tensor) -> torch.Tensor:
    return (x & 3) + (x << 2) + (x >> 1)

# Complex tensors: arithmetic, shapes, constants, and what is refused.
COMPLEX_TENSORS_PAIRS = torch.randn(2, 4, 6, 2)


@case(COMPLEX_TENSORS_PAIRS, frontends=("script",), rtol=1e-3, atol=1e-4)
def complex_tensors_a_script_with_complex_numbers(v: torch.Tensor) -> torch.Tensor:
    z = torch.view_as_complex(v) * 2j
    z = torch.cat([z, z.conj()], 1)
    return torch.view_as_real(z[..., 1:] + torch.exp(z[..., :-1] * 1j))

# Ops lowered by torch's own definition.
DEFINED_BY_TORCH_X = torch.rand(2, 4, 4) * 0.8 + 0.1
DEFINED_BY_TORCH_Y = torch.rand(2, 4, 4) * 0.8 + 0.1


@case(DEFINED_BY_TORCH_X, DEFINED_BY_TORCH_Y, frontends=FRONTENDS)
def defined_by_torch_elementwise(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    one = torch.lerp(x, y, 0.3) + torch.lerp(x, y, y) + torch.addcmul(x, x, y, value=0.5) + torch.logaddexp(x, y)
    return one + torch.addcdiv(x, x, y, value=2.0) + torch.logit(x, eps=0.2) + torch.sinc(x) + torch.xlogy(x, y)


@case(DEFINED_BY_TORCH_X, DEFINED_BY_TORCH_Y, frontends=TRACE_AND_EXPORT)
def defined_by_torch_places(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    one = torch.movedim(x, 1, 2) + torch.rot90(x, 1, (1, 2)) + torch.take_along_dim(x, (y * 4).long(), 1)
    return one + torch.tensor_split(y, 2, 0)[0] + torch.kron(x[0, :2, :2], y[0, :2, :2])


@case(DEFINED_BY_TORCH_X, frontends=TRACE_AND_EXPORT)
def defined_by_torch_statistics(x: torch.Tensor) -> torch.Tensor:
    gaps = torch.where(x > 0.4, x, torch.nan)
    one = torch.quantile(x, 0.3, dim=1) + torch.quantile(x, torch.tensor([0.1, 0.5]), dim=1, keepdim=True)[1]
    return one + torch.nanmean(gaps, 1) + torch.isin((x[:, 0] * 4).int(), torch.tensor([1, 2])).float()


@case(DEFINED_BY_TORCH_X, DEFINED_BY_TORCH_Y, frontends=TRACE_AND_EXPORT)
def defined_by_torch_losses(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = torch.nn.functional.cross_entropy(x[0], torch.tensor([0, 1, 2, 0])) + y.sum() * 0
    loss = loss + torch.nn.functional.nll_loss(x[1], torch.tensor([0, -100, 2, 0]), torch.tensor([1.0, 2, 3, 4]))
    return loss + torch.nn.functional.poisson_nll_loss(x, y) + torch.nn.functional.soft_margin_loss(x, y)


SLICED_X = torch.rand(2, 3, 8)
for name, function in {
    "lerp": lambda x: torch.lerp(x[:, :, 1:], x[:, :, :-1], 0.3),
    "addcmul": lambda x: torch.addcmul(x[:1], x[:1], x[1:]),
    "logaddexp": lambda x: torch.logaddexp(x[:1], x[1:]), "distance": lambda x: F.pairwise_distance(x[:, 0], x[:, 1]),
    "l1_loss": lambda x: F.l1_loss(x[:1], x[1:]), "vstack": lambda x: torch.vstack([x[:1], x[1:]]),
}.items():
    add_case(f"defined by torch of two slices {name}", function, SLICED_X, flexible=[2], lowest=3,
             at=[(SLICED_X[..., :3],)], frontends=TRACE_AND_EXPORT)
add_case("defined by torch flexible size", lambda x: torch.lerp(x, x * 2, 0.3) + torch.logaddexp(x, x),
    torch.rand(4, 3), flexible=[0], at=[(torch.rand(2, 3),), (torch.rand(64, 3),)])
add_refused("defined by torch a graph that hangs on a flexible size is refused", "depends on a flexible size",
    lambda x: x.tensor_split(2)[1], torch.rand(4, 3), flexible=[0])
add_case("defined by torch two flexible sizes", torch.diag_embed, torch.rand(4, 3), flexible=[0, 1],
         at=[(torch.rand(2, 9),), (torch.rand(9, 9),)])

# `torch.diff`.
DIFFERENCES_X = torch.randn(3, 6)


@case(DIFFERENCES_X, frontends=FRONTENDS)
def differences(x: torch.Tensor) -> torch.Tensor:
    return torch.diff(x) + torch.diff(x, n=2, dim=-1, prepend=x[:, :1])


add_case("differences integers bools and other dimensions", lambda x: torch.diff(x, dim=0, append=x[:1]),
    (DIFFERENCES_X * 5).int())
add_case("differences integers bools and other dimensions", lambda x: torch.diff(x > 0, n=2).int(), DIFFERENCES_X)
add_case("differences integers bools and other dimensions", lambda x: torch.diff(x, n=0), DIFFERENCES_X)
add_case("differences integers bools and other dimensions", lambda x: torch.diff(x, n=0, prepend=x[:, :1]),
    DIFFERENCES_X)
add_case("differences flexible size", lambda x: torch.diff(x, dim=0), DIFFERENCES_X, flexible=[0],
    at=[(torch.randn(2, 6),), (torch.randn(64, 6),)])
add_refused("differences nothing left is refused", "6 differences of 6 elements leave none",
    lambda x: torch.diff(x, n=6), DIFFERENCES_X)

# Rounded divisions and remainders.
DIVISION_X = torch.tensor([[-7.5, 7.5, -0.25, 1.0], [5.75, -5.0, 0.0, 2.0]])
DIVISION_Y = torch.tensor([2.0, -2.0, 3.0, 1.0])
DIVISION_I = torch.tensor([[-7, 7, 2 ** 30 + 1], [5, -5, 0]])
DIVISION_J = torch.tensor([2, -2, 3])


@case(DIVISION_X, frontends=FRONTENDS)
def division_by_one(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x % 1, torch.remainder(x, 1.0), x // 1, torch.div(x, 1, rounding_mode="floor"),
                      torch.div(x, 1.0, rounding_mode="trunc"), torch.floor_divide(x, 1), x % -1])


add_case("division by one in the model", lambda x: x % 1, DIVISION_X)
add_case("division by one in the model", lambda x, y: x // y[:, :1] + x % y[:, :1], DIVISION_X, torch.ones(2, 2))


@case(DIVISION_X, DIVISION_Y, frontends=FRONTENDS)
def division_floats(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.cat([x % y, x // y, torch.div(x, y, rounding_mode="trunc"), x / y, 3 / (y + x * 0), x % 0.75])


@case(DIVISION_I, DIVISION_J, frontends=FRONTENDS)
def division_true_division_of_ints(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x / y + x / 4 + torch.true_divide(y, 2.5)


add_case("division floats over ints", lambda x, y: torch.cat([x // y, x % y, x / y]), DIVISION_X[:, :3], DIVISION_J)

# fmax, fmin, copysign, signbit, erfc.
ELEMENTWISE_NAN, ELEMENTWISE_INF = float("nan"), float("inf")
ELEMENTWISE_X = torch.tensor(
    [[1.0, -2.0, ELEMENTWISE_NAN, ELEMENTWISE_NAN, 0.0, -0.0, ELEMENTWISE_INF, -ELEMENTWISE_INF]]
)
ELEMENTWISE_Y = torch.tensor(
    [
        [-0.0, 3.0, 5.0, ELEMENTWISE_NAN, -1.0, 1.0, 2.0, ELEMENTWISE_NAN],
        [0.0, -3.0, ELEMENTWISE_NAN, 4.0, 1.0, -1.0, ELEMENTWISE_NAN, -ELEMENTWISE_INF],
    ]
)


@case(ELEMENTWISE_X, ELEMENTWISE_Y, frontends=FRONTENDS)
def elementwise_numbers_and_none(x: torch.Tensor, y: torch.Tensor):
    return torch.fmax(x, y), torch.fmin(x, y), torch.fmax((y > 0).int(), torch.ones(8, dtype=torch.int32))


@case(ELEMENTWISE_X, ELEMENTWISE_Y, frontends=TRACE_AND_EXPORT)
def elementwise_signs(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x, y = torch.nan_to_num(x[:, :6]), torch.nan_to_num(y[:, :6])
    return torch.copysign(x, y), torch.copysign(x, -1.0), torch.signbit(y).int(), torch.erfc(x)

add_case(
    "elementwise signs",
    lambda x: torch.signbit(x).int() + torch.signbit(x.int()).int(),
    ELEMENTWISE_Y[:, [0, 1, 4, 5]],
    frontends=TRACE_AND_EXPORT,
)

# eye keeps its dtype.
EYE_X = torch.tensor([[3, 5, 8], [7, 9, 2]], dtype=torch.int32)


@case(EYE_X, frontends=FRONTENDS)
def eye_integers_stay_integers(x: torch.Tensor) -> torch.Tensor:
    return x // (torch.eye(2, 3, dtype=torch.int32) + 1)


@case(EYE_X, frontends=TRACE_AND_EXPORT)
def eye_a_mask_of_bools(x: torch.Tensor) -> torch.Tensor:
    q = x.float().view(1, 2, 3)
    mask = torch.eye(2, dtype=torch.bool)
    return torch.nn.functional.scaled_dot_product_attention(q, q, q, mask) + torch.eye(3)[1]



@case(torch.arange(6.)[None], frontends=TRACE_AND_EXPORT)
def flexible_splits_into_one_chunk(x: torch.Tensor):
    """As the default of a class that divides its work into chunks."""
    (whole,) = x.chunk(1, -1)
    return torch.cat([torch.tanh(each) for each in x.chunk(1, 1)], 1), whole * 2


@case(torch.arange(48.).reshape(2, 4, 3, 2).sin(), frontends=TRACE_AND_EXPORT)
def instance_statistics_of_each_image(x: torch.Tensor):
    """Adaptive instance normalization as a batch norm of one image with all channels."""
    scales = x[:, :, 0, 0].reshape(-1)
    mean, variance = torch.zeros(4).repeat(2), torch.ones(4).repeat(2)
    rows = x.reshape(1, 8, 3, 2)
    normalized = torch.nn.functional.batch_norm(rows, mean, variance, scales, scales * 2, True, 0.1, 1e-3)
    plain = torch.nn.functional.batch_norm(x, torch.zeros(4), torch.ones(4), training=True)
    return normalized.view(2, 4, 3, 2), plain




@case(torch.tensor([[1., -2., 3.], [0., 5., -6.], [7., 8., 9.]]), frontends=TRACE_AND_EXPORT)
def choosing_by_a_triangle_of_bytes(x: torch.Tensor):
    """As the mask of a decoder, beside a mask of what is padding."""
    shown = (x > 0) & torch.tril(torch.ones(3, 3)).type(torch.uint8)
    return x.masked_fill(shown == 0, -10.0), torch.full((3, 3), 3, dtype=torch.int32) & (x > 0)


add_case("eye of a flexible size",
    lambda x: x @ torch.eye(x.shape[1]) + torch.eye(3, x.shape[1]) + torch.eye(x.shape[1], dtype=torch.int32)[:3],
    torch.rand(3, 5), flexible=[1], lowest=3, at=[(torch.rand(3, 3),), (torch.rand(3, 9),)], frontends=TRACE_AND_EXPORT)

# `zeros`, `ones`, `full`, `new_*`, `*_like`, `fill_`, `zero_`.
FILLED_NUMBERS = torch.tensor([[3, -1, 2], [0, 5, 7]], dtype=torch.int32)


@case(FILLED_NUMBERS, frontends=FRONTENDS)
def filled_zero_and_fill(x: torch.Tensor) -> torch.Tensor:
    return (x + 1).zero_() + (x * 2).fill_(2) + torch.full((3,), 2) / 4


add_case("filled computed value", lambda x: (x + 1).fill_(x.sum()) + x, torch.randn(2, 3))


@case(torch.randn(4, 3), flexible=[0], at=[(torch.randn(2, 3),), (torch.randn(64, 3),)])
def filled_sizes_of_a_flexible_input(x: torch.Tensor) -> torch.Tensor:
    return x.new_ones((x.shape[0], 3)) + torch.full_like(x, 2.5) + torch.zeros(x.size(0), 1) + x

# `chunk` and `split` along a flexible axis.
FLEXIBLE_SPLITS_X = torch.arange(24.0).reshape(2, 4, 3)
FLEXIBLE_SPLITS_Y = torch.arange(63.0).reshape(3, 7, 3)


@case(FLEXIBLE_SPLITS_X, flexible=(0, 1), at=[[FLEXIBLE_SPLITS_X[:, :3]]])
def flexible_splits_split(x: torch.Tensor) -> torch.Tensor:
    first, second = x.split(2, 1)
    return first - second.sum(1, keepdim=True)


@case(FLEXIBLE_SPLITS_X, flexible=(0, 1), at=[[FLEXIBLE_SPLITS_Y]])
def flexible_splits_computed_sizes(x: torch.Tensor) -> torch.Tensor:
    first, second = x.split([1, x.shape[1] - 1], 1)
    return torch.cat([second, first], 1)


@case(FLEXIBLE_SPLITS_X, frontends=TRACE_AND_EXPORT, flexible=(0, 1), at=[[FLEXIBLE_SPLITS_Y]])
def flexible_splits_other_axis(x: torch.Tensor) -> torch.Tensor:
    first, second = x.split([1, 2], 2)
    return first + second + x.chunk(3, 2)[1] + x.split(1, 2)[0]


@case(FLEXIBLE_SPLITS_X, frontends=FRONTENDS)
def flexible_splits_known_sizes(x: torch.Tensor) -> torch.Tensor:
    return x.split(2, 1)[1] + torch.split(x, [2, 2], 1)[0]

# Functions of ints and bools.
FLOAT_FUNCTIONS_X = torch.tensor([[1, 2, 3], [4, 1, 1]])
FLOAT_FUNCTIONS_NAMES = (
    "acos",
    "asin",
    "atan",
    "cos",
    "cosh",
    "erf",
    "exp",
    "exp2",
    "expm1",
    "log",
    "log10",
    "log1p",
    "log2",
    "rsqrt",
    "sigmoid",
    "sin",
    "sinh",
    "sqrt",
    "tan",
    "tanh",
)


@case(FLOAT_FUNCTIONS_X)
def float_functions_functions_of_ints(x: torch.Tensor) -> torch.Tensor:
    ones = x.clamp(0, 1)
    return torch.stack([getattr(torch, name)(ones if name[0] == "a" else x) for name in FLOAT_FUNCTIONS_NAMES])


@case(FLOAT_FUNCTIONS_X, frontends=FRONTENDS)
def float_functions_roots_of_ints(x: torch.Tensor) -> torch.Tensor:
    return torch.sqrt(x) + torch.exp(x > 2) + torch.logsumexp(x, 1, keepdim=True) + torch.atan2(x, x + 1)


@case(FLOAT_FUNCTIONS_X, frontends=FRONTENDS)
def float_functions_ints_stay_ints(x: torch.Tensor) -> torch.Tensor:
    y = x - 2
    return torch.floor(y) * torch.ceil(y) + torch.round(y) + torch.relu(y)


add_case("float functions floats are left to the host",
    lambda x: torch.sqrt(x) + torch.floor(x) + torch.relu(x - 2) + torch.round(x), FLOAT_FUNCTIONS_X / 2)
add_case("float functions softmax of ints", lambda x: (x.softmax(1, dtype=torch.float32),
                                                            x.relu().softmax(-1, dtype=torch.float32)),
    FLOAT_FUNCTIONS_X, frontends=TRACE_AND_EXPORT)
add_case("float functions relu6 of ints", lambda x: F.relu6(x * 3 - 4), FLOAT_FUNCTIONS_X, frontends=TRACE_AND_EXPORT)
add_case("float functions round to decimals",
    lambda x: torch.round(x, decimals=2) + torch.round(x, decimals=-1) + torch.round(x), torch.rand(9) * 40 - 20,
    frontends=TRACE_AND_EXPORT)

# rms_norm, cosine_similarity, mse_loss and cross.
FORMULAS_X = torch.rand(2, 4, 6) - 0.5
FORMULAS_Y = torch.rand(2, 4, 6) - 0.5


@case(FORMULAS_X, FORMULAS_Y, frontends=FRONTENDS)
def formulas_cosine_similarity(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    one = torch.cosine_similarity(x, y) + torch.cosine_similarity(x, y[0], 1, 0.5)
    return one + torch.cosine_similarity(x * 0, y)


COSINES_X = torch.randn(2, 4, 9)
for name, function in {"first axis": lambda x: F.cosine_similarity(x, x[:1], dim=0),
                       "channels": lambda x: F.cosine_similarity(x[:, :1], x[:, 1:], dim=1),
                       "another rank": lambda x: F.cosine_similarity(x[:, :1], x[0], dim=1)}.items():
    add_case(f"formulas cosine similarity that broadcasts {name}", function, COSINES_X, flexible=[2],
             at=[(COSINES_X[..., :2],)], frontends=TRACE_AND_EXPORT)


add_case(
    "formulas mse loss",
    lambda x, y: F.mse_loss(x, y) + F.mse_loss(x, y, reduction="none") + F.mse_loss(x, y, reduction="sum"),
    FORMULAS_X,
    FORMULAS_Y,
    frontends=TRACE_AND_EXPORT,
)


@case(torch.rand(2, 3, 3), torch.rand(2, 3, 3), frontends=TRACE_AND_EXPORT)
def formulas_cross(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.cross(x, y) + torch.cross(x, y, dim=2) + torch.linalg.cross(x, y[:1])


@case(torch.rand(4, 3), flexible=[0], at=[(torch.rand(7, 3),)])
def formulas_flexible_sizes(x: torch.Tensor) -> torch.Tensor:
    return torch.cosine_similarity(x, x + 1, -1)[:, None] + torch.linalg.cross(x, x + 1) + F.rms_norm(x, (3,))

# torch.fft with and without its arguments, and the conjugate.
FOURIER_X = torch.randn(2, 4, 6)


@case(FOURIER_X, frontends=TRACE_AND_EXPORT, rtol=1e-3, atol=1e-4)
def fourier_sizes_axes_and_norm(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.fft.rfft(x, n=4, dim=1, norm="ortho").imag, torch.fft.fftn(x, s=(2, 8), norm="forward").real


@case(FOURIER_X, frontends=TRACE_AND_EXPORT, rtol=1e-3, atol=1e-4)
def fourier_back_and_forth(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.fft.irfft(torch.fft.rfft(x)), torch.fft.ifft2(torch.fft.fft2(x)).real


@case(FOURIER_X, frontends=TRACE_AND_EXPORT, rtol=1e-3, atol=1e-4)
def fourier_the_conjugate(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = torch.conj(torch.fft.fft(x)).resolve_conj()
    return y.real, y.imag

# Assignment at indices and masks.
INDEX_PUT_X = torch.arange(60.).reshape(3, 4, 5) - 30


add_case("index put masked scatter", lambda x: x.masked_scatter(x > 3, x * 100), INDEX_PUT_X)
add_case(
    "index put masked scatter", lambda x: x.masked_scatter(x[:, :1] > -100, x + 1), INDEX_PUT_X, frontends=("export",)
)

# `index_add`, `index_copy`, `index_fill`.
INDEXED_X = torch.randn(2, 4, 3)
INDEXED_INDEX = torch.tensor([2, 0, 2])
INDEXED_SOURCE = torch.randn(2, 3, 3)


@case(
    INDEXED_X,
    INDEXED_INDEX,
    INDEXED_SOURCE,
    frontends=FRONTENDS,
    at=[(INDEXED_X, torch.tensor([1, 3, 1]), INDEXED_SOURCE)],
)
def indexed_computed_index(x: torch.Tensor, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    added = x.index_add(1, index, source, alpha=2.0)
    return added + x.index_copy(1, index[:2], source[:, :2]) + x.index_fill(1, index, 7.0)


@case(INDEXED_X, INDEXED_SOURCE, frontends=TRACE_AND_EXPORT)
def indexed_constant_index(x: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    added = x.index_add(-2, INDEXED_INDEX, source)
    return added + x.index_copy(1, INDEXED_INDEX[:2], source[:, :2]) + x.index_fill(2, torch.tensor([-1, 0]), 7.0)


add_case("indexed computed value and other dtypes", lambda x: x.index_fill(0, torch.tensor(1), x.sum()), INDEXED_X)
add_case(
    "indexed computed value and other dtypes",
    lambda x: (x > 0).index_fill(1, INDEXED_INDEX, torch.tensor(True)).int(),
    INDEXED_X,
)
add_case(
    "indexed computed value and other dtypes",
    lambda x: (x > 0).index_copy(1, INDEXED_INDEX[:2], x[:, :2] > 1).int(),
    INDEXED_X,
)
add_case("indexed computed value and other dtypes", lambda x: x.index_add(0, torch.tensor([1, 1]), x[:2], alpha=3),
    (INDEXED_X * 9).int())
add_case("indexed flexible size", lambda x, index: x.index_fill(0, index, 1.0) + x.index_add(0, index, x[:2]),
    torch.randn(4, 3), torch.tensor([1, -1]) % 4, flexible=[0], at=[(torch.randn(2, 3), torch.tensor([0, 0]))])
add_case(
    "indexed negative computed index", lambda x, index: x.index_fill(1, index, 1.0), INDEXED_X, torch.tensor([-1, 0])
)
add_refused("indexed adding bools is refused", "adds bools",
    lambda x: (x > 0).index_add(1, INDEXED_INDEX, (x > 0)[:, :3]).int(), INDEXED_X)

# Exported programs that write into their input.



add_case("input mutation the written input may be the output", lambda x: x.mul_(3), torch.arange(6.).reshape(2, 3),
    frontends=("export",))

# log_softmax and logcumsumexp where exponentials overflow and probabilities vanish.
LOG_SUMS_X = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0)) * 300


add_case("log sums scalars and other dtypes", lambda x: torch.log_softmax(x[0, 0, 0], 0), LOG_SUMS_X)
add_case("log sums scalars and other dtypes", lambda x: torch.logcumsumexp(x[0, 0, 0], 0), LOG_SUMS_X)
add_case("log sums scalars and other dtypes", lambda x: torch.log_softmax(x, 1, dtype=torch.float32), LOG_SUMS_X.int())

# pad in every mode, with negative widths, of bools.
PADDING_X = torch.arange(30.0).reshape(2, 3, 5)


add_case("padding circular of two axes and of a flexible one", lambda x: pad(x, (1, 2, 0, 1), mode="circular"),
    PADDING_X.reshape(2, 1, 3, 5), flexible=(2,), at=[(torch.rand(2, 1, 6, 5),)])
add_case(
    "padding bools and integers",
    lambda x: (pad(x > 7, (1, 0), value=True).int(), pad(x.int(), (-1, 1, 2, 0), value=3) // 2),
    PADDING_X,
    flexible=(0,),
    at=[(torch.rand(4, 3, 5),)],
)

# Max pools with dilation, average pools with a divisor.
POOLING_X = torch.randn(2, 3, 9, 8)


@case(POOLING_X, frontends=TRACE_AND_EXPORT)
def pooling_dilation(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    plain = F.max_pool2d(x, 2)
    wide = F.max_pool2d(x, 2, 1, dilation=2), F.max_pool2d(x, 3, 2, 1, dilation=(2, 1), ceil_mode=True)
    return plain, *wide, F.max_pool1d(x[:, 0], 2, 3, dilation=3)

add_case(
    "pooling dilation", lambda x: F.max_pool2d(x, 2, return_indices=True)[0], POOLING_X, frontends=TRACE_AND_EXPORT
)


add_case(
    "pooling dilation with a flexible batch",
    lambda x: F.max_pool2d(x, 3, 2, 1, dilation=2),
    POOLING_X,
    flexible=[0],
    at=[(torch.randn(5, 3, 9, 8) - 9,)],
)
add_refused("pooling indices in ceil mode of a flexible image", "ceil_mode=True with indices needs floats of static",
    lambda x: F.max_pool2d(x, 2, ceil_mode=True, return_indices=True)[0], torch.rand(1, 2, 5, 5), flexible=[2])
add_refused("pooling dilation of a flexible image is refused", "dilation needs floats of static spatial sizes",
    lambda x: F.max_pool2d(x, 2, dilation=2), POOLING_X, flexible=[2])


@case(POOLING_X, frontends=TRACE_AND_EXPORT)
def pooling_a_divisor(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return F.avg_pool2d(x, 2, divisor_override=3), F.avg_pool2d(x, 3, 2, 1, divisor_override=1), F.avg_pool2d(x, 3)


def pooling_without_a_batch(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    one = x[0, 0]
    return (F.max_pool2d(x[0], 2), F.avg_pool2d(x[0], 3, 2, 1), F.max_pool2d(x[0], 3, 1, dilation=2),
            F.max_pool1d(one, 2), F.avg_pool1d(one, 2), F.avg_pool2d(x[1], 2, divisor_override=3),
            F.max_pool2d(x[0], 1, 2, ceil_mode=True),
            F.max_pool3d(x, 2))


add_case("pooling without a batch", pooling_without_a_batch, POOLING_X)


# In 3-D, coremltools has a window too many where the size is flexible.
for kind in ("max", "avg"):
    options = {"count_include_pad": False} if kind == "avg" else {}
    add_case(f"pooling flexible volumes in ceil mode, {kind}", lambda x, kind=kind, options=options: (
        getattr(F, f"{kind}_pool3d")(x, 2, 2, 1, ceil_mode=True, **options),
        getattr(F, f"{kind}_pool3d")(x, 3, (1, 2, 3), 1, ceil_mode=True, **options)),
        torch.randn(1, 2, 7, 7, 7), flexible=[2], lowest=5, at=[(torch.randn(1, 2, size, 7, 7),) for size in (5, 8, 9)])
add_refused("pooling flexible volumes in ceil mode with averaged padding is refused", "averages padding in ceil_mode",
            lambda x: F.avg_pool3d(x, 2, 2, 1, ceil_mode=True), torch.randn(1, 2, 7, 7, 7), flexible=[2])


# Generalized mean pooling, as of embeddings of images.
def pooling_of_the_whole_image(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    size, one = (x.size(-2), x.size(-1)), x[0]
    return (F.avg_pool2d(x.clamp(min=1e-6).pow(3.0), size).pow(1 / 3.0), F.max_pool2d(x, (x.shape[2], x.shape[3])),
            F.avg_pool2d(one, (one.size(-2), one.size(-1))), F.max_pool2d(x, size, stride=1))


for axes in ([2], [2, 3], []):
    add_case(f"pooling of the whole image, flexible {axes}", pooling_of_the_whole_image, POOLING_X, flexible=axes,
             frontends=("trace",) if axes else TRACE_AND_EXPORT,
             at=[(torch.randn(2, 3, 5 if axes else 9, 11 if 3 in axes else 8),)])
add_refused("pooling by a computed window that is smaller is refused", "'kernel_size' is computed by the model",
            lambda x: F.avg_pool2d(x, (x.size(-2) // 2, x.size(-1))), POOLING_X, flexible=[2])
add_refused("pooling the image with padding is refused", "'kernel_size' is computed by the model",
            lambda x: F.max_pool2d(x, (x.size(-2), x.size(-1)), padding=1), POOLING_X, flexible=[2])


add_refused("pooling a divisor with ceil mode is refused", "divisor_override with ceil_mode",
    lambda x: F.avg_pool2d(x, 2, ceil_mode=True, divisor_override=3), POOLING_X)


# With a stride above the kernel; MIL's shape rule counts it where there is no padding.
@case(POOLING_X, frontends=TRACE_AND_EXPORT)
def pooling_a_window_behind_the_input_is_dropped(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    one = x[:, 0]
    return (F.max_pool2d(x, 1, 2, ceil_mode=True), F.avg_pool2d(x, (2, 1), (5, 7), ceil_mode=True),
            F.avg_pool1d(one, 2, 6, ceil_mode=True), F.max_pool1d(one, 1, 4, ceil_mode=True),
            F.max_pool2d(x, 2, 3, ceil_mode=True), F.avg_pool2d(x, 3, 2, 1, ceil_mode=True))

add_case("pooling a window behind the input is dropped", lambda x: F.max_pool3d(x, 1, 3, ceil_mode=True),
    torch.randn(1, 2, 4, 6, 7), frontends=TRACE_AND_EXPORT)


add_refused("pooling a window behind a padded flexible size is refused",
    "ceil_mode with padding and a stride above the kernel, on a flexible size",
    lambda x: F.max_pool2d(x, (2, 1), (1, 3), (1, 0), ceil_mode=True), POOLING_X, flexible=[3])
add_case(
    "pooling a window behind a padded flexible size is refused",
    lambda x: F.max_pool2d(x, 2, ceil_mode=True),
    POOLING_X,
    flexible=[2],
)

# `arange` and `linspace` of torch's dtype.
RANGES_X = torch.rand(3, 4)


@case(RANGES_X, frontends=TRACE_AND_EXPORT)
def ranges_steps(x: torch.Tensor) -> torch.Tensor:
    x = x + torch.arange(4) + torch.arange(1, 9, 2) + torch.arange(3, -1, -1) + torch.arange(0, 1, 0.25)
    return x + torch.linspace(-1, 1, 4) + torch.arange(0.1, 0.5, 0.1)


@case(RANGES_X, frontends=("script",))
def ranges_a_script(x: torch.Tensor) -> torch.Tensor:
    numbers = torch.arange(x.size(1), dtype=torch.float32)
    return x + numbers.mean() + torch.arange(1, 5) + torch.arange(0, 8, 2, dtype=torch.float32).mean()


add_case("ranges a flexible size",
    lambda x: x + torch.arange(x.shape[1], dtype=x.dtype).mean() + torch.arange(1, x.shape[1] + 1), RANGES_X,
    frontends=TRACE_AND_EXPORT, flexible=[1], at=[(torch.rand(3, 7),)])
add_case("ranges linspace of a flexible size",
    lambda x: (x + torch.linspace(-1, 1, x.shape[1]), x * torch.linspace(0, x.shape[1] - 1, x.shape[1]).round()),
    RANGES_X, flexible=[1], at=[(torch.rand(3, 1),), (torch.rand(3, 2),), (torch.rand(3, 31),)])
add_case("ranges a step that single precision rounds down", lambda x: x + torch.arange(0, 1, 1 / 11),
    torch.rand(2, 11), frontends=TRACE_AND_EXPORT)

# Reductions of ints, bools and with a dtype.
REDUCED_DTYPES_F = torch.tensor([[0.25, -2.0, 3.0], [0.0, 0.5, float("nan")]])
REDUCED_DTYPES_N = torch.tensor([[1, -2, 4], [4, 0, 3]])


@case(REDUCED_DTYPES_N, frontends=FRONTENDS)
def reduced_dtypes_dtypes(n: torch.Tensor) -> torch.Tensor:
    whole = torch.mean(n, dtype=torch.float32) + n.sum(dtype=torch.float32) / 3 + n.sum() / 2
    return n.mean(1, dtype=torch.float32) + torch.sum(n, dim=[1], dtype=torch.float32) / 4 + whole


@case(REDUCED_DTYPES_F, frontends=FRONTENDS)
def reduced_dtypes_truth(x: torch.Tensor) -> torch.Tensor:
    each = torch.cat([x.all(1), x.any(1), x.all(dim=0), (x > 0).any(-1), (x > 5).any().reshape(1)])
    return each.float() + (x * 0 + 1 > 0).all().float()


@case(REDUCED_DTYPES_F, frontends=FRONTENDS)
def reduced_dtypes_counts(x: torch.Tensor) -> torch.Tensor:
    found = x > 0
    return found.sum(1, keepdim=True) / 2 + found.sum() + found.float().mean((0, 1)) + x.nan_to_num().mean()


@case(torch.arange(24.0).reshape(2, 4, 3), frontends=FRONTENDS)
def reduced_dtypes_axes(x: torch.Tensor) -> torch.Tensor:
    return x.mean(dim=(0, 2), keepdim=True) + x.sum(-2, keepdim=True) + x.mean(1, keepdim=True) + x.sum()

# Variance with corrections, `prod`, `median`, `kthvalue`, `argmax` over everything.
REDUCTIONS_X = torch.randn(2, 5, 3)


@case(REDUCTIONS_X, frontends=TRACE_AND_EXPORT)
def reductions_corrections(x: torch.Tensor) -> torch.Tensor:
    one = x.var(1, correction=2) + x.std(1) + x.var(1, unbiased=False) + x.std((0, 2), correction=0).sum()
    return one + x.std() + x.var() + torch.var(x, unbiased=False)


@case(REDUCTIONS_X, frontends=FRONTENDS)
def reductions_with_the_mean(x: torch.Tensor) -> torch.Tensor:
    variance, mean = torch.var_mean(x, dim=1, keepdim=True)
    deviation, again = torch.std_mean(x, dim=1, keepdim=True)
    return (x - mean) / (variance + 0.1).sqrt() + deviation * again


add_case("reductions variance of a flexible size", lambda x: x.var(0, correction=0.5) + x.std(), torch.randn(4, 3),
    flexible=[0], at=[(torch.randn(2, 3),), (torch.randn(64, 3),)])


@case(REDUCTIONS_X, frontends=FRONTENDS)
def reductions_products(x: torch.Tensor) -> torch.Tensor:
    return torch.prod(x) + torch.prod(x, 1, keepdim=True) + torch.prod(x > -9.0, 2, keepdim=True) / 2


@case(REDUCTIONS_X, frontends=FRONTENDS)
def reductions_order_statistics(x: torch.Tensor) -> torch.Tensor:
    values, places = torch.median(x, 1)
    low, low_places = torch.kthvalue(x, 2, 1, True)
    return values + places + (low + low_places)[:, 0] + torch.median(x)


@case(REDUCTIONS_X, frontends=FRONTENDS)
def reductions_argmax_over_everything(x: torch.Tensor) -> torch.Tensor:
    return torch.argmax(x) + torch.argmin(x, 1, keepdim=True) + torch.argmax(x, dim=-1, keepdim=True)


add_case("reductions order statistics of a flexible size",
    lambda x: (*x.median(0), *x.kthvalue(2, 0, True), x.median(), *x.median(1)), torch.randn(4, 3), flexible=[0],
    at=[(torch.randn(2, 3),), (torch.randn(7, 3),)], frontends=TRACE_AND_EXPORT)

# repeat_interleave by constants, embedding_bag.
REPEATED_X = torch.rand(3, 4)


@case(REPEATED_X, frontends=TRACE_AND_EXPORT)
def repeated_repeats(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    by_each = torch.repeat_interleave(x, torch.tensor([1, 0, 2, 3]), 1, output_size=6)
    return by_each, torch.repeat_interleave(x, 2, -1), torch.repeat_interleave(x > 0.5, 2).int()


add_case("repeated repeats of a flexible size", lambda x: torch.repeat_interleave(x, 2, 0), REPEATED_X, flexible=[0],
    at=[(torch.rand(7, 4),)])
add_refused("repeated repeats of a flexible size", "repeats for each element of a flexible size",
    lambda x: torch.repeat_interleave(x, torch.tensor([1, 0, 2]), 0), REPEATED_X, flexible=[0])
add_refused("repeated repeats that the model computes are refused", "the repeats are computed by the model",
    lambda x, n: torch.repeat_interleave(x, n, 0), REPEATED_X, torch.tensor([1, 0, 2]))

# A tensor returned twice.



add_case("repeated outputs an input returned twice", lambda x: (x, x, x + 1), torch.randn(2, 3))
add_case("repeated outputs an input returned twice", lambda x: (x, x), torch.randn(2, 3))
add_case("repeated outputs an input returned twice", lambda x: (x, x), torch.randn(2, 3), frontends=("export",))

# Bicubic, trilinear and nearest-exact interpolation.
RESAMPLING_IMAGE = torch.randn(1, 2, 6, 8)


add_case("resampling nearest", lambda x: interpolate(x, size=(9, 5), mode="nearest-exact"), RESAMPLING_IMAGE,
    frontends=TRACE_AND_EXPORT)
add_case("resampling nearest", lambda x: interpolate(x, scale_factor=1.7, mode="nearest-exact"), RESAMPLING_IMAGE[0],
    frontends=TRACE_AND_EXPORT)
add_case("resampling nearest of a video", lambda x: interpolate(x, scale_factor=(2, 1, 1.5), mode="nearest"),
    torch.randn(1, 2, 3, 4, 5))
add_refused("resampling flexible size is refused", "resizes an image of flexible size",
    lambda x: interpolate(x, size=(9, 9), mode="bicubic", antialias=True), RESAMPLING_IMAGE, flexible=[2])

# cummax and cummin.
RUNNING_EXTREMES_X = torch.tensor([[3.0, 1.0, 3.0, 5.0, 2.0], [-1.0, -2.0, -2.0, 0.0, 0.0]])


@case(RUNNING_EXTREMES_X, frontends=FRONTENDS)
def running_extremes_values_and_places(x: torch.Tensor):
    largest, at = torch.cummax(x, 1)
    least, below = torch.cummin(x.int(), 0)
    return largest, at, least, below


add_case("running extremes a flexible batch", lambda x: torch.cummin(x, -1)[1], RUNNING_EXTREMES_X, flexible=[0],
    at=[(torch.rand(7, 5),)])
add_refused("running extremes a flexible dimension is refused", "needs a dimension of static size; fix the size",
    lambda x: torch.cummax(x, 1)[0], RUNNING_EXTREMES_X, flexible=[1])

# cumsum along any axis.
RUNNING_SUMS_X = torch.arange(-12.0, 12.0).reshape(2, 3, 4)


@case(RUNNING_SUMS_X, frontends=FRONTENDS)
def running_sums_an_axis_counted_from_the_end(x: torch.Tensor) -> torch.Tensor:
    return torch.cumsum(x, -2)

# Sizes as numbers, traced, scripted and exported.
SCALAR_CASTS_X = torch.arange(24.0).reshape(2, 4, 3)


@case(SCALAR_CASTS_X, frontends=("script",))
def scalar_casts_item_of_a_computed_number(x: torch.Tensor) -> torch.Tensor:
    return x * int(x.max()) + float(x.sum()) * x.max().item()


add_case("scalar casts root of an exported flexible size", lambda x: x / (x.shape[1] ** 0.5), SCALAR_CASTS_X,
    frontends=("export",), flexible=(1,), at=[[torch.ones(2, 9, 3)]])

# expand to no dimensions.
SCALAR_EXPAND_X = torch.arange(6.).reshape(2, 3)


@case(SCALAR_EXPAND_X, frontends=FRONTENDS)
def scalar_expand_a_number_expanded_to_a_number(x: torch.Tensor):
    return x.sum().expand([]), x * torch.ones(()).expand([]), x.sum().expand_as(x[0, 0]), \
        torch.broadcast_to(x.mean(), [])


@case(SCALAR_EXPAND_X, frontends=TRACE_AND_EXPORT)
def scalar_expand_broadcast_tensors(x: torch.Tensor):
    """As in the quantile of a normal distribution."""
    first, second = torch.broadcast_tensors(torch.tensor(1.5), torch.tensor(2.))
    mean, largest = torch.broadcast_tensors(x.mean(), x.amax())
    return x * first + second, x * mean + largest, torch.broadcast_tensors(x, torch.tensor(2.))[1] * x


@case(SCALAR_EXPAND_X, frontends=FRONTENDS)
def scalar_expand_all_others_are_as_ever(x: torch.Tensor):
    return x[:, :1].expand(-1, 4), x.sum().expand(3, 2), x[0].expand_as(x), x.sum().expand_as(x), x.expand(1, 2, 3)


add_case(
    "scalar expand flexible sizes",
    lambda x: x[:1].expand(x.shape[0], 3) + x.sum().expand(()),
    SCALAR_EXPAND_X,
    flexible=[0],
    at=[(torch.rand(5, 3),)],
)


add_case(
    "scalar expand beside flexible sizes",
    lambda x: (torch.zeros(3, 2).scatter_add(0, x[:, :1].long().expand(-1, 2), x[:, :2]),
               torch.zeros(3, 3).scatter_reduce(0, x[:, :1].long().expand_as(x), x, "amax"),
               torch.zeros(1, 1).expand(x.shape[0], 1).squeeze(1) + x[:, 0], (x > 1)[:, :1].expand(-1, 3)),
    torch.rand(4, 3) * 3, frontends=TRACE_AND_EXPORT, flexible=[0], at=[(torch.rand(9, 3) * 3,)],
)


add_case(
    "defined by torch of a flexible batch",
    lambda x: (torch.tensordot(x, torch.ones(6, 3), 1), torch.inner(x, torch.arange(12.0).reshape(2, 6)),
               torch.linalg.multi_dot([x, torch.ones(6, 3), torch.ones(3, 2)]), x.take_along_dim(x.argsort(1), 1),
               torch.column_stack([x[:, 0], x[:, 1]]), torch.quantile(x, 0.3, dim=1), torch.diag_embed(x),
               F.cross_entropy(x, x.softmax(1)), F.nll_loss(x.log_softmax(1), x.argmax(1), torch.arange(6.0) + 1)),
    torch.randn(4, 6), flexible=[0], at=[(torch.randn(9, 6),), (torch.randn(1, 6),)],
)


add_case(
    "defined by torch of a flexible size that grows",
    lambda x: (torch.kron(x, torch.tensor([[1.0, 2], [3, 4]])), torch.tensor_split(x, (1, 2), 0)[2],
               torch.diag_embed(x.T), torch.matrix_power(x.T @ x, 3)),
    torch.randn(4, 6), flexible=[0], at=[(torch.randn(9, 6),)],
)


@case(SCALAR_EXPAND_X, frontends=TRACE_AND_EXPORT)
def scalar_expand_broadcast_to(x: torch.Tensor):
    return torch.broadcast_to(x[:, :1], (4, 2, 3)), x.broadcast_to((2, -1, 3)), torch.broadcast_to(x.sum(), (2,)), \
        torch.broadcast_to(x[0], x.shape), *torch.broadcast_tensors(x[:, :1], x[0])


@case(SCALAR_EXPAND_X, frontends=TRACE_AND_EXPORT)
def scalar_expand_a_view_of_one_element(x: torch.Tensor):
    one = x[1:, 2:]
    return one.view(()) + x[:, 0], one.reshape([]).unsqueeze(0), torch.stack([one.view([]), x.sum()]), \
        x.sum().view(1, 1), x.sum().flatten(), x.sum().reshape(-1), x.flatten(0, 1), one.view(()).view(())


add_case("scalar expand a constant of several dimensions",
    lambda x: (x * torch.tensor([[2.0]]).view(()), x + torch.tensor([[[3]]]).squeeze(),
               x - torch.ones(1, 1).reshape([])),
    torch.randn(2, 3), frontends=TRACE_AND_EXPORT)


@case(torch.randn(6, 4), torch.randn(6, 4), frontends=TRACE_AND_EXPORT)
def defined_by_torch_losses_and_shifts(x: torch.Tensor, y: torch.Tensor):
    signs = torch.tensor([1.0, -1, 1, -1, 1, 1])
    return (F.cosine_embedding_loss(x, y, signs), F.margin_ranking_loss(x[:, 0], y[:, 0], signs, margin=0.3),
            F.hinge_embedding_loss(x[:, 0], signs), F.triplet_margin_loss(x, y, x * y, swap=True),
            torch.fft.fftshift(x, dim=-1), torch.fft.ifftshift(x), torch.vander(x[0]))


KEPT = torch.tensor([[True, False], [False, True], [True, True]])


@case(SCALAR_EXPAND_X, frontends=TRACE_AND_EXPORT)
def scalar_expand_an_element_of_a_constant(x: torch.Tensor):
    return (x.masked_fill(KEPT.clone()[0, 1], 2.0), x * (torch.arange(3) == 1)[1], x * KEPT[:, 0].clone().unbind(0)[1],
            x * torch.tensor([0.5, 2.0], dtype=torch.float16)[1].to(x.dtype))


@case(SCALAR_EXPAND_X, frontends=FRONTENDS)
def flexible_splits_of_one_piece(x: torch.Tensor):
    parts = x.split(4, 0)
    return torch.cat([torch.relu(part) for part in parts], 0), x.split(3, dim=1)[0], x.split(2, dim=1)[1]


@case(SCALAR_EXPAND_X, frontends=TRACE_AND_EXPORT)
def splits_that_are_called_unsafe(x: torch.Tensor):
    return *torch.unsafe_split(x, 2, 1), *torch.unsafe_split_with_sizes(x, (1, 2), -1), *torch.unsafe_chunk(x, 2, 0)


# Sums with a factor, mixed dtypes.
SCALED_SUMS_F = torch.tensor([[1.5, -2.0, 0.25], [3.0, 0.0, -1.0]])
SCALED_SUMS_N = torch.tensor([[1, -2, 3], [4, 0, 2]])


@case(SCALED_SUMS_F, SCALED_SUMS_N, frontends=FRONTENDS)
def scaled_sums_alpha(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.add(x, n, alpha=2), torch.sub(n, x, alpha=0.5), torch.rsub(x, 3, alpha=2),
                      torch.rsub(x, 2.5), torch.add(n, 0.5), n - x])


@case(SCALED_SUMS_F, frontends=FRONTENDS)
def scaled_sums_bools(x: torch.Tensor) -> torch.Tensor:
    a, b = x > 0, x > 1
    return torch.stack([(a + b).float(), a + 1.5, (a < b).float(), (a >= b).float(), a * x])


@case(SCALED_SUMS_F, frontends=FRONTENDS)
def scaled_sums_products_with_factors(x: torch.Tensor) -> torch.Tensor:
    square = torch.addmm(x[:, :2], x, x.t(), beta=3, alpha=2)
    batch = torch.baddbmm(x[None, :, :2], x[None], x.t()[None], beta=0, alpha=0.5)
    return square + batch + torch.addmm(x[:, :2], x, x.t())


add_case("scaled sums outer of ints and floats", lambda x, n: torch.outer(n[0], x[0]), SCALED_SUMS_F, SCALED_SUMS_N)
add_case(
    "scaled sums sizes",
    lambda x: x.reshape(x.shape[0] + 1 - 1, -1) * (x.shape[0] + 2),
    SCALED_SUMS_F,
    flexible=(0,),
    at=[[torch.ones(5, 3)]],
)

# `gather`, `scatter`, `scatter_add`, `scatter_reduce`, `index_select`, and const indices.
SCATTER_GATHER_X = torch.arange(24.0).reshape(2, 4, 3)
SCATTER_GATHER_INDEX = torch.tensor([[[0, 3, 2], [1, 1, 0]]])


@case(SCATTER_GATHER_X, SCATTER_GATHER_INDEX.repeat(2, 1, 1), frontends=FRONTENDS)
@case(SCATTER_GATHER_X, SCATTER_GATHER_INDEX, frontends=FRONTENDS)
def scatter_gather_gather(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return torch.gather(x, 1, index) + torch.gather(x > 5, -2, index).float()


@case(SCATTER_GATHER_X, frontends=TRACE_AND_EXPORT)
def scatter_gather_scatter_of_a_number(x: torch.Tensor) -> torch.Tensor:
    ints = torch.scatter(x.int(), 2, SCATTER_GATHER_INDEX[:, :, :1], 7)
    return (
        torch.scatter(x, 1, SCATTER_GATHER_INDEX, 5)
        + torch.scatter(x, 1, SCATTER_GATHER_INDEX, 2.5, reduce="add")
        + ints
    )


@case(SCATTER_GATHER_X, SCATTER_GATHER_INDEX, SCATTER_GATHER_X * 2 - 20, frontends=FRONTENDS)
def scatter_gather_scatter_of_a_tensor(x: torch.Tensor, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.scatter(x, 1, index, source), torch.scatter_add(x, 1, index, source),
                      torch.scatter_reduce(x, 1, index, source, "amax")])


add_case(
    "scatter gather scatter of bools",
    lambda x: torch.scatter(x > 100, 1, SCATTER_GATHER_INDEX, x > 5).float(),
    SCATTER_GATHER_X,
)


@case(SCATTER_GATHER_X, flexible=(0,), at=[[torch.arange(60.0).reshape(5, 4, 3)]])
def scatter_gather_flexible_batch(x: torch.Tensor) -> torch.Tensor:
    order = x.argsort(1, descending=True)
    return torch.gather(x, 1, order) + torch.scatter(x, 1, order, 3)


add_case(
    "scatter gather computed index of rank 0", lambda x: torch.index_select(x, 1, x[0, 0, :].argmax()), SCATTER_GATHER_X
)
add_case("scatter gather a flexible size of one input",
    lambda x: torch.zeros_like(x).scatter(1, x.argmax(1, keepdim=True), x[:, :1]), torch.rand(4, 3), flexible=[0],
    at=[(torch.rand(9, 3),)])
add_case(
    "scatter gather gathering along a flexible size by fewer",
    lambda x, y: torch.gather(x, 1, (y[:, :2] * 0 + 1).long()),
    SCATTER_GATHER_X[0],
    SCATTER_GATHER_X[0, :2],
    flexible=[0],
    at=[(torch.rand(7, 3), SCATTER_GATHER_X[0, :2])],
)

# Windows of signals.
SIGNAL_WINDOWS_X = torch.rand(2, 6)


add_refused(
    "signal windows a length that is not known is refused",
    "length of a window is computed by the model; fix the size",
    lambda x: x * torch.hann_window(x.shape[1]),
    SIGNAL_WINDOWS_X,
    flexible=[1],
)

# Scripted sizes.
SIZE_ITEMS_X = torch.arange(24.0).reshape(2, 4, 3)


@case(SIZE_ITEMS_X, frontends=("script",))
def size_items_items_of_a_list_of_numbers(x: torch.Tensor) -> torch.Tensor:
    steps = [3, 5, 7]
    return x * steps[1] + steps[-1] + steps[0]


@case(SIZE_ITEMS_X, frontends=("script",))
def size_items_items_of_a_list_of_tensors(x: torch.Tensor) -> torch.Tensor:
    return torch.split(x, 2, 0)[0] + torch.split(x, 1, 1)[1] + [x[0]][0]

# Constants that passes fuse into biases.
BIASED_X, BIASED_WEIGHT = torch.randn(2, 8), torch.randn(4, 8)


@case(BIASED_X, frontends=TRACE_AND_EXPORT)
def fused_biases_a_number_beside_one_output(x: torch.Tensor):
    y = functional.linear(x, BIASED_WEIGHT[:1])
    return y + 2.0, functional.linear(x, BIASED_WEIGHT[1:2]) - 2.0, 2.0 - x @ BIASED_WEIGHT[:1].T


@case(BIASED_X)
def fused_biases_of_higher_rank(x: torch.Tensor):
    y, z = functional.linear(x, BIASED_WEIGHT), functional.linear(x, BIASED_WEIGHT + 1)
    return y + torch.arange(4.0).view(1, 1, 4), (torch.arange(4.0).view(1, 1, 4) - z).relu(), \
        functional.linear(x, BIASED_WEIGHT - 1) + torch.arange(4.0).view(1, 4)


@case(torch.randn(2, 4, 6))
def fused_biases_of_convolutions(x: torch.Tensor):
    def convolve(factor: float) -> torch.Tensor:
        return functional.conv1d(x, BIASED_WEIGHT.view(4, 4, 2) * factor)

    return (convolve(1) + torch.arange(4.0).view(1, 1, 4, 1)).relu(), \
        (convolve(2).transpose(1, 2) - torch.arange(4.0).view(1, 1, 1, 4)).relu(), convolve(3) + torch.ones(4, 1)


add_case("masked fill of a larger mask", lambda x, mask: (
    x.masked_fill(mask > 0, -9.0).sum(0), x.masked_fill(mask > 0, torch.tensor(2)).flatten(1),
    x.masked_fill(x > 0, 1.0)),
    torch.randn(1, 4, 4), torch.randn(3, 1, 4), frontends=TRACE_AND_EXPORT)


# One element of a small concat.



add_case("small concat floats and ints",
    lambda x: torch.cat([x, x * 2])[3] + torch.cat([x.to(torch.int64), x.to(torch.int64)])[0],
    torch.tensor([1.5, 2.5]), readable=False)


@case(torch.arange(6.).reshape(2, 3), flexible=(0,), at=[[torch.arange(12.).reshape(4, 3)]])
def small_concat_sizes_are_still_followed(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(torch.Size([x.shape[1], x.shape[0]])) * 1



STACKED_WEIGHTS = torch.randn(2, 2)


@case(torch.randn(2), frontends=TRACE_AND_EXPORT)
def small_concat_elements_of_weights_are_stacked(x: torch.Tensor) -> torch.Tensor:
    a = STACKED_WEIGHTS @ STACKED_WEIGHTS.T
    inverse = torch.stack([torch.stack([a[1, 1], -a[0, 1]]), torch.stack([-a[1, 0], a[0, 0]], -1)])
    return inverse @ x + torch.stack([a[0, 0]]) + torch.stack([a[0, 0], x[1]], dim=0)

# `triu`, `tril`, `roll`.
TRIANGLES_X = torch.randn(2, 4, 5)


@case(TRIANGLES_X, frontends=FRONTENDS)
def triangles(x: torch.Tensor) -> torch.Tensor:
    return torch.triu(x, 1) + torch.tril(x, -2) + torch.triu(x, -1) + torch.tril(x) + torch.triu(x > 0).int()


add_case("triangles infinity stays infinity", lambda x: torch.triu(x, 1) + torch.tril(x, -1),
    torch.full((3, 3), float("inf")), frontends=TRACE_AND_EXPORT)
add_case(
    "triangles infinity stays infinity",
    lambda x: torch.softmax(x + torch.full((5, 5), float("-inf")).triu(1)[:4], -1),
    TRIANGLES_X,
    frontends=TRACE_AND_EXPORT,
)
add_case("triangles flexible sizes", lambda x: torch.triu(x, 1) + torch.tril(x, -1), torch.randn(3, 4),
    flexible=[0, 1], at=[(torch.randn(6, 2),), (torch.randn(2, 9),)])


@case(TRIANGLES_X, frontends=FRONTENDS)
def triangles_rolls(x: torch.Tensor) -> torch.Tensor:
    return torch.roll(x, [1, -7], [1, 2]) + torch.roll(x, [2], [0])


add_case("triangles roll of everything and of flexible sizes", lambda x: torch.roll(x, 3), TRIANGLES_X,
    frontends=TRACE_AND_EXPORT)
add_case("triangles roll of everything and of flexible sizes", lambda x: torch.roll(x, 1, 0) + torch.roll(x, -1, 0),
    torch.randn(4, 3), frontends=TRACE_AND_EXPORT, flexible=[0], at=[(torch.randn(2, 3),)])

# `Tensor.unfold`.
UNFOLDING_X = torch.arange(24.0).reshape(2, 12)


@case(UNFOLDING_X, frontends=FRONTENDS)
def unfolding_few_large_and_many_small_windows(x: torch.Tensor) -> torch.Tensor:
    return x.unfold(1, 10, 2).sum(1) + x.unfold(-1, 2, 1).sum(1)[:, :1]


add_case("unfolding patches of an image", lambda x: x.unfold(0, 2, 2).unfold(1, 3, 3), UNFOLDING_X.reshape(4, 6))
add_case("unfolding patches of an image", lambda x: (x > 5).unfold(1, 2, 1).int(), UNFOLDING_X)
add_case("unfolding flexible size", lambda x: x.unfold(0, 2, 1), torch.randn(4, 3), flexible=[0],
    at=[(torch.randn(9, 3),)])
add_case("unfolding a scalar", lambda x: x[0, 0].unfold(0, 1, 1), UNFOLDING_X)
add_refused("unfolding windows of rank 6 as a result are refused",
    r"makes a tensor of rank 6, but Core ML supports 5 at most .* is an output", lambda x: x.unfold(1, 2, 1),
    torch.randn(1, 2, 2, 2, 2))

# Matrices times vectors.
VECTOR_PRODUCTS_X = torch.rand(2, 4, 4)
VECTOR_PRODUCTS_V = torch.rand(4)


@case(VECTOR_PRODUCTS_X, VECTOR_PRODUCTS_V, frontends=FRONTENDS)
def vector_products_each_side(x: torch.Tensor, v: torch.Tensor):
    w = torch.matmul(v, v) + torch.dot(v, v)
    return x @ v, v @ x, x[0] @ v, v @ x[0], torch.mv(x[1], v) + w, x @ x


add_case(
    "vector products consts and whole numbers",
    lambda x: (x @ torch.arange(4.0), torch.ones(4) @ x, (x * 9).int() @ torch.arange(4, dtype=torch.int32)),
    VECTOR_PRODUCTS_X,
)
add_case("vector products consts and whole numbers",
    lambda x: (x * 9).int() @ torch.arange(16, dtype=torch.int32).reshape(4, 4), VECTOR_PRODUCTS_X)
add_case("vector products linear of a vector", lambda x, v: (
    torch.nn.functional.linear(x, v), torch.nn.functional.linear(x, torch.arange(4.)),
    torch.nn.functional.linear(v, v, torch.tensor(0.5)), torch.nn.functional.linear(v, x[0]),
    torch.nn.functional.linear(v, torch.arange(8.).view(2, 4), torch.tensor([1., 2.]))),
    VECTOR_PRODUCTS_X, VECTOR_PRODUCTS_V)
add_case(
    "vector products a flexible batch",
    lambda x, v: x @ v + v @ x,
    VECTOR_PRODUCTS_X,
    VECTOR_PRODUCTS_V,
    flexible=[0],
    at=[(torch.rand(7, 4, 4), VECTOR_PRODUCTS_V)],
)
BILINEAR = torch.nn.Bilinear(4, 3, 5).requires_grad_(False)
add_case("vector products bilinear layers", lambda x, y: F.bilinear(x, y, BILINEAR.weight, BILINEAR.bias),
    VECTOR_PRODUCTS_X, torch.rand(2, 4, 3))
add_case("vector products bilinear of vectors without a bias", lambda x, v: F.bilinear(
    x[0, 0], v, torch.arange(48.).view(3, 4, 4) / 9), VECTOR_PRODUCTS_X, VECTOR_PRODUCTS_V)
add_case("vector products bilinear of a flexible batch", lambda x, v: F.bilinear(
    x, x + v, torch.arange(48.).view(3, 4, 4) / 9), VECTOR_PRODUCTS_X, VECTOR_PRODUCTS_V, flexible=[0],
    at=[(torch.rand(7, 4, 4), VECTOR_PRODUCTS_V)])
add_refused("vector products bilinear of a computed weight are refused", "has a computed weight; use torch.einsum",
    lambda x, v: F.bilinear(v, v, x), VECTOR_PRODUCTS_X, VECTOR_PRODUCTS_V)
add_case("defined by torch distances, margins, distributions, places", lambda x, v: (
    torch.dist(x[0, 0], v, 3), torch.dist(x[0, 0], v, 1), torch.special.ndtr(x), torch.linalg.vander(v, N=3),
    torch.argwhere(x[0] > 0.5), F.multi_margin_loss(x[0], torch.tensor([1, 0, 3, 2]))),
    VECTOR_PRODUCTS_X, VECTOR_PRODUCTS_V)

# diagonal, narrow, unbind.
VIEW_READS_X = torch.arange(60.).reshape(3, 4, 5)


add_case("view reads diagonal of ints and bools", lambda x: x.to(torch.int64).diagonal() + (x > 10).diagonal() * 1.0,
    VIEW_READS_X)

# Reductions over all axes behind a transpose.



@case(torch.randn(2, 3), flexible=(0,), at=[[torch.randn(4, 3)]])
@case(torch.randn(2, 3))
def whole_reductions_sums_of_everything_and_of_some_axes(x: torch.Tensor) -> torch.Tensor:
    turned = torch.relu(x.transpose(0, 1))
    return turned + turned.sum() + turned.sum(1, keepdim=True) + turned.max()


# `grid_sample` of images and volumes.
def sampled_at_a_grid(x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    return functional.grid_sample(x, grid, align_corners=False)


add_case("volume sampling images", sampled_at_a_grid, torch.randn(1, 2, 4, 5), torch.rand(1, 3, 2, 2) * 2 - 1,
         frontends=FRONTENDS)
add_refused("volume sampling bicubic is refused with advice",
            "interpolates by mode 'bicubic', which Core ML's resample does not have; use mode='bilinear' or",
            lambda x, grid: functional.grid_sample(x, grid, mode="bicubic", align_corners=False),
            torch.randn(1, 2, 4, 5), torch.rand(1, 3, 2, 2) * 2 - 1, frontends=TRACE_AND_EXPORT)
add_case("volume sampling volumes", sampled_at_a_grid, torch.randn(1, 2, 3, 4, 5), torch.rand(1, 2, 2, 3, 3) * 3 - 1.5,
         frontends=FRONTENDS)


def each_frontend(cases: list[Case]) -> list[object]:
    return [pytest.param(one, frontend, id=f"{one.name}-{frontend}") for one in cases for frontend in one.frontends]


@pytest.mark.sampled(30)
@pytest.mark.parametrize("one, frontend", each_frontend(VALUES))
def test_values_are_those_of_pytorch(one: Case, frontend: str) -> None:
    check(one.function, *one.example, frontend=frontend, **one.options)


@pytest.mark.parametrize("one, frontend", each_frontend(REFUSED))
def test_what_is_refused_says_why(one: Case, frontend: str) -> None:
    with pytest.raises(NotConverted, match=one.match):
        check(one.function, *one.example, frontend=frontend, **one.options)


@pytest.mark.parametrize("function", [lambda x: x.mT @ x, lambda x: x.mH + 1, lambda x: x.adjoint() * 2])
def test_a_name_with_capitals_is_found_before_torch_has_used_it(function, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mT", "mH", "adjoint"):
        monkeypatch.delattr(torch.ops.aten, name, raising=False)
    check(function, torch.randn(2, 3, 4))


@pytest.mark.parametrize("function", [
    lambda x, y: torch.addr(x, y[:, 0], x[0]), lambda x, y: torch.tensordot(x, y, ([0], [0]))])
def test_defined_by_torch_sizes_that_are_only_traced_as_equal_are_refused(function) -> None:
    rows = [ct.RangeDim(1, 64, default=size) for size in (3, 4, 3, 5)]
    with pytest.raises(NotConverted, match="depends on a flexible size in a way that has no lowering"):
        check(function, torch.rand(3, 4), torch.rand(3, 5), inputs=[
            ct.TensorType("x0", (rows[0], rows[1])), ct.TensorType("x1", (rows[2], rows[3]))])


def test_scatter_gather_a_flexible_size_of_two_inputs() -> None:
    """coremltools converts it to a package that it cannot read."""
    rows = ct.RangeDim(2, 64, default=4)
    with pytest.raises(NotConverted, match="have an axis of the same flexible size from different inputs"):
        check(lambda x, places: torch.zeros_like(x).scatter(1, places[:, None].long(), x[:, :1]), torch.rand(4, 3),
              torch.tensor([0, 2, 1, 1], dtype=torch.int32), inputs=[
                  ct.TensorType("x0", (rows, 3)), ct.TensorType("x1", (rows,), dtype=int)])
