"""Exported programs that write into their input."""

from __future__ import annotations

import torch

from ..checks import check


def test_outputs_are_right_and_the_mutation_is_no_output() -> None:
    def write(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x * 2

    mlmodel = check(write, torch.arange(6.).reshape(2, 3), frontend="export")
    assert len(mlmodel._mil_program.functions["main"].outputs) == 1


def test_the_written_input_may_be_the_output() -> None:
    check(lambda x: x.mul_(3), torch.arange(6.).reshape(2, 3), frontend="export")
