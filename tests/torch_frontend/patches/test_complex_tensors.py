"""Complex tensors: arithmetic, shapes, constants, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import view_as_complex as to_complex  # noqa: E402
from torch import view_as_real as to_real  # noqa: E402

import mil_ane_passes as ane  # noqa: E402
from mil_ane_passes.torch_frontend import NotConverted  # noqa: E402
from tests.torch_frontend.checks import check, convert  # noqa: E402

torch.manual_seed(0)
PAIRS = torch.randn(2, 4, 6, 2)


def zero_first(z):
    z = z.clone()
    z[..., 0] = 0
    z *= 2
    z += 1j
    return z


FORMS = {
    "products": lambda v: to_real(to_complex(v) * to_complex(v) + to_complex(v) * to_complex(v).conj()),
    "by 1j": lambda v: to_real(1j * to_complex(v) + 2.0 - v[..., 0] * (2 - 1j)),
    "sums": lambda v: to_real(v[..., 0] - (v[..., 1] - to_complex(v)) + torch.sub(to_complex(v), v[..., 0], alpha=3)),
    "broadcast": lambda v: to_real(to_complex(v)[:, :1] * v[..., 0] + to_complex(v)[0, :, :1] + v[0, :, :, 1]),
    "real divisor": lambda v: to_real(to_complex(v) / 3 + to_complex(v) / (2 + v[..., :1, 0].abs())),
    "quotients": lambda v: to_real(to_complex(v) / to_complex(v.flip(0)) + 1 / to_complex(v)),
    "powers": lambda v: torch.stack([to_real(to_complex(v) ** power) for power in (1, 2, 3, -1)]),
    "polar form": lambda v: (to_complex(v).abs(), to_complex(v).angle(), v.angle(), to_real(to_complex(v).sgn())),
    "from polar form": lambda v: to_real(torch.polar(v[..., 0].abs(), v[..., 1])),
    "exp and log": lambda v: (to_real(torch.exp(to_complex(v))), to_real(torch.log(to_complex(v)))),
    "exp of an angle": lambda v: to_real(torch.exp(1j * v[..., 0])),
    "torch.complex": lambda v: to_real(torch.complex(v[..., 0], v[:, :1, :, 1])),
    "slices": lambda v: to_real(to_complex(v)[..., 1:][:, 1:3].select(1, 0)),
    "indices": lambda v: to_real(to_complex(v)[:, torch.tensor([2, 0])].index_select(2, torch.tensor([5, 1]))),
    "layout": lambda v: to_real(to_complex(v).transpose(1, 2).permute(2, 0, 1).unsqueeze(0).squeeze(0).reshape(6, 8)),
    "cat": lambda v: to_real(torch.cat([to_complex(v), torch.ones(2, 1, 6), v[:, :1, :, 0]], 1)),
    "stack": lambda v: to_real(torch.stack([to_complex(v), -to_complex(v)], 1)),
    "splits": lambda v: to_real(to_complex(v).split([1, 3], 1)[1] * to_complex(v).unbind(1)[1][:, None]),
    "means": lambda v: (to_real(to_complex(v).mean(1)), to_real(to_complex(v).sum((0, 2))),
                        to_real(to_complex(v).sum())),
    "where": lambda v: to_real(torch.where(v[..., 0] > 0, to_complex(v), 0.0).masked_fill(v[..., 1] > 0, 1.0)),
    "rolled": lambda v: to_real(torch.roll(to_complex(v), 1, 1).flip(0).expand(3, 2, 4, 6)),
    "written": lambda v: to_real(zero_first(to_complex(v))),
    "padded": lambda v: to_real(torch.nn.functional.pad(to_complex(v), (1, 2))),
    "converted": lambda v: to_real(v[..., 0].to(torch.complex64) + to_complex(v)),
    "filled": lambda v: to_real(torch.cat([torch.full_like(to_complex(v), 2.0), torch.zeros_like(to_complex(v))])),
    "matmul": lambda v: to_real(to_complex(v) @ to_complex(v).transpose(1, 2)),
    "einsum": lambda v: to_real(torch.einsum("bij,bkj->bik", to_complex(v), to_complex(v).conj())),
    "einsum of three": lambda v: to_real(torch.einsum("bij, bkj, bij -> bk", to_complex(v), to_complex(v).conj(),
                                                      v[..., 0].to(torch.cfloat))),
    "einsum of four": lambda v: to_real(torch.einsum("bij,bkj,j,i->ki", to_complex(v), to_complex(v),
                                                     to_complex(v)[0, 0], to_complex(v)[1, :, 0])),
    "moved": lambda v: to_real(to_complex(v).to(v.device) * to_complex(v).cfloat()),
    "zeros": lambda v: to_real(torch.zeros(2, 4, 6, dtype=torch.complex64) + to_complex(v)),
    "ones and more": lambda v: to_real(torch.ones_like(v[..., 0], dtype=torch.complex64) * to_complex(v)
                                       + v.new_zeros(6, dtype=torch.complex64)),
    "equal": lambda v: to_complex(v) == to_complex(torch.cat([v[:1], v[:1]])),
    "second names": lambda v: to_real(torch.multiply(torch.concatenate([to_complex(v)] * 2), to_complex(v)[:1])),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("form", FORMS)
def test_values(form):
    check(FORMS[form], PAIRS, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_values_of_exported_programs():
    def model(v):
        results = [form(v) for form in FORMS.values()]
        return tuple(each for result in results for each in (result if isinstance(result, tuple) else [result]))

    check(model, PAIRS, frontend="export", rtol=1e-3, atol=1e-4)


def test_an_einsum_of_three_with_an_ellipsis_is_refused():
    with pytest.raises(NotConverted, match="more than two complex operands and an equation with an ellipsis"):
        convert(lambda v: to_real(torch.einsum("...j,...j,...j->...", *[to_complex(v)] * 3)), [PAIRS])


@pytest.mark.parametrize("z", [0, 1, -1, 1j, -1j, -2 - 1e-3j, 3e4 - 3e4j])
def test_sizes_and_angles_at_the_axes_and_beyond_the_squares_of_fp16(z):
    mlmodel = convert(lambda v: (to_complex(v).abs(), to_complex(v).angle()), [PAIRS], precision=None)
    feed = np.broadcast_to(np.array([np.real(z), np.imag(z)], np.float32), PAIRS.shape)
    size, angle = ane.run(mlmodel, {"x0": feed}, precision="float16").values()
    expected = math.atan2(np.imag(z), np.real(z))
    np.testing.assert_allclose(size, abs(z), rtol=2e-3)
    np.testing.assert_allclose(angle, expected, atol=4e-3)


class Rotary(torch.nn.Module):
    """Rotary embedding as Llama has it: a complex buffer, queries viewed as complex numbers."""

    def __init__(self):
        super().__init__()
        angles = torch.outer(torch.arange(4.0), 10.0 ** -torch.arange(3.0))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))

    def forward(self, queries):
        z = to_complex(queries.float().reshape(*queries.shape[:-1], -1, 2))
        return to_real(z * self.turns[:, None]).flatten(3).type_as(queries)


@pytest.mark.parametrize("frontend", ["trace", "export"])
def test_rotary_embedding(frontend):
    check(Rotary(), torch.randn(2, 4, 2, 6), frontend=frontend)


@pytest.mark.parametrize("frontend", ["trace", "export"])
def test_a_flexible_size(frontend):
    turns = torch.polar(torch.ones(6), torch.arange(6.0))
    check(lambda v: to_real(to_complex(v) * turns + 1).flatten(2), PAIRS, frontend=frontend, flexible=[1],
          at=[[torch.randn(2, 7, 6, 2)]], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("model", "words"), [
    (lambda v: to_complex(v), "op 'view_as_complex' .*returns complex numbers.*view_as_real"),
    (lambda v: (v, to_complex(v) * 2), "op 'mul' .*returns complex numbers"),
    (lambda v: to_real(to_complex(v).cumprod(0)), "op 'cumprod' .*has no lowering for complex numbers; compute with"),
    (lambda v: to_real(to_complex(v) ** 0.5), "op 'pow' .*power other than an integer.*polar"),
])
@pytest.mark.parametrize("frontend", ["trace", "export"])
def test_what_is_refused_names_op_line_and_advice(model, words, frontend):
    with pytest.raises(NotConverted, match=words):
        convert(model, [PAIRS], frontend)


def test_a_complex_input_is_refused():
    with pytest.raises(NotConverted, match=r"input .* is complex.*view_as_complex in the model"):
        convert(lambda z: z.abs(), [to_complex(PAIRS)])
