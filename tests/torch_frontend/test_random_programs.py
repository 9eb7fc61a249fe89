"""Random programs of views and writes, converted whole: right or refused, at the traced size and at another."""

from __future__ import annotations

import random

import coremltools as ct
import numpy as np
import pytest
import torch

from mil_ane_passes.torch_frontend import NotConverted

from .checks import captured, convert_captured, outputs, silence
from .programs import OPS, VIEWS, program

SIZES = (2, 3, 4), (4, 3, 5)


def feed(place: int) -> torch.Tensor:
    count = int(np.prod(SIZES[place]))
    return torch.arange(-(count // 2), count - count // 2, dtype=torch.float32).reshape(SIZES[place])


def drawn(seed: int) -> str:
    """Convert one drawn program and compare it; "right", "refused" or "no program" (torch itself refuses it)."""
    chance = random.Random(seed)
    steps = [(chance.randint(0, 5), chance.choice([*VIEWS, *OPS])) for _ in range(chance.randint(2, 7))]
    function, frontend = program(steps), chance.choice(["trace", "script", "export"])
    flexible = (0, 2) if frontend == "trace" and chance.random() < 0.5 else ()
    feeds = [feed(place) for place in range(1 + bool(flexible))]
    try:
        expected = [function(one.clone()) for one in feeds]
        captive = captured(function, feeds[:1], frontend, flexible)
        same = frontend != "trace" or all(  # a trace may hold for the traced size only
            torch.equal(one, other) for place, wanted in enumerate(expected)
            for one, other in zip(captive(feeds[place].clone()), wanted, strict=True))
    except Exception:
        return "no program"
    if not same or any(0 in value.shape for values in expected for value in values):
        return "no program"
    target = chance.choice([ct.target.iOS16, ct.target.iOS18])
    try:
        mlmodel = convert_captured(captive, feeds[:1], frontend, flexible=flexible, target=target)
    except NotConverted:
        return "refused"
    for one, wanted in zip(feeds, expected, strict=True):
        for found, value in zip(outputs(mlmodel, [one]), wanted, strict=True):
            np.testing.assert_allclose(np.reshape(found, value.shape), value.numpy(), rtol=1e-4, atol=1e-4,
                                       err_msg=f"{steps} {frontend} {flexible} {target}")
    return "right"


def judged(seeds: range) -> None:
    with silence():
        verdicts = [drawn(seed) for seed in seeds]
    assert verdicts.count("right") >= 6 * verdicts.count("refused") and verdicts.count("right") >= len(seeds) // 5


def test_a_few() -> None:
    judged(range(15))


@pytest.mark.slow
def test_a_thousand() -> None:
    judged(range(40, 1040))
