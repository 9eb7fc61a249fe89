"""Packages of real architectures and the fixtures: what no rewrite touches comes back bit for bit."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types

import mil_ane_passes as ane
from mil_ane_passes.package import load, save

from . import proto_diff, real
from .helpers import MODEL, WEIGHTS, replace, tree

FIXTURES = sorted((Path(__file__).parents[2] / "fixtures").glob("*.mlpackage"))


def weights_are_kept(before: Path, after: Path) -> bool:
    """Whether the weight file after begins with that before, but for the count of blobs in its header."""
    old, new = (path / WEIGHTS for path in (before, after))
    if not old.exists():
        return True
    with open(old, "rb") as one, open(new, "rb") as other:
        size = old.stat().st_size
        one.seek(4)
        other.seek(4)
        return one.read(size - 4) == other.read(size - 4)


MOVES = {"edge_integers"}
"Rewrites that are there to put ops in another place."


def touched(before: Path, after: Path, moved: bool = False) -> proto_diff.Diff:
    """What differs; and beside the model and its weights nothing does, kept consts share as before.

    What is not touched follows in the order of before, unless a rewrite has `moved` ops.
    """
    kept = weights_are_kept(before, after)
    diff = proto_diff.proto_diff(before, after, moved=not kept)
    assert not diff.outside
    assert moved or all(ops.same_order for ops in diff.functions.values())
    old, new = proto_diff.consts(before), proto_diff.consts(after)
    both = [key for key in old if key in new and key[1] not in diff.functions.get(key[0], proto_diff.Ops()).changed]
    for key in both:
        assert (old[key] == new[key]) if kept else old[key][0] == new[key][0]
    assert len({old[key] for key in both}) == len({new[key] for key in both}), "consts share as many blobs"
    assert len({(old[key], new[key]) for key in both}) == len({old[key] for key in both}), "and the same ones"
    files = [{name: data for name, data in tree(path).items() if name not in (MODEL, WEIGHTS)}
             for path in (before, after)]
    assert files[0] == files[1]
    return diff


def unexplained(before: Path, diff: proto_diff.Diff, named: set[tuple[str, str]]) -> list[str]:
    """The ops that changed or went though no rewrite was at work there.

    A trace names the op that a rewrite matched at. What that took with it hangs together with it, op by op; a const
    that went has no other readers.
    """
    found = []
    for function, ops in diff.functions.items():
        old = proto_diff.ops_of(before)[function]
        gone = ops.removed | ops.changed
        is_const = {name for name in gone if name in old and proto_diff.is_const(old[name])}
        reached = {name for where, name in named if where == function and name in gone}
        edges = {name: proto_diff.reads(old[name]) & gone for name in gone - is_const}
        while True:
            more = {one for one, read in edges.items() if one in reached or read & (reached - is_const)}
            more |= {read for one in more for read in edges[one] if one in reached}
            if more <= reached:
                break
            reached |= more
        readers: dict[str, set[str]] = {}
        for name, op in old.items():
            for read in proto_diff.reads(op) & is_const:
                readers.setdefault(read, set()).add(name)
        reached |= {name for name in is_const & ops.removed if readers.get(name, set()) <= reached}
        found += sorted(f"{function}/{name}" for name in gone - reached)
    return found


def check_unchanged(source: Path, folder: Path) -> bool:
    """Saved as loaded, and rewritten by passes that find nothing; False where each of them finds something."""
    save(load(source), folder / "saved.mlpackage")
    assert tree(folder / "saved.mlpackage") == tree(source)
    found = ane.rewrite(source, dry_run=True, preset="full", max_growth=None).traces
    idle = [trace.rule for trace in found if not trace.fired]
    while idle:  # a pass that comes later finds what the ones before it fixed
        traces = ane.rewrite(source, dry_run=True, passes=idle, max_growth=None).traces
        found = [trace.rule for trace in traces if trace.fired]
        if not found:
            break
        idle = [name for name in idle if name not in found]
    if not idle:
        return False
    report = ane.rewrite(source, folder / "rewritten.mlpackage", passes=idle, verify=False)
    assert report.status == "unchanged"
    assert tree(folder / "rewritten.mlpackage") == tree(source)
    return True


def check_rewritten(source: Path, folder: Path) -> int:
    """How many places the preset rewrote."""
    target = folder / "full.mlpackage"
    report = ane.rewrite(source, target, preset="full", max_growth=None, verify=False)
    fired = {(each.function, each.value) for trace in report.traces for each in trace.fired}
    moved = any(each.fired and each.rule in MOVES for each in report.traces)
    diff = touched(source, target, moved)
    if moved:  # the others leave the order as it is
        others = [name for name in report.passes if name not in MOVES]
        ane.rewrite(source, folder / "others.mlpackage", passes=",".join(others), max_growth=None, verify=False)
        touched(source, folder / "others.mlpackage")
    assert bool(diff) == bool(fired)
    assert unexplained(source, diff, fired) == []
    return len(fired)


def _is_float(var: Any) -> bool:
    return bool(types.is_tensor(var.sym_type) and types.is_float(var.dtype))


def _middle(package: Any, fits: Callable[[Any], bool]) -> Any:
    found = [op for op in package.program.functions["main"].operations if op.op_type != "const" and fits(op)]
    return found[len(found) // 2] if found else None


def check_edited(source: Path, folder: Path) -> None:
    """One op gets another input, one is replaced, one weight gets other values: the diff has these, and no more."""
    package = load(source)
    function = package.program.functions["main"]
    one = _middle(package, lambda op: "x" in op.inputs and _is_float(op.x) and op.x.op is not None
                  and op.x.op.op_type != "const")
    with function, mb.set_before_op(one):
        doubled = mb.add(x=one.x, y=one.x, name="doubled")
    one.set_inputs(x=doubled, no_check_var_types=True)
    save(package, folder / "rebound.mlpackage")
    assert weights_are_kept(source, folder / "rebound.mlpackage")
    ops = touched(source, folder / "rebound.mlpackage").functions["main"]
    assert (ops.changed, ops.added, ops.removed) == ({one.outputs[0].name}, {"doubled"}, set())

    package = load(source)
    two = _middle(package, lambda op: len(op.outputs) == 1 and _is_float(op.outputs[0]) and "x" in op.inputs
                  and op.x.sym_type == op.outputs[0].sym_type and op.outputs[0] not in op.enclosing_block.outputs)
    if two is None:  # a network in which every layer changes the shape
        return
    name = two.outputs[0].name
    replace(two, lambda: mb.tanh(x=two.x), name=name)
    save(package, folder / "replaced.mlpackage")
    ops = touched(source, folder / "replaced.mlpackage").functions["main"]
    assert (ops.changed, ops.added, ops.removed) == ({name}, set(), set())


def check_weight(source: Path, folder: Path) -> None:
    """The largest weight gets other values: its const changes, and every other one keeps its bytes in a new place."""
    package = load(source)
    function = package.program.functions["main"]
    consts = [op for op in function.operations if getattr(op, "blob", None) is not None]
    largest = max(consts, key=lambda op: op.blob.nbytes)
    twins = [op for op in consts if op.blob == largest.blob]
    old = np.asarray(largest.outputs[0].val)
    with function, mb.set_before_op(largest):
        new = mb.const(val=old[::-1] * np.asarray(2, old.dtype), name="other")
    for op in twins:
        name = op.outputs[0].name
        op.enclosing_block.replace_uses_of_var_after_op(
            anchor_op=new.op, old_var=op.outputs[0], new_var=new, force_replace=True, no_check_var_types=True)
        op.enclosing_block.remove_ops([op])
    new.name = name
    save(package, folder / "weight.mlpackage")
    diff = touched(source, folder / "weight.mlpackage").functions["main"]
    gone = {op.outputs[0].name for op in twins}
    assert name in diff.changed and diff.removed <= gone - {name} and not diff.added
    if len(twins) == 1:
        assert diff.changed == {name}
    place = proto_diff.consts(folder / "weight.mlpackage")["main", name]
    assert proto_diff.blob(folder / "weight.mlpackage", place)[1] == new.val.tobytes()
    assert (folder / "weight.mlpackage" / WEIGHTS).stat().st_size <= 1.02 * (source / WEIGHTS).stat().st_size


@pytest.mark.parametrize("source", FIXTURES, ids=lambda path: path.stem)
def test_a_fixture_comes_back_and_edits_stay_where_they_are(source, tmp_path):
    assert check_unchanged(source, tmp_path)
    assert check_rewritten(source, tmp_path) or source.stem != "conv_transpose_1d"
    check_edited(source, tmp_path)
    check_weight(source, tmp_path)


@pytest.fixture(scope="session")
def packages(tmp_path_factory) -> list[Path]:
    pytest.importorskip("torch")
    return list(real.make(real.given() or tmp_path_factory.mktemp("real")).values())


def over_all(packages: list[Path], check: Callable[[Path, Path], Any]) -> list[Any]:
    """What `check` says of each package, given a folder that is gone when it is done."""
    found = []
    for source in packages:
        with tempfile.TemporaryDirectory() as folder:
            found.append(check(source, Path(folder)))
    return found


@pytest.mark.slow
def test_packages_of_real_architectures_come_back_byte_for_byte(packages):
    assert sum(over_all(packages, check_unchanged)) >= 30


@pytest.mark.slow
def test_only_what_rewrites_touched_differs_in_real_architectures(packages):
    assert sum(count > 0 for count in over_all(packages, check_rewritten)) >= 30


@pytest.mark.slow
def test_only_what_was_edited_differs_in_real_architectures(packages):
    over_all(packages, check_edited)
    over_all(packages, check_weight)
