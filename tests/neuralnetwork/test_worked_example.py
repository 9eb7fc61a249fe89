"""The example of the page about .mlmodel files, run as it stands there: what it shows is what is printed."""

from tests.readme.walk import ROOT, shown_anew

PAGE = ROOT / "mil_ane_passes/neuralnetwork/README.md"
TITLE = "### Broadcastable and ND layers: an example"


def test_the_example_shows_what_it_prints(tmp_path):
    text = PAGE.read_text(encoding="utf-8")
    assert shown_anew(text, tmp_path, TITLE, here=True) == text, (
        "run python -m tests.neuralnetwork.test_worked_example to write it")


def test_the_example_ends_without_layers_off_the_ane():
    text = PAGE.read_text(encoding="utf-8")
    assert "layers reported off the ANE: 8 -> 0" in text and text.count("\nequal in ") == 2


if __name__ == "__main__":
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as place:
        PAGE.write_text(shown_anew(PAGE.read_text(encoding="utf-8"), Path(place), TITLE), encoding="utf-8")
