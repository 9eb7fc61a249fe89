"""What is said of a file of JSON that cannot be read."""

from __future__ import annotations

import pytest

from mil_ane_passes.utils.errors import InputError
from mil_ane_passes.utils.json_file import read_json


def test_what_is_in_it(tmp_path):
    (tmp_path / "a.json").write_text('{"a": [1, "é"]}', encoding="utf-8")
    assert read_json(tmp_path / "a.json", "who", "expected it") == {"a": [1, "é"]}


@pytest.mark.parametrize(("text", "message"), [
    (None, r"^who: no file '.*a\.json'; expected it$"),
    (b"{", r"^who: '.*a\.json' cannot be read as JSON \(.*\); expected it$"),
    (b"\xff", r"cannot be read as JSON"),
    (b"[" * 100_000, r"cannot be read as JSON"),
])
def test_who_asked_what_was_found_and_what_was_expected(tmp_path, text, message):
    if text is not None:
        (tmp_path / "a.json").write_bytes(text)
    with pytest.raises(InputError, match=message):
        read_json(tmp_path / "a.json", "who", "expected it")
