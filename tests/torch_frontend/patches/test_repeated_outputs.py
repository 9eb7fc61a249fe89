"""A tensor returned twice."""

from __future__ import annotations

import pytest
import torch

from ..checks import FRONTENDS, check


def twice(x: torch.Tensor) -> list[torch.Tensor]:
    y = x + 1
    return [y, y * 2, y, y.detach()]


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_every_output_has_its_name(frontend: str) -> None:
    mlmodel = check(twice, torch.randn(2, 3), frontend=frontend)
    names = [output.name for output in mlmodel.get_spec().description.output]
    assert len(set(names)) == 4


def test_an_input_returned_twice() -> None:
    check(lambda x: (x, x, x + 1), torch.randn(2, 3))
    check(lambda x: (x, x), torch.randn(2, 3))
    check(lambda x: (x, x), torch.randn(2, 3), frontend="export")
