"""Show the documentation of a rule (why, when, exactness, before and after, options, evidence), of a patch of the torch
frontend, or of a topic.
"""

from __future__ import annotations

import argparse
import ast
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._version import make_json_header
from ..passes.evidence import format_evidence
from ..passes.rule_lookup import RuleKeys, find_rule_name
from ..torch_frontend.registry import is_patch_key
from ..utils.errors import InputError
from .options import add_format_option
from .output import print_report
from .pages import Facts, load_layer_rule_pages, load_patch_pages, load_rule_pages
from .passes import Page
from .patches import PatchPage

__all__ = ["TOPICS", "Contents", "Topic"]

HELP = "show the documentation of a rule, patch or topic"
EXAMPLE = "explain ANE301"
TOPICS = {
    "equivalence": "equivalence",
    "prediction": "ane",
    "guard": "passes.guard",
    "numbers": "equivalence.calibration",
    "packages": "package",
    "runtime": "runtime",
    "frontend": "torch_frontend",
    "threads": "utils.locking",
}
"""Topics, and the modules whose docstrings are their pages. The files are parsed, not imported, because imports are
slow."""


_CODE_OF_RULE = re.compile(r"(ANE|NN)\d+", re.IGNORECASE)
"Codes of rules: anything else may be the name of a patch of the torch frontend."


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("code", metavar="CODE", nargs="?",
                        help="a code (ANE301), a slug, the name of a pass or patch, or a topic; without it, topics "
                             "are listed")
    add_format_option(parser)
    parser.set_defaults(run=run, uses_frontend=lambda arguments: not _CODE_OF_RULE.fullmatch(arguments.code or ""))


def run(arguments: argparse.Namespace) -> int:
    if arguments.code is None:
        print_report(Contents(), arguments.format)
    elif arguments.code.lower() in TOPICS:
        print_report(Topic(arguments.code.lower()), arguments.format)
    else:
        print_report(_find_page(arguments.code), arguments.format)
    return 0


def _find_page(key: str) -> Page | PatchPage | LayerPage:
    """Find the page of a rule, a patch or a layer rule. Raises InputError if there is none."""
    pages, note = load_rule_pages()
    keys = [RuleKeys(each["pass"], each["code"], each["slug"], each["shares_code"]) for each in pages]
    try:
        name = find_rule_name(key, keys, note)
    except InputError:
        if is_patch_key(key):
            return _find_patch_page(key)
        layers = _find_layer_page(key)
        if layers is not None:
            return layers
        raise
    return Page(next(each for each in pages if each["pass"] == name))


def _find_patch_page(key: str) -> PatchPage:
    """Find the page of a patch by its code or name; InputError for a code that no patch has."""
    found = next((each for each in load_patch_pages() if key.lower() in (each["patch"], each["code"].lower())), None)
    if found is None:
        raise InputError(f"no patch '{key}'; `mil-ane-passes patches` lists their codes and names")
    return PatchPage(found)


def _find_layer_page(key: str) -> LayerPage | None:
    """Find the page of a rule about layers by its code, its slug, or the name of a rewrite that fixes it."""
    return next((LayerPage(each) for each in load_layer_rule_pages()
                 if key.upper() == each["code"] or key.lower() == each["slug"]
                 or key in (fix["pass"] for fix in each["fixed_by"])), None)


@dataclass(frozen=True)
class LayerPage:
    """The page of a rule about NeuralNetwork layers, with the rewrites within the format that fix it."""

    facts: Facts

    def to_dict(self) -> dict[str, Any]:
        return {**make_json_header("explain"), **self.facts}

    def __str__(self) -> str:
        facts, fixes = self.facts, self.facts["fixed_by"]
        lines = [f"{facts['code']} {facts['slug']}",
                 "of layers of a NeuralNetwork (.mlmodel); confidence " + facts["confidence"], "", facts["summary"]]
        lines += [f"what to do: {facts['advice']}"] * bool(facts["advice"])
        lines += ["", "rewrites within the format (rewrite IN.mlmodel -o OUT.mlmodel)"] if fixes else []
        lines += [f"    {each['pass']} ({each['exactness']}, preset {each['preset']}): {each['summary']}"
                  for each in fixes]
        return "\n".join([*lines, "", "evidence", *(f"    {format_evidence(each)}" for each in facts["evidence"])])


@dataclass(frozen=True)
class Topic:
    """A topic: guarantees and limits of one part of the tool."""

    name: str

    @property
    def text(self) -> str:
        path = Path(__file__).parent.parent.joinpath(*TOPICS[self.name].split("."))
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        return ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""

    def to_dict(self) -> dict[str, Any]:
        return {**make_json_header("explain"), "topic": self.name, "text": self.text}

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Contents:
    """The list of all topics."""

    def to_dict(self) -> dict[str, Any]:
        return {**make_json_header("explain"),
                "topics": {name: Topic(name).text.splitlines()[0] for name in TOPICS}}

    def __str__(self) -> str:
        width = max(map(len, TOPICS))
        lines = [f"  {name:<{width}}  {Topic(name).text.splitlines()[0]}" for name in TOPICS]
        return "\n".join(["topics", *lines, "",
                          "Rules by code, slug or pass name (explain ANE301); mil-ane-passes passes lists them.",
                          "Patches of the torch frontend by code or name (explain TORCH114); mil-ane-passes patches "
                          "lists them."])
