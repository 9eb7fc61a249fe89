"""A short run of the fuzzer, and that it sees what it is there to see."""

from __future__ import annotations

import os

import pytest

import mil_ane_passes as ane

from .fixtures import build_fixtures
from .networks import build_networks
from .pool import iterate_outcomes, make_tries
from .tries import Tries


@pytest.fixture(scope="module")
def fixtures():
    return build_fixtures(["conv", "branches", "integers18", "state"])


def test_nothing_breaks_the_reader(fixtures):
    found = list(iterate_outcomes(fixtures, 7, list(range(80)), 1))
    assert {outcome.number for outcome in found} == set(range(80))
    assert [outcome for outcome in found if outcome.kind not in ("loaded", "refused")] == []
    assert min(sum(outcome.kind == kind for outcome in found) for kind in ("loaded", "refused")) > 15


@pytest.mark.parametrize(("error", "kind"), [
    (KeyError("x"), "exception"), (MemoryError(), "memory"), (RecursionError(), "exception"),
    (ane.InputError("two\nlines"), "unclear"), (ane.InputError("one line"), "refused"),
])
def test_what_is_not_in_our_words_is_a_failure(fixtures, tmp_path, monkeypatch, error, kind):
    def load(path):
        raise error

    monkeypatch.setattr(ane, "load", load)
    assert Tries(fixtures, 7, tmp_path / "tries").run(3).kind == kind


def test_a_package_that_comes_back_changed_is_a_failure(fixtures, tmp_path, monkeypatch):
    save = ane.save

    def careless(package, path):
        save(package, path)
        (path / "Manifest.json").write_text("{}")

    monkeypatch.setattr(ane, "save", careless)
    tries = Tries(fixtures, 7, tmp_path / "tries")
    found = {tries.run(number).kind for number in range(12)}
    assert "exception" in found and "loaded" not in found


def test_time_and_memory_are_watched(fixtures, tmp_path, monkeypatch):
    monkeypatch.setattr("tests.lab.fuzz.tries.MAX_PROCESSOR_SECONDS", 0.2)

    def endless(path):
        while True:
            pass

    monkeypatch.setattr(ane, "load", endless)
    tries = Tries(fixtures, 7, tmp_path / "tries")
    assert tries.run(3).kind == "hang"

    def greedy(path):
        bytearray(400 << 20).count(1)
        raise ane.InputError("refused too late")

    monkeypatch.setattr(ane, "load", greedy)
    monkeypatch.setattr("tests.lab.fuzz.tries.MAX_PROCESSOR_SECONDS", 9.0)
    assert tries.run(3).kind == "memory"


@pytest.mark.slow
def test_a_child_that_dies_fails_its_try_and_no_other(fixtures, monkeypatch):
    run = Tries.run

    def fatal(self, number):
        if number == 3:
            os._exit(9)
        return run(self, number)

    monkeypatch.setattr(Tries, "run", fatal)
    found = {outcome.number: outcome.kind for outcome in iterate_outcomes(fixtures, 7, list(range(8)), 2)}
    assert set(found) == set(range(8)) and found[3] == "crash" and list(found.values()).count("crash") == 1


def test_a_try_is_the_same_each_time(fixtures, tmp_path):
    def files(folder):
        made = Tries(fixtures, 7, folder).make(5)
        return {str(path.relative_to(made)): path.read_bytes() for path in made.rglob("*") if path.is_file()}

    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_nothing_breaks_the_upgrade_of_networks():
    found = list(iterate_outcomes(build_networks(["image", "shapes", "loop"]), 7, list(range(20)), 1))
    assert [outcome for outcome in found if outcome.kind not in ("loaded", "refused")] == []
    assert min(sum(outcome.kind == kind for outcome in found) for kind in ("loaded", "refused")) > 3


def test_a_file_of_a_network_is_the_same_each_time(tmp_path):
    made = [make_tries(build_networks(["image"]), 7, tmp_path / name).make(5).read_bytes() for name in "ab"]
    assert made[0] == made[1]
