"""Change fp32 inputs and outputs of a model to fp16."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder, Function, Program, Var, types

from ...ir.interface_casts import find_retype_obstacle, retype_input, retype_output
from ...ir.value_ranges import Range
from ...passes.contract import Community, Exactness, Example, Hit, Miss, ProgramRewrite, Vendor
from ...passes.examples import make_example
from ...utils.errors import InputError, suggest_nearest
from ._fp16_conversion import FP16_MAX, FP16_MIN_SUBNORMAL, is_cast_to_fp16


class Fp16Io(ProgramRewrite):
    """Convert inputs and outputs to fp16 and remove the interface casts.

    why     Each fp32 input and output costs an interface cast, a pass over the data off the ANE.
    when    fp32 tensors of a function for iOS16 and later; images, states, classifier outputs and inputs that are
            returned directly are unchanged. If the program computes in fp32 at the interface, a cast is inserted, and
            the finding states it; such values that exceed fp16 in the runs (--feeds, --ranges) are skipped. This
            changes the model's interface: callers must pass and accept fp16.
    exact   bitwise for inputs that fp16 represents; outputs are the original ones, rounded to fp16.
    cost    none if the program computes in fp16; otherwise a cast for each input or output that is computed in fp32.
            The caller has to convert fp32 data.

    before
        %0: fp16[1, 8] = cast(x=%x, dtype=fp16)
        %1: fp16[1, 8] = relu(x=%0)
        %y: fp32[1, 8] = cast(x=%1, dtype=fp32)
    after
        %y: fp16[1, 8] = relu(x=%x)
    """

    code, slug = "ANE503", "fp32-io"
    stage = "cleanup"
    exactness = Exactness.BITWISE
    preset = "named"
    interface = True
    measures = True
    evidence = (
        Vendor("from iOS16 and macOS13 on inputs and outputs may be fp16: no interface casts",
               source="https://apple.github.io/coremltools/docs-guides/source/typed-execution.html"),
        Community("fp32 inputs and outputs cost interface casts", chip="M1",
                  source="smpanaro/more-ane-transformers src/experiments/NOTES.md"),
        Community("contradicts it, outdated since iOS16: Core ML supports FLOAT32 only",
                  source="eiln coreml102"),
    )

    inputs: bool = True
    "Change inputs."
    outputs: bool = True
    "Change outputs."
    names: str = ""
    "Only these inputs and outputs, separated by +."

    def match_program(self, program: Program) -> Iterator[Hit | Miss]:
        only = self._parse_names(program)
        for name, function in program.functions.items():
            ends = [*(function.inputs.values() if self.inputs else ()), *(function.outputs if self.outputs else ())]
            for var in dict.fromkeys(filter(_is_array, ends)):
                op = var.op or next(iter(var.child_ops), None)
                if op is None or var.dtype != types.fp32 or (only and var.name not in only):
                    continue
                reason = _find_io_obstacle(function, var) or _describe_fp16_loss(var, self.measured or {})
                yield Miss(op, reason) if reason else Hit(op, note=_describe_change(var), function=name, end=var.name)

    def _parse_names(self, program: Program) -> set[str]:
        """Return the requested names; empty for all.

        Raise InputError for a name that is neither an input nor an output.
        """
        only = {name.strip() for name in self.names.split("+") if name.strip()}
        known = {var.name for function in program.functions.values()
                 for var in (*function.inputs.values(), *function.outputs)}
        for name in sorted(only - known):
            raise InputError(f"fp16_io: names: '{name}' is not an input or output of the model (it has "
                             f"{', '.join(sorted(known))}){suggest_nearest(name, known)}")
        return only

    def rewrite_program(self, hits: list[Hit], program: Program) -> None:
        for hit in hits:
            function = program.functions[hit.function]
            if hit.end in function.inputs:
                retype_input(function, function.inputs[hit.end], "fp16")
            else:
                retype_output(function, next(var for var in function.outputs if var.name == hit.end), "fp16")

    def examples(self) -> Iterable[Example]:
        yield _make_fp32_example("casts at both ends", _build_interface_casts)
        yield _make_fp32_example("fp32 inside", _build_relu, opset=ct.target.iOS16)
        yield _make_fp32_example("the input only", _build_interface_casts, options={"outputs": False})
        yield _make_fp32_example("one by name", lambda x: [_build_relu(x), Builder.abs(x=x, name="w")],
                                 options={"names": "x"})
        yield _make_fp32_example("rank 0", _build_total, options={"inputs": False})
        yield _make_fp32_example("too old", _build_relu, opset=ct.target.iOS15,
                                 reason="inputs and outputs in fp16 need iOS16; the function is for iOS15")
        yield _make_fp32_example("returned as it is", lambda x: [x, _build_relu(x)], options={"names": "x"},
                                 reason="input 'x' is returned directly and has to keep its type")
        yield _make_fp32_example(
            "beyond fp16", lambda x: Builder.add(x=x, y=np.float32(123456), name="y"), options={"inputs": False},
            reason="'y' reaches 1.2e+05, the fp16 maximum is 65504")
        yield _make_fp32_example("fp16 already", _build_relu, dtype=types.fp16, reason="")


def _is_array(var: Var) -> bool:
    """Return whether an input or output is a tensor or, with rank 0, a number."""
    return bool(types.is_tensor(var.sym_type) or types.is_scalar(var.sym_type))


def _find_io_obstacle(function: Function, var: Var) -> str:
    """Return why an input or output stays in fp32, "" when it need not."""
    if function.opset_version < ct.target.iOS16:
        return f"inputs and outputs in fp16 need iOS16; the function is for {function.opset_version.name}"
    return find_retype_obstacle(function, var)


def _describe_fp16_loss(var: Var, measured: Mapping[Var, Range]) -> str:
    """Describe what fp16 cannot represent of an input or output that is fp32 inside the function, or return ""."""
    if var not in measured or _is_fp16_internally(var):
        return ""
    largest = measured[var].largest
    if largest > FP16_MAX:
        return f"'{var.name}' reaches {largest:.2g}, the fp16 maximum is {FP16_MAX:.0f}"
    if 0 < largest < FP16_MIN_SUBNORMAL:
        return f"the largest value of '{var.name}' is {largest:.2g}, below the fp16 minimum ({FP16_MIN_SUBNORMAL:.1e})"
    return ""


def _is_fp16_internally(var: Var) -> bool:
    """Return whether ops read the input `var` only as fp16, or compute the output `var` from fp16."""
    if var.op is None:
        return all(map(is_cast_to_fp16, var.child_ops))
    return bool(var.op.op_type == "cast" and var.op.x.dtype == types.fp16)


def _describe_change(var: Var) -> str:
    end, remaining_cast = (("input", "cast to fp32 for its fp32 users") if var.op is None
                           else ("output", "it is computed in fp32 and cast"))
    return f"{end} '{var.name}' in fp16; {'its cast is removed' if _is_fp16_internally(var) else remaining_cast}"


def _make_fp32_example(name: str, body: Callable[[Var], Any], dtype: Any = types.fp32, **settings: Any) -> Example:
    return make_example(name, body, dtype=dtype, x=(1, 8), **settings)


def _build_interface_casts(x: Var) -> Any:
    return Builder.cast(x=Builder.relu(x=Builder.cast(x=x, dtype="fp16")), dtype="fp32", name="y")


def _build_relu(x: Var) -> Any:
    return Builder.relu(x=x, name="y")


def _build_total(x: Var) -> Any:
    total = Builder.reduce_sum(x=Builder.cast(x=x, dtype="fp16"), keep_dims=False)
    return Builder.cast(x=total, dtype="fp32", name="y")
