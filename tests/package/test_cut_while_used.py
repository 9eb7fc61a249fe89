"""A weight file that is cut short while it is in use is an error in words; the process that uses it lives on."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import subprocess
import sys

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types

import mil_ane_passes as ane
from mil_ane_passes.commands import sources
from mil_ane_passes.runtime import memory_limits, prepared_function
from mil_ane_passes.utils import mapped_files
from mil_ane_passes.utils.mapped_files import check_mapped_files, file_of, is_mapped, iterate_chunks

from .helpers import WEIGHTS, make

CUT = "was truncated to 4096 bytes while it was in use"


def table(dtype):
    """A package with a weight of 2 MB or more that an op reads as a whole and another one in part."""
    rows = np.random.default_rng(0).standard_normal((512, 1024)).astype(dtype)

    def program(x, ids):
        return mb.matmul(x=x, y=rows, name="product"), mb.gather(x=rows, indices=ids, axis=0, name="picked")

    kind = types.fp16 if dtype is np.float16 else types.fp32
    return mb.program(input_specs=[mb.TensorSpec((2, 512), dtype=kind), mb.TensorSpec((3,), dtype=types.int32)],
                      opset_version=ct.target.iOS17)(program)


FEEDS = {"x": np.ones((2, 512), np.float32), "ids": np.array([0, 5, 511], np.int32)}


@pytest.fixture(scope="module", params=["fp32", "fp16"])
def package(request, tmp_path_factory):
    precision = ct.precision.FLOAT32 if request.param == "fp32" else ct.precision.FLOAT16
    dtype = np.float32 if request.param == "fp32" else np.float16
    path = tmp_path_factory.mktemp("whole") / "whole.mlpackage"
    return make(path, table(dtype), ct.target.iOS17, compute_precision=precision, pass_pipeline=ct.PassPipeline.EMPTY)


SCRIPT = """
import os, sys
import numpy as np
import mil_ane_passes as ane
from mil_ane_passes.utils.locking import exclusive
dtype = np.float16 if sys.argv[3] == "float16" else np.float32
feeds = {"x": np.ones((2, 512), dtype), "ids": np.array([0, 5, 511], np.int32)}
package = ane.load(sys.argv[1])
runtime = ane.runtime.Runtime(package.program)
calls = {
    "run": lambda: ane.runtime.Runtime(package.program)(feeds),
    "again": lambda: runtime(feeds),
    "verify": lambda: ane.verify(package, package, seeds=1),
    "lint": lambda: ane.lint(package),
    "rewrite": lambda: ane.rewrite(package, sys.argv[1] + ".out.mlpackage", preset="full"),
    "save": lambda: ane.save(package, sys.argv[1] + ".saved.mlpackage"),
}
runtime(feeds)
os.truncate(sys.argv[2], 4096)
for name, call in calls.items():
    try:
        call()
        print(name, "no error")
    except ane.AnePassesError as error:
        print(name, error)
"""


@pytest.mark.slow
def test_a_cut_is_an_error_and_not_the_end_of_the_process(package, tmp_path, request):
    copy = tmp_path / "copy.mlpackage"
    shutil.copytree(package, copy)
    dtype = "float16" if "fp16" in request.node.callspec.id else "float32"
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(copy), str(copy / WEIGHTS), dtype],
                          capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-1000:]}"
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert "was modified or removed after it was loaded" in said.pop("save")
    assert set(said) == {"run", "again", "verify", "lint", "rewrite"}
    assert not {name: words for name, words in said.items() if CUT not in words}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy.mlpackage"]


def test_what_a_run_reads_is_what_the_file_holds(package, monkeypatch):
    monkeypatch.setattr(mapped_files, "_CHUNK_BYTES", 1000)
    loaded = ane.load(package)
    op = next(op for op in loaded.program.functions["main"].operations if op.op_type == "matmul")
    value = op.y.val
    assert is_mapped(value) and is_mapped(value[3:]) and not is_mapped(value.copy())
    read = np.concatenate([piece.copy() for _, piece in iterate_chunks(value[5])])
    assert np.array_equal(read, value[5]) and not is_mapped(read)
    feeds = {name: array.astype(value.dtype) if name == "x" else array for name, array in FEEDS.items()}
    runtime = ane.runtime.Runtime(loaded.program)
    for _ in range(3):
        found = runtime(feeds)
        np.testing.assert_allclose(found["product"], feeds["x"].astype(np.float64) @ value.astype(np.float64),
                                   rtol=2e-3, atol=2e-2)
        assert np.array_equal(found["picked"].astype(value.dtype), value[FEEDS["ids"]])


def three_layers():
    """A program whose three weights of 1 MB are stored as they are computed."""
    first, second = (np.random.default_rng(seed).standard_normal((512, 512)).astype(np.float32) for seed in (1, 2))

    def program(x):
        y = mb.matmul(x=mb.matmul(x=x, y=first, name="one"), y=second, name="two")
        return mb.matmul(x=y, y=first, name="three")

    return mb.program(input_specs=[mb.TensorSpec((1, 512), dtype=types.fp32)], opset_version=ct.target.iOS17)(program)


@pytest.fixture
def layers(tmp_path):
    return make(tmp_path / "layers.mlpackage", three_layers(), ct.target.iOS17,
                compute_precision=ct.precision.FLOAT32, pass_pipeline=ct.PassPipeline.EMPTY)


@pytest.fixture
def read_bytes(monkeypatch):
    """How many bytes of weights each read has taken from a file."""
    found = []
    real = mapped_files._read_into
    monkeypatch.setattr(
        mapped_files, "_read_into", lambda target, *rest: (found.append(target.size), real(target, *rest))[1]
    )
    return found


X = {"x": np.ones((1, 512), np.float32)}
MB = 512 * 512 * 4


def test_runs_of_one_package_read_a_weight_once_and_share_it(layers, read_bytes):
    loaded = ane.load(layers)
    first = ane.runtime.Runtime(loaded.program)
    expected = first(X)["three"]
    assert read_bytes == 3 * [MB]
    second = ane.runtime.Runtime(loaded.program)
    assert all(np.array_equal(runtime(X)["three"], expected) for runtime in (first, second, second))
    assert read_bytes == 3 * [MB]
    del first, second
    gc.collect()
    assert not any(each.copies for each in mapped_files._mapped_files.values()), "freed with the last runtime"
    assert np.array_equal(ane.runtime.Runtime(loaded.program)(X)["three"], expected)
    assert read_bytes == 6 * [MB]


def test_weights_beyond_what_may_be_kept_are_read_in_each_run(layers, read_bytes, monkeypatch):
    expected = ane.runtime.Runtime(ane.load(layers).program)(X)["three"]
    read_bytes.clear()
    monkeypatch.setattr(memory_limits, "_get_machine_bytes", lambda: 4 * MB + 100)  # a quarter of it: one weight
    monkeypatch.setattr(prepared_function, "_CACHE_BYTES", 0)
    runtime = ane.runtime.Runtime(ane.load(layers).program)
    for run in (1, 2, 3):
        assert np.array_equal(runtime(X)["three"], expected)
        assert read_bytes.count(MB) == 1 + 2 * run, "one is kept, two are read in each run"


CUT_WITHIN = """
import os, sys
import numpy as np
import mil_ane_passes as ane
package = ane.load(sys.argv[1])
def cut(op, var, value):
    os.truncate(sys.argv[2], 4096)
try:
    ane.runtime.Runtime(package.program, observer=cut)({"x": np.ones((1, 512), np.float32)})
except ane.AnePassesError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_cut_within_a_run_is_an_error(layers):
    done = subprocess.run([sys.executable, "-c", CUT_WITHIN, str(layers), str(layers / WEIGHTS)],
                          capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-1000:]}"
    assert CUT in done.stdout


def test_a_run_is_an_error_when_its_file_was_cut_and_not_when_another_was(layers, tmp_path):
    copy = tmp_path / "copy.mlpackage"
    shutil.copytree(layers, copy)
    loaded, other = ane.load(layers), ane.load(copy)
    runtime = ane.runtime.Runtime(loaded.program)
    expected = runtime(X)["three"]
    os.truncate(copy / WEIGHTS, 4096)
    assert np.array_equal(runtime(X)["three"], expected) and other is not None
    os.truncate(layers / WEIGHTS, 4096)
    with pytest.raises(ane.AnePassesError, match=CUT):
        runtime(X)


def test_a_rewrite_is_an_error_when_its_file_was_cut_and_not_when_another_was(layers, tmp_path):
    copy = tmp_path / "copy.mlpackage"
    shutil.copytree(layers, copy)
    loaded, other = ane.load(layers), ane.load(copy)
    os.truncate(copy / WEIGHTS, 4096)
    assert ane.rewrite(loaded, preset="full", verify=False).status != "not verified"
    ane.lint(loaded)
    for asked in (ane.lint, ane.rewrite):
        with pytest.raises(ane.AnePassesError, match=CUT):
            asked(other)


def test_a_mapping_is_forgotten_with_the_last_array_that_needs_it(package):
    before = len(mapped_files._mapped_files)
    loaded = ane.load(package)
    op = next(op for op in loaded.program.functions["main"].operations if op.op_type == "matmul")
    value = op.y.val
    del loaded, op
    assert is_mapped(value), "the program may be gone, the view is not"
    check_mapped_files([file_of(value)])
    del value
    gc.collect()
    assert len(mapped_files._mapped_files) <= before


CUT_BEHIND_A_CHECK = """
import os, shutil, sys
import numpy as np
import mil_ane_passes as ane
from mil_ane_passes.utils.mapped_files import MappedFile
path, weights, whole = sys.argv[1], sys.argv[2], sys.argv[2] + ".whole"
feeds = {"x": np.ones((2, 512), np.float32), "ids": np.array([0, 5, 511], np.int32)}
check = MappedFile.check
calls = {
    "run": lambda: ane.run(path, feeds),
    "verify": lambda: ane.verify(path, path, seeds=1),
    "lint": lambda: ane.lint(path),
    "rewrite": lambda: ane.rewrite(path, preset="full", verify=False),
}
shutil.copy(weights, whole)

def count_checks_until_cut(name, number):
    shutil.copy(whole, weights)
    seen = []

    def check_and_cut(mapping):
        check(mapping)
        seen.append(mapping)
        if len(seen) == number:
            os.truncate(weights, 4096)

    MappedFile.check = check_and_cut
    try:
        calls[name]()
    except ane.AnePassesError as error:
        if len(seen) < number or "while it was in use" not in str(error) and "modified or removed" not in str(error):
            raise
    else:
        assert len(seen) <= number, f"{name}: cut behind check {number} of {len(seen)}, and no error"
    return len(seen)

for name in calls:
    number = 1
    while count_checks_until_cut(name, number) >= number:
        number += 1
    print(name, number - 1)
"""


@pytest.mark.slow
def test_a_cut_between_a_check_and_the_read_is_an_error(package, tmp_path, request):
    """The pages that are gone read as zeros, and no result is made of them; behind the last check nothing is read."""
    if "fp16" in request.node.callspec.id:
        pytest.skip("the feeds of the script are fp32")
    copy = tmp_path / "copy.mlpackage"
    shutil.copytree(package, copy)
    done = subprocess.run([sys.executable, "-c", CUT_BEHIND_A_CHECK, str(copy), str(copy / WEIGHTS)],
                          capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-1000:]}"
    counted = dict(line.split() for line in done.stdout.splitlines())
    assert set(counted) == {"run", "verify", "lint", "rewrite"} and all(int(count) for count in counted.values())


SUMS_OF_WHAT_IS_GONE = """
import os, signal, sys, threading
import numpy as np
from mil_ane_passes.utils.mapped_files import MappedFile, map_file
from io import FileIO
from pathlib import Path
path, sums = Path(sys.argv[1]), []
for _ in range(50):
    path.write_bytes(b"\\1" * 100_000)
    mapped = map_file(FileIO(path), path)
    os.truncate(path, 5000)
    barrier = threading.Barrier(4)
    threads = [threading.Thread(target=lambda: (barrier.wait(), sums.append(int(mapped.sum())))) for _ in range(4)]
    for each in threads: each.start()
    for each in threads: each.join()
print(sums)
os.truncate(path, 200_000)
try:
    MappedFile.check(next(iter(sys.modules["mil_ane_passes.utils.mapped_files"]._mapped_files.values())))
except Exception as error:
    print(error)
sys.stdout.flush()
for _ in range(2): os.kill(os.getpid(), signal.SIGBUS)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGBUS"), reason="the system has no such signal")
def test_only_reads_of_mapped_files_survive(tmp_path):
    """A signal that has another cause ends the process as it would without this package."""
    done = subprocess.run([sys.executable, "-c", SUMS_OF_WHAT_IS_GONE, str(tmp_path / "file")],
                          capture_output=True, text=True)
    sums, words = done.stdout.splitlines()
    assert set(json.loads(sums)) == {5000} and "while it was in use" in words
    assert done.returncode == -signal.SIGBUS


def overwrite(path):
    """Write other bytes of the same number into the weights."""
    with open(path / WEIGHTS, "r+b") as file:
        file.seek(-64, os.SEEK_END)
        file.write(b"\x11" * 64)
    os.utime(path / WEIGHTS, ns=(5, 5))  # the clock of a file system may still show the time before


CALLS = {
    "run": lambda model: ane.run(model, X),
    "trace": lambda model: ane.trace(model, X),
    "verify": lambda model: ane.verify(model, model, seeds=1),
    "verify a callable": lambda model: ane.verify(model, lambda x: x, seeds=1),
    "lint": ane.lint,
    "calibrate": lambda model: ane.calibrate(model, feeds=X),
    "rewrite": lambda model: ane.rewrite(model, preset="full"),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("as_path", [True, False], ids=["path", "package"])
def test_a_source_that_is_overwritten_while_a_command_reads_it_is_refused(name, as_path, layers, monkeypatch):
    opened = sources.open_source

    def open_and_overwrite(model):
        found = opened(model)
        overwrite(layers)
        return found

    monkeypatch.setattr(sources, "open_source", open_and_overwrite)
    with pytest.raises(ane.AnePassesError, match="modified or removed after it was loaded|modified while it was in"):
        CALLS[name](str(layers) if as_path else ane.load(layers))


def test_a_package_that_was_replaced_may_be_used_on(layers, tmp_path):
    """What was loaded is still there, in files without a name."""
    loaded = ane.load(layers)
    expected = ane.run(loaded, X)["three"]
    shutil.move(layers, tmp_path / "moved.mlpackage")
    assert np.array_equal(ane.run(loaded, X)["three"], expected)
    shutil.rmtree(tmp_path / "moved.mlpackage")
    assert ane.verify(loaded, loaded, seeds=1).equal and ane.lint(loaded) is not None
