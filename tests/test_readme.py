"""What the README says is what the code does: its tables are generated, its examples run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Program, types

import mil_ane_passes as ane
from mil_ane_passes.core.registry import by_name
from mil_ane_passes.report.catalogue import markdown_answers, markdown_findings, markdown_table
from mil_ane_passes.report.patches import patches_table
from mil_ane_passes.runtime.quirks import described
from mil_ane_passes.torch_frontend.registry import all_patches
from tests.benchmarks.table import startup
from tests.benchmarks.table import table as speed_table
from tests.cli.test_calibrate import squares
from tests.models.whole_table import summary as whole_table
from tests.models.whole_table import telling
from tests.reliability.table import table as reliability_table
from tests.residency.agreement import table as agreement_table
from tests.torch_frontend.grid.run import table as grid_table
from tests.upstream.__main__ import Counts
from tests.versions.needs import older_than

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def block_after(marker: str) -> str:
    """The fenced block that follows a marker."""
    return re.search(rf"<!-- {marker} -->\n```\w*\n(.*?)\n```", README, re.S).group(1)


def fault_table() -> str:
    """The fault models, one row each, with links to who published them."""
    rows = [f"| `{each.name}` | {each.summary} | {', '.join(link(source) for source in each.sources)} |"
            for each in described()]
    return "\n".join(["| name | what goes wrong | published in |", "|---|---|---|", *rows])


def link(source: str) -> str:
    """`https://github.com/OWNER/NAME/issues/1 (page)` as a short link."""
    address = source.split(" ")[0]
    words = address.removeprefix("https://").removeprefix("github.com/").removesuffix("/").split("/")
    label = words[1] if "github.com" in address else words[0]
    label += f"#{words[3]}" if words[2:3] in (["issues"], ["pull"]) else ""
    return f"[{label}]({address})"


def upstream_table() -> str:
    """What `python -m tests.upstream --record` counted last."""
    counts = json.loads((ROOT / "tests" / "upstream" / "counts.json").read_text())
    versions = ", ".join(f"{name} {version}" for name, version in counts.pop("versions").items())
    lines = [f"| tests ({versions}) | came to a prediction | judged | passed | explained | share |",
             "|---|---|---|---|---|---|"]
    for suite, numbers in counts.items():
        judged = Counts(**numbers)
        lines.append(f"| {NAMES[suite]} | {judged.reached:,} | {judged.passed + judged.failed:,} | {judged.passed:,} | "
                     f"{judged.failed:,} | {judged.share:.2f} % |")
    return "\n".join(lines)


def fired_table() -> str:
    """What `python -m tests.models.fired --record` saw last."""
    recorded = json.loads((ROOT / "tests" / "models" / "fired.json").read_text())["full"]
    places, models = Counter(), defaultdict(list)
    for model, row in recorded.items():
        for name, count in row["fired"].items():
            places[name] += count
            models[name].append(model)
    lines = ["| pass | architectures | places | such as |", "|---|---|---|---|"]
    lines += [f"| `{name}` | {len(models[name])} | {count} | {'; '.join(models[name][:3])} |"
              for name, count in sorted(places.items())]
    quiet = [model for model, row in recorded.items() if not row["fired"]]
    lines.append(f"| none | {len(quiet)} | | {'; '.join(quiet[:3])} |")
    return "\n".join(lines)


def calibrate_example() -> str:
    """An RMSNorm whose squares overflow, on the feeds of the tests."""
    program = squares()
    report = ane.calibrate(program, feeds={"x": np.full((2, 8), 5, np.float16)})
    return f"```\n{report}\n```"


def durations() -> Program:
    """A vocoder in small: a cumsum and a wide kernel between convs."""
    narrow, wide = np.zeros((64, 64, 1, 7), np.float16), np.zeros((64, 64, 1, 31), np.float16)

    @mb.program(input_specs=[mb.TensorSpec((1, 64, 1, 4096), types.fp16)], opset_version=ct.target.iOS17)
    def made(mel):
        x = mb.relu(x=mb.conv(x=mel, weight=narrow, pad_type="same", name="encoder"), name="encoded")
        x = mb.cumsum(x=x, axis=3, name="durations")
        x = mb.conv(x=x, weight=wide, pad_type="same", name="smooth")
        x = mb.relu(x=mb.conv(x=x, weight=narrow, pad_type="same", name="decoder"), name="decoded")
        x = mb.conv(x=x, weight=narrow, pad_type="same", name="last")
        return mb.tanh(x=x, name="waveform")

    return made


def lint_example() -> str:
    """A small vocoder with a cumsum and a kernel that is too wide."""
    return f"```\n{ane.lint(durations(), target='m4')}\n```"


NAMES = {"mil": "`mil/ops/tests`", "torch": "`frontend/torch/test/test_torch_ops.py`",
         "stateful": "`frontend/torch/test/test_torch_stateful_model.py`"}
TABLES = {"answers": markdown_answers, "whole": whole_table, "telling": telling, "passes": markdown_table,
          "findings": markdown_findings,
          "fault-models": fault_table,
          "upstream": upstream_table, "patches": lambda: patches_table(all_patches()), "grid": grid_table,
          "fired": fired_table, "calibrate": calibrate_example, "lint": lint_example,
          "agreement": agreement_table, "reliability": reliability_table, "start-up": startup, "speed": speed_table}


@pytest.mark.parametrize("marker", TABLES)
def test_the_tables_are_generated(marker):
    if marker == "agreement" and older_than("9.0"):
        pytest.skip(f"coremltools {ct.__version__} does not make the models that were measured: see test_m4.py")
    wanted = f"<!-- {marker} -->\n{TABLES[marker]()}\n"
    assert wanted in README, "run python -m tests.test_readme to write the tables"


def test_coremltools_own_tests_pass():
    """The whole of them, as counted last; a sample runs beside this."""
    counts = json.loads((ROOT / "tests" / "upstream" / "counts.json").read_text())
    mil, torch = Counts(**counts["mil"]), Counts(**counts["torch"])
    assert mil.passed > 4000 and mil.share >= 99.5 and mil.unexplained == 0
    assert torch.passed > 4000 and torch.share >= 99 and torch.unexplained == 0


def test_before_and_after_are_the_rules_own():
    indented = "\n".join(f"    {line}".rstrip() for line in block_after("before-after").splitlines())
    assert indented in by_name("lift_conv_transpose_1d").__doc__


def test_it_has_the_two_commands_that_ci_runs():
    for marker in ("set-up", "tests"):
        assert block_after(marker).count("\n") == 0


def test_every_command_line_is_one_the_tool_knows():
    from mil_ane_passes.cli.main import _parser

    lines = re.findall(r"^mil-ane-passes (.*?)(?:\s{2,}#.*)?$", README, re.M)
    assert len(lines) >= 6
    for line in lines:
        _parser().parse_args(line.split())


@pytest.mark.parametrize(
    "line", ["calibrate", "convert", "rewrite", "verify", "run", "trace", "load", "save", "pipeline", "batch", "edit"])
def test_every_library_call_exists(line):
    assert re.search(rf"\bane\.{line}\(", README) and callable(getattr(ane, line))


NEWCOMER = '''
import sys
from pathlib import Path
import mil_ane_passes.rewrites
mil_ane_passes.rewrites.__path__.append(sys.argv[1])
from mil_ane_passes.core.pipeline import register_passes
from mil_ane_passes.core.registry import all_rules, refresh
from mil_ane_passes.testing import CHECKS
refresh()
register_passes()
rule = all_rules()["drop_double_relu"]
for number, check in enumerate(CHECKS):
    folder = Path(sys.argv[1], f"check{number}")
    folder.mkdir()
    check(rule, folder)
from mil_ane_passes.cli.main import main
sys.exit(main(["explain", "ANE199"]))
'''


def test_a_newcomers_rewrite_is_one_source_file(tmp_path):
    """The README's file, put into the folder of rewrites: found, registered, held to the tests, explained."""
    (tmp_path / "drop_double_relu.py").write_text(block_after("newcomer"))
    done = subprocess.run([sys.executable, "-c", NEWCOMER, str(tmp_path)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "fix: ane::drop_double_relu (bitwise, preset named)" in done.stdout


def write_tables() -> None:
    """Write the generated parts into the README."""
    text = README
    for marker, table in TABLES.items():
        made = f"<!-- {marker} -->\n{table()}\n"
        old = rf"<!-- {marker} -->\n(?:```\n(?:.*\n)*?```\n|(?:[|-].*\n)*)"
        text = re.sub(old, lambda found, made=made: made, text)
    (ROOT / "README.md").write_text(text)


if __name__ == "__main__":
    write_tables()
