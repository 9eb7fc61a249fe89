"""The pipeline for `ct.convert`."""

from __future__ import annotations

from typing import Any

import coremltools as ct
from coremltools.converters.mil.mil import Program

from ..core import pipeline as passes_of
from ..core.locking import synchronized
from ..core.max_growth import DEFAULT_MAX_GROWTH
from ..core.targets import parse_target
from ..core.value_ranges import Measure
from ..proof.execution import build_plans
from ..proof.range_measurement import make_measurer
from ..proof.user_inputs import Feeds, Ranges, UserInputs
from .prediction import make_forecaster, make_guard

__all__ = ["DEFAULT_SEEDS", "make_measures", "pipeline"]

DEFAULT_SEEDS = 3
"Seeded draws where a rule is content with those."


@synchronized
def pipeline(
    base: ct.PassPipeline | None = None, *, preset: str = "safe", target: str = "all",
    passes: passes_of.Passes | None = None, options: passes_of.Options | None = None,
    feeds: Feeds | None = None, ranges: Ranges | None = None, max_growth: float | None = DEFAULT_MAX_GROWTH,
    strict: bool = False,
) -> ct.PassPipeline:
    """coremltools' pipeline `base` (default: `ct.PassPipeline.DEFAULT`) followed by our passes, as a new object.

    Ours come last, so that nothing of coremltools' folds them back (`fuse_conv_bias` would). `base` is never changed;
    a base that holds our passes already gets them anew, not twice. Names, options, preset and target are checked
    here, and a wrong one raises InputError with the nearest right one. Passes that decide by the values they see run
    the program on `feeds` (a mapping from input name to array, or several) and within `ranges` (input name to
    (low, high)); that needs torch. `max_growth`: what a preset brings for the sake of place and speed is undone where
    the predicted cost grows by more than this share, or more ops than before are not taken by the ANE; what is asked
    for by name, and fixes of wrong numbers, are not. None undoes nothing. A pass that fails leaves the program as it
    was and logs a warning; with `strict` it stops the conversion. The names in the result's `passes` do the same
    without the object, in any process that has imported mil_ane_passes: `ct.PassPipeline(names)` after a trip through
    JSON, or ExecuTorch's `pass_names`. Settings and guard are in the name `ane::guard_begin{target=m4 ...}`; only feeds
    and ranges cannot travel. By hand a preset is one name, `ane::full{target=m4 max_growth=0.01}`, and a pass is
    `ane::triangle_cumsum{target=m4}`.
    """
    measure, draw = make_measures(UserInputs.of(feeds, ranges), lambda function: None)
    parse_target(target)
    return passes_of.pipeline(base, preset=preset, target=target, passes=passes, options=options, measure=measure,
                              draw=draw, guard=make_guard(make_forecaster(target), max_growth), strict=strict)


def make_measures(
    given: UserInputs, describe: Any, seeds: int = DEFAULT_SEEDS, progress: Any = None
) -> tuple[Measure | None, Measure]:
    """How to measure a program on what the user gave (None where that is nothing), and on seeded draws."""
    say = progress or (lambda text: None)

    def drawn(program: Program) -> Any:
        return build_plans(program, seeds, describe)

    def asked(program: Program) -> Any:
        return given.plans(program, describe)

    return (make_measurer(asked, say) if given else None), make_measurer(drawn, say)
