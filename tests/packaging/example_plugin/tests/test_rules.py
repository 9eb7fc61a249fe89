"""The rules are held to what every rule of mil_ane_passes is held to."""

import pytest
from example_ane_rules import DropDoubleAbs, SoftmaxOfOne

from mil_ane_passes.testing import select_checks


@pytest.mark.parametrize(
    "rule, check", [(rule, check) for rule in (DropDoubleAbs, SoftmaxOfOne) for check in select_checks(rule)],
    ids=lambda value: value.__name__)
def test_rule(rule, check, tmp_path):
    check(rule, tmp_path)
