"""What the tests of convolutions and pools share: laws held against the op before, and what is still refused."""

from __future__ import annotations

import numpy as np

from mil_ane_passes.ane.prediction import predict_plan
from mil_ane_passes.equivalence.comparison import Strictness, compare_outputs
from mil_ane_passes.ir.clone import clone_program
from mil_ane_passes.passes.contract import Exactness, Hit
from mil_ane_passes.passes.engine import apply_rewrite
from mil_ane_passes.passes.registry import find_rewrite, get_all_rules
from mil_ane_passes.runtime import Runtime


def configured(name, **options):
    return find_rewrite(name).configured(**options)


OLD = {"ANE228", "ANE229"}
"What only old chips refuse; it counts where one of them is named."
TRAPS = {"ANE512"}
"What takes minutes to compile: kernels count here, strides do not."


def refused(program, target):
    """The ops that a rule says some chip of the target rejects, certainly or not, or takes minutes to compile."""
    rules = [rule() for rule in get_all_rules().values() if rule.refuses or rule.code in TRAPS]
    _, found = predict_plan(program, [rule for rule in rules if rule.code not in OLD or target == "a13"], target=target)
    return [item.answer.op.op_type for item in found if isinstance(item.answer, Hit)
            and not (item.rule.code in TRAPS and item.answer.note.startswith("stride"))]


def drawn(program, seed=0, extent=9):
    """Normal draws that fp16 has; symbolic dimensions are `extent`."""
    random = np.random.default_rng(seed)
    return {name: random.standard_normal([extent if not isinstance(size, (int, np.integer)) else size
                                          for size in var.shape]).astype(np.float16).astype(np.float32)
            for name, var in program.functions["main"].inputs.items()}


def holds(program, name, *, target="all", exactness=Exactness.ROUNDING, extent=9, halves=0, **options):
    """Run the rewrite in place; its hits and reasons, after the values were held against the program before.

    `halves`: how many halves of a unit in the last place of the largest input the rewrite's own bound allows in fp16,
    where the program before happens to be nearer than that.
    """
    before = clone_program(program)
    trace = apply_rewrite(configured(name, **options), program, target=target)
    program.validate()
    feeds = drawn(before, extent=extent)
    truth = None
    for precision in ("float64", "float16"):
        old, new = (Runtime(each, precision=precision)(feeds) for each in (before, program))
        within = halves * np.spacing(np.float16(max(np.abs(x).max() for x in feeds.values()))) / 2
        wrong = [str(each) for each in compare_outputs(old, new, Strictness(exactness), truth) if not each.passed
                 and (truth is None or not np.abs(new[each.output] - truth[each.output]).max() <= within)]
        assert not wrong, (precision, wrong)
        truth = truth or old
    return trace
