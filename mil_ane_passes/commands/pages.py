"""Pages of rules, layer rules and patches as data, for `explain`, `passes` and `patches`.

Collecting them from the registries takes seconds: rules import coremltools, and patches import torch and run probes.
Therefore the file `pages.json`, written by `python -m tests.test_readme`, stores the pages of this package. It is used
if it is current: the sources have the recorded digests and no plugin is installed; for patches, Python and the packages
used by probes must have the recorded versions, too.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import json
import re
import sys
import zlib
from importlib.metadata import PackageNotFoundError, distribution, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..passes.coremltools_setup import ENTRY_POINT_GROUP

if TYPE_CHECKING:
    from ..neuralnetwork.layer_rules import LayerRule
    from ..passes.contract import Evidence, Rule
    from ..torch_frontend.registry import PatchStatus

__all__ = [
    "PAGES_FILE",
    "Facts",
    "collect_pages",
    "describe_environment",
    "describe_patch",
    "load_layer_rule_pages",
    "load_patch_pages",
    "load_rule_pages",
]

Facts = dict[str, Any]
PAGES_FILE = Path(__file__).with_name("pages.json")
_HOME = Path(__file__).parents[1]
_FOLDERS = ("ane", "neuralnetwork", "passes", "rewrites", "rules", "torch_frontend/patches")
"The folders with the sources of pages."
_WITH_FUNCTIONS = ("neuralnetwork", "torch_frontend")
"Folders whose pages also depend on functions: on docstrings of checks, and on probes."
_FUNCTION = re.compile(r"^( *)(?:async )?def .*\n(?:\1[ )].*\n|[ \t]*\n)*", re.MULTILINE)
_PROBED = ("coremltools", "numpy", "torch")
"The packages that the results of probes depend on, besides Python."


def load_rule_pages() -> tuple[list[Facts], str]:
    """Load the pages of all rules, by code, problems before the rewrites that share it, and unlisted ones last.

    Returns them and a note for errors about unknown names: it names plugins whose rules were skipped, if any.
    """
    stored = _read_current_pages()
    if stored is not None and not entry_points(group=ENTRY_POINT_GROUP):
        return list(stored["rules"]), ""
    from ..passes.registry import mention_skipped_plugins

    return _collect_rules(), mention_skipped_plugins()


def load_layer_rule_pages() -> list[Facts]:
    """Load the pages of all rules about layers of neural networks."""
    stored = _read_current_pages()
    return list(stored["layers"]) if stored is not None else _collect_layer_rules()


def load_patch_pages() -> list[Facts]:
    """Load the pages of all patches by name, with what the probes say here. Raises InputError without torch."""
    stored = _read_current_pages()
    if stored is None or stored["probed with"] != describe_environment():
        return _collect_patches()
    return list(stored["patches"])


def collect_pages() -> dict[str, Any]:
    """Collect all pages, and what they hold for, from the registries: the contents of `pages.json`."""
    return {"sources": _digest_sources(), "probed with": describe_environment(), "rules": _collect_rules(),
            "layers": _collect_layer_rules(), "patches": _collect_patches()}


@functools.cache
def _read_current_pages() -> dict[str, Any] | None:
    """Read the stored pages; None if they are not those of the sources that are here."""
    try:
        found = json.loads(PAGES_FILE.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.get("sources") == _digest_sources() else None


def _digest_sources() -> dict[str, str]:
    """Digest each source of pages, in most folders without functions: pages have what classes and modules declare."""
    return {file.relative_to(_HOME).as_posix(): _digest_source(file) for folder in _FOLDERS
            for file in sorted((_HOME / folder).rglob("*.py"))}


def _digest_source(file: Path) -> str:
    text = file.read_text(encoding="utf-8")
    kept = text if file.relative_to(_HOME).parts[0] in _WITH_FUNCTIONS else _FUNCTION.sub("", text)
    return f"{zlib.crc32(kept.encode()):08x}"


def describe_environment() -> dict[str, str]:
    """Return the versions of Python and of the packages that patches are probed with."""
    return {"python": f"{sys.version_info.major}.{sys.version_info.minor}",
            **{name: _find_version(name) for name in _PROBED}}


def _find_version(name: str) -> str:
    """Find the version of an installed package; "unknown" where an import would find another copy, or none."""
    try:
        installed, found = distribution(name), importlib.util.find_spec(name)
    except (PackageNotFoundError, ImportError, ValueError):
        return "unknown"
    expected = str(installed.locate_file(f"{name}/__init__.py"))
    return installed.version.partition("+")[0] if found is not None and found.origin == expected else "unknown"


def _collect_rules() -> list[Facts]:
    from ..ane.measured_otherwise import MeasuredOtherwise
    from ..passes.registry import get_all_rules
    from ..passes.rule_class import shares_code

    listed = sorted(get_all_rules().values(), key=lambda rule: (rule.code, shares_code(rule)))
    return [*(_describe_rule(rule, listed=True) for rule in listed), _describe_rule(MeasuredOtherwise, listed=False)]


def _describe_rule(rule: type[Rule], *, listed: bool) -> Facts:
    from ..passes.contract import Rewrite
    from ..passes.registry import fixes_for
    from ..passes.rule_class import shares_code
    from ..passes.targets import GENERATIONS

    fix, options = issubclass(rule, Rewrite), rule.options()
    return {
        "listed": listed, "shares_code": shares_code(rule),
        "pass": rule.name, "code": rule.code, "slug": rule.slug, "summary": rule.summary(), "fix": fix,
        "preset": rule.preset if issubclass(rule, Rewrite) else None,
        "exactness": rule.exactness.value if issubclass(rule, Rewrite) else None,
        "stage": rule.stage if fix else None,
        "fixes": [problem.name for problem in rule.fixes] if issubclass(rule, Rewrite) else [],
        "fixed_by": [] if fix else [each.name for each in fixes_for(rule)],
        "options": {name: option.default for name, option in options.items()},
        "option_docs": {name: option.doc for name, option in options.items()},
        "text": inspect.getdoc(rule), "bound": getattr(rule, "bound", ""), "refuses": rule.refuses,
        "confidence": rule.confidence, "severity": rule.get_severity().value, "advice": rule.advice or None,
        "targets": [each.name for each in GENERATIONS if rule.targets.includes(each)],
        "evidence": [each.to_dict() for each in _list_evidence(rule)],
    }


def _list_evidence(rule: type[Rule]) -> list[Evidence]:
    """Return the rule's own evidence, then that of the problems that it fixes."""
    from ..passes.contract import Rewrite

    problems = rule.fixes if issubclass(rule, Rewrite) else ()
    return list(dict.fromkeys(each for cited in (rule, *problems) for each in cited.evidence))


def _collect_layer_rules() -> list[Facts]:
    from ..neuralnetwork.layer_rules import get_layer_rules

    return [_describe_layer_rule(rule) for rule in get_layer_rules().values()]


def _describe_layer_rule(rule: LayerRule) -> Facts:
    from ..neuralnetwork.layer_rewriting import get_layer_rewrites

    fixes = [{"pass": each.name, "layers": list(each.kinds), "exactness": each.exactness.value,
              "preset": each.preset, "summary": each.summary}
             for each in get_layer_rewrites().values() if each.fixes == rule.code]
    return {**rule.to_dict(), "fixed_by": fixes}


def _collect_patches() -> list[Facts]:
    from ..torch_frontend.registry import collect_patch_statuses

    return [describe_patch(each) for each in collect_patch_statuses()]


def describe_patch(status: PatchStatus) -> Facts:
    """Describe a patch, and whether it is needed here."""
    patch = status.patch
    return {"code": patch.code, "patch": patch.name, "title": patch.title, "severity": patch.severity.value,
            "needed": status.reason is not None, "why": status.reason, "text": patch.text, "ops": sorted(patch.ops),
            "replaces": [f"{each.module}.{each.attribute}" for each in patch.replacements],
            "upstream": list(patch.upstream)}
