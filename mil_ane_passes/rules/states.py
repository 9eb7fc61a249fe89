"""States: width, number, and updates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Block, Builder, Function, Operation, Program, Var, types
from coremltools.converters.mil.mil.types.symbolic import is_symbolic

from ..ir.query import get_consumers, is_const
from ..passes.contract import BlockRule, Community, Example, Hit, Measured, Miss, Severity, Vendor
from ..passes.examples import make_example
from ..passes.targets import format_generations
from ..utils.text_format import join_names
from ._sizes import select_generations

_WIDTH_MULTIPLE = 32
"fp16 elements in a row of 64 bytes: a state whose width is not a multiple of this failed."
_STATE_PATTERN = "https://github.com/john-rocky/CoreML-LLM/blob/main/docs/MLSTATE_PATTERN.md"
_STATE_WRITERS = frozenset({"coreml_update_state", "write_state"})
_PASSED_THROUGH = frozenset({"slice_by_index", "slice_by_size", "coreml_update_state", "identity"})
"Ops through which rows of an updated cache are traced."


class StateWidth(BlockRule):
    """The width of a state is not a multiple of 32; such a model failed on the ANE.

    why     A model with a state of width 270 fails if the ANE is allowed, and runs with width 256; both run on CPU and
            GPU. One report, with a script. 32 fp16 numbers are the 64 bytes to which rows are padded.
    when    Each state whose last dimension is not a multiple of 32, at its first user. Chips other than M4 were not
            measured.
    fix     Pad the state to the next multiple of 32, slice it after each read, and pad before each write.
    no fix  The shape of a state belongs to the model's interface.
    """

    code, slug = "ANE233", "state-width"
    refuses, confidence = True, "medium"
    advice = "Pad the last dimension of the state to a multiple of 32 and slice after each read (the same bits)."
    evidence = (
        Measured("a state 270 wide fails on the ANE, 256 works", chip="M4", os="macOS 15.2", date="2025-12-19",
                 source="https://github.com/apple/coremltools/issues/2631"),
        Community("a key and value cache worked on the ANE after its shapes were made smaller; the alignment to 64 "
                  "bytes is suspected", source="https://github.com/Anemll/Anemll/issues/27", date="2025-07-11"),
    )

    def match_block(self, block: Block) -> Iterator[Hit | Miss]:
        if not isinstance(block, Function):
            return
        m4 = select_generations(tuple(self.generations), "m4")
        for name, var in block.inputs.items():
            if not types.is_state(var.sym_type) or not var.shape or not get_consumers(var):
                continue
            width, readers = var.shape[-1], get_consumers(var)
            if is_symbolic(width):
                continue
            if int(width) % _WIDTH_MULTIPLE == 0:
                yield Miss(readers[0], f"state '{name}' is {width} wide, a multiple of 32", near=False)
                continue
            beside = "" if m4 else f"; not measured on {format_generations(self.generations)}"
            yield Hit(readers[0], covers=readers, sure=bool(m4),
                      note=f"state '{name}' is {width} wide, not a multiple of {_WIDTH_MULTIPLE}; 270 failed on M4, "
                           f"256 ran{beside}")

    def examples(self) -> Iterable[Example]:
        yield Example("270", lambda: _build_stateful(270))
        yield Example("256", lambda: _build_stateful(256), reason="state 's' is 256 wide, a multiple of 32")
        yield make_example("no state", lambda x: Builder.relu(x=x, name="y"), reason="", x=(1, 270))


class SeveralStates(BlockRule):
    """A function has two or more states; such models failed at prediction, while one state worked.

    why     In a test of nine variants of a decoder, those with two states fail at prediction (status 0x1d), and those
            with one state run; with three, the CPU also computed slice_update wrongly. However, the same author ships
            another decoder with two states, which runs. The cause of the difference is unknown.
    when    A function with two or more states, at the first op that reads one.
    fix     Merge the states into one (`edit --merge-states`), or pass the cache as an input and return its new rows
            (`edit --state-to-io`, `adapt`).
    no fix  States belong to the model's interface, which rewrites do not change.
    """

    code, slug = "ANE241", "several-states"
    severity = Severity.UNSUPPORTED
    confidence = "medium"
    advice = "Merge the states into one (edit --merge-states), or keep them in the caller (edit --state-to-io)."
    evidence = (
        Community("of nine variants of a decoder all with two states fail with status 0x1d, all with one run; with "
                  "three the CPU computes slice_update wrongly",
                  source="https://github.com/john-rocky/CoreML-LLM/blob/main/docs/LFM2_CONVERSION_FINDINGS.md",
                  os="macOS 26.0.1, iOS", date="2026-04-28"),
        Community("contradicts it: a decoder with two states is shipped and makes 31 tokens a second",
                  source=_STATE_PATTERN, date="2026-04-28"),
    )

    def match_block(self, block: Block) -> Iterator[Hit | Miss]:
        if not isinstance(block, Function):
            return
        states = [(name, readers) for name, var in block.inputs.items()
                  if types.is_state(var.sym_type) and (readers := get_consumers(var))]
        if len(states) == 1:
            yield Miss(states[0][1][0], "one state in the function; two are reported to fail", near=False)
        elif states:
            names = join_names(f"'{name}'" for name, _ in states)
            yield Hit(states[0][1][0], covers=[op for _, readers in states for op in readers],
                      note=f"{len(states)} states in one function ({names}); two states failed at prediction in one "
                           f"report, and ran in another model")

    def examples(self) -> Iterable[Example]:
        yield Example("two", lambda: _build_cache(states=2))
        yield Example("one", lambda: _build_cache(), reason="one state in the function; two are reported to fail")
        yield make_example("none", lambda x: Builder.relu(x=x, name="y"), reason="", x=(1, 32))


class StateUpdatedInPlace(BlockRule):
    """ANE support of slice_update on a state depends on the position, the opset and the model.

    why     Sources contradict each other. With updates at a computed position, the ANE's compiler rejected one entire
            decoder but accepted its prefill; other decoders run, with one state and the opset of iOS 18. One program
            with slice_update was planned on the ANE as CoreML8 and failed with -14 as CoreML9 (iOS 26). According to
            Apple, window assignments may reside on the ANE.
    when    A slice_update whose result is written to a state. The finding states whether the position is constant or
            computed.
    fix     Blend with a mask of ones at the new rows (the same bits for finite values), as `adapt` does; the position
            becomes an input. Do not raise the opset above iOS 18.
    no fix  The position of the rows has to become an input, which changes the model's interface (`adapt`).
    """

    code, slug = "ANE242", "state-updated-in-place"
    severity, confidence = Severity.SUGGESTION, "low"
    advice = "Blend the new rows with a mask, as adapt does, and keep the opset of iOS 18."
    evidence = (
        Community("a decoder that updates its cache in the model is rejected by the ANE's compiler; of its prefill "
                  "1,918 of 1,919 ops are on the ANE", chip="M5 Pro",
                  source="https://github.com/FluidInference/mobius/pull/77", date="2026-07-16"),
        Community("contradicts it: computed positions run with one packed state and the opset of iOS 18",
                  source=_STATE_PATTERN, date="2026-04-28"),
        Community("the same program with slice_update is planned on the ANE as CoreML8 and fails with -14 as CoreML9",
                  source="https://github.com/savageAZfck/mil_spec", date="2026-09"),
        Vendor("an assignment to a window may reside on the ANE",
               source="https://github.com/apple/coremltools/blob/9.0/coremltools/converters/mil/frontend/torch/ops.py"),
    )

    def match_block(self, block: Block) -> Iterator[Hit | Miss]:
        for op in block.operations:
            if op.op_type != "slice_update" or not any(each.op_type in _STATE_WRITERS for each in _list_users(op)):
                continue
            computed = [name for name in ("begin", "end") if not is_const(op.inputs.get(name))]
            place = "a computed position, rejected in one model and run in another" if computed else (
                "a constant position; some computed ones were rejected")
            yield Hit(op, note=f"rows are written into a state at {place}")

    def examples(self) -> Iterable[Example]:
        yield Example("constant place", lambda: _build_cache())
        yield Example("computed place", lambda: _build_cache(computed=True))
        yield Example("blended", lambda: _build_cache(blended=True), reason="")


class TransposedUpdate(BlockRule):
    """A transpose of rows of an updated cache fails in the ANE's compiler, as reported.

    why     A decoder whose keys are sliced from the result of a slice_update and transposed by a separate op fails with
            -14; with the transpose inside the matmul (transpose_y) it compiles.
    when    A transpose of the result of a slice_update, directly or through slices, or of the same values after a state
            read.
    fix     matmul with transpose_x or transpose_y instead of the transpose: the same bits.
    """

    code, slug = "ANE243", "transposed-cache-update"
    severity = Severity.UNSUPPORTED
    confidence = "low"
    advice = "Use transpose_y of the matmul instead of the transpose: the same bits."
    evidence = (
        Community("a standalone transpose of a slice of a slice_update fails with -14; matmul's transpose_y does not",
                  source=_STATE_PATTERN, date="2026-04-28"),
    )

    def match_block(self, block: Block) -> Iterator[Hit | Miss]:
        for op in block.operations:
            if op.op_type != "transpose":
                continue
            source = _find_source_of_rows(op.x)
            if source.op is not None and source.op.op_type == "slice_update":
                yield Hit(op, note=f"reads '{source.name}', the result of a slice_update")

    def examples(self) -> Iterable[Example]:
        yield Example("of the update", lambda: _build_cache(transposed=True))
        yield Example("through a slice", lambda: _build_cache(
            transposed=True, read=lambda state, kept: Builder.slice_by_size(x=kept, begin=[0, 1, 0], size=[1, 2, 32])))
        yield Example("read back from the state", lambda: _build_cache(
            transposed=True, read=lambda state, kept: Builder.read_state(input=state)))
        yield Example("read before it is written", lambda: _build_cache(
            transposed=True, read=lambda state, kept: kept.op.inputs["value"].op.x), reason="")
        yield Example("not transposed", lambda: _build_cache(), reason="")
        yield make_example("of an input", lambda x: Builder.transpose(x=x, perm=[1, 0], name="y"), reason="", x=(4, 32))


def _list_users(op: Operation) -> list[Operation]:
    return [user for var in op.outputs for user in get_consumers(var)]


def _find_source_of_rows(var: Var) -> Var:
    """Follow rows of a cache back through slices and the state that they are kept in, within their block."""
    while var.op is not None:
        if var.op.op_type == "read_state":
            source = _find_written_value(var)
        elif var.op.op_type in _PASSED_THROUGH:
            source = var.op.inputs["value" if var.op.op_type in _STATE_WRITERS else "x"]
        else:
            break
        if source is None:
            break
        var = source
    return var


def _find_written_value(read: Var) -> Var | None:
    """Return the value that was written last to the state that `read` was read from, before it in its block."""
    state, found = read.op.inputs["input"], None
    for op in read.op.enclosing_block.operations:
        if op is read.op:
            break
        if op.op_type in _STATE_WRITERS and op.inputs.get("state") is state:
            found = op.inputs["value"]
    return found


def _build_cache(
    states: int = 1, computed: bool = False, blended: bool = False, transposed: bool = False,
    read: Callable[[Var, Var], Var] = lambda state, kept: kept,
) -> Program:
    """Build a function that writes a row into each of its states, and returns a product with what they hold.

    `read` gets the state and what was written, and returns what is multiplied.
    """
    placeholders = {f"s{number}": Builder.state_tensor_placeholder((1, 4, 32), types.fp16) for number in range(states)}
    given = {"x": Builder.placeholder((1, 1, 32), types.fp16), "at": Builder.placeholder((3,), types.int32)}
    with Function({**placeholders, **given}, opset_version=ct.target.iOS18) as function:
        x, results = function.inputs["x"], []
        for name in placeholders:
            held = Builder.read_state(input=function.inputs[name])
            if blended:
                mask = np.array([1, 0, 0, 0], np.float16).reshape(1, 4, 1)
                new = Builder.add(x=Builder.mul(x=held, y=1 - mask), y=Builder.mul(x=x, y=mask))
            else:
                begin = function.inputs["at"] if computed else np.array([0, 1, 0], np.int32)
                end = Builder.add(x=begin, y=np.array([1, 1, 32], np.int32))
                new = Builder.slice_update(x=held, update=x, begin=begin, end=end)
            state = function.inputs[name]
            kept = read(state, Builder.coreml_update_state(state=state, value=new))
            if transposed:
                results.append(Builder.matmul(x=x, y=Builder.transpose(x=kept, perm=[0, 2, 1])))
            else:
                results.append(Builder.matmul(x=x, y=kept, transpose_y=True))
        function.set_outputs([Builder.concat(values=results, axis=0, name="y")])
    built = Program()
    built.add_function("main", function)
    return built


def _build_stateful(width: int) -> Program:
    held = Builder.state_tensor_placeholder((1, 2, width), types.fp16)
    given = Builder.placeholder((1, 2, width), types.fp16)
    with Function({"s": held, "x": given}, opset_version=ct.target.iOS18) as function:
        read: Var = Builder.read_state(input=function.inputs["s"])
        added = Builder.add(x=read, y=function.inputs["x"], name="y")
        Builder.coreml_update_state(state=function.inputs["s"], value=added)
        function.set_outputs([added])
    built = Program()
    built.add_function("main", function)
    return built
