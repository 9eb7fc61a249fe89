"""What does not pass, with its reason: cases of coremltools' own tests of NeuralNetworks, and placements."""

from __future__ import annotations

import re

__all__ = ["EXPLAINED", "PLACED_WORSE", "find_explanation"]

EXPLAINED: dict[str, str] = {
    r"::test_topk_(cpu|gpu)$": (
        "the values are those expected; the test takes the places of equal numbers from `np.argsort`, which does not "
        "define their order, and the layer does not either"
    ),
    r"::TestKMeansLookup::test_kmeans_lookup\[weightShape[013]": (
        "scikit-learn, which the test needs to choose a table, is not among what the tests are run with; it predicts "
        "nothing"
    ),
}
"""Patterns, which are searched for in the names of cases, and reasons."""


def find_explanation(case: str) -> str | None:
    """Return why `case` does not pass; None when nobody has said."""
    return next((reason for pattern, reason in EXPLAINED.items() if re.search(pattern, case)), None)

PLACED_WORSE: dict[str, str] = {
    "T5": "two look-ups of ids in one table, which in this format are gathers of a constant: gathers accept negative "
          "ids, and the direct conversion by coremltools drops their wrapping in one of the two (add, mod on int32)",
}
"""Architectures of which more ops stay off the ANE than of the direct conversion, and why."""
