"""Rules of other distributions are found by entry point; what is broken in one is left out, named, stops nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import coremltools as ct
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil.passes.pass_registry import PASS_REGISTRY

import mil_ane_passes as ane
from mil_ane_passes.commands.main import main
from mil_ane_passes.passes import plugins, rule_class
from mil_ane_passes.passes.contract import Rule
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.passes.guard_passes import BEGIN_PASS, END_PASS
from mil_ane_passes.passes.pipeline import PRESETS, apply_rewrites, register_passes, select_rewrites
from mil_ane_passes.passes.registry import (
    find_rewrite,
    find_rule,
    get_all_rewrites,
    get_all_rules,
    get_skipped_plugins,
    reset_registry,
)
from mil_ane_passes.utils.errors import InputError, RuleError
from tests.passes.test_registry import EVIDENCE, source
from tests.without_torch import ABSENT

FINDING = """
from mil_ane_passes.passes.contract import Community, Miss, Rule

class Mine(Rule):
    \"\"\"Finds nothing.\"\"\"
    code, slug, roots = "ACME101", "mine", ("relu",)
    evidence = (Community("shown here", source="https://example.org"),)
    def match(self, op):
        return Miss(op, "never")
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch, clean_registry):
    """Installs a distribution that names a module or class under our entry point."""
    installed = []

    def install(target: str, text: str, distribution: str = "newcomer") -> Path:
        site = tmp_path / distribution
        info = site / f"{distribution}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[mil_ane_passes.rules]\nmine = {target}\n")
        (site / f"{distribution}_rules.py").write_text(text)
        monkeypatch.syspath_prepend(str(site))
        installed.append(f"{distribution}_rules")
        reset_registry()
        return site

    plugins._warn_once.cache_clear()
    yield install
    for module in installed:
        sys.modules.pop(module, None)


def the_only_one() -> str:
    (only,) = get_skipped_plugins()
    assert only.distribution == "newcomer 1.0"
    return str(only)


def squares():
    return build_program(lambda x: mb.square(x=mb.square(x=x), name="y"), x=(2, 3))


@pytest.mark.parametrize(
    ("target", "names"),
    [
        ("newcomer_rules:SquareByMul", ["square_by_mul"]),
        ("newcomer_rules:named", ["squares"]),
    ],
)
def test_another_distributions_class_is_found(plugin, target, names):
    text = source() + "class named(SquareByMul):\n    name, code, slug = 'squares', 'X1', 'squares'\n"
    plugin(target, text)
    assert set(names) <= set(get_all_rewrites()) and not get_skipped_plugins()
    register_passes()
    assert {f"ane::{name}" for name in names} <= set(PASS_REGISTRY.passes)


def test_another_distributions_module_is_found(plugin):
    other = source("Other", "ACME902")
    plugin("newcomer_rules", source() + other.replace('"square"', '"other"', 1))
    assert {"square_by_mul", "other"} <= set(get_all_rewrites())
    prog = squares()
    (trace,) = apply_rewrites(select_rewrites(passes="square_by_mul"), prog)
    assert len(trace.fired) == 2


FIRST = """
import sys
sys.modules["torch"] = None
{first}
import mil_ane_passes
import newcomer_rules
from coremltools.converters.mil.mil.passes.pass_registry import PASS_REGISTRY
assert "ane::square_by_mul" in mil_ane_passes.pipeline(passes="square_by_mul").passes
assert "ane::square_by_mul" in PASS_REGISTRY, sorted(name for name in PASS_REGISTRY.passes if name[:3] == "ane")
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("target", ["newcomer_rules", pytest.param("newcomer_rules:SquareByMul",
                                                                    marks=pytest.mark.slow)])
@pytest.mark.parametrize("first", ["import mil_ane_passes", "import newcomer_rules"])
def test_a_plugin_is_found_whoever_is_imported_first(plugin, target, first):
    done = elsewhere(plugin(target, textwrap.dedent(source())), FIRST.format(first=first))
    assert done.returncode == 0, done.stderr[-600:]


@pytest.mark.slow
def test_a_package_that_imports_us_before_its_parts_is_not_taken_for_broken(plugin):
    """While its `__init__` runs, its modules cannot be imported yet: they are asked later."""
    site = plugin("newcomer.rules", "")
    (site / "newcomer").mkdir()
    (site / "newcomer" / "__init__.py").write_text("import mil_ane_passes\nSLUG = 'square'\n")
    (site / "newcomer" / "rules.py").write_text("from . import SLUG\n" + textwrap.dedent(source()))
    asked = "import newcomer, mil_ane_passes\nmil_ane_passes.pipeline(passes='square_by_mul')\n"
    done = elsewhere(site, asked)
    assert done.returncode == 0 and "left out" not in done.stderr, done.stderr[-600:]


def elsewhere(site: Path, code: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ABSENT), str(site), str(Path(ane.__file__).parent.parent)])
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False,
                          env={"PYTHONPATH": path, "PATH": ""})


@pytest.mark.parametrize(
    ("target", "text", "why"),
    [
        (
            "newcomer_rules",
            "import no_such_module",
            "importing it fails (ModuleNotFoundError: No module named 'no_such_module')",
        ),
        ("newcomer_rules", "class Broken(:", "importing it fails (SyntaxError: "),
        ("newcomer_rules", "raise SystemExit('no licence')", "importing it fails (SystemExit: no licence)"),
        ("newcomer_rules:Nobody", "x = 1", "importing it fails (AttributeError: "),
        ("newcomer_gone", "x = 1", "importing it fails (ModuleNotFoundError: No module named 'newcomer_gone')"),
        ("newcomer_rules", "x = 1", "the module defines no rule"),
        (
            "newcomer_rules",
            "from mil_ane_passes.rewrites.convolution.lift_conv_1d import LiftConv1d",
            "the module defines no rule (imported ones do not count)",
        ),
        ("newcomer_rules:answer", "answer = 42",
         "found 42; expected a module, or a subclass of mil_ane_passes.passes.contract.Rule"),
        ("newcomer_rules:dict", "dict = dict",
         "found <class 'dict'>; expected a module, or a subclass of mil_ane_passes.passes.contract.Rule"),
        (
            "newcomer_rules:Rewrite",
            "from mil_ane_passes.passes.contract import Rewrite",
            "expected a module, or a subclass",
        ),
    ],
)
def test_an_entry_point_that_gives_no_rule_is_left_out(plugin, caplog, capsys, target, text, why):
    plugin(target, text)
    assert main(["passes"]) == 0
    assert "ane::lift_conv_1d" in capsys.readouterr().out
    said = the_only_one()
    assert said.startswith(f"plugin newcomer 1.0: entry point 'mine = {target}' is skipped: ") and why in said
    assert said.endswith("Everything else works; fix, update or uninstall newcomer")
    reset_registry()
    assert main(["explain", "ANE301"]) == 0
    assert [record.getMessage() for record in caplog.records if record.name == "mil_ane_passes"] == [said]


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('"ACME901"', '""', "it has no code; every rule states code, slug and evidence"),
        ('"ACME901"', '"ANE599"', "it has code 'ANE599', which is reserved for mil_ane_passes; expected other letters"),
        ('"ACME901"', '"TORCH101"', "it has code 'TORCH101', which is reserved for mil_ane_passes"),
        ('"ACME901"', '"mine-1"', "it has code 'mine-1'; expected capital letters and digits"),
        ('"ACME901"', "7", "it has code 7; expected capital letters and digits"),
        ('"square"', '"Square It"', "it has slug 'Square It'; expected lower-case letters"),
        ('roots = ("square",)', 'roots = "square"', "it has roots='square'; expected a tuple of strings"),
        ('roots = ("square",)', 'roots = ("square",); after = ["b"]',
         "it has after=['b']; expected a tuple of strings"),
        ("evidence = (Community(", "evidence = (str(", "importing it fails (TypeError: "),
        ('evidence = (Community("shown here", source="https://example.org"),)', 'evidence = ("shown here",)',
         "it has evidence=('shown here',); expected a tuple of Measured, Vendor or Community"),
        ('preset = "safe"', 'preset = "safest"', "it has preset 'safest'; expected one of safe, full, named"),
        ('preset = "safe"', 'stage = "last"', "it has stage 'last'; expected one of structure, "),
        ('preset = "safe"', 'exactness = "bitwise"', "it has exactness='bitwise'; expected an Exactness"),
        ('preset = "safe"', 'preset = "safe"; interface = True',
         "it has preset 'safe' and changes dtypes of inputs and outputs; expected preset 'named'"),
        *(('preset = "safe"', f"preset = 'safe'; targets = {wrong!r}",
           f"it has targets={wrong!r}; expected a Gate, such as Gate('m1', 'm4')")
          for wrong in ("m4", ("m4",), None, [])),
        ('preset = "safe"', "from mil_ane_passes.passes.targets import Gate; targets = Gate('m99')",
         "it has targets=Gate(first='m99', last=''), which is not valid: target 'm99' is unknown"),
        ('preset = "safe"', 'name = "full"', "it has name 'full', which is not a valid pass name"),
        ('preset = "safe"', 'name = "two-words"', "it has name 'two-words', which is not a valid pass name"),
        ("def rewrite", "def rewrites", "it does not define rewrite(); expected match and rewrite"),
        ("def match", "def matches", "it does not define match(); expected match and rewrite"),
        ("scale: int = 1", "target: str = ''", "it has an option 'target', which is an option of every pass"),
        ("scale: int = 1", "scale: int", "it cannot be instantiated (AttributeError: "),
        ("scale: int = 1", "scale: Nonsense = 1", "it cannot be instantiated (NameError: "),
        ("scale: int = 1", "def __init__(self, scale): pass", "it cannot be instantiated (TypeError: "),
        ('"ACME901"', '"ANE301"', "it has code 'ANE301', which is reserved for mil_ane_passes"),
        ('"square"', '"conv-transpose-1d-bias"', "it has slug 'conv-transpose-1d-bias', which LiftConvTranspose1d in"),
        ('preset = "safe"', 'name = "lift_conv_1d"', "it has name 'lift_conv_1d', which LiftConv1d in "),
    ],
)
def test_a_rule_that_is_not_whole_is_left_out(plugin, old, new, why):
    text = source()
    assert old in text
    # `from __future__` so that a wrong annotation is seen when options are read, not when the module is imported
    site = plugin("newcomer_rules", "from __future__ import annotations\n" + text.replace(old, new, 1))
    ours = set(get_all_rules())
    said = the_only_one()
    assert why in said and "lift_conv_1d" in ours and "square_by_mul" not in ours
    assert ("entry point" in said) or f"SquareByMul in {site / 'newcomer_rules.py'} is skipped: " in said


def test_what_is_whole_beside_it_is_used(plugin):
    bad = source("Other")
    plugin("newcomer_rules", textwrap.dedent(source()) + textwrap.dedent(bad))
    assert "square_by_mul" in get_all_rules() and "other" not in get_all_rules()
    assert "it has code 'ACME901', which SquareByMul in " in the_only_one()


def test_two_rules_of_one_name_are_told_apart_by_a_name_of_their_own(plugin):
    other = source("Other", "ACME902").replace("preset = ", 'name = "square_by_mul"\n    preset = ')
    plugin("newcomer_rules", source() + other.replace('"square"', '"other"', 1))
    assert "it has name 'square_by_mul', which SquareByMul in " in the_only_one()
    assert "already has; expected a unique name (set `name` on the class)" in the_only_one()


def test_a_base_class_of_a_module_is_not_a_rule(plugin):
    """Rules of one module may share a base; an alias is not a second rule either."""
    text = source("_Base").replace(EVIDENCE, "").replace('code, slug = "ACME901", "square"', "")
    plugin("newcomer_rules", text + f"""
class Derived(_Base):
    code, slug = "ACME901", "square"
    {EVIDENCE}

Alias = Derived
""")
    assert not get_skipped_plugins() and "derived" in get_all_rewrites() and "_base" not in get_all_rules()


@pytest.mark.parametrize(("name", "snake"), [
    ("Conv1dKernel", "conv_1d_kernel"), ("Range1d", "range_1d"), ("Int32Ops", "int32_ops"),
    ("RankAbove5", "rank_above_5"),
    ("Fp16Compute", "fp16_compute"), ("PerBlockInt8", "per_block_int8"), ("SplitPoint2", "split_point_2"),
    ("Cumsum", "cumsum")])
def test_a_rule_is_named_after_its_class(name, snake):
    assert rule_class.assign_default_name(type(name, (Rule,), {})).name == snake


def test_of_two_distributions_the_first_by_name_has_the_code(plugin):
    plugin("zeta_rules", FINDING, "zeta")
    plugin("alpha_rules", FINDING, "alpha")
    assert find_rule("ACME101").__module__ == "alpha_rules"
    (only,) = get_skipped_plugins()
    assert only.distribution == "zeta 1.0" and "already has" in only.why


def test_orders_that_go_round_are_left_out_and_those_beside_them_are_not(plugin):
    def after(name: str, code: str, what: str) -> str:
        made = source(name.title(), code).replace("preset = ", f'name, after = "{name}", ("{what}",)\n    preset = ')
        return made.replace('"square"', f'"{name}-slug"', 1)

    plugin("newcomer_rules", "".join([after("hen", "X1", "egg"), after("egg", "X2", "hen"), after("chick", "X3", "egg"),
                                      after("grass", "X4", "rain")]))
    assert {"chick", "grass"} <= set(get_all_rewrites()) and not {"hen", "egg"} & set(get_all_rewrites())
    assert sorted(each.why for each in get_skipped_plugins()) == [
        "its after=('egg',) forms a cycle", "its after=('hen',) forms a cycle"]
    assert select_rewrites("safe")


def test_an_error_about_a_name_recalls_what_was_left_out(plugin):
    plugin("newcomer_rules", "import no_such_module")
    for ask in (find_rewrite, find_rule):
        with pytest.raises(InputError, match=re.escape("; skipped are the rules of newcomer 1.0")):
            ask("newcomer_rules")


def test_the_command_says_it_once_on_the_error_stream(plugin, fixtures):
    site = plugin("newcomer_rules", "import no_such_module")
    path = os.pathsep.join([str(ABSENT), str(site), str(Path(ane.__file__).parent.parent)])
    done = subprocess.run(
        [sys.executable, "-m", "mil_ane_passes", "lint", str(fixtures / "nothing_to_do.mlpackage"), "--format", "json"],
        capture_output=True, text=True, check=False, env={"PYTHONPATH": path, "PATH": ""})
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("{") and "no_such_module" not in done.stdout
    assert done.stderr.count("plugin newcomer 1.0") == 1 and "Traceback" not in done.stderr


def test_names_that_mean_something_else_are_reserved():
    assert {*PRESETS, BEGIN_PASS, END_PASS} == rule_class._RESERVED_NAMES


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('return Hit(op, note="squared")', "return op.no_such_input", "AttributeError: "),
        ('return Hit(op, note="squared")', "return None", "returned None; expected a Hit or a Miss"),
        ('return Hit(op, note="squared")', "raise ValueError('odd')", "ValueError: odd"),
    ],
)
def test_a_rule_that_fails_is_named(plugin, tmp_path, capsys, old, new, says):
    """Not taken for a fault of the model, nor of the tool, and without losing what the other rules find."""
    plugin("newcomer_rules", source().replace(old, new))
    model = ct.convert(squares(), convert_to="mlprogram", skip_model_load=True, pass_pipeline=ct.PassPipeline.EMPTY,
                       minimum_deployment_target=ct.target.iOS17)
    model.save(str(tmp_path / "in.mlpackage"))
    assert main(["lint", str(tmp_path / "in.mlpackage")]) in (0, 1)
    said = capsys.readouterr()
    assert "rule square_by_mul failed at %" in said.out and "(square) and 1 other place: " in said.out
    assert says in said.out and "internal error" not in said.err


def test_a_rewrite_of_a_preset_that_fails_is_left_out(plugin):
    plugin(
        "newcomer_rules", source().replace("y=hit.op.x", "y=hit.op.z").replace('preset = "named"', 'preset = "safe"')
    )
    report = ane.rewrite(squares())
    (only,) = [each for each in report.failed if each.rule == "square_by_mul"]
    assert only.reason.startswith("AttributeError: ") and report.status == "unchanged"


@pytest.mark.parametrize("answer", ["None", "True"])
def test_a_rewrite_that_answers_something_else_is_left_out(plugin, answer):
    text = source().replace('return Hit(op, note="squared")', f"return {answer}")
    plugin("newcomer_rules", text.replace('preset = "named"', 'preset = "safe"'))
    (only,) = [each for each in ane.rewrite(squares()).failed if each.rule == "square_by_mul"]
    assert f"returned {answer}; expected a Hit or a Miss" in only.reason


def test_a_rewrite_that_fails_is_named(plugin):
    plugin("newcomer_rules", source().replace("y=hit.op.x", "y=hit.op.z"))
    fault = r"rule square_by_mul .* failed with AttributeError: .*; report it to its authors"
    with pytest.raises(RuleError, match=fault):
        apply_rewrites(select_rewrites(passes="square_by_mul"), squares())
