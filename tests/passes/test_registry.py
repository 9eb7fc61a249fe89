"""Rules are found where they lie: in our folders, and in a newcomer's file there."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil.passes.pass_registry import PASS_REGISTRY

import mil_ane_passes as ane
import mil_ane_passes.rewrites as folder
import mil_ane_passes.rules as problems
from mil_ane_passes.commands import pages
from mil_ane_passes.commands.main import main
from mil_ane_passes.ir.query import iterate_ops
from mil_ane_passes.passes.contract import BlockRewrite, Rewrite
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.passes.pipeline import register_passes
from mil_ane_passes.passes.registry import find_rewrite, find_rule, get_all_rules, reset_registry
from mil_ane_passes.passes.rule_class import shares_code
from mil_ane_passes.utils.errors import InputError, RuleError

SOURCE = '''
"""Square by mul."""
from mil_ane_passes.passes.contract import Community, Example, Hit, Rewrite

class {name}(Rewrite):
    """Write square(x) as mul(x, x)."""
    code, slug = "{code}", "square"
    preset = "{preset}"
    roots = ("square",)
    {evidence}
    scale: int = 1
    "An option."
    def match(self, op):
        return Hit(op, note="squared")
    def rewrite(self, hit, mb):
        return mb.mul(x=hit.op.x, y=hit.op.x)
'''
EVIDENCE = 'evidence = (Community("shown here", source="https://example.org"),)'


FINDINGS = """
from mil_ane_passes.passes.contract import Community, Miss, Rule

class _Never(Rule):
    evidence = (Community("shown here", source="https://example.org"),)
    def match(self, op):
        return Miss(op, "never")

class Square2d(_Never):
    \"\"\"Finds nothing.\"\"\"
    code, slug, roots = "ACME101", "mine", ("relu",)

class CeilFound(_Never):
    \"\"\"Finds nothing either.\"\"\"
    code, slug, roots = "ACME102", "yours", ("ceil",)
"""


def source(name="SquareByMul", code="ACME901", preset="safe", evidence=EVIDENCE) -> str:
    return SOURCE.format(name=name, code=code, preset=preset, evidence=evidence)


@pytest.fixture
def newcomer(tmp_path, monkeypatch, clean_registry):
    """Writes a file beside our rewrites, as somebody who adds one would."""

    def write(stem: str, text: str) -> Path:
        file = tmp_path / f"{stem}.py"
        file.write_text(text, encoding="utf-8")
        monkeypatch.delitem(sys.modules, f"mil_ane_passes.rewrites.{stem}", raising=False)
        return file

    monkeypatch.setattr(folder, "__path__", [*folder.__path__, str(tmp_path)])
    monkeypatch.setattr(pages, "_read_current_pages", lambda: None)  # as with a new file in the folder itself
    yield write
    for file in tmp_path.glob("*.py"):
        sys.modules.pop(f"mil_ane_passes.rewrites.{file.stem}", None)


def squares():
    return build_program(lambda x: mb.square(x=mb.square(x=x), name="y"), x=(2, 3))


def public_files(folder):
    return {file.stem for file in (Path(ane.__file__).parent / folder).rglob("*.py") if not file.stem.startswith("_")}


def test_every_file_of_the_folders_has_rules_and_a_rewrite_is_named_after_its_file():
    rules = get_all_rules()
    assert public_files("rewrites") == {name for name, rule in rules.items() if issubclass(rule, Rewrite)}
    modules = {rule.__module__ for rule in rules.values() if not issubclass(rule, Rewrite)}
    assert {module.rpartition(".")[2] for module in modules} == public_files("rules")
    assert all(rule.name == name for name, rule in rules.items())


def test_rules_are_in_order_of_their_names_and_problems_have_codes_of_their_own():
    assert list(get_all_rules()) == sorted(get_all_rules())
    problems = [rule for rule in get_all_rules().values() if not shares_code(rule)]
    assert len({rule.code for rule in problems}) == len({rule.slug for rule in problems}) == len(problems)
    assert {rule.code for rule in get_all_rules().values()} == {rule.code for rule in problems}


def test_summaries_are_one_line_and_not_cut_off():
    assert [name for name, rule in get_all_rules().items() if not rule.summary().endswith(".")] == []


def test_one_new_file_is_all_it_takes(newcomer, capsys):
    newcomer("square_by_mul", source())
    register_passes()
    assert "ane::square_by_mul" in PASS_REGISTRY
    assert "ane::square_by_mul" in ane.pipeline().passes
    assert main(["passes"]) == 0
    assert "ACME901  ane::square_by_mul" in capsys.readouterr().out
    assert main(["explain", "square"]) == 0
    assert "scale=1  An option." in capsys.readouterr().out
    prog = squares()
    PASS_REGISTRY["ane::square_by_mul"](prog)
    assert [op.op_type for _, op in iterate_ops(prog) if op.op_type != "const"] == ["mul", "mul"]


def test_a_new_file_runs_in_the_command(newcomer, fixtures, capsys):
    newcomer(
        "square_by_mul",
        source().replace('"square"', '"relu"').replace("mb.mul(x=hit.op.x, y=hit.op.x)", "mb.abs(x=hit.op.x)"),
    )
    assert main(["rewrite", str(fixtures / "nothing_to_do.mlpackage"), "--dry-run", "--format", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert "square_by_mul" in report["passes"]
    assert [trace["pass"] for trace in report["traces"] if trace["fired"]] == ["square_by_mul"]


def test_files_with_an_underscore_are_no_rules(newcomer):
    newcomer("_helper", source())
    assert "_helper" not in get_all_rules()


def test_a_file_of_rules_may_have_several(newcomer, monkeypatch):
    file = newcomer("squares", FINDINGS)
    monkeypatch.setattr(folder, "__path__", [each for each in folder.__path__ if each != str(file.parent)])
    monkeypatch.setattr(problems, "__path__", [*problems.__path__, str(file.parent)])
    monkeypatch.delitem(sys.modules, "mil_ane_passes.rules.squares", raising=False)
    assert {"square_2d", "ceil_found"} <= set(get_all_rules())
    reset_registry()
    sys.modules.pop("mil_ane_passes.rules.squares")
    file.write_text("x = 1")
    with pytest.raises(RuleError) as error:
        get_all_rules()
    assert str(error.value) == f"{file} defines 0 rules; expected at least one a file"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            source(evidence="pass"),
            "SquareByMul in {file} has no evidence; every rule states code, slug and evidence, or the rules that it "
            "`fixes`",
        ),
        (
            source(code=""),
            "SquareByMul in {file} has no code; every rule states code, slug and evidence, or the rules that it "
            "`fixes`",
        ),
        (
            source().replace('"square"', '""', 1),
            "SquareByMul in {file} has no slug; every rule states code, slug and evidence, or the rules that it "
            "`fixes`",
        ),
        (source() + source("Other", "ACME902"), "{file} defines 2 rules; expected exactly one a file"),
        ("x = 1", "{file} defines 0 rules; expected exactly one a file"),
        (
            source("Other"),
            "Other in {file} has name 'other'; expected that of its file, which holds one rewrite",
        ),
    ],
)
def test_a_rule_that_is_not_whole_is_refused(newcomer, text, message):
    file = newcomer("square_by_mul", text)
    with pytest.raises(RuleError) as error:
        get_all_rules()
    assert str(error.value) == message.format(file=file)


def test_a_code_that_is_taken_is_refused_with_both_files(newcomer):
    file = newcomer("square_by_mul", source(code="ANE301"))
    with pytest.raises(RuleError) as error:
        get_all_rules()
    text = str(error.value)
    assert text.startswith("code 'ANE301' is used by ") and text.endswith("expected one rule per code")
    assert str(file) in text and "lift_conv_transpose_1d.py" in text


def test_names_are_taken_with_and_without_the_namespace():
    assert find_rewrite("ane::lift_conv_1d") is find_rewrite("lift_conv_1d")
    assert issubclass(find_rewrite("carry_lift"), BlockRewrite) and issubclass(find_rewrite("lift_conv_1d"), Rewrite)


@pytest.mark.parametrize(
    "key",
    [
        "ANE301",
        "ane301",
        "conv-transpose-1d-bias",
        "lift_conv_transpose_1d",
        "ane::lift_conv_transpose_1d",
        "LIFT_CONV_TRANSPOSE_1D",
    ],
)
def test_a_rule_is_found_by_code_slug_and_name(key):
    assert find_rule(key) is find_rewrite("lift_conv_transpose_1d")


def test_what_a_measurement_contradicts_has_a_page(capsys):
    assert main(["explain", "ane599"]) == 0
    assert capsys.readouterr().out.startswith("ANE599 measured-otherwise")


@pytest.mark.parametrize(
    ("key", "ending"),
    [
        ("ANE3001", "; did you mean 'ANE301'?"),
        ("conv-transpose-bias", "; did you mean 'conv-transpose-1d-bias'?"),
        ("conv_trans", "; names that contain it: explicit_conv_transpose_shape, lift_conv_transpose_1d, "
                       "split_conv_transpose_bias, symmetrize_conv_transpose_pad"),
        ("zzz", "lists codes and names"),
        ("ane52", "; codes with this prefix: ANE520, ANE521, ANE522, ANE523, ANE524"),
    ],
)
def test_an_unknown_rule_has_a_suggestion(key, ending):
    with pytest.raises(InputError) as error:
        find_rule(key)
    assert str(error.value).startswith(f"no rule '{key}'; `mil-ane-passes passes` lists codes and names")
    assert str(error.value).endswith(ending)


@pytest.mark.parametrize(("key", "passes"), [
    ("ANE205", "'triangle_cumsum'"), ("cumsum", "'triangle_cumsum'"),
    ("ANE217", "'unroll_gru' or 'unroll_lstm' or 'unroll_rnn'"),
    ("elementary_functions", "'arcsine' or 'hyperbolic' or 'inverse_tanh' or 'tangent'"),
])
def test_a_problem_in_place_of_a_pass_suggests_all_passes_that_fix_it(key, passes):
    with pytest.raises(InputError) as error:
        find_rewrite(key)
    assert str(error.value).endswith(f"; did you mean {passes}?")
