"""The patches are on where they were asked for, and nowhere and never else."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import coremltools as ct
import pytest
import torch
from coremltools.converters.mil.frontend.torch import torch_op_registry
from coremltools.converters.mil.frontend.torch.torch_op_registry import _TORCH_OPS_REGISTRY, TorchOpsRegistry
from coremltools.converters.mil.mil import Builder as mb

import mil_ane_passes as ane
from mil_ane_passes.passes.severity import Severity
from mil_ane_passes.torch_frontend import active, install, patched, patching, registry, uninstall
from mil_ane_passes.torch_frontend.contract import Patch, Replacement
from mil_ane_passes.torch_frontend.probes import find_fault, is_lowered_by_coremltools, isolate_coremltools
from mil_ane_passes.torch_frontend.registry import PatchStatus, collect_patch_statuses, load_patches
from mil_ane_passes.utils.errors import RuleError

from .checks import captured, convert, outputs

HERE = Path(__file__).parent
OPS = "coremltools.converters.mil.frontend.torch.ops"


def ours(x: torch.Tensor) -> torch.Tensor:
    """What coremltools alone cannot convert."""
    return torch.fmod(x, 2.0)


EXAMPLE = torch.tensor([-3.5, 2.5, 7.0])


def converts() -> bool:
    """Whether `fmod` converts for the caller."""
    try:
        convert(ours, [EXAMPLE], patched=False)
    except Exception:
        return False
    return True


def snapshot() -> dict[Any, Any]:
    """The very objects of coremltools that patches could exchange."""
    found: dict[Any, Any] = {("registry", kind): function
                             for kind, function in _TORCH_OPS_REGISTRY.name_to_func_mapping.items()}
    found |= {("class", name): value for name, value in vars(TorchOpsRegistry).items()}
    found |= {("module", name): value for name, value in vars(torch_op_registry).items() if callable(value)}
    for patch in load_patches():
        for each in patch.replacements:
            owner: Any = importlib.import_module(each.module)
            *path, name = each.attribute.split(".")
            for part in path:
                owner = getattr(owner, part)
            found[each.module, each.attribute] = vars(owner)[name]
    return found


def same(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    return one.keys() == other.keys() and all(one[key] is other[key] for key in one)


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    collect_patch_statuses()  # probed once, before anything is compared
    before = snapshot()
    yield
    uninstall()
    assert not active() and patching._holders == 0
    assert same(snapshot(), before)


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts patches of the test's own in the place of all that were found."""
    def pretend(*patches: Patch) -> None:
        with isolate_coremltools():
            found = tuple(PatchStatus(patch, patch.needed(is_lowered_by_coremltools)) for patch in patches)
        monkeypatch.setattr(registry, "collect_patch_statuses", lambda: found)
    return pretend


def test_a_context_converts_with_the_patches_and_leaves_the_host_as_it_was():
    before = snapshot()
    assert not converts() and not active()
    with patched():
        assert converts() and active()
        assert not same(snapshot(), before)
    assert same(snapshot(), before)
    assert not converts() and not active()


def test_contexts_nest():
    before = snapshot()
    with patched():
        inside = snapshot()
        with patched():
            assert active() and same(snapshot(), inside)
        assert active() and converts()
    assert same(snapshot(), before)


def test_an_exception_restores():
    before = snapshot()
    with pytest.raises(KeyError), patched(), patched():
        raise KeyError("of the user's")
    assert not active() and same(snapshot(), before)


def test_a_refused_conversion_restores():
    before = snapshot()
    with pytest.raises(Exception, match="bessel_j0"), patched():
        ct.convert(captured(lambda x: torch.special.bessel_j0(x), [EXAMPLE], "trace"),
                   inputs=[ct.TensorType(shape=(3,))], convert_to="milinternal")
    assert same(snapshot(), before)


def test_installing_twice_is_once_and_so_is_uninstalling():
    before = snapshot()
    install()
    inside = snapshot()
    install()
    assert same(snapshot(), inside) and active() and converts()
    uninstall()
    assert same(snapshot(), before) and not active()
    uninstall()
    assert same(snapshot(), before)
    install()
    assert active()
    uninstall()
    assert same(snapshot(), before)


def test_a_context_within_an_installation():
    before = snapshot()
    install()
    with patched():
        uninstall()
        assert active() and converts()
    assert not active() and same(snapshot(), before)
    with patched():
        install()
    assert active()
    uninstall()
    assert same(snapshot(), before)


def test_one_function_of_a_context_may_be_used_again():
    @patched()
    def used() -> bool:
        return active()

    assert used() and used() and not active()


class Steps:
    """Two threads that take turns; what one raises is raised in the test."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2, timeout=60)
        self.errors: list[BaseException] = []

    def turn(self) -> None:
        self._barrier.wait()

    def run(self, *functions: Any) -> None:
        def guarded(function: Any) -> None:
            try:
                function()
            except BaseException as error:
                self.errors.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=guarded, args=(function,)) for function in functions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in self.errors:
            raise error


def test_another_thread_converts_as_the_host():
    steps = Steps()

    def with_patches() -> None:
        with patched():
            steps.turn()
            assert active()
            steps.turn()
            assert converts()

    def without() -> None:
        steps.turn()
        assert not active() and not converts()
        steps.turn()

    steps.run(with_patches, without)


def test_of_two_threads_with_the_patches_one_leaves_first():
    before = snapshot()
    steps = Steps()

    def first() -> None:
        with patched():
            steps.turn()
        assert not active() and not converts()
        steps.turn()

    def last() -> None:
        with patched():
            steps.turn()
            steps.turn()
            assert active() and converts()

    steps.run(first, last)
    assert same(snapshot(), before)


def test_an_installation_holds_in_every_thread():
    install()
    seen: list[bool] = []
    thread = threading.Thread(target=lambda: seen.append(active()))
    thread.start()
    thread.join()
    assert seen == [True]


IMPORTING = """
import sys
from coremltools.converters.mil.frontend.torch.torch_op_registry import _TORCH_OPS_REGISTRY as table, TorchOpsRegistry
before, members = dict(table.name_to_func_mapping), dict(vars(TorchOpsRegistry))
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        assert name.split(".")[0] != "torch", name
for name in [name for name in sys.modules if name.split(".")[0] == "torch"]:
    del sys.modules[name]
sys.meta_path.insert(0, NoTorch())
import mil_ane_passes as ane
ane.torch_frontend.patched, ane.torch_frontend.install, ane.convert, ane.torch_frontend.active()
ane.pipeline(), ane.rewrite, ane.run
assert all(table.name_to_func_mapping[name] is before[name] for name in before)
assert len(table.name_to_func_mapping) == len(before)
assert all(vars(TorchOpsRegistry)[name] is members[name] for name in members)
assert not [name for name in sys.modules if name.startswith("mil_ane_passes.torch_frontend.patches")]
assert "torch" not in sys.modules
"""


@pytest.mark.slow
def test_importing_patches_nothing_and_imports_no_torch():
    done = subprocess.run([sys.executable, "-c", IMPORTING], capture_output=True, text=True, check=False,
                          cwd=HERE.parent.parent)
    assert done.returncode == 0, done.stderr


def own_fmod(context: Any, node: Any) -> None:
    """A lowering as a user would register: twice the input."""
    context.add(mb.mul(x=context[node.inputs[0]], y=2.0, name=node.name))


@pytest.mark.parametrize("module", [__name__, None], ids=["of a module", "of code that was executed"])
def test_a_lowering_that_the_user_registered_wins(module, monkeypatch):
    monkeypatch.setattr(own_fmod, "__module__", module)
    kept = dict(_TORCH_OPS_REGISTRY.name_to_func_mapping)
    try:
        with patched():
            torch_op_registry.register_torch_op(torch_alias=["fmod"], override=True)(own_fmod)
            found = outputs(convert(ours, [EXAMPLE], patched=False), [EXAMPLE])[0]
            assert found.tolist() == (2 * EXAMPLE).tolist()
        found = outputs(convert(ours, [EXAMPLE], patched=True), [EXAMPLE])[0]
        assert found.tolist() == (2 * EXAMPLE).tolist()
    finally:
        _TORCH_OPS_REGISTRY.name_to_func_mapping.clear()
        _TORCH_OPS_REGISTRY.name_to_func_mapping.update(kept)


CODES = (("one", "TORCH198"), ("other", "TORCH199"))


def test_two_patches_that_lower_one_op_are_refused():
    one, other = (Patch("a", ("none known",), name=name, code=code) for name, code in CODES)
    one.op("sum_of_all", "relu")(own_fmod)
    other.op("relu")(own_fmod)
    with pytest.raises(RuleError, match="relu is used by the patches 'one' and 'other'; expected one"):
        registry._check_distinct([one, other])


def test_two_patches_of_one_function_are_chained(pretended):
    order: list[str] = []

    def noting(name: str) -> Any:
        def _get_inputs(host: Any, *arguments: Any, **named: Any) -> Any:
            order.append(name)
            return host(*arguments, **named)
        return _get_inputs

    one, other = (Patch("a", ("none known",), name=name, code=code,
                        replacements=[Replacement(OPS, "_get_inputs", noting(name))]) for name, code in CODES)
    registry._check_distinct([one, other])
    for patch in (one, other):
        patch.probe(lambda: "wrong, says the test")
    original = vars(importlib.import_module(OPS))["_get_inputs"]
    pretended(one, other)
    with patched():
        found = outputs(convert(torch.tanh, [EXAMPLE], patched=False), [EXAMPLE])[0]
    assert found == pytest.approx(torch.tanh(EXAMPLE).numpy()) and order[:2] == ["other", "one"]
    assert vars(importlib.import_module(OPS))["_get_inputs"] is original


def test_probes_run_with_the_hosts_functions_though_patches_are_installed():
    seen: list[bool] = []
    patch = Patch("a", ("none known",))
    patch.op("fmod")(own_fmod)
    patch.probe(lambda: seen.extend([active(), converts()]) or None)
    install()
    with patched(), isolate_coremltools():
        patch.needed(is_lowered_by_coremltools)
        assert is_lowered_by_coremltools("relu") and not is_lowered_by_coremltools("op_of_nobody")
    assert seen == [False, False] and active()


def test_a_patch_that_the_host_does_not_need_is_off(pretended):
    class Host:
        calls = 0

    unneeded = Patch("a", ("none known",), name="unneeded")
    unneeded.op("relu")(own_fmod)
    unneeded.probe(lambda: None)

    @unneeded.replace_function(OPS, "_cast")
    def _cast(host: Any, *arguments: Any) -> Any:
        Host.calls += 1
        return host(*arguments)

    pretended(unneeded)
    original = vars(importlib.import_module(OPS))["_cast"]
    with patched():
        assert vars(importlib.import_module(OPS))["_cast"] is original
        found = outputs(convert(torch.relu, [EXAMPLE], patched=False), [EXAMPLE])[0]
    assert found.tolist() == torch.relu(EXAMPLE).tolist() and Host.calls == 0


def test_a_patch_that_the_host_needs_is_on_and_gets_the_hosts_function(pretended):
    needed = Patch("a", ("none known",), name="needed")
    needed.op("relu")(own_fmod)
    needed.probe(lambda: "wrong, says the test")
    seen: list[Any] = []

    @needed.replace_function(OPS, "_get_inputs")
    def _get_inputs(host: Any, *arguments: Any, **named: Any) -> Any:
        seen.append(host)
        return host(*arguments, **named)

    original = vars(importlib.import_module(OPS))["_get_inputs"]
    pretended(needed)
    with patched():
        found = outputs(convert(lambda x: torch.tanh(torch.relu(x)), [EXAMPLE], patched=False), [EXAMPLE])[0]
    assert found == pytest.approx(torch.tanh(2 * EXAMPLE).numpy())
    assert seen and all(each is original for each in seen)
    assert vars(importlib.import_module(OPS))["_get_inputs"] is original


def test_without_a_probe_a_patch_is_needed_for_what_the_host_lacks():
    patch = Patch("a", ("none known",))
    patch.op("relu")(own_fmod)
    assert patch.needed(is_lowered_by_coremltools) is None
    patch.op("op_of_nobody", "another_of_nobody")(own_fmod)
    assert patch.needed(is_lowered_by_coremltools) == "not implemented: another_of_nobody, op_of_nobody"
    patch.probe(lambda: None)  # what it asks is right; the rest is lacking all the same
    assert patch.needed(is_lowered_by_coremltools) == "not implemented: another_of_nobody, op_of_nobody"


def test_a_probe_that_breaks_is_a_patch_that_is_needed():
    patch = Patch("a", ("none known",))
    patch.probe(lambda: [][0])
    assert patch.needed(is_lowered_by_coremltools) == "fails: IndexError: list index out of range"


@pytest.mark.parametrize("name, reason", [
    ("small_concat", "fails: Types should have zero-rank ndarray input, got ? instead."),
    ("tensors", "fails: torch::tensor ? Unsupported dtype: bool"),
    ("index_put", "fails: Input ? has rank 1 != other inputs rank 0"),
])
def test_the_reason_is_the_same_whatever_was_converted_before(name, reason):
    """coremltools' messages name symbolic dimensions and torch values, which are numbered by process."""
    (patch,) = [each for each in load_patches() if each.name == name]
    for _ in range(2):
        with isolate_coremltools():
            assert patch.needed(is_lowered_by_coremltools) == reason


@pytest.mark.skipif(not ct.__version__.startswith("9.0"), reason="severities are those with coremltools 9.0")
def test_a_severity_is_what_the_probe_finds():
    silent = {found.patch.name for found in collect_patch_statuses() if "silently" in (found.reason or "")}
    wrong = {patch.name for patch in load_patches() if patch.severity is Severity.WRONG}
    assert wrong == silent | {"scaled_sums"}, "probe the fault that changes values first"


@pytest.mark.slow
def test_an_exported_alpha_is_overlooked_without_a_word():
    with isolate_coremltools():
        fault = find_fault(lambda x: torch.add(x, x, alpha=2), torch.ones(2), exporting=True)
    assert fault == "silently miscompiled"


def test_two_threads_that_come_first_probe_once(monkeypatch):
    probed: list[int] = []
    patch = Patch("a", ("none known",))
    patch.probe(lambda: (time.sleep(0.05), probed.append(1))[1])
    monkeypatch.setattr(registry, "load_patches", lambda: (patch,))
    registry._probe_patches.cache_clear()
    try:
        Steps().run(collect_patch_statuses, collect_patch_statuses)
    finally:
        registry._probe_patches.cache_clear()
        monkeypatch.undo()
        collect_patch_statuses()
    assert probed == [1]


@pytest.mark.parametrize("patch", load_patches(), ids=lambda patch: patch.name)
def test_every_patch_says_what_it_is_for_and_is_tested(patch):
    module = importlib.import_module(f"mil_ane_passes.torch_frontend.patches.{patch.name}")
    assert inspect.getdoc(module) and len(inspect.getdoc(module) or "") > 40
    assert patch.title and patch.title[-1] != "." and "\n" not in patch.title
    assert patch.upstream and all(link == "none known" or link.startswith("https://") for link in patch.upstream)
    assert patch.ops or patch.replacements
    own = HERE / "patches" / f"test_{patch.name}.py"
    expected = f"expected {own.name}, or cases in a table or tests whose names begin with '{patch.name}'"
    assert own.exists() or any(name.startswith(patch.name) for name in _list_names_of_patch_tests()), expected


@cache
def _list_names_of_patch_tests():
    """The names of cases in the tables and of tests in files about several patches, without `test_`."""
    from tests.torch_frontend.patches import test_values
    from tests.torch_frontend.patches.table import REFUSED, VALUES

    assert test_values  # fills the tables
    tree = ast.parse((HERE / "patches" / "test_single_ops.py").read_text())
    functions = [node.name.removeprefix("test_") for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [*functions, *(case.name.replace(" ", "_") for case in (*VALUES, *REFUSED))]


@pytest.mark.parametrize("patch", load_patches(), ids=lambda patch: patch.name)
def test_what_a_patch_exchanges_is_there_in_the_host(patch):
    for each in patch.replacements:
        owner: Any = importlib.import_module(each.module)
        *path, name = each.attribute.split(".")
        for part in path:
            owner = getattr(owner, part)
        assert name in vars(owner), each


@pytest.mark.parametrize("patch", load_patches(), ids=lambda patch: patch.name)
def test_ops_are_named_as_the_host_names_them(patch):
    from coremltools.converters.mil.frontend.torch.utils import sanitize_op_kind, unify_inplace_and_functional

    for kind in patch.ops:
        assert unify_inplace_and_functional(sanitize_op_kind(kind)) == kind


def test_the_public_names_are_few():
    assert set(ane.torch_frontend.__all__) == {"NotConverted", "NotEqual", "active", "install", "patched", "uninstall"}
