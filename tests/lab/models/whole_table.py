"""What the last `python -m tests.lab.models.whole --record` saw, for the README and the tests; needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.lab import records

RECORD = Path(__file__).with_name("whole.json")
TARGETS = ("m4", "m1")
MAX_COST_INCREASE = 0.01


@dataclass
class ArchitectureResult:
    """One architecture for one target; pairs are before and after, costs predicted and in ms."""

    architecture: str
    target: str
    ops: tuple[int, int]
    weight_bytes: tuple[int, int]
    refused: tuple[int, int]
    off: tuple[int, int]
    cost: tuple[float, float]
    cures: float
    switches: tuple[int, int]
    proved: str
    error: tuple[float, float]  # against PyTorch, a share of the output's largest value; the mean of `draws`, geometric
    fired: dict[str, int] = field(default_factory=dict)
    undone: dict[str, str] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)  # refused ops that are left, by kind
    draws: int = 1  # of inputs

    @property
    def grows(self) -> bool:
        """Whether it is predicted to cost more than a guard allows."""
        return self.cost[1] > max(self.cost[0], self.cures) * (1 + MAX_COST_INCREASE) + 1e-9

    @property
    def costs_more(self) -> bool:
        """Whether the predicted cost grows by more than a guard allows, fixes of wrong numbers included."""
        return self.cost[1] > self.cost[0] * (1 + MAX_COST_INCREASE) + 1e-9

    @property
    def stays(self) -> bool:
        """Whether some ops were refused and not fewer are."""
        return self.refused[1] >= max(self.refused[0], 1)

    @property
    def faults(self) -> list[str]:
        """What is not as it should be."""
        found = {
            f"{self.refused[0]} -> {self.refused[1]} refused": self.stays,
            f"cost {self.cost[0]:.3f} -> {self.cost[1]:.3f} ms, fixes {self.cures:.3f}": self.grows,
            self.proved: self.proved not in ("nothing fired", "bitwise", "rounding"),
            f"error {self.error[0]:.1e} -> {self.error[1]:.1e}": self.error[1] > max(4 * self.error[0], 1e-2),
        }
        return [words for words, wrong in found.items() if wrong]


def read_record() -> list[ArchitectureResult]:
    """The rows of the last `--record`."""
    return (
        [
            ArchitectureResult(
                **{name: tuple(value) if isinstance(value, list) else value for name, value in each.items()}
            )
            for each in records.read_record(RECORD, [])
        ]
    )


TABLE_HEAD = records.format_head((
    "architecture", "target", "ops", "weight bytes", "unsupported ops", "off the ANE", "predicted ms",
    "with fixes alone", "transitions", "verified", "error against PyTorch"))


def format_row(found: ArchitectureResult) -> str:
    pairs = (found.ops, found.weight_bytes, found.refused, found.off)
    return records.format_row((
        found.architecture, found.target, *(f"{a} -> {b}" for a, b in pairs),
        f"{found.cost[0]:.3f} -> {found.cost[1]:.3f}", f"{found.cures:.3f}",
        f"{found.switches[0]} -> {found.switches[1]}", found.proved.splitlines()[0],
        f"{found.error[0]:.1e} -> {found.error[1]:.1e}"))


def format_summary() -> str:
    """Both targets in a few lines."""
    table = read_record()
    columns = [_count_results([each for each in table if each.target == target]) for target in TARGETS]
    return records.format_table(["", *TARGETS], ([what, *(column[what] for column in columns)] for what in columns[0]))


def _count_results(rows: Sequence[ArchitectureResult]) -> dict[str, str]:
    some = [each for each in rows if each.refused[0]]
    stuck = [each.architecture for each in some if each.stays]
    both = [[sum(getattr(each, name)[place] for each in rows) for place in (0, 1)]
            for name in ("refused", "off", "switches")]
    return {
        "architectures": str(len(rows)),
        "with unsupported ops, before -> after": f"{len(some)} -> {sum(each.refused[1] > 0 for each in rows)}",
        "with unsupported ops, none of which was removed": "; ".join(stuck) or "0",
        "unsupported ops, all architectures": "{} -> {}".format(*both[0]),
        "ops predicted off the ANE, all architectures": "{} -> {}".format(*both[1]),
        "transitions, all architectures": "{} -> {}".format(*both[2]),
        "predicted to cost more than 1 % more than before": str(sum(each.costs_more for each in rows)),
        "of these, by more than fixes of wrong numbers alone": str(
            sum(each.costs_more and each.grows for each in rows)
        ),
        "largest such growth of the predicted cost": max(
            (f"{each.cost[1] / each.cost[0] - 1:.1%} ({each.architecture})" for each in rows if each.costs_more),
            key=lambda text: float(text.partition("%")[0]),
            default="none",
        ),
        "not verified equivalent": str(
            sum(each.proved not in ("nothing fired", "bitwise", "rounding") for each in rows)
        ),
    }
