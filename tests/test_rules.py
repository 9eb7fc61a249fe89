"""Every rule that is found is held to the standard checks; nothing here names a rule."""

from __future__ import annotations

import pytest

from mil_ane_passes.passes.registry import get_all_rules
from mil_ane_passes.testing import CHECKS


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("rule", get_all_rules().values(), ids=lambda rule: rule.name)
def test_rule(rule, check, tmp_path):
    check(rule, tmp_path)
