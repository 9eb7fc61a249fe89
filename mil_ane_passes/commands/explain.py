"""The page of one rule (why, when, how exact, before and after, options, evidence), of a patch of the torch frontend,
or of a part of the tool.
"""

from __future__ import annotations

import argparse
import ast
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..utils.errors import InputError
from .options import add_format_option
from .output import print_report
from .passes import Page
from .patches import PatchPage

if TYPE_CHECKING:
    from ..neuralnetwork.layer_rewriting import LayerRewrite
    from ..neuralnetwork.layer_rules import LayerRule

__all__ = ["TOPICS", "Contents", "Topic"]

HELP = "the page of one rule, patch or topic"
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
"""Topics, and the modules whose docstrings are their pages; they are read, not imported, which would take long."""


_CODE_OF_RULE = re.compile(r"(ANE|NN)\d+", re.IGNORECASE)
"What is no name of a patch of the torch frontend."


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("code", metavar="CODE", nargs="?",
                        help="a code (ANE301), a slug, the name of a pass or patch, or a topic; without it, the "
                             "topics are listed")
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
    """Find the page of a rule, of a patch, or of a rule about layers; InputError if none of them exists."""
    from ..ane.measured_otherwise import MeasuredOtherwise
    from ..passes.registry import find_rule
    from ..torch_frontend.registry import find_patch_status

    try:
        return Page(find_rule(key, MeasuredOtherwise))
    except InputError:
        found, layers = find_patch_status(key), _find_layer_page(key)
        if found is not None:
            return PatchPage(found)
        if layers is not None:
            return layers
        raise


def _find_layer_page(key: str) -> LayerPage | None:
    """Find the page of a rule about layers by its code, its slug, or the name of a rewrite that fixes it."""
    from ..neuralnetwork.layer_rewriting import get_layer_rewrites
    from ..neuralnetwork.layer_rules import get_layer_rules

    required = get_layer_rewrites()[key].fixes if key in get_layer_rewrites() else key
    return next((LayerPage(rule) for code, rule in get_layer_rules().items()
                 if required.upper() == code or required.lower() == rule.slug), None)


@dataclass(frozen=True)
class LayerPage:
    """The page of a rule about NeuralNetwork layers, with the rewrites within the format that fix it."""

    rule: LayerRule

    def _fixes(self) -> list[LayerRewrite]:
        from ..neuralnetwork.layer_rewriting import get_layer_rewrites

        return [each for each in get_layer_rewrites().values() if each.fixes == self.rule.code]

    def to_dict(self) -> dict[str, Any]:
        fixes = [{"pass": each.name, "layers": list(each.kinds), "exactness": each.exactness.value,
                  "preset": each.preset, "summary": each.summary} for each in self._fixes()]
        return {"schema": 1, "command": "explain", **self.rule.to_dict(), "fixed_by": fixes}

    def __str__(self) -> str:
        rule = self.rule
        lines = [f"{rule.code} {rule.slug}", "of layers of a NeuralNetwork (.mlmodel); confidence " + rule.confidence,
                 "", rule.summary]
        lines += [f"what to do: {rule.advice}"] * bool(rule.advice)
        lines += ["", "rewrites within the format (rewrite IN.mlmodel -o OUT.mlmodel)"] if self._fixes() else []
        lines += [f"    {each.name} ({each.exactness.value}, preset {each.preset}): {each.summary}"
                  for each in self._fixes()]
        return "\n".join([*lines, "", "evidence", *(f"    {each}" for each in rule.evidence)])


@dataclass(frozen=True)
class Topic:
    """One part of the tool: what it guarantees, and what it does not."""

    name: str

    @property
    def text(self) -> str:
        path = Path(__file__).parent.parent.joinpath(*TOPICS[self.name].split("."))
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        return ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""

    def to_dict(self) -> dict[str, Any]:
        return {"schema": 1, "command": "explain", "topic": self.name, "text": self.text}

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Contents:
    """The list of all topics."""

    def to_dict(self) -> dict[str, Any]:
        return {"schema": 1, "command": "explain",
                "topics": {name: Topic(name).text.splitlines()[0] for name in TOPICS}}

    def __str__(self) -> str:
        width = max(map(len, TOPICS))
        lines = [f"  {name:<{width}}  {Topic(name).text.splitlines()[0]}" for name in TOPICS]
        return "\n".join(["topics", *lines, "",
                          "Rules by code, slug or pass name (explain ANE301); mil-ane-passes passes lists them.",
                          "Patches of the torch frontend by code or name (explain TORCH114); mil-ane-passes patches "
                          "lists them."])
