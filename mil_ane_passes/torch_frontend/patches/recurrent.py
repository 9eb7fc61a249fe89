"""`nn.LSTM`, `nn.GRU` and `nn.RNN`: exported, bidirectional, and of packed sequences.

coremltools supports only the ops of TorchScript, no bidirectional `nn.RNN`, and treats a packed sequence as a padded
one: the last state of a short sequence is then that of its padding, silently. Here the lengths have to be constants.
Packed data has torch's layout (the first steps of all samples, then the second steps, ...), selected by constant rows;
sequences of equal length run together. coremltools lowers a GRU to a loop, with which it cannot save an exported model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from coremltools.converters.mil.frontend.torch.utils import TorchFrontend
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Program, Var
from coremltools.converters.mil.mil.scope import ScopeSource

from ...ir.query import iterate_ops
from ...passes.severity import Severity
from ..contract import Patch, describe_fault
from ..errors import NotConverted
from ..lowering import add_results, bind_arguments, to_python, to_tensor
from ..probes import find_fault
from ..recurrent_layers import (
    TEMPORARY_NAME,
    compute_packed_rows,
    gather_rows,
    iterate_equal_lengths,
    lower_recurrent_layer,
)

PATCH = Patch(code="TORCH131", severity=Severity.WRONG,
              title="exported recurrent layers are not implemented; packed sequences silently include their padding",
              upstream=("none known",))


@PATCH.probe
def probe() -> str | None:
    """Test the last state of a packed sequence that is shorter than its padding, and the table of a loop's handles."""
    import torch

    with torch.random.fork_rng(devices=[]):
        layer = torch.nn.LSTM(1, 1, batch_first=True)
    for weight in layer.parameters():
        weight.requires_grad_(False).fill_(0.5)

    def run(x: Any) -> Any:
        packed = torch.nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 1]), batch_first=True)
        return layer(packed)[1][0]

    return find_fault(run, torch.ones(2, 3, 1)) or _find_unsaved_loop()


def _find_unsaved_loop() -> str | None:
    """Return why coremltools cannot make the table of debug handles of a loop, or None."""
    def repeat(x: Any) -> Any:
        return mb.while_loop(_cond=lambda y: mb.less(x=mb.squeeze(x=y), y=1.0), _body=lambda y: mb.add(x=y, y=1.0),
                             loop_vars=(x,))

    program = mb.program(input_specs=[mb.TensorSpec((1,))])(repeat)
    program._add_essential_scope_source([ScopeSource.EXIR_DEBUG_HANDLE])
    try:
        program.construct_debug_handle_to_ops_mapping()
    except Exception as error:
        return f"fails: {describe_fault(error)}"
    return None


@PATCH.replace_function("coremltools.converters.mil.mil.program", "Program._add_essential_scope_source")
def add_scope_sources(host: Callable[..., Any], program: Program, sources: Any) -> None:
    """Leave out the debug handles of a program with loops, of which coremltools' `save` cannot make a table."""
    if isinstance(sources, list) and any(op.blocks for _, op in iterate_ops(program)):
        sources = [source for source in sources if source is not ScopeSource.EXIR_DEBUG_HANDLE]
    host(program, sources)


_LAYER_KINDS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_SHARED_PARAMETERS = "params has_biases num_layers dropout train bidirectional"


@PATCH.op(*(kind + form for kind in _LAYER_KINDS for form in ("", ".input", ".data")))
def lower_recurrent(context: Any, node: Any) -> None:
    """Lower lstm(input, hx, ..., batch_first), lstm(data, batch_sizes, hx, ...): of tensors or of packed data."""
    kind, _, form = node.kind.partition(".")
    states = context[node.inputs[1]] if isinstance(node.inputs[1], str) else node.inputs[1]
    packed = form == "data" or (not form and _is_packed(kind, states))
    inputs = bind_arguments(
        context,
        node,
        f"data batch_sizes hx {_SHARED_PARAMETERS}" if packed else f"input hx {_SHARED_PARAMETERS} batch_first",
    )
    states = inputs.hx if isinstance(inputs.hx, list | tuple) else [inputs.hx]
    if not packed:
        _add_named_results(context, node, lower_recurrent_layer(context, node, kind, inputs.input, states, inputs))
        return
    inputs.batch_first = False
    sizes = np.asarray(to_python(inputs.batch_sizes, node, "batch_sizes"))
    results: list[list[Var]] = []
    entire, places, ends = inputs.data, [], np.cumsum([0, *sizes])
    for length, first, last in iterate_equal_lengths(sizes):
        rows = np.array([[ends[step] + which for which in range(first, last)] for step in range(length)])
        places.append(rows.ravel())
        x = mb.reshape(x=gather_rows(entire, rows.ravel()), shape=[*rows.shape, entire.shape[-1]])
        parts = [state if last - first == sizes[0] else mb.slice_by_index(
            x=state, begin=[0, first, 0], end=[0, last, 0], begin_mask=[True, False, True],
            end_mask=[True, False, True]) for state in states]
        out, *left = lower_recurrent_layer(context, node, kind, x, parts, inputs)
        results.append([mb.reshape(x=out, shape=[rows.size, out.shape[-1]]), *left])
    out, *left = (mb.concat(values=list(each), axis=0 if not which else 1) if len(each) > 1 else each[0]
                  for which, each in enumerate(zip(*results, strict=True)))
    _add_named_results(context, node, [gather_rows(out, np.argsort(np.concatenate(places))), *left])


def _add_named_results(context: Any, node: Any, results: Sequence[Var]) -> None:
    """Add new results to the context, with the names that coremltools' lowering of TorchScript gives them.

    It appends the number of the layer to the name of a GRU's last state.
    """
    if context.frontend == TorchFrontend.TORCHSCRIPT:
        for name, var in zip(node.outputs, results, strict=True):
            temporary = TEMPORARY_NAME.match(var.name)
            var.name = name if temporary is None else name + var.name[temporary.end():]
    add_results(context, node, results)


def _is_packed(kind: str, second: Any) -> bool:
    """Return whether a node of TorchScript has packed data.

    Its second argument is then a vector of sizes, not a state.
    """
    return isinstance(second, Var) and (kind == "lstm" or second.rank == 1)


@PATCH.op("_pack_padded_sequence")
def pack_padded_sequence(context: Any, node: Any) -> None:
    """Lower _pack_padded_sequence(input, lengths, batch_first) -> data, batch_sizes."""
    inputs = bind_arguments(context, node, "input lengths batch_first")
    try:
        lengths = np.asarray(to_python(inputs.lengths, node, "lengths"))
    except NotConverted as error:
        single = inputs.input.shape[0 if to_python(inputs.batch_first, node, "batch_first") else 1] == 1
        raise NotConverted.at(node, "the lengths of the sequences are computed by the model",
                              "leave the packing out, which one sequence of full length does not need" if single else
                              "make them constants, sorted (enforce_sorted=True)") from error
    x = inputs.input
    if to_python(inputs.batch_first, node, "batch_first"):
        x = mb.transpose(x=x, perm=[1, 0, *range(2, x.rank)])
    steps, samples, *rest = x.shape
    if not all(isinstance(size, int | np.integer) for size in x.shape):
        raise NotConverted.at(node, "sequences of a flexible size are not packed", "fix the size")
    sizes = np.array([np.sum(lengths > step) for step in range(lengths.max())])
    rows = np.concatenate([step * samples + np.arange(size) for step, size in enumerate(sizes)])
    data = gather_rows(mb.reshape(x=x, shape=[steps * samples, *rest]), rows)
    add_results(context, node, [data, to_tensor(sizes)])


@PATCH.op("_pad_packed_sequence")
def pad_packed_sequence(context: Any, node: Any) -> None:
    """Lower _pad_packed_sequence(data, batch_sizes, batch_first, padding_value, total_length) -> padded, lengths."""
    inputs = bind_arguments(context, node, "data batch_sizes batch_first padding_value total_length")
    sizes = np.asarray(to_python(inputs.batch_sizes, node, "batch_sizes"))
    steps = max(len(sizes), int(to_python(inputs.total_length, node, "total_length")))
    rows, lengths = compute_packed_rows(sizes, steps)
    data = inputs.data
    if np.any(rows == sizes.sum()):
        padding = np.full((1, *data.shape[1:]), to_python(inputs.padding_value, node, "padding_value"), np.float32)
        data = mb.concat(values=[data, to_tensor(padding, data.dtype)], axis=0)
    padded = mb.reshape(x=gather_rows(data, rows.ravel()), shape=[*rows.shape, *data.shape[1:]])
    if to_python(inputs.batch_first, node, "batch_first"):
        padded = mb.transpose(x=padded, perm=[1, 0, *range(2, padded.rank)])
    _add_named_results(context, node, [padded, to_tensor(lengths)])
