"""Writes README.md from the records of both experiments and the lists of attacks: python -m tests.lab"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from tests.lab.fuzz_programs.beside import BESIDE, Tally
from tests.lab.records import format_table, read_record

HERE = Path(__file__).parent
README = HERE / "README.md"
MUTATION, FUZZ = HERE / "mutation" / "result.json", HERE / "fuzz_programs" / "result.json"
PASSES = HERE / "fuzz_passes" / "result.json"

_README_TEMPLATE = """# How far the equivalence check of `rewrite` can be relied on

Two experiments attack the check from both sides: planted errors that it has to notice, and random programs on which
rewrites are right and it has to be silent. The tables are made from the records by `python -m tests.lab`.

## Planted errors

{mutation_command}

Each error replaces one piece of source text of a rewrite (`mutation/mutants.py`), in a fork that imports the package
anew. `ane.rewrite` then runs that pass with its check on, on the pass's own firing examples and on directed programs
(`mutation/directed.py`) for what those do not reach; programs that the check rejects without the error are left out. An
error is *caught* when the check, or the engine's own checks of shapes and dtypes, rejects the result on one of them.
What passes is judged on many more draws (`mutation/judge.py`: other seeds, x 30 to x 1e-6, zeros of both signs,
infinities, NaN, the ends of fp16, ties, negative integers, eight sizes): *missed* changes a result there that the
rewrite without the error has right, *equivalent* changes none. The score is caught / (caught + missed).

{mutation}

{verdicts}

## Random programs

{fuzz_command}

A seed is a program of one to three kinds of op chains (`fuzz_programs/kinds.py`) on values of rank 0 to 5, for iOS15 to
iOS18, in fp16 or (15 %) fp32, with a flexible batch in a quarter. Each is linted, rewritten with preset full for M4 and
M1 (some for older chips, too) with the check on, and rewritten again. `--only SEED` prints one program and what became
of it. A pass that the check leaves out is judged again at float64 on six other draws: *false alarm* is equal there,
*different* is not, by more than the rewrites declare (such as infinities that spread, or constants folded in fp16).
Either way the pass is left out, and nothing wrong is delivered. Counts are runs (one program on one target).

{fuzz}

{failures}

{rules}

## Beside whole runs

{beside_commands}

The check computes once what both programs share, and at float64 computes at float32 what is before all that differs.
Here it is held against a check that runs one program after the other, each in full at every precision. The pairs: each
random program and its distinct results of preset full, *rewritten*; and these results and the program itself with an
error in one op (`fuzz_programs/planted.py`: another constant or parameter, exchanged operands, another op or none),
*planted*. Some such errors change no result. Both ways have to give the same verdict, with the same failing runs, and
where nothing was computed at float32 the same bits of all outputs.

{beside}

{beside_differing}

## Passes of coremltools

    {passes_command}

A seed is a chain of two to five ops that coremltools fuses, moves or removes, with constants of many shapes
(`fuzz_passes/chains.py`). Each pass of the default pipeline runs on it, corrected as in `ane.pipeline()`
(`mil_ane_passes/passes/corrected_passes.py`), and what changes is compared with the program before. `--plain` runs
coremltools' own passes, of which several give other results, fail, or change the constants of the caller.

{passes}

{attack}
"""


def build_readme() -> str:
    """README.md, from the records."""
    mutation, fuzz, beside, passes = map(read_record, (MUTATION, FUZZ, BESIDE, PASSES))
    return _README_TEMPLATE.format(
        mutation_command=_format_command(mutation),
        mutation=_format_mutation_counts(mutation),
        verdicts=_format_verdicts(mutation),
        fuzz_command=_format_command(fuzz),
        passes_command=f"{passes['command']}    # {passes['date']}, {passes['seconds'] // 60} min on a shared core",
        passes=_format_pass_counts(passes),
        fuzz=_format_fuzz_counts(fuzz),
        failures=_format_failures(fuzz),
        rules=_format_rules(fuzz),
        beside_commands="\n".join(_format_shard(*each, beside["date"]) for each in beside["shards"].items()),
        beside=_format_pair_counts(beside),
        beside_differing=_format_differing(beside),
        attack=(HERE / "attacks.md").read_text().strip(),
    )


_EXPLAINED_FAULTS = {("common::const_elimination", "wrong"): "coremltools computes an interleaved concat of constants "
                                                              "as a plain one"}
"What is left, by pass and kind: values that are wrong before any pass runs."


def _format_pass_counts(record: dict[str, Any]) -> str:
    faults = [f"`{name}`: {kind}, {count} ({_EXPLAINED_FAULTS.get((name, kind), 'not explained')})"
              for name, kind, count in record["faults"]]
    return (f"{record['programs']:,} programs with coremltools {record['coremltools']}: "
            f"{'; '.join(faults) if faults else 'no pass changed a result or a constant, and none failed'}.")


def _format_command(record: dict[str, Any]) -> str:
    return f"    {record['command']}    # {record['date']}, {record['seconds'] // 60} min on one shared core"


def _format_mutation_counts(record: dict[str, Any]) -> str:
    directed = sum(verdict["directed"] for verdict in record["verdicts"])
    return format_table(["errors", "caught", "of these by directed programs only", "missed", "equivalent", "score"], [[
        record["mutants"], record["caught"], directed, record["missed"], record["equivalent"],
        f"{100 * record['score']:.1f} %"]])


def _format_verdicts(record: dict[str, Any]) -> str:
    from .mutation.mutants import MUTANTS

    known = {mutant.name: mutant for mutant in MUTANTS}
    rows = [[f"`{each['name']}`", f"`{known[each['name']].rule}`", known[each["name"]].wrong,
             each["outcome"] + (" (directed)" if each["directed"] else "")] for each in record["verdicts"]]
    return format_table(["error", "pass", "what is wrong", "outcome"], rows)


def _format_fuzz_counts(record: dict[str, Any]) -> str:
    failures = record["failures"]
    return format_table(["programs", "rejected by pymil", "rewritten", "runs", *failures],
                         [[f"{record['programs']:,}", record["rejected_by_pymil"], f"{record['rewritten']:,}",
                           f"{record['runs']:,}", *failures.values()]])


def _format_failures(record: dict[str, Any]) -> str:
    if not record["failed"]:
        return "No run failed."
    counted = Counter((failure["kind"], failure["rule"]) for failure in record["failed"])
    seeds = {key: sorted({failure["seed"] for failure in record["failed"]
                          if (failure["kind"], failure["rule"]) == key}) for key in counted}
    return format_table(["failure", "pass", "runs", "seeds"], [
        [kind, f"`{rule}`", count, ", ".join(map(str, seeds[kind, rule][:6]))]
        for (kind, rule), count in counted.most_common()])


def _format_rules(record: dict[str, Any]) -> str:
    fired = sorted(record["rules"].items(), key=lambda item: (-item[1], item[0]))
    return (f"{len(fired)} passes fired, at so many matches: "
            + ", ".join(f"`{rule}` {count:,}" for rule, count in fired) + ".")


def _format_shard(seeds: str, held: dict[str, Any], date: str) -> str:
    """The command for these seeds, and how far it came: it goes on from there."""
    return (f"    python -m tests.lab.fuzz_programs --beside-whole-runs --seeds {seeds} --record"
            f"    # {date}, {held['seconds'] // 60} min on a busy core, up to seed {held['next'] - 1}")


def _sum_shards(record: dict[str, Any]) -> Tally:
    total = Tally()
    for held in map(Tally.from_dict, record["shards"].values()):
        total.programs += held.programs
        total.pairs += held.pairs
        total.runs += held.runs
        total.lowered += held.lowered
        total.differing += held.differing
    return total


def _format_pair_counts(record: dict[str, Any]) -> str:
    total = _sum_shards(record)
    kinds = sorted(total.pairs)
    return format_table(
        ["programs", "pairs", *kinds, "runs of the same bits", "runs partly at float32", "differences"],
        [[f"{total.programs:,}", f"{total.pairs.total():,}", *(f"{total.pairs[kind]:,}" for kind in kinds),
          f"{total.runs:,}", f"{total.lowered:,}", len(total.differing)]])


def _format_differing(record: dict[str, Any]) -> str:
    found = _sum_shards(record).differing
    if not found:
        return "No pair is judged otherwise."
    return format_table(["seed", "pair", "difference"], [[each["seed"], each["pair"], each["what"]] for each in found])


if __name__ == "__main__":
    README.write_text(build_readme())
