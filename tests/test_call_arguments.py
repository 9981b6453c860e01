"""Arguments of calls in a history: the template always gets an object, in bounded time."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.text.dialects.json_calls import read_arguments

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = SCALARS | st.lists(SCALARS | st.lists(SCALARS, max_size=2), max_size=2)


@settings(max_examples=50, deadline=None)
@given(arguments=st.dictionaries(st.text(), VALUES, max_size=3), data=st.data())
def test_of_arguments_that_were_cut_the_whole_members_stay(
    arguments: dict[str, Any], data: Any
) -> None:
    text = json.dumps(arguments)
    assert read_arguments(text) == arguments
    read = read_arguments(text[: data.draw(st.integers(1, len(text)))])
    assert list(read) == list(arguments)[: len(read)]
    assert all(read[name] == arguments[name] for name in list(read)[:-1])


@given(st.text())
def test_any_text_is_an_object(text: str) -> None:
    assert isinstance(read_arguments(text), dict)


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("", {}),
        ("{", {}),
        ('{"a": 1, b: 2}', {"a": 1}),
        ('{"a": [1, 2, {"b": "c', {"a": [1, 2, {}]}),
        ('{"a": "line\nbreak"}', {"a": "line\nbreak"}),
        ("[1]", {"arguments": "[1]"}),
        ("ls -l", {"arguments": "ls -l"}),
        ('{"a": ' * 5000, None),
        ('{"a": ' + "1" * 5000 + "}", {}),
    ],
)
def test_broken_arguments_are_read_as_far_as_they_go(text: str, read: Any) -> None:
    found = read_arguments(text)
    assert isinstance(found, dict)
    if read is not None:
        assert found == read


def test_long_broken_arguments_take_little_time() -> None:
    began_s = time.perf_counter()
    read_arguments('{"a": "' + "x" * 10_000_000)
    read_arguments('{"a": [' + "1, " * 200_000)
    assert time.perf_counter() - began_s < 5.0
