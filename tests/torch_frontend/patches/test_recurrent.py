"""Recurrent layers: exported, bidirectional, of packed sequences."""

from __future__ import annotations

from typing import Any

import coremltools as ct
import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import mil_ane_passes as ane
from mil_ane_passes.torch_frontend import NotConverted

from ..checks import check

X = torch.rand(3, 4, 6)
LAYERS = [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN]


def flat(results: Any) -> tuple[torch.Tensor, ...]:
    out, left = results
    return (out, *left) if isinstance(left, tuple) else (out, left)


def layer(kind: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    return kind(6, 5, **options).eval().requires_grad_(False)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_directions_and_layers(kind: Any, both: bool, frontend: str) -> None:
    net = layer(kind, num_layers=1 + both, bidirectional=both, batch_first=both, bias=both)
    check(lambda x: flat(net(x)), X, frontend=frontend)


@pytest.mark.parametrize("kind", LAYERS)
def test_given_states(kind: Any) -> None:
    net = layer(kind, num_layers=2, nonlinearity="relu") if kind is torch.nn.RNN else layer(kind, num_layers=2)
    check(lambda x, h: flat(net(x, (h, h * 2) if kind is torch.nn.LSTM else h)), X, torch.rand(2, 4, 5),
          frontend="export")


@pytest.mark.parametrize("kind", LAYERS)
def test_an_exported_layer_is_saved(kind: Any, tmp_path: Any) -> None:
    program = torch.export.export(kind(6, 4, batch_first=True).eval(), (X,))
    ane.convert(program, skip_model_load=True).save(str(tmp_path / "layer.mlpackage"))
    assert ane.load(tmp_path / "layer.mlpackage").program.functions


def test_flexible_steps() -> None:
    net = layer(torch.nn.LSTM, bidirectional=True)
    check(lambda x: flat(net(x)), X, flexible=[0], at=[(torch.rand(7, 4, 6),)])


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("lengths", "ordered"), [([4, 2, 2], True), ([1, 4, 3], False), ([4, 4, 4], True)],
                         ids=str)
@pytest.mark.parametrize("kind", LAYERS)
def test_packed_sequences_of_known_lengths(kind: Any, lengths: list[int], ordered: bool) -> None:
    net = layer(kind, num_layers=2, bidirectional=ordered)

    def packed(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        packed = pack_padded_sequence(x, torch.tensor(lengths), batch_first=True, enforce_sorted=ordered)
        out, *left = flat(net(packed))
        padded, found = pad_packed_sequence(out, batch_first=ordered, padding_value=0.5, total_length=5)
        return (padded, found, *left)

    check(packed, X)


@pytest.mark.parametrize(("rows", "advice"), [
    (len(X), "make them constants"), (1, "leave the packing out, which one sequence of full length does not need")])
def test_lengths_that_the_model_computes_are_refused(rows: int, advice: str) -> None:
    net = layer(torch.nn.LSTM)
    with pytest.raises(NotConverted, match=f"lengths of the sequences are computed by the model; {advice}"):
        check(lambda x, lengths: net(pack_padded_sequence(x, lengths, batch_first=True))[1][0], X[:rows],
              torch.tensor([4, 3, 2])[:rows])


def test_projections_are_refused() -> None:
    net = layer(torch.nn.LSTM, proj_size=3)
    with pytest.raises(NotConverted, match="projections"):
        check(lambda x: net(x)[0], X)


@pytest.mark.parametrize("cell", [torch.nn.LSTMCell(4, 5), torch.nn.GRUCell(4, 5)])
def test_a_traced_cell_writes_to_its_chunks(cell: torch.nn.Module) -> None:
    def states(x: torch.Tensor) -> torch.Tensor:
        found = cell.requires_grad_(False)(x)
        return found[1] if isinstance(found, tuple) else found

    check(states, torch.randn(3, 4))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize("kind", [*LAYERS, torch.nn.LSTMCell, torch.nn.GRUCell])
def test_layers_of_float16(kind: Any, frontend: str) -> None:
    cell = kind.__name__.endswith("Cell")
    net = layer(kind, bias=not cell).half()

    def compute(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = net((x[0] if cell else x).half())
        flattened = flat(found) if isinstance(found, tuple) and not cell else found
        return tuple(each.float() for each in (flattened if isinstance(flattened, tuple) else (flattened,)))

    check(compute, X, frontend=frontend, rtol=5e-3, atol=5e-3, target=ct.target.iOS15)
