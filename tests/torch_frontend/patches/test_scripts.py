"""Whole scripted modules: attributes, branches on what is known, exceptions, defaults."""

from __future__ import annotations

import pytest
from torch import nn

from mil_ane_passes.torch_frontend import NotConverted

from ..grid.modules import MODULES, X3, Attributes, converted, module_outcome, scripted

REFUSED = {"encoder layer", "attention without weights"}
"What of the modules is refused, by name and in words."


class RaisesOnValues(nn.Module):
    def forward(self, x):
        if bool(x.sum() > 1e9):
            raise ValueError("too large")
        return x * 2


class RaisesAlways(nn.Module):
    def forward(self, x):
        if x.dim() != 2:
            raise ValueError("two dimensions")
        return x * 2


@pytest.mark.parametrize("name", MODULES)
def test_a_whole_scripted_module_is_right_or_refused(name):
    found = module_outcome(name, patched=True)
    assert found.verdict == ("refused" if name in REFUSED else "right"), found


def test_the_users_module_stays_as_it_is():
    module = scripted(Attributes)
    converted(module, X3)
    kinds = [node.kind() for node in module.forward.graph.nodes()]
    assert "prim::GetAttr" in kinds and "prim::If" in kinds and module.hop == 2


def test_an_exception_on_values_and_one_that_is_always_raised_are_refused():
    with pytest.raises(NotConverted, match=r"test_scripts\.py:\d+\): raises an exception on a condition that the model "
                                           "computes; leave the check out"):
        converted(scripted(RaisesOnValues), X3)
    with pytest.raises(NotConverted, match=r"test_scripts\.py:\d+\): raises an exception for inputs of these shapes"):
        converted(scripted(RaisesAlways), X3)
