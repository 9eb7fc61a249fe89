"""Find lstm, gru and rnn."""

from __future__ import annotations

from collections.abc import Iterable

from coremltools.converters.mil.mil import Builder, Operation, Var
from coremltools.converters.mil.mil.types.symbolic import is_symbolic

from ..passes.contract import Community, Example, Hit, Miss, Rule, Vendor
from ..passes.evidence import cite_2020_layer_list, cite_m4_study, cite_private_route
from ..passes.examples import make_example, make_weight
from ..utils.text_format import format_count
from ._unsupported_ops import make_unsupported_hit


class Recurrent(Rule):
    """lstm, gru and rnn are unsupported on the ANE.

    why     Said by a maintainer of coremltools, measured on an M4, and so for all generations when the ANE's compiler
            is asked without Core ML. They run on the CPU.
    when    Any lstm, gru or rnn; the note has the number of steps.
    fix     A sequence of fixed length: `ane::unroll_lstm`, `ane::unroll_gru` and `ane::unroll_rnn` write it out into
            linear, sigmoid and tanh, which are taken; the roundings differ and add up over the steps. A very long one:
            keep the convolutions and linears before and after it together, so that it costs two transitions
            and no more, or split the model there.
    """

    code, slug = "ANE217", "recurrent"
    roots = ("lstm", "gru", "rnn")
    refuses, confidence = True, "high"
    advice = "Fix the length of the sequence, so that it can be written out step by step, or split the model there."
    evidence = (
        Vendor("RNN and LSTM ops are not supported on the neural engine",
               source="https://github.com/apple/coremltools/issues/1780", date="2023-02-26"),
        cite_m4_study("rnn, lstm and gru are unsupported"),
        Community("an LSTM runs on BNNS, while the layers after it run on the ANE",
                  source="https://github.com/apple/coremltools/issues/337", chip="A12", date="2019-03"),
        cite_2020_layer_list("RNN layers, LSTM and GRU among them, do not run on the ANE"),
        cite_private_route("lstm, gru and rnn have no form on any generation"),
    )

    def match(self, op: Operation) -> Hit | Miss:
        steps = op.x.shape[0]
        how = "steps known only at run time" if is_symbolic(steps) else format_count(int(steps), "step")
        message = 'Unsupported MIL operation "rnn".' if op.op_type == "rnn" else None
        return make_unsupported_hit(self, op, f"{op.op_type} is unsupported on the ANE ({how})", message=message)

    def examples(self) -> Iterable[Example]:
        yield make_example("rnn", _build_rnn, x=(5, 1, 4), h=(1, 3))
        yield make_example("lstm", _build_lstm, x=(5, 1, 4), h=(1, 3), c=(1, 3))
        yield make_example("gru", _build_gru, x=(None, 1, 4), h=(1, 3))
        yield make_example(
            "one step, written out",
            lambda x, h: Builder.tanh(
                x=Builder.add(
                    x=Builder.linear(x=x, weight=make_weight(3, 4)), y=Builder.linear(x=h, weight=make_weight(3, 3))
                ),
                name="y",
            ),
            reason="",
            x=(1, 4),
            h=(1, 3),
        )


def _build_rnn(x: Var, h: Var) -> Var:
    outputs: tuple[Var, ...] = Builder.rnn(x=x, initial_h=h, weight_ih=make_weight(3, 4), weight_hh=make_weight(3, 3))
    return outputs[0]


def _build_lstm(x: Var, h: Var, c: Var) -> Var:
    outputs: tuple[Var, ...] = Builder.lstm(x=x, initial_h=h, initial_c=c, weight_ih=make_weight(12, 4),
                                            weight_hh=make_weight(12, 3))
    return outputs[0]


def _build_gru(x: Var, h: Var) -> Var:
    outputs: tuple[Var, ...] = Builder.gru(x=x, initial_h=h, weight_ih=make_weight(9, 4), weight_hh=make_weight(9, 3))
    return outputs[0]
