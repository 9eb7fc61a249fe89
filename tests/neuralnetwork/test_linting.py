"""Findings about the layers of .mlmodel files, and the layers behind findings about the upgraded program's ops."""

import json

import coremltools as ct
import numpy as np
import pytest
from coremltools.models import datatypes, neural_network

import mil_ane_passes as ane
from mil_ane_passes.commands.main import main
from mil_ane_passes.ir.query import iterate_ops
from mil_ane_passes.neuralnetwork.layer_rules import find_layer_hits, get_layer_rules
from mil_ane_passes.neuralnetwork.network_view import list_views

RNG = np.random.default_rng(3)


def draw(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def make_builder(exact=True, outputs=("out",), **inputs):
    features = [(name, datatypes.Array(*shape)) for name, shape in inputs.items()]
    return neural_network.NeuralNetworkBuilder(features, [(name, None) for name in outputs],
                                               disable_rank5_shape_mapping=exact)


@pytest.mark.parametrize("line", [
    ["lint", "IN", "-o", "OUT"], ["lint", "IN", "--format", "json", "-o", "OUT"],
    ["lint", "other.mlmodel", "--after", "IN", "-o", "OUT"], ["run", "IN", "--feeds", "feeds.npz", "-o", "OUT"],
    ["run", "IN", "--feeds", "feeds.npz", "-o", "free.npz", "--state-out", "OUT"]])
@pytest.mark.parametrize("link", ["", "symlink_to", "hardlink_to"])
def test_results_do_not_replace_the_source(tmp_path, monkeypatch, capsys, line, link):
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "net.mlmodel"
    builder = make_builder(x=(3, 4))
    builder.add_activation("layer", "RELU", "x", "out")
    ct.utils.save_spec(builder.spec, str(source))
    stored = source.read_bytes()
    (tmp_path / "other.mlmodel").write_bytes(stored)
    np.savez("feeds.npz", x=draw(3, 4))
    out = source
    if link:
        out = tmp_path / "linked"
        getattr(out, link)(source)
    assert main([{"IN": str(source), "OUT": str(out)}.get(each, each) for each in line]) == 2
    assert "read by this run" in capsys.readouterr().err
    assert source.read_bytes() == stored


def make_one(add, *shapes, exact=True, **settings):
    builder = make_builder(exact, **dict(zip("xy", shapes)))
    names = {"input_names": list("xy")} if len(shapes) > 1 else {"input_name": "x"}
    getattr(builder, f"add_{add}")(name="layer", **names, output_name="out", **settings)
    return builder.spec


def make_convolution(dilation=1, **settings):
    builder = make_builder(False, x=(3, 9, 9))
    builder.add_convolution("layer", 3, 4, 3, 3, 1, 1, "valid", 1, draw(3, 3, 3, 4), None, False, input_name="x",
                            output_name="out", dilation_factors=[dilation, dilation], **settings)
    return builder.spec


def make_pooling(window, stride):
    builder = make_builder(False, x=(3, 40, 40))
    builder.add_pooling("layer", window, window, stride, stride, "MAX", "VALID", "x", "out")
    return builder.spec


def make_lstm():
    builder = make_builder(False, x=(5,), h=(4,), c=(4,), outputs=("out", "h2", "c2"))
    builder.add_unilstm("layer", [draw(4, 4) for _ in range(4)], [draw(4, 5) for _ in range(4)], None, 4, 5,
                        ["x", "h", "c"], ["out", "h2", "c2"])
    return builder.spec


def make_gather():
    builder = make_builder(True, x=(6, 4), y=(3,))
    builder.add_gather("layer", ["x", "y"], "out", axis=0)
    return builder.spec


def make_branch():
    builder = make_builder(True, x=(1,))
    layer = builder.add_branch("layer", "x")
    for name, network in (("a", layer.branch.ifBranch), ("b", layer.branch.elseBranch)):
        inner = neural_network.NeuralNetworkBuilder(input_features=None, output_features=None, spec=None,
                                                    nn_spec=network)
        inner.add_activation(name, "RELU", "x", "out")
    return builder.spec


HITS = {
    "NN101": (lambda: make_one("add_broadcastable", (2, 3), (2, 3)), lambda: make_one("tanh", (2, 3))),
    "NN102": (lambda: make_one("softmax_nd", (2, 3), axis=1), lambda: make_one("softmax", (2, 3, 4))),
    "NN104": (make_lstm, lambda: make_one("tanh", (2, 3))),
    "NN105": (make_gather, lambda: make_one("tanh", (2, 3))),
    "NN106": (lambda: make_convolution(2), make_convolution),
    "NN107": (lambda: make_one("elementwise", (1, 4, 3, 3), (1, 4, 1, 1), mode="ADD"),
              lambda: make_one("elementwise", (1, 4, 3, 3), (1, 4, 3, 3), mode="ADD")),
    "NN108": (lambda: make_pooling(14, 1), lambda: make_pooling(13, 2)),
    "NN109": (lambda: make_one("upsample", (3, 4, 4), exact=False, scaling_factor_h=3, scaling_factor_w=1),
              lambda: make_one("upsample", (3, 4, 4), exact=False, scaling_factor_h=2, scaling_factor_w=2)),
    "NN110": (make_branch, lambda: make_one("tanh", (2, 3))),
}


@pytest.mark.parametrize("code", HITS)
def test_a_rule_finds_its_layer_and_not_its_neighbour(code):
    bad, good = HITS[code]
    (hit,) = [hit for hit in find_layer_hits(list_views(bad(), "it")) if hit.rule.code == code]
    assert hit.layer == "layer" and hit.reason
    assert code not in {hit.rule.code for hit in find_layer_hits(list_views(good(), "it"))}


def test_every_rule_is_tested_and_has_evidence():
    rules = get_layer_rules()
    assert set(rules) - set(HITS) == {"NN103"}  # a network with custom layers cannot be upgraded
    for code, rule in rules.items():
        assert rule.evidence and rule.summary.endswith(".") and rule.confidence in ("high", "medium", "low")
        assert code == rule.code and rule.slug.endswith("-layer")
    assert len({rule.slug for rule in rules.values()}) == len(rules)


def test_strides_over_2_are_found():
    (hit,) = find_layer_hits(list_views(make_pooling(3, 3), "it"))
    assert hit.reason == "stride 3x3 is over 2"


def make_mixed():
    """Layers off the ANE as layers, one of which (a softmax over the width) no rewrite replaces."""
    builder = make_builder(x=(1, 64, 64, 64))
    builder.add_convolution("conv 1", 64, 64, 3, 3, 1, 1, "same", 1, draw(3, 3, 64, 64), draw(64), True,
                            input_name="x", output_name="a")
    builder.add_add_broadcastable("sum", ["a", "x"], "b")
    builder.add_cumsum("running sum", ["b"], "c", axis=3)
    builder.add_convolution("conv 2", 64, 64, 3, 3, 1, 1, "same", 1, draw(3, 3, 64, 64), draw(64), True,
                            input_name="c", output_name="d")
    builder.add_softmax_nd("softmax", "d", "out", -1)
    return builder.spec


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    place = tmp_path_factory.mktemp("lint") / "net.mlmodel"
    ct.models.utils.save_spec(make_mixed(), str(place))
    return place


def test_the_text_names_layers_and_what_both_ways_would_reach(path, capsys):
    assert main(["lint", str(path), "--target", "m4"]) == 1
    out = capsys.readouterr().out
    assert "as a NeuralNetwork: 2 of 5 layers reported off the ANE:" in out
    assert "NN101 broadcastable-layer  1 layer: Broadcastable layers of Core ML 3 do not run on the ANE." in out
    assert "  'sum' (addBroadcastable): addBroadcastable is a broadcastable layer" in out
    assert "  fix within the format: replace_broadcastable (same bits; in preset safe)" in out
    assert "  'softmax' (softmaxND): stays: it runs over axis -1 of rank 4; the classic softmax" in out
    assert "<hollance/neural-engine docs/unsupported-layers.md>" in out
    assert "unsupported ops 1 -> 0: mil-ane-passes rewrite" in out and "--preset full --target m4" in out
    assert "rewrite within the format --preset full: layers reported off the ANE 2 -> 1: mil-ane-passes" in out
    assert "(cumsum, from layer 'running sum' (cumSum))" in out


def test_what_the_outlook_says_is_what_rewriting_does(path, tmp_path):
    report = ane.lint(path, target="m4")
    rewritten = ane.rewrite(path, tmp_path / "out.mlpackage", preset="full", target="m4")
    assert (report.network.before, report.network.after) == rewritten.predicted
    assert report.network.after.unsupported == 0 < report.network.before.unsupported
    in_format = ane.rewrite(path, tmp_path / "out.mlmodel", preset="full")
    assert in_format.off_ane_before == report.network.off_ane
    assert in_format.off_ane_after == report.network.left_off_ane


def test_the_json_has_layers_and_the_layers_of_ops(path, capsys):
    main(["lint", str(path), "--format", "json", "--target", "m4"])
    found = json.loads(capsys.readouterr().out)
    layers = {each["layer"]: each for each in found["network"]["findings"]}
    assert layers["sum"]["code"] == "NN101" and layers["sum"]["kind"] == "addBroadcastable"
    assert layers["sum"]["fix"]["pass"] == "replace_broadcastable" and layers["sum"]["evidence"]
    assert layers["softmax"]["fix"] is None and "runs over axis -1" in layers["softmax"]["not_fixed_because"]
    assert [found["ops"][index]["op"] for index in layers["softmax"]["ops"]] == ["softmax", "cast"]
    (cumsum,) = [each for each in found["findings"] if each["op"] == "cumsum" and each["refuses"]]
    assert cumsum["origin"] == {"module": "running sum", "module_type": "cumSum", "op": None, "source": None}
    assert found["network"]["upgrade_and_rewrite"]["after"]["unsupported"] == 0


def test_every_op_has_the_layer_it_comes_from(path):
    from mil_ane_passes.ir.query import iterate_ops
    from mil_ane_passes.ir.scopes import find_origin

    origins = {op.op_type: find_origin(op) for _, op in iterate_ops(ane.load(path).program) if op.op_type != "const"}
    assert {kind: each.module for kind, each in origins.items()} == {
        "cast": "softmax", "conv": "conv 2", "add": "sum", "cumsum": "running sum", "softmax": "softmax"}


def test_sarif_has_rules_and_results_of_layers(path, capsys):
    main(["lint", str(path), "--format", "sarif"])
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    rules = run["tool"]["driver"]["rules"]
    (found,) = [each for each in run["results"] if each["ruleId"] == "NN101"]
    assert rules[found["ruleIndex"]]["id"] == "NN101" and found["level"] == "warning"
    assert found["locations"][0]["logicalLocations"][0] == {
        "name": "sum", "fullyQualifiedName": "sum", "kind": "module"}
    assert all(rules[each["ruleIndex"]]["id"] == each["ruleId"] for each in run["results"])
    assert run["properties"]["network"]["off_ane"] == 2 and run["properties"]["upgraded"]


def test_the_page_has_the_layers(path, tmp_path, capsys):
    assert main(["lint", str(path), "--format", "html", "-o", str(tmp_path / "page.html")]) == 1
    page = (tmp_path / "page.html").read_text()
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    lines = data["reports"][0]["network"]
    assert any("'sum' (addBroadcastable)" in line for line in lines)
    assert any(line.startswith("upgrade and rewrite --preset full: ") for line in lines)
    assert 'id="network-lines"' in page and "is a NeuralNetwork; read as an ML Program" in page


def test_a_package_has_no_part_about_layers(path, tmp_path, capsys):
    ane.upgrade(path, tmp_path / "out.mlpackage")
    main(["lint", str(tmp_path / "out.mlpackage"), "--format", "json"])
    assert "network" not in json.loads(capsys.readouterr().out)
    assert "NeuralNetwork" not in str(ane.lint(tmp_path / "out.mlpackage"))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("select", "ignore", "layers", "ops"),
    [
        (None, None, {"NN101", "NN102"}, True),
        ("NN1", None, {"NN101", "NN102"}, False),
        ("nn101", None, {"NN101"}, False),
        ("nd-layer,ANE2", None, {"NN102"}, True),
        ("ANE2", None, set(), True),
        (None, "NN", set(), True),
        (["NN101", "NN102"], ["broadcastable-layer"], {"NN102"}, False),
    ],
)
def test_layer_rules_are_selected_as_others_are(path, select, ignore, layers, ops):
    report = ane.lint(path, target="m4", select=select, ignore=ignore)
    assert {each.code for each in report.network.findings} == layers
    assert any(each.rule.code.startswith("ANE2") for each in report.findings) is ops


def test_gates_count_findings_of_layers(path, capsys):
    assert main(["lint", str(path), "--select", "NN101"]) == 1
    assert main(["lint", str(path), "--select", "NN104"]) == 0
    assert main(["lint", str(path), "--select", "NN999"]) == 2
    assert "no rule 'NN999'" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["NN101", "nn101", "broadcastable-layer", "replace_subtract"])
def test_explain_has_the_pages_of_layer_rules(capsys, key):
    assert main(["explain", key]) == 0
    out = capsys.readouterr().out
    assert out.startswith("NN101 broadcastable-layer\n") and "replace_subtract (bitwise, preset safe): " in out
    assert main(["explain", key, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["code"] == "NN101" and {"replace_subtract"} < {each["pass"] for each in found["fixed_by"]}


def test_hostile_names_of_layers_stay_on_their_line(tmp_path, capsys):
    spec = make_mixed()
    spec.neuralNetwork.layers[1].name = "a\nb\x1b[31m{0}](x)<script>"
    (tmp_path / "x.mlmodel").write_bytes(spec.SerializeToString())
    for form in ("text", "html", "sarif", "json"):
        assert main(["lint", str(tmp_path / "x.mlmodel"), "--format", form]) == 1
        out = capsys.readouterr().out
        assert "\x1b" not in out and (form == "json" or "b\\x1b[31m" in out or form != "text")
        assert form != "html" or "<script>\"" not in out


def test_the_command_printed_for_an_lstm_makes_its_rewrite_possible(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    ct.utils.save_spec(make_lstm(), "net.mlmodel")
    ane.upgrade("net.mlmodel", "old.mlpackage")
    found = ane.lint("net.mlmodel", target="m4")
    assert found.next_step.command == "mil-ane-passes upgrade net.mlmodel -o OUT.mlpackage --deployment-target iOS17"
    assert found.next_step.words == "iOS16 has no fp16 for lstm, so no pass can move it to the ANE; iOS17 has fp16."
    (item,) = (each for each in found.findings if each.code == "ANE502")
    assert item.reason.endswith("as iOS16 has no fp16 for it: upgrade the network with --deployment-target iOS17")

    assert main(found.next_step.command.split()[1:]) == 0
    newer = ane.lint("OUT.mlpackage", target="m4")
    assert "ANE502" not in [each.code for each in newer.findings]
    (item,) = (each for each in newer.findings if each.code == "ANE217")
    assert item.fix["pass"] == "ane::unroll_lstm"
    done = ane.rewrite("OUT.mlpackage", passes="unroll_lstm", target="m4", max_growth=None)
    assert "lstm" not in [op.op_type for _, op in iterate_ops(done.package.program)]

    package = ane.lint("old.mlpackage", target="m4")  # which does not record that it was a network
    assert package.next_step.command == "" and package.next_step.words.endswith(
        "iOS16 has no fp16 for lstm: convert the model with minimum_deployment_target iOS17, or upgrade its "
        "NeuralNetwork with --deployment-target iOS17.")
    capsys.readouterr()
    memory = ane.lint(ct.models.MLModel(make_lstm(), skip_model_load=True), target="m4")
    assert memory.next_step.command == "mil_ane_passes.upgrade(..., deployment_target='iOS17')"
