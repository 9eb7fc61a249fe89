"""What a Mac says of a model, against our prediction: `calibrate-plan`, and `lint --measured`."""

from __future__ import annotations

import json
from pathlib import Path

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb

import mil_ane_passes as ane
from mil_ane_passes.ane import predict_plan
from mil_ane_passes.ane.agreement import compare_with_measurement
from mil_ane_passes.ane.compute_plan import match_ops, read_measurements
from mil_ane_passes.commands.main import main
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.passes.plan import Cost
from mil_ane_passes.passes.registry import get_all_rules
from tests.conversions import save_program
from tests.lab.versions.needs import coremltools_from

from ..ane.m4_cases import context, networks
from .fake_coremltools import FACTS, fake_mac, measured

OP = {"operator": "ios18.relu", "outputs": ["y"], "supported": ["cpu"], "preferred": "cpu", "cost": 0.5}


def functions(*ops):
    return {"program": {"functions": {"main": list(ops)}}}


def layers():
    """Two convolutions around a tan, which the M4 refuses."""
    weight = np.full((16, 16, 3, 3), 0.01, np.float16)

    def body(x):
        one = mb.relu(x=mb.conv(x=x, weight=weight, pad_type="same", name="one"), name="sharp")
        odd = mb.tan(x=one, name="odd")
        two = mb.conv(x=odd, weight=weight, pad_type="same", name="two")
        return mb.relu(x=two, name="y")

    return build_program(body, x=(1, 16, 8, 8))


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    path = tmp_path_factory.mktemp("plan") / "in.mlpackage"
    save_program(layers(), path, ct.target.iOS18)
    return str(path)


@pytest.fixture(scope="module")
def predicted(package):
    return ane.lint(package, target="m4").to_dict()["ops"]


def as_predicted(predicted, **changed):
    """A dumped plan that says what we say, but for ops that are named: (supported, preferred)."""
    costs = [row["est_ane_ms" if row["predicted_backend"] == "ane" else "est_cpu_ms"] for row in predicted]
    ops = []
    for row, cost in zip(predicted, costs):
        supported = ["cpu", "ane"] if row["ane"] == "yes" else ["cpu"]
        supported, preferred = changed.get(row["output"], (supported, row["predicted_backend"]))
        ops.append({"operator": f"ios18.{row['op']}", "outputs": [row["output"]], "supported": supported,
                    "preferred": preferred, "cost": cost / sum(costs)})
    constant = {"operator": "const", "outputs": ["w"], "supported": None, "preferred": None, "cost": None}
    return {"program": {"functions": {"main": [constant, *ops]}}, "units": "CPU_AND_NE",
            "machine": {"chip": "Apple M4", "macos": "26.1"}}


@pytest.fixture
def plan(tmp_path, predicted):
    def write(data=None, **changed):
        path = tmp_path / "plan.json"
        path.write_text(json.dumps(as_predicted(predicted, **changed) if data is None else data))
        return str(path)

    return write


def called(capsys, *arguments, code):
    assert main(["calibrate-plan", *arguments]) == code
    return capsys.readouterr().out


def test_a_plan_that_says_what_we_say_agrees(plan, package, capsys):
    data = json.loads(called(capsys, plan(), "--model", package, "--format", "json", code=0))
    (found,) = data["packages"]
    assert data["agrees"] and found["target"] == "M4" and found["disagreements"] == [] == found["contradicted"]
    assert (found["matched"], found["only_here"], found["only_measured"]) == (5, 0, 0)
    assert found["shares"]["correlation"] == pytest.approx(1) and found["shares"]["max_error"] == pytest.approx(0)
    assert found["kinds"]["conv"] == {"ops": 2, "agree": 2, "differ": 0, "unknown": 0}
    assert "5 of 5 ops as predicted" in called(capsys, plan(), "--model", package, code=0)


def test_contradictions_name_our_rule_or_table_and_the_machine(plan, package, capsys):
    file = plan(odd=(["cpu", "ane"], "ane"), sharp=(["cpu"], "cpu"))
    data = json.loads(called(capsys, file, "--model", package, "--format", "json", code=1))
    (found,) = data["packages"]
    support = {row["output"]: row for row in found["disagreements"] if row["what"] == "support"}
    assert {name: (row["predicted"], row["measured"]) for name, row in support.items()} == {
        "odd": ("no", "yes"), "sharp": ("yes", "no")}
    assert support["odd"]["codes"] and support["odd"]["reason"]
    wrong = {(row["code"], row["op"]): row for row in found["contradicted"]}
    assert set(wrong) == {(support["odd"]["codes"][0], None), (None, "relu")}
    assert all(row["on"] == "M4, macOS 26.1" for row in wrong.values())
    text = called(capsys, file, "--model", package, code=1)
    assert f"contradicted there: that relu was seen (1 op, measured no), {support['odd']['codes'][0]} (1 op" in text \
        or f"{support['odd']['codes'][0]} (1 op, measured yes)" in text
    assert "%odd (tan): predicted no, measured yes" in text


def test_ops_that_are_named_otherwise_are_matched_by_order(plan, package, predicted, capsys):
    data = as_predicted(predicted)
    ops = data["program"]["functions"]["main"]
    for op in ops:
        op["outputs"] = [f"{op['outputs'][0]}_renamed"]
    ops.append({"operator": "ios18.copy", "outputs": ["more"], "supported": ["cpu"], "preferred": "cpu", "cost": 0})
    ops[:] = [op for op in ops if not (op["operator"] == "ios18.conv" and op["outputs"] == ["two_renamed"])]
    told = json.loads(called(capsys, plan(data), "--model", package, "--format", "json", code=0))["packages"][0]
    assert (told["matched"], told["only_here"], told["only_measured"]) == (3, 2, 2)
    text = called(capsys, plan(data), "--model", package, code=0)
    assert "only measured, so not compared: %one_renamed (conv), %more (copy)" in text


def test_one_op_is_said_to_be_one(plan, package, predicted, capsys):
    data = as_predicted(predicted)
    del data["program"]["functions"]["main"][2:]
    text = called(capsys, plan(data), "--model", package, code=0)
    assert "): 1 op matched, 4 only in the prediction, 0 only in the measurement" in text


@pytest.mark.parametrize("relu_on_cpu, agrees, extra", [(0.01, True, 0.0), (0.03, False, 0.02)])
def test_another_place_at_the_same_cost_is_no_disagreement(relu_on_cpu, agrees, extra):
    """The last op on the ANE pays for the output, on the CPU for the change: the same, so its own cost decides."""
    weight = np.full((8, 8, 3, 3), 0.01, np.float16)
    made = build_program(lambda x: mb.relu(x=mb.conv(x=x, weight=weight, name="one"), name="y"), x=(1, 8, 8, 8))
    plan, _ = predict_plan(made, [], target="m4")
    for row, cost in zip(plan.rows, (Cost(0.01, 9, 9), Cost(0.01, relu_on_cpu, relu_on_cpu))):
        row.cost, row.backend = cost, "ane"
    data = functions(OP | {"operator": "conv", "outputs": ["one"], "supported": ["cpu", "ane"], "preferred": "ane"},
                     OP | {"supported": ["cpu", "ane"]})
    (measurement,) = read_measurements(data)
    found = compare_with_measurement(plan, match_ops(plan, measurement))
    assert [each.row.op.op_type for each in found.backend] == ["relu"]
    assert found.extra_ms == pytest.approx(extra, abs=1e-9) and found.is_tie == found.agrees == agrees


def test_factors_per_kind_are_written(plan, predicted, tmp_path, capsys):
    """Three convolutions that Core ML finds twice as dear as we do, relative to the rest."""
    weight = np.full((16, 16, 3, 3), 0.01, np.float16)

    def body(x):
        for place in range(3):
            x = mb.tan(x=mb.conv(x=x, weight=weight, pad_type="same", name=f"c{place}"), name=f"t{place}")
        return x

    path = str(tmp_path / "in.mlpackage")
    save_program(build_program(body, x=(1, 16, 8, 8)), path, ct.target.iOS18)
    data = as_predicted(ane.lint(path, target="m4").to_dict()["ops"])
    for op in data["program"]["functions"]["main"][1:]:
        op["cost"] *= 2 if op["operator"] == "ios18.conv" else 1
    (found,) = json.loads(called(capsys, plan(data), "--model", path, "--format", "json", code=0))["packages"]
    told = {row["op"]: row for row in found["factors"]}
    assert set(told) == {"conv", "tan"} and told["conv"]["ops"] == 3
    assert told["conv"]["factor"] / told["tan"]["factor"] == pytest.approx(2)
    text = called(capsys, plan(data), "--model", path, code=0).splitlines()
    at = text.index("predicted and measured share of the cost:")
    assert text[at + 1].split() == ["kind", "on", "ops", "median", "lowest", "highest"]
    assert text[at + 2].split()[:4] == ["conv", told["conv"]["backend"], "3", f"{told['conv']['factor']:.3g}"]


def test_lint_shows_the_measurement_beside_the_prediction(plan, package, capsys):
    file = plan(odd=(["cpu", "ane"], "ane"))
    assert main(["lint", package, "--target", "m4", "--no-config", "--measured", file, "--format", "json"]) == 1
    data = json.loads(capsys.readouterr().out)
    rows = {row["output"]: row for row in data["ops"]}
    assert rows["odd"]["ane"] == "yes" and rows["odd"]["predicted_backend"] == "cpu"
    assert rows["odd"]["reason"] == "measured by you on M4, macOS 26.1: it is supported on the ANE"
    assert rows["odd"]["measured"]["preferred"] == "ane" and rows["odd"]["measured"]["supported"] == ["cpu", "ane"]
    assert rows["one"]["measured"]["cost"] > 0 and "measured by you" not in rows["one"]["reason"]
    (finding,) = [each for each in data["findings"] if each["code"] == "ANE599"]
    assert finding["value"] == "odd" and finding["severity"] == "suggestion"
    assert finding["reason"].startswith("measured yes on M4, macOS 26.1, predicted no (ANE")
    assert data["measured"]["chip"] == "M4" and data["measured"]["matched"] == 5
    assert main(["lint", package, "--target", "m4", "--no-config", "--measured", file]) == 1
    text = capsys.readouterr().out
    assert "measured on M4, macOS 26.1, CPU_AND_NE" in text and "ANE599 measured-otherwise" in text
    assert main(["lint", package, "--target", "m4", "--no-config", "--measured", file, "--format", "sarif"]) == 1
    assert any(result["ruleId"] == "ANE599" for result in json.loads(capsys.readouterr().out)["runs"][0]["results"])


@pytest.mark.parametrize("target, answers", [("m4", ("yes", "no")), ("m1", ("no", None)), ("all", ("no", "no"))])
def test_a_chip_answers_for_its_own_generation(plan, package, target, answers):
    """For several generations a "no" of one of them counts, and a "yes" does not."""
    before = {row["output"]: row["ane"] for row in ane.lint(package, target=target).to_dict()["ops"]}
    report = ane.lint(package, target=target, measured=plan(odd=(["cpu", "ane"], "ane"), sharp=(["cpu"], "cpu")))
    after = {row["output"]: row["ane"] for row in report.to_dict()["ops"]}
    assert after == before | {name: answer for name, answer in zip(("odd", "sharp"), answers) if answer}


def test_a_machine_without_an_ane_answers_nothing(plan, package, predicted, capsys):
    data = as_predicted(predicted, **{row["output"]: (["cpu", "gpu"], "gpu") for row in predicted})
    report = ane.lint(package, target="m4", measured=data).to_dict()
    assert [row["ane"] for row in report["ops"]] == [row["ane"] for row in predicted]
    assert not report["measured"]["with_ane"]
    text = called(capsys, plan(data), "--model", package, code=1)
    assert "no op was supported on the ANE in this measurement" in text


def test_from_a_package_to_a_mac_and_back(package, predicted, tmp_path, capsys, monkeypatch):
    """mac-script, the script itself, and what it brings home: each package that lies beside the file is compared."""
    assert main(["mac-script", str(tmp_path / "mac"), package, package, "--seeds", "1"]) == 0
    rows = {row["output"]: row for row in predicted}
    with monkeypatch.context() as patched:
        fake_mac(patched, answer=lambda name, op: (
            ("cpu", "gpu", "ane") if rows[op.outputs[0].name]["ane"] == "yes" else ("cpu", "gpu"),
            rows[op.outputs[0].name]["predicted_backend"], 0.2))
        assert measured(tmp_path / "mac")["problems"] == []
    capsys.readouterr()
    file = str(tmp_path / "mac" / "result.json")
    data = json.loads(called(capsys, file, "--format", "json", code=0))
    assert [(each["package"], each["units"], each["matched"]) for each in data["packages"]] == [
        ("before", "CPU_AND_NE", 5), ("after", "CPU_AND_NE", 5)]
    both = ane.lint(package, target="m4", after=package, measured=file).to_dict()
    assert (both["measured"]["package"], both["after"]["measured"]["package"]) == ("before", "after")
    assert [(run["units"], run["passed"]) for run in both["measured"]["runs"]] == [
        ("CPU_ONLY", True), ("CPU_AND_NE", True), ("ALL", True)]
    assert all(run["median_ms"] > 0 for run in both["measured"]["runs"])
    assert "  main with ALL: agrees; " in str(ane.lint(package, target="m4", measured=file))


DEVICES = {"C": "cpu", "A": "ane", "G": "gpu"}


FEWER = coremltools_from("9.0", "leaves the indices of a gather alone: fewer ops than the M4 was given")


@pytest.mark.parametrize("name", [
    "add", "cos", pytest.param("gather_dyn", marks=FEWER), "inverse", "reduce_argmax_c", "tanh"])
def test_plans_that_an_m4_gave_are_read_and_agree(name):
    """Published plans of small networks, without names of values: ops are matched by order. Costs have 4 decimals."""
    row = networks()[name]
    ops = [{"operator": kind, "outputs": [], "preferred": DEVICES[preferred], "cost": float(cost),
            "supported": [DEVICES[device] for device in supported]}
           for (kind, preferred, supported), cost in zip(
               (text.split(":") for text in row["ops"].split(";")), row["weights"].split(","), strict=True)]
    (measurement,) = read_measurements(functions(*ops) | {"machine": {"chip": "Apple M4", "macos": "27.0.1"}})
    plan, _ = predict_plan(context(name), [rule() for rule in get_all_rules().values()], target=str(measurement.chip))
    found = compare_with_measurement(plan, match_ops(plan, measurement))
    assert (len(found.match.pairs), found.match.ours, found.match.theirs) == (len(ops), [], [])
    assert found.support == [] and found.agrees
    assert len(found.shares.rows) == len(ops) and found.shares.correlation > 0.9999
    assert max(abs(ours - theirs) for _, _, ours, theirs in found.shares.rows) < 2e-4


def test_what_went_wrong_there_is_shown(package, predicted):
    plan = {"plans": {"ALL": as_predicted(predicted)}}
    data = {"schema": 1, "machine": {"chip": "Apple M4"}, "packages": {"before": plan}, "complete": False,
            "doing": "compute plan of after, ALL", "problems": [{"where": "load", "problem": "no"}] * 6}
    text = str(ane.lint(package, target="m4", measured=data))
    assert ("  problem on that machine: the script did not finish: compute plan of after, ALL\n"
            "  problem on that machine: load: no\n") in text
    assert "  and 2 more problems\n" in text


def test_an_unknown_chip_is_predicted_for_all(package, predicted, capsys, plan):
    data = as_predicted(predicted) | {"machine": {"chip": "Apple M99"}}
    assert main(["calibrate-plan", plan(data), "--model", package]) in (0, 1)
    note = "the measurement's chip (M99) is not a known target, so the prediction is for all targets"
    assert note in capsys.readouterr().out


@pytest.mark.parametrize("data, said", [
    ("no JSON", "cannot be read as JSON"),
    ([], "has no compute plan; expected the result.json of measure.py"),
    ({"schema": 2, "packages": {}}, "has schema 2; expected 1"),
    ({"schema": 1, "packages": {}, "problems": [{"where": "compute plan of before, ALL", "problem": "no macOS"}]},
     "has no compute plan (compute plan of before, ALL: no macOS)"),
    ({"schema": 1, "packages": {}, "complete": False, "doing": "load before, main, ALL"},
     "has no compute plan (the script did not finish: load before, main, ALL)"),
    ({"program": None}, "program: found NoneType, expected an object"),
    (functions(7), "function main, op 0: found int, expected an object"),
    (functions(OP | {"operator": None}), "function main, op 0, operator: found NoneType, expected a text"),
    (functions(OP | {"preferred": "tpu"}), "device 'tpu'; expected cpu, gpu or ane"),
    (functions(OP | {"cost": 35.2}), "cost is 35.2; expected a number from 0 to 1, or null"),
    (functions(OP | {"cost": "much"}), "cost is 'much'; expected a number from 0 to 1, or null"),
    (functions(OP | {"operator": "other", "outputs": ["z"]}), "measured: no op of "),
    (functions(OP | {"operator": "ios18.tan", "outputs": ["z"]}), "measured: only 1 of 5 ops of "),
])
def test_bad_files_are_one_line(tmp_path, package, capsys, data, said):
    file = tmp_path / "plan.json"
    file.write_text(data if isinstance(data, str) else json.dumps(data))
    for command in (["calibrate-plan", str(file), "--model", package],
                    ["lint", package, "--no-config", "--measured", str(file)]):
        assert main(command) == 2
        line = capsys.readouterr().err
        assert line.startswith("mil-ane-passes: measured: ") and said in line and line.count("\n") == 1


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_files_may_be_in_any_encoding_of_unicode(encoding, tmp_path, predicted):
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(as_predicted(predicted)), encoding=encoding)
    assert read_measurements(file)[0].functions["main"]


def test_what_is_missing_or_in_the_way_is_said(tmp_path, package, plan, capsys):
    file = plan()
    for arguments, said in (
        ([str(tmp_path / "none.json")], "measured: no file"),
        ([str(tmp_path)], "is a folder; expected the result.json of measure.py"),
        ([file], "no package found next to"),
        ([file, "--model", package, "--target", "m99"], "target 'm99' is unknown"),
    ):
        assert main(["calibrate-plan", *arguments]) == 2
        assert said in capsys.readouterr().err
    assert json.loads(Path(file).read_text())["machine"]["chip"] == FACTS["machdep.cpu.brand_string"]
