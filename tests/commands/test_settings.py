"""What a project's files may say about lint, where they are looked for, and what is said of mistakes."""

from __future__ import annotations

import pytest

from mil_ane_passes.commands.settings import Settings, read_settings
from mil_ane_passes.utils.errors import InputError

TOML = """
[tool.other]
x = 1
[tool.mil_ane_passes]
select = ["ANE2", "ANE3"]
ignore = "int-inputs, ANE301"
target = "m4"
fail-under = 92.5
baseline = "reports/lint.json"
[tool.mil_ane_passes.options.lift_conv_1d]
axis = 2
"""
INI = """
[metadata]
name = x
[mil_ane_passes]
select = ANE2, ANE3
ignore =
    int-inputs
    ANE301
target = m4
fail-under = 92.5
baseline = reports/lint.json
[mil_ane_passes.options.lift_conv_1d]
axis = 2
"""
FILES = {"pyproject.toml": TOML, "setup.cfg": INI}


def written(folder, name, text):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    return folder / name


@pytest.mark.parametrize("name", FILES)
def test_both_files_say_the_same(name, tmp_path):
    file = written(tmp_path, name, FILES[name])
    found = read_settings(start=tmp_path)
    assert (found.file, found.select, found.ignore) == (file, ("ANE2", "ANE3"), ("int-inputs", "ANE301"))
    assert (found.target, found.fail_under, found.baseline) == ("m4", 92.5, tmp_path / "reports" / "lint.json")
    assert {rule: {key: int(value) for key, value in said.items()} for rule, said in found.options.items()} == \
        {"lift_conv_1d": {"axis": 2}}
    assert read_settings(file) == found


def test_the_nearest_file_that_speaks_of_us_counts(tmp_path):
    inner = tmp_path / "a" / "b"
    written(inner, "setup.cfg", "[metadata]\nname = mil_ane_passes\n")
    written(inner, "pyproject.toml", "this is no TOML = = and does not name us")
    outer = written(tmp_path / "a", "setup.cfg", "[mil_ane_passes]\ntarget = m1\n")
    written(tmp_path, "pyproject.toml", "[tool.mil_ane_passes]\ntarget = 'm2'\n")
    assert read_settings(start=inner).file == outer
    pyproject = written(tmp_path / "a", "pyproject.toml", "[tool.mil_ane_passes]\n")
    assert read_settings(start=inner) == Settings(pyproject)


def test_nothing_said(tmp_path):
    assert read_settings(start=tmp_path) == Settings()


WRONG = {
    "unknown key": ("setup.cfg", "[mil_ane_passes]\nfail-udner = 3\n",
                    "no key 'fail-udner' in [mil_ane_passes]; expected select, ignore, per-op-ignores, "
                    "options, target, fail-on, fail-under, baseline; did you mean 'fail-under'?"),
    "unknown key in TOML": ("pyproject.toml", "[tool.mil_ane_passes]\nselects = []\n",
                            "no key 'selects' in [tool.mil_ane_passes]; "),
    "unknown section": ("setup.cfg", "[mil_ane_passes.option.x]\na = 1\n",
                        "unknown section [mil_ane_passes.option.x]; "),
    "dashes": ("pyproject.toml", "[tool.mil-ane-passes]\ntarget='m4'\n", "found a section 'mil-ane-passes'; expected"),
    "dashes in ini": ("setup.cfg", "[mil-ane-passes]\ntarget=m4\n", "found a section 'mil-ane-passes'; expected"),
    "name of pytest's kind": ("setup.cfg", "[tool:mil_ane_passes]\ntarget=m4\n",
                              "found a section 'tool:mil_ane_passes'; expected [mil_ane_passes]"),
    "percent": ("setup.cfg", "[mil_ane_passes]\nfail-under = most\n",
                "fail-under: found 'most'; expected a percentage, 0 to 100"),
    "percent beyond": ("pyproject.toml", "[tool.mil_ane_passes]\nfail-under = 101\n", "fail-under: found 101; "),
    "truth": ("pyproject.toml", "[tool.mil_ane_passes]\nfail-under = true\n", "fail-under: found True; "),
    "list": ("pyproject.toml", "[tool.mil_ane_passes]\nselect = 3\n", "found select 3; expected rules"),
    "list of lists": ("pyproject.toml", "[tool.mil_ane_passes]\nignore = [['a']]\n", "found ignore [['a']]; "),
    "target": ("pyproject.toml", "[tool.mil_ane_passes]\ntarget = 4\n", "found target 4; expected a string"),
    "options": ("pyproject.toml", "[tool.mil_ane_passes]\noptions = {a = 1}\n", "found {'a': 1} as options; expected"),
    "options as a text": ("setup.cfg", "[mil_ane_passes]\noptions = a\n[mil_ane_passes.options.b]\nc = 1\n",
                          "found 'a' as options; expected sections [mil_ane_passes.options.RULE]"),
    "no TOML": ("pyproject.toml", "[tool.mil_ane_passes\n", "cannot be read as TOML ("),
    "no table": ("pyproject.toml", "[tool]\nmil_ane_passes = 1\n", "found 1 as tool.mil_ane_passes; expected a table"),
    "no INI": ("setup.cfg", "mil_ane_passes\n", "cannot be read ("),
    "both spellings": ("pyproject.toml", "[tool.mil_ane_passes]\nfail-under = 1\nfail_under = 2\n",
                       "found both 'fail-under' and 'fail_under'; expected one of them"),
    "twice": ("setup.cfg", "[mil_ane_passes]\na=1\n[mil_ane_passes]\n", "cannot be read ("),
}


@pytest.mark.parametrize("case", WRONG)
def test_mistakes_name_the_file(case, tmp_path):
    name, text, message = WRONG[case]
    file = written(tmp_path, name, text)
    for given in ({"start": tmp_path}, {"file": file}):
        with pytest.raises(InputError) as raised:
            read_settings(**given)
        assert str(raised.value).startswith(f"{file}: {message}") and "\n" not in str(raised.value)


OTHERS = """[metadata]
name: x
version: 1
[options]
zip_safe
install_requires:
    a
[flake8]
exclude =
    [mil_ane_passes]
"""


@pytest.mark.parametrize("text", [OTHERS + INI.replace("metadata", "rest"), INI.replace("[mil", f"{OTHERS}[mil", 1)])
def test_sections_of_other_tools_may_have_other_forms(text, tmp_path):
    """setuptools and others also accept colons, and keys without a value."""
    found = read_settings(written(tmp_path, "setup.cfg", text))
    assert (found.target, found.ignore, found.fail_under) == ("m4", ("int-inputs", "ANE301"), 92.5)
    assert found.options == {"lift_conv_1d": {"axis": "2"}}
    with pytest.raises(InputError, match=r"\[line 13\]: 'target: m4"):
        read_settings(written(tmp_path, "setup.cfg", f"{OTHERS}\n[mil_ane_passes]\ntarget: m4\n"))


def test_a_named_file_must_have_a_section(tmp_path):
    with pytest.raises(InputError, match="no such file; expected"):
        read_settings(tmp_path / "no.toml")
    with pytest.raises(InputError, match=r"has no section \[tool.mil_ane_passes\]; add the section"):
        read_settings(written(tmp_path, "pyproject.toml", "[tool.other]\n"))


@pytest.mark.parametrize("name", FILES)
def test_a_byte_order_mark_and_other_defaults_are_no_settings(name, tmp_path):
    defaults = "[DEFAULT]\nother = 1\n" if name == "setup.cfg" else ""
    file = written(tmp_path, name, f"\ufeff{defaults}{FILES[name]}")
    assert read_settings(file).target == "m4"
