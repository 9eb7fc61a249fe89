"""Find models whose weights are too large for the ANE."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod

from coremltools.converters.mil.mil import Block, Builder, Var, types

from ..ane.partitions import iterate_rows_by_function
from ..ir.query import get_type_info
from ..passes.contract import Community, Example, Hit, Miss, PlanRule, Vendor
from ..passes.examples import build_program, make_weight
from ..passes.plan import Plan

_GB = 10 ** 9


class ModelSize(PlanRule):
    """A function has more weights than the ANE of a phone takes.

    why     Apple says that a model for the Neural Engine of an iPhone cannot be larger than 1 GB. On a Mac with M1 a
            model between 2 and 3 GB went to the CPU as a whole, and all loaded ones together took 3 GB at most. Which
            applies depends on the device, not on the generation: an A15 and an M2 have the same ANE.
    when    The weights that a function's ops read, as they are stored (compressed ones by their packed size), exceed
            `phone` GB. In a package of several functions each is weighed alone, since one is loaded at a time.
    fix     Split the model: coremltools.models.utils.bisect_model cuts a package in two, each part below 1 GB. fp32
            weights halve with ane::fp16_compute. Whether palettized weights help is open: in 2023, on an M1, 4 bits
            did not.
    """

    code, slug = "ANE510", "model-size"
    confidence = "high"
    advice = "Split the model with coremltools.models.utils.bisect_model."
    evidence = (
        Vendor("to run on the Neural Engine of an iPhone a model cannot be larger than 1 GB; bisect_model cuts it",
               source="https://apple.github.io/coremltools/docs-guides/source/mlmodel-utilities.html"),
        Community("somewhere between 2 and 3 GB a model goes to the CPU as a whole; of five models of 0.8 GB the last "
                  "does; weights of 4 bits do not help", chip="M1", date="2023-04-01",
                  source="smpanaro/more-ane-transformers src/experiments/NOTES.md"),
    )
    phone: float = 1.0
    "GB (10^9 bytes) of weights that an iPhone's ANE supports; Apple's number."
    mac: float = 3.0
    "GB of weights that an M1's ANE supports, all models together, as reported."

    def match_plan(self, plan: Plan) -> Iterator[Hit | Miss]:
        sizes = {name: _count_weight_bytes(plan.program.functions[name]) for name, _ in iterate_rows_by_function(plan)}
        first = {name: rows[0].op for name, rows in iterate_rows_by_function(plan)}
        for name, size in sizes.items():
            if size > self.phone * _GB:
                where = f"{self.phone:g} GB (iPhone)"
                where += f" and than {self.mac:g} GB (M1)" if size > self.mac * _GB else ""
                yield Hit(
                    first[name],
                    note=f"the weights of function '{name}' take {_format_gigabytes(size)}, more than {where}",
                )
        files = plan.package.weight_bytes if plan.package is not None else 0
        if sizes and files > self.phone * _GB and max(sizes.values()) <= self.phone * _GB:
            yield Miss(
                next(iter(first.values())),
                f"the weight files hold {_format_gigabytes(files)}, the largest function reads "
                f"{_format_gigabytes(max(sizes.values()))}",
            )

    def examples(self) -> Iterable[Example]:
        yield Example("above", _build_linear, options={"phone": 1e-7})
        yield Example("below", _build_linear, reason="", options={"phone": 1e-6})


def _format_gigabytes(size: int) -> str:
    return f"{size / _GB:.3g} GB"


def _count_weight_bytes(function: Block) -> int:
    """Count the bytes of a function's constants as stored, those of nested blocks included."""
    total, pending = 0, [function]
    while pending:
        for op in pending.pop().operations:
            if op.op_type == "const":
                total += _count_stored_bytes(op.outputs[0])
            pending.extend(op.blocks)
    return total


def _count_stored_bytes(var: Var) -> int:
    kind = get_type_info(var)
    if not kind.is_tensor or kind.shape is None or not (types.is_float(kind.dtype) or types.is_int(kind.dtype)):
        return 0
    return -(-prod(kind.shape) * int(kind.dtype.get_bitwidth()) // 8)


def _build_linear() -> object:
    return build_program(lambda x: Builder.linear(x=x, weight=make_weight(8, 16), name="y"), x=(1, 16))
