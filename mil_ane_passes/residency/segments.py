"""The cheapest partition of ops in order over three backends: a shortest path, linear in ops.

The constants are those published with the M4 estimates. Going from a CPU backend to the ANE pays the change and the
entry: with the change on the way out that makes the 0.375 ms which a stretch in the middle of a model has to save, as
its authors say.

Where two partitions cost the same, Core ML takes either: in 49 of the measured networks the last relu costs as much on
both sides of the border, 32 keep it on the ANE and 17 do not. No plain order of adding the numbers tells which, so here
it stays on the ANE. Of two CPU backends that cost the same it is classic_cpu, as in all of the measured models.
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
    return chosen[::-1], total


def _fine(item: Cost, engine: Engine) -> int:
    spent = item.of(engine)
    return _NEVER if spent == float("inf") else round(spent * _FINE)
