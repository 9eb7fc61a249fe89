"""Passes of coremltools on a few random programs, and that each kind of fault is seen."""

from __future__ import annotations

import numpy as np
import pytest
from coremltools.converters.mil.mil.passes.graph_pass import AbstractGraphPass
from coremltools.converters.mil.mil.passes.pass_registry import PASS_REGISTRY

from mil_ane_passes.ir.query import iterate_ops

from .fuzz_passes.__main__ import iterate_faults
from .fuzz_passes.chains import draw_chain


def list_faults(seeds, plain=False):
    chains = ((seed, draw_chain(seed)) for seed in seeds)
    return [fault for seed, chain in chains if chain is not None for fault in iterate_faults(seed, chain, plain)]


def test_a_seed_is_always_the_same_program():
    first, second = draw_chain(3), draw_chain(3)
    kinds, others = ([op.op_type for _, op in iterate_ops(chain.program)] for chain in (first, second))
    assert kinds == others and first.shape == second.shape
    assert all(np.array_equal(one[0], other[0]) for one, other in zip(first.constants, second.constants, strict=True))


def test_corrected_passes_keep_results():
    assert list_faults(range(20)) == []


@pytest.mark.slow
def test_corrected_passes_keep_results_of_many_programs():
    assert list_faults(range(10000, 10600)) == []


@pytest.mark.slow
def test_coremltools_own_passes_have_faults():
    """They are found with the same programs; a coremltools without them needs no corrections."""
    kinds = {fault.kind for fault in list_faults(range(300), plain=True)}
    assert kinds == {"wrong", "fails", "changes a constant"}


@pytest.mark.parametrize("kind", ["wrong", "fails", "changes a constant"])
def test_a_fault_is_seen(kind, monkeypatch):
    chain = draw_chain(1)

    def apply(self, program):
        if kind == "fails":
            raise AttributeError("planted")
        if kind == "changes a constant":
            chain.constants[0][0][...] += 1
        else:
            block = program.functions["main"]
            with block:
                from coremltools.converters.mil.mil import Builder as mb

                block.set_outputs([mb.add(x=var, y=1.0) for var in block.outputs])

    planted = type("planted", (AbstractGraphPass,), {"apply": apply})
    monkeypatch.setitem(PASS_REGISTRY.passes, "common::fuse_gelu_exact", planted)
    assert [fault.kind for fault in iterate_faults(1, chain)] == [kind]
