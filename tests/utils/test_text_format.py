"""Formatting of nouns in messages."""

from __future__ import annotations

import pytest

import mil_ane_passes as ane
from mil_ane_passes.utils.text_format import add_article


@pytest.mark.parametrize("found", [
    "a tanh", "an add", "an upsample_bilinear", "an lstm", "an rnn", "a gru", "an l2_norm", "a uint8", "an int32",
    "a bool", "an fp16", "a float", "a list", "an ndarray", "an MLModel", "a NoneType", "an OrderedDict", "an op",
    "a unary", "a unique", "an unfold", "a matmul", "a dict", "an imputer", "a oneHotEncoder", "a logical_and",
])
def test_nouns_get_the_article_of_their_sound(found):
    assert add_article(found.split(" ")[-1]) == found


@pytest.mark.parametrize("given", [7, {"a", "b"}])
def test_types_of_users_objects_have_the_right_article(given):
    article = "an int" if isinstance(given, int) else "a set"
    with pytest.raises(ane.InputError, match=f"cannot load {article};"):
        ane.load(given)
