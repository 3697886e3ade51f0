"""The format of notifications: what is sent can be parsed, and nothing else."""

from __future__ import annotations

import pytest

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

pytestmark = pytest.mark.once

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
