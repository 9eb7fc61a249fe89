"""The standard tests of a rule, for ours and for anybody's:

    import pytest
    from mil_ane_passes.testing import CHECKS

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_my_rule(check, tmp_path):
        check(MyRule, tmp_path)

They read the rule's `examples()` and need torch (the `verify` extra).
"""

from __future__ import annotations

from .checks import CHECKS, Check

__all__ = ["CHECKS", "Check"]
