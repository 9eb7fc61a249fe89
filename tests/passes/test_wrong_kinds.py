"""What is of the wrong kind altogether is unsupported in the words of the argument, not by a traceback from within."""

from __future__ import annotations

import shutil
from pathlib import Path

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb

import mil_ane_passes as ane
from mil_ane_passes.passes.examples import build_program

WRONG = {
    "preset None": ({"preset": None}, "no preset 'None'; expected safe or full"),
    "preset 3": ({"preset": 3}, "no preset '3'; expected safe or full"),
    "target None": ({"target": None}, "target: found None; expected a name such as 'all', 'm4' or 'iPhone 15 Pro'"),
    "targets": ({"target": ["m1", "m4"]}, "target: found ['m1', 'm4']; expected a name"),
    "target 4": ({"target": 4}, "target: found 4; expected a name"),
    "passes 3": ({"passes": 3}, "passes: found 3; expected 'a,b{option=value}', a list of such, or a mapping"),
    "passes of None": ({"passes": [None]}, "passes: found [None]; expected"),
    "options 3": ({"options": 3}, "options: found 3; expected a mapping from the name of a pass to its options"),
    "an option 3": ({"preset": "full", "options": {"lift_conv_1d": 3}}, "options of 'lift_conv_1d': found 3; expected"),
    "settings 3": ({"passes": {"lift_conv_1d": 3}}, "options of 'lift_conv_1d': found 3; expected a mapping"),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize(
    "function", [lambda **asked: ane.rewrite(build_program(lambda x: mb.relu(x=x), x=(1, 2)), **asked), ane.pipeline]
)
def test_what_is_of_the_wrong_kind(case, function):
    asked, message = WRONG[case]
    with pytest.raises(ane.InputError) as refused:
        function(**asked)
    assert str(refused.value).startswith(message)


def test_a_preset_is_no_base():
    with pytest.raises(ane.InputError) as refused:
        ane.pipeline("full")
    assert str(refused.value) == ("base: found 'full'; expected a ct.PassPipeline, or None for coremltools' default; "
                                  "did you mean preset='full'?")


CALLS = {
    "measured": (lambda program: ane.lint(program, measured=3), "measured: found an int; expected the result.json"),
    "a path to save to": (lambda program: ane.save(ane.load(program), None), "path: found a NoneType; expected a path"),
    "executor": (lambda program: ane.batch("lint", [program], program.parent, executor=3),
                 "executor: found an int; expected an executor of concurrent.futures"),
    "a class": (lambda program: ane.lint(ct.models.MLModel), "cannot read the class MLModel; expected a path"),
    "values to show": (lambda program: ane.calibrate(program, worst="a"), "worst: found 'a'; expected a whole number"),
    "values below 1": (lambda program: ane.calibrate(program, worst=-1), "worst: found -1; expected a whole number"),
    "seeds of rewrite": (lambda program: ane.rewrite(program, program.parent / "out.mlpackage", seeds=0),
                         "seeds: found 0; expected a whole number, from 1 to 10000"),
    "seeds of verify": (lambda program: ane.verify(program, program, seeds=True), "seeds: found True; expected"),
}


@pytest.mark.parametrize("case", CALLS)
def test_what_is_of_the_wrong_kind_in_other_functions(case, fixtures, tmp_path):
    source = Path(shutil.copytree(fixtures / "nothing_to_do.mlpackage", tmp_path / "in.mlpackage"))
    call, message = CALLS[case]
    with pytest.raises(ane.InputError) as refused:
        call(source)
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize("asked", ["full", ["ane::triangle_cumsum"], 3])
def test_convert_takes_pipelines_only(asked):
    with pytest.raises(ane.InputError) as refused:
        ane.convert(build_program(lambda x: mb.relu(x=x), x=(1, 2)), pass_pipeline=asked)
    assert str(refused.value).startswith(f"pass_pipeline: found {asked!r}; expected a ct.PassPipeline")


@pytest.mark.parametrize("asked", [None, 0, b"in.mlpackage", ["in.mlpackage"]])
def test_load_takes_paths_only(asked):
    with pytest.raises(ane.InputError) as refused:
        ane.load(asked)
    assert "expected the path of an .mlpackage" in str(refused.value)


def test_load_says_what_to_do_with_an_mlmodel(fixtures):
    model = ct.models.MLModel(str(fixtures / "nothing_to_do.mlpackage"), skip_model_load=True)
    with pytest.raises(ane.InputError, match=r"^cannot load an MLModel; expected the path of an \.mlpackage"):
        ane.load(model)


def test_tensors_that_require_gradients_are_fed_as_they_are():
    torch = pytest.importorskip("torch")
    made = build_program(lambda x: mb.relu(x=x, name="y"), x=(1, 2))
    outputs = ane.run(made, {"x": torch.ones(1, 2, dtype=torch.float16, requires_grad=True)})
    assert outputs["y"].tolist() == [[1.0, 1.0]]


def test_only_packages_are_saved(tmp_path, fixtures):
    model = ct.models.MLModel(str(fixtures / "nothing_to_do.mlpackage"), skip_model_load=True)
    with pytest.raises(ane.InputError, match=r"^cannot save an MLModel; expected a Package, as load returns it"):
        ane.save(model, tmp_path / "out.mlpackage")


@pytest.mark.parametrize("state", [3, "state", ["state"]])
def test_states_are_a_mapping(state):
    made = build_program(lambda x: mb.relu(x=x, name="y"), x=(1, 2))
    with pytest.raises(ane.InputError, match="^state: found .*; expected a mapping from names of states to arrays"):
        ane.run(made, {"x": [[1.0, 2.0]]}, state=state)


WRONG_FOR_LINT = {
    "select": ({"select": 3}, "select: found 3; expected codes"),
    "a rule of None": ({"select": [None]}, "select: found None; expected rules by code"),
    "ignore": ({"ignore": b"ANE3"}, "ignore: found b'ANE3'; expected codes"),
    "ignored": ({"per_op_ignores": {"a*": 3}}, "per_op_ignores: found 3; expected codes"),
    "nothing ignored": ({"per_op_ignores": {"a*": None}}, "per_op_ignores: found None for 'a*'; expected rules"),
    "no rules": ({"per_op_ignores": {"a*": ()}}, "per_op_ignores: found an empty list; expected rules by code"),
    "options": ({"options": 3}, "options: found 3; expected a mapping from the name of a rule"),
    "a rule": ({"options": {3: {}}}, "options: found the key 3"),
}


@pytest.mark.parametrize("case", WRONG_FOR_LINT)
def test_what_lint_has_of_the_wrong_kind(case):
    given, message = WRONG_FOR_LINT[case]
    with pytest.raises(ane.InputError) as refused:
        ane.lint(build_program(lambda x: mb.relu(x=x), x=(1, 2)), **given)
    assert str(refused.value).startswith(message)


def test_rules_are_also_selected_by_an_iterator():
    made = build_program(lambda x: mb.cumsum(x=x, axis=1), x=(1, 2))
    keys = ["ANE2"]
    assert [each.code for each in ane.lint(made, select=iter(keys)).findings] == [
        each.code for each in ane.lint(made, select=keys).findings] != []


@pytest.mark.parametrize("command", [ane.lint, ane.load, ane.run, ane.rewrite])
def test_a_path_that_is_too_long_is_named(command):
    with pytest.raises(ane.InputError, match=r"^/a+.*: cannot be opened \(File name too long\); expected an"):
        command(f"/{'a' * 5000}.mlpackage", *[{}] * (command is ane.run))


WRONG_FOR_COMMANDS = {
    "a baseline": ("lint", {"baseline": 5}, "baseline: found 5; expected a text or a path or None"),
    "faults": ("run", {"feeds": {}, "quirks": 5}, "quirks: found 5; expected texts"),
    "a function": ("run", {"feeds": {}, "function": np.zeros(2)}, "function: found array([0., 0.]); expected a text"),
    "a traced function": ("trace", {"feeds": {}, "function": np.zeros(2)}, "function: found array"),
    "a traced state": ("trace", {"feeds": {}, "state": [1]}, "state: found [1]; expected a dict by name or None"),
    "seeds": ("verify", {"seeds": "3"}, "seeds: found '3'; expected a whole number"),
    "many seeds": ("verify", {"seeds": [3] * 99}, "seeds: found [3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3"),
    "feeds": ("verify", {"feeds": b"x"}, "feeds: found b'x'; expected a mapping by name or None"),
    "faults of the second": ("verify", {"quirks": float("nan")}, "quirks: found nan; expected texts"),
    "precision": ("verify", {"precision": np.zeros(2)}, "precision: found array([0., 0.]); expected a text"),
    "a preset": ("rewrite", {"preset": np.zeros(2)}, "preset: found array([0., 0.]); expected a text"),
    "progress": ("rewrite", {"progress": None}, "progress: found None; expected a function of a text"),
    "a check": ("rewrite", {"verify": np.zeros(2)}, "verify: found array([0., 0.]); expected True or False"),
}


@pytest.mark.parametrize("case", WRONG_FOR_COMMANDS)
def test_what_commands_have_of_the_wrong_kind(case):
    name, given, message = WRONG_FOR_COMMANDS[case]
    made = build_program(lambda x: mb.relu(x=x), x=(1, 2))
    with pytest.raises(ane.InputError) as refused:
        getattr(ane, name)(*[made] * (2 if name == "verify" else 1), **given)
    assert str(refused.value).startswith(message)
    assert refused.value.option == message.partition(":")[0]


@pytest.mark.parametrize("place", ["package", 3, b"out.mlpackage", ["out.mlpackage"]], ids=str)
def test_an_output_is_a_path(fixtures, place):
    source = fixtures / "nothing_to_do.mlpackage"
    place = ane.load(source) if place == "package" else place
    with pytest.raises(ane.InputError, match=r"^dst: found an? \w+; expected a path, or the program that is src"):
        ane.rewrite(source, place)
    with pytest.raises(ane.InputError, match=r"^folder: found an? \w+; expected the path of an output folder"):
        ane.batch("lint", source, place)


def test_errors_with_right_kinds_stay_what_they_are(monkeypatch):
    """A fault of ours is not put on an option."""
    from mil_ane_passes.equivalence import trace

    def fail(error):
        def collect(*arguments, **named):
            raise error
        monkeypatch.setattr(trace, "trace_function", collect)
        ane.trace(build_program(lambda x: mb.relu(x=x), x=(1, 2)), {})

    for error in (IndexError("of ours"), TypeError("of ours"), ValueError("of ours")):
        with pytest.raises(type(error), match="^of ours$"):
            fail(error)
