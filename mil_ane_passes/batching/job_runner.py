"""Execution of a batch's jobs on an executor: submits them, collects results, and stops all on an interrupt."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Executor, Future
from typing import Any

from ..report.batch import BatchItem, BatchReport
from .job import Job, OptionsError, run_job
from .workers import WorkerPool

__all__ = ["JobRunner"]

_BROKEN = ("the process that worked on it, or one beside it, died; it may have been killed for want of memory: "
           "fewer jobs at a time need less. What is done is not done again by the next run")


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
                self._submit(number, job)
                self._collect(wait=False)
            while self._running:
                self._collect(wait=True)
        except BaseException:
            self._stop()
            raise

    def _submit(self, number: int, job: Job) -> None:
        self._progress(self._words(job.name))
        try:
            future = self._executor.submit(run_job, job)
        except (BrokenExecutor, RuntimeError) as error:
            self._note(number, None, error)
            return
        self._running[number] = future
        future.add_done_callback(lambda done: self._ended.put((number, done)))

    def _collect(self, wait: bool) -> None:
        """Collect the jobs that have ended; with `wait`, wait until one has."""
        while self._running and (wait or not self._ended.empty()):
            number, future = self._ended.get()
            wait = False
            del self._running[number]
            try:
                self._note(number, future.result(), None)
            except (KeyboardInterrupt, OptionsError):
                raise
            except BaseException as error:  # that a future was cancelled is an Exception for some and none for others
                self._note(number, None, error)

    def _note(self, number: int, done: BatchItem | None, error: BaseException | None) -> None:
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
        self._progress(self._words(item.name))

    def _words(self, name: str) -> str:
        total = len(self._report.items)
        return f"{total - self._left} of {total} done; {name}"

    def _stop(self) -> None:
        """Stop running jobs and drop waiting ones; jobs that finished meanwhile count."""
        for future in self._running.values():
            future.cancel()
        if isinstance(self._executor, WorkerPool):
            self._executor.interrupt()
            self._executor.shutdown()
        while not self._ended.empty():
            number, future = self._ended.get()
            if not future.cancelled() and future.exception() is None:
                self._note(number, future.result(), None)


def _check_report_visible(item: BatchItem) -> None:
    """Mark the item as failed if its report is not visible here: a remote worker may have written to its own disk."""
    if item.report_file is not None and not os.path.exists(item.report_file):
        item.status, item.code, item.report_file = "failed", 2, None
        item.error = (f"a worker says that it wrote {item.output}, which is not here; workers need the same paths: "
                      "give them on a file system that all of them have")
