"""`lint` of models out of the ordinary: lists in nested blocks of fp32, and names that no terminal should be handed."""

from __future__ import annotations

import json

import coremltools as ct
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Function, Program, types

import mil_ane_passes as ane
from mil_ane_passes.report.html import build_page
from mil_ane_passes.report.sarif import build_sarif


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_lists_and_nested_blocks(dtype):
    @mb.program(input_specs=[mb.TensorSpec((1, 4, 8), dtype=types.string_to_builtin(dtype))],
                opset_version=ct.target.iOS17)
    def nested(x):
        total = mb.reduce_sum(x=x, axes=[0, 1, 2], keep_dims=False)

        def through_a_list():
            held = mb.make_list(init_length=3, elem_shape=(1, 4, 8), dtype=dtype)
            return mb.list_read(ls=mb.list_write(ls=held, index=0, value=x), index=0, name="read")

        def looped():
            return mb.while_loop(_cond=lambda i, a: mb.less(x=i, y=3),
                                 _body=lambda i, a: (mb.add(x=i, y=1), mb.cumsum(x=a, axis=2)), loop_vars=(0, x))[1]

        zero = mb.cast(x=0.0, dtype=dtype)
        return mb.cond(pred=mb.greater(x=total, y=zero), _true_fn=through_a_list, _false_fn=looped, name="out")

    before = str(nested)
    data = json.loads(json.dumps(ane.lint(nested).to_dict(), allow_nan=False))
    kinds = [op["op"] for op in data["ops"]]
    assert [op["index"] for op in data["ops"]] == list(range(len(kinds))) and "const" not in kinds
    assert {"make_list", "list_write", "list_read", "cumsum", "while_loop", "cond"} <= set(kinds)
    assert all(op["shape"] is None for op in data["ops"] if op["op"] in ("make_list", "list_write"))
    assert str(nested) == before


def test_names_with_control_characters():
    name = "a\"'\n\r\x1b[31m</script><!--&\u2028"
    program = Program()
    with Function({"x": mb.placeholder(shape=(1, 4, 8), dtype=types.fp16)}, opset_version=ct.target.iOS17) as function:
        function.set_outputs([mb.sqrt(x=mb.cumsum(x=function.inputs["x"], axis=2, name=name), name="y")])
    program.add_function("main", function)
    found = ane.lint(program)
    assert name in {op["output"] for op in json.loads(json.dumps(found.to_dict()))["ops"]}
    assert json.loads(json.dumps(build_sarif(found)))["runs"][0]["results"]
    made = build_page(found)
    assert made.count("<script") == made.count("</script>")
    text = str(found)
    assert r"\n\r\x1b[31m" in text and all(each == "\n" or each.isprintable() for each in text)
