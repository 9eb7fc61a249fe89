"""Sources that are NeuralNetworks and were read as the ML Programs that `upgrade` makes of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

__all__ = ["UpgradedSource", "upgrades_to_dict"]


@dataclass(frozen=True)
class UpgradedSource:
    """A NeuralNetwork that was read through `upgrade`, and the settings with which it was.

    Nothing compares the upgrade with the layers of the network, which run in Core ML only. `verify` of a network and
    its upgrade therefore compares two upgrades.
    `kind` is its kind in the Model proto, `layers` the number of its layers.
    """

    source: str
    kind: str
    layers: int
    deployment_target: str
    precision: str

    def to_dict(self) -> dict[str, Any]:
        return {"source": self.source, "kind": self.kind, "layers": self.layers,
                "deployment_target": self.deployment_target, "precision": self.precision}

    def __str__(self) -> str:
        what = "a pipeline of NeuralNetworks" if self.kind.startswith("pipeline") else "a NeuralNetwork"
        return (f"{self.source} is {what}; read as an ML Program, upgraded with `--deployment-target "
                f"{self.deployment_target} --precision {self.precision}`; the upgrade itself is not checked "
                "against the layers")


def upgrades_to_dict(upgraded: Iterable[UpgradedSource]) -> dict[str, Any]:
    """Return the JSON of the upgraded sources of a report: nothing where all sources were ML Programs."""
    listed = [each.to_dict() for each in upgraded]
    return {"upgraded": listed} if listed else {}
