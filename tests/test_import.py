"""What importing the package does and does not do, and which way imports run."""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

import mil_ane_passes as ane
from tests.without_torch import hide_torch

HOME = Path(ane.__file__).parent
NAME = "mil_ane_passes"
PUBLIC = {
    "AnePassesError",
    "InputError",
    "LimitReached",
    "NotSupported",
    "Package",
    "RuleError",
    "__version__",
    "adapt",
    "batch",
    "calibrate",
    "convert",
    "edit",
    "exclusive",
    "lint",
    "load",
    "pipeline",
    "rewrite",
    "run",
    "runtime",
    "save",
    "torch_frontend",
    "trace",
    "upgrade",
    "verify",
}

WITHOUT_TORCH = """
import importlib, json, sys

class NoTorch:
    importers = []
    def find_spec(self, name, path=None, target=None):
        if name == "torch" or name.startswith("torch."):
            frame = sys._getframe(1)
            while frame.f_globals.get("__name__", "").startswith("importlib"):
                frame = frame.f_back
            self.importers.append(frame.f_globals.get("__name__"))
            raise ImportError("no torch here", name="torch")

sys.meta_path.insert(0, NoTorch())
import coremltools as ct
from coremltools.converters.mil.mil.passes.pass_registry import PASS_REGISTRY
host = dict(PASS_REGISTRY.passes)
NoTorch.importers.clear()
import mil_ane_passes as ane
registered = sorted(set(PASS_REGISTRY.passes) - set(host))
replaced = sorted(name for name in host if PASS_REGISTRY.passes[name] is not host[name])
parts = ("__version__", "runtime", "torch_frontend")
public = {name: callable(getattr(ane, name)) for name in ane.__all__ if name not in parts}
pipeline = ane.pipeline(preset="full").passes
asked = list(NoTorch.importers)
lacking = []
# As in the command, where importing the package registers no passes: so the module itself comes first.
sys.argv, sys.orig_argv = ["mil-ane-passes", *sys.argv[1:]], ["mil-ane-passes"]
to_be_first = sys.argv[3].split()
for module in sys.argv[1].split():
    for loaded in [name for name in sys.modules if name.split(".")[0] == "mil_ane_passes" and module in to_be_first]:
        del sys.modules[loaded]
    try:
        importlib.import_module(module)
    except ImportError as error:
        assert error.name == "torch", (module, error)
        lacking.append(module)
import mil_ane_passes as ane
order = {}
for first in ("ane.rewrite", "ane.run", "ane.verify", "importlib.import_module('mil_ane_passes.equivalence.feeds')",
              "importlib.import_module('mil_ane_passes.commands.rewrite')",
              "importlib.import_module('mil_ane_passes.commands.main')"):
    for loaded in [name for name in sys.modules if name.split(".")[0] == "mil_ane_passes"]:
        del sys.modules[loaded]
    import mil_ane_passes as ane
    try:
        eval(first)
    except ModuleNotFoundError:
        continue
    order[first] = callable(ane.verify)
try:
    ane.run(sys.argv[2], {})
except ane.InputError as error:
    run = str(error)
print(json.dumps({"registered": registered, "replaced": replaced, "public": public, "pipeline": pipeline,
                  "asked": asked, "lacking": lacking, "run": run, "order": order}))
"""

def find_modules() -> dict[str, Path]:
    found = {}
    for file in sorted(HOME.rglob("*.py")):
        parts = file.relative_to(HOME).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        found[".".join((NAME, *parts))] = file
    return found


MODULES = find_modules()


def base_of(module: str, level: int) -> str:
    """The package that `level` dots in `module` stand for."""
    parts = module.split(".")
    is_package = (
        any(name.startswith(f"{module}.") for name in MODULES) or (HOME / Path(*parts[1:]) / "__init__.py").exists()
    )
    return ".".join(parts[: len(parts) - level + is_package])


@functools.cache
def imports(module: str, lazy: bool) -> frozenset[str]:
    """Full names a module imports; without `lazy` only when it is imported itself. Never those for type checkers."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            return
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not lazy:
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            base = ".".join(filter(None, [base_of(module, node.level) if node.level else "", node.module or ""]))
            for alias in node.names:
                full = f"{base}.{alias.name}"
                found.add(full if full in MODULES else base)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(MODULES[module].read_text(encoding="utf-8")))
    return frozenset(found)


def part_of(module: str) -> str:
    """`ir`, `runtime`, ...; a top-level module is its own part, the package itself is "public"."""
    return module.split(".")[1] if "." in module else "public"


PARTS = sorted({part_of(module) for module in MODULES})
ALLOWED = {
    "utils": {"utils"},
    "ir": {"ir", "utils"},
    "passes": {"passes", "ir", "utils"},
    "ane": {"ane", "passes", "ir", "utils"},
    "rules": {"rules", "ane", "passes", "ir", "utils"},
    "rewrites": {"rewrites", "rules", "ane", "passes", "ir", "utils"},
    "package": {"package", "passes", "ir", "utils"},
    "neuralnetwork": {"neuralnetwork", "package", "passes", "ir", "utils"},
    "transforms": {"transforms", "package", "passes", "ir", "utils"},
    "runtime": {"runtime", "neuralnetwork", "package", "passes", "ir", "utils"},
    "equivalence": {"equivalence", "runtime", "passes", "ir", "utils", "_version"},
    "torch_frontend": {"torch_frontend", "equivalence", "runtime", "passes", "ir", "utils"},
    "testing": {"testing", "equivalence", "runtime", "package", "ane", "passes", "ir", "utils"},
    "report": {"report", "transforms", "package", "ane", "passes", "ir", "utils", "_version"},
    "commands": {
        "commands",
        "neuralnetwork",
        "report",
        "transforms",
        "equivalence",
        "torch_frontend",
        "runtime",
        "package",
        "ane",
        "passes",
        "ir",
        "utils",
        "_version",
    },
    "_version": set(),
    "public": {"passes", "utils", "_version"},
    "__main__": {"commands"},
}

COPIED = {f"{NAME}.report.decoder.generate"}
"Scripts that are copied for users, and import the package as users do."


@pytest.mark.parametrize("part", PARTS)
def test_imports_run_one_way(part):
    for module in (name for name in MODULES if part_of(name) == part and name not in COPIED):
        reached = {part_of(name) for name in imports(module, lazy=True) if name.split(".")[0] == NAME}
        assert reached <= ALLOWED[part], f"{module} imports from {sorted(reached - ALLOWED[part])}"


def test_the_check_of_arrows_sees_imports():
    assert f"{NAME}.utils.errors" in imports(f"{NAME}.commands.main", lazy=False)
    running = f"{NAME}.commands.run"
    assert f"{NAME}.runtime" in imports(running, lazy=True) - imports(running, lazy=False)
    assert f"{NAME}.package" in imports(f"{NAME}.commands.sources", lazy=False)
    assert f"{NAME}.runtime.inputs" not in imports(f"{NAME}.runtime.engine", lazy=True)


def test_torch_is_imported_in_the_runtime_and_the_frontend_only():
    users = {module for module in MODULES if any(name.split(".")[0] == "torch" for name in imports(module, lazy=True))}
    assert users and {part_of(module) for module in users} == {"runtime", "torch_frontend"}


def test_no_module_needs_itself_to_be_imported():
    graph = {module: imports(module, lazy=False) & set(MODULES) - {module} for module in MODULES}
    done: set[str] = set()
    while ready := {module for module, needs in graph.items() if module not in done and needs <= done}:
        done |= ready
    assert not set(graph) - done, f"circular: {sorted(set(graph) - done)}"


def import_without_torch(to_be_first):
    """What the process sees that imports each module, those `to_be_first` before all others."""
    command = [
        sys.executable,
        "-c",
        WITHOUT_TORCH,
        " ".join(MODULES),
        str(HOME.parent / "fixtures/nothing_to_do.mlpackage"),
        " ".join(to_be_first),
    ]
    result = subprocess.run(command, capture_output=True, text=True, env=hide_torch(), check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def without_torch():
    """Of the modules of a folder, whose imports begin with the same packages, the first and the last come first."""
    folders = defaultdict(list)
    for module, file in MODULES.items():
        folders[file.parent].append(module)
    return import_without_torch({each for modules in folders.values() for each in (modules[0], modules[-1])})


def test_importing_needs_no_torch_and_asks_for_none(without_torch):
    assert without_torch["asked"] == []


def test_public_names_are_functions_and_classes_whatever_was_used_first(without_torch):
    """A submodule that is imported later must not take the place of a function of the same name."""
    assert without_torch["public"] == dict.fromkeys(PUBLIC - {"__version__", "runtime", "torch_frontend"}, True)
    assert len(without_torch["order"]) >= 5
    assert without_torch["order"] == dict.fromkeys(without_torch["order"], True)


def test_importing_registers_our_passes_and_replaces_none(without_torch):
    from mil_ane_passes.passes.registry import get_all_rewrites

    assert without_torch["registered"] == sorted(
        f"ane::{name}" for name in {*get_all_rewrites(), "guard_begin", "guard_end"}
    )
    assert without_torch["replaced"] == []
    assert set(without_torch["registered"]) >= {
        name.partition("{")[0] for name in without_torch["pipeline"] if name.startswith("ane::")}


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_module_can_be_the_first_one_imported(without_torch, every):
    """All but the kernels also without torch. Two of each folder in the fast run."""
    without_torch = import_without_torch(MODULES) if every else without_torch
    needing = {
        module for module in MODULES if any(name.split(".")[0] == "torch" for name in imports(module, lazy=False))
    }
    assert set(without_torch["lacking"]) >= needing
    assert {part_of(module) for module in without_torch["lacking"]} <= {"runtime", "torch_frontend"}
    assert not {f"{NAME}.runtime", f"{NAME}.runtime.engine"} & set(without_torch["lacking"])


def test_running_without_torch_says_what_to_install(without_torch):
    assert without_torch["run"] == (
        "the reference runtime needs PyTorch, which is not installed: pip install 'mil-ane-passes[verify]'"
    )


def test_public_names():
    assert set(ane.__all__) == PUBLIC
    assert all(getattr(ane, name) is not None for name in PUBLIC)
    assert set(dir(ane)) >= PUBLIC


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'mil_ane_passes' has no attribute 'pipelines'"):
        ane.pipelines  # noqa: B018


@pytest.mark.parametrize(
    ("argv", "orig", "ours"),
    [
        ("/usr/bin/mil-ane-passes", ["mil-ane-passes", "passes"], True),
        ("-m", ["python", "-m", "mil_ane_passes", "passes"], True),
        ("/lib/mil_ane_passes/__main__.py", ["python", "-m", "mil_ane_passes", "passes"], True),
        ("/lib/pytest/__main__.py", ["python", "-m", "pytest"], False),
        ("-m", ["python", "-m", "pytest"], False),
        ("train.py", ["python", "train.py"], False),
        ("", ["python"], False),
    ],
)
def test_only_the_command_puts_off_what_an_import_does(monkeypatch, argv, orig, ours):
    from mil_ane_passes.passes.coremltools_setup import register_with_coremltools

    done = []
    monkeypatch.setattr(sys, "argv", [argv])
    monkeypatch.setattr(sys, "orig_argv", orig)
    monkeypatch.setattr("mil_ane_passes.passes.pipeline.register_passes", lambda guard=None: done.append(True))
    register_with_coremltools()
    assert bool(done) != ours


def test_the_command_quietens_coremltools_and_gives_its_voice_back(caplog):
    import logging

    from mil_ane_passes.passes.coremltools_setup import silence_coremltools

    logger = logging.getLogger("coremltools")
    filters = list(logger.filters)
    with silence_coremltools(), caplog.at_level(logging.INFO, "coremltools"):
        logger.warning("noise")
        logger.error("trouble")
    assert logger.filters == filters
    assert [record.message for record in caplog.records] == ["trouble"]


HELP = """
import sys
sys.argv, sys.orig_argv = ["mil-ane-passes", "--help"], ["mil-ane-passes", "--help"]
from mil_ane_passes.commands.main import main
try:
    main(["--help"])
except SystemExit:
    assert "coremltools" not in sys.modules, "help waits for coremltools"
else:
    raise AssertionError("no help")
"""


def test_help_does_not_wait_for_coremltools():
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=False,
                          env=hide_torch())
    assert done.returncode == 0, done.stderr


COLLECTOR = """
import gc, json, sys
sys.argv, sys.orig_argv = [sys.argv[1]], [sys.argv[1]]
during, before = [], gc.get_freeze_count()

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "coremltools":
            during.append(gc.isenabled())

sys.meta_path.insert(0, Finder())
import mil_ane_passes as ane
try:
    ane.rewrite(0)
except ane.InputError:
    kept = gc.get_freeze_count() - before
ane.pipeline, ane.runtime
print(json.dumps([during, gc.isenabled(), kept > 50_000, gc.get_freeze_count() - before <= kept]))
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("program", ["mil-ane-passes", "train.py"])
def test_the_collector_rests_while_modules_are_imported_and_only_the_command_never_looks_at_them_again(program):
    """What comes after the first import is collected as ever; a caller's collector is left as it was."""
    done = subprocess.run([sys.executable, "-c", COLLECTOR, program], capture_output=True, text=True, check=True,
                          env=hide_torch())
    assert json.loads(done.stdout.splitlines()[-1]) == [[False], True, program == "mil-ane-passes", True]


PRIVATE = re.compile(
    r"(?<!self)\._(sym_val|sym_type|auto_val|input_vars|output_vars|child_ops|internal_vars|block_inputs|input_dict)\b"
)


def test_private_attributes_of_pymil_are_touched_in_ir_only():
    users = {file.relative_to(HOME).parts[0] for file in HOME.rglob("*.py") if PRIVATE.search(file.read_text())}
    assert users == {"ir"}
