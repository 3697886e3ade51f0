"""What operators ask of Consumers: to be quiet, to claim again, to stop; each strategy, API and database."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from sqlaqueue import AsyncConsumer, Consumer, QueueConfig, QueueMixin, claim, prepare
from sqlaqueue.admin import QueueAdmin
from sqlaqueue.admin.changes import ConsumerAction, ask_consumers
from sqlaqueue.admin.doctor.doctor import doctor
from sqlaqueue.admin.state import about_consumer, workers
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.sql.portable import clock
from tests.models import sent_statements
from tests.programs import wait_until
from tests.servers import Server

STRATEGIES = ("update_status", "delete_returning", "batch_select")


def make_task(strategy: str, **options: Any) -> Any:
    class Base(DeclarativeBase):
        pass

    class Task(QueueMixin, Base):
        __tablename__ = "task"
        __queue__ = QueueConfig(strategy=strategy, **options)
        id: Mapped[int] = mapped_column(primary_key=True)

    return Task


class Bench:
    """A queue, and one Consumer of it that begins each job when the test lets it."""

    def __init__(self, url: str, async_url: str) -> None:
        self.async_url, self.engine = async_url, prepare(sa.create_engine(url, pool_size=5))
        self.began: list[int] = []
        self.ended: list[int] = []
        self.gate = threading.Event()
        self.thread: threading.Thread | None = None
        self.model: Any = None

    def create(self, strategy: str, **options: Any) -> None:
        self.model = make_task(strategy, **options)
        self.model.metadata.create_all(self.engine)

    def enqueue(self, *keys: int) -> None:
        with Session(self.engine) as session:
            session.add_all([self.model(id=key) for key in keys])
            session.commit()

    @contextmanager
    def consuming(self, api: str, **options: Any) -> Iterator[Any]:
        given = {"poll_interval": 0.1, "worker_name": "web", "grace": 20, **options}
        if api == "sync":
            consumer: Any = Consumer(self.model, self.send, lambda: Session(self.engine), **given)
            self.thread = threading.Thread(target=consumer.run)
        else:
            engine = prepare(create_async_engine(self.async_url))
            consumer = AsyncConsumer(self.model, self.async_send, async_sessionmaker(engine), **given)
            self.thread = threading.Thread(target=asyncio.run, args=[self._run(consumer, engine)])
        self.thread.start()
        try:
            yield consumer
        finally:
            self.gate.set()
            consumer.stop()
            self.thread.join(60)
            assert not self.thread.is_alive(), "the Consumer does not end"

    async def _run(self, consumer: Any, engine: Any) -> None:
        try:
            await consumer.run()
        finally:
            await engine.dispose()

    def send(self, session: Session, job: Any) -> None:
        key = job.id
        self.began.append(key)
        self.gate.wait(60)
        self.ended.append(key)

    async def async_send(self, session: AsyncSession, job: Any) -> None:
        key = job.id
        self.began.append(key)
        while not self.gate.is_set():
            await asyncio.sleep(0.01)
        self.ended.append(key)

    # -- what is in the database ---------------------------------------------------------------------------------------

    def ask(self, action: ConsumerAction) -> None:
        # It may have begun a job before its first heartbeat.
        self.wait_for(lambda _: True)
        with Session(self.engine) as session:
            ask_consumers(session, self.model, action, [each.id for each in self.rows()])

    def rows(self) -> list[Any]:
        with Session(self.engine) as session:
            return [*workers(session, spec_of(self.model))]

    def row(self) -> Any:
        (row,) = self.rows()
        return row

    def wait_for(self, condition: Callable[[Any], Any]) -> Any:
        wait_until(lambda: [*map(condition, self.rows())] == [True])
        return self.row()

    def wait_for_heartbeats(self, number: int = 2) -> None:
        """Wait until the Consumer has had the time of some heartbeats in which to do something wrong."""
        self.wait_for(lambda _: True)
        for _ in range(number):
            last = self.row().heartbeat_at
            self.wait_for(lambda row, last=last: row.heartbeat_at > last)

    def requests(self) -> list[Any]:
        control = self.model.metadata.tables["sqlaqueue_control"]
        with self.engine.connect() as connection:
            return [*connection.scalars(sa.select(control.c.key))]


@pytest.fixture(params=["postgresql", "sqlite", "mariadb"])
def bench(request: pytest.FixtureRequest, server: Server, tmp_path: Path) -> Iterator[Bench]:
    if request.param == "postgresql":
        with server.database() as database:
            yield from _yielded(Bench(database.url(), database.url("asyncpg")))
    elif request.param == "sqlite":
        yield from _yielded(Bench(f"sqlite:///{tmp_path}/jobs.db", f"sqlite+aiosqlite:///{tmp_path}/jobs.db"))
    else:
        mariadb = request.getfixturevalue("mariadb")
        with mariadb.database() as name:
            yield from _yielded(Bench(mariadb.url(name), mariadb.url(name, "mariadb+asyncmy")))


def _yielded(bench: Bench) -> Iterator[Bench]:
    yield bench
    bench.engine.dispose()


PLACES = [
    *(("postgresql", strategy) for strategy in STRATEGIES),
    *(("mariadb", strategy) for strategy in STRATEGIES if strategy != "delete_returning"),
    ("sqlite", "update_status"),
]


@pytest.fixture
def short_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sqlaqueue.consumer.pace.HEARTBEAT", 0.3)


@pytest.mark.usefixtures("short_heartbeats")
@pytest.mark.few(3)
@pytest.mark.parametrize("api", ["sync", "async"])
@pytest.mark.parametrize(("bench", "strategy"), PLACES, indirect=["bench"])
def test_a_quiet_consumer_finishes_what_it_runs_and_claims_nothing_more(bench: Bench, strategy: str, api: str) -> None:
    bench.create(strategy)
    with bench.consuming(api, batch_size=1) as consumer:
        bench.enqueue(1)
        wait_until(lambda: bench.began == [1])
        bench.ask("quiet")
        row = bench.wait_for(lambda row: about_consumer(row).quiet)
        assert (row.is_alive, bool(row.quiet_asked), bool(row.stop_asked), row.listening) == (True, True, False, False)
        assert about_consumer(row).handlers == [f"tests.engines.test_requests:Bench.{'async_' * (api != 'sync')}send"]
        bench.enqueue(2)
        bench.gate.set()
        wait_until(lambda: bench.ended == [1])
        bench.wait_for_heartbeats()
        assert bench.began == [1]
        assert [each.split(":")[0] for each in consumer.health().problems] == ["it is quiet"]
        assert consumer.health().alive
        bench.ask("resume")
        wait_until(lambda: bench.ended == [1, 2])
        row = bench.wait_for(lambda row: not about_consumer(row).quiet)
        assert not row.quiet_asked
    assert bench.rows() == []
    assert bench.requests() == []


@pytest.mark.usefixtures("short_heartbeats")
@pytest.mark.few(3)
@pytest.mark.parametrize("api", ["sync", "async"])
@pytest.mark.parametrize(("bench", "strategy"), PLACES, indirect=["bench"])
def test_a_consumer_that_is_asked_to_stop_ends_as_after_a_signal(bench: Bench, strategy: str, api: str) -> None:
    bench.create(strategy)
    with bench.consuming(api, batch_size=1) as consumer:
        bench.enqueue(1, 2)
        wait_until(lambda: bench.began == [1])
        bench.ask("quiet")
        bench.ask("stop")
        wait_until(lambda: "it is stopping" in consumer.health().problems)
        bench.gate.set()
        wait_until(lambda: bench.thread is not None and not bench.thread.is_alive())
    assert bench.ended == [1]
    assert bench.rows() == []
    # Another run of the program must not find them.
    assert bench.requests() == []


@pytest.mark.parametrize("bench", ["postgresql"], indirect=True)
def test_a_notification_tells_a_consumer_that_something_is_asked(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.create("update_status")
    with bench.consuming("sync"):
        bench.wait_for(lambda row: row.listening)
        monkeypatch.setattr("sqlaqueue.consumer.pace.HEARTBEAT", 3600.0)
        bench.ask("quiet")
        bench.wait_for(lambda row: about_consumer(row).quiet)
        bench.ask("resume")
        bench.wait_for(lambda row: not about_consumer(row).quiet and row.listening)
        bench.ask("stop")
        wait_until(lambda: bench.rows() == [])


@pytest.mark.few(1)
@pytest.mark.usefixtures("short_heartbeats")
@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_quiet_consumer_does_not_poll(bench: Bench, concurrency: int) -> None:
    bench.create("update_status")
    with bench.consuming("sync", concurrency=concurrency):
        bench.wait_for(lambda _: True)
        bench.ask("quiet")
        bench.wait_for(lambda row: about_consumer(row).quiet)
        with sent_statements(bench.engine) as sent:
            bench.wait_for_heartbeats(4)
        # It looks for expired leases as before, and reads what is asked of it.
        other = ("lease_expires_at <=", "sqlaqueue_consumer")
        assert [each for each, _ in sent if "task" in each and not any(part in each for part in other)] == []


@pytest.mark.usefixtures("short_heartbeats")
@pytest.mark.parametrize("bench", ["postgresql"], indirect=True)
def test_the_heartbeat_itself_reads_what_is_asked(bench: Bench) -> None:
    """A Consumer of which nothing is asked sends no statement for it."""
    bench.create("update_status")
    with bench.consuming("sync", poll_interval=600):
        bench.wait_for_heartbeats(2)
        with sent_statements(bench.engine) as sent:
            bench.wait_for_heartbeats(3)
    beats = [each for each, _ in sent if "WITH sqlaqueue_heartbeat" in each]
    assert len(beats) >= 3
    assert all("'sqlaqueue_quiet'" in each and "'sqlaqueue_stop'" in each for each in beats)
    # The others are the reads of this test, and of the versions of tables.
    reads = [each for each, _ in sent if "sqlaqueue_control" in each and "obj_description" not in each]
    others = [each for each in reads if each not in beats]
    assert all("AS quiet_asked" in each for each in others)


@pytest.mark.usefixtures("short_heartbeats")
def test_a_drain_that_is_asked_to_be_quiet_ends(bench: Bench) -> None:
    bench.create("update_status")
    bench.enqueue(1, 2)
    consumer = Consumer(bench.model, bench.send, lambda: Session(bench.engine), batch_size=1)
    thread = threading.Thread(target=consumer.drain)
    thread.start()
    wait_until(lambda: bench.began == [1])
    bench.wait_for(lambda _: True)
    bench.ask("quiet")
    wait_until(lambda: "it is stopping" in consumer.health().problems)
    bench.gate.set()
    thread.join(60)
    assert not thread.is_alive()
    assert bench.ended == [1]


def test_requests_to_consumers_that_are_gone_are_deleted(bench: Bench) -> None:
    bench.create("update_status")
    tables = bench.model.metadata.tables
    consumers, control = tables["sqlaqueue_consumer"], tables["sqlaqueue_control"]
    with Session(bench.engine) as session:
        ask_consumers(session, bench.model, "quiet", ["gone"])
        ask_consumers(session, bench.model, "stop", ["gone"])
        ask_consumers(session, bench.model, "quiet", ["lives"])
    with bench.engine.begin() as connection:
        row = {"queue": "task", "name": "n", "host": "h", "pid": 1, "version": "1", "listening": False, "running": []}
        moments = {"heartbeat_at": clock(), "expires_at": sa.text("'2999-01-01'")}
        connection.execute(sa.insert(consumers).values(id="lives", **row, **moments))
        connection.execute(sa.update(control).values(created_at=sa.text("'2020-01-01'")))
    with Session(bench.engine) as session:
        (left,) = [each for each in doctor(session, bench.model) if each.code == "old_cancellations"]
        assert left.facts == {"requests": 2}
    with bench.consuming("sync"):
        wait_until(lambda: len(bench.requests()) == 1)
        assert [bool(each.quiet_asked) for each in bench.rows() if each.id == "lives"] == [True]


def test_a_pause_keeps_its_reason_and_blocks_claims(bench: Bench) -> None:
    bench.create("update_status")
    bench.enqueue(1)
    reason = 'the "mail server" is\tbeing moved: \\ \u00e9\u4e2d\U0001f40c ' + "x" * 150
    with Session(bench.engine) as session:
        admin = QueueAdmin(session, bench.model)
        admin.pause(reason=reason, author="\u4e2d" * 50)
        told = admin.pause_info()
        assert told is not None
        assert (told.reason, told.author) == (" ".join(reason.split()), "\u4e2d" * 50)
        assert told.since.tzinfo is not None
        assert session.scalars(claim(bench.model, 1)).all() == []
        session.rollback()
        admin.pause(reason="another", author="eve")
        assert admin.pause_info() == told
        admin.resume()
        assert admin.pause_info() is None
        admin.pause()
        told = admin.pause_info()
        assert told is not None
        assert told.reason == ""
        admin.resume()
        assert len(session.scalars(claim(bench.model, 1)).all()) == 1
        session.rollback()
    assert bench.requests() == []
