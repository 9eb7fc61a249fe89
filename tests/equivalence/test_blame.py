"""A pass of a preset that breaks the equivalence check is named and left out, the rest is verified and written; one
that was requested by name is named, and nothing is written."""

from __future__ import annotations

import json
import math

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb

import mil_ane_passes as ane
from mil_ane_passes.commands.batch import batch
from mil_ane_passes.commands.main import main
from mil_ane_passes.commands.rewrite_steps import MAX_PASSES_LEFT_OUT
from mil_ane_passes.equivalence.equivalence import compare_programs
from mil_ane_passes.ir.printer import format_program
from mil_ane_passes.ir.query import iterate_ops
from mil_ane_passes.passes.contract import Evidence, Exactness, Hit, Miss, Rewrite
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.runtime.registry import load_kernels

CHAIN = ("abs", "relu", "tanh", "square", "sigmoid", "sin")


class _Plus(Rewrite):
    """An op's result plus a constant: right with 0, wrong with anything else."""

    code, slug, preset, evidence = "X1", "x", "safe", (Evidence("", ""),)
    found, plus, by_name = "relu", 0.0, False

    def __init__(self):
        self.name, self.roots, self._asked = f"more_{self.found}", (self.found,), self.by_name

    def match(self, op):
        done = any(reader.op_type == "real_div" for reader in op.outputs[0].child_ops)
        return Hit(op, note="plus") if not done and "done" not in op.name else Miss(op, "done", near=False)

    def rewrite(self, hit, mb):
        made = getattr(mb, self.found)(x=hit.op.x, name=f"{hit.op.name}_done")
        return mb.add(x=mb.real_div(x=made, y=np.float16(1)), y=np.float16(self.plus))


def right(found, **more):
    return type("_R", (_Plus,), {"found": found, **more})()


def wrong(found, **more):
    return right(found, plus=0.5, **more)


@pytest.fixture
def preset(monkeypatch, leaving_out):
    """Puts rules in the place of what is asked for."""

    def put(*rules):
        monkeypatch.setattr("mil_ane_passes.commands.rewrite_steps.select_rewrites", lambda *_: list(rules))

    return put


def chain(*kinds):
    def body(x):
        for number, kind in enumerate(kinds):
            last = {"name": "y"} if number == len(kinds) - 1 else {}
            x = getattr(mb, kind)(x=x, **last)
        return x

    return build_program(body, x=(2, 3))


@pytest.fixture
def package(tmp_path):
    path = tmp_path / "in.mlpackage"
    model = ct.convert(chain(*CHAIN), convert_to="mlprogram", minimum_deployment_target=ct.target.iOS16,
                       pass_pipeline=ct.PassPipeline.EMPTY)
    model.save(str(path))
    return str(path)


def left_out(report):
    return [each.rule for each in report.left_out_passes]


@pytest.mark.parametrize("bad", range(len(CHAIN)))
def test_whichever_it_is_it_is_left_out_and_the_rest_is_written(bad, package, preset, tmp_path):
    preset(*[(wrong if number == bad else right)(kind) for number, kind in enumerate(CHAIN)])
    report = ane.rewrite(package, tmp_path / "out.mlpackage")
    assert report.status == "written" and report.verified and left_out(report) == [f"more_{CHAIN[bad]}"]
    assert [trace.rule for trace in report.traces if trace.fired] == [
        f"more_{kind}" for number, kind in enumerate(CHAIN) if number != bad]
    written = ane.load(tmp_path / "out.mlpackage").program
    assert sum(op.op_type == "real_div" for _, op in iterate_ops(written)) == len(CHAIN) - 1
    assert compare_programs(ane.load(package).program, written).equal


def test_it_says_which_where_and_by_how_much(package, preset, tmp_path):
    preset(right("abs"), wrong("tanh"), right("sin"))
    report = ane.rewrite(package, tmp_path / "out.mlpackage")
    text = str(report)
    assert (
        "\nane::more_tanh  left out because it breaks the equivalence check at 1 place: main, seed 0, float64: y: "
        in text
    )
    (line,) = [line for line in text.splitlines() if "left out because" in line]
    assert line.endswith("; the first op that differs: add %" + report.left_out_passes[0].verify.first.after.value)
    assert any(line.startswith("written to") and line.endswith(" s, without ane::more_tanh")
               for line in text.splitlines())
    data = json.loads(json.dumps(report.to_dict()))
    (entry,) = data["left_out_passes"]
    assert (entry["pass"], entry["places"], data["blamed"], data["verify"]["status"]) == ("more_tanh", 1, None, "equal")
    assert entry["first_difference"]["after"]["op_type"] == "add" and "float64" in entry["reason"]


def test_several_are_left_out(package, preset, tmp_path):
    preset(wrong("abs"), right("relu"), wrong("tanh"), right("square"), wrong("sin"))
    report = ane.rewrite(package, tmp_path / "out.mlpackage")
    assert report.status == "written" and left_out(report) == ["more_abs", "more_tanh", "more_sin"]
    assert [trace.rule for trace in report.traces if trace.fired] == ["more_relu", "more_square"]


def test_a_pass_that_promises_less_is_not_blamed_for_one_that_is_wrong(package, preset):
    """Beside one that is wrong, what rounds is held to what all of them promise together."""
    preset(right("square", plus=1e-12, exactness=Exactness.ROUNDING), wrong("sin"))
    assert left_out(ane.rewrite(package)) == ["more_sin"]


def test_where_all_are_left_out_the_package_is_copied(package, preset, tmp_path):
    preset(wrong("abs"))
    report = ane.rewrite(package, tmp_path / "out.mlpackage")
    assert (report.status, report.changed, left_out(report)) == ("unchanged", False, ["more_abs"])
    assert ("nothing left to write: all rewrites that matched were left out; the package was copied as it is to "
            in str(report))
    assert format_program(ane.load(tmp_path / "out.mlpackage").program) == format_program(ane.load(package).program)


def test_a_program_in_place_gets_what_is_proved(preset):
    preset(right("abs"), wrong("tanh"))
    prog = chain(*CHAIN)
    report = ane.rewrite(prog, dst=prog)
    assert report.status == "in memory" and report.package is prog
    assert [op.op_type for _, op in iterate_ops(prog) if op.op_type != "const"] == [
        "abs", "real_div", "add", *CHAIN[1:]]


def test_what_was_asked_for_by_name_is_named_and_not_left_out(package, preset, tmp_path, capsys):
    preset(right("abs"), wrong("tanh", by_name=True), right("sin"))
    out = tmp_path / "out.mlpackage"
    assert main(["rewrite", package, "-o", str(out), "--passes", "more_tanh"]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(
        "nothing written: ane::more_tanh breaks the equivalence check at 1 place: main, seed 0, float64: y: "
    )
    assert "; the first op that differs: add %" in last and "remove it from --passes" in last
    assert not out.exists()
    report = ane.rewrite(package, out)
    assert report.faulty_pass.rule == "more_tanh" and not report.left_out_passes
    assert report.to_dict()["blamed"]["pass"] == "more_tanh" and report.status == "not verified"


def test_beside_one_that_was_asked_for_a_presets_is_left_out(package, preset, tmp_path):
    preset(right("abs", by_name=True), wrong("tanh"))
    report = ane.rewrite(package, tmp_path / "out.mlpackage")
    assert report.status == "written" and left_out(report) == ["more_tanh"]


def test_a_model_that_cannot_be_run_blames_no_pass(package, preset, tmp_path, monkeypatch, capsys):
    preset(right("abs"), right("tanh"))
    monkeypatch.delitem(load_kernels(), "square")
    assert main(["rewrite", package, "-o", str(tmp_path / "out.mlpackage")]) == 1
    text = capsys.readouterr().out
    assert ("not verified: the unmodified model already fails the equivalence check with itself: the reference "
            "runtime has no "
            "kernel for: square ('") in text
    assert "left out" not in text and "nothing written" in text


def test_a_pass_that_brings_an_op_that_cannot_be_run_is_left_out(package, preset, tmp_path, monkeypatch):
    preset(right("abs"), wrong("tanh"), right("sin"))
    before = chain(*CHAIN)
    monkeypatch.delitem(load_kernels(), "real_div")
    report = ane.rewrite(before)
    assert left_out(report) == ["more_abs", "more_tanh", "more_sin"]
    assert "no kernel for: real_div" in report.left_out_passes[0].reason and report.status == "unchanged"


def test_a_pass_that_changes_a_branch_no_run_enters_is_left_out(preset):
    preset(right("abs"), right("tanh"))
    built = build_program(lambda x: mb.cond(
        pred=mb.greater(x=mb.reduce_sum(x=mb.cast(x=x, dtype="fp32"), axes=[0, 1], keep_dims=False), y=np.float32(1e6)),
        _true_fn=lambda: mb.abs(x=x), _false_fn=lambda: mb.tanh(x=x), name="y"), x=(2, 3))
    report = ane.rewrite(built)
    assert left_out(report) == ["more_abs"] and report.verify.equal
    assert report.left_out_passes[0].reason.startswith("no run entered ")
    said = str(report)
    assert "\nane::more_abs  left out because it is not covered by the equivalence check at 1 place: no run" in said
    assert "feeds= compares on values that enter it" in said


def test_there_is_an_end_to_leaving_out(preset):
    kinds = ("abs", "relu", "tanh", "square", "sigmoid", "sin", "cos", "erf", "atan", "exp")
    preset(*map(wrong, kinds))
    said = []
    report = ane.rewrite(chain(*kinds), progress=said.append)
    assert report.status == "not verified" and len(report.left_out_passes) == MAX_PASSES_LEFT_OUT < len(kinds)
    assert f"{MAX_PASSES_LEFT_OUT} passes were left out" in str(report) and report.faulty_pass is None
    halvings = [text for text in said if "searching for the faulty one" in text]
    assert len(halvings) <= MAX_PASSES_LEFT_OUT * math.ceil(math.log2(len(kinds)))
    assert "ane::more_abs breaks the equivalence check; continuing without it" in said


def test_what_is_right_is_proved_once(package, preset):
    preset(right("abs"), right("sin"))
    said = []
    report = ane.rewrite(package, progress=said.append)
    assert report.verified and len([text for text in said if "run 1 of" in text]) == 1


def test_a_batch_tells_and_remembers(package, preset, tmp_path):
    preset(right("abs"), wrong("tanh"))
    for status in ("written", "up to date"):
        report = batch("rewrite", package, tmp_path / "out")
        assert [(item.status, item.code, item.left_out_passes) for item in report.items] == [
            (status, 0, ["more_tanh"])]
        assert report.to_dict()["items"][0]["left_out_passes"] == ["more_tanh"]
        assert "without ane::more_tanh" in str(report)


class _MoveThreshold(_Plus):
    """A wrong rewrite that only draws between two thresholds show."""

    found = "greater"

    def match(self, op):
        return Hit(op) if float(op.y.val) == 0.25 else Miss(op, "done", near=False)

    def rewrite(self, hit, mb):
        return mb.greater(x=hit.op.x, y=np.float16(0.252))


def test_a_run_that_only_the_whole_result_asks_for_finds_its_pass(preset):
    """Feeds at thresholds depend on the constants of both programs, so results of some passes do not ask for them."""
    built = build_program(lambda x: mb.sigmoid(x=mb.relu(x=mb.cast(x=mb.greater(
        x=mb.tanh(x=x), y=np.float16(0.25)), dtype="fp16")), name="y"), x=(2, 3))
    preset(right("tanh"), right("relu"), _MoveThreshold(), right("sigmoid"))
    report = ane.rewrite(built)
    assert [each.rule for each in report.left_out_passes] == ["more_greater"], str(report)
    assert "thresholds of floats" in str(report) and report.verify.equal
