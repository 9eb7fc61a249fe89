"""Findings of wrong numbers in a program, as `lint` reports them, without a prediction of where its ops run."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from coremltools.converters.mil.mil import Program

from ..passes.contract import Hit, Rewrite
from ..passes.finding import Finding, build_finding
from ..passes.rule_selection import configure_rules
from ..passes.severity import Severity
from ..utils.text_format import format_count
from .fixes import attach_fixes, names_of_fixes
from .prediction import iterate_rule_results

__all__ = ["find_wrong_numbers", "format_wrong_numbers"]


def find_wrong_numbers(program: Program, target: str, *, keeps_interface: bool = False) -> list[Finding]:
    """Find the ops of `program` whose values on the ANE of `target` differ from their definition.

    With `keeps_interface`, rewrites that change inputs or outputs are left out. Only the rules on wrong numbers, and
    those that share findings with them, are matched: this costs a fraction of a prediction.
    """
    rules = configure_rules(None)
    wrong = [rule for rule in rules.values() if rule.get_severity() is Severity.WRONG]
    # A rewrite's match is merged into the finding of the rule that it fixes, which has the severity of that rule.
    names = {rule.name for rule in wrong}
    names |= {fixed.name for rule in wrong if isinstance(rule, Rewrite) for fixed in rule.fixes}
    names |= names_of_fixes(rules[name] for name in names)
    matched = [rule for name, rule in rules.items() if name in names
               and not (keeps_interface and getattr(rule, "interface", False))]
    found = attach_fixes(list(iterate_rule_results(matched, program, target, [])), names)
    listed = (replace(build_finding(item.rule, item.answer, item.function), fixed_by=item.fixed_by,
                      not_fixed_because=item.not_fixed_because) for item in found if isinstance(item.answer, Hit))
    return [item for item in listed if item.severity is Severity.WRONG]


def format_wrong_numbers(codes: Collection[str]) -> str:
    """Format the number of findings of wrong numbers with these codes, one for each: `2 findings of wrong numbers
    (ANE310, ANE321)`; "" for none."""
    listed = ", ".join(sorted(set(codes)))
    return f"{format_count(len(codes), 'finding')} of wrong numbers ({listed})" if codes else ""
