"""What the README says is what the code does: its tables are generated, its examples run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from mil_ane_passes.core.registry import by_name
from mil_ane_passes.report.catalogue import markdown_table

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def block_after(marker: str) -> str:
    """The fenced block that follows a marker."""
    return re.search(rf"<!-- {marker} -->\n```\w*\n(.*?)\n```", README, re.S).group(1)


def test_the_table_of_passes_is_generated():
    assert f"<!-- passes -->\n{markdown_table()}\n" in README, "run python -m tests.test_readme to write the table"


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


@pytest.mark.parametrize("line", ["rewrite", "verify", "run", "load", "save", "pipeline"])
def test_every_library_call_exists(line):
    import mil_ane_passes as ane

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
    text = re.sub(r"(<!-- passes -->\n)(?:\|.*\n)+", lambda found: found.group(1) + markdown_table() + "\n", README)
    (ROOT / "README.md").write_text(text)


if __name__ == "__main__":
    write_tables()
