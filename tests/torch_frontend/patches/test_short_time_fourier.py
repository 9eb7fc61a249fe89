"""stft and istft, and small models around them."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest

torch = pytest.importorskip("torch")
import mil_ane_passes as ane  # noqa: E402
from mil_ane_passes.torch_frontend import NotConverted  # noqa: E402
from tests.torch_frontend.checks import check, convert  # noqa: E402

torch.manual_seed(0)
SIGNAL = torch.randn(2, 64)
WINDOW = torch.hann_window(16)
SHORT = torch.hamming_window(12)
CLOSE = {"rtol": 1e-3, "atol": 1e-4}

FORWARD = {
    "plain": dict(n_fft=16, hop_length=4, window=WINDOW),
    "not centered": dict(n_fft=16, hop_length=4, window=WINDOW, center=False),
    "a hop that divides nothing": dict(n_fft=16, hop_length=5, win_length=12, window=SHORT, normalized=True),
    "a hop that leaves samples": dict(n_fft=16, hop_length=8),
    "both sides": dict(n_fft=16, hop_length=4, onesided=False),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize("form", FORWARD)
def test_forward(form, frontend):
    check(lambda x: torch.view_as_real(torch.stft(x, return_complex=True, **FORWARD[form])), SIGNAL[:, :62],
          frontend=frontend, **CLOSE)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize("options", [
    dict(n_fft=16, hop_length=4, window=WINDOW),
    dict(n_fft=16, hop_length=4, window=WINDOW, length=50),
    dict(n_fft=16, hop_length=4, window=WINDOW, length=70),
    dict(n_fft=16, hop_length=5, window=WINDOW, length=60),
    dict(n_fft=16, hop_length=8, win_length=12, window=SHORT, normalized=True),
    dict(n_fft=16, hop_length=4, center=False),
    dict(n_fft=16, hop_length=4, window=WINDOW, onesided=False),
], ids=range(7))
def test_back(options, frontend):
    forward = {name: value for name, value in options.items() if name != "length"}

    def model(x):
        spectrum = torch.stft(x, return_complex=True, **forward)
        return torch.istft(spectrum * (2 - 1j), **options)

    check(model, SIGNAL, frontend=frontend, **CLOSE)
    check(model, SIGNAL[0], frontend=frontend, **CLOSE)


@pytest.mark.parametrize("hop", [4, 5])
@pytest.mark.parametrize("frontend", ["trace", "export"])
def test_back_with_a_flexible_number_of_frames(hop, frontend):
    check(lambda s: torch.istft(torch.view_as_complex(s), 16, hop, window=WINDOW), torch.randn(2, 9, 12, 2),
          frontend=frontend, flexible=[2], lowest=6, at=[[torch.randn(2, 9, 7, 2)]], **CLOSE)


def test_there_and_back_at_a_flexible_length():
    def model(x):
        return torch.istft(torch.stft(x, 16, 4, window=WINDOW, return_complex=True), 16, 4, window=WINDOW)

    check(model, SIGNAL, flexible=[1], lowest=32, at=[[torch.randn(2, length)] for length in (40, 56)], **CLOSE)


@pytest.mark.parametrize("length", ["computed", 50])
def test_back_to_a_length_from_a_flexible_number_of_frames(length):
    def model(x):
        spectrum = torch.stft(x, 16, 4, window=WINDOW, return_complex=True)
        return torch.istft(spectrum, 16, 4, window=WINDOW, length=x.shape[-1] if length == "computed" else length)

    check(model, SIGNAL, flexible=[1], lowest=32, at=[[torch.randn(2, length)] for length in (41, 47, 56)], **CLOSE)


def test_no_op_is_a_conv_with_a_stride_where_the_hop_divides_the_length():
    def model(x):
        return torch.istft(torch.stft(x, 16, 4, window=WINDOW, return_complex=True), 16, 4, window=WINDOW)

    mlmodel = convert(model, [SIGNAL])
    convs = [op for op in mlmodel._mil_program.functions["main"].operations if "conv" in op.op_type]
    assert [(op.op_type, op.weight.shape[2:]) for op in convs] == [("conv", (4,)), ("conv", (4,))]
    assert all(op.strides is None or list(op.strides.val) == [1] for op in convs)


def test_windows_that_add_up_to_nothing_are_refused():
    def model(s):
        return torch.view_as_complex(s)

    class Head(torch.nn.Module):
        def forward(self, s):
            return torch.istft(model(s), 16, 16, window=torch.ones(16))

    spectrum = torch.randn(2, 9, 7, 2)
    traced = torch.jit.trace(Head().eval(), spectrum, check_trace=False)
    graph = traced.graph  # torch refuses such a window when it runs, so the constant is exchanged afterwards
    ones = next(node for node in graph.nodes() if node.kind() == "aten::ones")
    twin = graph.create("aten::zeros", list(ones.inputs()), 1).insertBefore(ones)
    ones.output().replaceAllUsesWith(twin.output())
    with pytest.raises(NotConverted, match=r"op 'istft'.*squares add up to 0"):
        ane.convert(traced, inputs=[ct.TensorType(name="x", shape=spectrum.shape)], skip_model_load=True,
                    minimum_deployment_target=ct.target.iOS16)


class Vocoder(torch.nn.Module):
    """A head as Vocos has it: logarithms of sizes and angles, to a signal."""

    def __init__(self):
        super().__init__()
        self.out = torch.nn.Linear(8, 18)
        self.register_buffer("window", torch.hann_window(16))

    def forward(self, x):
        size, angle = self.out(x).transpose(1, 2).chunk(2, dim=1)
        size = torch.exp(size).clip(max=1e2)
        return torch.istft(size * (torch.cos(angle) + 1j * torch.sin(angle)), 16, 4, 16, self.window, center=True)


class Separator(torch.nn.Module):
    """A hybrid separator: the parts of the spectrum are channels of convolutions, and the result a mask of it."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Conv2d(4, 8, 3, padding=1)
        self.last = torch.nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x):
        batch, channels, length = x.shape
        z = torch.stft(x.reshape(-1, length), 32, 8, window=torch.hann_window(32), normalized=True, center=True,
                       return_complex=True, pad_mode="reflect")[..., :-1, :]
        z = z.view(batch, channels, *z.shape[1:])
        parts = torch.view_as_real(z).permute(0, 1, 4, 2, 3).reshape(batch, channels * 2, *z.shape[2:])
        parts = self.last(torch.relu(self.first(parts))).view(batch, channels, 2, *z.shape[2:])
        masked = torch.view_as_complex(parts.permute(0, 1, 3, 4, 2).contiguous())
        masked = torch.nn.functional.pad(masked, (0, 0, 0, 1))
        return torch.istft(masked.reshape(-1, *masked.shape[2:]), 32, 8, window=torch.hann_window(32), normalized=True,
                           length=length, center=True).view(batch, channels, length)


class Pitch(torch.nn.Module):
    """The autocorrelation of frames, which a pitch estimator reads."""

    def forward(self, x):
        spectrum = torch.fft.rfft(x, n=64)
        return torch.fft.irfft(spectrum * spectrum.conj(), n=64)[..., :20] / x.square().sum(-1, keepdim=True)


MODELS = {"vocoder": (Vocoder, (1, 12, 8)), "separator": (Separator, (1, 2, 128)), "pitch": (Pitch, (3, 32))}


@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize("name", MODELS)
def test_small_models(name, frontend):
    factory, shape = MODELS[name]
    torch.manual_seed(1)
    check(factory().eval(), torch.randn(shape), frontend=frontend, **CLOSE)


@pytest.mark.parametrize("name", MODELS)
def test_small_models_in_fp16(name):
    factory, shape = MODELS[name]
    torch.manual_seed(1)
    model, x = factory().eval(), torch.randn(shape)
    mlmodel = ane.convert(torch.jit.trace(model, x), inputs=[ct.TensorType(name="x", shape=shape)], check=True,
                          minimum_deployment_target=ct.target.iOS16, skip_model_load=True)
    (found,) = ane.run(mlmodel, {"x": x.numpy()}, precision="float16").values()
    expected = model(x).detach().numpy()
    assert np.abs(found - expected).max() < 1e-2 * np.abs(expected).max()
