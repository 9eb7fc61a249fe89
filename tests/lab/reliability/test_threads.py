"""Threads of one process share the API: each gets what it would get alone, and none waits for ever."""

from __future__ import annotations

import gc
import hashlib
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb

import mil_ane_passes as ane
from mil_ane_passes.commands.mac_script import write_mac_script
from mil_ane_passes.passes.pipeline import NAMESPACE
from mil_ane_passes.utils.garbage_collection import pause_garbage_collection
from mil_ane_passes.utils.locking import exclusive, is_synchronized, synchronized_property
from tests.without_torch import hide_torch

REWRITTEN, IDLE = "conv_transpose_1d.mlpackage", "nothing_to_do.mlpackage"
THREADS = 8
PUBLIC = ("mil_ane_passes", "mil_ane_passes.package", "mil_ane_passes.runtime", "mil_ane_passes.torch_frontend")
WITHOUT_LOCK = {
    "exclusive": "is the lock",
    "batch": "its jobs take the lock, in whatever process or thread they run",
    "active": "reads a context variable",
    "patched": "takes the lock to enter, not while the caller's code runs",
    "uninstall": "puts functions back, under a lock of its own",
    "check_destination": "looks at paths", "check_backup": "looks at paths",
    "CopyAhead.take_copy": "renames files", "CopyAhead.__init__": "copies files",
    "CopyAhead.__enter__": "returns itself", "CopyAhead.__exit__": "removes files",
    "Package.description": "reads a proto", "Package.check_source": "compares stamps of files",
    "Predictor.make_state": "makes arrays",
    "Patch.__init__": "holds data",
}
MAX_WAIT_SECONDS = 60


def hash_package(path: Path) -> str:
    """The files of a package, without the identifiers that are drawn anew."""
    hashed = hashlib.sha256()
    for file in sorted(path.rglob("*")):
        if file.is_file() and file.name != "Manifest.json":
            hashed.update(file.relative_to(path).as_posix().encode() + file.read_bytes())
    return hashed.hexdigest()


def format_report(report, *folders) -> str:
    """A report as text, without paths and seconds."""
    data = report.to_dict()
    for name in ("seconds", "output", "outputs", "folder"):
        data.pop(name, None)
    for item in data.get("items", ()):
        item.pop("seconds", None)
    text = json.dumps(data, default=str, sort_keys=True)
    for folder in folders:
        text = text.replace(str(folder), "")
    return text


class PublicCalls:
    """Calls of every public function; each returns what must be the same in every thread."""

    def __init__(self, fixtures: Path) -> None:
        self.rewritten, self.idle = fixtures / REWRITTEN, fixtures / IDLE
        self.feeds = {"mel": np.load(fixtures / "conv_transpose_1d.npz")["mel"]}
        self.all = [value for name, value in sorted(vars(PublicCalls).items()) if name.startswith("job_")]

    def job_rewrite(self, folder):
        report = ane.rewrite(self.rewritten, folder / "full.mlpackage", preset="full", seeds=1)
        assert report.status == "written"
        ane.load(folder / "full.mlpackage")
        return hash_package(folder / "full.mlpackage")

    def job_rewrite_unverified(self, folder):
        report = ane.rewrite(self.idle, folder / "safe.mlpackage", verify=False)
        return report.status, hash_package(folder / "safe.mlpackage")

    def job_lint(self, folder):
        return format_report(ane.lint(self.rewritten))

    def job_lint_other(self, folder):
        return format_report(ane.lint(self.idle, target="m4"))

    def job_verify(self, folder):
        return format_report(ane.verify(self.rewritten, self.rewritten, seeds=1))

    def job_run(self, folder):
        return {name: value.tobytes() for name, value in ane.run(self.rewritten, self.feeds).items()}

    def job_trace(self, folder):
        return format_report(ane.trace(self.rewritten, self.feeds))

    def job_calibrate(self, folder):
        return format_report(ane.calibrate(self.rewritten, feeds=self.feeds))

    def job_edit(self, folder):
        name = next(iter(self.feeds))
        ane.edit(self.rewritten, folder / "edited.mlpackage", rename={name: "renamed"})
        return hash_package(folder / "edited.mlpackage")

    def job_load_and_save(self, folder):
        package = ane.load(self.rewritten)
        assert package.is_unchanged()
        ane.save(package, folder / "saved.mlpackage")
        return hash_package(folder / "saved.mlpackage")

    def job_batch(self, folder):
        report = ane.batch("lint", [self.rewritten, self.idle], folder / "batch")
        return [(item.name, item.status, item.count) for item in report.items]

    def job_predict(self, folder):
        predictor = ane.runtime.predictor(self.rewritten)
        return {name: value.tobytes() for name, value in predictor.predict(dict(self.feeds)).items()}

    def job_pipeline(self, folder):
        with exclusive():
            @mb.program(input_specs=[mb.TensorSpec((1, 4, 8))], opset_version=ct.target.iOS16)
            def program(x):
                return mb.relu(x=mb.relu(x=x), name="out")
        return ane.pipeline(preset="full").passes, ane.rewrite(program, verify=False).ops_before

    def job_convert(self, folder):
        import torch

        module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()).eval()
        with exclusive():
            traced = torch.jit.trace(module, torch.zeros(1, 4))
        with ane.torch_frontend.patched():
            model = ane.convert(traced, inputs=[ct.TensorType(shape=(1, 4))], skip_model_load=True)
        return [op.op_type for op in model._mil_program.functions["main"].operations]

    def job_mac_script(self, folder):
        write_mac_script(self.rewritten, folder / "mac", seeds=1)
        return sorted(path.relative_to(folder).as_posix() for path in (folder / "mac").rglob("*.npz"))


def test_eight_threads_get_what_each_would_get_alone(fixtures, tmp_path):
    jobs = PublicCalls(fixtures)
    alone = {}
    for job in jobs.all:
        folder = tmp_path / "alone" / job.__name__
        folder.mkdir(parents=True)
        alone[job.__name__] = job(jobs, folder)
    start = threading.Barrier(THREADS)

    def work(number):
        start.wait(MAX_WAIT_SECONDS)
        wrong = []
        for step in range(len(jobs.all) // 2):
            job = jobs.all[(step + number * 2) % len(jobs.all)]
            folder = tmp_path / str(number) / job.__name__
            folder.mkdir(parents=True)
            if job(jobs, folder) != alone[job.__name__]:
                wrong.append(job.__name__)
        return wrong

    enabled = gc.isenabled()
    with ThreadPoolExecutor(THREADS) as pool:
        results = [pool.submit(work, number) for number in range(THREADS)]
        assert [result.result() for result in results] == [[]] * THREADS
    assert gc.isenabled() == enabled and not ane.torch_frontend.active()


def collect_public_callables():
    """Every public function and method by name, and every pass of coremltools' registry that is ours."""
    from coremltools.converters.mil.mil.passes.pass_registry import PASS_REGISTRY

    found = {}
    for name in PUBLIC:
        module = importlib.import_module(name)
        for each in module.__all__:
            value = getattr(module, each)
            if inspect.isclass(value) and not issubclass(value, BaseException):
                found |= {f"{each}.{method}": member for method, member in vars(value).items()
                          if inspect.isfunction(member) and (not method.startswith("_") or method in (
                              "__init__", "__call__", "__enter__", "__exit__"))}
            elif inspect.isfunction(value):
                found[each] = value
    passes = [name for name in PASS_REGISTRY.passes if name.startswith(f"{NAMESPACE}::")]
    return found | {name: type(PASS_REGISTRY[name]).apply for name in passes}


def test_every_public_function_takes_the_lock_or_says_why_not():
    found = collect_public_callables()
    assert {"rewrite", "lint", "verify", "run", "Predictor.predict", "Runtime.__call__", "convert"} < set(found)
    assert any(name.startswith(f"{NAMESPACE}::") for name in found)
    open_ones = {name for name, value in found.items() if not is_synchronized(value)}
    assert not open_ones - set(WITHOUT_LOCK), "neither @synchronized nor listed with a reason"
    assert not {name for name in WITHOUT_LOCK if name in found} - open_ones


def run_in_thread(call):
    """Start `call` in a thread; returns an event that is set when it is done."""
    done = threading.Event()

    def work():
        call()
        done.set()

    threading.Thread(target=work, daemon=True).start()
    return done


def test_a_property_waits_for_the_lock_alone():
    """functools.cached_property has a lock of its own before Python 3.12: these two threads would never go on."""
    computed = []

    class Report:
        @synchronized_property
        def step(self):
            with exclusive():
                computed.append(self)
                return object()

    one, two, waiting = Report(), Report(), []

    def read_in_the_api():
        with exclusive():
            waiting.append(run_in_thread(lambda: one.step))
            time.sleep(0.2)  # the other thread is in the property
            assert two.step

    assert run_in_thread(read_in_the_api).wait(10) and waiting[0].wait(10)
    assert computed == [two, one] and one.step is one.step and one.step is not two.step and computed == [two, one]
    assert isinstance(Report.step, synchronized_property)


def test_no_other_property_is_kept_under_a_lock_of_its_own():
    sources = (Path(ane.__file__).parent).rglob("*.py")
    assert not [path.name for path in sources if re.search(r"import.*cached_property|functools\.cached_property$",
                                                           path.read_text(), re.M)]


def test_a_second_thread_waits_until_the_first_is_done(fixtures):
    with exclusive():
        done = run_in_thread(lambda: ane.lint(fixtures / IDLE))
        assert not done.wait(0.3)
    assert done.wait(MAX_WAIT_SECONDS)


def test_a_callback_may_call_the_api_in_its_thread(fixtures):
    seen = []

    def progress(text):
        seen.append(len(ane.lint(fixtures / IDLE).findings))

    assert ane.rewrite(fixtures / REWRITTEN, preset="full", seeds=1, progress=progress).changed
    assert len(seen) > 2


def test_the_lock_is_not_held_while_the_callers_code_runs(fixtures):
    with ane.torch_frontend.patched():
        assert run_in_thread(lambda: ane.lint(fixtures / IDLE)).wait(MAX_WAIT_SECONDS)
    package = ane.load(fixtures / REWRITTEN)
    assert run_in_thread(lambda: ane.rewrite(package)).wait(MAX_WAIT_SECONDS)


def test_the_lock_is_free_after_an_error(fixtures):
    with pytest.raises(ane.InputError):
        ane.lint("there-is-none.mlpackage")
    assert run_in_thread(lambda: ane.lint(fixtures / IDLE)).wait(MAX_WAIT_SECONDS)


def test_the_collector_is_on_again_when_the_last_thread_goes_on():
    inside, leave = threading.Event(), threading.Event()

    def other():
        with pause_garbage_collection():
            inside.set()
            leave.wait(MAX_WAIT_SECONDS)

    gc.enable()
    done = run_in_thread(other)
    inside.wait(MAX_WAIT_SECONDS)
    with pause_garbage_collection():
        leave.set()
        assert done.wait(MAX_WAIT_SECONDS) and not gc.isenabled(), "still paused by this thread"
    assert gc.isenabled()


FORK = """
import gc, os, signal, sys, threading
import mil_ane_passes as ane
from coremltools.converters.mil.mil import block, Builder as mb
from mil_ane_passes.utils.garbage_collection import pause_garbage_collection
from mil_ane_passes.utils.locking import exclusive
inside = threading.Event()

def other():
    with exclusive(), pause_garbage_collection():
        @mb.program(input_specs=[mb.TensorSpec((1,))])
        def program(x):
            inside.set()
            threading.Event().wait()

def child(check):
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        try:
            check()
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def lint():
    assert gc.isenabled() and not block.BLOCK_STACK
    assert ane.lint(sys.argv[1]).plan.rows

with exclusive():
    first = child(lint)  # forked within a call
threading.Thread(target=other, daemon=True).start()
inside.wait()
second = child(lint)  # forked while another thread works
print(first, second, flush=True)
os._exit(0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on Windows")
def test_a_forked_process_does_not_wait_for_a_thread_it_does_not_have(fixtures):
    done = subprocess.run([sys.executable, "-c", FORK, str(fixtures / IDLE)], capture_output=True, text=True,
                          timeout=2 * MAX_WAIT_SECONDS, env=hide_torch())
    assert done.stdout.split() == ["0", "0"], done.stderr
