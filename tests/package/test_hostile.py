"""Small files that claim to be large, or contradict themselves: refused in words or kept whole, at little cost."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest

import mil_ane_passes as ane
from mil_ane_passes.package import wire

from ..lab.fuzz.tries import MAX_MEGABYTES, MAX_PROCESSOR_SECONDS, read_peak_memory, reset_peak_memory
from .helpers import MODEL, tree
from .hostile import BOOL, FLOAT, INT, Made, giant, nested, package, several

SIZE = 1 << 33
GIANTS = {
    "fill": lambda: giant("fill", (SIZE,), {"shape": ((1,), [(1 << 31) - 1], INT), "value": ((), [1.0], FLOAT)}),
    "fill within": lambda: giant(
        "fill", ((1 << 31) - 1,), {"shape": ((1,), [(1 << 31) - 1], INT), "value": ((), [1.0], FLOAT)}),
    "tile": lambda: giant("tile", (1 << 30,), {"x": ((2,), [1.0, 2.0], FLOAT), "reps": ((1,), [1 << 29], INT)}),
    "range": lambda: giant(
        "range_1d", (1 << 30,), {"start": ((), [0], INT), "end": ((), [1 << 30], INT), "step": ((), [1], INT)}),
    "one_hot": lambda: giant(
        "one_hot", (2, 1 << 30), {"indices": ((2,), [0, 1], INT), "one_hot_vector_size": ((), [1 << 30], INT),
                                  "axis": ((), [-1], INT), "on_value": ((), [1], INT), "off_value": ((), [0], INT)}),
}


def of(change):
    """What makes a model that `change` was made to."""
    return lambda: several(lambda made, number: change(made), 1)


def vector(kind, param):
    """An op whose input `param`, known only when it runs, says how many dimensions its output has."""

    def change(made):
        made.input("many", SIZE, dtype=INT)
        made.const("one", (), [1.0], FLOAT)
        made.op(kind, "y", (None,), **{param: "many"}, **{"fill": {"value": "one"}}.get(kind, {"x": "x"}))

    return of(change)


def counted(made):
    made.input("w", 1 << 40, 4)
    made.op("linear", "y", (1 << 40,), x="x", weight="w")


def taken_names(made):
    made.op("custom", "y", (4,), **dict.fromkeys(
        ("self", "name", "name_", "before_op", "__init__", "_x", "op_type", "origin", "inputs", "input__x", "a b", ""),
        "x"))


def odd_types(made):
    kinds = ("__init__", "a b", "\0", "const ", "relu", "é", "cond", "while_loop", "constexpr_x")
    for number, kind in enumerate(kinds):
        made.op(kind, f"y{number}", (4,), x="x")


def wrong_blocks(made):
    for kind, count in (("relu", 1), ("cond", 1), ("cond", 3), ("while_loop", 0), ("custom", 2)):
        op = made.op(kind, f"{kind}{count}", (4,), x="x")
        for _ in range(count):
            op.blocks.add().outputs.append("x")


def states(made):
    made.op("write_state", "odd", (4,), input="x", data="x")
    made.op("write_state", None, input="x", data="x")
    made.op("read_state", None, input="x")
    inner = made.function.inputs.add()
    inner.name = "s"
    inner.type.stateType.wrappedType.listType.type.tensorType.dataType = FLOAT
    made.op("read_state", "r", (4,), input="s")


def mixed(made):
    made.op("concat", "y", (8,), values="x").inputs["values"].arguments.add().value.CopyFrom(
        made.const("c", (4,), [1.0] * 4, FLOAT).attributes["val"])
    made.block.operations[0].inputs["axis"].arguments.add().value.CopyFrom(
        made.const("d", (), [0]).attributes["val"])


def doubled(made):
    """Forty times twice as much."""
    made.const("axis", (), [0])
    made.const("no", (), [False], BOOL)
    for number in range(40):
        before = "x" if number == 0 else f"y{number - 1}"
        made.op("concat", f"y{number}", (4 << (number + 1),), values=before, axis="axis", interleave="no").inputs[
            "values"].arguments.add().name = before


def no_blocks_needed(made):
    made.op("custom", None, x="x")
    made.op("custom", "nothing")


KEPT = {
    **GIANTS,
    **{f"{kind} by a vector": vector(kind, param) for kind, param in (("fill", "shape"), ("reshape", "shape"))},
    "rows counted out": of(counted),
    "names pymil takes": of(taken_names),
    "odd types": of(odd_types),
    "wrong blocks": of(wrong_blocks),
    "states": of(states),
    "values by name and written out": of(mixed),
    "ops without ends": of(no_blocks_needed),
    "forty blocks deep": lambda: nested(40),
    "a type of many dimensions": of(lambda made: made.op("custom", "y", (None,) * 5000, x="x")),
    "a declared type that is another": of(lambda made: made.op("relu", "y", (5,), x="x")),
    "a state of nothing": of(lambda made: made.op("custom", "y", x="x").outputs[0].type.stateType.SetInParent()),
    "an unknown dtype": of(lambda made: made.op("relu", "y", (4,), 99, x="x")),
    "a group": lambda: (
        Made().bytes() + wire.encode_varint(900 << 3 | 3) + b"\x08\x01" + wire.encode_varint(900 << 3 | 4)
    ),
    "readers of one value": lambda: several(lambda made, n: made.op("conv", f"y{n}", (4,), x="x"), 3000),
    "one op that reads one value often": of(
        lambda made: [
            made.block.operations.add(type="concat").inputs["values"].arguments.add(name="x"),
            made.block.operations[0]
            .inputs["values"]
            .arguments.extend([made.block.operations[0].inputs["values"].arguments[0]] * 50_000),
            made.block.operations[0].outputs.add(name="y"),
        ]
    ),
    "fills in number": of(
        lambda made: [
            made.const("s", (1,), [1 << 20]),
            made.const("v", (), [1.0], FLOAT),
            *(made.op("fill", f"f{n}", (1 << 20,), shape="s", value="v") for n in range(200)),
        ]
    ),
}


def twice(made):
    made.op("custom", "y", (4,), x="x")
    made.op("custom", "y", (4,), x="x")


def entry_twice():
    raw = Made().bytes()
    return wire.edit_payloads(
        raw, lambda f, p: wire.edit_payloads(p, lambda g, q: q + wire.encode_field(2, b"")) if f.number == 502 else None
    )


def flat(made, values):
    made.const("c", (0, 1 << 40, 1 << 40), values)


REFUSED = {
    "a value twice": (of(twice), "two values of one block are called 'y'.* save_multifunction made it, give"),
    "a value called as an input": (of(lambda made: made.op("custom", "x", (4,), x="x")), "are called 'x'"),
    "no outputs": (of(lambda made: made.block.ClearField("outputs")), "function 'main' has no outputs; expected one"),
    "an input twice": (of(lambda made: made.input("x", 4)), "function 'main' has several inputs 'x'"),
    "itself": (of(lambda made: made.op("custom", "y", (4,), x="y")), "refer to 'y'; expected an input or an earlier"),
    "a dimension too many": (of(lambda made: made.op("custom", "y", (1 << 32, 1 << 32), x="x")), "no more than"),
    "an empty giant": (of(lambda made: flat(made, [])), "no more than"),
    "no type": (lambda: several(lambda made, n: made.block.operations.add(), 100_000), "has no type"),
    "an op that does nothing": (of(lambda made: made.op("custom", None)), "neither inputs nor outputs"),
    "a const without a value": (of(lambda made: made.op("const", "c", (4,))), "1 outputs and no value"),
    "a const without an output": (of(lambda made: made.const("c", (1,), [1]).outputs.pop()), "neither inputs nor"),
    "a map entry of two values": (entry_twice, "map entry 'main' has 2 values"),
    "too deep": (lambda: nested(1000), "not a Core ML model"),
    "bools as text": (of(lambda made: made.const("c", (2,), [True, True], BOOL).attributes["val"].immediateValue.tensor
                         .strings.values.append("x")), "inline value of 1 elements; expected 2 of bool"),
}


def cheap(use):
    """What `use` gives; it takes little time and memory."""
    before, started = reset_peak_memory(), time.process_time()
    try:
        return use()
    finally:
        seconds, megabytes = time.process_time() - started, read_peak_memory() - before
        assert seconds < MAX_PROCESSOR_SECONDS and megabytes < MAX_MEGABYTES, f"{seconds:.1f} s, {megabytes:.0f} MB"


@pytest.mark.sampled(14)
@pytest.mark.parametrize("case", KEPT)
def test_what_cannot_be_understood_is_kept_at_little_cost(case, tmp_path):
    source = package(tmp_path / "source.mlpackage", KEPT[case]())
    loaded = cheap(lambda: ane.load(source))
    ane.save(loaded, tmp_path / "saved.mlpackage")
    assert tree(tmp_path / "saved.mlpackage") == tree(source)
    cheap(lambda: ane.rewrite(source, tmp_path / "new.mlpackage", preset="full", verify=False))
    ane.load(tmp_path / "new.mlpackage")


@pytest.mark.parametrize("case", REFUSED)
def test_what_contradicts_itself_is_refused_at_little_cost(case, tmp_path):
    make, message = REFUSED[case]
    source = package(tmp_path / "source.mlpackage", make())
    with pytest.raises(ane.InputError, match=message) as caught:
        cheap(lambda: ane.load(source))
    assert str(caught.value).startswith(str(source)) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "case", ["names pymil takes", "odd types", "wrong blocks", "states", "a declared type that is another"])
def test_what_is_kept_can_be_linted(case, tmp_path):
    report = ane.lint(package(tmp_path / "source.mlpackage", KEPT[case]()))
    assert report.to_dict()


def test_an_input_whose_name_pymil_takes_is_still_the_files(tmp_path):
    program = ane.load(package(tmp_path / "source.mlpackage", KEPT["names pymil takes"]())).program
    op = program.functions["main"].operations[0]
    assert op.op_type == "custom" and len(op.inputs) == 12 and {var.name for var in op.inputs.values()} == {"x"}


def test_an_op_that_is_not_as_the_host_defines_it_does_not_pass_for_one(tmp_path):
    program = ane.load(package(tmp_path / "source.mlpackage", KEPT["readers of one value"]())).program
    assert {op.op_type for op in program.functions["main"].operations} == {"conv (opaque)"}


def test_a_value_that_no_machine_holds_is_not_run(tmp_path):
    source = package(tmp_path / "source.mlpackage", of(doubled)())
    with pytest.raises(ane.NotSupported, match=r"value 'y\d+' .*; the reference runtime holds at most [\d.]+ GB"):
        cheap(lambda: ane.run(source, {"x": np.ones(4, np.float32)}))


@pytest.mark.parametrize("where", ["Manifest.json", MODEL])
def test_a_giant_file_is_refused_unread(where, tmp_path):
    source = package(tmp_path / "source.mlpackage", Made().bytes())
    os.truncate(source / where, 1 << 31)  # takes no place on the disk
    with pytest.raises(ane.InputError, match=r"2147483648 bytes; expected at most \d+"):
        cheap(lambda: ane.load(source))
