"""The generated tables of the pages of documentation."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from mil_ane_passes.ane.latency_parameters import load_parameters
from mil_ane_passes.neuralnetwork.layer_rewriting import get_layer_rewrites
from mil_ane_passes.neuralnetwork.layer_rules import get_layer_rules
from mil_ane_passes.passes.contract import Rewrite, Rule
from mil_ane_passes.passes.registry import fixes_for, get_all_rules
from mil_ane_passes.torch_frontend.registry import collect_patch_statuses as patch_findings
from tests.ane.agreement import table as agreement_table
from tests.lab.benchmarks.table import format_conditions
from tests.lab.benchmarks.table import format_table as speed_table
from tests.lab.latency.proof import format_proofs
from tests.lab.models.whole_latency import format_latency_summary, format_slower, format_steps
from tests.lab.models.whole_table import format_summary
from tests.lab.records import format_table
from tests.lab.reliability.table import format_table as reliability_table
from tests.lab.upstream.__main__ import CaseCounts

ROOT = Path(__file__).parents[2]
SUITES = {"mil": "`mil/ops/tests`", "torch": "`frontend/torch/test/test_torch_ops.py`",
          "stateful": "`frontend/torch/test/test_torch_stateful_model.py`"}
SAYS = {"measured": "measured", "vendor": "Apple", "community": "reported"}
CHIP = re.compile("[AM][0-9]|iPhone")
SPEEDS = ("| `explain` of a rule |", "| `lint` of 100 ops |", "| `rewrite --no-verify` of 100 ops |",
          "| `rewrite --no-verify` of 1.0 GB |",
          "| `rewrite --no-verify` of 1.0 GB, beyond start-up | `cp -r` |",
          "| `lint` of 1.0 GB", "| `lint` of 10,000", "| preset full on 2,000 ops |",
          "| a call of resnet50 (", "| `ane.convert` of vocoder |", "| what the equivalence check of vocoder",
          "| check of resnet50 with one op changed |", "| rewrite with check of", "| memory of rewrite with check of")
"How the rows begin that the README has of the table of speed."
HUNDREDS = {"1": "layout, shape, size", "2": "ops that may be unsupported on the ANE", "3": "wrong numbers",
            "4": "weights", "5": "the model as a whole"}
HOST = {"silently miscompiled": "silently wrong values", "not implemented": "not implemented"}


def rules() -> str:
    """What is unsupported on the ANE, the rewrites that take its place or why none does, and who says so."""
    rows = []
    for rule in by_code():
        if rule.refuses and not issubclass(rule, Rewrite):
            fixes = ", ".join(named(fix.name) for fix in fixes_for(rule))
            rows.append((short(rule), rule.summary(), fixes or rule.advice, witnesses([rule])))
    return format_table(("code", "problem", "fix", "evidence"), rows)


def rewrites() -> str:
    """The rewrites that fix no unsupported op."""
    answers = {fix.name for rule in get_all_rules().values() if rule.refuses for fix in fixes_for(rule)}
    rows = [(short(rule), f"`{rule.name}`{fired(rule.name)}", f"{rule.preset}, {rule.exactness.value}", rule.summary())
            for rule in by_code()
            if issubclass(rule, Rewrite) and rule.name not in answers and rule.preset != "named"]
    return format_table(("code", "rewrite (matches / models)", "preset, exactness", "what it does"), rows)


def layer_rules() -> str:
    """Problems of NeuralNetwork layers on the ANE, and the rewrites within the format that fix them."""
    rows = []
    for code, rule in sorted(get_layer_rules().items()):
        fixes = [f"`{name}`" for name, each in get_layer_rewrites().items()
                 if each.fixes == code and not name.startswith("keep_")]
        rows.append(f"| {code} | `{rule.slug}` | {rule.summary} | {rule.confidence} | {', '.join(fixes) or '-'} |")
    return "\n".join(["| code | name | problem | confidence | fixed within the format by |", "|---|---|---|---|---|",
                      *rows])


def layer_rewrites() -> str:
    """Rewrites of NeuralNetwork layers."""
    rows = [f"| `{name}` | {', '.join(f'`{kind}`' for kind in each.kinds)} | {each.exactness.value} | {each.preset} | "
            f"{each.summary} |" for name, each in get_layer_rewrites().items() if not name.startswith("keep_")]
    return "\n".join(["| name | layers | exactness | preset | |", "|---|---|---|---|---|", *rows])


def asked_for() -> str:
    """The rewrites that no preset has, in one line."""
    rewrites = [rule for rule in by_code() if issubclass(rule, Rewrite) and rule.preset == "named"]
    return f"- By name only: {', '.join(f'{short(rule)} `{rule.name}`' for rule in rewrites)}."


def findings() -> str:
    """What is found besides, by the hundreds of the codes."""
    rows = []
    for digit, title in HUNDREDS.items():
        found = [rule for rule in by_code()
                 if rule.code[3] == digit and not rule.refuses and not issubclass(rule, Rewrite)]
        names = ", ".join(f"{short(rule)} `{rule.name}`" for rule in found)
        rows += [(f"{digit}xx", f"{title}: {names}", witnesses(found))] if found else []
    return format_table(("codes", "findings without a rewrite", "evidence"), rows)


def agreement() -> str:
    """What the prediction reproduces of what it was fitted to, as one sentence."""
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in agreement_table().splitlines()[2:]]
    return "- " + "; ".join(f"{what}: {compared}, {agreed}" for what, compared, agreed in rows) + "."


def named(name: str) -> str:
    """`pass` with what has to be known of it; the preset where it is not full."""
    rule = get_all_rules()[name]
    assert issubclass(rule, Rewrite), name
    words = [rule.exactness.value, *([rule.preset] if rule.preset != "full" else [])]
    return f"`{name}`{fired(name)} ({', '.join(words)})"


def fired(name: str) -> str:
    """In how many places of how many real architectures it fired when that was recorded last."""
    recorded = json.loads((ROOT / "tests" / "lab" / "models" / "fired.json").read_text())["full"]
    places = [row["fired"][name] for row in recorded.values() if name in row["fired"]]
    return f" {sum(places)}/{len(places)}" if places else ""


def short(rule: type[Rule]) -> str:
    return rule.code.removeprefix("ANE")


def witnesses(rules: Iterable[type[Rule]]) -> str:
    """`measured (M4), reported (M1, M2)`: the kinds of sources, and the chips that they name."""
    chips: dict[str, list[str]] = {}
    for each in (each for rule in rules for each in rule.evidence):
        named = chips.setdefault(SAYS[each.kind], [])
        named += [chip for chip in re.split(r", | and ", each.chip or "") if CHIP.match(chip) and chip not in named]
    return ", ".join(f"{kind} ({', '.join(named)})" if named else kind for kind, named in chips.items())


def by_code() -> list[type[Rule]]:
    return sorted(get_all_rules().values(), key=lambda rule: rule.code)


def patches() -> str:
    """The patches by what the installed host does without them."""
    groups: dict[str, list[str]] = {label: [] for label in (*HOST.values(), "refused, or fails")}
    for each in patch_findings():
        label = HOST.get((each.reason or "").partition(":")[0], "refused, or fails")
        links = ", ".join(link(source) for source in each.patch.upstream if source.startswith("https://"))
        name = f"{each.patch.code} `{each.patch.name}`"
        groups[label].append(f"{name}: {each.patch.title}{f' ({links})' if links else ''}")
    return format_table(("coremltools alone", "patch: what happens without it"),
                    [(label, "<br>".join(lines)) for label, lines in groups.items()])


def link(source: str) -> str:
    """`https://github.com/OWNER/NAME/issues/1 (page)` as a short link."""
    address = source.split(" ")[0]
    words = address.removeprefix("https://").removeprefix("github.com/").removesuffix("/").split("/")
    label = words[1] if "github.com" in address else words[0]
    label = f"#{words[3]}" if words[2:3] in (["issues"], ["pull"]) else label
    return f"[{label}]({address})"


def upstream() -> str:
    """What `python -m tests.lab.upstream --record` counted last."""
    counts = json.loads((ROOT / "tests" / "lab" / "upstream" / "counts.json").read_text())
    versions = ", ".join(f"{name} {version}" for name, version in counts.pop("versions").items())
    judged = [(suite, CaseCounts(**numbers)) for suite, numbers in counts.items()]
    head = (f"tests ({versions})", "rejected by coremltools' conversion", "came to a prediction", "judged", "passed",
            "explained", "share")
    return format_table(head, [(SUITES[suite], f"{each.not_converted:,}", f"{each.reached:,}",
                                f"{each.passed + each.failed:,}", f"{each.passed:,}", f"{each.failed:,}",
                                f"{each.share:.2f} %") for suite, each in judged])


def whole_latency() -> str:
    """Latency of the architectures before and after the preset full, by chip."""
    return format_latency_summary()


def whole_steps() -> str:
    """What each rewrite brings there."""
    return format_steps()


def whole_slower() -> str:
    """Which are slower, and why."""
    return format_slower()


def latency_proof() -> str:
    """Known models before and after, beside measurements."""
    return format_proofs()


def whole() -> str:
    """What the preset full makes of the architectures, whose number stands in the text above."""
    return without(format_summary(), "architectures ")


def reliability() -> str:
    """What was tried; the same over existing packages, which is recorded as well, takes no lines here."""
    return without(reliability_table(), "the same")


def without(table: str, beginning: str) -> str:
    return "\n".join(row for row in table.splitlines() if not row.startswith(f"| {beginning}"))


def measured() -> str:
    """Where and when; a package of 8 GB is recorded as well, and takes no line here."""
    return "\n".join(line for line in format_conditions().splitlines() if not line.startswith("- package, 8 GB: "))


def speed() -> str:
    """What the benchmarks recorded last, one row or two of each; they print all."""
    head, line, *rows = speed_table().splitlines()
    return "\n".join([head, line, *(row for row in rows if row.startswith(SPEEDS))])


def latency_errors() -> str:
    """The errors of the latency model on groups held out of the fit, per chip and kind."""
    record = (ROOT / "tests/lab/latency/README.md").read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in record
             if re.match(r"\| (all|m[1-6]) \|", row)]
    rows = [[chip, "call" if kind == "floor" else kind, *errors[:3]] for chip, kind, *errors in cells]
    return format_table(("chip", "kind", "rows", "median error", "nine of ten below"), rows)


def latency_ranges() -> str:
    """The factors of the ranges of the latency model, per chip and kind."""
    kinds = {"conv": "conv and linear", "attention": "attention", "elementwise": "elementwise", "floor": "call",
             "reduction": "reductions, norms", "movement": "data movement", "other": "other op types"}
    rows = []
    for name, chip in load_parameters()["chips"].items():
        basis = f"{chip['rows']} rows" if chip["rows"] else f"as {chip['relative']}, no row"
        rows.append((name, basis, *(f"{chip['spread'][kind]:.2f}" + ("*" if kind in chip["measured_kinds"] else "")
                                    for kind in kinds)))
    return format_table(("chip", "basis", *kinds.values()), rows)
