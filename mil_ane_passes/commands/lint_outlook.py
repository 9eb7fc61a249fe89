"""Forecasts of a linted model after `rewrite` or `adapt`; its report requests them when it is printed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..report.next_step import FixForecast
from ..utils.errors import AnePassesError, InputError
from ..utils.locking import synchronized, synchronized_property

if TYPE_CHECKING:
    from ..passes.forecast import Forecast, Forecaster
    from .sources import OpenedSource

__all__ = ["SourceOutlook"]

_MAX_WEIGHT_BYTES = 1 << 30
"Passes may rewrite each weight; for larger models a report would take too long and twice the memory."


@dataclass
class SourceOutlook:
    """Forecasts of one source rewritten in memory for `target`; nothing is run, verified or written."""

    source: OpenedSource
    target: str

    @synchronized_property
    def _plan_forecaster(self) -> Forecaster:
        from .pipeline import make_forecaster

        return make_forecaster(self.target, self.source.package)

    @synchronized_property
    def _source_forecast(self) -> Forecast:
        return self._plan_forecaster(self.source.program)

    def forecast(self, passes: Sequence[str]) -> FixForecast | str:
        """Forecast the source rewritten by `passes`, named as in findings; the reason, where that is not done."""
        return self._forecast_rewrite(passes=",".join(name.removeprefix("ane::") for name in passes))

    def forecast_preset(self, preset: str) -> FixForecast | str:
        """Forecast the source rewritten by `preset`, of which the guard reverts what does not pay."""
        return self._forecast_rewrite(preset=preset)

    @synchronized
    def _forecast_rewrite(self, **chosen: Any) -> FixForecast | str:
        from ..passes.guard import Guard
        from .rewrite import RewriteOptions
        from .rewrite_steps import apply_and_verify, plan_rewrite

        if self.source.package is not None and self.source.package.weight_bytes > _MAX_WEIGHT_BYTES:
            return "the model has more than 1 GiB of weights"
        plan = plan_rewrite(RewriteOptions(self.source.program, target=self.target, verify=False, **chosen))
        measuring = [rule.name for rule in plan.rules if rule.accepts_sampled]
        if measuring:
            return f"{measuring[0]} has to run the model to measure values"
        try:
            after = self._plan_forecaster(apply_and_verify(plan, self.source).after.copy.program)
        except AnePassesError as error:
            # A report must not fail because a rewrite does: the forecast says why there is none.
            return f"the rewrite fails: {error}"
        fault = Guard(self._plan_forecaster).find_fault(self._source_forecast, after)
        return FixForecast(self._source_forecast, after, "" if fault is None else fault.words)

    @synchronized
    def recognize(self) -> str:
        """Return the kind of language model that `adapt` recognizes in the source; empty if it is not one, or needs no
        change."""
        from ..transforms.decoder import has_cache, recognize_decoder
        from ..transforms.encoder import recognize_encoder

        program, source = self.source.program, self.source
        if len(program.functions) != 1 or source.keeps_interface or source.upgraded:
            return ""
        try:
            if has_cache(program):
                recognize_decoder(program, source.name)
                kind = "decoder with a cache"
            else:
                kind = "encoder of token ids" if recognize_encoder(program, source.name).ids else ""
        except InputError:
            # The recognizers raise InputError for every other kind of model.
            return ""
        return kind if kind and self._source_forecast.unsupported else ""  # last: it is slow
