"""Counting layout ops, and holding converted models against PyTorch's own outputs."""

from __future__ import annotations

from collections import Counter

import coremltools as ct
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import mil_ane_passes as ane
from mil_ane_passes.ane.prediction import predict_plan
from mil_ane_passes.ir.query import iterate_ops
from mil_ane_passes.passes.registry import find_rewrite, get_all_rules
from mil_ane_passes.runtime import Runtime
from tests.conversions import convert_model


def converted_as(module, x, way, path, *, precision="FLOAT16", target="iOS17", **settings):
    """The program of the saved package, after coremltools' own passes; `settings` are those of `convert_model`."""
    made = convert_model(module, x, way=way, names="x", compute_precision=getattr(ct.precision, precision),
                         minimum_deployment_target=getattr(ct.target, target), **settings)
    made.save(str(path))
    return ane.load(path).program


def configure_rewrite(name, **options):
    return find_rewrite(name).configured(**options)


def unsupported_ops(program, target="m4") -> list[str]:
    """List the types of the ops that some rule says the ANE of `target` does not support."""
    rules = [rule() for rule in get_all_rules().values()]
    return [row.op.op_type for row in predict_plan(program, rules, target=target)[0].rows if row.ane == "no"]


def at_any_numbers(check, count, reach):
    """Call `check` with many lists of `count` numbers that fp16 has, up to `reach` in size."""
    @given(st.lists(st.floats(-reach, reach, width=16), min_size=count, max_size=count))
    def checked(numbers):
        check(np.array(numbers, np.float16))

    checked()


def kinds(program) -> Counter:
    return Counter(op.op_type for _, op in iterate_ops(program))


def layout_ops(program) -> int:
    counted = kinds(program)
    return counted["expand_dims"] + counted["squeeze"]


def torch_outputs(module, *inputs) -> np.ndarray:
    """The module's own output in double precision."""
    import torch

    with torch.no_grad():
        return module.double()(*(value.double() for value in inputs)).numpy()


def only_output(program, value, precision, quirks=()) -> np.ndarray:
    runtime = Runtime(program, precision=precision, quirks=quirks)
    (name,) = program.functions["main"].inputs
    (output,) = runtime({name: value}).values()
    return output


def half(module):
    """The module with its weights rounded to fp16, which is what an fp16 package stores."""
    import torch

    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(parameter.half().to(parameter.dtype))
    return module
