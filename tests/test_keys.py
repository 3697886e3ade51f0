"""Primary keys: their text, their values, and grouping by claim."""

from __future__ import annotations

import csv
from typing import Any
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sqlaqueue.queue.run import Run, key_text, key_value, keys_by_token, keys_from

pytestmark = pytest.mark.once

COMPOSITE = st.lists(st.text(), min_size=2, max_size=3)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ((5,), "5"),
        (("a,b",), "a,b"),
        ((5, "de"), "5,de"),
        (("a,b", "c"), '"a,b",c'),
        (("a", "b,c"), 'a,"b,c"'),
        (('"', ""), '"""",'),
        ((UUID(int=1), 2), "00000000-0000-0000-0000-000000000001,2"),
    ],
)
def test_the_text_of_a_key(key: tuple[Any, ...], text: str) -> None:
    assert key_text(key) == text


@given(COMPOSITE)
def test_the_text_of_a_composite_key_can_be_parsed(key: list[str]) -> None:
    assert list(csv.reader([key_text(key)])) == [key]


def test_the_value_of_a_key() -> None:
    assert key_value((5,)) == 5
    assert key_value([5, "de"]) == (5, "de")


def test_returned_keys_become_tuples() -> None:
    assert keys_from(iter([5, 6]), 1) == [(5,), (6,)]
    assert keys_from([[5, "de"]], 2) == [(5, "de")]


def test_runs_are_grouped_by_the_token_of_their_claim() -> None:
    one, other = uuid4(), uuid4()
    tokens = {1: one, 2: one, 3: other, 4: None, 5: UUID(int=one.int)}
    runs = [Run((key,), token, 1, 5) for key, token in tokens.items()]
    assert keys_by_token(runs) == {one: [(1,), (2,), (5,)], other: [(3,)], None: [(4,)]}
    assert keys_by_token([]) == {}
