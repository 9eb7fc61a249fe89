"""Other readers than ours read what `rewrite` wrote, and these checks notice what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ...package.helpers import MODEL, conv_program, main_block, make, spec_of, write_spec
from . import readers, table
from .rewritten import write_rewritten

README = Path(__file__).parents[2] / "README.md"
MISSING = readers.find_missing_for_netron()
needs_netron = pytest.mark.skipif(MISSING is not None, reason=MISSING or "")
NAMES = [pytest.param(name, marks=[needs_netron] if name == "read_netron" else []) for name in readers.READERS]


@pytest.fixture(scope="module")
def rewritten(tmp_path_factory) -> list[Path]:
    return write_rewritten(tmp_path_factory.mktemp("readers"), every=5)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_readers_of_others_read_what_was_rewritten(name, rewritten, capfd):
    figure = readers.READERS[name](rewritten)
    assert figure["tries"] >= 100 and figure["failures"] == 0, capfd.readouterr().err


def change_dimension(package: Path) -> None:
    spec = spec_of(package)
    (weight,) = (op for op in main_block(spec).operations if op.type == "const" and "weight" in op.outputs[0].name)
    weight.attributes["val"].type.tensorType.dimensions[0].constant.size += 1
    write_spec(package, spec)


def change_manifest(package: Path) -> None:
    manifest = json.loads((package / "Manifest.json").read_text())
    manifest["rootModelIdentifier"] = "another"
    (package / "Manifest.json").write_text(json.dumps(manifest))


def add_unknown_field(package: Path) -> None:
    with (package / MODEL).open("ab") as model:
        model.write(bytes([0xF8, 0xFF, 0x01, 0x01]))  # field 4095, a number


def change_dtype(package: Path) -> None:
    spec = spec_of(package)
    main_block(spec).operations[-1].outputs[0].type.tensorType.dataType = 0
    write_spec(package, spec)


@pytest.mark.parametrize(("name", "damage", "message"), [
    ("read_manifests", change_manifest, "its manifest does not lead to the model"),
    ("read_weights", change_dimension, "the program declares 1224"),
    pytest.param("read_models", add_unknown_field, "with unknown fields", marks=pytest.mark.slow),
    pytest.param("read_netron", change_dtype, "Netron says Unsupported data type", marks=needs_netron)])
def test_what_is_wrong_is_noticed(name: str, damage: Callable[[Path], Any], message: str, tmp_path, capsys):
    whole, damaged = (make(tmp_path / f"{each}.mlpackage", conv_program()) for each in ("whole", "damaged"))
    damage(damaged)
    capsys.readouterr()
    assert readers.READERS[name]([whole, damaged])["failures"] == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{damaged}") and message in line


@needs_netron
def test_netron_reads_other_weights_of_another_package(tmp_path, capsys, monkeypatch):
    """Its weights are compared with the file's, which here is another."""
    program = conv_program()
    first = make(tmp_path / "first.mlpackage", program)
    (conv,) = program.functions["main"].find_ops(op_type="conv")
    conv.weight.val[...] *= 2
    expected = readers.describe_graphs(make(tmp_path / "second.mlpackage", program))
    monkeypatch.setattr(readers, "describe_graphs", lambda package: expected)
    assert readers.count_netron_loads([first])["failures"] == 1
    assert "Netron shows another program" in capsys.readouterr().err


def test_the_record_has_all_of_them():
    figures = table.read_figures()
    assert all(figures[name]["tries"] >= 500 for name in readers.READERS)
    assert figures["read_netron"]["version"] == readers.NETRON_VERSION
    assert f"netron=={readers.NETRON_VERSION}" in README.read_text()
