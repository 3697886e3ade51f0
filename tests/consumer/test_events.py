"""The events of jobs, for event listeners and in the log."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from sqlaqueue import Cancel, Fail, JobEvent, Retry, Snooze
from sqlaqueue.exc import ConfigurationError
from tests.consumer.bench import Bench
from tests.programs import wait_until

ENDS: dict[str, tuple[str, Any]] = {
    "good": ("completed", None),
    "retry": ("retried", Retry(3600, error="later")),
    "error": ("retried", ValueError("an error")),
    "fail": ("failed", Fail("for good")),
    "cancel": ("cancelled", Cancel("not needed")),
    "snooze": ("released", Snooze(1800)),
}


async def end(io: Any, job: Any) -> None:
    """Settle the run as the job's payload says."""
    _, error = ENDS[job.payload]
    if error is not None:
        raise error


def test_each_outcome_has_an_event(bench: Bench) -> None:
    keys = {payload: bench.enqueue(1, payload=payload)[0] for payload in ENDS}
    server = bench.consumer(end, retry=lambda *_: 7200)
    server.drain()
    for payload, (name, error) in ENDS.items():
        claimed, ended = [event for event in server.events if event.key == (keys[payload],)]
        assert (claimed.name, ended.name) == ("claimed", name)
        assert ended.queue == claimed.queue == "job"
        assert ended.attempt == claimed.attempt == 1
        assert ended.error is error
    delays = {event.key[0]: event.delay for event in server.events if event.delay is not None}
    assert delays == {keys["retry"]: 3600, keys["error"]: 7200, keys["snooze"]: 1800}


def test_an_event_follows_the_commit(bench: Bench) -> None:
    """Other transactions see the change."""
    keys = {payload: bench.enqueue(1, payload=payload)[0] for payload in ENDS}
    seen: dict[int, tuple[str, str]] = {}
    server = bench.consumer(end, retry=lambda *_: 7200)

    def look(event: JobEvent) -> None:
        seen[event.key[0]] = (event.name, bench.row(event.key[0]).status)

    for name in ("completed", "retried", "failed", "cancelled", "released"):
        server.consumer.on(name, look)
    server.drain()
    states = {"completed": "completed", "failed": "failed", "cancelled": "cancelled"}
    assert seen == {keys[payload]: (name, states.get(name, "pending")) for payload, (name, _) in ENDS.items()}


def test_events_have_the_number_of_the_attempt(bench: Bench) -> None:
    [key] = bench.enqueue(1)

    async def work(io: Any, job: Any) -> None:
        raise ValueError

    server = bench.consumer(work)
    server.drain()
    told = [(event.name, event.attempt) for event in server.events]
    assert told == [
        ("claimed", 1),
        ("retried", 1),
        ("claimed", 2),
        ("retried", 2),
        ("claimed", 3),
        ("failed", 3),
    ]
    assert bench.row(key).attempts == 3


@pytest.mark.parametrize("error", [ValueError("in a listener"), SystemExit(1), KeyboardInterrupt()])
def test_an_event_listener_that_raises_changes_nothing(bench: Bench, error: BaseException, log: Any) -> None:
    bench.enqueue(5)
    server = bench.consumer(concurrency=2)

    def fail(event: JobEvent) -> None:
        raise error

    for name in ("claimed", "completed"):
        server.consumer.on(name, fail)
    assert server.drain() == 5
    assert bench.states() == {"completed": 5}
    assert log.text.count("an event listener for 'completed' failed") == 5
    bench.assert_tidy()


def test_an_unknown_event_is_refused(leased: Bench) -> None:
    with pytest.raises(ConfigurationError, match=r"'finished'.*claimed, completed"):
        leased.consumer().consumer.on("finished", print)


def test_the_log_names_the_jobs(bench: Bench, log: Any) -> None:
    keys = {payload: bench.enqueue(1, payload=payload)[0] for payload in ENDS}
    bench.consumer(end, retry=lambda *_: 7200).drain()
    lines = {record.getMessage(): record for record in log.records}
    [completed] = [line for line in lines if line.startswith(f"job {keys['good']} of queue job: completed in ")]
    assert lines[completed].levelno == logging.DEBUG
    [retried] = [line for line in lines if "ValueError: an error" in line]
    assert retried == (
        f"job {keys['error']} of queue job: attempt 1 of 3 failed, next try in 7200 s: ValueError: an error"
    )
    assert lines[retried].levelno == logging.WARNING
    failed = lines[f"job {keys['fail']} of queue job: attempt 1 of 3 failed, no further try: Fail: for good"]
    assert failed.levelno == logging.ERROR
    assert {record.name for record in log.records} <= {"sqlaqueue", "asyncio"}


def test_a_rescue_and_a_refusal_are_told(leased: Bench, frequent_rescues: None, log: Any) -> None:
    [key] = leased.enqueue(1)

    async def work(io: Any, job: Any) -> None:
        if job.attempts == 1:
            leased.execute("UPDATE job SET lease_expires_at = clock_timestamp() - interval '1 s'")
            with leased.consumer().running() as thief:
                wait_until(lambda: leased.states() == {"completed": 1})
            assert thief.told("rescued", "completed") == [key, key]

    server = leased.consumer(work)
    server.drain()
    assert server.told("lease_lost") == [key]
    assert f"job {key} of queue job: rescued: its lease expired" in log.text
    assert f"job {key} of queue job: the result of attempt 1 of 3 is refused" in log.text
    assert "None" not in log.text
