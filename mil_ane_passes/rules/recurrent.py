"""Find lstm, gru and rnn."""

from __future__ import annotations

from collections.abc import Iterable

from coremltools.converters.mil.mil import Builder, Operation, Var
from coremltools.converters.mil.mil.types.symbolic import is_symbolic

from ..core.contract import Community, Example, Hit, Miss, Rule, Vendor
from ..core.evidence import in_2020, on_m4, private
from ..core.examples import program, weight
from ..core.words import counted
from ._refused import refusal


class Recurrent(Rule):
    """The ANE takes no lstm, gru and rnn.

    why     Said by a maintainer of coremltools, measured on an M4, and so for all generations when the ANE's compiler
            is asked without Core ML. They run on the CPU.
    when    Any lstm, gru or rnn; the note has the number of steps.
    cure    A sequence of fixed length: `ane::unroll_lstm`, `ane::unroll_gru` and `ane::unroll_rnn` write it out into
            linear, sigmoid and tanh, which are taken; the roundings differ and add up over the steps. A very long one:
            keep the convolutions and linears before and after it together, so that it costs two changes of processor
            and no more, or split the model there.
    """

    code, slug = "ANE217", "recurrent"
    roots = ("lstm", "gru", "rnn")
    refuses, confidence = True, "high"
    advice = "Fix the length of the sequence, so that it can be written out step by step, or split the model there."
    evidence = (
        Vendor("RNN and LSTM ops are not supported on the neural engine",
               source="https://github.com/apple/coremltools/issues/1780", date="2023-02-26"),
        on_m4("rnn, lstm and gru are refused"),
        Community("an LSTM runs on BNNS, while the layers after it run on the ANE",
                  source="https://github.com/apple/coremltools/issues/337", chip="A12", date="2019-03"),
        in_2020("RNN layers, LSTM and GRU among them, do not run on the ANE"),
        private("lstm, gru and rnn have no form on any generation"),
    )

    def match(self, op: Operation) -> Hit | Miss:
        steps = op.x.shape[0]
        how = "steps known only at run time" if is_symbolic(steps) else counted(int(steps), "step")
        message = 'Unsupported MIL operation "rnn".' if op.op_type == "rnn" else None
        return refusal(self, op, f"the ANE takes no {op.op_type} ({how})", message=message)

    def examples(self) -> Iterable[Example]:
        yield Example("rnn", lambda: program(_rnn, x=(5, 1, 4), h=(1, 3)))
        yield Example("lstm", lambda: program(_lstm, x=(5, 1, 4), h=(1, 3), c=(1, 3)))
        yield Example("gru", lambda: program(_gru, x=(None, 1, 4), h=(1, 3)))
        yield Example("one step, written out", lambda: program(
            lambda x, h: Builder.tanh(x=Builder.add(x=Builder.linear(x=x, weight=weight(3, 4)),
                                                    y=Builder.linear(x=h, weight=weight(3, 3))), name="y"),
            x=(1, 4), h=(1, 3)), reason="")


def _rnn(x: Var, h: Var) -> Var:
    outputs: tuple[Var, ...] = Builder.rnn(x=x, initial_h=h, weight_ih=weight(3, 4), weight_hh=weight(3, 3))
    return outputs[0]


def _lstm(x: Var, h: Var, c: Var) -> Var:
    outputs: tuple[Var, ...] = Builder.lstm(x=x, initial_h=h, initial_c=c, weight_ih=weight(12, 4),
                                            weight_hh=weight(12, 3))
    return outputs[0]


def _gru(x: Var, h: Var) -> Var:
    outputs: tuple[Var, ...] = Builder.gru(x=x, initial_h=h, weight_ih=weight(9, 4), weight_hh=weight(9, 3))
    return outputs[0]
