"""SARIF 2.1.0: the parts that its schema requires, and that they say what the report says.

Where the environment variable SARIF_SCHEMA names the schema of OASIS (sarif-schema-2.1.0.json, not shipped here) and
jsonschema is installed, it judges, too.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest

from mil_ane_passes import lint
from mil_ane_passes.passes.registry import get_all_rewrites
from mil_ane_passes.report.baseline import Baseline
from mil_ane_passes.report.sarif import FINGERPRINT_NAME, build_sarif

from .made import MESSAGE, chain, empty, report, two_functions

ALLOWED = {
    "log": {"$schema", "version", "runs"},
    "run": {"tool", "invocations", "artifacts", "results", "columnKind", "properties"},
    "rule": {"id", "name", "shortDescription", "fullDescription", "help", "defaultConfiguration", "properties"},
    "result": {"ruleId", "ruleIndex", "kind", "level", "message", "locations", "partialFingerprints", "properties",
               "baselineState"},
    "location": {"physicalLocation", "logicalLocations"},
    "logical": {"name", "fullyQualifiedName", "kind"},
}
ROLES = {"analysisTarget", "directory", "memoryContents"}


def conforming(log):
    """What the schema asks of the objects we write, none of which may have other keys."""
    assert set(log) == ALLOWED["log"] and log["version"] == "2.1.0"
    (run,) = log["runs"]
    assert set(run) == ALLOWED["run"] and run["invocations"] == [{"executionSuccessful": True}]
    driver = run["tool"]["driver"]
    assert set(driver) == {"name", "version", "rules"} and driver["name"] == "mil-ane-passes"
    for rule in driver["rules"]:
        assert set(rule) == ALLOWED["rule"] and rule["defaultConfiguration"]["level"] in ("error", "warning", "note")
        assert all(rule[each]["text"] for each in ("shortDescription", "fullDescription", "help"))
        assert rule["help"]["markdown"] and len(set(rule["properties"]["tags"])) == len(rule["properties"]["tags"])
    assert len({rule["id"] for rule in driver["rules"]}) == len(driver["rules"])
    (artifact,) = run["artifacts"]
    assert set(artifact["roles"]) <= ROLES and set(artifact) == {"location", "description", "roles"}
    for result in run["results"]:
        conforming_result(result, driver["rules"])
    return run


def conforming_result(result, rules):
    assert set(result) <= ALLOWED["result"] and result["message"]["text"]
    assert result["kind"] in ("fail", "informational") and result["level"] in ("error", "warning", "note", "none")
    assert (result["level"] == "none") == (result["kind"] != "fail")  # a level is for failures only
    if "ruleIndex" in result:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
    assert result.get("baselineState", "new") in ("new", "unchanged", "absent")
    (location,) = result["locations"]
    assert set(location) <= ALLOWED["location"]
    assert all(set(each) <= ALLOWED["logical"] and each["fullyQualifiedName"] for each in location["logicalLocations"])


def judged(log):
    """`log` as it is written and read again, after the official schema where there is one."""
    log = json.loads(json.dumps(log, allow_nan=False))
    if os.environ.get("SARIF_SCHEMA"):
        jsonschema = pytest.importorskip("jsonschema")
        schema = json.loads(Path(os.environ["SARIF_SCHEMA"]).read_text())
        jsonschema.validate(log, schema, format_checker=jsonschema.FormatChecker())
    return conforming(log)


@pytest.mark.parametrize("name", ["conv_transpose_1d", "nmp", "nothing_to_do"])
def test_of_a_package(name, fixtures):
    found = lint(fixtures / f"{name}.mlpackage")
    run = judged(build_sarif(found))
    assert len(run["results"]) == len(found.findings) + len(found.near_misses)
    assert run["artifacts"][0]["location"]["uri"].startswith("file:///")
    assert Counter(each["ruleId"] for each in run["results"] if each["kind"] == "fail") == \
        Counter(item.rule.code for item in found.findings)
    prints = [each["partialFingerprints"][FINGERPRINT_NAME] for each in run["results"]]
    assert len(set(prints)) == len(prints)
    assert run["properties"]["summary"] == json.loads(json.dumps(found.summary()))


def test_a_relative_path_stays_relative(fixtures, monkeypatch):
    monkeypatch.chdir(fixtures)
    run = judged(build_sarif(lint("nmp.mlpackage")))
    assert run["artifacts"][0]["location"] == {"uri": "nmp.mlpackage"}
    assert run["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "nmp.mlpackage"


def test_a_delegate_is_at_its_program(tmp_path):
    (tmp_path / "model.pte").write_bytes(b"")
    found = report(chain("relu"))
    found.model = str(tmp_path / "model.pte" / "forward" / "0")
    run = judged(build_sarif(found))
    uri = (tmp_path / "model.pte").as_uri()
    assert run["artifacts"][0]["location"]["uri"] == uri and run["artifacts"][0]["roles"] == ["analysisTarget"]
    assert run["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == uri


def test_a_result_says_what_the_finding_says():
    run = judged(build_sarif(report(chain("relu", "tanh", "sigmoid"))))
    wrong, refused, named = run["results"]
    assert refused["message"]["text"] == (f"relu %relu_0: relu of rank 2. Core ML says: {MESSAGE} Use a tanh. "
                                          "(Predicted.)")
    assert (wrong["level"], refused["level"], named["level"]) == ("error", "warning", "note")
    assert [each["properties"]["severity"] for each in run["results"]] == ["wrong", "unsupported", "suggestion"]
    assert "Fix: " not in refused["message"]["text"] and refused["properties"]["coreMLMessage"] == MESSAGE
    assert refused["locations"] == [{"logicalLocations": [
        {"name": "relu_0", "fullyQualifiedName": "main/relu_0", "kind": "variable"}]}]
    rule = run["tool"]["driver"]["rules"][refused["ruleIndex"]]
    assert rule["properties"]["evidence"][0]["chip"] == "M4" and rule["properties"]["confidence"] == "high"
    assert "seen refused" in rule["help"]["markdown"]


def test_near_misses_are_no_failures():
    run = judged(build_sarif(report(chain("tanh", shape=(2, 3, 4)))))
    assert [(each["kind"], each["level"]) for each in run["results"]] == [("informational", "none")]


@pytest.mark.parametrize("name", ["argmax_by_max", "fp32_island"])
def test_a_code_is_described_once_where_a_rule_and_a_rewrite_report_under_it(name):
    """A rewrite has the code of the rule that it fixes; its near misses stand beside the findings of the rule."""
    examples = [each for each in get_all_rewrites()[name]().examples() if each.reason is None]
    for example in examples:
        run = judged(build_sarif(lint(example.build(), target="m4")))
        code = get_all_rewrites()[name].code
        (described,) = [each for each in run["tool"]["driver"]["rules"] if each["id"] == code]
        assert described["name"] != get_all_rewrites()[name].__name__


@pytest.mark.parametrize("made,functions", [(two_functions, {"main", "other"}), (empty, set())])
def test_functions_and_nothing(made, functions):
    run = judged(build_sarif(report(made())))
    found = {each["locations"][0]["logicalLocations"][0]["fullyQualifiedName"].split("/")[0] for each in run["results"]}
    assert found == functions


def test_fingerprints_do_not_hang_on_words():
    first, second = report(chain("relu")), report(chain("relu", shape=(2, 3, 4)))
    prints = [
        [each["partialFingerprints"] for each in build_sarif(each)["runs"][0]["results"]] for each in (first, second)
    ]
    assert prints[0] == prints[1] and first.findings[0].reason != second.findings[0].reason


def test_the_state_against_a_baseline():
    old, new = report(chain("relu", "tanh")), report(chain("relu", "square"))
    new.baseline = Baseline("old.json", "m4", Counter(item.key for item in old.findings)).compare(new.findings)
    states = {each["ruleId"]: each["baselineState"] for each in judged(build_sarif(new))["results"]}
    assert states == {"ANE216": "unchanged", "ANE591": "new", "ANE391": "absent"}
