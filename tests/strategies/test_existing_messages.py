"""A message table of the application, which inserts the messages itself."""

import logging
from datetime import datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqlaqueue import Consumer, QueueConfig, QueueMixin, claim, complete, fail, reconcile, release, requeue, retry
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.strategies.existing_messages import ExistingMessages
from tests.models import insert, make_job
from tests.programs import wait_until


class Base(DeclarativeBase):
    pass


class Note(Base):
    __tablename__ = "note"
    number: Mapped[int] = mapped_column("no", primary_key=True)
    about: Mapped[int] = mapped_column("job_id")
    since: Mapped[int] = mapped_column(server_default="9")
    state: Mapped[str] = mapped_column(server_default="new")


class Job(QueueMixin, Base):
    __tablename__ = "job"
    __queue__ = QueueConfig(
        strategy=ExistingMessages(Note, job="about", order_by="since", waiting={"state": "new"}),
        adopt={"status": "status", "attempts": "attempts", "run_at": "run_at"},
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[str] = mapped_column(default="pending")
    attempts: Mapped[int] = mapped_column(default=0)
    run_at: Mapped[datetime | None]


@pytest.fixture
def engine(engine: sa.Engine) -> sa.Engine:
    Base.metadata.create_all(engine)
    return engine


def enqueue(engine: sa.Engine, *jobs: int, **values: Any) -> None:
    insert(engine, Job, [{"id": number, **values} for number in jobs])


def note(engine: sa.Engine, *jobs: int, **values: Any) -> None:
    with Session(engine) as session:
        for number in jobs:
            session.add(Note(about=number, **values))
            session.flush()
        session.commit()


def noted(engine: sa.Engine) -> list[int]:
    with Session(engine) as session:
        return list(session.scalars(sa.select(Note.about).order_by(Note.since, Note.number)))


def impatient(engine: sa.Engine) -> Session:
    """Return a session whose first transaction does not wait for locks."""
    session = Session(engine)
    session.execute(sa.text("SET LOCAL lock_timeout = '100ms'"))
    return session


def numbers(jobs: Any) -> list[int]:
    return [job.id for job in jobs]


def test_messages_are_consumed_in_their_own_order(engine: sa.Engine) -> None:
    enqueue(engine, 1, 2, 3, 4)
    note(engine, 3, 1)
    note(engine, 4, since=1)
    note(engine, 2, state="draft")
    with Session(engine) as session:
        assert numbers(session.scalars(claim(Job, 2))) == [4, 3]
        assert numbers(session.scalars(claim(Job, 9))) == [1]
        session.commit()
    assert noted(engine) == [2]


def test_a_rollback_restores_the_messages(engine: sa.Engine) -> None:
    enqueue(engine, 1, 2)
    note(engine, 2, 1, 2)
    with Session(engine) as session:
        session.scalars(claim(Job, 9)).all()
    assert noted(engine) == [2, 1, 2]


def test_a_job_with_several_messages_is_claimed_once(engine: sa.Engine) -> None:
    enqueue(engine, 1, 2)
    note(engine, 2, 1, 2, 2)
    with Session(engine) as session:
        assert numbers(session.scalars(claim(Job, 3))) == [2, 1]
        session.commit()
    assert noted(engine) == [2]


def test_two_messages_of_a_job_do_not_let_two_workers_claim_it(engine: sa.Engine) -> None:
    enqueue(engine, 1)
    note(engine, 1, 1)
    with Session(engine) as one, impatient(engine) as other:
        (job,) = one.scalars(claim(Job, 1))
        assert other.scalars(claim(Job, 1)).all() == []
        one.execute(complete(job))
        one.commit()
        assert other.scalars(claim(Job, 1)).all() == []
    assert noted(engine) == [1]


def test_a_locked_job_keeps_its_message(engine: sa.Engine) -> None:
    enqueue(engine, 1, 2)
    note(engine, 1, 2)
    with Session(engine) as holder, impatient(engine) as session:
        holder.execute(sa.select(Job).where(Job.id == 1).with_for_update())
        assert numbers(session.scalars(claim(Job, 9))) == [2]
        session.commit()
    assert noted(engine) == [1]


def test_a_job_is_claimed_when_it_is_due(engine: sa.Engine) -> None:
    tomorrow = datetime.now() + timedelta(days=1)  # noqa: DTZ005 - a column without a time zone
    enqueue(engine, 1, run_at=tomorrow)
    enqueue(engine, 2)
    note(engine, 1, 2)
    with Session(engine) as session:
        assert numbers(session.scalars(claim(Job, 9))) == [2]


@pytest.mark.parametrize("verb", [retry, release])
def test_a_job_that_runs_again_gets_another_message(engine: sa.Engine, verb: Any) -> None:
    enqueue(engine, 1, 2, 3)
    note(engine, 1, 2, 3)
    with Session(engine) as session:
        first, second = session.scalars(claim(Job, 2))
        assert session.scalars(verb(first)).all() == [1]
        session.execute(complete(second))
        session.commit()
        assert session.get_one(Job, 1).attempts == (verb is retry)
        assert noted(engine) == [3, 1]
        assert numbers(session.scalars(claim(Job, 9))) == [3, 1]


def test_a_requeued_job_gets_another_message(engine: sa.Engine) -> None:
    enqueue(engine, 1, 2)
    note(engine, 1, 2)
    with Session(engine) as session:
        session.execute(fail(session.scalars(claim(Job, 9)).all()))
        session.commit()
        assert noted(engine) == []
        assert session.scalars(requeue(sa.select(Job).where(Job.id == 2))).all() == [2]
        session.commit()
        assert noted(engine) == [2]
        assert numbers(session.scalars(claim(Job, 9))) == [2]


def test_orphaned_messages_are_deleted(engine: sa.Engine) -> None:
    enqueue(engine, 1, 2)
    enqueue(engine, 3, status="completed")
    note(engine, 3, 1, 8, 2)
    note(engine, 3, 9, state="draft")
    with Session(engine) as session:
        assert numbers(session.scalars(claim(Job, 1))) == [1]
        session.rollback()
        assert sorted(session.scalars(reconcile(Job))) == [3, 8]
        session.commit()
        assert sorted(noted(engine)) == [1, 2, 3, 9]
        # Pending jobs without a message are left to the application.
        session.execute(sa.delete(Note))
        assert session.scalars(reconcile(Job)).all() == []


def test_the_message_of_a_locked_job_is_not_orphaned(engine: sa.Engine) -> None:
    """The transaction that has locked it may make it pending."""
    enqueue(engine, 1, status="failed")
    note(engine, 1)
    with Session(engine) as writer, impatient(engine) as session:
        writer.execute(sa.update(Job).values(status="pending"))
        assert session.scalars(reconcile(Job)).all() == []
        session.commit()
        writer.commit()
        assert numbers(session.scalars(claim(Job, 9))) == [1]


def test_a_locked_orphaned_message_is_left_alone(engine: sa.Engine) -> None:
    enqueue(engine, 1, status="completed")
    note(engine, 1, 8)
    with Session(engine) as holder, impatient(engine) as session:
        holder.execute(sa.select(Note).with_for_update())
        assert session.scalars(reconcile(Job)).all() == []


def test_a_drain_skips_orphaned_messages_and_reports_them(engine: sa.Engine, caplog: pytest.LogCaptureFixture) -> None:
    enqueue(engine, 1, 2)
    note(engine, 70, 71, 1, 72, 2, 1)
    done: list[int] = []

    def work(session: Session, job: Job) -> None:
        done.append(job.id)

    with caplog.at_level(logging.WARNING, "sqlaqueue"):
        assert Consumer(Job, work, sessionmaker(engine), batch_size=1).drain() == 2
    assert done == [1, 2]
    assert noted(engine) == []
    told = [word for record in caplog.records for word in record.getMessage().rpartition(": ")[2].split(", ")]
    assert sorted(told) == ["1", "70", "71", "72"]


def test_a_running_consumer_deletes_orphaned_messages(engine: sa.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    # Else it waits for a hundred times as long as the last one took.
    monkeypatch.setattr("sqlaqueue.consumer.pace.Intervals.reconcile", lambda *_: 0.1)
    enqueue(engine, 1)
    note(engine, 1)
    consumer: Consumer[Any]

    def work(session: Session, job: Job) -> None:
        note(engine, 70)
        wait_until(lambda: noted(engine) == [1])  # the one that this run has deleted is there to everybody else
        consumer.stop()

    consumer = Consumer(Job, work, sessionmaker(engine))
    consumer.run()
    assert noted(engine) == []


def test_composite_keys_and_a_table_that_is_not_mapped(engine: sa.Engine) -> None:
    class Base(DeclarativeBase):
        pass

    calls = sa.Table(
        "calls",
        Base.metadata,
        sa.Column("id", sa.Integer(), primary_key=True),
        sa.Column("tenant", sa.Integer()),
        sa.Column("number", sa.Integer()),
    )

    class Task(QueueMixin, Base):
        __tablename__ = "task"
        __queue__ = QueueConfig(
            strategy=ExistingMessages(calls, job=["tenant", "number"]), columns={"priority": None, "run_at": None}
        )
        tenant: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
        number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)

    Base.metadata.create_all(engine)
    with Session(engine) as session:
        session.add_all([Task(tenant=tenant, number=number) for tenant in (1, 2) for number in (1, 2)])
        session.execute(
            sa.insert(calls), [{"tenant": 1, "number": 2}, {"tenant": 2, "number": 1}, {"tenant": 3, "number": None}]
        )
        session.commit()
        jobs = session.scalars(claim(Task, 9)).all()
        assert [(job.tenant, job.number) for job in jobs] == [(1, 2), (2, 1)]
        assert session.scalars(fail(jobs)).all() == [(1, 2), (2, 1)]
        session.commit()
        assert session.scalars(reconcile(Task)).all() == [(3, None)]
        assert sorted(session.scalars(requeue(Task))) == [(1, 2), (2, 1)]
        session.commit()
        assert len(session.scalars(claim(Task, 9)).all()) == 2


@pytest.mark.once
@pytest.mark.parametrize(
    ("strategy", "text"),
    [
        (ExistingMessages(Note, job="job_id"), r"Job: ExistingMessages\(Note\) names 'job_id'.*there are .*about"),
        (ExistingMessages(Note, job="about", order_by="when"), "names 'when'"),
        (ExistingMessages(Note, job="about", waiting={"status": "new"}), "names 'status'"),
        (ExistingMessages(Note, job=["about", "number"]), r"Job: .*ExistingMessages\(job=.*each of the job's key: id"),
        (ExistingMessages(sa.Table("m", sa.MetaData(), sa.Column("job", sa.Integer())), job="job"), "primary key"),
        (ExistingMessages("note", job="about"), "Job: .*give a mapped class or a Table"),
    ],
)
def test_unsuitable_columns_are_refused_when_the_class_is_mapped(strategy: ExistingMessages, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        make_job("existing_messages", strategy=strategy)


@pytest.mark.once
def test_a_priority_that_would_be_ignored_is_refused() -> None:
    strategy = ExistingMessages(Note, job="about")
    with pytest.raises(ConfigurationError, match=r"Job\.priority: .*columns=\{'priority': None\}"):
        make_job("existing_messages", strategy=strategy, columns={"priority": "priority"})
    with pytest.raises(ConfigurationError, match=r"needs the queue attribute 'status'"):
        make_job("existing_messages", strategy=strategy, columns={"priority": None, "status": None})
