"""pad in every mode, with negative widths, of bools."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")
from torch.nn.functional import pad  # noqa: E402

from mil_ane_passes import torch_frontend  # noqa: E402
from tests.torch_frontend.checks import check, convert  # noqa: E402

X = torch.arange(30.0).reshape(2, 3, 5)


@pytest.mark.parametrize("frontend", ["trace", "script", "export"])
@pytest.mark.parametrize("widths", [(2, 1), (0, 5), (-1, 2)])
def test_circular(frontend, widths):
    def model(x: torch.Tensor) -> torch.Tensor:
        return pad(x, widths, mode="circular")

    def scripted(x: torch.Tensor) -> torch.Tensor:
        return pad(x, [2, 1], mode="circular")

    check(scripted if frontend == "script" else model, X, frontend=frontend)


def test_a_convolution_with_circular_padding():
    torch.manual_seed(0)
    check(torch.nn.Conv1d(3, 4, 3, padding=2, padding_mode="circular"), X, rtol=1e-3)


@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize("widths", [(-1, 2), (1, -2, -1, 1), (-1, -1), (0, 0, 0, 0, -1, 1)])
def test_negative_widths_crop(frontend, widths):
    check(lambda x: pad(x, widths, value=2.5), X, frontend=frontend)


@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize("mode", ["constant", "reflect", "replicate"])
def test_widths_of_a_buffer(mode, frontend):
    class Padded(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("width", torch.tensor(2), persistent=False)

        def forward(self, x):
            return pad(x, (self.width, 1), mode=mode)

    check(Padded(), X, frontend=frontend)


@pytest.mark.parametrize("mode", ["constant", "reflect", "replicate"])
def test_what_the_host_does(mode):
    check(lambda x: pad(x, (2, 1), mode=mode), X)


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
def test_modes_on_other_axes_than_the_last_two_need_no_pad(mode):
    mlmodel = check(lambda x: pad(x, (1, 2, 0, 1, 2, 0), mode=mode), torch.rand(1, 1, 3, 4, 5), flexible=(2,),
                    at=[(torch.rand(1, 1, 4, 4, 5),)])
    assert not mlmodel._mil_program.functions["main"].find_ops(op_type="pad")


COMPUTED = {
    "to a multiple": lambda x: pad(x, (0, 0, 0, -x.shape[1] % 4)),
    "in front": lambda x: pad(x, (1, 2, x.shape[1] % 3, 1), value=-2.5),
    "to a length": lambda x: pad(x, (0, 0, 0, 6 - x.shape[1])),
    "to a length, from the front": lambda x: pad(x, (0, 0, 6 - x.shape[1], 0)),
    "and a crop of another axis": lambda x: pad(x, (-1, 2, 0, x.shape[1] % 2)),
    "of bools": lambda x: pad(x > 0, (0, 0, x.shape[1] % 3, x.shape[1] % 2), value=True),
    "of integers": lambda x: pad(x.int(), (0, 0, 0, x.shape[1] % 3), value=7),
}


SELECTED = {
    "after": lambda x, mode: pad(x, (0, -x.shape[2] % 4), mode=mode),
    "in front": lambda x, mode: pad(x, (x.shape[2] % 3, 2), mode=mode),
    "crops": lambda x, mode: pad(x, (2 - x.shape[2] % 4, -1), mode=mode),
    "rows and columns": lambda x, mode: pad(x[None], (1, 0, 2, -x.shape[2] % 4), mode=mode),
    "columns of a constant": lambda x, mode: pad(torch.arange(12.).view(1, 2, 6), (0, x.shape[2] % 5), mode=mode) * x[
        :, :1, :1],
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", SELECTED)
@pytest.mark.parametrize(("mode", "frontend"), [
    *itertools.product(["reflect", "replicate"], ["trace", "export"]), ("circular", "trace")])
def test_widths_that_the_model_computes_in_other_modes(case, mode, frontend):
    """torch.export fixes the size of an axis that is padded by itself."""
    at = [(torch.randn(2, 5, size),) for size in (5, 6, 8, 9)]
    check(lambda x: SELECTED[case](x, mode), torch.randn(2, 5, 7), frontend=frontend, flexible=(2,), lowest=5, at=at)


@pytest.mark.parametrize("case", COMPUTED)
@pytest.mark.parametrize("frontend", ["trace", "export"])
def test_widths_that_the_model_computes(case, frontend):
    """Also 0, for which no tensor may be without elements."""
    at = [(torch.randn(2, size, 5),) for size in (3, 4, 6, 8, 9)]
    mlmodel = check(COMPUTED[case], torch.randn(2, 7, 5), frontend=frontend, flexible=(1,), at=at)
    assert not any(0 in var.shape for op in mlmodel._mil_program.functions["main"].operations for var in op.outputs)


def test_refusals_of_computed_widths():
    with pytest.raises(torch_frontend.NotConverted, match="pads by computed widths and crops by 1; slice first"):
        convert(lambda x: pad(x, (-1, x.shape[2] % 2)), (X,), flexible=(2,))


def test_refusals():
    with pytest.raises(torch_frontend.NotConverted, match=r"widths \[-1, 1\] in mode 'replicate'; slice first"):
        convert(lambda x: pad(x, (-1, 1), mode="replicate"), (X,))


@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize("widths", [(3, 1), (1, 3), (3, 3), (0, 3)])
def test_circular_widths_of_the_size_of_the_tensor(widths, frontend):
    """The tensor stands twice in the concat, which is no reflection; a user's concat may be like that, too."""
    check(lambda x: (pad(x, widths, mode="circular"), torch.cat([x, x, x[..., :1]], -1)), torch.randn(1, 2, 3),
          frontend=frontend)


def test_a_concat_of_a_reflection_is_one():
    mlmodel = check(lambda x: torch.cat([x[..., 1:2], x, x[..., -2:-1]], -1), torch.randn(1, 2, 5))
    assert len(mlmodel._mil_program.functions["main"].find_ops(op_type="pad")) == 1
