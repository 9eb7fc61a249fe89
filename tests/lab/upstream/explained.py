"""The cases of coremltools' own op tests that come to a prediction and do not pass here, each with its reason."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["EXPLAINED", "ExplainedFailure", "find_explanation"]


@dataclass(frozen=True)
class ExplainedFailure:
    """`pattern` is searched for in the case's name, `FILE::CLASS::TEST[parameters]`.

    `suite` is "patched" for a case that passes with the host alone and not with our torch frontend.
    """

    suite: str
    pattern: str
    reason: str

    def covers(self, case: str) -> bool:
        return re.search(self.pattern, case) is not None


_UNDEFINED = ("the indices lie outside and validate_indices is false: the op documents the result as undefined, and "
              "the test asserts that it is not what the runtime gives")

EXPLAINED: tuple[ExplainedFailure, ...] = (
    ExplainedFailure(
        "mil",
        r"iOS15/test_image_resizing\.py::TestCropResize::test_builder_to_backend_smoke",
        "the box [2, 2, 1, 1] lies outside the interval [0, 1] that the op documents for normalized boxes; the "
        "test expects the whole image, which no reading of the documentation gives",
    ),
    ExplainedFailure(
        "mil",
        r"iOS17/test_scatter_gather\.py::Test\w+::test_ios17_invalid_indices\[.*validate_indices=False",
        _UNDEFINED,
    ),
    ExplainedFailure(
        "torch",
        r"TestStack::test_stack_dynamic_range_dim\[.*default_dynamic_size=2",
        "Core ML refuses a program that cannot run at its default shapes, whatever it is fed; the runtime asks "
        "about the shapes that are fed only, and on those the test's own numbers come out",
    ),
    ExplainedFailure(
        "torch",
        r"TestLSTMWithPackedSequence::test_lstm",
        "the host takes the first sequence's length for the batch size, so the converted lstm gets an initial "
        "state of 10 rows for a batch of 3, which the op's documentation does not allow",
    ),
    ExplainedFailure(
        "torch",
        r"TestIndexPut::test_index_put_negative_indices_case_2\[.*rank=2-accumulate=False",
        "the host's add_int16_cast casts a part of the negative indices to uint16, where -1 is 65535, before "
        "they are compared with 0; MIL defines no saturation there, and the scatter then asks for row 65535",
    ),
    ExplainedFailure(
        "torch",
        r"TestIndex::test_index_bool_indices\[.*\(3, 4, 5, 6\)",
        "selects where a random float32 number is above 0.5, and the program compares in float16: a number just "
        "above rounds to 0.5, so the shapes depend on the draw",
    ),
    ExplainedFailure(
        "patched",
        r"TestActivation::test_softplus\[.*threshold=(?!20\b)",
        "the test looks for softplus_parametric, which has no threshold; with the patches the threshold that the "
        "host forgets is kept, by a select",
    ),
    ExplainedFailure(
        "patched",
        r"(TestTo::test_fold_const|TestLinspace::test_linspace_static_not_fold|"
        r"TestZeros::test_zeros_static_fold_to_const)",
        "the test counts range_1d or fill before the host's constant folding; with the patches what is known is "
        "a const from the start, since both ops leave the ANE",
    ),
    ExplainedFailure(
        "patched",
        r"TestRepeatInterleave::test_unsupported_tensor_repeat",
        "the test asks for a refusal of what converts with the patches, and then goes on to a neural network, "
        "which the runtime does not run",
    ),
    ExplainedFailure(
        "patched",
        r"(test_bitwise_and_unsupport_input|test_complex_output_error|test_directly_use_fft_complex_output_error|"
        r"test_multinomial_not_supported|test_invalid_complex_dtype)",
        "the test expects a refusal of the type that coremltools raises; with the patches every refusal is "
        "a NotConverted, which names op, module and source line",
    ),
    ExplainedFailure(
        "patched",
        r"TestNLLLoss::test_nllloss",
        "the test looks for the one_hot of the host's lowering; PyTorch's own definition, which knows weights "
        "and all reductions, gathers instead, and neither op runs on the ANE",
    ),
    ExplainedFailure(
        "patched",
        r"TestTopk::test_topk_ios17\[.*fp16.*x_dtype=<class 'numpy\.int32'>",
        "the values agree; the test looks for the int16 to which the host casts int32 inputs, which with the patches "
        "stay int32 where no bound shows that they fit",
    ),
    ExplainedFailure(
        "patched",
        r"TestTensorAssign::test_tensor_assign_dynamic_slice",
        "the values agree; the test asks that no squeeze of an index is left, which the host's passes fuse away "
        "only in the host's own order of ops",
    ),
)


def find_explanation(case: str, patched: bool = False) -> str | None:
    """Why `case` does not pass, with our torch frontend or without it; None when nobody has said."""
    return next((entry.reason for entry in EXPLAINED if entry.covers(case) and (patched or entry.suite != "patched")),
                None)
