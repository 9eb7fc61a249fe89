"""Files that arrays look into: found while others are released."""

from __future__ import annotations

import numpy as np

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


def test_a_file_that_is_released_during_the_search_does_not_end_it(monkeypatch):
    found = {}
    found.update({1: Released(found), 2: Released(found), 3: Released(found)})
    monkeypatch.setattr(mapped_files, "_mapped_files", found)
    assert mapped_files.file_of(np.zeros(3)) is None and set(found) == {1, 3}
