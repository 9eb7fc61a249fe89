"""Predictions for the M4 against what Core ML answered there, op by op and network by network."""

from __future__ import annotations

import pytest

from tests.lab.versions.needs import coremltools_from

from . import agreement
from .m4_cases import CASES, alone, context, estimates, in_order, networks, signature

pytestmark = coremltools_from("9.0", "does not wrap indices: its models are not those that were measured")


def test_the_cases_are_those_that_were_measured():
    assert len(CASES) == 276
    assert set(estimates()) <= set(CASES) and set(networks()) <= set(CASES)


@pytest.mark.parametrize("name", estimates())
def test_a_case_holds_the_ops_that_were_measured(name):
    built = [signature(op) for op in in_order(alone(name))]
    seen = [(row["op_type"], row["out_dtype"], row["out_shape"]) for row in estimates()[name]]
    assert [(kind, "-", "-") if told[1] == "-" else (kind, *rest)
            for (kind, *rest), told in zip(built, seen, strict=True)] == seen


@pytest.mark.sampled(30)
@pytest.mark.parametrize("name", networks())
def test_a_network_holds_the_ops_that_were_measured(name):
    assert [op.op_type for op in in_order(context(name))] == [
        text.split(":")[0] for text in networks()[name]["ops"].split(";")]


def test_what_the_ane_takes_is_predicted():
    assert list(agreement.disagreements()) == []


_BY_KIND = """
    tan asin acos sinh cosh atanh mod scatter scatter_along_axis lstm gru band_part sliding_windows crop_resize
    random_normal"""
REFUSED = {name: kinds.split() for name, kinds in {
    **{kind: kind for kind in _BY_KIND.split()},
    "reduce_prod_c": "reduce_prod", "cumsum_w": "cumsum", "cumsum_c": "cumsum", "nms": "non_maximum_suppression",
    "add_i32": "add", "matmul_i32": "matmul", "cast_i32_f16": "cast", "cast_f16_i8": "cast cast", "quantize_i8": "cast",
    "embedding": "cast cast greater_equal add select cast gather", "gather_along_axis": "cast",
    "relu_c65537": "relu", "relu_h65537": "relu", "sw_matmul_k40000": "matmul",
    "conv_k17": "conv", "conv_k1x31": "conv",
    **{f"sw_conv_k{kernel}": "conv" for kernel in ("1x17", "1x32", "64x1")},
    **{f"sw_maxpool_k{window}": "max_pool" for window in ("13", "14", "1x9")},
}.items()}
"""What is unsupported in the models whose rows nobody gave us, as the notes published with the data tell it in
words."""


@pytest.mark.slow
def test_models_without_published_rows_are_answered_as_the_notes_say():
    plans = {name: agreement.plan_alone(name).rows for name in CASES if name not in estimates()}
    refused = {name: found for name, rows in plans.items()
               if (found := [row.op.op_type for row in rows if row.ane == "no"])}
    assert refused == REFUSED
    assert [name for name, rows in plans.items() if any(row.ane == "unknown" for row in rows)] == []


@pytest.mark.parametrize("backend", ["ane", "bnns", "classic"])
def test_estimates_are_those_that_were_published(backend):
    found = agreement.errors()[backend]
    assert len(found) > 100
    assert found[-1] < 1e-12, "a law or a size has changed"


def test_shares_of_a_network_are_those_that_were_published():
    assert agreement.shares()[-1] < 5.1e-5, "more than the rounding of four digits"


@pytest.mark.parametrize("name", networks())
def test_a_partition_is_the_measured_one_or_costs_the_same(name):
    assert agreement.judged(name) in ("equal", "of equal cost")


def test_backends_of_ops_alone_are_the_selected_ones():
    wrong = [(name, row["op_type"], row["selected"], told.engine) for name, rows in estimates().items()
             for row, told in zip(rows, agreement.plan_alone(name).rows, strict=True)
             if row["source"] == "analytics" and row["selected"] != told.engine]
    assert wrong == []


def test_the_table_of_agreement_names_what_was_compared():
    found = agreement.table()
    assert f"{len(networks())} networks" in found and "0 wrong" in found
