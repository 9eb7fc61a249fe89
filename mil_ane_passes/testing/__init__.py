"""The standard tests of a rule, for ours and for anybody's:

    import pytest
    from mil_ane_passes.testing import CHECKS

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_my_rule(check, tmp_path):
        check(MyRule, tmp_path)

They read the rule's `examples()`, at least one that fires and one that does not, and need torch (the `verify` extra).
The rule need not be installed for them. To write one, these modules are there for others too, not for us alone:

- `mil_ane_passes.core.contract`: `Rule`, `Rewrite` and their kinds, `Hit`, `Miss`, `Example`, `Exactness`, evidence;
- `mil_ane_passes.core.examples`: short ways to build the programs of `examples()`;
- `mil_ane_passes.core.query`: questions about ops and values; `core.targets`: the generations of a rule
(`get_generations_between`);
- `mil_ane_passes.core.builder`: the builder that `rewrite()` is given.

A distribution names its rules under the entry point group `mil_ane_passes.rules` (see `core.plugins`), with codes of
its own: capital letters and digits, such as ACME101. ANE and digits are refused: a later version may give them out.
"""

from __future__ import annotations

from .checks import CHECKS, Check

__all__ = ["CHECKS", "Check"]
