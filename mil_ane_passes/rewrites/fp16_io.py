"""Change fp32 inputs and outputs of a model to fp16."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder, Function, Program, Var, types

from ..core.contract import Community, Exactness, Example, Hit, Miss, ProgramRewrite, Vendor
from ..core.errors import InputError, suggest_nearest
from ..core.examples import build_program
from ._interface_casts import describe_fp16_loss, is_fp16_internally, narrow_input, narrow_output


class Fp16Io(ProgramRewrite):
    """Make inputs and outputs fp16 and drop the casts at the border: what was converted there comes in converted.

    why     Each fp32 input and output costs a cast at the border, which is a pass over the data off the ANE.
    when    fp32 tensors of a function for iOS16 and later; images, states, what a classifier gives and an input that is
            returned as it is stay. Where a program computes in fp32 at the border, a cast is put inside: the note
            says so; there what is beyond fp16 in the runs (--feeds, --ranges) stays, but is not looked
            for without them. This changes the model's interface: callers have to hand over and take fp16.
    exact   bitwise for inputs that fp16 holds; outputs are those of before, rounded to fp16.
    cost    none where the inside is in fp16; else a cast for each end that is read or made in fp32. The caller has to
            convert what is fp32.

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
        Vendor("from iOS16 and macOS13 on inputs and outputs may be fp16: no casts at the border",
               source="https://apple.github.io/coremltools/docs-guides/source/typed-execution.html"),
        Community("fp32 inputs and outputs cost casts at the border", chip="M1",
                  source="smpanaro/more-ane-transformers src/experiments/NOTES.md"),
        Community("contradicts, and is outdated since iOS16: Core ML takes FLOAT32 only",
                  source="eiln coreml102"),
    )

    inputs: bool = True
    "Change inputs."
    outputs: bool = True
    "Change outputs."
    names: str = ""
    "Only these inputs and outputs, with + between them."

    def match_program(self, program: Program) -> Iterator[Hit | Miss]:
        only = self._parse_names(program)
        for name, function in program.functions.items():
            ends = [*(function.inputs.values() if self.inputs else ()), *(function.outputs if self.outputs else ())]
            for var in dict.fromkeys(filter(_is_array, ends)):
                op = var.op or next(iter(var.child_ops), None)
                if op is None or var.dtype != types.fp32 or (only and var.name not in only):
                    continue
                reason = _find_io_obstacle(function, var) or describe_fp16_loss(var, self.measured or {})
                yield Miss(op, reason) if reason else Hit(op, note=_describe_change(var), function=name, end=var.name)

    def rewrite_program(self, hits: list[Hit], program: Program) -> None:
        for hit in hits:
            function = program.functions[hit.function]
            if hit.end in function.inputs:
                narrow_input(function, function.inputs[hit.end])
            else:
                narrow_output(function, next(var for var in function.outputs if var.name == hit.end))

    def _parse_names(self, program: Program) -> set[str]:
        """Return the requested names; empty for all.

        Raise InputError for a name that is neither an input nor an output.
        """
        only = {name.strip() for name in self.names.split("+") if name.strip()}
        known = {var.name for function in program.functions.values()
                 for var in (*function.inputs.values(), *function.outputs)}
        for name in sorted(only - known):
            raise InputError(f"fp16_io: names: '{name}' is no input and no output of the model (it has "
                             f"{', '.join(sorted(known))}){suggest_nearest(name, known)}")
        return only

    def examples(self) -> Iterable[Example]:
        yield Example("casts at both ends", _build_interface_casts)
        yield Example("fp32 inside", lambda: _build_relu(ct.target.iOS16))
        yield Example("the input only", _build_interface_casts, options={"outputs": False})
        yield Example("one by name", _build_two_outputs, options={"names": "x"})
        yield Example("rank 0", _build_total, options={"inputs": False})
        yield Example("too old", lambda: _build_relu(ct.target.iOS15),
                      reason="inputs and outputs in fp16 need iOS16; the function is for iOS15")
        yield Example("returned as it is", _build_returned_input, options={"names": "x"},
                      reason="input 'x' is returned as it is and has to keep its type")
        yield Example("beyond fp16", _build_large_output, options={"inputs": False},
                      reason="'y' reaches 1.2e+05, fp16 ends at 65504")
        yield Example("fp16 already", lambda: _build_relu(ct.target.iOS17, types.fp16), reason="")


def _is_array(var: Var) -> bool:
    """Return whether an input or output is a tensor or, with rank 0, a number."""
    return bool(types.is_tensor(var.sym_type) or types.is_scalar(var.sym_type))


def _find_io_obstacle(function: Function, var: Var) -> str:
    """Return why an input or output stays in fp32, "" when it need not."""
    if function.opset_version < ct.target.iOS16:
        return f"inputs and outputs in fp16 need iOS16; the function is for {function.opset_version.name}"
    if var.name in _collect_image_names(function):
        return f"'{var.name}' is an image, whose type the description gives"
    if var.op is None and var in function.outputs:
        return f"input '{var.name}' is returned as it is and has to keep its type"
    return ""


def _collect_image_names(function: Function) -> set[str]:
    """Collect the inputs and outputs that are images by the package, or by the types passed to `ct.convert`."""
    given = [kind.name for kind in function.input_types if isinstance(kind, ct.ImageType)]
    made = [var.name for var, kind in zip(function.outputs, function.output_types or ())
            if isinstance(kind, ct.ImageType)]
    return {*getattr(function, "images", ()), *given, *made}


def _describe_change(var: Var) -> str:
    end, left = (("input", "cast to fp32 where it is read so") if var.op is None
                 else ("output", "it is computed in fp32 and cast"))
    return f"{end} '{var.name}' in fp16; {'its cast is gone' if is_fp16_internally(var) else left}"


def _build_interface_casts() -> Program:
    def body(x: Any) -> Any:
        return Builder.cast(x=Builder.relu(x=Builder.cast(x=x, dtype="fp16")), dtype="fp32", name="y")

    return build_program(body, dtype=types.fp32, x=(1, 8))


def _build_relu(opset: Any, dtype: Any = types.fp32) -> Program:
    return build_program(lambda x: Builder.relu(x=x, name="y"), opset=opset, dtype=dtype, x=(1, 8))


def _build_total() -> Program:
    return build_program(lambda x: Builder.cast(
        x=Builder.reduce_sum(x=Builder.cast(x=x, dtype="fp16"), keep_dims=False), dtype="fp32", name="y"),
        dtype=types.fp32, x=(1, 8))


def _build_large_output() -> Program:
    return build_program(lambda x: Builder.add(x=x, y=np.float32(123456), name="y"), dtype=types.fp32, x=(1, 8))


def _build_two_outputs() -> Program:
    return build_program(
        lambda x: (Builder.relu(x=x, name="y"), Builder.abs(x=x, name="w")), dtype=types.fp32, x=(1, 8)
    )


def _build_returned_input() -> Program:
    return build_program(lambda x: (x, Builder.relu(x=x, name="y")), dtype=types.fp32, x=(1, 8))
