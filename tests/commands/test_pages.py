"""The stored pages of rules and patches: they say what the registries say, and are used only where they do."""

from __future__ import annotations

import json
import sys

import pytest

from mil_ane_passes.commands import pages
from mil_ane_passes.commands.explain import LayerPage
from mil_ane_passes.commands.main import main
from mil_ane_passes.commands.pages import PAGES_FILE, collect_pages
from mil_ane_passes.commands.passes import Catalogue, Page
from mil_ane_passes.commands.patches import Patches, PatchPage

WRITE = "run python -m tests.test_readme to write pages.json"
PARTS = {"rules": Page, "layers": LayerPage, "patches": PatchPage}
VERDICT = ("needed", "why")
RULE = '''"""Rules."""

class One(Rule):
    """One."""

    code = "ANE901"

    def match(self, op,
              other=()):
        """Match."""
        if op:

            return None
        return Hit(op)

    advice = "None."
'''


@pytest.fixture(scope="module")
def collected():
    return collect_pages()


@pytest.fixture(scope="module")
def stored():
    return json.loads(PAGES_FILE.read_text(encoding="utf-8"))


def format_page(part, facts):
    """What explain prints of a page, in both formats."""
    page = PARTS[part](facts)
    return str(page), json.dumps(page.to_dict(), indent=2, allow_nan=False)


def without_verdict(facts):
    """What holds of a patch with every version of coremltools."""
    return {key: value for key, value in facts.items() if key not in VERDICT}


@pytest.mark.parametrize("part", ["rules", "layers"])
def test_they_are_those_of_the_registries_byte_for_byte(part, stored, collected):
    assert stored["sources"] == collected["sources"], WRITE
    assert len(stored[part]) == len(collected[part]) > 5, WRITE
    for ours, theirs in zip(stored[part], collected[part]):
        assert format_page(part, ours) == format_page(part, theirs), WRITE
    if part == "rules":
        ours, theirs = Catalogue(stored[part]), Catalogue(collected[part])
        assert (str(ours), json.dumps(ours.to_dict())) == (str(theirs), json.dumps(theirs.to_dict()))


def test_the_patches_are_those_of_the_registry_and_the_verdicts_where_the_versions_are(stored, collected):
    same = stored["probed with"] == collected["probed with"]
    assert len(stored["patches"]) == len(collected["patches"]) > 50, WRITE
    for ours, theirs in zip(stored["patches"], collected["patches"]):
        if same:
            assert format_page("patches", ours) == format_page("patches", theirs), WRITE
        assert without_verdict(ours) == without_verdict(theirs), WRITE
    ours, theirs = Patches(stored["patches"]), Patches(collected["patches"])
    assert not same or (str(ours), ours.to_dict()) == (str(theirs), theirs.to_dict())


@pytest.fixture
def registries(monkeypatch):
    """Stored pages and registries that say different things; what is printed tells which was asked."""
    facts = {"pass": "one", "code": "ANE901", "slug": "one", "shares_code": False, "listed": True}
    monkeypatch.setattr(pages, "_collect_rules", lambda: [{**facts, "from": "registry"}])
    monkeypatch.setattr(pages, "_collect_layer_rules", lambda: [{"from": "registry"}])
    monkeypatch.setattr(pages, "_collect_patches", lambda: [{"from": "registry"}])
    monkeypatch.setattr(pages, "entry_points", lambda group: [])
    pages._read_current_pages.cache_clear()
    yield lambda: tuple(each[0].get("from", "stored") for each in
                        (pages.load_rule_pages()[0], pages.load_layer_rule_pages(), pages.load_patch_pages()))
    pages._read_current_pages.cache_clear()


@pytest.fixture
def same_versions(monkeypatch, stored):
    monkeypatch.setattr(pages, "describe_environment", lambda: dict(stored["probed with"]))


@pytest.mark.usefixtures("same_versions")
def test_they_are_used_where_they_hold(registries):
    assert registries() == ("stored",) * 3


@pytest.mark.usefixtures("same_versions")
def test_a_plugin_is_seen(registries, monkeypatch):
    asked = []
    monkeypatch.setattr(pages, "entry_points", lambda group: asked.append(group) or ["a plugin"])
    assert registries() == ("registry", "stored", "stored") and asked == ["mil_ane_passes.rules"]


@pytest.mark.parametrize("name", ["python", "coremltools", "numpy", "torch"])
def test_patches_are_probed_with_other_versions(registries, monkeypatch, stored, name):
    monkeypatch.setattr(pages, "describe_environment", lambda: {**stored["probed with"], name: "0.1"})
    assert registries() == ("stored", "stored", "registry")


@pytest.mark.usefixtures("same_versions")
def test_changed_sources_are_seen(registries, monkeypatch, stored):
    monkeypatch.setattr(pages, "_digest_sources", lambda: {**stored["sources"], "rules/new.py": "00000000"})
    assert registries() == ("registry",) * 3


@pytest.mark.parametrize("text", [None, "", "{", "[]", "{}", '{"sources": 1}'])
@pytest.mark.usefixtures("same_versions")
def test_a_damaged_file_is_not_used(registries, monkeypatch, tmp_path, text):
    file = tmp_path / "pages.json"
    if text is not None:
        file.write_text(text)
    monkeypatch.setattr(pages, "PAGES_FILE", file)
    assert registries() == ("registry",) * 3


@pytest.mark.parametrize(("folder", "old", "new", "changes"), [
    ("rules", "return Hit(op)", "return Hit(op, note='x')", False),
    ("rules", "other=()", "other=None", False),
    ("rules", '"None."', '"Some."', True),
    ("rules", '"""One."""', '"""Another."""', True),
    ("rules", "ANE901", "ANE902", True),
    ("rewrites/layout", "return None", "return False", False),
    ("neuralnetwork", '"""Match."""', '"""Find."""', True),
    ("torch_frontend/patches", "return None", "return 'a fault'", True),
])
def test_a_digest_changes_with_what_pages_say(monkeypatch, tmp_path, folder, old, new, changes):
    file = tmp_path / folder / "one.py"
    file.parent.mkdir(parents=True)
    file.write_text(RULE)
    monkeypatch.setattr(pages, "_HOME", tmp_path)
    before = pages._digest_sources()
    assert RULE.count(old) == 1 and list(before) == [f"{folder}/one.py"]
    file.write_text(RULE.replace(old, new))
    assert (pages._digest_sources() != before) == changes


def test_a_new_source_is_seen(monkeypatch, tmp_path):
    monkeypatch.setattr(pages, "_HOME", tmp_path)
    (tmp_path / "rewrites" / "pooling").mkdir(parents=True)
    before = pages._digest_sources()
    (tmp_path / "rewrites" / "pooling" / "new.py").write_text("")
    assert before == {} and list(pages._digest_sources()) == ["rewrites/pooling/new.py"]


def test_a_copy_of_a_package_that_hides_the_installed_one_has_no_known_version(monkeypatch, tmp_path):
    assert pages._find_version("coremltools")[0].isdigit()
    assert pages._find_version("no_such_package") == "unknown"
    (tmp_path / "coremltools").mkdir()
    (tmp_path / "coremltools" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "coremltools", raising=False)
    assert pages._find_version("coremltools") == "unknown"


@pytest.mark.parametrize("words", [["explain", "ANE301"], ["passes"], ["explain", "NN101"], ["explain", "TORCH117"],
                                   ["explain", "ANE599"], ["explain", "cumsun"], ["explain", "TORCH199"]])
def test_commands_print_the_same_without_the_file(words, monkeypatch, capsys):
    code, first = main(words), capsys.readouterr()
    monkeypatch.setattr(pages, "_read_current_pages", lambda: None)
    assert (main(words), capsys.readouterr()) == (code, first)
