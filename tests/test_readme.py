"""What the README says is what the code does: its tables are generated, its five minutes are walked."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest

import mil_ane_passes as ane
from mil_ane_passes.passes.contract import Rewrite
from mil_ane_passes.passes.registry import get_all_rules
from tests.lab.models.whole_table import read_record
from tests.lab.upstream.__main__ import CaseCounts
from tests.readme.pages import PAGES, read_page, write_stored_pages, write_tables
from tests.readme.tables import ROOT
from tests.readme.walk import shown_anew, steps
from tests.torch_frontend.grid.run import table as grid
from tests.torch_frontend.models.language import transformers

README = (ROOT / "README.md").read_text()
TRANSFORMS = "mil_ane_passes/transforms/README.md"
RECORDED_WITH = {"coremltools": "9.0", "torch": "2.13.0"}
OTHER_FILES = {
    "generate.py", "train.py",  # of users
    "frontend/torch/test/test_torch_ops.py", "frontend/torch/test/test_torch_stateful_model.py", "test_nn_builder.py",
    "test_numpy_nn_layers.py", "test_quantization.py",
    "test_simple_nn_inference.py", "tests/chat.py",  # of coremltools and Anemll
}
"Scripts that the pages name and that are not files of this project."
HERE = {name: version(name).split("+")[0] for name in RECORDED_WITH}


def block_after(marker: str, text: str = README) -> str:
    """The fenced block that follows a marker."""
    return re.search(rf"<!-- {marker} -->\n```\w*\n(.*?)\n```", text, re.S).group(1)


@pytest.mark.parametrize("name, marker", [
    pytest.param(name, marker, marks=[pytest.mark.slow] if marker == "agreement" else [])
    for name, tables in PAGES.items() for marker in tables])
def test_the_tables_are_generated(name, marker):
    if marker in ("patches", "agreement") and HERE["coremltools"] != RECORDED_WITH["coremltools"]:
        pytest.skip(f"{marker} are those of coremltools 9.0; {HERE['coremltools']} is here")
    if marker == "patches" and np.lib.NumpyVersion(np.__version__) < "2.4.0":
        pytest.skip(f"what fails differs below numpy 2.4, which refuses casts of arrays; {np.__version__} is here")
    wanted = f"<!-- {marker} -->\n{PAGES[name][marker]()}\n"
    assert wanted in read_page(name), "run python -m tests.test_readme to write the tables"


def test_every_generated_table_belongs_to_a_page():
    marked = {(name, marker) for name in PAGES for marker in re.findall(r"^<!-- ([\w-]+) -->$", read_page(name), re.M)}
    copied = {*(("README.md", each) for each in ("set-up", "tests", "plugin")), (TRANSFORMS, "decoder")}
    assert marked - copied == {
        (name, marker) for name, tables in PAGES.items() for marker in tables}


@pytest.mark.parametrize("here", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_five_minutes_show_what_they_print(tmp_path, here):
    """Every block is run as it stands; with other versions names and numbers may differ, so only that it runs.

    Here, or (slow) in a process a command, as a reader would.
    """
    assert {step.language for step in steps(README)} == {"python", "sh"} and len(list(steps(README))) >= 3
    anew = shown_anew(README, tmp_path, here=here)
    if HERE == RECORDED_WITH:
        assert anew == README, "run python -m tests.test_readme to write what they print"


def test_coremltools_own_tests_pass():
    """The whole of them, as counted last; a sample runs beside this."""
    counts = json.loads((ROOT / "tests" / "lab" / "upstream" / "counts.json").read_text())
    mil, torch = CaseCounts(**counts["mil"]), CaseCounts(**counts["torch"])
    assert mil.passed > 4000 and mil.share >= 99.5 and mil.unexplained == 0
    assert torch.passed > 4000 and torch.share >= 99 and torch.unexplained == 0


def test_it_has_the_two_commands_that_ci_runs():
    for marker in ("set-up", "tests"):
        assert block_after(marker).count("\n") == 0


def test_the_numbers_in_its_words():
    rewrites = sum(issubclass(rule, Rewrite) for rule in get_all_rules().values())
    architectures = {each.architecture for each in read_record()}
    assert f"| {rewrites} rewrites;" in read_page("mil_ane_passes/README.md"), f"write {rewrites} into its comparison"
    assert f"their results on {len(architectures)} real architectures" in README
    assert f"Small models of {len(architectures)} architectures" in read_page("mil_ane_passes/rewrites/README.md")
    every = [cell.strip() for cell in grid().splitlines()[-1].strip("|").split("|")]
    alone, patched = (re.search(r"\((\d+)\.(\d)%\)", every[place]) for place in (2, 5))
    share = f"coremltools converts {alone[1]}.{alone[2]} % correctly, with the patches {patched[1]}.{patched[2]} %"
    assert f"of {every[1]} cases\n[{share}]" in README


def test_every_command_line_is_one_the_tool_knows():
    from mil_ane_passes.commands.main import _build_parser

    lines = re.findall(r"^mil-ane-passes (.*?)(?:\s{2,}#.*)?$", README, re.M)
    assert len(lines) >= 6
    for line in lines:
        _build_parser().parse_args(line.split())


def test_every_topic_it_names_is_one():
    from mil_ane_passes.commands.explain import TOPICS

    named = set(re.findall(r"`(?:mil-ane-passes )?explain ([a-z]+)`", README))
    assert named and named <= set(TOPICS)


@pytest.mark.parametrize(
    "line", ["calibrate", "convert", "rewrite", "verify", "run", "trace", "lint", "pipeline", "batch", "edit"])
def test_every_library_call_exists(line):
    assert re.search(rf"\bane\.{line}\(", README) and callable(getattr(ane, line))


@pytest.mark.parametrize("name", PAGES)
def test_every_file_it_links_to_is_there(name):
    text = re.sub(r"```.*?```", "", read_page(name), flags=re.S)
    targets = re.findall(r"\]\((?!https://)([^)]+)\)|src(?:set)?=\"([^\"]+)\"", text)
    pictures = [picture for _, picture in targets if picture]
    assert len(pictures) == (2 if name == "README.md" else 0)  # light and dark
    for target in map("".join, targets):
        assert ((ROOT / name).parent / target).exists(), target


@pytest.mark.parametrize("name", PAGES)
def test_every_module_it_names_is_there(name):
    """Names in backticks: of a module in the page's folder, or a path from the package or the repository."""
    text = re.sub(r"```.*?```", "", read_page(name), flags=re.S)
    folders = (ROOT / name).parent, ROOT / "mil_ane_passes", ROOT
    named = [found for found in re.findall(r"`([\w/]+\.py)`", text) if found not in OTHER_FILES and "NAME" not in found]
    assert not [found for found in named if not any((folder / found).exists() for folder in folders)]


@pytest.mark.parametrize("room", sorted(path.parent.name for path in (ROOT / "mil_ane_passes").glob("*/__init__.py")))
def test_every_room_has_a_page(room):
    assert f"[{room}]({room}/README.md)" in read_page("mil_ane_passes/README.md")


@pytest.mark.parametrize("family", ["Qwen2", *(pytest.param(name, marks=pytest.mark.slow) for name in (
    "Llama", "Mistral", "Qwen3", "Gemma", "Phi3", "Olmo2", "Granite", "SmolLM3", "Starcoder2", "Cohere"))])
def test_the_recipe_for_decoders_generates_what_torch_does(tmp_path, monkeypatch, family):
    """As it stands, with a tiny model of random weights in place of the one to download."""
    package, torch = transformers(), pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    config = getattr(package, f"{family}Config")(
        vocab_size=96, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=96, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    getattr(package, f"{family}ForCausalLM")(config).save_pretrained("tiny")
    recipe = block_after("decoder", read_page(TRANSFORMS))
    replaced = recipe.replace('"Qwen/Qwen2.5-0.5B", 1024', '"tiny", 64')
    assert replaced != recipe
    names = {"__name__": "__main__"}
    exec(compile(replaced, "<page>", "exec"), names)
    assert not names["decoder"].training  # which both converters warn of
    ane.adapt("decoder.mlpackage", "folder", context=64, target="m4")
    done = subprocess.run([sys.executable, "folder/generate.py", "--ids", "1,2,3", "--steps", "6", "--runtime",
                           "reference", "--json"], capture_output=True, text=True)
    ids = [1, 2, 3]
    with torch.no_grad():
        for _ in range(6):
            ids.append(int(names["model"](torch.tensor([ids])).logits[0, -1].argmax()))
    assert json.loads(done.stdout)["tokens"] == ids[3:], done.stderr


def test_the_rewrite_it_shows_is_the_plugins():
    """Line by line, in its order; the plugin itself is built, installed and held to the standard tests."""
    lines = iter((ROOT / "tests" / "packaging" / "example_plugin" / "example_ane_rules.py").read_text().splitlines())
    assert all(line in lines for line in block_after("plugin").splitlines())


def write() -> None:
    """Write the generated tables into their pages, what the commands print into the README, and the pages of rules."""
    write_stored_pages()
    write_tables()
    with tempfile.TemporaryDirectory() as folder:
        (ROOT / "README.md").write_text(shown_anew(read_page("README.md"), Path(folder)))


if __name__ == "__main__":
    write()
