"""Find inputs whose shape is not fixed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from coremltools.converters.mil.mil import Builder, Var, types
from coremltools.converters.mil.mil.types.symbolic import any_symbolic

from ..ane.partitions import iterate_rows_by_function
from ..ir.query import get_consumers
from ..passes.contract import Community, Example, Hit, Miss, PlanRule, Vendor
from ..passes.evidence import cite_surgery_tip
from ..passes.examples import make_example
from ..passes.plan import Plan, Row
from ..utils.text_format import format_count
from ._plan_rules import map_inputs_to_ops
from ._shape_flexibility import describe_flexible_shape


class FlexibleShapes(PlanRule):
    """An input has no fixed shape, so the ANE runs its default shape at most.

    why     For ranged shapes Apple says: only the default shape runs on the Neural Engine, the others on GPU or CPU; a
            measurement has 0 % of the ANE for them. Enumerated shapes should all be able to run there, and do so in
            some reports; in others they do not (an A13 with fp16, a model with layer norm, one run of two at 2 %).
            From iOS 17.4 on the hint reshapeFrequency = infrequent has Core ML optimise anew for each shape.
    when    Each input with a dimension that is not fixed. The package says whether it is a range or a list of shapes; a
            program in memory does not. It is reported at the first op that reads the input. The answers for ops are
            those for the default shape.
    fix     Fix the shape and pad to the largest; or list the shapes (EnumeratedShapes); or give each shape a function
            of its own (multifunction models, iOS 18); or set the hint, where the shape seldom changes.
    """

    code, slug = "ANE504", "flexible-shapes"
    confidence = "high"
    advice = "Fix the shape and pad to the largest one, list the shapes, or give each shape a function of its own."
    evidence = (
        Vendor(
            "with range flexibility only the input's default shape is supported on the Neural Engine, others run on "
            "GPU or CPU; with enumerated shapes each should be able to run there (an Apple engineer)",
            source="https://developer.apple.com/forums/thread/724930",
            chip="A13",
        ),
        Vendor(
            "use enumerated shapes for best performance; up to 128",
            source="https://apple.github.io/coremltools/docs-guides/source/flexible-inputs.html",
        ),
        Vendor(
            "reshapeFrequency infrequent: Core ML re-optimizes for a new shape if possible; the default does not",
            source="https://developer.apple.com/documentation/coreml/mlreshapefrequencyhint",
            os="iOS 17.4",
        ),
        Community(
            "ranged: ANE at 75 % for the default shape, 0 % for random ones; enumerated, random: 71 % in one "
            "run, 2 % in another",
            source="https://github.com/apple/coremltools/issues/2370",
            date="2024-10-29",
        ),
        Community(
            "contradicts the above: a model with a flexible shape does not use the ANE at all",
            source="https://github.com/apple/coremltools/issues/1764",
            date="2023-02-09",
        ),
        cite_surgery_tip(
            "use static and known shapes, or pad to the largest: the ANE's tasks are fixed at compile time"
        ),
        Community(
            "enumerated shapes in fp16 run on the CPU",
            chip="A13",
            source="https://developer.apple.com/forums/thread/763368",
        ),
        Community(
            "a layer_norm of rank 3 keeps a model with enumerated shapes off the ANE; ranged and fixed ones run",
            source="https://github.com/apple/coremltools/issues/1909",
            date="2023-07-10",
        ),
    )

    def match_plan(self, plan: Plan) -> Iterator[Hit | Miss]:
        for name, rows in iterate_rows_by_function(plan):
            function = plan.program.functions[name]
            described = plan.package.description(name).input if plan.package is not None else ()
            features = {feature.name: feature for feature in described}
            inputs = [var for var in function.inputs.values() if not types.is_state(var.sym_type)]
            found = {
                var: said
                for var in inputs
                if (said := describe_flexible_shape(features.get(var.name), var)) is not None
            }
            reach = _describe_affected_ops(rows) if found else ""
            for var, at in map_inputs_to_ops(found, rows).items():
                yield Hit(at, covers=get_consumers(var), note=f"input '{var.name}' {found[var]}; {reach}")

    def examples(self) -> Iterable[Example]:
        yield make_example("batch", lambda x: Builder.relu(x=x, name="y"), x=(None, 8))
        yield make_example(
            "one of two", lambda x, z: (Builder.relu(x=x, name="y"), Builder.relu(x=z, name="w")), x=(1, None), z=(2, 3)
        )
        yield make_example("fixed", lambda x: Builder.relu(x=x, name="y"), reason="", x=(2, 8))


def _describe_affected_ops(rows: list[Row]) -> str:
    """Describe how many ops of the function have such a dimension."""
    count = sum(any(map(_has_dynamic_shape, row.op.outputs)) for row in rows)
    return f"{format_count(count, 'op')} of {len(rows)} make{'s' * (count == 1)} what has such a dimension"


def _has_dynamic_shape(var: Var) -> Any:
    return types.is_tensor(var.sym_type) and any_symbolic(var.shape)
