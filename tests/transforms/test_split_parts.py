"""Packages that are cut into several parts where few bytes cross: decoders between their layers."""

from __future__ import annotations

from pathlib import Path

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types

import mil_ane_passes as ane
from mil_ane_passes.commands.main import main
from mil_ane_passes.equivalence.changed_interfaces import compare_across_interfaces
from mil_ane_passes.ir.clone import clone_program
from mil_ane_passes.passes.layout import format_bytes
from mil_ane_passes.transforms.contract import Draft, apply_transforms
from mil_ane_passes.transforms.split_parts import SplitIntoParts
from mil_ane_passes.utils.byte_size import parse_byte_size
from tests.package.helpers import make, normal, with_functions

WIDTH, INNER = 16, 64
LAYER_BYTES = 2 * WIDTH * INNER * 4


def layers(count, *, tied=False, states="", heads=1, inner=INNER):
    """Residual layers of a wide inner value, with what all of them read made at the start."""
    width = WIDTH
    kept = [mb.StateTensorSpec((1, 4, width), dtype=types.fp16) for _ in range(count if states == "each" else 1)]
    names = [f"cache{at}" for at in range(len(kept))] if states else []

    def body(x, mask, *caches):
        mask = mb.mul(x=mask, y=mb.cos(x=mask), name="shared_mask")
        table = normal(inner, width)
        if tied:
            x = mb.linear(x=mb.linear(x=x, weight=table, name="looked_up"), weight=normal(width, inner), name="x0")
        for at in range(count):
            wide = mb.relu(x=mb.linear(x=x, weight=normal(inner, width, seed=at + 1), name=f"up{at}"))
            narrow = mb.linear(x=wide, weight=normal(width, inner, seed=at + 1), name=f"down{at}")
            if states:
                cache = caches[at if states == "each" else 0]
                held = mb.cast(x=mb.read_state(input=cache), dtype="fp32")
                held = mb.add(x=held, y=narrow)
                mb.coreml_update_state(state=cache, value=mb.cast(x=held, dtype="fp16"))
                narrow = mb.add(x=narrow, y=mb.reduce_sum(x=held, axes=[1], keep_dims=True))
            x = mb.add(x=x, y=mb.mul(x=narrow, y=mask), name=f"layer{at}")
        x = mb.linear(x=x, weight=table, name="scores") if tied else x
        outputs = [mb.mul(x=x, y=float(at + 1), name=f"out{at}") for at in range(heads)]
        return tuple(outputs) if heads > 1 else outputs[0]

    text = "lambda {0}: body({0})".format(", ".join(["x", "mask", *names]))  # inputs are named by a signature
    specs = [mb.TensorSpec((1, 1, width)), mb.TensorSpec((1, 1, width)), *(kept if states else [])]
    opset = ct.target.iOS18 if states else ct.target.iOS16
    return mb.program(input_specs=specs, opset_version=opset)(eval(text, {"body": body}))


def split(program, **options):
    return apply_transforms(Draft(clone_program(program), "a program"), [SplitIntoParts(**options)])


def linears(part):
    return [op.name for op in part.program.functions["main"].operations if op.op_type == "linear"]


@pytest.mark.parametrize(("count", "sizes"), [(2, [3, 3]), (3, [2, 2, 2]), (6, [1] * 6), (4, [1, 1, 2, 2])])
def test_parts_are_even_and_cut_between_layers(count, sizes):
    program = layers(6)
    parts = split(program, count=count)
    found = [len(linears(part)) / 2 for part in parts]
    assert sorted(found) == sorted(sizes) and sum(found) == 6
    assert [part.part for part in parts] == [str(number) for number in range(1, count + 1)]
    assert [name for part in parts for name in linears(part)] == linears(Draft(program, "all"))
    for part in parts[1:]:
        assert {name for name in part.program.functions["main"].inputs if name != "mask"} <= {
            "shared_mask", *(f"layer{at}" for at in range(6))}
    report = compare_across_interfaces(program, parts)
    assert report.equal, str(report)


def test_the_wide_value_inside_a_layer_never_crosses():
    parts = split(layers(3), count=2)  # an even cut would go through a layer
    assert sorted(len(linears(part)) for part in parts) == [2, 4]
    _, needed = split(layers(1), count=2)  # no other cut
    assert "up0" in needed.program.functions["main"].inputs


def test_as_few_parts_as_the_size_allows():
    program = layers(5)
    parts = split(program, max_bytes=2 * LAYER_BYTES + 100)
    assert [len(linears(part)) for part in parts] in ([4, 4, 2], [4, 2, 4], [2, 4, 4])
    assert compare_across_interfaces(program, parts).equal
    assert [f"{format_bytes(len(linears(part)) * LAYER_BYTES // 2)} of weights" in each.note
            for part, each in zip(parts, parts[0].done, strict=True)] == [True] * 3
    (whole,) = split(program, max_bytes=5 * LAYER_BYTES)
    assert whole.part == "" and not whole.done[-1].changed
    assert whole.done[-1].note == f"one part: its weights take {5 * LAYER_BYTES / 1000:.1f} kB"


def test_a_weight_that_two_parts_read_counts_in_both():
    """The table of the first op is that of the last one."""
    program = layers(4, tied=True)
    parts = split(program, count=3)
    assert compare_across_interfaces(program, parts).equal
    assert "looked_up" in linears(parts[0]) and "scores" in linears(parts[-1])
    half = WIDTH * INNER * 4
    sizes = [len(linears(part)) * half for part in parts]
    assert max(sizes) <= 4 * half and sum(sizes) == 11 * half


def test_each_state_stays_in_its_part_over_steps():
    program = layers(4, states="each")
    parts = split(program, count=2)
    held = [{name for name, var in part.program.functions["main"].inputs.items() if types.is_state(var.sym_type)}
            for part in parts]
    assert held == [{"cache0", "cache1"}, {"cache2", "cache3"}]
    report = compare_across_interfaces(program, parts)
    assert report.equal, str(report)


def test_a_state_of_all_layers_allows_no_cut_between_its_uses():
    with pytest.raises(ane.InputError, match="can be cut at 2 places only; states are used on both sides of others: "
                                             "cache0; expected at most 3 parts"):
        split(layers(4, states="one"), count=4)
    with pytest.raises(ane.InputError, match="cannot be cut, have 24.6 kB of weights; the states cache0 allow no cut"):
        split(layers(4, states="one"), max_bytes=10_000)


def test_one_weight_above_the_size_is_named():
    with pytest.raises(ane.InputError, match=r"max_part_size 3000: the ops around '.*' alone, between which it cannot "
                                             r"be cut, have 4.10 kB of weights; expected at least that"):
        split(layers(2), max_bytes=3000)


def test_more_parts_than_places():
    with pytest.raises(ane.InputError, match="can be cut at 3 places only; expected at most 4 parts"):
        split(layers(2), count=5)
    program = mb.program(input_specs=[mb.TensorSpec((1, 64))], opset_version=ct.target.iOS16)(
        lambda x: mb.linear(x=x, weight=normal(64, 64), name="only"))
    with pytest.raises(ane.InputError, match="split_parts 2: there is no place at which the function can be cut; "
                                             "expected two ops that read weights"):
        split(program, count=2)


@pytest.mark.parametrize("count", [0, 1, 65, -3, 2.5, "2"])
def test_numbers_of_parts(count):
    with pytest.raises(ane.InputError, match="expected a number of parts from 2 to 64"):
        SplitIntoParts(count=count)


def test_functions_are_cut_after_the_same_values():
    program = layers(4)
    program.functions["other"] = clone_program(program).functions["main"]
    parts = split(program, count=2)
    assert all(set(part.program.functions) == {"main", "other"} for part in parts)
    assert compare_across_interfaces(program, parts).equal
    (first, second) = split(program, count=2, function="other")
    assert set(first.program.functions) == set(second.program.functions) == {"other"}


def functions_with(tmp_path, *, shared):
    """A package of two functions of equal layers, with the same weights or with weights of their own."""
    named = {}
    for seed, name in enumerate(("one", "two")):
        @mb.program(input_specs=[mb.TensorSpec((1, 64))], opset_version=ct.target.iOS18)
        def program(x):
            for at in range(4):
                weight = np.full((64, 64), at, np.float32) if shared else normal(64, 64, seed=4 * seed + at)
                x = mb.add(x=x, y=mb.linear(x=x, weight=weight, name=f"linear{at}"), name=f"layer{at}")
            return x

        named[name] = make(tmp_path / f"{name}.mlpackage", program, ct.target.iOS18,
                           pass_pipeline=ct.PassPipeline.EMPTY)
    return with_functions(tmp_path / "both.mlpackage", named, "two")


@pytest.mark.parametrize(("shared", "count"), [(True, 2), (False, 4)])
def test_weights_of_all_functions_count(tmp_path, shared, count):
    size = 2 * 64 * 64 * 4
    report = ane.edit(functions_with(tmp_path, shared=shared), tmp_path / "out.mlpackage", max_part_size=size + 100)
    assert len(report.outputs) == count
    found = [sum(file.stat().st_size for file in Path(each).rglob("*.bin")) for each in report.outputs]
    assert all(size <= each < size + 1000 for each in found), found
    assert f"part 1 of {count} has" in str(report) and "--max-part-size  two: " in str(report)
    assert str(report).count(f"{format_bytes(size)} of weights") == count


def test_weights_of_functions_that_do_not_fit_are_stated():
    program, other = layers(2), layers(2, inner=4 * INNER)
    program.functions["other"] = other.functions["main"]
    with pytest.raises(ane.InputError, match="the ops around .* alone, between which it cannot be cut, have 2"):
        split(program, max_bytes=10_000)
    for op in other.functions["main"].operations:
        if op.op_type == "linear" and op.name == "up1":  # its place is then unknown, and taken to be that before it
            op.outputs[0].name = "other"
    with pytest.raises(ane.InputError, match=r"part 4 of 4 would have 42.0 kB of weights in its functions; expected a "
                                             "larger size, or function=, which cuts one"):
        split(program, max_bytes=25_000)
    assert len(split(program, max_bytes=42_000)) == 2


def test_outputs_are_made_where_their_values_are():
    program = layers(4, heads=3)
    parts = split(program, count=2)
    assert {var.name for var in parts[1].program.functions["main"].outputs} == {"out0", "out1", "out2"}
    assert compare_across_interfaces(program, parts).equal


@pytest.mark.parametrize(("text", "size"), [("1.4GB", 1_400_000_000), ("700 MB", 700_000_000), ("2GiB", 2 << 30),
                                            ("1e9", 10**9), (2048, 2048), ("12kb", 12_000), ("5B", 5)])
def test_sizes(text, size):
    assert parse_byte_size(text, "max_part_size") == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1.4 TB", "0", "0.1", "nan", "1,4GB", "1e999"])
def test_texts_that_are_no_sizes(text):
    with pytest.raises(ane.InputError, match="expected a size such as 1.4GB, 700MB or a number of bytes"):
        parse_byte_size(text, "max_part_size")


def test_the_command_writes_all_parts_or_none(tmp_path, capsys):
    source = make(tmp_path / "source.mlpackage", layers(4), ct.target.iOS16, pass_pipeline=ct.PassPipeline.EMPTY)
    arguments = ["edit", str(source), "-o", str(tmp_path / "out.mlpackage")]
    assert main([*arguments, "--split-parts", "3", "--split-at", "layer1"]) == 2
    assert "--split-at and --split-parts: each makes several packages" in capsys.readouterr().err
    assert main([*arguments, "--split-parts", "1000000000"]) == 2
    assert "expected a number of parts from 2 to 64" in capsys.readouterr().err
    assert main([*arguments, "--max-part-size", "3kB"]) == 2
    assert "expected at least that" in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))
    assert main([*arguments, "--split-parts", "3", "--verify"]) == 0
    printed = capsys.readouterr().out
    assert "part 1 of 3 has" in printed and "equal" in printed
    assert sorted(path.name for path in tmp_path.glob("out*")) == [f"out_{number}.mlpackage" for number in (1, 2, 3)]
    feeds = {"x": normal(1, 1, WIDTH), "mask": normal(1, 1, WIDTH, seed=1)}
    expected = ane.run(source, feeds)["out0"]
    known = dict(feeds)
    for number in (1, 2, 3):
        part = ane.load(tmp_path / f"out_{number}.mlpackage")
        known |= ane.run(part, {name: known[name] for name in part.program.functions["main"].inputs})
    assert np.array_equal(known["out0"], expected)
    assert main([*arguments, "--max-part-size", "1GB"]) == 0
    assert "one part: its weights take" in capsys.readouterr().out and (tmp_path / "out.mlpackage").is_dir()


def test_weights_are_in_the_part_that_reads_them_alone(tmp_path):
    source = make(tmp_path / "source.mlpackage", layers(4, inner=1024), ct.target.iOS16,
                  pass_pipeline=ct.PassPipeline.EMPTY)
    report = ane.edit(source, tmp_path / "out.mlpackage", max_part_size=3 * WIDTH * 1024 * 4)
    sizes = [sum(file.stat().st_size for file in (tmp_path / f"out_{number}.mlpackage").rglob("*.bin"))
             for number in range(1, len(report.outputs) + 1)]
    assert len(sizes) == 4 and max(sizes) < 3 * WIDTH * 1024 * 4


def test_a_model_without_functions_cannot_be_cut(tmp_path):
    source = make(tmp_path / "in.mlpackage", layers(1))
    model, = source.rglob("model.mlmodel")
    spec = ct.utils.load_spec(str(source))
    spec.mlProgram.functions.clear()
    model.write_bytes(spec.SerializeToString())
    with pytest.raises(ane.InputError, match="found no function; expected one that can be cut into parts"):
        ane.edit(source, tmp_path / "out.mlpackage", split_parts=np.int64(2))
