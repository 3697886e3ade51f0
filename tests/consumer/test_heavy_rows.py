"""Rows that take much memory, or long to arrive: few of them are claimed at once, and their leases do not expire."""

from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker, undefer

from sqlaqueue import Consumer, QueueConfig, QueueMixin
from sqlaqueue.consumer import context, pace
from sqlaqueue.consumer.maintenance import state
from tests.consumer.bench import LATER, Bench, Gate, Server, await_listening
from tests.faults.proxy import Proxy
from tests.programs import wait_until
from tests.servers import Database

pytestmark = pytest.mark.once

MIB = 2**20


def sizes_of_claims(server: Server) -> list[int]:
    """Return a list that gets the number of jobs of each claim that finds some."""
    sizes: list[int] = []
    server.consumer.on("polled", lambda event: sizes.append(event.jobs) if event.jobs else None)
    return sizes


@pytest.mark.parametrize("batch", [False, True])
def test_a_claim_takes_as_many_heavy_rows_as_fit_into_memory(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, *, batch: bool
) -> None:
    """Only the first one knows nothing of them. Later claims take more again."""
    monkeypatch.setattr(context, "CLAIM_BYTES", MIB)
    bench.enqueue(30, payload="x" * (MIB // 5))
    server = bench.consumer(batch=batch)
    sizes = sizes_of_claims(server)
    server.drain()
    assert bench.states() == {"completed": 30}
    first, *others = sizes
    assert first == (pace.FEW if batch else 1)
    assert max(others) == 4
    bench.enqueue(600)
    sizes.clear()
    server.drain()
    assert max(sizes) > 30


def test_a_batch_size_that_was_given_is_claimed_whatever_its_rows_weigh(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is the number of jobs that run, or commit, together."""
    monkeypatch.setattr(context, "CLAIM_BYTES", MIB)
    bench.enqueue(20, payload="x" * (MIB // 5))
    server = bench.consumer(batch=True, batch_size=10)
    sizes = sizes_of_claims(server)
    server.drain()
    assert sizes == [10, 10]


@pytest.mark.usefixtures("frequent_rescues")
def test_a_lease_does_not_end_while_its_row_arrives(leased: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the job could be rescued as soon as its claim is committed, and would run twice."""
    monkeypatch.setattr(state, "_SECOND_LOOK", 0.05)
    lease, gate = 2, Gate()
    with Proxy(leased.database) as proxy:
        server = leased.consumer(gate, url=proxy.url("psycopg"), lease=lease, poll_interval=LATER)
        no_jobs = sa.select(leased.Job).where(leased.Job.id < 0)
        with server.running(), leased.consumer(model=no_jobs).running() as other:
            await_listening(server, other)
            proxy.bytes_per_second = MIB / (1.2 * lease)
            [key] = leased.enqueue(1, payload="x" * MIB)
            gate.await_call()
            ends = leased.row(key).lease_expires_at
            wait_until(lambda: other.told("rescued") or leased.row(key).lease_expires_at != ends)
            gate.open()
            wait_until(lambda: leased.states() == {"completed": 1})
    assert server.told("rescued", "lease_lost") == other.told("rescued", "lease_lost") == []
    assert gate.calls == 1


def test_claims_take_fewer_rows_until_they_arrive_in_time(leased: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a connection is so slow that the first claim is given up; the same one would be given up for ever."""
    monkeypatch.setattr(pace, "LONGEST_WAIT", 2.0)
    with Proxy(leased.database) as proxy:
        server = leased.consumer(url=proxy.url("psycopg"), concurrency=8, poll_interval=0.2)
        sizes = sizes_of_claims(server)
        leased.enqueue(8, payload="x" * MIB)
        with server.running():
            proxy.bytes_per_second = 4 * MIB
            wait_until(lambda: leased.states() == {"completed": 8})
    assert max(sizes) < 8


@pytest.mark.parametrize("undeferred", [False, True])
def test_a_deferred_column_is_loaded_when_it_is_read(database: Database, strategy: str, *, undeferred: bool) -> None:
    """Not by the claim, unless the select says so; what it returned would be in memory, and thrown away."""

    class Base(DeclarativeBase):
        pass

    class Job(QueueMixin, Base):
        __tablename__ = "job"
        __queue__ = QueueConfig(strategy=strategy)
        id: Mapped[int] = mapped_column(primary_key=True)
        payload: Mapped[str] = mapped_column(deferred=True)

    engine = sa.create_engine(database.url())
    Base.metadata.create_all(engine)
    with Session(engine) as session:
        session.add(Job(payload="x"))
        session.commit()
    returned, loaded = list[str](), list[tuple[bool, str]]()

    @sa.event.listens_for(engine, "after_cursor_execute")
    def note(_: object, cursor: Any, statement: str, *__: object) -> None:
        if "SKIP LOCKED" in statement:
            returned.extend(each[0] for each in cursor.description or ())

    def handle(session: Session, job: Job) -> None:
        loaded.append(("payload" in job.__dict__, job.payload))

    jobs = sa.select(Job).options(undefer(Job.payload)) if undeferred else Job
    assert Consumer(jobs, handle, sessionmaker(engine)).drain() == 1
    engine.dispose()
    assert loaded == [(undeferred, "x")]
    assert ("payload" in returned) == undeferred
    assert "id" in returned
