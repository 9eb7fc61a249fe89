"""Executors of batch jobs: this process, worker processes of this machine, or a Dask cluster.

The death of a worker process affects only its own job, and all stop on an interrupt.

Each is an executor of its own with one process, so that it is known which job a process was running when it died.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import current_process, get_context
from multiprocessing.connection import wait
from types import FrameType
from typing import Any

from ..package.staging import close_all_stagings
from ..passes.coremltools_setup import WORKER_VARIABLE, hide_optional_packages, is_importing
from ..utils.errors import InputError
from .batch_jobs import Job, OptionsError, run_job
from .batch_report import BatchItem, BatchReport

__all__ = ["InProcessExecutor", "JobRunner", "WorkerPool", "connect_to_dask"]


_GUARD = 'put the code of the script under `if __name__ == "__main__":`'
_CLEANUP_SECONDS = 60.0
"Seconds for a job to clean up after its parent has died."
_THREAD_SETTINGS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


class InProcessExecutor(Executor):
    """Executor that runs each job immediately, in this process."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class WorkerPool(Executor):
    """Executor of `count` processes, each started when there is a job for it; they share the processor's cores.

    A job whose process dies raises BrokenProcessPool, and a new process replaces it. While there are workers, the
    environment variables that set the number of threads of numeric libraries are set in this process, unless they are
    set already: the workers inherit them. Raises InputError in a process that is only starting as a worker; its jobs
    raise OptionsError where no worker could start.
    """

    def __init__(self, count: int) -> None:
        if getattr(current_process(), "_inheriting", False):  # as multiprocessing asks before it starts a process
            raise InputError(f"batch: the script that called it with jobs={count} is imported by each worker process, "
                             f"which called it again; {_GUARD}")
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="mil-ane-passes")
        self._own = threading.local()
        self._pools: dict[ProcessPoolExecutor, Future[int]] = {}
        self._stopped = False
        each = str(max(1, (os.cpu_count() or 1) // count))
        wanted = {WORKER_VARIABLE: "1", **dict.fromkeys(_THREAD_SETTINGS, each)}
        self._set = {name: value for name, value in wanted.items() if name not in os.environ}
        os.environ.update(self._set)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return self._threads.submit(self._run_in_pool, fn, args, kwargs)

    def _run_in_pool(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        pool = self._get_pool()
        if self._stopped:
            raise KeyboardInterrupt
        try:
            return pool.submit(_run_interruptibly, fn, *args, **kwargs).result()
        except BrokenProcessPool as error:
            self._own.pool = None
            started = self._pools.pop(pool, None)
            pool.shutdown()
            if started is not None and started.exception() is not None:
                raise OptionsError(f"batch: a worker process ended during start-up (it may have printed the reason); "
                                   f"in a script, {_GUARD}") from error
            raise

    def _get_pool(self) -> ProcessPoolExecutor:
        """Return the executor of the calling thread."""
        pool: ProcessPoolExecutor | None = getattr(self._own, "pool", None)
        if pool is None:
            pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_start_worker)
            with _block_interrupts():
                self._pools[pool] = pool.submit(os.getpid)
            self._own.pool = pool
        return pool

    def interrupt(self) -> None:
        """Interrupt the running jobs, so that they clean up, and drop the waiting ones; those of workers that are
        starting end when they begin."""
        self._stopped = True  # before the pools are listed: a thread reads it after it has added its own
        self._threads.shutdown(wait=False, cancel_futures=True)
        for pid in list(self._pools.values()):
            pid.add_done_callback(partial(_signal_worker, signal.SIGINT))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        try:
            self._threads.shutdown(wait=wait, cancel_futures=cancel_futures)
        except KeyboardInterrupt:  # second interrupt: do not wait any longer
            for pid in list(self._pools.values()):
                if pid.done():
                    _signal_worker(signal.SIGKILL, pid)
            raise
        finally:
            for pool in list(self._pools):
                pool.shutdown(wait=wait, cancel_futures=cancel_futures)
            self._pools.clear()
            for name in self._set:
                os.environ.pop(name, None)
            self._set = {}


def _signal_worker(number: int, pid: Future[int]) -> None:
    """Send a signal to the worker of which `pid` is known, if it has started."""
    if not pid.cancelled() and pid.exception() is None:
        with contextlib.suppress(ProcessLookupError):  # it may have ended since its pid was read
            os.kill(pid.result(), number)


class _WorkerState:
    is_busy = False
    interrupted = False
    idle = threading.Event()


def _start_worker() -> None:
    """Initialize a worker; runs in its main thread, with interrupts blocked."""
    _WorkerState.idle.set()
    signal.signal(signal.SIGINT, _handle_interrupt)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup
        signal.signal(signal.SIGHUP, _handle_interrupt)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_watch_parent, daemon=True).start()
    hide_optional_packages()


def _run_interruptibly(job: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Run `job` and return its result; an interrupt ends it."""
    _WorkerState.idle.clear()
    _WorkerState.is_busy = True
    try:
        if _WorkerState.interrupted:
            raise KeyboardInterrupt
        return job(*args, **kwargs)
    finally:
        _WorkerState.is_busy = False
        _WorkerState.idle.set()


def _handle_interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt in the running job, or the next one if there is none.

    It is raised once: a second interrupt must not stop the cleanup.
    """
    is_first, _WorkerState.interrupted = not _WorkerState.interrupted, True
    if _WorkerState.is_busy and is_first:
        if is_importing(frame):  # an import may swallow the exception
            close_all_stagings()
            os._exit(1)
        raise KeyboardInterrupt


def _watch_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)  # interrupts any wait of the main thread
        _WorkerState.idle.wait(_CLEANUP_SECONDS)
        os._exit(1)


@contextlib.contextmanager
def _block_interrupts() -> Any:
    """Block interrupts, so that a process started meanwhile is not interrupted before it can handle that.

    `_start_worker` unblocks them.
    """
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


_CONNECT_TIMEOUT = 8
"Seconds until a scheduler counts as unreachable."


@contextlib.contextmanager
def connect_to_dask(address: str, say: Callable[[str], object] = lambda text: None) -> Iterator[Executor]:
    """Connect to the workers of the scheduler at `address`, e.g. tcp://10.0.0.1:8786.

    They need the same paths and packages.

    If the cluster has no workers yet, work waits for them, as it may start them on demand; `say` gets a message then.
    Raises InputError when `distributed` is not installed, or the scheduler does not answer within 8 seconds.
    """
    try:
        from distributed import Client
    except ImportError as error:
        raise InputError(f"running on a Dask cluster needs distributed, which cannot be imported ({error}): "
                         "pip install 'mil-ane-passes[dask]'") from error
    logging.getLogger("distributed").setLevel(logging.ERROR)
    try:
        client: Any = Client(address, timeout=_CONNECT_TIMEOUT, set_as_default=False)
    except Exception as error:  # another kind of server may answer, which can raise anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"no Dask scheduler answers at {address} ({reason}); expected the address printed by `dask "
                         f"scheduler`, e.g. tcp://10.0.0.1:8786") from error
    with client:
        if not client.scheduler_info()["workers"]:
            say(f"the cluster at {address} has no workers yet; waiting for workers")
        yield client.get_executor(pure=False)


_BROKEN = ("the worker process, or another one of the pool, died; possibly out of memory: use fewer jobs. The next "
           "run skips completed packages")


class JobRunner:
    """The jobs of one batch on an executor.

    Only `submit` of the executor is used, and methods that all futures have.
    """

    def __init__(
        self, executor: Executor, report: BatchReport, work: dict[int, Job], progress: Callable[[str], None],
    ) -> None:
        self._executor, self._report, self._work, self._progress = executor, report, work, progress
        self._ended: queue.SimpleQueue[tuple[int, Future[Any]]] = queue.SimpleQueue()
        self._running: dict[int, Future[Any]] = {}
        self._left = len(work)

    def go(self) -> None:
        try:
            for number, job in self._work.items():
                self._submit_job(number, job)
                self._collect_ended_jobs(wait=False)
            while self._running:
                self._collect_ended_jobs(wait=True)
        except BaseException:
            self._stop_jobs()
            raise

    def _submit_job(self, number: int, job: Job) -> None:
        self._progress(self._format_progress(job.name))
        try:
            future = self._executor.submit(run_job, job)
        except (BrokenExecutor, RuntimeError) as error:
            self._record_result(number, None, error)
            return
        self._running[number] = future
        future.add_done_callback(lambda done: self._ended.put((number, done)))

    def _collect_ended_jobs(self, wait: bool) -> None:
        """Collect the jobs that have ended; with `wait`, wait until one has."""
        while self._running and (wait or not self._ended.empty()):
            number, future = self._ended.get()
            wait = False
            del self._running[number]
            try:
                self._record_result(number, future.result(), None)
            except (KeyboardInterrupt, OptionsError):
                raise
            except BaseException as error:  # that a future was cancelled is an Exception for some and none for others
                self._record_result(number, None, error)

    def _record_result(self, number: int, done: BatchItem | None, error: BaseException | None) -> None:
        self._left -= 1
        item = self._report.items[number]
        if done is not None:
            done.source = item.source
            self._report.items[number] = done
            _check_report_visible(done)
        else:
            item.status = "failed"
            words = " ".join(f"{type(error).__name__}: {error}".split())
            item.error = f"{_BROKEN} ({words})" if isinstance(error, BrokenExecutor) else f"not run ({words})"
        self._progress(self._format_progress(item.name))

    def _format_progress(self, name: str) -> str:
        total = len(self._report.items)
        return f"{total - self._left} of {total} done; {name}"

    def _stop_jobs(self) -> None:
        """Stop running jobs and drop waiting ones; jobs that finished meanwhile count."""
        for future in self._running.values():
            future.cancel()
        if isinstance(self._executor, WorkerPool):
            self._executor.interrupt()
            self._executor.shutdown()
        while not self._ended.empty():
            number, future = self._ended.get()
            if not future.cancelled() and future.exception() is None:
                self._record_result(number, future.result(), None)


def _check_report_visible(item: BatchItem) -> None:
    """Mark the item as failed if its report is not visible here: a remote worker may have written to its own disk."""
    if item.report_file is not None and not os.path.exists(item.report_file):
        item.status, item.code, item.report_file = "failed", 2, None
        item.error = (f"a worker reported that it wrote {item.output}, but the file does not exist here; workers need "
                      f"the same paths: use a shared file system")
