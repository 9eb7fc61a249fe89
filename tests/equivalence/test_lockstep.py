"""Two programs side by side: the results that each has alone, and what is computed once."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from dataclasses import replace

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Function, Program, mil_list, types

import mil_ane_passes as ane
from mil_ane_passes.equivalence.equivalence import compare_programs
from mil_ane_passes.equivalence.execution import Plan, build_plans, execute_plans
from mil_ane_passes.equivalence.lockstep import Lockstep, execute_in_lockstep
from mil_ane_passes.ir.clone import clone_program
from mil_ane_passes.passes.contract import Exactness
from mil_ane_passes.passes.examples import build_program, make_weight
from mil_ane_passes.runtime.interpreter import Interpreter
from mil_ane_passes.utils.errors import InputError, LimitReached
from tests.conversions import save_program
from tests.lab.fuzz_programs.draft import generate_program
from tests.lab.fuzz_programs.kinds import KINDS

PRECISIONS = ("float64", "float16")


def run_both(before, after, plans=None, precisions=PRECISIONS, mapping=None, **options):
    plans = build_plans(before, 2, lambda name: None) if plans is None else plans
    return execute_in_lockstep(before, after, plans, precisions, lambda text: None, mapping or {}, **options)


def run_alone(before, after, plans=None, precisions=PRECISIONS):
    plans = build_plans(before, 2, lambda name: None) if plans is None else plans
    old = execute_plans(before, plans, precisions, lambda text: None)
    return old, execute_plans(after, [replace(run.plan, error=run.error) for run in old.runs], precisions,
                              lambda text: None)


def assert_same(one, other):
    """The same errors, bits and executed blocks."""
    for found, expected in zip(one, other, strict=True):
        for run, alone in zip(found.runs, expected.runs, strict=True):
            assert run.error == alone.error and list(run.results) == list(alone.results)
            for precision, results in alone.results.items():
                assert list(run.results[precision]) == list(results)
                for name, value in results.items():
                    assert run.results[precision][name].dtype == value.dtype
                    assert run.results[precision][name].tobytes() == value.tobytes(), (precision, name)
        assert found.executed_blocks == expected.executed_blocks


@contextlib.contextmanager
def counted(monkeypatch):
    """Count the ops that are run, by type."""
    count, run_op = Counter(), Interpreter.run_op

    def run(self, op):
        count[op.op_type] += 1
        run_op(self, op)

    with monkeypatch.context() as patched:
        patched.setattr(Interpreter, "run_op", run)
        yield count


def chain(change=lambda x: mb.add(x=x, y=np.float16(1), name="middle"), target=ct.target.iOS17):
    """exp, tanh, a changed value, then relu, sigmoid and cos."""
    def body(x):
        x = mb.tanh(x=mb.exp(x=x, name="first"), name="second")
        return mb.cos(x=mb.sigmoid(x=mb.relu(x=change(x), name="fourth"), name="fifth"), name="y")

    return build_program(body, opset=target, x=(2, 3))


def test_what_both_programs_compute_is_run_once(monkeypatch):
    before, after = chain(), chain(lambda x: mb.sub(x=x, y=np.float16(-1), name="middle"))
    with counted(monkeypatch) as count:
        found = run_both(before, after)
    assert count == {"exp": 4, "tanh": 4, "add": 4, "sub": 4, "relu": 4, "sigmoid": 4, "cos": 4}  # 2 draws, 2 widths
    assert_same(found, run_alone(before, after))


def test_behind_other_values_both_are_run_until_the_bits_agree_again(monkeypatch):
    def halved(x):
        return mb.real_div(x=x, y=np.float16(2), name="middle")

    def shifted(x):
        return mb.sub(x=mb.real_div(x=x, y=np.float16(2)), y=np.float16(30), name="middle")

    def build(change):  # relu makes zeros of all that the second program shifted
        return chain(lambda x: mb.sub(x=change(x), y=np.float16(60), name="lowered"))

    before, after = build(halved), build(shifted)
    with counted(monkeypatch) as count:
        found = run_both(before, after, precisions=("float64",))
    assert count["relu"] == 4 and count["sigmoid"] == count["cos"] == 2
    assert_same(found, run_alone(before, after, precisions=("float64",)))


def test_a_value_of_another_name_is_found_by_the_mapping(monkeypatch):
    before, after = chain(), chain(lambda x: mb.sub(x=x, y=np.float16(-1), name="other"))
    for mapping, runs in (({}, 4), ({"middle": "other"}, 2)):
        with counted(monkeypatch) as count:
            found = run_both(before, after, precisions=("float64",), mapping=mapping)
        assert count["relu"] == runs
        assert_same(found, run_alone(before, after, precisions=("float64",)))


def multiplied(weight, **names):
    return build_program(lambda x: mb.relu(x=mb.matmul(x=x, y=weight, name="product"), name="y"), x=(2, len(weight)))


@pytest.mark.parametrize(("change", "runs"), [
    (lambda weight: weight, 2), (lambda weight: weight * (1 + 2.0**-9 * (np.arange(weight.size) == 700).reshape(
        weight.shape)).astype(np.float16), 4), (lambda weight: np.where(weight == 0, np.float16(-0.0), weight), 4)],
    ids=["equal", "one element", "the sign of a zero"])
def test_large_constants_are_equal_by_their_bits(monkeypatch, tmp_path, change, runs):
    weight = make_weight(32, 32)
    weight[3, 4] = 0
    before, after = (ane.load(save_program(multiplied(each), tmp_path / f"{number}.mlpackage")).program
                     for number, each in enumerate((weight, change(weight))))
    with counted(monkeypatch) as count:
        found = run_both(before, after, precisions=("float64",))
    assert count["matmul"] == runs
    assert_same(found, run_alone(before, after, precisions=("float64",)))


@pytest.mark.parametrize("packed", [False, True])
def test_weights_of_a_package_that_took_the_place_of_another_are_its_own(packed, tmp_path):
    def build(last):
        values = np.arange(64 * 64).reshape(64, 64) % 16
        values[-1, -1] = last
        return build_program(lambda x: mb.matmul(x=x, y=mb.constexpr_lut_to_dense(
            indices=values.astype(types.np_uint4_dtype), lut=np.arange(16, dtype=np.float16).reshape(1, 1, 16, 1))
            if packed else values.astype(np.float16), name="y"), opset=ct.target.iOS18, x=(2, 64))

    path, feeds = tmp_path / "model.mlpackage", {"x": np.ones((2, 64), np.float16)}
    save_program(build(15), path, ct.target.iOS18)
    known = ane.load(path)
    first = ane.run(known, feeds)
    path.rename(tmp_path / "aside.mlpackage")
    assert ane.verify(known, tmp_path / "aside.mlpackage").equal
    save_program(build(3), path, ct.target.iOS18)
    assert not np.array_equal(first["y"], ane.run(path, feeds)["y"])
    for sides in ((known, path), (path, known)):
        assert ane.verify(*sides, feeds=feeds).status == "different"


def test_packed_weights_of_two_files_are_compared(monkeypatch, tmp_path):
    def build(last):
        indices = np.arange(64 * 64).reshape(64, 64) % 16
        indices[-1, -1] = last
        return build_program(lambda x: mb.matmul(x=x, y=mb.constexpr_lut_to_dense(
            indices=indices.astype(types.np_uint4_dtype), lut=np.arange(16, dtype=np.float16).reshape(1, 1, 16, 1)),
            name="y"), opset=ct.target.iOS18, x=(2, 64))

    for last, runs in ((15, 2), (14, 4)):
        before, after = (ane.load(save_program(build(each), tmp_path / f"{last} {each}.mlpackage", ct.target.iOS18)
                                  ).program for each in (15, last))
        with counted(monkeypatch) as count:
            found = run_both(before, after, precisions=("float64",))
        assert count["matmul"] == runs
        assert_same(found, run_alone(before, after, precisions=("float64",)))


def branched(limit, inner=1.0):
    def body(x):
        raised = mb.mul(x=x, y=np.float16(2), name="raised")
        total = mb.reduce_sum(x=mb.cast(x=x, dtype="fp32"), axes=[0, 1], keep_dims=False)
        found = mb.cond(pred=mb.greater(x=total, y=np.float32(0), name="positive"),
                        _true_fn=lambda: mb.add(x=raised, y=np.float16(inner)),
                        _false_fn=lambda: mb.exp(x=raised), name="chosen")
        return mb.minimum(x=found, y=np.float16(limit), name="y")

    return build_program(body, x=(2, 3))


@pytest.mark.parametrize(("inner", "runs"), [(1.0, 2), (3.0, 4)], ids=["alike", "another constant in a branch"])
def test_branches_that_are_alike_are_run_once(monkeypatch, inner, runs):
    before, after = branched(1.0), branched(2.0, inner)
    with counted(monkeypatch) as count:
        found = run_both(before, after, precisions=("float64",))
    assert count["cond"] == runs
    assert_same(found, run_alone(before, after, precisions=("float64",)))


def test_what_a_branch_reads_from_outside_counts(monkeypatch):
    def build(change):
        def body(x):
            outside = change(x)
            return mb.cond(pred=mb.greater(x=mb.reduce_max(x=x, axes=[0, 1], keep_dims=False), y=np.float16(-9)),
                           _true_fn=lambda: mb.relu(x=outside), _false_fn=lambda: mb.abs(x=outside), name="y")
        return build_program(body, x=(2, 3))

    before, after = (build(lambda x, kind=kind: kind(x=x, name="outside")) for kind in (mb.sin, mb.cos))
    found = run_both(before, after)
    assert_same(found, run_alone(before, after))
    with counted(monkeypatch) as count:
        run_both(before, before)
    assert count["cond"] == 4


def accumulating(change):
    """A state that is read, written and read again."""
    @mb.program(input_specs=[mb.TensorSpec((1, 4), dtype=types.fp16),
                             mb.StateTensorSpec((1, 4), dtype=types.fp16)], opset_version=ct.target.iOS18)
    def made(x, total):
        held = mb.read_state(input=total, name="held")
        new = mb.coreml_update_state(state=total, value=mb.add(x=held, y=change(x), name="new"), name="updated")
        return mb.tanh(x=mb.sub(x=mb.read_state(input=total, name="again"), y=mb.relu(x=new)), name="y")

    return made


def test_states_are_each_programs_own(monkeypatch):
    before = accumulating(lambda x: mb.mul(x=x, y=np.float16(2), name="change"))
    for kind, runs in ((lambda x: mb.add(x=x, y=x, name="change"), 2),
                       (lambda x: mb.mul(x=x, y=np.float16(3), name="change"), 4)):
        after = accumulating(kind)
        with counted(monkeypatch) as count:
            found = run_both(before, after, precisions=("float64",))
        assert count["read_state"] == 8 and count["tanh"] == runs
        assert_same(found, run_alone(before, after, precisions=("float64",)))


def test_inputs_of_another_width_are_not_the_same():
    def build(dtype):
        return build_program(lambda x: mb.cast(x=mb.exp(x=mb.cast(x=x, dtype="fp16")), dtype="fp32", name="y"),
                             dtype=dtype, x=(2, 3))

    before, after = build(types.fp32), build(types.fp16)
    plans = [Plan("main", "small", {"x": np.float32([[1.1, 2.3, 3.7], [0.1, 0.2, 0.3]])})]
    assert_same(run_both(before, after, plans), run_alone(before, after, plans))


def failing(rows):
    """A reshape that fits an input of so many rows."""
    return build_program(lambda x: mb.relu(x=mb.reshape(x=mb.exp(x=x), shape=[rows, 3]), name="y"), x=(None, 3))


@pytest.mark.parametrize(("numbers", "errors"), [
    ((2, 5), (False, True)), ((5, 2), (True, True)), ((5, 5), (True, True)),
], ids=["of the second", "of the first", "of both"])
def test_errors_are_those_of_each_program(numbers, errors):
    before, after = map(failing, numbers)
    plans = [Plan("main", "two rows", {"x": np.ones((2, 3), np.float16)})]
    found = run_both(before, after, plans)
    assert_same(found, run_alone(before, after, plans))
    assert [bool(execution.runs[0].error) for execution in found] == list(errors)
    with pytest.raises(InputError, match="reshape"):
        run_both(before, after, [replace(plans[0], label="given feeds")])


def test_values_are_freed_when_neither_reads_them(monkeypatch):
    """A chain of fifty ops of 80 kB holds a few values at a time, in either program and in both."""
    def build(last):
        def body(x):
            for _ in range(50):
                x = mb.tanh(x=x)
            return last(x=x, name="y")
        return build_program(body, x=(100, 100))

    from mil_ane_passes.runtime.memory_limits import LiveValues

    held, add = [], LiveValues.add_value
    monkeypatch.setattr(LiveValues, "add_value",
                        lambda self, key, value: (add(self, key, value), held.append(self.bytes)))
    run_both(build(mb.relu), build(mb.abs), precisions=("float64",))
    assert 80_000 <= max(held) <= 4 * 80_000


def test_programs_that_fit_in_memory_alone_are_run_one_after_the_other(monkeypatch):
    """Two that have nothing in common need the sum of what they hold at once."""
    def build(kind):
        def body(x):
            values = [kind(x=mb.mul(x=x, y=np.float16(number))) for number in range(1, 5)]
            return mb.concat(values=values, axis=0, name="y")
        return build_program(body, x=(100, 100))

    before, after = build(mb.sin), build(mb.cos)
    monkeypatch.setattr("mil_ane_passes.runtime.memory_limits._get_byte_limit", lambda: 900_000)
    expected = run_alone(before, after, precisions=("float64",))
    assert_same(run_both(before, after, precisions=("float64",)), expected)
    monkeypatch.setattr("mil_ane_passes.runtime.memory_limits._get_byte_limit", lambda: 300_000)
    with pytest.raises(LimitReached):
        run_both(before, after, precisions=("float64",))


def test_functions_of_one_program_are_each_held_against_its_own():
    def build(change):
        program = Program()
        for name in ("main", "other"):
            function = chain(change if name == "other" else lambda x: mb.relu(x=x, name="middle")).functions["main"]
            program.add_function(name, function)
        program.default_function_name = "main"
        return program

    before, after = (build(lambda x, kind=kind: kind(x=x, name="middle")) for kind in (mb.sin, mb.abs))
    assert all(isinstance(each, Function) for each in before.functions.values())
    found = run_both(before, after)
    assert {run.plan.function for run in found[0].runs} == {"main", "other"}
    assert_same(found, run_alone(before, after))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("seed", range(3, 300, 27))
def test_random_programs_have_the_results_that_they_have_alone(seed):
    """A program, and what the preset full makes of it without a check of its own."""
    drawn = generate_program(seed, KINDS)
    if drawn is None:
        pytest.skip("pymil does not accept the program of this seed")
    after = clone_program(drawn.program)
    ane.rewrite(after, dst=after, passes="full", target=drawn.targets[0] if drawn.targets else "m1", verify=False)
    assert_same(run_both(drawn.program, after), run_alone(drawn.program, after))


def test_a_difference_is_found_behind_what_is_shared():
    report = compare_programs(chain(), chain(lambda x: mb.add(x=x, y=np.float16(1.5), name="middle")),
                              exactness=Exactness.ROUNDING)
    assert report.status == "different" and report.first is not None and "middle" in str(report.first)


def test_ops_of_another_opset_are_not_the_same(monkeypatch):
    def build(target):
        return build_program(lambda x: mb.gather(x=mb.exp(x=x), indices=np.int32([1, 0]), axis=0, name="y"),
                             opset=target, x=(2, 3))

    before, after = build(ct.target.iOS15), build(ct.target.iOS17)
    with counted(monkeypatch) as count:
        found = run_both(before, after, precisions=("float64",))
    assert count == {"exp": 2, "gather": 4}
    assert_same(found, run_alone(before, after, precisions=("float64",)))


@contextlib.contextmanager
def widths(monkeypatch):
    """Collect the width at which each op was run last, by the name of its output."""
    found, run_op = {}, Interpreter.run_op

    def run(self, op):
        found[op.outputs[0].name] = self.precision.name
        run_op(self, op)

    with monkeypatch.context() as patched:
        patched.setattr(Interpreter, "run_op", run)
        yield found


def assert_near(one, other):
    """The same verdict on bits, and the same values but for the rounding of float32."""
    for first, second, old, new in zip(one[0].runs, one[1].runs, other[0].runs, other[1].runs, strict=True):
        assert bool(first.error) == bool(old.error) and bool(second.error) == bool(new.error)
        for name in [] if first.error or second.error else old.results["float64"]:
            found, known = (each.results["float64"][name] for each in (first, old))
            assert found.dtype == known.dtype and found.shape == known.shape
            np.testing.assert_allclose(found, known, rtol=1e-5, atol=1e-6)
            if np.array_equal(known, new.results["float64"][name]):
                assert found.tobytes() == second.results["float64"][name].tobytes()


def test_what_nothing_that_differs_comes_before_is_run_at_float32(monkeypatch):
    before, after = chain(), chain(lambda x: mb.add(x=x, y=np.float16(1.0009765625), name="middle"))
    with widths(monkeypatch) as found:
        both = run_both(before, after, precisions=("float64",), lowers=True)
    assert found == {"first": "float32", "second": "float32", "middle": "float64", "fourth": "float64",
                     "fifth": "float64", "y": "float64"}
    assert_near(both, run_alone(before, after, precisions=("float64",)))
    assert [(run.ops["float64"].ops, run.ops["float64"].shared, run.ops["float64"].at_float32)
            for run in both[1].runs] == [(6, 2, 2)] * 2


def test_rows_that_are_only_moved_at_float32_are_exact():
    def built(more):
        def body(ids):
            table = np.arange(40, dtype=np.float16).reshape(20, 2)
            x = mb.transpose(x=mb.gather(x=table, indices=ids, axis=0, validate_indices=False), perm=[1, 0])
            return mb.add(x=x, y=np.float16(more), name="y")

        return build_program(body, dtype=types.int32, ids=(3,))

    both = run_both(built(1), built(1.5), precisions=("float64",), lowers=True)
    assert all(run.ops["float64"].shared == 2 and run.ops["float64"].at_float32 == 0 for run in both[1].runs)


def test_behind_equal_bits_ops_are_run_at_float32_again(monkeypatch):
    before, after = chain(), chain(lambda x: mb.sub(x=x, y=np.float16(-1), name="middle"))
    with widths(monkeypatch) as found:
        both = run_both(before, after, precisions=("float64",), lowers=True)
    assert found.pop("middle") == "float64" and set(found.values()) == {"float32"}
    assert all(run.ops["float64"].at_float32 == 5 for run in both[1].runs)
    assert all(old.results["float64"]["y"].tobytes() == new.results["float64"]["y"].tobytes()
               for old, new in zip(both[0].runs, both[1].runs))


def test_what_only_float64_holds_is_run_at_float64(monkeypatch):
    """1e30 squared is infinite at float32; its root is not."""
    def build(last):
        def body(x):
            large = mb.mul(x=mb.add(x=x, y=np.float32(1e30), name="sum"), y=np.float32(1e30), name="square")
            small = mb.mul(x=large, y=np.float32(1e-38), name="small")
            return last(x=mb.sqrt(x=mb.tanh(x=small, name="one")), name="y")
        return build_program(body, dtype=types.fp32, x=(2, 3))

    before, after = build(mb.sin), build(mb.cos)
    plans = build_plans(before, 1, lambda name: None)
    with widths(monkeypatch) as found:
        both = run_both(before, after, plans, ("float64",), lowers=True)
    assert found.pop("sum") == "float32" and set(found.values()) == {"float64"}
    assert_near(both, run_alone(before, after, plans, ("float64",)))


def test_an_infinite_mask_does_not_raise_the_precision(monkeypatch):
    mask = np.where(np.tri(4, dtype=bool), 0, -np.inf).astype(np.float16)

    def build(last):
        return build_program(lambda x: last(x=mb.softmax(x=mb.add(x=x, y=mask, name="masked"), axis=-1, name="soft"),
                                            name="y"), x=(4, 4))

    with widths(monkeypatch) as found:
        run_both(build(mb.sin), build(mb.cos), precisions=("float64",), lowers=True)
    assert found["soft"] == "float32"


def test_quotients_of_infinite_numbers_stay_at_float32(monkeypatch):
    def build(last):
        def body(x):
            y = mb.real_div(x=x, y=np.float16([[0.5], [2], [4]]), name="quotient")
            return last(x=mb.tanh(x=y, name="one"), name="y")
        return build_program(body, x=(3, 2))

    plans = [Plan("main", "by hand", {"x": np.float16([[1, np.inf], [np.nan, 2], [3, 4]])})]
    with widths(monkeypatch) as found:
        run_both(build(mb.sin), build(mb.cos), plans, ("float64",), lowers=True)
    assert found["quotient"] == found["one"] == "float32"


@pytest.mark.parametrize(("size", "width"), [(1.0, "float32"), (1e19, "float64")], ids=["small", "may overflow"])
def test_what_is_not_finite_because_an_operand_is_not_stays_at_float32(monkeypatch, size, width):
    weight, bias = make_weight(3, 3).astype(np.float32) * np.float32(size), np.float32([1, np.inf, 2])

    def build(last):
        def body(x):
            y = mb.linear(x=x, weight=weight, bias=bias, name="linear")
            y = mb.leaky_relu(x=mb.add(x=y, y=x, name="sum"), alpha=np.float32(0.5), name="leaky")
            return last(x=mb.tanh(x=mb.mul(x=y, y=x, name="product"), name="one"), name="y")
        return build_program(body, dtype=types.fp32, x=(4, 3))

    before, after = build(mb.sin), build(mb.cos)
    x = np.float32([[1, 2, 3], [np.nan, 1, 2], [np.inf, -1, 0], [size, -np.inf, size]])
    plans = [Plan("main", "by hand", {"x": x})]
    with widths(monkeypatch) as found:
        both = run_both(before, after, plans, ("float64",), lowers=True)
    assert found["linear"] == width and found["y"] == "float64"
    assert size > 1 or {found[name] for name in ("sum", "leaky", "product", "one")} == {"float32"}
    assert_near(both, run_alone(before, after, plans, ("float64",)))


def test_an_op_without_a_bound_on_its_results_is_run_at_float64_where_they_are_not_finite(monkeypatch):
    before, after = (build_program(lambda x, last=last: last(x=mb.exp(x=x, name="exp"), name="y"), dtype=types.fp32,
                                   x=(3,)) for last in (mb.atan, mb.tanh))
    plans = [Plan("main", "by hand", {"x": np.float32([1, np.nan, 100])})]  # e^100 is finite at float64
    with widths(monkeypatch) as found:
        both = run_both(before, after, plans, ("float64",), lowers=True)
    assert found["exp"] == "float64"
    assert_near(both, run_alone(before, after, plans, ("float64",)))


def test_labels_and_lists_are_made_at_float64(monkeypatch):
    """What is no tensor has no precision of its own, and its elements are not rounded."""
    def classified(last):
        def body(x):
            label, scores = mb.classify(probabilities=mb.softmax(x=x, axis=-1, name="soft"),
                                        classes=mb.const(val=mil_list(["a", "b", "c"])), name="label")
            return label, scores, last(x=x, name="y")
        return build_program(body, dtype=types.fp32, x=(1, 3))

    def listed(last):
        def body(x):
            values = mb.list_write(ls=mb.make_list(init_length=2, elem_shape=(3,), dtype="fp32", name="made"),
                                   index=1, value=mb.tanh(x=x, name="one"), name="label")
            return mb.list_gather(ls=values, indices=[1], name="two"), last(x=x, name="y")
        return build_program(body, dtype=types.fp32, x=(3,))

    for build in (classified, listed):
        before, after = build(mb.sin), build(mb.cos)
        with widths(monkeypatch) as found:
            both = run_both(before, after, precisions=("float64",), lowers=True)
        assert {found[name] for name in found if name.startswith("label")} == {"float64"}, found
        assert "float32" in found.values()
        assert not any(run.error for runs in both for run in runs.runs)


def test_two_values_for_one_keep_their_precision(monkeypatch):
    """The value `held` moved to another name, and another value took its name: what is behind must not be shared."""
    def build(moved):
        def body(x):
            held = mb.tanh(x=x, name="moved" if moved else "held")
            other = mb.add(x=held, y=np.float16(2.0**-10), name="held") if moved else held
            return mb.add(x=mb.sin(x=other, name="behind"), y=held, name="y")
        return build_program(body, x=(2, 3))

    before, after = build(False), build(True)
    with widths(monkeypatch) as found:
        both = run_both(before, after, precisions=("float64",), lowers=True)
    assert found["behind"] == "float64"
    assert_near(both, run_alone(before, after, precisions=("float64",)))


def test_sizes_that_are_computed_from_floats_are_those_at_float64():
    """At float32 16777217 rounds to 16777216, and 3 elements of 4 are asked for."""
    def build(last):
        def body(x):
            count = mb.sub(x=mb.add(x=mb.mul(x=x, y=np.float32(16777216)), y=np.float32(1)), y=np.float32(16777213))
            return last(x=mb.fill(shape=mb.reshape(x=mb.cast(x=count, dtype="int32"), shape=[1]),
                                  value=np.float32(1)), name="y")
        return build_program(body, dtype=types.fp32, x=(1,))

    before, after = build(mb.sin), build(mb.cos)
    plans = [Plan("main", "one", {"x": np.ones(1, np.float32)})]
    known = run_alone(before, after, plans, ("float64",))
    assert known[0].runs[0].results["float64"]["y"].shape == (4,)
    report = compare_programs(before, after, feeds=plans[0].feeds)
    assert report.status == "different" and report.first is not None


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(4, 300, 27))
def test_random_programs_agree_to_float32_where_less_is_run_at_float64(seed):
    drawn = generate_program(seed, KINDS)
    if drawn is None:
        pytest.skip("pymil does not accept the program of this seed")
    after = clone_program(drawn.program)
    ane.rewrite(after, dst=after, passes="full", target=drawn.targets[0] if drawn.targets else "m1", verify=False)
    for target in (after, clone_program(drawn.program)):
        both, alone = run_both(drawn.program, target, lowers=True), run_alone(drawn.program, target)
        for run, known in zip(both[0].runs, alone[0].runs):
            assert run.error == known.error
            assert {name: value.shape for name, value in run.results.get("float64", {}).items()} == {
                name: value.shape for name, value in known.results.get("float64", {}).items()}
    assert all(one.results["float64"][name].tobytes() == other.results["float64"][name].tobytes()
               for one, other in zip(both[0].runs, both[1].runs) for name in one.results.get("float64", {}))


def test_a_run_that_does_not_pass_is_made_at_float64(monkeypatch):
    """The typed run is held against the truth at float64, and a difference is that at float64."""
    before, after = chain(), chain(lambda x: mb.add(x=x, y=np.float16(1.5), name="middle"))
    report = compare_programs(before, after, exactness=Exactness.ROUNDING)
    assert report.status == "different" and report.ops["float64"].at_float32 == 0
    after = chain(lambda x: mb.sub(x=x, y=np.float16(-1), name="middle"))
    equal = compare_programs(before, after, exactness=Exactness.BITWISE)
    assert equal.equal_bits and equal.ops["float64"].at_float32 > 0
    claimed = compare_programs(before, after, exactness=Exactness.ROUNDING)
    assert claimed.equal_bits and claimed.ops["float64"].at_float32 == 0
    count = equal.ops["float64"]
    assert f"{count.at_float32} of {count.ops} ops read the same values in both" in str(equal)
    assert equal.to_dict()["ops"]["float64"] == dataclasses.asdict(equal.ops["float64"])


def test_what_the_second_computes_from_shared_values_may_be_computed_otherwise_in_the_first():
    """At float32 the square of the shared root is not x; at float64 it is, within the tolerance."""
    def build(squared):
        def body(x):
            root = mb.sqrt(x=mb.add(x=mb.abs(x=x), y=np.float32(1), name="sum"), name="root")
            again = mb.mul(x=root, y=root, name="y") if squared else mb.add(x=mb.abs(x=x), y=np.float32(1), name="y")
            return again, mb.sin(x=root, name="other")
        return build_program(body, dtype=types.fp32, x=(8, 8))

    both = run_both(build(False), build(True), precisions=("float64",), lowers=True)
    found, known = (each.runs[0].results["float64"]["y"] for each in both)
    assert 1e-9 < np.abs(found - known).max() < 1e-6
    report = compare_programs(build(False), build(True))
    assert report.equal and not report.equal_bits and report.ops["float64"].at_float32 == 0


def test_regions_that_differ_are_listed_where_they_end():
    def middle(x):
        return mb.mul(x=mb.add(x=mb.mul(x=x, y=np.float16(0.3)), y=np.float16(0.3)), y=np.float16(1 / 0.3),
                      name="middle")

    report = compare_programs(chain(), chain(middle), precisions=PRECISIONS, digests=True,
                              exactness=Exactness.APPROXIMATE)
    assert {(each.value, each.before, each.precision) for each in report.regions} == {
        ("middle", "middle", precision) for precision in PRECISIONS}
    assert all(each.runs >= 3 and each.equal_bits < each.runs and 0 < each.difference < 0.01
               for each in report.regions)
    same = compare_programs(chain(), chain(lambda x: mb.sub(x=x, y=np.float16(-1), name="middle")), digests=True)
    assert [(each.value, each.equal_bits, each.difference) for each in same.regions] == [
        ("middle", same.regions[0].runs, 0.0)]
    assert compare_programs(chain(), chain(middle), exactness=Exactness.APPROXIMATE).regions == []


def test_runs_on_feeds_of_one_shape_are_batched(monkeypatch):
    """Results follow from rows that are computed together, so they are the same to rounding, not to the bit."""
    before = chain()
    after = chain(lambda x: mb.sub(x=x, y=np.float16(-1), name="middle"))
    plans = build_plans(before, 3, lambda name: None)
    with counted(monkeypatch) as count:
        found = run_both(before, after, plans, batches=True)
    assert count["exp"] == len(PRECISIONS) and all(run.is_batched for execution in found for run in execution.runs)
    for execution, alone in zip(found, run_alone(before, after, plans)):
        for run, expected in zip(execution.runs, alone.runs):
            np.testing.assert_allclose(run.results["float64"]["y"], expected.results["float64"]["y"], rtol=1e-14)
            np.testing.assert_allclose(run.results["float16"]["y"], expected.results["float16"]["y"], atol=1e-3)


def test_a_difference_in_one_of_the_batched_runs_is_found_in_it():
    """All three draws are one run; the programs differ above 2.5 only, which the second of them reaches."""
    before = build_program(lambda x: mb.identity(x=x, name="y"), x=(2, 3))
    after = build_program(lambda x: mb.minimum(x=x, y=np.float16(2.5), name="y"), x=(2, 3))
    drawn = build_plans(before, 3, lambda name: None)
    plans = [replace(plan, feeds={"x": np.full((2, 3), size, np.float16)})
             for plan, size in zip(drawn, (1, 3, 2), strict=True)]
    report = compare_programs(before, after, precisions=PRECISIONS, further=plans)
    failing = {case.feeds for case in report.cases if not case.passed}
    assert report.status == "different" and "seed 1" in failing and not failing & {"seed 0", "seed 2"}


def test_a_run_that_fails_among_others_is_made_alone():
    """What rounds otherwise among others must not count as a difference; an error of one run is that run's alone."""
    before = build_program(lambda x: mb.identity(x=x, name="y"), x=(2, 3))
    plans = build_plans(before, 3, lambda name: None)
    broken = [plans[0], replace(plans[1], error="known not to run"), plans[2]]
    old, new = run_both(before, clone_program(before), broken, batches=True)
    assert [run.is_batched for run in old.runs] == [True, False, True]
    assert [bool(run.results) for run in new.runs] == [True, False, True]


def test_a_run_that_differs_when_batched_is_judged_alone(monkeypatch):
    """Planted: what batched runs compute is off by 1 %."""
    run_batch = Lockstep.run_batch

    def perturb(self, feeds):
        return [(one, {name: value * 1.01 for name, value in other.items()})
                for one, other in run_batch(self, feeds)]

    monkeypatch.setattr(Lockstep, "run_batch", perturb)
    before = chain()
    report = compare_programs(before, clone_program(before), precisions=PRECISIONS)
    assert report.equal and report.equal_bits


def test_large_runs_are_not_batched(monkeypatch):
    from mil_ane_passes.equivalence import lockstep

    monkeypatch.setattr(lockstep, "_MAX_BATCH_ELEMENTS", 2 * 6 * 7)
    plans = build_plans(chain(), 3, lambda name: None)
    with counted(monkeypatch) as count:
        run_both(chain(), chain(), plans, ("float64",), batches=True)
    assert count["exp"] == 2, "two runs as one, and the third alone"
