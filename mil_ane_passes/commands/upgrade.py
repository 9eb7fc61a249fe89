"""Convert a NeuralNetwork model (.mlmodel) to an ML Program with the same interface."""

from __future__ import annotations

import argparse
import os
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any

from .._version import make_json_header
from ..package.manifest import check_network_path
from ..utils.errors import InputError
from ..utils.text_format import escape_text, format_command_path, format_count, format_lines, quote_word
from .options import add_format_option, add_options, argument, command, flag, read_options
from .output import print_report, show_progress

if TYPE_CHECKING:
    from ..neuralnetwork.upgrade import UpgradedModel
    from ..package import Package

__all__ = ["UpgradeOptions", "UpgradeReport", "upgrade"]

HELP = "convert a NeuralNetwork (.mlmodel) to an ML Program"
EXAMPLE = "upgrade in.mlmodel -o out.mlpackage --deployment-target iOS17"


@dataclass(frozen=True)
class UpgradeOptions:
    """The options of `upgrade`."""

    src: Any = field(metadata=argument("IN", check=check_network_path))
    "the .mlmodel to read, or an .mlpackage with a NeuralNetwork; never modified"
    dst: str | os.PathLike[str] | None = field(default=None, metadata=flag("-o", "--output", metavar="OUT"))
    "the .mlpackage to write"
    _: KW_ONLY
    deployment_target: str = field(default="iOS16", metadata=flag(choices=("iOS15", "iOS16", "iOS17", "iOS18")))
    "the oldest system version that has to run the result (default: iOS16, the first with compressed weights)"
    precision: str = field(default="fp16", metadata=flag(choices=("fp16", "fp32")))
    "precision of the ops: fp16 (default; the ANE computes in fp16) or fp32; inputs and outputs keep their types"
    overwrite: bool = field(default=False, metadata=flag())
    "replace OUT if it exists"


@dataclass(frozen=True)
class UpgradeReport:
    """The outcome of an upgrade: the path written, the number of layers by kind, and the names that changed."""

    source: str
    output: str
    layers: dict[str, int]
    renamed: dict[str, str]
    expanded: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        return {**make_json_header("upgrade"),
                "source": self.source, "output": self.output, "layers": self.layers, "renamed": self.renamed,
                "expanded": self.expanded}

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.layers.items())
        lines = [f"{format_count(sum(self.layers.values()), 'layer')} converted: {kinds}"]
        lines += [f"renamed: {escape_text(old)} is now {new}, because names in ML Programs must be identifiers"
                  for old, new in self.renamed.items()]
        if self.expanded:
            vectors = format_count(len(self.expanded), "quantized vector")
            lines.append(f"decompressed: {vectors} (biases and the like) of {sum(self.expanded.values())} numbers, "
                         f"because these parameters are floats in ML Programs")
        output = quote_word(format_command_path(self.output))
        lines += [f"written to {self.output}",
                  "not compared with the network, whose layers run in Core ML only; with the torch module that it was "
                  f"converted from: mil-ane-passes verify {output} --torch MODULE:FACTORY",
                  f"next: mil-ane-passes lint {output}"]
        return format_lines(lines)


def add(parser: argparse.ArgumentParser) -> None:
    add_options(parser, UpgradeOptions)
    add_format_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    options = read_options(arguments, UpgradeOptions)
    if "dst" not in options:
        raise InputError("no output given; expected -o OUT.mlpackage")
    with show_progress() as progress:
        progress(f"converting {options['src']}")
        upgraded = _upgrade_source(**options)
    print_report(UpgradeReport(upgraded.source, os.fspath(options["dst"]), upgraded.layers, upgraded.renamed,
                               upgraded.expanded), arguments.format)
    return 0


@command(UpgradeOptions)
def upgrade(options: UpgradeOptions) -> Package:
    """Convert the NeuralNetwork `src` to an ML Program of the same interface, and save it to `dst` if that is set.

    `src` is the path of an .mlmodel, or of an .mlpackage that contains a network, a `ct.models.MLModel` or its spec.
    `precision` is the precision of the ops. Inputs and outputs stay fp32 and int32; doubles, which ML Programs do not
    support, become fp32. Names that are not identifiers are changed to identifiers. Quantized weights stay quantized.

    Raises InputError for a model that is not a network, and for layers that have no form in an ML Program, each by its
    name and kind.
    """
    return _convert_and_save(options).package


def _convert_and_save(options: UpgradeOptions) -> UpgradedModel:
    from ..neuralnetwork.upgrade import upgrade_model
    from ..package import check_destination, save

    if options.dst is not None and isinstance(options.src, (str, os.PathLike)):
        check_destination(options.src, options.dst, options.overwrite)
    upgraded = upgrade_model(options.src, _get_name(options.deployment_target), _get_name(options.precision))
    if options.dst is not None:
        save(upgraded.package, options.dst, overwrite=options.overwrite)
    return upgraded


def _get_name(setting: Any) -> str:
    """Return the spelling of a target or precision, which may be coremltools' own: `ct.target.iOS17`."""
    name = str(getattr(setting, "name", setting))
    return {"FLOAT16": "fp16", "FLOAT32": "fp32"}.get(name, name)


_upgrade_source = command(UpgradeOptions)(_convert_and_save)
