"""Stored documents: types, ranges and kinds of files are checked, and every problem is one sentence."""

import os

import pytest
from pydantic import Field

from equipoise.core import InputError
from equipoise.core.files import Count, Document, check_document, parse_json, read_bounded, sealed, unsealed


class Part(Document):
    sigma: float
    shape: tuple[int, ...] = ()


class Example(Document):
    steps: Count
    parts: dict[str, Part] = Field(default_factory=dict)


GOOD = '{"steps": 3, "parts": {"a": {"sigma": 1, "shape": [1, 2]}}}'

BAD = {
    "[]": "must be an object",
    "{}": "'steps' is missing",
    '{"steps": "3"}': "'steps' must be a valid integer, got '3'",
    '{"steps": true}': "'steps' must be a valid integer, got True",
    '{"steps": -1}': "'steps' must be greater than or equal to 0",
    '{"steps": 1' + "0" * 30 + "}": "'steps' must be less than or equal to",
    '{"steps": 1, "parts": {"a": {"sigma": null}}}': "'parts.a.sigma' must be a valid number, got None",
    '{"steps": 1, "parts": {"a": {"sigma": 1e999}}}': "'parts.a.sigma' must be a finite number",
    '{"steps": 1, "stepz": 1}': "unknown key 'stepz'",
    '{"steps": 1, "steps": 2}': "given twice",
    '{"steps": NaN}': "NaN",
    '{"steps": "\\ud800"}': "Invalid JSON",
    "{": "not JSON",
}


@pytest.mark.parametrize("text", BAD)
def test_what_does_not_fit_is_one_sentence(text):
    good = check_document(parse_json(GOOD, "x.json"), Example, "x.json")
    assert good == Example(steps=3, parts={"a": Part(sigma=1.0, shape=(1, 2))})
    with pytest.raises(InputError) as caught:
        check_document(parse_json(text, "x.json"), Example, "x.json")
    assert BAD[text] in str(caught.value)
    assert str(caught.value).startswith("x.json")
    assert "\n" not in str(caught.value)


def test_a_seal_is_asked_for_and_checked():
    good = sealed({"steps": 3})
    assert unsealed(good, "x.json", needed=True) == {"steps": 3}
    with pytest.raises(InputError, match="changed after it was written"):
        unsealed(good | {"steps": 4}, "x.json", needed=True)
    with pytest.raises(InputError, match="digest"):
        unsealed({"steps": 3}, "x.json", needed=True)


@pytest.mark.timeout(10)
def test_only_regular_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    for path in (tmp_path / "pipe.json", tmp_path, "/dev/zero"):
        with pytest.raises(InputError, match="not a regular file"):
            read_bounded(path)
    with pytest.raises(InputError, match="cannot read"):
        read_bounded(tmp_path / "missing.json")
