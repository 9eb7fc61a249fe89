"""Worker processes of this machine: the death of one affects only its own job, and all stop on an interrupt.

Each is an executor of its own with one process, so that it is known which job a process was running when it died.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import current_process, get_context
from typing import Any

from ..core.coremltools_setup import WORKER_VARIABLE
from ..core.errors import InputError
from . import worker_process
from .job import OptionsError

__all__ = ["InProcessExecutor", "WorkerPool"]

_GUARD = 'put what the script does under `if __name__ == "__main__":`'
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
                             f"and called it again there; {_GUARD}")
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="mil-ane-passes")
        self._own = threading.local()
        self._pools: dict[ProcessPoolExecutor, Future[int]] = {}
        self._stopped = False
        each = str(max(1, (os.cpu_count() or 1) // count))
        wanted = {WORKER_VARIABLE: "1", **dict.fromkeys(_THREAD_SETTINGS, each)}
        self._set = {name: value for name, value in wanted.items() if name not in os.environ}
        os.environ.update(self._set)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return self._threads.submit(self._run, fn, args, kwargs)

    def _run(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        pool = self._pool()
        try:
            return pool.submit(worker_process.run_interruptibly, fn, *args, **kwargs).result()
        except BrokenProcessPool as error:
            self._own.pool = None
            started = self._pools.pop(pool, None)
            pool.shutdown()
            if started is not None and started.exception() is not None:
                raise OptionsError(f"batch: a worker process ended while it started, and may have printed why; in a "
                                   f"script, {_GUARD}") from error
            raise

    def _pool(self) -> ProcessPoolExecutor:
        """Return the executor of the calling thread."""
        pool: ProcessPoolExecutor | None = getattr(self._own, "pool", None)
        if pool is None:
            pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=worker_process.start_worker)
            with _block_interrupts():
                self._pools[pool] = pool.submit(os.getpid)
            self._own.pool = pool
        return pool

    def interrupt(self) -> None:
        """Interrupt the running jobs, so that they clean up, and drop the waiting ones."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._signal(signal.SIGINT)

    def _signal(self, number: int) -> None:
        for pid in list(self._pools.values()):
            if pid.done() and pid.exception() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid.result(), number)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        try:
            self._threads.shutdown(wait=wait, cancel_futures=cancel_futures)
        except KeyboardInterrupt:  # second interrupt: do not wait any longer
            self._signal(signal.SIGKILL)
            raise
        finally:
            for pool in list(self._pools):
                pool.shutdown(wait=wait, cancel_futures=cancel_futures)
            self._pools.clear()
            for name in self._set:
                os.environ.pop(name, None)
            self._set = {}


@contextlib.contextmanager
def _block_interrupts() -> Any:
    """Block interrupts, so that a process started meanwhile is not interrupted before it can handle that.

    `worker_process.start_worker` unblocks them.
    """
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
