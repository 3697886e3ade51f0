"""The texts of primary keys and of notifications: what is written can be read again, and nothing else."""

import csv
from typing import Any
from uuid import UUID, uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sqlaqueue.notify_payloads import (
    MAX_BYTES,
    Claimed,
    Deregistered,
    Heartbeat,
    Payload,
    Pending,
    Settled,
    Signal,
    WaitRequest,
    parse,
    settled_payloads,
)
from sqlaqueue.queue.run import Run, key_text, key_value, keys_by_token, keys_from

pytestmark = pytest.mark.once

# What CSV has a meaning for, and some letters: to prepare all characters of Unicode takes Hypothesis seconds.
CHARACTERS = st.sampled_from(",;:|\"'\\\0\a\t\r\n aä😀\x85\u2028")
COMPOSITE = st.lists(st.text(CHARACTERS), min_size=2, max_size=3)


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


# A loaded machine takes seconds for what is quick.
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
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


# -- notifications --------------------------------------------------------------------------------------------------
KEYS = ["5", "two words", '["1", "a b"]', "ä\n\"'\\ \U0001f600", ""]


@pytest.mark.parametrize(
    "payload",
    [
        Pending("4711", 3),
        Pending("4711", 3, 1764000000.25, more=True),
        Claimed(2, ["4711", "4712@1764000000.25"]),
        Heartbeat("a"),
        Deregistered("a"),
        WaitRequest("a", KEYS),
        Settled(KEYS),
        *Signal,
    ],
    ids=lambda payload: str(payload).partition(" ")[0],
)
def test_what_is_sent_can_be_parsed(payload: Payload) -> None:
    assert parse(str(payload)) == payload


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\0",
        "another kind",
        "pending",
        "pending 1 x 0",
        "pending 1 1 y",
        "pending 1 1 nan",
        "claimed",
        "claimed x 1",
        "heartbeat",
        "poll 1",
        "wait",
        "wait x",
        "wait x {",
        "wait x 5",
        "wait x [5]",
        "settled",
        "settled [",
        "settled 5",
        'settled [5, "',
    ],
)
def test_what_cannot_be_parsed_is_ignored(text: str) -> None:
    assert parse(text) is None


def test_many_settled_jobs_take_several_payloads() -> None:
    jobs = [str(number) * 20 for number in range(3000)]
    payloads = [*settled_payloads(jobs)]
    assert len(payloads) > 1
    assert all(len(str(payload)) <= MAX_BYTES for payload in payloads)
    assert [job for payload in payloads for job in payload.jobs] == jobs
    assert [*settled_payloads([])] == []
