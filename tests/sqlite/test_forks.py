"""Processes that fork while a Consumer runs: a child has nothing of its parent's connections, locks and Consumers."""

from __future__ import annotations

import os
import posix
import signal
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

from sqlaqueue import Consumer
from sqlaqueue.consumer.notifications import listener
from sqlaqueue.engines import notifications
from sqlaqueue.exc import ConfigurationError
from tests.consumer.models import models, prepared
from tests.consumer.test_crashes import (
    ENDS,
    children_are_ended,
    test_children_that_exit_in_the_handler_are_left_alone,
)
from tests.programs import wait_until

if TYPE_CHECKING:
    from tests.sqlite.bench import SQLiteBench

__all__ = ["test_children_that_exit_in_the_handler_are_left_alone"]

pytestmark = pytest.mark.once


def test_a_child_that_returns_from_the_handler_is_ended(bench: SQLiteBench) -> None:
    # SQLAlchemy 2.1 waits for the thread of aiosqlite first, which the child has not, so the loop goes on and ends it.
    waits = bench.api == "async" and not sa.__version__.startswith("2.0.")
    children_are_ended(bench, ENDS | {"statement": 0 if waits else 1})


def code_of_child(work: Callable[[], None]) -> int:
    """Do something in a forked child, for ten seconds at the most, and return its exit code."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            signal.alarm(10)
            work()
            code = 0
        finally:
            # Not os._exit(), which coverage extends by a write to a SQLite file of its own. That may wait without end
            # for a lock of the SQLite library that a thread of the parent had at the fork.
            posix._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def enqueue_and_drain(path: Path) -> None:
    """Do so with an engine and a Consumer of this process, and count the jobs that it has run."""
    engine, (base, job, *_) = prepared(sa.create_engine(f"sqlite:///{path}")), models("update_status")
    base.metadata.create_all(engine)
    with Session(engine) as session:
        session.add_all(job(payload="child") for _ in range(3))
        session.commit()
    ran: list[Any] = []
    mine = sa.select(job).where(job.payload == "child")
    Consumer(mine, lambda session, job: ran.append(job.id), sessionmaker(engine)).drain()
    assert len(ran) == 3


def is_refused(work: Callable[[], Any], path: Path) -> None:
    with pytest.raises(ConfigurationError, match=f"forked while process {os.getppid()} had connections to {path}"):
        work()


@pytest.mark.parametrize("api", ["sync"])
def test_a_file_that_the_parent_has_open_is_refused(bench: SQLiteBench) -> None:
    """SQLite would take the parent's locks for the child's own. The parent's Consumer goes on."""
    ran: list[Any] = []
    path = bench.file.path
    session = bench.sessions()
    session.add(bench.Owner(name="of an open transaction"))

    def work() -> None:
        is_refused(lambda: enqueue_and_drain(path), path)
        is_refused(bench.states, path)
        is_refused(session.commit, path)

    with Consumer(bench.Job, lambda session, job: ran.append(job.id), bench.sessions, poll_interval=3600):
        for number in range(1, 4):
            assert code_of_child(work) == 0
            bench.enqueue()
            wait_until(lambda number=number: len(ran) == number, "the parent's Consumer is woken")
        session.flush()
        assert code_of_child(work) == 0
        session.commit()
    assert bench.states() == {"completed": 3}


@pytest.mark.parametrize("api", ["sync"])
def test_a_file_that_creator_opens_is_refused(bench: SQLiteBench) -> None:
    """On either side: the URL does not name it."""
    path = bench.file.path

    def creating() -> sa.Engine:
        return prepared(sa.create_engine("sqlite://", creator=lambda: sqlite3.connect(path), poolclass=sa.NullPool))

    def connect(engine: sa.Engine) -> None:
        with engine.connect() as connection:
            connection.execute(sa.select(bench.Job)).all()

    engine = creating()
    bench.engine.dispose()
    with engine.connect() as connection:
        connection.execute(sa.select(bench.Job)).all()
        assert code_of_child(lambda: is_refused(lambda: connect(bench.engine), path)) == 0
        assert code_of_child(lambda: is_refused(lambda: connect(creating()), path)) == 0
        assert code_of_child(lambda: is_refused(lambda: connect(engine), path)) == 0
    assert code_of_child(lambda: connect(engine)) == 0


@pytest.mark.parametrize("api", ["sync"])
def test_a_file_that_the_parent_has_closed_is_not_refused(bench: SQLiteBench) -> None:
    bench.enqueue()
    with bench.engine.connect() as connection:
        connection.detach()
    bench.engine.dispose()
    assert code_of_child(lambda: enqueue_and_drain(bench.file.path)) == 0
    assert bench.states() == {"pending": 1, "completed": 3}


@pytest.mark.parametrize("lock", [notifications, listener], ids=lambda module: module.__name__.rpartition(".")[2])
def test_a_lock_that_was_held_at_the_fork(tmp_path: Path, lock: Any) -> None:
    """A thread of the parent has it, which the child has not, so nothing would release it there."""
    taken, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        with lock._lock:
            taken.set()
            may_end.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait()

    def work() -> None:
        enqueue_and_drain(tmp_path / "other.db")
        # That of PostgreSQL is not taken on a file.
        assert lock._lock.acquire(timeout=5)

    try:
        assert code_of_child(work) == 0
    finally:
        may_end.set()
        thread.join()


@pytest.mark.parametrize("api", ["sync"])
def test_subscriptions_stay_with_the_parent(bench: SQLiteBench) -> None:
    """In the child, the end of one does not fail, and nothing is delivered to the parent's subscribers."""

    class Subscriber:
        def receive(self, payload: Any) -> None:
            raise AssertionError

    subscriber: Any = Subscriber()

    def work() -> None:
        listener.unsubscribe(subscriber)
        end = notifications.subscribe(bench.engine, lambda *_: None)
        end()
        end_of_parent()

    listener.subscribe(bench.engine, "sqlaqueue_job", subscriber)
    end_of_parent = notifications.subscribe(bench.engine, lambda *_: None)
    try:
        assert code_of_child(work) == 0
    finally:
        end_of_parent()
        listener.unsubscribe(subscriber)
