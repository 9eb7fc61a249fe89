"""`calibrate`: ranges and room in fp16 on the user's feeds, the first overflow, and what fixes it."""

from __future__ import annotations

import functools
import json
import re

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import get_new_symbol, types

import mil_ane_passes as ane
from mil_ane_passes.commands.main import main
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.passes.registry import get_all_rewrites, get_all_rules
from tests.conversions import save_program
from tests.package.helpers import with_functions


def squares(factor=100):
    """An RMSNorm behind a product: it overflows where the product is beyond 256."""

    def body(x):
        scaled = mb.mul(x=x, y=np.float16(factor), name="scaled")
        mean = mb.reduce_mean(x=mb.mul(x=scaled, y=scaled, name="squares"), axes=[-1], keep_dims=True, name="mean")
        root = mb.rsqrt(x=mb.add(x=mean, y=np.float16(1e-5), name="sum"), epsilon=np.float16(1e-12), name="root")
        return mb.mul(x=scaled, y=root, name="normed")

    return build_program(body, x=(2, 8))


def sums():
    weight = np.concatenate([np.full((1, 32), 1200), np.full((1, 32), -1200)], axis=1).astype(np.float16)
    return build_program(lambda x: mb.linear(x=x, weight=weight, name="y"), x=(1, 64))


@pytest.fixture
def saved(tmp_path):
    def save(made, **feeds):
        path = tmp_path / "in.mlpackage"
        save_program(made, path)
        np.savez(tmp_path / "feeds.npz", **feeds)
        return str(path), str(tmp_path / "feeds.npz")

    return save


def called(capsys, *arguments):
    assert main(["calibrate", *arguments]) == 0
    return capsys.readouterr().out


def test_the_first_overflow_and_its_cure(saved, capsys):
    package, feeds = saved(squares(), x=np.full((2, 8), 5, np.float16))
    data = json.loads(called(capsys, package, "--feeds", feeds, "--format", "json"))
    assert list(data) == [
        "schema",
        "tool",
        "version",
        "command",
        "source",
        "target",
        "runs",
        "sampled",
        "first_overflow",
        "rules",
        "ops",
    ]
    assert (data["schema"], data["command"], data["runs"], data["first_overflow"]) == (1, "calibrate", 1, "squares")
    rows = {row["value"]: row for row in data["ops"]}
    assert rows["scaled"]["headroom"] == pytest.approx(65504 / 500) and rows["scaled"]["beyond"] is None
    assert rows["squares"]["headroom"] == pytest.approx(65504 / 250000)
    assert rows["squares"]["beyond"] == "overflow" and rows["squares"]["cured_by"] == ["scaled_rms_norm"]
    assert {rule["pass"]: rule["places"] for rule in data["rules"]} == {"scaled_rms_norm": 1}
    text = called(capsys, package, "--feeds", feeds)
    assert "first to overflow fp16: %squares in main" in text
    assert "%squares overflows fp16; fixed by ane::scaled_rms_norm" in text


def test_what_fits_is_said_to_fit(saved, capsys):
    package, feeds = saved(squares(), x=np.full((2, 8), 0.5, np.float16))
    lines = called(capsys, package, "--feeds", feeds, "--worst", "2").splitlines()
    assert "all values fit fp16 in 1 run" in lines
    assert [line.split()[0] for line in lines[1:3]] == ["%squares", "%mean"]
    assert lines[3] == "  and 4 more values with more headroom (--worst N shows more)"


def test_nan_does_not_fit(saved, capsys):
    """NaN is in no range: a model that gives nothing else is not one whose values fit."""
    package, feeds = saved(squares(), x=np.full((2, 8), np.nan, np.float16))
    lines = called(capsys, package, "--feeds", feeds).splitlines()
    assert not any(line.startswith("all values fit") for line in lines)
    assert "first NaN: %scaled in main, 16 of 16 elements; NaN is left out of min, max and headroom" in lines
    package, feeds = saved(
        build_program(lambda x: mb.log(x=x, name="y"), x=(1, 4)), x=np.array([[1, 2, -1, 4]], np.float16)
    )
    lines = called(capsys, package, "--feeds", feeds).splitlines()
    assert "first NaN: %y in main, 1 of 4 elements; NaN is left out of min, max and headroom" in lines


def test_the_text_shows_thirty_values_where_nobody_says_how_many_and_the_data_has_all(saved, capsys):
    def body(x):
        return functools.reduce(lambda y, _: mb.abs(x=y), range(40), mb.mul(x=x, y=np.float16(500), name="scaled"))

    package, feeds = saved(build_program(body, x=(2, 8)), x=np.full((2, 8), 300, np.float16))
    lines = called(capsys, package, "--feeds", feeds).splitlines()
    assert lines[31] == "  and 11 more values with more headroom (--worst N shows more)"
    assert lines[1].startswith("> ") and lines[32].startswith("first to overflow fp16: ")
    assert len([line for line in lines if "overflows fp16; fixed by" in line]) == 30
    assert lines[-1] == "and 11 more values overflow fp16"
    assert len(json.loads(called(capsys, package, "--feeds", feeds, "--format", "json"))["ops"]) == 41


def test_sums_that_the_accumulator_cannot_hold(saved, capsys):
    package, feeds = saved(sums(), x=np.ones((1, 64), np.float16))
    data = json.loads(called(capsys, package, "--feeds", feeds, "--format", "json"))
    (row,) = data["ops"]
    assert row["partial"] == pytest.approx(64 * 1200) and row["max"] == 0 and row["headroom"] is None
    assert row["beyond"] == "sums" and row["cured_by"] == ["bounded_accumulation"] and row["codes"] == ["ANE312"]


def test_several_feeds_and_ranges_make_one_table(saved, capsys, tmp_path):
    package, feeds = saved(squares(), x=np.full((2, 8), 0.5, np.float16))
    np.savez(tmp_path / "more.npz", x=np.full((2, 8), -3, np.float16))
    data = json.loads(called(capsys, package, "--feeds", feeds, "--feeds", str(tmp_path / "more.npz"),
                             "--format", "json"))
    scaled = next(row for row in data["ops"] if row["value"] == "scaled")
    assert (data["runs"], scaled["min"], scaled["max"]) == (2, -300, 50)
    ranged = ane.calibrate(package, ranges={"x": (-1, 2)})
    scaled = next(row for row in ranged.found.rows if row.trace.value == "scaled")
    assert (scaled.trace.minimum, scaled.trace.maximum) == (-100, 200)


def test_a_value_that_no_rewrite_fixes_says_so(saved, capsys):
    package, feeds = saved(build_program(lambda x: mb.relu(x=mb.square(x=x, name="large"), name="y"), x=(2,)),
                           x=np.full(2, 1000, np.float16))
    assert "%large overflows fp16; fixed by no single rewrite" in called(capsys, package, "--feeds", feeds)


@pytest.mark.parametrize("arguments, said", [
    (["--ranges", "x"], "ranges: 'x'; expected NAME=LOW:HIGH"),
    (["--ranges", "x=2:1"], "ranges: 'x' is 2 to 1; expected two finite numbers, the lower one first"),
    (["--ranges", "x=a:1"], "ranges: 'x=a:1'; expected NAME=LOW:HIGH"),
    (["--ranges", "x=0:1,x=0:2"], "ranges: 'x' has two ranges, 0 to 1 and 0 to 2; expected one for each input"),
    (["--ranges", "y=0:1"], "ranges: no input 'y'; expected x"),
    (["--ranges", "x=0:1e6"], "ranges: 'x' is 0 to 1e+06; fp16 holds -65504 to 65504"),
    (["--feeds", "missing.npz"], "feeds: no file 'missing.npz'"),
    (["--ranges", "x=0:1", "--target", "m99"], "target 'm99' is unknown"),
])
def test_bad_input_is_one_line(saved, capsys, arguments, said):
    package, _ = saved(squares(), x=np.zeros((2, 8), np.float16))
    capsys.readouterr()
    assert main(["calibrate", package, *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"mil-ane-passes: {said}")


def integers():
    def body(ids):
        return mb.gather(x=np.zeros((100000, 2), np.float16), indices=mb.add(x=ids, y=np.int32(5)), axis=0, name="y")

    return build_program(body, dtype=types.int32, ids=(3,))


def test_integers_have_no_room_in_fp16(saved):
    package, _ = saved(integers())
    row = next(row for row in ane.calibrate(package, ranges={"ids": (90000, 90000)}).found.rows
               if row.trace.op_type == "add")
    assert row.trace.maximum == 90005 and row.to_dict()["headroom"] is None


@pytest.mark.parametrize("ranges, said", [
    ({"ids": (0.2, 0.8)}, "'ids' is 0.2 to 0.8; expected an interval with an integer for int32"),
    ({"ids": (0, 1e12)}, r"'ids' is 0 to 1e\+12; int32 holds -2.14748e\+09 to 2.14748e\+09"),
    ([1], "ranges: found a list"),
])
def test_ranges_that_an_input_cannot_hold_are_refused(ranges, said):
    with pytest.raises(ane.InputError, match=said):
        ane.calibrate(integers(), ranges=ranges)


def image_model(path, layout):
    """A model of an image, which it scales itself."""
    channels = 1 if "GRAY" in layout else 3

    @mb.program(input_specs=[mb.TensorSpec((1, channels, 4, 4), dtype=types.fp32)], opset_version=ct.target.iOS16)
    def scaling(image):
        return mb.mul(x=image, y=np.float32(1 / 255), name="y")

    feature = ct.ImageType("image", (1, channels, 4, 4), color_layout=getattr(ct.colorlayout, layout))
    return save_program(scaling, path, ct.target.iOS16, inputs=[feature])


@pytest.mark.parametrize("layout", ["RGB", "BGR", "GRAYSCALE"])
@pytest.mark.parametrize("ends", ["-1:1", "0:256", "300:400"])
def test_ranges_of_images_are_those_of_pixels(tmp_path, capsys, layout, ends):
    image_model(tmp_path / "in.mlpackage", layout)
    capsys.readouterr()
    for command in (["calibrate"], ["rewrite", "-o", str(tmp_path / "out.mlpackage"), "--preset", "full"]):
        assert main([*command, str(tmp_path / "in.mlpackage"), "--ranges", f"image={ends}"]) == 2
        assert (f"ranges: 'image' is {ends.replace(':', ' to ')}; it is an image, whose pixels are 0 to 255; expected "
                "a range of pixels, before the model scales them\n") in capsys.readouterr().err
    assert main(["calibrate", str(tmp_path / "in.mlpackage"), "--ranges", "image=0:255"]) == 0
    assert "image" not in capsys.readouterr().err


def test_pixels_within_ranges_are_whole(tmp_path):
    image_model(tmp_path / "in.mlpackage", "RGB")
    with pytest.raises(ane.InputError, match="'image' is 0.2 to 0.8; expected an interval with an integer for pixels"):
        ane.calibrate(tmp_path / "in.mlpackage", ranges={"image": (0.2, 0.8)})
    row, = ane.calibrate(tmp_path / "in.mlpackage", ranges={"image": (0.6, 2.6)}).found.rows
    assert (row.trace.minimum, row.trace.maximum) == (np.float32(1 / 255), np.float32(2 / 255))


def test_a_float16_image_has_any_range(tmp_path):
    image_model(tmp_path / "in.mlpackage", "GRAYSCALE_FLOAT16")
    row, *_ = ane.calibrate(tmp_path / "in.mlpackage", ranges={"image": (-510, 510)}).found.rows
    assert row.trace.minimum < -1.9


@pytest.mark.parametrize("feeds", [5, [3], "x.npz"])
def test_feeds_that_are_none_are_refused(feeds):
    with pytest.raises(ane.InputError, match="expected a mapping from input name to array, or a list of such"):
        ane.calibrate(integers(), feeds=feeds)


def test_sizes_that_a_model_does_not_take_are_left_out():
    size = get_new_symbol()
    built = build_program(lambda x: mb.exp(x=mb.reshape(x=x, shape=(-1, 8)), name="y"), dtype=types.fp32, x=(size,))
    report = ane.calibrate(built, ranges={"x": (-1, 1)})
    assert report.runs == 6 and len(report.found.rows) == 2  # of 16 elements, not of 41
    assert ane.rewrite(built, passes="fp16_compute", ranges={"x": (-1, 1)}).changed
    assert ane.rewrite(built, passes="fp16_compute").changed


def test_numbers_that_a_model_does_not_take_are_the_users_to_fix():
    with pytest.raises(ane.InputError, match="found indices"):
        ane.calibrate(integers(), ranges={"ids": (0, 200000)})


def test_ranges_are_of_states_too():
    @mb.program(input_specs=[mb.TensorSpec((2,), dtype=types.fp16), mb.StateTensorSpec((2,), dtype=types.fp16)],
                opset_version=ct.target.iOS18)
    def adding(x, held):
        return mb.add(x=mb.read_state(input=held, name="read"), y=x, name="y")

    rows = {row.trace.value: row.trace for row in ane.calibrate(adding, ranges={"held": (7, 9)}).found.rows}
    assert (rows["read"].minimum, rows["read"].maximum) == (7, 9)


def test_each_function_has_findings_of_its_own(saved, tmp_path):
    """Two functions with values of the same names, of which one overflows."""
    parts = {name: tmp_path / f"{name}.mlpackage" for name in ("large", "small")}
    for name, factor in (("large", 100), ("small", 1)):
        save_program(squares(factor), parts[name], ct.target.iOS18)
    with_functions(tmp_path / "both.mlpackage", parts, "large")
    report = ane.calibrate(str(tmp_path / "both.mlpackage"), ranges={"x": (-5, 5)})
    rows = {(row.function, row.trace.value): row for row in report.found.rows}
    assert rows["large", "squares"].fixed_by == ["scaled_rms_norm"] and not rows["small", "squares"].beyond
    assert rows["large", "normed"].codes == ["ANE309"] and rows["small", "normed"].codes == []
    assert "large:%squares overflows fp16; fixed by ane::scaled_rms_norm" in str(report)


def test_functions_that_feeds_do_not_run_are_named(tmp_path):
    parts = {name: tmp_path / f"{name}.mlpackage" for name in ("large", "small")}
    for name in parts:
        save_program(squares(1), parts[name], ct.target.iOS18)
    with_functions(tmp_path / "both.mlpackage", parts, "small")
    model = ane.load(tmp_path / "both.mlpackage")
    x = model.program.functions["small"].inputs["x"]
    report = ane.calibrate(str(tmp_path / "both.mlpackage"), feeds={"x": np.ones(x.shape, np.float16)})
    assert {row.function for row in report.found.rows} == {"small"}
    assert "not run: function 'large'; " in str(report) and report.to_dict()["functions_not_run"] == ["large"]
    assert "not run" not in str(ane.calibrate(str(tmp_path / "both.mlpackage"), ranges={"x": (-1, 1)}))


def test_rewrite_proves_on_the_feeds_too(saved, capsys, tmp_path):
    package, feeds = saved(sums(), x=np.ones((1, 64), np.float16))
    output = tmp_path / "out.mlpackage"
    capsys.readouterr()
    assert main(["rewrite", package, "-o", str(output), "--preset", "full", "--feeds", feeds, "--format", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["status"] == "written" and "given feeds" in {case["feeds"] for case in data["verify"]["cases"]}
    found = ane.run(output, {"x": np.ones((1, 64), np.float16)}, quirks=["mac_overflow_32768"])
    assert np.array_equal(next(iter(found.values())), np.zeros((1, 1)))


def test_without_feeds_it_runs_on_random_feeds_and_says_so(saved, capsys):
    package, _ = saved(integers(), ids=np.zeros(3, np.int32))
    out = called(capsys, package)
    assert "on random feeds, because neither --feeds nor --ranges were given" in out
    data = json.loads(called(capsys, package, "--format", "json"))
    assert data["sampled"] and data["runs"] >= 2
    assert not ane.calibrate(package, feeds={"ids": np.zeros(3, np.int32)}).to_dict()["sampled"]


def test_ranges_include_both_ends_and_an_error_says_so(saved, capsys):
    package, _ = saved(integers(), ids=np.zeros(3, np.int32))
    assert main(["calibrate", package, "--ranges", "ids=0:100000"]) == 2
    error = capsys.readouterr().err
    assert "expected -100000..99999" in error and error.rstrip().endswith("--ranges includes both ends")
    assert main(["calibrate", package, "--ranges", "idx=0:3"]) == 2
    assert capsys.readouterr().err.endswith("no input 'idx'; expected ids; did you mean 'ids'?\n")
    assert main(["calibrate", package, "--ranges", "ids=0:99994"]) == 0


def test_the_passes_it_names_exist(saved, capsys):
    """nan_logic is a finding without a rewrite: it is not printed as a pass."""
    rule = get_all_rules()["nan_logic"]
    built = next(iter(rule().examples())).build()
    package, feeds = saved(built, x=np.ones(built.functions["main"].inputs["x"].shape, np.float16))
    out = called(capsys, package, "--feeds", feeds)
    assert f"ANE319 {rule.slug}: 1 match\n" in f"{out}\n"
    data = json.loads(called(capsys, package, "--feeds", feeds, "--format", "json"))
    assert [(rule["rule"], rule["pass"]) for rule in data["rules"]] == [("nan_logic", None)]
    fixed, feeds = saved(squares(), x=np.full((2, 8), 300, np.float16))
    for name in re.findall(r"ane::(\w+)", called(capsys, fixed, "--feeds", feeds)):
        assert name in get_all_rewrites()


def test_a_rule_that_fails_is_named_and_the_others_are_looked_at(saved, monkeypatch, capsys):
    def broken(self, op):
        raise ValueError("no such op")

    package, feeds = saved(squares(), x=np.full((2, 8), 300, np.float16))
    monkeypatch.setattr(get_all_rewrites()["stable_softplus"], "roots", ("mul",))
    monkeypatch.setattr(get_all_rewrites()["stable_softplus"], "match", broken)
    out = called(capsys, package, "--feeds", feeds)
    assert "failed" in out and "ValueError: no such op" in out and "ane::scaled_rms_norm" in out
    data = json.loads(called(capsys, package, "--feeds", feeds, "--format", "json"))
    assert [each["pass"] for each in data["failed_rules"]] == ["stable_softplus"]
