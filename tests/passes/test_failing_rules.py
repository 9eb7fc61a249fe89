"""A rule that fails takes neither the program nor the other rules with it."""

from __future__ import annotations

import json
import logging

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import block as host_block

import mil_ane_passes as ane
from mil_ane_passes.commands.main import main
from mil_ane_passes.ir.printer import format_program
from mil_ane_passes.ir.query import iterate_ops
from mil_ane_passes.passes.contract import BlockRewrite, Hit, ProgramRewrite, Rewrite
from mil_ane_passes.passes.engine import apply_rewrite
from mil_ane_passes.passes.examples import build_program, make_weight
from mil_ane_passes.passes.pipeline import apply_rewrites, select_rewrites
from mil_ane_passes.passes.registry import find_rewrite
from mil_ane_passes.utils.errors import InputError, RuleError
from tests.conversions import save_program

pytest.importorskip("torch")
FAILING = "triangle_cumsum"


def mixed(x):
    """What `triangle_cumsum` and `stable_softplus` rewrite, the second of each in a nested block."""
    x = mb.softplus(x=mb.cumsum(x=x, axis=-1), name="soft")
    return mb.mul(x=mb.cumsum(x=x, axis=-1, name="last"), y=np.float16(2), name="y")


def built():
    return build_program(mixed, x=(1, 4, 300))


def broken(kind):
    """A `rewrite` that fails at its second place, after it has changed the program."""
    def rewrite(self, hit, mb):
        if hit.op.outputs[0].name != "last":
            return mb.abs(x=hit.op.x)
        mb.relu(x=hit.op.x)
        if kind == "shape":
            return mb.reduce_max(x=hit.op.x, axes=[-1])
        if kind == "memory":
            raise MemoryError("24 GB")
        if kind == "recursion":
            return rewrite(self, hit, mb)
        raise KeyError("odd")

    return rewrite


@pytest.fixture(params=["shape", "memory", "recursion", "exception"])
def failing(request, monkeypatch):
    monkeypatch.setattr(find_rewrite(FAILING), "rewrite", broken(request.param))
    return request.param


def fired(traces):
    return {trace.rule for trace in traces if trace.fired}


def test_what_it_changed_is_rolled_back_and_the_rest_is_done(failing):
    prog, others = built(), built()
    traces = apply_rewrites(select_rewrites("full"), prog, target="m4")
    (only,) = [trace.failed for trace in traces if trace.failed]
    assert (only.rule, only.function, only.op_type, only.value) == (FAILING, "main", "cumsum", "last")
    assert only.reason and "triangle_cumsum.py" not in only.reason
    apply_rewrites([rule for rule in select_rewrites("full") if rule.name != FAILING], others, target="m4")
    assert format_program(prog) == format_program(others)
    assert FAILING not in fired(traces) and "stable_softplus" in fired(traces)
    prog.validate()
    assert not host_block.BLOCK_STACK


def converted(pipeline):
    return ct.convert(built(), convert_to="mlprogram", skip_model_load=True, pass_pipeline=pipeline,
                      minimum_deployment_target=ct.target.iOS17)._mil_program


@pytest.mark.parametrize("asked", [{"passes": FAILING}, {"preset": "full", "strict": True}])
def test_by_name_or_strict_it_is_an_error_that_names_rule_op_and_reason(failing, asked):
    with pytest.raises(RuleError, match=FAILING) as error:
        ane.rewrite(built(), target="m4", **asked)
    assert error.value.failure.value == "last" and "last" in str(error.value)


def test_a_strict_conversion_stops(failing):
    with pytest.raises(RuleError, match=FAILING) as error:
        converted(ane.pipeline(preset="full", target="m4", strict=True))
    assert error.value.failure.value == "last"


def test_a_conversion_goes_on_and_says_so(failing, caplog):
    with caplog.at_level(logging.WARNING, "mil_ane_passes"):
        found = converted(ane.pipeline(preset="full", target="m4", max_growth=None))
    said = [record.getMessage() for record in caplog.records if record.name == "mil_ane_passes"]
    assert len(said) == 1 and f"ane::{FAILING} failed at %last (cumsum): " in said[0]
    without = ane.pipeline(preset="full", target="m4", max_growth=None)
    without.remove_passes({f"ane::{FAILING}"})
    assert format_program(found) == format_program(converted(without))


def saved(folder, prog):
    path = folder / "in.mlpackage"
    save_program(prog, path)
    return str(path)


def test_the_command_reports_it_and_writes_the_rest(failing, tmp_path, capsys):
    path, out = saved(tmp_path, built()), str(tmp_path / "out.mlpackage")
    asked = ["rewrite", path, "-o", out, "--preset", "full", "--target", "m4", "--max-growth", "none"]
    assert main([*asked, "--format", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    (only,) = told["failed_passes"]
    assert (only["pass"], only["op_type"], only["value"], only["places"]) == (FAILING, "cumsum", "last", 1)
    assert told["status"] == "written" and told["verified"]
    assert [trace["failed"] for trace in told["traces"] if "failed" in trace] == [only]
    assert main([*asked, "--overwrite"]) == 0
    text = capsys.readouterr().out
    assert f"ane::{FAILING}  failed and was rolled back, at %last (cumsum): " in text
    assert f"without ane::{FAILING}" in text


@pytest.mark.parametrize("how", [["--preset", "full", "--strict"], ["--passes", FAILING]])
def test_the_command_stops_where_that_is_requested(failing, how, tmp_path, capsys):
    path, out = saved(tmp_path, built()), tmp_path / "out.mlpackage"
    assert main(["rewrite", path, "-o", str(out), "--target", "m4", *how]) == 2
    said = capsys.readouterr().err
    assert FAILING in said and "last" in said and "Traceback" not in said and "internal error" not in said
    assert not out.exists()


def test_a_batch_names_it(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(find_rewrite(FAILING), "rewrite", broken("exception"))
    saved(tmp_path, built())
    asked = ["batch", "rewrite", str(tmp_path / "in.mlpackage"), "-o", str(tmp_path / "out"), "--jobs", "0",
             "--preset", "full", "--target", "m4"]
    assert main([*asked, "--format", "json"]) == 0
    (item,) = json.loads(capsys.readouterr().out)["items"]
    assert item["failed_passes"] == [FAILING] and item["status"] == "written"
    assert main([*asked, "--again", "--strict"]) == 2
    assert FAILING in capsys.readouterr().out


def test_a_match_that_fails_costs_only_its_own_findings(monkeypatch, tmp_path, capsys):
    path = saved(tmp_path, built())
    before = {(item["code"], item["value"]) for item in ane.lint(path, target="m4").to_dict()["findings"]}
    match = find_rewrite(FAILING).match

    def half(self, op):
        if op.outputs[0].name == "last":
            raise AttributeError("'select' object has no attribute 'x'")
        return match(self, op)

    monkeypatch.setattr(find_rewrite(FAILING), "match", half)
    assert main(["lint", path, "--target", "m4", "--format", "json"]) in (0, 1)
    told = json.loads(capsys.readouterr().out)
    (only,) = told["failed_rules"]
    assert (only["pass"], only["value"]) == (FAILING, "last")
    assert only["reason"] == "AttributeError: 'select' object has no attribute 'x'"
    assert {(item["code"], item["value"]) for item in told["findings"]} == before
    assert main(["lint", path, "--target", "m4"]) in (0, 1)
    assert f"rule {FAILING} failed at %last (cumsum): AttributeError" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["edge_integers", "ping_pong", "fp16_compute"])
def test_rules_about_blocks_plans_and_programs_may_fail_too(name, monkeypatch):
    from mil_ane_passes.passes.registry import get_all_rules

    kind = next(each for each in ("match_program", "match_plan", "match_block") if hasattr(get_all_rules()[name], each))

    def fails(self, asked):
        yield from ()
        raise IndexError("out of range")

    monkeypatch.setattr(get_all_rules()[name], kind, fails)
    report = ane.lint(built(), target="m4")
    (only,) = report.to_dict()["failed_rules"]
    assert (only["pass"], only["op_type"], only["reason"]) == (name, None, "IndexError: out of range")
    assert report.findings


def test_what_is_not_the_fault_of_a_rule_is_no_failure(monkeypatch):
    def rewrite(self, hit, mb):
        raise error

    monkeypatch.setattr(find_rewrite(FAILING), "rewrite", rewrite)
    for error in (OSError("disk full"), InputError("max_error is 7")):
        prog = built()
        text = format_program(prog)
        with pytest.raises(type(error), match=str(error)):
            apply_rewrites(select_rewrites(passes=FAILING), prog, target="m4")
        assert format_program(prog) == text


class Halfway(Rewrite):
    name, code, slug, roots = "halfway", "X3", "x", ("relu",)

    def match(self, op):
        return Hit(op)

    def rewrite(self, hit, mb):
        return mb.relu(x=hit.op.x)


class HalfwayThroughBlocks(BlockRewrite):
    name, code, slug = "halfway_blocks", "X4", "x"

    def match_block(self, block):
        yield from (Hit(op) for op in block.operations if op.op_type == "relu")

    def rewrite_block(self, hit, mb):
        if hit.op.enclosing_block.outer_op is not None:
            raise ValueError("nested")
        return {hit.op.outputs[0]: mb.abs(x=hit.op.x)}


class HalfwayThroughTheProgram(ProgramRewrite):
    name, code, slug = "halfway_program", "X5", "x"

    def match_program(self, program):
        yield Hit(next(op for _, op in iterate_ops(program) if op.op_type == "relu"))

    def rewrite_program(self, hits, program):
        program.functions["other"] = program.functions.pop("main")
        program.hint = "odd"
        raise ValueError("gone")


def branched():
    def body(x):
        x = mb.linear(x=mb.relu(x=x, name="outer"), weight=make_weight(4, 4))
        return mb.cond(pred=mb.equal(x=mb.reduce_max(x=x), y=np.float16(0)), _true_fn=lambda: mb.relu(x=x),
                       _false_fn=lambda: mb.exp(x=x), name="y")

    return build_program(body, x=(2, 4))


@pytest.mark.parametrize("rule", [Halfway, HalfwayThroughBlocks, HalfwayThroughTheProgram])
def test_after_any_failure_the_program_is_as_it_was_and_works(rule):
    prog = branched()
    text, names = format_program(prog, names=True), [op.name for _, op in iterate_ops(prog)]
    with pytest.raises(RuleError, match=rule.name):
        apply_rewrite(rule(), prog)
    assert format_program(prog, names=True) == text and [op.name for _, op in iterate_ops(prog)] == names
    assert not hasattr(prog, "hint") and not host_block.BLOCK_STACK
    prog.validate()
    apply_rewrites(select_rewrites("full"), prog)
    prog.validate()


def nested(depth):
    """Branches with constant predicates, one in the other."""
    def body(x, left=depth):
        if not left:
            return mb.relu(x=x)
        known = mb.const(val=np.bool_(left % 2))
        deeper = lambda: body(mb.abs(x=x), left - 1)  # noqa: E731
        other = lambda: mb.exp(x=x)  # noqa: E731
        made = mb.cond(pred=known, _true_fn=deeper if left % 2 else other, _false_fn=other if left % 2 else deeper)
        return mb.tanh(x=made)

    return build_program(lambda x: mb.identity(x=body(x), name="y"), x=(2, 3))


@pytest.mark.parametrize("depth", [1, 17, 40])
def test_branches_are_inlined_at_any_depth(depth):
    prog = nested(depth)
    (trace,) = apply_rewrites(select_rewrites(passes="inline_constant_branch"), prog)
    kinds = [op.op_type for _, op in iterate_ops(prog) if op.op_type not in ("const", "identity")]
    assert len(trace.fired) >= 1 and kinds == ["abs"] * depth + ["relu"] + ["tanh"] * depth
    prog.validate()


def test_nested_branches_do_not_stop_the_preset(tmp_path, capsys):
    path = saved(tmp_path, nested(20))
    assert main(["rewrite", path, "-o", str(tmp_path / "out.mlpackage"), "--preset", "full"]) == 0
    assert "failed" not in capsys.readouterr().out
