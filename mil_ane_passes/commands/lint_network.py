"""The part of `lint` that is about a NeuralNetwork's layers."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..neuralnetwork.layer_rewriting import (
    LayerTrace,
    explain_missing_rewrite,
    get_layer_rewrites,
    rewrite_network,
    select_layer_rewrites,
)
from ..neuralnetwork.layer_rules import (
    LayerHit,
    find_layer_hits,
    get_layer_rules,
    is_layer_rule_key,
    select_layer_rules,
)
from ..neuralnetwork.network_view import list_views
from ..neuralnetwork.upgrade import read_network
from ..package import Package
from ..passes.forecast import Forecast
from ..passes.plan import Plan
from ..passes.rule_selection import resolve_rule_names
from ..report.ignored import PerOpIgnore
from ..report.network import LayerFinding, NetworkLint
from ..utils.errors import InputError
from .sources import OpenedSource

if TYPE_CHECKING:
    from ..ir.scopes import Origin

__all__ = ["lint_network", "resolve_per_op_ignores", "split_layer_rules"]

Names = Iterable[str] | str | None


def split_layer_rules(select: Names, ignore: Names) -> tuple[frozenset[str], Names, Names]:
    """Return the codes of the layer rules to report, and what is left of `select` and `ignore` for other rules.

    What is left of a `select` that names layer rules alone is empty.
    """
    select, ignore = (list(keys) if isinstance(keys, Iterator) else keys for keys in (select, ignore))
    chosen, others = _split_keys(select, "select")
    left_out, others_out = _split_keys(ignore, "ignore")
    codes = frozenset(get_layer_rules()) if select is None else select_layer_rules(chosen)
    return (codes - select_layer_rules(left_out), others if chosen else select, (others_out or None) if left_out else
            ignore)


def resolve_per_op_ignores(table: Mapping[str, Iterable[str] | str] | None) -> list[PerOpIgnore]:
    """Resolve the rules of each pattern. Raises InputError for unknown rules, and for other types."""
    if table is not None and not isinstance(table, Mapping):
        raise InputError(f"per_op_ignores: found {table!r}; expected a mapping from patterns of names to rules",
                         option="per_op_ignores")
    ignores = []
    for pattern, keys in (table or {}).items():
        if not isinstance(pattern, str) or not pattern.strip():
            raise InputError(f"per_op_ignores: found the pattern {pattern!r}; expected value names, with the "
                             f"wildcards * and ?",
                             option="per_op_ignores")
        if keys is None:
            raise InputError(f"per_op_ignores: found None for {pattern!r}; expected rules", option="per_op_ignores")
        listed = tuple(key.strip() if isinstance(keys, str) else key for key in _list_keys(keys, "per_op_ignores"))
        chosen, others = _split_keys(listed, "per_op_ignores")
        names = resolve_rule_names(others, "per_op_ignores") if others or not chosen else frozenset()
        ignores.append(PerOpIgnore(pattern, listed, names, select_layer_rules(chosen)))
    return ignores


def _list_keys(keys: Names, who: str) -> list[str]:
    if keys is None or isinstance(keys, str):
        return [] if keys is None else keys.split(",")
    if not isinstance(keys, Iterable) or isinstance(keys, bytes):
        raise InputError(f"{who}: found {keys!r}; expected codes, code prefixes, slugs or names, as a string or a "
                         f"list of strings", option=who)
    return list(keys)


def _split_keys(keys: Names, who: str) -> tuple[list[str], list[str]]:
    listed = _list_keys(keys, who)
    chosen = [key for key in listed if isinstance(key, str) and is_layer_rule_key(key)]
    return chosen, [key for key in listed if key not in chosen]


def lint_network(
    src: Any, source: OpenedSource, plan: Plan, target: str, codes: Collection[str]
) -> NetworkLint | None:
    """Lint the layers of the network that `source` was upgraded from; None for an ML Program.

    None, too, for a `Package` that was upgraded from a model in memory: its layers are gone.
    """
    if not source.upgraded:
        return None
    if isinstance(src, Package):
        src = source.upgraded[0].source
        if not os.path.exists(src):
            return None
    spec, where = read_network(src)
    chosen = select_layer_rewrites("full")
    rewritten = rewrite_network(spec, chosen, where)
    hits = find_layer_hits(rewritten.views)
    left = find_layer_hits(list_views(rewritten.spec, where)) if rewritten.changed else hits
    fixes, reasons = _collect_fixes(rewritten.traces)
    ops = _collect_ops(plan)
    tried = [each.name for each in chosen]
    findings = tuple(_make_finding(hit, ops, fixes, reasons, tried) for hit in hits if hit.rule.code in codes)
    before, after = _forecast_upgrade(source, target)
    count = sum(len(view.network.layers) for view in rewritten.views)
    return NetworkLint(count, findings, before, after, _count_layers(hits), _count_layers(left))


def _count_layers(hits: Iterable[LayerHit]) -> int:
    return len({hit.layer for hit in hits})


def _collect_ops(plan: Plan) -> dict[str, list[int]]:
    """Collect the indices of the ops of each layer."""
    from ..ir.scopes import find_origin

    found: dict[str, list[int]] = defaultdict(list)
    for row in plan.rows:
        origin: Origin | None = find_origin(row.op)
        if origin is not None and origin.is_layer:
            found[origin.module or ""].append(row.index)
    return found


def _collect_fixes(
    traces: Iterable[LayerTrace],
) -> tuple[dict[str, Mapping[str, str]], dict[str, str]]:
    """Return, by layer, the rewrites that replace it, and the reasons why one does not."""
    known = get_layer_rewrites()
    fixes: dict[str, Mapping[str, str]] = {}
    reasons: dict[str, str] = {}
    for trace in traces:
        rewrite_of = known[trace.rule]
        for each in trace.fired:
            fixes[each.layer] = {"pass": trace.rule, "exactness": rewrite_of.exactness.value,
                                 "preset": rewrite_of.preset, "note": each.note}
        reasons |= {each.layer: each.note for each in trace.near_misses}
    return fixes, reasons


def _make_finding(
    hit: LayerHit, ops: Mapping[str, list[int]], fixes: Mapping[str, Mapping[str, str]], reasons: Mapping[str, str],
    tried: Collection[str],
) -> LayerFinding:
    rule, fix = hit.rule, fixes.get(hit.layer)
    return LayerFinding(
        rule.code, rule.slug, rule.summary, rule.confidence, rule.evidence, hit.layer, hit.kind, hit.reason,
        tuple(ops.get(hit.layer, ())), rule.advice, fix, "" if fix else reasons.get(hit.layer) or
        explain_missing_rewrite(rule.code, hit.kind, tried), rule.severity)


def _forecast_upgrade(source: OpenedSource, target: str) -> tuple[Forecast, Forecast]:
    """Forecast the upgraded program as it is, and rewritten with the preset full."""
    from .pipeline import make_forecaster
    from .rewrite import rewrite

    before = make_forecaster(target, source.package)(source.program)
    try:
        report = rewrite(source.package, preset="full", target=target, verify=False)
    except InputError:  # a rewrite that has to measure values needs PyTorch
        return before, before
    return report.predicted or (before, before)
