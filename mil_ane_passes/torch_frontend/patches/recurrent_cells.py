"""`LSTMCell`, `GRUCell` and `RNNCell`: one step, in torch's order of gates, as products and elementwise ops."""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var, types

from ..contract import Patch
from ..lowering import add_result, add_results, bind_arguments

PATCH = Patch(code="TORCH166",
              title="`LSTMCell`, `GRUCell` and `RNNCell` are not implemented", upstream=("none known",))
_CELL_SIGNATURE = "input hx w_ih w_hh b_ih=None b_hh=None"



@PATCH.op("lstm_cell")
def lstm_cell(context: Any, node: Any) -> None:
    """Lower lstm_cell(input, [h, c], w_ih, w_hh, b_ih, b_hh) -> h, c; the gates are input, forget, cell, output."""
    inputs = bind_arguments(context, node, _CELL_SIGNATURE)
    hidden, cell = inputs.hx
    gates = mb.add(
        x=_multiply_weights(inputs.input, inputs.w_ih, inputs.b_ih),
        y=_multiply_weights(hidden, inputs.w_hh, inputs.b_hh),
    )
    enter, forget, new, leave = mb.split(x=gates, num_splits=4, axis=-1)
    kept = mb.mul(x=mb.sigmoid(x=forget), y=cell)
    cell = mb.add(x=kept, y=mb.mul(x=mb.sigmoid(x=enter), y=mb.tanh(x=new)))
    add_results(context, node, [mb.mul(x=mb.sigmoid(x=leave), y=mb.tanh(x=cell)), cell])


@PATCH.op("gru_cell")
def gru_cell(context: Any, node: Any) -> None:
    """Lower gru_cell(input, h, w_ih, w_hh, b_ih, b_hh); the gates are reset, update, new."""
    inputs = bind_arguments(context, node, _CELL_SIGNATURE)
    of_input = mb.split(x=_multiply_weights(inputs.input, inputs.w_ih, inputs.b_ih), num_splits=3, axis=-1)
    of_hidden = mb.split(x=_multiply_weights(inputs.hx, inputs.w_hh, inputs.b_hh), num_splits=3, axis=-1)
    reset, update = (mb.sigmoid(x=mb.add(x=of_input[place], y=of_hidden[place])) for place in (0, 1))
    new = mb.tanh(x=mb.add(x=of_input[2], y=mb.mul(x=reset, y=of_hidden[2])))
    add_result(context, node, mb.add(x=new, y=mb.mul(x=update, y=mb.sub(x=inputs.hx, y=new)), name=node.name))


@PATCH.op("rnn_tanh_cell", "rnn_relu_cell")
def rnn_cell(context: Any, node: Any) -> None:
    """Lower rnn_tanh_cell(input, h, w_ih, w_hh, b_ih, b_hh)."""
    inputs = bind_arguments(context, node, _CELL_SIGNATURE)
    total = mb.add(
        x=_multiply_weights(inputs.input, inputs.w_ih, inputs.b_ih),
        y=_multiply_weights(inputs.hx, inputs.w_hh, inputs.b_hh),
    )
    activation = mb.tanh if node.kind == "rnn_tanh_cell" else mb.relu
    add_result(context, node, activation(x=total, name=node.name))


def _multiply_weights(x: Var, weight: Var, bias: Var | None) -> Var:
    """Multiply x of [batch, features] or [features] by the weight's transpose, and add the bias."""
    rows = x if x.rank == 2 else mb.expand_dims(x=x, axes=[0])
    if bias is None:
        bias = mb.const(val=np.zeros(int(weight.shape[0]), types.nptype_from_builtin(weight.dtype)))
    product = mb.linear(x=rows, weight=weight, bias=bias)
    return product if x.rank == 2 else mb.squeeze(x=product, axes=[0])
