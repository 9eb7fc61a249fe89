"""Latency of real architectures before and after the preset full, as `python -m tests.lab.models.whole` measures it.

It needs no torch: packages that were converted earlier are predicted and rewritten, for more chips than whole.json has,
without the equivalence check that those rows have. What each rewrite brings is the step that it makes when the rewrites
which stayed are applied one after the other.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import mil_ane_passes as ane
from mil_ane_passes.commands.pipeline import make_forecaster, make_measures
from mil_ane_passes.equivalence.user_inputs import UserInputs
from mil_ane_passes.passes.engine import RunSettings, run_rewrites
from mil_ane_passes.passes.forecast import Forecast
from mil_ane_passes.passes.guard import is_guarded
from mil_ane_passes.passes.pipeline import select_rewrites
from tests.lab import records

RECORD = Path(__file__).with_name("whole_latency.json")
TARGETS = ("m1", "m2", "m4", "m5", "a17")
SLOWER = 1.02
"Factor above which a row counts as slower."
FIXES = "fixes of wrong numbers"
"The one reason for which a row may be slower."
TRANSFORMERS = frozenset("""
ViT; Swin; SegFormer; Wav2Vec2; Whisper; AST; Parakeet conformer; BERT; DistilBERT; GPT-2; T5; Llama; Gemma; DETR;
DPT (depth); SAM, vision encoder; SAM, mask decoder; Swin2SR; CLIP, vision; CLIP, text; DINOv2; Whisper, encoder;
Wav2Vec2, CTC log probabilities; HuBERT, log of softmax; BERT, mask as input; BERT, mask as input, exported;
BERT, classic mask; torch.nn.Transformer; DistilBERT, mask as input; RoBERTa, mask as input;
MPNet, sentence embedding; ELECTRA; ALBERT; GPT by hand; GPT-2, mask as input; GPT-2, its own mask;
Llama, mask as input; Mistral; Qwen2; Qwen3; Qwen3, exported; Phi-3; Gemma 2; T5 encoder, mask as input
""".replace("\n", " ").strip().split("; "))


@dataclass(frozen=True)
class LatencyResult:
    """One architecture on one chip: microseconds (estimate, low, high), and the factor that each rewrite makes.

    `fixes` are rewrites that fix wrong numbers, which the guard leaves alone. `off` are ops predicted off the ANE,
    `extrapolated` the microseconds of ops that no measurement of the chip covers, before and after.
    """

    architecture: str
    target: str
    before: tuple[float, float, float]
    after: tuple[float, float, float]
    off: tuple[int, int]
    extrapolated: tuple[float, float] = (0.0, 0.0)
    steps: dict[str, float] = field(default_factory=dict)
    fixes: tuple[str, ...] = ()

    @property
    def factor(self) -> float:
        """The time after in proportion to that before."""
        return self.after[0] / self.before[0]

    @property
    def is_slower(self) -> bool:
        return self.factor > SLOWER

    @property
    def reason(self) -> str:
        """Why it is slower, if rewrites that fix wrong numbers account for it; "" for no such reason."""
        slow = ", ".join(f"`{name}`" for name, step in self.steps.items() if step > 1.001)
        others = math.prod(step for name, step in self.steps.items() if name not in self.fixes)
        return f"{FIXES}: {slow}" if others <= SLOWER else ""


def measure_latency(name: str, package: Path, target: str) -> LatencyResult:
    """Rewrite `package` for `target` with the guard, and estimate it before, after, and after each rewrite."""
    report = ane.rewrite(package, preset="full", target=target, verify=False)
    source = ane.load(package)
    forecast = make_forecaster(target, source)
    first = forecast(source.program)
    last = report.predicted[1] if report.predicted else first
    kept = {trace.rule for trace in report.traces if trace.fired}
    rules = [rule for rule in select_rewrites("full") if rule.name in kept]
    _, draw = make_measures(UserInputs.of(None, None), source.description)
    steps, spent = {}, _get_microseconds(first)
    for rule in rules:
        run_rewrites([rule], source.program, RunSettings(target, None, draw))
        now = _get_microseconds(forecast(source.program))
        steps[rule.name], spent = round(now / spent, 4), now
    fixes = tuple(rule.name for rule in rules if not is_guarded(rule))
    off = (_count_off(first), _count_off(last))
    return LatencyResult(name, target, _get_range(first), _get_range(last), off,
                         (_get_extrapolated(first), _get_extrapolated(last)), steps, fixes)


def _get_microseconds(forecast: Forecast) -> float:
    assert forecast.latency_us is not None
    return forecast.latency_us


def _get_range(forecast: Forecast) -> tuple[float, float, float]:
    central, low, high = (round(value or 0.0, 1) for value in (
        forecast.latency_us, forecast.latency_low_us, forecast.latency_high_us))
    return central, low, high


def _get_extrapolated(forecast: Forecast) -> float:
    (chip,) = forecast.latencies
    return round(chip.extrapolated_us, 1)


def _count_off(forecast: Forecast) -> int:
    return forecast.ops - (forecast.on_ane or 0)


def read_latencies() -> list[LatencyResult]:
    """Read the rows of the last record."""
    return [LatencyResult(**{name: tuple(value) if isinstance(value, list) else value for name, value in row.items()})
            for row in records.read_record(RECORD, [])]


def write_latencies(found: Iterable[LatencyResult], order: Sequence[str]) -> None:
    """Put these rows in the place of earlier ones of the same architecture and target."""
    table = {(each.architecture, each.target): each for each in [*read_latencies(), *found]}
    rows = sorted(table.values(), key=lambda each: (order.index(each.architecture), TARGETS.index(each.target)))
    RECORD.write_text("[\n" + ",\n".join(json.dumps(asdict(each)) for each in rows) + "\n]\n")


def compute_geometric_mean(factors: Iterable[float]) -> float:
    """Compute the geometric mean; 1 of none."""
    values = list(factors)
    return math.exp(sum(map(math.log, values)) / len(values)) if values else 1.0


LATENCY_HEAD = records.format_head(("architecture", "target", "latency, ms", "change", "off the ANE", "rewrites"))


def format_latency(found: LatencyResult) -> str:
    """Format a row."""
    before, after = ("{:.3f} ({:.3f} to {:.3f})".format(*(value / 1e3 for value in each))
                     for each in (found.before, found.after))
    steps = ", ".join(f"{name} {step - 1:+.1%}" for name, step in found.steps.items())
    return records.format_row((found.architecture, found.target, f"{before} -> {after}", f"{found.factor - 1:+.1%}",
                               f"{found.off[0]} -> {found.off[1]}", steps or "none"))


def format_latency_summary() -> str:
    """Format the record in a few lines, with a column for each chip."""
    table = read_latencies()
    columns = [dict(_summarize([each for each in table if each.target == target])) for target in TARGETS]
    return records.format_table(["", *TARGETS], ([what, *(column[what] for column in columns)] for what in columns[0]))


def _summarize(rows: Sequence[LatencyResult]) -> Iterator[tuple[str, str]]:
    transformers = [each for each in rows if each.architecture in TRANSFORMERS]
    slower = [each for each in rows if each.is_slower]
    yield "architectures, transformers among them", f"{len(rows)}, {len(transformers)}"
    for words, some in (("all", rows), ("transformers", transformers)):
        yield f"latency after, geometric mean over {words}", _format_factor(each.factor for each in some)
        yield f"without fixes of wrong numbers, {words}", _format_factor(
            math.prod(step for name, step in each.steps.items() if name not in each.fixes) for each in some)
    yield "faster by more than 2 %", str(sum(each.factor < 1 / SLOWER for each in rows))
    yield "slower by more than 2 %", str(len(slower))
    yield f"of these: {FIXES}", str(sum(bool(each.reason) for each in slower))


def _format_factor(factors: Iterable[float]) -> str:
    return f"{100 * compute_geometric_mean(factors):.1f} %"


def format_steps() -> str:
    """Format what each rewrite brings: on how many rows, and the geometric mean of its step there."""
    table = read_latencies()
    names = sorted({name for each in table for name in each.steps})
    rows = []
    for name in names:
        cells = []
        for target in TARGETS:
            steps = [each.steps[name] for each in table if each.target == target and name in each.steps]
            cells.append(f"{compute_geometric_mean(steps) - 1:+.1%} ({len(steps)})" if steps else "")
        fixes = any(name in each.fixes for each in table)
        rows.append([f"`{name}`", "fix" if fixes else "", *cells])
    return records.format_table(["rewrite", "of wrong numbers", *TARGETS], rows)


def format_slower() -> str:
    """Format the rows that are slower by more than 2 %, with the reason; chips with the same reason share a line."""
    lines: dict[tuple[str, str], list[str]] = {}
    for each in read_latencies():
        if each.is_slower:
            lines.setdefault((each.architecture, each.reason), []).append(f"{each.target} {each.factor - 1:+.0%}")
    return records.format_table(["architecture", "slower", "by"],
                                ((name, ", ".join(chips), reason) for (name, reason), chips in lines.items()))
