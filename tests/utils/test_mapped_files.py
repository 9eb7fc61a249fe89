"""Files that arrays look into: found while others are released."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from mil_ane_passes.utils import mapped_files


class Released:
    """A file that another one is released next to, as a finalizer does when garbage is collected in between."""

    def __init__(self, others):
        self._others = others

    @property
    def start(self):
        self._others.pop(2, None)
        return 0

    size = 1

    def check(self):
        """It is whole."""


def test_a_file_that_is_released_during_the_search_does_not_end_it(monkeypatch):
    found = {}
    found.update({1: Released(found), 2: Released(found), 3: Released(found)})
    monkeypatch.setattr(mapped_files, "_mapped_files", found)
    assert mapped_files.file_of(np.zeros(3)) is None and set(found) == {1, 3}


class Owner:
    """An array's owner in a cycle, so that only the collector of garbage releases its file."""

    def __init__(self):
        self.itself = self


@pytest.mark.parametrize("search", [lambda: mapped_files.file_of(np.zeros(3)), mapped_files.check_mapped_files])
def test_files_that_garbage_holds_may_be_released_at_any_time(monkeypatch, search):
    """Garbage is collected at each allocation of the search in turn."""
    found = {number: Released({}) for number in range(30)}
    monkeypatch.setattr(mapped_files, "_mapped_files", found)
    before = gc.get_threshold()
    gc.disable()
    try:
        for allocations in range(60):
            gc.collect()
            owner = Owner()
            found["held"] = Released({})
            weakref.finalize(owner, found.pop, "held", None).atexit = False
            del owner
            gc.set_threshold(gc.get_count()[0] + allocations)
            gc.enable()
            search()
            gc.disable()
    finally:
        gc.set_threshold(*before)
        gc.enable()
