"""Packages that tests of several commands copy."""

from __future__ import annotations

import pytest
from coremltools.converters.mil.mil import Builder as mb

from mil_ane_passes.passes.examples import build_program
from tests.conversions import save_program


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """A folder with found.mlpackage, which has a finding, and clean.mlpackage, which has none; tests copy them."""
    folder = tmp_path_factory.mktemp("made")
    save_program(build_program(lambda x: mb.cumsum(x=mb.relu(x=x), axis=1, name="sums"), x=(1, 8, 16)),
                 folder / "found.mlpackage")
    save_program(build_program(lambda x: mb.relu(x=x, name="y"), x=(1, 8, 16)), folder / "clean.mlpackage")
    return folder
