"""Calibration: finds where a model exceeds fp16 on the user's own feeds, and the rewrites that fix it.

Most numeric faults are silent: the ANE returns a number, and it is wrong. Which of them occurs depends on the values,
so use your own inputs. `calibrate` runs the model, reports the headroom that fp16 leaves at each value (65504 over the
largest magnitude), bounds every partial sum (the ANE's accumulator ends at 32768), and tries each applicable rewrite
on a copy. `--feeds` may be repeated; `--ranges 'image=0:1'` stands for inputs of which you have no sample, both ends
included. Without either it runs on random feeds.

`rewrite` accepts both, too: `bounded_accumulation` scales values that `calibrate` reports as too large, `fp16_compute`
keeps in fp32 what exceeds fp16, and the equivalence check runs on them besides its own random feeds; approximate
rewrites are judged on the user's feeds alone.

An fp32 package becomes an fp16 one with `--passes fp16_compute`: weights halve, inputs and outputs are unchanged, and
the report lists what was kept in fp32, why, and the largest error on the feeds (without feeds, on seeded random
feeds). `--passes fp16_io` makes inputs and outputs fp16 as well, which changes the interface, so it only runs on
request.

`finite_mask` replaces the infinities of additive masks by -1e4, as Apple's own models do. A masked weight is 0 before
and after; only a row that is masked throughout changes, from NaN to the softmax of its scores.
"""

from __future__ import annotations

from typing import Any

from coremltools.converters.mil.mil import Program

from ..equivalence.calibration import calibrate_program
from ..equivalence.execution import build_plans
from ..equivalence.user_inputs import Feeds, Ranges, UserInputs
from ..passes.contract import ProgramRewrite, Rewrite, Rule
from ..passes.registry import get_all_rules
from ..passes.targets import parse_target
from ..report.calibrate import CalibrateReport
from ..utils.budget import DEFAULT_MAX_STEPS, share_budget
from ..utils.errors import InputError
from ..utils.locking import synchronized
from ..utils.option_spelling import format_option
from .pass_pipeline import DEFAULT_SEEDS
from .source import Progress, ignore_progress, open_source

__all__ = ["calibrate"]


@synchronized
def calibrate(
    src: Any, *, feeds: Feeds | None = None, ranges: Ranges | None = None, target: str = "all",
    worst: int | None = None, max_steps: int | None = DEFAULT_MAX_STEPS, max_seconds: float | None = None,
    progress: Progress = ignore_progress,
) -> CalibrateReport:
    """Run a model on `feeds` (a mapping from input name to array, or several) or within `ranges` (input name to (low,
    high), both included), at float32, and report for each value its range, its fp16 headroom, the bound on its partial
    sums, the rules that match, and the rewrites that fix what does not fit: each rule that fires is tried on a copy.
    Without feeds and ranges the model runs on random feeds, those of the equivalence check: normal values, and indices
    that are valid; the report has `sampled` set.

    Raises InputError where feeds or ranges do not fit, NotSupported for an op the runtime lacks, and LimitReached if
    runs take more than `max_steps` loop steps each or `max_seconds` together (None: no limit).
    """
    parse_target(target)
    given = UserInputs.of(feeds, ranges)
    model = open_source(src)

    def make(program: Program) -> Any:
        return given.plans(program, model.describe) if given else build_plans(program, DEFAULT_SEEDS, model.describe)

    rules = [rule for rule in get_all_rules().values() if _is_numerics_rule(rule)]
    try:
        with share_budget(max_steps, max_seconds, progress):
            found = calibrate_program(model.program, make, rules, target=target, progress=progress)
    except InputError as error:
        if not given.ranges:
            raise
        raise InputError(f"{error}; both ends of {format_option('ranges')} are included") from error
    return CalibrateReport(model.name, target, found.runs, found, worst, sampled=not given)


def _is_numerics_rule(rule: type[Rule]) -> bool:
    """Return whether a rule is about numerics: 3xx.

    Rules that change the interface or all types are not fixes of a value.
    """
    return rule.code.startswith("ANE3") and not (
        issubclass(rule, Rewrite) and (rule.interface or issubclass(rule, ProgramRewrite)))
