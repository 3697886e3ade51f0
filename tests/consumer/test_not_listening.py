"""Consumers that receive no notifications poll, and log it where the operator can change it."""

from __future__ import annotations

import errno
import resource
import threading
from typing import Any

import pytest

from sqlaqueue.consumer import pace
from sqlaqueue.consumer.core.waker import Waker
from sqlaqueue.consumer.maintenance import leases
from sqlaqueue.consumer.notifications import listener, polls
from sqlaqueue.consumer.notifications.polls import PollSchedule
from tests.consumer.bench import LATER, Bench, await_listening, idle, is_listening, listening_connections
from tests.programs import wait_until


@pytest.fixture(autouse=True)
def no_rescues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "RESCUE", LATER)


def test_a_lost_connection_is_replaced(mixed: Bench) -> None:
    with idle(mixed).running() as server:
        await_listening(server)
        assert mixed.database.kill_backends() > 0
        mixed.enqueue()
        wait_until(lambda: mixed.states() == {"completed": 1})
        await_listening(server)
        mixed.enqueue()
        wait_until(lambda: mixed.states() == {"completed": 2})


def test_each_loss_of_a_working_connection_is_logged(mixed: Bench, log: pytest.LogCaptureFixture) -> None:
    """And waited for as briefly as the first one."""
    with idle(mixed).running() as server:
        for number in range(1, 4):
            await_listening(server)
            mixed.database.kill_backends()
            wait_until(lambda number=number: len(_losses(log)) == number, "the loss is logged")


def _losses(log: pytest.LogCaptureFixture) -> list[Any]:
    return [record for record in log.records if getattr(record, "event", "") == "listener_lost"]


def test_a_listener_that_cannot_even_wait_connects_again(leased: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the process has no file descriptor left for a moment."""
    if leased.api == "async":
        pytest.skip("the event loop waits for an asynchronous listener")
    failed = threading.Semaphore(0)

    def fail(*_: Any) -> bool:
        failed.release()
        raise OSError(errno.EMFILE, "Too many open files")

    with idle(leased).running() as server:
        await_listening(server)
        with monkeypatch.context() as patched:
            (own,) = listener._listeners.values()
            patched.setattr(own, "_connection", fail)
            patched.setattr(own._waker, "wait", fail)
            assert leased.database.kill_backends() > 0
            for _ in range(4):
                assert failed.acquire(timeout=30)
            leased.enqueue()
        await_listening(server)
        leased.enqueue()
        wait_until(lambda: leased.states() == {"completed": 2})


def test_a_waker_opens_no_file_to_wait() -> None:
    waker = Waker()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limit[1]))
    try:
        assert waker.wait(0) is False
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        waker.close()


def test_a_consumer_without_notifications_polls_and_logs_it_once(
    mixed: Bench, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    """As behind a pooler in transaction mode, where LISTEN succeeds and nothing arrives."""
    monkeypatch.setattr(polls, "PROOF_TIMEOUT", 0.05)
    monkeypatch.setattr(pace, "HEARTBEAT", 0.2)
    monkeypatch.setattr(PollSchedule, "receive", lambda self, payload: None)
    with idle(mixed, poll_interval=0.05).running():
        mixed.enqueue()
        wait_until(lambda: mixed.states() == {"completed": 1})
        wait_until(lambda: "notifications do not arrive" in log.text)
        mixed.enqueue()
        wait_until(lambda: mixed.states() == {"completed": 2})
    assert log.text.count("notifications do not arrive") == 1


def test_a_long_drain_does_not_log_it(
    mixed: Bench, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    """A drain does not listen."""
    monkeypatch.setattr(polls, "PROOF_TIMEOUT", 0.05)
    monkeypatch.setattr(pace, "HEARTBEAT", 0.1)
    beats, enough = list[Any](), threading.Event()
    send_heartbeat = leases.send_heartbeat

    def count(session: Any, context: Any, beat: Any) -> Any:
        beats.append(beat)
        if len(beats) == 3:
            enough.set()
        return send_heartbeat(session, context, beat)

    async def work(io: Any, job: Any) -> None:
        await io.wait(enough)

    monkeypatch.setattr(leases, "send_heartbeat", count)
    mixed.enqueue()
    assert mixed.consumer(work).drain() == 1
    assert "notifications do not arrive" not in log.text


@pytest.mark.parametrize("trigger", ["sqlaqueue_wake_insert"])
def test_a_disabled_trigger_is_detected(mixed: Bench, trigger: str, log: pytest.LogCaptureFixture) -> None:
    mixed.execute(f"ALTER TABLE job DISABLE TRIGGER {trigger}")
    try:
        with idle(mixed, poll_interval=0.05).running() as server:
            wait_until(lambda: trigger in log.text)
            mixed.enqueue()
            wait_until(lambda: mixed.states() == {"completed": 1})
            assert not is_listening(server)
    finally:
        mixed.execute(f"ALTER TABLE job ENABLE TRIGGER {trigger}")


def test_without_notifications(server: Any, strategy: str, api: str) -> None:
    with server.database() as database:
        bench = Bench(database, strategy, api, notify=False)
        bench.create()
        assert bench.execute("SELECT count(*) FROM pg_trigger WHERE tgname LIKE 'sqlaqueue_wake%'") == 0
        with idle(bench, poll_interval=0.05).running():
            bench.enqueue()
            wait_until(lambda: bench.states() == {"completed": 1})
            assert listening_connections(bench) == 0
