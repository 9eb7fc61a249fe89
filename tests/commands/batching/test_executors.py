"""Whatever does the work, the results are the same; what dies takes only its own package with it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial

import pytest
import torch  # noqa: F401  (before it is hidden)

from mil_ane_passes import InputError, batch
from mil_ane_passes.commands.batch_executors import (
    WorkerPool,
    _run_interruptibly,
    _start_worker,
    connect_to_dask,
)
from mil_ane_passes.commands.main import main
from tests.without_torch import ABSENT, hide_torch

from .helpers import IDLE, REWRITTEN, ByPost, Deadly, files, packages, shown, statuses, write_late

DONE = {"c": "unchanged", "b": "written", "a": "unchanged"}


@pytest.fixture(autouse=True)
def workers_start_sooner(monkeypatch):
    """Workers look for modules where this process does; here they verify nothing, and need no torch."""
    monkeypatch.syspath_prepend(str(ABSENT))


@pytest.fixture(scope="module")
def three(fixtures, tmp_path_factory):
    return packages(fixtures, tmp_path_factory.mktemp("in"), c=IDLE, b=REWRITTEN, a=IDLE)


@pytest.fixture(scope="module")
def expected(three, tmp_path_factory):
    out = tmp_path_factory.mktemp("here")
    assert statuses(batch("rewrite", three, out)) == DONE
    return {name: files(out / name) for name in shown(out)}


def check(report, out, expected, without=""):
    assert statuses(report) == {**DONE, **dict.fromkeys(without, "failed")}
    assert list(statuses(report)) == ["c", "b", "a"]
    assert shown(out) == [name for name in expected if name[0] not in without]
    assert all(files(out / name) == expected[name] for name in shown(out))


def test_threads_take_turns(three, expected, tmp_path):
    with ThreadPoolExecutor(3) as executor:
        check(batch("rewrite", three, tmp_path, executor=executor), tmp_path, expected)


def test_an_executor_that_only_has_submit_and_small_jobs(three, expected, tmp_path):
    post = ByPost()
    check(batch("rewrite", three, tmp_path, executor=post), tmp_path, expected)
    assert len(post.posted) == 3 and max(post.posted) < 2000


@pytest.mark.slow
def test_a_process_pool(three, expected, tmp_path):
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor:
        check(batch("rewrite", three, tmp_path, executor=executor, verify=False), tmp_path, expected)


def test_a_pool_that_breaks_is_said_and_loses_nothing(three, tmp_path):
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor:
        report = batch("rewrite", three, tmp_path, executor=Deadly(executor, executor, "c", "b", "a"))
    assert set(statuses(report).values()) == {"failed"} and report.exit_code == 2
    assert "the worker process, or another one of the pool, died" in report.items[0].error
    with pytest.raises(InputError, match="both jobs and an executor"):
        batch("rewrite", three, tmp_path, executor=executor, jobs=2)
    ended = ThreadPoolExecutor(1)
    ended.shutdown()
    over = batch("rewrite", three, tmp_path, executor=ended)
    assert "cannot schedule new futures after shutdown" in over.items[0].error


def test_of_our_processes_only_one_dies_and_the_next_takes_its_place(three, expected, tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = dict(os.environ)
    with WorkerPool(1) as workers:
        first = workers.submit(os.getpid).result()
        report = batch("rewrite", three, tmp_path, executor=Deadly(workers, ByPost(), "c"))
        check(report, tmp_path, expected, without="c")
        assert "the worker process, or another one of the pool, died" in report.items[0].error
        assert workers.submit(os.getpid).result() != first
        assert workers.submit(os.getenv, "OMP_NUM_THREADS").result() == str(os.cpu_count())
    assert dict(os.environ) == before
    report = batch("rewrite", three, tmp_path)
    assert statuses(report) == {"c": "unchanged", "b": "up to date", "a": "up to date"}


ORPHAN = """
import os, sys, time
sys.argv = ["mil-ane-passes"]
from mil_ane_passes.commands.batch_executors import WorkerPool
if __name__ == "__main__":
    workers = WorkerPool(1)
    print(workers.submit(os.getpid).result(), flush=True)
    workers.submit(time.sleep, 600)
    time.sleep(600)
"""


@pytest.mark.slow
def test_a_script_without_a_guard_gets_advice(three, tmp_path):
    (tmp_path / "script.py").write_text(
        f"import mil_ane_passes as ane\nane.batch('lint', {three!r}, {str(tmp_path / 'out')!r}, jobs=2)\n")
    done = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True,
                          env=hide_torch())
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    expected = "mil_ane_passes.commands.batch_jobs.OptionsError: batch: a worker process ended during start-up"
    assert last.startswith(expected)
    assert last.endswith('under `if __name__ == "__main__":`')
    assert "is imported by each worker process" in done.stderr and "bootstrapping" not in done.stderr


@pytest.mark.slow
def test_a_worker_does_not_outlive_its_parent(tmp_path):
    (tmp_path / "parent.py").write_text(ORPHAN)
    with subprocess.Popen([sys.executable, tmp_path / "parent.py"], stdout=subprocess.PIPE, text=True,
                          env=hide_torch()) as parent:
        worker = int(parent.stdout.readline())
        time.sleep(0.3)  # so that it is at work
        os.kill(worker, 0)
        parent.kill()
    deadline = time.monotonic() + 30
    with pytest.raises(ProcessLookupError):
        while time.monotonic() < deadline:
            os.kill(worker, 0)
            time.sleep(0.05)


@pytest.mark.parametrize("starts", [False, True], ids=["a worker that is not there", "a worker that starts"])
def test_jobs_of_a_worker_that_starts_are_interrupted(starts, tmp_path):
    with WorkerPool(1) as workers:
        job = workers.submit(write_late, str(tmp_path / "done"))
        while starts and not workers._pools:
            time.sleep(0.001)
        workers.interrupt()
    assert job.cancelled() or isinstance(job.exception(), KeyboardInterrupt)
    assert not (tmp_path / "done").exists()


def test_an_idle_worker_that_is_interrupted_begins_no_job(tmp_path):
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), initializer=_start_worker) as pool:
        os.kill(pool.submit(os.getpid).result(), signal.SIGINT)
        assert isinstance(pool.submit(_run_interruptibly, write_late, str(tmp_path / "done")).exception(),
                          KeyboardInterrupt)
    assert not (tmp_path / "done").exists()


def test_a_worker_ignores_the_signals_that_its_parent_ignores(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with WorkerPool(1) as workers:
            os.kill(workers.submit(os.getpid).result(), signal.SIGHUP)
            assert workers.submit(len, "abc").exception() is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_cores_are_shared():
    with WorkerPool(2) as workers:
        assert os.environ["OPENBLAS_NUM_THREADS"] == str(max(1, os.cpu_count() // 2))
        assert workers.submit(len, "abc").result() == 3


@pytest.mark.slow
def test_a_dask_cluster_of_two_workers(three, expected, tmp_path, capsys):
    import dask
    from distributed import LocalCluster

    unverified = partial(batch, "rewrite", verify=False)
    with dask.config.set({"distributed.scheduler.allowed-failures": 0}), LocalCluster(
            n_workers=2, processes=True, threads_per_worker=1, dashboard_address=None) as cluster:
        address = cluster.scheduler_address
        assert main(["batch", "rewrite", *three, "-o", str(tmp_path / "a"), "--no-verify", "--dask", address]) == 0
        assert "3 packages" in capsys.readouterr().out
        report = unverified(three, tmp_path / "a")
        assert set(statuses(report).values()) == {"up to date"}
        assert {name: files(tmp_path / "a" / name) for name in shown(tmp_path / "a")} == expected
        said = []
        with connect_to_dask(address, say=said.append) as executor:
            report = unverified(three[1], tmp_path / "a", executor=Deadly(executor, executor, "b"), again=True)
    assert said == [] and statuses(report) == {"b": "failed"} and "KilledWorker" in report.items[0].error
    assert set(statuses(unverified(three, tmp_path / "a")).values()) == {"up to date"}


def test_a_cluster_without_workers_is_waited_for_and_said():
    from distributed import LocalCluster

    said = []
    with LocalCluster(n_workers=0, processes=False, dashboard_address=None, protocol="tcp://") as cluster, \
            connect_to_dask(cluster.scheduler_address, say=said.append):
        assert said == [f"the cluster at {cluster.scheduler_address} has no workers yet; waiting for workers"]


@pytest.mark.parametrize(("address", "words"), [("nonsense", "missing port"), ("tcp://127.0.0.1:1", "127.0.0.1:1")])
def test_a_scheduler_that_is_not_there(address, words, three, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("mil_ane_passes.commands.batch_executors._CONNECT_TIMEOUT", 1)
    assert main(["batch", "rewrite", *three, "-o", str(tmp_path), "--dask", address]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"mil-ane-passes: no Dask scheduler answers at {address} (") and words in said
    assert said.count("\n") == 1


def test_without_dask_the_extra_is_named(three, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "distributed", None)
    assert main(["batch", "rewrite", *three, "-o", str(tmp_path), "--dask", "tcp://127.0.0.1:1"]) == 2
    assert "pip install 'mil-ane-passes[dask]'" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "there", "words"), [
    ("describe_tool", lambda: {"version": "7.7", "code": "0123456789", "coremltools": "9.0", "plugins": []},
     "another mil-ane-passes or coremltools: found 7.7 (01234567, coremltools 9.0), expected "),
    ("RECORDS_FOLDER", "not-there", "does not see {folder}; workers need the same paths"),
])
def test_a_worker_elsewhere_must_be_the_same_tool_and_see_the_same_files(name, there, words, three, tmp_path,
                                                                         monkeypatch):
    class Elsewhere(ByPost):
        def submit(self, fn, /, *args, **kwargs):
            with monkeypatch.context() as context:
                context.setattr(f"mil_ane_passes.commands.batch_jobs.{name}", there)
                return super().submit(fn, *args, **kwargs)

    report = batch("rewrite", three, tmp_path, executor=Elsewhere())
    assert set(statuses(report).values()) == {"failed"} and shown(tmp_path) == []
    assert words.format(folder=tmp_path) in report.items[0].error
