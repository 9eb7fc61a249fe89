"""Equivalence across changes of the interface, and the contract by which transforms declare them."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from dataclasses import dataclass, fields
from pathlib import Path

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types

import mil_ane_passes as ane
from mil_ane_passes import transforms
from mil_ane_passes.commands.edit import EditOptions
from mil_ane_passes.commands.main import main
from mil_ane_passes.equivalence.changed_interfaces import compare_across_interfaces
from mil_ane_passes.ir.clone import clone_program
from mil_ane_passes.passes.contract import Exactness
from mil_ane_passes.passes.interface_change import InterfaceChange, InterfaceMapping, change_dtype
from mil_ane_passes.transforms.contract import Draft, Transform, apply_transforms
from mil_ane_passes.transforms.rename import Rename
from tests.package.helpers import make, normal, spec_of, write_spec
from tests.transforms.test_fix_shape import RANGED, flattening, flexible


@pytest.mark.parametrize(("kind", "edits"), [
    ("iOS16", {"rename": {"x": "image", "out": "probabilities", "relu": "inner"}}),
    ("iOS16", {"rename": {"x": "out", "out": "x"}}),
    ("halves", {"io": "fp16"}),
    ("iOS16", {"io": "fp16"}),
    ("state", {"rename": {"s": "cache", "x": "y"}, "expose": "sum", "io": {"fp32": "out"}}),
    ("state", {"drop_output": "out", "expose": "sum"}),
    ("iOS17", {"split_at": "relu", "rename": {"out": "result", "x": "y"}}),
    ("multifunction", {"split_at": "relu", "function": "zeta"}),
    ("multifunction", {"rename": {"x": "image"}, "io": "fp16"}),
    ("classifier", {"expose": "linear_0"}),
    ("classifier", {"rename": {"classLabel_probs": "scores", "classLabel": "label"}}),
    ("palettized16", {"dedup_weights": True}),
])
def test_results_are_those_of_the_source_across_the_change(package, kind, edits):
    report = ane.edit(package(kind), dry_run=True, verify=True, **edits)
    assert report.verification.equal and report.verification.cases
    assert report.to_dict()["verification"]["status"] == "equal"
    assert {case.function for case in report.verification.cases} <= set(ane.load(package(kind)).functions)


@pytest.mark.parametrize("shapes", [{"x": (1, 4, 13)}, [{"x": (1, 4, 5)}, {"x": (1, 4, 64)}]])
def test_shapes_that_are_fixed_are_those_that_are_compared(tmp_path, shapes):
    source = flexible(tmp_path / "source.mlpackage", flattening, {"x": RANGED})
    report = ane.edit(source, dry_run=True, verify=True, fix_shape=shapes, rename={"x": "y"})
    assert report.verification.equal
    assert len({case.function for case in report.verification.cases}) == (1 if isinstance(shapes, dict) else 2)


def double(program):
    """What a wrong transform makes of a program: outputs twice as large."""
    for function in program.functions.values():
        with function:
            out = function.outputs[0]
            new = mb.mul(x=out, y=np.asarray(2, types.nptype_from_builtin(out.dtype)))
        name, out.name = out.name, f"{out.name}_before"
        function.set_outputs([new])
        new.name = name


def test_a_transform_that_changes_results_is_found(package, tmp_path, monkeypatch, capsys):
    wrong = Rename.apply

    def apply(self, draft):
        double(draft.program)
        return wrong(self, draft)

    monkeypatch.setattr(Rename, "apply", apply)
    arguments = ["edit", str(package("iOS16")), "-o", str(tmp_path / "out.mlpackage"), "--rename", "x=y", "--verify"]
    assert main(arguments) == 1
    assert "nothing written: the results are not those of the source" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("op_type", "reason"), [
    ("no_op_of_coremltools", "not verified: the reference runtime has no kernel for: no_op_of_coremltools"),
    ("gather", "not verified: none of the sampled feeds can be run"),
])
def test_what_cannot_be_compared_is_not_written(tmp_path, capsys, op_type, reason):
    @mb.program(input_specs=[mb.TensorSpec((2, 3))], opset_version=ct.target.iOS17)
    def program(x):
        rows = mb.cast(x=mb.add(x=mb.clip(x=x, alpha=0.0, beta=1.0), y=7.0), dtype="int32")
        return mb.relu(x=mb.gather(x=x, indices=rows, axis=0), name="out")

    source = make(tmp_path / "source.mlpackage", program, ct.target.iOS17)
    if op_type != "gather":
        spec = spec_of(source)
        ops = spec.mlProgram.functions["main"].block_specializations["CoreML7"].operations
        next(op for op in ops if op.type == "relu").type = op_type
        write_spec(source, spec)
    arguments = ["edit", str(source), "-o", str(tmp_path / "out.mlpackage"), "--rename", "x=y"]
    assert main([*arguments, "--verify"]) == 1
    assert reason in "".join(capsys.readouterr())
    assert not (tmp_path / "out.mlpackage").exists()
    assert main(arguments) == 0


def accumulating(factor):
    """A state that sums what goes in; `factor` is applied to what is stored."""
    @mb.program(input_specs=[mb.TensorSpec((1, 4), dtype=types.fp16), mb.StateTensorSpec((1, 4), dtype=types.fp16)],
                opset_version=ct.target.iOS18)
    def program(x, s):
        total = mb.add(x=mb.read_state(input=s), y=x, name="total")
        mb.coreml_update_state(state=s, value=mb.mul(x=total, y=np.float16(factor)), name="stored")
        return mb.identity(x=total, name="out")

    return program


def test_a_state_that_differs_is_found_in_the_state_and_in_the_next_step():
    before = accumulating(1)
    for factor, status in ((1, "equal"), (0.5, "different")):
        report = compare_across_interfaces(before, [Draft(accumulating(factor), "made")], exactness=Exactness.BITWISE)
        assert report.status == status
    failed = [(case.feeds, output.output) for case in report.cases for output in case.failed]
    assert ("seed 0, step 0", "state s") in failed and ("seed 0, step 1", "out") in failed
    assert ("seed 0, step 0", "out") not in failed


def body(x):
    """Rows divided by a sum over all of them: results depend on what is in the padding."""
    total = mb.reduce_sum(x=mb.abs(x=x), axes=[0, 1], keep_dims=True)
    return mb.real_div(x=x, y=total, name="out")


@dataclass(frozen=True)
class PadRows(Transform):
    """A transform as others may write it: the input gets more rows, whose results are cut off again."""

    rows: int
    value: float

    def apply(self, draft):
        old = draft.program.functions["main"].inputs["x"].shape[0]
        made = mb.program(input_specs=[mb.TensorSpec((self.rows, 4))])(body)
        draft.program.functions["main"] = made.functions["main"]
        forms = {"map": lambda value: np.pad(value, ((0, self.rows - old), (0, 0)), constant_values=self.value),
                 "unmap": lambda value: value[:old]}
        draft.change_interface("main", InterfaceChange("input", "x", "x", "reshaped", **forms),
                               InterfaceChange("output", "out", "out", "reshaped", **forms))
        return [draft]


@pytest.mark.parametrize(("value", "status"), [(0.0, "equal"), (1.0, "different")])
def test_values_are_mapped_by_the_functions_of_the_change(value, status):
    before = mb.program(input_specs=[mb.TensorSpec((3, 4))])(body)
    parts = apply_transforms(Draft(clone_program(before), "a program"), [PadRows(8, value)])
    assert compare_across_interfaces(before, parts).status == status


def test_mappings_of_several_steps():
    mapping = InterfaceMapping("main").followed_by(
        InterfaceChange("input", "a", "b", "renamed"), InterfaceChange("input", "b", "a", "renamed"),
    ).followed_by(change_dtype("input", "a", np.float32, np.float16), InterfaceChange("output", "y", None, "removed"),
                  InterfaceChange("output", None, "z", "added"))
    mapping = mapping.followed_by(InterfaceChange("input", "a", "c", "renamed"), InterfaceChange(
        "input", None, "mask", "added", make=lambda feeds: np.ones(feeds["a"].shape, np.float32)))
    feeds = {"a": normal(2), "b": np.float32([1.0001, 3.0])}
    mapped = mapping.map_feeds(feeds)
    assert list(mapped) == ["b", "c", "mask"] and mapped["c"].dtype == np.float16
    assert np.array_equal(mapped["b"], feeds["a"]) and np.array_equal(mapped["mask"], [1, 1])
    rounded = mapping.round_feeds(feeds)
    assert rounded["b"].tolist() == [1.0, 3.0] and rounded["a"] is feeds["a"]
    assert mapping.unmap_results({"x": 1, "z": 2}, {}) == {"x": 1}
    assert mapping.map_state({"s": 1}, feeds) == {"s": 1}
    assert [each.to_dict() for each in mapping.changes][-1] == {
        "kind": "input", "old": None, "new": "mask", "action": "added"}


def test_programs_in_memory_are_transformed_too(tmp_path):
    @mb.program(input_specs=[mb.TensorSpec((1, 4))])
    def program(x):
        return mb.relu(x=mb.linear(x=x, weight=normal(4, 4), name="inner"), name="out")

    draft = Draft(clone_program(program), "a program")
    parts = apply_transforms(draft, [Rename({"x": "image", "out": "result"})])
    assert list(parts[0].program.functions["main"].inputs) == ["image"]
    assert compare_across_interfaces(program, parts).equal
    made = make(tmp_path / "out.mlpackage", parts[0].program)
    assert list(ane.run(made, {"image": normal(1, 4)})) == ["result"]


def test_the_page_lists_all_transforms():
    parameters = inspect.signature(ane.edit).parameters
    page = (Path(ane.__file__).parent / "transforms/README.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \| `(--[\w-]+)` \|", page, re.MULTILINE)
    for module in pkgutil.iter_modules(transforms.__path__):
        importlib.import_module(f"{transforms.__name__}.{module.name}")
    composed = re.findall(r"^\| `(\w+)` \| `adapt` \|", page, re.MULTILINE)
    assert {name for name, _ in listed} | set(composed) == {kind.__name__ for kind in Transform.__subclasses__() if
                                            kind.__module__.startswith("mil_ane_passes")}
    options = {option.strip("-").replace("-", "_") for _, option in listed}
    assert options <= set(parameters)
    assert options | {"max_part_size"} == {each.name for each in fields(EditOptions) if "edit" in each.metadata}
