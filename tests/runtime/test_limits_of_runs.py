"""No run goes on for ever, or takes more memory than there is: it is stopped with the op, what it took, and what to do.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import get_new_symbol

import mil_ane_passes as ane
from mil_ane_passes.commands import output
from mil_ane_passes.commands.main import main
from mil_ane_passes.ir.loop_steps import UnknownStepCount, count_steps
from mil_ane_passes.runtime import Runtime, memory_limits
from mil_ane_passes.utils.budget import DEFAULT_MAX_STEPS, share_budget
from tests.conversions import save_program
from tests.runtime.helpers import program

X = {"x": np.zeros(2, np.float32)}


def loop(step: int, end: int = 1) -> Any:
    """Counts from 0 by `step` while below `end`; never ends with a step of 0."""
    def build(x: Any) -> Any:
        return mb.while_loop(
            _cond=lambda i, a: mb.less(x=i, y=end),
            _body=lambda i, a: (mb.add(x=i, y=step), mb.relu(x=mb.add(x=a, y=1.0))),
            loop_vars=(np.int32(0), mb.mul(x=x, y=1.0)), name="turn")[1]

    return program(build, X)


def nested(outer: int, inner: int) -> Any:
    def turns(times: int, value: Any, body: Any) -> Any:
        return mb.while_loop(_cond=lambda i, a: mb.less(x=i, y=times),
                             _body=lambda i, a: (mb.add(x=i, y=1), body(a)), loop_vars=(np.int32(0), value))[1]

    return program(lambda x: turns(outer, x, lambda a: turns(inner, a, lambda b: mb.add(x=b, y=1.0))), X)


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("endless") / "endless.mlpackage"
    ct.convert(loop(0), minimum_deployment_target=ct.target.iOS16, compute_precision=ct.precision.FLOAT32,
               skip_model_load=True).save(str(path))
    return path


@pytest.fixture(scope="module")
def feeds(tmp_path_factory: pytest.TempPathFactory, endless: Path) -> Path:
    path = tmp_path_factory.mktemp("feeds") / "feeds.npz"
    np.savez(path, **{name: np.zeros(2, np.float32) for name in ane.load(endless).program.functions["main"].inputs})
    return path


def test_a_loop_is_stopped_after_its_steps() -> None:
    with share_budget(max_steps=50), pytest.raises(ane.LimitReached) as reached:
        Runtime(loop(0))(X)
    assert "while_loop '" in str(reached.value) and "still running after 50 loop steps" in str(reached.value)
    assert "max_steps=" in str(reached.value)
    with share_budget(max_steps=np.int64(50), max_seconds=np.float32(60)):
        Runtime(loop(1, 50))(X)
    with share_budget(max_steps=49), pytest.raises(ane.LimitReached):
        Runtime(loop(1, 50))(X)
    with share_budget(max_steps=None):
        Runtime(loop(1, 50))(X)


def test_steps_of_nested_loops_count_together_and_each_run_begins_anew() -> None:
    runtime = Runtime(nested(4, 5))
    with share_budget(max_steps=24):
        runtime(X), runtime(X)
    with share_budget(max_steps=23), pytest.raises(ane.LimitReached, match=r"in it while_loop .* after 23 loop steps"):
        runtime(X)


def test_a_run_is_stopped_when_its_time_is_over() -> None:
    started = time.monotonic()
    with (
        share_budget(max_steps=None, max_seconds=0.2),
        pytest.raises(ane.LimitReached, match=r"stopped after 0\.2 s, at"),
    ):
        Runtime(loop(0))(X)
    assert time.monotonic() - started < 20
    with share_budget(max_seconds=0.001), pytest.raises(ane.LimitReached, match="relu|add|mul|identity"):
        time.sleep(0.01)  # all runs share the time
        Runtime(program(lambda x: mb.relu(x=x), X))(X)


def test_progress_says_how_far_a_loop_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mil_ane_passes.utils.budget._PROGRESS_INTERVAL", 0.0)
    said: list[str] = []
    with share_budget(max_steps=600, progress=said.append), pytest.raises(ane.LimitReached):
        Runtime(loop(0))(X)
    assert [re.sub(r"'.*?'", "L", text) for text in said] == ["while_loop L (step 256)", "while_loop L (step 512)"]


@pytest.mark.parametrize("limits", [{"max_steps": 0}, {"max_steps": 1.5}, {"max_seconds": -1}, {"max_seconds": "x"},
                                    {"max_steps": True}, {"max_seconds": float("nan")}])
def test_limits_that_are_none_are_refused(limits: dict[str, Any], endless: Path) -> None:
    with pytest.raises(ane.InputError, match="above 0"):
        ane.verify(endless, endless, **limits)


def test_every_function_that_runs_a_model_is_bounded(endless: Path, tmp_path: Path) -> None:
    feeds = {name: np.zeros(2, np.float32) for name in ane.load(endless).program.functions["main"].inputs}
    for call in (lambda: ane.run(endless, feeds, max_steps=40), lambda: ane.trace(endless, feeds, max_steps=40),
                 lambda: ane.calibrate(endless, feeds=feeds, max_steps=40),
                 lambda: ane.runtime.predictor(endless, max_steps=40).predict(dict(feeds))):
        with pytest.raises(ane.LimitReached, match="after 40 loop steps"):
            call()
    report = ane.verify(endless, endless, max_steps=40)
    assert report.status == "not verified" and "after 40 loop steps" in report.reason and not report.equal
    assert ane.verify(endless, lambda x: x, max_steps=40).status == "not verified"
    passes = ane.rewrite(endless, tmp_path / "out.mlpackage", passes="fp16_compute", max_steps=40)
    assert passes.status == "not verified" and "after 40 loop steps" in passes.verify.reason
    assert not (tmp_path / "out.mlpackage").exists()


def test_the_command_says_so_and_writes_nothing(
    endless: Path, feeds: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, most = str(tmp_path / "out"), ["--max-steps", "40"]
    assert main(["run", str(endless), "--feeds", str(feeds), "-o", f"{out}.npz", *most]) == 2
    assert "raise it with --max-steps N" in capsys.readouterr().err
    assert main(["calibrate", str(endless), "--feeds", str(feeds), *most]) == 2
    assert main(["verify", str(endless), str(endless), "--format", "json", *most]) == 1
    assert json.loads(capsys.readouterr().out)["status"] == "not verified"
    assert main(["verify", str(endless), str(endless), "--max-steps", "none", "--max-seconds", "0.3"]) == 1
    assert "--max-seconds 0.3 is the limit" in capsys.readouterr().out
    rewrite = ["rewrite", str(endless), "-o", f"{out}.mlpackage", "--passes", "fp16_compute"]
    assert main([*rewrite, *most]) == 1
    assert "not verified" in capsys.readouterr().out and not list(tmp_path.iterdir())
    assert main([*rewrite, "--max-steps", "many"]) == 2
    batch = ["batch", "rewrite", str(endless), "-o", f"{out}.d", "--jobs", "0", "--passes", "fp16_compute", *most]
    assert main(batch) == 1


def test_without_a_terminal_a_line_comes_now_and_then(
    endless: Path, feeds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "_LOG_INTERVAL", 0.2)
    command = ["run", str(endless), "--feeds", str(feeds), "-o", str(tmp_path / "o.npz"), "--max-seconds", "3"]
    assert main([*command, "--max-steps", "none"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("mil-ane-passes: 0 s: ") and len(lines) > 4
    assert any("while_loop" in line and "(step " in line for line in lines[:-1])


def test_counting_steps_is_bounded_too() -> None:
    op = loop(0).functions["main"].find_ops(op_type="while_loop")[0]
    with share_budget(max_seconds=0.05), pytest.raises(UnknownStepCount, match="not determined within 0.05 s"):
        count_steps(op, 10**9)


def test_a_loop_of_a_hundred_thousand_steps_is_allowed_unasked() -> None:
    assert DEFAULT_MAX_STEPS >= 100_000


# Memory


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_limits, "_get_machine_bytes", lambda: 2 * 64_000_000)


def wide(count: int, *, kept: bool) -> Any:
    """`count` values of 20 MB, needed at once (`kept`) or one after the other."""
    def build(x: Any) -> Any:
        if not kept:
            y = mb.tile(x=x, reps=[2_500_000])
            for _ in range(count):
                y = mb.relu(x=y)
            return mb.reduce_sum(x=y)
        made = [mb.tile(x=mb.add(x=x, y=float(i)), reps=[2_500_000]) for i in range(count)]
        out = made[0]
        for each in made[1:]:
            out = mb.add(x=out, y=each)
        return mb.reduce_sum(x=out)

    return program(build, X)


def test_the_sum_of_live_values_is_bounded_before_anything_runs(little_memory: None) -> None:
    Runtime(wide(6, kept=False))(X)
    Runtime(wide(2, kept=True))(X)
    ran: list[str] = []
    with pytest.raises(ane.LimitReached, match=r"values that are alive here take .* at most 64.0 MB"):
        Runtime(wide(6, kept=True), observer=lambda op, var, value: ran.append(op.op_type))(X)
    assert not ran


def test_the_user_limits_the_memory(tmp_path: Path, capsys: Any) -> None:
    path = save_program(wide(2, kept=True), tmp_path / "wide.mlpackage")
    assert ane.run(path, {"x": np.ones(2, np.float32)}, max_memory="200MB")
    with pytest.raises(ane.LimitReached, match=r"holds at most 50\.0 MB of values at once with max_memory 100\.0 MB"):
        ane.run(path, {"x": np.ones(2, np.float32)}, max_memory=1e8)
    assert main(["verify", path, path, "--max-memory", "100 MB"]) == 1
    said = capsys.readouterr().out
    assert "not verified: " in said and "with --max-memory 100.0 MB" in said
    assert main(["verify", path, path, "--max-memory", "400MB", "--seeds", "1"]) == 0
    with pytest.raises(ane.LimitReached, match=r"takes 16 bytes; .* at most 3 bytes for one value .* 7 bytes$"):
        ane.run(path, {"x": np.ones(2, np.float32)}, max_memory=7)
    assert main(["verify", path, path, "--max-memory", "much"]) == 2
    assert "--max-memory much: expected a size such as 1.4GB" in capsys.readouterr().err


def test_views_of_one_memory_count_once(little_memory: None) -> None:
    def build(x: Any) -> Any:
        y = mb.tile(x=x, reps=[2_500_000])
        views = [mb.reshape(x=y, shape=[-1, 2 ** (i + 1)]) for i in range(4)]
        return [mb.reduce_sum(x=each) for each in views]

    Runtime(program(lambda x: tuple(build(x)), X))(X)


@pytest.mark.parametrize("build", [
    lambda x: mb.fill(shape=x, value=1.0),
    lambda x: mb.tile(x=np.ones((1, 1), np.float32), reps=x),
    lambda x: mb.range_1d(start=0, end=mb.reduce_prod(x=x, axes=[0], keep_dims=False), step=1),
], ids=["fill", "tile", "range_1d"])
def test_sizes_that_are_fed_are_looked_at_first(build: Any, little_memory: None) -> None:
    made = program(build, {"x": np.array([3, 4], np.int32)})
    assert Runtime(made)({"x": np.array([3, 4], np.int32)})
    with pytest.raises(ane.LimitReached, match=r"makes 80.0 MB in addition to"):
        Runtime(made)({"x": np.array([10_000, 2_000], np.int32)})


def test_values_of_dynamic_shapes_are_added_up(little_memory: None) -> None:
    def build(x: Any) -> Any:
        made = [mb.fill(shape=x, value=float(i)) for i in range(6)]
        return mb.reduce_sum(x=mb.concat(values=[mb.reduce_sum(x=each, keep_dims=True) for each in made], axis=0))

    made = program(build, {"x": np.array([3, 4], np.int32)})
    Runtime(made)({"x": np.array([1000, 2000], np.int32)})  # 8 MB each
    with pytest.raises(ane.LimitReached, match="of values still needed"):
        Runtime(made)({"x": np.array([1000, 3000], np.int32)})


def attend(**settings: Any) -> Runtime:
    """The softmax of the products of `x` (rows, 2) with itself, whose size is that of the feed."""
    def build(x: Any) -> Any:
        return mb.reduce_sum(x=mb.exp(x=mb.matmul(x=x, y=x, transpose_y=True)))

    rows = mb.TensorSpec((get_new_symbol(), 2))
    made = mb.program(input_specs=[rows], opset_version=ct.target.iOS16)(build)
    return Runtime(made, precision="float32", **settings)


def test_products_of_fed_sizes_are_looked_at_first(little_memory: None) -> None:
    assert attend()({"x": np.ones((1000, 2), np.float32)})
    with pytest.raises(ane.LimitReached, match=r"matmul '.*': makes 100.0 MB in addition to"):
        attend()({"x": np.ones((5000, 2), np.float32)})


def test_results_of_fed_sizes_are_added_up_after_their_op(little_memory: None) -> None:
    with pytest.raises(ane.LimitReached, match=r"exp '.*': there are 72\.\d MB of values still needed"):
        attend()({"x": np.ones((3000, 2), np.float32)})


def test_the_memory_of_observed_sums_is_limited(little_memory: None) -> None:
    bounds: list[float] = []
    attend(partial_sums=lambda op, bound: bounds.append(bound))({"x": np.ones((1500, 2), np.float32)})
    assert bounds == [2.0]
    with pytest.raises(ane.LimitReached, match=r"matmul '.*': makes 64.1 MB in addition to"):
        attend(partial_sums=lambda op, bound: bounds.append(bound))({"x": np.ones((2001, 2), np.float32)})


def test_memory_that_the_system_does_not_give_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    made = program(lambda x: mb.relu(x=x), X)
    for error in (MemoryError("Unable to allocate 24.0 GiB"),
                  RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4000000000 bytes.")):
        def fail(op: Any, ins: Any, error: Exception = error) -> Any:
            raise error

        monkeypatch.setitem(Runtime(made)._kernels, "relu", fail)
        with pytest.raises(ane.LimitReached, match=r"relu '.*': the system does not provide (4\.0 GB more|as much)"):
            Runtime(made)(X)


LIMITED = """
import resource, sys
import numpy as np
import mil_ane_passes as ane
from mil_ane_passes.runtime.memory_limits import _get_free_address_space
ane.run(sys.argv[1], {"x": np.zeros((2,), np.float32)})
used = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + 100_000_000, resource.RLIM_INFINITY))
assert 0 < _get_free_address_space() <= 100_000_000
try:
    ane.run(sys.argv[2], {"x": np.zeros((2,), np.float32)})
except ane.LimitReached as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ulimit -v holds on Linux only")
def test_a_limit_of_the_shell_counts(tmp_path: Path) -> None:
    paths = []
    for number, count in enumerate((1, 40)):
        def build(x: Any, count: int = count) -> Any:
            return mb.reduce_sum(x=mb.tile(x=x, reps=[count * 1_000_000]), name="out")

        paths.append(str(tmp_path / f"{number}.mlpackage"))
        save_program(program(build, X), paths[-1], ct.target.iOS16, compute_precision=ct.precision.FLOAT32)
    done = subprocess.run([sys.executable, "-c", LIMITED, *paths], capture_output=True, text=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert "tile '" in done.stdout and "ulimit -v" in done.stdout, done.stderr[-2000:]


def test_a_memory_error_anywhere_else_gets_words(monkeypatch: pytest.MonkeyPatch, fixtures: Path, capsys: Any) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr("mil_ane_passes.commands.sources.open_source", fail)
    assert main(["lint", str(fixtures / "nothing_to_do.mlpackage")]) == 2
    said = capsys.readouterr().err
    assert "not enough memory; use fewer jobs" in said and "internal error" not in said and "report it" not in said


def test_a_limit_that_texts_exceed_names_an_array(tmp_path: Path) -> None:
    """Texts such as the padding of a conv are no arrays, and take part in no sum."""
    @mb.program(input_specs=[mb.TensorSpec((1, 2, 8))])
    def program(x):
        return mb.conv(x=x, weight=np.ones((2, 2, 3), np.float32), pad_type="same", name="y")

    path = save_program(program, tmp_path / "text.mlpackage")
    with pytest.raises(ane.LimitReached, match="of shape .* takes"):
        ane.run(path, {"x": np.ones((1, 2, 8), np.float32)}, max_memory=1)
