"""The cheapest partition of ops in order over three backends: a shortest path, linear in ops."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.plan import CHANGE, ENTER, OUTPUT, Cost, Engine

__all__ = ["CHANGE", "ENTER", "ENGINES", "OUTPUT", "partition"]

ENGINES: tuple[Engine, ...] = ("ane", "bnns", "classic_cpu")


def partition(costs: Sequence[Cost], outputs: Sequence[int]) -> tuple[list[Engine], float]:
    """The engine of each op and the total in ms; `outputs` counts the graph outputs that each op makes.

    Of equal partitions the one that stays on the ANE is taken.
    """
    if not costs:
        return [], 0.0
    best = {engine: _enter(None, engine) for engine in ENGINES}
    back: list[dict[Engine, Engine]] = []
    for place, (item, made) in enumerate(zip(costs, outputs)):
        came: dict[Engine, Engine] = {}
        reached: dict[Engine, float] = {}
        for engine in ENGINES:
            came[engine] = min(ENGINES, key=lambda before: best[before] + _enter(before, engine)) if place else engine
            way = best[came[engine]] + (_enter(came[engine], engine) if place else 0.0)
            reached[engine] = way + item.of(engine) + (OUTPUT * made if engine == "ane" else 0.0)
        best = reached
        back.append(came)
    engine = min(ENGINES, key=lambda last: best[last])
    total = best[engine]
    chosen: list[Engine] = []
    for came in reversed(back):
        chosen.append(engine)
        engine = came[engine]
    return chosen[::-1], total


def _enter(before: Engine | None, engine: Engine) -> float:
    """What it costs to go on with `engine` after `before` (None: the model's start)."""
    if before == engine:
        return 0.0
    return (CHANGE if before is not None else 0.0) + (ENTER if engine == "ane" else 0.0)
