"""Which encoders and decoders become packages without unsupported ops, and are results and tokens the same?

    python -m tests.lab.language_models [NAME ...] [--record]
    python -m tests.lab.language_models --billion [--record]

All go through `adapt`, which compares them with the source on random feeds: encoders at several lengths, decoders of
`builders.py` in each form of their cache over steps, and over 16 tokens generated with both, behind a prompt in chunks.
Of decoders, the script generate.py then continues a prompt of 40 tokens on the reference runtime, and its tokens and
logits are compared with those of the torch module. `--record` writes the rows to the table in README.md. `--billion`
measures time and memory of `adapt` on a decoder of a billion weights instead (`large.py`), which needs 12 GB of memory
and 8 GB of disk. The exit code is 1 where a package is not written, or a bound is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import mil_ane_passes as ane
from tests.lab.language_models import large

TARGET = "m4"
PREFILL, PROMPT, STEPS = 4, 40, 16
SHORTER = 13
"The tokens of an encoder of flexible length: fewer than the most, so that they are padded."
PAGE = Path(__file__).parent / "README.md"
HEAD = ("| model | form | ops | unsupported on m4 | % of ops on the ANE | % of time | transitions | "
        "compared with the source |\n| --- | --- | --- | --- | --- | --- | --- | --- |")
BEGIN, END = "<!-- table -->\n", "<!-- end of the table -->\n"


def measure(name: str, form: str, folder: Path) -> tuple[str, bool]:
    """Adapt one model; returns its row of the table, and whether its package was written."""
    from tests.lab.language_models.builders import convert

    try:
        report, outcome = (_adapt_encoder if form == "encoder" else _adapt)(
            name, form, convert(name, form), folder)
    except ane.InputError as error:
        return f"| {name} | {form} | | | | | | {' '.join(str(error).split())} |", False
    pairs = list(zip(_list_figures(report.before), _list_figures(report.after), strict=True))
    row = f"| {name} | {form} | {' | '.join(f'{old} → {new}' for old, new in pairs)} | {outcome} |"
    return row, report.status == "written"


def _list_figures(figures: Mapping[str, Any]) -> list[str]:
    return [str(figures["ops"]), str(sum(figures["unsupported"].values())), f"{figures['share']:.0f}",
            f"{figures['time_share']:.0f}", str(figures["transitions"])]


def _adapt(name: str, form: str, source: Path, folder: Path) -> Any:
    report = ane.adapt(source, folder / name, prefill=PREFILL, target=TARGET)
    if report.status != "written":
        return report, report.reason
    return report, (f"{len(report.tokens)} tokens the same, logits within {report.logit_error:.0e}; "
                    f"{_continue_prompt(name, form, folder / name)}")


def _continue_prompt(name: str, form: str, folder: Path) -> str:
    """Continue a prompt with the script of the folder and with the torch module; returns how far they agree."""
    from mil_ane_passes.report.decoder.generate import Decoder, open_by

    prompt = np.random.default_rng(5).integers(0, 96, PROMPT).tolist()
    command = [sys.executable, str(folder / "generate.py"), "--ids", ",".join(map(str, prompt)), "--steps", str(STEPS),
               "--runtime", "reference", "--json"]
    fixed = make_encoded(name, SHORTER if form.endswith("flexible") else None)
    if fixed:
        np.savez(folder.parent / "inputs.npz", **fixed)
        command += ["--inputs", str(folder.parent / "inputs.npz")]
    made = subprocess.run(command, capture_output=True, text=True, check=True, env={
        **os.environ, "PYTHONPATH": str(Path(ane.__file__).parent.parent)})
    found = json.loads(made.stdout)["tokens"]
    expected, logits = run_torch(name, prompt, STEPS, fixed)
    same = next((place for place, (x, y) in enumerate(zip(found, expected)) if x != y), STEPS)
    chunked = Decoder(folder, open_by("reference"), fixed).feed(prompt)
    error = float(np.abs(chunked - logits[0]).max() / np.abs(logits[0]).max())
    parted = ""
    if same < STEPS:
        gap = float((logits[same].max() - logits[same][found[same]]) / np.abs(logits[same]).max())
        parted = f", then one whose logit is {gap:.0e} below the largest{_compare_source(name, prompt, expected)}"
    return f"behind {PROMPT} tokens {same} those of torch{parted}, logits within {error:.0e}"


def _compare_source(name: str, prompt: Sequence[int], expected: Sequence[int]) -> str:
    """Return how many tokens of torch the source generates, in the precision in which the script runs the result."""
    from tests.lab.language_models.builders import DECODERS, MORE_DECODERS, convert, make_mask

    if name not in DECODERS and name not in MORE_DECODERS:
        return ""
    source = ane.runtime.Runtime(ane.load(convert(name, "states")).program, precision="float16")
    state: dict[str, Any] = {}
    tokens = list(prompt)
    ids = tokens
    for _ in range(STEPS):
        logits = source({"inputIds": np.int32([ids]), "causalMask": make_mask(len(ids), len(tokens))}, state)["logits"]
        ids = [int(np.argmax(logits[0, -1]))]
        tokens += ids
    found = tokens[len(prompt):]
    same = next((place for place, (x, y) in enumerate(zip(found, expected)) if x != y), STEPS)
    return f" (the source, traced with states, has {same} at float16)"


def make_encoded(name: str, length: int | None = None) -> dict[str, Any]:
    """Make what an encoder returns for a decoder with cross attention: random, its last quarter hidden by a mask."""
    from tests.lab.language_models.builders import CROSS_DECODERS, ENCODED, HEADS, WIDTH

    if name not in CROSS_DECODERS:
        return {}
    length = length or ENCODED
    found = {"encoded": np.random.default_rng(7).standard_normal((1, length, HEADS * WIDTH)).astype(np.float16)}
    if CROSS_DECODERS[name].masked:
        hidden = np.arange(length) >= length - length // 4
        found["encoderMask"] = np.where(hidden, -40000, 0).astype(np.float16)[None, None, None]
    return found


def run_torch(
    name: str, ids: Sequence[int], steps: int, fixed: Mapping[str, Any] | None = None
) -> tuple[list[int], list[Any]]:
    """Return the likeliest tokens by the torch module in float64, without a cache, and its logits at each step.

    `fixed` is what an encoder returned, and a mask of its keys if there is one.
    """
    import torch

    from tests.lab.language_models.builders import CROSS_DECODERS, DECODERS, MORE_DECODERS, RECURRENT, package

    known = {**DECODERS, **MORE_DECODERS, **CROSS_DECODERS, **RECURRENT}
    model, tokens, logits = known[name].make().double(), list(ids), []
    encoded = {key: torch.tensor(value).double() for key, value in (fixed or {}).items()}

    def run() -> Any:
        if not encoded:
            return model(torch.tensor([tokens]), use_cache=False)
        return model(encoder_outputs=package.modeling_outputs.BaseModelOutput(encoded["encoded"]),
                     attention_mask=encoded.get("encoderMask"), decoder_input_ids=torch.tensor([tokens]),
                     use_cache=False)

    with torch.no_grad():
        for _ in range(steps):
            logits.append(run().logits[0, -1].numpy())
            tokens.append(int(logits[-1].argmax()))
    return tokens[len(ids):], logits


def _adapt_encoder(name: str, form: str, source: Path, folder: Path) -> Any:
    report = ane.adapt(source, folder / name, target=TARGET)
    if report.status != "written":
        return report, report.reason
    where = f"at {len(report.lengths)} lengths" if report.lengths else "on random features"
    return report, f"the same {where}, within {report.result_error:.0e}"


def write_page(rows: Sequence[str]) -> None:
    """Put rows into the table of the page, in the place of those of the same model and form."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    table, _, after = rest.partition(END)
    made = {_get_key(row): row for row in (*table.splitlines()[2:], *rows)}
    ordered = [made[key] for key in _list_keys() if key in made]
    PAGE.write_text(before + BEGIN + "\n".join((HEAD, *ordered)) + "\n" + END + after, encoding="utf-8")


def _get_key(row: str) -> tuple[str, str]:
    _, name, form, *_ = (cell.strip() for cell in row.split("|"))
    return name, form


def _list_keys(names: Sequence[str] = ()) -> list[tuple[str, str]]:
    """List the models with their forms, in the order of the table."""
    from tests.lab.language_models.builders import (
        CROSS_DECODERS,
        DECODERS,
        ENCODERS,
        FORMS,
        MORE_DECODERS,
        RECURRENT,
    )

    groups = {("encoder",): ENCODERS, FORMS: DECODERS, ("states",): MORE_DECODERS, ("cross",): CROSS_DECODERS,
              ("recurrent",): RECURRENT}
    known = {name: forms for forms, group in groups.items() for name in group}
    known |= {name: ("cross", "cross, flexible") for name, each in CROSS_DECODERS.items() if each.masked}
    return [(name, form) for name in names or known for form in known[name]]


def main(arguments: Sequence[str]) -> int:
    from tests.lab.models.fired import silence_warnings

    parser = argparse.ArgumentParser(prog="python -m tests.lab.language_models", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--billion", action="store_true")
    parser.add_argument("--layers", type=int, default=large.LAYERS, help="with --billion: fewer, to try it")
    given = parser.parse_args(arguments)
    if given.billion:
        return _measure_large(given.layers, given.record)
    print(HEAD)
    rows, good = [], True
    for name, form in _list_keys(given.names):
        with tempfile.TemporaryDirectory() as folder, silence_warnings():
            row, written = measure(name, form, Path(folder))
        rows.append(row)
        good = good and written
        print(row, flush=True)
    if given.record:
        write_page(rows)
    return 0 if good else 1


def _measure_large(layers: int, records: bool) -> int:
    """Measure `adapt` on a large decoder; 1 if a bound is missed."""
    with tempfile.TemporaryDirectory() as folder:
        found = large.measure(Path(folder), layers)
    print(large.format_section(found))
    if records:
        if layers != large.LAYERS:
            raise SystemExit(f"--layers {layers} is not recorded: the bounds are those of {large.LAYERS}")
        large.record_costs(PAGE, found)
    return int(not all(large.is_within_bounds(name, found) for name in large.BOUNDS))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
