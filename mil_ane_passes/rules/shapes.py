"""Shapes: dimensions over a limit, ranks above 5, flexible inputs, broadcasts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from coremltools.converters.mil.mil import Block, Builder, Operation, Program, Var, types
from coremltools.converters.mil.mil.types.symbolic import any_symbolic, is_symbolic

from ..ane.limits import ExceededLimit, collect_evidence, find_exceeded_limit, find_limit
from ..ane.op_support import BEFORE_M4
from ..ane.partitions import iterate_rows_by_function
from ..ir.large_values import Shape, group_ops_by_large_values
from ..ir.query import get_const_value, get_consumers, get_type_info, is_compressed, is_const
from ..passes.contract import BlockRule, Community, Example, Hit, Miss, PlanRule, Rule, Severity, Vendor
from ..passes.evidence import cite_2020_layer_list, cite_m1_gpt_notes, cite_m4_study, cite_surgery_tip
from ..passes.examples import build_program, make_example, make_weight
from ..passes.plan import Plan, Row
from ..passes.targets import Generation
from ..utils.text_format import format_count
from ._plan_rules import format_op_types, map_inputs_to_ops
from ._sizes import select_generations

_M4_RANGE, _PRE_M4_RANGE = (f"N[1-65536]D[1-{most}]C[1-65536]H[1-{most}]W[1-{most}]" for most in (65536, 16384))
_BINARY_OPS = frozenset({"add", "sub", "mul", "real_div", "maximum", "minimum", "pow", "floor_div"})
_MAX_SHAPES_LISTED = 4
"Maximum number of shapes that a finding lists."


class DimensionLimit(BlockRule):
    """A dimension of a tensor exceeds the ANE's limit.

    why     Core ML's message on an M4: no dimension may exceed 65536. On older chips the limit is 16384 for width,
            height and depth, as observed on M1, M2 and M3.
    when    An operand or result with a dimension over the limit of the strictest generation of the target. Connected
            ops with such values are one finding. For values of rank below 4 only the last axis is known to be the
            width; the others are judged as channels, and reported as unknown between the two limits.
    fix     Elementwise ops: reshape [.., W] to [.., W / k, k] first (the same bits). Conv or matmul: chunks, with
            overlap for a conv. Large vocabulary: several outputs, each within the limit.
    """

    code, slug = "ANE223", "dimension-limit"
    refuses, confidence = True, "high"
    advice = "Split the long axis into two by a reshape (the same bits for elementwise ops), or process chunks."
    evidence = (
        *collect_evidence("spatial", "channels"),
        cite_m1_gpt_notes("matmuls with 50257 columns exceed a limit of the ANE"),
    )

    def match_block(self, block: Block) -> Iterator[Hit | Miss]:
        looked_at = tuple(self.generations)
        shortest = find_limit("spatial", looked_at)
        if shortest is None:
            return
        judged: dict[tuple[int, ...], tuple[int, ExceededLimit] | None] = {}

        def exceeds_limit(shape: Shape) -> bool:
            extents = _to_numeric_shape(shape)
            if max(extents, default=0) <= shortest.most:
                return False
            if extents not in judged:
                judged[extents] = _find_longest_over_limit(extents, looked_at)
            return judged[extents] is not None

        for ops, var in group_ops_by_large_values(block, exceeds_limit):
            found = judged[_to_numeric_shape(var.shape)]
            if found is None:
                continue
            more = f"; {len(ops)} ops read or produce such values" if len(ops) > 1 else ""
            message = _format_coreml_message(
                var, bool(select_generations(looked_at, "m4")), bool(select_generations(looked_at, "m1", "m2"))
            )
            yield Hit(ops[0], covers=ops, sure=found[1].sure, message=message,
                      note=f"'{var.name}' is {_format_var_shape(var)}: dimension {found[0]} {found[1].words}{more}")

    def examples(self) -> Iterable[Example]:
        yield Example("a width of 65537", lambda: _build_relu_sqrt(1, 1, 1, 65537))
        yield Example("channels", lambda: _build_relu_sqrt(1, 65537, 1, 1))
        yield Example("an M1's width", lambda: _build_relu_sqrt(1, 1, 1, 16385))
        yield Example("rank 1", lambda: _build_relu_sqrt(70000))
        yield Example("a long sequence", lambda: _build_relu_sqrt(1, 20000, 4))
        yield Example("at the limit", lambda: _build_relu_sqrt(1, 1, 1, 16384), reason="")
        yield Example("channels as long as the width limit", lambda: _build_relu_sqrt(1, 20000, 1, 1), reason="")


def _to_numeric_shape(shape: Shape) -> tuple[int, ...]:
    """Return the dimensions as numbers, symbolic ones as 1."""
    return tuple(1 if is_symbolic(extent) else int(str(extent)) for extent in shape)


def _find_longest_over_limit(
    shape: tuple[int, ...], looked_at: Sequence[Generation]
) -> tuple[int, ExceededLimit] | None:
    """Return the longest dimension that exceeds a limit, and that limit; None where all are within the limits."""
    found: list[tuple[int, ExceededLimit]] = []
    for place, extent in enumerate(shape):
        wide = find_exceeded_limit("spatial", extent, looked_at)
        if place == len(shape) - 1 or (len(shape) > 3 and place > 1):
            broken = wide
        else:
            broken = find_exceeded_limit("channels", extent, looked_at)
            if broken is None and wide and len(shape) < 4:
                broken = ExceededLimit(wide.most, False, f"{wide.words}, if that is the height")
        if broken:
            found.append((extent, broken))
    return max(found, key=lambda item: (item[1].sure, item[0]), default=None)


def _format_var_shape(var: Var) -> str:
    return "x".join(map(str, var.shape))


def _format_coreml_message(var: Var, m4: bool, older: bool) -> str | None:
    """Return Core ML's message, as measured: for rank 4, and for values of one dimension whatever their rank."""
    if any(is_symbolic(extent) for extent in var.shape) or var.rank > 4:
        return None
    extents = [int(extent) for extent in var.shape]
    if var.rank < 4 and extents[:-1] != [1] * (var.rank - 1):
        return None
    batch, channels, height, width = [1] * (4 - var.rank) + extents
    if m4 and max(extents) > 65536:
        allowed = _M4_RANGE
    elif older and (max(batch, channels) > 65536 or max(height, width) > 16384):
        allowed = _PRE_M4_RANGE
    else:
        return None
    return f"Tensor dimensions N{batch}D1C{channels}H{height}W{width} are not within supported range, {allowed}."


def _build_relu_sqrt(*shape: int) -> Program:
    def build_body(x: Var) -> Var:
        result: Var = Builder.sqrt(x=Builder.relu(x=x), name="y")
        return result

    return build_program(build_body, x=shape)


class RankAbove5(BlockRule):
    """A tensor has rank 6 or more; the ANE supports five dimensions.

    why     Apple and all reports agree: the maximum rank is 5, for Core ML in general and for the ANE.
    when    An operand or result of rank 6 or more. Connected ops with such values are one finding.
    fix     Merge axes that stay adjacent, or reshape and transpose in two steps of rank 4 or 5: the same bits.
            coremltools' expand_high_rank_reshape_and_transpose does it for reshape, transpose, reshape.
    """

    code, slug = "ANE225", "rank-above-5"
    refuses, confidence = True, "high"
    advice = "Merge axes that stay adjacent, or transpose in two steps of rank 4 or 5: the same bits."
    evidence = (
        *collect_evidence("rank"),
        Vendor("Core ML does not support tensors with a rank greater than five (a maintainer)", date="2023-01-09",
               source="https://github.com/apple/coremltools/issues/1723"),
        Community("a log of Core ML's: ANE does not support blob with rank: 6", date="2023-08-09",
                  source="https://github.com/microsoft/onnxruntime/issues/14212"),
    )

    def match_block(self, block: Block) -> Iterator[Hit | Miss]:
        for ops, var in group_ops_by_large_values(block, lambda shape: len(shape) > 5):
            more = f"; {len(ops)} ops read or produce such values" if len(ops) > 1 else ""
            yield Hit(ops[0], covers=ops, note=f"'{var.name}' has rank {var.rank}, the limit is 5{more}")

    def examples(self) -> Iterable[Example]:
        yield Example("windows", lambda: _build_window_partition(1, 2, 4, 2, 4, 3))
        yield Example("rank 5", lambda: _build_window_partition(2, 4, 2, 4, 3), reason="")


def _build_window_partition(*shape: int) -> Program:
    def build_body(x: Var) -> Var:
        split = Builder.reshape(x=x, shape=list(shape))
        turned = Builder.transpose(x=split, perm=[*range(len(shape) - 2), len(shape) - 1, len(shape) - 2])
        result: Var = Builder.reshape(x=turned, shape=[1, 8, 8, 3], name="y")
        return result

    return build_program(build_body, x=(1, 8, 8, 3))


class MatmulInnerDimension(Rule):
    """The inner dimension of a matmul exceeds the ANE's kernel memory.

    why     Core ML's message on an M4: the inner dimension, at two bytes per element, must fit into 65536 bytes.
            Without Core ML, the limit of the ANE's compiler is 16384 on M1 and M2.
    when    matmul of two computed values. A constant operand and linear were not measured.
    fix     Split the inner dimension: slices of both operands, one matmul each, and adds (different rounding).
    """

    code, slug = "ANE224", "matmul-inner-dimension"
    roots = ("matmul", "linear")
    refuses, confidence = True, "medium"
    advice = "Split the inner dimension into matmuls that are added (different rounding)."
    evidence = collect_evidence("matmul-inner")

    def match(self, op: Operation) -> Hit | Miss:
        rows = op.op_type == "matmul" and get_const_value(op.transpose_x, False) and op.x.rank > 1
        inner = op.x.shape[-2 if rows else -1] if op.x.rank else 1
        if is_symbolic(inner):
            return Miss(op, "the inner dimension is symbolic", near=False)
        inner, looked_at = int(inner), tuple(self.generations)
        long = find_exceeded_limit("matmul-inner", inner, looked_at)
        if long is None:
            most = find_limit("matmul-inner", looked_at)
            at_limit = most is not None and most.most == inner
            return Miss(op, f"inner dimension {inner}, the limit is {inner}" if at_limit else "fits", near=at_limit)
        note = f"inner dimension {inner} {long.words}"
        if op.op_type == "linear" or any(is_const(var) or is_compressed(var) for var in (op.x, op.y)):
            return Hit(op, note=f"{note}; measured for two computed operands, not for a constant one", sure=False)
        later = select_generations(looked_at, "m4", "m6")
        message = f"Error: the output channel of input A ({2 * inner} kB) can not fit the Kmem (65536 kB)"
        fails_on_m4 = find_exceeded_limit("matmul-inner", inner, later) is not None and bool(
            select_generations(looked_at, "m4")
        )
        return Hit(op, note=note, sure=long.sure, message=message if fails_on_m4 else None)

    def examples(self) -> Iterable[Example]:
        yield make_example("over 32768", lambda x, z: Builder.matmul(x=x, y=z, name="y"), x=(2, 32769), z=(32769, 2))
        yield make_example(
            "transposed", lambda x, z: Builder.matmul(x=x, y=z, transpose_x=True, name="y"), x=(40000, 2), z=(40000, 2)
        )
        yield make_example("on an M1", lambda x, z: Builder.matmul(x=x, y=z, name="y"), x=(2, 16385), z=(16385, 2))
        yield make_example(
            "at the limit",
            lambda x, z: Builder.matmul(x=x, y=z, name="y"),
            reason="inner dimension 16384, the limit is 16384",
            x=(2, 16384),
            z=(16384, 2),
        )
        yield make_example("small", lambda x, z: Builder.matmul(x=x, y=z, name="y"), reason="fits", x=(2, 3), z=(3, 2))
        yield make_example(
            "symbolic",
            lambda x, z: Builder.matmul(x=x, y=z, transpose_x=True, name="y"),
            reason="the inner dimension is symbolic",
            x=(None, 2),
            z=(4, 2),
        )


class FlexibleShapes(PlanRule):
    """An input has a flexible shape; the ANE runs the default shape at most.

    why     According to Apple, with ranged shapes only the default shape runs on the Neural Engine, others on GPU or
            CPU; a measurement shows 0 % on the ANE for them. Enumerated shapes should all be able to run there, and do
            in some reports, but not in others (an A13 with fp16, a model with layer norm, one run of two at 2 %). From
            iOS 17.4 on, with the hint reshapeFrequency = infrequent, Core ML optimises again for each new shape.
    when    Each input with a dimension that is not fixed, at its first user. A package states whether its shapes are
            ranges or enumerations, a program in memory does not. Costs and latencies are those of the default shape.
    fix     Fix the shape and pad to the largest; or enumerate the shapes of a range (EnumeratedShapes); or make one
            function per shape (multifunction models, iOS 18); or set the hint if the shape rarely changes.
    """

    code, slug = "ANE504", "flexible-shapes"
    severity = Severity.UNSUPPORTED
    confidence = "high"
    advice = "Fix the shape and pad to the largest one, enumerate those of a range, or make one function per shape."
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
    return f"{format_count(count, 'op')} of {len(rows)} produce{'s' * (count == 1)} values with such a dimension"


def _has_dynamic_shape(var: Var) -> Any:
    return types.is_tensor(var.sym_type) and any_symbolic(var.shape)


class OldBroadcast(BlockRule):
    """Broadcast between two computed values, which was unsupported on the ANE in the NeuralNetwork format.

    why     According to logs and lists of 2020, a product of (C, H, W) with (C, 1, 1) leaves the ANE unless one side is
            constant, and so do the broadcastable layers. They are about the NeuralNetwork format. In an ML Program Core
            ML on an M4 accepts every broadcast; M1 to M3 were not measured.
    when    add, sub, mul, real_div, maximum, minimum, pow and floor_div of two computed values of different shape, if
            the target includes chips before M4. One finding per block. The prediction still counts them as supported.
    fix     None by default. If a device shows that the op leaves the ANE, give both operands the same shape with tile
            or concat. A tile of a constant becomes a constant of full size, and tiles were reported to slow models
            down.
    """

    code, slug = "ANE234", "broadcast-before-m4"
    targets = BEFORE_M4
    severity, confidence = Severity.SUGGESTION, "low"
    advice = "Keep it unless a device shows that it leaves the ANE; then give both operands the same shape first."
    evidence = (
        Community(
            "elementwise with channel broadcast supported only with constant vector or transplant input (a log of "
            "Core ML's; NeuralNetwork format)",
            date="2020-07-14",
            source="https://github.com/hollance/neural-engine/issues/2",
        ),
        cite_2020_layer_list(
            "broadcastable and ND layers, and certain broadcasts, are among the layers that leave the ANE; some of "
            "the list is guessed"
        ),
        Community(
            "MobileNetV3 takes 11 ms with the ANE allowed, MobileNetV2 3 ms: it seems to be the products with "
            "broadcast; plain multiply layers, which broadcast within limits, seem to work",
            source="https://github.com/apple/coremltools/issues/657",
            date="2020-04-15",
        ),
        cite_m4_study(
            "contradicts it for ML Programs: add, sub, mul, real_div, pow, floor_div, maximum, minimum, comparisons "
            "and select are accepted with every broadcast"
        ),
        Community(
            "a pass that removes tiles, so that ops broadcast, moves them back to the ANE; with all compute "
            "units allowed the model became slower (24.6 to 31.8 ms)",
            chip="M4",
            source="https://github.com/kasper0406/stablehlo-coreml/issues/105",
        ),
    )

    def match_block(self, block: Block) -> Iterator[Hit | Miss]:
        found = [op for op in block.operations if op.op_type in _BINARY_OPS and _is_computed_broadcast(op)]
        if found:
            yield Hit(
                found[0],
                covers=found,
                note=f"{format_count(len(found), 'broadcast')} between computed values ({format_op_types(found)}): "
                     f"accepted on M4, unsupported in the NeuralNetwork format of 2020, not measured in between",
            )

    def examples(self) -> Iterable[Example]:
        yield Example("channels", lambda: _build_mul((1, 4, 8, 8), (1, 4, 1, 1)))
        yield Example("rank", lambda: _build_mul((2, 3, 4), (4,)))
        yield Example("one shape", lambda: _build_mul((1, 4, 8, 8), (1, 4, 8, 8)), reason="")
        yield make_example(
            "a constant", lambda x: Builder.mul(x=x, y=make_weight(1, 4, 1, 1), name="y"), reason="", x=(1, 4, 8, 8)
        )


def _is_computed_broadcast(op: Operation) -> bool:
    if any(is_const(var) or is_compressed(var) for var in (op.x, op.y)):
        return False
    one, other = get_type_info(op.x).shape, get_type_info(op.y).shape
    return bool(one is not None and other is not None and one and other and one != other)


def _build_mul(one: tuple[int, ...], other: tuple[int, ...]) -> Program:
    return build_program(lambda x, z: Builder.mul(x=x, y=z, name="y"), x=one, z=other)


def describe_flexible_shape(feature: Any, var: Var) -> str | None:
    """Describe a flexible shape, or return None for a fixed one.

    An example is `is ranged: (1, 3, 64..512, 64..), by default (1, 3, 128, 128)`. `feature` is the input's description
    in the package, or None.
    """
    kind = feature.type.WhichOneof("Type") if feature is not None else None
    if kind == "multiArrayType":
        found = _describe_array_shape(feature.type.multiArrayType)
    elif kind == "imageType":
        found = _describe_image_size(feature.type.imageType)
    else:
        found = None
    if found is None and types.is_tensor(var.sym_type) and any_symbolic(var.shape):
        shape = ", ".join("?" if is_symbolic(extent) else str(extent) for extent in var.shape)
        return f"has a flexible shape: ({shape}), ranged or enumerated"
    return found


def _describe_array_shape(array: Any) -> str | None:
    default = [int(extent) for extent in array.shape]
    kind = array.WhichOneof("ShapeFlexibility")
    if kind == "enumeratedShapes":
        return _describe_enumerated(
            [[int(extent) for extent in one.shape] for one in array.enumeratedShapes.shapes], default
        )
    if kind == "shapeRange":
        return _describe_ranged([_read_bounds(one) for one in array.shapeRange.sizeRanges], default)
    return None


def _describe_image_size(image: Any) -> str | None:
    default = [int(image.height), int(image.width)]
    kind = image.WhichOneof("SizeFlexibility")
    if kind == "enumeratedSizes":
        return _describe_enumerated([[int(one.height), int(one.width)] for one in image.enumeratedSizes.sizes], default)
    if kind == "imageSizeRange":
        return _describe_ranged(
            [_read_bounds(image.imageSizeRange.heightRange), _read_bounds(image.imageSizeRange.widthRange)], default
        )
    return None


def _describe_enumerated(shapes: list[list[int]], default: list[int]) -> str | None:
    distinct = list(dict.fromkeys(tuple(shape) for shape in shapes))
    if len(distinct) < 2:
        return None
    more = f" and {len(distinct) - _MAX_SHAPES_LISTED} more" if len(distinct) > _MAX_SHAPES_LISTED else ""
    listed = ", ".join(map(_format_shape, distinct[:_MAX_SHAPES_LISTED]))
    return f"has {len(distinct)} shapes: {listed}{more}, by default {_format_shape(default)}"


def _describe_ranged(ranges: list[tuple[int, int]], default: list[int]) -> str | None:
    if all(low == high for low, high in ranges):
        return None
    each = [str(low) if low == high else f"{low}..{high if high >= 0 else ''}" for low, high in ranges]
    return f"is ranged: ({', '.join(each)}), by default {_format_shape(default)}"


def _read_bounds(one: Any) -> tuple[int, int]:
    """Return the lower and upper bound; a negative upper bound means unbounded."""
    return int(one.lowerBound), int(one.upperBound)


def _format_shape(shape: Any) -> str:
    return f"({', '.join(map(str, shape))})"
