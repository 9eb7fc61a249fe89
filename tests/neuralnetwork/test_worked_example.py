"""The example of the page about .mlmodel files, run as it stands there: what it shows is what is printed."""

import re

from tests.readme.walk import ROOT, STEP, Step

PAGE = ROOT / "mil_ane_passes/neuralnetwork/README.md"
SECTION = re.compile(r"^### Broadcastable and ND layers: an example\n(.*?)^### ", re.S | re.M)


def show_anew(text, folder):
    """The page with every excerpt as the steps of the example print it now."""
    for found in STEP.finditer(SECTION.search(text)[1]):
        language, code, wanted, shown = found.groups()
        output = Step(language, code, wanted or "", shown or "").run(folder)
        if wanted:
            excerpt = Step(language, code, wanted, shown).excerpt(output)
            assert excerpt, f"nothing printed by {code} matches {wanted}"
            text = text.replace(f"<!-- shows {wanted} -->\n```\n{shown}```",
                                f"<!-- shows {wanted} -->\n```\n{excerpt}```")
    return text


def test_the_example_shows_what_it_prints(tmp_path):
    text = PAGE.read_text(encoding="utf-8")
    assert show_anew(text, tmp_path) == text, "run python -m tests.neuralnetwork.test_worked_example to write it"


def test_the_example_ends_without_layers_off_the_ane():
    text = PAGE.read_text(encoding="utf-8")
    assert "layers reported off the ANE: 8 -> 0" in text and text.count("\nequal in ") == 3


if __name__ == "__main__":
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as place:
        PAGE.write_text(show_anew(PAGE.read_text(encoding="utf-8"), Path(place)), encoding="utf-8")
