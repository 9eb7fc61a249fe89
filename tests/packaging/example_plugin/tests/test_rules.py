"""The rules are held to what every rule of mil_ane_passes is held to."""

import pytest
from example_ane_rules import DropDoubleAbs, SoftmaxOfOne

from mil_ane_passes.testing import CHECKS


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("rule", [DropDoubleAbs, SoftmaxOfOne])
def test_rule(rule, check, tmp_path):
    check(rule, tmp_path)
