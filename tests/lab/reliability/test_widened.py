"""A package of a few KB declares values of many GB: linting and rewriting take no memory and no time for them."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

import mil_ane_passes as ane
from mil_ane_passes.passes.registry import get_all_rules
from mil_ane_passes.utils.errors import AnePassesError

from .widened import (
    collect_extents,
    convert_program,
    iterate_examples,
    iterate_hostile_scatters,
    limit_memory,
    make_range_model,
    make_relu_model,
    widen_model,
    write_package,
)

MEMORY, SECONDS = 400 << 20, 6.0
FAST = ("constant_range", "scatter_as_slices", "chain_max_pool", "finite_mask", "lopsided", "constant_band_part",
        "one_hot_compare")
"Rules that make arrays or lists of sizes that a package declares, or once did."
NOT_CONVERTED = ("custom_layer", "classifier_label")
"Rules whose examples coremltools does not convert as they are: custom layers, and strings as outputs."


def lint_and_rewrite(path: Path, options=None) -> None:
    """Lint and rewrite a package within the bounds."""
    started = time.process_time()
    with limit_memory(MEMORY):
        ane.lint(path, options=options)
        ane.rewrite(path, preset="full", verify=False)
    assert time.process_time() - started < SECONDS


def lint_and_rewrite_examples(names, folder: Path) -> int:
    """All examples of these rules, one axis after the other a few million times as long; how many there were."""
    count = 0
    for name in names:
        for number, (example, options, model) in enumerate(iterate_examples(get_all_rules()[name])):
            spec, place = model.get_spec(), folder / f"{name}_{number}"
            place.mkdir()
            for extent in collect_extents(spec):
                path = write_package(place, model, widen_model(spec, extent))
                try:
                    lint_and_rewrite(path, {name: options} if options else None)
                except AnePassesError:  # more elements than can be counted, or indices that are outside now
                    pass
                except BaseException as error:
                    error.add_note(f"rule {name}, example '{example}', axis of {extent}")
                    raise
                count += 1
    return count


@pytest.mark.slow
def test_rules_make_nothing_of_the_size_that_a_package_declares(tmp_path):
    assert lint_and_rewrite_examples(FAST, tmp_path) > 50


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in get_all_rules() if name not in (*FAST, *NOT_CONVERTED)])
def test_no_rule_makes_anything_of_the_size_that_a_package_declares(name, tmp_path):
    lint_and_rewrite_examples([name], tmp_path)


@pytest.mark.parametrize("count", [1 << 28, (1 << 31) - 1])
def test_range(count, tmp_path):
    lint_and_rewrite(write_package(tmp_path, *make_range_model(count)))


@pytest.mark.parametrize("count", [(1 << 53) - 111, (1 << 61) - 1, (1 << 63) - 1, 1 << 62])
def test_divisors(count, tmp_path):
    lint_and_rewrite(write_package(tmp_path, *make_relu_model(count)))


@pytest.mark.parametrize(("name", "program"), iterate_hostile_scatters(), ids=lambda value: str(value)[:30])
def test_scatters(name, program, tmp_path):
    model = convert_program(program)
    lint_and_rewrite(write_package(tmp_path, model, model.get_spec()))


@pytest.mark.slow
def test_the_command_says_what_a_range_is(tmp_path):
    """As users call it: the limit holds for all that the process does."""
    path = write_package(tmp_path, *make_range_model((1 << 31) - 1))
    made = subprocess.run([sys.executable, "-m", "mil_ane_passes", "lint", str(path)], capture_output=True, text=True)
    assert made.returncode == 1 and "range" in made.stdout and not made.stderr
