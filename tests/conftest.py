"""Paths and states that several folders of tests share."""

from __future__ import annotations

import gc
import logging
import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

from tests.sampling import leave_to_slow

# The same draws in every run, so that a change is not blamed for what it did not do; the slow run draws anew.
settings.register_profile("few", max_examples=10, deadline=None, derandomize=True)
settings.register_profile("many", max_examples=250, deadline=None)

if "PYTEST_XDIST_WORKER_COUNT" in os.environ:  # before torch is there: tests side by side share the cores
    share = max(1, (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))
    os.environ.setdefault("OMP_NUM_THREADS", str(share))

#: modules of tests that start processes of a minute or more
LONGEST = ("tests/lab/upstream/", "tests/packaging/", "tests/test_readme.py", "tests/lab/versions/")
FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"


def pytest_configure(config):
    settings.load_profile("many" if _asks_for_slow(config) else "few")
    if not _asks_for_slow(config):
        _draw_the_same_whatever_is_imported()
    if config.pluginmanager.hasplugin("xdist"):
        from xdist.workermanage import NodeManager

        NodeManager.EXIT_TIMEOUT = 300  # under coverage a worker writes its data as it ends: killed, it leaves none
    if config.option.collectonly:
        _import_tests_without_rewriting_assertions()


def _draw_the_same_whatever_is_imported():
    """Keep hypothesis from drawing constants out of the modules imported so far, all of which it reads and parses.

    They are others on each worker and after each change of the code; and reading them takes seconds.
    """
    from hypothesis.internal.conjecture import providers

    if hasattr(providers, "_get_local_constants") and hasattr(providers, "Constants"):  # not in all versions
        constants = providers.Constants()
        providers._get_local_constants = lambda: constants


def _import_tests_without_rewriting_assertions():
    """Leave out what makes failing assertions readable, a third of the collection: none will run."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "AssertionRewritingHook"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Run the longest modules first, so that no process waits for them at the end; the slow run has the laws, too."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))
    leave_to_slow(items)
    if _asks_for_slow(config):
        for item in items:
            if item.get_closest_marker("law"):
                item.add_marker("slow")


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    """Skips where the model to be tested cannot be had from an older coremltools."""
    try:
        return (yield)
    except (ValueError, RuntimeError) as error:
        from tests.lab.versions.needs import unable

        if reason := unable(error):
            pytest.skip(reason)
        raise


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Look for no garbage while the tests are imported: what is imported stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish(session):
    """coremltools looks for garbage at the end of each conversion: half a second each, among all that is collected."""
    if not session.config.option.collectonly:
        gc.collect()
    gc.freeze()
    # Programs are large and short-lived: looking at the young ones each 700 objects is a tenth of the CPU time.
    gc.set_threshold(50_000)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    """What the tests of a file leave behind, once their fixtures are gone, is not looked through either."""
    done = yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()
    return done


def _asks_for_slow(config):
    return config.getoption("markexpr") == "slow"


@pytest.fixture(scope="session", autouse=True)
def faster_conversions(request):
    """Convert without what coremltools and torch repeat in each conversion; the slow run leaves nothing out."""
    if _asks_for_slow(request.config):
        yield
        return
    from tests.faster_conversions import skip_repeated_work

    with pytest.MonkeyPatch.context() as monkeypatch:
        skip_repeated_work(monkeypatch)
        yield


@pytest.fixture(scope="session")
def fixtures() -> Path:
    """The folder of small packages."""
    return FIXTURES


@pytest.fixture
def clean_registry():
    """Rules that a test adds are forgotten afterwards, by us and by coremltools."""
    from coremltools.converters.mil.mil.passes.pass_registry import PASS_REGISTRY

    from mil_ane_passes.passes.registry import reset_registry

    known = dict(PASS_REGISTRY.passes)
    reset_registry()
    yield
    reset_registry()
    PASS_REGISTRY.passes.clear()
    PASS_REGISTRY.passes.update(known)


@pytest.fixture
def leaving_out():
    """For tests of how passes that break the equivalence check are left out."""


@pytest.fixture(autouse=True)
def nothing_left_out(request, monkeypatch):
    """Elsewhere no pass may break an equivalence check: were one left out, the test would pass without it."""
    if "leaving_out" not in request.fixturenames:
        monkeypatch.setattr("mil_ane_passes.commands.rewrite_steps.MAX_PASSES_LEFT_OUT", 0)


@pytest.fixture(autouse=True)
def keep_log_level():
    """Restore the log level of coremltools, which generate.py sets for its process."""
    logger = logging.getLogger("coremltools")
    level = logger.level
    yield
    logger.setLevel(level)
