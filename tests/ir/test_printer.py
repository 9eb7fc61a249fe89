"""MIL as text: the same for the same program, whatever its names."""

from __future__ import annotations

import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import get_new_symbol, types

from mil_ane_passes.ir.printer import diff_program_texts, format_function_body, format_op, format_program, format_type
from mil_ane_passes.ir.query import iterate_ops
from mil_ane_passes.passes.examples import build_program, make_weight
from tests.ir.test_edits import stateful
from tests.passes.test_engine import nested_program


def plain(middle: str = "middle"):
    return build_program(
        lambda x: mb.relu(x=mb.conv(x=x, weight=make_weight(2, 3, 4), name=middle), name="y"), x=(1, 3, 8)
    )


def listed():
    def body(x):
        made = mb.make_list(init_length=2, elem_shape=(3,), dtype="fp16")
        return mb.list_read(ls=mb.list_write(ls=made, index=0, value=x), index=0, name="y")

    return build_program(body, x=(3,))


def joined():
    return build_program(
        lambda x: mb.concat(values=[x, mb.const(val=np.ones((1, 2), np.float16)), mb.exp(x=x)], axis=0, name="y"),
        x=(1, 2),
    )


def test_sizes_that_are_not_fixed_have_no_name_in_a_type():
    """pymil numbers them as it makes them: another number in each process."""
    size = get_new_symbol()
    made = build_program(lambda x: mb.pad(x=x, pad=[0, 0, 1, 1], name="y"), x=(1, size)).functions["main"]
    assert [format_type(var) for var in (made.inputs["x"], *made.outputs)] == ["fp16[1, ?]", "fp16[1, ?]"]


def test_the_form():
    assert format_program(plain()) == (
        "main(%x: fp16[1, 3, 8]) {\n"
        "    %0: fp16[1, 2, 5] = conv(x=%x, weight=<fp16[2, 3, 4]>)\n"
        "    %y: fp16[1, 2, 5] = relu(x=%0)\n"
        "} -> (%y)"
    )


def test_the_body_alone():
    assert format_function_body(plain().functions["main"]).splitlines() == [
        "%0: fp16[1, 2, 5] = conv(x=%x, weight=<fp16[2, 3, 4]>)",
        "%y: fp16[1, 2, 5] = relu(x=%0)",
    ]


def test_with_names():
    assert "    %middle: fp16[1, 2, 5] = conv(" in format_program(plain(), names=True)
    assert "%y: fp16[1, 2, 5] = relu(x=%middle)" in format_program(plain(), names=True)


def test_tuples_and_small_consts_are_inline():
    assert "%y: fp16[3, 2] = concat(values=(%x, [[1.0, 1.0]], %0), axis=0)" in format_program(joined())


@pytest.mark.parametrize(
    "build",
    [plain, nested_program, listed, stateful, joined, lambda: build_program(lambda x: mb.exp(x=mb.relu(x=x)), x=(2,))],
    ids=["plain", "nested", "list", "state", "tuple", "unnamed output"],
)
def test_built_twice_it_prints_the_same(build):
    one, other = build(), build()
    if len(one.functions["main"].outputs[0].name) > 1:  # an output without a name of its own gets a counted one
        other.functions["main"].outputs[0].name = one.functions["main"].outputs[0].name
    assert format_program(one) == format_program(other)


def test_names_of_inner_values_do_not_matter_and_those_at_the_ends_do():
    assert format_program(plain("a")) == format_program(plain("b"))
    renamed = plain()
    renamed.functions["main"].outputs[0].name = "z"
    assert format_program(renamed) != format_program(plain())


def test_symbolic_dimensions_print_the_same_for_the_same_program():
    def build():
        return build_program(lambda x, z: mb.concat(values=[x, z], axis=0, name="y"), x=(None, 4), z=(None, 4))

    assert format_program(build()) == format_program(build())


def test_symbols_that_differ_print_differently():
    text = format_program(build_program(lambda x: mb.relu(x=x, name="y"), x=(None, None, 4)))
    head = text.splitlines()[0]
    first, second = head[head.index("[") + 1 : head.index("]")].split(", ")[:2]
    assert first != second and f"%y: fp16[{first}, {second}, 4]" in text


def test_nested_blocks_are_shown_with_their_inputs_and_outputs():
    lines = format_program(nested_program()).splitlines()
    assert any("= cond(" in line for line in lines) and any("= while_loop(" in line for line in lines)
    assert any(line.strip().startswith("(%") and line.endswith(") {") and "int32" in line for line in lines)
    assert sum(line.strip().startswith("} -> (") for line in lines) == 5


def test_states_say_so():
    text = format_program(stateful())
    assert text.startswith("main(%x: fp16[2, 3], %memory: state fp16[2, 3]) {")
    assert "read_state(input=%memory)" in text and "coreml_update_state(state=%memory, value=%" in text


def test_types_in_words():
    placed = build_program(
        lambda x: [mb.reduce_sum(x=x, axes=[0], keep_dims=False), mb.cast(x=x, dtype="bool")], x=(3,), dtype=types.fp32
    )
    assert [format_type(var) for var in placed.functions["main"].outputs] == ["fp32", "bool[3]"]
    (made,) = [op.outputs[0] for _, op in iterate_ops(listed()) if op.op_type == "make_list"]
    assert format_type(made) == "list"


def test_what_is_default_is_left_out():
    def body(x):
        return mb.conv(x=x, weight=make_weight(2, 3, 4), strides=[1], dilations=[2], groups=1, name="y")

    assert "conv(x=%x, weight=<fp16[2, 3, 4]>, dilations=[2])" in format_program(build_program(body, x=(1, 3, 8)))


def test_one_op_under_its_own_names():
    (found,) = [op for _, op in iterate_ops(plain()) if op.op_type == "relu"]
    assert format_op(found) == "%y: fp16[1, 2, 5] = relu(x=%middle)"


def test_a_const_that_is_an_output_is_shown():
    prog = build_program(lambda x: [mb.relu(x=x, name="y"), mb.const(val=np.float16(2), name="two")], x=(2,))
    assert "%two: fp16 = const(val=2.0)" in format_program(prog)
    assert format_program(prog).endswith("} -> (%y, %two)")


def test_functions_follow_one_another():
    prog = plain()
    prog.add_function("second", plain().functions["main"])
    assert format_program(prog).count("} -> (%y)") == 2
    assert "\nsecond(%x: fp16[1, 3, 8]) {" in format_program(prog)


def test_a_diff_has_the_changed_lines():
    other = build_program(lambda x: mb.exp(x=mb.conv(x=x, weight=make_weight(2, 3, 4)), name="y"), x=(1, 3, 8))
    diff = diff_program_texts(format_program(plain()), format_program(other)).splitlines()
    assert diff[:2] == ["--- before", "+++ after"]
    assert "-    %y: fp16[1, 2, 5] = relu(x=%0)" in diff and "+    %y: fp16[1, 2, 5] = exp(x=%0)" in diff
    assert diff_program_texts(format_program(plain()), format_program(plain())) == ""
