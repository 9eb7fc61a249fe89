"""The cheapest partition of ops in order over three backends: a shortest path, linear in ops.

The constants are those published with the M4 estimates. Going from a CPU backend to the ANE pays the transition and
the entry: with the transition on the way out, that makes the 0.375 ms which a partition in the middle of a model has
to save, as its authors state.

If two partitions cost the same, the last bit of a sum decides. This happens if an ANE partition ends in a relu, which
costs as much on both sides: in 49 of the networks that we read such a relu ends the model, 32 keep it on the ANE and
17 do not. One order of summation reproduces all 49: the estimates of the partition before that op from the last to the
first, then the cost of entering, then the op. That order was picked among many because it does, on these very
networks, and has no other justification; it is assumed for partitions in the middle as well. Where it errs, the
partition costs the same. Of two CPU backends that cost the same, classic_cpu is chosen, as in every model that we
read.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..passes.plan import ANE_OUTPUT_MS, ENTER_ANE_MS, TRANSITION_MS, Cost, Engine

__all__ = ["ENGINES", "find_cheapest_partition"]

ENGINES: tuple[Engine, ...] = ("ane", "classic_cpu", "bnns")
"""The engines; of several with equal cost, the first is chosen."""
_FEMTOSECONDS_PER_MS = 10 ** 12
"Sums are of whole femtoseconds, so that equal costs compare equal."
_INFINITE_COST = 10 ** 30
"Femtoseconds of an op on an engine that does not support it: larger than any sum of real costs."


def find_cheapest_partition(costs: Sequence[Cost], outputs: Sequence[int]) -> tuple[list[Engine], float]:
    """Compute the engine of each op and the total in ms; `outputs` counts the graph outputs that each op makes."""
    if not costs:
        return [], 0.0
    enter, change, output = (
        round(spent * _FEMTOSECONDS_PER_MS) for spent in (ENTER_ANE_MS, TRANSITION_MS, ANE_OUTPUT_MS)
    )
    best = {engine: enter if engine == "ane" else 0 for engine in ENGINES}
    back: list[dict[Engine, Engine]] = []
    for place, (item, made) in enumerate(zip(costs, outputs)):
        came: dict[Engine, Engine] = {}
        reached: dict[Engine, int] = {}
        left = min(ENGINES, key=best.__getitem__)
        for engine in ENGINES:
            way = best[left] + change + (enter if engine == "ane" else 0)
            stays = place == 0 or best[engine] < way or (best[engine] == way and left != "ane")
            came[engine], way = (engine, best[engine]) if stays else (left, way)
            reached[engine] = way + _to_femtoseconds(item, engine) + (output * made if engine == "ane" else 0)
        best = reached
        back.append(came)
    engine = min(ENGINES, key=best.__getitem__)
    total = best[engine] / _FEMTOSECONDS_PER_MS
    chosen: list[Engine] = []
    for came in reversed(back):
        chosen.append(engine)
        engine = came[engine]
    chosen.reverse()
    _resolve_ties(costs, outputs, chosen)
    return chosen, total


def _resolve_ties(costs: Sequence[Cost], outputs: Sequence[int], chosen: list[Engine]) -> None:
    """Move ops at the end of an ANE partition off the ANE, where that costs the same and the last bit decides so."""
    start = 0
    for place in range(1, len(chosen)):
        if chosen[place] != "ane":
            continue
        if chosen[place - 1] != "ane":
            start = place
        final = place == len(chosen) - 1
        if place > start and outputs[place] == final and (final or chosen[place + 1] != "ane"):
            other = chosen[place + 1] if not final else min(ENGINES[1:], key=costs[place].of)
            if costs[place].ane == costs[place].of(other) and _is_cheaper_off_ane(costs[start:place], costs[place]):
                chosen[place] = other


def _is_cheaper_off_ane(before: Sequence[Cost], item: Cost) -> bool:
    """Return whether a sum of doubles makes `item`, which costs the same on both backends, cheaper off the ANE."""
    spent = 0.0
    for earlier in reversed(before):
        spent += earlier.of("ane")
    spent += ENTER_ANE_MS
    return (spent + item.of("ane")) + TRANSITION_MS > (spent + TRANSITION_MS) + item.of("ane")


def _to_femtoseconds(item: Cost, engine: Engine) -> int:
    spent = item.of(engine)
    return _INFINITE_COST if spent == float("inf") else round(spent * _FEMTOSECONDS_PER_MS)
