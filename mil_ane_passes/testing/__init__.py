"""Standard tests of a rule, for our rules and those of plugins:

    import pytest
    from mil_ane_passes.testing import select_checks

    @pytest.mark.parametrize("check", select_checks(MyRule), ids=lambda check: check.__name__)
    def test_my_rule(check, tmp_path):
        check(MyRule, tmp_path)

They read the rule's `examples()`, at least one that fires and one that does not, and need torch (the `verify` extra).
The rule need not be installed for them. These modules are public, for writing rules:

- `mil_ane_passes.passes.contract`: `Rule`, `Rewrite` and their kinds, `Hit`, `Miss`, `Example`, `Exactness`, evidence;
- `mil_ane_passes.passes.examples`: helpers that build the programs of `examples()`;
- `mil_ane_passes.ir.query`: queries about ops and values; `passes.targets`: the generations of a rule
  (`get_generations_between`);
- `mil_ane_passes.ir.builder`: the builder that is passed to `rewrite()`.

A distribution names its rules under the entry point group `mil_ane_passes.rules` (see `passes.plugins`), with codes of
its own: capital letters and digits, such as ACME101. Codes of ANE and digits are rejected: a later version may use
them.
"""

from __future__ import annotations

from .checks import CHECKS, Check, select_checks

__all__ = ["CHECKS", "Check", "select_checks"]
