"""The programs that the report's tests look at."""

from __future__ import annotations

from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder, Function, Program, types

from mil_ane_passes.passes.examples import build_program, make_weight

HOSTILE = "</script><img src=x onerror=alert(1)><!--\u2028\u202e\ud800{{data}}"
SHOWN = HOSTILE.replace("\ud800", "\ufffd")


def vocoder() -> Program:
    """Findings of several rules, with and without a fix: an int input, 1-D convs, a cumsum."""
    placeholders = {
        "x": Builder.placeholder(shape=(1, 8, 64), dtype=types.fp16),
        "steps": Builder.placeholder(shape=(4,), dtype=types.int32),
    }
    with Function(placeholders, opset_version=ct.target.iOS17) as function:
        x, steps = function.inputs.values()
        x = Builder.conv(x=x, weight=make_weight(8, 8, 3), pad_type="same", name="first")
        x = Builder.relu(x=x, name="bend")
        x = Builder.conv_transpose(x=x, weight=make_weight(8, 4, 4), bias=make_weight(4), strides=[2], name="grow")
        x = Builder.cumsum(x=x, axis=2, name="phase")
        x = Builder.tanh(x=x, name="wave")
        rows = Builder.gather(x=make_weight(16, 4), indices=steps, axis=0, name="rows")
        function.set_outputs([x, rows])
    return whole(main=function)


def two_functions() -> Program:
    made = {}
    for name, body in (("encode", Builder.relu), ("decode", Builder.tanh)):
        with Function(
            {"x": Builder.placeholder(shape=(1, 4, 8, 8), dtype=types.fp16)}, opset_version=ct.target.iOS17
        ) as one:
            one.set_outputs([body(x=Builder.exp(x=one.inputs["x"], name=f"{name}_exp"), name=f"{name}_end")])
        made[name] = one
    return whole(**made)


def whole(**functions: Function) -> Program:
    built = Program()
    for name, function in functions.items():
        built.add_function(name, function)
    return built


def empty() -> Program:
    def body(x: Any) -> Any:
        return x

    return build_program(body, x=(2, 3))


def hostile() -> Program:
    """Names that would be markup, if names ever became markup."""

    def body(x: Any) -> Any:
        y = Builder.relu(x=Builder.cumsum(x=x, axis=0, name="a"), name="b")
        y.op.inputs["x"].name = HOSTILE
        y.op.inputs["x"].op.name = HOSTILE
        return y

    return build_program(body, x=(4, 8))


def long_names() -> Program:
    """Names as other frontends make them, of ops that compute in fp32, and of a large and a small partition."""

    def body(x: Any) -> Any:
        name = "StatefulPartitionedCall_model_1_flatten_audio_channels_1_reshape_Reshape"
        for place in range(2):
            x = Builder.conv(x=x, weight=make_weight(64, 64, 3, 3).astype(np.float32), pad_type="same",
                             name=f"{name}_{place}")
        x = Builder.cast(x=x, dtype="fp16", name=f"{name}_to_fp16")
        for place in range(120):
            x = Builder.conv(x=x, weight=make_weight(64, 64, 3, 3), pad_type="same", name=f"{name}_half_{place}")
        return x

    return build_program(body, dtype=types.fp32, x=(1, 64, 64, 64))


def nested() -> Program:
    def body(x: Any) -> Any:
        small = Builder.less(x=Builder.reduce_sum(x=x, axes=[0, 1], keep_dims=False), y=np.float16(1))
        return Builder.cond(
            pred=small, _true_fn=lambda: Builder.relu(x=x), _false_fn=lambda: Builder.tanh(x=x), name="y"
        )

    return build_program(body, x=(4, 8))


def said_by_a_mac(report: Any) -> dict[str, Any]:
    """A compute plan as a Mac dumps it, which says of every op what we say, and of the cumsum the contrary."""
    ops = [
        {
            "operator": f"ios17.{row.op.op_type}",
            "outputs": [row.op.outputs[0].name],
            "supported": ["cpu", "ane"] if (row.ane == "yes") != (row.op.op_type == "cumsum") else ["cpu"],
            "preferred": "ane" if row.op.op_type == "cumsum" else row.backend,
            "cost": 1 / len(report.plan.rows),
        }
        for row in report.plan.rows
    ]
    machine = {"chip": "Apple M4", "macos": "26.1"}
    return {"program": {"functions": {"main": ops}}, "units": "CPU_AND_NE", "machine": machine}


def large(ops: int = 10_000) -> Program:
    """A long chain with skips, and an op unsupported on the ANE now and then: hundreds of segments."""

    def body(x: Any) -> Any:
        kept, shared = x, Builder.const(val=make_weight(64, 64, 3, 3), name="shared")
        for place in range(ops):
            if place % 40 == 39:
                x = Builder.cumsum(x=x, axis=1, name=f"sum_{place}")
            elif place % 8 == 7:
                x = kept = Builder.add(x=x, y=kept, name=f"skip_{place}")
            elif place % 4 == 1:
                x = Builder.conv(x=x, weight=shared, pad_type="same", name=f"conv_{place}")
            else:
                x = Builder.relu(x=x, name=f"relu_{place}")
        return x

    return build_program(body, x=(1, 64, 64, 64))
