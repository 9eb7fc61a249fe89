"""Decoders traced from PyTorch with their cache in states: forms of attention, of masks and of caches."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest

import mil_ane_passes as ane
from mil_ane_passes.utils.errors import InputError

torch = pytest.importorskip("torch")

ROWS, WIDTH, HEADS, VOCABULARY = 16, 16, 2, 20
SIZE = WIDTH // HEADS


class Decoder(torch.nn.Module):
    """Layers of attention whose keys and values are written to states at the end of the mask minus the new tokens."""

    def __init__(self, layers: int, form: str) -> None:
        super().__init__()
        self.form = form
        self.table, self.head = torch.nn.Embedding(VOCABULARY, WIDTH), torch.nn.Linear(WIDTH, VOCABULARY)
        self.projections = torch.nn.ModuleList(torch.nn.Linear(WIDTH, 3 * WIDTH) for _ in range(layers))
        self.seen = torch.ones(1, 1, ROWS, ROWS, dtype=torch.bool).tril()
        self.register_buffer("k", torch.zeros(layers, 1, HEADS, ROWS, SIZE))
        self.register_buffer("v", torch.zeros(layers, 1, HEADS, ROWS, SIZE))

    def forward(self, ids, mask):
        count, end = ids.shape[1], mask.shape[-1]
        x = self.table(ids)
        for layer, projection in enumerate(self.projections):
            q, k, v = (each.view(1, count, HEADS, SIZE).transpose(1, 2) for each in projection(x).split(WIDTH, -1))
            self.k[layer, :, :, end - count:end] = k
            self.v[layer, :, :, end - count:end] = v
            y = self.attend(q, self.k[layer, :, :, :end], self.v[layer, :, :, :end], mask, count, end)
            x = x + y.transpose(1, 2).reshape(1, count, WIDTH)
        return self.head(x)

    def attend(self, q, k, v, mask, count, end):
        far = torch.arange(end - count, end)[:, None] - torch.arange(end)[None] >= 4
        if self.form == "fused":
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        if self.form.startswith("window by where"):
            mask = torch.where(far, torch.tensor(-3e4), mask)
        elif self.form == "window by masked_fill":
            mask = mask.masked_fill(far, -3e4)
        if self.form == "window by where, fused":
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        scores = q @ k.transpose(-1, -2) * SIZE ** -0.5 + mask
        if self.form == "rows of a buffer":
            scores = torch.where(self.seen[:, :, end - count:end, :end], scores, torch.tensor(-3e4))
        if self.form == "sinks":
            sinks = torch.full((1, HEADS, count, 1), 0.5)
            return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ v
        return scores.softmax(-1) @ v


def save_decoder(path, convert, layers=2, form="plain", precision="FLOAT16", held="kv"):
    torch.manual_seed(0)
    module = Decoder(layers, form).eval()
    with torch.no_grad():
        traced = torch.jit.trace(module, (torch.zeros(1, 3, dtype=torch.int32), torch.zeros(1, 1, 3, 5)),
                                 check_trace=False)
    tokens, end = ct.RangeDim(1, ROWS, 1), ct.RangeDim(1, ROWS, 1)
    states = [ct.StateType(ct.TensorType(shape=tuple(module.k.shape), dtype=np.float16), name=name) for name in held]
    model = convert(traced, inputs=[ct.TensorType("ids", (1, tokens), dtype=np.int32),
                                    ct.TensorType("mask", (1, 1, tokens, end), dtype=np.float16)],
                    outputs=[ct.TensorType("logits", dtype=np.float16)], states=states or None, skip_model_load=True,
                    minimum_deployment_target=ct.target.iOS18, compute_precision=getattr(ct.precision, precision))
    model.save(str(path))
    return path


@pytest.mark.sampled(4)
@pytest.mark.parametrize("convert", [ct.convert, ane.convert], ids=["ct", "ane"])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("form", ["plain", "fused", "window by where", "window by where, fused",
                                  "window by masked_fill", "sinks",
                                  "rows of a buffer"])
def test_forms_of_attention(tmp_path, form, layers, convert):
    report = ane.adapt(save_decoder(tmp_path / "source.mlpackage", convert, layers, form), tmp_path / "out")
    assert report.status == "written" and report.kind == "decoder", str(report)


def test_a_cache_that_is_cast_keeps_its_states(tmp_path):
    source = save_decoder(tmp_path / "source.mlpackage", ct.convert, precision="FLOAT32")
    with pytest.raises(InputError, match="or convert the source model at float16, which casts no cache, or"):
        ane.adapt(source, tmp_path / "out")
    assert ane.adapt(source, tmp_path / "out", cache="state").status == "written"


@pytest.mark.parametrize("convert", [ct.convert, ane.convert], ids=["ct", "ane"])
def test_the_values_of_a_stateful_decoder_are_computed_without_its_writes(tmp_path, convert):
    """The sinks of several tokens are a constant once the number of tokens is fixed."""
    source = save_decoder(tmp_path / "source.mlpackage", convert, 1, "sinks")
    report = ane.edit(source, tmp_path / "out.mlpackage", verify=True, fix_shape={"ids": (1, 4)},
                      pad_shape={"mask": (1, 1, (4, 4), (4, ROWS))})
    assert report.status == "written", str(report)


def test_buffers_without_states_are_named_as_in_the_module(tmp_path):
    """`ane.convert` makes constants of the slices of a buffer, too, as rows are written into these first."""
    source = save_decoder(tmp_path / "source.mlpackage", ane.convert, held="")
    with pytest.raises(InputError, match="into the constant buffer 'k', and they are lost") as refusal:
        ane.adapt(source, tmp_path / "out")
    assert ("states=[ct.StateType(wrapped_type=ct.TensorType(shape=(2, 1, 2, 16, 8), dtype=np.float16), "
            "name='k'), ...], one for each cache buffer: k, v (" in str(refusal.value)), str(refusal.value)


def test_a_forgotten_state_is_the_likely_cause_of_other_logits(tmp_path):
    report = ane.adapt(save_decoder(tmp_path / "source.mlpackage", ane.convert, 1, held="k"), tmp_path / "out")
    assert report.status == "rejected" and "into the constant buffer 'v', and they are lost" in report.reason
    assert "besides 'k'" in report.reason and "shape=(1, 1, 2, 16, 8), dtype=np.float16), name='v')]" in report.reason
    after = next(line for line in str(report).splitlines() if line.startswith("after:"))
    assert "0 unsupported on m4" in after and "all ops are supported, the model is too small for the ANE" in after
