"""Helpers for recurrent layers: one layer after the other, and the positions of packed sequences."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from coremltools.converters.mil.frontend.torch import ops
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var, types

from .errors import NotConverted
from .lowering import cast_to, make_prefix, to_python, to_tensor

__all__ = ["TEMPORARY_NAME", "compute_packed_rows", "gather_rows", "iterate_equal_lengths", "lower_recurrent_layer"]

TEMPORARY_NAME = re.compile(r".*_recurrent\d+_out\d+")
"Names of the results of coremltools' lowerings, before what they append to the name that they are given."


def lower_recurrent_layer(context: Any, node: Any, kind: str, x: Var, states: Sequence[Var], given: Any) -> list[Var]:
    """Lower `lstm`, `gru`, `rnn_tanh` or `rnn_relu` of steps × samples × features; return (out, last states).

    coremltools' own lowerings of TorchScript lower `lstm` and `gru`, on arguments under temporary names. A layer of
    fp16, which they and older opsets reject, is computed in fp32.
    """
    if x.dtype == types.fp16:
        widened = SimpleNamespace(**{**vars(given), "params": [
            mb.const(val=each.val.astype(np.float32)) for each in given.params]})
        results = lower_recurrent_layer(context, node, kind, cast_to(x, types.fp32),
                                        [cast_to(each, types.fp32) for each in states], widened)
        return [cast_to(each, types.fp16) for each in results]
    flags = {name: to_python(getattr(given, name), node, name)
             for name in ("has_biases", "num_layers", "dropout", "train", "bidirectional", "batch_first")}
    if flags["train"] and flags["dropout"]:
        raise NotConverted.at(node, "dropout is random in training mode", "call .eval() first")
    cells = flags["num_layers"] * (2 if flags["bidirectional"] else 1)
    if len(given.params) != cells * (4 if flags["has_biases"] else 2):
        raise NotConverted.at(node, "projections (proj_size) are not supported")
    if kind.startswith("rnn"):
        return _lower_simple_rnn(x, states[0], given.params, flags, kind.removeprefix("rnn_"))
    prefix = make_prefix(context, f"{node.name}_recurrent")
    values = [x, list(states) if kind == "lstm" else states[0], list(given.params),
              *(mb.const(val=flags[name]) for name in ("has_biases", "num_layers")), None,
              *(mb.const(val=flags[name]) for name in ("train", "bidirectional", "batch_first"))]
    for place, value in enumerate(values):
        context.add(value, torch_name=f"{prefix}{place}")
    call = SimpleNamespace(name=f"{prefix}out", kind=kind, inputs=[f"{prefix}{place}" for place in range(9)],
                           outputs=[f"{prefix}out{which}" for which in range(1 + len(states))], kwinputs=None)
    getattr(ops, kind)(context, call)
    return [context[name] for name in call.outputs]


def _lower_simple_rnn(x: Var, state: Var, params: Sequence[Var], flags: dict[str, Any], activation: str) -> list[Var]:
    """Lower `nn.RNN`: one pass for each direction and layer."""
    per_cell = 4 if flags["has_biases"] else 2
    directions = 2 if flags["bidirectional"] else 1
    if flags["batch_first"]:
        x = mb.transpose(x=x, perm=[1, 0, 2])
    left = []
    for layer in range(flags["num_layers"]):
        outs = []
        for direction in range(directions):
            cell = layer * directions + direction
            weight, hidden, *biases = params[cell * per_cell:(cell + 1) * per_cell]
            first = mb.slice_by_index(x=state, begin=[cell, 0, 0], end=[cell + 1, 0, 0], begin_mask=[False, True, True],
                                      end_mask=[False, True, True], squeeze_mask=[True, False, False])
            out, last = mb.rnn(x=mb.reverse(x=x, axes=[0]) if direction else x, initial_h=first, weight_ih=weight.val,
                               weight_hh=hidden.val, output_sequence=True, activation=activation,
                               bias=biases[0].val + biases[1].val if biases else None)
            outs.append(mb.reverse(x=out, axes=[0]) if direction else out)
            left.append(last)
        x = mb.concat(values=outs, axis=2) if directions == 2 else outs[0]
    if flags["batch_first"]:
        x = mb.transpose(x=x, perm=[1, 0, 2])
    return [x, mb.stack(values=left, axis=0)]


def iterate_equal_lengths(sizes: np.ndarray[Any, Any]) -> Iterator[tuple[int, int, int]]:
    """Yield (length, first, last + 1) of each run of samples of equal length.

    `sizes` is the number of samples in each step.
    """
    lengths = np.array([np.sum(sizes > which) for which in range(sizes[0])])
    first = 0
    for length, run_of in itertools.groupby(lengths):
        last = first + len(list(run_of))
        yield int(length), first, last
        first = last


def compute_packed_rows(sizes: np.ndarray[Any, Any], steps: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Compute the row of each step × sample in packed data, and the lengths of the samples.

    Steps after the end of a sample have the row after the last one.
    """
    ends = np.cumsum([0, *sizes])
    lengths = np.array([np.sum(sizes > which) for which in range(sizes[0])])
    rows = np.full((steps, len(lengths)), ends[-1])
    for which, length in enumerate(lengths):
        rows[:length, which] = ends[:length] + which
    return rows, lengths


def gather_rows(x: Var, rows: np.ndarray[Any, Any]) -> Var:
    """Gather constant rows of `x`; return `x` itself where they are all rows in order."""
    if np.array_equal(rows, np.arange(x.shape[0])):
        return x
    return mb.gather(x=x, indices=to_tensor(rows), axis=0)
