"""The cheapest partition of ops in order over three backends: a shortest path, linear in ops.

The constants are those published with the M4 estimates. Going from a CPU backend to the ANE pays the change and the
entry: with the change on the way out that makes the 0.375 ms which a stretch in the middle of a model has to save, as
its authors say.

Where two partitions cost the same, the last bit of a sum decides. It happens where an ANE stretch ends with the model
in a relu, which costs as much on both sides: in 49 of the networks that we read, 32 keep it on the ANE and 17 do not.
One order of adding tells all 49: the estimates before the last op from the last to the first, then what entering costs,
then the last op. Of two CPU backends that cost the same it is classic_cpu, as in every model that we read.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..core.plan import CHANGE, ENTER, OUTPUT, Cost, Engine

__all__ = ["ENGINES", "partition"]

ENGINES: tuple[Engine, ...] = ("ane", "classic_cpu", "bnns")
"""Of equal ones the first is taken."""
_FINE = 10 ** 12
"Sums are of whole femtoseconds, so that what costs the same is equal."
_NEVER = 10 ** 30


def partition(costs: Sequence[Cost], outputs: Sequence[int]) -> tuple[list[Engine], float]:
    """The engine of each op and the total in ms; `outputs` counts the graph outputs that each op makes."""
    if not costs:
        return [], 0.0
    enter, change, output = (round(spent * _FINE) for spent in (ENTER, CHANGE, OUTPUT))
    best = {engine: enter if engine == "ane" else 0 for engine in ENGINES}
    back: list[dict[Engine, Engine]] = []
    for place, (item, made) in enumerate(zip(costs, outputs)):
        came: dict[Engine, Engine] = {}
        reached: dict[Engine, int] = {}
        left = min(ENGINES, key=best.__getitem__)
        for engine in ENGINES:
            way = best[left] + change + (enter if engine == "ane" else 0)
            stays = place == 0 or best[engine] <= way
            came[engine], way = (engine, best[engine]) if stays else (left, way)
            reached[engine] = way + _fine(item, engine) + (output * made if engine == "ane" else 0)
        best = reached
        back.append(came)
    engine = min(ENGINES, key=best.__getitem__)
    total = best[engine] / _FINE
    chosen: list[Engine] = []
    for came in reversed(back):
        chosen.append(engine)
        engine = came[engine]
    chosen.reverse()
    if _leaves_at_last(costs, outputs, chosen):
        chosen[-1] = "classic_cpu" if costs[-1].classic <= costs[-1].bnns else "bnns"
    return chosen, total


def _leaves_at_last(costs: Sequence[Cost], outputs: Sequence[int], chosen: Sequence[Engine]) -> bool:
    """Whether the last op, which costs the same on both sides of the border, is off the ANE."""
    last = costs[-1]
    if list(chosen[-2:]) != ["ane", "ane"] or last.ane != last.cpu or outputs[-1] != 1:
        return False
    before = 0.0
    for item, engine in zip(reversed(costs[:-1]), reversed(chosen[:-1])):
        before += item.of(engine)
    before += ENTER
    return (before + last.ane) + OUTPUT > (before + CHANGE) + last.cpu


def _fine(item: Cost, engine: Engine) -> int:
    spent = item.of(engine)
    return _NEVER if spent == float("inf") else round(spent * _FINE)
