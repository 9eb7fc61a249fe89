"""`explain` tells of the parts of the tool what `explain CODE` tells of a rule."""

from __future__ import annotations

import json

import pytest

from mil_ane_passes.commands.explain import TOPICS
from mil_ane_passes.commands.main import main
from mil_ane_passes.passes.registry import get_all_rules
from mil_ane_passes.torch_frontend.registry import load_patches


def test_without_a_code_the_topics_are_listed(capsys):
    assert main(["explain"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in TOPICS) and "mil-ane-passes passes" in said
    assert "mil-ane-passes patches" in said
    assert main(["explain", "--format", "json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["topics"]) == set(TOPICS)


@pytest.mark.parametrize(("topic", "promise"), [
    ("equivalence", "no sample reaches"), ("prediction", "*predicted*"), ("guard", "--max-growth"),
    ("numbers", "65504"), ("threads", "exclusive()"), ("packages", "byte for byte"),
    ("runtime", "--quirk"), ("Frontend", "NotConverted")])
def test_a_topic_is_a_page(topic, promise, capsys):
    assert main(["explain", topic]) == 0
    page = capsys.readouterr().out
    assert promise in page and max(map(len, page.splitlines())) <= 120
    assert main(["explain", topic, "--format", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["schema"], data["command"], data["topic"]) == (1, "explain", topic.lower())
    assert data["text"] + "\n" == page


def test_no_topic_hides_a_rule_and_neither_hides_a_patch():
    taken = {key for rule in get_all_rules().values() for key in (rule.code.lower(), rule.slug, rule.name)}
    assert not taken & set(TOPICS)
    assert not {patch.code.lower() for patch in load_patches()} & (taken | set(TOPICS))
    assert {patch.name for patch in load_patches()} & (taken | set(TOPICS)) == {"recurrent"}, "to be asked for by code"
