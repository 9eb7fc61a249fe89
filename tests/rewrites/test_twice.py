"""The preset run twice equals the preset run once, on what every rewrite shows as an example."""

from __future__ import annotations

import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb

from mil_ane_passes.core.examples import program, weight
from mil_ane_passes.core.forecast import Forecast
from mil_ane_passes.core.guard import Guard
from mil_ane_passes.core.pipeline import run_all, selected
from mil_ane_passes.core.registry import all_rules, rewrites
from mil_ane_passes.residency.predict import predict


def guard(target):
    rules = [rule() for rule in all_rules().values() if rule.refuses]
    return Guard(lambda each: Forecast.of(predict(each, rules, target=target)[0]))


def fired_again(built, target):
    run_all(selected("full"), built, target=target, guard=guard(target))
    again = run_all(selected("full"), built, target=target, guard=guard(target))
    return [trace.rule for trace in again if trace.fired]


@pytest.mark.parametrize("name", [name for name, rule in rewrites().items() if rule.preset != "named"])
def test_examples(name):
    again = {example.name: fired_again(example.build(), "all") for example in rewrites()[name]().examples()}
    assert not any(again.values()), again


def pooled(x):
    x = mb.avg_pool(x=mb.max_pool(x=x, kernel_sizes=[40], strides=[2], pad_type="valid"), kernel_sizes=[40],
                    strides=[3], pad_type="same")
    return mb.pad(x=mb.cumsum(x=x, axis=-1), pad=[0, 0, 0, 0, 7, 8], constant_val=np.float16(1),
                  name="y")


def upsampled(x):
    x = mb.tan(x=mb.max_pool(x=x, kernel_sizes=[13], strides=[3], pad_type="same"))
    x = mb.conv(x=x, weight=weight(8, 1, 80), groups=4, pad_type="same")
    return mb.conv_transpose(x=x, weight=weight(8, 8, 16), bias=weight(8), strides=[2], name="y")


@pytest.mark.parametrize(("body", "target"), [(pooled, "all"), (upsampled, "m4")])
def test_what_a_guard_weighs_against_each_other(body, target):
    assert not fired_again(program(body, x=(1, 4, 300)), target)
